//! The Python extension module `ingot._native`.
//!
//! It converts arguments, releases the interpreter, calls `ingot-io`, and turns failures into exceptions. It knows no
//! framework: the modules of `python/ingot` pass the functions that make their tensors ([`wrap::Wrap`]).

mod credentials;
mod delta;
mod destination;
mod device;
mod distance;
mod dlpack;
mod documents;
mod download;
mod edit;
mod errors;
mod export;
mod expression;
mod hash;
mod header;
mod index;
mod intake;
mod module;
mod object;
mod object_fault;
mod open;
mod paths;
mod prefetch;
mod produced;
mod read;
mod remap;
mod remote;
mod serialize;
mod shards;
mod shared;
mod statistics;
mod temporary_file;
mod tensor;
mod upload;
mod watch;
mod wrap;
mod writer;

/// The module that Python imports.
#[pyo3::pymodule(gil_used = false)]
mod _native {
    #[pymodule_export]
    use crate::delta::{Patch, compose_patches, diff_versions, has_digests, version_id};
    #[pymodule_export]
    use crate::destination::Destinations;
    #[pymodule_export]
    use crate::device::{Gpu, release_pinned, why_pageable};
    #[pymodule_export]
    use crate::distance::distances;
    #[pymodule_export]
    use crate::documents::{fetch_beside, fetch_start, hub_headers, list_objects, url_file_name};
    #[pymodule_export]
    use crate::download::{download, planned_download};
    #[pymodule_export]
    use crate::edit::{Sources, replace_tensor, update_metadata};
    #[pymodule_export]
    use crate::export::Export;
    #[pymodule_export]
    use crate::expression::Expression;
    #[pymodule_export]
    use crate::hash::{blob_digest, hash, hash_object, hashes, read_url};
    #[pymodule_export]
    use crate::header::TensorInfo;
    #[pymodule_export]
    use crate::module::module_tensors;
    #[pymodule_export]
    use crate::open::Checkpoint;
    #[pymodule_export]
    use crate::open::in_natural_order;
    #[pymodule_export]
    use crate::paths::{destination, is_url, local_path, shown_url};
    #[pymodule_export]
    use crate::prefetch::Stream;
    #[pymodule_export]
    use crate::remote::{check_storage_options, identity, why_uncached};
    #[pymodule_export]
    use crate::serialize::{NewFile, prepare, serialize, stream};
    #[pymodule_export]
    use crate::shards::ShardIndex;
    #[pymodule_export]
    use crate::statistics::statistics;
    #[pymodule_export]
    use crate::temporary_file::{TemporaryFile, check_destination, replace_file};
    #[pymodule_export]
    use crate::tensor::Exporter;
    #[pymodule_export]
    use crate::upload::{check_upload, remove_objects, replace_object, upload_file};
    #[pymodule_export]
    use crate::wrap::Wrap;
    #[pymodule_export]
    use crate::writer::{Appender, ForeignFile, Writer};

    #[pymodule_export]
    #[allow(non_upper_case_globals, reason = "the name that Python modules use")]
    const __version__: &str = env!("CARGO_PKG_VERSION");
    /// The metadata keys of records about tensors: their digests, the digest of all data, aliases and training states;
    /// and all these keys, including signatures.
    #[pymodule_export]
    const CHECKSUMS_KEY: &str = ingot_format::CHECKSUMS_KEY;
    #[pymodule_export]
    const MODEL_SPEC_KEY: &str = ingot_io::binding::MODEL_SPEC_KEY;
    #[pymodule_export]
    const SHARED_KEY: &str = ingot_format::SHARED_KEY;
    #[pymodule_export]
    const STATE_KEY: &str = ingot_io::binding::STATE_KEY;
    #[pymodule_export]
    const DELTA_KEY: &str = ingot_format::DELTA_KEY;
    #[pymodule_export]
    const RECORD_KEYS: [&str; 10] = ingot_io::binding::RECORD_KEYS;
    #[pymodule_export]
    const STALE_KEYS: [&str; 12] = ingot_io::binding::STALE_KEYS;
}
