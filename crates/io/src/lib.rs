//! Opens, reads and saves safetensors and bintensors files.
//!
//! [`Archive`] opens a file: its header is proven ([`ingot_format::Header`]), its tensors are views of a mapping
//! or are read in parallel into memory of their own. What is read, and to where, is a [`Plan`].

mod archive;
mod backend;
mod block;
mod dest;
mod error;
mod execute;
mod failure;
mod gather;
mod hash;
mod head;
mod plan;
mod region;
mod save;
mod serialize;
mod source;
mod watch;
mod workers;

pub use archive::{Archive, OpenOptions, Tensor};
pub use backend::{BACKEND_VARIABLE, Backend};
pub use dest::{Dest, Payload};
pub use error::Error;
pub use execute::ReadOptions;
pub use hash::{
    Algorithm, Compared, Definition, Digest, Keep, MODEL_SPEC_KEY, Mismatch, Proof, Report, Sealed, Unequal,
    hash, verify,
};
pub use plan::{OWN_BLOCK_NBYTES, Place, Plan, Read, SHARED_BLOCK_NBYTES, TooLarge};
pub use region::Region;
pub use save::{Durability, ReadOnly, Replace, SaveOptions, save};
pub use serialize::safetensors::serialize_to_file;
pub use serialize::{bintensors, safetensors};
pub use source::{FileSource, Memory, MemorySource, Source};
pub use watch::{Unwatched, Watch};
