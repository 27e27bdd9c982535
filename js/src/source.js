// Sources of bytes: memory, a `File` or `Blob`, a server with HTTP ranges, or an object of the page. All have one
// interface, `{ name, size, read(begin, end, signal) }`; ranges are read at once or as a stream.
//
// A returned range is complete and of one version of the file; otherwise reading fails. A server's answer must be 206
// with exactly the requested range, not encoded, and of the version seen on opening. An answer that breaks off is
// resumed from there.

import { showUrl, urlOf } from "./address.js";
import { escapeName, Fault, namingLater } from "./errors.js";
import { FileRange, isPath, pathOf, statFile } from "./file.js";
import {
  badStatus,
  bodyUpTo,
  contentRange,
  discard,
  get,
  isEmptyFile,
  Patience,
  pause,
  rangeIgnored,
  refuseEncoded,
  remoteFault,
  retrying,
  retryPause,
  sizeOption,
  Transport,
  unlessAborted,
  versionOf,
  versionText,
  wrongLength,
} from "./http.js";

/**
 * @typedef {object} Source An object to read ranges from.
 * @property {string | null} name The name in errors: the name of the file, or the address without secret parts.
 * @property {number} size Bytes in the file.
 * @property {(begin: number, end: number, signal?: AbortSignal) => Promise<Uint8Array>} read Reads the bytes from `begin` to
 *   before `end`, counted from the start of the file.
 */

/** Bytes that a server that ignores ranges may send: a file of at most this size is read whole. */
const MAX_WHOLE_NBYTES = 1 << 20;

/** Bytes of a piece of `streamRange`: whole elements of every dtype, including those that pack four into three bytes.
 */
const PIECE_NBYTES = 3 << 20;

/** Bytes per read of a stream, into a buffer that is reused. */
const SCRATCH_NBYTES = 1 << 20;

/** After this many bytes of progress, the count of retries starts again. */
const PROGRESS_NBYTES = 1 << 20;

const NOTHING = new Uint8Array(0);

// // --- Interface ---

/**
 * Opens a file. For a URL this takes one request, which returns the size and the version of the file. In Node, text
 * without a scheme and `file:` URLs are paths.
 *
 * Later reads return the same version, or fail with a `SafetensorError` with the code `changed`. The first bytes,
 * 131,072 or `options.firstBytes`, are kept, so that `readHeader` needs no other request if they hold the header.
 *
 * @param {ArrayBufferLike | ArrayBufferView | Blob | URL | string} source Memory, which is not copied
 *   and must not change; a `File` or `Blob`; or an address: `https://…`, `hf://owner/name/file`, or one
 *   relative to the page.
 * @param {object} [options] The options of `readHeader`: `fetch`, `headers`, `timeout`, `retries`, `allowPrivateRedirects`,
 *   `firstBytes`, `hub`; they hold for every later read. `signal` ends the opening only. `name` replaces the address in
 *   errors. `version`, from a source of the same file, is the version that the file must have.
 * @returns {Promise<Source>}
 * @throws {SafetensorError} `invalid-url`, `network`, `timeout`, `http-status`, `redirect-refused`, `range-ignored`,
 *   `wrong-range`, `content-encoded`, `malformed-response` or `short-read`.
 */
export async function openSource(source, options = {}) {
  if (isBuffer(source) || isBlob(source)) return asSource(source);
  if (isPath(source)) return FileSource.open(pathOf(source));
  const transport = new Transport(options);
  const url = urlOf(source, transport);
  return options.known
    ? new UrlSource(url, transport, { name: options.name, ...options.known })
    : UrlSource.open(url, transport, options);
}

/** A source of known size and strong ETag: opening it needs no request. */
export function knownBy(size, etag, head = NOTHING) {
  return { size, head, version: versionText(size, etag, null) };
}

/**
 * Reads the bytes from `begin` to before `end`, all of them, without interpreting them.
 *
 * @param {Source | Blob | ArrayBufferLike | ArrayBufferView} source A source of `openSource`, or any object with its
 *   properties. An address must be opened first, so that all ranges are of one version.
 * @param {number} begin Counted in bytes from the start of the file, like `tensorRange(…).position`.
 * @param {number} end At most `source.size`.
 * @param {object} [options]
 * @param {AbortSignal} [options.signal] Ends the reading; the promise is then rejected with `signal.reason`.
 * @param {Uint8Array<any>} [options.into] A buffer of `end - begin` bytes, which is filled and returned, without another
 *   allocation of that size. After an error it may hold a part of the range.
 * @returns {Promise<Uint8Array>}
 * @throws {RangeError} The range is not within the file, or `into` has another length.
 * @throws {TypeError} An argument has another type.
 * @throws {SafetensorError} `changed`, `read`, and the codes of `openSource`. A read that fails for a temporary reason is
 *   resumed from where it broke off.
 */
export async function readRange(source, begin, end, { signal, into } = {}) {
  const from = asSource(source);
  checkRange(from, begin, end);
  if (into !== undefined) checkMemory(into, end - begin);
  return namingLater(from.name, () => readAll(from, begin, end, signal, into));
}

/**
 * Reads the same bytes in pieces. Only one piece is in memory at a time. Each piece but the last has `pieceBytes`. A
 * piece is overwritten by the next, unless its buffer was transferred. Leaving the loop ends the request.
 *
 *     for await (const piece of streamRange(source, position, position + nbytes)) count(decode(dtype, piece));
 *
 * @param {Source | Blob | ArrayBufferLike | ArrayBufferView} source As for `readRange`.
 * @param {number} begin
 * @param {number} end
 * @param {object} [options]
 * @param {AbortSignal} [options.signal]
 * @param {number} [options.pieceBytes] 3,145,728, which is a whole number of elements of every dtype. Other values
 *   should be multiples of 24.
 * @returns {AsyncGenerator<Uint8Array, void, void>}
 * @throws The errors of `readRange`: for wrong arguments at once, all others from the loop.
 */
export function streamRange(source, begin, end, { signal, pieceBytes = PIECE_NBYTES } = {}) {
  const from = asSource(source);
  checkRange(from, begin, end);
  if (sizeOption(pieceBytes, "pieceBytes") === 0) throw new RangeError("pieceBytes must be 1 or more");
  return pieces(from, begin, end, signal, pieceBytes);
}

/** Returns a reader of the same bytes: `fill(view)` fills a view with the next bytes, `close()` ends the request. */
export function openRange(source, begin, end, signal) {
  const from = asSource(source);
  checkRange(from, begin, end);
  const reading = new Reading(from, begin, end, signal);
  return { fill: (view) => namingLater(from.name, () => reading.fill(view)), close: () => reading.close() };
}

async function* pieces(source, begin, end, signal, pieceBytes) {
  const reading = new Reading(source, begin, end, signal);
  let buffer = new ArrayBuffer(0);
  try {
    for (let at = begin; at < end;) {
      // For the first piece, and if the caller has transferred the buffer of the last one.
      if (buffer.byteLength === 0) buffer = new ArrayBuffer(Math.min(pieceBytes, end - at));
      const piece = new Uint8Array(buffer, 0, Math.min(pieceBytes, end - at));
      await namingLater(source.name, () => reading.fill(piece));
      at += piece.length;
      yield piece;
    }
  } finally {
    await reading.close();
  }
}

/** Reads all bytes of a range. Its errors do not name the file; the caller adds the name. */
export async function readAll(source, begin, end, signal, into = new Uint8Array(end - begin)) {
  const reading = new Reading(source, begin, end, signal);
  try {
    await reading.fill(into);
    return into;
  } finally {
    await reading.close();
  }
}

function checkRange({ name, size }, begin, end) {
  for (const [what, value] of Object.entries({ begin, end })) {
    if (typeof value !== "number") throw new TypeError(`${what} must be a number of bytes`);
  }
  const isWhole = Number.isSafeInteger(begin) && Number.isSafeInteger(end);
  if (!isWhole || begin < 0 || end < begin || end > size) {
    const file = name === null ? "the file" : escapeName(name);
    throw new RangeError(`bytes ${begin}..${end} are not a range of ${file}, which has ${size}`);
  }
}

function checkMemory(into, nbytes) {
  if (!(into instanceof Uint8Array)) throw new TypeError("into must be a Uint8Array");
  if (into.length !== nbytes) throw new RangeError(`into must have ${nbytes} bytes, and has ${into.length}`);
}

// --- Kinds of sources ---

/** Whether an object has the interface of a source. */
export function isSource(source) {
  return typeof source?.read === "function" && typeof source.size === "number";
}

export function isBlob(source) {
  return typeof Blob !== "undefined" && source instanceof Blob;
}

export function isBuffer(source) {
  return source instanceof ArrayBuffer || ArrayBuffer.isView(source) || isShared(source);
}

function isShared(buffer) {
  return typeof SharedArrayBuffer !== "undefined" && buffer instanceof SharedArrayBuffer;
}

/** Returns the bytes of a buffer or a view. */
export function bytesOf(source, what) {
  if (source instanceof ArrayBuffer) return new Uint8Array(source);
  if (ArrayBuffer.isView(source)) {
    const bytes = new Uint8Array(source.buffer, source.byteOffset, source.byteLength);
    // Another thread may write to shared memory, and checked bytes must not change.
    return isShared(source.buffer) ? bytes.slice() : bytes;
  }
  if (isShared(source)) return new Uint8Array(source).slice();
  throw new TypeError(`${what} must be an ArrayBuffer or a view of one`);
}

/** Returns one of our sources for anything that needs no request to a server. */
export function asSource(source) {
  if (source instanceof OwnSource) return source;
  if (isBuffer(source)) return new BytesSource(bytesOf(source, "source"));
  if (isBlob(source)) return new BlobSource(source);
  if (isSource(source)) return new ForeignSource(source);
  throw new TypeError("source must be a result of openSource, a Blob or an ArrayBuffer");
}

/**
 * The base of our sources. Besides the interface they have `open(begin, end, signal)`, which returns an object with
 * `read(view)` and `close()`. `read` puts the next bytes at the start of `view` and returns their number, 0 at the end.
 */
class OwnSource {
  /** The number of retries. 0 by default, since only faults of a network are temporary. */
  retries = 0;

  constructor(name, size) {
    this.name = name;
    this.size = size;
  }

  read(begin, end, signal) {
    return readRange(this, begin, end, { signal });
  }
}

class BytesSource extends OwnSource {
  constructor(bytes) {
    super(null, bytes.length);
    this.bytes = bytes;
  }

  async open(begin, end) {
    return new Memory(this.bytes.subarray(begin, end));
  }
}

/** A `File` or `Blob`. */
class BlobSource extends OwnSource {
  constructor(blob) {
    super(typeof blob.name === "string" ? blob.name : null, blob.size);
    this.blob = blob;
  }

  async open(begin, end, signal) {
    const patience = new Patience({ signal: signal ?? null, timeout: Infinity });
    return new Stream(this.blob.slice(begin, end).stream(), patience, unreadable);
  }
}

/** A local file, in Node. Each read opens it, so that there is nothing to close. */
class FileSource extends OwnSource {
  constructor(path, { size, version }) {
    super(path, size);
    this.version = version;
  }

  static async open(path) {
    return new FileSource(path, await statFile(path));
  }

  open(begin, end, signal) {
    return FileRange.open(this.name, this.version, begin, end, signal);
  }
}

/** Browsers reject a file that was changed after it was chosen. */
function unreadable(error) {
  const reason = `cannot be read: ${escapeName(String(error?.message ?? error))}`;
  return new Fault("read", null, reason, { cause: error });
}

/** A caller's object with the same interface, which may return a wrong number of bytes. */
class ForeignSource extends OwnSource {
  constructor(source) {
    super(source.name ?? null, sizeOption(source.size, "size"));
    this.source = source;
  }

  async open(begin, end, signal) {
    let at = begin;
    const read = async (view) => {
      const upTo = Math.min(end, at + view.length);
      if (upTo === at) return 0;
      const bytes = await unlessAborted(signal, () => this.source.read(at, upTo, signal));
      if (!(bytes instanceof Uint8Array)) throw new TypeError("source.read must return a Uint8Array");
      if (bytes.length !== upTo - at) throw wrongLength(upTo - at, bytes.length);
      view.set(bytes);
      at = upTo;
      return bytes.length;
    };
    return { read, close: async () => {} };
  }
}

/** A file on a server, read in ranges. All of them are of one version. */
export class UrlSource extends OwnSource {
  #version = null;

  /**
   * @param {URL} url
   * @param {Transport} transport
   * @param {{ name?: string, version?: string, size?: number, head?: Uint8Array<any> }} [known]
   */
  constructor(url, transport, { name, version, size = 0, head = NOTHING } = {}) {
    super(name ?? showUrl(url), size);
    this.#version = version ?? null;
    this.url = url;
    this.transport = transport.withSignal(null);
    this.retries = transport.retries;
    /** The first bytes, from opening. */
    this.head = head;
  }

  static async open(url, transport, known) {
    const source = new UrlSource(url, transport, known);
    await namingLater(source.name, () => retrying(transport, (signal) => source.#start(transport.firstBytes, signal)));
    return source;
  }

  /** Frees the first bytes once the header was parsed, unless they are the whole file. */
  forgetHead() {
    if (this.#version !== null) this.head = NOTHING;
  }

  /** The version that every answer must have; null if the file was sent whole. Text, so that it can be sent to a
   * worker. */
  get version() {
    return this.#version;
  }

  async #start(nbytes, signal) {
    const response = await this.#ask(0, nbytes, signal);
    if (response.status === 200) {
      this.#keep(await wholeOf(response, Math.max(nbytes, MAX_WHOLE_NBYTES)));
    } else if (isEmptyFile(response)) {
      // An empty file has no ranges.
      await discard(response);
    } else {
      const { total, nbytes: length, version } = await this.#accept(response, 0, nbytes);
      const bytes = await bodyUpTo(response, length);
      if (bytes.length !== length) throw wrongLength(length, bytes.length);
      this.#keep(bytes, total);
      // Not earlier: an answer without usable bytes does not fix the version.
      this.#version = version;
    }
  }

  #keep(bytes, size = bytes.length) {
    this.head = bytes;
    this.size = size;
  }

  async open(begin, end, signal) {
    if (end <= this.head.length) return new Memory(this.head.subarray(begin, end));
    const patience = new Patience(this.transport.withSignal(signal ?? null));
    try {
      const response = await patience.wait(() => this.#part(begin, end, patience.signal));
      return new Stream(response.body, patience, brokenOff);
    } catch (fault) {
      patience.end();
      throw fault;
    }
  }

  async #part(begin, end, signal) {
    const response = await this.#ask(begin, end, signal);
    if (response.status === 200) {
      await discard(response);
      throw rangeIgnored(begin, end);
    }
    await this.#accept(response, begin, end);
    return response;
  }

  #ask(begin, end, signal) {
    // fetch adds `Accept-Encoding: identity` to every request for a range, and forbids setting it.
    return get(this.url, { range: `bytes=${begin}-${end - 1}` }, this.transport, signal);
  }

  /** Checks the headers of an answer, and returns their description of the part that follows. */
  async #accept(response, begin, end) {
    if (response.status !== 206) {
      await discard(response);
      throw badStatus(response, 206);
    }
    await refuseEncoded(response);
    const range = await contentRange(response, begin, end);
    const version = await versionOf(response, range.total);
    // Compared here and not with If-Match, for which browsers would send a preflight request.
    if (this.#version !== null && this.#version !== version) {
      await discard(response);
      throw remoteFault("changed", "the file changed while it was read");
    }
    return { ...range, version };
  }
}

/** Returns the whole file, which the server sent instead of a part. */
async function wholeOf(response, limit) {
  await refuseEncoded(response);
  const said = Number(response.headers.get("content-length") ?? 0);
  const bytes = said > limit ? null : await bodyUpTo(response, limit);
  if (bytes === null || bytes.length > limit) {
    await discard(response);
    throw rangeIgnored(0, limit);
  }
  return bytes;
}

function brokenOff(error, found) {
  if (error instanceof Fault) return error;
  return remoteFault("short-read", `the answer breaks off after ${found} bytes`, { found, cause: error }, 0);
}

// --- Reading ---

/** Reads the bytes of a range in order, and resumes where an answer breaks off. */
class Reading {
  #source;
  #begin;
  #at;
  #end;
  #signal;
  #answer = null;
  #tries = 0;
  /** The position at which the last try began. */
  #since;

  constructor(source, begin, end, signal) {
    signal?.throwIfAborted();
    [this.#source, this.#begin, this.#end, this.#signal] = [source, begin, end, signal];
    this.#at = this.#since = begin;
  }

  /** Fills all of `view` with the next bytes. */
  async fill(view) {
    for (let have = 0; have < view.length;) {
      have += await this.#trying(() => this.#read(view.subarray(have)));
    }
    if (this.#at === this.#end && this.#answer !== null) await this.#expectEnd();
  }

  async close() {
    const answer = this.#answer;
    this.#answer = null;
    await answer?.close();
  }

  async #read(view) {
    this.#answer ??= await this.#source.open(this.#at, this.#end, this.#signal);
    const nbytes = await this.#answer.read(view);
    if (nbytes === 0) throw wrongLength(this.#end - this.#begin, this.#at - this.#begin);
    this.#at += nbytes;
    return nbytes;
  }

  /** Returns the result of `attempt`, retried while it fails for a temporary reason. */
  async #trying(attempt) {
    for (;;) {
      try {
        return await attempt();
      } catch (fault) {
        await this.close();
        if (this.#signal?.aborted) throw this.#signal.reason;
        if (this.#at - this.#since >= PROGRESS_NBYTES) this.#tries = 0;
        this.#since = this.#at;
        const wait = retryPause(fault, this.#tries++, this.#source.retries);
        if (wait === null) throw fault;
        await pause(wait, this.#signal);
      }
    }
  }

  /** Rejects bytes after the last one, which show that the answer's headers were wrong. */
  async #expectEnd() {
    let more = 0;
    try {
      more = await this.#answer.read(new Uint8Array(1));
    } catch {
      this.#signal?.throwIfAborted();
      // All bytes have arrived, so an error at the end of the answer is ignored.
    }
    if (more > 0) throw wrongLength(this.#end - this.#begin, this.#end - this.#begin + more);
    await this.close();
  }
}

/** Bytes in memory. */
class Memory {
  constructor(bytes) {
    this.bytes = bytes;
  }

  async read(view) {
    const nbytes = Math.min(view.length, this.bytes.length);
    view.set(this.bytes.subarray(0, nbytes));
    this.bytes = this.bytes.subarray(nbytes);
    return nbytes;
  }

  async close() {}
}

/**
 * The bytes of a stream. If it can read into a given buffer, one buffer is reused; otherwise each chunk has its own
 * memory, and the part that did not fit is kept. `patience` limits its reads, `faultOf` translates its errors.
 */
class Stream {
  #reader;
  #scratch;
  #patience;
  #faultOf;
  #rest = NOTHING;
  #received = 0;

  constructor(stream, patience, faultOf) {
    [this.#patience, this.#faultOf] = [patience, faultOf];
    // Some answers have no body. They contain no bytes.
    const body = stream ?? new Blob([]).stream();
    try {
      this.#reader = body.getReader({ mode: "byob" });
      this.#scratch = new ArrayBuffer(SCRATCH_NBYTES);
    } catch {
      this.#reader = body.getReader();
      this.#scratch = null;
    }
  }

  async read(view) {
    if (this.#rest.length === 0) this.#rest = await this.#next();
    const nbytes = Math.min(view.length, this.#rest.length);
    view.set(this.#rest.subarray(0, nbytes));
    this.#rest = this.#rest.subarray(nbytes);
    return nbytes;
  }

  /** The next bytes, valid until the next call; none at the end. */
  async #next() {
    const chunk = () => this.#reader.read(...(this.#scratch ? [new Uint8Array(this.#scratch)] : []));
    for (;;) {
      let done, value;
      try {
        ({ done, value } = await this.#patience.wait(chunk));
      } catch (error) {
        this.#patience.rest();
        throw this.#faultOf(error, this.#received);
      }
      if (this.#scratch && value) this.#scratch = value.buffer;
      if (done) break;
      this.#received += value.length;
      this.#patience.receive(value.length);
      if (value.length > 0) return value;
    }
    this.#patience.rest();
    return NOTHING;
  }

  async close() {
    this.#patience.rest();
    // This ends the request. A broken connection is not an error here, and a hanging one is not waited for.
    this.#reader.cancel().catch(() => {});
  }
}
