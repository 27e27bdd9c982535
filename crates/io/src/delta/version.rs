//! Versions of a checkpoint: the id, which depends on the headers and on the data, and the digest of the data.

use std::collections::BTreeMap;

use ingot_format::{Header, StopFlag, Version, to_u64};
use xxhash_rust::xxh3::Xxh3;

use crate::checkpoint::Checkpoint;
use crate::digest::Algorithm;
use crate::error::{Error, PatchFault, size};
use crate::file::{Archive, Tensor, read_exactly};
use crate::fold::{Fold, fold};
use crate::options::ReadOptions;
use crate::verify::RecordedDigests;
use crate::watch::Watch;

/// The digests of the chunks of a tensor.
#[derive(Clone, Default)]
pub(super) struct ChunkDigests {
    chunks: Vec<[u8; 16]>,
    begun: Option<Box<Xxh3>>,
}

impl std::fmt::Debug for ChunkDigests {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_list().entries(&self.chunks).finish()
    }
}

impl ChunkDigests {
    pub(super) fn feed(&mut self, bytes: &[u8]) {
        self.begun.get_or_insert_default().update(bytes);
    }

    fn close(&mut self) {
        if let Some(chunk) = self.begun.take() {
            self.chunks.push(chunk.digest128().to_be_bytes());
        }
    }

    pub(super) fn join(&mut self, later: &mut ChunkDigests) {
        self.close();
        later.close();
        self.chunks.append(&mut later.chunks);
    }
}

/// Hashes the chunks of tensors.
struct Hashing;

impl Fold<1> for Hashing {
    type Result = ChunkDigests;

    fn empty(&self, _: usize) -> ChunkDigests {
        ChunkDigests::default()
    }

    fn add(&self, _: usize, digests: &mut ChunkDigests, [bytes]: [&[u8]; 1]) {
        digests.feed(bytes);
    }

    fn join(mut earlier: ChunkDigests, mut later: ChunkDigests) -> ChunkDigests {
        earlier.join(&mut later);
        earlier
    }
}

/// Return the digests of the chunks of each tensor.
pub(super) fn hashed(
    tensors: &[Tensor<'_>],
    options: &ReadOptions,
    watch: &dyn Watch,
) -> Result<Vec<ChunkDigests>, Error> {
    let groups: Vec<[Tensor<'_>; 1]> = tensors.iter().map(|&tensor| [tensor]).collect();
    fold(&groups, &Hashing, options, watch)
}

/// Return the digest of all data, from the digests of the chunks of each tensor by name.
pub(super) fn digest(tensors: &BTreeMap<&str, ChunkDigests>) -> String {
    let mut all = Xxh3::new();
    for (name, digests) in tensors {
        all.update(&to_u64(name.len()).to_le_bytes());
        all.update(name.as_bytes());
        all.update(&to_u64(digests.chunks.len()).to_le_bytes());
        digests.chunks.iter().for_each(|chunk| all.update(chunk));
    }
    format!("{:032x}", all.digest128())
}

/// The digests of the data of some files.
pub(super) struct DataDigests {
    pub(super) all: String,
    files: Vec<String>,
}

impl DataDigests {
    /// Read the files.
    pub(super) fn of(
        files: &[&Archive],
        options: &ReadOptions,
        watch: &dyn Watch,
    ) -> Result<DataDigests, Error> {
        let tensors: Vec<Tensor<'_>> = files.iter().flat_map(|file| file.tensors()).collect();
        let mut digests = hashed(&tensors, options, watch)?.into_iter();
        let named = files.iter().map(|file| -> BTreeMap<&str, ChunkDigests> {
            let names = file.tensors().map(|tensor| tensor.entry().name);
            names.zip(digests.by_ref()).collect()
        });
        let named: Vec<_> = named.collect();
        Ok(DataDigests {
            files: named.iter().map(digest).collect(),
            all: digest(&named.into_iter().flatten().collect()),
        })
    }
}

/// Return the bytes of a file before its data.
pub(super) fn head(archive: &Archive) -> Result<Vec<u8>, Error> {
    let mut head = vec![0; size(archive.header().data_start())?];
    let read = read_exactly(archive.source(), 0, &mut head, StopFlag::never());
    read.map_err(|failure| archive.explain(failure))?;
    Ok(head)
}

/// Return the id of the checkpoint whose files begin with these bytes. `digest` is the digest of the data, if the headers do
/// not have digests of all tensors.
pub(super) fn id(heads: &[Vec<u8>], digest: Option<&str>) -> String {
    let of_heads = match heads {
        [head] => Algorithm::Blake3.digest(head),
        heads => {
            let digests = heads.iter().map(|head| Algorithm::Blake3.digest(head));
            let all: Vec<u8> = digests.flat_map(|digest| digest.as_bytes().to_vec()).collect();
            Algorithm::Blake3.digest(&all)
        }
    };
    let Some(digest) = digest else {
        return of_heads.to_string();
    };
    let both = [of_heads.as_bytes(), digest.as_bytes()].concat();
    Algorithm::Blake3.digest(&both).to_string()
}

/// Return whether the headers have a digest of each tensor, so that the id is an id of the data too.
pub(super) fn covers_data<'h>(mut headers: impl Iterator<Item = &'h Header>) -> bool {
    headers.all(|header| {
        let record = RecordedDigests::of(header, None).ok().flatten();
        header.is_empty() || record.is_some_and(|record| record.uncovered.is_empty())
    })
}

/// Return the id of a checkpoint. Without digests of all tensors in its headers, the data is read.
///
/// # Errors
/// As [`Checkpoint::file`]; errors of reading; [`Failure::Interrupted`](crate::Failure::Interrupted).
pub fn version_id(
    checkpoint: &Checkpoint,
    options: &ReadOptions,
    watch: &dyn Watch,
) -> Result<String, Error> {
    Ok(Found::of(&checkpoint.all_files()?, false, options, watch)?.id)
}

/// The version of a checkpoint, to compare it with the versions in a patch.
pub(super) struct Found {
    pub(super) id: String,
    /// The digest of the data, if it was read.
    pub(super) digest: Option<String>,
    /// The id of each file, computed as if the file was the whole version.
    pub(super) files: Vec<String>,
}

impl Found {
    /// Find the version of the checkpoint of these files. The data is read if `verify`, or if the headers lack digests of
    /// some tensors.
    pub(super) fn of(
        files: &[&Archive],
        verify: bool,
        options: &ReadOptions,
        watch: &dyn Watch,
    ) -> Result<Found, Error> {
        let covers = covers_data(files.iter().map(|file| file.header()));
        let digests = (verify || !covers).then(|| DataDigests::of(files, options, watch));
        let digests = digests.transpose()?;
        let heads = files.iter().map(|file| head(file));
        let heads = heads.collect::<Result<Vec<_>, _>>()?;
        // If the header of a file has digests, the id of the file must not depend on whether the data was read.
        let of_file = |number: usize| {
            let covers = covers_data([files[number].header()].into_iter());
            let digest = digests.as_ref().map(|digests| &*digests.files[number]);
            id(&heads[number..=number], digest.filter(|_| !covers))
        };
        let digest = digests.as_ref().map(|digests| &*digests.all);
        Ok(Found {
            id: id(&heads, digest.filter(|_| !covers)),
            files: (0..files.len()).map(of_file).collect(),
            digest: digest.map(ToOwned::to_owned),
        })
    }

    pub(super) fn is(&self, version: &Version) -> bool {
        let is_equal = |digest: &String| *digest == version.digest;
        self.id == version.id && self.digest.as_ref().is_none_or(is_equal)
    }

    /// Return the error that this is not the version `expected`.
    pub(super) fn mismatch(self, expected: &Version) -> PatchFault {
        let (expected, found) = match self.digest {
            Some(found) if self.id == expected.id => (expected.digest.clone(), found),
            _ => (expected.id.clone(), self.id),
        };
        PatchFault::WrongBase { expected, found }
    }
}
