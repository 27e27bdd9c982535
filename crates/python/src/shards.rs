//! Indexes of sharded checkpoints.

use pyo3::prelude::*;
use pyo3::types::{PyDict, PyList};

use crate::errors::raise;
use crate::paths::file_path;

/// The index of a sharded checkpoint, without its shards. `ingot.read_index` gives it.
///
/// ``len(index)`` is the number of its tensors, and ``name in index`` says whether it has one.
///
/// Attributes
/// ----------
/// shards : list of str
///     The names of the files, sorted.
#[pyclass(frozen, module = "ingot")]
pub(crate) struct ShardIndex {
    index: ingot_format::ShardIndex,
}

impl From<ingot_format::ShardIndex> for ShardIndex {
    fn from(index: ingot_format::ShardIndex) -> ShardIndex {
        ShardIndex { index }
    }
}

#[pymethods]
impl ShardIndex {
    /// Read the index in a local file. `ingot.read_index` takes URLs too.
    ///
    /// Parameters
    /// ----------
    /// source : str, bytes or os.PathLike
    ///     The index, such as ``model.safetensors.index.json``.
    ///
    /// Raises
    /// ------
    /// OSError
    ///     The index cannot be opened.
    /// CheckpointError
    ///     It breaks a rule (FORMAT.md, I1 to I8).
    #[staticmethod]
    fn read(py: Python<'_>, source: &Bound<'_, PyAny>) -> PyResult<ShardIndex> {
        let path = file_path(source)?;
        let index = py.detach(|| ingot_io::read_index(&path));
        index.map(ShardIndex::from).map_err(|error| raise(py, &error))
    }

    fn __len__(&self) -> usize {
        self.index.len()
    }

    fn __contains__(&self, name: &Bound<'_, PyAny>) -> bool {
        let name = name.extract::<&str>();
        name.is_ok_and(|name| self.index.find(name).is_some())
    }

    #[getter]
    fn shards(&self) -> Vec<&str> {
        self.index.shards().iter().map(String::as_str).collect()
    }

    /// Give the names of the tensors, sorted.
    fn keys<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyList>> {
        PyList::new(py, self.index.names_by_name())
    }

    /// Give the name of the file that holds a tensor; None where there is no such tensor.
    fn shard_of(&self, name: &str) -> Option<&str> {
        self.index.shard_of(name)
    }

    /// Give the name of its file for each tensor, as a new dict in the order of the index.
    fn weight_map<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        let shards = PyList::new(py, self.index.shards())?;
        let map = PyDict::new(py);
        for (name, shard) in self.index.entries() {
            map.set_item(name, shards.get_item(shard)?)?;
        }
        Ok(map)
    }

    /// Give the metadata of the index, which may be any JSON; None where it has none.
    fn metadata<'py>(&self, py: Python<'py>) -> PyResult<Option<Bound<'py, PyAny>>> {
        metadata(py, &self.index)
    }

    fn __repr__(&self) -> String {
        let (tensors, shards) = (self.index.len(), self.index.shards().len());
        format!("<ingot.ShardIndex: {tensors} tensors in {shards} shards>")
    }
}

/// The metadata of an index, which may be any JSON.
pub(crate) fn metadata<'py>(
    py: Python<'py>,
    index: &ingot_format::ShardIndex,
) -> PyResult<Option<Bound<'py, PyAny>>> {
    index.metadata().map(|text| loads(py, text)).transpose()
}

/// JSON that has been read once and found to be sound, by Python's own reader.
pub(crate) fn loads<'py>(py: Python<'py>, text: &str) -> PyResult<Bound<'py, PyAny>> {
    py.import("json")?.call_method1("loads", (text,))
}
