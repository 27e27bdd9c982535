//! Files that keep digests of themselves.

use std::borrow::Cow;
use std::fs::File;
use std::path::Path;

use ingot_format::{CHECKSUMS_KEY, Checksums, Format, FormatError, Layout, Spec, layout};

use super::algorithm::{Algorithm, Digest};
use super::digests::Digests;
use super::pass::read_through;
use super::verify::MODEL_SPEC_KEY;
use crate::dest::Payload;
use crate::error::Error;
use crate::failure::Failure;
use crate::save::{SaveOptions, save_sealed};
use crate::source::FileSource;
use crate::watch::Watch;

/// Which digests a new file keeps of itself.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Keep {
    /// One of each tensor, by this algorithm.
    pub tensors: Option<Algorithm>,
    /// One of the data section, as ModelSpec wants it.
    pub model_spec: bool,
}

/// A new file that keeps digests of itself: it is laid out with room for them, written, read again, and gets them in
/// its header before it gets its name.
///
/// They are digests of what is in the file, not of the memory that was written: a tensor that changes while it is
/// saved matches its digest all the same.
///
/// ```
/// use ingot_format::{Dtype, Format, Spec};
/// use ingot_io::{Algorithm, Keep, Payload, SaveOptions, Sealed, Unwatched, verify};
/// let specs = [Spec { name: "bias", dtype: Dtype::F32, shape: &[2] }];
/// let keep = Keep { tensors: Some(Algorithm::Blake3), ..Keep::default() };
/// let file = Sealed::new(&specs, None, Format::Safetensors, keep)?;
/// let folder = tempfile::tempdir()?;
/// let path = folder.path().join("bias.safetensors");
/// file.save(&path, &[Payload::from(&b"12345678"[..])], &SaveOptions::default(), &Unwatched)?;
/// assert!(verify(&path, None, &Unwatched)?.is_ok());
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug)]
pub struct Sealed<'a> {
    specs: &'a [Spec<'a>],
    metadata: Vec<(&'a str, &'a str)>,
    format: Format,
    keep: Keep,
    layout: Layout,
}

impl<'a> Sealed<'a> {
    /// Lays out a file that holds `specs` and `metadata`. Digests in `metadata` that are among those that the file is
    /// to keep are left out: they were made for another.
    ///
    /// # Errors
    /// What [`layout()`] refuses.
    pub fn new(
        specs: &'a [Spec<'a>],
        metadata: Option<&[(&'a str, &'a str)]>,
        format: Format,
        keep: Keep,
    ) -> Result<Sealed<'a>, FormatError> {
        let is_ours = |key: &str| key == CHECKSUMS_KEY || (keep.model_spec && key == MODEL_SPEC_KEY);
        let metadata: Vec<_> = metadata
            .unwrap_or_default()
            .iter()
            .copied()
            .filter(|pair| !is_ours(pair.0))
            .collect();
        let zeros = |algorithm| vec![Digest::zero(algorithm); specs.len()];
        let tensors = keep.tensors.map(|algorithm| (algorithm, zeros(algorithm)));
        let data = keep.model_spec.then(|| Digest::zero(Algorithm::Sha256));
        let order: Vec<usize> = (0..specs.len()).collect();
        let layout = laid_out(specs, &order, &metadata, format, tensors, data)?;
        Ok(Sealed {
            specs,
            metadata,
            format,
            keep,
            layout,
        })
    }

    /// The file, but for the tensors' bytes and for the digests, in whose places are zeros.
    #[must_use]
    pub fn layout(&self) -> &Layout {
        &self.layout
    }

    /// Writes the file: as [`crate::save`] does, with `payloads` in the order of the layout. Not into a pipe or a
    /// device, from which nothing can be read again.
    ///
    /// # Errors
    /// What [`crate::save`] says.
    pub fn save(
        &self,
        path: &Path,
        payloads: &[Payload<'_>],
        options: &SaveOptions,
        watch: &dyn Watch,
    ) -> Result<(), Error> {
        let seal = |file: &File, watch: &dyn Watch| self.head_of(file, watch);
        save_sealed(path, &self.layout.head, payloads, &seal, options, watch)
    }

    /// The head of the file, with the digests of what is in it.
    fn head_of(&self, file: &File, watch: &dyn Watch) -> Result<Vec<u8>, Failure> {
        let fault = |source| Failure::Read {
            position: 0,
            expected: self.layout.head.len(),
            found: 0,
            source: Some(source),
        };
        let source = file.try_clone().and_then(FileSource::new).map_err(fault)?;
        let header = &self.layout.header;
        let start = header.data_start();
        let ranges = header
            .entries()
            .map(|entry| start + entry.begin..start + entry.end);
        let tensors = self
            .keep
            .tensors
            .map(|algorithm| (algorithm, Digests::new(algorithm, ranges)));
        let data = self
            .keep
            .model_spec
            .then(|| Digests::new(Algorithm::Sha256, Some(start..header.file_nbytes())));
        let all: Vec<&Digests> = tensors.iter().map(|pair| &pair.1).chain(&data).collect();
        read_through(&source, &all, &Quiet(watch))?;
        // Everything was fed, so everything has a digest.
        let tensors = tensors.map(|(algorithm, digests)| {
            let found = digests.finish().into_iter();
            (
                algorithm,
                found
                    .map(|digest| digest.unwrap_or(Digest::zero(algorithm)))
                    .collect(),
            )
        });
        let data = data.and_then(|digests| digests.finish().pop().flatten());
        let layout = laid_out(
            self.specs,
            &self.layout.order,
            &self.metadata,
            self.format,
            tensors,
            data,
        )
        .map_err(|fault_| fault(std::io::Error::other(fault_)))?;
        Ok(layout.head)
    }
}

/// Lays out the file with these digests: of the tensors, in the order `order` of `specs`, and of the data section.
/// However the digests are, the head has the same length.
fn laid_out(
    specs: &[Spec<'_>],
    order: &[usize],
    metadata: &[(&str, &str)],
    format: Format,
    tensors: Option<(Algorithm, Vec<Digest>)>,
    data: Option<Digest>,
) -> Result<Layout, FormatError> {
    let record = tensors.map(|(algorithm, digests)| {
        let named = order
            .iter()
            .zip(digests)
            .map(|(&number, digest)| (specs[number].name, Cow::Owned(digest.to_string())));
        Checksums::new(algorithm.name(), named).map(|record| record.render())
    });
    // A name that comes twice is refused by the layout, in its own words.
    let record = record.and_then(Result::ok);
    let data = data.map(|digest| format!("0x{digest}"));
    let ours = [
        (CHECKSUMS_KEY, record.as_deref()),
        (MODEL_SPEC_KEY, data.as_deref()),
    ];
    let ours = ours.into_iter().filter_map(|(key, value)| Some((key, value?)));
    let pairs: Vec<(&str, &str)> = metadata.iter().copied().chain(ours).collect();
    layout(specs, Some(&pairs), format)
}

/// Asks a watch, but tells it nothing: the bytes were counted when they were written.
struct Quiet<'w>(&'w dyn Watch);

impl Watch for Quiet<'_> {
    fn interrupted(&self) -> bool {
        self.0.interrupted()
    }
}
