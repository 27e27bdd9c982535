//! Saving into the file that exists. It can be left half written; the atomic way cannot.

use std::fs::File;
use std::io::{self, Seek};

use super::pieces::Pieces;
use super::space::{self, release};
use super::temp;
use super::write::{self, Route};
use crate::disk::{Directory, DirectoryEntry, Size, exists};
use crate::error::{Step, Stop, step};
use crate::options::{Durability, Existing, SaveOptions};
use crate::watch::Watch;

/// Writes into the file that `entry` names, or makes it.
pub(super) fn save(
    entry: &DirectoryEntry,
    pieces: &Pieces<'_>,
    options: &SaveOptions,
    watch: &dyn Watch,
) -> Result<(), Stop> {
    fill(entry, options, |file| {
        overwrite(file, Some(entry), pieces, options, watch)
    })
}

/// Opens the file that `entry` names, or makes it, and lets `write` fill it. One that was made goes again when that
/// fails.
fn fill(
    entry: &DirectoryEntry,
    options: &SaveOptions,
    write: impl FnOnce(&File) -> Result<(), Stop>,
) -> Result<(), Stop> {
    let (file, made) = entry.open().step(step::OPEN)?;
    if !made && options.existing() == Existing::Refuse {
        return Err(exists()).step(step::OPEN);
    }
    let done = write(&file);
    match done {
        Err(_) if made => entry.remove(),
        Ok(()) if made && options.durable == Durability::Durable => {
            entry.directory.flush(&file).step(step::FLUSH_DIRECTORY)?;
        }
        _ => {}
    }
    done
}

/// Makes `file` hold `pieces` and nothing else. `entry` is where it is, if it has a name.
pub(super) fn overwrite(
    file: &File,
    entry: Option<&DirectoryEntry>,
    pieces: &Pieces<'_>,
    options: &SaveOptions,
    watch: &dyn Watch,
) -> Result<(), Stop> {
    if file.metadata().step(step::OPEN)?.len() == 0 {
        // Nobody can have mapped anything of it.
        let done = space::reserve(file, pieces.nbytes(), Size::Set, watch)
            .and_then(|()| write::write(pieces, file, &Route::Cached(None), watch));
        if done.is_err() {
            let _ = file.set_len(0);
            return done;
        }
        return finish(file, options);
    }
    // The payloads may lie in a mapping of this very file, as they do when a loaded model is saved again. Nothing
    // tells, so all bytes go to another file first.
    let scratch = scratch(entry).step(step::CREATE)?;
    space::reserve(&scratch, pieces.nbytes(), Size::Set, watch)?;
    write::write(pieces, &scratch, &Route::Cached(None), watch)?;
    space::reserve(file, pieces.nbytes(), Size::Kept, watch)?;
    copy(&scratch, file, pieces.nbytes(), options)?;
    release(scratch);
    Ok(())
}

/// Copies `from`, which holds all of `pieces`, into the file that `entry` names: what remains where a file system
/// renames no file over another.
pub(super) fn copy_to(
    entry: &DirectoryEntry,
    from: &File,
    pieces: &Pieces<'_>,
    options: &SaveOptions,
) -> Result<(), Stop> {
    fill(entry, options, |file| copy(from, file, pieces.nbytes(), options))
}

/// From here on the old bytes are lost, so no watch is asked: a whole file late is better than half a file.
fn copy(mut from: &File, mut file: &File, nbytes: u64, options: &SaveOptions) -> Result<(), Stop> {
    from.rewind().step(step::COPY)?;
    if io::copy(&mut from, &mut file).step(step::COPY)? != nbytes {
        return Err(io::Error::from(io::ErrorKind::UnexpectedEof)).step(step::COPY);
    }
    // Cut at the end and not at the start, so that whoever has the file mapped meets wrong bytes, but no hole, which
    // would end the process. A shorter file does that all the same.
    file.set_len(nbytes).step(step::COPY)?;
    finish(file, options)
}

fn finish(file: &File, options: &SaveOptions) -> Result<(), Stop> {
    match options.durable {
        Durability::Durable => file.sync_all().step(step::FLUSH),
        Durability::Fast => Ok(()),
    }
}

/// A file without a name, beside the target or, where nothing may be made there, among the system's temporary ones.
fn scratch(entry: Option<&DirectoryEntry>) -> io::Result<File> {
    let name = entry.map_or("model".as_ref(), |entry| &*entry.name);
    if let Some(entry) = entry
        && let Ok(file) = temp::scratch(&entry.directory, name)
    {
        return Ok(file);
    }
    let directory = Directory::at(&std::env::temp_dir())?;
    temp::scratch(&directory, name)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::options::Replace;
    use crate::save::target::find;
    use crate::watch::Unwatched;

    #[test]
    fn what_came_to_be_meanwhile_stays_where_nothing_may_be_replaced() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("file");
        let entry = find(&path, &Unwatched).unwrap();
        let options = SaveOptions {
            replace: Replace::Nothing,
            ..SaveOptions::default()
        };
        let put = || {
            fill(&entry, &options, |mut file| {
                io::Write::write_all(&mut file, b"bytes").step(step::WRITE)
            })
        };
        assert!(put().is_ok());
        std::fs::write(&path, b"other").unwrap();
        let Err(Stop::Fault { step, source }) = put() else {
            panic!("it was replaced");
        };
        assert_eq!((step, source.kind()), (step::OPEN, io::ErrorKind::AlreadyExists));
        assert_eq!(std::fs::read(&path).unwrap(), b"other");
    }
}
