//! SOCKS5, as far as connecting takes it: RFC 1928, and RFC 1929 for who we are.

use std::io;
use std::net::IpAddr;

use crate::fault::Fault;
use crate::http::connection::Connection;
use crate::http::dial::unreachable;
use crate::http::pace::Pace;
use crate::http::proxy::Proxy;

const VERSION: u8 = 5;

/// The ways to say who we are, in the order in which RFC 1928 numbers them.
const NOBODY: u8 = 0;
const PASSWORD: u8 = 2;

const CONNECT: u8 = 1;

/// The kinds of addresses.
const V4: u8 = 1;
const NAME: u8 = 3;
const V6: u8 = 4;

/// Has the proxy at the other end of `connection` connect us to `host`, which is a name or an address.
pub(crate) fn connect(
    connection: &mut Connection,
    proxy: &Proxy,
    host: &str,
    port: u16,
    pace: &mut Pace<'_>,
) -> Result<(), Fault> {
    let mut talk = Talk {
        connection,
        proxy,
        host,
        port,
        pace,
    };
    talk.introduce()?;
    talk.ask()
}

/// What is said to a proxy until it has connected us.
struct Talk<'t, 'f> {
    connection: &'t mut Connection,
    proxy: &'t Proxy,
    host: &'t str,
    port: u16,
    pace: &'t mut Pace<'f>,
}

impl Talk<'_, '_> {
    /// Says who we are, where the proxy wants to know that.
    fn introduce(&mut self) -> Result<(), Fault> {
        let user = self.proxy.user();
        let ways: &[u8] = match user {
            Some(_) => &[VERSION, 2, NOBODY, PASSWORD],
            None => &[VERSION, 1, NOBODY],
        };
        self.send(ways)?;
        let why = match (self.answer()?, user) {
            ([VERSION, NOBODY], _) => return Ok(()),
            ([VERSION, PASSWORD], Some((name, password))) => {
                self.send(&[&[1][..], &counted(&name)?, &counted(&password)?].concat())?;
                match self.answer()? {
                    [_, 0] => return Ok(()),
                    _ => "refuses the user or the password",
                }
            }
            ([VERSION, _], None) => "lets nobody in without a user and a password",
            ([VERSION, _], Some(_)) => "takes no user and password",
            _ => return Err(self.strange()),
        };
        Err(self.refused(io::ErrorKind::PermissionDenied, why))
    }

    /// Asks for the host.
    fn ask(&mut self) -> Result<(), Fault> {
        let (kind, address) = match self.host.parse() {
            Ok(IpAddr::V4(address)) => (V4, address.octets().to_vec()),
            Ok(IpAddr::V6(address)) => (V6, address.octets().to_vec()),
            Err(_) => (NAME, counted(self.host)?),
        };
        let port = self.port.to_be_bytes();
        self.send(&[&[VERSION, CONNECT, 0, kind], &*address, &port].concat())?;
        let [VERSION, reply, _, kind] = self.answer()? else {
            return Err(self.strange());
        };
        if reply != 0 {
            let (kind, why) = meaning(reply);
            return Err(self.refused(kind, why));
        }
        // The address and the port that it connects from, on which nothing hangs.
        let nbytes = match kind {
            V4 => 4,
            V6 => 16,
            NAME => usize::from(self.answer::<1>()?[0]),
            _ => return Err(self.strange()),
        };
        for _ in 0..nbytes + 2 {
            self.answer::<1>()?;
        }
        // A server of HTTP or TLS waits to be spoken to.
        match self.connection.buffered() {
            [] => Ok(()),
            _ => Err(self.strange()),
        }
    }

    fn send(&mut self, bytes: &[u8]) -> Result<(), Fault> {
        self.connection.send(bytes, self.pace)
    }

    /// The next bytes that the proxy says.
    fn answer<const N: usize>(&mut self) -> Result<[u8; N], Fault> {
        loop {
            if let Some(&bytes) = self.connection.buffered().first_chunk() {
                self.connection.take(N);
                return Ok(bytes);
            }
            self.connection.fill_some(self.pace)?;
        }
    }

    fn strange(&self) -> Fault {
        self.refused(io::ErrorKind::InvalidData, "does not speak SOCKS5")
    }

    fn refused(&self, kind: io::ErrorKind, why: &str) -> Fault {
        let source = io::Error::new(kind, format!("the proxy {} {why}", self.proxy));
        unreachable(self.host, self.port, source)
    }
}

/// A text behind its length.
fn counted(text: &str) -> Result<Vec<u8>, Fault> {
    let nbytes = u8::try_from(text.len()).map_err(|_| {
        Fault::option(
            "SOCKS5 has no room for more than 255 bytes of a user, a password or the name of a host",
        )
    })?;
    Ok([&[nbytes], text.as_bytes()].concat())
}

/// What a reply means: RFC 1928, §6.
fn meaning(reply: u8) -> (io::ErrorKind, &'static str) {
    match reply {
        2 => (io::ErrorKind::PermissionDenied, "does not allow it"),
        3 => (io::ErrorKind::NetworkUnreachable, "cannot reach its network"),
        4 => (io::ErrorKind::HostUnreachable, "cannot reach it"),
        5 => (io::ErrorKind::ConnectionRefused, "was refused by it"),
        6 => (io::ErrorKind::TimedOut, "has waited for it too long"),
        7 | 8 => (io::ErrorKind::Unsupported, "cannot do that"),
        _ => (io::ErrorKind::Other, "has failed"),
    }
}
