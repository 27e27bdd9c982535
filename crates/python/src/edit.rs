//! Changing files, and making new ones of parts of others.

use std::path::PathBuf;

use ingot_io::{Edited, Error, MetadataChange, Origin, Pick, Way};
use pyo3::exceptions::PyIndexError;
use pyo3::prelude::*;
use pyo3::types::{PyAny, PyDict, PyList};

use crate::errors::raise;
use crate::intake::{Exporter, borrowed, metadata};
use crate::open::file_path;
use crate::produced::Raised;
use crate::serialize::{format_of, save_options};
use crate::watch::Signals;

/// Changes metadata. See `_native.pyi`.
#[pyfunction]
pub(crate) fn update_metadata(
    py: Python<'_>,
    path: &Bound<'_, PyAny>,
    set: &Bound<'_, PyAny>,
    remove: Vec<String>,
    in_place: bool,
    durable: bool,
) -> PyResult<&'static str> {
    let path = file_path(path)?;
    let pairs = metadata(Some(set))?.unwrap_or_default();
    let way = if in_place { Way::InPlace } else { Way::Rewrite };
    let options = save_options(durable, true, false);
    let edited = Signals::detach(py, |signals| {
        let change = MetadataChange {
            set: &borrowed(&pairs),
            remove: &remove.iter().map(String::as_str).collect::<Vec<_>>(),
        };
        ingot_io::update_metadata(&path, &change, way, &options, signals)
    })?;
    Ok(match edited {
        Edited::Unchanged => "unchanged",
        Edited::InPlace => "in-place",
        Edited::Rewritten => "rewritten",
    })
}

/// Replaces a tensor. See `_native.pyi`.
#[pyfunction]
pub(crate) fn replace_tensor(
    path: &Bound<'_, PyAny>,
    name: &Bound<'_, PyAny>,
    tensor: &Bound<'_, PyAny>,
    payload: &Bound<'_, PyAny>,
    durable: bool,
) -> PyResult<()> {
    let path = file_path(path)?;
    let items = [(name.clone(), tensor.clone())];
    let exporter = Exporter {
        export: None,
        payload,
        raised: Raised::default(),
    };
    let options = save_options(durable, true, false);
    for (name, new) in exporter.take(&items)? {
        let replaced = Signals::detach(payload.py(), |signals| {
            ingot_io::replace_tensor(
                &path,
                name,
                new.dtype,
                &new.shape,
                &new.payload(),
                &options,
                signals,
            )
        });
        replaced.map_err(|fault| exporter.raised.take().unwrap_or(fault))?;
    }
    Ok(())
}

/// Files whose tensors go into others. See `_native.pyi`.
#[pyclass(frozen, module = "ingot._native")]
pub(crate) struct Sources {
    origins: Vec<Origin>,
}

#[pymethods]
impl Sources {
    #[staticmethod]
    fn open(py: Python<'_>, paths: Vec<Bound<'_, PyAny>>) -> PyResult<Sources> {
        let paths: Vec<PathBuf> = paths.iter().map(file_path).collect::<PyResult<_>>()?;
        let origins = py.detach(|| paths.iter().map(|path| Origin::open(path)).collect());
        let origins: Result<Vec<Origin>, Error> = origins;
        Ok(Sources {
            origins: origins.map_err(|error| raise(py, &error))?,
        })
    }

    fn __len__(&self) -> usize {
        self.origins.len()
    }

    /// The names of the tensors of one file, in the order of the data.
    fn names<'py>(&self, py: Python<'py>, source: usize) -> PyResult<Bound<'py, PyList>> {
        PyList::new(py, self.origin(source)?.header().names().collect::<Vec<_>>())
    }

    /// Their sizes in bytes.
    fn sizes(&self, source: usize) -> PyResult<Vec<u64>> {
        let header = self.origin(source)?.header();
        Ok(header.entries().map(|entry| entry.nbytes()).collect())
    }

    fn metadata<'py>(&self, py: Python<'py>, source: usize) -> PyResult<Option<Bound<'py, PyDict>>> {
        let Some(metadata) = self.origin(source)?.header().metadata() else {
            return Ok(None);
        };
        let pairs = PyDict::new(py);
        for (key, value) in metadata.iter() {
            pairs.set_item(key, value)?;
        }
        Ok(Some(pairs))
    }

    fn format(&self, source: usize) -> PyResult<&'static str> {
        Ok(self.origin(source)?.header().format().name())
    }

    /// Writes a file of `picks`: a file, the number of a tensor in the order of its data, the name in the new file.
    #[pyo3(signature = (path, picks, metadata, format, *, reserve = 0, align = 8, durable = true, force = false))]
    #[allow(clippy::too_many_arguments, reason = "one for each keyword that Python has")]
    fn write(
        &self,
        py: Python<'_>,
        path: &Bound<'_, PyAny>,
        picks: Vec<(usize, usize, String)>,
        metadata: Option<&Bound<'_, PyAny>>,
        format: &str,
        reserve: u64,
        align: u64,
        durable: bool,
        force: bool,
    ) -> PyResult<()> {
        let path = file_path(path)?;
        let format = format_of(format)?;
        let pairs = crate::intake::metadata_of_new(metadata)?;
        let layout = crate::serialize::layout_options(reserve, align)?;
        let options = save_options(durable, true, force);
        let picks = self.picks(&picks)?;
        Signals::detach(py, |signals| {
            let pairs = pairs.as_deref().map(borrowed);
            ingot_io::assemble(
                &path,
                &picks,
                pairs.as_deref(),
                format,
                &layout,
                &options,
                signals,
            )
        })
    }
}

impl Sources {
    fn origin(&self, source: usize) -> PyResult<&Origin> {
        self.origins
            .get(source)
            .ok_or_else(|| PyIndexError::new_err("there is no such source"))
    }

    fn picks<'a>(&'a self, picks: &'a [(usize, usize, String)]) -> PyResult<Vec<Pick<'a>>> {
        picks
            .iter()
            .map(|(source, number, name)| {
                let origin = self.origin(*source)?;
                if *number >= origin.header().len() {
                    return Err(PyIndexError::new_err("there is no such tensor"));
                }
                Ok(Pick {
                    origin,
                    number: *number,
                    name,
                })
            })
            .collect()
    }
}
