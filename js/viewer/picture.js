// A picture of a matrix: for each drawn row, the mean of the values in each cell. Values that are not numbers are
// marked.

import { asNumbers, Matrix } from "./lines.js";
import { unitOf } from "./numbers.js";

/** Rows that are read for the first, coarse picture. */
const FIRST_ROWS = 48;
/** Bytes that one picture may take. */
const MOST_NBYTES = 24 << 20;

export const HAS_NAN = 1;
export const HAS_INFINITY = 2;

/** The part of a window that is read: if rows are too long for a picture, only their beginning. */
function windowOf(
  matrix,
  dtype,
  cells,
  [row = 0, rows = matrix.down, column = 0, columns = matrix.across] = [],
) {
  const first = { row: clamp(row, 0, matrix.down - 1), column: clamp(column, 0, matrix.across - 1) };
  const { elements, nbytes } = unitOf(dtype);
  const down = clamp(rows, 1, matrix.down - first.row);
  const longest = Math.floor(((MOST_NBYTES / Math.min(down, cells)) * elements) / nbytes / matrix.stride);
  return {
    ...first,
    rows: down,
    columns: clamp(columns, 1, Math.min(matrix.across - first.column, Math.max(1, longest))),
  };
}

function clamp(value, low, high) {
  return Math.max(low, Math.min(high, Math.floor(value)));
}

/**
 * Draws progressively: `onProgress` is called with each better picture, and the last one is returned. `read` is `readLines`
 * for the tensor.
 */
export async function picture(read, tensor, { layout, window, cells, kind }, onProgress) {
  // Rows across the memory order are read as columns, and the picture is transposed.
  const isTurned = layout.down !== null && layout.down > layout.across;
  const turned = isTurned ? { ...layout, down: layout.across, across: layout.down } : layout;
  const [rowCells, columnCells] = isTurned ? [...cells].reverse() : cells;
  const matrix = new Matrix(tensor.shape, turned);
  const part = isTurned ? [window[2], window[3], window[0], window[1]] : window;
  const seen = windowOf(matrix, tensor.dtype, rowCells, part);
  const columns = Math.min(columnCells, seen.columns);
  let drawn;
  for (const most of seen.rows > FIRST_ROWS ? [FIRST_ROWS, rowCells] : [rowCells]) {
    const rows = Math.min(most, seen.rows);
    const numbers = Array.from({ length: rows }, (_, n) => seen.row + Math.floor(((n + 0.5) * seen.rows) / rows));
    const cellsOf = { values: new Float32Array(rows * columns), marks: new Uint8Array(rows * columns) };
    const take = (row, values) =>
      fill(cellsOf, row * columns, columns, seen.columns, asNumbers(tensor.dtype, values), kind);
    await read(matrix, numbers, { first: seen.column, count: seen.columns }, take);
    drawn = { ...cellsOf, rows, columns, seen, isSampled: rows < seen.rows };
    if (isTurned) drawn = turnedOver(drawn);
    onProgress(drawn);
  }
  return drawn;
}

function fill({ values, marks }, at, cells, columns, numbers, kind) {
  for (let cell = 0; cell < cells; cell++) {
    const from = Math.floor((cell * columns) / cells);
    const upto = Math.min(Math.floor(((cell + 1) * columns) / cells), numbers.length);
    let sum = 0;
    let most = 0;
    let count = 0;
    let mark = 0;
    for (let n = from; n < upto; n++) {
      const value = numbers[n];
      if (value - value === 0) {
        sum += value;
        count++;
        if (Math.abs(value) > Math.abs(most)) most = value;
      } else mark |= value !== value ? HAS_NAN : HAS_INFINITY;
    }
    values[at + cell] = count === 0 ? NaN : kind === "largest" ? most : sum / count;
    marks[at + cell] = mark;
  }
}

function turnedOver({ values, marks, rows, columns, seen, ...rest }) {
  const turn = (array) => array.map((_, at) => array[(at % rows) * columns + Math.floor(at / rows)]);
  const own = { row: seen.column, rows: seen.columns, column: seen.row, columns: seen.rows };
  return { ...rest, values: turn(values), marks: turn(marks), rows: columns, columns: rows, seen: own };
}
