//! What the fuzz targets need and nobody else should see. No part of the API.

use std::io::Write as _;
use std::net::TcpStream;
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::time::Duration;

use crate::fault::Fault;
use crate::http::connection::Connection;
use crate::http::message::{Framing, Head, HttpRequest};
use crate::http::pace::{Deadline, Pace};
use crate::options::RemoteOptions;
use crate::secrets::Secrets;
use crate::url::Url;
use ingot_format::StopFlag;

/// The status and the body of the answer that is in `bytes`, behind which the server hangs up; `None` where it does so
/// within the body.
///
/// # Errors
/// It is no answer of HTTP/1.1 that we take.
pub fn answer(bytes: &[u8]) -> Result<Option<(u16, Vec<u8>)>, Fault> {
    let mut connection = connection(bytes)?;
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

/// A connection on which this comes, and then its end. Nobody has to listen anywhere for it.
fn connection(bytes: &[u8]) -> Result<Connection, Fault> {
    let broken = |fault: std::io::Error| Fault::option(fault.to_string());
    let (mut server, client) = UnixStream::pair().map_err(broken)?;
    server.set_nonblocking(true).map_err(broken)?;
    server.write_all(bytes).map_err(broken)?;
    Ok(Connection::plain(TcpStream::from(OwnedFd::from(client))))
}

/// A URL of HTTP as it was understood.
#[derive(Debug)]
pub struct Address {
    /// The host, without brackets.
    pub host: String,
    /// The port.
    pub port: u16,
    /// Whether the host may be one of the public internet.
    pub may_be_public: bool,
    /// What a request for it has as its first line and its `Host`.
    pub head: Vec<u8>,
    /// All that is ever shown of it.
    pub shown: [String; 2],
}

/// What `text` means, and where `location`, to which it redirects, leads from there.
///
/// # Errors
/// One of the two is no URL of HTTP.
pub fn addresses(text: &str, location: &str) -> Result<(Address, Result<Address, Fault>), Fault> {
    let url = Url::parse(text)?;
    let there = url.join(location).and_then(|there| address(&there));
    Ok((address(&url)?, there))
}

fn address(url: &Url) -> Result<Address, Fault> {
    Ok(Address {
        host: url.host.clone(),
        port: url.port,
        may_be_public: url.may_be_public(),
        head: request(url, Vec::new(), &[]).render(false, &[])?,
        shown: [url.to_string(), format!("{url:?}")],
    })
}

fn request<'r>(url: &'r Url, headers: Vec<(String, String)>, body: &'r [u8]) -> HttpRequest<'r> {
    HttpRequest {
        method: "GET",
        url,
        headers,
        body,
    }
}

/// What is told of what a server has said, to which a request was sent with these headers and this body.
///
/// # Errors
/// `url` is none.
pub fn told(url: &str, headers: Vec<(String, String)>, body: &[u8], said: &str) -> Result<String, Fault> {
    let url = Url::parse(url)?;
    Ok(Secrets::of_request(&request(&url, headers, body)).removed(said))
}
