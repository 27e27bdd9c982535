//! Which version of a file was opened.

use super::fault::{Fault, FaultKind};
use super::message::Head;
use super::url::{Origin, Url};

/// What names the version of a file: every part that is read later has to be of it.
#[derive(Clone, Debug, Default)]
pub(crate) struct Pin {
    pub(crate) nbytes: u64,
    etag: Option<String>,
    modified: Option<String>,
    /// Who says so.
    origin: Option<Origin>,
}

impl Pin {
    pub(crate) fn new(head: &Head, nbytes: u64, url: &Url) -> Pin {
        let header = |name| head.get(name).map(ToOwned::to_owned);
        Pin {
            nbytes,
            etag: header("etag"),
            modified: header("last-modified"),
            origin: Some(url.origin()),
        }
    }

    /// The same version, of so many bytes.
    pub(crate) fn of(self, nbytes: u64) -> Pin {
        Pin { nbytes, ..self }
    }

    /// Whether the server of `url` is the one that named the version. Another knows nothing of it.
    pub(crate) fn is_from(&self, url: &Url) -> bool {
        self.origin.as_ref() == Some(&url.origin())
    }

    /// The header that has a server refuse to give bytes of another version. A weak tag names no bytes, and may not
    /// stand in `If-Match`.
    pub(crate) fn condition(&self) -> Option<(String, String)> {
        match (self.strong_etag(), &self.modified) {
            (Some(etag), _) => Some(("If-Match".to_owned(), etag.to_owned())),
            (None, Some(modified)) => Some(("If-Unmodified-Since".to_owned(), modified.clone())),
            (None, None) => None,
        }
    }

    /// Checks an answer all the same: not every server knows those headers.
    pub(crate) fn check(&self, other: &Pin) -> Result<(), Fault> {
        let nbytes_now = (self.nbytes != other.nbytes).then_some(other.nbytes);
        let is_other = match (self.strong_etag(), other.strong_etag()) {
            (Some(one), Some(other)) => one != other,
            _ => differs(&self.etag, &other.etag) || differs(&self.modified, &other.modified),
        };
        if nbytes_now.is_some() || is_other {
            return Err(FaultKind::Changed { nbytes_now }.into());
        }
        Ok(())
    }

    /// What no other version of the file at this address says of itself, as far as the server says anything.
    #[cfg(unix)]
    pub(crate) fn version(&self) -> Option<String> {
        match (self.strong_etag(), &self.modified) {
            (Some(etag), _) => Some(format!("etag {etag}")),
            (None, Some(modified)) => Some(format!("modified {modified}")),
            (None, None) => None,
        }
    }

    fn strong_etag(&self) -> Option<&str> {
        self.etag.as_deref().filter(|etag| !etag.starts_with("W/"))
    }
}

/// What only one of two answers says tells nothing.
fn differs(one: &Option<String>, other: &Option<String>) -> bool {
    one.is_some() && other.is_some() && one != other
}
