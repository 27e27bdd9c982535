//! Files and other sources of bytes: opening, reading headers, reading by position, mapping.

mod archive;
#[cfg(target_os = "linux")]
mod direct;
mod local;
#[cfg(target_os = "linux")]
mod residency;
#[cfg(target_os = "linux")]
mod rows;
mod source;

pub use archive::{Archive, Origin, Tensor, TensorId};
pub(crate) use archive::{BUFFER, Files, check_unchanged, nearest, threads_of_environment};
pub use local::LocalFile;
pub(crate) use local::{Place, is_in_its_place, most_open};
pub use source::{MemorySource, ReadAt, Source, read_header};
pub(crate) use source::{OpenSource, Stream, read_exactly, read_until};
