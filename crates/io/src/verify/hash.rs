//! Digests of the bytes of a file.

use std::ops::Range;
use std::path::Path;

use super::pass::feed_all;
use crate::digest::{Algorithm, Digest, Digests};
use crate::error::{Error, Failure};
use crate::file::{LocalFile, ReadAt, check_unchanged};
use crate::memory::Dest;
use crate::options::ReadOptions;
use crate::read::buffer::Destination;
use crate::read::plan::{Piece, Plan};
use crate::read::run::{execute, reading};
use crate::watch::Watch;

/// Return the digest of the file at `path`, which may have any contents.
///
/// The file is read by position, never through a mapping, so that truncating it during the call is an error and does
/// not end the process.
///
/// ```
/// use ingot_io::{Algorithm, Unwatched, hash};
/// let folder = tempfile::tempdir()?;
/// let path = folder.path().join("any.txt");
/// std::fs::write(&path, "abc")?;
/// let found = hash(&path, Algorithm::Blake3, &Unwatched)?;
/// assert_eq!(found.to_string(), "6437b3ac38465133ffb63b75273a8db548c558465d79db03fd359c6cd5bd9d85");
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
///
/// # Errors
/// [`Failure::Open`]; [`Failure::Read`]; [`Failure::Changed`] if the file was written meanwhile; [`Failure::Interrupted`].
pub fn hash(path: &Path, algorithm: Algorithm, watch: &dyn Watch) -> Result<Digest, Error> {
    let source = LocalFile::open(path)?;
    hash_range(&source, 0..source.nbytes(), algorithm, path, watch)
}

/// Return the digest of a range of an open source. `path` is its name in errors.
///
/// # Errors
/// As [`hash`].
pub fn hash_range(
    source: &dyn ReadAt,
    range: Range<u64>,
    algorithm: Algorithm,
    path: &Path,
    watch: &dyn Watch,
) -> Result<Digest, Error> {
    let digests = Digests::new(algorithm, Some(range));
    feed_all(source, &digests, watch).map_err(|failure| explain(failure, source, path))?;
    check_unchanged(source, Some(path))?;
    // The whole range was fed.
    let digest = digests.finish().pop().flatten();
    Ok(digest.unwrap_or_else(|| Digest::zero(algorithm)))
}

/// Fill `dest` with the bytes of these runs, one after the other.
///
/// # Errors
/// As [`hash`].
pub fn read_runs(
    source: &dyn ReadAt,
    runs: Vec<Range<u64>>,
    dest: &mut [u8],
    path: &Path,
    watch: &dyn Watch,
) -> Result<(), Error> {
    let run = || {
        let pieces: Result<Vec<_>, _> = runs.into_iter().map(|run| Piece::run(0, run)).collect();
        let plan = Plan::into_each(pieces?);
        let mut rest = Dest::from(dest);
        let mut dests = Vec::with_capacity(plan.blocks().len());
        for block in plan.blocks() {
            let (first, after) = rest.split_at(block.nbytes);
            dests.push(Destination::Host(first));
            rest = after;
        }
        let reading = reading(&plan, &[source], &ReadOptions::default());
        execute(&plan, &[source], &[], dests, reading, watch).map_err(|fault| fault.failure)
    };
    run().map_err(|failure| explain(failure, source, path))?;
    check_unchanged(source, Some(path))
}

/// Add the path to a failure.
fn explain(failure: Failure, source: &dyn ReadAt, path: &Path) -> Error {
    match check_unchanged(source, Some(path)) {
        // The likeliest reason for a short read, and the more useful error.
        Err(changed) if changed.is_changed() && matches!(failure, Failure::Read { .. }) => changed,
        _ => failure.about(Some(path), None),
    }
}
