//! Bytes of files behind URLs: HTTP, the Hugging Face Hub, S3 and what speaks like it, Google Cloud Storage, Azure.
//!
//! [`Location::find`] reads a URL, a [`Resource`] is a file that a [`Client`] can ask for, and a [`RemoteFile`] one
//! version of it, whose ranges are read as they come. Requests are made by the threads that read, each of which waits
//! for its own: bytes go from the socket to where they are wanted. Of files no more is asked than `GET` with `Range` gives,
//! over HTTP/1.1; one connection for each thread brings more than streams that share one. No thread outlives a call but
//! those, 64 at most, in which the system still resolves a name that nobody waits for any more.
//!
//! ```no_run
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! use std::io::Read;
//! use std::sync::Arc;
//!
//! use ingot_remote::{Client, Location, RemoteFile, RemoteOptions, Resource, START_NBYTES, StopFlag};
//!
//! let (options, stop) = (RemoteOptions::default(), StopFlag::never());
//! let Location::Remote(remote) = Location::find("hf://openai-community/gpt2/model.safetensors", &options, stop)? else {
//!     return Err("it lies on this machine".into());
//! };
//! let file = RemoteFile::begin(Resource::new(&Arc::new(Client::new(options)), &remote), START_NBYTES, stop)?;
//! let mut length = [0; 8];
//! file.reader(0..8, stop).read_exact(&mut length)?;
//! println!("{} bytes, of which {} are the header", file.nbytes(), u64::from_le_bytes(length));
//! # Ok(())
//! # }
//! ```

#![cfg_attr(docsrs, feature(doc_cfg))]
#![forbid(unsafe_code)]

// From the ground up: `credentials`, `fault`, `network`, `options`, `url`; `http`, `system`; `pin`, `secrets`; `store`, `access`;
// `place`; `fetch`; `file`, `document`, `fuzzing`. Each imports what stands below it: scripts/check-floors.
mod access;
mod credentials;
mod document;
mod fault;
mod fetch;
mod file;
#[cfg(all(feature = "fuzzing", unix))]
#[doc(hidden)]
pub mod fuzzing;
mod http;
mod network;
mod options;
mod pin;
mod place;
mod secrets;
mod store;
mod system;
mod url;

pub use ingot_format::StopFlag;
pub use {
    credentials::{Credential, Credentials, Identity, Keys, Secret, Wanted},
    document::shard_headers,
    fault::Fault,
    fetch::Resource,
    file::{GAP_NBYTES, READS_AT_ONCE, RemoteFile, START_NBYTES, told_region},
    http::client::Client,
    options::{RemoteOptions, Token},
    place::{Location, Remote, is_repository, is_url, local_path, url_file_name, was_url},
    secrets::redacted,
    store::hub::{INDEX_FILE, MODEL_FILE},
};

/// The program in README.md must compile.
#[cfg(doctest)]
#[doc = include_str!("../README.md")]
struct ReadmeMd;
