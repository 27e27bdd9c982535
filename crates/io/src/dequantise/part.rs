//! Reading parts of the tensors that a quantised weight consists of.

use std::num::NonZeroUsize;
use std::ops::Range;

use ingot_format::{Dtype, Entry, Index, StopFlag, saturating_usize};

use crate::checkpoint::Checkpoint;
use crate::error::Error;
use crate::memory::Dest;
use crate::options::ReadOptions;
use crate::read::fill;
use crate::read::job::{Job, Target};

/// A stored tensor, seen as a matrix: all dimensions before the last are joined into the rows.
#[derive(Clone, Debug)]
pub(super) struct Part {
    pub(super) name: String,
    pub(super) dtype: Dtype,
    pub(super) shape: Vec<u64>,
    matrix: [u64; 2],
}

impl Part {
    /// Return a whole tensor as a part. A vector is one row.
    pub(super) fn new(entry: &Entry<'_>) -> Part {
        let columns = entry.shape.last().copied().unwrap_or(1);
        let rows = entry.shape.iter().rev().skip(1).product();
        Part {
            name: entry.name.to_owned(),
            dtype: entry.dtype,
            shape: entry.shape.to_vec(),
            matrix: [rows, columns],
        }
    }

    /// Return the part with its bytes as elements of another dtype of the same size.
    pub(super) fn of(self, dtype: Dtype) -> Part {
        Part { dtype, ..self }
    }

    /// Return the part as a matrix of the same elements with other rows.
    pub(super) fn seen_as(self, rows: u64, columns: u64) -> Part {
        Part {
            matrix: [rows, columns],
            ..self
        }
    }

    pub(super) fn rows(&self) -> u64 {
        self.matrix[0]
    }

    pub(super) fn columns(&self) -> u64 {
        self.matrix[1]
    }

    /// Return the number of elements.
    pub(super) fn count(&self) -> u64 {
        self.matrix[0] * self.matrix[1]
    }

    pub(super) fn is_float(&self) -> bool {
        matches!(self.dtype, Dtype::F32 | Dtype::F16 | Dtype::BF16)
    }
}

/// The checkpoint that parts are read from, and the flag that stops a read.
#[derive(Clone, Copy)]
pub(super) struct Reads<'r> {
    pub(super) inputs: &'r Checkpoint,
    pub(super) stop: StopFlag<'r>,
}

impl Reads<'_> {
    /// Return the bytes of a part of a matrix.
    pub(super) fn bytes(&self, part: &Part, rows: Range<u64>, columns: Range<u64>) -> Result<Vec<u8>, Error> {
        self.read(part, rows, columns, None)
    }

    /// Return a part of a matrix of floats.
    pub(super) fn floats(
        &self,
        part: &Part,
        rows: Range<u64>,
        columns: Range<u64>,
    ) -> Result<Vec<f32>, Error> {
        let bytes = self.read(part, rows, columns, Some(Dtype::F32))?;
        Ok(elements(&bytes, f32::from_le_bytes))
    }

    /// Return a part of a matrix of words of 32 bits.
    pub(super) fn words(
        &self,
        part: &Part,
        rows: Range<u64>,
        columns: Range<u64>,
    ) -> Result<Vec<u32>, Error> {
        let bytes = self.read(part, rows, columns, None)?;
        Ok(elements(&bytes, u32::from_le_bytes))
    }

    /// Return all bytes of a small part.
    pub(super) fn all(&self, part: &Part) -> Result<Vec<u8>, Error> {
        self.bytes(part, 0..part.rows(), 0..part.columns())
    }

    fn read(
        &self,
        part: &Part,
        rows: Range<u64>,
        columns: Range<u64>,
        dtype: Option<Dtype>,
    ) -> Result<Vec<u8>, Error> {
        let stored = self.inputs.find(&part.name)?;
        let entry = Entry {
            dtype: part.dtype,
            shape: &part.matrix,
            ..*stored.entry()
        };
        let tensor = stored.archive().alias(stored.number(), entry, None);
        let job = Job::new(tensor, &[index(rows), index(columns)], dtype)?;
        let mut bytes = vec![0; saturating_usize(job.nbytes())];
        let target = Target {
            dtype: job.dtype(),
            shape: job.shape(),
            memory: Dest::from(&mut bytes[..]),
        };
        // One thread: the call runs on one of the threads that share the work.
        let options = ReadOptions::new().threads(NonZeroUsize::MIN);
        fill(std::slice::from_ref(&job), vec![target], &options, &self.stop)?;
        Ok(bytes)
    }
}

fn index(range: Range<u64>) -> Index {
    let signed = |at: u64| i64::try_from(at).unwrap_or(i64::MAX);
    (signed(range.start)..signed(range.end)).into()
}

fn elements<const N: usize, T>(bytes: &[u8], element: impl Fn([u8; N]) -> T) -> Vec<T> {
    bytes
        .as_chunks::<N>()
        .0
        .iter()
        .map(|bytes| element(*bytes))
        .collect()
}
