//! The limits of a reader, each with its unit and its reason.

/// The limits of a reader.
///
/// ```
/// use ingot_format::{Header, Limits};
///
/// let limits = Limits { header_nbytes: 10, ..Limits::default() };
/// let text = br#"{"__metadata__":{"title":"long"}}"#;
/// assert_eq!(Header::parse_json(text, &limits).unwrap_err().code(), "header-too-large");
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Limits {
    /// Largest header that is accepted, in bytes, without the 8 bytes of its length. Values above [`Limits::CEILING`]
    /// are lowered to it.
    pub header_nbytes: u64,
    /// Whether harmless deviations from the specification are accepted.
    pub leniency: Leniency,
}

/// How to handle headers whose meaning is clear but whose form deviates from the specification: white space before the
/// JSON or other than spaces after it, `"__metadata__": null`, unknown fields in an entry.
///
/// ```
/// use ingot_format::{Header, Leniency, Limits};
///
/// let text = br#"{"__metadata__":null}"#;
/// assert!(Header::parse_json(text, &Limits::default()).is_ok());
/// let strict = Limits { leniency: Leniency::Refuse, ..Limits::default() };
/// assert_eq!(Header::parse_json(text, &strict).unwrap_err().code(), "not-strict");
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub enum Leniency {
    /// Accept them, as safetensors 0.8.0 does.
    #[default]
    Accept,
    /// Reject them with [`crate::FormatError::NotStrict`].
    Refuse,
    /// Read the sound tensors of a file that breaks rules. [`crate::Header::findings`] lists its faults.
    Salvage,
}

impl Limits {
    /// Upstream's limit, 100 MB, so that every file readable there is accepted here.
    pub const HEADER_NBYTES: u64 = 100_000_000;
    /// A header counts its names and dimensions in 32 bits.
    pub const CEILING: u64 = 0xFFFF_FFFF;

    /// Returns the header limit in force.
    #[must_use]
    pub fn header_nbytes(&self) -> u64 {
        self.header_nbytes.min(Limits::CEILING)
    }
}

impl Default for Limits {
    fn default() -> Self {
        Limits {
            header_nbytes: Limits::HEADER_NBYTES,
            leniency: Leniency::Accept,
        }
    }
}
