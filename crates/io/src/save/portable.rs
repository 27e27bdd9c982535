//! Saving with the standard library alone, where there is no Unix underneath.

use std::ffi::OsString;
use std::fs::{self, File, OpenOptions};
use std::hash::{BuildHasher, Hasher, RandomState};
use std::io::{self, Seek};
use std::path::{Path, PathBuf};

use super::flush::{flush, sync};
use super::pieces::Pieces;
use super::write::{self, Route};
use crate::error::{Step, Stop, step};
use crate::options::{Durability, ReadOnly, Replace, SaveOptions};
use crate::watch::Watch;

const SUFFIX: &str = ".ingot-tmp";

pub(super) fn save(
    path: &Path,
    pieces: &Pieces<'_>,
    options: &SaveOptions,
    watch: &dyn Watch,
) -> Result<(), Stop> {
    // The file that a link leads to is replaced, not the link.
    let path = &fs::canonicalize(path).unwrap_or_else(|_| path.to_path_buf());
    let existing = fs::metadata(path).ok();
    if existing.as_ref().is_some_and(fs::Metadata::is_dir) {
        return Err(io::Error::from(io::ErrorKind::IsADirectory)).step(step::OPEN);
    }
    if existing.is_some() && options.replace == Replace::Nothing {
        return Err(io::Error::from(io::ErrorKind::AlreadyExists)).step(step::OPEN);
    }
    if options.replace == Replace::InPlace {
        return in_place(path, pieces, options, watch);
    }
    let read_only = existing.filter(|metadata| metadata.permissions().readonly());
    if read_only.is_some() && options.read_only == ReadOnly::Refuse {
        return Err(io::Error::from(io::ErrorKind::PermissionDenied)).step(step::READ_ONLY);
    }
    remove_stale(path);
    let temp = NamedTemp::create(path).step(step::CREATE)?;
    let file = OpenOptions::new().write(true).open(&temp.0).step(step::CREATE)?;
    write::write(pieces, &file, &Route::Cached(None), watch)?;
    if options.durable == Durability::Durable {
        flush(&file, watch)?;
    }
    // An open file cannot be renamed.
    drop(file);
    if let Some(metadata) = read_only {
        let mut permissions = metadata.permissions();
        fs::set_permissions(&temp.0, permissions.clone()).step(step::ATTRIBUTES)?;
        #[expect(
            clippy::permissions_set_readonly_false,
            reason = "this platform has no other permissions"
        )]
        permissions.set_readonly(false);
        fs::set_permissions(path, permissions).step(step::ATTRIBUTES)?;
    }
    if options.replace == Replace::Nothing {
        // Unlike a rename, a link replaces nothing that was made in the meantime.
        match fs::hard_link(&temp.0, path) {
            Ok(()) => return Ok(()),
            Err(fault) if fault.kind() == io::ErrorKind::AlreadyExists => {
                return Err(fault).step(step::RENAME);
            }
            // The file system has none.
            Err(_) => {}
        }
    }
    fs::rename(&temp.0, path).step(step::RENAME)
}

fn in_place(path: &Path, pieces: &Pieces<'_>, options: &SaveOptions, watch: &dyn Watch) -> Result<(), Stop> {
    let file = OpenOptions::new()
        .write(true)
        .create(true)
        .truncate(false)
        .open(path)
        .step(step::OPEN)?;
    if file.metadata().step(step::OPEN)?.len() == 0 {
        write::write(pieces, &file, &Route::Cached(None), watch)?;
    } else {
        // The payloads may lie in a mapping of this very file.
        let temp = NamedTemp::create(&std::env::temp_dir().join("model")).step(step::CREATE)?;
        let mut scratch = OpenOptions::new()
            .read(true)
            .write(true)
            .open(&temp.0)
            .step(step::CREATE)?;
        write::write(pieces, &scratch, &Route::Cached(None), watch)?;
        scratch.rewind().step(step::COPY)?;
        if io::copy(&mut scratch, &mut &file).step(step::COPY)? != pieces.nbytes() {
            return Err(io::Error::from(io::ErrorKind::UnexpectedEof)).step(step::COPY);
        }
        file.set_len(pieces.nbytes()).step(step::COPY)?;
    }
    match options.durable {
        Durability::Durable => sync(&file).step(step::FLUSH),
        Durability::Fast => Ok(()),
    }
}

/// The path of a file that is removed again, unless it was renamed.
struct NamedTemp(PathBuf);

impl NamedTemp {
    fn create(target: &Path) -> io::Result<NamedTemp> {
        let random = RandomState::new().build_hasher().finish();
        let mut name = prefix(target);
        name.push(format!("{random:016x}{SUFFIX}"));
        let path = target.with_file_name(name);
        File::create_new(&path)?;
        Ok(NamedTemp(path))
    }
}

impl Drop for NamedTemp {
    fn drop(&mut self) {
        let _ = fs::remove_file(&self.0);
    }
}

fn prefix(target: &Path) -> OsString {
    let mut name = OsString::from(".");
    name.push(target.file_name().unwrap_or_default());
    name.push(".");
    name
}

/// Removes temporary files that a process left behind. One that another process has open cannot be removed.
fn remove_stale(target: &Path) {
    let prefix = prefix(target);
    let Some(entries) = target.parent().and_then(|parent| fs::read_dir(parent).ok()) else {
        return;
    };
    for entry in entries.flatten() {
        let name = entry.file_name();
        let name = name.to_string_lossy();
        if name.starts_with(&*prefix.to_string_lossy()) && name.ends_with(SUFFIX) {
            let _ = fs::remove_file(entry.path());
        }
    }
}
