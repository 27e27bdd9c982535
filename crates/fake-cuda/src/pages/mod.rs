//! Addresses that no code can access.

#[cfg(unix)]
mod unix;
#[cfg(windows)]
mod windows;

#[cfg(unix)]
pub(crate) use unix::reserve;
#[cfg(windows)]
pub(crate) use windows::reserve;
