//! The hashes of whole files that people know, by the names that they know them by.

use std::ops::Range;
use std::path::Path;

use ingot_format::{Entry, Format, FormatError, Header, Layout, Limits, layout, to_u64, to_usize};

use super::pass::feed_all;
use crate::digest::{Algorithm, Digest, Digests};
use crate::error::{Error, Failure};
use crate::file::ReadAt;
use crate::file::{LocalFile, check_unchanged, read_header};
use crate::memory::Dest;
use crate::options::ReadOptions;
use crate::read::execute::{execute, reading};
use crate::read::gather::Destination;
use crate::read::plan::{Piece, Plan};
use crate::watch::Watch;

/// What a hash is taken of, and how it is written.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Definition {
    /// All bytes of the file, whatever it holds.
    File(Algorithm),
    /// `autov1`, A1111's old model hash: the first 8 digits of the SHA-256 of the 64 KiB that begin at 1 MiB.
    AutoV1,
    /// `autov2`, Civitai's: the first 10 digits of the SHA-256 of the file.
    AutoV2,
    /// `autov3`, Civitai's, and `addnet` and `sshs_model_hash` of the programs that train and load adapters: the SHA-256
    /// of the data section. It does not change with the metadata.
    AutoV3,
    /// `sshs_legacy`, of the same programs: [`Definition::AutoV1`] of the safetensors file that holds the same tensors
    /// and of the metadata only the keys that begin with `ss_`.
    SshsLegacy,
    /// `modelspec`: [`Definition::AutoV3`] after `0x`, as ModelSpec writes it.
    ModelSpec,
}

/// The bytes that A1111's old hash is taken of.
const AUTO_V1_BEGIN: u64 = 0x10_0000;
const AUTO_V1_NBYTES: usize = 0x1_0000;
const AUTO_V1_DIGITS: usize = 8;
const AUTO_V2_DIGITS: usize = 10;

impl Definition {
    /// Those that are not simply an algorithm over the file, with their names.
    const NAMED: [(&str, Definition); 5] = [
        ("autov1", Definition::AutoV1),
        ("autov2", Definition::AutoV2),
        ("autov3", Definition::AutoV3),
        ("sshs_legacy", Definition::SshsLegacy),
        ("modelspec", Definition::ModelSpec),
    ];

    /// All there are, with their names.
    pub fn all() -> impl Iterator<Item = (&'static str, Definition)> {
        Algorithm::ALL
            .into_iter()
            .map(|algorithm| (algorithm.name(), Definition::File(algorithm)))
            .chain(Definition::NAMED)
    }

    /// The definition of this name.
    #[must_use]
    pub fn from_name(name: &str) -> Option<Definition> {
        Definition::all().find(|pair| pair.0 == name).map(|pair| pair.1)
    }
}

/// The hash of the file at `path` by `definition`, in lowercase hexadecimal digits.
///
/// The file is read by position, never through a mapping, so that one that is shortened meanwhile is an error and not
/// the end of the process.
///
/// ```
/// use ingot_io::{Algorithm, Definition, Unwatched, hash};
/// let folder = tempfile::tempdir()?;
/// let path = folder.path().join("any.txt");
/// std::fs::write(&path, "abc")?;
/// let found = hash(&path, Definition::File(Algorithm::Blake3), &Unwatched)?;
/// assert_eq!(found, "6437b3ac38465133ffb63b75273a8db548c558465d79db03fd359c6cd5bd9d85");
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
///
/// # Errors
/// [`Error::Open`]; [`Error::Read`]; [`Error::Changed`] when the file was written to meanwhile; [`Error::Header`] when a
/// definition that asks for tensors finds none; [`Error::Interrupted`].
pub fn hash(path: &Path, definition: Definition, watch: &dyn Watch) -> Result<String, Error> {
    hash_source(&LocalFile::open(path)?, path, definition, watch)
}

/// Returns the hash of a source that is open. `path` is its name in errors.
///
/// # Errors
/// As [`hash`].
pub fn hash_source(
    source: &dyn ReadAt,
    path: &Path,
    definition: Definition,
    watch: &dyn Watch,
) -> Result<String, Error> {
    of_source(source, path, definition, &Limits::default(), watch)
}

/// As [`hash`], of a file that is open.
pub(crate) fn of_source(
    source: &dyn ReadAt,
    path: &Path,
    definition: Definition,
    limits: &Limits,
    watch: &dyn Watch,
) -> Result<String, Error> {
    let header = || read_header(source, Some(path), limits);
    let found = match definition {
        Definition::File(algorithm) => of_file(source, algorithm, path, watch)?.to_string(),
        Definition::AutoV1 => shortened(&auto_v1(source, path, watch)?, AUTO_V1_DIGITS),
        Definition::AutoV2 => shortened(&of_file(source, Algorithm::Sha256, path, watch)?, AUTO_V2_DIGITS),
        Definition::AutoV3 => of_data(source, &header()?, path, watch)?.to_string(),
        Definition::SshsLegacy => shortened(&sshs_legacy(source, &header()?, path, watch)?, AUTO_V1_DIGITS),
        Definition::ModelSpec => format!("0x{}", of_data(source, &header()?, path, watch)?),
    };
    check_unchanged(source, Some(path))?;
    Ok(found)
}

fn shortened(digest: &Digest, digits: usize) -> String {
    let mut text = digest.to_string();
    text.truncate(digits);
    text
}

fn of_file(
    source: &dyn ReadAt,
    algorithm: Algorithm,
    path: &Path,
    watch: &dyn Watch,
) -> Result<Digest, Error> {
    of_range(source, algorithm, 0..source.nbytes(), path, watch)
}

fn of_data(source: &dyn ReadAt, header: &Header, path: &Path, watch: &dyn Watch) -> Result<Digest, Error> {
    of_range(
        source,
        Algorithm::Sha256,
        header.data_start()..header.file_nbytes(),
        path,
        watch,
    )
}

fn of_range(
    source: &dyn ReadAt,
    algorithm: Algorithm,
    range: Range<u64>,
    path: &Path,
    watch: &dyn Watch,
) -> Result<Digest, Error> {
    let digests = Digests::new(algorithm, Some(range));
    feed_all(source, &digests, watch).map_err(|failure| explain(failure, source, path))?;
    // All of the range was fed.
    Ok(digests
        .finish()
        .pop()
        .flatten()
        .unwrap_or_else(|| Digest::zero(algorithm)))
}

/// Adds the path to what went wrong below.
fn explain(failure: Failure, source: &dyn ReadAt, path: &Path) -> Error {
    match check_unchanged(source, Some(path)) {
        // The likeliest reason for a short read, and the more useful thing to say.
        Err(changed @ Error::Changed { .. }) if matches!(failure, Failure::Read { .. }) => changed,
        _ => failure.about(Some(path), None),
    }
}

fn auto_v1(source: &dyn ReadAt, path: &Path, watch: &dyn Watch) -> Result<Digest, Error> {
    // Of a shorter file there is less, or nothing, to hash; A1111 does not mind.
    let [begin, end] =
        [AUTO_V1_BEGIN, AUTO_V1_BEGIN + to_u64(AUTO_V1_NBYTES)].map(|at| at.min(source.nbytes()));
    of_range(source, Algorithm::Sha256, begin..end, path, watch)
}

fn sshs_legacy(
    source: &dyn ReadAt,
    header: &Header,
    path: &Path,
    watch: &dyn Watch,
) -> Result<Digest, Error> {
    let new = laid_out_again(header).map_err(|fault| Error::Unstorable {
        path: Some(path.to_owned()),
        fault,
    })?;
    let entries: Vec<Entry<'_>> = header.entries().collect();
    let mut window = Vec::with_capacity(AUTO_V1_NBYTES);
    let head = new
        .head
        .get(to_usize(AUTO_V1_BEGIN).unwrap_or(usize::MAX)..)
        .unwrap_or_default();
    window.extend_from_slice(&head[..head.len().min(AUTO_V1_NBYTES)]);
    let begin_of_data = AUTO_V1_BEGIN.saturating_sub(new.header.data_start());
    let (begin, mut runs) = (window.len(), Vec::new());
    for (place, entry) in new.header.entries().enumerate() {
        let room = AUTO_V1_NBYTES - window.len();
        if room == 0 || entry.end <= begin_of_data {
            continue;
        }
        let skipped = begin_of_data.saturating_sub(entry.begin);
        let count = to_u64(room).min(entry.nbytes() - skipped);
        let position = header.data_start() + entries[new.order[place]].begin + skipped;
        runs.push(position..position + count);
        window.resize(window.len() + to_usize(count).unwrap_or(room), 0);
    }
    read_runs(source, runs, &mut window[begin..], watch).map_err(|failure| explain(failure, source, path))?;
    Ok(Algorithm::Sha256.digest(&window))
}

/// Fills `dest` with the bytes of these runs, one after the other.
fn read_runs(
    source: &dyn ReadAt,
    runs: Vec<Range<u64>>,
    dest: &mut [u8],
    watch: &dyn Watch,
) -> Result<(), Failure> {
    let pieces: Result<Vec<_>, _> = runs.into_iter().map(|run| Piece::run(0, run)).collect();
    let plan = Plan::into_each(pieces?);
    let mut rest = Dest::from(dest);
    let mut dests = Vec::with_capacity(plan.blocks().len());
    for &nbytes in plan.blocks() {
        let (first, after) = rest.split_at(nbytes);
        dests.push(Destination::Together(first));
        rest = after;
    }
    let reading = reading(&plan, &[source], &ReadOptions::default());
    execute(&plan, &[source], &[], dests, reading, watch).map_err(|fault| fault.failure)
}

/// The safetensors file that holds the tensors of `header`, and no metadata but what trainers wrote.
fn laid_out_again(header: &Header) -> Result<Layout, FormatError> {
    let pairs: Vec<(&str, &str)> = header
        .metadata()
        .into_iter()
        .flat_map(ingot_format::Metadata::iter)
        .filter(|pair| pair.0.starts_with("ss_"))
        .collect();
    layout(&header.specs(), Some(&pairs), Format::Safetensors)
}
