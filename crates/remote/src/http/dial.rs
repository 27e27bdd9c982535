//! Connecting to a host.

use std::io;
use std::net::{SocketAddr, TcpStream, ToSocketAddrs};
use std::sync::mpsc::{RecvTimeoutError, channel};
use std::thread;
use std::time::{Duration, Instant};

use crate::fault::{Fault, FaultKind};
use crate::http::pace::{Deadline, TICK};
use crate::network::is_public;
use crate::url::bracketed;

/// Which addresses may be connected to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum AddressScope {
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
pub(crate) fn dial(
    host: &str,
    port: u16,
    scope: AddressScope,
    deadline: Deadline<'_>,
) -> Result<TcpStream, Fault> {
    let authority = format!("{}:{port}", bracketed(host));
    let fault = |source| FaultKind::Connect {
        authority: authority.clone(),
        source,
    };
    let at = deadline.at;
    let (sender, receiver) = channel();
    let target = (host.to_owned(), port);
    // The system resolves names and connects without asking whether to go on. A thread does that, which is left alone
    // when nobody waits for it any more.
    thread::Builder::new()
        .name("ingot-connect".to_owned())
        .spawn(move || sender.send(connect((&target.0, target.1), scope, at)))
        .map_err(fault)?;
    loop {
        match receiver.recv_timeout(TICK) {
            Ok(Ok(stream)) => return Ok(stream),
            Ok(Err(ConnectFault::Scope)) => {
                return Err(inward(authority));
            }
            Ok(Err(ConnectFault::System(source))) => return Err(fault(source).into()),
            Err(RecvTimeoutError::Disconnected) => {
                return Err(fault(io::ErrorKind::Other.into()).into());
            }
            Err(RecvTimeoutError::Timeout) if deadline.stop.is_set() => return Err(FaultKind::Stopped.into()),
            Err(RecvTimeoutError::Timeout) if Instant::now() >= at => {
                return Err(fault(io::ErrorKind::TimedOut.into()).into());
            }
            Err(RecvTimeoutError::Timeout) => {}
        }
    }
}

/// The fault of a redirect to where no stranger may send us.
pub(crate) fn inward(authority: String) -> Fault {
    Fault::new(FaultKind::Redirect {
        to: authority,
        why: "it is no address of the public internet",
    })
}

enum ConnectFault {
    Scope,
    System(io::Error),
}

fn connect(target: (&str, u16), scope: AddressScope, deadline: Instant) -> Result<TcpStream, ConnectFault> {
    let found: Vec<SocketAddr> = target.to_socket_addrs().map_err(ConnectFault::System)?.collect();
    let addresses: Vec<SocketAddr> = found
        .iter()
        .copied()
        .filter(|address| scope == AddressScope::Anywhere || is_public(address.ip()))
        .collect();
    if addresses.is_empty() && !found.is_empty() {
        return Err(ConnectFault::Scope);
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
    Err(ConnectFault::System(last))
}

/// Requests are small and wanted at once; waiting is done in steps, between which others are asked whether to go on.
fn prepared(stream: TcpStream) -> io::Result<TcpStream> {
    stream.set_nodelay(true)?;
    stream.set_read_timeout(Some(TICK))?;
    stream.set_write_timeout(Some(TICK))?;
    Ok(stream)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::stop::StopFlag;

    #[test]
    fn only_public_addresses_are_dialled_for_a_server() {
        // Nobody listens there; it is refused before that matters.
        for host in ["127.0.0.1", "localhost", "::1"] {
            let deadline = Deadline::within(Duration::from_secs(2), StopFlag::never());
            let fault = dial(host, 9, AddressScope::Public, deadline).unwrap_err();
            assert_eq!(fault.code(), "redirect-refused", "{host}: {fault}");
            assert!(
                fault.to_string().contains(&format!(" {}:9 ", bracketed(host))),
                "{fault}"
            );
        }
    }
}
