//! Linux, macOS and other Unix systems.

use std::ffi::OsString;
use std::io;
use std::net::{SocketAddr, TcpStream};
use std::os::fd::OwnedFd;
use std::os::unix::ffi::OsStringExt;
use std::path::PathBuf;
use std::time::Duration;

#[cfg(not(target_vendor = "apple"))]
use rustix::net::{SocketFlags, socket_with};
use rustix::{
    event::{PollFd, PollFlags, Timespec, poll},
    io::{Errno, ioctl_fionbio},
    net::{AddressFamily, SocketType, sockopt},
};

use crate::fault::Result;
use crate::http::pace::{Deadline, TICK};

/// The variable with the parent of gcloud's folder. `None`: on Unix gcloud's folder is in the home directory.
pub(crate) const GCLOUD_VARIABLE: Option<&str> = None;

/// Return the path of a `file:` URL.
pub(crate) fn path_of_url(bytes: Vec<u8>) -> Result<PathBuf, &'static str> {
    Ok(PathBuf::from(OsString::from_vec(bytes)))
}

/// Connect to one address, and check the stop flag and the deadline every tick.
pub(crate) fn connect(address: SocketAddr, deadline: Deadline<'_>) -> Result<io::Result<TcpStream>> {
    let socket = match begun(address) {
        Ok(socket) => socket,
        Err(fault) => return Ok(Err(fault.into())),
    };
    loop {
        let left = deadline.left()?;
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

/// Return a socket that is connecting.
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

/// Wait until a socket is connected, or has failed.
fn is_connected(socket: &OwnedFd, most: Duration) -> Result<bool, Errno> {
    let most = Timespec::try_from(most).map_err(|_| Errno::INVAL)?;
    match poll(&mut [PollFd::new(socket, PollFlags::OUT)], Some(&most)) {
        Ok(0) | Err(Errno::INTR) => Ok(false),
        Ok(_) => sockopt::socket_error(socket)?.map(|()| true),
        Err(fault) => Err(fault),
    }
}
