//! Connecting to a host.

use std::io;
use std::net::{SocketAddr, TcpStream, ToSocketAddrs};
#[cfg(unix)]
use std::os::fd::OwnedFd;
use std::time::{Duration, Instant};

#[cfg(all(unix, not(target_vendor = "apple")))]
use rustix::net::{SocketFlags, socket_with};
#[cfg(unix)]
use rustix::{
    event::{PollFd, PollFlags, Timespec, poll},
    io::{Errno, ioctl_fionbio},
    net::{AddressFamily, SocketType, sockopt},
};

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
/// A name is resolved once, and connected to is what was checked: it cannot lead elsewhere a moment later. It is the
/// system that resolves it, in one call that ends when it is answered or by time limits of the system's own. Leaving
/// that call to a thread, and the thread behind, would end this one sooner and leave something running.
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
    let found: Vec<SocketAddr> = (host, port).to_socket_addrs().map_err(fault)?.collect();
    let mut addresses = found.clone();
    addresses.retain(|address| scope == AddressScope::Anywhere || is_public(address.ip()));
    if addresses.is_empty() && !found.is_empty() {
        return Err(inward(authority));
    }
    let mut last = io::Error::from(io::ErrorKind::NotFound);
    for (rank, address) in addresses.iter().enumerate() {
        let is_last = rank + 1 == addresses.len();
        let soon = Instant::now() + EACH_TIMEOUT;
        let at = if is_last {
            deadline.at
        } else {
            deadline.at.min(soon)
        };
        match connect(*address, Deadline { at, ..deadline })?.and_then(prepared) {
            Ok(stream) => return Ok(stream),
            Err(fault) => last = fault,
        }
    }
    Err(fault(last).into())
}

/// The fault of a redirect to where no stranger may send us.
pub(crate) fn inward(authority: String) -> Fault {
    Fault::new(FaultKind::Redirect {
        to: authority,
        why: "it is no address of the public internet",
    })
}

/// Connects to one address. Waiting is done in steps, between which it is looked whether to go on.
#[cfg(unix)]
fn connect(address: SocketAddr, deadline: Deadline<'_>) -> Result<io::Result<TcpStream>, Fault> {
    let socket = match begun(address) {
        Ok(socket) => socket,
        Err(fault) => return Ok(Err(fault.into())),
    };
    loop {
        if deadline.stop.is_set() {
            return Err(FaultKind::Stopped.into());
        }
        let left = deadline.at.saturating_duration_since(Instant::now());
        if left.is_zero() {
            return Ok(Err(io::ErrorKind::TimedOut.into()));
        }
        match is_connected(&socket, left.min(TICK)) {
            Ok(false) => {}
            Ok(true) => {
                let stream = TcpStream::from(socket);
                return Ok(stream.set_nonblocking(false).map(|()| stream));
            }
            Err(fault) => return Ok(Err(fault.into())),
        }
    }
}

/// Sockets of other systems are not waited for in steps.
#[cfg(not(unix))]
fn connect(address: SocketAddr, deadline: Deadline<'_>) -> Result<io::Result<TcpStream>, Fault> {
    if deadline.stop.is_set() {
        return Err(FaultKind::Stopped.into());
    }
    let left = deadline.at.saturating_duration_since(Instant::now());
    Ok(match left.is_zero() {
        true => Err(io::ErrorKind::TimedOut.into()),
        false => TcpStream::connect_timeout(&address, left),
    })
}

/// A socket that has begun to connect.
#[cfg(unix)]
fn begun(address: SocketAddr) -> Result<OwnedFd, Errno> {
    let family = match address {
        SocketAddr::V4(_) => AddressFamily::INET,
        SocketAddr::V6(_) => AddressFamily::INET6,
    };
    #[cfg(not(target_vendor = "apple"))]
    let socket = socket_with(family, SocketType::STREAM, SocketFlags::CLOEXEC, None)?;
    #[cfg(target_vendor = "apple")]
    let socket = {
        let socket = rustix::net::socket(family, SocketType::STREAM, None)?;
        rustix::io::fcntl_setfd(&socket, rustix::io::FdFlags::CLOEXEC)?;
        sockopt::set_socket_nosigpipe(&socket, true)?;
        socket
    };
    ioctl_fionbio(&socket, true)?;
    match rustix::net::connect(&socket, &address) {
        Ok(()) | Err(Errno::INPROGRESS | Errno::INTR) => Ok(socket),
        Err(fault) => Err(fault),
    }
}

/// Waits for a socket to be connected, or to fail.
#[cfg(unix)]
fn is_connected(socket: &OwnedFd, most: Duration) -> Result<bool, Errno> {
    let most = Timespec::try_from(most).map_err(|_| Errno::INVAL)?;
    match poll(&mut [PollFd::new(socket, PollFlags::OUT)], Some(&most)) {
        Ok(0) | Err(Errno::INTR) => Ok(false),
        Ok(_) => sockopt::socket_error(socket)?.map(|()| true),
        Err(fault) => Err(fault),
    }
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
