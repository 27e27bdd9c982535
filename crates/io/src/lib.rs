//! Opens, reads and saves safetensors and bintensors files.
//!
//! | task | items |
//! |---|---|
//! | [Open a file and read a tensor](#open-a-file-and-read-a-tensor) | [`Archive::open`], [`Archive::read`], [`Region`] |
//! | [Read a slice, or another dtype](#read-a-slice-or-another-dtype) | [`Tensor::select`], [`Job`], [`read()`] |
//! | [Save](#save) | [`serialize_to_file`], [`save()`], [`Writer`], [`Appender`] |
//! | [Open a sharded checkpoint](#open-a-sharded-checkpoint) | [`Checkpoint::open`] |
//! | [Open a URL](#open-a-url), with the feature `remote` | `Checkpoint::open_url`, `download` |
//! | [Edit a file](#edit-a-file) | [`update_metadata`], [`replace_tensor`] |
//! | [Verify and hash a file](#verify-and-hash-a-file) | [`verify()`], [`hash()`] |
//! | Read from your own storage | [`Source`], [`Archive::from_source`] |
//! | Show progress, stop a call | [`Watch`] |
//! | Replace the `safetensors` crate | [`safetensors`], [`SafeTensors`], [`TensorView`], [`serialize`] |
//! | Replace the `bintensors` crate | [`bintensors`] |
//!
//! # Open a file and read a tensor
//!
//! [`Archive::open`] checks the header and reads no tensor. By default a local file is mapped, and reading a tensor copies
//! nothing. The environment variables `INGOT_BACKEND` (`mmap` or `pread`) and `INGOT_THREADS` set the defaults of a process.
//! Another process may change a mapped file, so its bytes are not borrowed as a slice: copy them
//! ([`Region::to_vec`]), or open the file with [`Backend::Pread`], which reads in parallel into private memory.
//!
//! ```
//! use ingot_io::{Archive, Backend, Failure, OpenOptions};
//! # use ingot_io::{Dtype, TensorView, serialize_to_file};
//! # let folder = tempfile::tempdir()?;
//! # let path = folder.path().join("model.safetensors");
//! # let values: Vec<u8> = [1.0_f32, 2.0, 3.0, 4.0].into_iter().flat_map(f32::to_le_bytes).collect();
//! # serialize_to_file([("weight", TensorView::new(Dtype::F32, vec![2, 2], &values)?)], None, &path)?;
//!
//! let archive = Archive::open(&path, &OpenOptions::new().backend(Backend::Pread))?;
//! for tensor in archive.tensors() {
//!     println!("{}: {} {:?}", tensor.entry().name, tensor.entry().dtype, tensor.entry().shape);
//! }
//! let weight = archive.read("weight")?;
//! let bytes: &[u8] = weight.as_slice()?;
//! let numbers: &[f32] = weight.as_f32()?;
//! assert_eq!((bytes.len(), numbers), (16, &[1.0, 2.0, 3.0, 4.0][..]));
//!
//! let missing = archive.read("weights").unwrap_err();
//! assert_eq!((missing.tensor(), missing.code()), (Some("weights"), "unknown-tensor"));
//! assert!(matches!(missing.failure(), Failure::UnknownTensor { .. }));
//! assert!(missing.to_string().ends_with("did you mean `weight`?"));
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
//!
//! # Read a slice, or another dtype
//!
//! ```
//! use ingot_io::{Archive, Backend, Dtype, Index, Job, OpenOptions, ReadOptions, Unwatched, read};
//! # use ingot_io::{TensorView, serialize_to_file};
//! # let folder = tempfile::tempdir()?;
//! # let path = folder.path().join("model.safetensors");
//! # let values: Vec<u8> = [1.0_f32, 2.0, 3.0, 4.0].into_iter().flat_map(f32::to_le_bytes).collect();
//! # serialize_to_file([("weight", TensorView::new(Dtype::F32, vec![2, 2], &values)?)], None, &path)?;
//!
//! let archive = Archive::open(&path, &OpenOptions::new().backend(Backend::Pread))?;
//! let weight = archive.find("weight")?;
//! let (shape, row) = weight.select(&[Index::At(1)], &Unwatched)?;
//! assert_eq!((shape, row.as_f32()?), (vec![2], &[3.0, 4.0][..]));
//!
//! // Many jobs, of one file or several, are read in parallel and converted on the way.
//! let column = Job::new(weight, &[Index::WHOLE, Index::At(0)], Some(Dtype::F64))?;
//! let found = read([column], &ReadOptions::new(), &Unwatched)?;
//! assert_eq!(found[0].as_elements::<f64>()?, [1.0, 3.0]);
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
//!
//! # Save
//!
//! A save replaces the file at `path` once the new one is complete and on the disk. [`serialize_to_file`] takes
//! [`TensorView`]s; [`save()`] takes a [`Layout`] and a [`Payload`] for each tensor, with [`SaveOptions`].
//!
//! ```
//! use ingot_io::{Dtype, Format, Payload, SaveOptions, Spec, TensorView, Unwatched, layout, save, serialize_to_file};
//! # let folder = tempfile::tempdir()?;
//! # let path = folder.path().join("model.safetensors");
//!
//! let bias = TensorView::new(Dtype::U8, vec![2], b"ab")?;
//! serialize_to_file([("bias", &bias)], None, &path)?;
//!
//! let specs = [Spec { name: "bias", dtype: Dtype::U8, shape: &[2] }];
//! let new = layout(&specs, Some(&[("title", "second")]), Format::Safetensors)?;
//! save(&path, &new, &[Payload::from(&b"cd"[..])], &SaveOptions::new(), &Unwatched)?;
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
//!
//! # Open a sharded checkpoint
//!
//! [`Checkpoint::open`] takes a file, an index or a directory.
//!
//! ```
//! use ingot_io::{Checkpoint, CheckpointOptions, Dtype, TensorView, serialize_to_file};
//! # let directory = tempfile::tempdir()?;
//! # let folder = directory.path();
//!
//! let two = TensorView::new(Dtype::F32, vec![2], b"12345678")?;
//! serialize_to_file([("wte", &two)], None, &folder.join("model-00001-of-00002.safetensors"))?;
//! serialize_to_file([("wpe", &two)], None, &folder.join("model-00002-of-00002.safetensors"))?;
//! let index = r#"{"weight_map": {
//!     "wte": "model-00001-of-00002.safetensors",
//!     "wpe": "model-00002-of-00002.safetensors"
//! }}"#;
//! std::fs::write(folder.join("model.safetensors.index.json"), index)?;
//!
//! let model = Checkpoint::open(folder, &CheckpointOptions::new())?;
//! assert_eq!((model.len(), model.files()), (2, 2));
//! assert_eq!(model.find("wpe")?.entry().shape, [2]);
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
//!
//! # Open a URL
//!
//! With the feature `remote`: HTTP, the Hugging Face Hub, S3, Google Cloud Storage and Azure. Opening reads the headers;
//! reading a tensor fetches its bytes.
//!
//! ```no_run
//! # #[cfg(feature = "remote")]
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! use ingot_io::{Checkpoint, Limits, ReadOptions, RemoteOptions, Unwatched};
//!
//! let options = RemoteOptions::default();
//! let model = Checkpoint::open_url("hf://openai-community/gpt2", &options, &Limits::default(), &Unwatched)?;
//! let bias = model.find("h.0.attn.c_attn.bias")?.read(&ReadOptions::new(), &Unwatched)?;
//! println!("{:?}", bias.as_f32()?);
//! # Ok(())
//! # }
//! # #[cfg(not(feature = "remote"))]
//! # fn main() {}
//! ```
//!
//! # Edit a file
//!
//! ```
//! use ingot_io::{
//!     Archive, Dtype, MetadataChange, OpenOptions, Payload, SaveOptions, Unwatched, replace_tensor, update_metadata,
//! };
//! # use ingot_io::{TensorView, serialize_to_file};
//! # let folder = tempfile::tempdir()?;
//! # let path = folder.path().join("model.safetensors");
//! # serialize_to_file([("bias", TensorView::new(Dtype::U8, vec![2], b"ab")?)], None, &path)?;
//!
//! let change = MetadataChange { set: &[("title", "first")], remove: &["draft"], rewrite: false };
//! update_metadata(&path, &change, &SaveOptions::new(), &Unwatched)?;
//! replace_tensor(&path, "bias", Dtype::U8, &[2], &Payload::from(&b"cd"[..]), &SaveOptions::new(), &Unwatched)?;
//!
//! let archive = Archive::open(&path, &OpenOptions::new())?;
//! assert_eq!(archive.header().text("title"), Some("first"));
//! assert_eq!(archive.read("bias")?.to_vec(), b"cd");
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
//!
//! # Verify and hash a file
//!
//! ```
//! use ingot_io::{Algorithm, Unwatched, hash, verify};
//! # use ingot_io::{Dtype, TensorView, serialize_to_file};
//! # let folder = tempfile::tempdir()?;
//! # let path = folder.path().join("model.safetensors");
//! # serialize_to_file([("bias", TensorView::new(Dtype::U8, vec![2], b"ab")?)], None, &path)?;
//!
//! let sha256 = hash(&path, Algorithm::Sha256, &Unwatched)?;
//! assert_eq!(sha256.to_string().len(), 64);
//! let report = verify(&path, None, &Unwatched)?;
//! assert_eq!(report.unchecked, ["bias"]); // the file keeps no digest of it
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```

#![cfg_attr(docsrs, feature(doc_cfg))]

// From the ground up: `sync`; `options`, `digest`, `convert`; `error`; `disk`, `watch`, `memory`; `file`;
// `workers`; `payload`, `checkpoint`; `read`, `computed`; `fold`, `verify`; `save`;
// `serialize`, `remote`; `edit`; `delta`; `writer`; `fuzzing`, `binding`. Each imports only modules before it:
// scripts/check-floors.
#[doc(hidden)]
pub mod binding;
mod checkpoint;
mod computed;
mod convert;
mod delta;
mod dequantise;
mod device;
mod digest;
mod disk;
mod edit;
mod error;
mod file;
mod fold;
#[cfg(feature = "fuzzing")]
#[doc(hidden)]
pub mod fuzzing;
mod memory;
mod options;
mod pages;
mod payload;
mod read;
#[cfg(feature = "remote")]
mod remote;
mod save;
mod serialize;
mod sync;
mod verify;
mod watch;
mod workers;
mod writer;

pub use checkpoint::Checkpoint;
pub use digest::{Algorithm, Digest, Unequal};
pub use edit::{Edited, MetadataChange, replace_tensor, update_metadata};
pub use error::{CheckpointFault, EditError, Error, Failure, PatchFault};
pub use file::{Archive, MemorySource, Source, Tensor};
pub use memory::{BorrowError, Plain, Region};
pub use options::{Backend, CheckpointOptions, OpenOptions, Reach, ReadOptions, Replace, SaveOptions};
pub use payload::{Payload, Produce};
pub use read::job::Job;
pub use read::read;
#[cfg(feature = "remote")]
pub use remote::{DownloadOptions, Downloaded, Fault, RemoteOptions, Secret, Token, download};
pub use save::save;
pub use verify::{Compared, Mismatch, Report, hash, verify};
pub use watch::{Unwatched, Watch};
pub use writer::{Appender, Writer};

/// The types of a provider of identities, for [`RemoteOptions::credentials`](crate::RemoteOptions).
#[cfg(feature = "remote")]
pub mod credentials {
    #[doc(no_inline)]
    pub use ingot_remote::{Credential, Credentials, Identity, Keys, Wanted};
}

// Items of ingot-format that appear in the API of this crate.
pub use ingot_format::{
    Entry, Format, FormatError, Header, Index, IndexError, Layout, LayoutOptions, Leniency, Limits, Places,
    SelectionError, ShardIndex, SharedError, Spec, layout,
};

// The names of the safetensors crate.
pub use serialize::safetensors::{
    Dtype, SafeTensorError, SafeTensors, TensorView, View, serialize, serialize_to_file,
};
#[doc(no_inline)]
pub use serialize::safetensors::{slice, tensor};
pub use serialize::{bintensors, safetensors};

/// The program in README.md must compile.
#[cfg(doctest)]
#[doc = include_str!("../README.md")]
struct ReadmeMd;
