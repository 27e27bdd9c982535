//! Changing files, and making new ones of parts of others.

use std::ffi::OsString;

use ingot_io::{Edited, Inherit, MetadataChange, Origin, Origins, Pick, Way};
use pyo3::exceptions::PyIndexError;
use pyo3::prelude::*;
use pyo3::types::{PyAny, PyDict, PyList};

use crate::intake::{Exporter, borrowed, metadata};
use crate::open::texts;
use crate::place::Location;
use crate::place::file_path;
use crate::produced::Raised;
use crate::serialize::{format_of, save_options};
use crate::shards;
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

/// Files, and checkpoints of many, whose tensors go into others. See `_native.pyi`.
#[pyclass(frozen, module = "ingot._native")]
pub(crate) struct Sources {
    sources: Vec<Origins>,
}

#[pymethods]
impl Sources {
    #[staticmethod]
    #[pyo3(signature = (paths, storage_options = None))]
    fn open(
        py: Python<'_>,
        paths: Vec<Bound<'_, PyAny>>,
        storage_options: Option<&Bound<'_, PyDict>>,
    ) -> PyResult<Sources> {
        let locations = paths.iter().map(|path| Location::of(path, storage_options));
        let locations: Vec<Location> = locations.collect::<PyResult<_>>()?;
        let sources = Signals::detach(py, |signals| {
            let open = |location: &Location| match location {
                Location::File(path) => Origins::open(path),
                Location::Url(url, options) => Origins::open_url(url, options, signals),
            };
            locations.iter().map(open).collect()
        })?;
        Ok(Sources { sources })
    }

    fn __len__(&self) -> usize {
        self.sources.len()
    }

    /// The path of its index, or of its only file.
    fn path(&self, source: usize) -> PyResult<OsString> {
        Ok(self.source(source)?.path().as_os_str().to_owned())
    }

    /// The names of the tensors of one source, in the order of the data, file after file.
    fn names<'py>(&self, py: Python<'py>, source: usize) -> PyResult<Bound<'py, PyList>> {
        let files = self.source(source)?.files();
        let names = files.iter().flat_map(|file| file.header().names());
        PyList::new(py, names.collect::<Vec<_>>())
    }

    /// Their sizes in bytes.
    fn sizes(&self, source: usize) -> PyResult<Vec<u64>> {
        let files = self.source(source)?.files();
        let entries = files.iter().flat_map(|file| file.header().entries());
        Ok(entries.map(|entry| entry.nbytes()).collect())
    }

    /// The metadata of each file of a source, by its path.
    fn metadata<'py>(&self, py: Python<'py>, source: usize) -> PyResult<Bound<'py, PyDict>> {
        let all = PyDict::new(py);
        for file in self.source(source)?.files() {
            all.set_item(file.path().as_os_str(), texts(py, file.header())?)?;
        }
        Ok(all)
    }

    /// The metadata of its index, where it has one: any JSON.
    fn index_metadata<'py>(&self, py: Python<'py>, source: usize) -> PyResult<Option<Bound<'py, PyAny>>> {
        match self.source(source)?.index() {
            Some(index) => shards::metadata(py, index),
            None => Ok(None),
        }
    }

    /// Writes a file of `picks`: a source, the number of a tensor in the order of its data, the name in the new file.
    #[pyo3(signature = (
        path, picks, metadata, format, *, inherit = false, reserve = 0, align = 8, durable = true, force = false,
        progress = None,
    ))]
    #[allow(clippy::too_many_arguments, reason = "one for each keyword that Python has")]
    fn write(
        &self,
        py: Python<'_>,
        path: &Bound<'_, PyAny>,
        picks: Vec<(usize, usize, String)>,
        metadata: Option<&Bound<'_, PyAny>>,
        format: &str,
        inherit: bool,
        reserve: u64,
        align: u64,
        durable: bool,
        force: bool,
        progress: Option<Bound<'_, PyAny>>,
    ) -> PyResult<()> {
        let path = file_path(path)?;
        let format = format_of(format)?;
        let pairs = crate::intake::metadata_of_new(metadata)?;
        let layout = crate::serialize::layout_options(reserve, align)?;
        let options = save_options(durable, true, force);
        let picks = self.picks(&picks)?;
        let inherit = if inherit {
            Inherit::Digests
        } else {
            Inherit::Nothing
        };
        Signals::telling(progress).run(py, |signals| {
            let pairs = pairs.as_deref().map(borrowed);
            ingot_io::assemble(
                &path,
                &picks,
                pairs.as_deref(),
                inherit,
                format,
                &layout,
                &options,
                signals,
            )
        })
    }
}

impl Sources {
    fn source(&self, source: usize) -> PyResult<&Origins> {
        self.sources
            .get(source)
            .ok_or_else(|| PyIndexError::new_err("there is no such source"))
    }

    fn picks<'a>(&'a self, picks: &'a [(usize, usize, String)]) -> PyResult<Vec<Pick<'a>>> {
        let no_tensor = || PyIndexError::new_err("there is no such tensor");
        picks
            .iter()
            .map(|(source, number, name)| {
                let (origin, number) = tensor(self.source(*source)?, *number).ok_or_else(no_tensor)?;
                Ok(Pick { origin, number, name })
            })
            .collect()
    }
}

/// The file that holds tensor `number` of all, and its number there.
fn tensor(source: &Origins, number: usize) -> Option<(&Origin, usize)> {
    let mut rest = number;
    for file in source.files() {
        let count = file.header().len();
        if rest < count {
            return Some((file, rest));
        }
        rest -= count;
    }
    None
}
