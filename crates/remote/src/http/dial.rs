//! Connecting to a host.

use std::io;
use std::net::{SocketAddr, TcpStream, ToSocketAddrs};
use std::time::Duration;

use crate::fault::{Fault, FaultKind};
use crate::http::aside::aside;
use crate::http::pace::{Deadline, TICK};
use crate::network::is_public;
use crate::system::connect;
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
    let addresses = resolve(host, port, scope, deadline)?;
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

/// The addresses of `host` that may be connected to, by the system's resolver.
pub(crate) fn resolve(
    host: &str,
    port: u16,
    scope: AddressScope,
    deadline: Deadline<'_>,
) -> Result<Vec<SocketAddr>, Fault> {
    let found = match host.parse() {
        Ok(address) => Ok(vec![SocketAddr::new(address, port)]),
        Err(_) => {
            let name = (host.to_owned(), port);
            aside(move || Ok(name.to_socket_addrs()?.collect::<Vec<_>>()), deadline)?
        }
    };
    let found = found.map_err(|fault| {
        let source = match fault.kind() {
            io::ErrorKind::TimedOut => io::Error::new(fault.kind(), "its name was not resolved in time"),
            _ => fault,
        };
        unreachable(host, port, source)
    })?;
    let is_let_in = |address: &&SocketAddr| scope == AddressScope::Anywhere || is_public(address.ip());
    let addresses: Vec<SocketAddr> = found.iter().filter(is_let_in).copied().collect();
    if addresses.is_empty() && !found.is_empty() {
        Err(inward(format!("{}:{port}", bracketed(host))))
    } else {
        Ok(addresses)
    }
}

/// The fault of a host that cannot be connected to.
pub(crate) fn unreachable(host: &str, port: u16, source: io::Error) -> Fault {
    let authority = format!("{}:{port}", bracketed(host));
    FaultKind::Connect { authority, source }.into()
}

/// The fault of a redirect to where no stranger may send us.
pub(crate) fn inward(authority: String) -> Fault {
    Fault::new(FaultKind::Redirect {
        to: authority,
        why: "it is no address of the public internet",
    })
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
    use ingot_format::StopFlag;

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
