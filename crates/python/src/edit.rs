//! Changing files, and writing new files from parts of others.

use std::ffi::OsString;
use std::path::Path;

use ingot_format::{Entry, Finding, Leniency};
use ingot_io::binding::{Alias, Inherit, Pick, Role, aliases, passed_over};
use ingot_io::{Archive, Edited, Failure, Job, MetadataChange, ReadOptions};
use pyo3::exceptions::PyIndexError;
use pyo3::prelude::*;
use pyo3::types::{PyAny, PyDict, PyList};

use crate::errors::raise;
use crate::header::{TensorInfo, texts};
use crate::intake::{Exporter, borrowed, metadata};
use crate::open::{Checkpoint, leniency_of};
use crate::paths::file_path;
use crate::serialize::{Target, format_of, keep, save_options};
use crate::shards;
use crate::tensor::memoryview;
use crate::watch::Signals;

/// Change metadata. See `_native.pyi`.
#[pyfunction]
#[pyo3(signature = (path, set, remove, in_place, durable, progress=None))]
pub(crate) fn update_metadata(
    py: Python<'_>,
    path: &Bound<'_, PyAny>,
    set: &Bound<'_, PyAny>,
    remove: Vec<String>,
    in_place: bool,
    durable: bool,
    progress: Option<Bound<'_, PyAny>>,
) -> PyResult<&'static str> {
    let path = file_path(path)?;
    let pairs = metadata(Some(set))?.unwrap_or_default();
    let options = save_options(durable, true, false);
    let edited = Signals::telling(progress).run(py, |signals| {
        let change = MetadataChange {
            set: &borrowed(&pairs),
            remove: &remove.iter().map(String::as_str).collect::<Vec<_>>(),
            rewrite: !in_place,
        };
        ingot_io::update_metadata(&path, &change, &options, signals)
    })?;
    Ok(match edited {
        Edited::Unchanged => "unchanged",
        Edited::InPlace => "in-place",
        Edited::Rewritten => "rewritten",
    })
}

/// Replace a tensor. See `_native.pyi`.
#[pyfunction]
#[pyo3(signature = (path, name, tensor, payload, durable, progress=None))]
pub(crate) fn replace_tensor(
    path: &Bound<'_, PyAny>,
    name: &Bound<'_, PyAny>,
    tensor: &Bound<'_, PyAny>,
    payload: &Bound<'_, PyAny>,
    durable: bool,
    progress: Option<Bound<'_, PyAny>>,
) -> PyResult<()> {
    let path = file_path(path)?;
    let items = [(name.clone(), tensor.clone())];
    let exporter = Exporter::new(None, payload);
    let options = save_options(durable, true, false);
    for (name, new) in exporter.take(&items)? {
        let signals = Signals::telling(progress.clone());
        let replaced = signals.run(payload.py(), |signals| {
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
        replaced.map_err(|fault| exporter.raised.or(fault))?;
    }
    Ok(())
}

/// Open files and checkpoints whose tensors are copied to other files. See `_native.pyi`.
#[pyclass(frozen, module = "ingot._native")]
pub(crate) struct Sources {
    sources: Vec<Source>,
}

/// The code of the rule, the tensor, the fault, and the remedy.
type Found = (&'static str, Option<String>, String, &'static str);

/// One source, and the aliases that its records add to its tensors.
struct Source {
    checkpoint: ingot_io::Checkpoint,
    aliases: Vec<Alias>,
}

impl Source {
    fn new(
        checkpoint: ingot_io::Checkpoint,
        leniency: Leniency,
        watch: &Signals,
    ) -> Result<Source, ingot_io::Error> {
        checkpoint.prepare_all(watch)?;
        let files = checkpoint.all_files()?;
        let headers = files
            .iter()
            .map(|file| (Some(file.path_or_buffer()), file.header()));
        let aliases = aliases(headers).or_else(|fault| match (leniency, fault.failure()) {
            // Whether `findings` reports faults of the source.
            (Leniency::Salvage, Failure::Shared(_)) => Ok(Vec::new()),
            _ => Err(fault),
        })?;
        Ok(Source { checkpoint, aliases })
    }

    fn files(&self, py: Python<'_>) -> PyResult<Vec<&Archive>> {
        self.checkpoint.all_files().map_err(|fault| raise(py, &fault))
    }

    /// Return the stored tensor of `files` with this number, or the alias; aliases count after the tensors.
    fn pick<'a>(&'a self, files: &[&'a Archive], number: usize, name: &'a str) -> Option<Pick<'a>> {
        let mut rest = number;
        for &file in files {
            let count = file.header().len();
            if rest < count {
                return Some(Pick {
                    tensor: file.tensor(rest)?,
                    name,
                    role: Role::Tensor,
                });
            }
            rest -= count;
        }
        let alias = self.aliases.get(rest)?;
        Some(Pick {
            tensor: files.get(alias.file)?.tensor(alias.number)?,
            name,
            role: alias.part.as_ref().map_or(Role::Alias, Role::Part),
        })
    }
}

#[pymethods]
impl Sources {
    /// Take the files of open checkpoints, which closes the other handles.
    #[new]
    #[pyo3(signature = (checkpoints, leniency = "accept"))]
    fn new(py: Python<'_>, checkpoints: Vec<Bound<'_, Checkpoint>>, leniency: &str) -> PyResult<Sources> {
        let leniency = leniency_of(leniency)?;
        let taken = checkpoints.iter().map(|checkpoint| checkpoint.get().take(py));
        let taken = taken.collect::<PyResult<Vec<_>>>()?;
        let sources = Signals::detach(py, |signals| {
            let sources = taken.into_iter();
            sources
                .map(|checkpoint| Source::new(checkpoint, leniency, signals))
                .collect()
        })?;
        Ok(Sources { sources })
    }

    fn __len__(&self) -> usize {
        self.sources.len()
    }

    /// Return the path of the index, or of the only file.
    fn path(&self, source: usize) -> PyResult<OsString> {
        let path = self.source(source)?.checkpoint.path();
        Ok(path.unwrap_or(Path::new("<buffer>")).as_os_str().to_owned())
    }

    /// Return the faults that a lenient reader found in a source.
    fn findings(&self, py: Python<'_>, source: usize) -> PyResult<Vec<Found>> {
        let mut found = Vec::new();
        for file in self.source(source)?.files(py)? {
            found.extend(file.header().findings().iter().map(|Finding { fault, remedy }| {
                let tensor = fault.tensor().map(ToOwned::to_owned);
                (fault.code(), tensor, fault.to_string(), remedy.code())
            }));
            found.extend(
                passed_over(file.path_or_buffer(), file.header())
                    .iter()
                    .map(|(fault, remedy)| {
                        let tensor = fault.tensor().map(ToOwned::to_owned);
                        (fault.code(), tensor, fault.to_string(), remedy.code())
                    }),
            );
        }
        Ok(found)
    }

    /// Return the names of the tensors of one source, in data order, file after file, and then the aliases.
    fn names<'py>(&self, py: Python<'py>, source: usize) -> PyResult<Bound<'py, PyList>> {
        let source = self.source(source)?;
        let (files, aliases) = (source.files(py)?, &source.aliases);
        let names = files.iter().flat_map(|file| file.header().names());
        let all = names.chain(aliases.iter().map(|alias| &*alias.name));
        PyList::new(py, all.collect::<Vec<_>>())
    }

    /// Return the info of the same tensors. An alias has its own name and the info of its tensor.
    fn infos(&self, py: Python<'_>, source: usize) -> PyResult<Vec<TensorInfo>> {
        let source = self.source(source)?;
        let (files, aliases) = (source.files(py)?, &source.aliases);
        let entries = files.iter().flat_map(|file| file.header().entries());
        let stored = |alias: &Alias| files[alias.file].header().entry(alias.number);
        let aliases = aliases.iter().filter_map(|alias| {
            Some(Entry {
                name: &alias.name,
                ..stored(alias)?
            })
        });
        entries
            .chain(aliases)
            .map(|entry| TensorInfo::of(py, &entry))
            .collect()
    }

    /// Return for each alias the number of its tensor.
    fn shared(&self, py: Python<'_>, source: usize) -> PyResult<Vec<usize>> {
        let source = self.source(source)?;
        let mut begins = vec![0];
        for file in source.files(py)? {
            begins.push(begins[begins.len() - 1] + file.header().len());
        }
        let numbers = source
            .aliases
            .iter()
            .map(|alias| begins[alias.file] + alias.number);
        Ok(numbers.collect())
    }

    /// Return the sizes of the tensors in bytes.
    fn sizes(&self, py: Python<'_>, source: usize) -> PyResult<Vec<u64>> {
        let files = self.source(source)?.files(py)?;
        let entries = files.iter().flat_map(|file| file.header().entries());
        Ok(entries.map(|entry| entry.nbytes()).collect())
    }

    /// Return the bytes of a tensor of one source, by its number.
    fn tensor_bytes<'py>(
        &self,
        py: Python<'py>,
        source: usize,
        number: usize,
    ) -> PyResult<Bound<'py, PyAny>> {
        let source = self.source(source)?;
        let picked = source.pick(&source.files(py)?, number, "");
        let tensor = picked.ok_or_else(no_such_tensor)?.tensor;
        let job = Job::new(tensor, &[], None).map_err(|error| raise(py, &error))?;
        let regions = Signals::detach(py, |signals| {
            ingot_io::read([&job], &ReadOptions::default(), signals)
        })?;
        memoryview(py, &regions[0])
    }

    /// Return the metadata of each file of a source, by path.
    fn metadata<'py>(&self, py: Python<'py>, source: usize) -> PyResult<Bound<'py, PyDict>> {
        let all = PyDict::new(py);
        for file in self.source(source)?.files(py)? {
            all.set_item(file.path_or_buffer().as_os_str(), texts(py, file.header())?)?;
        }
        Ok(all)
    }

    /// Return the metadata of the index, if there is one. Its values may be any JSON.
    fn index_metadata<'py>(&self, py: Python<'py>, source: usize) -> PyResult<Option<Bound<'py, PyAny>>> {
        match self.source(source)?.checkpoint.index() {
            Some(index) => shards::metadata(py, index),
            None => Ok(None),
        }
    }

    /// Write a file of `picks`: each names a source, the number of a tensor in data order, and the name in the new
    /// file.
    #[pyo3(signature = (
        path, picks, metadata, format, *, inherit = false, checksums = Vec::new(), reserve = 0, align = 8,
        durable = true, overwrite = false, replace_read_only = false, storage_options = None, progress = None,
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
        checksums: Vec<String>,
        reserve: u64,
        align: u64,
        durable: bool,
        overwrite: bool,
        replace_read_only: bool,
        storage_options: Option<&Bound<'_, PyDict>>,
        progress: Option<Bound<'_, PyAny>>,
    ) -> PyResult<()> {
        let target = Target::new(
            path,
            save_options(durable, overwrite, replace_read_only),
            storage_options,
        )?;
        let format = format_of(format)?;
        let pairs = crate::intake::metadata(metadata)?;
        let layout = crate::serialize::layout_options(reserve, align)?;
        let picks = self.picks(py, &picks)?;
        let inherit = if inherit {
            Inherit::Digests
        } else if checksums.is_empty() {
            Inherit::Nothing
        } else {
            Inherit::Computed(keep(&checksums)?)
        };
        Signals::telling(progress).run(py, |signals| {
            let pairs = pairs.as_deref().map(borrowed);
            ingot_io::binding::assemble(
                &target.shown(),
                |pieces, watch| target.save(pieces, watch),
                &picks,
                pairs.as_deref(),
                inherit,
                format,
                &layout,
                signals,
            )
        })
    }
}

impl Sources {
    fn source(&self, source: usize) -> PyResult<&Source> {
        self.sources
            .get(source)
            .ok_or_else(|| PyIndexError::new_err("there is no such source"))
    }

    fn picks<'a>(&'a self, py: Python<'_>, picks: &'a [(usize, usize, String)]) -> PyResult<Vec<Pick<'a>>> {
        let files = self.sources.iter().map(|source| source.files(py));
        let files = files.collect::<PyResult<Vec<_>>>()?;
        picks
            .iter()
            .map(|(source, number, name)| {
                self.source(*source)?
                    .pick(&files[*source], *number, name)
                    .ok_or_else(no_such_tensor)
            })
            .collect()
    }
}

fn no_such_tensor() -> PyErr {
    PyIndexError::new_err("there is no such tensor")
}
