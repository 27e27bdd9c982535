//! Connecting to a host.

use std::io;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, TcpStream, ToSocketAddrs};
use std::sync::mpsc::{RecvTimeoutError, channel};
use std::thread;
use std::time::{Duration, Instant};

use super::fault::{Fault, FaultKind};
use super::pace::{TICK, stopped};

/// Which addresses may be connected to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Reach {
    /// All: the caller has named the host.
    Anywhere,
    /// Those of the public internet: a server has named the host.
    Public,
}

/// Of several addresses, all but the last have this long: the first may be one of IPv6 that leads nowhere.
const EACH_TIMEOUT: Duration = Duration::from_secs(3);

/// Connects to `host`, which is a name or an address.
///
/// A name is resolved once, and connected to is what was checked: it cannot lead elsewhere a moment later.
pub(crate) fn dial(host: &str, port: u16, reach: Reach, timeout: Duration) -> Result<TcpStream, Fault> {
    let authority = format!("{host}:{port}");
    let fault = |source| FaultKind::Connect {
        authority: authority.clone(),
        source,
    };
    let deadline = Instant::now() + timeout;
    let (sender, receiver) = channel();
    let target = (host.to_owned(), port);
    // The system resolves names and connects without asking whether to go on. A thread does that, which is left alone
    // when nobody waits for it any more.
    thread::Builder::new()
        .name("ingot-connect".to_owned())
        .spawn(move || sender.send(connect((&target.0, target.1), reach, deadline)))
        .map_err(fault)?;
    loop {
        match receiver.recv_timeout(TICK) {
            Ok(Ok(stream)) => return Ok(stream),
            Ok(Err(Refusal::Reach)) => {
                return Err(FaultKind::Redirect {
                    to: authority,
                    why: "it is an address of a private network",
                }
                .into());
            }
            Ok(Err(Refusal::System(source))) => return Err(fault(source).into()),
            Err(RecvTimeoutError::Disconnected) => {
                return Err(fault(io::ErrorKind::Other.into()).into());
            }
            Err(RecvTimeoutError::Timeout) if stopped() => return Err(FaultKind::Stopped.into()),
            Err(RecvTimeoutError::Timeout) if Instant::now() >= deadline => {
                return Err(fault(io::ErrorKind::TimedOut.into()).into());
            }
            Err(RecvTimeoutError::Timeout) => {}
        }
    }
}

enum Refusal {
    Reach,
    System(io::Error),
}

fn connect(target: (&str, u16), reach: Reach, deadline: Instant) -> Result<TcpStream, Refusal> {
    let found: Vec<SocketAddr> = target.to_socket_addrs().map_err(Refusal::System)?.collect();
    let addresses: Vec<SocketAddr> = found
        .iter()
        .copied()
        .filter(|address| reach == Reach::Anywhere || is_public(address.ip()))
        .collect();
    if addresses.is_empty() && !found.is_empty() {
        return Err(Refusal::Reach);
    }
    let mut last = io::Error::from(io::ErrorKind::NotFound);
    for (rank, address) in addresses.iter().enumerate() {
        let left = deadline.saturating_duration_since(Instant::now());
        let most = if rank + 1 < addresses.len() {
            left.min(EACH_TIMEOUT)
        } else {
            left
        };
        if most.is_zero() {
            break;
        }
        match TcpStream::connect_timeout(address, most).and_then(prepared) {
            Ok(stream) => return Ok(stream),
            Err(fault) => last = fault,
        }
    }
    Err(Refusal::System(last))
}

/// Requests are small and wanted at once; waiting is done in steps, between which others are asked whether to go on.
fn prepared(stream: TcpStream) -> io::Result<TcpStream> {
    stream.set_nodelay(true)?;
    stream.set_read_timeout(Some(TICK))?;
    stream.set_write_timeout(Some(TICK))?;
    Ok(stream)
}

/// Whether an address is one of the public internet, and not of this machine, its networks or its cloud.
pub(crate) fn is_public(address: IpAddr) -> bool {
    match address {
        IpAddr::V4(address) => is_public_v4(address),
        IpAddr::V6(address) => is_public_v6(address),
    }
}

/// The special blocks of RFC 6890 and its successors.
fn is_public_v4(address: Ipv4Addr) -> bool {
    let [a, b, c, _] = address.octets();
    let special = address.is_private()
        || address.is_loopback()
        || address.is_link_local()
        || address.is_documentation()
        || address.is_multicast()
        || a == 0
        || a >= 240
        || (a == 100 && b & 0xC0 == 64)
        || (a == 192 && b == 0 && c == 0)
        || (a == 198 && b & 0xFE == 18);
    !special
}

fn is_public_v6(address: Ipv6Addr) -> bool {
    let parts = address.segments();
    let v4 = |high: u16, low: u16| {
        let [a, b] = high.to_be_bytes();
        let [c, d] = low.to_be_bytes();
        is_public_v4(Ipv4Addr::new(a, b, c, d))
    };
    match parts {
        // Mapped and compatible addresses, `::` and `::1` among them, and those of NAT64 and 6to4: what they stand for.
        [0, 0, 0, 0, 0, 0 | 0xFFFF, high, low] | [0x64, 0xFF9B, 0, 0, 0, 0, high, low] => v4(high, low),
        [0x2002, high, low, ..] => v4(high, low),
        // Local NAT64, documentation, unique local, link-local, site-local, multicast.
        [0x64, 0xFF9B, 1, ..] | [0x2001, 0xDB8, ..] => false,
        [first, ..] => !(first & 0xFE00 == 0xFC00 || first & 0xFF80 == 0xFE80 || first & 0xFF00 == 0xFF00),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn private_addresses_are_known_in_every_dress() {
        for address in [
            "127.0.0.1",
            "127.255.0.9",
            "10.1.2.3",
            "172.16.0.1",
            "172.31.255.255",
            "192.168.0.1",
            "169.254.169.254",
            "100.64.0.1",
            "100.127.255.255",
            "0.0.0.0",
            "192.0.0.8",
            "198.19.0.1",
            "224.0.0.1",
            "255.255.255.255",
            "::",
            "::1",
            "::ffff:127.0.0.1",
            "::ffff:169.254.169.254",
            "::127.0.0.1",
            "64:ff9b::7f00:1",
            "64:ff9b:1::1",
            "2002:7f00:1::",
            "fd00::1",
            "fe80::1",
            "fec0::1",
            "ff02::1",
            "2001:db8::1",
        ] {
            assert!(!is_public(address.parse().unwrap()), "{address}");
        }
        for address in [
            "1.1.1.1",
            "100.63.0.1",
            "100.128.0.1",
            "172.32.0.1",
            "198.20.0.1",
            "2606:4700::1111",
            "::ffff:1.1.1.1",
            "64:ff9b::101:101",
        ] {
            assert!(is_public(address.parse().unwrap()), "{address}");
        }
    }

    #[test]
    fn only_public_addresses_are_dialled_for_a_server() {
        // Nobody listens there; it is refused before that matters.
        for host in ["127.0.0.1", "localhost", "::1"] {
            let fault = dial(host, 9, Reach::Public, Duration::from_secs(2)).unwrap_err();
            assert_eq!(fault.code(), "redirect-refused", "{host}: {fault}");
        }
    }
}
