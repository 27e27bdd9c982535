//! Loading only what is proven to be right.

use std::fmt;
use std::io;

use ingot_format::{to_u64, to_usize};

use super::algorithm::{Algorithm, Digest, Unequal};
use super::digests::Digests;
use super::verify::{MODEL_SPEC_KEY, Record, sha256_from};
use crate::archive::Archive;
use crate::error::Error;
use crate::execute::ReadOptions;
use crate::failure::{Failure, read_exactly};
use crate::region::Region;
use crate::source::Source;
use crate::watch::Watch;

/// What tensors are compared with before they are handed out.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Proof {
    /// The digests that the file keeps: those of the tensors or, where it has none of them, ModelSpec's.
    pub kept: bool,
    /// The SHA-256 of the whole file.
    pub sha256: Option<Digest>,
}

/// A digest that was promised, and what computes the one of the bytes that come.
struct Promise {
    tensors: Vec<(Option<usize>, Digest)>,
    algorithm: Algorithm,
    digests: Digests,
}

/// A source that feeds what is read of it to digests.
struct Hashed<'a> {
    source: &'a dyn Source,
    all: &'a [&'a Digests],
}

impl Source for Hashed<'_> {
    fn nbytes(&self) -> u64 {
        self.source.nbytes()
    }

    fn read_at(&self, position: u64, dest: &mut [u8]) -> io::Result<usize> {
        let mut filled = 0;
        while filled < dest.len() {
            let from = position + to_u64(filled);
            let end = dest.len().min(filled + self.step(from));
            let piece = &mut dest[filled..end];
            match read_exactly(self.source, from, piece) {
                Ok(()) => self.all.iter().for_each(|digests| digests.feed(from, piece)),
                Err(failure) => {
                    self.all.iter().for_each(|digests| digests.end());
                    return match failure {
                        Failure::Read {
                            source: Some(fault), ..
                        } => Err(fault),
                        Failure::Read { found, .. } => Ok(filled + found),
                        _ => Err(io::ErrorKind::Other.into()),
                    };
                }
            }
            filled = end;
        }
        Ok(filled)
    }
}

impl Hashed<'_> {
    /// How many bytes from `position` on to read before they are fed. Those of a tree as many as stay in a core's cache;
    /// of what is hashed in order as many as are asked for, so that a thread reads while another hashes.
    fn step(&self, position: u64) -> usize {
        let end = match self.all {
            [digests] => digests.piece_end(position),
            _ => u64::MAX,
        };
        to_usize(end - position).unwrap_or(usize::MAX).min(usize::MAX / 2)
    }
}

impl fmt::Debug for Hashed<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.source.fmt(f)
    }
}

impl Archive {
    /// The bytes of all tensors, in the order of the file, when they are what `proof` asks for. They are in memory of
    /// their own, whatever the backend, since a mapped file can change after it was looked at; the digests are taken of
    /// the bytes in that memory, on the way into it.
    ///
    /// # Errors
    /// [`Error::Digest`] for the first tensor, or the file, that differs; [`Error::NoDigest`] for the first tensor that
    /// the file keeps no digest of; [`Error::Checksums`]; and what [`Archive::regions`] says.
    pub fn proven(
        &self,
        proof: &Proof,
        options: &ReadOptions,
        watch: &dyn Watch,
    ) -> Result<Vec<Region>, Error> {
        let mut promises = Vec::new();
        if proof.kept {
            promises.push(self.kept()?);
        }
        if let Some(expected) = proof.sha256 {
            promises.push(self.whole(expected)?);
        }
        let all: Vec<&Digests> = promises.iter().map(|promise| &promise.digests).collect();
        let numbers: Vec<usize> = (0..self.header().len()).collect();
        let source = Hashed {
            source: self.source(),
            all: &all,
        };
        let regions = self.read_regions(&source, &numbers, options, watch)?;
        self.check_unchanged()?;
        promises
            .into_iter()
            .try_for_each(|promise| self.compare(promise))?;
        Ok(regions)
    }

    /// What the file itself promises of its bytes.
    fn kept(&self) -> Result<Promise, Error> {
        let header = self.header();
        let record = Record::of(header, self.path())?;
        let model_spec = header
            .metadata()
            .and_then(|metadata| metadata.get(MODEL_SPEC_KEY));
        if let (None, Some(text)) = (&record, model_spec) {
            let expected = sha256_from(text).ok_or_else(|| Error::Checksums {
                path: self.path().map(ToOwned::to_owned),
                reason: format!(
                    "metadata `{MODEL_SPEC_KEY}` is no SHA-256: {}",
                    ingot_format::Quoted(text)
                ),
            })?;
            return Ok(Promise {
                tensors: vec![(None, expected)],
                algorithm: Algorithm::Sha256,
                digests: Digests::new(Algorithm::Sha256, Some(header.data_start()..header.file_nbytes())),
            });
        }
        let (algorithm, covered, uncovered) = match record {
            Some(record) => (
                record.algorithm,
                record.covered,
                record.uncovered.first().copied(),
            ),
            None => (Algorithm::Blake3, Vec::new(), (!header.is_empty()).then_some(0)),
        };
        if let Some(entry) = uncovered.and_then(|number| header.entry(number)) {
            return Err(Error::NoDigest {
                path: self.path().map(ToOwned::to_owned),
                tensor: entry.name.to_owned(),
            });
        }
        let start = header.data_start();
        // No tensor is without a digest, so these are all of them.
        let runs = header
            .entries()
            .map(|entry| start + entry.begin..start + entry.end);
        Ok(Promise {
            tensors: covered
                .into_iter()
                .map(|(number, digest)| (Some(number), digest))
                .collect(),
            algorithm,
            digests: Digests::new(algorithm, runs),
        })
    }

    /// What the caller expects of the whole file, of which the head has been fed already.
    fn whole(&self, expected: Digest) -> Result<Promise, Error> {
        let digests = Digests::new(Algorithm::Sha256, Some(0..self.header().file_nbytes()));
        let mut head = vec![0; to_usize(self.header().data_start()).unwrap_or(usize::MAX)];
        read_exactly(self.source(), 0, &mut head).map_err(|failure| failure.about(self.path(), None))?;
        digests.feed(0, &head);
        Ok(Promise {
            tensors: vec![(None, expected)],
            algorithm: Algorithm::Sha256,
            digests,
        })
    }

    fn compare(&self, promise: Promise) -> Result<(), Error> {
        let found = promise.digests.finish();
        for ((number, expected), found) in promise.tensors.into_iter().zip(found) {
            // Everything was fed, so everything has a digest.
            let found = found.unwrap_or_else(|| Digest::zero(promise.algorithm));
            if found != expected {
                let entry = number.and_then(|number| self.header().entry(number));
                return Err(Error::Digest {
                    path: self.path().map(ToOwned::to_owned),
                    tensor: entry.map(|entry| entry.name.to_owned()),
                    unequal: Box::new(Unequal {
                        algorithm: promise.algorithm,
                        expected,
                        found,
                    }),
                });
            }
        }
        Ok(())
    }
}
