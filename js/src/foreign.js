// Recognises files of other formats by their first bytes.

import { Fault } from "./errors.js";
import { OPEN_BRACE } from "./json.js";

/** Describes the format of a file that begins like this, with advice; null if the format is unknown. */
function foreignKind(start) {
  // A broken file of our format: a length below 4 GiB and then a brace. If the length is 640, it begins like a pickle.
  if (start[8] === OPEN_BRACE && start.subarray(4, 8).every((byte) => byte === 0)) return null;
  const bytes = latin1(start);
  const text = bytes.replace(/^[ \t\n\f\r]+/, "").replace(/^\xef\xbb\xbf/, "");
  const kind = FOREIGN.find(([, isIt]) => isIt(bytes, text));
  return kind === undefined ? null : kind[0];
}

/** @type {[string, (bytes: string, text: string) => boolean][]} */
const FOREIGN = [
  [
    "a Git LFS pointer, not the file it points to — run `git lfs pull`",
    (bytes) => bytes.startsWith("version https://git-lfs"),
  ],
  [
    "a PyTorch checkpoint (ZIP with a pickle) — convert it with `ingot convert` or torch.load",
    (bytes) => bytes.startsWith("PK\x03\x04") && bytes.includes("data.pkl"),
  ],
  [
    "a NumPy .npz archive — convert it with `ingot convert` or read it with numpy.load",
    (bytes) => bytes.startsWith("PK\x03\x04") && bytes.includes(".npy"),
  ],
  [
    "a ZIP archive — unpack it, or if it is a checkpoint, convert it with `ingot convert`",
    (bytes) => bytes.startsWith("PK\x03\x04") || bytes.startsWith("PK\x05\x06"),
  ],
  ["a GGUF model — convert it with `ingot convert`", (bytes) => bytes.startsWith("GGUF")],
  ["an HDF5 file — convert it with `ingot convert`", (bytes) => bytes.startsWith("\x89HDF\r\n\x1a\n")],
  [
    "a NumPy .npy array — convert it with `ingot convert` or read it with numpy.load",
    (bytes) => bytes.startsWith("\x93NUMPY"),
  ],
  ["compressed with gzip — unpack it first", (bytes) => bytes.startsWith("\x1f\x8b")],
  ["compressed with Zstandard — unpack it first", (bytes) => bytes.startsWith("\x28\xb5\x2f\xfd")],
  [
    "a file whose patch in place was not finished — finish it by `ingot delta apply --in-place` with the same patch",
    (bytes) => bytes.startsWith("\xffpatch\r\n"),
  ],
  ["a PDF document", (bytes) => bytes.startsWith("%PDF-")],
  [
    "only zeros at the start, as an interrupted copy or a full disk leaves it — fetch it again",
    (bytes) => /^\0{8,}$/.test(bytes),
  ],
  [
    "a Python pickle, perhaps an old PyTorch checkpoint — convert it with `ingot convert` or torch.load",
    // Protocols 2 to 5. No opcode is below `(`.
    (bytes) => /^\x80[\x02-\x05][(-\xff]/.test(bytes),
  ],
  [
    "an HTML page, probably an error or login page saved in place of the file — download it again",
    (_, text) => /^<(?:!doctype html|html)/i.test(text),
  ],
  [
    "an XML document, probably a storage server's error saved in place of the file — download it again",
    (_, text) => text.startsWith("<?xml"),
  ],
  [
    "the index of a sharded checkpoint — open the shards that it names",
    (_, text) => text.startsWith("{") && text.includes('"weight_map"'),
  ],
  ["a JSON document without the 8 bytes of a header length before it", (_, text) => /^\{["\n\r]/.test(text)],
];

/** Bytes as characters, for searching with patterns. At most the first 64 KiB: formats are recognised by their start.
 */
function latin1(bytes) {
  let text = "";
  const end = Math.min(bytes.length, 1 << 16);
  // In parts, because each byte becomes an argument.
  for (let at = 0; at < end; at += 4096) text += String.fromCharCode(...bytes.subarray(at, Math.min(at + 4096, end)));
  return text;
}

/** Calls `read`, and adds the file's format to its faults if `start` shows it. */
export function namingForeign(start, read) {
  try {
    return read();
  } catch (fault) {
    const kind = fault instanceof Fault ? foreignKind(start) : null;
    if (kind === null) throw fault;
    const { expected, found } = fault.fields;
    throw new Fault("foreign-file", fault.rule, `this is ${kind} (${fault.message})`, { expected, found });
  }
}
