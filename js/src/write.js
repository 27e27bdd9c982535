// Writes `.safetensors` files: byte for byte the files that ingot writes in Python and Rust (FORMAT.md, "Writing").

import { compareNames, Fault, naming, quoteName } from "./errors.js";
import { parseHeader } from "./header.js";
import { DTYPES } from "./raw.js";
import { bytesOf, isBlob, isBuffer } from "./source.js";

const METADATA_KEY = "__metadata__";

const PREFIX_NBYTES = 8;

/** Metadata that describes the tensors of another file: `RECORD_KEYS` of the Rust crate. */
const RECORD_KEYS = new Set([
  ...["ingot.checksums", "ingot.shared", "modelspec.hash_sha256", "c2pa:manifest", "c2pa:manifest.uri"],
  ...["__signature__", "sigstore", "vouch_credential", "ingot.state"],
]);

/** Wide elements first. */
const RANKS = new Map([...DTYPES.keys()].reverse().map((dtype, rank) => [dtype, rank]));

/** @type {[Function, string][]} */
const DTYPES_OF_ARRAYS = [
  [Float64Array, "F64"],
  [Float32Array, "F32"],
  [BigInt64Array, "I64"],
  [BigUint64Array, "U64"],
  [Int32Array, "I32"],
  [Uint32Array, "U32"],
  [Int16Array, "I16"],
  [Uint16Array, "U16"],
  [Int8Array, "I8"],
  [Uint8Array, "U8"],
  [Uint8ClampedArray, "U8"],
];
const DTYPE_OF_ARRAY = new Map(DTYPES_OF_ARRAYS);
if (typeof Float16Array !== "undefined") DTYPE_OF_ARRAY.set(Float16Array, "F16");

/**
 * Returns the bytes of a `.safetensors` file as a stream. Only one piece of the data is in memory at a time.
 *
 *     await writeFile("m.safetensors", writeSafetensors({ bias: { shape: [2], data: new Float32Array(2) } }));
 *
 * @param {Map | Iterable | object} tensors Name to `{ dtype, shape, data }`. `data` holds the elements as the file
 *   stores them, little-endian: a typed array, another buffer, a `Blob`, or a stream of `Uint8Array`s, for example of
 *   `streamRange`. The dtype of a typed array is its element type unless `dtype` is given. Buffers are not copied
 *   and must not change until the stream ends.
 * @param {Map | object | null} [metadata] Text to text. Entries that describe the tensors of another file, such as
 *   digests, are left out.
 * @returns {ReadableStream<Uint8Array>} The same bytes for the same input. It fails if a `Blob` or a stream has
 *   another length than its dtype and shape need, or fails itself.
 * @throws {SafetensorError} Before the first byte: `reserved-name`, `duplicate-tensor`, `unknown-dtype`,
 *   `partial-byte`, `size-overflow`, `size-mismatch`, `invalid-unicode` or `header-too-large`.
 * @throws {TypeError} An argument has another type.
 */
export function writeSafetensors(tensors, metadata = null) {
  const { head, ordered } = naming(null, () => laidOut(tensors, metadata));
  const pieces = bytesOfFile(head, ordered);
  return new ReadableStream(
    {
      async pull(controller) {
        const { done, value } = await pieces.next();
        if (done) controller.close();
        else controller.enqueue(value);
      },
      async cancel() {
        await pieces.return();
      },
    },
    { highWaterMark: 0 },
  );
}

/** Returns the header as bytes, and the tensors in data order. */
function laidOut(tensors, metadata) {
  const ordered = entriesOf(tensors, "tensors").map(([name, tensor]) => checked(name, tensor));
  ordered.sort((a, b) => RANKS.get(a.dtype) - RANKS.get(b.dtype) || compareNames(a.name, b.name));
  const fields = metadata === null ? [] : [`"${METADATA_KEY}":${renderedTexts(metadata)}`];
  let begin = 0n;
  for (const { name, dtype, shape, nbytes } of ordered) {
    const entry = `{"dtype":"${dtype}","shape":[${shape.join()}],"data_offsets":[${begin},${begin + nbytes}]}`;
    fields.push(`${JSON.stringify(name)}:${entry}`);
    begin += nbytes;
  }
  const text = new TextEncoder().encode(`{${fields.join()}}`);
  const head = new Uint8Array(PREFIX_NBYTES + Math.ceil(text.length / 8) * 8).fill(0x20);
  new DataView(head.buffer).setBigUint64(0, BigInt(head.length - PREFIX_NBYTES), true);
  head.set(text, PREFIX_NBYTES);
  // A writer must not write a header that readers reject.
  parseHeader(head, { fileSize: head.length + Number(begin) });
  return { head, ordered };
}

function entriesOf(given, what) {
  if (given === null || typeof given !== "object") throw new TypeError(`${what} must be an object, a Map or pairs`);
  return typeof given[Symbol.iterator] === "function" ? [...given] : Object.entries(given);
}

function checked(name, tensor) {
  if (typeof name !== "string") throw new TypeError(`tensor names must be text, found ${typeof name}`);
  refuseSurrogates(name, { tensor: name });
  if (name === METADATA_KEY) {
    throw new Fault("reserved-name", null, "the name is reserved for metadata", { tensor: name });
  }
  if (!Array.isArray(tensor?.shape)) throw new TypeError(`tensor ${quoteName(name)}: shape must be an array`);
  const { data, shape } = tensor;
  const dtype = tensor.dtype ?? DTYPE_OF_ARRAY.get(data?.constructor);
  if (!DTYPES.has(dtype)) {
    throw new Fault("unknown-dtype", null, `unknown dtype ${quoteName(String(dtype))}`, { tensor: name });
  }
  if (!shape.every((dim) => Number.isSafeInteger(dim) && dim >= 0)) {
    throw new TypeError(`tensor ${quoteName(name)}: the dimensions of shape must be whole numbers, zero or more`);
  }
  const nbytes = nbytesOf(name, dtype, shape);
  const found = isBuffer(data) ? data.byteLength : isBlob(data) ? data.size : null;
  if (found === null && typeof data?.[Symbol.asyncIterator] !== "function") {
    throw new TypeError(`tensor ${quoteName(name)}: data must be a buffer, a Blob or a stream`);
  }
  if (found !== null && BigInt(found) !== nbytes) throw wrongSize({ name, dtype, shape, nbytes }, found);
  return { name, dtype, shape, nbytes, data };
}

function nbytesOf(name, dtype, shape) {
  const nbits = shape.reduce((product, dim) => product * BigInt(dim), BigInt(DTYPES.get(dtype)));
  if (nbits % 8n === 0n) return nbits / 8n;
  const reason = `shape [${shape.join(", ")}] of ${dtype}: its ${nbits} bits end inside a byte`;
  throw new Fault("partial-byte", null, reason, { tensor: name });
}

function wrongSize({ name, dtype, shape, nbytes }, found) {
  const reason = `shape [${shape.join(", ")}] of ${dtype} needs ${nbytes} bytes, data has ${found}`;
  return new Fault("size-mismatch", null, reason, { tensor: name, expected: Number(nbytes), found });
}

function renderedTexts(metadata) {
  const pairs = entriesOf(metadata, "metadata").filter(([key]) => !RECORD_KEYS.has(key));
  for (const [key, value] of pairs) {
    if (typeof key !== "string" || typeof value !== "string") throw new TypeError("metadata must be text to text");
    [key, value].forEach((text) => refuseSurrogates(text, {}, `metadata key ${quoteName(key)}: `));
  }
  pairs.sort(([a], [b]) => compareNames(a, b));
  return `{${pairs.map((pair) => pair.map((text) => JSON.stringify(text)).join(":")).join()}}`;
}

/** UTF-8 cannot express a lone surrogate. */
function refuseSurrogates(text, fields, where = "") {
  if (/\p{Surrogate}/u.test(text)) {
    throw new Fault("invalid-unicode", null, `${where}the text is not valid Unicode`, fields);
  }
}

async function* bytesOfFile(head, ordered) {
  yield head;
  for (const tensor of ordered) {
    let found = 0;
    for await (const piece of piecesOf(tensor.data)) {
      found += piece.length;
      if (found > tensor.nbytes) break;
      yield piece;
    }
    if (BigInt(found) !== tensor.nbytes) throw wrongSize(tensor, found).toError(null);
  }
}

function piecesOf(data) {
  if (isBuffer(data)) return data.byteLength === 0 ? [] : [bytesOf(data, "data")];
  return isBlob(data) ? data.stream() : ownPieces(data);
}

/** Copies each piece: a stream may overwrite it when the next one is requested, and our readers may keep it. */
async function* ownPieces(stream) {
  for await (const piece of stream) {
    if (!(piece instanceof Uint8Array)) throw new TypeError("a stream of data must consist of Uint8Arrays");
    yield piece.slice();
  }
}
