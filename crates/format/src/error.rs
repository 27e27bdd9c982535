//! Faults of a header, or of a list of tensors to be written.

use alloc::boxed::Box;
use alloc::string::String;
use alloc::vec::Vec;
use core::fmt;

use crate::dtype::Dtype;
use crate::extent::{self, ExtentError, dims, to_u64};
use crate::format::Format;
use crate::metadata::METADATA_KEY;
use crate::quoted::{Quoted, Shape};
use crate::sniff::Foreign;

/// A rule of FORMAT.md that a file, or a list of tensors, breaks.
///
/// Names and numbers are kept unchanged; `Display` escapes and shortens them. It never mentions a path: code that knows
/// the path adds it.
///
/// ```
/// use ingot_format::{FormatError, Header, Limits};
///
/// let fault = Header::parse(b"short", 5, &Limits::default()).unwrap_err();
/// assert_eq!(fault, FormatError::TooShort { file_nbytes: 5 });
/// ```
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum FormatError {
    /// F1: the file has no room for the 8 bytes of the header's length.
    TooShort {
        /// Size of the file.
        file_nbytes: u64,
    },
    /// F2: the header is longer than the limit.
    HeaderTooLarge {
        /// The length that the file claims, or that a writer would need.
        found: u64,
        /// [`crate::Limits::header_nbytes`].
        limit: u64,
    },
    /// F3: the header would pass the end of the file.
    HeaderPastEnd {
        /// The length that the file claims.
        header_nbytes: u64,
        /// Size of the file.
        file_nbytes: u64,
    },
    /// F4: the header, or a string in it, is not UTF-8.
    InvalidUtf8 {
        /// Counted from the start of the file.
        position: u64,
    },
    /// F5: the header is not one JSON object with white space around it.
    InvalidJson {
        /// The JSON parser's message, with line and column.
        reason: String,
    },
    /// F6: `__metadata__` is not an object of strings.
    InvalidMetadata {
        /// The key at fault, if one of the values is wrong.
        key: Option<String>,
        /// A description of the value.
        found: String,
    },
    /// F7: two tensors have the same name.
    DuplicateTensor {
        /// The name, escapes undone.
        tensor: String,
    },
    /// F7: two metadata pairs have the same key, or there are two `__metadata__`.
    DuplicateMetadataKey {
        /// The key, escapes undone.
        key: String,
    },
    /// F7: an entry has a field twice.
    DuplicateField {
        /// The entry's name.
        tensor: String,
        /// The field.
        field: &'static str,
    },
    /// F8: an entry, or a field of it, is of the wrong kind.
    InvalidEntry {
        /// The entry's name.
        tensor: String,
        /// `dtype`, `shape` or `data_offsets`; empty if the entry itself is not an object.
        field: &'static str,
        /// The kind of value that is required.
        expected: &'static str,
        /// A description of the value.
        found: String,
    },
    /// F8: an entry lacks a field.
    MissingField {
        /// The entry's name.
        tensor: String,
        /// The field.
        field: &'static str,
    },
    /// F8: the format has no such dtype.
    UnknownDtype {
        /// The entry's name.
        tensor: String,
        /// As the file spells it.
        dtype: String,
    },
    /// F9: shape and dtype have no size in bytes.
    Extent {
        /// The entry's name.
        tensor: String,
        /// Its dtype.
        dtype: Dtype,
        /// Its shape.
        shape: Vec<u64>,
        /// The reason.
        reason: ExtentError,
    },
    /// F10: the range does not have the size that shape and dtype need, or ends before it begins.
    SizeMismatch {
        /// The entry's name.
        tensor: String,
        /// Its dtype.
        dtype: Dtype,
        /// Its shape.
        shape: Vec<u64>,
        /// Bytes that shape and dtype need.
        expected: u64,
        /// Begin of the data according to the header.
        begin: u64,
        /// End of the data according to the header.
        end: u64,
    },
    /// F11: bytes of the data section belong to no tensor.
    Hole {
        /// The first tensor after the hole.
        tensor: String,
        /// Begin of the hole.
        begin: u64,
        /// End of the hole.
        end: u64,
    },
    /// F11: two tensors share bytes, or are out of order in a `.bt` header.
    Overlap {
        /// The tensor that begins too early.
        tensor: String,
        /// The tensor before it.
        other: String,
        /// Begin of `tensor`.
        begin: u64,
        /// End of `other`.
        end: u64,
    },
    /// F12: the file ends before the last tensor does.
    Truncated {
        /// The first tensor that is cut off.
        tensor: String,
        /// Bytes that the tensors need.
        expected: u64,
        /// Bytes that the data section has.
        found: u64,
    },
    /// F12: the file continues after the last tensor.
    TrailingBytes {
        /// Bytes that the tensors need.
        expected: u64,
        /// Bytes that the data section has.
        found: u64,
    },
    /// B1: the byte that announces metadata is neither 0 nor 1.
    InvalidOption {
        /// The byte.
        found: u8,
    },
    /// B2: a number is not in its shortest form, or is wider than 64 bits.
    InvalidVarint {
        /// Counted from the start of the file.
        position: u64,
    },
    /// B3: a length, count or string passes the end of the header.
    UnexpectedEnd {
        /// Counted from the start of the file.
        position: u64,
        /// The item that was being read.
        reading: &'static str,
    },
    /// B4: the last entry is followed by anything other than up to 7 spaces.
    InvalidPadding {
        /// Counted from the start of the file.
        position: u64,
    },
    /// The header's meaning is clear, but it deviates from the specification, which [`crate::Leniency::Refuse`]
    /// rejects.
    NotStrict {
        /// The deviation.
        found: String,
    },
    /// The file has another format entirely.
    Foreign {
        /// The format.
        kind: Foreign,
        /// The rule that the file breaks.
        fault: Box<FormatError>,
    },
    /// A tensor to be written has the reserved name `__metadata__`.
    ReservedName,
    /// Space in the header or an alignment of the data was requested for a `.bt` file, where rule B4 allows neither.
    NoRoom,
    /// A tensor to be written has a dtype that the format lacks.
    UnsupportedDtype {
        /// The tensor's name.
        tensor: String,
        /// Its dtype.
        dtype: Dtype,
        /// The format to be written.
        format: Format,
    },
    /// The bytes of a tensor to be written do not fit its shape and dtype.
    WrongLength {
        /// The tensor's name.
        tensor: String,
        /// Its dtype.
        dtype: Dtype,
        /// Its shape.
        shape: Vec<u64>,
        /// Bytes that shape and dtype need.
        expected: u64,
        /// Bytes that it has.
        found: u64,
    },
    /// A file to be written to memory does not fit there.
    TooLargeForMemory {
        /// Size of the file.
        nbytes: u64,
    },
    /// An error of the operating system, for functions with the types of the safetensors crate. This crate itself opens
    /// no files.
    #[cfg(feature = "std")]
    IoError(SystemError),
    /// The file is valid, but not in the requested format.
    OtherFormat {
        /// The requested format.
        expected: Format,
        /// The format of the file.
        found: Format,
    },
    /// No tensor has this name. Named as in the safetensors crate, because programs match it.
    TensorNotFound(String),
    /// A dtype, a shape, and a number of bytes that does not fit them. Named as in the safetensors crate.
    InvalidTensorView(Dtype, Vec<usize>, usize),
}

impl FormatError {
    /// A stable name for the fault, in kebab-case; programs may match it.
    #[must_use]
    pub fn code(&self) -> &'static str {
        match self {
            FormatError::TooShort { .. } => "too-short",
            FormatError::HeaderTooLarge { .. } => "header-too-large",
            FormatError::HeaderPastEnd { .. } => "header-past-end",
            FormatError::InvalidUtf8 { .. } => "invalid-utf8",
            FormatError::InvalidJson { .. } => "invalid-json",
            FormatError::InvalidMetadata { .. } => "invalid-metadata",
            FormatError::DuplicateTensor { .. } => "duplicate-tensor",
            FormatError::DuplicateMetadataKey { .. } => "duplicate-metadata-key",
            FormatError::DuplicateField { .. } => "duplicate-field",
            FormatError::InvalidEntry { .. } => "invalid-entry",
            FormatError::MissingField { .. } => "missing-field",
            FormatError::UnknownDtype { .. } => "unknown-dtype",
            FormatError::Extent {
                reason: ExtentError::Overflow,
                ..
            } => "size-overflow",
            FormatError::Extent {
                reason: ExtentError::PartialByte { .. },
                ..
            } => "partial-byte",
            FormatError::SizeMismatch { begin, end, .. } if begin > end => "reversed-range",
            FormatError::SizeMismatch { .. } => "size-mismatch",
            FormatError::Hole { .. } => "hole",
            FormatError::Overlap { .. } => "overlap",
            FormatError::Truncated { .. } => "truncated",
            FormatError::TrailingBytes { .. } => "trailing-bytes",
            FormatError::InvalidOption { .. } => "invalid-option",
            FormatError::InvalidVarint { .. } => "invalid-varint",
            FormatError::UnexpectedEnd { .. } => "unexpected-end",
            FormatError::InvalidPadding { .. } => "invalid-padding",
            FormatError::NotStrict { .. } => "not-strict",
            FormatError::Foreign { .. } => "foreign-file",
            FormatError::ReservedName => "reserved-name",
            FormatError::NoRoom => "no-room",
            FormatError::UnsupportedDtype { .. } => "unsupported-dtype",
            FormatError::WrongLength { .. } => "wrong-length",
            FormatError::TooLargeForMemory { .. } => "too-large-for-memory",
            #[cfg(feature = "std")]
            FormatError::IoError(_) => "io",
            FormatError::OtherFormat { .. } => "other-format",
            FormatError::TensorNotFound(_) => "unknown-tensor",
            FormatError::InvalidTensorView(dtype, shape, _) => match extent::nbytes(*dtype, &dims(shape)) {
                Ok(_) => "wrong-length",
                Err(ExtentError::Overflow) => "size-overflow",
                Err(ExtentError::PartialByte { .. }) => "partial-byte",
            },
        }
    }

    /// Returns the tensor at fault, if there is one.
    #[must_use]
    pub fn tensor(&self) -> Option<&str> {
        match self {
            FormatError::DuplicateTensor { tensor }
            | FormatError::DuplicateField { tensor, .. }
            | FormatError::InvalidEntry { tensor, .. }
            | FormatError::MissingField { tensor, .. }
            | FormatError::UnknownDtype { tensor, .. }
            | FormatError::Extent { tensor, .. }
            | FormatError::SizeMismatch { tensor, .. }
            | FormatError::Hole { tensor, .. }
            | FormatError::Overlap { tensor, .. }
            | FormatError::Truncated { tensor, .. }
            | FormatError::UnsupportedDtype { tensor, .. }
            | FormatError::WrongLength { tensor, .. }
            | FormatError::TensorNotFound(tensor) => Some(tensor),
            FormatError::ReservedName => Some(METADATA_KEY),
            _ => None,
        }
    }

    /// Returns the two sizes that differ, in bytes: expected, found.
    #[must_use]
    pub fn expected_found(&self) -> Option<(u64, u64)> {
        match *self {
            FormatError::TooShort { file_nbytes } => Some((8, file_nbytes)),
            FormatError::HeaderTooLarge { found, limit } => Some((limit, found)),
            FormatError::HeaderPastEnd {
                header_nbytes,
                file_nbytes,
            } => Some((header_nbytes.saturating_add(8), file_nbytes)),
            FormatError::SizeMismatch {
                expected, begin, end, ..
            } => Some((expected, end.saturating_sub(begin))),
            FormatError::Truncated { expected, found, .. }
            | FormatError::TrailingBytes { expected, found }
            | FormatError::WrongLength { expected, found, .. } => Some((expected, found)),
            FormatError::InvalidTensorView(dtype, ref shape, found) => {
                let expected = extent::nbytes(dtype, &dims(shape)).ok()?;
                Some((expected, to_u64(found)))
            }
            FormatError::Foreign { ref fault, .. } => fault.expected_found(),
            _ => None,
        }
    }

    /// Returns the bytes of the data section at fault.
    #[must_use]
    pub fn range(&self) -> Option<(u64, u64)> {
        match *self {
            FormatError::SizeMismatch { begin, end, .. }
            | FormatError::Hole { begin, end, .. }
            | FormatError::Overlap { begin, end, .. } => Some((begin, end)),
            _ => None,
        }
    }
}

impl fmt::Display for FormatError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if let Some(tensor) = self.tensor() {
            write!(f, "tensor {}: ", Quoted(tensor))?;
        }
        match self {
            FormatError::TooShort { file_nbytes } => {
                write!(
                    f,
                    "too short for a header length: expected at least 8 bytes, found {file_nbytes}"
                )
            }
            FormatError::HeaderTooLarge { found, limit } => {
                write!(
                    f,
                    "header too large: expected at most {limit} bytes, found {found}"
                )
            }
            FormatError::HeaderPastEnd {
                header_nbytes,
                file_nbytes,
            } => write!(
                f,
                "header passes the end of the file: expected {header_nbytes} bytes after the first 8, found {} \
                 — incomplete download?",
                file_nbytes.saturating_sub(8)
            ),
            FormatError::InvalidUtf8 { position } => {
                write!(f, "invalid UTF-8 at byte {position} of the file")
            }
            FormatError::InvalidJson { reason } => write!(f, "invalid JSON in the header: {reason}"),
            FormatError::InvalidMetadata {
                key: Some(key),
                found,
            } => {
                write!(
                    f,
                    "metadata key {}: expected a string, found {found}",
                    Quoted(key)
                )
            }
            FormatError::InvalidMetadata { key: None, found } => {
                write!(f, "metadata: expected an object of strings, found {found}")
            }
            FormatError::DuplicateTensor { .. } => f.write_str("two tensors have this name"),
            FormatError::DuplicateMetadataKey { key } => {
                write!(f, "metadata key {}: it occurs twice", Quoted(key))
            }
            FormatError::DuplicateField { field, .. } => write!(f, "field `{field}` occurs twice"),
            FormatError::InvalidEntry {
                field: "",
                expected,
                found,
                ..
            } => {
                write!(f, "expected {expected}, found {found}")
            }
            FormatError::InvalidEntry {
                field,
                expected,
                found,
                ..
            } => {
                write!(f, "field `{field}`: expected {expected}, found {found}")
            }
            FormatError::MissingField { field, .. } => write!(f, "field `{field}` is missing"),
            FormatError::UnknownDtype { dtype, .. } => write!(f, "unknown dtype {}", Quoted(dtype)),
            FormatError::Extent {
                dtype, shape, reason, ..
            } => write!(f, "shape {} of {dtype}: {reason}", Shape(shape)),
            FormatError::SizeMismatch {
                dtype,
                shape,
                expected,
                begin,
                end,
                ..
            } => write!(
                f,
                "shape {} of {dtype} needs {expected} bytes, header gives {begin}..{end}",
                Shape(shape)
            ),
            FormatError::Hole { begin, end, .. } => {
                write!(
                    f,
                    "bytes {begin}..{end} of the data before it belong to no tensor"
                )
            }
            FormatError::Overlap {
                other, begin, end, ..
            } => {
                write!(
                    f,
                    "begins at byte {begin} of the data, before {} ends at {end}",
                    Quoted(other)
                )
            }
            FormatError::Truncated { expected, found, .. } => write!(
                f,
                "the file is {} bytes short: expected {expected} bytes of data, found {found} — incomplete download?",
                expected - found
            ),
            FormatError::TrailingBytes { expected, found } => write!(
                f,
                "{} bytes follow the last tensor: expected {expected} bytes of data, found {found}",
                found - expected
            ),
            FormatError::InvalidOption { found } => {
                write!(f, "first byte of the header: expected 0 or 1, found {found}")
            }
            FormatError::InvalidVarint { position } => {
                write!(
                    f,
                    "number at byte {position} of the file is not in its shortest form, or too wide"
                )
            }
            FormatError::UnexpectedEnd { position, reading } => {
                write!(
                    f,
                    "{reading} at byte {position} of the file passes the end of the header"
                )
            }
            FormatError::InvalidPadding { position } => {
                write!(
                    f,
                    "expected up to 7 spaces after the last entry, found other bytes at byte {position} of the file"
                )
            }
            FormatError::NotStrict { found } => write!(f, "not strictly as specified: {found}"),
            FormatError::Foreign { kind, fault } => write!(f, "this is {kind} ({fault})"),
            FormatError::ReservedName => f.write_str("the name is reserved for metadata"),
            FormatError::NoRoom => f.write_str(
                "a bintensors header has no room for padding (at most 7 bytes) — save as safetensors",
            ),
            FormatError::UnsupportedDtype { dtype, format, .. } => {
                write!(
                    f,
                    "{format} has no dtype {dtype} — save as safetensors, or convert it"
                )
            }
            FormatError::WrongLength {
                dtype,
                shape,
                expected,
                found,
                ..
            } => {
                let shape = Shape(shape);
                write!(
                    f,
                    "shape {shape} of {dtype} needs {expected} bytes, data has {found}"
                )
            }
            FormatError::TooLargeForMemory { nbytes } => {
                write!(f, "no room in memory for a file of {nbytes} bytes")
            }
            #[cfg(feature = "std")]
            FormatError::IoError(source) => write!(f, "{source}"),
            FormatError::OtherFormat { expected, found } => {
                write!(f, "not the requested format: expected {expected}, found {found}")
            }
            FormatError::TensorNotFound(_) => f.write_str("there is no such tensor"),
            FormatError::InvalidTensorView(dtype, shape, found) => {
                let dims = dims(shape);
                write!(f, "shape {} of {dtype}", Shape(&dims))?;
                match extent::nbytes(*dtype, &dims) {
                    Ok(expected) => write!(f, " needs {expected} bytes, data has {found}"),
                    Err(reason) => write!(f, ": {reason}"),
                }
            }
        }
    }
}

impl core::error::Error for FormatError {
    fn source(&self) -> Option<&(dyn core::error::Error + 'static)> {
        match self {
            #[cfg(feature = "std")]
            FormatError::IoError(source) => Some(&*source.0),
            _ => None,
        }
    }
}

/// An error of the operating system: a [`std::io::Error`] that can be cloned and compared, like the faults that contain
/// it.
///
/// ```
/// use ingot_format::SystemError;
/// let fault = SystemError::from(std::io::Error::from_raw_os_error(2));
/// assert_eq!(fault.kind(), std::io::ErrorKind::NotFound);
/// assert_eq!(fault, fault.clone());
/// ```
#[cfg(feature = "std")]
#[derive(Clone, Debug)]
pub struct SystemError(alloc::sync::Arc<std::io::Error>);

#[cfg(feature = "std")]
impl core::ops::Deref for SystemError {
    type Target = std::io::Error;

    fn deref(&self) -> &std::io::Error {
        &self.0
    }
}

/// Makes `?` work on reading a file in a function that returns a `SafeTensorError`.
#[cfg(feature = "std")]
impl From<std::io::Error> for FormatError {
    fn from(fault: std::io::Error) -> FormatError {
        FormatError::IoError(SystemError::from(fault))
    }
}

#[cfg(feature = "std")]
impl From<std::io::Error> for SystemError {
    fn from(fault: std::io::Error) -> SystemError {
        SystemError(alloc::sync::Arc::new(fault))
    }
}

/// Two errors are equal if their kind and the system's error number are.
#[cfg(feature = "std")]
impl PartialEq for SystemError {
    fn eq(&self, other: &SystemError) -> bool {
        (self.kind(), self.raw_os_error()) == (other.kind(), other.raw_os_error())
    }
}

#[cfg(feature = "std")]
impl Eq for SystemError {}

#[cfg(feature = "std")]
impl fmt::Display for SystemError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::dtype::Dtype;
    use alloc::string::ToString;

    #[test]
    fn expected_found_returns_the_sizes_that_differ() {
        let tensor = || "a".to_string();
        for (fault, sizes) in [
            (FormatError::TooShort { file_nbytes: 7 }, Some((8, 7))),
            (FormatError::HeaderTooLarge { found: 9, limit: 5 }, Some((5, 9))),
            (
                FormatError::HeaderPastEnd {
                    header_nbytes: 20,
                    file_nbytes: 12,
                },
                Some((28, 12)),
            ),
            (
                FormatError::TrailingBytes {
                    expected: 3,
                    found: 4,
                },
                Some((3, 4)),
            ),
            (
                FormatError::WrongLength {
                    tensor: tensor(),
                    dtype: Dtype::F32,
                    shape: [2].to_vec(),
                    expected: 8,
                    found: 7,
                },
                Some((8, 7)),
            ),
            (
                FormatError::InvalidTensorView(Dtype::F32, [2, 3].to_vec(), 20),
                Some((24, 20)),
            ),
            (FormatError::DuplicateTensor { tensor: tensor() }, None),
        ] {
            assert_eq!(fault.expected_found(), sizes, "{fault}");
            let foreign = FormatError::Foreign {
                kind: Foreign::Gzip,
                fault: alloc::boxed::Box::new(fault),
            };
            assert_eq!(foreign.expected_found(), sizes, "{foreign}");
        }
    }

    #[test]
    fn a_range_fault_has_its_range_tensor_and_sizes() {
        let tensor = || "a".to_string();
        let (begin, end) = (3, 10);
        let mismatch = FormatError::SizeMismatch {
            tensor: tensor(),
            dtype: Dtype::F32,
            shape: [2].to_vec(),
            expected: 8,
            begin,
            end,
        };
        assert_eq!(mismatch.expected_found(), Some((8, 7)));
        let hole = FormatError::Hole {
            tensor: tensor(),
            begin,
            end,
        };
        let overlap = FormatError::Overlap {
            tensor: tensor(),
            other: "b".to_string(),
            begin,
            end,
        };
        for fault in [mismatch, hole, overlap] {
            assert_eq!(
                (fault.tensor(), fault.range()),
                (Some("a"), Some((3, 10))),
                "{fault}"
            );
        }
        assert_eq!(
            (FormatError::NoRoom.tensor(), FormatError::NoRoom.range()),
            (None, None)
        );
        assert_eq!(FormatError::ReservedName.tensor(), Some(METADATA_KEY));
    }

    #[cfg(feature = "std")]
    #[test]
    fn a_system_error_keeps_its_message_and_is_the_source() {
        use core::error::Error as _;
        let system = std::io::Error::other("the disk is gone");
        let fault = FormatError::from(system);
        assert_eq!(
            SystemError::from(std::io::Error::other("the disk is gone")).to_string(),
            "the disk is gone"
        );
        assert_eq!(
            fault.source().map(ToString::to_string).as_deref(),
            Some("the disk is gone")
        );
        assert!(FormatError::NoRoom.source().is_none());
    }

    #[cfg(feature = "std")]
    #[test]
    fn system_errors_are_equal_if_kind_and_number_are() {
        use std::io;
        let fault = |fault: io::Error| SystemError::from(fault);
        let missing = || fault(io::Error::from_raw_os_error(2));
        assert_eq!(missing(), missing());
        assert_ne!(missing(), fault(io::Error::from_raw_os_error(13)));
        // The same kind, but one has no number.
        assert_ne!(missing(), fault(io::ErrorKind::NotFound.into()));
        assert_ne!(
            fault(io::ErrorKind::NotFound.into()),
            fault(io::ErrorKind::TimedOut.into())
        );
    }
}
