//! Memory that tensors lie in: whose it is, where in it their elements are, and writing to it by address.
//!
//! Of others: [`Bytes`] and [`Strided`] are read, a [`Dest`] or a [`StridedDest`] is filled, and a [`Footprint`] says which
//! bytes each takes. Of our own: a [`Block`] is filled once and becomes [`Memory`], of which each tensor holds a [`Region`].
//! Nothing here knows of files.

mod block;
mod dest;
mod footprint;
mod pages;
mod region;
mod strided;
mod strided_dest;

pub(crate) use block::{Block, HUGE_PAGE_NBYTES};
pub use dest::{Bytes, Dest};
pub use footprint::{Dim, Footprint, crowds, overlapping};
pub(crate) use pages::Pages;
pub use region::{BorrowError, Memory, Plain, Region};
pub(crate) use region::{alignment, mapped_files};
pub use strided::Strided;
#[cfg(target_os = "linux")]
pub(crate) use strided::copy_units;
pub use strided_dest::StridedDest;
