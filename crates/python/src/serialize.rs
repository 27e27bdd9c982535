//! Saving.

use std::path::PathBuf;
use std::sync::{Mutex, PoisonError};

use ingot_format::{Format, FormatError, Layout, Spec, layout, to_usize};
use ingot_io::{Durability, Error, Payload, ReadOnly, Replace, SaveOptions, Snapshot};
use pyo3::exceptions::{PyMemoryError, PyRuntimeError, PyValueError};
use pyo3::prelude::*;
use pyo3::types::PyBytes;

use crate::errors::raise;
use crate::intake::{Exporter, Item, items, metadata};
use crate::open::file_path;
use crate::produced::Raised;
use crate::shared::refuse_shared;
use crate::tensor::Imported;
use crate::watch::Signals;

/// Takes over all that goes into a file. See `_native.pyi`.
#[pyfunction]
#[pyo3(signature = (path, tensors, payload, metadata, format, *, export = None, shared = "copy", durable = true, atomic = true, force = false))]
#[allow(clippy::too_many_arguments, reason = "one for each keyword that Python has")]
pub(crate) fn prepare(
    path: &Bound<'_, PyAny>,
    tensors: &Bound<'_, PyAny>,
    payload: &Bound<'_, PyAny>,
    metadata: Option<&Bound<'_, PyAny>>,
    format: &str,
    export: Option<&Bound<'_, PyAny>>,
    shared: &str,
    durable: bool,
    atomic: bool,
    force: bool,
) -> PyResult<NewFile> {
    let path = file_path(path)?;
    let exporter = Exporter {
        export,
        payload,
        raised: Raised::default(),
    };
    let contents = Contents::new(&items(tensors)?, &exporter, metadata, format, shared, Some(&path))?;
    let options = SaveOptions {
        durable: if durable {
            Durability::Durable
        } else {
            Durability::Fast
        },
        replace: if atomic { Replace::Atomic } else { Replace::InPlace },
        read_only: if force {
            ReadOnly::Replace
        } else {
            ReadOnly::Refuse
        },
    };
    Ok(NewFile {
        path,
        head: contents.layout.head.clone(),
        options,
        raised: exporter.raised,
        data: Mutex::new(Some(Data::Tensors(contents.tensors))),
    })
}

/// A file that is yet to be written. See `_native.pyi`.
#[pyclass(frozen, module = "ingot._native")]
pub(crate) struct NewFile {
    path: PathBuf,
    head: Vec<u8>,
    options: SaveOptions,
    raised: Raised,
    /// `None` while or after it is written.
    data: Mutex<Option<Data>>,
}

/// The bytes after the head.
enum Data {
    Tensors(Vec<Imported>),
    Snapshot(Snapshot),
}

impl Data {
    fn payloads(&self) -> Vec<Payload<'_>> {
        match self {
            Data::Tensors(tensors) => tensors.iter().map(Imported::payload).collect(),
            Data::Snapshot(snapshot) => snapshot.payloads(),
        }
    }
}

#[pymethods]
impl NewFile {
    /// Copies the tensors and lets go of them.
    fn snapshot(&self, py: Python<'_>) -> PyResult<()> {
        let data = self.take()?;
        let copy = self.run(py, Signals::default(), |signals| {
            Snapshot::take(&data.payloads(), &self.path, signals)
        })?;
        self.put(Data::Snapshot(copy));
        Ok(())
    }

    /// Writes the file.
    #[pyo3(signature = (progress = None))]
    fn write(&self, py: Python<'_>, progress: Option<Bound<'_, PyAny>>) -> PyResult<()> {
        let data = self.take()?;
        self.run(py, Signals::telling(progress), |signals| {
            ingot_io::save(&self.path, &self.head, &data.payloads(), &self.options, signals)?;
            // Memory goes back while the interpreter runs others.
            if let Data::Snapshot(snapshot) = data {
                drop(snapshot);
            }
            Ok(())
        })
    }
}

impl NewFile {
    fn run<T: Send>(
        &self,
        py: Python<'_>,
        signals: Signals,
        work: impl Send + FnOnce(&Signals) -> Result<T, Error>,
    ) -> PyResult<T> {
        let outcome = signals.run(py, work);
        outcome.map_err(|fault| self.raised.take().unwrap_or(fault))
    }

    fn take(&self) -> PyResult<Data> {
        let mut data = self.data.lock().unwrap_or_else(PoisonError::into_inner);
        data.take()
            .ok_or_else(|| PyRuntimeError::new_err("the file is being written, or was"))
    }

    fn put(&self, data: Data) {
        *self.data.lock().unwrap_or_else(PoisonError::into_inner) = Some(data);
    }
}

/// The bytes of a file with tensors in it. See `_native.pyi`.
#[pyfunction]
#[pyo3(signature = (tensors, payload, metadata, format, *, export = None, shared = "copy"))]
pub(crate) fn serialize<'py>(
    py: Python<'py>,
    tensors: &Bound<'_, PyAny>,
    payload: &Bound<'_, PyAny>,
    metadata: Option<&Bound<'_, PyAny>>,
    format: &str,
    export: Option<&Bound<'_, PyAny>>,
    shared: &str,
) -> PyResult<Bound<'py, PyBytes>> {
    let exporter = Exporter {
        export,
        payload,
        raised: Raised::default(),
    };
    let contents = Contents::new(&items(tensors)?, &exporter, metadata, format, shared, None)?;
    let layout = &contents.layout;
    let payloads: Vec<Payload<'_>> = contents.tensors.iter().map(Imported::payload).collect();
    let nbytes = to_usize(layout.header.file_nbytes())
        .ok_or_else(|| PyMemoryError::new_err("too large for memory"))?;
    PyBytes::new_with(py, nbytes, |file| {
        let (head, data) = file.split_at_mut(layout.head.len());
        head.copy_from_slice(&layout.head);
        let copied = py.detach(|| copy_all(&payloads, data));
        copied.map_err(|fault| exporter.raised.take().unwrap_or_else(|| fault.into()))
    })
}

fn copy_all(payloads: &[Payload<'_>], data: &mut [u8]) -> std::io::Result<()> {
    let mut rest = data;
    for payload in payloads {
        let len = to_usize(payload.nbytes()).unwrap_or(rest.len());
        let (place, after) = rest.split_at_mut(len);
        payload.read(0, place)?;
        rest = after;
    }
    Ok(())
}

/// All that goes into a file.
struct Contents {
    layout: Layout,
    /// In the order of the layout.
    tensors: Vec<Imported>,
}

impl Contents {
    fn new(
        items: &[Item<'_>],
        exporter: &Exporter<'_, '_>,
        pairs: Option<&Bound<'_, PyAny>>,
        format: &str,
        shared: &str,
        path: Option<&PathBuf>,
    ) -> PyResult<Contents> {
        let py = exporter.payload.py();
        let format = match format {
            "safetensors" => Format::Safetensors,
            "bintensors" => Format::Bintensors,
            _ => {
                let message =
                    format!("unknown format {format:?}: expected \"safetensors\" or \"bintensors\"");
                return Err(PyValueError::new_err(message));
            }
        };
        let pairs = metadata(pairs)?;
        let tensors = exporter.take(items)?;
        if shared == "error" {
            refuse_shared(py, &tensors)?;
        }
        let layout = laid_out(&tensors, pairs.as_deref(), format).map_err(|fault| {
            let path = path.cloned();
            raise(py, &Error::Unstorable { path, fault })
        })?;
        let mut tensors: Vec<Option<Imported>> =
            tensors.into_iter().map(|(_, tensor)| Some(tensor)).collect();
        let ordered = layout.order.iter().filter_map(|&number| tensors[number].take());
        Ok(Contents {
            tensors: ordered.collect(),
            layout,
        })
    }
}

fn laid_out(
    tensors: &[(&str, Imported)],
    pairs: Option<&[(String, String)]>,
    format: Format,
) -> Result<Layout, FormatError> {
    let specs: Vec<Spec<'_>> = tensors
        .iter()
        .map(|(name, tensor)| Spec {
            name,
            dtype: tensor.dtype,
            shape: &tensor.shape,
        })
        .collect();
    let pairs: Option<Vec<(&str, &str)>> = pairs.map(|pairs| {
        pairs
            .iter()
            .map(|(key, value)| (key.as_str(), value.as_str()))
            .collect()
    });
    layout(&specs, pairs.as_deref(), format)
}
