// Where two tensors of one shape differ: a picture whose cells show their largest difference, and the largest of all.

import { asNumbers, Matrix } from "./lines.js";
import { HAS_INFINITY, HAS_NAN } from "./picture.js";

/** Values of each tensor that are read at a time. */
const BLOCK = 1 << 20;

/** A tensor as a matrix of all its values: the dimensions before the last one run down. */
export function flattened({ shape, ...tensor }) {
  const last = shape.at(-1);
  const down = shape.slice(0, -1).reduce((product, dim) => product * dim, 1);
  return { ...tensor, shape: shape.length < 2 ? shape : [down, last] };
}

/** The indices of a value by its place in memory. */
export function indicesOf(shape, place) {
  return shape.reduceRight(([rest, ...found], dim) => [Math.floor(rest / dim), rest % dim, ...found], [place]).slice(1);
}

/**
 * Returns a picture of the second tensor less the first, of at most `cells` rows and columns, and `largest`: the place
 * in memory and both values of the largest difference, null without any. `read` has a `readLines` for each tensor.
 */
export async function difference(read, tensors, cells) {
  const { shape } = tensors[0];
  const matrix = new Matrix(shape, shape.length < 2 ? {} : { down: 0, across: 1 });
  const [rows, columns] = [Math.min(cells[0], matrix.down), Math.min(cells[1], matrix.across)];
  const found = { values: new Float32Array(rows * columns), marks: new Uint8Array(rows * columns), largest: null };
  const step = Math.max(1, Math.floor(BLOCK / matrix.across));
  for (let top = 0; top < matrix.down; top += step) {
    const numbers = Array.from({ length: Math.min(step, matrix.down - top) }, (_, n) => top + n);
    const [ours, theirs] = await Promise.all(read.map((one, side) => blockOf(one, tensors[side], matrix, numbers)));
    numbers.forEach((row, n) => {
      const at = Math.floor((row * rows) / matrix.down) * columns;
      addRow(found, at, { matrix, row, columns }, ours[n], theirs[n]);
    });
  }
  return { ...found, rows, columns, seen: { row: 0, rows: matrix.down, column: 0, columns: matrix.across } };
}

async function blockOf(read, { dtype }, matrix, rows) {
  const found = [];
  const take = (number, values) => (found[number] = asNumbers(dtype, values));
  await read(matrix, rows, { first: 0, count: matrix.across }, take);
  return found;
}

function addRow(found, at, { matrix, row, columns }, ours, theirs) {
  const { values, marks } = found;
  for (let n = 0; n < ours.length; n++) {
    const [one, two] = [ours[n], theirs[n]];
    const cell = at + Math.floor((n * columns) / matrix.across);
    if (one !== one || two !== two) marks[cell] |= HAS_NAN;
    else if (one - one !== 0 || two - two !== 0) marks[cell] |= HAS_INFINITY;
    // Two NaN are equal, as in the distances.
    if (one === two || (one !== one && two !== two)) continue;
    const distance = two - one;
    const size = distance - distance === 0 ? Math.abs(distance) : Infinity;
    if (size > Math.abs(values[cell]) && size !== Infinity) values[cell] = distance;
    if (found.largest === null || size > found.largest.size) {
      found.largest = { size, place: matrix.run(row, n, 1).begin, one, two };
    }
  }
}
