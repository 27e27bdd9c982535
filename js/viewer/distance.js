// Distances of the values of tensors, in one pass over both, as `ingot diff --values` computes them. Tensors that are
// adjacent in both files are read as one range of each: a model has many small ones, and a request for each would take
// longer than their bytes.

import { openRange } from "../src/source.js";
import { Numbers, unitOf } from "./numbers.js";

/** Elements that are compared at a time: whole bytes of every dtype. */
const ELEMENTS = 1 << 16;
/** Gaps of at most this many bytes are read and discarded instead of starting a new request. */
const GAP = 64 << 10;
/** Runs that are read at a time, so that one is read while another is counted. */
const CONCURRENCY = 2;

/**
 * Calls `take(place, found)` for each of `pairs` of tensors, in no order. `found` is null if the shapes differ, or if a
 * dtype has no known values, like the dtypes of 6 bits. `open` returns the source of a tensor.
 */
export async function distances(pairs, open, take, signal) {
  const known = [];
  pairs.forEach((tensors, place) => (hasDistance(tensors) ? known.push({ tensors, place }) : take(place, null)));
  const runs = runsOf(known);
  const work = async () => {
    for (let run = runs.shift(); run; run = runs.shift()) await compareRun(run, open, take, signal);
  };
  await Promise.all(Array.from({ length: CONCURRENCY }, work));
}

function hasDistance([one, two]) {
  return String(one.shape) === String(two.shape) && ![one, two].some(({ dtype }) => dtype.startsWith("F6_"));
}

/** Pairs in the order of the first file, in runs of those that follow each other in both. */
function runsOf(pairs) {
  const numbers = new Map();
  const fileOf = ({ wire }) => {
    if (!numbers.has(wire)) numbers.set(wire, numbers.size);
    return numbers.get(wire);
  };
  const placed = pairs.map((pair) => ({ ...pair, files: pair.tensors.map(fileOf) }));
  placed.sort((a, b) => a.files[0] - b.files[0] || a.tensors[0].position - b.tensors[0].position);
  const runs = [];
  for (const pair of placed) {
    const last = runs.at(-1)?.at(-1);
    const follows = (side) => {
      const gap = pair.tensors[side].position - last.tensors[side].position - last.tensors[side].nbytes;
      return last.files[side] === pair.files[side] && gap >= 0 && gap <= GAP;
    };
    if (last && follows(0) && follows(1)) runs.at(-1).push(pair);
    else runs.push([pair]);
  }
  return runs;
}

async function compareRun(run, open, take, signal) {
  const sides = [];
  // If one side fails, the other is not read further.
  const controller = new AbortController();
  const both = AbortSignal.any([signal, controller.signal]);
  try {
    for (const side of [0, 1]) sides.push(await Side.of(run.map(({ tensors }) => tensors[side]), open, both));
    for (const { tensors, place } of run) {
      const distance = new Distance(tensors[0].dtype === tensors[1].dtype && /^[IU]64$/.test(tensors[0].dtype));
      const numbers = tensors.map(({ dtype }) => new Numbers(dtype));
      const total = tensors[0].shape.reduce((product, dim) => product * dim, 1);
      for (let at = 0; at < total; at += ELEMENTS) {
        const count = Math.min(ELEMENTS, total - at);
        const bytes = await Promise.all(sides.map((side, number) => side.next(tensors[number], at, count)));
        distance.add(...bytes.map((own, number) => numbers[number].of(own)), bytes);
      }
      take(place, distance.result());
    }
  } finally {
    controller.abort();
    await Promise.all(sides.map((side) => side.close()));
  }
}

/** The bytes of one side of a run, in order. */
class Side {
  #range;
  #at;
  #memory = new Uint8Array(0);

  static async of(tensors, open, signal) {
    const [begin, last] = [tensors[0].position, tensors.at(-1)];
    return new Side(openRange(await open(tensors[0]), begin, last.position + last.nbytes, signal), begin);
  }

  constructor(range, at) {
    [this.#range, this.#at] = [range, at];
  }

  /** Returns the bytes of `count` elements of a tensor from element `first` on. The next call overwrites them. */
  async next({ dtype, position }, first, count) {
    const unit = unitOf(dtype);
    const bytesOf = (elements) => (elements / unit.elements) * unit.nbytes;
    const begin = position + bytesOf(first);
    while (this.#at < begin) await this.#fill(Math.min(begin - this.#at, GAP));
    return this.#fill(bytesOf(count));
  }

  async #fill(nbytes) {
    if (this.#memory.length < nbytes) this.#memory = new Uint8Array(nbytes);
    const view = this.#memory.subarray(0, nbytes);
    await this.#range.fill(view);
    this.#at += nbytes;
    return view;
  }

  close() {
    return this.#range.close();
  }
}

class Distance {
  count = 0;
  different = 0;
  largest = 0;
  squares = 0;
  ours = 0;
  theirs = 0;
  products = 0;

  /** `isWide`: compare the bytes of numbers that doubles cannot represent. */
  constructor(isWide) {
    this.isWide = isWide;
  }

  add(one, two, bytes) {
    const found = sumsOf(one, two);
    this.count += one.length;
    this.different += this.isWide ? differingWords(...bytes) : found.different;
    if (found.largest > this.largest || found.largest !== found.largest) this.largest = found.largest;
    for (const sum of ["squares", "ours", "theirs", "products"]) this[sum] += found[sum];
  }

  result() {
    const { count, different, largest, squares, ours, theirs, products } = this;
    const norms = Math.sqrt(ours) * Math.sqrt(theirs);
    if (different === 0) return { count, different, largest: 0, relative: 0, cosine: norms === 0 ? null : 1 };
    const cosine = Math.max(-1, Math.min(1, products / norms));
    return {
      count,
      different,
      largest,
      relative: ours === 0 ? null : Math.sqrt(squares) / Math.sqrt(ours),
      cosine: norms === 0 ? null : cosine,
    };
  }
}

function sumsOf(one, two) {
  const found = finiteSumsOf(one, two);
  // One value that is not finite makes a sum not finite, and so do values whose squares are too large.
  return Number.isFinite(found.ours + found.theirs + found.squares) ? found : anySumsOf(one, two);
}

/** The sums of finite values. */
function finiteSumsOf(one, two) {
  let different = 0;
  let largest = 0;
  let squares = 0;
  let ours = 0;
  let theirs = 0;
  let products = 0;
  for (let n = 0; n < one.length; n++) {
    const x = one[n];
    const y = two[n];
    const difference = x - y;
    if (difference !== 0) different++;
    const size = difference < 0 ? -difference : difference;
    if (size > largest) largest = size;
    squares += difference * difference;
    ours += x * x;
    theirs += y * y;
    products += x * y;
  }
  return { different, largest, squares, ours, theirs, products };
}

function anySumsOf(one, two) {
  let different = 0;
  let largest = 0;
  let squares = 0;
  let ours = 0;
  let theirs = 0;
  let products = 0;
  for (let n = 0; n < one.length; n++) {
    const x = one[n];
    const y = two[n];
    const difference = x - y;
    // Two infinities of one sign have no distance, and a NaN equals every other.
    if (difference - difference !== 0 && (x === y || (x !== x && y !== y))) continue;
    if (difference !== 0) different++;
    const size = difference < 0 ? -difference : difference;
    if (size > largest || size !== size) largest = size;
    squares += difference * difference;
    ours += x * x;
    theirs += y * y;
    products += x * y;
  }
  return { different, largest, squares, ours, theirs, products };
}

function differingWords(...bytes) {
  const [one, two] = bytes.map((own) => new Uint32Array(own.buffer, own.byteOffset, own.length / 4));
  let different = 0;
  for (let n = 0; n < one.length; n += 2) if (one[n] !== two[n] || one[n + 1] !== two[n + 1]) different++;
  return different;
}
