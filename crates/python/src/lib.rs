//! The Python extension module `ingot._native`.
//!
//! It converts, lets go of the interpreter, calls `ingot-io`, and turns failures into exceptions. It knows no
//! framework: those live in `python/ingot`, and hand over what makes their tensors ([`wrap::Wrap`]).

mod errors;
mod hash;
mod index;
mod intake;
mod open;
mod serialize;
mod shared;
mod tensor;
mod watch;
mod wrap;

/// The module that Python imports.
#[pyo3::pymodule(gil_used = false)]
mod _native {
    #[pymodule_export]
    use crate::hash::{hash, hashes, verify};
    #[pymodule_export]
    use crate::open::{Archive, TensorInfo};
    #[pymodule_export]
    use crate::serialize::{serialize, serialize_file};
    #[pymodule_export]
    use crate::tensor::Buffer;
    #[pymodule_export]
    use crate::wrap::Wrap;

    #[pymodule_export]
    #[allow(non_upper_case_globals, reason = "the name that Python modules use")]
    const __version__: &str = env!("CARGO_PKG_VERSION");
}
