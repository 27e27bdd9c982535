//! Hashes of whole files as other tools define them, under the tools' names.

use std::ops::Range;
use std::path::Path;

use ingot_format::{
    Entry, Format, FormatError, Header, Layout, Limits, layout, saturating_usize, to_u64, to_usize,
};
use ingot_io::binding::{LocalFile, ReadAt, hash_range, read_header, read_runs};
use ingot_io::{Algorithm, Digest, Error, Failure, Watch};
#[cfg(feature = "remote")]
use ingot_io::{RemoteOptions, binding::url_source};

/// The bytes that are hashed, and the form of the hash.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Definition {
    /// All bytes of the file, which may have any format.
    File(Algorithm),
    /// `autov1`, A1111's old model hash: the first 8 digits of the SHA-256 of the 64 KiB that begin at 1 MiB.
    AutoV1,
    /// `autov2` of Civitai: the first 10 digits of the SHA-256 of the file.
    AutoV2,
    /// `autov3` of Civitai, and `addnet` and `sshs_model_hash` of programs that train and load adapters: the SHA-256 of
    /// the data section. It does not change with the metadata.
    AutoV3,
    /// `sshs_legacy` of the same programs: [`Definition::AutoV1`] of a safetensors file with the same tensors and only
    /// the metadata keys that begin with `ss_`.
    SshsLegacy,
    /// `modelspec`: `0x` and [`Definition::AutoV3`], as in ModelSpec.
    ModelSpec,
}

/// The range of bytes of A1111's old hash.
const AUTO_V1_BEGIN: u64 = 0x10_0000;
const AUTO_V1_NBYTES: usize = 0x1_0000;
const AUTO_V1_DIGITS: usize = 8;
const AUTO_V2_DIGITS: usize = 10;

impl Definition {
    /// The definitions other than an algorithm over the whole file, with their names.
    const NAMED: [(&str, Definition); 5] = [
        ("autov1", Definition::AutoV1),
        ("autov2", Definition::AutoV2),
        ("autov3", Definition::AutoV3),
        ("sshs_legacy", Definition::SshsLegacy),
        ("modelspec", Definition::ModelSpec),
    ];

    /// Returns all definitions, with their names.
    pub fn all() -> impl Iterator<Item = (&'static str, Definition)> {
        Algorithm::ALL
            .into_iter()
            .map(|algorithm| (algorithm.name(), Definition::File(algorithm)))
            .chain(Definition::NAMED)
    }

    /// Returns whether the hash depends on the positions of the tensors.
    #[cfg(feature = "remote")]
    fn needs_header(self) -> bool {
        matches!(
            self,
            Definition::AutoV3 | Definition::SshsLegacy | Definition::ModelSpec
        )
    }

    /// Returns the definition with this name.
    #[must_use]
    pub fn from_name(name: &str) -> Option<Definition> {
        Definition::all().find(|pair| pair.0 == name).map(|pair| pair.1)
    }
}

/// Returns the hash of the file at `path` by `definition`, in lowercase hexadecimal digits.
///
/// The file is read by position, never through a mapping, so that truncating it during the call is an error and does
/// not end the process.
///
/// ```
/// use ingot_inspect::{Definition, hash};
/// use ingot_io::{Algorithm, Unwatched};
/// let folder = tempfile::tempdir()?;
/// let path = folder.path().join("any.txt");
/// std::fs::write(&path, "abc")?;
/// let found = hash(&path, Definition::File(Algorithm::Blake3), &Unwatched)?;
/// assert_eq!(found, "6437b3ac38465133ffb63b75273a8db548c558465d79db03fd359c6cd5bd9d85");
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
///
/// # Errors
/// [`Failure::Open`]; [`Failure::Read`]; [`Failure::Changed`] if the file was written to during the call; [`Failure::Header`]
/// if a definition needs tensors and the file has none; [`Failure::Interrupted`].
pub fn hash(path: &Path, definition: Definition, watch: &dyn Watch) -> Result<String, Error> {
    hash_source(
        &LocalFile::open(path)?,
        path,
        definition,
        &Limits::default(),
        watch,
    )
}

/// Return the hash of the file behind `url`. Only the parts that are being fetched or hashed are in memory.
///
/// # Errors
/// As [`Checkpoint::open_url`](ingot_io::Checkpoint::open_url) and [`hash`].
#[cfg(feature = "remote")]
pub fn hash_url(
    url: &str,
    definition: Definition,
    options: &RemoteOptions,
    watch: &dyn Watch,
) -> Result<String, Error> {
    let (source, path, limits) = url_source(url, options, definition.needs_header(), watch)?;
    hash_source(&*source, &path, definition, &limits, watch)
}

/// Return the hash of an open source. `path` is its name in errors.
///
/// # Errors
/// As [`hash`].
pub fn hash_source(
    source: &dyn ReadAt,
    path: &Path,
    definition: Definition,
    limits: &Limits,
    watch: &dyn Watch,
) -> Result<String, Error> {
    let header = || read_header(source, Some(path), limits);
    let sha256 = |range| hash_range(source, range, Algorithm::Sha256, path, watch);
    let data = || {
        let header = header()?;
        sha256(header.data_start()..header.file_nbytes())
    };
    let whole = 0..source.nbytes();
    Ok(match definition {
        Definition::File(algorithm) => hash_range(source, whole, algorithm, path, watch)?.to_string(),
        Definition::AutoV1 => shortened(&sha256(auto_v1(source.nbytes()))?, AUTO_V1_DIGITS),
        Definition::AutoV2 => shortened(&sha256(whole)?, AUTO_V2_DIGITS),
        Definition::AutoV3 => data()?.to_string(),
        Definition::SshsLegacy => shortened(&sshs_legacy(source, &header()?, path, watch)?, AUTO_V1_DIGITS),
        Definition::ModelSpec => format!("0x{}", data()?),
    })
}

fn shortened(digest: &Digest, digits: usize) -> String {
    let mut text = digest.to_string();
    text.truncate(digits);
    text
}

/// Returns the range of A1111's old hash: shorter for a shorter file, or empty.
fn auto_v1(nbytes: u64) -> Range<u64> {
    AUTO_V1_BEGIN.min(nbytes)..(AUTO_V1_BEGIN + to_u64(AUTO_V1_NBYTES)).min(nbytes)
}

fn sshs_legacy(
    source: &dyn ReadAt,
    header: &Header,
    path: &Path,
    watch: &dyn Watch,
) -> Result<Digest, Error> {
    let new = laid_out_again(header).map_err(|fault| Failure::Unstorable(fault).about(Some(path), None))?;
    let entries: Vec<Entry<'_>> = header.entries().collect();
    let mut window = Vec::with_capacity(AUTO_V1_NBYTES);
    let head = new
        .head
        .get(saturating_usize(AUTO_V1_BEGIN)..)
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
    read_runs(source, runs, &mut window[begin..], path, watch)?;
    Ok(Algorithm::Sha256.digest(&window))
}

/// Returns a safetensors file with the tensors of `header` and only the metadata that trainers write.
fn laid_out_again(header: &Header) -> Result<Layout, FormatError> {
    let pairs: Vec<(&str, &str)> = header
        .metadata()
        .into_iter()
        .flat_map(ingot_format::Metadata::iter)
        .filter(|pair| pair.0.starts_with("ss_"))
        .collect();
    layout(&header.specs(), Some(&pairs), Format::Safetensors)
}
