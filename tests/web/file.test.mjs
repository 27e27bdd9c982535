// Files and directories on disk, and tensors read as numbers.

import assert from "node:assert/strict";
import { execFileSync } from "node:child_process";
import { mkdir, mkdtemp, rename, rm, writeFile } from "node:fs/promises";
import { tmpdir } from "node:os";
import { join } from "node:path";
import { test } from "node:test";
import { pathToFileURL } from "node:url";

import { decode, openSource, parseHeader, readHeader, readModel, readRange, writeSafetensors } from "../../js/index.js";
import { bytes, errorOf, fileWith, oracle } from "./oracle.mjs";
import { serveFiles } from "./server.mjs";

async function folder(t, files = {}) {
  const path = await mkdtemp(join(tmpdir(), "ingot-"));
  t.after(() => rm(path, { recursive: true }));
  for (const [name, content] of Object.entries(files)) {
    await mkdir(join(path, name, ".."), { recursive: true });
    await writeFile(join(path, name), content);
  }
  return path;
}

const ONE = "part/model-00001-of-00002.safetensors";
const TWO = "part/model-00002-of-00002.safetensors";
const SHARDED = {
  "model.safetensors.index.json": JSON.stringify({ weight_map: { a: ONE, b: TWO } }),
  "config.json": '{"a":1}',
  [ONE]: fileWith("a"),
  [TWO]: fileWith("b"),
};

test("a file is opened by its path", async (t) => {
  const file = fileWith("a", "b");
  const path = join(await folder(t, { "m #1.safetensors": file }), "m #1.safetensors");
  for (const given of [path, pathToFileURL(path), pathToFileURL(path).href]) {
    const source = await openSource(given);
    assert.deepEqual([source.name, source.size], [path, file.length]);
    assert.deepEqual(await readRange(source, 5, file.length), file.slice(5));
    assert.equal((await readHeader(given)).size, 2);
    assert.equal((await readModel(given)).size, 2);
  }
});

test("a file that is replaced or missing is an error", async (t) => {
  const path = join(await folder(t, { "m.safetensors": fileWith("a"), other: fileWith("b") }), "m.safetensors");
  const source = await openSource(path);
  await rename(join(path, "../other"), path);
  assert.equal((await errorOf(() => readRange(source, 0, 8))).code, "changed");
  await assert.rejects(openSource(`${path}.bt`), { code: "ENOENT" });
  assert.equal((await errorOf(() => openSource(join(path, "..")))).code, "read");
});

test("a FIFO is an error at once", async (t) => {
  const path = join(await folder(t), "fifo");
  execFileSync("mkfifo", [path]);
  assert.equal((await errorOf(() => openSource(path))).code, "read");
});

test("a directory is the model that it holds", async (t) => {
  const path = await folder(t, SHARDED);
  for (const given of [path, `${path}/`, join(path, "model.safetensors.index.json")]) {
    const model = await readModel(given, { config: true });
    assert.deepEqual([[...model.shards.keys()], model.config], [[ONE, TWO], { a: 1 }]);
    assert.deepEqual((await model.readTensor("b")).values, new Float32Array(1));
  }
  await rm(join(path, TWO));
  assert.equal((await errorOf(() => readModel(path))).code, "missing-shards");
  const two = await folder(t, { "a.bt": fileWith("a"), "b.safetensors": fileWith("b") });
  assert.equal((await errorOf(() => readModel(two))).code, "ambiguous-checkpoint");
  await writeFile(join(two, "model.safetensors"), fileWith("c"));
  assert.ok((await readModel(two)).has("c"));
  assert.equal((await errorOf(async () => readModel(await folder(t)))).code, "no-checkpoint");
});

test("rows of a tensor are those of the whole tensor", async () => {
  for (const { dtype, bytes: data } of oracle("elements")) {
    const whole = decode(dtype, bytes(data));
    const places = dtype === "C64" ? 2 : 1;
    const shape = [whole.length / places / 4, 4];
    const blob = await new Response(writeSafetensors({ a: { dtype, shape, data: bytes(data) } })).blob();
    const model = await readModel(blob);
    const all = await model.readTensor("a");
    assert.deepEqual(all, { name: "a", dtype, shape, values: whole });
    for (const rows of [[0, 0], [1, 2], [3, shape[0]], [shape[0], shape[0]]]) {
      const expected = whole.subarray(...rows.map((row) => row * 4 * places));
      const found = await model.readTensor("a", { rows });
      assert.deepEqual([found.shape, found.values], [[rows[1] - rows[0], 4], expected], dtype);
    }
    // Two rows share a byte.
    const odd = await readModel(
      await new Response(writeSafetensors({ a: { dtype, shape: [shape[0] * 4, 1], data: bytes(data) } })).blob(),
    );
    const { values } = await odd.readTensor("a", { rows: [3, 10] });
    assert.deepEqual(values, whole.subarray(3 * places, 10 * places), dtype);
  }
});

test("only the bytes of the rows are requested from a server", async (t) => {
  const file = new Uint8Array(
    await new Response(writeSafetensors({ a: { shape: [1000, 100], data: new Float32Array(100_000).fill(7) } }))
      .arrayBuffer(),
  );
  const server = await serveFiles(t, { "/m.safetensors": file });
  const model = await readModel(`${server.url}/m.safetensors`, { firstBytes: 200 });
  const { shape, values } = await model.readTensor("a", { rows: [500, 502] });
  assert.deepEqual([shape, values], [[2, 100], new Float32Array(200).fill(7)]);
  const begin = parseHeader(file).dataStart + 200_000;
  assert.equal(server.requests.at(-1).headers.range, `bytes=${begin}-${begin + 799}`);
});

test("rows outside of the tensor and unknown names are errors", async () => {
  const model = await readModel(new Blob([fileWith("encoder.weight", "encoder.bias")]));
  for (const rows of [[0, 2], [1, 0], [-1, 1]]) {
    await assert.rejects(model.readTensor("encoder.bias", { rows }), RangeError);
  }
  for (const rows of [1, [0], ["0", 1], [0, 0.5]]) {
    await assert.rejects(model.readTensor("encoder.bias", { rows }), TypeError);
  }
  const error = await errorOf(() => model.readTensor("Encoder_Weight"));
  const reason = "blob 1: tensor `Encoder_Weight`: the file has no such tensor — did you mean `encoder.weight`?";
  assert.deepEqual([error.code, error.message], ["unknown-tensor", reason]);
});
