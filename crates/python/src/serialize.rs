//! Saving.

use ingot_format::{CHECKSUMS_KEY, Format, FormatError, Layout, Spec, layout, to_usize};
use ingot_io::{Algorithm, Durability, Error, Keep, Payload, ReadOnly, Replace, SaveOptions, Sealed};
use pyo3::exceptions::{PyMemoryError, PyValueError};
use pyo3::prelude::*;
use pyo3::types::PyBytes;

use crate::errors::raise;
use crate::intake::{Exporter, Item, items, metadata};
use crate::open::file_path;
use crate::shared::refuse_shared;
use crate::tensor::Imported;
use crate::watch::Signals;

/// Saves tensors to a file. See `_native.pyi`.
#[pyfunction]
#[pyo3(signature = (path, tensors, payload, metadata, format, *, export = None, shared = "copy", durable = true, atomic = true, force = false, checksums = Vec::new()))]
#[allow(clippy::too_many_arguments, reason = "one for each keyword that Python has")]
pub(crate) fn serialize_file(
    py: Python<'_>,
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
    checksums: Vec<String>,
) -> PyResult<()> {
    let path = file_path(path)?;
    let items = items(tensors)?;
    let new = NewFile::new(&items, &Exporter { export, payload }, metadata, format, shared)?;
    let unstorable = |fault| {
        let path = Some(path.clone());
        raise(py, &Error::Unstorable { path, fault })
    };
    let specs = new.specs();
    let pairs = new.pairs();
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
    let keep = keep(&checksums)?;
    if keep == Keep::default() {
        let layout = layout(&specs, pairs.as_deref(), new.format).map_err(unstorable)?;
        let payloads = new.payloads(&layout);
        return Signals::detach(py, |signals| {
            ingot_io::save(&path, &layout.head, &payloads, &options, signals)
        });
    }
    let sealed = Sealed::new(&specs, pairs.as_deref(), new.format, keep).map_err(unstorable)?;
    let payloads = new.payloads(sealed.layout());
    Signals::detach(py, |signals| sealed.save(&path, &payloads, &options, signals))
}

/// The digests of these names, which a file is to keep.
fn keep(names: &[String]) -> PyResult<Keep> {
    let mut keep = Keep::default();
    for name in names {
        match Algorithm::from_name(name) {
            None if name == "modelspec" => keep.model_spec = true,
            Some(algorithm) if keep.tensors.is_none() => keep.tensors = Some(algorithm),
            _ => {
                return Err(PyValueError::new_err(format!(
                    "unknown or second checksum {name:?}"
                )));
            }
        }
    }
    Ok(keep)
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
    let items = items(tensors)?;
    let new = NewFile::new(&items, &Exporter { export, payload }, metadata, format, shared)?;
    let layout = new
        .layout()
        .map_err(|fault| raise(py, &Error::Unstorable { path: None, fault }))?;
    let payloads = new.payloads(&layout);
    let nbytes = to_usize(layout.header.file_nbytes())
        .ok_or_else(|| PyMemoryError::new_err("too large for memory"))?;
    PyBytes::new_with(py, nbytes, |file| {
        let (head, data) = file.split_at_mut(layout.head.len());
        head.copy_from_slice(&layout.head);
        py.detach(|| copy_all(&payloads, data));
        Ok(())
    })
}

fn copy_all(payloads: &[Payload<'_>], data: &mut [u8]) {
    let mut rest = data;
    for payload in payloads {
        let (place, after) = rest.split_at_mut(payload.len());
        payload.copy_into(0, place);
        rest = after;
    }
}

/// All that goes into a file.
struct NewFile<'a> {
    tensors: Vec<(&'a str, Imported)>,
    metadata: Option<Vec<(String, String)>>,
    format: Format,
}

impl<'a> NewFile<'a> {
    fn new(
        items: &'a [Item<'_>],
        exporter: &Exporter<'_, '_>,
        pairs: Option<&Bound<'_, PyAny>>,
        format: &str,
        shared: &str,
    ) -> PyResult<NewFile<'a>> {
        let format = match format {
            "safetensors" => Format::Safetensors,
            "bintensors" => Format::Bintensors,
            _ => {
                let message =
                    format!("unknown format {format:?}: expected \"safetensors\" or \"bintensors\"");
                return Err(PyValueError::new_err(message));
            }
        };
        let mut metadata = metadata(pairs)?;
        if let Some(pairs) = &mut metadata {
            // A record that was copied along with other metadata speaks of other bytes.
            pairs.retain(|pair| pair.0 != CHECKSUMS_KEY);
        }
        let imported = exporter.take(items)?;
        if shared == "error" {
            refuse_shared(exporter.payload.py(), &imported)?;
        }
        Ok(NewFile {
            tensors: imported,
            metadata,
            format,
        })
    }

    fn layout(&self) -> Result<Layout, FormatError> {
        layout(&self.specs(), self.pairs().as_deref(), self.format)
    }

    fn specs(&self) -> Vec<Spec<'_>> {
        self.tensors
            .iter()
            .map(|(name, tensor)| Spec {
                name,
                dtype: tensor.dtype,
                shape: &tensor.shape,
            })
            .collect()
    }

    fn pairs(&self) -> Option<Vec<(&str, &str)>> {
        let pairs = self.metadata.as_ref()?.iter();
        Some(pairs.map(|(key, value)| (key.as_str(), value.as_str())).collect())
    }

    /// The tensors' bytes, in the order of the layout.
    fn payloads(&self, layout: &Layout) -> Vec<Payload<'_>> {
        layout
            .order
            .iter()
            .map(|&number| self.tensors[number].1.payload())
            .collect()
    }
}
