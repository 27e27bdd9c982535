//! Faults of a file, and how a lenient reader handled them.

use alloc::boxed::Box;
use alloc::string::String;
use alloc::vec::Vec;

use crate::error::FormatError;
use crate::metadata::Metadata;
use crate::raw::RawHeader;

/// The largest number of findings that are kept for one file. A header of 100 MB has room for millions of broken
/// entries, and each finding takes up to a few hundred bytes; a file with more findings is rejected.
const MAX_FINDINGS: usize = 1_000_000;

/// A rule that a file breaks, and how a lenient reader handled it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Finding {
    /// The broken rule.
    pub fault: FormatError,
    /// The action of the reader.
    pub remedy: Remedy,
}

/// The action of a lenient reader on a broken rule.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Remedy {
    /// The tensor named by [`FormatError::tensor`] is left out of the header.
    TensorLeftOut,
    /// Bytes that belong to no tensor are ignored.
    BytesLeftOut,
    /// Metadata that is not an object is ignored.
    ValueLeftOut,
    /// A metadata value that is not a string is kept as its JSON text; bytes that are not UTF-8 become U+FFFD.
    MadeText,
    /// Of several values for one name, the last is kept, as by readers that do not check for duplicates.
    LastKept,
    /// The meaning is clear; a writer writes it in the correct form.
    Rewritten,
}

impl Remedy {
    /// A stable name, in kebab-case; programs may match it.
    #[must_use]
    pub fn code(self) -> &'static str {
        match self {
            Remedy::TensorLeftOut => "tensor-left-out",
            Remedy::BytesLeftOut => "bytes-left-out",
            Remedy::ValueLeftOut => "value-left-out",
            Remedy::MadeText => "made-text",
            Remedy::LastKept => "last-kept",
            Remedy::Rewritten => "rewritten",
        }
    }
}

/// Findings in the order in which they were found.
#[derive(Debug, Default)]
pub(crate) struct Findings(Vec<Finding>);

impl Findings {
    /// Returns whether the finding is kept. One more than the limit is kept, so that `all` can detect that the limit
    /// was exceeded.
    pub(crate) fn add(&mut self, fault: FormatError, remedy: Remedy) -> bool {
        let has_room = self.0.len() <= MAX_FINDINGS;
        if has_room {
            self.0.push(Finding { fault, remedy });
        }
        has_room
    }

    /// All findings; `None` if there are more than the limit.
    pub(crate) fn all(self) -> Option<Box<[Finding]>> {
        (self.0.len() <= MAX_FINDINGS).then(|| self.0.into())
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.0.is_empty()
    }
}

/// The result of reading a header leniently: its entries, not yet checked, and the entries that could not be read.
#[derive(Debug, Default)]
pub(crate) struct Understood {
    pub(crate) raw: RawHeader,
    pub(crate) unread: Vec<Unread>,
    pub(crate) findings: Findings,
}

/// The bytes of an entry that could not be read.
#[derive(Debug)]
pub(crate) struct Unread {
    pub(crate) tensor: String,
    pub(crate) begin: u64,
    pub(crate) end: u64,
}

impl Understood {
    /// Sets the metadata, keeping the last value of each key.
    pub(crate) fn keep_last_of_each(&mut self, metadata: Option<Metadata>) {
        let Some((metadata, twice)) = metadata.map(Metadata::last_of_each) else {
            return;
        };
        for key in twice {
            let fault = FormatError::DuplicateMetadataKey { key };
            self.findings.add(fault, Remedy::LastKept);
        }
        self.raw.metadata = Some(metadata);
    }
}
