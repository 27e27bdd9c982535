// The time to read a header in JavaScript, compared with JSON.parse and the checks that a careful program adds.
//
// Usage: node benches/web/headers.mjs [TENSORS] [ROUNDS]. Both sides take turns in one process, and must agree first.

import assert from "node:assert/strict";
import os from "node:os";

import { parseHeader } from "../../js/index.js";

const TENSORS = Number(process.argv[2] ?? 100_000);
const ROUNDS = Number(process.argv[3] ?? 15);
const NBYTES = 64 * 64 * 2;

function headOf(count) {
  const entry = (number) => {
    const name = `model.layers.${number >> 4}.block_sparse_moe.experts.${number & 15}.w${number % 3}.weight`;
    const [begin, end] = [number * NBYTES, (number + 1) * NBYTES];
    return `"${name}":{"dtype":"BF16","shape":[64,64],"data_offsets":[${begin},${end}]}`;
  };
  const text = new TextEncoder().encode(`{${Array.from({ length: count }, (_, number) => entry(number))}}`);
  const head = new Uint8Array(8 + text.length);
  new DataView(head.buffer).setBigUint64(0, BigInt(text.length), true);
  head.set(text, 8);
  return head;
}

/** What JSON.parse leaves to check: sizes, holes and overlaps. It cannot see names that are there twice. */
function byHand(head, fileSize) {
  const entries = Object.entries(JSON.parse(new TextDecoder().decode(head.subarray(8))));
  const tensors = entries.map(([name, { dtype, shape, data_offsets }]) => {
    return { name, dtype, shape, begin: data_offsets[0], end: data_offsets[1] };
  });
  tensors.sort((a, b) => a.begin - b.begin);
  let covered = 0;
  for (const { shape, begin, end } of tensors) {
    assert.ok(begin === covered && end - begin === shape.reduce((product, dim) => product * dim, 2));
    covered = end;
  }
  assert.equal(covered, fileSize - head.length);
  return new Map(tensors.map((tensor) => [tensor.name, tensor]));
}

function milliseconds(work) {
  const begin = performance.now();
  work();
  return performance.now() - begin;
}

function median(times) {
  return times.toSorted((a, b) => a - b)[times.length >> 1];
}

const head = headOf(TENSORS);
const fileSize = head.length + TENSORS * NBYTES;
const sides = {
  "parseHeader": () => parseHeader(head, { fileSize }),
  "JSON.parse with checks by hand": () => byHand(head, fileSize),
};

const expected = byHand(head, fileSize);
const found = parseHeader(head, { fileSize });
assert.equal(found.size, expected.size);
for (const [name, { shape, begin, end }] of expected) {
  const tensor = found.get(name);
  assert.deepEqual([tensor.shape, tensor.begin, tensor.end], [shape, begin, end]);
}

const times = Object.fromEntries(Object.keys(sides).map((side) => [side, []]));
for (let round = 0; round < ROUNDS; round++) {
  for (const [side, read] of Object.entries(sides)) times[side].push(milliseconds(read));
}

const size = (head.length / 1e6).toFixed(1);
console.log(`${os.cpus()[0].model}, Node ${process.version}: ${TENSORS} tensors, header of ${size} MB`);
for (const [side, taken] of Object.entries(times)) {
  const [least, most] = [Math.min(...taken), Math.max(...taken)].map((time) => time.toFixed(1));
  console.log(`${side}: ${median(taken).toFixed(1)} ms (${least} to ${most})`);
}
