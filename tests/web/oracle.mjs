// The expected results of a reader of headers, from oracle.py, and their form for comparisons.

import assert from "node:assert/strict";
import { spawnSync } from "node:child_process";
import { fileURLToPath } from "node:url";

import { SafetensorError } from "../../js/index.js";

const PYTHON = process.env.PYTHON ?? "python3";
const PROGRAM = fileURLToPath(new URL("oracle.py", import.meta.url));

export function oracle(kind) {
  const { status, stdout, stderr } = spawnSync(PYTHON, [PROGRAM, kind], { encoding: "utf8", maxBuffer: 1 << 30 });
  assert.equal(status, 0, stderr);
  const cases = JSON.parse(stdout);
  assert.ok(cases.length > 0, `oracle.py ${kind} has nothing to say`);
  return cases;
}

export function bytes(base64) {
  // A copy, because a Buffer may share its memory with others.
  return new Uint8Array(Buffer.from(base64, "base64"));
}

/** Returns the tensors of a header in the form of oracle.py. */
export function rows(header) {
  return header.tensors.map(({ name, dtype, shape, exactShape, begin, end }) => [
    name,
    dtype,
    (exactShape ?? shape).map(String),
    String(begin),
    String(end),
  ]);
}

export function pairs(metadata) {
  return metadata === null ? null : [...metadata].sort(([a], [b]) => (a < b ? -1 : 1));
}

/** Returns the error that `read` throws, or with which its promise is rejected. */
export async function errorOf(read) {
  try {
    await read();
  } catch (error) {
    assert.ok(error instanceof SafetensorError, `${error?.stack}`);
    return error;
  }
  assert.fail("it was accepted");
}

/** A file with this header, as text or bytes, and this much data. */
export function fileOf(header, nbytes = 0) {
  const text = typeof header === "string" ? new TextEncoder().encode(header) : header;
  const file = new Uint8Array(8 + text.length + nbytes);
  new DataView(file.buffer).setBigUint64(0, BigInt(text.length), true);
  file.set(text, 8);
  return file;
}

/** A file of some tensors of 4 bytes each. */
export function fileWith(...names) {
  const entries = names.map((name, place) => {
    const entry = { dtype: "F32", shape: [1], data_offsets: [4 * place, 4 * place + 4] };
    return `${JSON.stringify(name)}:${JSON.stringify(entry)}`;
  });
  return fileOf(`{${entries.join(",")}}`, 4 * names.length);
}
