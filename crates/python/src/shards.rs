//! Indexes of sharded checkpoints.

use pyo3::prelude::*;
use pyo3::types::{PyDict, PyList};

use crate::errors::raise;
use crate::paths::file_path;

/// The index of a sharded checkpoint, without its shards.
#[pyclass(frozen, module = "ingot._native")]
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
    /// Read the index at a path or in a directory; `None` for a single file.
    #[staticmethod]
    fn read(py: Python<'_>, source: &Bound<'_, PyAny>) -> PyResult<Option<ShardIndex>> {
        let path = file_path(source)?;
        let index = py.detach(|| ingot_io::Checkpoint::index_at(&path));
        let index = index.map_err(|error| raise(py, &error))?;
        Ok(index.map(ShardIndex::from))
    }

    /// Return the names of the files, sorted.
    #[getter]
    fn shards(&self) -> Vec<&str> {
        self.index.shards().iter().map(String::as_str).collect()
    }

    /// Return the file name of each tensor, in the order of the index.
    fn weight_map<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        let shards = PyList::new(py, self.index.shards())?;
        let map = PyDict::new(py);
        for (name, shard) in self.index.entries() {
            map.set_item(name, shards.get_item(shard)?)?;
        }
        Ok(map)
    }

    fn metadata<'py>(&self, py: Python<'py>) -> PyResult<Option<Bound<'py, PyAny>>> {
        metadata(py, &self.index)
    }
}

/// Return the metadata of an index, which may be any JSON.
pub(crate) fn metadata<'py>(
    py: Python<'py>,
    index: &ingot_format::ShardIndex,
) -> PyResult<Option<Bound<'py, PyAny>>> {
    index.metadata().map(|text| loads(py, text)).transpose()
}

/// Convert valid JSON with Python's own reader.
pub(crate) fn loads<'py>(py: Python<'py>, text: &str) -> PyResult<Bound<'py, PyAny>> {
    py.import("json")?.call_method1("loads", (text,))
}
