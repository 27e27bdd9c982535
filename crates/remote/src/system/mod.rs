//! Differences between operating systems. `unix` and `windows` define the same names, and one of them is compiled.

#[cfg(any(windows, test))]
mod drive;
#[cfg(unix)]
mod unix;
#[cfg(windows)]
mod windows;

#[cfg(unix)]
use unix as here;
#[cfg(windows)]
use windows as here;

pub(crate) use here::{GCLOUD_VARIABLE, connect, path_of_url};
