// Decodes the bytes of a tensor, as stored in the file, to numbers. Supports every dtype of FORMAT.md, including the
// packed ones. Needs no other module.
//
// Floats narrower than 32 bits become `Float32Array`, which holds each such value exactly; other elements keep their
// width. Bit patterns that are not a number become NaN, regardless of sign and payload.

/** Float formats up to 16 bits: exponent bits, mantissa bits, bias, and the meaning of the top patterns. */
const FLOATS = {
  F4: { exponent: 2, mantissa: 1, bias: 1, top: "finite" },
  F6_E2M3: { exponent: 2, mantissa: 3, bias: 1, top: "finite" },
  F6_E3M2: { exponent: 3, mantissa: 2, bias: 3, top: "finite" },
  F8_E5M2: { exponent: 5, mantissa: 2, bias: 15, top: "ieee" },
  F8_E4M3: { exponent: 4, mantissa: 3, bias: 7, top: "nan" },
  F8_E4M3FNUZ: { exponent: 4, mantissa: 3, bias: 8, top: "fnuz" },
  F8_E5M2FNUZ: { exponent: 5, mantissa: 2, bias: 16, top: "fnuz" },
  F16: { exponent: 5, mantissa: 10, bias: 15, top: "ieee" },
  BF16: { exponent: 8, mantissa: 7, bias: 127, top: "ieee" },
};

/** Arrays that hold elements unchanged. */
const PLAIN = {
  BOOL: Uint8Array,
  U8: Uint8Array,
  I8: Int8Array,
  I16: Int16Array,
  U16: Uint16Array,
  I32: Int32Array,
  U32: Uint32Array,
  F32: Float32Array,
  C64: Float32Array,
  F64: Float64Array,
  I64: BigInt64Array,
  U64: BigUint64Array,
};

/** Bits per element of the dtypes that are decoded by a table. */
const TABLE_BITS = { F8_E8M0: 8 };
for (const [dtype, { exponent, mantissa }] of Object.entries(FLOATS)) TABLE_BITS[dtype] = 1 + exponent + mantissa;

/** The tables, created on first use: the two tables for 16 bits take 256 KiB each. */
const tables = new Map();

/** @type {[string, any][]} */
const byTable = Object.keys(TABLE_BITS).map((dtype) => [dtype, Float32Array]);

/**
 * The type of array that `decode` returns for each dtype. An element takes one place in the array. An element of `C64`
 * takes two places, the real part first.
 *
 * @type {ReadonlyMap<any, any>}
 */
export const DECODED = new Map([...byTable, ...Object.entries(PLAIN)]);

/**
 * Returns the value of each bit pattern of a float of 16 bits or fewer: `valuesOf("F8_E4M3")[0x38]` is 1. By counting
 * patterns, a program can compute statistics and histograms of a whole tensor.
 *
 * @param {string} dtype `F4`, `F6_…`, `F8_…`, `F16` or `BF16`.
 * @returns {Float32Array} 16, 64, 256 or 65,536 values. Created once: do not write to it.
 * @throws {RangeError} For any other dtype.
 */
export function valuesOf(dtype) {
  if (!Object.hasOwn(TABLE_BITS, dtype)) throw new RangeError(`no table of values: ${JSON.stringify(dtype)}`);
  if (!tables.has(dtype)) tables.set(dtype, dtype === "F8_E8M0" ? powersOfTwo() : floats(FLOATS[dtype]));
  return tables.get(dtype);
}

function powersOfTwo() {
  return Float32Array.from({ length: 256 }, (_, pattern) => (pattern === 0xff ? NaN : 2 ** (pattern - 127)));
}

function floats({ exponent, mantissa, bias, top }) {
  const [signBit, steps, last] = [2 ** (exponent + mantissa), 2 ** mantissa, 2 ** exponent - 1];
  return Float32Array.from({ length: 2 * signBit }, (_, pattern) => {
    const sign = pattern < signBit ? 1 : -1;
    const magnitude = pattern % signBit;
    const [power, fraction] = [Math.floor(magnitude / steps), magnitude % steps];
    if (top === "ieee" && power === last) return fraction === 0 ? sign * Infinity : NaN;
    if (top === "nan" && magnitude === signBit - 1) return NaN;
    // The only NaN, at the pattern of negative zero.
    if (top === "fnuz" && pattern === signBit) return NaN;
    return power === 0
      ? sign * (fraction / steps) * 2 ** (1 - bias)
      : sign * (1 + fraction / steps) * 2 ** (power - bias);
  });
}

/**
 * Decodes the elements in `bytes`, or every `step`-th of them: for a column of a matrix, `first` is its index and
 * `step` the length of a row.
 *
 * @param {string} dtype
 * @param {ArrayBufferLike | ArrayBufferView} bytes Whole elements as stored in a file: little-endian, packed from
 *   the lowest bit on. They may have any alignment, and are only read.
 * @param {object} [options] All three are counted in elements.
 * @param {number} [options.first] The first element to decode. 0.
 * @param {number} [options.step] The distance from one element to the next, 1 or more. 1.
 * @param {number} [options.count] The number of elements. All that there are.
 * @param {ArrayLike<number | bigint>} [options.into] An array of the kind in `DECODED`, with `count` places or more
 *   (`C64`: twice as many), which is filled from its start. It must not share memory with `bytes`.
 * @returns {any} `into`, or a new array of exactly the elements, of the kind in `DECODED`. It shares no memory
 *   with `bytes`.
 * @throws {RangeError} An unknown dtype, bytes that end inside an element, elements out of range, or an `into` that is
 *   too short.
 * @throws {TypeError} An argument has another type.
 */
export function decode(dtype, bytes, options = {}) {
  if (!DECODED.has(dtype)) throw new RangeError(`unknown dtype: ${JSON.stringify(dtype)}`);
  const { source, length } = elementsOf(dtype, bytesOf(bytes));
  const { first, step, count } = selection(options, length);
  const places = dtype === "C64" ? 2 : 1;
  const out = destination(dtype, count * places, options.into);
  if (Object.hasOwn(PLAIN, dtype)) copy(source, out, places, first, step, count);
  else lookUp(valuesOf(dtype), source, TABLE_BITS[dtype], out, first, step, count);
  return out;
}

function bytesOf(bytes) {
  if (ArrayBuffer.isView(bytes)) return new Uint8Array(bytes.buffer, bytes.byteOffset, bytes.byteLength);
  const isShared = typeof SharedArrayBuffer !== "undefined" && bytes instanceof SharedArrayBuffer;
  if (isShared || bytes instanceof ArrayBuffer) return new Uint8Array(bytes);
  throw new TypeError("bytes must be an ArrayBuffer or a view of one");
}

/** Returns an array to read elements from (of their width, or the packed bytes), and the number of elements. */
function elementsOf(dtype, bytes) {
  const bits = TABLE_BITS[dtype];
  const array = bits === 16 ? Uint16Array : bits === undefined ? PLAIN[dtype] : Uint8Array;
  // The smallest number of bytes that can be decoded on its own.
  const unit = bits === 6 ? 3 : array.BYTES_PER_ELEMENT * (dtype === "C64" ? 2 : 1);
  if (bytes.length % unit !== 0) {
    throw new RangeError(`${bytes.length} bytes end inside an element of ${dtype}, of which ${unit} bytes are whole`);
  }
  const length = bits < 8 ? (bytes.length * 8) / bits : bytes.length / unit;
  return { source: widened(bytes, array), length };
}

const IS_LITTLE_ENDIAN = new Uint8Array(Uint16Array.of(1).buffer)[0] === 1;

/** The bytes as an array of wider elements, without a copy if they are aligned. */
function widened(bytes, array) {
  const width = array.BYTES_PER_ELEMENT;
  const isUsable = bytes.byteOffset % width === 0 && (IS_LITTLE_ENDIAN || width === 1);
  const own = isUsable ? bytes : bytes.slice();
  if (!IS_LITTLE_ENDIAN) {
    for (let at = 0; width > 1 && at < own.length; at += width) own.subarray(at, at + width).reverse();
  }
  return new array(own.buffer, own.byteOffset, own.length / width);
}

/** @param {{ first?: number, step?: number, count?: number }} options */
function selection({ first = 0, step = 1, count }, length) {
  whole(first, "first", 0);
  whole(step, "step", 1);
  const most = Math.max(0, Math.ceil((length - first) / step));
  if (count === undefined) return { first, step, count: most };
  whole(count, "count", 0);
  if (count > most) throw new RangeError(`${count} elements from ${first} by ${step} are not among ${length}`);
  return { first, step, count };
}

function whole(value, name, least) {
  if (typeof value !== "number") throw new TypeError(`${name} must be a number of elements`);
  if (!Number.isSafeInteger(value) || value < least) throw new RangeError(`${name} must be whole, ${least} or more`);
}

function destination(dtype, places, into) {
  const array = DECODED.get(dtype);
  if (into === undefined) return new array(places);
  if (!(into instanceof array)) throw new TypeError(`into must be a ${array.name} for ${dtype}`);
  if (into.length < places) throw new RangeError(`into has ${into.length} places, and ${places} are needed`);
  return into;
}

/** Copies elements that need no decoding, of `places` places each. */
function copy(source, out, places, first, step, count) {
  if (step === 1) {
    out.set(source.subarray(first * places, (first + count) * places));
    return;
  }
  for (let place = 0; place < places; place++) {
    for (let n = 0, at = first; n < count; n++, at += step) out[n * places + place] = source[at * places + place];
  }
}

/** Decodes elements through `table`. */
function lookUp(table, source, bits, out, first, step, count) {
  if (bits >= 8) {
    for (let n = 0, at = first; n < count; n++, at += step) out[n] = table[source[at]];
  } else if (bits === 4) {
    for (let n = 0, at = first; n < count; n++, at += step) {
      const byte = source[Math.floor(at / 2)];
      out[n] = table[at % 2 === 0 ? byte & 15 : byte >> 4];
    }
  } else {
    for (let n = 0, at = first; n < count; n++, at += step) out[n] = table[sixBits(source, at)];
  }
}

/** The pattern of an element of 6 bits. Four take three bytes. */
function sixBits(source, at) {
  const byte = 3 * Math.floor(at / 4);
  const three = source[byte] | (source[byte + 1] << 8) | (source[byte + 2] << 16);
  return (three >> (6 * (at % 4))) & 63;
}
