//! Loading of tensors that are first compared with their digests.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::ptr;

use ingot_format::{MODEL_SPEC_KEY, SHARED_KEY, SharedName, render_shared};

use super::pass::{Feeding, feed, feed_all};
use super::{Promise, RecordedDigests, sha256_from};
use crate::checkpoint::Checkpoint;
use crate::checkpoint::copied::copied;
use crate::digest::Digest;
use crate::error::{CheckpointFault, Error, Failure};
use crate::file::{Archive, Files, Tensor, TensorId};
use crate::memory::Region;
use crate::options::ReadOptions;
use crate::read::buffer::Buffer;
use crate::read::input::Witness;
use crate::read::job::{Job, Target};
use crate::read::{check_targets, fill, fill_checked, read_owned, read_to};
use crate::watch::{Asked, Watch};

/// The digests that tensors are compared with before they are returned.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Proof {
    /// The digests in the file: of its tensors, or else ModelSpec's.
    pub kept: bool,
    /// The SHA-256 of the whole file.
    pub sha256: Option<Digest>,
}

impl Checkpoint {
    /// Read whole tensors of this checkpoint, and return them if they match `proof`. They are read into memory of their
    /// own with every backend, since a mapped file can change after the check; the digests are computed on the way into
    /// memory.
    /// ModelSpec's digest covers all tensors of a file. It is compared only if all of them are read. If only
    /// some are read, each of them needs a digest of its own.
    ///
    /// # Errors
    /// [`Failure::Digest`] for the first tensor, or the file, that differs; [`Failure::NoDigest`] for the first tensor
    /// without a digest in its file; [`Failure::Checksums`]; [`Failure::Checkpoint`] for one hash of many files; and the
    /// errors of [`crate::read`](fn@crate::read).
    #[doc(hidden)]
    pub fn proven(
        &self,
        jobs: &[Job<'_>],
        proof: &Proof,
        options: &ReadOptions,
        watch: &dyn Watch,
    ) -> Result<Vec<Buffer>, Error> {
        if !jobs.iter().all(|job| job.tensor().is_stored()) {
            let copy = self.copy_of(jobs, proof, options, watch)?;
            return read_to(&again(jobs, &copy)?, options, &Asked(watch));
        }
        let (files, ids) = Files::of(jobs.iter().map(|job| *job.tensor()));
        // Each tensor occurs once, as the digests require.
        let wanted: BTreeMap<TensorId, &Job<'_>> = ids.iter().copied().zip(jobs).collect();
        let numbered: Vec<_> = wanted.iter().map(|(id, job)| (id.file, *job)).collect();
        let buffers = self.compared(&files, &ids, proof, watch, |witnesses| {
            let buffers = read_owned(&files, witnesses, &numbered, options, watch)?;
            files.check_unchanged()?;
            Ok(buffers)
        })?;
        let buffers: BTreeMap<&TensorId, Buffer> = wanted.keys().zip(buffers).collect();
        Ok(ids.iter().map(|id| buffers[id].clone()).collect())
    }

    /// Return a copy in memory of these tensors, under the same names, if they match `proof`. For an alias the stored
    /// tensor is compared and copied.
    ///
    /// # Errors
    /// As [`Checkpoint::proven`].
    #[doc(hidden)]
    pub fn proven_copy(
        &self,
        tensors: &[Tensor<'_>],
        proof: &Proof,
        options: &ReadOptions,
        watch: &dyn Watch,
    ) -> Result<Archive, Error> {
        let mut seen = BTreeSet::new();
        let (_, ids) = Files::of(tensors.iter().copied());
        let each_once = tensors.iter().zip(ids).filter(|(_, id)| seen.insert(*id));
        let stored = each_once.filter_map(|(tensor, _)| tensor.archive().tensor(tensor.number()));
        let stored: Vec<Tensor<'_>> = stored.collect();
        let jobs: Vec<Job<'_>> = stored.iter().copied().map(Job::from).collect();
        let buffers = self.proven(&jobs, proof, options, watch)?;
        let regions: Vec<Region> = buffers.into_iter().filter_map(Buffer::host).collect();
        let has_name = |tensor: &Tensor<'_>| tensor.archive().header().find(tensor.entry().name).is_some();
        let mut record = None;
        if !tensors.iter().all(has_name) {
            record = Some(HashMap::from([(
                SHARED_KEY.to_owned(),
                self.record_of(&stored, watch)?,
            )]));
        }
        copied(&stored, &regions, record, self.path())
    }

    fn copy_of(
        &self,
        jobs: &[Job<'_>],
        proof: &Proof,
        options: &ReadOptions,
        watch: &dyn Watch,
    ) -> Result<Checkpoint, Error> {
        let tensors: Vec<Tensor<'_>> = jobs.iter().map(|job| *job.tensor()).collect();
        Ok(Checkpoint::from(
            self.proven_copy(&tensors, proof, options, watch)?,
        ))
    }

    /// The record of the aliases of these tensors.
    fn record_of(&self, stored: &[Tensor<'_>], watch: &dyn Watch) -> Result<String, Error> {
        let mut names = Vec::new();
        for alias in self.aliases(watch)? {
            let file = self.file(alias.file)?;
            let is_of =
                |tensor: &&Tensor<'_>| ptr::eq(tensor.archive(), file) && tensor.number() == alias.number;
            names.extend(stored.iter().find(is_of).map(|tensor| SharedName {
                name: alias.name.clone(),
                of: tensor.entry().name.to_owned(),
                part: alias.part.clone(),
            }));
        }
        Ok(render_shared(&mut names))
    }

    /// Read whole tensors into `targets`, as [`fill`](crate::binding::fill) does, and compare them with `proof`. The
    /// digests are computed of the bytes of the file, before they are converted.
    ///
    /// # Errors
    /// As [`Checkpoint::proven`] and [`fill`](crate::binding::fill). After [`Failure::Digest`] the bytes stay in the targets.
    #[doc(hidden)]
    pub fn fill_proven(
        &self,
        jobs: &[Job<'_>],
        targets: Vec<Target<'_>>,
        proof: &Proof,
        options: &ReadOptions,
        watch: &dyn Watch,
    ) -> Result<(), Error> {
        let mut seen = BTreeSet::new();
        let (files, ids) = Files::of(jobs.iter().map(|job| *job.tensor()));
        if !ids.iter().all(|id| seen.insert(id)) || !jobs.iter().all(|job| job.tensor().is_stored()) {
            let copy = self.copy_of(jobs, proof, options, watch)?;
            return fill(&again(jobs, &copy)?, targets, options, &Asked(watch));
        }
        check_targets(jobs, &targets)?;
        self.compared(&files, &ids, proof, watch, |witnesses| {
            fill_checked(&files, &ids, jobs, targets, witnesses, options, watch)
        })
    }

    /// Return the result of `read` if the digests match `proof`. `read` reads these tensors and shows them to a witness for
    /// each file.
    fn compared<T>(
        &self,
        files: &Files<'_>,
        ids: &[TensorId],
        proof: &Proof,
        watch: &dyn Watch,
        read: impl FnOnce(&[&dyn Witness]) -> Result<T, Error>,
    ) -> Result<T, Error> {
        let mut promises = promises(files, ids, proof)?;
        if let Some(expected) = proof.sha256 {
            let file = self.one_file()?;
            match &mut promises[..] {
                [of_file] if file.are_all(ids) => of_file.push(file.whole(expected, watch)?),
                _ => file.check_whole(expected, watch)?,
            }
        }
        let feeding = files.sources().into_iter().zip(&promises);
        let feeding = feeding.map(|(source, of_file)| Feeding {
            source,
            all: of_file.iter().map(|promise| &promise.digests).collect(),
        });
        let feeding: Vec<_> = feeding.collect();
        let witnesses: Vec<&dyn Witness> = feeding.iter().map(|feeding| feeding as _).collect();
        let found = read(&witnesses)?;
        drop(feeding);
        for (archive, of_file) in files.archives().iter().zip(promises) {
            of_file
                .into_iter()
                .try_for_each(|promise| archive.compare(promise))?;
        }
        Ok(found)
    }

    /// Return the only file, since one hash describes one file.
    pub(crate) fn one_file(&self) -> Result<&Archive, Error> {
        match self.index() {
            None => self.file(0),
            Some(_) => {
                let fault = CheckpointFault::ManyFiles { files: self.files() };
                Err(Failure::Checkpoint(fault).about(self.path(), None))
            }
        }
    }
}

/// Return jobs that read the same tensors from `copy`. All jobs read whole tensors.
fn again<'c>(jobs: &[Job<'c>], copy: &'c Checkpoint) -> Result<Vec<Job<'c>>, Error> {
    let job = |job: &Job<'c>| {
        let tensor = copy.find(job.tensor().entry().name)?;
        Ok(Job::new(tensor, &[], Some(job.dtype()))?.onto(job.device()))
    };
    jobs.iter().map(job).collect()
}

/// Return the expected digests of the wanted tensors in each of these files.
fn promises(files: &Files<'_>, ids: &[TensorId], proof: &Proof) -> Result<Vec<Vec<Promise>>, Error> {
    let ids = sorted(ids);
    let of_file = |ids: &[TensorId]| {
        let kept = || files.archives()[ids[0].file].kept(ids);
        Ok(Vec::from_iter(proof.kept.then(kept).transpose()?))
    };
    ids.chunk_by(|one, next| one.file == next.file)
        .map(of_file)
        .collect()
}

impl Archive {
    /// Return the expected digests in the file of these tensors, each once and in order.
    fn kept(&self, ids: &[TensorId]) -> Result<Promise, Error> {
        let header = self.header();
        let model_spec = header.text(MODEL_SPEC_KEY);
        let record = match (RecordedDigests::of(header, self.path())?, model_spec) {
            (Some(record), _) => record,
            (None, Some(text)) if self.are_all(ids) => return self.kept_of_data(text),
            (None, _) => RecordedDigests::default(),
        };
        let mut expected = Vec::new();
        for &TensorId { number, .. } in ids {
            let Some(entry) = header.entry(number) else {
                continue;
            };
            let Ok(place) = record.covered.binary_search_by_key(&number, |pair| pair.0) else {
                return Err(Failure::NoDigest.about(self.path(), Some(entry.name)));
            };
            expected.push(record.covered[place]);
        }
        Ok(Promise::of_tensors(header, record.algorithm, &expected))
    }

    /// Return the expected digest of the data section from ModelSpec's hash in `text`.
    fn kept_of_data(&self, text: &str) -> Result<Promise, Error> {
        let header = self.header();
        let expected = sha256_from(text).ok_or_else(|| {
            let text = ingot_format::Quoted(text);
            let reason = format!("metadata `{MODEL_SPEC_KEY}` is not a SHA-256: {text}");
            Failure::Checksums(reason).about(self.path(), None)
        })?;
        Ok(Promise::of(expected, header.data_start()..header.file_nbytes()))
    }

    /// Return the digest that the caller expects of the whole file. The head has been fed already.
    fn whole(&self, expected: Digest, watch: &dyn Watch) -> Result<Promise, Error> {
        let promise = Promise::of(expected, 0..self.header().file_nbytes());
        let feeding = Feeding {
            source: self.source(),
            all: vec![&promise.digests],
        };
        feed(&[feeding], &[(0, 0..self.header().data_start())], watch)
            .map_err(|fault| self.explain(fault.failure))?;
        Ok(promise)
    }

    /// Read the whole file, although only a part is requested, and compare its digest with the expected one.
    fn check_whole(&self, expected: Digest, watch: &dyn Watch) -> Result<(), Error> {
        let promise = Promise::of(expected, 0..self.header().file_nbytes());
        feed_all(self.source(), &promise.digests, watch).map_err(|failure| self.explain(failure))?;
        self.compare(promise)
    }

    /// Return whether these tensors are all tensors of the file.
    fn are_all(&self, ids: &[TensorId]) -> bool {
        sorted(ids).len() == self.header().len()
    }

    fn compare(&self, promise: Promise) -> Result<(), Error> {
        promise.unequal().next().map_or(Ok(()), |(number, unequal)| {
            let entry = number.and_then(|number| self.header().entry(number));
            Err(Failure::Digest(unequal).about(self.path(), entry.map(|entry| entry.name)))
        })
    }
}

/// Each tensor once, in order.
fn sorted(ids: &[TensorId]) -> Vec<TensorId> {
    let mut ids = ids.to_vec();
    ids.sort_unstable();
    ids.dedup();
    ids
}
