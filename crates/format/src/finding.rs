//! What is wrong with a file, and what a lenient reader makes of it.

use alloc::boxed::Box;
use alloc::string::String;
use alloc::vec::Vec;

use crate::error::FormatError;
use crate::metadata::Metadata;
use crate::raw::RawHeader;

/// Most findings that are kept of one file. A header of 100 MB has room for millions of broken entries, and each finding
/// takes up to some hundred bytes; a file with more is refused.
const MAX_FINDINGS: usize = 1_000_000;

/// A rule that a file breaks, and what a lenient reader made of it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Finding {
    /// The rule.
    pub fault: FormatError,
    /// What was done.
    pub remedy: Remedy,
}

/// What a lenient reader does about a rule that is broken.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Remedy {
    /// The tensor that [`FormatError::tensor`] names is not among those of the header.
    TensorLeftOut,
    /// Bytes that belong to no tensor are passed over.
    BytesLeftOut,
    /// Metadata that is no object is passed over.
    ValueLeftOut,
    /// A value of the metadata that is no string is kept as its JSON, bytes that are not UTF-8 as U+FFFD.
    MadeText,
    /// Of what stands there several times, the last counts, as for readers that know nothing of duplicates.
    LastKept,
    /// It means what it says, and a writer writes it as it should be.
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

/// Findings in the order in which they were made.
#[derive(Debug, Default)]
pub(crate) struct Findings(Vec<Finding>);

impl Findings {
    /// Whether it is kept. One more than may be is, which is how `all` knows that there were more.
    pub(crate) fn add(&mut self, fault: FormatError, remedy: Remedy) -> bool {
        let has_room = self.0.len() <= MAX_FINDINGS;
        if has_room {
            self.0.push(Finding { fault, remedy });
        }
        has_room
    }

    /// All of them; `None` where there are too many.
    pub(crate) fn all(self) -> Option<Box<[Finding]>> {
        (self.0.len() <= MAX_FINDINGS).then(|| self.0.into())
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.0.is_empty()
    }
}

/// What a codec understood of a header: its entries, not yet checked, and what it had to leave out.
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
    /// Sets the metadata, each key with its last value.
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
