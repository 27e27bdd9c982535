//! The stores of files: the URLs of their objects, and the credentials of requests.

mod access;
pub(crate) mod azure;
mod bucket;
pub(crate) mod credentials;
pub(crate) mod gcs;
pub(crate) mod hub;
pub(crate) mod s3;
mod shared_key;
mod sigv4;

pub(crate) use access::{Access, Auth};
pub(crate) use bucket::Object;
