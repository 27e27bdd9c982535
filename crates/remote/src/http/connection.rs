//! One connection to a server, with its buffer.

use std::io::{self, Read, Write};
use std::net::TcpStream;
use std::ops::Range;
use std::sync::Arc;
use std::time::{Duration, Instant};

use ingot_format::to_u64;
use rustls::pki_types::ServerName;
use rustls::{ClientConfig, ClientConnection, StreamOwned};

use crate::fault::{Fault, FaultKind};
use crate::http::pace::Pace;
use crate::stop::StopFlag;
use crate::url::bracketed;

/// Bytes of heads that are read at once. Bodies are read past the buffer.
const BUFFER_NBYTES: usize = 8 << 10;

#[derive(Debug)]
enum Transport {
    Plain(TcpStream),
    Tls(Box<StreamOwned<ClientConnection, TcpStream>>),
}

/// A connection to a server. What it reads beyond a head stays in its buffer.
#[derive(Debug)]
pub(crate) struct Connection {
    transport: Transport,
    buffer: Vec<u8>,
    /// What of the buffer has come and was not taken.
    filled: Range<usize>,
    /// Bytes that came in all.
    came: u64,
}

impl Connection {
    /// A connection that others can read.
    pub(crate) fn plain(socket: TcpStream) -> Connection {
        Connection::of(Transport::Plain(socket))
    }

    fn of(transport: Transport) -> Connection {
        Connection {
            transport,
            buffer: Vec::new(),
            filled: 0..0,
            came: 0,
        }
    }

    /// Makes a plain connection safe: the certificate has to be that of `host`.
    pub(crate) fn secured(
        self,
        host: &str,
        config: &Arc<ClientConfig>,
        timeout: Duration,
        stop: StopFlag<'_>,
    ) -> Result<Connection, Fault> {
        let refuse = |source| {
            Fault::new(FaultKind::Tls {
                authority: bracketed(host).into_owned(),
                source,
            })
        };
        let Transport::Plain(mut socket) = self.transport else {
            return Ok(self);
        };
        let name = ServerName::try_from(host.to_owned()).map_err(|fault| refuse(io::Error::other(fault)))?;
        let session = ClientConnection::new(Arc::clone(config), name);
        let mut session = session.map_err(|fault| refuse(io::Error::other(fault)))?;
        let deadline = Instant::now() + timeout;
        while session.is_handshaking() {
            match session.complete_io(&mut socket) {
                Ok(_) => {}
                Err(fault) if !is_a_tick(&fault) => {
                    // What is refused for a reason of TLS is refused again.
                    return Err(match fault.kind() {
                        io::ErrorKind::InvalidData => refuse(fault),
                        _ => FaultKind::Broken(fault).into(),
                    });
                }
                Err(_) if stop.is_set() => return Err(FaultKind::Stopped.into()),
                Err(_) if Instant::now() < deadline => {}
                Err(_) => {
                    return Err(FaultKind::Slow {
                        what: "no safe connection had come about",
                        after: timeout,
                    }
                    .into());
                }
            }
        }
        Ok(Connection::of(Transport::Tls(Box::new(StreamOwned::new(
            session, socket,
        )))))
    }

    /// Sends all of `bytes`.
    pub(crate) fn send(&mut self, bytes: &[u8], pace: &mut Pace<'_>) -> Result<(), Fault> {
        let mut rest = bytes;
        while !rest.is_empty() {
            match self.transport.write(rest) {
                Ok(0) => return Err(FaultKind::Broken(io::ErrorKind::WriteZero.into()).into()),
                Ok(count) => rest = &rest[count..],
                Err(fault) if is_a_tick(&fault) => pace.check()?,
                Err(fault) => return Err(FaultKind::Broken(fault).into()),
            }
        }
        loop {
            match self.transport.flush() {
                Ok(()) => return Ok(()),
                Err(fault) if is_a_tick(&fault) => pace.check()?,
                Err(fault) => return Err(FaultKind::Broken(fault).into()),
            }
        }
    }

    /// Bytes that have come into the buffer and were not taken.
    pub(crate) fn buffered(&self) -> &[u8] {
        &self.buffer[self.filled.clone()]
    }

    /// Takes bytes out of the buffer.
    pub(crate) fn take(&mut self, count: usize) {
        self.filled.start = (self.filled.start + count).min(self.filled.end);
    }

    /// Brings more bytes into the buffer, which grows as it needs to; says how many. None means the end.
    pub(crate) fn fill(&mut self, pace: &mut Pace<'_>) -> Result<usize, Fault> {
        if self.filled.start > 0 {
            self.buffer.copy_within(self.filled.clone(), 0);
            self.filled = 0..self.filled.len();
        }
        if self.filled.end == self.buffer.len() {
            self.buffer.resize((2 * self.buffer.len()).max(BUFFER_NBYTES), 0);
        }
        let count = self
            .transport
            .receive(&mut self.buffer[self.filled.end..], pace)?;
        self.filled.end += count;
        self.came += to_u64(count);
        Ok(count)
    }

    /// Reads into `dest`, past the buffer once that is empty; says how many bytes. None means the end.
    pub(crate) fn read(&mut self, dest: &mut [u8], pace: &mut Pace<'_>) -> Result<usize, Fault> {
        if self.filled.is_empty() {
            let count = self.transport.receive(dest, pace)?;
            self.came += to_u64(count);
            return Ok(count);
        }
        let count = dest.len().min(self.filled.len());
        dest[..count].copy_from_slice(&self.buffered()[..count]);
        self.take(count);
        Ok(count)
    }

    /// Bytes that came in all.
    pub(crate) fn came(&self) -> u64 {
        self.came
    }

    /// Whether it can take another request: the server has not closed it, and has sent nothing that was not asked for.
    pub(crate) fn is_quiet(&self) -> bool {
        let socket = self.transport.socket();
        let look = || {
            socket.set_nonblocking(true)?;
            let seen = socket.peek(&mut [0]);
            socket.set_nonblocking(false)?;
            seen
        };
        self.filled.is_empty() && look().is_err_and(|fault| fault.kind() == io::ErrorKind::WouldBlock)
    }
}

impl Transport {
    fn socket(&self) -> &TcpStream {
        match self {
            Transport::Plain(socket) => socket,
            Transport::Tls(session) => &session.sock,
        }
    }

    fn read(&mut self, dest: &mut [u8]) -> io::Result<usize> {
        match self {
            Transport::Plain(socket) => socket.read(dest),
            Transport::Tls(session) => session.read(dest),
        }
    }

    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        match self {
            Transport::Plain(socket) => socket.write(bytes),
            Transport::Tls(session) => session.write(bytes),
        }
    }

    fn flush(&mut self) -> io::Result<()> {
        match self {
            Transport::Plain(socket) => socket.flush(),
            Transport::Tls(session) => session.flush(),
        }
    }

    /// Reads once, however often it has to wait for that.
    fn receive(&mut self, dest: &mut [u8], pace: &mut Pace<'_>) -> Result<usize, Fault> {
        loop {
            let outcome = self.read(dest);
            if let Ok(count) = &outcome {
                pace.came(to_u64(*count));
            }
            pace.check()?;
            match outcome {
                Ok(count) => return Ok(count),
                Err(fault) if is_a_tick(&fault) => {}
                // A server that ends a connection of TLS without saying so: what is missing shows in the lengths.
                Err(fault) if fault.kind() == io::ErrorKind::UnexpectedEof => return Ok(0),
                Err(fault) => return Err(FaultKind::Broken(fault).into()),
            }
        }
    }
}

/// Whether a wait was over and nothing more.
fn is_a_tick(fault: &io::Error) -> bool {
    matches!(
        fault.kind(),
        io::ErrorKind::WouldBlock | io::ErrorKind::TimedOut | io::ErrorKind::Interrupted
    )
}
