// Requests over HTTP: timeouts, retries, redirects, and the validation of answers.

import { HUB, isPublic, showUrl } from "./address.js";
import { escapeName, Fault, quoteName } from "./errors.js";

// // --- Options ---

/** Bytes to read while the header's length is unknown. 97 of 100 headers on the Hub are shorter. */
const FIRST_NBYTES = 1 << 17;

/** Milliseconds that one request may keep its reader waiting. */
const TIMEOUT = 60_000;

/** Retries of a request that failed for a temporary reason. */
const RETRIES = 2;

/** The options of requests, shared by all readers. */
export class Transport {
  constructor(options = {}) {
    this.fetch = options.fetch ?? ((url, request) => globalThis.fetch(url, request));
    this.headers = options.headers ?? {};
    this.signal = options.signal ?? null;
    // The length of a header is in the first 8 bytes.
    this.firstBytes = Math.max(8, sizeOption(options.firstBytes ?? FIRST_NBYTES, "firstBytes"));
    this.timeout = sizeOption(options.timeout ?? TIMEOUT, "timeout");
    this.retries = sizeOption(options.retries ?? RETRIES, "retries");
    this.allowPrivateRedirects = options.allowPrivateRedirects === true;
    this.hub = options.hub ?? HUB;
  }

  withSignal(signal) {
    return Object.assign(Object.create(Object.getPrototypeOf(this)), this, { signal });
  }
}

export function sizeOption(value, name) {
  if (!Number.isSafeInteger(value) || value < 0) throw new TypeError(`${name} must be a whole number, zero or more`);
  return value;
}

/** A controller, and a signal that aborts if the controller or `outer` does. */
export function linked(outer) {
  outer?.throwIfAborted();
  const controller = new AbortController();
  return { controller, signal: outer ? AbortSignal.any([outer, controller.signal]) : controller.signal };
}

// --- Requests ---

const REDIRECTS = new Set([301, 302, 303, 307, 308]);
const MAX_HOPS = 5;

const PASSING = new Set([408, 429, 500, 502, 503, 504]);
const PAUSE = 250;
/** If a server asks for a longer pause, in milliseconds, the request fails at once. */
const MAX_PAUSE = 10_000;

// Browsers follow redirects themselves and hide the target. The first redirect shows whether this is a browser.
let redirectsAreHidden = false;

/** A fault of the network or the server. `retryIn` is null if a retry would fail again. */
export function remoteFault(code, reason, fields = {}, retryIn = null) {
  return Object.assign(new Fault(code, null, reason, fields), { retryIn });
}

/** Returns the result of `attempt`, retried while it fails for a temporary reason. */
export async function retrying(settings, attempt) {
  for (let tries = 0;; tries++) {
    try {
      return await withDeadline(settings, attempt);
    } catch (fault) {
      const wait = retryPause(fault, tries, settings.retries);
      if (wait === null) throw fault;
      await pause(wait, settings.signal);
    }
  }
}

/** Milliseconds to wait before the next try after `tries` failed ones; null after the last. */
export function retryPause(fault, tries, retries) {
  const retryIn = fault instanceof Fault ? (fault.retryIn ?? null) : null;
  return retryIn === null || tries >= retries ? null : Math.max(retryIn, PAUSE * 2 ** tries);
}

async function withDeadline(settings, attempt) {
  const { controller, signal } = linked(settings.signal);
  const rings = Math.min(settings.timeout, LONGEST_TIMER);
  const timer = setTimeout(() => controller.abort(tooLate(settings.timeout)), rings);
  try {
    return await attempt(signal);
  } catch (fault) {
    // This is the cause, regardless of the error that followed from it.
    throw signal.aborted ? signal.reason : fault;
  } finally {
    clearTimeout(timer);
  }
}

/** The longest delay of a timer; longer ones fire at once. */
const LONGEST_TIMER = 2 ** 31 - 1;

/** Bytes a second below which a server counts as stalled. */
const MIN_RATE = 1024;

function tooLate(timeout) {
  return remoteFault("timeout", `no answer in ${timeout} ms`);
}

/**
 * The time that one request may keep its reader waiting: `timeout` for each part of the answer, and in total no longer
 * than its bytes take at `MIN_RATE`. The reader's own work between two parts does not count. An answer may have tens of
 * thousands of parts, so one timer and one listener serve them all.
 */
export class Patience {
  #controller;
  #timeout;
  #waited = 0;
  #received = 0;
  /** The current wait: its start, and the function that ends it. */
  #since = null;
  #leave = null;
  #timer = null;
  #rings = 0;

  constructor(settings) {
    const { controller, signal } = linked(settings.signal);
    this.signal = signal;
    this.#controller = controller;
    this.#timeout = settings.timeout;
    signal.addEventListener("abort", () => this.#leave?.(signal.reason));
  }

  /** Returns the result of `work`, which should stop on `signal` but is abandoned if not. One call at a time. */
  async wait(work) {
    this.signal.throwIfAborted();
    const begin = performance.now();
    this.#since = begin;
    this.#watch();
    try {
      return await new Promise((resolve, reject) => {
        this.#leave = reject;
        work().then(resolve, reject);
      });
    } catch (fault) {
      // This is the cause, regardless of the error that followed from it.
      throw this.signal.aborted ? this.signal.reason : fault;
    } finally {
      this.#since = this.#leave = null;
      this.#waited += performance.now() - begin;
    }
  }

  /** Records that `nbytes` more arrived. */
  receive(nbytes) {
    this.#received += nbytes;
  }

  /** Stops the timer, since nothing more is expected. */
  rest() {
    clearTimeout(this.#timer);
    this.#timer = null;
  }

  /** Ends the request, and frees its connection. */
  end(reason) {
    this.rest();
    this.#controller.abort(reason);
  }

  /** Sets the timer to fire no later than the end of the allowed time. */
  #watch() {
    const allowed = this.#timeout + (this.#received / MIN_RATE) * 1000 - this.#waited;
    const rings = this.#since + Math.max(0, Math.min(allowed, this.#timeout));
    if (rings === Infinity || (this.#timer !== null && this.#rings <= rings)) return;
    clearTimeout(this.#timer);
    this.#rings = rings;
    this.#timer = setTimeout(() => this.#ring(), Math.min(rings - performance.now(), LONGEST_TIMER));
  }

  #ring() {
    this.#timer = null;
    if (this.#since === null) return;
    // It was set for an earlier wait, or has the longest possible delay.
    this.#watch();
    if (this.#rings <= performance.now()) this.end(tooLate(this.#timeout));
  }
}

/** Returns the result of `work`, or rejects with the reason of the signal, if that comes first. */
export async function unlessAborted(signal, work) {
  signal?.throwIfAborted();
  if (!signal) return work();
  let listen;
  const aborted = new Promise((_, reject) => {
    listen = () => reject(signal.reason);
    signal.addEventListener("abort", listen);
  });
  try {
    return await Promise.race([work(), aborted]);
  } catch (fault) {
    // This is the cause, regardless of the error that followed from it.
    throw signal.aborted ? signal.reason : fault;
  } finally {
    signal.removeEventListener("abort", listen);
  }
}

export function pause(milliseconds, outer) {
  const { signal } = linked(outer);
  return new Promise((resolve, reject) => {
    const timer = setTimeout(resolve, milliseconds);
    signal.addEventListener("abort", () => {
      clearTimeout(timer);
      reject(signal.reason);
    });
  });
}

/** Return the answer to a GET, redirects followed. The caller's headers go to the caller's host and to no other. */
export async function get(url, headers, settings, signal) {
  let ours = new Headers(settings.headers);
  for (let at = url, hops = 0;;) {
    const follows = redirectsAreHidden && staysAtItsHost(ours);
    const response = await ask(at, allHeaders(ours, headers), settings, signal, follows);
    if (response.type === "opaqueredirect" && !follows) {
      redirectsAreHidden = true;
      if (staysAtItsHost(ours)) continue;
      throw hiddenRedirect(ours);
    }
    if (!REDIRECTS.has(response.status)) {
      // A `fetch` that followed the redirect itself.
      if (response.redirected && response.url) refuseRedirect(at, new URL(response.url), url, settings);
      return response;
    }
    await discard(response);
    if (++hops > MAX_HOPS) throw remoteFault("redirect-refused", `more than ${MAX_HOPS} redirects`);
    const next = redirectTarget(at, response.headers.get("location"));
    refuseRedirect(at, next, url, settings);
    if (next.origin !== at.origin) ours = new Headers();
    at = next;
  }
}

/** Whether a browser that follows a redirect keeps these headers from other hosts: it removes Authorization only. */
function staysAtItsHost(headers) {
  return [...headers.keys()].every((name) => name === "authorization");
}

function hiddenRedirect(headers) {
  const name = [...headers.keys()].find((one) => one !== "authorization");
  const why = `the server redirects, and the browser would send the header ${
    quoteName(name)
  } to a host that it does not name`;
  return remoteFault(
    "redirect-refused",
    `${why} — give the address that it redirects to, or no header but Authorization`,
  );
}

function allHeaders(ours, more) {
  const headers = new Headers(ours);
  for (const [name, value] of Object.entries(more)) headers.set(name, value);
  return headers;
}

async function ask(url, headers, settings, signal, follows) {
  try {
    return await settings.fetch(url.href, { headers, signal, redirect: follows ? "follow" : "manual" });
  } catch (error) {
    if (signal.aborted) throw error;
    const reason = escapeName(String(error?.cause?.message ?? error?.message ?? error));
    throw remoteFault("network", `cannot be fetched: ${reason}`, { cause: error }, 0);
  }
}

function redirectTarget(from, location) {
  let to;
  try {
    to = new URL(location ?? "", from);
  } catch {
    throw remoteFault("redirect-refused", `redirected to an invalid URL: ${quoteName(String(location))}`);
  }
  if (location === null) throw remoteFault("redirect-refused", "redirected to nowhere");
  return to;
}

/**
 * A server may redirect its clients, but not to a weaker protocol and not into a private network: a private host is
 * requested only if the caller has named that host.
 */
function refuseRedirect(from, to, home, settings) {
  const isWeaker = to.protocol !== "https:" && !(to.protocol === "http:" && from.protocol === "http:");
  const isNamed = to.origin === home.origin || settings.allowPrivateRedirects;
  if (isWeaker || (!isNamed && !isPublic(to.hostname)) || to.username !== "" || to.password !== "") {
    throw remoteFault("redirect-refused", `redirected to ${quoteName(showUrl(to))}, which is refused`);
  }
}

// --- Answers ---

export async function discard(response) {
  // It may be endless, and a broken connection is not an error here.
  await response.body?.cancel().catch(() => {});
}

/** Returns the body, or a little more than `limit` bytes of a longer one. */
export async function bodyUpTo(response, limit) {
  if (!response.body) return new Uint8Array(await response.arrayBuffer());
  const reader = response.body.getReader();
  const parts = [];
  let size = 0;
  try {
    while (size <= limit) {
      const { done, value } = await reader.read();
      if (done) break;
      parts.push(value);
      size += value.length;
    }
  } catch (error) {
    throw remoteFault("short-read", `the answer breaks off after ${size} bytes`, { found: size, cause: error }, 0);
  } finally {
    reader.cancel().catch(() => {});
  }
  return concatenate(parts, size);
}

export function concatenate(parts, size) {
  if (parts.length === 1) return parts[0];
  const bytes = new Uint8Array(size);
  let at = 0;
  for (const part of parts) {
    bytes.set(part, at);
    at += part.length;
  }
  return bytes;
}

/** Returns the fault of an answer with an unexpected status. */
export function badStatus(response, expected) {
  const { status } = response;
  // The viewer's server, which reads a remote file through Python.
  if (response.headers.get("x-error-code") === "changed") {
    return remoteFault("changed", escapeName(plain(response.headers.get("x-error-message")) ?? "the file changed"), {
      status,
    });
  }
  // The Hub's code for a missing file or repository, for example `EntryNotFound`.
  const word = response.headers.get("x-error-code") ?? response.statusText;
  const reason = `expected status ${expected}, found ${status}${word ? ` (${escapeName(word.slice(0, 200))})` : ""}`;
  const retryIn = PASSING.has(status) ? retryAfter(response) : null;
  return remoteFault("http-status", reason, { expected, found: status, status }, retryIn);
}

/** A percent-encoded text of a header field; null if the text is not encoded. */
function plain(text) {
  try {
    return text === null ? null : decodeURIComponent(text);
  } catch {
    return null;
  }
}

/** Milliseconds after which to try again; null if that is too long. */
function retryAfter(response) {
  const text = response.headers.get("retry-after") ?? "0";
  // If the header occurs twice, the longest pause counts. A date has a comma too.
  const isDate = !/^[\d, ]+$/.test(text);
  const wait = isDate ? Date.parse(text) - Date.now() : Math.max(...text.split(",").map(Number)) * 1000;
  return wait > MAX_PAUSE ? null : Math.max(0, wait || 0);
}

/** Returns all of a short file other than a header: an index, a configuration. */
export async function getWhole(url, settings, tooLarge, limit) {
  return retrying(settings, async (signal) => {
    const response = await get(url, {}, settings, signal);
    if (response.status !== 200) {
      await discard(response);
      throw badStatus(response, 200);
    }
    // Decoded bytes are counted, so compression by the server does not matter here.
    const bytes = await bodyUpTo(response, limit);
    if (bytes.length > limit) throw tooLarge(bytes.length);
    return bytes;
  });
}

/** Returns an identifier of the file's version. A weak ETag does not guarantee equal bytes. */
export async function versionOf(response, total) {
  const etag = await onlyValue(response, "etag", /(?:W\/)?"[^"]*"|[^\s,"]+/g);
  const modified = await onlyValue(response, "last-modified", /[^\s,].*?(?:GMT|$)/g);
  const isStrong = etag !== null && !etag.startsWith("W/");
  return versionText(total, etag, isStrong ? null : modified);
}

export function versionText(size, etag, modified) {
  return JSON.stringify([size, etag, modified]);
}

/** A header's value. If it occurs twice, `fetch` joins both with a comma; `each` matches a single value. */
async function onlyValue(response, name, each) {
  const [value = null, ...others] = response.headers.get(name)?.match(each) ?? [];
  if (others.some((other) => other !== value)) {
    await discard(response);
    throw remoteFault("malformed-response", `the answer has the header ${name} twice, with two values`);
  }
  return value;
}

export function isEmptyFile(response) {
  return response.status === 416 && response.headers.get("content-range")?.trim() === "bytes */0";
}

/** Rejects a content encoding: encoded bytes are not the bytes of the file. */
export async function refuseEncoded(response) {
  // If the header occurs twice, this has all values, one after the other.
  const encoding = response.headers.get("content-encoding") ?? "";
  if (encoding.split(",").some((one) => !["", "identity"].includes(one.trim().toLowerCase()))) {
    await discard(response);
    const reason = `expected the bytes of the file, found them encoded as ${quoteName(encoding)}`;
    throw remoteFault("content-encoded", reason);
  }
}

/** Returns the size of the file; the part that follows must be the requested one. */
export async function contentRange(response, begin, end) {
  const said = response.headers.get("content-range");
  const [, first, last, total] = /^bytes (\d+)-(\d+)\/(\d+)$/i.exec(said?.trim() ?? "")?.map(Number) ?? [];
  const isSafe = [first, last, total].every(Number.isSafeInteger);
  if (isSafe && first === begin && last === Math.min(end, total) - 1 && last >= first) {
    return { total, nbytes: last - first + 1 };
  }
  await discard(response);
  const found = said === null ? "no Content-Range" : quoteName(said);
  // Browsers hide headers that a server of another origin does not expose.
  const hint = said === null ? " — a server of another origin has to expose Content-Range and ETag" : "";
  throw remoteFault("wrong-range", `expected bytes ${begin}-${end - 1} of the file, found ${found}${hint}`);
}

export function rangeIgnored(begin, end) {
  const reason = `the server does not give parts: expected bytes ${begin}-${end - 1}, found the whole file`;
  return remoteFault("range-ignored", reason);
}

export function wrongLength(expected, found) {
  if (found > expected) {
    return remoteFault("wrong-range", `expected ${expected} bytes, found more`, { expected });
  }
  return remoteFault("short-read", `expected ${expected} bytes, found ${found}`, { expected, found }, 0);
}
