//! The stores that files lie in: where each has them, and what lets a caller in.

pub(crate) mod azure;
mod bucket;
pub(crate) mod credentials;
pub(crate) mod gcs;
pub(crate) mod hub;
pub(crate) mod s3;
mod sigv4;

pub(crate) use bucket::Object;
