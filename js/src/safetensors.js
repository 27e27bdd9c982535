// Parses the header of a `.safetensors` file: rules F4 to F8 of FORMAT.md.

import { Fault, quoteName } from "./errors.js";
import { CLOSE_BRACE, CLOSE_BRACKET, Json, OPEN_BRACE, OPEN_BRACKET, QUOTE, utf8Text } from "./json.js";
import {
  DTYPES,
  duplicateMetadataKey,
  METADATA_KEY,
  MetadataBuilder,
  PREFIX_NBYTES,
  RawHeader,
  unknownDtype,
} from "./raw.js";

export function parseJsonHeader(header, isStrict) {
  const text = utf8Text(header, PREFIX_NBYTES, "F4", "file");
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
    /** The first deviation that a strict reader rejects. */
    this.unusual = null;
    /** For each dtype in the file, the text with which a compact entry begins. */
    this.beginnings = [];
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
    if (!this.compactEntry(name)) this.anyEntry(name);
  }

  /**
   * Reads an entry as writers write it: without white space, and with the fields in this order. For any other, returns
   * false and has read nothing.
   */
  compactEntry(name) {
    const { json } = this;
    const begin = json.at;
    for (const { dtype, beginning } of this.beginnings) {
      if (!json.take(beginning)) continue;
      const shape = json.plainIntegers();
      const first = shape !== null && json.take(',"data_offsets":[') ? json.plainInteger() : -1;
      const last = first >= 0 && json.take(",") ? json.plainInteger() : -1;
      if (last < 0 || !json.take("]}")) break;
      this.raw.add(name, dtype, shape, first, last);
      return true;
    }
    json.at = begin;
    return false;
  }

  anyEntry(name) {
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
    if (this.beginnings.every((known) => known.dtype !== dtype)) {
      this.beginnings.push({ dtype, beginning: `{"dtype":"${dtype}","shape":[` });
    }
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

/** Whether the padding contains a tab or a line break. */
function endsUnusually(text) {
  let end = text.length;
  while (text.charCodeAt(end - 1) === 0x20) end--;
  return /[\t\n\r]/.test(text.charAt(end - 1));
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
  return new Fault("duplicate-field", "F7", `field \`${field}\` occurs twice`, { tensor });
}

function missingField(tensor, field) {
  return new Fault("missing-field", "F8", `field \`${field}\` is missing`, { tensor });
}
