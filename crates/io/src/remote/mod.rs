//! Files behind URLs, which `ingot-remote` requests. Each is a [`Source`](crate::Source) for checkpoints, digests,
//! documents and downloads.

mod digest;
mod documents;
mod download;
mod identity;
mod session;
mod source;

pub use self::digest::{read_url, url_source};
pub use self::documents::{fetch_beside, hub_headers};
pub use self::download::{DownloadOptions, Downloaded, download, planned_download};
pub use self::identity::identity;
pub use self::session::REMOTE_HEADER_NBYTES;
pub use ingot_remote::{
    Fault, RemoteOptions, Secret, Token, is_url, local_path, redacted, url_file_name, was_url,
};
