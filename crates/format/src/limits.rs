//! The limits of a reader, each with its unit and its reason.

/// What a reader is willing to take on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Limits {
    /// Largest header that is read, in bytes, without the 8 bytes of its length. Values above
    /// [`Limits::CEILING`] count as that.
    pub header_nbytes: u64,
    /// Whether what is harmless but not in the specification is accepted.
    pub leniency: Leniency,
}

/// What to do with headers that are clear in meaning but not as the specification writes them: white space
/// before the JSON or other than spaces after it, `"__metadata__": null`, unknown fields in an entry.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub enum Leniency {
    /// Accept them, as safetensors 0.8.0 does.
    #[default]
    Accept,
    /// Refuse them with [`crate::FormatError::NotStrict`].
    Refuse,
    /// Of a file that breaks rules, take the tensors that are sound. [`crate::Header::findings`] has what was wrong.
    Salvage,
}

impl Limits {
    /// Upstream's limit, so that no file readable there is refused here: 100 MB.
    pub const HEADER_NBYTES: u64 = 100_000_000;
    /// A header counts its names and dimensions in 32 bits.
    pub const CEILING: u64 = 0xFFFF_FFFF;

    /// The header limit that is in force.
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
