//! A tensor that is decoded tile by tile.

use std::cell::RefCell;
use std::fmt::Debug;
use std::ops::Range;
use std::sync::atomic::{AtomicU64, Ordering};

use ingot_format::{Dtype, StopFlag, saturating_usize, to_u64};

use super::part::Reads;
use crate::checkpoint::Checkpoint;
use crate::computed::Make;
use crate::convert::convert;
use crate::error::{Error, Failure};

/// Elements that are decoded at once. Their floats fit in a core's second cache.
const TILE: u64 = 256 << 10;

/// Rows that are decoded together for reads of parts of single rows, which mostly follow one another.
const ROWS_AHEAD: u64 = 16;

/// Parts of a row that are longer than this are decoded alone.
const LONG_PART: u64 = 16 << 10;

/// Decodes a matrix of numbers.
pub(super) trait Decode: Debug + Send + Sync {
    /// Return the rows that are best decoded together. Many, if the rows are columns of the stored words: a read of a few
    /// bytes from each stored row costs more than its bytes.
    fn rows_at_once(&self) -> u64 {
        1
    }

    /// Fill `values`, row after row, with the numbers of a tile.
    fn decode(&self, tile: &Tile, reads: Reads<'_>, values: &mut [f32]) -> Result<(), Error>;
}

/// Some columns of some rows.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Tile {
    pub(super) rows: Range<u64>,
    pub(super) columns: Range<u64>,
}

impl Tile {
    pub(super) fn height(&self) -> usize {
        saturating_usize(self.rows.end - self.rows.start)
    }

    pub(super) fn width(&self) -> usize {
        saturating_usize(self.columns.end - self.columns.start)
    }
}

/// The maker of a tensor, whose dimensions before the last are joined into the rows.
#[derive(Debug)]
pub(super) struct Matrix {
    decoder: Box<dyn Decode>,
    rows: u64,
    columns: u64,
    dtype: Dtype,
    number: u64,
}

/// The next number of a matrix. [`AHEAD`] distinguishes matrices by their numbers.
static NUMBERS: AtomicU64 = AtomicU64::new(0);

thread_local! {
    /// The rows that this thread decoded last for a read of a part of one row.
    static AHEAD: RefCell<Ahead> = RefCell::default();
}

/// Parts of several rows, encoded.
#[derive(Debug, Default)]
struct Ahead {
    known: Option<(u64, Tile)>,
    bytes: Vec<u8>,
}

impl Matrix {
    pub(super) fn new(decoder: Box<dyn Decode>, rows: u64, columns: u64, dtype: Dtype) -> Matrix {
        Matrix {
            decoder,
            rows,
            columns,
            dtype,
            number: NUMBERS.fetch_add(1, Ordering::Relaxed),
        }
    }

    fn element_nbytes(&self) -> usize {
        saturating_usize(self.dtype.bits() / 8)
    }

    /// Return the rows that begin with the first of the elements `wanted`: whole rows, or a part of one row. Rows that are
    /// columns of the stored words are whole, even if only a part of the first or the last one is wanted.
    fn band(&self, wanted: &Range<u64>) -> Tile {
        let (row, column) = (wanted.start / self.columns, wanted.start % self.columns);
        let last = (wanted.end - 1) / self.columns;
        let at_once = self.decoder.rows_at_once();
        if at_once > 1 && row < last {
            return Tile {
                rows: row..(last + 1).min(row + at_once),
                columns: 0..self.columns,
            };
        }
        let left = wanted.end - wanted.start;
        if column > 0 || left < self.columns {
            let columns = column..self.columns.min(column + left);
            return Tile {
                rows: row..row + 1,
                columns,
            };
        }
        let most = (TILE / self.columns).max(1);
        Tile {
            rows: row..row + most.min(left / self.columns),
            columns: 0..self.columns,
        }
    }

    /// Fill `dest` with the elements of a band from number `skip` on. `values` is scratch memory.
    fn fill_band(
        &self,
        band: &Tile,
        skip: usize,
        reads: Reads<'_>,
        values: &mut Vec<f32>,
        dest: &mut [u8],
    ) -> Result<(), Error> {
        let (height, width) = (to_u64(band.height()), to_u64(band.width()));
        let step = (TILE / height).max(1);
        values.resize(saturating_usize(height * step.min(width)), 0.0);
        let mut at = band.columns.start;
        while at < band.columns.end {
            if reads.stop.is_set() {
                return Err(Failure::Interrupted.into());
            }
            let tile = Tile {
                rows: band.rows.clone(),
                columns: at..band.columns.end.min(at + step),
            };
            let values = &mut values[..tile.height() * tile.width()];
            self.decoder.decode(&tile, reads, values)?;
            let before = saturating_usize(at - band.columns.start);
            for (number, values) in values.chunks_exact(tile.width()).enumerate() {
                self.encode_row(number * band.width() + before, values, skip, dest);
            }
            at = tile.columns.end;
        }
        Ok(())
    }

    /// Round the numbers from `first` of a band on into `dest`, which begins with number `skip` of the band.
    fn encode_row(&self, first: usize, values: &[f32], skip: usize, dest: &mut [u8]) {
        let size = self.element_nbytes();
        let from = first.max(skip);
        let end = (first + values.len()).min(skip + dest.len() / size);
        if from < end {
            let dest = &mut dest[(from - skip) * size..(end - skip) * size];
            encode(&values[from - first..end - first], self.dtype, dest);
        }
    }

    /// Fill `dest` with a part of a row. The same part of the rows that follow is decoded with it, since a slice of columns is
    /// read row by row.
    fn fill_part(
        &self,
        part: &Tile,
        reads: Reads<'_>,
        values: &mut Vec<f32>,
        dest: &mut [u8],
    ) -> Result<(), Error> {
        let row = part.rows.start;
        AHEAD.with_borrow_mut(|ahead| {
            let has_it = ahead.known.as_ref().is_some_and(|(number, tile)| {
                *number == self.number && tile.columns == part.columns && tile.rows.contains(&row)
            });
            if !has_it {
                let tile = Tile {
                    rows: row..self.rows.min(row + ROWS_AHEAD),
                    columns: part.columns.clone(),
                };
                ahead.known = None;
                ahead.bytes.resize(dest.len() * tile.height(), 0);
                self.fill_band(&tile, 0, reads, values, &mut ahead.bytes)?;
                ahead.known = Some((self.number, tile));
            }
            let first = ahead.known.as_ref().map_or(row, |(_, tile)| tile.rows.start);
            let at = saturating_usize(row - first) * dest.len();
            dest.copy_from_slice(&ahead.bytes[at..at + dest.len()]);
            Ok(())
        })
    }
}

impl Make for Matrix {
    fn unit_nbytes(&self) -> usize {
        self.element_nbytes()
    }

    fn fill(
        &self,
        inputs: &Checkpoint,
        begin: u64,
        dest: &mut [u8],
        stop: StopFlag<'_>,
    ) -> Result<(), Error> {
        let reads = Reads { inputs, stop };
        let unit = to_u64(self.element_nbytes());
        let (mut wanted, mut rest) = (begin / unit..(begin + to_u64(dest.len())) / unit, dest);
        let count = wanted.end - wanted.start;
        let is_part = count < self.columns && count <= LONG_PART && self.rows > 1;
        let mut values = Vec::new();
        while !wanted.is_empty() {
            let band = self.band(&wanted);
            let end = (band.rows.end - 1) * self.columns + band.columns.end;
            let end = end.min(wanted.end);
            let nbytes = saturating_usize(end - wanted.start) * self.element_nbytes();
            let (dest, after) = rest.split_at_mut(nbytes);
            if is_part && band.height() == 1 {
                self.fill_part(&band, reads, &mut values, dest)?;
            } else {
                let first = band.rows.start * self.columns + band.columns.start;
                let skip = saturating_usize(wanted.start - first);
                self.fill_band(&band, skip, reads, &mut values, dest)?;
            }
            (wanted.start, rest) = (end, after);
        }
        Ok(())
    }
}

/// Round floats to `dtype`, once.
fn encode(values: &[f32], dtype: Dtype, dest: &mut [u8]) {
    // In pieces that stay in the first cache.
    const PIECE: usize = 1024;
    let mut bytes = [0; 4 * PIECE];
    let width = dest.len() / values.len().max(1);
    for (values, dest) in values.chunks(PIECE).zip(dest.chunks_mut(PIECE * width.max(1))) {
        for (value, bytes) in values.iter().zip(bytes.as_chunks_mut::<4>().0) {
            *bytes = value.to_le_bytes();
        }
        convert(Dtype::F32, dtype, &bytes[..4 * values.len()], dest);
    }
}
