// Decoded elements, compared with ml_dtypes and NumPy: every bit pattern of up to 16 bits, at every bit position.

import assert from "node:assert/strict";
import { readFileSync } from "node:fs";
import { test } from "node:test";

import { decode, DECODED, DTYPES, openSource, readHeader, readRange, tensorRange, valuesOf } from "../../js/index.js";
import { bytes, oracle } from "./oracle.mjs";

const ARRAYS = { "u1": Uint8Array, "i1": Int8Array, "<u2": Uint16Array, "<i2": Int16Array, "<u4": Uint32Array };
Object.assign(ARRAYS, { "<i4": Int32Array, "<u8": BigUint64Array, "<i8": BigInt64Array });
Object.assign(ARRAYS, { "<f4": Float32Array, "<f8": Float64Array });

const CASES = oracle("elements").map(({ dtype, array, bytes: data, values }) => {
  return { dtype, data: bytes(data), values: new ARRAYS[array](bytes(values).buffer) };
});

/** Checks that numbers are equal, including the signs of zeros. All NaNs are equal. */
function same(found, expected, what) {
  assert.equal(found.constructor, expected.constructor, what);
  assert.equal(found.length, expected.length, what);
  // Not deepEqual, which takes minutes for so many values.
  const differs = expected.findIndex((value, at) => !Object.is(found[at], value));
  assert.equal(differs, -1, `${what}: place ${differs}: expected ${expected[differs]}, found ${found[differs]}`);
}

test("every dtype is decoded, and no other", () => {
  assert.deepEqual(new Set(DECODED.keys()), new Set(DTYPES.keys()));
  assert.deepEqual(CASES.map(({ dtype }) => dtype).sort(), [...DTYPES.keys()].sort());
  for (const dtype of ["F7", "", "bf16", "__proto__", "constructor", undefined, null]) {
    assert.throws(() => decode(dtype, new Uint8Array(8)), RangeError);
    assert.throws(() => valuesOf(dtype), RangeError);
  }
});

for (const { dtype, bits, values } of oracle("values")) {
  test(`${dtype}: the value of each of ${2 ** bits} patterns is that of ml_dtypes`, () => {
    same(valuesOf(dtype), new Float32Array(bytes(values).buffer), dtype);
    assert.equal(valuesOf(dtype).length, 2 ** bits);
    assert.equal(valuesOf(dtype), valuesOf(dtype), "made once");
  });
}

for (const { dtype, data, values } of CASES) {
  const places = dtype === "C64" ? 2 : 1;
  const length = values.length / places;

  test(`${dtype}: all patterns are decoded, at any address`, () => {
    same(decode(dtype, data), values, dtype);
    same(decode(dtype, data.buffer), values, dtype);
    for (let at = 1; at < 9; at++) {
      const memory = new Uint8Array(data.length + 16).fill(0xa5);
      memory.set(data, at);
      const before = memory.slice();
      same(decode(dtype, memory.subarray(at, at + data.length)), values, `${dtype} at ${at}`);
      assert.deepEqual(memory, before, "bytes are only read");
    }
    const shared = new Uint8Array(new SharedArrayBuffer(data.length));
    shared.set(data);
    same(decode(dtype, shared), values, dtype);
  });

  test(`${dtype}: selections are those of the slow way`, () => {
    for (const first of [0, 1, 2, 3, 5, length - 1, length, length + 1]) {
      for (const step of [1, 2, 3, 4, 7, 64, length]) {
        for (const count of [undefined, 0, 1, 5]) {
          const picked = [];
          const most = count ?? Infinity;
          for (let at = first; at < length && picked.length < most; at += step) picked.push(at);
          const read = () => decode(dtype, data, { first, step, count });
          const what = `${dtype} ${first} ${step} ${count}`;
          if (count !== undefined && picked.length < count) {
            assert.throws(read, RangeError, what);
            continue;
          }
          const naive = picked.flatMap((at) => [...values.subarray(at * places, (at + 1) * places)]);
          same(read(), values.constructor.from(naive), what);
        }
      }
    }
  });

  test(`${dtype}: memory of the caller is filled from its start, and no more of it`, () => {
    const mark = typeof values[0] === "bigint" ? 7n : 7;
    const into = new values.constructor(values.length + 3).fill(mark);
    assert.equal(decode(dtype, data, { into }), into);
    same(into.subarray(0, values.length), values, dtype);
    assert.deepEqual([...into.subarray(values.length)], [mark, mark, mark]);
    const short = new values.constructor(values.length - 1);
    assert.throws(() => decode(dtype, data, { into: short }), RangeError);
    assert.throws(() => decode(dtype, data, { into: [] }), TypeError);
  });

  test(`${dtype}: bytes that end inside an element are refused`, () => {
    const bits = DTYPES.get(dtype);
    const whole = bits === 6 ? 3 : Math.max(1, bits / 8);
    for (let nbytes = 0; nbytes < 25; nbytes++) {
      const read = () => decode(dtype, new Uint8Array(nbytes));
      if (nbytes % whole === 0) assert.equal(read().length, (places * nbytes * 8) / bits);
      else assert.throws(read, RangeError, `${nbytes}`);
    }
  });
}

test("arguments of other types are refused", () => {
  for (const data of [null, undefined, "abc", [1, 2], {}]) assert.throws(() => decode("U8", data), TypeError);
  const data = new Uint8Array(8);
  const outside = { first: [-1, 0.5, NaN], step: [0, -1, 1.5], count: [-1, 9, Infinity] };
  for (const [key, values] of Object.entries(outside)) {
    for (const value of values) assert.throws(() => decode("U8", data, { [key]: value }), RangeError);
    assert.throws(() => decode("U8", data, { [key]: "1" }), TypeError);
  }
});

test("what is decoded shares no memory with the bytes", () => {
  const data = new Uint8Array(8);
  const values = decode("U8", data);
  data.fill(9);
  assert.deepEqual([...values], Array(8).fill(0));
});

test("a file that ingot wrote is read to its values", async () => {
  const [{ file, values }] = oracle("model");
  const source = await openSource(new File([bytes(file)], "m.safetensors"));
  const header = await readHeader(source);
  assert.equal(header.size, Object.keys(values).length);
  for (const { name, dtype } of header) {
    const { position, nbytes } = tensorRange(header, name);
    const found = decode(dtype, await readRange(source, position, position + nbytes));
    assert.deepEqual(Float64Array.from(found, Number), new Float64Array(bytes(values[name]).buffer), name);
  }
});

test("decoding needs no other module", () => {
  assert.doesNotMatch(
    readFileSync(new URL("../../js/src/decode.js", import.meta.url), "utf8"),
    /\bimport\b|\brequire\b/,
  );
});
