//! Files behind URLs, which `ingot-remote` requests. Each is a [`Source`](crate::Source) for checkpoints, digests,
//! documents and downloads. A store is a destination of saves too.

mod cache;
mod digest;
mod documents;
mod download;
mod identity;
mod session;
mod source;
mod upload;

pub use self::cache::why_uncached;
pub use self::digest::{read_url, url_source};
pub use self::documents::{fetch_beside, fetch_start, hub_headers, list_objects};
pub use self::download::{DownloadOptions, Downloaded, download, planned_download};
pub use self::identity::identity;
pub use self::session::REMOTE_HEADER_NBYTES;
pub use self::upload::{UploadOptions, check_upload, remove_objects, upload_file, upload_pieces};
pub use ingot_remote::{
    Fault, RemoteOptions, Secret, Token, is_url, is_written, local_path, parse_size, redacted, url_file_name,
    was_url,
};
