//! Files and other sources of bytes: opening, reading headers, reading by position, mapping.

mod archive;
mod backend;
#[cfg(target_os = "linux")]
mod direct;
mod header;
mod local;
mod mapping;
mod objects;
mod open;
mod read_at;
#[cfg(target_os = "linux")]
mod residency;
mod stamp;

pub use archive::{Archive, Tensor, TensorId};
pub(crate) use archive::{BUFFER, Files, check_unchanged, nearest};
pub(crate) use backend::threads_of_environment;
pub(crate) use header::START_NBYTES;
pub use header::{ShardHeader, ShardHeaders, read_header};
pub use local::LocalFile;
pub use objects::{Given, MemorySource, Source};
pub(crate) use open::{Place, most_open};
pub use read_at::ReadAt;
pub(crate) use read_at::{Stream, read_exactly};
pub(crate) use stamp::Stamp;
