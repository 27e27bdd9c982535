// Reads headers, indexes and models from memory, a `File` or `Blob`, a path, or a server that supports HTTP ranges.

import { parseUrl, showUrl, unescaped, urlOf } from "./address.js";
import {
  escapeName,
  Fault,
  leastName,
  naming,
  namingLater,
  nearestName,
  quoteName,
  SafetensorError,
} from "./errors.js";
import { exists, isPath, locate, pathOf } from "./file.js";
import { namingForeign } from "./foreign.js";
import { headSizeOf, limitOption, MAX_HEADER_BYTES, MAX_REMOTE_HEADER_BYTES, parse, parseHeader } from "./header.js";
import { concatenate, getWhole, linked, sizeOption, Transport } from "./http.js";
import { readElements } from "./read.js";
import { indexTooLarge, MAX_INDEX_BYTES, parseIndex, readIndexText, shardNameFault } from "./shard_index.js";
import { asSource, isBlob, isBuffer, isSource, openSource, readAll, UrlSource } from "./source.js";

// // --- Options ---

/** Headers that are fetched in parallel, as by the Hub's own reader. */
const CONCURRENCY = 20;

class Settings extends Transport {
  constructor(options = {}) {
    super(options);
    this.strict = options.strict === true;
    this.concurrency = Math.max(1, sizeOption(options.concurrency ?? CONCURRENCY, "concurrency"));
    this.localLimit = limitOption(options, MAX_HEADER_BYTES);
    this.remoteLimit = limitOption(options, MAX_REMOTE_HEADER_BYTES);
    this.shardUrl = options.shardUrl ?? shardBeside;
    this.config = options.config ?? false;
  }
}

/** Runs `work` for each item, a few at a time, and returns the results. The first failure cancels the others. */
async function mapLimited(items, settings, work) {
  const { controller, signal } = linked(settings.signal);
  const inner = settings.withSignal(signal);
  const results = [];
  const rest = items.entries();
  const worker = async () => {
    // One iterator for all workers, so that each item is taken once.
    for (const [place, item] of rest) results[place] = await work(item, inner);
  };
  try {
    await Promise.all(Array.from({ length: Math.min(settings.concurrency, items.length) }, worker));
    return results;
  } catch (fault) {
    controller.abort(fault);
    throw fault;
  }
}

// --- One file ---

/** Reads the header of an open file, with one more read if the bytes from opening do not hold all of it. */
async function headerOf(source, settings) {
  const isRemote = source instanceof UrlSource;
  const limit = isRemote ? settings.remoteLimit : settings.localLimit;
  const fileSize = source.size;
  return namingLater(source.name, async () => {
    const read = (begin, end) => readAll(source, begin, end, settings.signal);
    const bytes = isRemote ? source.head : await read(0, Math.min(settings.firstBytes, fileSize));
    const size = namingForeign(bytes, () => headSizeOf(bytes, fileSize, limit));
    const rest = size > bytes.length ? [await read(bytes.length, size)] : [];
    const start = concatenate([bytes, ...rest], Math.max(size, bytes.length));
    return parse(start, { fileSize, limit, strict: settings.strict });
  });
}

/** The file at a URL and its header. */
async function openedAt(url, settings) {
  const source = await UrlSource.open(url, settings);
  const header = await headerOf(source, settings);
  source.forgetHead();
  return { source, header };
}

/** The header of a file in memory, of a `File` or `Blob`, of a source, at a URL, or in Node at a path. */
export async function readHeader(source, options = {}) {
  if (isBuffer(source)) return parseHeader(source, options);
  const settings = new Settings(options);
  if (isBlob(source) || isSource(source)) return headerOf(asSource(source), settings);
  if (isPath(source)) return headerOf(await openSource(source), settings);
  return (await openedAt(urlOf(source, settings), settings)).header;
}

/** The index of a sharded checkpoint, from any of the same sources. Its shards are not opened. */
export async function readIndex(source, options = {}) {
  if (isBuffer(source)) return parseIndex(source, options);
  const settings = new Settings(options);
  if (isBlob(source) || isSource(source)) return indexOf(asSource(source), settings);
  if (isPath(source)) return indexOf(await openSource(source), settings);
  return indexAt(urlOf(source, settings), settings);
}

async function indexOf(source, settings) {
  return namingLater(source.name, async () => {
    if (source.size > MAX_INDEX_BYTES) throw indexTooLarge(source.size);
    return readIndexText(await readAll(source, 0, source.size, settings.signal));
  });
}

async function indexAt(url, settings) {
  return namingLater(
    showUrl(url),
    async () => readIndexText(await getWhole(url, settings, indexTooLarge, MAX_INDEX_BYTES)),
  );
}

// --- Models of one or many files ---

const LENIENT_UTF8 = new TextDecoder("utf-8", { ignoreBOM: true });

/** The headers of a model, and its index if it is sharded. */
export class Model {
  #sources;

  constructor(path, index, shards, config, sources) {
    this.#sources = sources;
    this.path = path;
    this.index = index;
    this.shards = shards;
    this.config = config;
    this.warnings = index === null ? [] : totalSizeWarnings(index, shards);
  }

  /** The tensor `name`, and the file that holds it. */
  get(name) {
    const shard = this.index === null ? this.shards.keys().next().value : this.index.weightMap.get(name);
    const tensor = this.shards.get(shard)?.get(name);
    return tensor === undefined ? undefined : { shard, tensor };
  }

  has(name) {
    return this.get(name) !== undefined;
  }

  get size() {
    return this.index === null ? this.shards.values().next().value.size : this.index.weightMap.size;
  }

  /**
   * Reads a tensor, or rows of it, as numbers.
   *
   * @param {string} name
   * @param {{ rows?: readonly [number, number], signal?: AbortSignal }} [options]
   */
  async readTensor(name, { rows, signal } = {}) {
    const { shard, position } = tensorRange(this, name);
    const { tensor } = this.get(name);
    return readElements(this.#sources.get(shard), position, tensor, rows, signal);
  }

  /** All tensors, file by file, in data order. */
  *[Symbol.iterator]() {
    for (const [shard, header] of this.shards) {
      for (const tensor of header.tensors) yield { shard, tensor };
    }
  }
}

function totalSizeWarnings(index, shards) {
  const said = index.totalSize;
  const found = [...shards.values()].reduce((total, header) => total + header.fileSize - header.dataStart, 0);
  return said === null || said === found
    ? []
    : [`the index says that all tensors take ${said} bytes, and they take ${found}`];
}

/**
 * Reads the headers of a model: of one file, or of all shards that an index names. `source` is a URL of a file, an
 * index or a directory, an address of the Hub, a `File`, several files, for example from a dropped folder, or one or
 * several sources of `openSource`.
 */
export async function readModel(source, options = {}) {
  const settings = new Settings(options);
  const folder = await folderOf(source, settings);
  const { index, name } = await folder.locate();
  const config = folder.config();
  // Both requests run at once. A rejection before the `await` below must not count as unhandled.
  config.catch(() => {});
  const names = index === null ? [name] : index.shards;
  const opened = await mapLimited(names, settings, (shard, inner) => folder.open(shard, inner));
  const shards = new Map(names.map((shard, place) => [shard, opened[place].header]));
  const sources = new Map(names.map((shard, place) => [shard, opened[place].source]));
  if (index !== null) naming(folder.path, () => refuseDifferences(index, shards));
  return new Model(folder.path, index, shards, await config, sources);
}

async function folderOf(source, settings) {
  if (isPath(source)) return new FileFolder(await filesAt(source, settings), settings);
  if (typeof source === "string" || source instanceof URL) return new RemoteFolder(urlOf(source, settings), settings);
  return new FileFolder(isBlob(source) || isSource(source) ? [source] : [...source], settings);
}

/** The files of the model at a path: the file or the index, the shards that the index names, and `config.json`. */
async function filesAt(given, settings) {
  const path = await locate(pathOf(given));
  const base = path.slice(0, path.lastIndexOf("/") + 1);
  const main = await openSource(path);
  const shards = isIndexName(path) ? (await indexOf(main, settings)).shards : [];
  const others = [...shards, ...(settings.config === true ? ["config.json"] : [])].map((name) => base + name);
  // A shard that is missing is an error that names all of them.
  const found = await mapLimited(others, settings, async (name) => ((await exists(name)) ? openSource(name) : null));
  return [main, ...found.filter((source) => source !== null)];
}

/** The file of a folder without an index. */
const SINGLE_FILE = "model.safetensors";
const INDEX_FILE = "model.safetensors.index.json";

/** Largest `config.json` that is read, in bytes; the limit of the Hub's own reader. */
const MAX_CONFIG_BYTES = 10_000_000;

function isIndexName(name) {
  return name.endsWith(".json");
}

function configTooLarge(found) {
  const reason = `configuration too large: expected at most ${MAX_CONFIG_BYTES} bytes, found ${found}`;
  return new Fault("config-too-large", null, reason, { expected: MAX_CONFIG_BYTES, found });
}

/** Parses the configuration in `bytes`, a file of another program, in the same way as that program. */
function parseConfig(bytes) {
  let config;
  try {
    config = JSON.parse(new TextDecoder().decode(bytes));
  } catch (error) {
    throw new Fault("invalid-config", null, `invalid JSON in the configuration: ${escapeName(error.message)}`);
  }
  if (!isObject(config)) throw new Fault("invalid-config", null, "the configuration is not a JSON object");
  return config;
}

export function isObject(value) {
  return typeof value === "object" && value !== null && !Array.isArray(value);
}

/** Files beside the given one, on a server. */
class RemoteFolder {
  constructor(url, settings) {
    this.url = url;
    this.settings = settings;
    this.path = showUrl(url);
    this.read = new Map();
  }

  /** Returns the index, or the name of the only file. */
  async locate() {
    if (isIndexName(this.url.pathname)) return { index: await this.indexAt(this.url), name: null };
    if (!this.url.pathname.endsWith("/")) return { index: null, name: lastPart(this.url) };
    return (await this.single()) ?? (await this.sharded()) ?? this.nothing();
  }

  async single() {
    const url = new URL(SINGLE_FILE, this.url);
    const opened = await unlessMissing(openedAt(url, this.settings));
    if (opened === null) return null;
    // Looking for it has already read it.
    this.read.set(SINGLE_FILE, opened);
    return { index: null, name: SINGLE_FILE };
  }

  async sharded() {
    const url = new URL(INDEX_FILE, this.url);
    const index = await unlessMissing(this.indexAt(url));
    if (index === null) return null;
    this.url = url;
    return { index, name: null };
  }

  /** An index whose names become parts of URLs: all of them are checked before any is requested. */
  async indexAt(url) {
    const index = await indexAt(url, this.settings);
    naming(showUrl(url), () => index.shards.forEach(refuseEncodedName));
    return index;
  }

  /** @returns {never} */
  nothing() {
    throw noCheckpoint(`expected ${SINGLE_FILE} or ${INDEX_FILE}`).toError(this.path);
  }

  async open(name, settings) {
    if (this.read.has(name)) return this.read.get(name);
    const isOnly = !isIndexName(this.url.pathname);
    const url = isOnly ? this.url : naming(this.path, () => this.shardUrl(name));
    return openedAt(url, settings);
  }

  shardUrl(name) {
    return parseUrl(String(this.settings.shardUrl(name, this.url)));
  }

  async config() {
    if (this.settings.config !== true) return this.settings.config || null;
    const url = new URL("config.json", this.url);
    const read = () => getWhole(url, this.settings, configTooLarge, MAX_CONFIG_BYTES);
    return unlessMissing(namingLater(showUrl(url), async () => parseConfig(await read())));
  }
}

/** Returns the value of a promise, or null if the server answers 404. */
async function unlessMissing(promise) {
  try {
    return await promise;
  } catch (fault) {
    if (fault instanceof SafetensorError && fault.status === 404) return null;
    throw fault;
  }
}

function noCheckpoint(expected) {
  return new Fault("no-checkpoint", null, `the directory holds no checkpoint: ${expected}`);
}

function lastPart(url) {
  const part = url.pathname.split("/").at(-1);
  return unescaped(part) ?? part;
}

/** The address of a shard: beside the index, without the query of the index. */
function shardBeside(shard, indexUrl) {
  return new URL(shard.split("/").map(encodeURIComponent).join("/"), indexUrl);
}

const ESCAPES_OF_URLS = /(?:%[0-9a-f]{2})+/gi;
/** How often a name may be decoded: a server and each proxy before it may decode it once. */
const MAX_DECODINGS = 5;

/** I6 for a name that becomes part of a URL: its decoded forms must keep the rule too. */
function refuseEncodedName(shard) {
  let name = shard;
  for (let times = 0; name.search(ESCAPES_OF_URLS) >= 0; times++) {
    // A `%` without two digits is a plain character. Bytes that are not UTF-8 become U+FFFD, which no rule forbids.
    name = name.replace(ESCAPES_OF_URLS, decodedBytes);
    const reason = times < MAX_DECODINGS ? shardNameFault(name) : "it is encoded too often";
    if (reason !== null) {
      throw new Fault("invalid-shard-name", "I6", `file name ${quoteName(shard)} refused: decoded, ${reason}`);
    }
  }
}

function decodedBytes(escapes) {
  return LENIENT_UTF8.decode(Uint8Array.from(escapes.split("%").slice(1), (digits) => parseInt(digits, 16)));
}

/** Files that the user chose or dropped, or that were opened by `openSource`. */
class FileFolder {
  constructor(files, settings) {
    this.settings = settings;
    const isFile = (file) => isBlob(file) || isSource(file);
    if (!files.every(isFile)) throw new TypeError("source must be a URL, a Blob or several Files");
    const pathOf = (file, place) => file.webkitRelativePath || file.name || `blob ${place + 1}`;
    this.files = new Map(files.map((file, place) => [pathOf(file, place), file]));
    if (this.files.size < files.length) throw new TypeError("two of the files have one name");
    /** The folder that names in the index are relative to. */
    this.base = "";
    this.path = null;
  }

  async locate() {
    const paths = [...this.files.keys()];
    const indexes = paths.filter((path) => path.endsWith(".index.json"));
    const candidates = indexes.length > 0 ? indexes : paths.filter((path) => /\.(?:safetensors|bt)$/.test(path));
    // A name without a known ending is accepted if there is only one file.
    const path = onlyOne(candidates.length === 0 && paths.length === 1 ? paths : candidates);
    this.path = path;
    this.base = path.slice(0, path.lastIndexOf("/") + 1);
    if (indexes.length === 0) return { index: null, name: path.slice(this.base.length) };
    const index = await indexOf(asSource(this.files.get(path)), this.settings);
    this.refuseMissing(index);
    return { index, name: null };
  }

  refuseMissing(index) {
    const missing = index.shards.filter((shard) => !this.files.has(this.base + shard));
    if (missing.length > 0) {
      const reason = `${missing.length} of the ${index.shards.length} files that the index names are not there: `;
      throw new Fault("missing-shards", null, reason + showNames(missing)).toError(this.path);
    }
  }

  async open(name, settings) {
    const source = asSource(this.files.get(this.base + name));
    return { source, header: await headerOf(source, settings) };
  }

  async config() {
    if (this.settings.config !== true) return this.settings.config || null;
    const blob = this.files.get(`${this.base}config.json`);
    if (blob === undefined) return null;
    return namingLater(blob.name, async () => {
      if (blob.size > MAX_CONFIG_BYTES) throw configTooLarge(blob.size);
      return parseConfig(await readAll(asSource(blob), 0, blob.size, this.settings.signal));
    });
  }
}

function onlyOne(paths) {
  if (paths.length === 1) return paths[0];
  if (paths.length === 0) {
    throw noCheckpoint("expected a *.safetensors.index.json, or one .safetensors or .bt file").toError(null);
  }
  const reason = `these files are more than one checkpoint, and any could be meant: ${showNames(paths)}`;
  throw new Fault("ambiguous-checkpoint", null, `${reason} — give the one to open`).toError(null);
}

function showNames(names) {
  const more = names.length > 8 ? ` and ${names.length - 8} more` : "";
  return names.slice(0, 8).map(quoteName).join(", ") + more;
}

/** Rejects an index that differs from its shards: each shard must hold exactly the tensors that the index lists. */
function refuseDifferences(index, shards) {
  const said = new Map(index.shards.map((shard) => [shard, new Set()]));
  for (const [name, shard] of index.weightMap) said.get(shard).add(name);
  for (const [shard, header] of shards) {
    const names = said.get(shard);
    const missing = [...names].filter((name) => !header.has(name));
    const extra = [...header.names()].filter((name) => !names.has(name));
    if (missing.length + extra.length > 0) {
      const tensor = leastName([...missing, ...extra]);
      throw differenceOf(tensor, !names.has(tensor), shard, index, shards);
    }
  }
}

function differenceOf(tensor, isExtra, shard, index, shards) {
  const other = [...shards.keys()].find((name) => name !== shard && shards.get(name).has(tensor));
  const here = quoteName(shard);
  if (isExtra && other !== undefined) {
    return new Fault("tensor-in-two-shards", null, `it is in ${here} and in ${quoteName(other)}`, { tensor });
  }
  if (isExtra) {
    const indexed = index.weightMap.get(tensor);
    const elsewhere = () => `says that it is in ${quoteName(indexed)}, which lacks it`;
    const says = indexed === undefined ? "does not name it" : elsewhere();
    return new Fault("extra-tensor", null, `it is in ${here}, and the index ${says}`, { tensor });
  }
  const elsewhere = other === undefined ? "" : `; it is in ${quoteName(other)}`;
  const reason = `the index says that it is in ${here}, which lacks it${elsewhere}`;
  return new Fault("missing-tensor", null, reason, { tensor });
}

/** The byte range of a tensor: its file in a model, the position in the file, and the number of bytes. */
export function tensorRange(source, name) {
  const found = source instanceof Model ? source.get(name) : { shard: null, tensor: source.get(name) };
  if (found?.tensor === undefined) {
    const names = source instanceof Model ? Array.from(source, ({ tensor }) => tensor.name) : source.names();
    const near = nearestName(names, name);
    const reason = `the file has no such tensor${near === null ? "" : ` — did you mean ${quoteName(near)}?`}`;
    throw new Fault("unknown-tensor", null, reason, { tensor: name }).toError(source.path ?? null);
  }
  const { shard, tensor } = found;
  const header = shard === null ? source : source.shards.get(shard);
  return { shard, position: header.dataStart + tensor.begin, nbytes: tensor.nbytes };
}
