// Escaping of names from files, and the errors that contain them. All other modules depend on this one.

// --- Names, made safe to print ---

/** The number of characters of a name in a message: a header may hold a name of 100 MB. */
const SHOWN_CHARS = 200;

// Controls, and the characters that Unicode calls default ignorable: they reorder, join or hide the text around them.
// Files hold no lone surrogates, but a caller may pass some.
const STEERING = new RegExp(
  "[\\0-\\x1f\\x7f-\\x9f]|[\\xad\\u034f\\u061c\\u115f\\u1160\\u17b4\\u17b5\\u180b-\\u180f\\u200b-\\u200f" +
    "\\u2028-\\u202e\\u2060-\\u206f\\u3164\\ud800-\\udfff\\ufe00-\\ufe0f\\ufeff\\uffa0\\ufff0-\\ufffb" +
    "\\u{1bca0}-\\u{1bca3}\\u{1d173}-\\u{1d17a}\\u{e0000}-\\u{e0fff}]",
  "gu",
);

/**
 * Escapes every character of a text from a file that could control a terminal or hide text. This does not make it safe
 * as HTML: set `textContent`, never `innerHTML`.
 */
export function escapeName(text) {
  return text.replace(STEERING, (character) => {
    const point = character.codePointAt(0);
    return point < 0xa0 ? `\\x${hex(point, 2)}` : `\\u${hex(point, 4)}`;
  });
}

/** A name between backticks, escaped, and shortened if it is too long for a message. */
export function quoteName(name) {
  // A character takes one or two units, so the rest of a long name can be ignored.
  const characters = Array.from(name.slice(0, 2 * SHOWN_CHARS + 2));
  if (characters.length <= SHOWN_CHARS) return `\`${escapeName(name)}\``;
  return `\`${escapeName(characters.slice(0, SHOWN_CHARS).join(""))}…\``;
}

function hex(number, digits) {
  return number.toString(16).padStart(digits, "0");
}

/** Compares names by their bytes in UTF-8, which is code point order and differs from the order of `<`. */
export function compareNames(a, b) {
  const length = Math.min(a.length, b.length);
  for (let at = 0; at < length; at++) {
    const left = a.charCodeAt(at);
    const right = b.charCodeAt(at);
    if (left !== right) return codePointRank(left) - codePointRank(right);
  }
  return a.length - b.length;
}

/** Surrogates sort after all 16-bit characters. */
function codePointRank(unit) {
  return unit >= 0xd800 && unit <= 0xdfff ? unit + 0x10000 : unit;
}

export function leastName(names) {
  return names.reduce((least, name) => (compareNames(name, least) < 0 ? name : least));
}

/**
 * Returns the name most similar to `name`: equal except for case and separators, or with the longest common start or
 * end; null if less than half is common. The Rust crate has the same rule, so that messages agree.
 */
export function nearestName(names, name) {
  const letters = (text) => new TextEncoder().encode(text.replace(/[^\p{Alphabetic}\p{N}]/gu, "").toLowerCase());
  const wanted = letters(name);
  let [best, likeness] = [null, -1];
  for (const candidate of names) {
    const found = letters(candidate);
    const common = (at) => {
      let count = 0;
      while (count < Math.min(found.length, wanted.length) && at(found, count) === at(wanted, count)) count++;
      return count;
    };
    const same = Math.max(
      common((bytes, count) => bytes[count]),
      common((bytes, count) => bytes[bytes.length - 1 - count]),
    );
    if (same >= likeness) [best, likeness] = [candidate, same];
  }
  return 2 * likeness >= Math.max(wanted.length, 1) ? best : null;
}

// --- Errors ---

/**
 * A fault of a file or of reading it. `code` is a stable word that programs may compare; `rule` is the number of the
 * broken rule in FORMAT.md, if any. Names are escaped in `message` only.
 */
export class SafetensorError extends Error {
  /**
   * @override
   * @type {"SafetensorError"}
   */
  name = "SafetensorError";

  /**
   * @param {string} message
   * @param {any} [fields]
   */
  constructor(message, fields = {}) {
    super(message, fields.cause === undefined ? undefined : { cause: fields.cause });
    this.code = fields.code ?? null;
    this.rule = fields.rule ?? null;
    this.path = fields.path ?? null;
    this.tensor = fields.tensor ?? null;
    this.expected = fields.expected ?? null;
    this.found = fields.found ?? null;
    this.begin = fields.begin ?? null;
    this.end = fields.end ?? null;
    this.status = fields.status ?? null;
  }
}

/** The fault of a `SafetensorError` without the file's name, which `naming` adds. */
export class Fault {
  constructor(code, rule, reason, fields = {}) {
    this.code = code;
    this.rule = rule;
    this.reason = reason;
    this.fields = fields;
    /** Milliseconds after which a retry may succeed; null if it cannot. */
    this.retryIn = null;
  }

  get message() {
    const { tensor } = this.fields;
    return tensor === undefined ? this.reason : `tensor ${quoteName(tensor)}: ${this.reason}`;
  }

  toError(path) {
    const message = path === null ? this.message : `${escapeName(path)}: ${this.message}`;
    return new SafetensorError(message, { ...this.fields, code: this.code, rule: this.rule, path });
  }
}

/** Calls `read`, and turns its faults into errors that name `path`. */
export function naming(path, read) {
  try {
    return read();
  } catch (fault) {
    throw fault instanceof Fault ? fault.toError(path) : fault;
  }
}

export async function namingLater(path, read) {
  try {
    return await read();
  } catch (fault) {
    throw fault instanceof Fault ? fault.toError(path) : fault;
  }
}
