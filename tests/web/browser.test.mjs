// Differences in browsers: they hide redirects, have an address of the page, and have no files on disk.

import assert from "node:assert/strict";
import { test } from "node:test";

import { readHeader } from "../../js/index.js";
import { errorOf, fileWith } from "./oracle.mjs";

const FILE = fileWith("a");

/** Returns a `fetch` like a browser's: every address redirects to `end`, and the caller sees only that address. */
function browserFetch(asked, end) {
  return async (url, { redirect }) => {
    asked.push([url, redirect]);
    if (redirect === "manual") {
      const hidden = Response.error();
      Object.defineProperty(hidden, "type", { value: "opaqueredirect" });
      return hidden;
    }
    const headers = { "content-range": `bytes 0-${FILE.length - 1}/${FILE.length}` };
    const response = new Response(FILE, { status: 206, headers });
    Object.defineProperties(response, { redirected: { value: true }, url: { value: end } });
    return response;
  };
}

test("redirects that are hidden are found out once, and then left to the browser", async () => {
  const asked = [];
  const read = (end) => readHeader("https://example.org/m", { fetch: browserFetch(asked, end) });
  assert.equal((await read("https://cdn.example.com/m")).size, 1);
  await read("https://cdn.example.com/m");
  assert.deepEqual(asked.map(([, redirect]) => redirect), ["manual", "follow", "follow"]);
  assert.equal((await errorOf(() => read("https://10.0.0.1/m"))).code, "redirect-refused");
});

test("headers that a browser would send to another host are never sent with a redirect that it follows", async () => {
  const read = (asked, headers) =>
    readHeader("https://example.org/m", { fetch: browserFetch(asked, "https://cdn.example.com/m"), headers });
  // Each twice: before and after the reader knows that redirects are hidden.
  for (
    const headers of [{ "X-Api-Key": "key" }, { authorization: "Bearer t", cookie: "c" }, [[
      "x-amz-security-token",
      "t",
    ]], new Headers({ accept: "*/*" })]
  ) {
    const asked = [];
    const error = await errorOf(() => read(asked, headers));
    assert.deepEqual([error.code, asked.map(([, redirect]) => redirect)], ["redirect-refused", ["manual"]]);
    assert.match(error.message, /the header `/);
  }
  const asked = [];
  assert.equal((await read(asked, { Authorization: "Bearer t" })).size, 1);
  assert.equal(asked.at(-1)[1], "follow");
});

test("an address is relative to the page", async (t) => {
  globalThis.document = { baseURI: "https://example.org/viewer/index.html" };
  t.after(() => delete globalThis.document);
  const asked = [];
  const fetch = browserFetch(asked, "https://example.org/models/m.safetensors");
  await readHeader("../models/m.safetensors?x=1", { fetch });
  assert.equal(asked[0][0], "https://example.org/models/m.safetensors?x=1");
});

test("a server that hides Content-Range from other origins is told what to do", async () => {
  const fetch = async () => new Response(FILE, { status: 206 });
  const error = await errorOf(() => readHeader("https://example.org/m", { fetch }));
  assert.equal(error.code, "wrong-range");
  assert.match(error.message, /expose Content-Range and ETag/);
});
