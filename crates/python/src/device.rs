//! Devices that tensors are read onto and saved from, and the frameworks that allocate there.
//!
//! `unsafe` is allowed in this file because the memory belongs to a framework.
#![allow(unsafe_code)]

use std::any::Any;
use std::path::PathBuf;
use std::ptr;
use std::sync::Arc;

use ingot_format::{Dtype, to_u64};
use ingot_io::Error;
use ingot_io::binding::{Allocator, DeviceFault, DeviceRegion, DeviceStream, Fresh, Onto, Refusal};
use pyo3::exceptions::{PyBufferError, PyValueError};
use pyo3::prelude::*;
use pyo3::types::{PyList, PyTuple};

use crate::dlpack::{Dims, DlView};
use crate::errors::raise;
use crate::object_fault::Raised;

/// A device that tensors are read onto and saved from. See `_native.pyi`.
#[pyclass(frozen, module = "ingot._native")]
pub(crate) struct Gpu {
    /// `current()` returns the number of the device, the caller's stream, and the handle of the stream.
    current: Py<PyAny>,
    allocate: Py<PyAny>,
    /// `stream(ordinal)` returns the caller's stream on the device of this number, and its handle.
    stream: Option<Py<PyAny>>,
    driver: Option<PathBuf>,
}

#[pymethods]
impl Gpu {
    #[new]
    #[pyo3(signature = (current, allocate, *, stream = None, driver = None))]
    fn new(
        current: Py<PyAny>,
        allocate: Py<PyAny>,
        stream: Option<Py<PyAny>>,
        driver: Option<PathBuf>,
    ) -> Gpu {
        Gpu {
            current,
            allocate,
            stream,
            driver,
        }
    }
}

impl Gpu {
    /// Return the device as a destination, in the order of the caller's current stream.
    pub(crate) fn onto(&self, py: Python<'_>) -> PyResult<Onto> {
        let Current { at, stream } = self.current(py)?;
        let allocator = Framework {
            ordinal: at.ordinal(),
            allocate: self.allocate.clone_ref(py),
            stream,
        };
        Ok(Onto::new(at, Arc::new(allocator)))
    }

    /// Return the device and the caller's current stream.
    pub(crate) fn current(&self, py: Python<'_>) -> PyResult<Current> {
        let (ordinal, stream, handle): (i32, Py<PyAny>, usize) = self.current.call0(py)?.extract(py)?;
        // The first call starts the driver, which takes long.
        let at = py.detach(|| {
            let handle = ptr::with_exposed_provenance_mut(handle);
            // SAFETY: requires a stream of the device: the handle is the framework's, and `Current` keeps alive the
            // stream or the allocator that owns it.
            unsafe { DeviceStream::new(ordinal, handle, self.driver.as_deref()) }
        });
        let at = at.map_err(|fault| refused(py, fault))?;
        Ok(Current { at, stream })
    }

    /// Return the device of `onto`, and the caller's current stream there. The current device may have changed since
    /// `onto` was created.
    fn current_on(&self, py: Python<'_>, onto: &Onto) -> PyResult<Current> {
        let ordinal = onto.at().ordinal();
        let (stream, handle): (Py<PyAny>, usize) = if let Some(stream) = &self.stream {
            stream.call1(py, (ordinal,))?.extract(py)?
        } else {
            let (current, stream, handle): (i32, Py<PyAny>, usize) = self.current.call0(py)?.extract(py)?;
            if current != ordinal {
                let (at, stream) = (onto.at().clone(), py.None());
                return Ok(Current { at, stream });
            }
            (stream, handle)
        };
        // SAFETY: requires a stream of the device: the handle is the framework's, and `Current` keeps the stream alive.
        let at = unsafe { onto.at().beside(ptr::with_exposed_provenance_mut(handle)) };
        Ok(Current { at, stream })
    }
}

/// A device and the caller's current stream there. The stream stays alive as long as this object.
pub(crate) struct Current {
    pub(crate) at: DeviceStream,
    stream: Py<PyAny>,
}

impl Current {
    /// Return the same, to copy from the device.
    pub(crate) fn outgoing(self, py: Python<'_>) -> PyResult<Current> {
        let at = py.detach(|| self.at.outgoing());
        let at = at.map_err(|fault| refused(py, fault))?;
        Ok(Current { at, ..self })
    }

    /// Raise if the caller's stream is being captured into a graph.
    pub(crate) fn refuse_capture(&self, py: Python<'_>) -> PyResult<()> {
        let asked = py.detach(|| self.at.refuse_capture());
        asked.map_err(|fault| refused(py, fault))
    }

    /// Make later copies wait for the work that the caller has queued by now.
    pub(crate) fn begin(&self, py: Python<'_>) -> PyResult<()> {
        let begun = py.detach(|| self.at.begin());
        begun.map_err(|fault| refused(py, fault))
    }

    /// Make work that the caller queues later wait for all copies so far.
    pub(crate) fn hold(&self, py: Python<'_>) -> PyResult<()> {
        let held = py.detach(|| self.at.hold());
        held.map_err(|fault| refused(py, fault))
    }
}

fn refused(py: Python<'_>, fault: DeviceFault) -> PyErr {
    raise(py, &Error::from(fault))
}

/// The devices of some tensors: one for all, or a device or the host for each.
pub(crate) struct Devices {
    gpus: Vec<Py<Gpu>>,
    all: Vec<Arc<Onto>>,
    /// The device of each tensor; `None` for the host. Empty if all have the first device.
    each: Vec<Option<usize>>,
}

impl Devices {
    /// Convert Python's argument for `count` tensors: a device, or a device or None for each tensor.
    pub(crate) fn of(onto: &Bound<'_, PyAny>, count: usize) -> PyResult<Devices> {
        let py = onto.py();
        if let Ok(gpu) = onto.cast::<Gpu>() {
            return Devices::on(py, vec![gpu.clone()], Vec::new());
        }
        let mut known: Vec<Bound<'_, Gpu>> = Vec::new();
        let mut each = Vec::new();
        for one in onto.try_iter()? {
            let one: Option<Bound<'_, Gpu>> = one?.extract()?;
            each.push(one.map(|device| {
                known
                    .iter()
                    .position(|known| known.is(&device))
                    .unwrap_or_else(|| {
                        known.push(device);
                        known.len() - 1
                    })
            }));
        }
        if each.len() != count {
            return Err(PyValueError::new_err("the numbers of tensors and devices differ"));
        }
        Devices::on(py, known, each)
    }

    fn on(py: Python<'_>, gpus: Vec<Bound<'_, Gpu>>, each: Vec<Option<usize>>) -> PyResult<Devices> {
        let all = gpus.iter().map(|gpu| Ok(Arc::new(gpu.get().onto(py)?)));
        Ok(Devices {
            all: all.collect::<PyResult<_>>()?,
            gpus: gpus.into_iter().map(Bound::unbind).collect(),
            each,
        })
    }

    /// Return the caller's current streams on the devices. Raise if one is being captured into a graph, because a wait for
    /// copies would break the capture.
    pub(crate) fn current(&self, py: Python<'_>) -> PyResult<Vec<Current>> {
        let current = |(gpu, onto): (&Py<Gpu>, &Arc<Onto>)| {
            let current = gpu.get().current_on(py, onto)?;
            current.refuse_capture(py)?;
            Ok(current)
        };
        self.gpus.iter().zip(&self.all).map(current).collect()
    }

    /// Return the device of the tensor with this number.
    pub(crate) fn device(&self, rank: usize) -> Option<&Arc<Onto>> {
        if self.each.is_empty() {
            self.all.first()
        } else {
            self.all.get((*self.each.get(rank)?)?)
        }
    }
}

/// The allocator of a framework on a device.
#[derive(Debug)]
struct Framework {
    ordinal: i32,
    /// `allocate(stream, [(code, shape), …])` returns a tensor and a capsule of its memory for each.
    allocate: Py<PyAny>,
    stream: Py<PyAny>,
}

impl Allocator for Framework {
    fn allocate(&self, blocks: &[Fresh<'_>]) -> Result<Vec<DeviceRegion>, Refusal> {
        let allocated = Python::attach(|py| self.blocks(py, blocks));
        allocated.map_err(|refusal| Refusal::from(Raised(refusal)))
    }
}

impl Framework {
    fn blocks(&self, py: Python<'_>, blocks: &[Fresh<'_>]) -> PyResult<Vec<DeviceRegion>> {
        let wanted = PyList::empty(py);
        for fresh in blocks {
            let (dtype, shape) = match fresh.tensor {
                Some((dtype, shape)) => (dtype, Dims::of(dtype, shape)),
                None => (Dtype::U8, Dims::of(Dtype::U8, &[to_u64(fresh.nbytes)])),
            };
            let shape = shape.ok_or_else(|| PyValueError::new_err("shape cannot be stored"))?;
            wanted.append((dtype.code(), PyTuple::new(py, shape.sizes())?))?;
        }
        let given = self.allocate.call1(py, (&self.stream, wanted))?;
        let given: Vec<(Bound<'_, PyAny>, Bound<'_, PyAny>)> = given.extract(py)?;
        if given.len() != blocks.len() {
            return Err(PyValueError::new_err(
                "the framework returned the wrong number of tensors",
            ));
        }
        let block = |((tensor, capsule), fresh)| self.block(tensor, &capsule, fresh);
        given.into_iter().zip(blocks).map(block).collect()
    }

    /// Return the memory of a tensor, which `capsule` describes.
    fn block(
        &self,
        tensor: Bound<'_, PyAny>,
        capsule: &Bound<'_, PyAny>,
        fresh: &Fresh<'_>,
    ) -> PyResult<DeviceRegion> {
        let address = address_on(self.ordinal, fresh.nbytes, capsule)?;
        let owner = FrameworkTensor {
            tensor: Some(tensor.unbind()),
            is_own: fresh.tensor.is_some(),
        };
        // SAFETY: requires memory that stays allocated on the device until the owner is dropped, and that no other code
        // uses: the tensor is new, and only the owner refers to it.
        Ok(unsafe { DeviceRegion::new(self.ordinal, address, fresh.nbytes, Arc::new(owner)) })
    }
}

/// Return the address of the `nbytes` bytes on a device that `capsule` describes.
fn address_on(ordinal: i32, nbytes: usize, capsule: &Bound<'_, PyAny>) -> PyResult<u64> {
    let address = |view: &DlView<'_>| {
        let count = view.sizes.iter().try_fold(view.itemsize()?, |nbytes, &size| {
            nbytes.checked_mul(usize::try_from(size).ok()?)
        });
        let fits = view.gpu == Some(ordinal) && view.is_c_order() && count == Some(nbytes);
        fits.then(|| to_u64(view.start.addr()))
    };
    DlView::by(capsule, address).flatten().ok_or_else(|| {
        PyBufferError::new_err(format!(
            "expected {nbytes} bytes of GPU {ordinal} from the framework"
        ))
    })
}

/// Return the memory of a tensor on the device of `onto`, to be filled, in a capsule that keeps the tensor.
pub(crate) fn onto_region(onto: &Onto, nbytes: u64, capsule: &Bound<'_, PyAny>) -> PyResult<DeviceRegion> {
    let ordinal = onto.at().ordinal();
    let nbytes = usize::try_from(nbytes).unwrap_or(usize::MAX);
    let address = address_on(ordinal, nbytes, capsule)?;
    let owner = Arc::new(capsule.clone().unbind());
    // SAFETY: requires memory that stays allocated on the device until the owner is dropped: the capsule keeps its tensor.
    // It cannot be proven that no other code writes to it before the end of the call. The consequence is a mixture of both
    // writers' bytes.
    Ok(unsafe { DeviceRegion::new(ordinal, address, nbytes, owner) })
}

/// A tensor of a framework that keeps device memory alive.
struct FrameworkTensor {
    tensor: Option<Py<PyAny>>,
    /// Whether the tensor is returned to the caller, rather than memory that several tensors share.
    is_own: bool,
}

impl Drop for FrameworkTensor {
    /// Drop the tensor at once, on the thread that drops the last reference. A deferred drop would keep device memory
    /// allocated.
    fn drop(&mut self) {
        let mut tensor = self.tensor.take();
        Python::try_attach(|_| drop(tensor.take()));
        // Without an interpreter, tensors cannot be freed any more.
        std::mem::forget(tensor);
    }
}

/// Return the framework's tensor of a region, if the region is the whole tensor.
pub(crate) fn own_tensor(region: &DeviceRegion) -> Option<&Py<PyAny>> {
    let owner: &(dyn Any + Send + Sync) = &**region.owner();
    let owner = owner.downcast_ref::<FrameworkTensor>()?;
    owner.tensor.as_ref().filter(|_| owner.is_own)
}

/// Return why some memory for copies to devices is not pinned, if any is not.
#[pyfunction]
pub(crate) fn why_pageable() -> Option<String> {
    ingot_io::binding::why_pageable()
}

/// Free the pinned memory that no copy uses.
#[pyfunction]
pub(crate) fn release_pinned() {
    ingot_io::binding::release_pinned();
}
