// Headers read from files that a user chose or dropped.

import assert from "node:assert/strict";
import { openAsBlob } from "node:fs";
import { mkdtemp, rm, truncate, writeFile } from "node:fs/promises";
import { tmpdir } from "node:os";
import { join } from "node:path";
import { test } from "node:test";

import { readHeader, readIndex, tensorRange } from "../../js/index.js";
import { bytes, errorOf, fileOf, fileWith, oracle } from "./oracle.mjs";

/** A Blob that records the ranges that are read. */
class Watched extends Blob {
  slices = [];

  slice(begin, end) {
    this.slices.push([begin, end]);
    return super.slice(begin, end);
  }

  arrayBuffer() {
    return assert.fail("all of it was read");
  }
}

test("only the header is read", async () => {
  const large = fileOf('{"a":{"dtype":"U8","shape":[1000000],"data_offsets":[0,1000000]}}', 1_000_000);
  const blob = new Watched([large]);
  const header = await readHeader(blob);
  assert.equal(header.fileSize, large.length);
  assert.deepEqual(blob.slices, [[0, 131_072]]);
});

test("a longer header is read in two parts", async () => {
  const metadata = `"__metadata__":{"k":"${"v".repeat(200_000)}"}`;
  const file = fileOf(`{${metadata},"a":{"dtype":"U8","shape":[9],"data_offsets":[0,9]}}`, 9);
  const blob = new Watched([file]);
  const header = await readHeader(blob);
  assert.deepEqual(blob.slices, [[0, 131_072], [131_072, file.length - 9]]);
  assert.equal(header.metadata.get("k").length, 200_000);
});

test("every vector gets the verdict that it gets in memory", async () => {
  for (const { name, file, code, limit } of oracle("vectors")) {
    const options = limit === null ? {} : { maxHeaderBytes: limit };
    const read = () => readHeader(new File([bytes(file)], name), options);
    if (code === null) {
      await read();
      continue;
    }
    const error = await errorOf(read);
    assert.deepEqual([error.code, error.path], [code, name]);
    assert.ok(error.message.startsWith(`${name}: `), error.message);
  }
});

test("the bytes of a tensor are where its range says", async () => {
  const file = fileWith("a", "b");
  file.set([1, 2, 3, 4], file.length - 4);
  const blob = new Blob([file]);
  const { position, nbytes } = tensorRange(await readHeader(blob), "b");
  const data = await blob.slice(position, position + nbytes).arrayBuffer();
  assert.deepEqual([...new Uint8Array(data)], [1, 2, 3, 4]);
});

test("the limit of a file on disk is that of all readers, and not the one of the network", async () => {
  const header = `{"__metadata__":{"k":"${"v".repeat(26_000_000)}"}}`;
  assert.equal((await readHeader(new Blob([fileOf(header)]))).metadata.get("k").length, 26_000_000);
  const error = await errorOf(() => readHeader(new Blob([fileOf(header)]), { maxHeaderBytes: 25_000_000 }));
  assert.equal(error.code, "header-too-large");
});

test("a file on disk that changes is an error and no other header", async (t) => {
  const folder = await mkdtemp(join(tmpdir(), "safetensors-"));
  t.after(() => rm(folder, { recursive: true }));
  const path = join(folder, "m.safetensors");
  await writeFile(path, fileWith("a"));
  const blob = await openAsBlob(path);
  assert.equal((await readHeader(blob)).size, 1);
  await truncate(path, 40);
  const error = await errorOf(() => readHeader(blob));
  assert.equal(error.code, "read");
  assert.ok(error.cause);
});

test("a signal ends the reading", async () => {
  const reason = new Error("enough");
  await assert.rejects(readHeader(new Blob([fileWith("a")]), { signal: AbortSignal.abort(reason) }), reason);
});

test("an index is read from a file, too", async () => {
  const index = await readIndex(new File(['{"weight_map":{"a":"a.safetensors"}}'], "i.json"));
  assert.deepEqual(index.shards, ["a.safetensors"]);
  const error = await errorOf(() => readIndex(new File(["{}"], "i.json")));
  assert.equal(error.message, "i.json: the index has no `weight_map`, which maps tensors to files");
});
