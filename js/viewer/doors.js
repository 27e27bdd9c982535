// How a model comes in: files that were dropped or chosen, an address, the local server, or a report. Each gives a
// `Table` over sources of one interface, and each source has a `wire`: what a worker opens the same file by.

import { hubUrl } from "../src/address.js";
import { escapeName, SafetensorError } from "../src/errors.js";
import { readIndex, readModel } from "../src/model.js";
import { knownBy, openSource } from "../src/source.js";
import { Table } from "./table.js";

/** Enough for the header of most files, where nobody says how long it is; a longer one takes a second request. */
const FIRST_NBYTES = 16_384;
const CONCURRENCY = 6;
const LIMITS = { maxHeaderBytes: 100_000_000 };

/** The door of a worker: the same file, of the same version. */
export async function reopened(wire, signal) {
  if (wire.blob) return wire.blob;
  if (wire.report) {
    throw new SafetensorError("the report does not hold the values of this tensor", { code: "not-in-report" });
  }
  return openSource(wire.url, { ...wire, signal });
}

async function remote(url, options = {}) {
  /** @type {any} */
  const source = await openSource(url, { firstBytes: FIRST_NBYTES, ...options });
  const { name, size, version } = source;
  // A server that gives no parts has sent the whole file, and tells no version by which a part would be known.
  const known = version === null ? undefined : { size, version };
  source.wire = { url: String(url), headers: options.headers, name, known };
  return source;
}

/** Files of one model: those of a folder, or one. */
export async function fromFiles(files) {
  const own = [...files].filter((file) =>
    /\.(safetensors|bt|index\.json)$|(^|\/)config\.json$/.test(file.name) || files.length === 1
  );
  const chosen = own.length > 0 ? own : [...files];
  for (const file of chosen) file.wire = { blob: file };
  return tableOf(
    chosen,
    chosen.length === 1 ? chosen[0].name : (chosen[0].webkitRelativePath || chosen[0].name).split("/")[0],
  );
}

/** A file, an index, a folder with a slash at its end, or a repository of the Hub, at an address. */
export async function fromAddress(text) {
  const url = text.startsWith("hf:") ? hubUrl(text) : new URL(text, location.href);
  // The parts of this page are no models, and what is not asked for by https is for the local server.
  if (!/^https?:$/.test(url.protocol)) {
    throw new SafetensorError(`${text}: expected an https:// or hf:// address`, { code: "invalid-url" });
  }
  if (!/\.json$|\/$/.test(url.pathname)) return tableOf([await remote(url)], text);
  const index = url.pathname.endsWith("/") ? new URL("model.safetensors.index.json", url) : url;
  try {
    return tableOf(await indexed(index), text);
  } catch (error) {
    if (error.status !== 404 || index === url) throw error;
    return tableOf([await remote(new URL("model.safetensors", url)), ...(await configOf(url))], text);
  }
}

async function indexed(url) {
  const source = await remote(url);
  const { shards } = await readIndex(source);
  const at = (shard) => new URL(shard.split("/").map(encodeURIComponent).join("/"), url);
  return [source, ...(await limited(shards, (shard) => remote(at(shard)))), ...(await configOf(url))];
}

async function configOf(url) {
  return remote(new URL("config.json", url)).then((one) => [one], () => []);
}

/** The models that the local server was started with. */
export async function fromServer(token) {
  const headers = { authorization: `Bearer ${token}` };
  const answer = await fetch("files", { headers });
  if (!answer.ok) {
    const why = answer.status === 401
      ? "open the address that `ingot view` printed"
      : escapeName((await answer.text()).trim());
    throw new SafetensorError(`the server answers ${answer.status}: ${why}`, { code: "http-status" });
  }
  const { models } = await answer.json();
  return models.map(({ label, format, files }) => async () => {
    const open = ({ number, name, size, etag, head, headNbytes }) => {
      const known = head === null ? null : knownBy(size, etag, fromBase64(head));
      return remote(new URL(`f/${number}`, location.href), {
        headers,
        name,
        known,
        firstBytes: headNbytes ?? FIRST_NBYTES,
      });
    };
    return tableOf(await limited(files, open), label, { format, isServed: true });
  });
}

/** What was written into the page itself: headers, statistics, thumbnails. */
export async function fromReport({ label, format, files, statistics, thumbnails }) {
  const sources = files.map(({ name, size, head }) => {
    const bytes = fromBase64(head);
    const read = async (begin, end) => {
      if (end > bytes.length) await reopened({ report: true });
      return bytes.subarray(begin, end);
    };
    return { name, size, read, wire: { report: true } };
  });
  // No more than the header is there to be read.
  const table = await tableOf(sources, label, { format }, { firstBytes: 8 });
  return Object.assign(table, { report: { statistics, thumbnails } });
}

export function fromBase64(text) {
  return Uint8Array.from(atob(text), (character) => character.charCodeAt(0));
}

async function tableOf(sources, label, about = {}, options = {}) {
  const read = (config) => readModel(sources, { ...LIMITS, ...options, config });
  try {
    return new Table(await read(true), sources, label, about);
  } catch (error) {
    if (!/config/.test(error?.code ?? "")) throw error;
    // How a model was quantised is good to know, and no more.
    return new Table(await read(false), sources, label, { ...about, warnings: [[error.code, error.message]] });
  }
}

async function limited(items, work) {
  const [results, rest] = [[], [...items.entries()]];
  const one = async () => {
    for (let next = rest.shift(); next; next = rest.shift()) results[next[0]] = await work(next[1]);
  };
  await Promise.all(Array.from({ length: CONCURRENCY }, one));
  return results;
}
