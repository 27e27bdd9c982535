//! Opens, reads and saves safetensors and bintensors files.
//!
//! [`Archive`] opens a file: its header is proven ([`ingot_format::Header`]), its tensors are views of a mapping
//! or are read in parallel into memory of their own. What is read, and to where, is a [`Plan`].
//!
//! ```
//! use ingot_io::{Archive, Backend, Dtype, OpenOptions, TensorView, serialize_to_file};
//!
//! let path = std::env::temp_dir().join(format!("ingot-io-{}.safetensors", std::process::id()));
//! let bias = TensorView::new(Dtype::F32, vec![2], b"12345678")?;
//! serialize_to_file([("bias", &bias)], None, &path)?; // on the disk when it returns
//!
//! let archive = Archive::open(&path, &OpenOptions::default())?;
//! assert!(archive.header().metadata().is_none());
//! for tensor in archive.tensors() {
//!     println!("{}: {} {:?}", tensor.entry().name, tensor.entry().dtype, tensor.entry().shape);
//! }
//! assert_eq!(archive.read("bias")?.to_vec(), b"12345678");
//!
//! let missing = archive.read("biass").map(drop).map_err(|error| (error.code(), error.to_string()));
//! assert!(matches!(missing, Err(("unknown-tensor", said)) if said.contains("did you mean `bias`?")));
//!
//! // A file that others may shorten is read, not mapped.
//! let owned = OpenOptions { backend: Backend::Pread, ..OpenOptions::default() };
//! assert_eq!(Archive::open(&path, &owned)?.backend(), "pread");
//! # std::fs::remove_file(path)?;
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
//!
//! With the feature `remote`, files behind URLs are opened ([`Checkpoint::open_url`]) and downloaded ([`download`]).

#![cfg_attr(docsrs, feature(doc_cfg))]

// From the ground up: `sync`; `options`, `digest`, `convert`, `residency`; `error`; `disk`, `watch`, `memory`, `values`; `source`;
// `heads`, `backend`, `workers`; `archive`; `payload`, `checkpoint`; `read`; `distance`, `statistics`, `verify`; `save`;
// `serialize`, `remote`; `edit`; `writer`; `fuzzing`. Each imports what stands below it: scripts/check-floors.
mod archive;
mod backend;
mod checkpoint;
mod convert;
mod device;
mod digest;
mod disk;
mod distance;
mod edit;
mod error;
#[cfg(feature = "fuzzing")]
#[doc(hidden)]
pub mod fuzzing;
mod heads;
mod memory;
mod options;
mod payload;
mod read;
#[cfg(feature = "remote")]
mod remote;
#[cfg(target_os = "linux")]
mod residency;
mod save;
mod serialize;
mod source;
mod statistics;
mod sync;
mod values;
mod verify;
mod watch;
mod workers;
mod writer;

pub use archive::{Archive, Tensor, TensorId};
pub use checkpoint::{Backing, Checkpoint};
pub use convert::{convert, converts, is_float};
pub use device::{
    Allocator, DeviceBlock, DeviceBytes, DeviceFault, DeviceRegion, DeviceStream, Fresh, Onto, Refusal,
    release_pinned, why_pageable,
};
pub use digest::{Algorithm, Digest, Keep, Sealed, Unequal};
pub use disk::blob_digest;
pub use distance::{Distance, distances};
pub use edit::{
    Alias, Edited, Inherit, MetadataChange, Origin, Origins, Pick, RECORD_KEYS, Role, Way, aliases, assemble,
    passed_over, replace_tensor, update_metadata,
};
pub use error::{CheckpointFault, EditError, Error, Misfit};
pub use heads::{Head, Heads};
pub use ingot_format::{MODEL_SPEC_KEY, StopFlag};
pub use memory::{Bytes, Dest, Dim, Footprint, Memory, Region, Strided, StridedDest, crowds, overlapping};
pub use options::{
    BACKEND_VARIABLE, Backend, CheckpointOptions, Durability, Existing, OpenOptions, PINNED_VARIABLE, Reach,
    ReadOnly, ReadOptions, Replace, SaveOptions, THREADS_VARIABLE,
};
pub use payload::{FileRange, Payload, Produce};
pub use read::home::{Found, Home};
pub use read::part::{Part, Target};
pub use read::plan::{Piece, Place, Plan};
pub use read::prefetch::{Fetched, Prefetch, Request};
pub use read::read::{StridedView, fill, read, read_to, warm_tensors};
#[cfg(feature = "remote")]
pub use remote::*;
pub use save::{Pieces, Snapshot, check_destination, replace_file, save};
pub use serialize::safetensors::{
    Dtype, SafeTensorError, SafeTensors, TensorView, View, serialize, serialize_to_file, slice, tensor,
};
pub use serialize::{bintensors, safetensors};
pub use source::{FileSource, MemorySource, ReadAt, Source};
pub use statistics::{Statistics, statistics};
pub use values::{Number, has_values};
pub use verify::{Compared, Definition, Mismatch, Proof, Report, hash, hash_source, verify};
pub use watch::{Unwatched, Watch};
pub use writer::ForeignFile;
pub use writer::{Appender, Aside, Orphan, Writer};

/// The program in README.md must compile.
#[cfg(doctest)]
#[doc = include_str!("../README.md")]
struct ReadmeMd;
