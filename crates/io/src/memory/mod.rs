//! Memory of tensors: its owner, the places of the elements in it, and access by address.
//!
//! [`Bytes`] and [`Dest`] are foreign memory that is read or filled; a [`Footprint`] is the set of bytes that it
//! covers. A [`Block`] is memory of our own. It is filled once and becomes [`Memory`]; each tensor holds a [`Region`]
//! of it. This module knows nothing of files.

mod block;
mod bytes;
mod cache_line;
mod dest;
mod footprint;
mod region;

pub(crate) use block::Block;
pub use bytes::Bytes;
#[cfg(target_os = "linux")]
pub(crate) use bytes::copy_units;
pub(crate) use cache_line::load_line;
pub use dest::Dest;
pub use footprint::{Dim, Footprint, crowds, overlapping};
pub use region::{BorrowError, Memory, Plain, Region};
pub(crate) use region::{alignment, mapped_files};
