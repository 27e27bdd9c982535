// Reads local files by path in Node: paths, byte ranges, and the files of a model in a directory.

import { Fault, quoteName } from "./errors.js";

/** Files of a directory that can be opened without a name, in the order of preference. */
const USUAL_NAMES = ["model.safetensors.index.json", "model.safetensors"];
const OTHER_NAMES = [/\.safetensors\.index\.json$/, /\.(?:safetensors|bt)$/];

/** Bytes per read: Node accepts less than 2 GiB. */
const MOST_NBYTES = 1 << 30;

// No `import` statement, so that browsers and bundlers do not try to resolve the module.
const node = (name) => globalThis.process.getBuiltinModule(`node:${name}`);

/** Whether text or a URL is a path: in Node, text without a scheme, and `file:`. */
export function isPath(source) {
  if (globalThis.process?.versions?.node === undefined || globalThis.document !== undefined) return false;
  if (source instanceof URL) return source.protocol === "file:";
  // One letter before a colon is a Windows drive.
  return typeof source === "string" && !/^(?!file:)[a-z][a-z0-9+.-]+:/i.test(source);
}

/** The path as text. On Windows with slashes, as in the names of an index. */
export function pathOf(source) {
  const isUrl = source instanceof URL || source.startsWith("file:");
  const path = isUrl ? node("url").fileURLToPath(source) : source;
  return globalThis.process.platform === "win32" ? path.replaceAll("\\", "/") : path;
}

/** Returns the size and the version of the regular file at `path`. */
export async function statFile(path) {
  const { stat } = node("fs/promises");
  return stamped(await stat(path, { bigint: true }), path);
}

function stamped(found, path) {
  // Opening a FIFO would wait for its writer.
  if (!found.isFile()) throw new Fault("read", null, "is not a regular file").toError(path);
  return { size: Number(found.size), version: `${found.dev}-${found.ino}-${found.size}-${found.mtimeNs}` };
}

/** Reads the bytes of a range in order, all of the version that `statFile` returned. */
export class FileRange {
  #file;
  #path;
  #version;
  #at;
  #end;
  #signal;

  static async open(path, version, begin, end, signal) {
    await statFile(path);
    const { open } = node("fs/promises");
    const range = new FileRange();
    [range.#file, range.#path, range.#version] = [await open(path), path, version];
    [range.#at, range.#end, range.#signal] = [begin, end, signal];
    try {
      await range.#check();
      return range;
    } catch (fault) {
      await range.close();
      throw fault;
    }
  }

  async #check() {
    const { version } = stamped(await this.#file.stat({ bigint: true }), this.#path);
    if (version !== this.#version) throw new Fault("changed", null, "the file changed while it was read");
  }

  /** Reads the next bytes to the start of `view` and returns their number: 0 at the end. */
  async read(view) {
    this.#signal?.throwIfAborted();
    const nbytes = Math.min(view.length, this.#end - this.#at, MOST_NBYTES);
    if (nbytes === 0) return 0;
    const { bytesRead } = await this.#file.read(view, 0, nbytes, this.#at);
    this.#at += bytesRead;
    if (this.#at === this.#end || bytesRead === 0) await this.#check();
    return bytesRead;
  }

  async close() {
    await this.#file.close();
  }
}

/** Returns the model file at `path`, which may be a directory. */
export async function locate(path) {
  const { readdir, stat } = node("fs/promises");
  if (!(await stat(path)).isDirectory()) return path;
  const names = await readdir(path);
  const usual = USUAL_NAMES.find((name) => names.includes(name));
  const others = OTHER_NAMES.map((pattern) => names.filter((name) => pattern.test(name)));
  // A directory with `model.safetensors` may also have an index with another name, which is preferred as in Python.
  const [index, file] = others;
  const found = usual === USUAL_NAMES[0] ? [usual] : index.length > 0 ? index : usual ? [usual] : file;
  if (found.length === 1) return `${path.replace(/\/+$/, "")}/${found[0]}`;
  if (found.length === 0) {
    const reason = "the directory holds no checkpoint: expected a .safetensors or .bt file, or an index";
    throw new Fault("no-checkpoint", null, reason).toError(path);
  }
  const some = found.slice(0, 8).map(quoteName).join(", ");
  const reason = `these files are more than one checkpoint, and any could be meant: ${some} — give the one to open`;
  throw new Fault("ambiguous-checkpoint", null, reason).toError(path);
}

/** Whether there is a file at `path`. */
export function exists(path) {
  const { access } = node("fs/promises");
  return access(path).then(
    () => true,
    () => false,
  );
}
