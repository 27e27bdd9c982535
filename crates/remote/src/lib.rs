//! Bytes of files behind URLs: HTTP, the Hugging Face Hub, S3 and compatible stores, Google Cloud Storage, Azure.
//!
//! [`Location::find`] parses a URL. A [`Resource`] is a file that a [`Client`] can request, and a [`RemoteFile`] is one
//! version of it, which is read in ranges. The reading threads make the requests and wait for the answers, so that bytes
//! pass from the socket to their destination. Files are read with `GET` and `Range` over HTTP/1.1, since one connection for
//! each thread is faster than streams that share one. No thread outlives a call, except up to 64 in which the system
//! resolves a name after its caller was interrupted.
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
//!     return Err("it is a file of this machine".into());
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

// From the ground up: `credentials`, `environment`, `fault`, `network`, `options`, `url`; `http`, `system`; `pin`,
// `secrets`; `store`; `place`; `fetch`; `cache`, `file`, `document`, `upload`; `listing`, `fuzzing`. Imports run
// downwards: scripts/check-floors.
mod cache;
mod credentials;
mod document;
mod environment;
mod fault;
mod fetch;
mod file;
#[cfg(all(feature = "fuzzing", unix))]
#[doc(hidden)]
pub mod fuzzing;
mod http;
mod listing;
mod network;
mod options;
mod pin;
mod place;
mod secrets;
mod store;
mod system;
mod upload;
mod url;

pub use ingot_format::StopFlag;
pub use {
    cache::{CacheOptions, parse_size},
    credentials::{Credential, Credentials, Found, Identity, Keys, Secret, Wanted},
    document::shard_headers,
    fault::Fault,
    fetch::Resource,
    file::{GAP_NBYTES, READS_AT_ONCE, RemoteFile, START_NBYTES, described_region},
    http::client::Client,
    listing::{Listed, list},
    options::{RemoteOptions, Token},
    place::{Location, Remote, is_folder, is_url, is_written, local_path, url_file_name, was_url},
    secrets::redacted,
    store::hub::{INDEX_FILE, MODEL_FILE},
    upload::{Part, Parts, Upload},
};

/// The program in README.md must compile.
#[cfg(doctest)]
#[doc = include_str!("../README.md")]
struct ReadmeMd;
