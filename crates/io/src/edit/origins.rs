//! Files, or checkpoints of many, whose tensors go into others.

use std::fs::File;
use std::path::{Path, PathBuf};

use ingot_format::{Header, Limits, ShardIndex};

use crate::archive::{Archive, open_file, read_header};
#[cfg(feature = "remote")]
use crate::checkpoint::Checkpoint;
use crate::checkpoint::open_files;
use crate::error::{EditError, Error};
use crate::payload::{FileRange, Payload, Section};
use crate::source::{FileSource, Source};

/// An open file that tensors are taken from, byte by byte: none is decoded, and none comes to lie in memory as a whole.
#[derive(Debug)]
pub struct Origin {
    path: PathBuf,
    bytes: Bytes,
}

#[derive(Debug)]
enum Bytes {
    File {
        source: FileSource,
        header: Header,
    },
    /// Of a file behind a URL.
    #[cfg_attr(not(feature = "remote"), expect(dead_code, reason = "all are files then"))]
    Archive(Archive),
}

impl Origin {
    /// Opens a file and proves its header.
    ///
    /// # Errors
    /// As [`Archive::open`](crate::Archive::open).
    pub fn open(path: &Path) -> Result<Origin, Error> {
        let file = open_file(path).map_err(|source| Error::Open {
            path: path.to_owned(),
            source,
        })?;
        Origin::of_file(file, path.to_owned())
    }

    /// As [`Origin::open`], for a file that is open. `path` is for the errors.
    pub(crate) fn of_file(file: File, path: PathBuf) -> Result<Origin, Error> {
        let source = FileSource::new(file).map_err(|source| Error::Open {
            path: path.clone(),
            source,
        })?;
        let header = read_header(&source, Some(&path), &Limits::default())?;
        Ok(Origin {
            path,
            bytes: Bytes::File { source, header },
        })
    }

    /// What is behind a URL.
    #[cfg(feature = "remote")]
    pub(crate) fn of_archive(archive: Archive) -> Origin {
        Origin {
            path: archive.path().map(ToOwned::to_owned).unwrap_or_default(),
            bytes: Bytes::Archive(archive),
        }
    }

    /// Where it is.
    #[must_use]
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// What it holds.
    #[must_use]
    pub fn header(&self) -> &Header {
        match &self.bytes {
            Bytes::File { header, .. } => header,
            Bytes::Archive(archive) => archive.header(),
        }
    }

    /// Bytes of the data section.
    pub(crate) fn range(&self, begin: u64, end: u64) -> Payload<'_> {
        match &self.bytes {
            Bytes::File { source, header } => {
                let begin_of_data = header.data_start();
                Payload::File(FileRange::new(source.file(), begin_of_data + begin, end - begin))
            }
            Bytes::Archive(archive) => Payload::Section(Section::new(archive, begin, end)),
        }
    }

    /// Fails when somebody wrote to the file since it was opened.
    pub(crate) fn check(&self) -> Result<(), Error> {
        // Of what is behind a URL, whoever reads it asks for the version that was opened.
        let Bytes::File { source, .. } = &self.bytes else {
            return Ok(());
        };
        match source.nbytes_now() {
            Ok(Some(now)) if now == source.nbytes() => Ok(()),
            _ => Err(Error::Edit {
                path: self.path.clone(),
                fault: EditError::Overtaken,
            }),
        }
    }
}

/// All files of a checkpoint, open so that tensors can be taken from them byte by byte.
#[derive(Debug)]
pub struct Origins {
    path: PathBuf,
    files: Vec<Origin>,
    index: Option<ShardIndex>,
}

impl Origins {
    /// Opens a file, the shards of an index, or whatever of these a directory holds.
    ///
    /// # Errors
    /// As [`Checkpoint::open`](crate::Checkpoint::open).
    pub fn open(path: &Path) -> Result<Origins, Error> {
        let (path, files, index) = open_files(path, Origin::of_file, Origin::header)?;
        Ok(Origins { path, files, index })
    }

    /// Opens what is behind a URL.
    ///
    /// # Errors
    /// As [`Checkpoint::open_url`](crate::Checkpoint::open_url).
    #[cfg(feature = "remote")]
    pub fn open_url(
        url: &str,
        options: &crate::RemoteOptions,
        watch: &dyn crate::Watch,
    ) -> Result<Origins, Error> {
        let checkpoint = Checkpoint::open_url(url, options, &crate::remote::header_limits(), watch)?;
        let path = checkpoint.path().map(Path::to_owned).unwrap_or_default();
        let (archives, index) = checkpoint.into_files(watch)?;
        let files = archives.into_iter().map(Origin::of_archive).collect();
        Ok(Origins { path, files, index })
    }

    /// The only file, or the index.
    #[must_use]
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// The files, in the order of their names.
    #[must_use]
    pub fn files(&self) -> &[Origin] {
        &self.files
    }

    /// The index, where there is one.
    #[must_use]
    pub fn index(&self) -> Option<&ShardIndex> {
        self.index.as_ref()
    }
}
