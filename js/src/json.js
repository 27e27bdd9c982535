// A strict JSON reader for headers and indexes, and the UTF-8 decoder that reports positions.

import { Fault, quoteName } from "./errors.js";

// --- Numbers of 64 bits ---

export const MAX_U64 = 2n ** 64n - 1n;

/** A number if that is exact, otherwise a BigInt. Two of these are equal if `===` says so. */
export function narrow(big) {
  return big <= Number.MAX_SAFE_INTEGER ? Number(big) : big;
}

// --- Text ---

// A byte order mark is kept as text, which makes the JSON invalid.
const STRICT_UTF8 = new TextDecoder("utf-8", { fatal: true, ignoreBOM: true });
const ENCODER = new TextEncoder();

/** F4, I2. Decodes `bytes`, which start at `position` of the file. Errors call the file `where`. */
export function utf8Text(bytes, position, rule, where) {
  try {
    return STRICT_UTF8.decode(bytes);
  } catch {
    const at = position + validUtf8Length(bytes);
    throw new Fault("invalid-utf8", rule, `invalid UTF-8 at byte ${at} of the ${where}`);
  }
}

/** Bytes before the first that is not UTF-8. Only called if there is one, since decoders do not report it. */
function validUtf8Length(bytes) {
  let at = 0;
  while (at < bytes.length) {
    const length = utf8SequenceLength(bytes, at);
    if (length === 0) break;
    at += length;
  }
  return at;
}

/** Returns the length of the character at `at`, or 0 if it is malformed. See table 3-7 of the Unicode standard. */
function utf8SequenceLength(bytes, at) {
  const first = bytes[at];
  if (first < 0x80) return 1;
  if (first < 0xc2 || first > 0xf4) return 0;
  const length = first < 0xe0 ? 2 : first < 0xf0 ? 3 : 4;
  const least = first === 0xe0 ? 0xa0 : first === 0xf0 ? 0x90 : 0x80;
  const most = first === 0xed ? 0x9f : first === 0xf4 ? 0x8f : 0xbf;
  for (let follower = 1; follower < length; follower++) {
    const byte = bytes[at + follower];
    const isFirst = follower === 1;
    if (byte === undefined || byte < (isFirst ? least : 0x80) || byte > (isFirst ? most : 0xbf)) return 0;
  }
  return length;
}

export function utf8Length(text) {
  return ENCODER.encode(text).length;
}

// --- JSON ---

/** Levels of objects and arrays, as serde_json counts them: the 128th is rejected. */
const MAX_DEPTH = 127;

export const QUOTE = 0x22;
const COMMA = 0x2c;
const COLON = 0x3a;
export const OPEN_BRACKET = 0x5b;
const BACKSLASH = 0x5c;
export const CLOSE_BRACKET = 0x5d;
export const OPEN_BRACE = 0x7b;
export const CLOSE_BRACE = 0x7d;

const NUMBER = /-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][+-]?[0-9]+)?/y;
const ESCAPES = { '"': '"', "\\": "\\", "/": "/", b: "\b", f: "\f", n: "\n", r: "\r", t: "\t" };

/**
 * A cursor in a JSON text, for readers that expect certain values. `JSON.parse` cannot be used: it keeps the last of
 * two equal keys, rounds integers above 2^53, and accepts lone surrogates.
 */
export class Json {
  /** `position` is the text's position in the file; `where` and `rule` are for faults. */
  constructor(text, position, rule, where) {
    this.text = text;
    this.at = 0;
    this.depth = 0;
    /** Memory of `plainIntegers`. */
    this.found = [];
    this.position = position;
    this.rule = rule;
    this.where = where;
  }

  /** Returns the next character that is not white space, without consuming it; NaN at the end. */
  peek() {
    const { text } = this;
    let unit = text.charCodeAt(this.at);
    while (unit === 0x20 || unit === 0x0a || unit === 0x0d || unit === 0x09) unit = text.charCodeAt(++this.at);
    return unit;
  }

  /** I3, F5, for the next character. */
  unexpected(expected) {
    const point = this.text.codePointAt(this.at);
    const found = point === undefined ? "the end" : quoteName(String.fromCodePoint(point));
    return this.invalid(`expected ${expected}, found ${found}`);
  }

  invalid(reason) {
    const at = this.position + utf8Length(this.text.slice(0, this.at));
    // A mistake of some writers, which pad as in C strings.
    const isPadded = this.where === "header" && /\}\0+$/.test(this.text.slice(-64));
    const hint = isPadded ? " — the header is padded with NUL, not spaces" : "";
    return new Fault("invalid-json", this.rule, `invalid JSON in the ${this.where}: ${reason} at byte ${at}${hint}`);
  }

  expect(unit, words) {
    if (this.peek() !== unit) throw this.unexpected(words);
    this.at++;
  }

  /** Checks that only white space is left. */
  expectEnd() {
    if (!Number.isNaN(this.peek())) throw this.unexpected("nothing after the object");
  }

  /** Enters an object or an array, whose first character was already examined. */
  open() {
    if (++this.depth > MAX_DEPTH) throw this.invalid(`more than ${MAX_DEPTH} levels`);
    this.at++;
  }

  /** Whether one more item follows in the list that ends with `close`; `count` items were read. */
  hasNext(close, count) {
    const unit = this.peek();
    if (unit === close) {
      this.at++;
      this.depth--;
      return false;
    }
    if (count > 0) {
      if (unit !== COMMA) throw this.unexpected(`\`,\` or \`${String.fromCharCode(close)}\``);
      this.at++;
      this.peek();
    }
    return true;
  }

  /** A key of an object, with the colon after it. */
  key() {
    const key = this.string("a string for a key");
    this.expect(COLON, "`:`");
    return key;
  }

  /** A string, with its escapes resolved. */
  string(words) {
    if (this.peek() !== QUOTE) throw this.unexpected(words);
    const { text } = this;
    const begin = ++this.at;
    for (let at = begin;; at++) {
      const unit = text.charCodeAt(at);
      if (unit === QUOTE) {
        this.at = at + 1;
        return text.slice(begin, at);
      }
      if (unit === BACKSLASH) return this.escapedString(begin, at);
      // NaN, past the end, is not above either.
      if (!(unit >= 0x20)) {
        this.at = at;
        throw this.unexpected("the end of a string");
      }
    }
  }

  /** The string that begins at `begin` and has its first escape at `at`. */
  escapedString(begin, at) {
    const { text } = this;
    const parts = [text.slice(begin, at)];
    this.at = at;
    for (;;) {
      const unit = text.charCodeAt(this.at);
      if (unit === QUOTE) break;
      if (!(unit >= 0x20)) throw this.unexpected("the end of a string");
      if (unit === BACKSLASH) {
        parts.push(this.escape());
      } else {
        const plain = this.at;
        while (isPlain(text.charCodeAt(this.at))) this.at++;
        parts.push(text.slice(plain, this.at));
      }
    }
    this.at++;
    return parts.join("");
  }

  escape() {
    const letter = this.text[this.at + 1];
    if (letter === "u") return this.unicodeEscape();
    if (!Object.hasOwn(ESCAPES, letter)) throw this.invalid("an escape that JSON does not have");
    this.at += 2;
    return ESCAPES[letter];
  }

  unicodeEscape() {
    const unit = this.escapedUnit();
    if (unit >= 0xdc00 && unit <= 0xdfff) throw this.invalid("a lone surrogate");
    if (unit < 0xd800 || unit > 0xdbff) return String.fromCharCode(unit);
    if (!this.text.startsWith("\\u", this.at)) throw this.invalid("a lone surrogate");
    const second = this.escapedUnit();
    if (second < 0xdc00 || second > 0xdfff) throw this.invalid("a lone surrogate");
    return String.fromCharCode(unit, second);
  }

  escapedUnit() {
    const digits = this.text.slice(this.at + 2, this.at + 6);
    if (!/^[0-9a-fA-F]{4}$/.test(digits)) throw this.invalid("an escape without four hexadecimal digits");
    this.at += 6;
    return parseInt(digits, 16);
  }

  /** An integer below 2^64 without sign, fraction and exponent; null for any other value. */
  integer() {
    this.peek();
    const { text } = this;
    let at = this.at;
    let number = 0;
    for (let digit; (digit = text.charCodeAt(at) - 0x30) >= 0 && digit <= 9; at++) number = number * 10 + digit;
    const digits = at - this.at;
    if (digits === 0) return null;
    const next = text.charCodeAt(at);
    const isWhole = next === COMMA || next === CLOSE_BRACKET;
    // 15 digits are exact, and a number that begins with 0 is 0 or wrong.
    if (isWhole && digits <= 15 && (digits === 1 || text.charCodeAt(this.at) !== 0x30)) {
      this.at = at;
      return number;
    }
    return this.unusualInteger();
  }

  /** Consumes this text if it follows. */
  take(text) {
    const follows = this.text.startsWith(text, this.at);
    if (follows) this.at += text.length;
    return follows;
  }

  /** An integer of 15 digits at most, without white space before it; -1 if none follows. */
  plainInteger() {
    const { text } = this;
    const begin = this.at;
    let at = begin;
    let number = 0;
    for (let digit; (digit = text.charCodeAt(at) - 0x30) >= 0 && digit <= 9; at++) number = number * 10 + digit;
    const digits = at - begin;
    if (digits === 0 || digits > 15 || (digits > 1 && text.charCodeAt(begin) === 0x30)) return -1;
    this.at = at;
    return number;
  }

  /** The rest of a list of such integers, up to its bracket; null if something else is in it. */
  plainIntegers() {
    const found = this.found;
    found.length = 0;
    if (this.take("]")) return [];
    do {
      const number = this.plainInteger();
      if (number < 0) return null;
      found.push(number);
    } while (this.take(","));
    // A copy has no room to grow, which would take more memory than the numbers.
    return this.take("]") ? found.slice() : null;
  }

  unusualInteger() {
    const begin = this.at;
    const spelling = this.number();
    if (/^[0-9]+$/.test(spelling)) {
      const big = BigInt(spelling);
      if (big <= MAX_U64) return narrow(big);
    }
    this.at = begin;
    return null;
  }

  /** A number in the spelling of the text. */
  number() {
    NUMBER.lastIndex = this.at;
    const match = NUMBER.exec(this.text);
    if (match === null) throw this.unexpected("a number");
    if (!Number.isFinite(Number(match[0]))) throw this.invalid("a number out of range");
    this.at += match[0].length;
    return match[0];
  }

  /** Describes a value of the wrong kind. Scalars are parsed, because broken JSON is the worse fault. */
  describe() {
    const unit = this.peek();
    if (unit === QUOTE) return `the string ${quoteName(this.string())}`;
    if (unit === OPEN_BRACE) return "an object";
    if (unit === OPEN_BRACKET) return "an array";
    const word = this.word();
    if (word !== null) return word;
    const spelling = this.number();
    const isInteger = /^-?[0-9]+$/.test(spelling) && BigInt(spelling) <= MAX_U64;
    return `the number ${spelling}${isInteger ? "" : ", which is not an integer below 2^64"}`;
  }

  /** `true`, `false` or `null`; null if it should be a number. */
  word() {
    for (const word of ["true", "false", "null"]) {
      if (this.text.startsWith(word, this.at)) {
        this.at += word.length;
        return word;
      }
    }
    const unit = this.peek();
    if (unit === 0x2d || (unit >= 0x30 && unit <= 0x39)) return null;
    throw this.unexpected("a value");
  }

  /** Parses a value that is ignored, but must be valid JSON. Records duplicate keys of its objects. */
  skip(duplicates) {
    const unit = this.peek();
    if (unit === QUOTE) {
      this.string();
    } else if (unit === OPEN_BRACE) {
      this.open();
      const keys = duplicates && new Set();
      for (let count = 0; this.hasNext(CLOSE_BRACE, count); count++) {
        const key = this.key();
        this.skip(duplicates);
        if (keys?.has(key)) duplicates.push(key);
        keys?.add(key);
      }
    } else if (unit === OPEN_BRACKET) {
      this.open();
      for (let count = 0; this.hasNext(CLOSE_BRACKET, count); count++) this.skip(duplicates);
    } else if (this.word() === null) {
      this.number();
    }
  }
}

function isPlain(unit) {
  return unit >= 0x20 && unit !== QUOTE && unit !== BACKSLASH;
}
