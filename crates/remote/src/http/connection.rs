//! A connection to a server, with its buffer and its TLS session, and the certificates that are trusted.

use std::fmt;
use std::fs;
use std::io::{self, Read, Write};
use std::net::TcpStream;
use std::ops::Range;
use std::path::Path;
use std::sync::Arc;
use std::time::Instant;

use ingot_format::to_u64;
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, ServerName};
use rustls::{ClientConfig, ClientConnection, RootCertStore, Stream};

use crate::fault::{Fault, FaultKind, Result};
use crate::http::pace::{Deadline, Pace};
use crate::url::bracketed;

/// First size of the buffer for heads. Bodies are read without the buffer.
const BUFFER_NBYTES: usize = 8 << 10;

/// Bytes that are sent between two reports of progress.
const SENT_NBYTES: usize = 256 << 10;

#[derive(Debug)]
enum Transport {
    Plain(TcpStream),
    /// TLS over another transport. Behind an `https:` proxy, that transport uses TLS too.
    Tls(Box<Tls>),
}

#[derive(Debug)]
struct Tls {
    session: ClientConnection,
    below: Transport,
}

/// Returns an error to stop. Called after every wait and every read, even of an incomplete TLS record.
type Check<'c> = dyn FnMut() -> Result<()> + 'c;

/// A connection to a server. The buffer keeps the bytes that were read beyond a head.
#[derive(Debug)]
pub(crate) struct Connection {
    transport: Transport,
    buffer: Vec<u8>,
    /// The bytes of the buffer that were received and not taken.
    filled: Range<usize>,
    /// Bytes received in total.
    received: u64,
}

impl Connection {
    /// Return a connection without TLS.
    pub(crate) fn plain(socket: TcpStream) -> Connection {
        Connection::of(Transport::Plain(socket))
    }

    fn of(transport: Transport) -> Connection {
        Connection {
            transport,
            buffer: Vec::new(),
            filled: 0..0,
            received: 0,
        }
    }

    /// Start TLS. The server must have a certificate for `host`.
    pub(crate) fn secured(
        mut self,
        host: &str,
        config: &Arc<ClientConfig>,
        deadline: Deadline<'_>,
    ) -> Result<Connection> {
        let refuse = |source| Fault::new(FaultKind::Tls(bracketed(host).into_owned(), source));
        let name = ServerName::try_from(host.to_owned()).map_err(|fault| refuse(io::Error::other(fault)))?;
        let session = ClientConnection::new(Arc::clone(config), name);
        let mut session = session.map_err(|fault| refuse(io::Error::other(fault)))?;
        let begun = Instant::now();
        let mut check = || {
            if deadline.left()?.is_zero() {
                return Err(FaultKind::Slow("TLS handshake timed out", begun.elapsed()).into());
            }
            Ok(())
        };
        while session.is_handshaking() {
            let mut below = Checked {
                transport: &mut self.transport,
                check: &mut check,
            };
            let progress = session.complete_io(&mut below);
            progress.map_err(|error| match error.kind() {
                // An error of TLS would recur.
                io::ErrorKind::InvalidData => refuse(error),
                _ => broken(error),
            })?;
        }
        let below = self.transport;
        Ok(Connection::of(Transport::Tls(Box::new(Tls { session, below }))))
    }

    /// Send all of `bytes`. Each piece that the connection takes is progress, as received bytes are.
    pub(crate) fn send(&mut self, bytes: &[u8], pace: &mut Pace<'_>) -> Result<()> {
        pace.resume();
        for piece in bytes.chunks(SENT_NBYTES) {
            let mut checked = Checked {
                transport: &mut self.transport,
                check: &mut || pace.check(),
            };
            let sent = checked.write_all(piece).and_then(|()| checked.flush());
            sent.map_err(broken)?;
            pace.moved(to_u64(piece.len()));
        }
        Ok(())
    }

    /// Return the bytes in the buffer that were not taken.
    pub(crate) fn buffered(&self) -> &[u8] {
        &self.buffer[self.filled.clone()]
    }

    /// Remove bytes from the buffer.
    pub(crate) fn take(&mut self, count: usize) {
        self.filled.start = (self.filled.start + count).min(self.filled.end);
    }

    /// Read more bytes into the buffer, which grows as needed. The end of the connection is an error.
    pub(crate) fn fill_some(&mut self, pace: &mut Pace<'_>) -> Result<()> {
        if self.filled.start > 0 {
            self.buffer.copy_within(self.filled.clone(), 0);
            self.filled = 0..self.filled.len();
        }
        let end = self.filled.end;
        if end == self.buffer.len() {
            self.buffer.resize((2 * end).max(BUFFER_NBYTES), 0);
        }
        let count = self.transport.receive(&mut self.buffer[end..], pace)?;
        self.filled.end += count;
        self.received += to_u64(count);
        match count {
            0 => Err(FaultKind::Broken(io::ErrorKind::UnexpectedEof.into()).into()),
            _ => Ok(()),
        }
    }

    /// Read into `dest`, without the buffer once that is empty. Returns the number of bytes, zero at the end.
    pub(crate) fn read(&mut self, dest: &mut [u8], pace: &mut Pace<'_>) -> Result<usize> {
        if self.filled.is_empty() {
            let count = self.transport.receive(dest, pace)?;
            self.received += to_u64(count);
            return Ok(count);
        }
        let count = dest.len().min(self.filled.len());
        dest[..count].copy_from_slice(&self.buffered()[..count]);
        self.take(count);
        Ok(count)
    }

    /// Return the number of bytes received in total.
    pub(crate) fn received(&self) -> u64 {
        self.received
    }

    /// Whether the connection can take another request: the server did not close it, and sent nothing unrequested.
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
            Transport::Tls(tls) => tls.below.socket(),
        }
    }

    /// Read once, after any number of ticks. Only payload counts as progress: TLS records that are empty or incomplete
    /// do not.
    fn receive(&mut self, dest: &mut [u8], pace: &mut Pace<'_>) -> Result<usize> {
        pace.resume();
        let mut checked = Checked {
            transport: self,
            check: &mut || pace.check(),
        };
        let count = match checked.read(dest) {
            Ok(count) => count,
            // The server closed a TLS connection without close_notify. The framing detects missing bytes.
            Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => 0,
            Err(error) => return Err(broken(error)),
        };
        pace.moved(to_u64(count));
        pace.check()?;
        Ok(count)
    }
}

/// A transport whose reads and writes end with an error once `check` fails.
struct Checked<'c, 't> {
    transport: &'t mut Transport,
    check: &'t mut Check<'c>,
}

impl Checked<'_, '_> {
    /// Call a function of the socket until it is done, and run the check after every tick.
    fn wait<T>(
        socket: &mut TcpStream,
        check: &mut Check<'_>,
        mut call: impl FnMut(&mut TcpStream) -> io::Result<T>,
    ) -> io::Result<T> {
        use io::ErrorKind::{Interrupted, TimedOut, WouldBlock};
        loop {
            let outcome = call(socket);
            check()?;
            match outcome {
                Err(error) if matches!(error.kind(), WouldBlock | TimedOut | Interrupted) => {}
                outcome => return outcome,
            }
        }
    }

    /// Run `call` on the TLS stream over the transport below.
    fn secured<T>(
        tls: &mut Tls,
        check: &mut Check<'_>,
        call: impl FnOnce(&mut Stream<'_, ClientConnection, Checked<'_, '_>>) -> io::Result<T>,
    ) -> io::Result<T> {
        let transport = &mut tls.below;
        let mut below = Checked { transport, check };
        call(&mut Stream::new(&mut tls.session, &mut below))
    }
}

impl Read for Checked<'_, '_> {
    fn read(&mut self, dest: &mut [u8]) -> io::Result<usize> {
        match self.transport {
            Transport::Plain(socket) => Checked::wait(socket, self.check, |socket| socket.read(dest)),
            Transport::Tls(tls) => Checked::secured(tls, self.check, |stream| stream.read(dest)),
        }
    }
}

impl Write for Checked<'_, '_> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        match self.transport {
            Transport::Plain(socket) => Checked::wait(socket, self.check, |socket| socket.write(bytes)),
            Transport::Tls(tls) => Checked::secured(tls, self.check, |stream| stream.write(bytes)),
        }
    }

    fn flush(&mut self) -> io::Result<()> {
        match self.transport {
            Transport::Plain(socket) => Checked::wait(socket, self.check, Write::flush),
            Transport::Tls(tls) => Checked::secured(tls, self.check, |stream| stream.flush()),
        }
    }
}

/// Return the fault of a check that failed, or of a connection that broke.
fn broken(error: io::Error) -> Fault {
    let fault = error.downcast::<Fault>();
    fault.unwrap_or_else(|error| FaultKind::Broken(error).into())
}

/// Return a TLS configuration that verifies certificates. Verification cannot be turned off.
///
/// The trusted roots are the certificates in `ca_file`. Without it they are the system's (`SSL_CERT_FILE` and
/// `SSL_CERT_DIR` name others). If the system has none, as in small containers, they are Mozilla's.
pub(crate) fn trusting(ca_file: Option<&Path>) -> Result<Arc<ClientConfig>> {
    let mut roots = RootCertStore::empty();
    if let Some(path) = ca_file {
        let unusable = |why: &dyn fmt::Display| {
            let path = path.to_string_lossy();
            Fault::option(format!(
                "the CA file {} cannot be used: {why}",
                ingot_format::Quoted(&path)
            ))
        };
        let pem = fs::read(path).map_err(|fault| unusable(&fault))?;
        for certificate in CertificateDer::pem_slice_iter(&pem) {
            let added = roots.add(certificate.map_err(|fault| unusable(&fault))?);
            added.map_err(|fault| unusable(&fault))?;
        }
        if roots.is_empty() {
            return Err(unusable(&"it contains no certificate in PEM"));
        }
    } else {
        roots.add_parsable_certificates(rustls_native_certs::load_native_certs().certs);
        if roots.is_empty() {
            roots.extend(webpki_roots::TLS_SERVER_ROOTS.iter().cloned());
        }
    }
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let mut config = ClientConfig::builder_with_provider(provider)
        .with_safe_default_protocol_versions()
        .map_err(|fault| FaultKind::Tls("any host".to_owned(), io::Error::other(fault)))?
        .with_root_certificates(roots)
        .with_no_client_auth();
    config.alpn_protocols = vec![b"http/1.1".to_vec()];
    Ok(Arc::new(config))
}
