//! Files and other sources of bytes: opening, reading headers, reading by position, mapping.

mod archive;
mod backend;
#[cfg(target_os = "linux")]
mod direct;
mod file;
mod given;
mod headers;
mod local;
mod mapped;
mod memory;
mod read_at;
#[cfg(target_os = "linux")]
mod residency;

pub use archive::{Archive, Tensor, TensorId};
pub(crate) use archive::{BUFFER, Files, check_unchanged, lent_source, nearest, open_source, read_header};
pub(crate) use backend::threads_of_environment;
pub use file::FileSource;
pub(crate) use file::Stamp;
pub use given::{Given, Source};
pub use headers::{Head, Heads};
pub(crate) use local::{LocalFile, Reopen, with_room};
pub use memory::MemorySource;
pub use read_at::ReadAt;
pub(crate) use read_at::{Stream, read_exactly};
