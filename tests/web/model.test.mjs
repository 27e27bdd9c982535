// Models of one and of many files: on servers, in repositories of the Hub, and from folders that were dropped.

import assert from "node:assert/strict";
import { readFile } from "node:fs/promises";
import { once } from "node:events";
import { test } from "node:test";

import { hubUrl, parameterCount, readModel, tensorRange } from "../../js/index.js";
import { errorOf, fileWith } from "./oracle.mjs";
import { sendPart, serve, serveFiles } from "./server.mjs";

const ONE = "model-00001-of-00002.safetensors";
const TWO = "model-00002-of-00002.safetensors";

function indexOf(weightMap, metadata) {
  return JSON.stringify({ metadata, weight_map: weightMap });
}

const INDEX = indexOf({ a: ONE, b: TWO, c: TWO }, { total_size: 12 });
const SHARDS = { [ONE]: fileWith("a"), [TWO]: fileWith("b", "c") };

/** Returns the same files below a folder. */
function below(folder, files) {
  return Object.fromEntries(Object.entries(files).map(([name, file]) => [folder + name, file]));
}

function file(name, content, relativePath) {
  const given = new File([content], name);
  if (relativePath) Object.defineProperty(given, "webkitRelativePath", { value: relativePath });
  return given;
}

// --- Servers ---

test("a sharded model takes one request for the index and one for each shard", async (t) => {
  const server = await serveFiles(t, below("/m/", { "x.safetensors.index.json": INDEX, ...SHARDS }));
  const model = await readModel(`${server.url}/m/x.safetensors.index.json?download=true`);
  assert.deepEqual([...model.shards.keys()], [ONE, TWO]);
  assert.deepEqual([model.size, model.warnings, model.config], [3, [], null]);
  assert.deepEqual([...model].map(({ shard, tensor }) => [shard, tensor.name]), [[ONE, "a"], [TWO, "b"], [TWO, "c"]]);
  assert.equal(model.path, `${server.url}/m/x.safetensors.index.json`);
  const { shard, position, nbytes } = tensorRange(model, "c");
  assert.deepEqual([shard, position, nbytes], [TWO, SHARDS[TWO].length - 4, 4]);
  assert.equal(model.get("d"), undefined);
  assert.equal((await errorOf(() => tensorRange(model, "d"))).code, "unknown-tensor");
  assert.equal(server.requests.length, 3);
});

test("one file is a model, too", async (t) => {
  const server = await serveFiles(t, { "/m/one%20file.bt": fileWith("a") });
  const model = await readModel(new URL(`${server.url}/m/one%20file.bt`));
  assert.deepEqual([...model.shards.keys()], ["one file.bt"]);
  assert.deepEqual([model.index, model.size, model.has("a"), model.has("b")], [null, 1, true, false]);
  assert.deepEqual(tensorRange(model, "a").shard, "one file.bt");
});

test("as many headers are fetched at a time as is allowed", async (t) => {
  const names = Array.from({ length: 30 }, (_, number) => `${String(number).padStart(2, "0")}.safetensors`);
  const weightMap = Object.fromEntries(names.map((name) => [`t${name}`, name]));
  for (const concurrency of [4, 20]) {
    const waiting = [];
    let [asked, most] = [0, 0];
    const server = await serve(t, (request, response) => {
      const name = request.url.slice(1);
      if (name === "i.json") return response.end(indexOf(weightMap));
      asked++;
      most = Math.max(most, waiting.push(() => sendPart(request, response, fileWith(`t${name}`))));
      // Answers when the allowed number of requests wait, the latest request first.
      if (waiting.length >= concurrency || asked === names.length) {
        for (const answer of waiting.splice(0).reverse()) answer();
      }
      return undefined;
    });
    const model = await readModel(`${server.url}/i.json`, concurrency === 20 ? {} : { concurrency });
    assert.equal(most, concurrency);
    assert.deepEqual([...model.shards.keys()], names, "in their order, whoever answered first");
  }
});

test("the first shard that fails ends the others", { timeout: 30_000 }, async (t) => {
  const pairs = Array.from({ length: 40 }, (_, number) => [`t${number}`, `${number}.safetensors`]);
  const weightMap = Object.fromEntries(pairs);
  const unanswered = [];
  const server = await serve(t, (request, response) => {
    if (request.url === "/i.json") response.end(indexOf(weightMap));
    else if (request.url !== "/1.safetensors") unanswered.push(once(response, "close"));
    else response.writeHead(404).end();
  });
  const error = await errorOf(() => readModel(`${server.url}/i.json`, { concurrency: 3 }));
  assert.deepEqual([error.code, error.status, error.path], ["http-status", 404, `${server.url}/1.safetensors`]);
  assert.ok(server.requests.length <= 5, `${server.requests.length}`);
  // Connections whose answer is not needed any more are closed.
  await Promise.all(unanswered);
});

test("what a shard holds and the index does not say is refused, and the other way round", async (t) => {
  const cases = {
    "missing-tensor": [{ a: ONE, b: TWO, c: TWO, d: TWO }, "d", "the index says that it is in `TWO`, which lacks it"],
    "extra-tensor": [{ a: ONE, b: TWO }, "c", "it is in `TWO`, and the index does not name it"],
    "missing-tensor, which is elsewhere": [
      { a: ONE, b: ONE, c: TWO },
      "b",
      "the index says that it is in `ONE`, which lacks it; it is in `TWO`",
    ],
  };
  for (const [what, [weightMap, tensor, reason]] of Object.entries(cases)) {
    const server = await serveFiles(t, below("/", { "i.json": indexOf(weightMap), ...SHARDS }));
    const error = await errorOf(() => readModel(`${server.url}/i.json`));
    assert.deepEqual([error.code, error.tensor], [what.split(",")[0], tensor]);
    const said = reason.replace("ONE", ONE).replace("TWO", TWO);
    assert.equal(error.message, `${server.url}/i.json: tensor \`${tensor}\`: ${said}`);
  }
  const twice = below("/", { "i.json": indexOf({ a: ONE, b: TWO }), [ONE]: fileWith("a", "b"), [TWO]: fileWith("b") });
  const server = await serveFiles(t, twice);
  assert.equal((await errorOf(() => readModel(`${server.url}/i.json`))).code, "tensor-in-two-shards");
});

test("a total that is wrong is a warning", async (t) => {
  const index = indexOf({ a: ONE }, { total_size: 5 });
  const server = await serveFiles(t, below("/", { "i.json": index, [ONE]: fileWith("a") }));
  const { warnings } = await readModel(`${server.url}/i.json`);
  assert.deepEqual(warnings, ["the index says that all tensors take 5 bytes, and they take 4"]);
});

test("a shard's name stays beside the index, however it is encoded", async (t) => {
  const asked = [];
  const odd = "a b#c?d&e+ü.safetensors";
  const server = await serve(t, (request, response) => {
    asked.push(request.url);
    if (request.url.endsWith("/i.json")) response.end(indexOf({ a: `sub/${odd}` }));
    else sendPart(request, response, fileWith("a"));
  });
  await readModel(`${server.url}/m/i.json`);
  assert.equal(decodeURIComponent(asked[1]), `/m/sub/${odd}`);
  const vectors = await readFile(new URL("../vectors/shards_in_urls.json", import.meta.url), "utf8");
  for (const { shard, accepted } of JSON.parse(vectors)) {
    const files = await serveFiles(t, { "/m/i.json": indexOf({ a: "first", b: shard }) });
    const error = await errorOf(() => readModel(`${files.url}/m/i.json`, { concurrency: 1 }));
    const expected = accepted ? ["http-status", null, 2] : ["invalid-shard-name", "I6", 1];
    assert.deepEqual([error.code, error.rule, files.requests.length], expected, shard);
  }
});

test("the caller may say where shards are", async (t) => {
  const server = await serveFiles(t, { "/i.json": indexOf({ a: ONE }), "/signed": fileWith("a") });
  const shardUrl = (shard, indexUrl) => new URL(`/signed?for=${shard}&of=${indexUrl.pathname}`, indexUrl);
  await readModel(`${server.url}/i.json`, { shardUrl });
  assert.equal(server.requests[1].path, `/signed?for=${ONE}&of=/i.json`);
  const error = await errorOf(() => readModel(`${server.url}/i.json`, { shardUrl: () => "file:///etc/passwd" }));
  assert.equal(error.code, "invalid-url");
});

test("the configuration is read where it is asked for", async (t) => {
  const config = JSON.stringify({ quantization_config: { quant_method: "gptq", bits: 4 } });
  const server = await serveFiles(t, { "/m.safetensors": fileWith("a.weight", "a.scales"), "/config.json": config });
  assert.equal((await readModel(`${server.url}/m.safetensors`)).config, null);
  assert.equal(server.requests.length, 1);
  const model = await readModel(`${server.url}/m.safetensors`, { config: true });
  assert.equal(parameterCount(model).parameterTotal, 1);
  assert.equal(parameterCount(model, { config: null }).parameterTotal, 1, "that of the model, where none is given");
  assert.equal(parameterCount(model, { config: {} }).parameterTotal, 2);
  const given = await readModel(`${server.url}/m.safetensors`, { config: { model_type: "x" } });
  assert.deepEqual(given.config, { model_type: "x" });
  const none = await serveFiles(t, { "/m.safetensors": fileWith("a") });
  assert.equal((await readModel(`${none.url}/m.safetensors`, { config: true })).config, null);
  for (const broken of ["{", "[]", "null", "1"]) {
    const bad = await serveFiles(t, { "/m.safetensors": fileWith("a"), "/config.json": broken });
    const error = await errorOf(() => readModel(`${bad.url}/m.safetensors`, { config: true }));
    assert.deepEqual([error.code, error.path], ["invalid-config", `${bad.url}/config.json`]);
  }
});

// --- The Hub ---

test("addresses of the Hub", async () => {
  const urls = {
    "hf://gpt2": "https://huggingface.co/gpt2/resolve/main/",
    "hf://datasets/squad@x": "https://huggingface.co/datasets/squad/resolve/x/",
    "hf://owner/name": "https://huggingface.co/owner/name/resolve/main/",
    "hf://models/owner/name/": "https://huggingface.co/owner/name/resolve/main/",
    "hf://owner/name/a b/m#1.bt": "https://huggingface.co/owner/name/resolve/main/a%20b/m%231.bt",
    "hf://owner/name@v1.0/m": "https://huggingface.co/owner/name/resolve/v1.0/m",
    "hf://owner/name@refs/pr/7/m": "https://huggingface.co/owner/name/resolve/refs%2Fpr%2F7/m",
    "hf://owner/name@a%2Fb": "https://huggingface.co/owner/name/resolve/a%2Fb/",
    "hf://datasets/owner/name/m": "https://huggingface.co/datasets/owner/name/resolve/main/m",
    "hf://spaces/owner/name@x/m": "https://huggingface.co/spaces/owner/name/resolve/x/m",
  };
  for (const [address, url] of Object.entries(urls)) assert.equal(hubUrl(address).href, url, address);
  assert.equal(hubUrl("hf://a/b", { hub: "http://localhost:8/x/" }).href, "http://localhost:8/x/a/b/resolve/main/");
  const odd = ["hf://", "hf:///a", "hf://a/b@/c", "hf://a/b@%/c", "hf://a/b@%ff", "hf://a//c"];
  const leading = ["hf://../../x", "hf://a/../b", "hf://a/b/../../../c", "hf://a/b@..", "hf://a/b@%2e%2e/c"];
  for (const address of [...odd, ...leading]) {
    const error = await errorOf(() => hubUrl(address));
    assert.equal(error.code, "invalid-url", address);
  }
});

test("of a repository the single file is taken before the index", async (t) => {
  const base = "/o/n/resolve/main/";
  const single = { "model.safetensors": fileWith("x") };
  const sharded = { "model.safetensors.index.json": INDEX, ...SHARDS };
  const read = async (files) => {
    const server = await serveFiles(t, below(base, files));
    return [await readModel("hf://o/n", { hub: server.url }), server.requests.length];
  };
  assert.deepEqual((([model, requests]) => [model.size, requests])(await read({ ...single, ...sharded })), [1, 1]);
  assert.deepEqual((([model, requests]) => [model.size, requests])(await read(sharded)), [3, 4]);
  const error = await errorOf(() => read({ "pytorch_model.bin": "x" }));
  assert.match(error.message, /^http.*\/o\/n\/resolve\/main\/: the directory holds no checkpoint: expected model\.saf/);
  assert.equal(error.code, "no-checkpoint");
});

test("what is not missing but forbidden is said to be so", async (t) => {
  const server = await serve(t, (_, response) => {
    response.writeHead(401, { "x-error-code": "GatedRepo" });
    response.end();
  });
  const error = await errorOf(() => readModel("hf://o/n", { hub: server.url }));
  assert.deepEqual([error.status, server.requests.length], [401, 1]);
  assert.match(error.message, /GatedRepo/);
});

// --- Files ---

test("files that were dropped are a model", async () => {
  const shards = Object.entries(SHARDS).map(([name, content]) => file(name, content));
  const index = file("model.safetensors.index.json", INDEX);
  const others = [file("README.md", "x"), file("config.json", '{"model_type":"x"}')];
  const model = await readModel([...others, ...shards, index], { config: true });
  assert.deepEqual([model.size, model.config, model.path], [3, { model_type: "x" }, "model.safetensors.index.json"]);
  const single = await readModel([file("a.bt", fileWith("a")), ...others]);
  assert.deepEqual([single.size, [...single.shards.keys()]], [1, ["a.bt"]]);
  assert.equal((await readModel(new Blob([fileWith("a")]))).size, 1);
  assert.equal((await readModel(file("weights", fileWith("a")))).size, 1);
});

test("files of a folder keep their places", async () => {
  const inFolder = (path, content) => file(path.split("/").at(-1), content, path);
  const index = indexOf({ a: "sub/a.safetensors" });
  const files = [inFolder("m/i.safetensors.index.json", index), inFolder("m/sub/a.safetensors", fileWith("a"))];
  assert.equal((await readModel(files)).size, 1);
  const elsewhere = [files[0], inFolder("m/a.safetensors", fileWith("a"))];
  const error = await errorOf(() => readModel(elsewhere));
  assert.equal(error.code, "missing-shards");
  const reason = "1 of the 1 files that the index names are not there: `sub/a.safetensors`";
  assert.equal(error.message, `m/i.safetensors.index.json: ${reason}`);
});

test("files of which several could be meant are refused, and none", async () => {
  const error = async (...names) => errorOf(() => readModel(names.map((name) => file(name, fileWith("a")))));
  assert.equal((await error("a.safetensors", "b.safetensors")).code, "ambiguous-checkpoint");
  assert.equal((await error("a.index.json", "b.index.json")).code, "ambiguous-checkpoint");
  assert.equal((await error("a.txt", "b.txt")).code, "no-checkpoint");
  await assert.rejects(readModel([]), { code: "no-checkpoint" });
  await assert.rejects(readModel([file("a.bt", "x"), "b.bt"]), TypeError);
  await assert.rejects(readModel([file("a.bt", "x"), file("a.bt", "x")]), TypeError);
  await assert.rejects(readModel(null), TypeError);
});
