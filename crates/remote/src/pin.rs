//! Which version of a file was opened.

use crate::fault::{Fault, FaultKind};
use crate::http::message::Head;
use crate::url::{SecurityOrigin, Url};

/// What names the version of a file: every part that is read later has to be of it.
#[derive(Clone, Debug, Default)]
pub(crate) struct Pin {
    pub(crate) nbytes: u64,
    version: Version,
    /// Who says so.
    origin: Option<SecurityOrigin>,
}

/// What a server says that tells two versions apart. What one answer says, all have to: where a later one is silent,
/// nobody knows what it is of.
#[derive(Clone, Debug, PartialEq, Eq)]
enum Version {
    /// A strong tag names the bytes, whenever they were written.
    Tag(String),
    /// A weak tag does not, so that the date counts too, as far as there is either.
    Dated {
        weak: Option<String>,
        modified: Option<String>,
    },
}

impl Default for Version {
    fn default() -> Version {
        Version::Dated {
            weak: None,
            modified: None,
        }
    }
}

impl Version {
    fn of(head: &Head) -> Result<Version, Fault> {
        let said = |text: Option<&str>| text.filter(|text| !text.is_empty()).map(ToOwned::to_owned);
        let tag = said(head.single("etag")?);
        let modified = said(head.single("last-modified")?);
        Ok(match tag {
            Some(tag) if !tag.starts_with("W/") => Version::Tag(tag),
            weak => Version::Dated { weak, modified },
        })
    }
}

impl Pin {
    pub(crate) fn new(head: &Head, nbytes: u64, url: &Url) -> Result<Pin, Fault> {
        Ok(Pin {
            nbytes,
            version: Version::of(head)?,
            origin: Some(url.origin()),
        })
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
        let (name, value) = match &self.version {
            Version::Tag(tag) => ("If-Match", tag),
            Version::Dated { modified, .. } => ("If-Unmodified-Since", modified.as_ref()?),
        };
        Some((name.to_owned(), value.clone()))
    }

    /// Checks an answer all the same: not every server knows those headers.
    pub(crate) fn check(&self, other: &Pin) -> Result<(), Fault> {
        let nbytes_now = (self.nbytes != other.nbytes).then_some(other.nbytes);
        if nbytes_now.is_some() || self.version != other.version {
            Err(FaultKind::Changed { nbytes_now }.into())
        } else {
            Ok(())
        }
    }

    /// The same as lines of text, for [`Pin::of_lines`].
    pub(crate) fn to_lines(&self) -> String {
        let mut lines = String::new();
        match &self.version {
            Version::Tag(tag) => add_line(&mut lines, "tag", Some(tag)),
            Version::Dated { weak, modified } => {
                add_line(&mut lines, "weak", weak.as_ref());
                add_line(&mut lines, "modified", modified.as_ref());
            }
        }
        lines
    }

    /// A version of so many bytes that [`Pin::to_lines`] has written, if it has. Which server named it is not known.
    pub(crate) fn of_lines(nbytes: u64, lines: &str) -> Option<Pin> {
        let said = |key| line(lines, key).map(ToOwned::to_owned);
        let version = match (said("tag"), said("weak"), said("modified")) {
            (Some(tag), ..) => Version::Tag(tag),
            (None, None, None) => return None,
            (None, weak, modified) => Version::Dated { weak, modified },
        };
        Some(Pin {
            nbytes,
            version,
            origin: None,
        })
    }

    /// What no other version of the file at this address says of itself, as far as the server says anything.
    pub(crate) fn version(&self) -> Option<String> {
        match &self.version {
            Version::Tag(tag) => Some(format!("etag {tag}")),
            Version::Dated { modified, .. } => Some(format!("modified {}", modified.as_ref()?)),
        }
    }
}

/// Adds the line that [`line`] finds, where there is a value.
pub(crate) fn add_line(lines: &mut String, key: &str, value: Option<&String>) {
    if let Some(value) = value {
        lines.extend([key, " ", value, "\n"]);
    }
}

/// What follows `key` on the line that it begins.
pub(crate) fn line<'l>(lines: &'l str, key: &str) -> Option<&'l str> {
    let mut values = lines
        .lines()
        .filter_map(|line| line.strip_prefix(key)?.strip_prefix(' '));
    values.next()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn said(version: Version) -> Pin {
        Pin {
            nbytes: 12,
            version,
            origin: None,
        }
    }

    #[test]
    fn a_version_is_the_same_after_it_was_told() {
        let text = |text: &str| Some(text.to_owned());
        for version in [
            Version::Tag("\"tag of words\"".to_owned()),
            Version::Dated {
                weak: text("W/\"1\""),
                modified: text("Thu, 01 Jan 1970 00:00:00 GMT"),
            },
            Version::Dated {
                weak: None,
                modified: text("tag, or so"),
            },
        ] {
            let pin = said(version);
            let again = Pin::of_lines(12, &pin.to_lines()).unwrap();
            assert!(pin.check(&again).is_ok(), "{pin:?} {again:?}");
            assert!(again.check(&pin).is_ok());
        }
    }

    #[test]
    fn what_no_server_said_is_no_version() {
        assert!(Pin::of_lines(12, &said(Version::default()).to_lines()).is_none());
        assert!(Pin::of_lines(12, "written 1 2").is_none());
    }

    #[test]
    fn a_line_begins_with_the_whole_of_its_key() {
        assert_eq!(line("committer x\ncommit 1\n", "commit"), Some("1"));
        assert_eq!(line("", "commit"), None);
    }
}
