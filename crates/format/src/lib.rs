//! Bytes and headers of the safetensors and bintensors formats.
//!
//! [`Header::parse`] takes the start of a file and either gives a header that is proven right or names the rule
//! that the file breaks; the rules stand in
//! [FORMAT.md](https://docs.rs/crate/ingot-format/latest/source/FORMAT.md). [`layout()`] goes the other way.
//! [`Selection`] says which bytes of a tensor an index takes. This crate opens no file, starts no thread, and
//! contains no `unsafe`.
#![no_std]
#![forbid(unsafe_code)]

extern crate alloc;
#[cfg(any(feature = "std", test))]
extern crate std;

mod bintensors;
mod dtype;
mod entry;
mod error;
mod extent;
mod format;
mod header;
mod layout;
mod limits;
mod metadata;
mod quoted;
mod safetensors;
mod selection;
mod sniff;

pub use dtype::Dtype;
pub use entry::Entry;
pub use error::FormatError;
pub use extent::{ExtentError, nbytes, to_u64, to_usize};
pub use format::Format;
pub use header::Header;
pub use layout::{Layout, Spec, layout};
pub use limits::{Leniency, Limits};
pub use metadata::Metadata;
pub use quoted::{Escaped, Quoted};
pub use selection::{Index, Row, Rows, Run, Runs, Selection, SelectionError};
pub use sniff::Foreign;

/// The programs in FORMAT.md must run.
#[cfg(doctest)]
#[doc = include_str!("../FORMAT.md")]
struct FormatMd;

/// The key under which a safetensors header holds its metadata. No tensor may have this name.
pub const METADATA_KEY: &str = "__metadata__";
