//! Items that only the extension module for Python, the benches, the tests and the fuzz targets use. They may change in
//! any release.

pub use ingot_format::{MODEL_SPEC_KEY, StopFlag};

pub use crate::checkpoint::aliases::{Alias, aliases};
pub use crate::computed::{Assembled, Piece, Side, remapped};
pub use crate::convert::{convert, converts, is_float};
pub use crate::delta::{Changed, Patch, apply, apply_in_place, compose, diff, has_digests, version_id};
pub use crate::dequantise::{Dequantised, dequantise};
pub use crate::device::{
    Allocator, DeviceBytes, DeviceFault, DeviceRegion, DeviceStream, Fresh, Onto, Refusal, release_pinned,
    why_pageable,
};
pub use crate::digest::{Keep, NewHeader};
pub use crate::disk::blob_digest;
pub use crate::edit::{Inherit, Pick, RECORD_KEYS, Role, STALE_KEYS, STATE_KEY, assemble, passed_over};
pub use crate::error::Misfit;
pub use crate::file::{LocalFile, Origin, ReadAt, TensorId, read_header};
pub use crate::fold::{Fold, fold};
pub use crate::memory::{Bytes, Dest, Dim, Footprint, Memory, crowds, overlapping};
pub use crate::options::{ShardHeader, ShardHeaders};
pub use crate::payload::FileRange;
pub use crate::read::buffer::Buffer;
pub use crate::read::job::Target;
pub use crate::read::prefetch::{Prefetch, Request};
pub use crate::read::{Part, fill, fill_on, read_to, warm_tensors};
#[cfg(feature = "remote")]
pub use crate::remote::{
    REMOTE_HEADER_NBYTES, UploadOptions, check_upload, fetch_beside, fetch_start, hub_headers, identity,
    is_url, is_written, list_objects, local_path, parse_size, planned_download, read_url, redacted,
    remove_objects, upload_file, upload_pieces, url_file_name, url_source, was_url, why_uncached,
};
pub use crate::save::{Pieces, Snapshot, check_destination, save_pieces};
pub use crate::verify::{Proof, hash_range, read_runs};
pub use crate::watch::After;
pub use crate::writer::{ForeignFile, TemporaryFile};
