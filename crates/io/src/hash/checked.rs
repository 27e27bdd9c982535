//! Loading only what is proven to be right.

use std::fmt;
use std::io;

use ingot_format::{to_u64, to_usize};

use super::algorithm::{Algorithm, Digest, Unequal};
use super::digests::Digests;
use super::pass::{read_through, step_end};
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
            let end = step_end(self.all, from, to_u64(dest.len() - filled));
            let end = filled + to_usize(end - from).unwrap_or(usize::MAX);
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

impl fmt::Debug for Hashed<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.source.fmt(f)
    }
}

impl Archive {
    /// The bytes of these tensors, given as for [`Archive::regions`], when they are what `proof` asks for. They are in
    /// memory of their own, whatever the backend, since a mapped file can change after it was looked at; the digests are
    /// taken of the bytes in that memory, on the way into it.
    ///
    /// A digest of more than these tensors is compared only when they are all that the file has: without its own, a
    /// tensor is then one without a digest.
    ///
    /// # Errors
    /// [`Error::Digest`] for the first tensor, or the file, that differs; [`Error::NoDigest`] for the first tensor that
    /// the file keeps no digest of; [`Error::Checksums`]; and what [`Archive::regions`] says.
    pub fn proven(
        &self,
        numbers: &[usize],
        proof: &Proof,
        options: &ReadOptions,
        watch: &dyn Watch,
    ) -> Result<Vec<Region>, Error> {
        let mut promises = Vec::new();
        if proof.kept {
            promises.push(self.kept(numbers)?);
        }
        match proof.sha256 {
            Some(expected) if self.are_all(numbers) => promises.push(self.whole(expected)?),
            Some(expected) => self.check_whole(expected, watch)?,
            None => {}
        }
        let all: Vec<&Digests> = promises.iter().map(|promise| &promise.digests).collect();
        let source = Hashed {
            source: self.source(),
            all: &all,
        };
        let regions = self.read_regions(&source, numbers, options, watch)?;
        self.check_unchanged()?;
        promises
            .into_iter()
            .try_for_each(|promise| self.compare(promise))?;
        Ok(regions)
    }

    /// What the file itself promises of the bytes of these tensors.
    fn kept(&self, numbers: &[usize]) -> Result<Promise, Error> {
        let header = self.header();
        let model_spec = header
            .metadata()
            .and_then(|metadata| metadata.get(MODEL_SPEC_KEY));
        let record = match (Record::of(header, self.path())?, model_spec) {
            (Some(record), _) => record,
            (None, Some(text)) if self.are_all(numbers) => return self.kept_of_data(text),
            (None, _) => Record::default(),
        };
        let mut tensors = Vec::new();
        let mut ranges = Vec::new();
        let start = header.data_start();
        for number in sorted(numbers) {
            let Some(entry) = header.entry(number) else {
                continue;
            };
            let Ok(place) = record.covered.binary_search_by_key(&number, |pair| pair.0) else {
                return Err(Error::NoDigest {
                    path: self.path().map(ToOwned::to_owned),
                    tensor: entry.name.to_owned(),
                });
            };
            tensors.push((Some(number), record.covered[place].1));
            ranges.push(start + entry.begin..start + entry.end);
        }
        Ok(Promise {
            tensors,
            algorithm: record.algorithm,
            digests: Digests::new(record.algorithm, ranges),
        })
    }

    /// What ModelSpec's hash, which is `text`, promises of the data section.
    fn kept_of_data(&self, text: &str) -> Result<Promise, Error> {
        let header = self.header();
        let expected = sha256_from(text).ok_or_else(|| Error::Checksums {
            path: self.path().map(ToOwned::to_owned),
            reason: format!(
                "metadata `{MODEL_SPEC_KEY}` is no SHA-256: {}",
                ingot_format::Quoted(text)
            ),
        })?;
        Ok(Promise {
            tensors: vec![(None, expected)],
            algorithm: Algorithm::Sha256,
            digests: Digests::new(Algorithm::Sha256, Some(header.data_start()..header.file_nbytes())),
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

    /// Reads the whole file, of which not all is wanted, and compares it with what the caller expects.
    fn check_whole(&self, expected: Digest, watch: &dyn Watch) -> Result<(), Error> {
        let digests = Digests::new(Algorithm::Sha256, Some(0..self.header().file_nbytes()));
        read_through(self.source(), &[&digests], watch).map_err(|failure| self.explain(failure))?;
        self.compare(Promise {
            tensors: vec![(None, expected)],
            algorithm: Algorithm::Sha256,
            digests,
        })
    }

    /// Whether these tensors are all that the file has.
    fn are_all(&self, numbers: &[usize]) -> bool {
        sorted(numbers).len() == self.header().len()
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

/// Each of them once, in order.
fn sorted(numbers: &[usize]) -> Vec<usize> {
    let mut numbers = numbers.to_vec();
    numbers.sort_unstable();
    numbers.dedup();
    numbers
}
