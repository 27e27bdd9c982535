// Indexes of sharded checkpoints, compared with the vectors of all readers.

import assert from "node:assert/strict";
import { test } from "node:test";

import { parseIndex } from "../../js/index.js";
import { bytes, errorOf, oracle } from "./oracle.mjs";

function index(text) {
  return parseIndex(new TextEncoder().encode(text));
}

for (const vector of oracle("indexes")) {
  test(`${vector.name} gets its verdict`, async () => {
    const read = () => parseIndex(bytes(vector.bytes));
    if (vector.code === null) {
      const found = read();
      assert.deepEqual([...found.weightMap], vector.weightMap);
      if (vector.metadata !== null) assert.equal(found.metadataText, vector.metadata);
      return;
    }
    const error = await errorOf(read);
    assert.deepEqual([error.code, error.rule], [vector.code, vector.rule]);
    assert.doesNotMatch(error.message, /\p{Cc}/u);
  });
}

test("messages say what ingot's say", async () => {
  const message = async (text) => (await errorOf(() => index(text))).message;
  assert.equal(
    await message('{"weight_map": {"wte": "../../etc/passwd"}}'),
    "tensor `wte`: file name `../../etc/passwd` refused: it has a part `.` or `..`",
  );
  assert.equal(
    await message('{"weight_map": {"wte": "a.safetensors", "wte": "b.safetensors"}}'),
    "tensor `wte`: it occurs twice, in `a.safetensors` and in `b.safetensors`",
  );
  const array = "field `metadata`: expected an object, found an array";
  assert.equal(await message('{"metadata":[],"weight_map":{}}'), array);
});

test("what is too long is refused", async () => {
  const value = (length) => index(`{"metadata":{"a":"${"x".repeat(length)}"},"weight_map":{}}`);
  assert.equal(value(4_000_000).metadata.a.length, 4_000_000);
  assert.equal((await errorOf(() => value(4 << 20))).code, "value-too-large");
  const map = Array.from({ length: 100_001 }, (_, number) => `"${number}":"${number}.safetensors"`);
  assert.equal((await errorOf(() => index(`{"weight_map":{${map}}}`))).code, "too-many-shards");
  assert.equal(index(`{"weight_map":{${map.slice(1)}}}`).shards.length, 100_000);
  assert.equal((await errorOf(() => parseIndex(new Uint8Array(250_000_001)))).code, "index-too-large");
});

test("the total is a number of bytes or nothing", () => {
  const total = (text) => index(`{"metadata":${text},"weight_map":{}}`).totalSize;
  assert.equal(total('{"total_size":24}'), 24);
  const none = ['"24"', "-1", "1.5", "{}", "null", "true"].map((value) => `{"total_size":${value}}`);
  for (const text of ["null", "{}", ...none]) {
    assert.equal(total(text), null, text);
  }
});

test("shards come in the order of their names", () => {
  const { shards, weightMap } = index('{"weight_map":{"a":"z","b":"\\ud83e\\udd80","c":"\\uffee","d":"z"}}');
  assert.deepEqual(shards, ["z", "\uffee", "🦀"]);
  assert.equal(weightMap.get("d"), "z");
});
