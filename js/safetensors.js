// Reads the headers of `.safetensors` and `.bt` files, and the indexes of sharded checkpoints: from memory, from a
// `File` or `Blob`, or from where they lie on a server, by HTTP ranges. Runs in browsers and in Node 20, and needs
// nothing else.
//
// The rules F1 to F12, B1 to B4 and I1 to I8 are those of FORMAT.md in ingot's repository. This reader gives the same
// verdict with the same `code` as ingot does in Rust and in Python; all three run the same test vectors.
//
// Sizes are numbers. The formats count in 64 bits and JavaScript in 53, so every size is read exactly, as a BigInt
// where it must be, and the header is proven with these. After that numbers are enough: begin and end lie inside the
// file, whose size is a safe integer, and a dimension of a tensor with elements divides a count that a double holds.
// What is left is a dimension of an empty tensor; such a tensor has `exactShape` too.

import { hubUrl, parseUrl, showUrl, unescaped, urlOf } from "./address.js";
import {
  Fault,
  SafetensorError,
  compareNames,
  escapeName,
  leastName,
  naming,
  namingLater,
  nearestName,
  quoteName,
} from "./errors.js";
import { exists, isPath, locate, pathOf } from "./file.js";
import { Transport, concatenate, getWhole, linked, sizeOption } from "./http.js";
import { readElements } from "./read.js";
import { UrlSource, asSource, bytesOf, isBlob, isBuffer, isSource, openSource, readAll } from "./source.js";

export { SafetensorError, compareNames, escapeName, hubUrl, quoteName };

// --- Numbers of 64 bits ---

const MAX_U64 = 2n ** 64n - 1n;

/** A number where that is exact, and a BigInt where it is not. Two of these are equal when `===` says so. */
function narrow(big) {
  return big <= Number.MAX_SAFE_INTEGER ? Number(big) : big;
}

function sum(a, b) {
  const total = typeof a === "number" && typeof b === "number" ? a + b : Infinity;
  return total <= Number.MAX_SAFE_INTEGER ? total : narrow(BigInt(a) + BigInt(b));
}

function difference(a, b) {
  return narrow(BigInt(a) - BigInt(b));
}

// --- Element types ---

/** [bits, number in `.bt`] of each dtype, in the order of FORMAT.md. */
const DTYPE_TABLE = {
  BOOL: [8, 0],
  F4: [4, null],
  F6_E2M3: [6, null],
  F6_E3M2: [6, null],
  U8: [8, 1],
  I8: [8, 2],
  F8_E5M2: [8, 3],
  F8_E4M3: [8, 4],
  F8_E8M0: [8, null],
  F8_E4M3FNUZ: [8, null],
  F8_E5M2FNUZ: [8, null],
  I16: [16, 5],
  U16: [16, 6],
  F16: [16, 7],
  BF16: [16, 8],
  I32: [32, 9],
  U32: [32, 10],
  F32: [32, 11],
  C64: [64, null],
  F64: [64, 12],
  I64: [64, 13],
  U64: [64, 14],
};

/** Bits that one element takes, by dtype. */
export const DTYPES = new Map(Object.entries(DTYPE_TABLE).map(([dtype, [bits]]) => [dtype, bits]));

const DTYPE_OF_BINTENSORS = new Map(Object.entries(DTYPE_TABLE).map(([dtype, [, number]]) => [number, dtype]));

// --- Limits ---

/** Largest header, in bytes: that of safetensors and bintensors, so that no file readable there is refused here. */
export const MAX_HEADER_BYTES = 100_000_000;

/** The same for a header that comes over a network, as the Hub's own readers have it. */
export const MAX_REMOTE_HEADER_BYTES = 25_000_000;

/** Whatever the caller allows: engines hold no longer strings. */
const HEADER_CEILING = 500_000_000;

const PREFIX_NBYTES = 8;

// --- Text ---

const METADATA_KEY = "__metadata__";

// A byte order mark is part of the text, which is then no JSON.
const STRICT_UTF8 = new TextDecoder("utf-8", { fatal: true, ignoreBOM: true });
const LENIENT_UTF8 = new TextDecoder("utf-8", { ignoreBOM: true });
const ENCODER = new TextEncoder();

/** F4, I2. The text of `bytes`, which stand at `position` of the file that `where` names. */
function decode(bytes, position, rule, where) {
  try {
    return STRICT_UTF8.decode(bytes);
  } catch {
    const at = position + validUtf8Length(bytes);
    throw new Fault("invalid-utf8", rule, `invalid UTF-8 at byte ${at} of the ${where}`);
  }
}

/** Bytes before the first that is not UTF-8. Only asked when there is one: decoders do not say. */
function validUtf8Length(bytes) {
  let at = 0;
  while (at < bytes.length) {
    const length = utf8SequenceLength(bytes, at);
    if (length === 0) break;
    at += length;
  }
  return at;
}

/** Bytes of the character at `at`; 0 where none is well-formed. The table is that of the Unicode standard, 3-7. */
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

function utf8Length(text) {
  return ENCODER.encode(text).length;
}

// --- JSON ---

/** Levels of objects and arrays, as serde_json counts them: the 128th is refused. */
const MAX_DEPTH = 127;

const QUOTE = 0x22;
const COMMA = 0x2c;
const COLON = 0x3a;
const OPEN_BRACKET = 0x5b;
const BACKSLASH = 0x5c;
const CLOSE_BRACKET = 0x5d;
const OPEN_BRACE = 0x7b;
const CLOSE_BRACE = 0x7d;

const NUMBER = /-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][+-]?[0-9]+)?/y;
const ESCAPES = { '"': '"', "\\": "\\", "/": "/", b: "\b", f: "\f", n: "\n", r: "\r", t: "\t" };

/**
 * A place in a JSON text, for readers that know what has to come next. `JSON.parse` cannot be used: it keeps the last
 * of two equal keys, rounds integers above 2^53, and takes lone surrogates.
 */
class Json {
  /** `position` is where the text begins in the file; `where` and `rule` are for faults. */
  constructor(text, position, rule, where) {
    this.text = text;
    this.at = 0;
    this.depth = 0;
    this.position = position;
    this.rule = rule;
    this.where = where;
  }

  /** The next character that is not white space, which stays; NaN at the end. */
  peek() {
    const { text } = this;
    let unit = text.charCodeAt(this.at);
    while (unit === 0x20 || unit === 0x0a || unit === 0x0d || unit === 0x09) unit = text.charCodeAt(++this.at);
    return unit;
  }

  /** I3, F5, with the character that stands here. */
  unexpected(expected) {
    const point = this.text.codePointAt(this.at);
    const found = point === undefined ? "the end" : quoteName(String.fromCodePoint(point));
    return this.invalid(`expected ${expected}, found ${found}`);
  }

  invalid(reason) {
    const at = this.position + utf8Length(this.text.slice(0, this.at));
    // A mistake of some writers, who pad as C strings end.
    const isPadded = this.where === "header" && /\}\0+$/.test(this.text.slice(-64));
    const hint = isPadded ? " — the header is padded with NUL, not spaces" : "";
    return new Fault("invalid-json", this.rule, `invalid JSON in the ${this.where}: ${reason} at byte ${at}${hint}`);
  }

  expect(unit, words) {
    if (this.peek() !== unit) throw this.unexpected(words);
    this.at++;
  }

  /** Nothing but white space is left. */
  expectEnd() {
    if (!Number.isNaN(this.peek())) throw this.unexpected("nothing after the object");
  }

  /** Enters an object or an array, whose first character was looked at. */
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

  /** A string, escapes undone. */
  string(words) {
    if (this.peek() !== QUOTE) throw this.unexpected(words);
    const { text } = this;
    const begin = ++this.at;
    for (let at = begin; ; at++) {
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
    if (!Object.hasOwn(ESCAPES, letter)) throw this.invalid("an escape that JSON has not");
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

  /** An integer below 2^64 without sign, fraction and exponent; null where something else stands. */
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

  /** A number, as it is spelled. */
  number() {
    NUMBER.lastIndex = this.at;
    const match = NUMBER.exec(this.text);
    if (match === null) throw this.unexpected("a number");
    if (!Number.isFinite(Number(match[0]))) throw this.invalid("a number out of range");
    this.at += match[0].length;
    return match[0];
  }

  /** What stands here, in words, where it is not what belongs here. Scalars are read: broken JSON is worse. */
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

  /** `true`, `false` or `null`; null where a number has to stand. */
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

  /** Reads a value that means nothing here; it has to be JSON all the same. Notes keys that an object has twice. */
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

// --- The header of `.safetensors` ---

/** What a header says, not yet checked against the file: rules F4 to F8. */
class RawHeader {
  constructor(format) {
    this.format = format;
    this.tensors = [];
    /** Pairs; null where there is no metadata, which is not the same as empty metadata. */
    this.metadata = null;
  }

  add(name, dtype, shape, begin, end) {
    this.tensors.push({ name, dtype, shape, begin, end, nbytes: 0 });
  }
}

function parseJsonHeader(header, isStrict) {
  const text = decode(header, PREFIX_NBYTES, "F4", "file");
  const json = new Json(text, PREFIX_NBYTES, "F5", "header");
  const reader = new JsonHeaderReader(json);
  const raw = reader.read();
  if (isStrict && reader.unusual !== null) {
    throw new Fault("not-strict", null, `not strictly as specified: ${reader.unusual}`);
  }
  return raw;
}

class JsonHeaderReader {
  constructor(json) {
    this.json = json;
    this.raw = new RawHeader("safetensors");
    /** The first thing that a strict reader refuses. */
    this.unusual = null;
  }

  read() {
    const { json } = this;
    if (!json.text.startsWith("{")) this.unusual ??= "white space before the JSON";
    if (endsUnusually(json.text)) this.unusual ??= "padding other than spaces";
    if (json.peek() !== OPEN_BRACE) throw json.invalid(`expected an object of tensors, found ${json.describe()}`);
    json.open();
    let hasMetadata = false;
    for (let count = 0; json.hasNext(CLOSE_BRACE, count); count++) {
      const name = json.key();
      if (name !== METADATA_KEY) {
        this.entry(name);
      } else if (hasMetadata) {
        throw duplicateMetadataKey(name, "F7");
      } else {
        hasMetadata = true;
        this.metadata();
      }
    }
    json.expectEnd();
    return this.raw;
  }

  /** F6. */
  metadata() {
    const { json } = this;
    if (json.peek() !== OPEN_BRACE) {
      const found = json.describe();
      if (found !== "null") throw invalidMetadata(`metadata: expected an object of strings, found ${found}`);
      this.unusual ??= "`__metadata__` is null";
      return;
    }
    json.open();
    const metadata = new MetadataBuilder();
    for (let count = 0; json.hasNext(CLOSE_BRACE, count); count++) {
      const key = json.key();
      if (json.peek() !== QUOTE) {
        throw invalidMetadata(`metadata key ${quoteName(key)}: expected a string, found ${json.describe()}`);
      }
      metadata.add(key, json.string());
    }
    this.raw.metadata = metadata.finish();
  }

  /** F8. */
  entry(name) {
    const { json } = this;
    if (json.peek() !== OPEN_BRACE) throw invalidEntry(name, "", json.describe());
    json.open();
    let dtype = null;
    let shape = null;
    let offsets = null;
    for (let count = 0; json.hasNext(CLOSE_BRACE, count); count++) {
      const field = json.key();
      if (field === "dtype") {
        if (dtype !== null) throw duplicateField(name, field);
        dtype = this.dtype(name);
      } else if (field === "shape") {
        if (shape !== null) throw duplicateField(name, field);
        shape = this.integers(name, field);
      } else if (field === "data_offsets") {
        if (offsets !== null) throw duplicateField(name, field);
        offsets = this.integers(name, field);
      } else {
        json.skip();
        this.unusual ??= `tensor ${quoteName(name)} has the unknown field ${quoteName(field)}`;
      }
    }
    if (dtype === null) throw missingField(name, "dtype");
    if (shape === null) throw missingField(name, "shape");
    if (offsets === null) throw missingField(name, "data_offsets");
    if (offsets.length !== 2) throw invalidEntry(name, "data_offsets", `${offsets.length} of them`);
    this.raw.add(name, dtype, shape, offsets[0], offsets[1]);
  }

  dtype(name) {
    const { json } = this;
    if (json.peek() !== QUOTE) throw invalidEntry(name, "dtype", json.describe());
    const dtype = json.string();
    if (!DTYPES.has(dtype)) throw unknownDtype(name, dtype);
    return dtype;
  }

  integers(name, field) {
    const { json } = this;
    if (json.peek() !== OPEN_BRACKET) throw invalidEntry(name, field, json.describe());
    json.open();
    const integers = [];
    while (json.hasNext(CLOSE_BRACKET, integers.length)) {
      const integer = json.integer();
      if (integer === null) throw invalidEntry(name, field, `in it ${json.describe()}`);
      integers.push(integer);
    }
    return integers;
  }
}

/** Whether a tab or a line break stands among the padding. */
function endsUnusually(text) {
  let end = text.length;
  while (text.charCodeAt(end - 1) === 0x20) end--;
  return /[\t\n\r]/.test(text.charAt(end - 1));
}

/** F7 for metadata. Keys are not kept in a list as well: there may be millions. */
class MetadataBuilder {
  constructor() {
    this.map = new Map();
    this.repeated = [];
  }

  add(key, value) {
    if (this.map.has(key)) this.repeated.push(key);
    this.map.set(key, value);
  }

  finish() {
    if (this.repeated.length > 0) throw duplicateMetadataKey(leastName(this.repeated), "F7");
    return this.map;
  }
}

/** The names that stand there more than once. */
function repeated(names) {
  const seen = new Set();
  return names.filter((name) => seen.size === seen.add(name).size);
}

function duplicateMetadataKey(key, rule) {
  return new Fault("duplicate-metadata-key", rule, `metadata key ${quoteName(key)}: it stands there twice`);
}

function invalidMetadata(reason) {
  return new Fault("invalid-metadata", "F6", reason);
}

const EXPECTED_IN_ENTRY = {
  "": "an object with dtype, shape and data_offsets",
  dtype: "a string",
  shape: "an array of integers",
  data_offsets: "an array of two integers",
};

function invalidEntry(tensor, field, found) {
  const place = field === "" ? "" : `field \`${field}\`: `;
  const reason = `${place}expected ${EXPECTED_IN_ENTRY[field]}, found ${found}`;
  return new Fault("invalid-entry", "F8", reason, { tensor });
}

function duplicateField(tensor, field) {
  return new Fault("duplicate-field", "F7", `field \`${field}\` stands there twice`, { tensor });
}

function missingField(tensor, field) {
  return new Fault("missing-field", "F8", `field \`${field}\` is missing`, { tensor });
}

function unknownDtype(tensor, dtype) {
  return new Fault("unknown-dtype", "F8", `unknown dtype ${quoteName(dtype)}`, { tensor });
}

// --- The header of `.bt` ---

/**
 * What the entries, dimensions and metadata pairs of one header may take, in bytes, and what Rust's reader needs for
 * each: five bytes of a file are enough for an entry, so that the length of the header alone does not bound memory.
 */
const ROOM_NBYTES = 100_000_000;
const ENTRY_NBYTES = 32;
const DIMENSION_NBYTES = 8;
const PAIR_NBYTES = 8;

function checkRoom(entries, dimensions, pairs) {
  const found = entries * ENTRY_NBYTES + dimensions * DIMENSION_NBYTES + pairs * PAIR_NBYTES;
  if (found > ROOM_NBYTES) throw headerTooLarge(found, ROOM_NBYTES);
}

function parseBinaryHeader(header) {
  return new BinaryHeaderReader(header).read();
}

class BinaryHeaderReader {
  constructor(header) {
    this.header = header;
    this.view = new DataView(header.buffer, header.byteOffset, header.byteLength);
    this.at = 0;
    this.raw = new RawHeader("bintensors");
  }

  read() {
    const option = this.byte("metadata option");
    if (option > 1) {
      throw new Fault("invalid-option", "B1", `first byte of the header: expected 0 or 1, found ${option}`);
    }
    if (option === 1) this.raw.metadata = this.metadata();
    this.entries();
    this.padding();
    return this.raw;
  }

  metadata() {
    // The lengths of key and value take a byte each.
    const count = this.count("metadata count", 2);
    checkRoom(0, 0, count);
    const metadata = new MetadataBuilder();
    for (let number = 0; number < count; number++) {
      metadata.add(this.string("metadata key"), this.string("metadata value"));
    }
    return metadata.finish();
  }

  entries() {
    // The name's length, dtype, rank, begin and end.
    const count = this.count("tensor count", 5);
    const pairs = this.raw.metadata?.size ?? 0;
    checkRoom(count, 0, pairs);
    for (let number = 0, dimensions = 0; number < count; number++) {
      const name = this.string("tensor name");
      const code = this.number("dtype");
      const dtype = DTYPE_OF_BINTENSORS.get(code);
      if (dtype === undefined) throw unknownDtype(name, String(code));
      const rank = this.count("rank", 1);
      dimensions += rank;
      checkRoom(count, dimensions, pairs);
      const shape = [];
      while (shape.length < rank) shape.push(this.number("dimension"));
      this.raw.add(name, dtype, shape, this.number("data range"), this.number("data range"));
    }
  }

  byte(reading) {
    if (this.at >= this.header.length) throw this.pastEnd(this.at, reading);
    return this.header[this.at++];
  }

  /** B2 and B3. */
  number(reading) {
    const begin = this.at;
    const tag = this.byte(reading);
    if (tag <= 250) return tag;
    if (tag > 253) throw this.invalidVarint(begin);
    const nbytes = tag === 251 ? 2 : tag === 252 ? 4 : 8;
    if (this.at + nbytes > this.header.length) throw this.pastEnd(begin, reading);
    const number =
      nbytes === 2
        ? this.view.getUint16(this.at, true)
        : nbytes === 4
          ? this.view.getUint32(this.at, true)
          : narrow(this.view.getBigUint64(this.at, true));
    const least = nbytes === 2 ? 251 : nbytes === 4 ? 2 ** 16 : 2 ** 32;
    if (number < least) throw this.invalidVarint(begin);
    this.at += nbytes;
    return number;
  }

  /** How many things follow, each of `least` bytes or more. B3: they must fit, so that no hostile count allocates. */
  count(reading, least) {
    const begin = this.at;
    const count = this.number(reading);
    if (count > Math.floor((this.header.length - this.at) / least)) throw this.pastEnd(begin, reading);
    return count;
  }

  string(reading) {
    const nbytes = this.count(reading, 1);
    const text = decode(this.header.subarray(this.at, this.at + nbytes), this.position(this.at), "F4", "file");
    this.at += nbytes;
    return text;
  }

  /** B4. */
  padding() {
    const { header } = this;
    let end = this.at;
    while (end < header.length && end < this.at + 7 && header[end] === 0x20) end++;
    if (end < header.length) {
      const found = `other bytes at byte ${this.position(end)} of the file`;
      throw new Fault("invalid-padding", "B4", `expected up to 7 spaces after the last entry, found ${found}`);
    }
  }

  position(at) {
    return PREFIX_NBYTES + at;
  }

  pastEnd(at, reading) {
    const reason = `${reading} at byte ${this.position(at)} of the file passes the end of the header`;
    return new Fault("unexpected-end", "B3", reason);
  }

  invalidVarint(at) {
    const reason = `number at byte ${this.position(at)} of the file is not in its shortest form, or too wide`;
    return new Fault("invalid-varint", "B2", reason);
  }
}

// --- The proof ---

/**
 * The header of a file, proven: the tensors cover the data exactly, in file order, without hole or overlap, every size
 * is shape times dtype, every name is there once.
 */
class Header {
  #byName;

  constructor(raw, byName, dataStart, fileSize) {
    this.format = raw.format;
    this.metadata = raw.metadata;
    this.tensors = raw.tensors;
    this.dataStart = dataStart;
    this.fileSize = fileSize;
    this.#byName = byName;
  }

  get(name) {
    return this.#byName.get(name);
  }

  has(name) {
    return this.#byName.has(name);
  }

  names() {
    return this.#byName.keys();
  }

  get size() {
    return this.tensors.length;
  }

  [Symbol.iterator]() {
    return this.tensors[Symbol.iterator]();
  }
}

/** Rules F7 and F9 to F12: the only way to a `Header`. */
function prove(raw, dataStart, fileSize) {
  // A binary header must list its tensors in the order of their data already.
  if (raw.format === "safetensors") sortByData(raw.tensors);
  const byName = new Map();
  for (const tensor of raw.tensors) byName.set(tensor.name, tensor);
  if (byName.size < raw.tensors.length) {
    const tensor = leastName(repeated(raw.tensors.map(({ name }) => name)));
    throw new Fault("duplicate-tensor", "F7", "two tensors have this name", { tensor });
  }
  proveRanges(raw.tensors, fileSize - dataStart);
  return new Header(raw, byName, dataStart, fileSize);
}

function byDataOrder(a, b) {
  if (a.begin !== b.begin) return a.begin < b.begin ? -1 : 1;
  return a.end === b.end ? 0 : a.end < b.end ? -1 : 1;
}

/** Most writers list them in this order already. */
function sortByData(tensors) {
  for (let number = 1; number < tensors.length; number++) {
    if (byDataOrder(tensors[number - 1], tensors[number]) > 0) {
      tensors.sort(byDataOrder);
      return;
    }
  }
}

/** F9 to F12, on tensors in the order of their data. */
function proveRanges(tensors, dataSize) {
  let covered = 0;
  for (let number = 0; number < tensors.length; number++) {
    const tensor = tensors[number];
    const nbytes = nbytesOf(tensor);
    if (sum(tensor.begin, nbytes) !== tensor.end) throw sizeMismatch(tensor, nbytes);
    if (tensor.begin !== covered) throw misplaced(tensors, number, covered);
    tensor.nbytes = nbytes;
    covered = tensor.end;
  }
  if (covered < dataSize) throw trailingBytes(covered, dataSize);
  if (covered > dataSize) throw truncated(tensors, covered, dataSize);
  // Only now: the faults above print dimensions as they are.
  for (const tensor of tensors) narrowShape(tensor);
}

/** F9. Bytes that a tensor takes. */
function nbytesOf(tensor) {
  const bits = DTYPES.get(tensor.dtype);
  let nbits = bits;
  let isEmpty = false;
  // Zeros are left out, so that the verdict does not depend on where they stand.
  for (const dim of tensor.shape) {
    if (dim === 0) isEmpty = true;
    else nbits *= Number(dim);
  }
  if (nbits > Number.MAX_SAFE_INTEGER) return exactNbytesOf(tensor, bits);
  if (isEmpty) return 0;
  if (nbits % 8 !== 0) throw badExtent(tensor, "partial-byte", `its ${nbits} bits end inside a byte`);
  return nbits / 8;
}

function exactNbytesOf(tensor, bits) {
  const dims = tensor.shape.map(BigInt);
  const nbits = dims.filter((dim) => dim !== 0n).reduce((product, dim) => product * dim, BigInt(bits));
  if (nbits > MAX_U64) throw badExtent(tensor, "size-overflow", "its size overflows 64 bits");
  if (dims.includes(0n)) return 0;
  if (nbits % 8n !== 0n) throw badExtent(tensor, "partial-byte", `its ${nbits} bits end inside a byte`);
  return narrow(nbits / 8n);
}

function narrowShape(tensor) {
  if (tensor.shape.some((dim) => typeof dim === "bigint")) {
    tensor.exactShape = tensor.shape.map(BigInt);
    tensor.shape = tensor.shape.map(Number);
  }
}

function badExtent(tensor, code, reason) {
  return new Fault(code, "F9", `shape ${showShape(tensor)}: ${reason}`, { tensor: tensor.name });
}

function sizeMismatch(tensor, expected) {
  const { name, begin, end } = tensor;
  const code = begin > end ? "reversed-range" : "size-mismatch";
  const found = begin > end ? 0 : difference(end, begin);
  const reason = `shape ${showShape(tensor)} needs ${expected} bytes, header gives ${begin}..${end}`;
  return new Fault(code, "F10", reason, { tensor: name, expected, found, begin, end });
}

/** F11: the tensor does not begin at `covered`, where the one before it ends. */
function misplaced(tensors, number, covered) {
  const { name, begin } = tensors[number];
  if (number > 0 && begin < covered) {
    const other = quoteName(tensors[number - 1].name);
    const reason = `begins at byte ${begin} of the data, before ${other} ends at ${covered}`;
    return new Fault("overlap", "F11", reason, { tensor: name, begin, end: covered });
  }
  const reason = `bytes ${covered}..${begin} of the data before it belong to no tensor`;
  return new Fault("hole", "F11", reason, { tensor: name, begin: covered, end: begin });
}

function truncated(tensors, expected, found) {
  const cut = tensors.find(({ end }) => end > found);
  const reason =
    `the file is ${difference(expected, found)} bytes short: ` +
    `expected ${expected} bytes of data, found ${found} — incomplete download?`;
  return new Fault("truncated", "F12", reason, { tensor: cut.name, expected, found });
}

function trailingBytes(expected, found) {
  const reason =
    `${difference(found, expected)} bytes follow the last tensor: ` +
    `expected ${expected} bytes of data, found ${found}`;
  return new Fault("trailing-bytes", "F12", reason, { expected, found });
}

function showShape({ shape, dtype }) {
  const dims = shape.slice(0, 16).join(", ");
  const more = shape.length > 16 ? `, … ${shape.length - 16} more` : "";
  return `[${dims}${more}] of ${dtype}`;
}

// --- Files of other kinds ---

/** What a file is that begins like this, and what to do about it; null where that is not known. */
function foreignKind(start) {
  // A broken file, but ours: a length below 4 GiB and then a brace. One of 640 bytes begins like a pickle.
  if (start[8] === OPEN_BRACE && start.subarray(4, 8).every((byte) => byte === 0)) return null;
  const bytes = latin1(start);
  const text = bytes.replace(/^[ \t\n\f\r]+/, "").replace(/^\xef\xbb\xbf/, "");
  const kind = FOREIGN.find(([, isIt]) => isIt(bytes, text));
  return kind === undefined ? null : kind[0];
}

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
  ["a PDF document", (bytes) => bytes.startsWith("%PDF-")],
  [
    "nothing but zeros where it begins, as an interrupted copy or a full disk leaves it — fetch it again",
    (bytes) => /^\0{8,}$/.test(bytes),
  ],
  [
    "a Python pickle, perhaps an old PyTorch checkpoint — convert it with `ingot convert` or torch.load",
    // Protocols 2 to 5. No opcode lies below `(`.
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

/** Bytes as characters, so that patterns can look for them. No more than the first 64 KiB: kinds begin early. */
function latin1(bytes) {
  let text = "";
  const end = Math.min(bytes.length, 1 << 16);
  // In parts, because each byte is an argument.
  for (let at = 0; at < end; at += 4096) text += String.fromCharCode(...bytes.subarray(at, Math.min(at + 4096, end)));
  return text;
}

/** `read`, whose faults say what the file is where `start` shows it. */
function namingForeign(start, read) {
  try {
    return read();
  } catch (fault) {
    const kind = fault instanceof Fault ? foreignKind(start) : null;
    if (kind === null) throw fault;
    const { expected, found } = fault.fields;
    throw new Fault("foreign-file", fault.rule, `this is ${kind} (${fault.message})`, { expected, found });
  }
}

// --- Headers in memory ---

function headerTooLarge(found, limit) {
  const reason = `header too large: expected at most ${limit} bytes, found ${found}`;
  return new Fault("header-too-large", "F2", reason, { expected: limit, found });
}

/** F1 to F3. Bytes of the length and the header. */
function headSizeOf(start, fileSize, limit) {
  if (start.length < PREFIX_NBYTES || fileSize < PREFIX_NBYTES) {
    const found = Math.min(fileSize, start.length);
    const reason = `too short for a header length: expected at least 8 bytes, found ${found}`;
    throw new Fault("too-short", "F1", reason, { expected: PREFIX_NBYTES, found });
  }
  const view = new DataView(start.buffer, start.byteOffset, PREFIX_NBYTES);
  const headerSize = narrow(view.getBigUint64(0, true));
  if (headerSize > limit) throw headerTooLarge(headerSize, limit);
  const headSize = headerSize + PREFIX_NBYTES;
  if (headSize > fileSize) throw headerPastEnd(headerSize, fileSize);
  return headSize;
}

function headerPastEnd(headerSize, fileSize) {
  const reason =
    `header passes the end of the file: expected ${headerSize} bytes after the first 8, ` +
    `found ${Math.max(0, fileSize - PREFIX_NBYTES)} — incomplete download?`;
  return new Fault("header-past-end", "F3", reason, { expected: headerSize + PREFIX_NBYTES, found: fileSize });
}

/** JSON begins with a brace or white space; what begins with another control character was not meant as JSON. */
function isBinary(first) {
  return first < 0x20 && first !== 0x09 && first !== 0x0a && first !== 0x0d;
}

function parse(start, options) {
  return namingForeign(start, () => {
    const headSize = headSizeOf(start, options.fileSize, options.limit);
    if (headSize > start.length) throw headerPastEnd(headSize - PREFIX_NBYTES, start.length);
    const header = start.subarray(PREFIX_NBYTES, headSize);
    const raw = isBinary(header[0]) ? parseBinaryHeader(header) : parseJsonHeader(header, options.strict);
    return prove(raw, headSize, options.fileSize);
  });
}

function limitOption(options, usual) {
  return Math.min(sizeOption(options.maxHeaderBytes ?? usual, "maxHeaderBytes"), HEADER_CEILING);
}

/**
 * Bytes at the start of a file that `parseHeader` needs. Asks for no more than the first 8, and the size of the file.
 */
export function headSize(start, options) {
  const bytes = bytesOf(start, "start");
  const fileSize = sizeOption(options?.fileSize, "fileSize");
  const limit = limitOption(options, MAX_HEADER_BYTES);
  return naming(options.path ?? null, () => namingForeign(bytes, () => headSizeOf(bytes, fileSize, limit)));
}

/** The header at the start of a file, of which `start` is all or at least the first `headSize` bytes. */
export function parseHeader(start, options = {}) {
  const bytes = bytesOf(start, "start");
  const fileSize = sizeOption(options.fileSize ?? bytes.length, "fileSize");
  const limit = limitOption(options, MAX_HEADER_BYTES);
  return naming(options.path ?? null, () => parse(bytes, { fileSize, limit, strict: options.strict === true }));
}

// --- The index of a sharded checkpoint ---

/** I1. What the Hub's own reader takes; the largest index known has 60 MB, for 497,000 tensors. */
export const MAX_INDEX_BYTES = 250_000_000;

/** I7. */
const MAX_SHARDS = 100_000;

/** I3. Largest value beside the weight map, in bytes. */
const MAX_VALUE_NBYTES = 4 << 20;

/** An index that keeps rules I1 to I8. Whether the shards hold what it says is for whoever reads them. */
class ShardIndex {
  constructor(weightMap, shards, metadataText) {
    this.weightMap = weightMap;
    this.shards = shards;
    this.metadataText = metadataText;
    // No key is there twice, so that nothing is lost.
    this.metadata = metadataText === null ? null : JSON.parse(metadataText);
  }

  /** Bytes that all tensors take, as the index says; nobody checked it. */
  get totalSize() {
    const total = this.metadata?.total_size;
    return Number.isSafeInteger(total) && total >= 0 ? total : null;
  }
}

/** The index in `bytes`, which are all of it. */
export function parseIndex(bytes, options = {}) {
  return naming(options.path ?? null, () => readIndexText(bytesOf(bytes, "bytes")));
}

function readIndexText(bytes) {
  if (bytes.length > MAX_INDEX_BYTES) throw indexTooLarge(bytes.length);
  return new IndexReader(new Json(decode(bytes, 0, "I2", "index"), 0, "I3", "index")).read();
}

function indexTooLarge(found) {
  const reason = `index too large: expected at most ${MAX_INDEX_BYTES} bytes, found ${found}`;
  return new Fault("index-too-large", "I1", reason, { expected: MAX_INDEX_BYTES, found });
}

class IndexReader {
  constructor(json) {
    this.json = json;
    /** The values of the fields that were read. */
    this.fields = new Map();
    this.tensors = new Map();
    /** Tensors that were there before, each with the shard that is named for it now. */
    this.repeated = [];
    this.shards = new Set();
  }

  read() {
    const { json } = this;
    if (json.peek() !== OPEN_BRACE) throw json.unexpected("an object");
    json.open();
    for (let count = 0; json.hasNext(CLOSE_BRACE, count); count++) {
      const field = json.key();
      if (field === "weight_map") this.weightMap();
      else if (field === "metadata") this.metadata();
      else this.unknown(field);
    }
    json.expectEnd();
    return this.finish();
  }

  finish() {
    if (!this.fields.has("weight_map")) {
      throw new Fault("missing-weight-map", "I5", "the index has no `weight_map`, which says where tensors are");
    }
    refuseCollisions(this.shards);
    if (this.repeated.length > 0) throw this.tensorTwice();
    return new ShardIndex(this.tensors, [...this.shards].sort(compareNames), this.fields.get("metadata") ?? null);
  }

  /** I4. */
  tensorTwice() {
    const tensor = leastName(this.repeated.map(([name]) => name));
    const first = this.tensors.get(tensor);
    const [, second] = this.repeated.find(([name]) => name === tensor);
    const where = first === second ? quoteName(first) : `${quoteName(first)} and in ${quoteName(second)}`;
    return new Fault("duplicate-tensor", "I4", `it stands there twice, in ${where}`, { tensor });
  }

  /** I4. */
  once(field) {
    if (this.fields.has(field)) {
      throw new Fault("duplicate-field", "I4", `field ${quoteName(field)} stands there twice`);
    }
  }

  weightMap() {
    const { json } = this;
    this.once("weight_map");
    if (json.peek() !== OPEN_BRACE) throw invalidField("weight_map", this.kind("weight_map"));
    this.fields.set("weight_map", null);
    json.open();
    for (let count = 0; json.hasNext(CLOSE_BRACE, count); count++) this.tensor();
  }

  tensor() {
    const { json } = this;
    const name = json.key();
    if (json.peek() !== QUOTE) {
      const reason = `expected the name of a file, found ${this.kind(name)}`;
      throw new Fault("invalid-shard", "I5", reason, { tensor: name });
    }
    const shard = json.string();
    if (!this.shards.has(shard)) this.addShard(shard, name);
    if (name === METADATA_KEY) {
      throw new Fault("reserved-name", "I5", "the name is reserved for metadata", { tensor: name });
    }
    if (this.tensors.has(name)) this.repeated.push([name, shard]);
    else this.tensors.set(name, shard);
  }

  /** I6 and I7. */
  addShard(shard, tensor) {
    refuseShardName(shard, tensor);
    if (this.shards.size === MAX_SHARDS) {
      throw new Fault("too-many-shards", "I7", `the index names more than ${MAX_SHARDS} files`);
    }
    this.shards.add(shard);
  }

  metadata() {
    this.once("metadata");
    const duplicates = [];
    const text = this.value("metadata", duplicates);
    if (duplicates.length > 0) throw duplicateMetadataKey(duplicates[0], "I4");
    if (text !== "null" && !text.startsWith("{")) throw invalidField("metadata", kindOf(text));
    this.fields.set("metadata", text === "null" ? null : text);
  }

  unknown(field) {
    this.value(field);
    this.once(field);
    this.fields.set(field, null);
  }

  /** A value, as it is spelled. */
  value(field, duplicates) {
    const { json } = this;
    const begin = json.at;
    json.peek();
    const spelled = json.at;
    json.skip(duplicates);
    const nbytes = (json.at - begin) * 3 < MAX_VALUE_NBYTES ? 0 : utf8Length(json.text.slice(begin, json.at));
    if (nbytes >= MAX_VALUE_NBYTES) {
      const reason = `field ${quoteName(field)}: value too large: expected at most ${MAX_VALUE_NBYTES} bytes`;
      throw new Fault("value-too-large", "I3", reason);
    }
    return json.text.slice(spelled, json.at);
  }

  kind(field) {
    return kindOf(this.value(field));
  }
}

function kindOf(text) {
  const truth = "true or false";
  const kinds = { n: "null", t: truth, f: truth, '"': "a string", "[": "an array", "{": "an object" };
  return kinds[text[0]] ?? "a number";
}

function invalidField(field, found) {
  return new Fault("invalid-field", "I5", `field \`${field}\`: expected an object, found ${found}`);
}

/** I6. An index comes from whoever wrote the checkpoint, and what it names must lie beside it on every system. */
function refuseShardName(shard, tensor) {
  const reason = shardNameFault(shard);
  if (reason !== null) {
    const message = `file name ${quoteName(shard)} refused: ${reason}`;
    throw new Fault("invalid-shard-name", "I6", message, { tensor });
  }
}

function shardNameFault(shard) {
  if (shard === "") return "it is empty";
  if (shard.startsWith("/")) return "it is an absolute path";
  if (shard.startsWith("~")) return "it begins with `~`, which shells take for a home directory";
  if (shard.includes("\\")) return "it has a backslash, which parts directories on Windows";
  if (shard.includes(":")) return "it has a colon, which names a drive or a stream on Windows";
  if (/\p{Cc}/u.test(shard)) return "it has a control character";
  // Bytes that Linux takes in a path, and in a part of it.
  if (utf8Length(shard) > 4095) return "it is longer than a file's name can be";
  return shard.split("/").map(partFault).find((reason) => reason !== null) ?? null;
}

function partFault(part) {
  if (part === "") return "it has an empty part";
  if (part === "." || part === "..") return "it has a part `.` or `..`";
  if (utf8Length(part) > 255) return "it is longer than a file's name can be";
  if (/[. ]$/.test(part)) return "a part of it ends with a dot or a space, which Windows drops";
  // Windows knows these in every directory and with every extension.
  const stem = part.split(".", 1)[0].replace(/\p{White_Space}+$/u, "");
  if (/^(?:con|prn|aux|nul|conin\$|conout\$|(?:com|lpt)[0-9¹²³])$/i.test(stem)) {
    return "it is the name of a device on Windows";
  }
  return null;
}

/** I8: no two shards are one file where case does not count. */
function refuseCollisions(shards) {
  const folded = new Map();
  for (const shard of [...shards].sort(compareNames)) {
    // Character by character, because the small form of a final sigma depends on what stands before it.
    const fold = Array.from(shard, (character) => character.toLowerCase()).join("");
    if (folded.has(fold)) {
      const [first, second] = [folded.get(fold), shard].map(quoteName);
      throw new Fault("shard-collision", "I8", `files ${first} and ${second} are one where case does not count`);
    }
    folded.set(fold, shard);
  }
}

// --- What the options say ---

/** Headers that are fetched at a time, as the Hub's own reader does. */
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

/** What `work` gives for each item, some at a time. The first that fails ends them all. */
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

/** The header of a file that was opened: by one more read where what was read on opening does not hold all of it. */
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

/** The index of a sharded checkpoint, from any of the same sources. Its shards are not looked at. */
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
  return namingLater(showUrl(url), async () =>
    readIndexText(await getWhole(url, settings, indexTooLarge, MAX_INDEX_BYTES)),
  );
}

// --- Models of one or many files ---

/** The headers of a model, and its index where it is sharded. */
class Model {
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

  /** Reads a tensor, or rows of it, as numbers. */
  async readTensor(name, { rows, signal } = {}) {
    const { shard, position } = tensorRange(this, name);
    const { tensor } = this.get(name);
    return readElements(this.#sources.get(shard), position, tensor, rows, signal);
  }

  /** All tensors, file by file, in the order of their data. */
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
 * The headers of a model: of one file, or of all shards that an index names. `source` is a URL of a file, an index or
 * a directory, an address of the Hub, a `File`, or several of them, as they come from a folder that was dropped; or what
 * `openSource` gave, one or several.
 */
export async function readModel(source, options = {}) {
  const settings = new Settings(options);
  const folder = await folderOf(source, settings);
  const { index, name } = await folder.locate();
  const config = folder.config();
  // Both are asked for at once; the one that nobody waits for yet must not count as unhandled.
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

/** What a folder holds that can be opened without a name, in the order in which it is looked for. */
const SINGLE_FILE = "model.safetensors";
const INDEX_FILE = "model.safetensors.index.json";

/** Bytes of a `config.json` that are read, as the Hub's own reader has it. */
const MAX_CONFIG_BYTES = 10_000_000;

function isIndexName(name) {
  return name.endsWith(".json");
}

function configTooLarge(found) {
  const reason = `configuration too large: expected at most ${MAX_CONFIG_BYTES} bytes, found ${found}`;
  return new Fault("config-too-large", null, reason, { expected: MAX_CONFIG_BYTES, found });
}

/** The configuration in `bytes`: another program's file, whose JSON is read as that program reads it. */
function parseConfig(bytes) {
  let config;
  try {
    config = JSON.parse(new TextDecoder().decode(bytes));
  } catch (error) {
    throw new Fault("invalid-config", null, `invalid JSON in the configuration: ${escapeName(error.message)}`);
  }
  if (!isObject(config)) throw new Fault("invalid-config", null, "the configuration is no JSON object");
  return config;
}

function isObject(value) {
  return typeof value === "object" && value !== null && !Array.isArray(value);
}

/** Files beside the one that was given, on a server. */
class RemoteFolder {
  constructor(url, settings) {
    this.url = url;
    this.settings = settings;
    this.path = showUrl(url);
    this.read = new Map();
  }

  /** The index, or the name of the only file. */
  async locate() {
    if (isIndexName(this.url.pathname)) return { index: await this.indexAt(this.url), name: null };
    if (!this.url.pathname.endsWith("/")) return { index: null, name: lastPart(this.url) };
    return (await this.single()) ?? (await this.sharded()) ?? this.nothing();
  }

  async single() {
    const url = new URL(SINGLE_FILE, this.url);
    const opened = await unlessMissing(openedAt(url, this.settings));
    if (opened === null) return null;
    // Looking for it has read it.
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

  /** An index whose names become parts of URLs: all of them are looked at before any is asked for. */
  async indexAt(url) {
    const index = await indexAt(url, this.settings);
    naming(showUrl(url), () => index.shards.forEach(refuseEncodedName));
    return index;
  }

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

/** What a promise gives, and null where the server has no such file. */
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
/** How often a name may be decoded on its way: by a server and by what stands before it, once by each. */
const MAX_DECODINGS = 5;

/** I6 for a name that becomes part of a URL: what servers make of it by decoding keeps the rule too. */
function refuseEncodedName(shard) {
  let name = shard;
  for (let times = 0; name.search(ESCAPES_OF_URLS) >= 0; times++) {
    // A `%` without two digits stands for itself, and what is no text for something that no rule is about.
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
    /** What a name in the index is relative to. */
    this.base = "";
    this.path = null;
  }

  async locate() {
    const paths = [...this.files.keys()];
    const indexes = paths.filter((path) => path.endsWith(".index.json"));
    const candidates = indexes.length > 0 ? indexes : paths.filter((path) => /\.(?:safetensors|bt)$/.test(path));
    // A name that says nothing is enough when there is only one.
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

/** An index speaks for its shards, and nobody takes its word: each holds what the index says, and nothing else. */
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

/** Where the bytes of a tensor lie: its file in a model, the position in the file, and how many bytes. */
export function tensorRange(source, name) {
  const found = source instanceof Model ? source.get(name) : { shard: null, tensor: source.get(name) };
  if (found?.tensor === undefined) {
    const names = source instanceof Model ? Array.from(source, ({ tensor }) => tensor.name) : source.names();
    const near = nearestName(names, name);
    const reason = `the file has none of this name${near === null ? "" : ` — did you mean ${quoteName(near)}?`}`;
    throw new Fault("unknown-tensor", null, reason, { tensor: name }).toError(source.path ?? null);
  }
  const { shard, tensor } = found;
  const header = shard === null ? source : source.shards.get(shard);
  return { shard, position: header.dataStart + tensor.begin, nbytes: tensor.nbytes };
}

// --- Parameter counts ---

/**
 * How many parameters there are, by dtype and in all, as huggingface.js counts them: those of the model before it was
 * quantised, without the scales and zero points that quantisation adds. `count: "stored"` counts elements as they are
 * in the file instead.
 */
export function parameterCount(source, options = {}) {
  const { count = "logical" } = options;
  if (count !== "logical" && count !== "stored") throw new TypeError('count must be "logical" or "stored"');
  const headers = source instanceof Model ? [...source.shards.values()] : [source];
  if (count === "stored") return totalled(storedCount(headers), undefined);
  const config = options.config ?? (source instanceof Model ? source.config : null);
  const said = source instanceof Model && source.index !== null ? source.index.metadata : headers[0].metadata;
  const declared = said instanceof Map ? said.get("total_parameters") : said?.total_parameters;
  return totalled(logicalCount(headers, config), declared);
}

function totalled(counts, declared) {
  const computed = [...counts.values()].reduce((total, count) => total + count, 0);
  const parameterTotal = Math.min(declaredTotal(declared) ?? Infinity, computed);
  return { parameterCount: Object.fromEntries(counts), parameterTotal };
}

/** What `total_parameters` says, where it is a number. Writers have written it as text, too. */
function declaredTotal(declared) {
  if (!declared || (typeof declared !== "string" && typeof declared !== "number")) return null;
  // As huggingface.js reads it: the digits at the start, so that "1e9" is 1.
  const total = typeof declared === "string" ? parseInt(declared, 10) : Math.floor(declared);
  return total >= 0 ? total : null;
}

/** Exact: a file of a safe size has more than 2^53 elements only if they are packed, and then their count is even. */
function elements(tensor) {
  return tensor.nbytes === 0 ? 0 : tensor.shape.reduce((product, dim) => product * dim, 1);
}

function storedCount(headers) {
  const counts = new Map();
  for (const header of headers) {
    for (const tensor of header.tensors) add(counts, tensor.dtype, elements(tensor));
  }
  return counts;
}

function logicalCount(headers, config) {
  const scheme = quantisation(config, headers);
  const counts = new Map();
  for (const header of headers) {
    for (const tensor of header.tensors) {
      // The scales of the microscaling formats; and a scalar is no parameter.
      if (tensor.dtype === "F8_E8M0" || scheme.isAuxiliary(tensor) || tensor.shape.length === 0) continue;
      add(counts, tensor.dtype, unpacked(elements(tensor), scheme.packing(tensor)));
    }
  }
  return counts;
}

function add(counts, dtype, count) {
  counts.set(dtype, (counts.get(dtype) ?? 0) + count);
}

/** `count` elements of which each holds `container / bits` parameters, to the nearest. */
function unpacked(count, { container, bits }) {
  if (container === bits) return count;
  const numerator = 2n * BigInt(count) * BigInt(container) + BigInt(bits);
  return Number(numerator / (2n * BigInt(bits)));
}

const UNPACKED = { container: 1, bits: 1 };

const CONTAINER_BITS = new Map(Object.entries({ U8: 8, I8: 8, U16: 16, I16: 16, U32: 32, I32: 32 }));

/** That elements of an integer dtype hold several parameters of `bits` each. */
function packed(dtype, bits) {
  const container = CONTAINER_BITS.get(dtype);
  const isPacked = container !== undefined && Number.isSafeInteger(bits) && bits > 0 && bits < container;
  return isPacked ? { container, bits } : UNPACKED;
}

function times(factor) {
  return { container: factor, bits: 1 };
}

/** What comes after the last dot, and what before it. */
function suffixOf(name) {
  return name.slice(name.lastIndexOf(".") + 1);
}

function moduleOf(name) {
  return name.slice(0, Math.max(0, name.lastIndexOf(".")));
}

const AUXILIARY = new Set([
  "weight_scale",
  "weight_scale_inv",
  "weight_scale_2",
  "weight_global_scale",
  "weight_zero_point",
  "input_scale",
  "input_global_scale",
  "input_zero_point",
  "zero_point",
  "weight_shape",
  "weight_g_idx",
]);

const NOT_QUANTISED = { isAuxiliary: () => false, packing: () => UNPACKED };

/** How a model was quantised, as its `config.json` says: which tensors are no parameters, and which hold several. */
function quantisation(config, headers) {
  const settings = quantisationConfig(config);
  if (settings === null) return NOT_QUANTISED;
  const method = (METHODS[settings.quant_method] ?? METHODS.other)(settings, config, headers);
  const isQuantised = quantisedNames(settings);
  return {
    isAuxiliary: (tensor) => AUXILIARY.has(suffixOf(tensor.name)) || method.isAuxiliary(tensor, isQuantised),
    packing: (tensor) => (isQuantised(tensor.name) ? method.packing(tensor) : UNPACKED),
  };
}

function quantisationConfig(config) {
  for (const place of [config, config?.text_config]) {
    if (!isObject(place)) continue;
    const found = mlxConfig(place) ?? (isObject(place.quantization_config) ? place.quantization_config : null);
    if (found !== null) return found;
  }
  return null;
}

/** mlx writes `quantization`, without a method, and the same again under the usual name. */
function mlxConfig(place) {
  for (const settings of [place.quantization, place.quantization_config]) {
    if (!isObject(settings) || settings.quant_method !== undefined) continue;
    if ("group_size" in settings && "bits" in settings) return { ...settings, quant_method: "mlx" };
  }
  return null;
}

/** Whether a module is quantised: it is unless a list in the configuration leaves it out. */
function quantisedNames(settings) {
  const ignored = strings(settings.ignore).map(targetMatcher);
  const kept = strings(settings.modules_to_not_convert);
  return (name) => {
    const weight = name.lastIndexOf(".weight");
    const module = weight < 0 ? name : name.slice(0, weight);
    if (ignored.some((matches) => matches(module))) return false;
    return !kept.some((pattern) => matchesGlob(`*${pattern}*`, name));
  };
}

function strings(list) {
  return Array.isArray(list) ? list.filter((item) => typeof item === "string") : [];
}

/** A target of compressed-tensors: a name, or after `re:` a pattern, of which the common part is understood. */
function targetMatcher(target) {
  if (!target.startsWith("re:")) return (module) => module === target;
  const glob = globOf(target.slice(3));
  return glob === null ? () => false : (module) => matchesGlob(glob, module);
}

/** The glob that says what a regular expression does; null where none does. A stranger wrote it, so it is never run. */
function globOf(pattern) {
  const isAnchored = pattern.endsWith("$");
  const body = pattern.replace(/^\^/, "").replace(/\$$/, "") + (isAnchored ? "" : ".*");
  let glob = "";
  for (let at = 0; at < body.length; ) {
    if (body.startsWith(".*", at)) {
      glob += "*";
      at += 2;
    } else if (body.startsWith("\\.", at)) {
      glob += ".";
      at += 2;
    } else if (/[\\^$.*+?()[\]{}|]/.test(body[at])) {
      return null;
    } else {
      glob += body[at++];
    }
  }
  return glob;
}

/** Whether all of `text` is as `glob` says, in which `*` is any text. In time of their lengths' product at most. */
function matchesGlob(glob, text) {
  let [at, place, star, resume] = [0, 0, -1, 0];
  while (at < text.length) {
    if (glob[place] === "*") {
      star = place++;
      resume = at;
    } else if (place < glob.length && glob[place] === text[at]) {
      place++;
      at++;
    } else if (star >= 0) {
      // The last star takes one character more.
      place = star + 1;
      at = ++resume;
    } else {
      return false;
    }
  }
  return /^\**$/.test(glob.slice(place));
}

/** By `quant_method`: which tensors are no parameters beside those of all methods, and how the others are packed. */
const METHODS = {
  __proto__: null,

  mxfp4: () => ({
    isAuxiliary: ({ dtype, name }) => dtype === "U8" && suffixOf(name).endsWith("_scales"),
    packing: ({ dtype, name }) => (dtype === "U8" && name.includes("_blocks") ? times(2) : UNPACKED),
  }),

  gptq: packedInWords,
  awq: packedInWords,

  "compressed-tensors": (settings) => {
    const groupOf = targetGroups(settings);
    return {
      isAuxiliary: () => false,
      packing: ({ dtype, name }) => {
        const { format, bits } = groupOf(moduleOf(name));
        return format.endsWith("pack-quantized") ? packed(dtype, bits) : UNPACKED;
      },
    };
  },

  fp8: (settings, config) => {
    const bits = expertBits(settings, config);
    const isExpert = (name) => name.includes(".experts.") && !name.includes("shared_experts");
    return {
      isAuxiliary: () => false,
      packing: ({ dtype, name }) => (isExpert(name) ? packed(dtype, bits) : UNPACKED),
    };
  },

  bitsandbytes: (settings) => ({
    isAuxiliary: ({ name }) => {
      const suffix = suffixOf(name);
      return BITSANDBYTES_STATE.has(suffix) || suffix.startsWith("bitsandbytes__");
    },
    packing: ({ dtype }) => (settings.load_in_4bit && dtype === "U8" ? times(2) : UNPACKED),
  }),

  mlx: (settings, _, headers) => mlxMethod(settings, headers),

  other: (settings) => ({
    isAuxiliary: () => false,
    packing: ({ dtype }) => {
      const isFourBits = settings.load_in_4bit || settings.bits === 4;
      return isFourBits && dtype === "U8" ? times(2) : UNPACKED;
    },
  }),
};

const BITSANDBYTES_STATE = new Set(["absmax", "quant_map", "nested_absmax", "nested_quant_map"]);

/** gptq and awq: as many parameters in a word of 32 bits as fit. */
function packedInWords({ bits = 4 }) {
  const state = new Set(["qzeros", "g_idx", "scales"]);
  return {
    isAuxiliary: ({ name }, isQuantised) => state.has(suffixOf(name)) && isQuantised(name),
    packing: ({ dtype, name }) => {
      if (suffixOf(name) === "qweight") return times(bits > 0 ? Math.max(1, Math.floor(32 / bits)) : 1);
      return dtype === "U8" && (bits === 4 || bits === 2) ? times(8 / bits) : UNPACKED;
    },
  };
}

/** Of a module: the format that its group of compressed-tensors has, and the bits of its weights. */
function targetGroups(settings) {
  const groups = (isObject(settings.config_groups) ? Object.values(settings.config_groups) : [])
    .filter(isObject)
    .map((group) => ({ ...group, matchers: strings(group.targets).map(targetMatcher) }));
  return (module) => {
    const group = groups.find(({ matchers }) => matchers.some((matches) => matches(module)));
    const format = String(group?.format ?? settings.format ?? "");
    const bits = group?.weights?.num_bits ?? groups[0]?.weights?.num_bits ?? /\d+/.exec(format)?.[0] ?? 4;
    return { format, bits: Number(bits) };
  };
}

const BITS_BY_NAME = new Map(Object.entries({ nvfp4: 4, mxfp4: 4, fp4: 4, int4: 4, uint4: 4, nf4: 4, int2: 2 }));

function expertBits(settings, config) {
  const ofModel = config?.expert_dtype ?? config?.text_config?.expert_dtype;
  return BITS_BY_NAME.get(settings.expert_dtype ?? ofModel ?? settings.store_dtype);
}

function mlxMethod(settings, headers) {
  // Of all shards: a weight and its scales may lie in two.
  const names = new Set(headers.flatMap((header) => [...header.names()]));
  const quantised = (module) => {
    const override = Object.hasOwn(settings, module) ? settings[module] : null;
    if (override === false) return null;
    const { mode = "affine", bits, group_size: groupSize } = { ...settings, ...(isObject(override) ? override : {}) };
    const isComplete = names.has(`${module}.scales`) && (mode !== "affine" || names.has(`${module}.biases`));
    return isComplete && isMlxBits(mode, bits, groupSize) ? { mode, bits } : null;
  };
  return {
    isAuxiliary: ({ name }) => {
      const suffix = suffixOf(name);
      if (suffix !== "scales" && suffix !== "biases") return false;
      const module = quantised(moduleOf(name));
      return module !== null && (suffix === "scales" || module.mode === "affine");
    },
    packing: ({ dtype, name }) => {
      const module = dtype === "U32" && suffixOf(name) === "weight" ? quantised(moduleOf(name)) : null;
      return module === null ? UNPACKED : packed(dtype, module.bits);
    },
  };
}

function isMlxBits(mode, bits, groupSize) {
  if (mode === "affine") return [2, 3, 4, 5, 6, 8].includes(bits) && [32, 64, 128].includes(groupSize);
  return Number.isSafeInteger(bits) && bits > 0 && bits <= 32;
}
