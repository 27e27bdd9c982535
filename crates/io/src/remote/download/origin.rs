//! Where the bytes of a file that is fetched come from.

use std::fs;
use std::path::{Path, PathBuf};
use std::time::UNIX_EPOCH;

use super::compare;
use crate::archive::open_source;
use crate::digest::Digest;
use crate::error::Error;
use crate::remote::journal::Journal;
use crate::remote::options::RemoteOptions;
use crate::remote::source::RemoteSource;
use crate::source::Source;

/// A file, of one version.
pub(super) struct Origin {
    pub(super) source: Box<dyn Source>,
    /// What the caller knows it by.
    pub(super) shown: PathBuf,
    /// What no other version of it is called; `None` where nothing tells versions apart.
    pub(super) version: Option<String>,
    /// The SHA-256 that it has to have.
    pub(super) sha256: Option<Digest>,
    /// Whether it comes over a network.
    pub(super) is_remote: bool,
    /// How often it is begun anew where it breaks off: where it is given whole or not at all.
    pub(super) retries: u32,
    is_whole: bool,
}

impl Origin {
    pub(super) fn remote(
        source: RemoteSource,
        backend: &str,
        shown: PathBuf,
        options: &RemoteOptions,
    ) -> Origin {
        let sha256 = linked(&source, backend);
        let is_whole = source.is_whole();
        Origin {
            shown,
            // The Hub gives the same bytes under many addresses: one for each commit.
            version: sha256
                .map(|digest| format!("sha256 {digest}"))
                .or_else(|| source.version()),
            sha256,
            is_remote: true,
            retries: if is_whole { options.retries } else { 0 },
            is_whole,
            source: Box::new(source),
        }
    }

    /// A file of the Hub's cache.
    pub(super) fn cached(path: &Path) -> Result<Origin, Error> {
        Ok(Origin {
            source: Box::new(open_source(path)?),
            shown: path.to_owned(),
            version: version(path),
            sha256: None,
            is_remote: false,
            retries: 0,
            is_whole: false,
        })
    }

    /// The same, which the caller expects to have this SHA-256. All who know it must say the same.
    pub(super) fn expecting(self, sha256: Option<Digest>) -> Result<Origin, Error> {
        if let (Some(expected), Some(found)) = (sha256, self.sha256) {
            compare(&self.shown, expected, found)?;
        }
        Ok(Origin {
            sha256: sha256.or(self.sha256),
            ..self
        })
    }

    pub(super) fn journal(&self) -> Journal {
        let version = self.version.as_deref().unwrap_or_default();
        match self.is_whole {
            true => Journal::of_one_part(self.source.nbytes(), version),
            false => Journal::new(self.source.nbytes(), version),
        }
    }
}

/// The SHA-256 that the Hub says a file has. Only the Hub means that by the header.
pub(super) fn linked(source: &RemoteSource, backend: &str) -> Option<Digest> {
    (backend == "hf").then(|| source.sha256()).flatten()
}

/// The name of the file's bytes in the cache, and when they were written.
fn version(path: &Path) -> Option<String> {
    let path = fs::canonicalize(path).ok()?;
    let modified = fs::metadata(&path).ok()?.modified().ok()?;
    let modified = modified.duration_since(UNIX_EPOCH).ok()?.as_nanos();
    Some(format!("cache {}\n{modified}", path.display()))
}
