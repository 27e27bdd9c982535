// Proves headers. The rules F1 to F12 and B1 to B4 are in FORMAT.md in ingot's repository. This reader accepts the same
// files as ingot in Rust and Python, and rejects others with the same `code`. All three run the same test vectors.
//
// Sizes are numbers. The formats have 64-bit sizes, but numbers are exact only to 53 bits. So every size is read
// exactly, as a BigInt if necessary, and the proof uses the exact values. After the proof, numbers are enough: begin
// and end lie inside the file, whose size is a safe integer, and every dimension of a tensor with elements divides a
// count that a double holds. The exception is a dimension of an empty tensor, which therefore has `exactShape` too.

import { parseBinaryHeader } from "./bintensors.js";
import { Fault, leastName, naming, quoteName } from "./errors.js";
import { namingForeign } from "./foreign.js";
import { sizeOption } from "./http.js";
import { MAX_U64, narrow } from "./json.js";
import { DTYPES, headerTooLarge, PREFIX_NBYTES } from "./raw.js";
import { parseJsonHeader } from "./safetensors.js";
import { bytesOf } from "./source.js";

// --- Limits ---

/** Largest header, in bytes. safetensors and bintensors have the same limit, so this reader accepts their files. */
export const MAX_HEADER_BYTES = 100_000_000;

/** The limit for a header that comes over a network, as in the Hub's own readers. */
export const MAX_REMOTE_HEADER_BYTES = 25_000_000;

/** A limit above the caller's: JavaScript engines do not support longer strings. */
const HEADER_CEILING = 500_000_000;

// --- The proof ---

/**
 * The header of a file, proven: the tensors cover the data exactly, in file order, without hole or overlap; every size
 * is shape times dtype; every name is unique.
 */
class Header {
  #names;
  #byName = null;

  constructor(raw, names, dataStart, fileSize) {
    this.format = raw.format;
    this.metadata = raw.metadata;
    this.tensors = raw.tensors;
    this.dataStart = dataStart;
    this.fileSize = fileSize;
    this.#names = names;
  }

  get(name) {
    // Made on first use, since the page of a model does not use it.
    this.#byName ??= new Map(this.tensors.map((tensor) => [tensor.name, tensor]));
    return this.#byName.get(name);
  }

  has(name) {
    return this.#names.has(name);
  }

  names() {
    return this.#names.keys();
  }

  get size() {
    return this.tensors.length;
  }

  [Symbol.iterator]() {
    return this.tensors[Symbol.iterator]();
  }
}

/** Proves rules F7 and F9 to F12: the only way to make a `Header`. */
function prove(raw, dataStart, fileSize) {
  // A binary header must already list its tensors in data order.
  if (raw.format === "safetensors") sortByData(raw.tensors);
  const names = new Set();
  for (const { name } of raw.tensors) names.add(name);
  if (names.size < raw.tensors.length) {
    const tensor = leastName(repeated(raw.tensors.map(({ name }) => name)));
    throw new Fault("duplicate-tensor", "F7", "two tensors have this name", { tensor });
  }
  proveRanges(raw.tensors, fileSize - dataStart);
  return new Header(raw, names, dataStart, fileSize);
}

function byDataOrder(a, b) {
  if (a.begin !== b.begin) return a.begin < b.begin ? -1 : 1;
  return a.end === b.end ? 0 : a.end < b.end ? -1 : 1;
}

/** Most writers already use this order. */
function sortByData(tensors) {
  for (let number = 1; number < tensors.length; number++) {
    if (byDataOrder(tensors[number - 1], tensors[number]) > 0) {
      tensors.sort(byDataOrder);
      return;
    }
  }
}

/** Checks F9 to F12 on tensors in data order. */
function proveRanges(tensors, dataSize) {
  let covered = 0;
  for (let number = 0; number < tensors.length; number++) {
    const tensor = tensors[number];
    const nbytes = nbytesOf(tensor);
    if (sum(tensor.begin, nbytes) !== tensor.end) throw sizeMismatch(tensor, nbytes);
    if (tensor.begin !== covered) throw misplaced(tensors, number, covered);
    tensor.nbytes = nbytes;
    covered = tensor.end;
  }
  if (covered < dataSize) throw trailingBytes(covered, dataSize);
  if (covered > dataSize) throw truncated(tensors, covered, dataSize);
  // Converted only now, because the errors above print the exact dimensions.
  for (const tensor of tensors) narrowShape(tensor);
}

/** F9. Returns the size of a tensor in bytes. */
function nbytesOf(tensor) {
  const bits = DTYPES.get(tensor.dtype);
  let nbits = bits;
  let isEmpty = false;
  // Zeros are left out, so that the verdict does not depend on their position.
  for (const dim of tensor.shape) {
    if (dim === 0) isEmpty = true;
    else nbits *= Number(dim);
  }
  if (nbits > Number.MAX_SAFE_INTEGER) return exactNbytesOf(tensor, bits);
  if (isEmpty) return 0;
  if (nbits % 8 !== 0) throw badExtent(tensor, "partial-byte", `its ${nbits} bits end inside a byte`);
  return nbits / 8;
}

function exactNbytesOf(tensor, bits) {
  const dims = tensor.shape.map(BigInt);
  const nbits = dims.filter((dim) => dim !== 0n).reduce((product, dim) => product * dim, BigInt(bits));
  if (nbits > MAX_U64) throw badExtent(tensor, "size-overflow", "its size overflows 64 bits");
  if (dims.includes(0n)) return 0;
  if (nbits % 8n !== 0n) throw badExtent(tensor, "partial-byte", `its ${nbits} bits end inside a byte`);
  return narrow(nbits / 8n);
}

function narrowShape(tensor) {
  if (tensor.shape.some((dim) => typeof dim === "bigint")) {
    tensor.exactShape = tensor.shape.map(BigInt);
    tensor.shape = tensor.shape.map(Number);
  }
}

function badExtent(tensor, code, reason) {
  return new Fault(code, "F9", `shape ${showShape(tensor)}: ${reason}`, { tensor: tensor.name });
}

function sizeMismatch(tensor, expected) {
  const { name, begin, end } = tensor;
  const code = begin > end ? "reversed-range" : "size-mismatch";
  const found = begin > end ? 0 : difference(end, begin);
  const reason = `shape ${showShape(tensor)} needs ${expected} bytes, header gives ${begin}..${end}`;
  return new Fault(code, "F10", reason, { tensor: name, expected, found, begin, end });
}

/** F11: the tensor does not begin at `covered`, the end of the previous one. */
function misplaced(tensors, number, covered) {
  const { name, begin } = tensors[number];
  if (number > 0 && begin < covered) {
    const other = quoteName(tensors[number - 1].name);
    const reason = `begins at byte ${begin} of the data, before ${other} ends at ${covered}`;
    return new Fault("overlap", "F11", reason, { tensor: name, begin, end: covered });
  }
  const reason = `bytes ${covered}..${begin} of the data before it belong to no tensor`;
  return new Fault("hole", "F11", reason, { tensor: name, begin: covered, end: begin });
}

function truncated(tensors, expected, found) {
  const cut = tensors.find(({ end }) => end > found);
  const reason = `the file is ${difference(expected, found)} bytes short: ` +
    `expected ${expected} bytes of data, found ${found} — incomplete download?`;
  return new Fault("truncated", "F12", reason, { tensor: cut.name, expected, found });
}

function trailingBytes(expected, found) {
  const reason = `${difference(found, expected)} bytes follow the last tensor: ` +
    `expected ${expected} bytes of data, found ${found}`;
  return new Fault("trailing-bytes", "F12", reason, { expected, found });
}

function showShape({ shape, dtype }) {
  const dims = shape.slice(0, 16).join(", ");
  const more = shape.length > 16 ? `, … ${shape.length - 16} more` : "";
  return `[${dims}${more}] of ${dtype}`;
}

/** Returns the names that occur more than once. */
function repeated(names) {
  const seen = new Set();
  return names.filter((name) => seen.size === seen.add(name).size);
}

function sum(a, b) {
  const total = typeof a === "number" && typeof b === "number" ? a + b : Infinity;
  return total <= Number.MAX_SAFE_INTEGER ? total : narrow(BigInt(a) + BigInt(b));
}

function difference(a, b) {
  return narrow(BigInt(a) - BigInt(b));
}

// --- Headers in memory ---

/** F1 to F3. Returns the size of the length and the header in bytes. */
export function headSizeOf(start, fileSize, limit) {
  if (start.length < PREFIX_NBYTES || fileSize < PREFIX_NBYTES) {
    const found = Math.min(fileSize, start.length);
    const reason = `too short for a header length: expected at least 8 bytes, found ${found}`;
    throw new Fault("too-short", "F1", reason, { expected: PREFIX_NBYTES, found });
  }
  const view = new DataView(start.buffer, start.byteOffset, PREFIX_NBYTES);
  const headerSize = narrow(view.getBigUint64(0, true));
  if (headerSize > limit) throw headerTooLarge(headerSize, limit);
  const headSize = headerSize + PREFIX_NBYTES;
  if (headSize > fileSize) throw headerPastEnd(headerSize, fileSize);
  return headSize;
}

function headerPastEnd(headerSize, fileSize) {
  const reason = `header passes the end of the file: expected ${headerSize} bytes after the first 8, ` +
    `found ${Math.max(0, fileSize - PREFIX_NBYTES)} — incomplete download?`;
  return new Fault("header-past-end", "F3", reason, { expected: headerSize + PREFIX_NBYTES, found: fileSize });
}

/** JSON begins with a brace or white space; a header that begins with another control character is not JSON. */
function isBinary(first) {
  return first < 0x20 && first !== 0x09 && first !== 0x0a && first !== 0x0d;
}

export function parse(start, options) {
  return namingForeign(start, () => {
    const headSize = headSizeOf(start, options.fileSize, options.limit);
    if (headSize > start.length) throw headerPastEnd(headSize - PREFIX_NBYTES, start.length);
    const header = start.subarray(PREFIX_NBYTES, headSize);
    const raw = isBinary(header[0]) ? parseBinaryHeader(header) : parseJsonHeader(header, options.strict);
    return prove(raw, headSize, options.fileSize);
  });
}

export function limitOption(options, usual) {
  return Math.min(sizeOption(options.maxHeaderBytes ?? usual, "maxHeaderBytes"), HEADER_CEILING);
}

/**
 * Returns the number of bytes at the start of a file that `parseHeader` needs, from the first 8 bytes and the file's
 * size.
 */
export function headSize(start, options) {
  const bytes = bytesOf(start, "start");
  const fileSize = sizeOption(options?.fileSize, "fileSize");
  const limit = limitOption(options, MAX_HEADER_BYTES);
  return naming(options.path ?? null, () => namingForeign(bytes, () => headSizeOf(bytes, fileSize, limit)));
}

/** Parses the header in `start`, which holds the whole file or at least its first `headSize` bytes. */
export function parseHeader(start, options = {}) {
  const bytes = bytesOf(start, "start");
  const fileSize = sizeOption(options.fileSize ?? bytes.length, "fileSize");
  const limit = limitOption(options, MAX_HEADER_BYTES);
  return naming(options.path ?? null, () => parse(bytes, { fileSize, limit, strict: options.strict === true }));
}
