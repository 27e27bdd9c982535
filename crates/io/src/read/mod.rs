//! Reading tensors, whole or in part, into memory of their own or of others.

pub(crate) mod execute;
pub(crate) mod gather;
pub(crate) mod part;
pub(crate) mod plan;
pub(crate) mod prefetch;
#[allow(clippy::module_inception, reason = "the file that has the function `read`")]
pub(crate) mod read;
pub(crate) mod warm;
