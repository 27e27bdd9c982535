//! Pages of memory that nobody can touch until they are opened.

#[cfg(unix)]
mod unix;
#[cfg(windows)]
mod windows;

#[cfg(unix)]
pub(crate) use unix::{allow, release, reserve};
#[cfg(windows)]
pub(crate) use windows::{allow, release, reserve};
