// Headers read from correct and from hostile servers. N1 to N19 are the threats to a reader of headers.

import assert from "node:assert/strict";
import { once } from "node:events";
import { readFile } from "node:fs/promises";
import { createServer as createRawServer } from "node:net";
import { test } from "node:test";
import { gzipSync } from "node:zlib";

import { readHeader, readIndex } from "../../js/index.js";
import { errorOf, fileOf, fileWith } from "./oracle.mjs";
import { sendPart, serve, serveFiles } from "./server.mjs";

const SMALL = fileWith("a", "b");

/** A file whose header is longer than the first request. */
function longFile(nbytes = 200_000) {
  return fileOf(`{"__metadata__":{"k":"${"v".repeat(nbytes)}"}}`);
}

/** Returns the error of reading from a server that answers with `handle`. */
async function refusal(t, handle, options = {}) {
  const server = await serve(t, handle);
  const error = await errorOf(() => readHeader(`${server.url}/m.safetensors?token=secret`, { retries: 0, ...options }));
  assert.doesNotMatch(error.message, /secret/);
  assert.ok(error.message.startsWith(`${server.url}/m.safetensors: `), error.message);
  return { error, ...server };
}

// --- Correct servers ---

test("a short header takes one request", async (t) => {
  const file = new Uint8Array([...SMALL]);
  const server = await serveFiles(t, { "/m.safetensors": file });
  const header = await readHeader(`${server.url}/m.safetensors`);
  assert.deepEqual([...header.names()], ["a", "b"]);
  assert.deepEqual(server.ranges(), ["bytes=0-131071"]);
  assert.equal(server.requests[0].headers["accept-encoding"], "identity");
});

test("a longer header takes two requests, of which none fetches a byte twice", async (t) => {
  const file = longFile();
  const server = await serveFiles(t, { "/m": file });
  const header = await readHeader(new URL(`${server.url}/m`));
  assert.equal(header.metadata.get("k").length, 200_000);
  assert.deepEqual(server.ranges(), ["bytes=0-131071", `bytes=131072-${file.length - 1}`]);
});

test("a header that just fits takes one request", async (t) => {
  const file = new Uint8Array([...fileOf('{"a":{"dtype":"U8","shape":[9],"data_offsets":[0,9]}}', 9)]);
  const server = await serveFiles(t, { "/m": file });
  const headBytes = file.length - 9;
  await readHeader(`${server.url}/m`, { firstBytes: headBytes });
  assert.deepEqual(server.ranges(), [`bytes=0-${headBytes - 1}`]);
  await readHeader(`${server.url}/m`, { firstBytes: headBytes - 1 });
  assert.deepEqual(server.ranges().slice(1), [`bytes=0-${headBytes - 2}`, `bytes=${headBytes - 1}-${headBytes - 1}`]);
});

test("no more of a large file is fetched than was asked for", async (t) => {
  const file = fileOf('{"a":{"dtype":"U8","shape":[1000000],"data_offsets":[0,1000000]}}', 1_000_000);
  const server = await serveFiles(t, { "/m": file });
  const answers = [];
  const fetch = async (...request) => (answers.push(await globalThis.fetch(...request)), answers.at(-1));
  const header = await readHeader(`${server.url}/m`, { fetch });
  assert.equal(header.fileSize, file.length);
  assert.deepEqual(answers.map(({ headers }) => headers.get("content-length")), ["131072"]);
});

test("the verdict is that of a file in memory, and names the address", async (t) => {
  const server = await serveFiles(t, {
    "/hole": fileOf('{"a":{"dtype":"U8","shape":[1],"data_offsets":[1,2]}}', 2),
    "/lfs": "version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n",
    "/empty": "",
    "/five": "12345",
  });
  const error = (path) => errorOf(() => readHeader(server.url + path));
  const hole = await error("/hole");
  assert.deepEqual([hole.code, hole.rule, hole.tensor, hole.path], ["hole", "F11", "a", `${server.url}/hole`]);
  assert.match((await error("/lfs")).message, /git lfs pull/);
  for (const [path, found] of [["/empty", 0], ["/five", 5]]) {
    const short = await error(path);
    assert.deepEqual([short.code, short.found], ["too-short", found]);
  }
});

test("headers of the caller are sent, and a fetch of the caller is used", async (t) => {
  const server = await serveFiles(t, { "/m": SMALL });
  const seen = [];
  const headers = new Headers({ authorization: "Bearer t", "x-key": "k", range: "bytes=0-1" });
  const fetch = (...request) => (seen.push(request), globalThis.fetch(...request));
  await readHeader(`${server.url}/m`, { headers, fetch });
  const [sent] = server.requests;
  assert.deepEqual([sent.headers.authorization, sent.headers["x-key"], seen.length], ["Bearer t", "k", 1]);
  assert.equal(sent.headers.range, "bytes=0-131071", "the range is not the caller's");
});

// --- N1 to N3: redirects ---

test("N1: what the caller sends stays with the caller's host, also when the chain comes back", async (t) => {
  const away = await serve(t, (_, response) => {
    response.writeHead(302, { location: `${home.url}/back` });
    response.end();
  });
  const home = await serve(t, (request, response) => {
    if (request.url === "/back") return sendPart(request, response, SMALL);
    response.writeHead(302, { location: request.url === "/start" ? "/middle" : `${away.url}/x` });
    response.end();
  });
  const secrets = { authorization: "Bearer t", cookie: "c=1", "x-api-key": "k", "proxy-authorization": "p" };
  await readHeader(`${home.url}/start`, { headers: secrets, allowPrivateRedirects: true });
  const what = ({ headers }) => [headers.authorization, headers["x-api-key"], headers.range];
  const sent = (server) => server.requests.map(what);
  const range = "bytes=0-131071";
  assert.deepEqual(sent(away), [[undefined, undefined, range]]);
  assert.equal(away.requests[0].headers.cookie, undefined);
  assert.deepEqual(sent(home), [["Bearer t", "k", range], ["Bearer t", "k", range], [undefined, undefined, range]]);
});

test("N1: five hops are followed, and no sixth", async (t) => {
  const hops = (count) => (request, response) => {
    const hop = Number(request.url.slice(1).replace(/\D.*/, "")) || 0;
    if (hop === count) return sendPart(request, response, SMALL);
    response.writeHead(307, { location: `/${hop + 1}` });
    response.end();
  };
  const server = await serve(t, hops(5));
  assert.equal((await readHeader(`${server.url}/0`)).size, 2);
  const { error, requests } = await refusal(t, hops(6));
  assert.deepEqual([error.code, requests.length], ["redirect-refused", 6]);
});

test("N2: other protocols are refused", async (t) => {
  for (const location of ["file:///etc/passwd", "ftp://a/b", "data:text/plain,x", "http://[", "http://u:p@a/"]) {
    const { error } = await refusal(t, (_, response) => {
      response.writeHead(302, { location });
      response.end();
    });
    assert.equal(error.code, "redirect-refused", location);
  }
  const { error } = await refusal(t, (_, response) => {
    response.writeHead(302);
    response.end();
  });
  assert.equal(error.code, "redirect-refused");
});

/**
 * A `fetch` that redirects the first request to `to` and answers later ones with a file. It replaces hosts that tests
 * must not contact.
 */
function redirecting(to, asked = []) {
  return async (url) => {
    asked.push(url);
    if (asked.length === 1) return new Response(null, { status: 302, headers: { location: to } });
    const headers = { "content-range": `bytes 0-${SMALL.length - 1}/${SMALL.length}` };
    return new Response(SMALL, { status: 206, headers });
  };
}

test("N2 and N3: a redirect may not lead to a weaker protocol, nor into the network of the client", async () => {
  const inward = ["127.0.0.1", "localhost", "a.localhost", "10.1.2.3", "172.16.0.1", "192.168.1.1", "169.254.169.254"];
  inward.push("100.64.0.1", "0.0.0.0", "2130706433", "0x7f.1");
  inward.push("[::1]", "[::]", "[::ffff:127.0.0.1]", "[fe80::1]", "[fd00::1]");
  const places = inward.map((host) => `https://${host}/`);
  for (const to of [...places, "http://example.com/"]) {
    const asked = [];
    const error = await errorOf(() => readHeader("https://example.org/m", { fetch: redirecting(to, asked) }));
    assert.deepEqual([error.code, asked.length], ["redirect-refused", 1], to);
  }
  for (const host of ["cdn.example.com", "11.1.2.3", "172.32.0.1", "100.128.0.1", "[2606:4700::1111]"]) {
    const to = `https://${host}/m`;
    assert.equal((await readHeader("https://example.org/m", { fetch: redirecting(to) })).size, 2, to);
  }
});

test("N3: a host that is private itself may not send elsewhere in the network of the client", async () => {
  const homes = ["http://localhost:8080/m", "http://10.0.0.1/m", "http://[fd00::1]/m"];
  const inward = ["http://10.0.0.2/", "http://localhost:22/", "http://169.254.169.254/", "http://[fe80::1]/"];
  for (const home of homes) {
    for (const to of inward) {
      const asked = [];
      const error = await errorOf(() => readHeader(home, { fetch: redirecting(to, asked) }));
      assert.deepEqual([error.code, asked.length], ["redirect-refused", 1], `${home} ${to}`);
      const allowed = { fetch: redirecting(to), allowPrivateRedirects: true };
      assert.equal((await readHeader(home, allowed)).size, 2, `${home} ${to}`);
    }
    const here = new URL("/elsewhere", home).href;
    assert.equal((await readHeader(home, { fetch: redirecting(here) })).size, 2, home);
    assert.equal((await readHeader(home, { fetch: redirecting("https://example.com/m") })).size, 2, home);
  }
});

test("N3: a host that was reached by a redirect names no other for the caller", async () => {
  const places = ["http://cdn.example.com/m", "http://10.0.0.1/m"];
  const asked = [];
  const fetch = async (url) => {
    asked.push(url);
    return new Response(null, { status: 302, headers: { location: places[asked.length - 1] } });
  };
  assert.equal((await errorOf(() => readHeader("http://10.0.0.9/m", { fetch }))).code, "redirect-refused");
  assert.deepEqual(asked, ["http://10.0.0.9/m", "http://cdn.example.com/m"]);
});

test("N3: addresses are public or not as the vectors that all readers share say", async () => {
  const vectors = JSON.parse(await readFile(new URL("../vectors/addresses.json", import.meta.url), "utf8"));
  assert.ok(vectors.length > 100);
  for (const [address, isPublic] of vectors) {
    const host = address.includes(":") ? `[${address}]` : address;
    const read = readHeader("https://example.org/m", { fetch: redirecting(`https://${host}/`) });
    const verdict = await read.then(() => true, (error) => error.code);
    assert.equal(verdict, isPublic || "redirect-refused", address);
  }
});

test("N2: a fetch that follows by itself is checked by where it came to", async () => {
  const answer = (url) => {
    const headers = { "content-range": `bytes 0-${SMALL.length - 1}/${SMALL.length}` };
    const response = new Response(SMALL, { status: 206, headers });
    Object.defineProperties(response, { redirected: { value: true }, url: { value: url } });
    return async () => response;
  };
  const read = (url) => readHeader("https://example.org/m", { fetch: answer(url) });
  assert.equal((await read("https://cdn.example.com/m")).size, 2);
  assert.equal((await errorOf(() => read("http://example.org/m"))).code, "redirect-refused");
  assert.equal((await errorOf(() => read("https://169.254.169.254/"))).code, "redirect-refused");
});

// --- N5 to N8: ranges and bodies ---

test("N5: a small file is taken whole from a server that ignores ranges", async (t) => {
  const server = await serve(t, (_, response) => response.end(SMALL));
  const header = await readHeader(`${server.url}/m`);
  assert.deepEqual([header.size, header.fileSize], [2, SMALL.length]);
});

test("N5: a large file is not", async (t) => {
  const body = Buffer.alloc(1 << 20, "x");
  const said = await refusal(t, (_, response) => {
    response.writeHead(200, { "content-length": 1e12 });
    response.write(body);
  });
  assert.equal(said.error.code, "range-ignored");
  const endless = await refusal(t, (_, response) => {
    const more = () => {
      while (!response.destroyed && response.write(body));
      response.once("drain", more);
    };
    more();
  });
  assert.equal(endless.error.code, "range-ignored");
  const [{ response }] = endless.requests;
  if (!response.destroyed) await once(response, "close");
});

test("N5: the whole file is never taken for a later part", async (t) => {
  const file = longFile();
  const { error } = await refusal(t, (request, response, count) => {
    if (count === 1) sendPart(request, response, file);
    else response.end(file);
  });
  assert.equal(error.code, "range-ignored");
});

test("N6: a part that is not the one that was asked for is refused", async (t) => {
  const last = SMALL.length - 1;
  for (
    const range of [
      undefined,
      `bytes 1-${last}/${last}`,
      `bytes 0-${last - 1}/${SMALL.length}`,
      `bytes 0-${last}/*`,
      `bytes 0-${last}/${last}`,
      `bytes 0-${last}/9007199254740993`,
      `bytes */${SMALL.length}`,
      `items 0-${last}/${SMALL.length}`,
      `bytes 0-${last}/${SMALL.length}, bytes 0-1/2`,
      "bytes 0-",
    ]
  ) {
    const { error } = await refusal(t, (_, response) => {
      response.writeHead(206, range === undefined ? {} : { "content-range": range });
      response.end(SMALL);
    });
    assert.equal(error.code, "wrong-range", range);
    assert.match(error.message, /expected bytes 0-131071 of the file, found/);
  }
  const { error } = await refusal(t, (_, response) => {
    response.writeHead(206, { "content-type": "multipart/byteranges; boundary=x" });
    response.end(`--x\r\ncontent-range: bytes 0-${last}/${SMALL.length}\r\n\r\n`);
  });
  assert.equal(error.code, "wrong-range");
});

test("N7: a body that is longer than it says is refused, and not read to its end", async (t) => {
  const range = { "content-range": `bytes 0-${SMALL.length - 1}/${SMALL.length}` };
  const longer = await refusal(t, (_, response) => {
    response.writeHead(206, range);
    response.end(Buffer.concat([SMALL, Buffer.from("x")]));
  });
  assert.equal(longer.error.code, "wrong-range");
  const endless = await refusal(t, (_, response) => {
    response.writeHead(206, range);
    const more = () => {
      while (!response.destroyed && response.write(Buffer.alloc(1 << 16)));
      response.once("drain", more);
    };
    more();
  });
  assert.equal(endless.error.code, "wrong-range");
});

test("N7: a body that breaks off is asked for again, and then an error", async (t) => {
  const cut = (_, response) => {
    const range = `bytes 0-${SMALL.length - 1}/${SMALL.length}`;
    response.writeHead(206, { "content-range": range, "content-length": SMALL.length });
    // End the connection only after the bytes were sent.
    response.write(SMALL.subarray(0, 9), () => response.socket.end());
  };
  const server = await serve(t, (request, response, count) => {
    if (count === 1) cut(request, response);
    else sendPart(request, response, SMALL);
  });
  assert.equal((await readHeader(`${server.url}/m`)).size, 2);
  const { error, requests } = await refusal(t, cut, { retries: 1 });
  assert.deepEqual([error.code, requests.length], ["short-read", 2]);
  const quiet = await refusal(t, (_, response) => {
    response.writeHead(206, { "content-range": `bytes 0-${SMALL.length - 1}/${SMALL.length}` });
    response.end(SMALL.subarray(0, 9));
  });
  assert.deepEqual([quiet.error.code, quiet.error.expected, quiet.error.found], ["short-read", SMALL.length, 9]);
});

test("N8: bytes that were encoded on the way are refused", async (t) => {
  const packed = gzipSync(SMALL);
  const part = await refusal(t, (_, response) => {
    const range = `bytes 0-${packed.length - 1}/${packed.length}`;
    response.writeHead(206, { "content-range": range, "content-encoding": "gzip" });
    response.end(packed);
  });
  assert.equal(part.error.code, "content-encoded");
  const whole = await refusal(t, (_, response) => {
    response.writeHead(200, { "content-encoding": "gzip" });
    response.end(packed);
  });
  assert.equal(whole.error.code, "content-encoded");
  const twice = await refusal(t, (request, response) => {
    sendPart(request, response, SMALL, { "content-encoding": ["identity", "gzip"] });
  });
  assert.equal(twice.error.code, "content-encoded");
  for (const plain of ["identity", "IDENTITY", "", ["identity", "identity"]]) {
    const headers = { "content-encoding": plain };
    const server = await serve(t, (request, response) => sendPart(request, response, SMALL, headers));
    assert.equal((await readHeader(`${server.url}/m`)).size, 2);
  }
});

// --- N9: one version ---

test("N9: parts of two versions are never put together", async (t) => {
  const [one, two] = [longFile(200_000), longFile(200_001)];
  const versions = {
    "another ETag": [{ etag: '"1"' }, { etag: '"2"' }],
    "an ETag that is gone": [{ etag: '"1"' }, { etag: [] }],
    "a weak ETag and another time": [
      { etag: 'W/"1"', "last-modified": "Mon, 01 Jan 2024 00:00:00 GMT" },
      { etag: 'W/"1"', "last-modified": "Mon, 01 Jan 2024 00:00:01 GMT" },
    ],
    "another time": [
      { etag: [], "last-modified": "Mon, 01 Jan 2024 00:00:00 GMT" },
      { etag: [], "last-modified": "Mon, 01 Jan 2024 00:00:01 GMT" },
    ],
  };
  for (const [what, headers] of Object.entries(versions)) {
    const { error } = await refusal(t, (request, response, count) => {
      sendPart(request, response, one, headers[count - 1]);
    });
    assert.equal(error.code, "changed", what);
  }
  const { error } = await refusal(t, (request, response, count) => {
    sendPart(request, response, count === 1 ? one : two);
  });
  assert.equal(error.code, "changed", "another size");
  const server = await serve(t, (request, response) => sendPart(request, response, one, { etag: [] }));
  assert.ok(await readHeader(`${server.url}/m`), "a server need not have versions");
});

// --- N10 to N12: time and sizes ---

test("N10: a server that says nothing, or goes on slowly, is left after the time that is allowed", async (t) => {
  const silent = await refusal(t, () => {}, { timeout: 100 });
  assert.equal(silent.error.code, "timeout");
  const slow = await refusal(
    t,
    (_, response) => {
      response.writeHead(206, { "content-range": `bytes 0-${SMALL.length - 1}/${SMALL.length}` });
      const drip = setInterval(() => response.write("x"), 20);
      response.on("close", () => clearInterval(drip));
    },
    { timeout: 150 },
  );
  assert.equal(slow.error.code, "timeout");
});

test("N10: headers without end are refused", async (t) => {
  const { error } = await refusal(t, (_, response) => {
    response.writeHead(206, { "x-long": "x".repeat(1 << 20) });
    response.end();
  });
  assert.equal(error.code, "network");
});

test("the caller's signal ends the reading with its own reason", async (t) => {
  const reason = new Error("enough");
  const asked = new AbortController();
  const server = await serve(t, () => asked.abort(reason));
  await assert.rejects(readHeader(`${server.url}/m`, { signal: asked.signal }), reason);
  assert.equal(server.requests.length, 1, "it is not tried again");
  await assert.rejects(readHeader(`${server.url}/m`, { signal: AbortSignal.abort(reason) }), reason);
  assert.equal(server.requests.length, 1);
  const waiting = new AbortController();
  const busy = await serve(t, (_, response) => {
    response.writeHead(503, { "retry-after": "9" });
    response.end();
    setTimeout(() => waiting.abort(reason), 50);
  });
  await assert.rejects(readHeader(`${busy.url}/m`, { signal: waiting.signal }), reason);
  assert.equal(busy.requests.length, 1, "a pause ends, too");
});

test("N11: a header that is too long is refused before it is asked for", async (t) => {
  const start = (length) => {
    const file = new Uint8Array(64).fill(0x20);
    new DataView(file.buffer).setBigUint64(0, length, true);
    file[8] = 0x7b;
    return file;
  };
  const lengths = new Map([[8n * 10n ** 12n, "header-too-large"], [25_000_001n, "header-too-large"]]);
  lengths.set(25_000_000n, "header-past-end");
  for (const [length, code] of lengths) {
    const { error, requests } = await refusal(t, (request, response) => sendPart(request, response, start(length)));
    assert.deepEqual([error.code, requests.length], [code, 1]);
  }
  const options = { maxHeaderBytes: 100 };
  const spaces = fileOf(" ".repeat(101));
  const { error } = await refusal(t, (request, response) => sendPart(request, response, spaces), options);
  assert.deepEqual([error.code, error.expected, error.found], ["header-too-large", 100, 101]);
});

test("N12: a server that is busy is asked again, twice and not for ever", async (t) => {
  const server = await serve(t, (request, response, count) => {
    if (count > 2) return sendPart(request, response, SMALL);
    response.writeHead(count === 1 ? 503 : 429, { "retry-after": count === 1 ? "0" : "" });
    response.end();
  });
  assert.equal((await readHeader(`${server.url}/m`)).size, 2);
  const busy = await refusal(
    t,
    (_, response) => {
      response.writeHead(503);
      response.end();
    },
    { retries: 2 },
  );
  assert.deepEqual([busy.error.code, busy.error.status, busy.requests.length], ["http-status", 503, 3]);
});

test("N12: a server that wants to be left alone for years is", async (t) => {
  for (const wait of ["315360000", "9".repeat(400), "Fri, 31 Dec 2100 23:59:59 GMT", ["0", "315360000"]]) {
    const { error, requests } = await refusal(
      t,
      (_, response) => {
        response.writeHead(429, { "retry-after": wait });
        response.end();
      },
      { retries: 5 },
    );
    assert.deepEqual([error.status, requests.length], [429, 1], wait);
  }
});

test("a status that will not pass is an error at once", async (t) => {
  for (const status of [204, 400, 401, 403, 404, 410, 412, 416, 501]) {
    const { error, requests } = await refusal(
      t,
      (_, response) => {
        response.writeHead(status, { "x-error-code": "RepoNotFound" });
        response.end();
      },
      { retries: 5 },
    );
    assert.deepEqual([error.code, error.status, requests.length], ["http-status", status, 1]);
    assert.match(error.message, new RegExp(`expected status 206, found ${status} \\(RepoNotFound\\)$`));
  }
});

// --- N14, N16, N19 ---

test("N14 and N16: an address with a password or with control characters is refused, and not repeated", async () => {
  for (const url of ["https://user:secret@example.org/m", "https://secret@example.org/m"]) {
    const error = await errorOf(() => readHeader(url, { fetch: () => assert.fail("it was asked") }));
    assert.equal(error.code, "invalid-url");
    assert.doesNotMatch(error.message + error.path, /secret/);
  }
  const odd = ["https://example.org/m\r\nx-evil: 1", "https://example.org/a b", "ftp://a/b"];
  for (const url of odd) {
    assert.equal((await errorOf(() => readHeader(url))).code, "invalid-url", url);
  }
});

/** A server that answers each connection with these bytes. */
async function serveRaw(t, answer) {
  const server = createRawServer((socket) => {
    socket.on("error", () => {});
    socket.once("data", () => socket.end(answer));
  });
  server.listen(0, "127.0.0.1");
  await once(server, "listening");
  t.after(() => server.close());
  return `http://127.0.0.1:${server.address().port}`;
}

test("N19: a chunk of 2^64 bytes, or two lengths that differ, are refused", async (t) => {
  const head = `HTTP/1.1 206 x\r\nContent-Range: bytes 0-${SMALL.length - 1}/${SMALL.length}\r\n`;
  for (
    const rest of [
      "Transfer-Encoding: chunked\r\n\r\n10000000000000000\r\nabc\r\n0\r\n\r\n",
      `Transfer-Encoding: chunked\r\nContent-Length: ${SMALL.length}\r\n\r\n5\r\nabcde\r\n0\r\n\r\n`,
      `Content-Length: 5\r\nContent-Length: ${SMALL.length}\r\n\r\nabcde`,
    ]
  ) {
    const url = await serveRaw(t, head + rest);
    const error = await errorOf(() => readHeader(url, { retries: 0 }));
    assert.ok(["network", "short-read"].includes(error.code), error.message);
  }
});

test("no server at all is an error of the network", async (t) => {
  const server = await serve(t, () => {});
  const error = await errorOf(() => readHeader(server.url.replace(/\d+$/, "1"), { retries: 0 }));
  assert.equal(error.code, "network");
  assert.ok(error.cause);
});

// --- Indexes ---

test("an index may come compressed, and is refused where it is too large unpacked", async (t) => {
  const text = '{"weight_map":{"a":"a.safetensors"}}';
  const server = await serve(t, (request, response) => {
    response.writeHead(200, { "content-encoding": "gzip" });
    response.end(request.url === "/bomb" ? gzipSync(Buffer.alloc(250_000_001, " ")) : gzipSync(text));
  });
  assert.deepEqual((await readIndex(`${server.url}/i.json`)).shards, ["a.safetensors"]);
  assert.equal(server.requests[0].headers.range, undefined);
  assert.equal((await errorOf(() => readIndex(`${server.url}/bomb`))).code, "index-too-large");
});
