//! Bytes and headers of the safetensors and bintensors formats.
//!
//! [`Header::parse`] reads the start of a file and returns either a header whose claims are all proven or the rule that
//! the file breaks. The rules are in [FORMAT.md](https://docs.rs/crate/ingot-format/latest/source/FORMAT.md).
//! [`layout()`] does the reverse. [`Selection`] computes which bytes of a tensor an index selects. This crate opens no
//! file, starts no thread, and contains no `unsafe`.
//!
//! Files in memory are read with [`SafeTensors`] and [`BinTensors`] and written with [`serialize`]:
//!
//! ```
//! use ingot_format::{Dtype, SafeTensors, TensorView, serialize};
//!
//! let bias = TensorView::new(Dtype::F32, vec![2], b"12345678")?;
//! let file = serialize([("bias", &bias)], None)?;
//! assert_eq!(SafeTensors::deserialize(&file)?.tensor("bias")?, bias);
//! # Ok::<(), ingot_format::FormatError>(())
//! ```
//!
//! # Coming from the safetensors crate
//!
//! `use safetensors::…` becomes `use ingot_format::…`: the names of that crate's root and of its modules `tensor` and
//! `slice` are here, and again in the module [`safetensors`]; [`bintensors`] has the names of the bintensors crate.
//! `serialize_to_file` opens a file, so it is in the crate `ingot-io`, which re-exports all of these names. The
//! differences:
//!
//! - `SafeTensorError` is an alias of [`FormatError`], with other variants; `TensorNotFound`, `InvalidTensorView` and
//!   `IoError` are unchanged.
//! - Names and tensors are in data order; the order does not change from run to run.
//! - In [`mod@slice`], an empty range selects no bytes; in that crate, it selects all bytes of the tensor if
//!   the index has another range or a step too. A range that ends before it begins is rejected, where that crate panics. An empty
//!   range may be at the end of a dimension, as in Rust slices.
#![cfg_attr(docsrs, feature(doc_cfg))]
#![no_std]
#![forbid(unsafe_code)]

extern crate alloc;
#[cfg(any(feature = "std", test))]
extern crate std;

pub mod bintensors;
mod checksums;
mod codec;
mod delta;
mod dtype;
mod edit;
mod entry;
mod error;
mod extent;
mod finding;
mod format;
#[cfg(feature = "fuzzing")]
#[doc(hidden)]
pub mod fuzzing;
mod header;
mod index;
mod layout;
mod limits;
#[cfg(feature = "std")]
mod lock;
mod metadata;
mod name_order;
mod natural;
mod quoted;
mod raw;
pub mod safetensors;
mod salvage;
mod selection;
mod serialize;
mod shared;
pub mod slice;
mod sniff;
mod stop;
#[cfg(feature = "std")]
pub mod tensor;
mod tensors;
mod view;
mod window;

pub use checksums::{CHECKSUMS_KEY, Checksums, ChecksumsError, MODEL_SPEC_KEY};
pub use delta::{DELTA_KEY, DELTA_VERSION, DeltaError, DeltaRecord, Version};
pub use dtype::Dtype;
pub use edit::edit_metadata;
pub use entry::{Entry, Spec};
#[cfg(feature = "std")]
pub use error::SystemError;
pub use error::{FormatError, FormatError as SafeTensorError};
pub use extent::{ExtentError, nbytes, saturating_usize, to_u64, to_usize};
pub use finding::{Finding, Remedy};
pub use format::Format;
pub use header::Header;
pub use index::{IndexError, IndexReader, ShardHeaders, ShardIndex, ShardNameFault};
pub use layout::{Align, Layout, LayoutOptions, Order, layout, layout_with};
pub use limits::{Leniency, Limits};
#[cfg(feature = "std")]
#[doc(hidden)]
pub use lock::{briefly, locked};
pub use metadata::{METADATA_KEY, Metadata};
pub use natural::natural_order;
pub use quoted::{Escaped, Quoted};
#[cfg(feature = "std")]
pub use safetensors::serialize;
pub use selection::{Index, Places, Row, Rows, Run, Runs, Selection, SelectionError, Strides};
pub use serialize::{Contents, to_vec};
pub use shared::{Excerpt, SHARED_KEY, SharedError, SharedName, parse_shared, render_shared};
pub use sniff::{Foreign, UNFINISHED_PATCH};
pub use stop::{Caller, StopFlag};
pub use tensors::{BinTensors, Binary, Json, Kind, SafeTensors, Tensors};
pub use view::{TensorView, View};
pub use window::HeaderWindow;

/// The program in README.md must run.
#[cfg(all(doctest, feature = "std"))]
#[doc = include_str!("../README.md")]
struct ReadmeMd;

/// The programs in FORMAT.md must run.
#[cfg(doctest)]
#[doc = include_str!("../FORMAT.md")]
struct FormatMd;
