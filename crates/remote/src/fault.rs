//! What can go wrong with a file behind a URL.

use std::error;
use std::fmt;
use std::io;
use std::ops::Range;
use std::time::Duration;

/// What Amazon's services, and those that speak like them, say of keys that are no longer good.
const EXPIRED: &[&str] = &[
    "ExpiredToken",
    "ExpiredTokenException",
    "InvalidAccessKeyId",
    "InvalidClientTokenId",
    "InvalidToken",
    "TokenRefreshRequired",
];

/// Why a remote file could not be read. It lies inside the [`io::Error`] that reading
/// gives.
#[derive(Debug)]
pub struct Fault {
    /// Boxed: it is larger than what most functions give.
    kind: Box<FaultKind>,
    /// The URL that it came from, where that is not the one of the file, without its secrets.
    from: Option<String>,
    /// How often it was tried.
    attempts: u32,
}

#[derive(Debug)]
pub(crate) enum FaultKind {
    /// The URL is not one.
    Address(String),
    /// An option does not fit.
    Option(String),
    /// What is asked for may not be fetched.
    Offline(String),
    /// The name or the address cannot be reached.
    Connect { authority: String, source: io::Error },
    /// The connection is not safe.
    Tls { authority: String, source: io::Error },
    /// The connection broke.
    Broken(io::Error),
    /// The server let us wait.
    Slow { what: &'static str, after: Duration },
    /// What came is not HTTP as RFC 9112 has it.
    Malformed(&'static str),
    /// A header on which something hangs cannot be understood.
    Header { name: &'static str, why: &'static str },
    /// The server refuses.
    Status {
        status: u16,
        reason: String,
        /// What it says itself, in a header or a word of the body.
        said: Option<String>,
        /// How long it wants us to wait.
        wait: Option<Duration>,
        /// The region of S3 where it wants to be asked.
        region: Option<String>,
    },
    /// The server answers with all of a file when it was asked for a part.
    RangeIgnored { asked: Range<u64>, nbytes: Option<u64> },
    /// The server answers with another part than was asked for.
    OtherRange { asked: Range<u64>, got: String },
    /// The body is compressed or otherwise encoded.
    Encoded(String),
    /// The body ended early.
    Short { expected: u64, found: u64 },
    /// The body is longer than what it should be a document of.
    TooLarge { limit: u64 },
    /// A redirect leads where we do not go.
    Redirect { to: String, why: &'static str },
    /// Too many redirects.
    Loop { hops: usize },
    /// The file is another one now.
    Changed { nbytes_now: Option<u64> },
    /// Who the caller is to the store cannot be found out from where that is configured.
    Credentials { source: String, fault: Fault },
    /// A provider of credentials failed.
    Provider(io::Error),
    /// The caller wants no more.
    Stopped,
}

impl Fault {
    pub(crate) fn new(kind: FaultKind) -> Fault {
        Fault {
            kind: Box::new(kind),
            from: None,
            attempts: 1,
        }
    }

    /// An option does not fit.
    #[must_use]
    pub fn option(why: impl Into<String>) -> Fault {
        FaultKind::Option(why.into()).into()
    }

    /// The URL is not one, or does not fit.
    #[must_use]
    pub fn address(why: impl Into<String>) -> Fault {
        FaultKind::Address(why.into()).into()
    }

    /// A document has more bytes than `limit`.
    #[must_use]
    pub fn too_large(limit: u64) -> Fault {
        FaultKind::TooLarge { limit }.into()
    }

    /// The same fault, of another URL than that of the file. One of a source of credentials has its own.
    pub(crate) fn from(mut self, url: String) -> Fault {
        if !matches!(*self.kind, FaultKind::Credentials { .. }) {
            self.from.get_or_insert(url);
        }
        self
    }

    /// What of it a server has said, or was said to one: what may hold secrets.
    pub(crate) fn said(&mut self) -> impl Iterator<Item = &mut String> {
        self.kind.said().into_iter().chain(&mut self.from)
    }

    /// The same fault, of a source of credentials. It is final: that has been tried again already, and no status of it is
    /// one of the file.
    pub(crate) fn of_credentials(self, source: &str) -> Fault {
        match *self.kind {
            FaultKind::Stopped => self,
            _ => FaultKind::Credentials {
                source: source.to_owned(),
                fault: self,
            }
            .into(),
        }
    }

    pub(crate) fn after(mut self, attempts: u32) -> Fault {
        self.attempts = attempts;
        self
    }

    pub(crate) fn kind(&self) -> &FaultKind {
        &self.kind
    }

    /// Whether the same request may succeed a little later.
    pub(crate) fn is_transient(&self) -> bool {
        match &*self.kind {
            // A proxy that refuses, or speaks something else, does so again.
            FaultKind::Connect { source, .. } => !matches!(
                source.kind(),
                io::ErrorKind::PermissionDenied | io::ErrorKind::InvalidData
            ),
            FaultKind::Broken(_) | FaultKind::Slow { .. } | FaultKind::Short { .. } => true,
            FaultKind::Status { status, .. } => matches!(status, 408 | 425 | 429 | 500 | 502 | 503 | 504),
            _ => false,
        }
    }

    /// The status that the server answered with, where it refused.
    #[must_use]
    pub fn status(&self) -> Option<u16> {
        match *self.kind {
            FaultKind::Status { status, .. } => Some(status),
            _ => None,
        }
    }

    /// Whether the server refuses the token or the keys that the request had, and may take others of the same caller.
    pub(crate) fn refuses_identity(&self) -> bool {
        match &*self.kind {
            FaultKind::Status { status: 401, .. } => true,
            FaultKind::Status {
                status: 400 | 403,
                said: Some(said),
                ..
            } => EXPIRED.contains(&said.split([' ', ';']).next().unwrap_or_default()),
            _ => false,
        }
    }

    /// Whether the server says that there is no such file.
    pub fn is_missing(&self) -> bool {
        matches!(self.status(), Some(404 | 410))
    }

    /// The same refusal, of another file too.
    pub fn and_not(mut self, other: &str) -> Fault {
        if let FaultKind::Status { said, .. } = &mut *self.kind {
            let word = said.take().map_or(String::new(), |said| format!("{said}; "));
            *said = Some(format!("{word}nor is there a file {other}"));
        }
        self
    }

    /// The region that a bucket of S3 lies in, where a server says so because it was asked in another.
    pub fn region(&self) -> Option<&str> {
        match &*self.kind {
            FaultKind::Status { region, .. } => region.as_deref(),
            _ => None,
        }
    }

    /// A stable name for the failure, in kebab-case; programs may match it.
    #[must_use]
    pub fn code(&self) -> &'static str {
        match &*self.kind {
            FaultKind::Address(_) => "bad-url",
            FaultKind::Option(_) => "storage-option",
            FaultKind::Offline(_) => "offline",
            FaultKind::Connect { .. } => "unreachable",
            FaultKind::Tls { .. } => "tls",
            FaultKind::Broken(_) => "connection-broken",
            FaultKind::Slow { .. } => "timed-out",
            FaultKind::Malformed(_) | FaultKind::Header { .. } => "malformed-response",
            FaultKind::Status { .. } => "http-status",
            FaultKind::RangeIgnored { .. } => "range-ignored",
            FaultKind::OtherRange { .. } => "wrong-range",
            FaultKind::Encoded(_) => "content-encoded",
            FaultKind::Short { .. } => "short-read",
            FaultKind::TooLarge { .. } => "document-too-large",
            FaultKind::Redirect { .. } => "redirect-refused",
            FaultKind::Loop { .. } => "too-many-redirects",
            FaultKind::Changed { .. } => "changed",
            FaultKind::Provider(error) if error.kind() == io::ErrorKind::Unsupported => "missing-sdk",
            FaultKind::Provider(error) if error.kind() == io::ErrorKind::InvalidInput => "storage-option",
            FaultKind::Credentials { fault, .. } if fault.is_misuse() => fault.code(),
            FaultKind::Credentials { .. } | FaultKind::Provider(_) => "no-credentials",
            FaultKind::Stopped => "interrupted",
        }
    }

    /// Whether it is a mistake of the caller's, in the URL or the options.
    #[must_use]
    pub fn is_misuse(&self) -> bool {
        match &*self.kind {
            FaultKind::Credentials { fault, .. } => fault.is_misuse(),
            FaultKind::Provider(error) => {
                matches!(
                    error.kind(),
                    io::ErrorKind::InvalidInput | io::ErrorKind::Unsupported
                )
            }
            kind => matches!(kind, FaultKind::Address(_) | FaultKind::Option(_)),
        }
    }

    /// Whether it is what a server, or the cache in its place, says of the file.
    #[must_use]
    pub fn is_answer(&self) -> bool {
        match &*self.kind {
            FaultKind::Credentials { fault, .. } => fault.is_answer(),
            FaultKind::Provider(error) => error.kind() == io::ErrorKind::PermissionDenied,
            kind => matches!(kind, FaultKind::Status { .. } | FaultKind::Offline(_)),
        }
    }

    /// The kinds are those of a file that is not there or not to be read, so that callers need not know the numbers of
    /// HTTP. None is `Interrupted`: whoever reads would try again.
    fn io_kind(&self) -> io::ErrorKind {
        match &*self.kind {
            FaultKind::Status { .. } if self.is_missing() => io::ErrorKind::NotFound,
            FaultKind::Offline(_) => io::ErrorKind::NotFound,
            FaultKind::Status {
                status: 401 | 403, ..
            } => io::ErrorKind::PermissionDenied,
            FaultKind::Credentials { fault, .. } => match fault.status() {
                Some(400..=499) => io::ErrorKind::PermissionDenied,
                _ => fault.io_kind(),
            },
            FaultKind::Address(_) | FaultKind::Option(_) => io::ErrorKind::InvalidInput,
            FaultKind::Slow { .. } => io::ErrorKind::TimedOut,
            FaultKind::Short { .. } => io::ErrorKind::UnexpectedEof,
            FaultKind::Connect { source, .. } | FaultKind::Provider(source) => source.kind(),
            _ => io::ErrorKind::Other,
        }
    }

    /// The fault that lies inside an error of the system.
    #[must_use]
    pub fn of(error: &io::Error) -> Option<&Fault> {
        error.get_ref()?.downcast_ref()
    }
}

impl FaultKind {
    /// What of it a server decides.
    fn said(&mut self) -> Vec<&mut String> {
        match self {
            FaultKind::Status { reason, said, .. } => said.iter_mut().chain([reason]).collect(),
            FaultKind::Encoded(text)
            | FaultKind::Connect { authority: text, .. }
            | FaultKind::Tls { authority: text, .. }
            | FaultKind::OtherRange { got: text, .. }
            | FaultKind::Redirect { to: text, .. } => vec![text],
            FaultKind::Credentials { fault, .. } => fault.said().collect(),
            _ => Vec::new(),
        }
    }
}

impl From<FaultKind> for Fault {
    fn from(kind: FaultKind) -> Fault {
        Fault::new(kind)
    }
}

impl fmt::Display for Fault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &*self.kind {
            FaultKind::Address(why) | FaultKind::Option(why) | FaultKind::Offline(why) => f.write_str(why)?,
            FaultKind::Connect { authority, source } => write!(f, "cannot connect to {authority}: {source}")?,
            FaultKind::Tls { authority, source } => {
                write!(f, "no safe connection to {authority}: {source}")?;
            }
            FaultKind::Broken(source) => write!(f, "the connection broke: {source}")?,
            FaultKind::Slow { what, after } => write!(f, "{what} after {} s", after.as_secs_f32())?,
            FaultKind::Malformed(what) => write!(f, "the answer is not proper HTTP: {what}")?,
            FaultKind::Header { name, why } => write!(f, "the answer is not proper HTTP: its {name} {why}")?,
            FaultKind::Status {
                status,
                reason,
                said,
                wait,
                ..
            } => {
                // Cut here, where secrets are out of them: of one that is cut, a part would be left.
                write!(f, "the server answers {status} {reason:.80}")?;
                if let Some(said) = said {
                    write!(f, " ({said:.300})")?;
                }
                if let Some(wait) = wait {
                    write!(f, ", to be asked again in {} s", wait.as_secs())?;
                }
            }
            FaultKind::RangeIgnored { asked, nbytes } => {
                write!(
                    f,
                    "asked for bytes {}..{}, got the whole file",
                    asked.start, asked.end
                )?;
                if let Some(nbytes) = nbytes {
                    write!(f, " of {nbytes} bytes")?;
                }
                f.write_str(": the server does not serve parts of files")?;
            }
            FaultKind::OtherRange { asked, got } => {
                write!(f, "asked for bytes {}..{}, got {got}", asked.start, asked.end)?;
            }
            FaultKind::Encoded(encoding) => write!(
                f,
                "asked for the bytes as they are, got them with content encoding {encoding}"
            )?,
            FaultKind::Short { expected, found } => {
                write!(f, "expected {expected} bytes, found {found}")?;
            }
            FaultKind::TooLarge { limit } => write!(f, "it is too large: expected at most {limit} bytes")?,
            FaultKind::Redirect { to, why } => write!(f, "a redirect to {to} is not followed: {why}")?,
            FaultKind::Loop { hops } => write!(f, "more than {hops} redirects")?,
            FaultKind::Changed { nbytes_now } => {
                f.write_str("the file was replaced since it was opened")?;
                if let Some(now) = nbytes_now {
                    write!(f, ", it has {now} bytes now")?;
                }
            }
            FaultKind::Provider(error) => write!(f, "{error}")?,
            FaultKind::Credentials { source, fault } => write!(f, "no credentials from {source}: {fault}")?,
            FaultKind::Stopped => f.write_str("interrupted")?,
        }
        if let Some(from) = &self.from {
            write!(f, " (from {from})")?;
        }
        if self.attempts > 1 {
            write!(f, ", {} times", self.attempts)?;
        }
        Ok(())
    }
}

impl error::Error for Fault {
    /// The error of a provider of credentials.
    fn source(&self) -> Option<&(dyn error::Error + 'static)> {
        match &*self.kind {
            FaultKind::Credentials { fault, .. } => fault.source(),
            FaultKind::Provider(error) => Some(error),
            _ => None,
        }
    }
}

impl From<Fault> for io::Error {
    fn from(fault: Fault) -> io::Error {
        io::Error::new(fault.io_kind(), fault)
    }
}
