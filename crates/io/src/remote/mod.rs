//! Files behind URLs: HTTP, the Hugging Face Hub, S3 and what speaks like it, Google Cloud Storage, Azure.
//!
//! A remote file is one more [`Source`](crate::Source). Its requests are made by the threads that read, each of which
//! waits for its own: bytes go from the socket to where they are wanted, nothing runs in between, and nothing is left
//! running when a call is over, so that a process may fork at any time. Of files no more is asked than `GET` with `Range`
//! gives, over HTTP/1.1; one connection for each thread brings more than streams that share one.

mod access;
mod asker;
mod azure;
mod bucket;
mod client;
mod connection;
mod dial;
mod digest;
mod document;
mod documents;
#[cfg(unix)]
mod download;
mod fault;
mod fetch;
mod file;
mod gcs;
mod google;
mod hub;
mod issued;
mod issuer;
mod message;
mod network;
mod options;
mod pace;
mod pin;
mod place;
mod proxy;
mod retry;
mod s3;
mod secrets;
mod session;
mod source;
mod trust;
mod url;

pub use self::digest::{hash_url, read_url};
pub use self::documents::{fetch_beside, hub_headers};
#[cfg(unix)]
pub use self::download::{DownloadOptions, Downloaded, download, planned_download};
pub use self::fault::Fault;
pub use self::options::{RemoteOptions, Secret, Token};
pub use self::place::{is_url, local_path, url_file_name, was_url};
pub use self::secrets::redacted;
pub use self::session::REMOTE_HEADER_NBYTES;
pub(crate) use self::session::header_limits;
