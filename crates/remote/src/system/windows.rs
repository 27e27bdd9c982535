//! The half for Windows.

use std::io;
use std::net::{SocketAddr, TcpStream};
use std::path::PathBuf;
use std::time::Duration;

use super::drive::without_root_of_drive;
use crate::fault::Fault;
use crate::http::aside::aside;
use crate::http::pace::Deadline;

/// Where gcloud keeps what is its own: a variable with a folder, where that is not in the folder of the user.
pub(crate) const GCLOUD_VARIABLE: Option<&str> = Some("APPDATA");

/// The path in a URL of `file:`.
pub(crate) fn path_of_url(bytes: Vec<u8>) -> Result<PathBuf, &'static str> {
    let text = String::from_utf8(bytes).map_err(|_| "the path is not UTF-8")?;
    Ok(PathBuf::from(without_root_of_drive(&text)))
}

/// Connects to one address, on a thread that is left alone when the time is over.
pub(crate) fn connect(address: SocketAddr, deadline: Deadline<'_>) -> Result<io::Result<TcpStream>, Fault> {
    match deadline.left()? {
        Duration::ZERO => Ok(Err(io::ErrorKind::TimedOut.into())),
        left => aside(move || TcpStream::connect_timeout(&address, left), deadline),
    }
}
