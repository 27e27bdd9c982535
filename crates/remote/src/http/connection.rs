//! One connection to a server, with its buffer, and whom to believe that it leads there.

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

use crate::fault::{Fault, FaultKind};
use crate::http::pace::{Deadline, Pace};
use crate::url::bracketed;

/// Bytes of heads that are read at once. Bodies are read past the buffer.
const BUFFER_NBYTES: usize = 8 << 10;

#[derive(Debug)]
enum Transport {
    Plain(TcpStream),
    /// Through another, which is safe itself where a proxy is spoken to over `https:`.
    Tls(Box<Tls>),
}

#[derive(Debug)]
struct Tls {
    session: ClientConnection,
    below: Transport,
}

/// Whether to go on waiting. Asked after every wait and after every read, also of a part of a TLS record.
type Check<'c> = dyn FnMut() -> Result<(), Fault> + 'c;

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

    /// Makes a connection safe: the certificate has to be that of `host`.
    pub(crate) fn secured(
        mut self,
        host: &str,
        config: &Arc<ClientConfig>,
        deadline: Deadline<'_>,
    ) -> Result<Connection, Fault> {
        let refuse = |source| {
            Fault::new(FaultKind::Tls {
                authority: bracketed(host).into_owned(),
                source,
            })
        };
        let name = ServerName::try_from(host.to_owned()).map_err(|fault| refuse(io::Error::other(fault)))?;
        let session = ClientConnection::new(Arc::clone(config), name);
        let mut session = session.map_err(|fault| refuse(io::Error::other(fault)))?;
        let begun = Instant::now();
        let mut check = || {
            if deadline.left()?.is_zero() {
                Err(FaultKind::Slow {
                    what: "TLS handshake timed out",
                    after: begun.elapsed(),
                }
                .into())
            } else {
                Ok(())
            }
        };
        while session.is_handshaking() {
            let mut below = Checked {
                transport: &mut self.transport,
                check: &mut check,
            };
            // What is refused for a reason of TLS is refused again.
            session
                .complete_io(&mut below)
                .map_err(|error| match error.kind() {
                    io::ErrorKind::InvalidData => refuse(error),
                    _ => broken(error),
                })?;
        }
        let below = self.transport;
        Ok(Connection::of(Transport::Tls(Box::new(Tls { session, below }))))
    }

    /// Sends all of `bytes`.
    pub(crate) fn send(&mut self, bytes: &[u8], pace: &mut Pace<'_>) -> Result<(), Fault> {
        let mut checked = Checked {
            transport: &mut self.transport,
            check: &mut || pace.check(),
        };
        checked
            .write_all(bytes)
            .and_then(|()| checked.flush())
            .map_err(broken)
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

    /// The same, where the end would come too early.
    pub(crate) fn fill_some(&mut self, pace: &mut Pace<'_>) -> Result<(), Fault> {
        match self.fill(pace)? {
            0 => Err(FaultKind::Broken(io::ErrorKind::UnexpectedEof.into()).into()),
            _ => Ok(()),
        }
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
            Transport::Tls(tls) => tls.below.socket(),
        }
    }

    /// Read once, after any number of ticks. Only payload counts as progress: TLS records that are empty or incomplete
    /// do not.
    fn receive(&mut self, dest: &mut [u8], pace: &mut Pace<'_>) -> Result<usize, Fault> {
        pace.resume();
        let mut checked = Checked {
            transport: self,
            check: &mut || pace.check(),
        };
        let count = match checked.read(dest) {
            Ok(count) => count,
            // A server that ends a connection of TLS without saying so: what is missing shows in the lengths.
            Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => 0,
            Err(error) => return Err(broken(error)),
        };
        pace.came(to_u64(count));
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
    /// Waits for the socket in ticks, between which it is checked whether to go on.
    fn wait<T>(
        socket: &mut TcpStream,
        check: &mut Check<'_>,
        mut call: impl FnMut(&mut TcpStream) -> io::Result<T>,
    ) -> io::Result<T> {
        loop {
            let outcome = call(socket);
            check()?;
            match outcome {
                Err(error) if is_a_tick(&error) => {}
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
        call(&mut Stream::new(
            &mut tls.session,
            &mut Checked { transport, check },
        ))
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

/// Whether a wait was over and nothing more.
fn is_a_tick(error: &io::Error) -> bool {
    matches!(
        error.kind(),
        io::ErrorKind::WouldBlock | io::ErrorKind::TimedOut | io::ErrorKind::Interrupted
    )
}

/// The fault of a check that failed below, or of a connection that broke.
fn broken(error: io::Error) -> Fault {
    error
        .downcast::<Fault>()
        .unwrap_or_else(|error| FaultKind::Broken(error).into())
}

/// How safe connections are made. There is no way to do without the check.
///
/// The certificates are those of `ca_file`, else those that the system trusts (`SSL_CERT_FILE` and `SSL_CERT_DIR` name
/// others), else, where a system has none, as small containers do, those that Mozilla trusts.
pub(crate) fn trusting(ca_file: Option<&Path>) -> Result<Arc<ClientConfig>, Fault> {
    let mut roots = RootCertStore::empty();
    match ca_file {
        Some(path) => {
            for certificate in certificates(path)? {
                roots
                    .add(certificate)
                    .map_err(|fault| unusable(path, &fault.to_string()))?;
            }
        }
        None => {
            roots.add_parsable_certificates(rustls_native_certs::load_native_certs().certs);
            if roots.is_empty() {
                roots.extend(webpki_roots::TLS_SERVER_ROOTS.iter().cloned());
            }
        }
    }
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let mut config = ClientConfig::builder_with_provider(provider)
        .with_safe_default_protocol_versions()
        .map_err(|fault| FaultKind::Tls {
            authority: "any host".to_owned(),
            source: io::Error::other(fault),
        })?
        .with_root_certificates(roots)
        .with_no_client_auth();
    config.alpn_protocols = vec![b"http/1.1".to_vec()];
    Ok(Arc::new(config))
}

fn certificates(path: &Path) -> Result<Vec<CertificateDer<'static>>, Fault> {
    let pem = fs::read(path).map_err(|fault| unusable(path, &fault.to_string()))?;
    let certificates: Result<Vec<_>, _> = CertificateDer::pem_slice_iter(&pem).collect();
    match certificates {
        Ok(certificates) if !certificates.is_empty() => Ok(certificates),
        Ok(_) => Err(unusable(path, "it holds no certificate in PEM")),
        Err(fault) => Err(unusable(path, &fault.to_string())),
    }
}

fn unusable(path: &Path, why: &str) -> Fault {
    let path = path.to_string_lossy();
    FaultKind::Option(format!(
        "the CA file {} cannot be used: {why}",
        ingot_format::Quoted(&path)
    ))
    .into()
}
