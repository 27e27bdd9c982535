//! Reading from a Python object: a file-like object, or the client of a store.
//!
//! Python decides which calls each kind of object gets (`python/ingot/_read/source.py`). The plan decides which ranges
//! are requested, and how many at once, as for every source. The interpreter is held during a request, and never while
//! bytes are copied.

use std::fmt;
use std::io::{self, Read};
use std::ops::Range;
use std::sync::atomic::{AtomicBool, Ordering};

use ingot_format::to_u64;
use ingot_io::binding::{ReadAt, StopFlag};
use pyo3::exceptions::PyTimeoutError;
use pyo3::prelude::*;

use crate::object_fault::{Raised, WrongLength};
use crate::tensor::BufferSource;

/// Gaps of at most this many bytes are read and discarded instead of starting a new request: as many as for URLs, since
/// most of these objects are remote.
const GAP_NBYTES: u64 = 128 << 10;

/// The interval in seconds at which a thread that waits for an answer checks the stop flag.
const POLL: f64 = 0.05;

/// A `Reader` of `python/ingot/_read/source.py`.
pub(crate) struct ObjectSource {
    reader: Py<PyAny>,
    nbytes: u64,
    /// The number of ranges that may be requested at once; `None` if requests do not wait.
    at_once: usize,
    /// Whether it was read since its size was last requested.
    was_read: AtomicBool,
}

impl ObjectSource {
    pub(crate) fn new(reader: &Bound<'_, PyAny>) -> PyResult<ObjectSource> {
        Ok(ObjectSource {
            nbytes: reader.getattr("nbytes")?.extract()?,
            at_once: reader.getattr("at_once")?.extract()?,
            reader: reader.clone().unbind(),
            was_read: AtomicBool::new(false),
        })
    }

    /// Request a range, and wait for the answer unless the stop flag is set.
    fn ask(&self, range: &Range<u64>, stop: StopFlag<'_>) -> io::Result<BufferSource> {
        self.was_read.store(true, Ordering::Relaxed);
        let answer = attached(|py| {
            let answer = self
                .reader
                .bind(py)
                .call_method1("ask", (range.start, range.end))?;
            BufferSource::new(&awaited(&answer, stop)?)
        })?;
        let (expected, found) = (range.end - range.start, answer.nbytes());
        if found == expected {
            Ok(answer)
        } else {
            Err(io::Error::other(WrongLength { expected, found }))
        }
    }
}

/// Return the result of a `concurrent.futures.Future`. It may never come, so the wait is abandoned if the stop flag is
/// set.
fn awaited<'py>(answer: &Bound<'py, PyAny>, stop: StopFlag<'_>) -> PyResult<Bound<'py, PyAny>> {
    let py = answer.py();
    loop {
        match answer.call_method1("result", (POLL,)) {
            Err(fault)
                if fault.is_instance_of::<PyTimeoutError>(py)
                    && !answer.call_method0("done")?.is_truthy()?
                    && !stop.is_set() => {}
            outcome => return outcome,
        }
    }
}

/// Return the result of `work`, if there is an interpreter: threads of a prefetch may outlive it.
fn attached<T>(work: impl FnOnce(Python<'_>) -> PyResult<T>) -> io::Result<T> {
    match Python::try_attach(work) {
        Some(outcome) => outcome.map_err(|fault| io::Error::other(Raised(fault))),
        None => Err(io::Error::other("the interpreter is shutting down")),
    }
}

impl fmt::Debug for ObjectSource {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "ObjectSource({} bytes)", self.nbytes)
    }
}

impl ReadAt for ObjectSource {
    fn nbytes(&self) -> u64 {
        self.nbytes
    }

    fn read_at(&self, position: u64, dest: &mut [u8]) -> io::Result<usize> {
        let end = self.nbytes.min(position.saturating_add(to_u64(dest.len())));
        if end <= position {
            return Ok(0);
        }
        self.ask(&(position..end), StopFlag::never())?.read_at(0, dest)
    }

    fn backend(&self) -> (&'static str, &'static str) {
        ("object", "ranges of bytes that an object gives")
    }

    fn gap_nbytes(&self) -> u64 {
        GAP_NBYTES
    }

    fn stream<'s>(&'s self, span: Range<u64>, stop: StopFlag<'s>) -> Option<Box<dyn Read + 's>> {
        Some(Box::new(Answer {
            source: self,
            span,
            stop,
            bytes: None,
            at: 0,
        }))
    }

    fn waits(&self) -> bool {
        self.at_once > 0
    }

    fn reads_at_once(&self) -> usize {
        self.at_once
    }

    fn nbytes_now(&self) -> io::Result<Option<u64>> {
        // The size may take a request, so it is only requested again after something was read.
        if !self.was_read.swap(false, Ordering::Relaxed) {
            return Ok(Some(self.nbytes));
        }
        attached(|py| {
            let answer = self.reader.bind(py).call_method0("ask_nbytes")?;
            awaited(&answer, StopFlag::never())?.extract()
        })
    }
}

/// A stream over the bytes of a span, which are requested at once on the first read.
struct Answer<'s> {
    source: &'s ObjectSource,
    span: Range<u64>,
    stop: StopFlag<'s>,
    bytes: Option<BufferSource>,
    /// The position of the next byte in the span.
    at: u64,
}

impl Read for Answer<'_> {
    fn read(&mut self, dest: &mut [u8]) -> io::Result<usize> {
        if self.span.is_empty() {
            return Ok(0);
        }
        let bytes = match &mut self.bytes {
            Some(bytes) => bytes,
            none => none.insert(self.source.ask(&self.span, self.stop)?),
        };
        let count = bytes.read_at(self.at, dest)?;
        self.at += to_u64(count);
        Ok(count)
    }
}
