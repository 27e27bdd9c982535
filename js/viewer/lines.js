// Rows and columns of a tensor of any number of dimensions. Only the visible elements are read, by ranges; ranges that
// are close to each other are merged.

import { decode } from "../src/decode.js";
import { readRange } from "../src/source.js";
import { unitOf } from "./numbers.js";

/** Gaps of at most this many bytes are read and discarded instead of starting a new request. */
const GAP = 16 << 10;
const MOST_NBYTES = 2 << 20;
/** A browser has six connections to a server. */
const CONCURRENCY = 6;

/**
 * The part of a tensor that is shown as a matrix: `down` and `across` are numbers of dimensions, `fixed` has an index
 * for each other one. A tensor of one dimension is folded into rows of `fold` elements; then both are null.
 */
export class Matrix {
  constructor(shape, { down = null, across = null, fixed = [], fold = 512 } = {}) {
    const strides = shape.map((_, dim) => shape.slice(dim + 1).reduce((product, one) => product * one, 1));
    this.total = shape.reduce((product, dim) => product * dim, 1);
    if (down === null) {
      this.across = Math.min(fold, this.total);
      this.base = 0;
      this.down = Math.ceil(this.total / Math.max(1, this.across));
      this.rowStride = this.across;
      this.stride = 1;
    } else {
      this.base = shape.reduce(
        (sum, _, dim) => (dim === down || dim === across ? sum : sum + (fixed[dim] ?? 0) * strides[dim]),
        0,
      );
      this.down = shape[down];
      this.across = shape[across];
      this.rowStride = strides[down];
      this.stride = strides[across];
    }
    // A fold may end in the middle of its last row.
    this.isFold = down === null;
  }

  /** Index of the first element of a run within a row, and the number of its elements. */
  run(row, first, count) {
    const begin = this.base + row * this.rowStride + first * this.stride;
    return { begin, count: this.isFold ? Math.max(0, Math.min(count, this.total - begin)) : count };
  }
}

/**
 * Calls `take(number, values)` for each of `rows`, in any order, with the decoded elements of `columns`.
 *
 * `rows` must be in ascending order.
 */
export async function readLines(source, { dtype, position }, matrix, rows, columns, take, signal) {
  const unit = unitOf(dtype);
  const runs = rows.map((row, number) => {
    const { begin, count } = matrix.run(row, columns.first, columns.count);
    const end = begin + (Math.max(1, count) - 1) * matrix.stride + 1;
    const [from, upto] = [Math.floor(begin / unit.elements), Math.ceil(end / unit.elements)];
    return { number, count, first: begin - from * unit.elements, from: from * unit.nbytes, upto: upto * unit.nbytes };
  });
  const batches = batched(runs.filter(({ count }) => count > 0));
  const work = async () => {
    for (let batch = batches.shift(); batch; batch = batches.shift()) {
      const bytes = await readRange(source, position + batch.from, position + batch.upto, { signal });
      for (const { number, count, first, from, upto } of batch.runs) {
        const own = bytes.subarray(from - batch.from, upto - batch.from);
        take(number, decode(dtype, own, { first, step: matrix.stride, count }));
      }
    }
  };
  await Promise.all(Array.from({ length: CONCURRENCY }, work));
}

function batched(runs) {
  const batches = [];
  for (const run of runs.toSorted((a, b) => a.from - b.from)) {
    const batch = batches.at(-1);
    if (batch && run.from - batch.upto <= GAP && run.upto - batch.from <= MOST_NBYTES) {
      batch.runs.push(run);
      batch.upto = Math.max(batch.upto, run.upto);
    } else batches.push({ from: run.from, upto: run.upto, runs: [run] });
  }
  return batches;
}

/** Values as numbers; for complex values, their magnitudes. */
export function asNumbers(dtype, values) {
  if (dtype === "C64") {
    return Float64Array.from({ length: values.length / 2 }, (_, n) => Math.hypot(values[2 * n], values[2 * n + 1]));
  }
  return dtype.endsWith("64") && dtype !== "F64" ? Float64Array.from(values, Number) : values;
}

/** Values as texts, from which NumPy reads the same values. */
export function asTexts(dtype, values) {
  const text = dtype.startsWith("F") || dtype === "BF16" ? (dtype === "F64" ? exact : short) : String;
  if (dtype !== "C64") return Array.from(values, text);
  return Array.from({ length: values.length / 2 }, (_, n) => {
    const [real, imaginary] = [short(values[2 * n]), short(values[2 * n + 1])];
    return `${real}${imaginary.startsWith("-") ? "" : "+"}${imaginary}j`;
  });
}

function exact(value) {
  return Object.is(value, -0) ? "-0" : String(value);
}

/** The fewest digits that distinguish a number from other floats of 32 bits. */
function short(value) {
  for (const digits of [7, 8, 9]) {
    const found = Number(value.toPrecision(digits));
    if (Math.fround(found) === value && value !== 0) return String(found);
  }
  return exact(value);
}
