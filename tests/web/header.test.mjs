// Headers in memory: the vectors of all readers, and files that ingot writes.

import assert from "node:assert/strict";
import { test } from "node:test";

import { compareNames, headSize, parseHeader, tensorRange } from "../../js/index.js";
import { bytes, errorOf, fileOf, fileWith, oracle, pairs, rows } from "./oracle.mjs";

const VECTORS = oracle("vectors");

function options(vector, more = {}) {
  return vector.limit === null ? more : { maxHeaderBytes: vector.limit, ...more };
}

for (const vector of VECTORS) {
  const file = bytes(vector.file);

  test(`${vector.name} gets its verdict`, async () => {
    const read = () => parseHeader(file, options(vector));
    if (vector.code === null) {
      const header = read();
      assert.equal(header.format, vector.format);
      assert.equal(header.fileSize, file.length);
      if (vector.tensors !== null) assert.deepEqual(rows(header), vector.tensors);
      if (vector.metadata !== null) assert.deepEqual(pairs(header.metadata), vector.metadata);
      return;
    }
    const error = await errorOf(read);
    assert.equal(error.code, vector.code);
    assert.equal(error.rule, vector.rule);
  });

  test(`${vector.name} gets the same verdict when only the header is at hand`, async () => {
    const known = options(vector, { fileSize: file.length });
    const read = () => parseHeader(file.subarray(0, headSize(file.subarray(0, 8), known)), known);
    if (vector.code === null) {
      read();
      return;
    }
    const { code } = await errorOf(read);
    // The format of a foreign file may be visible only in later bytes.
    assert.ok(code === vector.code || vector.code === "foreign-file", code);
  });

  test(`${vector.name} gets its verdict from a strict reader`, async () => {
    const read = () => parseHeader(file, options(vector, { strict: true }));
    if (vector.strictCode === null) read();
    else assert.equal((await errorOf(read)).code, vector.strictCode);
  });
}

test("a refusal says what ingot says, in Rust and in Python", async () => {
  const refused = VECTORS.filter(({ error }) => error !== null);
  assert.ok(refused.length > 100);
  for (const vector of refused) {
    const error = await errorOf(() => parseHeader(bytes(vector.file), options(vector)));
    // Each JSON parser has its own messages for invalid JSON, and its own text for numbers that the format does not allow.
    const ownWords = error.message.includes("invalid JSON") || /the number -|not an integer/.test(error.message);
    if (ownWords) assert.match(vector.error.message, /invalid JSON|the number/);
    else assert.equal(error.message, vector.error.message, vector.name);
    assert.equal(error.tensor, vector.error.tensor, vector.name);
    for (const key of ["expected", "found", "begin", "end"]) {
      assert.equal(error[key] === null ? null : String(error[key]), vector.error[key], `${vector.name}, ${key}`);
    }
  }
});

test("no file is accepted when it ends earlier or later", async () => {
  const accepted = VECTORS.filter(({ code, limit, file }) => code === null && limit === null && file.length < 1000);
  assert.ok(accepted.length > 50);
  for (const vector of accepted) {
    const file = bytes(vector.file);
    for (let end = 0; end < file.length; end++) {
      const { code } = await errorOf(() => parseHeader(file.subarray(0, end)));
      assert.ok(["too-short", "header-past-end", "truncated"].includes(code), `${vector.name} to ${end}: ${code}`);
    }
    const longer = new Uint8Array([...file, 0]);
    assert.equal((await errorOf(() => parseHeader(longer))).code, "trailing-bytes");
  }
});

test("what ingot writes is read as ingot reads it", () => {
  for (const expected of oracle("rendered")) {
    const header = parseHeader(bytes(expected.file), { strict: true });
    assert.equal(header.format, expected.format);
    assert.deepEqual(rows(header), expected.tensors, expected.name);
    assert.deepEqual(pairs(header.metadata), pairs(expected.metadata));
    assert.deepEqual([...header.names()].sort(compareNames), expected.byName, "names are ordered by their bytes");
  }
});

test("one changed byte is refused, or changes what is read", async () => {
  const file = fileOf('{"__metadata__":{"k":"v"},"é\\n":{"dtype":"F32","shape":[2,3],"data_offsets":[0,24]}}  ', 24);
  const [said] = rows(parseHeader(file));
  for (let at = 0; at < file.length - 24; at++) {
    for (const byte of [0, 9, 0x20, 0x22, 0x2c, 0x30, 0x39, 0x5c, 0x7b, 0x7d, 0x80, 0xff]) {
      const changed = file.slice();
      changed[at] = byte;
      try {
        const [found] = rows(parseHeader(changed));
        // White space, and the metadata, may differ.
        if (found !== undefined) assert.deepEqual(found.slice(1), said.slice(1));
      } catch (error) {
        assert.equal(error.name, "SafetensorError", error.stack);
      }
    }
  }
});

test("any view of memory is read, and only its part", () => {
  const file = fileWith("a");
  const padded = new Uint8Array(file.length + 16);
  padded.set(file, 8);
  const inside = [8, file.length];
  const shared = new Uint8Array(new SharedArrayBuffer(file.length));
  shared.set(file);
  for (
    const source of [
      file.buffer,
      new Uint8Array(padded.buffer, ...inside),
      new DataView(padded.buffer, ...inside),
      Buffer.from(padded.buffer, ...inside),
      shared,
      shared.buffer,
    ]
  ) {
    assert.deepEqual([...parseHeader(source).names()], ["a"]);
  }
  for (const source of [undefined, null, "text", [1, 2], 8]) assert.throws(() => parseHeader(source), TypeError);
  for (const fileSize of [-1, 1.5, 2 ** 53, "9", NaN]) assert.throws(() => parseHeader(file, { fileSize }), TypeError);
});

test("sizes beyond 53 bits are compared exactly", async () => {
  const entry = (shape, begin, end) => `{"a":{"dtype":"U8","shape":${shape},"data_offsets":[${begin},${end}]}}`;
  const error = async (...entryOf) => errorOf(() => parseHeader(fileOf(entry(...entryOf))));
  // 2^53 + 1 is no double: a reader that rounds sees 2^53.
  const mismatch = await error("[9007199254740993]", 0, "9007199254740992");
  assert.deepEqual([mismatch.code, mismatch.expected, mismatch.found], ["size-mismatch", 2n ** 53n + 1n, 2n ** 53n]);
  const truncated = await error("[9007199254740993]", 0, "9007199254740993");
  assert.deepEqual([truncated.code, truncated.expected], ["truncated", 2n ** 53n + 1n]);
  assert.match(truncated.message, /9007199254740993 bytes short/);
  const hole = await error("[1]", "18446744073709551614", "18446744073709551615");
  assert.deepEqual([hole.code, hole.end], ["hole", 2n ** 64n - 2n]);
  assert.equal((await error("[1]", 0, "18446744073709551616")).code, "invalid-entry");
  assert.equal((await error("[2]", "18446744073709551615", "1")).code, "reversed-range");
});

test("a dimension beyond 53 bits of an empty tensor is kept exactly", () => {
  const header = parseHeader(fileOf('{"a":{"dtype":"U8","shape":[0,9007199254740993],"data_offsets":[0,0]}}'));
  assert.deepEqual(header.get("a").exactShape, [0n, 2n ** 53n + 1n]);
  assert.deepEqual(header.get("a").shape, [0, 2 ** 53]);
  assert.equal("exactShape" in parseHeader(fileWith("b")).get("b"), false);
});

test("a name is only a name", () => {
  const names = ["__proto__", "constructor", "toString", "<img onerror=alert(1)>", "", "../../etc/passwd"];
  const header = parseHeader(fileWith(...names));
  assert.deepEqual([...header.names()], names);
  assert.equal(header.get("hasOwnProperty"), undefined);
  assert.deepEqual(tensorRange(header, "__proto__"), { shard: null, position: header.dataStart, nbytes: 4 });
  assert.equal({}.dtype, undefined);
  const metadata = parseHeader(fileOf('{"__metadata__":{"__proto__":"x"}}')).metadata;
  assert.deepEqual([...metadata], [["__proto__", "x"]]);
});

test("the range of a tensor counts from the start of the file", async () => {
  const file = fileWith("a", "b");
  const header = parseHeader(file);
  const { position, nbytes } = tensorRange(header, "b");
  assert.deepEqual([position + nbytes, nbytes], [file.length, 4]);
  const error = await errorOf(() => tensorRange(header, "c"));
  assert.deepEqual([error.code, error.message], ["unknown-tensor", "tensor `c`: the file has no such tensor"]);
});

test("the path stands before the fault, escaped", async () => {
  const error = await errorOf(() => parseHeader(new Uint8Array(3), { path: "a\x1b[31m.safetensors" }));
  const message = "a\\x1b[31m.safetensors: too short for a header length: expected at least 8 bytes, found 3";
  assert.equal(error.message, message);
  assert.equal(error.path, "a\x1b[31m.safetensors");
});

test("a bad byte is named by its position", async () => {
  const text = new TextEncoder().encode('{"é":1}');
  const bad = [[0xff], [0xc3], [0xc0, 0x80], [0xed, 0xa0, 0x80], [0xf4, 0x90, 0x80, 0x80], [0xe2, 0x82]];
  bad.push([0xf0, 0x8f, 0xbf, 0xbf]);
  for (const sequence of bad) {
    const header = new Uint8Array([...text.slice(0, 4), ...sequence, ...text.slice(4)]);
    const { code, message } = await errorOf(() => parseHeader(fileOf(header)));
    assert.deepEqual([code, message], ["invalid-utf8", "invalid UTF-8 at byte 12 of the file"]);
  }
});
