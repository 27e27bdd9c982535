//! Functions for the fuzz targets. They are not part of the API.

use std::io::Write as _;
use std::net::TcpStream;
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::time::Duration;

use ingot_format::StopFlag;

use crate::fault::{Fault, Result};
use crate::http::connection::Connection;
use crate::http::message::{Framing, Head, HttpRequest};
use crate::http::pace::{Deadline, Pace};
use crate::options::RemoteOptions;
use crate::secrets::Secrets;
use crate::url::Url;

/// Return the status and the body of the response in `bytes`, after which the connection ends; `None` if it ends within
/// the body.
///
/// # Errors
/// If the bytes are not an accepted response of HTTP/1.1.
pub fn answer(bytes: &[u8]) -> Result<Option<(u16, Vec<u8>)>> {
    let mut connection = connection(bytes).map_err(|fault| Fault::option(fault.to_string()))?;
    let deadline = Deadline::within(Duration::from_secs(60), StopFlag::never());
    let pace = &mut Pace::new(&RemoteOptions::default(), deadline);
    let head = Head::read(&mut connection, pace)?;
    let mut framing = head.framing()?;
    let (mut body, mut piece) = (Vec::new(), [0; 1 << 10]);
    loop {
        match framing.read(&mut connection, &mut piece, pace)? {
            0 => break,
            count => body.extend_from_slice(&piece[..count]),
        }
    }
    let is_whole = framing.has_ended() || matches!(framing, Framing::Close);
    Ok(is_whole.then_some((head.status, body)))
}

/// Return a connection that brings these bytes and then ends.
fn connection(bytes: &[u8]) -> std::io::Result<Connection> {
    let (mut server, client) = UnixStream::pair()?;
    server.set_nonblocking(true)?;
    server.write_all(bytes)?;
    Ok(Connection::plain(TcpStream::from(OwnedFd::from(client))))
}

/// A parsed URL of HTTP.
#[derive(Debug)]
pub struct Address {
    /// The host, without brackets.
    pub host: String,
    /// The port.
    pub port: u16,
    /// Whether the host may be one of the public internet.
    pub may_be_public: bool,
    /// The head of a request for the URL.
    pub head: Vec<u8>,
    /// The URL as `Display` and as `Debug`.
    pub shown: [String; 2],
}

/// Parse `text`, and resolve a redirect to `location` from there.
///
/// # Errors
/// If one of the two is not a URL of HTTP.
pub fn addresses(text: &str, location: &str) -> Result<(Address, Result<Address>)> {
    let url = Url::parse(text)?;
    let there = url.join(location).and_then(|there| address(&there));
    Ok((address(&url)?, there))
}

fn address(url: &Url) -> Result<Address> {
    Ok(Address {
        host: url.host.clone(),
        port: url.port,
        may_be_public: url.may_be_public(),
        head: HttpRequest::new("GET", url).render(false, &[])?.into(),
        shown: [url.to_string(), format!("{url:?}")],
    })
}

/// Return the words of a server without the secrets of a request with these headers and this body.
///
/// # Errors
/// If `url` is invalid.
pub fn cleaned(url: &str, headers: Vec<(String, String)>, body: &[u8], said: &str) -> Result<String> {
    let url = Url::parse(url)?;
    let request = HttpRequest {
        headers,
        body,
        ..HttpRequest::new("GET", &url)
    };
    Ok(Secrets::of_request(&request).removed(said))
}
