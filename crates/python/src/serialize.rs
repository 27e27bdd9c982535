//! Saving.

use std::borrow::Cow;
use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::{Mutex, PoisonError};

use ingot_format::{Align, Format, FormatError, Layout, LayoutOptions, Spec, to_u64, to_usize};
use ingot_io::binding::{
    Keep, NewHeader, Pieces, Snapshot, StopFlag, UploadOptions, redacted, save_pieces, upload_pieces,
};
use ingot_io::{Algorithm, Error, Failure, Payload, Replace, SaveOptions, Watch};
use pyo3::exceptions::{PyMemoryError, PyRuntimeError, PyValueError};
use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyDict};

use crate::errors::raise;
use crate::export::{Export, Item, items};
use crate::intake::{Exporter, borrowed, metadata_of_new};
use crate::paths::{file_path, is_store};
use crate::produced::Raised;
use crate::remote::remote_options;
use crate::shared::refuse_shared;
use crate::tensor::{Imported, bytes_of};
use crate::watch::Signals;

/// Collect the contents of a new file. See `_native.pyi`.
#[pyfunction]
#[pyo3(signature = (path, tensors, payload, metadata, format, *, export = None, shared = "copy", records = BTreeMap::new(), reserve = 0, align = 8, durable = true, overwrite = true, atomic = true, replace_read_only = false, storage_options = None, checksums = Vec::new()))]
#[allow(clippy::too_many_arguments, reason = "one for each keyword that Python has")]
pub(crate) fn prepare(
    path: &Bound<'_, PyAny>,
    tensors: &Bound<'_, PyAny>,
    payload: &Bound<'_, PyAny>,
    metadata: Option<&Bound<'_, PyAny>>,
    format: &str,
    export: Option<&Bound<'_, Export>>,
    shared: &str,
    records: BTreeMap<String, String>,
    reserve: u64,
    align: u64,
    durable: bool,
    overwrite: bool,
    atomic: bool,
    replace_read_only: bool,
    storage_options: Option<&Bound<'_, PyDict>>,
    checksums: Vec<String>,
) -> PyResult<NewFile> {
    let mut options = save_options(durable, overwrite, replace_read_only);
    if overwrite && !atomic {
        options = options.replace(Replace::InPlace);
    }
    let target = Target::new(path, options, storage_options)?;
    let path = target.shown();
    let exporter = Exporter::new(export, payload);
    let form = Form {
        format: format_of(format)?,
        options: layout_options(reserve, align)?,
        keep: keep(&checksums)?,
    };
    let pairs = metadata_of_new(metadata, records)?;
    let contents = Contents::new(&items(tensors)?, &exporter, pairs, form, shared, Some(&path))?;
    Ok(NewFile {
        path,
        target,
        head: contents.head,
        raised: exporter.raised,
        data: Mutex::new(Some(Data::Tensors(contents.tensors))),
    })
}

/// A file to be written. See `_native.pyi`.
#[pyclass(frozen, module = "ingot._native")]
pub(crate) struct NewFile {
    /// The path or the URL in errors.
    path: PathBuf,
    target: Target,
    head: NewHeader,
    raised: Raised,
    /// `None` while it is written, and afterwards.
    data: Mutex<Option<Data>>,
}

/// The destination of a file.
pub(crate) enum Target {
    File(PathBuf, SaveOptions),
    /// An object of a store, by its URL.
    Object(String, Box<UploadOptions>),
}

impl Target {
    /// Return the destination at a path or at the URL of a store.
    pub(crate) fn new(
        path: &Bound<'_, PyAny>,
        options: SaveOptions,
        storage_options: Option<&Bound<'_, PyDict>>,
    ) -> PyResult<Target> {
        if !is_store(path) {
            return Ok(Target::File(file_path(path)?, options));
        }
        let overwrite = options.replace != Replace::Nothing;
        let remote = remote_options(storage_options)?;
        Ok(Target::Object(
            path.extract()?,
            Box::new(UploadOptions { overwrite, remote }),
        ))
    }

    /// Return the path or the URL without its secrets.
    pub(crate) fn shown(&self) -> PathBuf {
        match self {
            Target::File(path, _) => path.clone(),
            Target::Object(url, _) => redacted(url).into(),
        }
    }

    fn write(&self, head: &NewHeader, data: &Data, signals: &Signals) -> Result<(), Error> {
        match (data, self) {
            (Data::Tensors(tensors), _) => self.save(Pieces::of_new(head, &payloads(tensors)), signals),
            (Data::Snapshot(copy), Target::File(path, options)) => copy.save(path, head, options, signals),
            (Data::Snapshot(copy), Target::Object(url, options)) => copy.upload(url, head, options, signals),
        }
    }

    /// Write a file of these pieces.
    pub(crate) fn save(
        &self,
        pieces: Result<Pieces<'_>, FormatError>,
        watch: &dyn Watch,
    ) -> Result<(), Error> {
        match self {
            Target::File(path, options) => save_pieces(path, pieces, options, watch),
            Target::Object(url, options) => upload_pieces(url, pieces, options, watch),
        }
    }
}

/// The bytes after the head.
enum Data {
    Tensors(Vec<Imported>),
    Snapshot(Snapshot),
}

fn payloads(tensors: &[Imported]) -> Vec<Payload<'_>> {
    tensors.iter().map(Imported::payload).collect()
}

#[pymethods]
impl NewFile {
    /// Copy the tensors and release them.
    fn snapshot(&self, py: Python<'_>) -> PyResult<()> {
        let data = match self.take()? {
            Data::Tensors(tensors) => Data::Snapshot(self.run(py, Signals::default(), |signals| {
                Snapshot::take(self.head.layout(), &payloads(&tensors), &self.path, signals)
            })?),
            copied => copied,
        };
        self.put(data);
        Ok(())
    }

    /// Write the file.
    #[pyo3(signature = (progress = None))]
    fn write(&self, py: Python<'_>, progress: Option<Bound<'_, PyAny>>) -> PyResult<()> {
        let data = self.take()?;
        self.run(py, Signals::telling(progress), |signals| {
            self.target.write(&self.head, &data, signals)?;
            // Memory is freed while the interpreter is released.
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
        outcome.map_err(|fault| self.raised.or(fault))
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

/// Return the bytes of a file with these tensors. See `_native.pyi`.
#[pyfunction]
#[pyo3(signature = (tensors, payload, metadata, format, *, export = None, shared = "copy", records = BTreeMap::new()))]
#[allow(clippy::too_many_arguments, reason = "one for each keyword that Python has")]
pub(crate) fn serialize<'py>(
    py: Python<'py>,
    tensors: &Bound<'_, PyAny>,
    payload: &Bound<'_, PyAny>,
    metadata: Option<&Bound<'_, PyAny>>,
    format: &str,
    export: Option<&Bound<'_, Export>>,
    shared: &str,
    records: BTreeMap<String, String>,
) -> PyResult<Bound<'py, PyBytes>> {
    let exporter = Exporter::new(export, payload);
    let form = Form::usual(format)?;
    let pairs = metadata_of_new(metadata, records)?;
    let contents = Contents::new(&items(tensors)?, &exporter, pairs, form, shared, None)?;
    let payloads = payloads(&contents.tensors);
    let pieces = pieces(py, contents.head.layout(), &payloads)?;
    let nbytes = to_usize(pieces.nbytes()).ok_or_else(|| PyMemoryError::new_err("too large for memory"))?;
    bytes_of(py, nbytes, |room| {
        let copied = Signals::detach(py, |signals| {
            for piece in 0..pieces.count() {
                if piece > 0 && signals.interrupted() {
                    return Err(Failure::Interrupted.into());
                }
                if let Err(fault) = pieces.fill(piece, room.next(pieces.len(piece)), StopFlag::never()) {
                    return Ok(Err(fault));
                }
            }
            Ok(Ok(()))
        })?;
        copied.map_err(|fault| exporter.raised.or(fault))
    })
}

/// Pass the bytes of a file to `write`, piece by piece. See `_native.pyi`.
#[pyfunction]
#[pyo3(signature = (write, tensors, payload, metadata, format, *, export = None, shared = "copy", records = BTreeMap::new(), reserve = 0, align = 8, checksums = Vec::new(), progress = None))]
#[allow(clippy::too_many_arguments, reason = "one for each keyword that Python has")]
pub(crate) fn stream(
    py: Python<'_>,
    write: &Bound<'_, PyAny>,
    tensors: &Bound<'_, PyAny>,
    payload: &Bound<'_, PyAny>,
    metadata: Option<&Bound<'_, PyAny>>,
    format: &str,
    export: Option<&Bound<'_, Export>>,
    shared: &str,
    records: BTreeMap<String, String>,
    reserve: u64,
    align: u64,
    checksums: Vec<String>,
    progress: Option<&Bound<'_, PyAny>>,
) -> PyResult<()> {
    let exporter = Exporter::new(export, payload);
    let form = Form {
        format: format_of(format)?,
        options: layout_options(reserve, align)?,
        keep: keep(&checksums)?,
    };
    let pairs = metadata_of_new(metadata, records)?;
    let contents = Contents::new(&items(tensors)?, &exporter, pairs, form, shared, None)?;
    let payloads = payloads(&contents.tensors);
    let layout = contents.digested(py, &payloads, &exporter.raised)?;
    let pieces = pieces(py, &layout, &payloads)?;
    let mut done = 0;
    for piece in 0..pieces.count() {
        let len = pieces.len(piece);
        let bytes = bytes_of(py, len, |room| {
            let filled = py.detach(|| pieces.fill(piece, room.next(len), StopFlag::never()));
            filled.map_err(|fault| exporter.raised.or(fault))
        })?;
        write.call1((bytes,))?;
        done += to_u64(len);
        if let Some(progress) = progress {
            progress.call1((done, pieces.nbytes()))?;
        }
    }
    Ok(())
}

/// The contents of a file.
struct Contents {
    head: NewHeader,
    /// The payloads, in the order of the layout.
    tensors: Vec<Imported>,
}

impl Contents {
    fn new(
        items: &[Item<'_>],
        exporter: &Exporter<'_, '_>,
        pairs: Option<Vec<(String, String)>>,
        form: Form,
        shared: &str,
        path: Option<&PathBuf>,
    ) -> PyResult<Contents> {
        let py = exporter.payload.py();
        let tensors = exporter.take(items)?;
        if shared == "error" {
            refuse_shared(py, &tensors)?;
        }
        let head = laid_out(&tensors, pairs.as_deref(), form).map_err(|fault| {
            raise(
                py,
                &Failure::Unstorable(fault).about(path.map(PathBuf::as_path), None),
            )
        })?;
        let mut tensors: Vec<Option<Imported>> =
            tensors.into_iter().map(|(_, tensor)| Some(tensor)).collect();
        let ordered = head
            .layout()
            .order
            .iter()
            .filter_map(|&number| tensors[number].take());
        Ok(Contents {
            tensors: ordered.collect(),
            head,
        })
    }

    /// Return the file with the requested digests, for which the tensors' payloads are read once.
    fn digested(
        &self,
        py: Python<'_>,
        payloads: &[Payload<'_>],
        raised: &Raised,
    ) -> PyResult<Cow<'_, Layout>> {
        if !self.head.keeps_digests() {
            return Ok(Cow::Borrowed(self.head.layout()));
        }
        let pieces = pieces(py, self.head.layout(), payloads)?;
        let read = Signals::detach(py, |signals| match self.head.digest(&pieces, signals) {
            Err(_) if signals.interrupted() => Err(Error::from(Failure::Interrupted)),
            outcome => Ok(outcome),
        })?;
        read.map(Cow::Owned).map_err(|fault| raised.or(fault))
    }
}

/// Return the file with these payloads of its tensors.
fn pieces<'a>(py: Python<'_>, layout: &'a Layout, payloads: &'a [Payload<'a>]) -> PyResult<Pieces<'a>> {
    let pieces = Pieces::of(layout, payloads);
    pieces.map_err(|fault| raise(py, &Failure::Unstorable(fault).into()))
}

fn laid_out(
    tensors: &[(&str, Imported)],
    pairs: Option<&[(String, String)]>,
    form: Form,
) -> Result<NewHeader, FormatError> {
    let specs: Vec<Spec<'_>> = tensors
        .iter()
        .map(|(name, tensor)| Spec {
            name,
            dtype: tensor.dtype,
            shape: &tensor.shape,
        })
        .collect();
    let pairs = pairs.map(borrowed);
    NewHeader::new(&specs, pairs.as_deref(), form.format, &form.options, form.keep)
}

/// Return the digests with these names, which the file will record.
pub(crate) fn keep(names: &[String]) -> PyResult<Keep> {
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

/// The layout options of a file, without its contents.
#[derive(Clone, Copy)]
struct Form {
    format: Format,
    options: LayoutOptions,
    keep: Keep,
}

impl Form {
    fn usual(format: &str) -> PyResult<Form> {
        Ok(Form {
            format: format_of(format)?,
            options: LayoutOptions::default(),
            keep: Keep::default(),
        })
    }
}

/// Return the format of this name.
pub(crate) fn format_of(name: &str) -> PyResult<Format> {
    [Format::Safetensors, Format::Bintensors]
        .into_iter()
        .find(|format| format.name() == name)
        .ok_or_else(|| {
            let message = format!("unknown format {name:?}: expected \"safetensors\" or \"bintensors\"");
            PyValueError::new_err(message)
        })
}

/// Return the reserved space in the header, and the alignment of the data.
pub(crate) fn layout_options(reserve: u64, align: u64) -> PyResult<LayoutOptions> {
    let align = Align::from_nbytes(align)
        .ok_or_else(|| PyValueError::new_err(format!("unknown alignment {align}: expected 8, 64 or 4096")))?;
    Ok(LayoutOptions {
        reserve,
        align,
        ..LayoutOptions::default()
    })
}

/// Return the options of a save that replaces a whole file, or None.
pub(crate) fn save_options(durable: bool, overwrite: bool, replace_read_only: bool) -> SaveOptions {
    SaveOptions::new()
        .durable(durable)
        .replace(if overwrite {
            Replace::Atomic
        } else {
            Replace::Nothing
        })
        .replace_read_only(replace_read_only)
}
