// Parses the index of a sharded checkpoint: rules I1 to I8 of FORMAT.md.

import { compareNames, Fault, leastName, naming, quoteName } from "./errors.js";
import { CLOSE_BRACE, Json, OPEN_BRACE, QUOTE, utf8Length, utf8Text } from "./json.js";
import { duplicateMetadataKey, METADATA_KEY } from "./raw.js";
import { bytesOf } from "./source.js";

/** I1. The limit of the Hub's own reader; the largest known index has 60 MB, for 497,000 tensors. */
export const MAX_INDEX_BYTES = 250_000_000;

/** I7. */
const MAX_SHARDS = 100_000;

/** I3. The largest value of another field, in bytes. */
const MAX_VALUE_NBYTES = 4 << 20;

/** An index that satisfies rules I1 to I8. Its shards are not checked: `readModel` compares them. */
class ShardIndex {
  constructor(weightMap, shards, metadataText) {
    this.weightMap = weightMap;
    this.shards = shards;
    this.metadataText = metadataText;
    // No key occurs twice, so nothing is lost.
    this.metadata = metadataText === null ? null : JSON.parse(metadataText);
  }

  /** The size of all tensors in bytes according to the index. It is not checked. */
  get totalSize() {
    const total = this.metadata?.total_size;
    return Number.isSafeInteger(total) && total >= 0 ? total : null;
  }
}

/** Parses the index in `bytes`, which must be the whole file. */
export function parseIndex(bytes, options = {}) {
  return naming(options.path ?? null, () => readIndexText(bytesOf(bytes, "bytes")));
}

export function readIndexText(bytes) {
  if (bytes.length > MAX_INDEX_BYTES) throw indexTooLarge(bytes.length);
  return new IndexReader(new Json(utf8Text(bytes, 0, "I2", "index"), 0, "I3", "index")).read();
}

export function indexTooLarge(found) {
  const reason = `index too large: expected at most ${MAX_INDEX_BYTES} bytes, found ${found}`;
  return new Fault("index-too-large", "I1", reason, { expected: MAX_INDEX_BYTES, found });
}

class IndexReader {
  constructor(json) {
    this.json = json;
    /** The values of the fields read so far. */
    this.fields = new Map();
    this.tensors = new Map();
    /** Tensors that occurred before, each with the shard of its later entry. */
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
      throw new Fault("missing-weight-map", "I5", "the index has no `weight_map`, which maps tensors to files");
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
    return new Fault("duplicate-tensor", "I4", `it occurs twice, in ${where}`, { tensor });
  }

  /** I4. */
  once(field) {
    if (this.fields.has(field)) {
      throw new Fault("duplicate-field", "I4", `field ${quoteName(field)} occurs twice`);
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

  /** A value in the spelling of the file. */
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

/** I6. An index may come from an untrusted author. Its file names must stay below its directory on every system. */
function refuseShardName(shard, tensor) {
  const reason = shardNameFault(shard);
  if (reason !== null) {
    const message = `file name ${quoteName(shard)} refused: ${reason}`;
    throw new Fault("invalid-shard-name", "I6", message, { tensor });
  }
}

export function shardNameFault(shard) {
  if (shard === "") return "it is empty";
  if (shard.startsWith("/")) return "it is an absolute path";
  if (shard.startsWith("~")) return "it begins with `~`, which shells take for a home directory";
  if (shard.includes("\\")) return "it has a backslash, which separates directories on Windows";
  if (shard.includes(":")) return "it has a colon, which names a drive or a stream on Windows";
  if (/\p{Cc}/u.test(shard)) return "it has a control character";
  // Limits of Linux for a path, and for a part of it, in bytes.
  if (utf8Length(shard) > 4095) return "it is longer than a file's name can be";
  return shard.split("/").map(partFault).find((reason) => reason !== null) ?? null;
}

function partFault(part) {
  if (part === "") return "it has an empty part";
  if (part === "." || part === "..") return "it has a part `.` or `..`";
  if (utf8Length(part) > 255) return "it is longer than a file's name can be";
  if (/[. ]$/.test(part)) return "a part of it ends with a dot or a space, which Windows drops";
  // Windows reserves these in every directory and with every extension.
  const stem = part.split(".", 1)[0].replace(/\p{White_Space}+$/u, "");
  if (/^(?:con|prn|aux|nul|conin\$|conout\$|(?:com|lpt)[0-9¹²³])$/i.test(stem)) {
    return "it is the name of a device on Windows";
  }
  return null;
}

/** I8: no two shards are the same file where names ignore case. */
function refuseCollisions(shards) {
  const folded = new Map();
  for (const shard of [...shards].sort(compareNames)) {
    // Character by character, because the lower case of a final sigma depends on the characters before it.
    const fold = Array.from(shard, (character) => character.toLowerCase()).join("");
    if (folded.has(fold)) {
      const [first, second] = [folded.get(fold), shard].map(quoteName);
      throw new Fault("shard-collision", "I8", `files ${first} and ${second} are the same if case is ignored`);
    }
    folded.set(fold, shard);
  }
}
