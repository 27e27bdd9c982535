// The programs of docs/guides/javascript.md run unchanged, with stand-ins for the page and for the Hub.

import assert from "node:assert/strict";
import { mkdtempSync, readFileSync, rmSync } from "node:fs";
import { tmpdir } from "node:os";
import { join } from "node:path";
import { test } from "node:test";

import { parseHeader } from "../../js/index.js";
import { fileOf, fileWith } from "./oracle.mjs";

const MODULE = new URL("../../js/index.js", import.meta.url);
const PAGE = readFileSync(new URL("../../docs/guides/javascript.md", import.meta.url), "utf8");
const SHARD = "model-00001-of-00001.safetensors";

const HUB = {
  "model.safetensors.index.json": JSON.stringify({ weight_map: { "a.weight": SHARD, "b.weight_scale": SHARD } }),
  "config.json": JSON.stringify({ quantization_config: { quant_method: "fp8" } }),
  [SHARD]: fileWith("a.weight", "b.weight_scale"),
};

async function hub(url) {
  const file = HUB[url.replace("https://huggingface.co/openai/gpt-oss-20b/resolve/main/", "")];
  return file === undefined ? new Response(null, { status: 404 }) : new Response(file);
}

test("the program of the page counts a model and shows a file that is dropped", async (t) => {
  const [, program] = /```js\n([^]*?)```/.exec(PAGE);
  const [lines, printed] = [[], []];
  let drop;
  const page = {
    fetch: hub,
    document: { createElement: () => ({}) },
    list: { append: (line) => lines.push(line.textContent) },
    dropZone: { addEventListener: (_, listener) => (drop = listener) },
  };
  // Node runs each file of tests in a process of its own.
  Object.assign(globalThis, page);
  t.mock.method(console, "log", (...words) => printed.push(words));
  const source = program.replace("./index.js", MODULE.href);
  await import(`data:text/javascript,${encodeURIComponent(source)}`);
  assert.deepEqual(printed.shift(), [2, "tensors,", 1, "parameters"]);
  const dropped = new File([fileWith("a\u202eb")], "m.safetensors");
  await drop({ preventDefault() {}, dataTransfer: { files: [dropped] } });
  assert.deepEqual(lines, ["a\\u202eb F32 [1]"]);
  assert.equal(printed[0][0].byteLength, 4);
});

/** The programs of js/README.md, each made to import the modules of this repository. */
const PROGRAMS = [...readFileSync(new URL("README.md", MODULE), "utf8").matchAll(/```js\n([^]*?)```/g)].map((
  [, program],
) => program.replace(/"\.\/(\w+\.js)"/g, (_, name) => JSON.stringify(new URL(name, MODULE).href)));

async function run(program) {
  await import(`data:text/javascript,${encodeURIComponent(program)}`);
}

test("the programs of js/README.md read a tensor, a row of it, and all of it in pieces", async (t) => {
  const entry = { dtype: "BF16", shape: [2, 2], data_offsets: [0, 8] };
  const file = fileOf(JSON.stringify({ "wpe.weight": entry }), 8);
  // 0.5, -3, 1, 2
  file.set([0x00, 0x3f, 0x40, 0xc0, 0x80, 0x3f, 0x00, 0x40], file.length - 8);
  const asked = [];
  globalThis.fetch = async (url) => (asked.push(url), new Response(file));
  const printed = [];
  t.mock.method(console, "log", (...words) => printed.push(words));
  const [row, , pieces] = PROGRAMS;
  await run(row);
  await run(pieces);
  assert.deepEqual(printed, [["BF16", [1, 2], 0.5], [[2, 2], 0.5], [3]]);
  const url = "https://huggingface.co/openai-community/gpt2/resolve/main/model.safetensors";
  assert.deepEqual(asked, [url, url]);
});

test("the program of js/README.md writes a file", async (t) => {
  const [folder, before] = [mkdtempSync(join(tmpdir(), "ingot-")), process.cwd()];
  t.after(() => rmSync(folder, { recursive: true }));
  process.chdir(folder);
  try {
    await run(PROGRAMS[1]);
  } finally {
    process.chdir(before);
  }
  const header = parseHeader(readFileSync(join(folder, "new.safetensors")));
  assert.deepEqual([...header.names()], ["bias", "weight"]);
  assert.deepEqual([...header.metadata], [["format", "pt"]]);
});

test("the names that the page imports are all that it uses", () => {
  const [, names] = /import \{ (.*) \} from "\.\/index\.js"/.exec(PAGE);
  const [, program] = /```js\n([^]*?)```/.exec(PAGE);
  for (const name of names.split(", ")) assert.ok(program.split(new RegExp(`\\b${name}\\b`)).length > 2, name);
});
