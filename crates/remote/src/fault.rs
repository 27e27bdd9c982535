//! Errors of remote files.

use std::error;
use std::fmt;
use std::io;
use std::ops::Range;
use std::time::Duration;

pub(crate) type Result<T, E = Fault> = std::result::Result<T, E>;

/// Error codes of stores for credentials that are expired or unknown.
const EXPIRED: &[&str] = &[
    "ExpiredToken",
    "ExpiredTokenException",
    "InvalidAccessKeyId",
    "InvalidClientTokenId",
    "InvalidToken",
    "TokenRefreshRequired",
];

/// Error codes of stores for failures that may be temporary, whatever their status is.
const TEMPORARY: &[&str] = &[
    "BadDigest",
    CONFLICT,
    "InternalError",
    "RequestTimeout",
    "ServiceUnavailable",
    "SlowDown",
    "XAmzContentChecksumMismatch",
    "XAmzContentSHA256Mismatch",
];

/// The error code of S3 for a conditional request that meets another request for the object, which may yet fail.
pub(crate) const CONFLICT: &str = "ConditionalRequestConflict";

/// The error code of S3 for parts that were removed.
pub(crate) const NO_PARTS: &str = "NoSuchUpload";

/// Error codes of stores, and what to do.
const HINTS: &[(&str, &str)] = &[
    (
        CONFLICT,
        "another writer made or removed the object meanwhile: save again",
    ),
    (
        NO_PARTS,
        "the parts of the object were removed meanwhile: save again",
    ),
    (
        "RequestTimeTooSkewed",
        "the store accepts a difference of 15 minutes: set the clock of this machine",
    ),
];

/// The reason why a remote file could not be read or written. Reading returns an [`io::Error`] that contains it.
///
/// ```
/// use std::io;
///
/// use ingot_remote::Fault;
///
/// /// Returns whether reading failed at the server or on the way to it.
/// fn is_remote(error: &io::Error) -> bool {
///     error.get_ref().is_some_and(|cause| cause.is::<Fault>())
/// }
/// # assert!(!is_remote(&io::Error::other("another cause")));
/// ```
#[derive(Debug)]
pub struct Fault {
    /// Boxed, since it is larger than most results.
    kind: Box<FaultKind>,
    /// The URL that failed, without its secrets, unless it is the URL of the file.
    url: Option<String>,
    attempts: u32,
}

#[derive(Debug)]
pub(crate) enum FaultKind {
    /// The URL is invalid.
    Address(String),
    /// An option is invalid.
    Option(String),
    /// The environment forbids requests to the Hub.
    Offline(String),
    /// The host cannot be resolved or reached.
    Connect(String, io::Error),
    /// The TLS handshake with a host failed.
    Tls(String, io::Error),
    /// The connection broke.
    Broken(io::Error),
    /// A time limit is over.
    Slow(&'static str, Duration),
    /// The response violates RFC 9112, or has a header that cannot be understood.
    Malformed(String),
    /// The server refused the request.
    Status(Refusal),
    /// The server sent the whole file, of this size, instead of the requested range.
    RangeIgnored(Range<u64>, Option<u64>),
    /// The server sent another range than the requested one.
    OtherRange(Range<u64>, String),
    /// The body has a content encoding.
    Encoded(String),
    /// The body ended early: the expected and the found bytes.
    Short(u64, u64),
    /// The document has more bytes than this limit.
    TooLarge(u64),
    /// A redirect to this place is not followed, and why.
    Redirect(String, &'static str),
    /// More redirects than this.
    Loop(usize),
    /// The object to be written exists already.
    Exists,
    /// The store may replace an object that it was requested to keep.
    Unconditional,
    /// The file was replaced. Its size now, if known.
    Changed(Option<u64>),
    /// A configured source of credentials failed.
    Credentials(String, Fault),
    /// A provider of credentials failed.
    Provider(io::Error),
    /// The caller set the stop flag.
    Stopped,
}

/// An answer of a server that refuses a request.
#[derive(Debug, Default)]
pub(crate) struct Refusal {
    pub(crate) status: u16,
    pub(crate) reason: String,
    /// The explanation in a header or the body.
    pub(crate) said: Option<String>,
    /// The time of `Retry-After`.
    pub(crate) wait: Option<Duration>,
    /// The region of the S3 bucket.
    pub(crate) region: Option<String>,
}

/// Who caused a fault.
#[derive(PartialEq)]
enum Cause {
    /// The caller, by a URL or an option.
    Caller,
    /// A server, by its answer about the file.
    Answer,
    Other,
}

impl Fault {
    pub(crate) fn new(kind: FaultKind) -> Fault {
        Fault {
            kind: Box::new(kind),
            url: None,
            attempts: 1,
        }
    }

    /// Return the fault of an invalid option.
    #[must_use]
    pub fn option(why: impl Into<String>) -> Fault {
        FaultKind::Option(why.into()).into()
    }

    /// Return the fault of a request that `offline` forbids.
    #[must_use]
    pub fn offline() -> Fault {
        let why = "requests are forbidden (offline), and the cache does not have these bytes";
        FaultKind::Offline(why.to_owned()).into()
    }

    /// Whether a request was forbidden.
    #[must_use]
    pub fn is_offline(&self) -> bool {
        matches!(*self.kind, FaultKind::Offline(_))
    }

    /// Return the fault of a wait that ended because the stop flag is set.
    #[must_use]
    pub fn stopped() -> Fault {
        FaultKind::Stopped.into()
    }

    /// Return the fault of an invalid URL.
    #[must_use]
    pub fn address(why: impl Into<String>) -> Fault {
        FaultKind::Address(why.into()).into()
    }

    /// Return the fault of a document with more than `limit` bytes.
    #[must_use]
    pub fn too_large(limit: u64) -> Fault {
        FaultKind::TooLarge(limit).into()
    }

    pub(crate) fn malformed(why: impl Into<String>) -> Fault {
        FaultKind::Malformed(why.into()).into()
    }

    /// Add the URL that failed. The faults of credentials have their own.
    pub(crate) fn at(mut self, url: String) -> Fault {
        if !matches!(*self.kind, FaultKind::Credentials(..)) {
            self.url.get_or_insert(url);
        }
        self
    }

    /// Return the texts that a server chose or that were sent to one. They may contain secrets.
    pub(crate) fn said(&mut self) -> impl Iterator<Item = &mut String> {
        let said: Vec<&mut String> = match &mut *self.kind {
            FaultKind::Status(refusal) => refusal.said.iter_mut().chain([&mut refusal.reason]).collect(),
            FaultKind::Encoded(text)
            | FaultKind::Connect(text, _)
            | FaultKind::Tls(text, _)
            | FaultKind::OtherRange(_, text)
            | FaultKind::Redirect(text, _) => vec![text],
            FaultKind::Credentials(_, fault) => fault.said().collect(),
            _ => Vec::new(),
        };
        said.into_iter().chain(&mut self.url)
    }

    /// Name the source of credentials that failed. The result is final: the source was retried already, and its status is
    /// not the file's.
    pub(crate) fn of_credentials(self, source: &str) -> Fault {
        match *self.kind {
            FaultKind::Stopped => self,
            _ => FaultKind::Credentials(source.to_owned(), self).into(),
        }
    }

    pub(crate) fn after(mut self, attempts: u32) -> Fault {
        self.attempts = attempts;
        self
    }

    pub(crate) fn kind(&self) -> &FaultKind {
        &self.kind
    }

    /// Whether the same request may succeed later.
    pub(crate) fn is_transient(&self) -> bool {
        match &*self.kind {
            // A proxy that refuses, or does not speak HTTP, does so again.
            FaultKind::Connect(_, source) => {
                let kind = source.kind();
                !matches!(kind, io::ErrorKind::PermissionDenied | io::ErrorKind::InvalidData)
            }
            FaultKind::Broken(_) | FaultKind::Slow(..) | FaultKind::Short(..) => true,
            FaultKind::Status(refusal) => {
                matches!(refusal.status, 408 | 425 | 429 | 500 | 502..=504)
                    || TEMPORARY.contains(&self.said_code())
            }
            _ => false,
        }
    }

    fn refusal(&self) -> Option<&Refusal> {
        match &*self.kind {
            FaultKind::Status(refusal) => Some(refusal),
            _ => None,
        }
    }

    /// Return the HTTP status if the server refused the request.
    #[must_use]
    pub fn status(&self) -> Option<u16> {
        self.refusal().map(|refusal| refusal.status)
    }

    /// Return the time that the server asks to wait before the next attempt.
    pub(crate) fn wait(&self) -> Option<Duration> {
        self.refusal()?.wait
    }

    /// Whether the server refused the credential of the request and may accept a new one.
    pub(crate) fn refuses_identity(&self) -> bool {
        let is_expired = EXPIRED.contains(&self.said_code());
        matches!(self.status(), Some(401)) || matches!(self.status(), Some(400 | 403)) && is_expired
    }

    /// Return the error code in the explanation of a store, which may be empty.
    pub(crate) fn said_code(&self) -> &str {
        self.refusal().map(Refusal::code).unwrap_or_default()
    }

    /// Whether the server answered that the file does not exist.
    pub fn is_missing(&self) -> bool {
        matches!(self.status(), Some(404 | 410))
    }

    /// Add that another file does not exist either.
    pub fn and_not(mut self, other: &str) -> Fault {
        if let FaultKind::Status(refusal) = &mut *self.kind {
            let said = refusal
                .said
                .take()
                .map_or(String::new(), |said| format!("{said}; "));
            refusal.said = Some(format!("{said}nor is there a file {other}"));
        }
        self
    }

    /// Return the region of an S3 bucket if the server refused the request because of its region.
    pub fn region(&self) -> Option<&str> {
        self.refusal()?.region.as_deref()
    }

    /// Return the code, the kind of the [`io::Error`] and the cause. The kinds are the kinds of local files, so that
    /// callers need no HTTP status. None of them is `Interrupted`, since readers would try again.
    fn class(&self) -> (&'static str, io::ErrorKind, Cause) {
        use io::ErrorKind as Kind;
        match &*self.kind {
            FaultKind::Address(_) => ("bad-url", Kind::InvalidInput, Cause::Caller),
            FaultKind::Option(_) => ("storage-option", Kind::InvalidInput, Cause::Caller),
            FaultKind::Offline(_) => ("offline", Kind::NotFound, Cause::Answer),
            FaultKind::Connect(_, source) => ("unreachable", source.kind(), Cause::Other),
            FaultKind::Tls(..) => ("tls", Kind::Other, Cause::Other),
            FaultKind::Broken(_) => ("connection-broken", Kind::Other, Cause::Other),
            FaultKind::Slow(..) => ("timed-out", Kind::TimedOut, Cause::Other),
            FaultKind::Malformed(_) => ("malformed-response", Kind::Other, Cause::Other),
            FaultKind::Status(refusal) => match refusal.status {
                404 | 410 if refusal.code() != NO_PARTS => ("http-status", Kind::NotFound, Cause::Answer),
                401 | 403 => ("http-status", Kind::PermissionDenied, Cause::Answer),
                _ => ("http-status", Kind::Other, Cause::Answer),
            },
            FaultKind::RangeIgnored(..) => ("range-ignored", Kind::Other, Cause::Other),
            FaultKind::OtherRange(..) => ("wrong-range", Kind::Other, Cause::Other),
            FaultKind::Encoded(_) => ("content-encoded", Kind::Other, Cause::Other),
            FaultKind::Short(..) => ("short-read", Kind::UnexpectedEof, Cause::Other),
            FaultKind::TooLarge(_) => ("document-too-large", Kind::Other, Cause::Other),
            FaultKind::Redirect(..) => ("redirect-refused", Kind::Other, Cause::Other),
            FaultKind::Loop(_) => ("too-many-redirects", Kind::Other, Cause::Other),
            FaultKind::Exists => ("exists", Kind::AlreadyExists, Cause::Answer),
            FaultKind::Unconditional => ("unconditional-store", Kind::Unsupported, Cause::Answer),
            FaultKind::Changed(_) => ("changed", Kind::Other, Cause::Other),
            FaultKind::Credentials(_, fault) => match (fault.class(), fault.status()) {
                (class @ (_, _, Cause::Caller), _) => class,
                ((_, _, cause), Some(400..=499)) => ("no-credentials", Kind::PermissionDenied, cause),
                ((_, kind, cause), _) => ("no-credentials", kind, cause),
            },
            FaultKind::Provider(error) => match error.kind() {
                kind @ Kind::Unsupported => ("missing-sdk", kind, Cause::Caller),
                kind @ Kind::InvalidInput => ("storage-option", kind, Cause::Caller),
                kind @ Kind::PermissionDenied => ("no-credentials", kind, Cause::Answer),
                kind => ("no-credentials", kind, Cause::Other),
            },
            FaultKind::Stopped => ("interrupted", Kind::Other, Cause::Other),
        }
    }

    /// Return the stable name of the failure, in kebab-case; programs may match it.
    #[must_use]
    pub fn code(&self) -> &'static str {
        self.class().0
    }

    /// Whether the URL or an option of the caller is wrong.
    #[must_use]
    pub fn is_misuse(&self) -> bool {
        self.class().2 == Cause::Caller
    }

    /// Whether it is an answer of a server, or of the cache in its place, about the file.
    #[must_use]
    pub fn is_answer(&self) -> bool {
        self.class().2 == Cause::Answer
    }

    /// Return the fault that an [`io::Error`] contains.
    #[must_use]
    pub fn of(error: &io::Error) -> Option<&Fault> {
        error.get_ref()?.downcast_ref()
    }
}

impl From<FaultKind> for Fault {
    fn from(kind: FaultKind) -> Fault {
        Fault::new(kind)
    }
}

impl fmt::Display for Fault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.kind)?;
        if let Some(url) = &self.url {
            write!(f, " (from {url})")?;
        }
        if self.attempts > 1 {
            write!(f, ", {} times", self.attempts)?;
        }
        Ok(())
    }
}

impl fmt::Display for FaultKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            FaultKind::Address(why) | FaultKind::Option(why) | FaultKind::Offline(why) => f.write_str(why),
            FaultKind::Connect(authority, source) => write!(f, "cannot connect to {authority}: {source}"),
            FaultKind::Tls(authority, source) => write!(f, "TLS handshake with {authority} failed: {source}"),
            FaultKind::Broken(source) => write!(f, "the connection broke: {source}"),
            FaultKind::Slow(what, after) => write!(f, "{what} after {} s", after.as_secs_f32()),
            FaultKind::Malformed(why) => write!(f, "malformed HTTP response: {why}"),
            FaultKind::Status(refusal) => write!(f, "{refusal}"),
            FaultKind::RangeIgnored(asked, nbytes) => {
                let size = nbytes.map_or(String::new(), |nbytes| format!(" of {nbytes} bytes"));
                let Range { start, end } = asked;
                write!(
                    f,
                    "requested bytes {start}..{end}, received the whole file{size}: "
                )?;
                f.write_str("the server does not support range requests")
            }
            FaultKind::OtherRange(asked, got) => {
                write!(
                    f,
                    "requested bytes {}..{}, received {got}",
                    asked.start, asked.end
                )
            }
            FaultKind::Encoded(encoding) => {
                write!(
                    f,
                    "requested the bytes unencoded, received content encoding {encoding}"
                )
            }
            FaultKind::Short(expected, found) => write!(f, "expected {expected} bytes, found {found}"),
            FaultKind::TooLarge(limit) => write!(f, "it is too large: expected at most {limit} bytes"),
            FaultKind::Redirect(to, why) => write!(f, "refused a redirect to {to}: {why}"),
            FaultKind::Loop(hops) => write!(f, "more than {hops} redirects"),
            FaultKind::Changed(now) => {
                let size = now.map_or(String::new(), |now| format!(", it has {now} bytes now"));
                write!(f, "the file was replaced since it was opened{size}")
            }
            FaultKind::Exists => f.write_str("the object exists"),
            FaultKind::Unconditional => f.write_str(
                "the store ignores If-None-Match, so that overwrite=False cannot protect an existing object",
            ),
            FaultKind::Provider(error) => write!(f, "{error}"),
            FaultKind::Credentials(source, fault) => write!(f, "no credentials from {source}: {fault}"),
            FaultKind::Stopped => f.write_str("interrupted"),
        }
    }
}

impl Refusal {
    /// Return the error code in the explanation of a store, which may be empty.
    fn code(&self) -> &str {
        let said = self.said.as_deref().unwrap_or_default();
        said.split([' ', ';']).next().unwrap_or_default()
    }

    /// Return the advice for the error code, if there is one.
    fn hint(&self) -> Option<&'static str> {
        let found = HINTS.iter().find(|(code, _)| *code == self.code());
        found.map(|(_, hint)| *hint)
    }
}

impl fmt::Display for Refusal {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        // Shortened here, after secrets were removed: a shortened secret would not be found.
        write!(f, "the server answered {} {:.80}", self.status, self.reason)?;
        if let Some(said) = &self.said {
            write!(f, " ({said:.300})")?;
        }
        if let Some(hint) = self.hint() {
            write!(f, ": {hint}")?;
        }
        match self.wait {
            Some(wait) => write!(f, ", retry after {} s", wait.as_secs()),
            None => Ok(()),
        }
    }
}

impl error::Error for Fault {
    /// The error of a provider of credentials.
    fn source(&self) -> Option<&(dyn error::Error + 'static)> {
        match &*self.kind {
            FaultKind::Credentials(_, fault) => fault.source(),
            FaultKind::Provider(error) => Some(error),
            _ => None,
        }
    }
}

impl From<Fault> for io::Error {
    fn from(fault: Fault) -> io::Error {
        io::Error::new(fault.class().1, fault)
    }
}
