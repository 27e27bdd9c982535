//! Versions of a checkpoint: the digest of its headers, and the digest of its data.

use std::collections::BTreeMap;

use ingot_format::{Header, StopFlag, Version, to_u64};
use xxhash_rust::xxh3::Xxh3;

use crate::checkpoint::Checkpoint;
use crate::digest::Algorithm;
use crate::error::{Error, size};
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

/// Return the digest of the data of a checkpoint, which is read.
pub(super) fn digest_of(
    checkpoint: &Checkpoint,
    options: &ReadOptions,
    watch: &dyn Watch,
) -> Result<String, Error> {
    let tensors = checkpoint.all()?;
    let digests = hashed(&tensors, options, watch)?;
    let named = tensors.iter().map(|tensor| tensor.entry().name).zip(digests);
    Ok(digest(&named.collect()))
}

/// Return the bytes of a file before its data.
pub(super) fn head(archive: &Archive) -> Result<Vec<u8>, Error> {
    let mut head = vec![0; size(archive.header().data_start())?];
    let read = read_exactly(archive.source(), 0, &mut head, StopFlag::never());
    read.map_err(|failure| archive.explain(failure))?;
    Ok(head)
}

/// Return the id of the checkpoint whose files begin with these bytes.
pub(super) fn id(heads: &[Vec<u8>]) -> String {
    match heads {
        [head] => Algorithm::Blake3.digest(head).to_string(),
        heads => {
            let digests = heads.iter().map(|head| Algorithm::Blake3.digest(head));
            let all: Vec<u8> = digests.flat_map(|digest| digest.as_bytes().to_vec()).collect();
            Algorithm::Blake3.digest(&all).to_string()
        }
    }
}

/// Return whether the headers have a digest of each tensor, so that the id is an id of the data too.
pub(super) fn covers_data<'h>(mut headers: impl Iterator<Item = &'h Header>) -> bool {
    headers.all(|header| {
        let record = RecordedDigests::of(header, None).ok().flatten();
        header.is_empty() || record.is_some_and(|record| record.uncovered.is_empty())
    })
}

/// Return the id of a checkpoint. Without digests of all tensors in its headers, it is an id of its layout only.
///
/// # Errors
/// As [`Checkpoint::file`].
pub fn version_id(checkpoint: &Checkpoint) -> Result<String, Error> {
    let files = checkpoint.all_files()?;
    let heads = files.into_iter().map(head).collect::<Result<Vec<_>, _>>()?;
    Ok(id(&heads))
}

/// Fail if neither the id nor, if it does not cover the data or if `verify`, the digest is of `expected`.
pub(super) fn is_version(
    checkpoint: &Checkpoint,
    expected: &Version,
    verify: bool,
    options: &ReadOptions,
    watch: &dyn Watch,
) -> Result<bool, Error> {
    if version_id(checkpoint)? != expected.id {
        return Ok(false);
    }
    let files = checkpoint.all_files()?;
    if !verify && covers_data(files.iter().map(|file| file.header())) {
        return Ok(true);
    }
    Ok(digest_of(checkpoint, options, watch)? == expected.digest)
}
