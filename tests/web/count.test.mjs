// Parameter counts, compared with the vectors that Python's tests use too.

import assert from "node:assert/strict";
import { test } from "node:test";

import { parameterCount, parseHeader, readModel } from "../../js/index.js";
import { bytes, fileWith, oracle } from "./oracle.mjs";

/** Returns the model of a vector, read from File objects as in a browser. */
async function modelOf({ files, names, config, index_metadata: metadata }) {
  const given = files.map(({ shard, file }) => new File([bytes(file)], shard));
  if (files.length > 1) {
    const entries = files.flatMap(({ shard }, place) => names[place].map((name) => [name, shard]));
    const weightMap = Object.fromEntries(entries);
    const index = JSON.stringify({ metadata: metadata && JSON.parse(metadata), weight_map: weightMap });
    given.push(new File([index], "model.safetensors.index.json"));
  }
  if (config !== null) given.push(new File([config], "config.json"));
  return readModel(given, { config: true });
}

for (const vector of oracle("counts")) {
  test(`${vector.name} is counted as huggingface.js counts it`, async () => {
    const model = await modelOf(vector);
    assert.deepEqual(parameterCount(model), { parameterCount: vector.logical, parameterTotal: vector.total });
    const stored = { parameterCount: vector.stored, parameterTotal: sum(vector.stored) };
    assert.deepEqual(parameterCount(model, { count: "stored" }), stored);
  });
}

test("Python counts the same, whatever the configuration says", () => {
  for (const { name, file, config, logical, total, stored } of oracle("counted")) {
    const header = parseHeader(bytes(file));
    const found = parameterCount(header, { config: JSON.parse(config) });
    assert.deepEqual(found, { parameterCount: logical, parameterTotal: total }, `${name}: ${config}`);
    assert.deepEqual(parameterCount(header, { count: "stored" }).parameterCount, stored, name);
  }
});

function sum(counts) {
  return Object.values(counts).reduce((total, count) => total + count, 0);
}

test("a header alone is counted with the configuration that is given", () => {
  const header = parseHeader(fileWith("a.weight", "b.weight_scale"));
  assert.deepEqual(parameterCount(header), { parameterCount: { F32: 2 }, parameterTotal: 2 });
  const config = { quantization_config: { quant_method: "fp8" } };
  assert.deepEqual(parameterCount(header, { config }), { parameterCount: { F32: 1 }, parameterTotal: 1 });
  assert.throws(() => parameterCount(header, { count: "all" }), TypeError);
});

test("a configuration of any form does no harm", () => {
  const header = parseHeader(fileWith("a.weight", "b.scales"));
  const methods = ["gptq", "mlx", "mxfp4", "compressed-tensors", "fp8", "bitsandbytes", "__proto__", "constructor", 4];
  const odd = [null, 1, "x", [], {}];
  for (const method of methods) odd.push({ quant_method: method }, { quant_method: method, bits: "4", format: null });
  for (const settings of odd) {
    const keys = ["quantization_config", "quantization", "text_config"];
    for (const config of [settings, ...keys.map((key) => ({ [key]: settings }))]) {
      const { parameterTotal } = parameterCount(header, { config });
      assert.ok(parameterTotal === 2 || parameterTotal === 1, JSON.stringify(config));
    }
  }
  const lists = { ignore: [1, null, "re:a(b+)+$"], modules_to_not_convert: { a: 1 }, config_groups: [{}] };
  const config = { quantization_config: { quant_method: "compressed-tensors", format: 4, ...lists } };
  assert.equal(parameterCount(header, { config }).parameterTotal, 2);
});

test("a pattern made to take long does not", () => {
  const header = parseHeader(fileWith(`${"a".repeat(20_000)}.weight`));
  const config = { quantization_config: { quant_method: "gptq", modules_to_not_convert: ["*a".repeat(60) + "b"] } };
  assert.equal(parameterCount(header, { config }).parameterTotal, 1);
});
