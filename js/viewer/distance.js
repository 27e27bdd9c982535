// How far apart the values of two tensors are, in one pass over both, as `ingot diff --values` has it.

import { streamRange } from "../source.js";
import { Numbers, unitOf } from "./numbers.js";

/** Elements that are compared at a time: whole bytes of every dtype. */
const ELEMENTS = 1 << 18;

/** Null where the shapes are not the same, or the values of a dtype are not known: those of 6 bits. */
export async function distance([one, two], sources, tell, signal) {
  if (String(one.shape) !== String(two.shape) || [one, two].some(({ dtype }) => dtype.startsWith("F6_"))) return null;
  const apart = new Apart(one.dtype === two.dtype && /^[IU]64$/.test(one.dtype));
  const streams = [one, two].map(({ dtype, position, nbytes }, side) => {
    const unit = unitOf(dtype);
    const pieceBytes = (ELEMENTS / unit.elements) * unit.nbytes;
    return streamRange(sources[side], position, position + nbytes, { signal, pieceBytes });
  });
  const numbers = [one, two].map(({ dtype }) => new Numbers(dtype));
  try {
    for (;;) {
      const pieces = await Promise.all(streams.map((stream) => stream.next()));
      if (pieces.some(({ done }) => done)) return apart.told();
      apart.add(...pieces.map(({ value }, side) => numbers[side].of(value)), pieces.map(({ value }) => value));
      tell(pieces[0].value.length);
    }
  } finally {
    await Promise.all(streams.map((stream) => stream.return()));
  }
}

class Apart {
  count = 0;
  different = 0;
  largest = 0;
  squares = 0;
  ours = 0;
  theirs = 0;
  products = 0;

  /** `isWide`: of numbers that have no doubles the bytes say whether they differ. */
  constructor(isWide) {
    this.isWide = isWide;
  }

  add(one, two, bytes) {
    const words = this.isWide ? bytes.map((own) => new Uint32Array(own.buffer, own.byteOffset, own.length / 4)) : null;
    let [different, largest, squares, ours, theirs, products] = [0, this.largest, 0, 0, 0, 0];
    for (let n = 0; n < one.length; n++) {
      const [x, y] = [one[n], two[n]];
      const apart = x - y;
      if (apart - apart !== 0) {
        // Two infinities of one sign are no distance apart, and a NaN equals every other.
        if (x === y || (x !== x && y !== y)) continue;
      }
      if (words === null ? apart !== 0 : words[0][2 * n] !== words[1][2 * n] || words[0][2 * n + 1] !== words[1][2 * n + 1]) different++;
      const size = Math.abs(apart);
      if (size > largest || size !== size) largest = size;
      squares += apart * apart;
      ours += x * x;
      theirs += y * y;
      products += x * y;
    }
    this.count += one.length;
    this.different += different;
    this.largest = largest;
    this.squares += squares;
    this.ours += ours;
    this.theirs += theirs;
    this.products += products;
  }

  told() {
    const { count, different, largest, squares, ours, theirs, products } = this;
    const norms = Math.sqrt(ours) * Math.sqrt(theirs);
    if (different === 0) return { count, different, largest: 0, relative: 0, cosine: norms === 0 ? null : 1 };
    const cosine = Math.max(-1, Math.min(1, products / norms));
    return { count, different, largest, relative: ours === 0 ? null : Math.sqrt(squares) / Math.sqrt(ours), cosine: norms === 0 ? null : cosine };
  }
}
