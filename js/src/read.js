// Reads the elements of a tensor, or of some of its rows, as numbers. Only their bytes are read.

import { decode, DECODED } from "./decode.js";
import { quoteName } from "./errors.js";
import { streamRange } from "./source.js";

/** A number of elements that takes whole bytes in every dtype. */
const GROUP = 4;

/**
 * Returns `{ name, dtype, shape, values }`. Besides the values, only one piece of the file is in memory. `position` is
 * the beginning of the tensor in the file.
 */
export async function readElements(source, position, tensor, rows, signal) {
  const { name, dtype } = tensor;
  const { shape, first, count } = selected(tensor, rows);
  const places = dtype === "C64" ? 2 : 1;
  const values = new (DECODED.get(dtype))(count * places);
  if (count === 0) return { name, dtype, shape, values };
  const bits = (8 * tensor.nbytes) / product(tensor.shape);
  const skipped = first % GROUP;
  const begin = ((first - skipped) * bits) / 8;
  const end = Math.min((Math.ceil((first + count) / GROUP) * GROUP * bits) / 8, tensor.nbytes);
  let done = 0;
  for await (const piece of streamRange(source, position + begin, position + end, { signal })) {
    const skip = done === 0 ? skipped : 0;
    const found = Math.min((piece.length * 8) / bits - skip, count - done);
    const into = values.subarray(done * places, (done + found) * places);
    decode(dtype, piece, { first: skip, count: found, into });
    done += found;
  }
  return { name, dtype, shape, values };
}

/** The shape of rows `begin` to before `end`, and the range of their elements. */
function selected({ name, shape, nbytes }, rows) {
  if (rows === undefined) return { shape, first: 0, count: nbytes === 0 ? 0 : product(shape) };
  if (!Array.isArray(rows) || rows.length !== 2 || !rows.every(Number.isSafeInteger)) {
    throw new TypeError("rows must be [begin, end], two whole numbers");
  }
  const [begin, end] = rows;
  if (shape.length === 0 || begin < 0 || begin > end || end > shape[0]) {
    const reason = `rows [${begin}, ${end}] are not within shape [${shape.join(", ")}]`;
    throw new RangeError(`tensor ${quoteName(name)}: ${reason}`);
  }
  // The dimensions of an empty tensor may have any size.
  const row = nbytes === 0 ? 0 : product(shape.slice(1));
  return { shape: [end - begin, ...shape.slice(1)], first: begin * row, count: (end - begin) * row };
}

function product(dims) {
  return dims.reduce((product, dim) => product * dim, 1);
}
