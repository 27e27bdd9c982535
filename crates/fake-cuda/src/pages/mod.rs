//! Addresses of memory that nobody can touch.

#[cfg(unix)]
mod unix;
#[cfg(windows)]
mod windows;

#[cfg(unix)]
pub(crate) use unix::reserve;
#[cfg(windows)]
pub(crate) use windows::reserve;
