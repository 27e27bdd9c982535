//! Files that store digests of their own tensors.

use std::borrow::Cow;
use std::io;

use ingot_format::{
    CHECKSUMS_KEY, Checksums, Format, FormatError, Layout, LayoutOptions, MODEL_SPEC_KEY, Spec, layout_with,
};

use super::algorithm::{Algorithm, Digest};
use super::digests::Digests;

/// The digests that a new file stores.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Keep {
    /// A digest of each tensor, by this algorithm.
    pub tensors: Option<Algorithm>,
    /// A digest of the data section, as ModelSpec defines it.
    pub model_spec: bool,
}

/// The bytes of a new file before its tensors. The header has placeholders for digests of the file. They are
/// computed while the tensors are written, and replace the placeholders before the file gets its name.
/// A digest is computed from the bytes that are written, in memory that no other thread can change. So a tensor that changes
/// during the save still matches its digest.
///
/// ```
/// use ingot_format::{Dtype, Format, LayoutOptions, Spec};
/// use ingot_io::binding::{Keep, NewHeader, Pieces, save_pieces};
/// use ingot_io::{Algorithm, Payload, SaveOptions, Unwatched, verify};
/// let specs = [Spec { name: "bias", dtype: Dtype::F32, shape: &[2] }];
/// let keep = Keep { tensors: Some(Algorithm::Blake3), ..Keep::default() };
/// let file = NewHeader::new(&specs, None, Format::Safetensors, &LayoutOptions::default(), keep)?;
/// let folder = tempfile::tempdir()?;
/// let path = folder.path().join("bias.safetensors");
/// let payloads = [Payload::from(&b"12345678"[..])];
/// save_pieces(&path, Pieces::of_new(&file, &payloads), &SaveOptions::default(), &Unwatched)?;
/// assert!(verify(&path, None, &Unwatched)?.is_ok());
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Clone, Debug)]
pub struct NewHeader {
    keep: Keep,
    options: LayoutOptions,
    /// The bytes before the data, with zeros in place of digests.
    layout: Layout,
}

impl NewHeader {
    /// Lay out a file that holds `specs` and `metadata`, and the digests that `keep` names. If it names any, digests in
    /// `metadata` are removed: they were made for another file.
    ///
    /// # Errors
    /// As [`layout_with()`].
    pub fn new(
        specs: &[Spec<'_>],
        metadata: Option<&[(&str, &str)]>,
        format: Format,
        options: &LayoutOptions,
        keep: Keep,
    ) -> Result<NewHeader, FormatError> {
        let zeros = FileDigests {
            tensors: keep
                .tensors
                .map(|algorithm| (algorithm, vec![Digest::zero(algorithm); specs.len()])),
            data: keep.model_spec.then(|| Digest::zero(Algorithm::Sha256)),
        };
        let layout = if keep == Keep::default() {
            layout_with(specs, metadata, format, options)
        } else {
            laid_out(specs, metadata.unwrap_or_default(), format, options, &zeros)
        };
        Ok(NewHeader {
            keep,
            options: *options,
            layout: layout?,
        })
    }

    /// Return the places of the tensors, and the bytes before them, with zeros for digests.
    #[must_use]
    pub fn layout(&self) -> &Layout {
        &self.layout
    }

    /// Return whether the file keeps digests.
    #[must_use]
    pub fn keeps_digests(&self) -> bool {
        self.keep != Keep::default()
    }

    /// Begin to compute the digests.
    pub(crate) fn begin(&self) -> Sealing<'_> {
        let header = &self.layout.header;
        let start = header.data_start();
        let ranges = header
            .entries()
            .map(|entry| start + entry.begin..start + entry.end);
        let data = || Digests::new(Algorithm::Sha256, Some(start..header.file_nbytes()));
        Sealing {
            sealed: self,
            tensors: self.keep.tensors.map(|algorithm| Digests::new(algorithm, ranges)),
            data: self.keep.model_spec.then(data),
        }
    }
}

impl From<Layout> for NewHeader {
    /// Return the header of a file without digests.
    fn from(layout: Layout) -> NewHeader {
        NewHeader {
            keep: Keep::default(),
            options: LayoutOptions::default(),
            layout,
        }
    }
}

/// A file that is being written, and the digests of the bytes written so far.
pub(crate) struct Sealing<'s> {
    sealed: &'s NewHeader,
    tensors: Option<Digests>,
    data: Option<Digests>,
}

impl Sealing<'_> {
    fn all(&self) -> impl Iterator<Item = &Digests> {
        self.tensors.iter().chain(&self.data)
    }

    /// Hash the bytes at `position` of the file.
    pub(crate) fn feed(&self, position: u64, bytes: &[u8]) {
        self.all().for_each(|digests| digests.feed(position, bytes));
    }

    /// Return whether bytes must be fed in order, so that a thread may wait for another one.
    pub(crate) fn in_order(&self) -> bool {
        self.all().any(Digests::in_order)
    }

    /// Report that some bytes are missing, so that no thread waits for them.
    pub(crate) fn end(&self) {
        self.all().for_each(Digests::end);
    }

    /// Return the file with the digests of all bytes that were fed. Its head is as long as the one with zeros.
    ///
    /// # Errors
    /// [`io::ErrorKind::UnexpectedEof`] if some bytes were not fed.
    pub(crate) fn layout(self) -> io::Result<Layout> {
        let header = &self.sealed.layout.header;
        let taken = |digests: Digests| {
            let found: Option<Vec<Digest>> = digests.finish().into_iter().collect();
            found.ok_or_else(|| io::Error::from(io::ErrorKind::UnexpectedEof))
        };
        let (tensors, data) = (
            self.tensors.map(taken).transpose()?,
            self.data.map(taken).transpose()?,
        );
        let found = FileDigests {
            tensors: self.sealed.keep.tensors.zip(tensors),
            data: data.and_then(|mut digests| digests.pop()),
        };
        let specs = header.specs();
        let metadata = header
            .metadata()
            .into_iter()
            .flat_map(ingot_format::Metadata::iter);
        let metadata: Vec<_> = metadata.collect();
        let sealed = laid_out(&specs, &metadata, header.format(), &self.sealed.options, &found);
        let sealed = sealed.map_err(io::Error::other)?;
        debug_assert_eq!(sealed.head.len(), self.sealed.layout.head.len());
        Ok(sealed)
    }
}

/// Digests of the tensors of some specs, and of the data section.
struct FileDigests {
    tensors: Option<(Algorithm, Vec<Digest>)>,
    data: Option<Digest>,
}

/// Lays out the file with these digests, which replace all digests in `metadata`. The length of the head does not depend on
/// their values.
fn laid_out(
    specs: &[Spec<'_>],
    metadata: &[(&str, &str)],
    format: Format,
    options: &LayoutOptions,
    found: &FileDigests,
) -> Result<Layout, FormatError> {
    let record = found.tensors.as_ref().map(|(algorithm, digests)| {
        let named = specs
            .iter()
            .zip(digests)
            .map(|(spec, digest)| (spec.name, Cow::Owned(digest.to_string())));
        Checksums::new(algorithm.name(), named).map(|record| record.render())
    });
    // The layout refuses a duplicate name with its own error.
    let record = record.and_then(Result::ok);
    let data = found.data.map(|digest| format!("0x{digest}"));
    let ours = [
        (CHECKSUMS_KEY, record.as_deref()),
        (MODEL_SPEC_KEY, data.as_deref()),
    ];
    let ours = || ours.into_iter().filter_map(|(key, value)| Some((key, value?)));
    // An old record of digests is for other bytes, and is removed even if the new file has no digests.
    let is_stale = |key: &str| key == CHECKSUMS_KEY || ours().any(|(ours, _)| key == ours);
    let pairs: Vec<(&str, &str)> = metadata
        .iter()
        .copied()
        .filter(|pair| !is_stale(pair.0))
        .chain(ours())
        .collect();
    layout_with(specs, Some(&pairs), format, options)
}

#[cfg(test)]
mod tests {
    use super::*;
    use ingot_format::Dtype;

    #[test]
    fn a_digest_of_bytes_that_did_not_come_is_no_digest() {
        for algorithm in [Algorithm::Blake3, Algorithm::Sha256] {
            for (tensors, model_spec) in [(Some(algorithm), false), (None, true), (Some(algorithm), true)] {
                let shapes = [&[3][..], &[0]];
                let specs = [("a", shapes[0]), ("b", shapes[1])].map(|(name, shape)| Spec {
                    name,
                    dtype: Dtype::U8,
                    shape,
                });
                let keep = Keep { tensors, model_spec };
                let layout = LayoutOptions::default();
                let sealed = NewHeader::new(&specs, None, Format::Safetensors, &layout, keep).unwrap();
                let start = sealed.layout().header.data_start();
                for (bytes, is_all) in [(&b"abc"[..], true), (b"ab", false), (b"", false)] {
                    let sealing = sealed.begin();
                    sealing.feed(start, bytes);
                    let fault = sealing.layout().map_err(|fault| fault.kind());
                    let expected = (!is_all).then_some(io::ErrorKind::UnexpectedEof);
                    assert_eq!(fault.err(), expected, "{keep:?}, {bytes:?}");
                }
            }
        }
    }
}
