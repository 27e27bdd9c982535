//! Connecting to a host.

use std::io;
use std::net::{SocketAddr, TcpStream, ToSocketAddrs};
use std::time::Duration;

use crate::fault::{Fault, FaultKind, Result};
use crate::http::helper::on_helper_thread;
use crate::http::pace::{Deadline, TICK};
use crate::network;
use crate::system::connect;
use crate::url::bracketed;

/// Time limit for each of several addresses except the last: the first may be an IPv6 address without a route.
const EACH_TIMEOUT: Duration = Duration::from_secs(3);

/// Connect to `host`, a name or an address. If `is_public`, its address must be one of the public internet.
///
/// A name is resolved once, and the checked addresses are the ones that are connected to.
pub(crate) fn dial(host: &str, port: u16, is_public: bool, deadline: Deadline<'_>) -> Result<TcpStream> {
    let addresses = resolve(host, port, is_public, deadline)?;
    let mut last = io::Error::from(io::ErrorKind::NotFound);
    for (rank, address) in addresses.iter().enumerate() {
        let this = if rank + 1 == addresses.len() {
            deadline
        } else {
            deadline.no_longer_than(EACH_TIMEOUT)
        };
        match connect(*address, this)?.and_then(prepared) {
            Ok(stream) => return Ok(stream),
            Err(fault) => last = fault,
        }
    }
    Err(unreachable(host, port, last))
}

/// Return the addresses of `host` that may be connected to, from the system's resolver.
fn resolve(host: &str, port: u16, is_public: bool, deadline: Deadline<'_>) -> Result<Vec<SocketAddr>> {
    let found = match host.parse() {
        Ok(address) => Ok(vec![SocketAddr::new(address, port)]),
        Err(_) => {
            let name = (host.to_owned(), port);
            on_helper_thread(move || Ok(name.to_socket_addrs()?.collect::<Vec<_>>()), deadline)?
        }
    };
    let found = found.map_err(|fault| {
        let source = match fault.kind() {
            io::ErrorKind::TimedOut => io::Error::new(fault.kind(), "its name was not resolved in time"),
            _ => fault,
        };
        unreachable(host, port, source)
    })?;
    let is_allowed = |address: &&SocketAddr| !is_public || network::is_public(address.ip());
    let addresses: Vec<SocketAddr> = found.iter().filter(is_allowed).copied().collect();
    if addresses.is_empty() && !found.is_empty() {
        return Err(inward(authority(host, port)));
    }
    Ok(addresses)
}

fn authority(host: &str, port: u16) -> String {
    format!("{}:{port}", bracketed(host))
}

/// Return the fault of a host that cannot be connected to.
fn unreachable(host: &str, port: u16, source: io::Error) -> Fault {
    FaultKind::Connect(authority(host, port), source).into()
}

/// Return the fault of a redirect to an address that servers may not name.
pub(crate) fn inward(authority: String) -> Fault {
    let why = "it is not an address of the public internet";
    FaultKind::Redirect(authority, why).into()
}

/// Send small requests at once, and wait in ticks, between which the stop flag and the deadline are checked.
fn prepared(stream: TcpStream) -> io::Result<TcpStream> {
    stream.set_nodelay(true)?;
    stream.set_read_timeout(Some(TICK))?;
    stream.set_write_timeout(Some(TICK))?;
    Ok(stream)
}

#[cfg(test)]
mod tests {
    use super::*;
    use ingot_format::StopFlag;

    #[test]
    fn a_host_that_a_server_named_must_have_a_public_address() {
        // No server listens there. The address is refused before that matters.
        for host in ["127.0.0.1", "localhost", "::1"] {
            let deadline = Deadline::within(Duration::from_secs(2), StopFlag::never());
            let fault = dial(host, 9, true, deadline).unwrap_err();
            assert_eq!(fault.code(), "redirect-refused", "{host}: {fault}");
            assert!(
                fault.to_string().contains(&format!(" {}:9: ", bracketed(host))),
                "{fault}"
            );
        }
    }
}
