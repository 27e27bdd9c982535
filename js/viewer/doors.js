// Ways to open a model: files that were dropped or chosen, an address, the local server, or a report. Each returns a
// `Table` over sources of one interface. Each source has a `wire`, from which a worker opens the same file.

import { hubUrl } from "../src/address.js";
import { compareNames, escapeName, SafetensorError } from "../src/errors.js";
import { readIndex, readModel } from "../src/model.js";
import { knownBy, openSource, readRange } from "../src/source.js";
import { Table } from "./table.js";

/** Holds the header of most files if its length is unknown; a longer header takes a second request. */
const FIRST_NBYTES = 16_384;
const CONCURRENCY = 6;
const MOST_CONFIG = 10_000_000;
const LIMITS = { maxHeaderBytes: 100_000_000 };

/** Opens the same version of the file in a worker. */
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
  // A server without range support has sent the whole file, and has no version to check a range against.
  const known = version === null ? undefined : { size, version };
  source.wire = { url: String(url), headers: options.headers, name, known };
  return source;
}

/** Opens the files of one model: the files of a folder, or a single one. Browsers list a folder in any order. */
export async function fromFiles(files) {
  const pathOf = (file) => file.webkitRelativePath || file.name;
  const own = [...files].filter((file) =>
    /\.(safetensors|bt|index\.json)$|(^|\/)(adapter_)?config\.json$/.test(file.name) || files.length === 1
  );
  const chosen = (own.length > 0 ? own : [...files]).sort((a, b) => compareNames(pathOf(a), pathOf(b)));
  for (const file of chosen) file.wire = { blob: file };
  const named =
    [/\.index\.json$/, /\.(safetensors|bt)$/, /./].flatMap((end) =>
      chosen.find((file) => end.test(file.name)) ?? []
    )[0];
  return tableOf(chosen, chosen.length === 1 ? named.name : pathOf(named).split("/")[0]);
}

/** Opens an address: a file, an index, a folder with a slash at its end, or a repository of the Hub. */
export async function fromAddress(text) {
  const url = text.startsWith("hf:") ? hubUrl(text) : new URL(text, location.href);
  // The parts of this page are not models, and addresses other than https belong to the local server.
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

function authorized(token) {
  return { authorization: `Bearer ${token}` };
}

/** Asks the local server for the models that it was started with. */
export function listServed(token) {
  return fetch("files", { headers: authorized(token) });
}

/** Opens the models of the local server's answer. */
export async function fromServer(answer, token) {
  const headers = authorized(token);
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

/** Opens the contents of a report, which are in the page itself: headers, statistics, thumbnails. */
export async function fromReport({ label, format, files, statistics, thumbnails }) {
  const sources = files.map(({ name, size, head }) => {
    const bytes = fromBase64(head);
    const read = async (begin, end) => {
      if (end > bytes.length) await reopened({ report: true });
      return bytes.subarray(begin, end);
    };
    return { name, size, read, wire: { report: true } };
  });
  // Only the header is there.
  const table = await tableOf(sources, label, { format }, { firstBytes: 8 });
  return Object.assign(table, { report: { statistics, thumbnails } });
}

export function fromBase64(text) {
  const read = /** @type {any} */ (Uint8Array).fromBase64;
  if (read) return read.call(Uint8Array, text);
  // Browsers before 2025 lack it.
  return Uint8Array.from(atob(text), (character) => character.charCodeAt(0));
}

/** The configuration of a PEFT adapter. An invalid one is left out, as by the command. */
async function adapterConfigOf(sources) {
  const file = sources.find(({ name }) => /(^|\/)adapter_config\.json$/.test(name));
  if (!file || file.size > MOST_CONFIG) return null;
  try {
    return JSON.parse(new TextDecoder().decode(await readRange(file, 0, file.size)));
  } catch {
    return null;
  }
}

async function tableOf(sources, label, given = {}, options = {}) {
  const about = { ...given, adapterConfig: await adapterConfigOf(sources) };
  const read = (config) => readModel(sources, { ...LIMITS, ...options, config });
  try {
    return new Table(await read(true), sources, label, about);
  } catch (error) {
    if (!/config/.test(error?.code ?? "")) throw error;
    // The configuration for quantised weights is optional.
    return new Table(await read(false), sources, label, { ...about, warnings: [[error.code, error.message]] });
  }
}

async function limited(items, work) {
  const [results, rest] = [[], [...items.entries()]];
  const openNext = async () => {
    for (let next = rest.shift(); next; next = rest.shift()) results[next[0]] = await work(next[1]);
  };
  await Promise.all(Array.from({ length: CONCURRENCY }, openNext));
  return results;
}
