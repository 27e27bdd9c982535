//! The stores that files lie in: where each has them, and what lets a caller in.

pub(crate) mod asker;
pub(crate) mod azure;
mod bucket;
pub(crate) mod gcs;
pub(crate) mod google;
pub(crate) mod hub;
mod issued;
mod issuer;
pub(crate) mod s3;

pub(crate) use bucket::Object;
