//! One tensor of a header: one that was read, and one to be written.

use crate::dtype::Dtype;

/// A header's description of one tensor. Proven: `begin..end` is inside the data section and has exactly the size that
/// `shape` and `dtype` need.
///
/// ```
/// use ingot_format::{Dtype, Header, Limits};
///
/// let text = br#"{"bias":{"dtype":"F32","shape":[2],"data_offsets":[0,8]}}"#;
/// let header = Header::parse_json(text, &Limits::default())?;
/// let bias = header.get("bias").expect("the header has it");
/// assert_eq!((bias.dtype, bias.shape, bias.nbytes()), (Dtype::F32, &[2][..], 8));
/// # Ok::<(), ingot_format::FormatError>(())
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Entry<'h> {
    /// The tensor's name.
    pub name: &'h str,
    /// Type of the elements.
    pub dtype: Dtype,
    /// Elements along each dimension, outermost first. Empty for a scalar.
    pub shape: &'h [u64],
    /// First byte, counted from the start of the data section.
    pub begin: u64,
    /// Byte after the last, counted from the start of the data section.
    pub end: u64,
}

impl Entry<'_> {
    /// The tensor's size in bytes.
    #[must_use]
    pub const fn nbytes(&self) -> u64 {
        self.end - self.begin
    }
}

/// A tensor to be written, without its bytes.
///
/// ```
/// use ingot_format::{Dtype, Format, Spec, layout};
///
/// let specs = [Spec { name: "bias", dtype: Dtype::F32, shape: &[2] }];
/// let new = layout(&specs, None, Format::Safetensors)?;
/// assert_eq!(new.header.data_nbytes(), 8);
/// # Ok::<(), ingot_format::FormatError>(())
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Spec<'a> {
    /// Its name.
    pub name: &'a str,
    /// Type of the elements.
    pub dtype: Dtype,
    /// Elements along each dimension.
    pub shape: &'a [u64],
}
