// A tensor as a NumPy file: its bytes if NumPy has the dtype, and otherwise its values as floats of 32 bits, which hold
// every value of the smaller floats.

import { decode } from "../src/decode.js";
import { streamRange } from "../src/source.js";
import { unitOf } from "./numbers.js";

const KINDS = {
  BOOL: "|b1",
  U8: "|u1",
  I8: "|i1",
  U16: "<u2",
  I16: "<i2",
  U32: "<u4",
  I32: "<i4",
  U64: "<u8",
  I64: "<i8",
  F16: "<f2",
  F32: "<f4",
  F64: "<f8",
  C64: "<c8",
};
/** Rows of a quantised matrix that are decoded at a time. */
const ROWS = 256;

/** The header of a NumPy file of version 1, which takes a multiple of 64 bytes. */
function headOf(kind, shape) {
  const dims = shape.length === 1 ? `${shape[0]},` : shape.join(", ");
  const text = `{'descr': '${kind}', 'fortran_order': False, 'shape': (${dims}), }`;
  const length = Math.ceil((10 + text.length + 1) / 64) * 64;
  const head = new Uint8Array(length).fill(0x20);
  head.set([0x93, ...Array.from("NUMPY", (letter) => letter.charCodeAt(0)), 1, 0]);
  new DataView(head.buffer).setUint16(8, length - 10, true);
  head.set(new TextEncoder().encode(text), 10);
  head[length - 1] = 0x0a;
  return head;
}

/** The file of a stored tensor, of `shape` as it is stored. */
export async function npyOf(source, { dtype, shape, nbytes, position }, pieceBytes, onProgress, signal) {
  const kind = KINDS[dtype];
  const parts = [headOf(kind ?? "<f4", shape)];
  const unit = unitOf(dtype).nbytes;
  let [done, rest] = [0, new Uint8Array(0)];
  for await (const piece of streamRange(source, position, position + nbytes, { signal, pieceBytes })) {
    // The next piece overwrites this one. A conversion takes whole elements.
    const bytes = new Uint8Array(rest.length + piece.length);
    bytes.set(rest);
    bytes.set(piece, rest.length);
    const whole = kind ? bytes.length : bytes.length - (bytes.length % unit);
    rest = bytes.slice(whole);
    const own = bytes.subarray(0, whole);
    parts.push(kind ? own : bytesOf(Float32Array.from(decode(dtype, own), Number)));
    onProgress((done += piece.length) / nbytes);
  }
  return new Blob(parts);
}

/** The file of a decoded matrix; `read` reads rows of it. */
export async function npyOfRows(read, { shape: [down, across] }, matrix, onProgress) {
  const parts = [headOf("<f4", [down, across])];
  for (let first = 0; first < down; first += ROWS) {
    const rows = Array.from({ length: Math.min(ROWS, down - first) }, (_, at) => first + at);
    const lines = [];
    await read(matrix, rows, { first: 0, count: across }, (at, values) => (lines[at] = bytesOf(values)));
    parts.push(...lines);
    onProgress(Math.min(down, first + ROWS) / down);
  }
  return new Blob(parts);
}

function bytesOf({ buffer, byteOffset, byteLength }) {
  return new Uint8Array(buffer, byteOffset, byteLength);
}
