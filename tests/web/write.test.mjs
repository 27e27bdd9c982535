// Files that JavaScript writes, compared with files that Python writes from the same tensors.

import assert from "node:assert/strict";
import { test } from "node:test";

import { openSource, parseHeader, streamRange, writeSafetensors } from "../../js/index.js";
import { bytes, errorOf, oracle } from "./oracle.mjs";

async function written(...given) {
  return new Uint8Array(await new Response(writeSafetensors(...given)).arrayBuffer());
}

/** Returns the tensors of a file in another order, each with its bytes in a type that `write` accepts. */
async function tensorsOf(file, header) {
  const source = await openSource(file);
  const forms = [
    (begin, end) => file.subarray(begin, end),
    (begin, end) => new Blob([file.subarray(begin, end)]),
    (begin, end) => streamRange(source, begin, end, { pieceBytes: 24 }),
    (begin, end) => file.slice(begin, end).buffer,
  ];
  return header.tensors.toReversed().map(({ name, dtype, shape, begin, end }, number) => {
    const data = forms[number % forms.length](header.dataStart + begin, header.dataStart + end);
    return [name, { dtype, shape, data }];
  });
}

test("the bytes are those that Python writes", async () => {
  let count = 0;
  for (const { name, format, file } of oracle("rendered")) {
    if (format !== "safetensors") continue;
    const expected = bytes(file);
    const header = parseHeader(expected);
    const pairs = header.metadata && [...header.metadata].toReversed();
    assert.deepEqual(await written(await tensorsOf(expected, header), pairs), expected, name);
    count++;
  }
  assert.ok(count > 50);
});

test("the dtype of a typed array is that of its elements", async () => {
  const file = await written({
    b: { shape: [2], data: Float32Array.of(1, -2) },
    a: { shape: [], data: BigInt64Array.of(-3n) },
    c: { shape: [0, 5], data: new Uint8Array() },
    d: { dtype: "BF16", shape: [1], data: Uint8Array.of(0x80, 0x3f) },
  });
  const header = parseHeader(file);
  const rows = header.tensors.map(({ name, dtype, shape }) => [name, dtype, shape]);
  assert.deepEqual(rows, [["a", "I64", []], ["b", "F32", [2]], ["d", "BF16", [1]], ["c", "U8", [0, 5]]]);
  assert.equal(header.metadata, null);
});

test("metadata about the tensors of another file is left out", async () => {
  const metadata = new Map([["ingot.checksums", "{}"], ["format", "pt"], ["modelspec.hash_sha256", "0x0"]]);
  const header = parseHeader(await written({}, metadata));
  assert.deepEqual([...header.metadata], [["format", "pt"]]);
});

test("what no reader accepts is an error before the first byte", async () => {
  const two = { dtype: "F32", shape: [2], data: new Uint8Array(8) };
  const faults = [
    [
      "size-mismatch",
      { a: { ...two, data: new Uint8Array(3) } },
      "tensor `a`: shape [2] of F32 needs 8 bytes, data has 3",
    ],
    ["partial-byte", { a: { dtype: "F4", shape: [3], data: new Uint8Array(2) } }],
    ["unknown-dtype", { a: { ...two, dtype: "F33" } }, "tensor `a`: unknown dtype `F33`"],
    ["reserved-name", { __metadata__: two }],
    ["invalid-unicode", { "a\ud800": two }],
    ["duplicate-tensor", [["a", two], ["a", two]]],
    ["size-overflow", { a: { dtype: "F32", shape: [2 ** 40, 2 ** 40, 0], data: new Uint8Array() } }],
  ];
  for (const [code, tensors, message] of faults) {
    const error = await errorOf(() => writeSafetensors(tensors));
    assert.equal(error.code, code, error.message);
    if (message) assert.equal(error.message, message);
  }
  assert.equal((await errorOf(() => writeSafetensors({}, { a: "\udfff" }))).code, "invalid-unicode");
  const types = [null, { a: null }, { a: { ...two, shape: 2 } }, { a: { ...two, shape: [-1] } }, {
    a: { ...two, data: 1 },
  }];
  for (const tensors of types) assert.throws(() => writeSafetensors(tensors), TypeError);
  assert.throws(() => writeSafetensors({}, { a: 1 }), TypeError);
});

test("the stream fails if data has another length than its shape needs", async () => {
  async function* data(lengths) {
    for (const length of lengths) yield new Uint8Array(length);
  }
  for (const lengths of [[4], [4, 3], [4, 5], [9]]) {
    const error = await errorOf(() => written({ a: { dtype: "F32", shape: [2], data: data(lengths) } }));
    assert.equal(error.code, "size-mismatch");
  }
});

test("the stream ends the streams of its data when it is cancelled", async () => {
  let ended = false;
  async function* data() {
    try {
      for (;;) yield new Uint8Array(4);
    } finally {
      ended = true;
    }
  }
  const reader = writeSafetensors({ a: { dtype: "U8", shape: [1 << 30], data: data() } }).getReader();
  await reader.read();
  await reader.read();
  await reader.cancel();
  assert.ok(ended);
});
