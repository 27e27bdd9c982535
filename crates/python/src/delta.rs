//! Patches: what changed between two versions of a checkpoint.

use std::ffi::OsString;
use std::num::NonZeroUsize;

use ingot_io::{Dtype, Error, Failure, ReadOptions, binding};
use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyDict};

use crate::destination::{Destination, Destinations, Held};
use crate::errors::raise;
use crate::header::TensorInfo;
use crate::open::Checkpoint;
use crate::paths::file_path;
use crate::serialize::save_options;
use crate::watch::Signals;

/// Write the patch between two versions. See `_native.pyi`.
#[pyfunction]
#[pyo3(signature = (
    base, new, path, *, index = None, step = None, durable = true, overwrite = false, replace_read_only = false,
    threads = None, progress = None,
))]
#[allow(clippy::too_many_arguments, reason = "one for each keyword that Python has")]
pub(crate) fn diff_versions(
    py: Python<'_>,
    base: &Checkpoint,
    new: &Checkpoint,
    path: &Bound<'_, PyAny>,
    index: Option<Vec<u8>>,
    step: Option<u64>,
    durable: bool,
    overwrite: bool,
    replace_read_only: bool,
    threads: Option<NonZeroUsize>,
    progress: Option<Bound<'_, PyAny>>,
) -> PyResult<()> {
    let path = file_path(path)?;
    let (base, new) = (base.opened(py)?, new.opened(py)?);
    let read = ReadOptions::new().threads(threads);
    let save = save_options(durable, overwrite, replace_read_only);
    Signals::telling(progress).run(py, |signals| {
        binding::diff(&base, &new, index.as_deref(), step, &path, &read, &save, signals)
    })
}

/// Write one patch for several in a row. See `_native.pyi`.
#[pyfunction]
#[pyo3(signature = (
    patches, path, *, durable = true, overwrite = false, replace_read_only = false, progress = None,
))]
pub(crate) fn compose_patches(
    py: Python<'_>,
    patches: Vec<Bound<'_, Patch>>,
    path: &Bound<'_, PyAny>,
    durable: bool,
    overwrite: bool,
    replace_read_only: bool,
    progress: Option<Bound<'_, PyAny>>,
) -> PyResult<()> {
    let path = file_path(path)?;
    let save = save_options(durable, overwrite, replace_read_only);
    let patches: Vec<&binding::Patch> = patches.iter().map(|patch| &patch.get().0).collect();
    Signals::telling(progress).run(py, |signals| binding::compose(&patches, &path, &save, signals))
}

/// An open patch. See `_native.pyi`.
#[pyclass(frozen, module = "ingot._native")]
pub(crate) struct Patch(binding::Patch);

#[pymethods]
impl Patch {
    /// Take the file out of an open checkpoint. This closes the other handles of the checkpoint.
    #[new]
    #[pyo3(signature = (checkpoint, prove, *, progress = None))]
    fn new(
        py: Python<'_>,
        checkpoint: &Checkpoint,
        prove: bool,
        progress: Option<Bound<'_, PyAny>>,
    ) -> PyResult<Patch> {
        let checkpoint = checkpoint.take(py)?;
        let open = |signals: &Signals| binding::Patch::open(checkpoint, prove, signals);
        Signals::telling(progress).run(py, open).map(Patch)
    }

    #[getter]
    fn path(&self) -> Option<OsString> {
        self.0.path().map(|path| path.as_os_str().to_owned())
    }

    /// Return the record of the patch.
    fn record<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        let record = self.0.record();
        let facts = PyDict::new(py);
        facts.set_item("id", self.0.id().map_err(|error| raise(py, &error))?)?;
        facts.set_item("base", (&record.base.id, &record.base.digest))?;
        facts.set_item("result", (&record.result.id, &record.result.digest))?;
        facts.set_item("step", record.step)?;
        facts.set_item("nbytes", &record.nbytes)?;
        facts.set_item("files", &record.files)?;
        facts.set_item("index", &record.index)?;
        facts.set_item("added", &record.added)?;
        facts.set_item("removed", &record.removed)?;
        Ok(facts)
    }

    /// Return the text of the index of the result.
    fn index<'py>(&self, py: Python<'py>) -> Option<Bound<'py, PyBytes>> {
        self.0.index().map(|text| PyBytes::new(py, text))
    }

    /// Return the changed tensors by name: info, codec, number of elements, and bytes in the patch.
    fn changed(&self, py: Python<'_>) -> PyResult<Vec<(TensorInfo, &'static str, u64, u64)>> {
        let changed = self.0.changed();
        changed
            .map(|one| {
                let info = TensorInfo::of(py, &one.entry)?;
                Ok((info, one.codec, one.elements, one.nbytes))
            })
            .collect()
    }

    /// Return the positions, as 64-bit integers, and the bytes of changed elements from `begin` to `end`.
    fn elements<'py>(
        &self,
        py: Python<'py>,
        name: &str,
        begin: u64,
        end: u64,
    ) -> PyResult<(Bound<'py, PyBytes>, Bound<'py, PyBytes>)> {
        let (positions, values) = Signals::detach(py, |_| self.0.elements(name, begin..end))?;
        let positions: Vec<u8> = positions.into_iter().flat_map(u64::to_le_bytes).collect();
        Ok((PyBytes::new(py, &positions), PyBytes::new(py, &values)))
    }

    /// Fail if `base` is not the version that the patch is for.
    #[pyo3(signature = (base, verify, *, threads = None, progress = None))]
    fn check_base(
        &self,
        py: Python<'_>,
        base: &Checkpoint,
        verify: bool,
        threads: Option<NonZeroUsize>,
        progress: Option<Bound<'_, PyAny>>,
    ) -> PyResult<()> {
        let (base, read) = (base.opened(py)?, ReadOptions::new().threads(threads));
        Signals::telling(progress).run(py, |signals| self.0.check_base(&base, verify, &read, signals))
    }

    /// Write one file of the result.
    #[pyo3(signature = (
        base, number, path, *, durable = true, overwrite = false, replace_read_only = false, progress = None,
    ))]
    #[allow(clippy::too_many_arguments, reason = "one for each keyword that Python has")]
    fn apply(
        &self,
        py: Python<'_>,
        base: &Checkpoint,
        number: usize,
        path: &Bound<'_, PyAny>,
        durable: bool,
        overwrite: bool,
        replace_read_only: bool,
        progress: Option<Bound<'_, PyAny>>,
    ) -> PyResult<()> {
        let (path, base) = (file_path(path)?, base.opened(py)?);
        let save = save_options(durable, overwrite, replace_read_only);
        Signals::telling(progress).run(py, |signals| {
            binding::apply(&base, &self.0, number, &path, &save, signals)
        })
    }

    /// Return the result, without the data of its tensors.
    fn layout(&self, py: Python<'_>) -> PyResult<Checkpoint> {
        let found = self.0.result().and_then(Checkpoint::of);
        found.map_err(|error| raise(py, &error))
    }

    /// Write new elements into memory of the base. See `_native.pyi`.
    #[pyo3(signature = (wanted, destinations, *, threads = None, progress = None))]
    fn write_into(
        &self,
        py: Python<'_>,
        wanted: Vec<(String, u64)>,
        destinations: &Destinations,
        threads: Option<NonZeroUsize>,
        progress: Option<Bound<'_, PyAny>>,
    ) -> PyResult<()> {
        let held = destinations.take()?.into_iter();
        let mut held = held
            .map(|held| bytes_of(py, held))
            .collect::<PyResult<Vec<_>>>()?;
        let targets = wanted.iter().zip(&mut held).map(|((name, _), held)| {
            let misfit = binding::Misfit::Overlap { other: name.clone() };
            let refused = || Failure::Destination(misfit).about(self.0.path(), Some(name));
            held.target().ok_or_else(|| raise(py, &refused()))
        });
        let targets = targets.collect::<PyResult<Vec<_>>>()?;
        let read = ReadOptions::new().threads(threads);
        Signals::telling(progress).run(py, |signals| self.0.write_into(&wanted, targets, &read, signals))
    }

    /// Change the files at `path`. Return false if they were the result already.
    #[pyo3(signature = (path, verify, *, durable = true, threads = None, progress = None))]
    fn apply_in_place(
        &self,
        py: Python<'_>,
        path: &Bound<'_, PyAny>,
        verify: bool,
        durable: bool,
        threads: Option<NonZeroUsize>,
        progress: Option<Bound<'_, PyAny>>,
    ) -> PyResult<bool> {
        let path = file_path(path)?;
        let (read, save) = (
            ReadOptions::new().threads(threads),
            save_options(durable, true, false),
        );
        Signals::telling(progress).run(py, |signals| {
            binding::apply_in_place(&path, &self.0, verify, &read, &save, signals)
        })
    }
}

/// Return the id of a version. Without digests of all tensors in the headers, the data is read.
#[pyfunction]
pub(crate) fn version_id(py: Python<'_>, checkpoint: &Checkpoint) -> PyResult<String> {
    let checkpoint = checkpoint.opened(py)?;
    Signals::detach(py, |signals| -> Result<String, Error> {
        binding::version_id(&checkpoint, &ReadOptions::new(), signals)
    })
}

fn bytes_of(py: Python<'_>, held: Held) -> PyResult<Destination> {
    match held {
        Held::Exported(destination) => Ok(destination),
        Held::Object((_, memory, is_scalar)) => Destination::new(Dtype::U8, memory.bind(py), is_scalar),
    }
}

/// Return whether the headers have a digest of each tensor.
#[pyfunction]
pub(crate) fn has_digests(py: Python<'_>, checkpoint: &Checkpoint) -> PyResult<bool> {
    let checkpoint = checkpoint.opened(py)?;
    Signals::detach(py, |_| binding::has_digests(&checkpoint))
}
