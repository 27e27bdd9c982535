// Statistics of a tensor's values from its pieces, in one pass, as `ingot stats` computes them. Values of up to 16
// bits are counted by their bit patterns, from which all results follow exactly. Wider ones are processed block by
// block, and joined by the formula of Chan, Golub and LeVeque.

import { valuesOf } from "../src/decode.js";
import { Numbers } from "./numbers.js";

/** Values that are processed together. */
const BLOCK = 16_384;
/** Counts of 32 bits are emptied into doubles before they can overflow. */
const MOST_COUNTED = 2 ** 31;

/** Dtypes of 6 bits have no settled packing, and no statistics. */
export function hasStatistics(dtype) {
  return !dtype.startsWith("F6_");
}

export function counterOf(dtype) {
  if (dtype === "F4") return new Patterns(dtype, valuesOf("F4"), 8);
  if (/^(F16|BF16|[IU]16)$/.test(dtype)) return new Patterns(dtype, valuesOfPatterns(dtype), 16);
  if (/^(F8|[IU]8|BOOL)/.test(dtype)) return new Patterns(dtype, valuesOfPatterns(dtype), 8);
  return new Wide(dtype);
}

function valuesOfPatterns(dtype) {
  const arrays = { I8: Int8Array, U8: Uint8Array, BOOL: Uint8Array, I16: Int16Array, U16: Uint16Array };
  const array = arrays[dtype];
  return array ? array.from({ length: 256 ** array.BYTES_PER_ELEMENT }, (_, pattern) => pattern) : valuesOf(dtype);
}

/** A histogram with bins of equal width over a range. */
export class Bins {
  constructor(low, high, length) {
    this.low = Number(low);
    this.counts = new Float64Array(length);
    // Halves, because the difference of two large numbers may overflow.
    const half = Number(high) / 2 - this.low / 2;
    const scale = half > 0 ? length / half / 2 : 0;
    this.scale = Number.isFinite(scale) ? scale : 0;
  }

  place(value) {
    const distance = value - this.low;
    const place = Number.isFinite(distance) ? distance * this.scale : value * this.scale - this.low * this.scale;
    return Math.max(0, Math.min(this.counts.length - 1, Math.floor(place)));
  }

  addAll(numbers) {
    const { counts, low, scale } = this;
    const last = counts.length - 1;
    for (let n = 0; n < numbers.length; n++) {
      const value = numbers[n];
      const place = (value - low) * scale;
      // A NaN, or infinite, or its distance is NaN.
      if (!(place - place === 0)) {
        if (value - value === 0) counts[this.place(value)]++;
      } else if (value - value === 0) counts[place >= last ? last : place < 0 ? 0 : place | 0]++;
    }
  }
}

/** Counts each number below `length`, in several tables, since two additions in a row to one place would wait for each
 * other. */
class Counts {
  #pending = 0;

  constructor(length, tables) {
    this.totals = new Float64Array(length);
    this.tables = Array.from({ length: tables }, () => new Uint32Array(length));
  }

  /** Calls `count(...tables)`, which counts `number` values, and returns its result. */
  add(number, count) {
    if (this.#pending + number > MOST_COUNTED) this.settle();
    this.#pending += number;
    return count(...this.tables);
  }

  settle() {
    this.#pending = 0;
    for (const table of this.tables) {
      for (let at = 0; at < table.length; at++) this.totals[at] += table[at];
      table.fill(0);
    }
    return this.totals;
  }
}

class Patterns {
  /** Histograms need no second pass. */
  isExact = true;

  constructor(dtype, values, width) {
    this.dtype = dtype;
    this.values = values;
    this.width = width;
    this.counts = new Counts(2 ** width, width === 8 ? 4 : 2);
  }

  add(bytes) {
    const words = new Uint32Array(bytes.buffer, bytes.byteOffset, bytes.length >> 2);
    const rest = bytes.subarray(words.length * 4);
    const isBytes = this.width === 8;
    this.counts.add(bytes.length, (...tables) => {
      if (isBytes) countBytes(words, ...tables);
      else countHalves(words, ...tables);
      if (isBytes) { for (const byte of rest) tables[0][byte]++; }
      else if (rest.length > 0) tables[0][rest[0] | (rest[1] << 8)]++;
    });
  }

  /** Calls `take` with each value and its count. */
  #each(take) {
    const totals = this.counts.settle();
    if (this.dtype !== "F4") return totals.forEach((count, pattern) => count > 0 && take(this.values[pattern], count));
    const nibbles = new Float64Array(16);
    totals.forEach((count, byte) => {
      nibbles[byte & 15] += count;
      nibbles[byte >> 4] += count;
    });
    nibbles.forEach((count, pattern) => count > 0 && take(this.values[pattern], count));
  }

  result() {
    const found = {
      count: 0,
      zeros: 0,
      nans: 0,
      infinities: 0,
      malformed: 0,
      min: null,
      max: null,
      mean: null,
      std: null,
    };
    let [sum, squares] = [0, 0];
    this.#each((value, count) => {
      found.count += count;
      if (Number.isNaN(value)) found.nans += count;
      else if (!Number.isFinite(value)) found.infinities += count;
      else {
        if (value === 0) found.zeros += count;
        if (this.dtype === "BOOL" && value > 1) found.malformed += count;
        found.min = found.min === null || value < found.min ? value : found.min;
        found.max = found.max === null || value > found.max ? value : found.max;
        sum += value * count;
      }
    });
    const finite = found.count - found.nans - found.infinities;
    if (finite === 0) return found;
    const mean = sum / finite;
    this.#each((value, count) => Number.isFinite(value) && (squares += count * (value - mean) ** 2));
    return { ...found, mean, std: Math.sqrt(squares / finite) };
  }

  bins(length, { min, max }) {
    const bins = new Bins(min, max, length);
    this.#each((value, count) => Number.isFinite(value) && (bins.counts[bins.place(value)] += count));
    return bins.counts;
  }
}

function countBytes(words, a, b, c, d) {
  for (let n = 0; n < words.length; n++) {
    const word = words[n];
    a[word & 255]++;
    b[(word >>> 8) & 255]++;
    c[(word >>> 16) & 255]++;
    d[word >>> 24]++;
  }
}

function countHalves(words, a, b) {
  for (let n = 0; n < words.length; n++) {
    const word = words[n];
    a[word & 65535]++;
    b[word >>> 16]++;
  }
}

/** Counts the upper halves of 32-bit floats, and returns how many of them are zeros. */
function countTops(words, a, b, c, d) {
  let zeros = 0;
  const whole = words.length & ~3;
  for (let n = 0; n < whole; n += 4) {
    const one = words[n];
    const two = words[n + 1];
    const three = words[n + 2];
    const four = words[n + 3];
    a[one >>> 16]++;
    b[two >>> 16]++;
    c[three >>> 16]++;
    d[four >>> 16]++;
    // All bits of zero are 0 except the sign.
    if (one << 1 === 0) zeros++;
    if (two << 1 === 0) zeros++;
    if (three << 1 === 0) zeros++;
    if (four << 1 === 0) zeros++;
  }
  for (let n = whole; n < words.length; n++) {
    a[words[n] >>> 16]++;
    if (words[n] << 1 === 0) zeros++;
  }
  return zeros;
}

/**
 * The range of values, and the sums of their distances from `near` and of the squares, in one pass. `near` is a mean of
 * similar values, so that the distances are small and their squares lose no precision. If a block is far from the one
 * before, the distance between the two exceeds the precision that is lost.
 */
function foldNear(block, near) {
  const { length } = block;
  let low = Infinity;
  let high = -Infinity;
  // Two sums of each kind: two additions in a row to one sum would wait for each other.
  let sum = 0;
  let squares = 0;
  let others = 0;
  let othersSquared = 0;
  for (let n = 1; n < length; n += 2) {
    const one = block[n - 1];
    const two = block[n];
    const distance = one - near;
    const other = two - near;
    sum += distance;
    others += other;
    squares += distance * distance;
    othersSquared += other * other;
    if (one < low) low = one;
    if (one > high) high = one;
    if (two < low) low = two;
    if (two > high) high = two;
  }
  if (length % 2 === 1) {
    const last = block[length - 1];
    const distance = last - near;
    sum += distance;
    squares += distance * distance;
    if (last < low) low = last;
    if (last > high) high = last;
  }
  return { low, high, sum: sum + others, squares: squares + othersSquared };
}

function zerosOf(numbers) {
  let zeros = 0;
  for (let n = 0; n < numbers.length; n++) if (numbers[n] === 0) zeros++;
  return zeros;
}

class Wide {
  isExact = false;
  count = 0;
  finite = 0;
  zeros = 0;
  nans = 0;
  infinities = 0;
  low = Infinity;
  high = -Infinity;
  mean = 0;
  squares = 0;

  constructor(dtype) {
    this.dtype = dtype;
    this.numbers = new Numbers(dtype);
    /** The mean of the block before, from which the next one is measured. */
    this.near = null;
    // The upper halves of floats of 32 bits make a histogram without a second pass, to one part in 128 of each value.
    this.tops = dtype === "F32" ? new Counts(65536, 4) : null;
    this.edges = dtype === "I64" || dtype === "U64" ? { low: null, high: null } : null;
  }

  add(bytes) {
    const numbers = this.numbers.of(bytes);
    this.count += numbers.length;
    for (let at = 0; at < numbers.length; at += BLOCK) this.#fold(numbers.subarray(at, at + BLOCK));
    this.zeros += this.tops ? this.#countTops(bytes) : zerosOf(numbers);
    if (this.edges) this.#widen(bytes, numbers);
  }

  #countTops(bytes) {
    const words = new Uint32Array(bytes.buffer, bytes.byteOffset, bytes.length >> 2);
    return this.tops.add(words.length, (...tables) => countTops(words, ...tables));
  }

  #fold(block) {
    this.near ??= Number.isFinite(block[0]) ? block[0] : 0;
    const { length } = block;
    const { low, high, sum, squares } = foldNear(block, this.near);
    // One value that is not finite makes the sum not finite, and so do values whose squares are too large.
    if (squares - squares !== 0) return this.#foldAny(block);
    this.#join(length, this.near + sum / length, Math.max(0, squares - (sum / length) * sum), low, high);
  }

  #foldAny(block) {
    const finite = block.filter(Number.isFinite);
    for (const value of block) {
      if (Number.isNaN(value)) this.nans++;
      else if (!Number.isFinite(value)) this.infinities++;
    }
    if (finite.length === 0) return;
    let [mean, squares, low, high] = [0, 0, Infinity, -Infinity];
    // Divided first: a sum of the largest numbers would overflow.
    for (const value of finite) {
      mean += value / finite.length;
      if (value < low) low = value;
      if (value > high) high = value;
    }
    for (const value of finite) squares += (value - mean) ** 2;
    this.#join(finite.length, mean, squares, low, high);
  }

  #join(length, mean, squares, low, high) {
    const part = length / (this.finite + length);
    const distance = mean - this.mean;
    this.squares += squares + distance * distance * this.finite * part;
    this.mean = Number.isFinite(distance) ? this.mean + distance * part : this.mean * (1 - part) + mean * part;
    this.near = mean;
    this.finite += length;
    if (low < this.low) this.low = low;
    if (high > this.high) this.high = high;
  }

  /** The exact range of numbers that doubles cannot represent. */
  #widen(bytes, numbers) {
    const exact = new (this.dtype === "I64" ? BigInt64Array : BigUint64Array)(
      bytes.buffer,
      bytes.byteOffset,
      numbers.length,
    );
    const { edges, low, high } = this;
    for (let n = 0; n < numbers.length; n++) {
      if (numbers[n] <= low && (edges.low === null || exact[n] < edges.low)) edges.low = exact[n];
      if (numbers[n] >= high && (edges.high === null || exact[n] > edges.high)) edges.high = exact[n];
    }
  }

  result() {
    const { count, zeros, nans, infinities, finite } = this;
    const found = { count, zeros, nans, infinities, malformed: 0, min: null, max: null, mean: null, std: null };
    if (finite === 0) return found;
    const [min, max] = this.edges ? [this.edges.low, this.edges.high] : [this.low, this.high];
    return { ...found, min, max, mean: this.mean, std: Math.sqrt(this.squares / finite) };
  }

  /** Without a second pass: each upper half is counted at its middle. Null if there are no upper halves. */
  bins(length, { min, max }) {
    if (!this.tops) return null;
    const bins = new Bins(min, max, length);
    const [word, value] = [new Uint32Array(1), new Float32Array(1)];
    const bytes = new Uint8Array(word.buffer);
    this.tops.settle().forEach((number, top) => {
      if (number === 0) return;
      word[0] = ((top << 16) | (top & 0x7fff ? 0x8000 : 0)) >>> 0;
      value[0] = new Float32Array(bytes.buffer)[0];
      if (Number.isFinite(value[0])) bins.counts[bins.place(Math.max(min, Math.min(max, value[0])))] += number;
    });
    return bins.counts;
  }
}
