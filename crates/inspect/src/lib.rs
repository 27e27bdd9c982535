//! Computations over tensors for the command and the viewer: statistics, distances and the hashes of other tools.
//!
//! | task | items |
//! |---|---|
//! | Describe the values of tensors | [`statistics()`], [`Statistics`] |
//! | Compare the values of two tensors | [`distances`], [`Distance`] |
//! | Hash a file as other tools do | [`hash()`], [`Definition`] |
//!
//! Loading and saving need nothing of this crate: see [`ingot_io`].

mod distance;
mod hash;
mod statistics;
mod values;

pub use distance::{Distance, distances};
#[cfg(feature = "remote")]
pub use hash::hash_url;
pub use hash::{Definition, hash, hash_source};
pub use statistics::{Statistics, statistics};
pub use values::{Number, has_values};

/// The program in README.md must compile.
#[cfg(doctest)]
#[doc = include_str!("../README.md")]
struct ReadmeMd;
