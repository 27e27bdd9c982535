//! Files of other formats that store the bytes of tensors in the same form.

use std::path::{Path, PathBuf};

use ingot_format::{StopFlag, saturating_usize, to_u64};

use super::Writer;
use crate::error::{Error, Failure, unopened};
use crate::file::{LocalFile, ReadAt, Tensor, read_exactly};
use crate::payload::{FileRange, Payload};
use crate::watch::{Asked, Watch};
use crate::workers::watched;

/// The number of bytes that are compared at a time: two buffers stay in a core's cache.
const STEP: u64 = 256 << 10;

/// An open file of any format. Callers that know the format pass the positions of tensors in it.
#[derive(Debug)]
pub struct ForeignFile {
    path: PathBuf,
    source: LocalFile,
}

impl ForeignFile {
    /// Open a file.
    ///
    /// # Errors
    /// [`Failure::Open`].
    pub fn open(path: &Path) -> Result<ForeignFile, Error> {
        Ok(ForeignFile {
            path: path.to_owned(),
            source: LocalFile::open_one_of_many(path)?,
        })
    }

    /// Copy the bytes from `position` on to the elements of the tensor `name` that `index` selects; an empty index
    /// selects all. The system copies them if it can.
    ///
    /// # Errors
    /// As [`Writer::write`]; [`Failure::Read`] when the file has fewer bytes.
    pub fn copy(
        &self,
        position: u64,
        writer: &Writer,
        name: &str,
        index: &[ingot_format::Index],
        watch: &dyn Watch,
    ) -> Result<(), Error> {
        let (entry, selection) = writer.select(name, index)?;
        self.check_has(position, selection.nbytes())?;
        let copied = self.source.with(|file| {
            let payload = Payload::File(FileRange::new(file, position, selection.nbytes()));
            Ok(writer.write(name, index, entry.dtype, selection.shape(), &payload, watch))
        });
        copied.map_err(unopened(&self.path))?
    }

    /// Return whether the `nbytes` bytes from `position` on equal the bytes of `tensor` from its byte `begin` on.
    ///
    /// # Errors
    /// [`Failure::Read`] when one of the two cannot be read; [`Failure::Interrupted`].
    pub fn agrees(
        &self,
        position: u64,
        tensor: &Tensor<'_>,
        begin: u64,
        nbytes: u64,
        watch: &dyn Watch,
    ) -> Result<bool, Error> {
        let in_tensor = tensor.entry().nbytes();
        if begin.checked_add(nbytes).is_none_or(|end| end > in_tensor) {
            return Ok(false);
        }
        self.check_has(position, nbytes)?;
        let archive = tensor.archive();
        let start = archive.header().data_start() + tensor.entry().begin + begin;
        let (mut ours, mut theirs) = (Vec::new(), Vec::new());
        let mut done = 0;
        while done < nbytes {
            let count = saturating_usize(STEP.min(nbytes - done));
            ours.resize(count, 0);
            theirs.resize(count, 0);
            fill(&self.source, position + done, &mut ours, watch)
                .map_err(|failure| failure.about(Some(&self.path), None))?;
            fill(archive.source(), start + done, &mut theirs, watch)
                .map_err(|failure| failure.about(archive.path(), None))?;
            if ours != theirs {
                return Ok(false);
            }
            done += to_u64(count);
        }
        Ok(true)
    }

    fn check_has(&self, position: u64, nbytes: u64) -> Result<(), Error> {
        let there = self.source.nbytes().saturating_sub(position);
        if there >= nbytes {
            Ok(())
        } else {
            let failure = Failure::Read {
                position,
                expected: nbytes,
                found: there,
                source: None,
            };
            Err(failure.about(Some(&self.path), None))
        }
    }
}

/// Fill `dest` from `position` on, while the caller watches.
fn fill(source: &dyn ReadAt, position: u64, dest: &mut [u8], watch: &dyn Watch) -> Result<(), Failure> {
    let read = |stop: StopFlag<'_>| read_exactly(source, position, dest, stop);
    watched(source.waits(), read, &Asked(watch))?
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Archive, OpenOptions, SaveOptions, Unwatched};
    use ingot_format::to_usize;
    use ingot_format::{Dtype, Format, Index, LayoutOptions, Spec};
    use proptest::prelude::*;

    fn bytes(len: usize) -> Vec<u8> {
        (0..251).cycle().take(len).collect()
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(24))]
        #[test]
        fn a_tensor_that_was_copied_agrees_until_a_byte_differs(
            rows in 1..40u64, columns in prop_oneof![1..50u64, 100_000..100_100u64],
            position in 0..5000usize, cut in 0..40u64, other in any::<prop::sample::Index>(),
        ) {
            let folder = tempfile::tempdir().unwrap();
            let (from, to) = (folder.path().join("from"), folder.path().join("to.safetensors"));
            let nbytes = to_usize(rows * columns).unwrap();
            let mut whole = bytes(position + nbytes + 3);
            std::fs::write(&from, &whole).unwrap();
            let cut = cut % (rows + 1);
            let writer = Writer::create(
                &to,
                &[Spec { name: "w", dtype: Dtype::U8, shape: &[rows, columns] }],
                None,
                Format::Safetensors,
                &LayoutOptions::default(),
                &SaveOptions::default(),
                &Unwatched,
            ).unwrap();
            let file = ForeignFile::open(&from).unwrap();
            // Two halves, the second one first.
            for (begin, end) in [(cut, rows), (0, cut)] {
                let part = Index::Span { start: Some(begin.cast_signed()), stop: Some(end.cast_signed()), step: None };
                file.copy(to_u64(position) + begin * columns, &writer, "w", &[part], &crate::Unwatched).unwrap();
            }
            writer.commit(&Unwatched).unwrap();
            let archive = Archive::open(&to, &OpenOptions::default()).unwrap();
            prop_assert_eq!(archive.read("w").unwrap().to_vec(), &whole[position..position + nbytes]);
            let tensor = archive.find("w").unwrap();
            let all = |file: &ForeignFile| file.agrees(to_u64(position), &tensor, 0, to_u64(nbytes), &Unwatched).unwrap();
            prop_assert!(all(&file));
            whole[position + other.index(nbytes)] ^= 1;
            std::fs::write(&from, &whole).unwrap();
            prop_assert!(!all(&ForeignFile::open(&from).unwrap()));
        }
    }

    #[test]
    fn a_file_that_is_too_short_is_named() {
        let folder = tempfile::tempdir().unwrap();
        let (from, to) = (folder.path().join("from"), folder.path().join("to.safetensors"));
        std::fs::write(&from, bytes(10)).unwrap();
        let spec = Spec {
            name: "w",
            dtype: Dtype::U8,
            shape: &[8],
        };
        let (layout, options) = (LayoutOptions::default(), SaveOptions::default());
        let writer = Writer::create(
            &to,
            &[spec],
            None,
            Format::Safetensors,
            &layout,
            &options,
            &Unwatched,
        )
        .unwrap();
        let file = ForeignFile::open(&from).unwrap();
        let text = file
            .copy(3, &writer, "w", &[], &crate::Unwatched)
            .unwrap_err()
            .to_string();
        assert!(
            text.contains("from") && text.contains('8') && text.contains('7'),
            "{text}"
        );
        file.copy(2, &writer, "w", &[], &crate::Unwatched).unwrap();
        writer.commit(&Unwatched).unwrap();
    }
}
