//! Saving so that the path always has the whole old file, or the whole new one.

use std::fs::File;
use std::io;

use super::direct::DirectWriter;
use super::flush::{Flusher, flush};
use super::in_place;
use super::pieces::Pieces;
use super::space;
use super::temp::{self, Refused, Temp, TempKind};
use super::write::{self, Route};
use crate::disk::{DirectoryEntry, Size};
use crate::error::{Step, Stop, step};
use crate::options::{Durability, SaveOptions};
use crate::payload::{FileRange, Payload};
use crate::watch::{Asked, Watch};

/// From this size on, a flush at the end alone takes long. Smaller files are there before a thread is.
const LONG_FLUSH: u64 = 32 << 20;

pub(super) fn save(
    entry: &DirectoryEntry,
    pieces: &Pieces<'_>,
    options: &SaveOptions,
    watch: &dyn Watch,
) -> Result<(), Stop> {
    entry.check(options)?;
    temp::remove_stale(entry);
    let mut temp = fill(entry, pieces, TempKind::Unnamed, options, watch)?;
    match publish(entry, &mut temp, pieces, options, watch) {
        Err(Unpublished::Nameless) => {
            let mut named = copy_of(&temp, entry, pieces.nbytes(), options, watch)?;
            publish(entry, &mut named, pieces, options, watch)
        }
        outcome => outcome,
    }
    .map_err(|unpublished| match unpublished {
        Unpublished::Stop(stop) => stop,
        // One that has a name already is linked to no other.
        Unpublished::Nameless => Stop::of(step::RENAME, io::ErrorKind::Unsupported.into()),
    })
}

/// Why a file that is written has not got its name.
enum Unpublished {
    /// The system gives none to a file that was made without one.
    Nameless,
    Stop(Stop),
}

/// Gives `temp`, which has all of `pieces`, the name of the target.
fn publish(
    entry: &DirectoryEntry,
    temp: &mut Temp<'_>,
    pieces: &Pieces<'_>,
    options: &SaveOptions,
    watch: &dyn Watch,
) -> Result<(), Unpublished> {
    if watch.interrupted() {
        return Err(Unpublished::Stop(Stop::Interrupted));
    }
    match temp.publish(options.existing()) {
        Ok(()) => match options.durable {
            Durability::Durable => entry.directory.flush(temp.file()).step(step::FLUSH_DIRECTORY),
            Durability::Fast => Ok(()),
        },
        Err(Refused::Fault(fault)) => Err(fault).step(step::RENAME),
        Err(Refused::Link) => return Err(Unpublished::Nameless),
        Err(Refused::Rename) => in_place::copy_to(entry, temp.file(), pieces, options),
    }
    .map_err(Unpublished::Stop)
}

/// A file with a name that has the `nbytes` bytes of `temp`. Not those of the payloads, which their owner may change once the
/// watch has been told that all are written.
fn copy_of<'p>(
    temp: &Temp<'_>,
    entry: &'p DirectoryEntry,
    nbytes: u64,
    options: &SaveOptions,
    watch: &dyn Watch,
) -> Result<Temp<'p>, Stop> {
    let all = [Payload::File(FileRange::new(temp.file(), 0, nbytes))];
    let pieces = Pieces::of_data(&[], nbytes, &all)
        .map_err(io::Error::other)
        .step(step::WRITE)?;
    fill(entry, &pieces, TempKind::Named, options, &Asked(watch))
}

/// A temporary file with all that the target is to have, but the name.
fn fill<'p>(
    entry: &'p DirectoryEntry,
    pieces: &Pieces<'_>,
    kind: TempKind,
    options: &SaveOptions,
    watch: &dyn Watch,
) -> Result<Temp<'p>, Stop> {
    let (attributes, birth) = entry.inherited().step(step::ATTRIBUTES)?;
    let temp = Temp::create(entry, birth, kind).step(step::CREATE)?;
    if let Some(attributes) = &attributes {
        attributes.begin(temp.file()).step(step::ATTRIBUTES)?;
    }
    let shared = pieces.share_blocks() && crate::payload::shares_blocks(temp.file());
    let size = if shared { Size::Sparse } else { Size::Set };
    space::reserve(temp.file(), pieces.nbytes(), size, watch)?;
    let route = match shared {
        true => Route::Shared,
        false => route(temp.file(), pieces, options),
    };
    write::write(pieces, temp.file(), &route, watch)?;
    if let Some(attributes) = attributes {
        attributes.apply(temp.file()).step(step::ATTRIBUTES)?;
    }
    match route {
        Route::Cached(Some(flusher)) => flusher.finish(temp.file(), watch)?,
        _ if options.durable == Durability::Durable || close_would_flush(temp.file()) => {
            flush(temp.file(), watch)?;
        }
        _ => {}
    }
    Ok(temp)
}

/// What must reach the disk before the save is over goes there at once: past the page cache where that is possible, or
/// else by flushes while the rest is written.
fn route(file: &File, pieces: &Pieces<'_>, options: &SaveOptions) -> Route {
    match options.durable {
        Durability::Fast => Route::Cached(None),
        Durability::Durable => match DirectWriter::open(file, pieces.nbytes()) {
            Some(direct) => Route::Direct(direct),
            None if pieces.nbytes() >= LONG_FLUSH => Route::Cached(Flusher::start(file)),
            None => Route::Cached(None),
        },
    }
}

/// Whether closing the file sends its bytes away, as network file systems do so that the next reader sees them.
/// What goes wrong then, Rust does not report; a flush costs nothing more and does.
fn close_would_flush(file: &File) -> bool {
    const NFS: u32 = 0x6969;
    const SMB: u32 = 0x517B;
    const CIFS: u32 = 0xFF53_4D42;
    const SMB2: u32 = 0xFE53_4D42;
    crate::disk::file_system(file).is_some_and(|number| [NFS, SMB, CIFS, SMB2].contains(&number))
}
