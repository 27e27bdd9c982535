//! Patches for tensors in memory: the layout of the result, and writing changes into memory of the caller.

use std::io;
use std::path::{Path, PathBuf};

use ingot_format::{Dtype, Header, StopFlag, saturating_usize, to_u64};

use super::numbers::in_memory;
use super::patch::{Change, NewFile, Patch, WINDOW_NBYTES, stored, unusable};
use super::version::covers_data;
use crate::checkpoint::folder::index_of;
use crate::checkpoint::{Checkpoint, Shards, Store};
use crate::error::{Error, Failure, Misfit};
use crate::file::{Archive, Origin, ReadAt};
use crate::memory::{Dest, Footprint, overlapping};
use crate::options::ReadOptions;
use crate::read::job::Target;
use crate::watch::Watch;
use crate::workers::{Reading, share};

/// Bytes of a tensor that one thread changes at once: a whole number of windows.
const PART_NBYTES: u64 = 32 * WINDOW_NBYTES;

/// Return whether the headers of a checkpoint have a digest of each tensor.
///
/// # Errors
/// As [`Checkpoint::file`].
pub fn has_digests(checkpoint: &Checkpoint) -> Result<bool, Error> {
    let files = checkpoint.all_files()?;
    Ok(covers_data(files.iter().map(|file| file.header())))
}

/// A file without its data.
#[derive(Debug)]
struct Unread {
    head: Vec<u8>,
    nbytes: u64,
}

impl ReadAt for Unread {
    fn nbytes(&self) -> u64 {
        self.nbytes
    }

    fn read_at(&self, position: u64, dest: &mut [u8]) -> io::Result<usize> {
        let rest = self.head.get(in_memory(position)?..).unwrap_or_default();
        if rest.is_empty() {
            let reason = "a patch has no data of tensors that do not change";
            return Err(io::Error::new(io::ErrorKind::Unsupported, reason));
        }
        let count = rest.len().min(dest.len());
        dest[..count].copy_from_slice(&rest[..count]);
        Ok(count)
    }

    fn backend(&self) -> (&'static str, &'static str) {
        ("patch", "the layout of the result of a patch")
    }
}

/// Return the file of the result without its data.
fn unread(file: &NewFile, path: Option<&Path>) -> Archive {
    let source = Unread {
        head: file.head.clone(),
        nbytes: file.header.file_nbytes(),
    };
    Archive::of_header(Origin::Other(Box::new(source)), path, file.header.clone())
}

/// The files of a result without their data.
#[derive(Debug)]
struct Results {
    path: PathBuf,
    names: Vec<String>,
    heads: Vec<(Vec<u8>, Header)>,
}

impl Store for Results {
    fn path(&self, _: &str) -> PathBuf {
        self.path.clone()
    }

    fn open(&self, shards: &Shards, number: usize, _: StopFlag<'_>) -> Result<Archive, Error> {
        let name = shards.name(number);
        let found = self
            .names
            .iter()
            .zip(&self.heads)
            .find(|(other, _)| *other == name);
        let Some((_, (head, header))) = found else {
            let fault = io::Error::new(io::ErrorKind::NotFound, format!("the patch has no file {name}"));
            return Err(Failure::Open(fault).about(Some(&self.path), None));
        };
        let file = NewFile {
            head: head.clone(),
            header: header.clone(),
        };
        Ok(unread(&file, Some(&self.path)))
    }

    fn reading(&self) -> Reading {
        Reading::on(1)
    }

    fn backend(&self) -> Option<(&'static str, &'static str)> {
        None
    }
}

impl Patch {
    /// Return the result with the names, dtypes, shapes and metadata of its tensors, and without their data.
    ///
    /// # Errors
    /// [`Failure::Index`] if the index of the result is invalid.
    pub fn result(&self) -> Result<Checkpoint, Error> {
        let path = self.path();
        let Some(text) = self.index() else {
            let [file] = &self.files[..] else {
                return Err(self.invalid("several files without an index".to_owned()));
            };
            return Ok(Checkpoint::from(unread(file, path)));
        };
        let path = path.map_or_else(PathBuf::new, ToOwned::to_owned);
        let index = index_of(text, to_u64(text.len()), &path)?;
        let store = Results {
            path: path.clone(),
            names: self.record().files.clone(),
            heads: self
                .files
                .iter()
                .map(|file| (file.head.clone(), file.header.clone()))
                .collect(),
        };
        Ok(Checkpoint::of_shards(Shards::new(path, index, Box::new(store))))
    }

    /// Write new bytes into the memory of the base. Each target has the bytes of the tensor with this name from `begin` on, as
    /// [`Dtype::U8`]. All targets are checked before the first byte changes. Tensors that do not change are left as they are.
    ///
    /// # Errors
    /// [`Failure::Destination`] if a target is not contiguous bytes of its tensor, or shares memory with another;
    /// [`Failure::Patch`] if the patch was not proven; errors of reading the patch; [`Failure::Interrupted`].
    pub fn write_into(
        &self,
        wanted: &[(String, u64)],
        targets: Vec<Target<'_>>,
        options: &ReadOptions,
        watch: &dyn Watch,
    ) -> Result<(), Error> {
        self.check_proven()?;
        let archive = self.archive()?;
        self.check_targets(wanted, &targets)?;
        let parts = wanted.iter().zip(targets).filter_map(|((name, begin), target)| {
            let (change, begin, rest) = (self.changes.get(name)?, *begin, target.memory);
            Some(Parts {
                name,
                change,
                begin,
                rest,
            })
        });
        let parts: Vec<Parts<'_, '_>> = parts.collect();
        let total = parts.iter().map(|part| to_u64(part.rest.len())).sum();
        let source = archive.source();
        let reading = Reading::of(source.nbytes(), &[(source, 0..source.nbytes())], options);
        let work = |part: Part<'_, '_>, stop: StopFlag<'_>| {
            let (name, nbytes) = (part.name, part.memory.len());
            let written = part.write(archive, stop);
            written
                .map(|()| nbytes)
                .map_err(|fault| unusable(archive, name, fault))
        };
        share(reading, parts.into_iter().flatten(), total, work, watch)?;
        archive.check_unchanged()
    }

    /// Check that each target is a part of its tensor, and that no two share memory.
    fn check_targets(&self, wanted: &[(String, u64)], targets: &[Target<'_>]) -> Result<(), Error> {
        let about = |failure: Failure, name: &String| failure.about(self.path(), Some(name));
        for ((name, begin), target) in wanted.iter().zip(targets) {
            let unknown = || about(Failure::UnknownTensor { nearest: None }, name);
            let entry = self.entry(name).ok_or_else(unknown)?;
            let end = begin.checked_add(to_u64(target.memory.len()));
            let is_inside = end.is_some_and(|end| end <= entry.nbytes());
            if target.dtype != Dtype::U8 || !target.memory.is_contiguous() || !is_inside {
                let (expected, found) = (vec![entry.nbytes()], target.shape.to_owned());
                return Err(about(
                    Failure::Destination(Misfit::Shape { expected, found }),
                    name,
                ));
            }
        }
        let footprints: Vec<Footprint> = targets.iter().map(|target| target.memory.footprint()).collect();
        let Some((one, other)) = overlapping(&footprints) else {
            return Ok(());
        };
        let other = wanted[other].0.clone();
        Err(about(
            Failure::Destination(Misfit::Overlap { other }),
            &wanted[one].0,
        ))
    }
}

/// The parts of a tensor that are left to change.
struct Parts<'p, 'd> {
    name: &'p str,
    change: &'p Change,
    begin: u64,
    rest: Dest<'d>,
}

/// A part of a tensor that one thread changes.
struct Part<'p, 'd> {
    name: &'p str,
    change: &'p Change,
    begin: u64,
    memory: Dest<'d>,
}

impl<'p, 'd> Iterator for Parts<'p, 'd> {
    type Item = Part<'p, 'd>;

    fn next(&mut self) -> Option<Part<'p, 'd>> {
        if self.rest.len() == 0 {
            return None;
        }
        let rest = std::mem::replace(&mut self.rest, Dest::from(&mut [][..]));
        let (memory, rest) = rest.split_at(saturating_usize(PART_NBYTES));
        self.rest = rest;
        let begin = self.begin;
        self.begin += to_u64(memory.len());
        Some(Part {
            name: self.name,
            change: self.change,
            begin,
            memory,
        })
    }
}

impl Part<'_, '_> {
    fn write(mut self, archive: &Archive, stop: StopFlag<'_>) -> io::Result<()> {
        let (begin, change) = (self.begin, self.change);
        self.memory.fill(|into| match change {
            Change::Whole(number) => stored(archive, *number).read(begin, into, stop),
            Change::Sparse(sparse) => sparse.write(archive, begin, into, stop),
        })
    }
}
