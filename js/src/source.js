// Where bytes come from: memory, a `File` or `Blob`, a server by HTTP ranges, or whatever a page has itself. One
// interface for all of them, `{ name, size, read(begin, end, signal) }`; and ranges of it, read at once or as a stream.
//
// A range that is given is complete and of one version of the file, or an error: a server's answer is 206 with the
// range that was asked for and nothing else, not encoded, and of the version that was met on opening. An answer that
// breaks off is asked for again from there.

import { showUrl, urlOf } from "./address.js";
import { escapeName, Fault, namingLater } from "./errors.js";
import { FileRange, isPath, look, pathOf } from "./file.js";
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
 * @typedef {object} Source What ranges are read from.
 * @property {string | null} name What errors call it: the name of the file, or the address without what may be secret.
 * @property {number} size Bytes in the file.
 * @property {(begin: number, end: number, signal?: AbortSignal) => Promise<Uint8Array>} read The bytes from `begin` to
 *   before `end`, counted from the start of the file.
 */

/** A server that ignores ranges may send this much, in bytes: a file that is no larger is taken whole. */
const MAX_WHOLE_NBYTES = 1 << 20;

/** Bytes of a piece of `streamRange`: whole elements of every dtype, also where four take three bytes. */
const PIECE_NBYTES = 3 << 20;

/** Bytes that a stream is read by, into memory that goes round. */
const SCRATCH_NBYTES = 1 << 20;

/** A try that brought as many bytes has not failed for good: after it, all tries are there again. */
const PROGRESS_NBYTES = 1 << 20;

const NOTHING = new Uint8Array(0);

// --- What callers use ---

/**
 * Opens a file: by one request where it is a URL, which says how long the file is and of what version. In Node, text
 * without a scheme and `file:` URLs are paths.
 *
 * What is read of it later is of that version, or a `SafetensorError` with the code `changed`. The first bytes, 131,072
 * or `options.firstBytes`, are kept, so that `readHeader` of the source asks for no more where they hold the header.
 *
 * @param {ArrayBufferLike | ArrayBufferView | Blob | URL | string} source Memory, which is not copied
 *   and must not change; a `File` or `Blob`; or an address: `https://…`, `hf://owner/name/file`, or one
 *   relative to the page.
 * @param {object} [options] Those of `readHeader`: `fetch`, `headers`, `timeout`, `retries`, `allowPrivateRedirects`,
 *   `firstBytes`, `hub`; they hold for every later read. `signal` ends the opening only. `name` is what errors call the
 *   file, in place of its address. `version`, which is that of a source of the same file, has to be met again.
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

/** What is known of a file by its size and a strong ETag, which somebody has told: nothing is asked for to open it. */
export function knownBy(size, etag, head = NOTHING) {
  return { size, head, version: versionText(size, etag, null) };
}

/**
 * The bytes from `begin` to before `end`, all of them. They are not looked at: whose they are, a header says.
 *
 * @param {Source | Blob | ArrayBufferLike | ArrayBufferView} source What `openSource` gave, or any object with its
 *   properties. No address: it is opened first, so that all ranges are of one version.
 * @param {number} begin Counted in bytes from the start of the file, as `tensorRange(…).position` is.
 * @param {number} end Not more than `source.size`.
 * @param {object} [options]
 * @param {AbortSignal} [options.signal] Ends the reading; the promise is then rejected with `signal.reason`.
 * @param {Uint8Array<any>} [options.into] Memory of the caller, `end - begin` bytes long, which is filled and given back:
 *   nothing of that size is made besides. After an error it may hold a part of the range.
 * @returns {Promise<Uint8Array>}
 * @throws {RangeError} Where the range is not within the file, or `into` has another length.
 * @throws {TypeError} Where an argument is of another type.
 * @throws {SafetensorError} `changed`, `read`, and those of `openSource`. What fails for a reason that may pass is
 *   tried again, from where it broke off.
 */
export async function readRange(source, begin, end, { signal, into } = {}) {
  const from = asSource(source);
  checkRange(from, begin, end);
  if (into !== undefined) checkMemory(into, end - begin);
  return namingLater(from.name, () => readAll(from, begin, end, signal, into));
}

/**
 * The same bytes in pieces, of which one is in memory at a time. Each piece but the last has `pieceBytes`; a piece is
 * overwritten when the next one is asked for, unless its buffer was transferred. To leave the loop ends the request.
 *
 *     for await (const piece of streamRange(source, position, position + nbytes)) count(decode(dtype, piece));
 *
 * @param {Source | Blob | ArrayBufferLike | ArrayBufferView} source As for `readRange`.
 * @param {number} begin
 * @param {number} end
 * @param {object} [options]
 * @param {AbortSignal} [options.signal]
 * @param {number} [options.pieceBytes] 3,145,728, which is a whole number of elements of every dtype. Another should
 *   be a multiple of 24.
 * @returns {AsyncGenerator<Uint8Array, void, void>}
 * @throws Those of `readRange`: of arguments at once, all others from the loop.
 */
export function streamRange(source, begin, end, { signal, pieceBytes = PIECE_NBYTES } = {}) {
  const from = asSource(source);
  checkRange(from, begin, end);
  if (sizeOption(pieceBytes, "pieceBytes") === 0) throw new RangeError("pieceBytes must be 1 or more");
  return pieces(from, begin, end, signal, pieceBytes);
}

/** The same bytes in parts of any length: `fill(view)` fills all of a view with the next ones, `close()` ends it. */
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
      // At first; and where the caller has sent it elsewhere, which leaves nothing here.
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

/** All bytes of a range, whose faults are still to be named. */
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

/** Whether an object has what a source has. */
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

/** The bytes of a buffer or a view, of any kind. */
export function bytesOf(source, what) {
  if (source instanceof ArrayBuffer) return new Uint8Array(source);
  if (ArrayBuffer.isView(source)) {
    const bytes = new Uint8Array(source.buffer, source.byteOffset, source.byteLength);
    // Another thread may write to shared memory, and what was checked must not change.
    return isShared(source.buffer) ? bytes.slice() : bytes;
  }
  if (isShared(source)) return new Uint8Array(source).slice();
  throw new TypeError(`${what} must be an ArrayBuffer or a view of one`);
}

/** What can be read without a question to a server, as one of our sources. */
export function asSource(source) {
  if (source instanceof OwnSource) return source;
  if (isBuffer(source)) return new BytesSource(bytesOf(source, "source"));
  if (isBlob(source)) return new BlobSource(source);
  if (isSource(source)) return new ForeignSource(source);
  throw new TypeError("source must be what openSource gives, a Blob or an ArrayBuffer");
}

/**
 * What all of ours have besides the interface: `open(begin, end, signal)`. What that gives has `read(view)`, which puts
 * the next bytes at the start of `view` and gives their number, 0 at the end; and `close()`.
 */
class OwnSource {
  /** Tries after the first: what is not on a network fails for good. */
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

/** A file on this machine, in Node. It is opened for each range, so that there is nothing to close. */
class FileSource extends OwnSource {
  constructor(path, { size, version }) {
    super(path, size);
    this.version = version;
  }

  static async open(path) {
    return new FileSource(path, await look(path));
  }

  open(begin, end, signal) {
    return FileRange.open(this.name, this.version, begin, end, signal);
  }
}

/** Browsers refuse a file that was changed since it was chosen. */
function unreadable(error) {
  const reason = `cannot be read: ${escapeName(String(error?.message ?? error))}`;
  return new Fault("read", null, reason, { cause: error });
}

/** An object of the caller with the same interface, which is not trusted to give as many bytes as it was asked for. */
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
      if (!(bytes instanceof Uint8Array)) throw new TypeError("source.read must give a Uint8Array");
      if (bytes.length !== upTo - at) throw wrongLength(upTo - at, bytes.length);
      view.set(bytes);
      at = upTo;
      return bytes.length;
    };
    return { read, close: async () => {} };
  }
}

/** A file on a server, of which parts are read. All of them are of one version. */
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
    /** The first bytes, which came on opening. */
    this.head = head;
  }

  static async open(url, transport, known) {
    const source = new UrlSource(url, transport, known);
    await namingLater(source.name, () => retrying(transport, (signal) => source.#start(transport.firstBytes, signal)));
    return source;
  }

  /** Frees the first bytes after the header was parsed, unless they are the whole file. */
  forgetHead() {
    if (this.#version !== null) this.head = NOTHING;
  }

  /** What every answer has to be of; null where the file came whole. It is text, which can be sent to a worker. */
  get version() {
    return this.#version;
  }

  async #start(nbytes, signal) {
    const response = await this.#ask(0, nbytes, signal);
    if (response.status === 200) {
      this.#keep(await wholeOf(response, Math.max(nbytes, MAX_WHOLE_NBYTES)));
    } else if (isEmptyFile(response)) {
      // No range of an empty file can be had.
      await discard(response);
    } else {
      const { total, nbytes: length, version } = await this.#accept(response, 0, nbytes);
      const bytes = await bodyUpTo(response, length);
      if (bytes.length !== length) throw wrongLength(length, bytes.length);
      this.#keep(bytes, total);
      // Not before: an answer of which nothing is kept binds nobody.
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
    // fetch adds `Accept-Encoding: identity` to every request for a range, and lets nobody else say it.
    return get(this.url, { range: `bytes=${begin}-${end - 1}` }, this.transport, signal);
  }

  /** What the headers of an answer say of the part that follows, once they are as they have to be. */
  async #accept(response, begin, end) {
    if (response.status !== 206) {
      await discard(response);
      throw badStatus(response, 206);
    }
    await refuseEncoded(response);
    const range = await contentRange(response, begin, end);
    const version = await versionOf(response, range.total);
    // Compared here and not by If-Match, for which browsers would ask twice.
    if (this.#version !== null && this.#version !== version) {
      await discard(response);
      throw remoteFault("changed", "the file changed while it was read");
    }
    return { ...range, version };
  }
}

/** The whole file, which the server sent instead of a part. */
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

/** The bytes of a range one after the other, asked for again from where they break off. */
class Reading {
  #source;
  #begin;
  #at;
  #end;
  #signal;
  #answer = null;
  #tries = 0;
  /** Where the last try began. */
  #since;

  constructor(source, begin, end, signal) {
    signal?.throwIfAborted();
    [this.#source, this.#begin, this.#end, this.#signal] = [source, begin, end, signal];
    this.#at = this.#since = begin;
  }

  /** Fills all of `view` with the bytes that come next. */
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

  /** What `attempt` gives, tried again while it fails for a reason that may pass. */
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

  /** What follows the last byte is of no use, and says that the server lies. */
  async #expectEnd() {
    let more = 0;
    try {
      more = await this.#answer.read(new Uint8Array(1));
    } catch {
      this.#signal?.throwIfAborted();
      // All bytes are here: that the answer does not end as it should is no loss.
    }
    if (more > 0) throw wrongLength(this.#end - this.#begin, this.#end - this.#begin + more);
    await this.close();
  }
}

/** Bytes that are there. */
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
 * The bytes of a stream. Where it fills memory of its reader, one buffer goes round; else each chunk is memory of its
 * own, and of it what did not fit is kept. `patience` is that with its reads, `faultOf` says what an error means.
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
    // Some answers have no body, which is one of no bytes.
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

  /** The next bytes, which are there until they are asked for again; none at the end. */
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
    // This ends the request. A connection that is cut is no fault here, and nobody waits for one that hangs.
    this.#reader.cancel().catch(() => {});
  }
}
