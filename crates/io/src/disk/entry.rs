//! The destination of a path, after following its symbolic links.

use std::ffi::{OsStr, OsString};
use std::fs::File;
use std::io;
use std::mem;
use std::path::Path;

use super::{Attributes, Birth, Directory, Facts, Kind, Opening, exists, in_use, is_a_directory, resolve};
use crate::error::{EditError, Error, Failure, Step, step};
use crate::options::SaveOptions;
use crate::watch::{Unwatched, Watch};

/// The result of resolving a path.
#[allow(dead_code, reason = "not every system has files without a name")]
pub(crate) enum Resolved {
    /// A name in a directory, for a regular file that exists or will be created.
    Entry(DirectoryEntry),
    /// A regular file without a name in a directory, such as the target of a link in /proc.
    Nameless(File),
    /// A file that is written sequentially: a pipe, a terminal or another device.
    Stream(File),
}

/// A name in a directory, for a regular file. The directory is held open, so it stays the same one if it is renamed or
/// if the program changes its working directory.
pub(crate) struct DirectoryEntry {
    pub(crate) directory: Directory,
    pub(crate) name: OsString,
    /// `None` if no file has the name.
    pub(crate) existing: Option<Facts>,
    /// The blob to which the name is a link, if there is one. A save replaces the link.
    pub(crate) blob: Option<Blob>,
}

/// A file of a content-addressed store, such as the cache of the Hugging Face Hub: snapshots link to it, and its name is
/// the digest of its contents. Saves never write to it.
pub(crate) struct Blob {
    /// The directory and the name of the blob. While a path is resolved, those of the link to it.
    pub(super) directory: Directory,
    pub(super) name: OsString,
    /// The name in the store, which is a digest. It may be a link to the blob.
    pub(super) digest: OsString,
}

/// A content-addressed store has one of these directories beside its blobs.
pub(crate) const BESIDE_BLOBS: [&str; 2] = ["snapshots", "refs"];
/// The directory of the blobs.
pub(crate) const BLOBS: &str = "blobs";

/// Whether `name` is a SHA-1 or a SHA-256, as the names of blobs are.
pub(crate) fn is_digest(name: &OsStr) -> bool {
    let name = name.as_encoded_bytes();
    matches!(name.len(), 40 | 64) && name.iter().all(u8::is_ascii_hexdigit)
}

/// The resolution of a path, one symbolic link after the other, because a new file is created in the last directory on
/// the way. A link to a blob is not followed: the new file replaces the link.
#[derive(Default)]
pub(super) struct Walk {
    /// The last link.
    pub(super) link: Option<(Directory, OsString)>,
    /// The blob to which a link on the way leads.
    blob: Option<Blob>,
}

/// The entry that a step of the resolution finds.
pub(super) enum Entered<'w> {
    End(DirectoryEntry),
    Link(&'w (Directory, OsString)),
}

impl Walk {
    /// Go to `name` in `directory`. `is_blob` means that the name is a digest and the directory contains the blobs of a
    /// store.
    pub(super) fn enter(
        &mut self,
        directory: Directory,
        name: &OsStr,
        is_blob: bool,
    ) -> Result<Entered<'_>, Error> {
        let (name, existing) = (name.to_owned(), directory.facts(name).step(step::OPEN)?);
        if is_blob && self.blob.is_none() {
            if self.link.is_none() && existing.is_some() {
                return Err(Failure::Edit(EditError::Blob).into());
            }
            self.blob = self.link.take().map(|(directory, link)| Blob {
                directory,
                name: link,
                digest: name.clone(),
            });
        }
        match existing.map(|facts| facts.kind) {
            None | Some(Kind::File) => Ok(Entered::End(self.entry(directory, name, existing))),
            Some(Kind::Link) => Ok(Entered::Link(self.link.insert((directory, name)))),
            Some(Kind::Directory) => Err(is_a_directory()).step(step::OPEN),
            // It was a regular file, or absent, a moment ago.
            Some(Kind::Other) => Err(in_use()).step(step::OPEN),
        }
    }

    /// Return the entry `name`. If it is a blob, return the link to it, which a save replaces.
    fn entry(
        &mut self,
        mut directory: Directory,
        mut name: OsString,
        existing: Option<Facts>,
    ) -> DirectoryEntry {
        if let Some(blob) = &mut self.blob {
            mem::swap(&mut blob.directory, &mut directory);
            mem::swap(&mut blob.name, &mut name);
        }
        DirectoryEntry {
            directory,
            name,
            existing,
            blob: self.blob.take(),
        }
    }
}

impl DirectoryEntry {
    /// Return the directory and the name of the existing file.
    fn current(&self) -> (&Directory, &OsStr) {
        match &self.blob {
            Some(blob) => (&blob.directory, &blob.name),
            None => (&self.directory, &self.name),
        }
    }

    /// Return the attributes of the existing file.
    fn attributes(&self) -> io::Result<Option<Attributes>> {
        let (directory, name) = self.current();
        let of = |facts| Attributes::of(directory, name, facts);
        self.existing.as_ref().map(of).transpose()
    }

    /// Return whether the existing file has other names too, so that an edit must create a new file.
    fn is_shared(&self) -> bool {
        self.blob.is_some() || self.existing.is_some_and(|facts| facts.names > 1)
    }

    /// Check that the existing file, if there is one, may be replaced. A rename succeeds even if the file is read-only,
    /// so this has to be checked explicitly.
    pub(crate) fn check(&self, options: &SaveOptions) -> Result<(), Error> {
        if self.existing.is_none() {
            return Ok(());
        }
        if options.keeps_existing() {
            return Err(exists()).step(step::OPEN);
        }
        if options.replace_read_only {
            return Ok(());
        }
        let (directory, name) = self.current();
        directory.check_writable(name).step(step::READ_ONLY)
    }

    /// Open the file for writing in place, or create it. Return whether it was created.
    pub(crate) fn open(&self) -> io::Result<(File, bool)> {
        let open = |opening| self.directory.file(&self.name, opening);
        loop {
            match open(Opening::Write) {
                Ok(file) => return Ok((file, false)),
                Err(fault) if fault.kind() == io::ErrorKind::NotFound => {}
                Err(fault) => return Err(fault),
            }
            match open(Opening::New(Birth::Usual)) {
                Ok(file) => return Ok((file, true)),
                Err(fault) if fault.kind() == io::ErrorKind::AlreadyExists => {}
                Err(fault) => return Err(fault),
            }
        }
    }

    /// Remove a file that was created and could not be filled.
    pub(crate) fn remove(&self) {
        let _ = self.directory.remove(&self.name);
    }

    /// Return the attributes for the new file, and the permissions that it has until they are set.
    pub(crate) fn inherited(&self) -> io::Result<(Option<Attributes>, Birth)> {
        let mut attributes = self.attributes()?;
        if attributes.is_none()
            && let Some(name) = final_name(&self.name)
            && let Ok(Resolved::Entry(replaced)) = resolve(&self.directory.path(name), &Unwatched)
        {
            attributes = replaced.attributes()?;
        }
        let birth = match attributes {
            Some(_) => Birth::Private,
            None => Birth::Usual,
        };
        Ok((attributes, birth))
    }
}

/// Return the final name of a temporary file of a checkpoint, whose name is `.ingot-01234567.{name}` until all files of
/// the checkpoint are complete. `None` for any other name.
fn final_name(name: &OsStr) -> Option<&OsStr> {
    let rest = name.to_str()?.strip_prefix(".ingot-")?;
    let (digits, name) = rest.split_at_checked(8)?;
    let is_hidden = digits.bytes().all(|byte| byte.is_ascii_hexdigit());
    is_hidden
        .then(|| name.strip_prefix('.').map(OsStr::new))
        .flatten()
}

/// Return whether the file at `path` has other names too. `named` describes the regular file or the link at `path`.
pub(crate) fn is_shared(path: &Path, named: &Facts, watch: &dyn Watch) -> Result<bool, Error> {
    // Only links, and files whose names are digests, can be blobs. Resolving a path takes four system calls.
    let may_be_blob = named.kind == Kind::Link || path.file_name().is_some_and(is_digest);
    if !may_be_blob {
        return Ok(named.names > 1);
    }
    let resolved = resolve(path, watch)?;
    Ok(matches!(resolved, Resolved::Entry(entry) if entry.is_shared()))
}

/// Return the digest in the name of the file at `path`, a SHA-256 or Git's SHA-1, if the file is a blob of a
/// content-addressed store, such as the cache of the Hugging Face Hub.
#[must_use]
pub fn blob_digest(path: &Path) -> Option<String> {
    let digest = match resolve(path, &Unwatched) {
        Ok(Resolved::Entry(entry)) => entry.blob?.digest,
        Err(fault) if fault.code() == "blob" => path.file_name()?.to_owned(),
        _ => return None,
    };
    digest.into_string().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_hidden_names_have_a_final_name() {
        let of = |name: &str| {
            final_name(OsStr::new(name))
                .and_then(OsStr::to_str)
                .map(ToOwned::to_owned)
        };
        assert_eq!(
            of(".ingot-0123abcd.model.safetensors").as_deref(),
            Some("model.safetensors")
        );
        for other in [
            "model",
            ".ingot-0123abc.m",
            ".ingot-0123abcg.m",
            ".ingot-0123abcdm",
            ".ingot-ä",
        ] {
            assert_eq!(of(other), None, "{other}");
        }
    }
}
