//! Windows.

use std::io;
use std::net::{SocketAddr, TcpStream};
use std::path::PathBuf;
use std::time::Duration;

use super::drive::without_root_of_drive;
use crate::fault::Result;
use crate::http::helper::on_helper_thread;
use crate::http::pace::Deadline;

/// The variable that names the folder in which gcloud has its own folder.
pub(crate) const GCLOUD_VARIABLE: Option<&str> = Some("APPDATA");

/// Return the path of a `file:` URL.
pub(crate) fn path_of_url(bytes: Vec<u8>) -> Result<PathBuf, &'static str> {
    let text = String::from_utf8(bytes).map_err(|_| "the path is not UTF-8")?;
    Ok(PathBuf::from(without_root_of_drive(&text)))
}

/// Connect to one address, on a thread that is abandoned after the deadline.
pub(crate) fn connect(address: SocketAddr, deadline: Deadline<'_>) -> Result<io::Result<TcpStream>> {
    match deadline.left()? {
        Duration::ZERO => Ok(Err(io::ErrorKind::TimedOut.into())),
        left => on_helper_thread(move || TcpStream::connect_timeout(&address, left), deadline),
    }
}
