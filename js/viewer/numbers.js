// The elements of a piece as numbers, without a copy if possible.

import { decode, DECODED } from "../src/decode.js";

const units = new Map();

/** The smallest number of elements that takes whole bytes, and those bytes. Parts of tensors are read in these units.
 */
export function unitOf(dtype) {
  // Called for each tensor of a model.
  if (!units.has(dtype)) units.set(dtype, madeUnit(dtype));
  return units.get(dtype);
}

function madeUnit(dtype) {
  if (dtype.startsWith("F6_")) return { elements: 4, nbytes: 3 };
  if (dtype === "F4") return { elements: 2, nbytes: 1 };
  const places = dtype === "C64" ? 2 : 1;
  const { BYTES_PER_ELEMENT: wide } = DECODED.get(dtype);
  const isFloat = /^(F8|F16|BF16)/.test(dtype);
  return { elements: 1, nbytes: isFloat ? (dtype.startsWith("F8") ? 1 : 2) : places * wide };
}

const VIEWED = { F32: Float32Array, C64: Float32Array, F64: Float64Array, I32: Int32Array, U32: Uint32Array };

/** Returns the numbers of the pieces of one tensor. Each result is overwritten by the next. `C64` returns its two
 * parts. */
export class Numbers {
  #dtype;
  #scratch = null;

  constructor(dtype) {
    this.#dtype = dtype;
  }

  of(bytes) {
    const viewed = VIEWED[this.#dtype];
    if (viewed && bytes.byteOffset % viewed.BYTES_PER_ELEMENT === 0) {
      return new viewed(bytes.buffer, bytes.byteOffset, bytes.length / viewed.BYTES_PER_ELEMENT);
    }
    if (this.#dtype === "I64" || this.#dtype === "U64") return this.#rounded(bytes);
    const unit = unitOf(this.#dtype);
    const length = (bytes.length / unit.nbytes) * unit.elements * (this.#dtype === "C64" ? 2 : 1);
    const into = this.#memory(DECODED.get(this.#dtype), length);
    decode(this.#dtype, bytes, { into });
    return into.subarray(0, length);
  }

  /** The nearest numbers. */
  #rounded(bytes) {
    const words = new Uint32Array(bytes.buffer, bytes.byteOffset, bytes.length / 4);
    const numbers = this.#memory(Float64Array, words.length / 2).subarray(0, words.length / 2);
    const isSigned = this.#dtype === "I64";
    for (let n = 0; n < numbers.length; n++) {
      const high = words[2 * n + 1];
      numbers[n] = (isSigned ? high | 0 : high) * 4294967296 + words[2 * n];
    }
    return numbers;
  }

  #memory(array, length) {
    if (this.#scratch === null || this.#scratch.length < length) this.#scratch = new array(length);
    return this.#scratch;
  }
}
