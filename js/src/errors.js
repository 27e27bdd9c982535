// Names from files, made safe to print, and the errors that speak of them. What every other module stands on.

// --- Names, made safe to print ---

/** Characters of a name that `quoteName` shows: a header may hold one of 100 MB, but no message should. */
const SHOWN_CHARS = 200;

// Controls, and what Unicode calls default ignorable: characters that reorder, join or hide what stands around them.
// Lone surrogates are in no file, but a caller may hand them in.
const STEERING = new RegExp(
  "[\\0-\\x1f\\x7f-\\x9f]|[\\xad\\u034f\\u061c\\u115f\\u1160\\u17b4\\u17b5\\u180b-\\u180f\\u200b-\\u200f" +
    "\\u2028-\\u202e\\u2060-\\u206f\\u3164\\ud800-\\udfff\\ufe00-\\ufe0f\\ufeff\\uffa0\\ufff0-\\ufffb" +
    "\\u{1bca0}-\\u{1bca3}\\u{1d173}-\\u{1d17a}\\u{e0000}-\\u{e0fff}]",
  "gu",
);

/**
 * Text from a file with every character escaped that could steer a terminal or hide text. HTML is another matter: set
 * `textContent`, never `innerHTML`.
 */
export function escapeName(text) {
  return text.replace(STEERING, (character) => {
    const point = character.codePointAt(0);
    return point < 0xa0 ? `\\x${hex(point, 2)}` : `\\u${hex(point, 4)}`;
  });
}

/** A name between backticks, escaped, and cut where it is longer than a message should be. */
export function quoteName(name) {
  // A character takes one or two units, so that no more of a long name need be looked at.
  const characters = Array.from(name.slice(0, 2 * SHOWN_CHARS + 2));
  if (characters.length <= SHOWN_CHARS) return `\`${escapeName(name)}\``;
  return `\`${escapeName(characters.slice(0, SHOWN_CHARS).join(""))}…\``;
}

function hex(number, digits) {
  return number.toString(16).padStart(digits, "0");
}

/** The order of names: that of their bytes in UTF-8, which is that of code points and not the one that `<` has. */
export function compareNames(a, b) {
  const length = Math.min(a.length, b.length);
  for (let at = 0; at < length; at++) {
    const left = a.charCodeAt(at);
    const right = b.charCodeAt(at);
    if (left !== right) return codePointRank(left) - codePointRank(right);
  }
  return a.length - b.length;
}

/** Surrogates stand for what comes after all of the 16-bit characters. */
function codePointRank(unit) {
  return unit >= 0xd800 && unit <= 0xdfff ? unit + 0x10000 : unit;
}

export function leastName(names) {
  return names.reduce((least, name) => (compareNames(name, least) < 0 ? name : least));
}

/**
 * The name most like `name`: equal except for case and separators, or with the longest common start or end; null if less
 * than half is common. The Rust crate has the same rule, so that messages agree.
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
 * What is wrong with a file, or with the way to it. `code` is a stable word that programs may compare; `rule` is the
 * number of the rule in FORMAT.md, where one is broken. Names are escaped in `message` and nowhere else.
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

/** A `SafetensorError` to be: whoever knows the file names it, see `naming`. */
export class Fault {
  constructor(code, rule, reason, fields = {}) {
    this.code = code;
    this.rule = rule;
    this.reason = reason;
    this.fields = fields;
    /** Milliseconds after which a second try may succeed; null if none can. */
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

/** What `read` gives; its faults become errors that name `path`. */
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
