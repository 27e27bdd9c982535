// Decodes parts of quantised weights: rows and columns of the decoded values, for each scheme that `meant.js` knows.

import { valuesOf } from "../src/decode.js";
import { asNumbers, Matrix, readLines } from "./lines.js";

/** Like `readLines`, for rows and columns of a decoded matrix. `open` returns the source of a part. */
export async function readMeant(open, tensor, rows, { first, count }, take, signal) {
  /** Reads rows of a part, by their numbers; `shape` is the shape of a matrix with the same elements. */
  const read = async (part, wanted, from, upto, shape = part.shape) => {
    const unique = [...new Set(wanted)].sort((a, b) => a - b);
    const found = new Map();
    const matrix = new Matrix(shape, { down: 0, across: 1 });
    const keep = (number, values) => found.set(unique[number], asNumbers(part.dtype, values));
    await readLines(await open(part, signal), part, matrix, unique, { first: from, count: upto - from }, keep, signal);
    return found;
  };
  const valueOf = await SCHEMES[tensor.scheme](tensor, read, rows, first, first + count);
  rows.forEach((row, number) =>
    take(number, Float32Array.from({ length: count }, (_, at) => valueOf(row, first + at)))
  );
}

/** The position of each of eight columns in a word of AutoAWQ's "gemm", where the even ones come first. */
const AWQ_PLACES = [0, 4, 1, 5, 2, 6, 3, 7];

/** The number by which bitsandbytes divides by 127, as a float of 32 bits. */
const PER_UNIT = Math.fround(7.874015718698502e-3);

const SCHEMES = {
  async gptq({ bits, shape, add, roles: { packed, zeros, scales, groups } }, read, rows, first, end) {
    const [each, mask] = [32 / bits, 2 ** bits - 1];
    const size = shape[0] / scales.shape[0];
    const indexes = groups ? (await read(groups, [0], 0, shape[0], [1, shape[0]])).get(0) : null;
    const groupOf = (row) => (indexes ? indexes[row] : Math.floor(row / size));
    const wanted = rows.map(groupOf);
    const zero = Math.floor(first / each);
    const words = await read(packed, rows.map((row) => Math.floor(row / each)), first, end);
    const points = await read(zeros, wanted, zero, Math.ceil(end / each));
    const factors = await read(scales, wanted, first, end);
    return (row, column) => {
      const weight = (words.get(Math.floor(row / each))[column - first] >>> ((row % each) * bits)) & mask;
      const group = groupOf(row);
      const point = ((points.get(group)[Math.floor(column / each) - zero] >>> ((column % each) * bits)) & mask) + add;
      return (weight - point) * factors.get(group)[column - first];
    };
  },

  async awq({ shape, roles: { packed, zeros, scales } }, read, rows, first, end) {
    const size = shape[0] / scales.shape[0];
    const groupOf = (row) => Math.floor(row / size);
    const wanted = rows.map(groupOf);
    const [word, upto] = [Math.floor(first / 8), Math.ceil(end / 8)];
    const words = await read(packed, rows, word, upto);
    const points = await read(zeros, wanted, word, upto);
    const factors = await read(scales, wanted, first, end);
    return (row, column) => {
      const [at, shift, group] = [Math.floor(column / 8) - word, AWQ_PLACES[column % 8] * 4, groupOf(row)];
      const weight = (words.get(row)[at] >>> shift) & 15;
      const point = (points.get(group)[at] >>> shift) & 15;
      return (weight - point) * factors.get(group)[column - first];
    };
  },

  async scaled({ block, grid, roles: { weight, scales, zeros } }, read, rows, first, end) {
    const weights = await read(weight, rows, first, end);
    const wanted = rows.map((row) => Math.floor(row / block[0]));
    const [from, upto] = [Math.floor(first / block[1]), Math.ceil(end / block[1])];
    const factors = await read(scales, wanted, from, upto, grid);
    const points = zeros ? await read(zeros, wanted, from, upto, grid) : null;
    return (row, column) => {
      const [group, at] = [Math.floor(row / block[0]), Math.floor(column / block[1]) - from];
      return (weights.get(row)[column - first] - (points?.get(group)[at] ?? 0)) * factors.get(group)[at];
    };
  },

  async packed({ bits, shape, roles: { weight, scales, zeros, groups } }, read, rows, first, end) {
    const [each, mask, half] = [32 / bits, 2 ** bits - 1, 2 ** (bits - 1)];
    const size = shape[1] / scales.shape[1];
    const indexes = groups ? (await read(groups, [0], first, end, [1, shape[1]])).get(0) : null;
    // Groups that were never set are -1.
    const isIndexed = indexes !== null && indexes.every((group) => group >= 0);
    const groupOf = (column) => (isIndexed ? indexes[column - first] : Math.floor(column / size));
    const [word, from] = [Math.floor(first / each), isIndexed ? 0 : groupOf(first)];
    const upto = isIndexed ? scales.shape[1] : Math.ceil(end / size);
    const words = await read(weight, rows, word, Math.ceil(end / each));
    const factors = await read(scales, rows, from, upto);
    const points = zeros ? await read(zeros, rows.map((row) => Math.floor(row / each)), from, upto) : null;
    const pointOf = (
      row,
      group,
    ) => (points ? (points.get(Math.floor(row / each))[group] >>> ((row % each) * bits)) & mask : half);
    return (row, column) => {
      const group = groupOf(column) - from;
      const value = (words.get(row)[Math.floor(column / each) - word] >>> ((column % each) * bits)) & mask;
      return (value - pointOf(row, group)) * factors.get(row)[group];
    };
  },

  async blocks({ shape, roles: { weight, scales } }, read, rows, first, end) {
    const [values, powers] = [valuesOf("F4"), valuesOf("F8_E8M0")];
    const [from, group] = [Math.floor(first / 2), Math.floor(first / 32)];
    const bytes = await read(weight, rows, from, Math.ceil(end / 2), [shape[0], shape[1] / 2]);
    const factors = await read(scales, rows, group, Math.ceil(end / 32), [shape[0], shape[1] / 32]);
    return (row, column) => {
      const byte = bytes.get(row)[Math.floor(column / 2) - from];
      return values[column % 2 === 0 ? byte & 15 : byte >> 4] *
        powers[factors.get(row)[Math.floor(column / 32) - group]];
    };
  },

  async nvfp4({ shape, experts, isAcross, isDivided, roles: { weight, scales, whole } }, read, rows, first, end) {
    const values = valuesOf("F4");
    // The numbers of elements in a byte, and in a block, along both axes.
    const [[high, wide], [tall, long]] = isAcross ? [[1, 2], [1, 16]] : [[2, 1], [16, 1]];
    const [from, group] = [Math.floor(first / wide), Math.floor(first / long)];
    const lines = (part, down, across, begin) =>
      read(part, rows.map((row) => Math.floor(row / down)), begin, Math.ceil(end / across), [
        shape[0] / down,
        shape[1] / across,
      ]);
    const [bytes, factors] = [await lines(weight, high, wide, from), await lines(scales, tall, long, group)];
    const count = whole.nbytes / 4;
    const all = (await read(whole, [0], 0, count, [1, count])).get(0);
    return (row, column) => {
      const byte = bytes.get(Math.floor(row / high))[Math.floor(column / wide) - from];
      const factor = factors.get(Math.floor(row / tall))[Math.floor(column / long) - group];
      const own = all[count === 1 ? 0 : Math.floor((row * experts) / shape[0])];
      const half = isAcross ? column % 2 : row % 2;
      return values[half === 0 ? byte & 15 : byte >> 4] * Math.fround(isDivided ? factor / own : factor * own);
    };
  },

  async bits4({ shape, blocksize, nested, offset, roles }, read, rows, first, end) {
    const from = Math.floor(first / 2);
    const bytes = await read(roles.weight, rows, from, Math.ceil(end / 2), [shape[0], shape[1] / 2]);
    const table = (await read(roles.map, [0], 0, 16, [1, 16])).get(0);
    const blockOf = (row, column) => Math.floor((row * shape[1] + column) / blocksize);
    const wanted = rows.flatMap((row) => {
      const begin = blockOf(row, first);
      return Array.from({ length: blockOf(row, end - 1) - begin + 1 }, (_, at) => begin + at);
    });
    const factors = await read(roles.absmax, wanted, 0, 1, [roles.absmax.shape[0], 1]);
    let factorOf = (block) => factors.get(block)[0];
    if (nested) {
      const codes = (await read(roles.nestedMap, [0], 0, 256, [1, 256])).get(0);
      const outer = wanted.map((block) => Math.floor(block / nested));
      const others = await read(roles.nestedAbsmax, outer, 0, 1, [roles.nestedAbsmax.shape[0], 1]);
      const more = Math.fround(offset);
      factorOf = (block) =>
        Math.fround(Math.fround(codes[factors.get(block)[0]] * others.get(Math.floor(block / nested))[0]) + more);
    }
    return (row, column) => {
      const byte = bytes.get(row)[Math.floor(column / 2) - from];
      return table[column % 2 === 0 ? byte >> 4 : byte & 15] * factorOf(blockOf(row, column));
    };
  },

  async bits8({ roles: { weight, scales } }, read, rows, first, end) {
    const weights = await read(weight, rows, first, end);
    const factors = await read(scales, rows, 0, 1, [scales.shape[0], 1]);
    return (row, column) => Math.fround(weights.get(row)[column - first] * factors.get(row)[0]) * PER_UNIT;
  },
};
