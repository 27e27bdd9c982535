//! The version of a file that was opened.

use crate::fault::{FaultKind, Result};
use crate::http::message::Head;
use crate::url::{SecurityOrigin, Url};

/// The version of a file. All later reads must return bytes of this version.
#[derive(Clone, Debug, Default)]
pub(crate) struct Pin {
    pub(crate) nbytes: u64,
    version: Version,
    /// The server that named the version.
    origin: Option<SecurityOrigin>,
}

/// The headers that distinguish versions. All answers must have the same ones: without them, the version of an answer
/// is unknown.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
struct Version {
    tag: Option<String>,
    /// The date, unless the tag is strong.
    modified: Option<String>,
}

impl Version {
    fn of(head: &Head) -> Result<Version> {
        let owned = |text: Option<&str>| text.filter(|text| !text.is_empty()).map(ToOwned::to_owned);
        let mut version = Version {
            tag: owned(head.single("etag")?),
            modified: owned(head.single("last-modified")?),
        };
        if version.strong_tag().is_some() {
            version.modified = None;
        }
        Ok(version)
    }

    /// Return the tag if it identifies the bytes. Weak tags do not.
    fn strong_tag(&self) -> Option<&String> {
        self.tag.as_ref().filter(|tag| !tag.starts_with("W/"))
    }
}

impl Pin {
    pub(crate) fn new(head: &Head, nbytes: u64, url: &Url) -> Result<Pin> {
        Ok(Pin {
            nbytes,
            version: Version::of(head)?,
            origin: Some(url.origin()),
        })
    }

    /// Whether the server of `url` named the version. Other servers do not know it.
    pub(crate) fn is_from(&self, url: &Url) -> bool {
        self.origin.as_ref() == Some(&url.origin())
    }

    /// Return the header that makes a server refuse to send bytes of another version. `If-Match` may not contain a weak
    /// tag.
    pub(crate) fn condition(&self) -> Option<(String, String)> {
        if let Some(tag) = self.version.strong_tag() {
            return Some(("If-Match".to_owned(), tag.clone()));
        }
        let modified = self.version.modified.clone()?;
        Some(("If-Unmodified-Since".to_owned(), modified))
    }

    /// Check the version of an answer, since not every server supports those headers.
    pub(crate) fn check(&self, other: &Pin) -> Result<()> {
        let nbytes_now = (self.nbytes != other.nbytes).then_some(other.nbytes);
        if nbytes_now.is_some() || self.version != other.version {
            return Err(FaultKind::Changed(nbytes_now).into());
        }
        Ok(())
    }

    /// Return the version as lines of text, for [`Pin::of_lines`].
    pub(crate) fn to_lines(&self) -> String {
        let mut lines = String::new();
        add_line(&mut lines, "tag", self.version.tag.as_ref());
        add_line(&mut lines, "modified", self.version.modified.as_ref());
        lines
    }

    /// Parse a version from [`Pin::to_lines`], without its server. `None` if the lines have no version.
    pub(crate) fn of_lines(nbytes: u64, lines: &str) -> Option<Pin> {
        let value = |key| line(lines, key).map(ToOwned::to_owned);
        let version = Version {
            tag: value("tag"),
            modified: value("modified"),
        };
        (version != Version::default()).then_some(Pin {
            nbytes,
            version,
            origin: None,
        })
    }

    /// Return the version as [`Pin::version`] does if it is a strong tag, which identifies the bytes.
    pub(crate) fn strong_version(&self) -> Option<String> {
        self.version.strong_tag().map(|tag| format!("etag {tag}"))
    }

    /// Return a text that differs between all versions of the file at this URL, if the server distinguishes them.
    pub(crate) fn version(&self) -> Option<String> {
        let modified = self.version.modified.as_ref();
        self.strong_version()
            .or_else(|| Some(format!("modified {}", modified?)))
    }
}

/// Add the line that [`line`] finds, if there is a value.
pub(crate) fn add_line(lines: &mut String, key: &str, value: Option<&String>) {
    if let Some(value) = value {
        lines.extend([key, " ", value, "\n"]);
    }
}

/// Return the rest of the first line that begins with `key` and a space.
pub(crate) fn line<'l>(lines: &'l str, key: &str) -> Option<&'l str> {
    let value = |line: &'l str| line.strip_prefix(key)?.strip_prefix(' ');
    lines.lines().find_map(value)
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
    fn versions_survive_a_round_trip_as_lines() {
        for (tag, modified) in [
            (Some("\"tag of words\""), None),
            (Some("W/\"1\""), Some("Thu, 01 Jan 1970 00:00:00 GMT")),
            (None, Some("tag, or so")),
        ] {
            let pin = said(Version {
                tag: tag.map(ToOwned::to_owned),
                modified: modified.map(ToOwned::to_owned),
            });
            let again = Pin::of_lines(12, &pin.to_lines()).unwrap();
            assert!(pin.check(&again).is_ok(), "{pin:?} {again:?}");
            assert!(again.check(&pin).is_ok());
        }
    }

    #[test]
    fn lines_without_a_version_are_rejected() {
        assert!(Pin::of_lines(12, &said(Version::default()).to_lines()).is_none());
        assert!(Pin::of_lines(12, "written 1 2").is_none());
    }

    #[test]
    fn a_line_is_found_by_its_whole_key() {
        assert_eq!(line("committer x\ncommit 1\n", "commit"), Some("1"));
        assert_eq!(line("", "commit"), None);
    }
}
