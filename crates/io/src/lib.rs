//! Opens, reads and saves safetensors and bintensors files.
//!
//! [`Archive`] opens a file: its header is proven ([`ingot_format::Header`]), its tensors are views of a mapping
//! or are read in parallel into memory of their own. What is read, and to where, is a [`Plan`].

mod archive;
mod backend;
mod block;
mod checkpoint;
mod convert;
mod dest;
mod edit;
mod error;
mod failure;
mod hash;
mod payload;
mod quarry;
mod read;
mod rearrange;
mod records;
mod region;
#[cfg(feature = "remote")]
mod remote;
#[cfg(target_os = "linux")]
mod residency;
mod save;
mod serialize;
mod source;
mod statistics;
mod stream;
mod strided_dest;
mod watch;
mod workers;
#[cfg(unix)]
mod writer;

pub use archive::{Archive, OpenOptions, Tensor};
pub use backend::{BACKEND_VARIABLE, Backend};
pub use checkpoint::{Checkpoint, CheckpointFault, CheckpointOptions, Manner, Origins, Reach, read_index};
pub use convert::{convert, converts, is_float};
pub use dest::{Bytes, Dest};
pub use edit::origin::Origin;
pub use edit::{EditError, Edited, MetadataChange, Way, replace_tensor, update_metadata};
pub use error::{Error, Misfit};
pub use hash::{
    Algorithm, Compared, Definition, Digest, Keep, Mismatch, Proof, Report, Sealed, Unequal, hash, verify,
};
pub use ingot_format::MODEL_SPEC_KEY;
pub use payload::{Dim, FileRange, Footprint, Payload, Produce, Strided, crowds, overlapping, prove_sizes};
pub use quarry::Quarry;
pub use read::execute::{ReadOptions, THREADS_VARIABLE};
pub use read::part::{Part, Target};
pub use read::plan::{OWN_BLOCK_NBYTES, Piece, Place, Plan, SHARED_BLOCK_NBYTES, TensorId};
pub use read::prefetch::{Fetched, Prefetch, Request};
pub use read::read::{StridedView, fill, read, warm_tensors};
pub use rearrange::{Inherit, assemble};
pub use records::{Alias, Pick, RECORD_KEYS, Role, aliases};
pub use region::Region;
#[cfg(all(unix, feature = "remote"))]
pub use remote::{DownloadOptions, Downloaded, download, planned_download};
#[cfg(feature = "remote")]
pub use remote::{
    Fault, REMOTE_HEADER_NBYTES, RemoteOptions, Secret, Token, fetch_beside, hash_url, hub_headers, is_url,
    local_path, read_url, redacted, url_file_name, was_url,
};
pub use save::{Durability, Existing, ReadOnly, Replace, SaveOptions, Snapshot, save};
pub use serialize::safetensors::{
    Dtype, SafeTensorError, SafeTensors, TensorView, View, serialize, serialize_to_file, slice, tensor,
};
pub use serialize::{bintensors, safetensors};
pub use source::{FileSource, Memory, MemorySource, Source};
pub use statistics::{Number, Statistics, has_statistics, statistics};
pub use strided_dest::StridedDest;
pub use watch::{Unwatched, Watch};
#[cfg(unix)]
pub use writer::{Appender, Aside, Orphan, Writer};
