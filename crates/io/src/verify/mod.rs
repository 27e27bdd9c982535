//! Digests of files and of the tensors in them: computing them, and comparing them with recorded ones. FORMAT.md,
//! "Checksums".

mod checked;
mod hash;
#[cfg(feature = "remote")]
pub(crate) mod in_order;
mod pass;

use std::borrow::Cow;
use std::io;
use std::ops::Range;
use std::path::Path;

use ingot_format::{CHECKSUMS_KEY, Checksums, Header, MODEL_SPEC_KEY, to_usize};

use self::pass::{Feeding, feed, wanted};
use crate::checkpoint::Checkpoint;
use crate::digest::{Algorithm, Digest, Digests, Hasher, Unequal};
use crate::disk;
use crate::error::{Error, Failure};
use crate::file::{Archive, Files};
use crate::options::{Backend, OpenOptions};
use crate::payload::Payload;
use crate::read::run::nbytes;
use crate::watch::{After, Watch};

pub use checked::Proof;
pub use hash::{hash, hash_range, read_runs};

/// The result of comparing a file with its digests.
///
/// ```
/// use ingot_io::{Unwatched, verify};
/// # use ingot_io::{Dtype, TensorView, serialize_to_file};
/// # let folder = tempfile::tempdir()?;
/// # let path = folder.path().join("model.safetensors");
/// # let bias = TensorView::new(Dtype::U8, vec![2], b"ab")?;
/// # serialize_to_file([("bias", &bias)], None, &path)?;
///
/// let report = verify(&path, None, &Unwatched)?;
/// assert_eq!((report.is_ok(), report.checked), (false, 0));
/// assert_eq!(report.unchecked, ["bias"]); // the file has no digest of this tensor
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Report {
    /// The algorithm of the tensors' digests; `None` if the file keeps none.
    pub algorithm: Option<Algorithm>,
    /// The number of tensors that were compared with their digest.
    pub checked: usize,
    /// Tensors whose bytes differ from their digest, in the order of the file.
    pub bad: Vec<Mismatch>,
    /// Tensors without a digest, in the order of the file.
    pub unchecked: Vec<String>,
    /// Names that have a digest but no tensor, sorted.
    pub missing: Vec<String>,
    /// The comparison of the data section with ModelSpec's hash; `None` if the file has no such hash.
    pub model_spec: Option<Compared>,
    /// The comparison of the whole file with the digest that the caller expects or, if the file is a blob of the
    /// Hugging Face cache, with the digest in its name. `None` if there is no such digest.
    pub file: Option<Compared>,
}

/// A tensor whose bytes are not those that were written.
///
/// ```
/// use ingot_io::{Mismatch, Unwatched, verify};
/// # use ingot_io::{Dtype, TensorView, serialize_to_file};
/// # let folder = tempfile::tempdir()?;
/// # let path = folder.path().join("model.safetensors");
/// # let bias = TensorView::new(Dtype::U8, vec![2], b"ab")?;
/// # serialize_to_file([("bias", &bias)], None, &path)?;
///
/// for Mismatch { tensor, expected, found } in verify(&path, None, &Unwatched)?.bad {
///     println!("{tensor}: expected {expected}, found {found}");
/// }
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Mismatch {
    /// The name of the tensor.
    pub tensor: String,
    /// The recorded digest.
    pub expected: Digest,
    /// The digest of the tensor's bytes.
    pub found: Digest,
}

/// Two digests that should be equal. `expected` is the recorded text, which may not be a valid digest.
///
/// ```
/// use ingot_io::{Algorithm, Unwatched, verify};
/// # use ingot_io::{Dtype, TensorView, serialize_to_file};
/// # let folder = tempfile::tempdir()?;
/// # let path = folder.path().join("model.safetensors");
/// # let bias = TensorView::new(Dtype::U8, vec![2], b"ab")?;
/// # serialize_to_file([("bias", &bias)], None, &path)?;
///
/// let of_another_file = Algorithm::Sha256.digest(b"abc");
/// let compared = verify(&path, Some(of_another_file), &Unwatched)?.file.expect("the caller gave a digest");
/// assert!(!compared.is_same());
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Compared {
    /// The recorded text.
    pub expected: String,
    /// The computed digest.
    pub found: Digest,
}

impl Compared {
    /// Returns whether they are the same. Upper case and a leading `0x` are ignored.
    #[must_use]
    pub fn is_same(&self) -> bool {
        sha256_from(&self.expected) == Some(self.found)
    }
}

impl Report {
    /// Returns whether all bytes of all tensors were compared with a digest, of the tensor, of the data section or of
    /// the file, and all digests match.
    #[must_use]
    pub fn is_ok(&self) -> bool {
        let of_all = [&self.model_spec, &self.file];
        let all_same = of_all
            .iter()
            .all(|pair| pair.as_ref().is_none_or(Compared::is_same));
        let any = of_all.iter().any(|pair| pair.is_some());
        self.bad.is_empty() && self.missing.is_empty() && all_same && (any || self.unchecked.is_empty())
    }
}

/// Returns the SHA-256 in `text`, with or without `0x`.
pub(crate) fn sha256_from(text: &str) -> Option<Digest> {
    Digest::from_hex(Algorithm::Sha256, text.strip_prefix("0x").unwrap_or(text))
}

/// Reads the file at `path` and compares its bytes with the digests in its metadata and with `sha256`, the digest of
/// the whole file, if the caller knows it.
///
/// The digests detect accidental changes. An attacker who changes a file can change its digests too; `sha256` from a
/// trusted source detects that as well.
///
/// ```
/// use ingot_io::{Algorithm, Dtype, TensorView, Unwatched, hash, serialize_to_file, verify};
///
/// let folder = tempfile::tempdir()?;
/// let path = folder.path().join("model.safetensors");
/// serialize_to_file([("bias", &TensorView::new(Dtype::F32, vec![2], b"12345678")?)], None, &path)?;
/// let published = hash(&path, Algorithm::Sha256, &Unwatched)?;
///
/// let report = verify(&path, Some(published), &Unwatched)?;
/// assert!(report.is_ok());
/// assert_eq!(report.unchecked, ["bias"]); // the file keeps no digest of its own
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
///
/// # Errors
/// [`Failure::Checksums`] if the record of digests is broken or has an unknown algorithm; errors of [`hash()`]. A digest
/// that differs is not an error: the report lists it.
pub fn verify(path: &Path, sha256: Option<Digest>, watch: &dyn Watch) -> Result<Report, Error> {
    // Never mapped: if another process shortens the file now, reading it returns an error instead of ending the
    // process.
    let options = OpenOptions {
        backend: Backend::Pread,
        ..OpenOptions::default()
    };
    let archive = Archive::open(path, &options)?;
    // There is one report for the one file.
    verify_files(vec![&archive], sha256, watch).map(|mut reports| reports.swap_remove(0))
}

impl Checkpoint {
    /// Compare each file with its recorded digests, as [`verify`] does. Return one report per file, in order. All files
    /// are first compared with the index. They should be open for positional reads, since truncating a mapped file
    /// during the check ends the process.
    ///
    /// # Errors
    /// As [`verify`]; [`Failure::Checkpoint`] if files and index do not match, or if `sha256` is passed for an index.
    pub fn verify(&self, sha256: Option<Digest>, watch: &dyn Watch) -> Result<Vec<Report>, Error> {
        if sha256.is_some() {
            self.one_file()?;
        }
        verify_files(self.all_files()?, sha256, watch)
    }
}

/// As [`verify`], for open files.
pub(crate) fn verify_files(
    archives: Vec<&Archive>,
    sha256: Option<Digest>,
    watch: &dyn Watch,
) -> Result<Vec<Report>, Error> {
    let checks = archives.iter().map(|archive| Check::new(archive, sha256));
    let checks = checks.collect::<Result<Vec<_>, _>>()?;
    let files = Files::from(archives);
    let feeding: Vec<_> = checks.iter().map(Check::feeding).collect();
    let runs = wanted(&feeding);
    let headers = files.headers();
    let sizes = headers.iter().map(|header| header.file_nbytes());
    let total = sizes.fold(0, u64::saturating_add);
    // Bytes that need no digest count as done.
    let before = total - nbytes(&runs);
    feed(&feeding, &runs, &After { watch, before, total }).map_err(|fault| files.explain(fault))?;
    drop(feeding);
    files.check_unchanged()?;
    Ok(checks.into_iter().map(Check::report).collect())
}

/// Expected digests of parts of a file, and the computation of the digests of the bytes that arrive.
struct Promise {
    algorithm: Algorithm,
    /// Each with the number of its tensor, if it is not of another part.
    expected: Vec<(Option<usize>, Digest)>,
    digests: Digests,
}

impl Promise {
    /// The SHA-256 of a range of the file.
    fn of(expected: Digest, range: Range<u64>) -> Promise {
        Promise {
            algorithm: Algorithm::Sha256,
            expected: vec![(None, expected)],
            digests: Digests::new(Algorithm::Sha256, Some(range)),
        }
    }

    /// The digests of tensors, in the order of the file.
    fn of_tensors(header: &Header, algorithm: Algorithm, expected: &[(usize, Digest)]) -> Promise {
        let entries = expected.iter().filter_map(|&(number, _)| header.entry(number));
        let start = header.data_start();
        Promise {
            algorithm,
            expected: expected
                .iter()
                .map(|&(number, digest)| (Some(number), digest))
                .collect(),
            digests: Digests::new(
                algorithm,
                entries.map(|entry| start + entry.begin..start + entry.end),
            ),
        }
    }

    /// Return the digests that differ, and the numbers of their tensors, once all bytes have been fed.
    fn unequal(self) -> impl Iterator<Item = (Option<usize>, Unequal)> {
        let algorithm = self.algorithm;
        let pairs = self.expected.into_iter().zip(self.digests.finish());
        pairs.filter_map(move |((number, expected), found)| {
            // All bytes were fed, so that `found` is always set here.
            let found = found.unwrap_or_else(|| Digest::zero(algorithm));
            let unequal = Unequal {
                algorithm,
                expected,
                found,
            };
            (found != expected).then_some((number, unequal))
        })
    }
}

/// The recorded digests of one file, and the computation of its digests.
struct Check<'a> {
    archive: &'a Archive,
    /// `None` if the file keeps no digests of its tensors.
    algorithm: Option<Algorithm>,
    record: RecordedDigests,
    tensors: Promise,
    model_spec: Option<&'a str>,
    data: Digests,
    sha256: Option<Digest>,
    file: Digests,
}

impl<'a> Check<'a> {
    fn new(archive: &'a Archive, sha256: Option<Digest>) -> Result<Check<'a>, Error> {
        let header = archive.header();
        let record = RecordedDigests::of(header, archive.path())?;
        let algorithm = record.as_ref().map(|record| record.algorithm);
        let record = record.unwrap_or_else(|| RecordedDigests {
            uncovered: (0..header.len()).collect(),
            ..RecordedDigests::default()
        });
        let start = header.data_start();
        let model_spec = header.text(MODEL_SPEC_KEY);
        // A blob of a cache is named after its contents.
        let of_name = || sha256_from(&disk::blob_digest(archive.path()?)?);
        let sha256 = sha256.or_else(of_name);
        let sha256_of = |range: Option<_>| Digests::new(Algorithm::Sha256, range);
        Ok(Check {
            archive,
            algorithm,
            tensors: Promise::of_tensors(header, record.algorithm, &record.covered),
            record,
            model_spec,
            data: sha256_of(model_spec.map(|_| start..header.file_nbytes())),
            sha256,
            file: sha256_of(sha256.map(|_| 0..header.file_nbytes())),
        })
    }

    fn feeding(&self) -> Feeding<'_> {
        Feeding {
            source: self.archive.source(),
            all: vec![&self.tensors.digests, &self.data, &self.file],
        }
    }

    /// Return the report, once all bytes have been fed.
    fn report(self) -> Report {
        let header = self.archive.header();
        let name = |number| {
            let entry = header.entry(number);
            entry.map_or_else(String::new, |entry| entry.name.to_owned())
        };
        let bad = self.tensors.unequal().filter_map(|(number, unequal)| {
            Some(Mismatch {
                tensor: name(number?),
                expected: unequal.expected,
                found: unequal.found,
            })
        });
        let compared = |expected: Option<String>, digests: Digests| {
            Some(Compared {
                expected: expected?,
                found: digests.finish().pop().flatten()?,
            })
        };
        Report {
            algorithm: self.algorithm,
            checked: self.record.covered.len(),
            bad: bad.collect(),
            unchecked: self.record.uncovered.iter().copied().map(name).collect(),
            missing: self.record.missing,
            model_spec: compared(self.model_spec.map(ToOwned::to_owned), self.data),
            file: compared(self.sha256.map(|sha256| sha256.to_string()), self.file),
        }
    }
}

/// Return the record for the metadata of `header` after the bytes of the tensor `name` were replaced by `payload`;
/// `None` if the header has no digest of this tensor.
pub(crate) fn renewed(
    header: &Header,
    name: &str,
    payload: &Payload<'_>,
    watch: &dyn Watch,
) -> io::Result<Option<String>> {
    let Some(Ok(record)) = header.text(CHECKSUMS_KEY).map(Checksums::parse) else {
        return Ok(None);
    };
    let algorithm = Algorithm::from_name(record.algorithm());
    let Some((algorithm, _)) = algorithm.zip(record.get(name)) else {
        return Ok(None);
    };
    let digest = digest_of(payload, algorithm, watch)?.to_string();
    let digests = record.iter().map(|(of, old)| {
        if of == name {
            (of, Cow::Borrowed(&*digest))
        } else {
            (of, Cow::Borrowed(old))
        }
    });
    let renewed = Checksums::new(algorithm.name(), digests);
    Ok(renewed.ok().map(|record| record.render()))
}

pub(crate) fn digest_of(
    payload: &Payload<'_>,
    algorithm: Algorithm,
    watch: &dyn Watch,
) -> io::Result<Digest> {
    const PIECE: u64 = 1 << 20;
    let mut hasher = Hasher::new(algorithm);
    let mut buffer = Vec::new();
    let mut at = 0;
    while at < payload.nbytes() {
        let len = PIECE.min(payload.nbytes() - at);
        buffer.resize(to_usize(len).unwrap_or(0), 0);
        payload.read_watched(at, &mut buffer, watch)?;
        hasher.update(&buffer);
        at += len;
    }
    Ok(hasher.finish())
}

/// The digests of tensors that a file records; none by default.
#[derive(Default)]
pub(crate) struct RecordedDigests {
    pub(crate) algorithm: Algorithm,
    /// Tensors with a digest, in the order of the data.
    pub(crate) covered: Vec<(usize, Digest)>,
    /// Tensors without a digest.
    pub(crate) uncovered: Vec<usize>,
    /// Names with a digest that no tensor has.
    missing: Vec<String>,
}

impl RecordedDigests {
    /// Return the record in the metadata of `header`, if there is one. Errors name `path`.
    pub(crate) fn of(header: &Header, path: Option<&Path>) -> Result<Option<RecordedDigests>, Error> {
        let text = header.text(CHECKSUMS_KEY);
        text.map(|text| RecordedDigests::parse(text, header, path))
            .transpose()
    }

    /// Parse the record of digests of the tensors in `header`.
    pub(crate) fn parse(text: &str, header: &Header, path: Option<&Path>) -> Result<RecordedDigests, Error> {
        let fault = |reason: String| Failure::Checksums(reason).about(path, None);
        let checksums = Checksums::parse(text).map_err(|error| fault(error.to_string()))?;
        let algorithm = Algorithm::from_name(checksums.algorithm()).ok_or_else(|| {
            let names = Algorithm::ALL.map(Algorithm::name).join(", ");
            let found = ingot_format::Quoted(checksums.algorithm()).to_string();
            fault(format!(
                "checksums of the unknown algorithm {found}: expected one of {names}"
            ))
        })?;
        let mut record = RecordedDigests {
            algorithm,
            covered: Vec::new(),
            uncovered: Vec::new(),
            missing: Vec::new(),
        };
        for (number, entry) in header.entries().enumerate() {
            let Some(hex) = checksums.get(entry.name) else {
                record.uncovered.push(number);
                continue;
            };
            let digest = Digest::from_hex(algorithm, hex).ok_or_else(|| {
                let (name, hex) = (ingot_format::Quoted(entry.name), ingot_format::Quoted(hex));
                fault(format!("tensor {name}: {hex} is not a digest of {algorithm}"))
            })?;
            record.covered.push((number, digest));
        }
        if checksums.iter().len() > record.covered.len() {
            let names = checksums.iter().map(|pair| pair.0);
            record.missing = names
                .filter(|name| header.find(name).is_none())
                .map(ToOwned::to_owned)
                .collect();
        }
        Ok(record)
    }
}
