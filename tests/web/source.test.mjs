// Ranges of every kind of source, whole and as streams: the right bytes, or an error. After a file is open, servers lie
// in the same ways as in the tests of headers.

import assert from "node:assert/strict";
import { once } from "node:events";
import { openAsBlob } from "node:fs";
import { mkdtemp, rm, truncate, writeFile } from "node:fs/promises";
import { tmpdir } from "node:os";
import { join } from "node:path";
import { test } from "node:test";
import { gzipSync } from "node:zlib";

import { openSource, readHeader, readIndex, readRange, streamRange, tensorRange } from "../../js/index.js";
import { errorOf, fileOf } from "./oracle.mjs";
import { sendPart, serve, serveFiles } from "./server.mjs";

const NBYTES = 300_000;
const HEADER = `{"a":{"dtype":"U8","shape":[${NBYTES}],"data_offsets":[0,${NBYTES}]}}`;
const FILE = fileOf(HEADER, NBYTES).map((byte, at) => (at < 8 + HEADER.length ? byte : (at * 7) >> 3));
const START = FILE.length - NBYTES;

/** Returns all bytes of a stream, and the length of each piece. */
async function collected(stream) {
  const [parts, lengths] = [[], []];
  for await (const piece of stream) {
    parts.push(Buffer.from(piece));
    lengths.push(piece.length);
  }
  return { bytes: Buffer.concat(parts), lengths };
}

/** Returns sources for memory, for a Blob and for a server. */
async function threeSources({ url }) {
  return [await openSource(FILE), new Blob([FILE]), await openSource(`${url}/m`, { firstBytes: 64 })];
}

/** Every way to read a range. */
const WAYS = {
  readRange: (source, begin, end, options) => readRange(source, begin, end, options),
  into: (source, begin, end, options) => {
    const into = new Uint8Array(Math.max(0, end - begin));
    return readRange(source, begin, end, { ...options, into });
  },
  streamRange: async (source, begin, end, options) =>
    (await collected(streamRange(source, begin, end, { ...options, pieceBytes: 4096 }))).bytes,
};

/** Opens a source on a server that is correct until the file is open. Later `handle` answers. */
async function opened(t, handle, options = {}, file = FILE) {
  const server = await serve(t, (request, response, count) => {
    if (count === 1) sendPart(request, response, file);
    else handle(request, response, count - 1);
  });
  const url = `${server.url}/m.safetensors?token=secret`;
  const source = await openSource(url, { retries: 0, firstBytes: 64, ...options });
  return { source, ...server };
}

/** Returns the error of each way to read from such a server. */
async function refusals(t, handle, options = {}) {
  const errors = [];
  for (const [way, read] of Object.entries(WAYS)) {
    const { source, requests, url } = await opened(t, handle, options);
    const error = await errorOf(() => read(source, START, FILE.length));
    assert.ok(error.message.startsWith(`${url}/m.safetensors: `), error.message);
    assert.doesNotMatch(error.message + error.path, /secret/);
    errors.push({ error, requests: requests.length - 1, way });
  }
  return errors;
}

async function refusedAs(t, code, handle, options) {
  for (const { error, way } of await refusals(t, handle, options)) assert.equal(error.code, code, `${way}: ${error}`);
}

// --- The right bytes ---

test("every source gives the same bytes, in every way", async (t) => {
  const folder = await mkdtemp(join(tmpdir(), "source-"));
  t.after(() => rm(folder, { recursive: true }));
  const path = join(folder, "m.safetensors");
  await writeFile(path, FILE);
  const server = await serveFiles(t, { "/m": FILE });
  const shared = new Uint8Array(new SharedArrayBuffer(FILE.length));
  shared.set(FILE);
  const sources = {
    bytes: await openSource(FILE),
    buffer: await openSource(FILE.buffer),
    shared: await openSource(shared),
    blob: await openSource(new Blob([FILE])),
    disk: await openSource(await openAsBlob(path)),
    url: await openSource(`${server.url}/m`, { firstBytes: 1000 }),
    foreign: { name: "mine", size: FILE.length, read: async (begin, end) => FILE.slice(begin, end) },
    "not opened": new Blob([FILE]),
  };
  const ends = [0, 1, 8, 999, 1000, 1001, 4096, 65_536, FILE.length - 1, FILE.length];
  for (const [what, source] of Object.entries(sources)) {
    assert.equal(source.size, FILE.length, what);
    for (const begin of ends) {
      for (const end of ends.filter((end) => end >= begin)) {
        for (const [way, read] of Object.entries(WAYS)) {
          const found = await read(source, begin, end);
          assert.equal(Buffer.compare(found, FILE.subarray(begin, end)), 0, `${what} ${way} ${begin}..${end}`);
        }
      }
    }
    if (what === "not opened") continue;
    assert.deepEqual(await source.read(3, 9), FILE.slice(3, 9), what);
  }
  assert.ok(server.requests.every(({ headers }) => headers["accept-encoding"] === "identity"));
});

test("a header is read from an open source, by no more requests than it needs", async (t) => {
  const server = await serveFiles(t, { "/m": FILE });
  const source = await openSource(`${server.url}/m?token=secret`, { firstBytes: START });
  assert.deepEqual([source.name, source.size], [`${server.url}/m`, FILE.length]);
  const header = await readHeader(source);
  const { position, nbytes } = tensorRange(header, "a");
  assert.deepEqual(await readRange(source, position, position + nbytes), FILE.slice(START));
  assert.deepEqual(server.ranges(), [`bytes=0-${START - 1}`, `bytes=${START}-${FILE.length - 1}`]);
  const foreign = { name: "mine", size: FILE.length, read: async (begin, end) => FILE.slice(begin, end) };
  assert.equal((await readHeader(foreign)).size, 1);
  const index = '{"weight_map":{"a":"a.safetensors"}}';
  assert.deepEqual((await readIndex(await openSource(new Blob([index])))).shards, ["a.safetensors"]);
});

test("a small file that came whole, and an empty one, take no more requests", async (t) => {
  const server = await serve(t, (request, response) => {
    if (request.url === "/empty") sendPart(request, response, Buffer.alloc(0));
    else response.end(FILE);
  });
  const source = await openSource(`${server.url}/m`);
  assert.deepEqual(await readRange(source, 5, FILE.length), FILE.slice(5));
  const empty = await openSource(`${server.url}/empty`);
  assert.deepEqual([empty.size, (await readRange(empty, 0, 0)).length], [0, 0]);
  assert.equal(server.requests.length, 2);
});

test("an empty range asks for nothing", async (t) => {
  const { source, requests } = await opened(t, () => assert.fail("it was asked"));
  for (const read of Object.values(WAYS)) assert.equal((await read(source, 500, 500)).length, 0);
  assert.equal(requests.length, 1);
});

test("several ranges are read at once", async (t) => {
  const server = await serveFiles(t, { "/m": FILE });
  const source = await openSource(`${server.url}/m`, { firstBytes: 64 });
  const begins = Array.from({ length: 20 }, (_, number) => START + number * 1000);
  const found = await Promise.all(begins.map((begin) => readRange(source, begin, begin + 5000)));
  found.forEach((bytes, place) => assert.deepEqual(bytes, FILE.slice(begins[place], begins[place] + 5000)));
});

// --- Memory ---

test("memory of the caller is filled and given back, and none beside it touched", async (t) => {
  const server = await serveFiles(t, { "/m": FILE });
  for (const source of await threeSources(server)) {
    for (const buffer of [new ArrayBuffer(60_000), new SharedArrayBuffer(60_000)]) {
      const all = new Uint8Array(buffer).fill(0xa5);
      const into = new Uint8Array(buffer, 7, 50_000);
      assert.equal(await readRange(source, START, START + 50_000, { into }), into);
      assert.equal(into.buffer, buffer, "it is no other memory");
      assert.equal(Buffer.compare(into, FILE.subarray(START, START + 50_000)), 0);
      assert.ok([...all.subarray(0, 7), ...all.subarray(50_007)].every((byte) => byte === 0xa5));
    }
  }
});

test("memory of another length or type is refused before anything is asked", async (t) => {
  const { source, requests } = await opened(t, () => assert.fail("it was asked"));
  for (const length of [0, 9, 11]) {
    await assert.rejects(readRange(source, 100, 110, { into: new Uint8Array(length) }), RangeError);
  }
  const detached = new Uint8Array(10);
  structuredClone(detached, { transfer: [detached.buffer] });
  await assert.rejects(readRange(source, 100, 110, { into: detached }), RangeError);
  for (const into of [null, [], new ArrayBuffer(10), new Int8Array(10), new DataView(new ArrayBuffer(10))]) {
    await assert.rejects(readRange(source, 100, 110, { into }), TypeError);
  }
  assert.equal(requests.length, 1);
});

test("pieces have the length that was asked for, and go round in one buffer", async (t) => {
  const server = await serveFiles(t, { "/m": FILE });
  for (const source of await threeSources(server)) {
    for (const pieceBytes of [1 << 20, NBYTES, 70_000, 24, 7]) {
      const end = START + (pieceBytes < 100 ? 1001 : NBYTES);
      const buffers = new Set();
      const lengths = [];
      for await (const piece of streamRange(source, START, end, { pieceBytes })) {
        buffers.add(piece.buffer);
        lengths.push(piece.length);
      }
      const whole = Math.floor((end - START) / pieceBytes);
      const rest = (end - START) % pieceBytes;
      assert.deepEqual(lengths, [...Array(whole).fill(pieceBytes), ...(rest > 0 ? [rest] : [])]);
      assert.equal(buffers.size, 1);
    }
  }
  const { lengths } = await collected(streamRange(new Blob([new Uint8Array(4 << 20)]), 0, 4 << 20));
  assert.deepEqual(lengths, [3 << 20, 1 << 20]);
});

test("a piece may be sent to a worker with its memory", async (t) => {
  const server = await serveFiles(t, { "/m": FILE });
  for (const source of await threeSources(server)) {
    const sent = [];
    for await (const piece of streamRange(source, START, FILE.length, { pieceBytes: 70_000 })) {
      sent.push(structuredClone(piece, { transfer: [piece.buffer] }));
    }
    assert.equal(Buffer.compare(Buffer.concat(sent), FILE.subarray(START)), 0);
  }
});

// --- Arguments ---

test("ranges outside of the file, and what is no source, are refused before anything is asked", async (t) => {
  const { source, requests } = await opened(t, () => assert.fail("it was asked"));
  const outside = [[-1, 5], [5, 4], [0, FILE.length + 1], [0.5, 2], [0, NaN], [Infinity, Infinity], [2 ** 53, 2 ** 53]];
  for (const [begin, end] of outside) {
    await assert.rejects(readRange(source, begin, end), RangeError, `${begin}..${end}`);
    assert.throws(() => streamRange(source, begin, end), RangeError, `${begin}..${end}`);
  }
  for (const [begin, end] of [["0", 5], [0, 5n], [null, 5], [0, undefined]]) {
    await assert.rejects(readRange(source, begin, end), TypeError);
  }
  for (const other of ["https://example.org/m", new URL("https://example.org/m"), null, undefined, {}, 5]) {
    await assert.rejects(readRange(other, 0, 0), TypeError);
    assert.throws(() => streamRange(other, 0, 0), TypeError);
  }
  for (const pieceBytes of [-1, 1.5, "9", NaN]) {
    assert.throws(() => streamRange(source, 0, 9, { pieceBytes }), TypeError);
  }
  assert.throws(() => streamRange(source, 0, 9, { pieceBytes: 0 }), RangeError);
  assert.equal(requests.length, 1);
});

test("a source of the caller that gives other bytes than it was asked for is found out", async () => {
  const source = (read) => ({ name: "mine", size: 100, read: async (begin, end) => read(end - begin) });
  for (const [way, read] of Object.entries(WAYS)) {
    const short = await errorOf(() => read(source((nbytes) => new Uint8Array(nbytes - 1)), 0, 100));
    assert.deepEqual([short.code, short.path, short.expected], ["short-read", "mine", 100], way);
    const long = await errorOf(() => read(source((nbytes) => new Uint8Array(nbytes + 1)), 0, 100));
    assert.equal(long.code, "wrong-range", way);
    await assert.rejects(read(source(() => "text"), 0, 100), TypeError, way);
    const own = new Error("its own");
    await assert.rejects(
      read(
        source(() => {
          throw own;
        }),
        0,
        100,
      ),
      own,
      way,
    );
  }
});

// --- Lying servers: N1 to N9 ---

test("N1 to N3: each range follows redirects as the header does", async (t) => {
  const away = await serveFiles(t, { "/m": FILE });
  const home = await serve(t, (_, response) => {
    response.writeHead(302, { location: `${away.url}/m` });
    response.end();
  });
  const headers = { authorization: "Bearer t", "x-api-key": "k" };
  const source = await openSource(`${home.url}/m`, { headers, allowPrivateRedirects: true, firstBytes: 64 });
  assert.deepEqual(await readRange(source, START, FILE.length), FILE.slice(START));
  assert.deepEqual(home.requests.map(({ headers }) => headers.authorization), ["Bearer t", "Bearer t"]);
  const secrets = away.requests.map(({ headers }) => headers.authorization ?? headers["x-api-key"]);
  assert.deepEqual(secrets, [undefined, undefined]);
  const places = [`${away.url}/m`, "file:///etc/passwd", "http://169.254.169.254/", "http://u:p@a/", "/again"];
  for (const location of places) {
    await refusedAs(t, "redirect-refused", (_, response) => {
      response.writeHead(302, { location });
      response.end();
    });
  }
});

test("N5 and N6: an answer that is not the range that was asked for is refused", async (t) => {
  const last = FILE.length - 1;
  await refusedAs(t, "range-ignored", (_, response) => response.end(FILE));
  const ranges = [undefined, `bytes 0-${last}/${FILE.length}`, `bytes ${START}-${last - 1}/${FILE.length}`];
  ranges.push(`bytes ${START + 1}-${last}/${FILE.length}`, `bytes ${START}-${last}/*`, `bytes ${START}-${last}/1`, "x");
  for (const range of ranges) {
    await refusedAs(t, "wrong-range", (_, response) => {
      response.writeHead(206, { etag: '"1"', ...(range && { "content-range": range }) });
      response.end(FILE.subarray(START));
    });
  }
  await refusedAs(t, "wrong-range", (_, response) => {
    response.writeHead(206, { "content-type": "multipart/byteranges; boundary=x", etag: '"1"' });
    response.end("--x\r\n");
  });
});

/** The correct headers of an answer with the range from START to the end. */
const WHOLE = { "content-range": `bytes ${START}-${FILE.length - 1}/${FILE.length}`, etag: '"1"' };

test("N7: an answer that is longer than its range is refused, also one without end", async (t) => {
  await refusedAs(t, "wrong-range", (_, response) => {
    response.writeHead(206, WHOLE);
    response.write(FILE.subarray(START));
    response.end("x");
  });
  for (
    const { error } of await refusals(t, (_, response) => {
      response.writeHead(206, WHOLE);
      const more = () => {
        while (!response.destroyed && response.write(Buffer.alloc(1 << 16)));
        response.once("drain", more);
      };
      more();
    })
  ) {
    assert.equal(error.code, "wrong-range");
  }
});

test("N8: bytes that were encoded on the way are refused", async (t) => {
  for (const encoding of ["gzip", ["identity", "gzip"], "br"]) {
    await refusedAs(t, "content-encoded", (_, response) => {
      response.writeHead(206, { ...WHOLE, "content-encoding": encoding });
      response.end(gzipSync(FILE.subarray(START)));
    });
  }
});

test("N9: a range is of the version that was opened, or refused", async (t) => {
  const longer = WHOLE["content-range"].replace(/\/.*/, `/${FILE.length + 1}`);
  const others = [{ etag: '"2"' }, { etag: 'W/"1"' }, { etag: [] }, { "content-range": longer }];
  for (const other of others) {
    await refusedAs(t, "changed", (_, response) => {
      response.writeHead(206, { ...WHOLE, ...other });
      response.end(FILE.subarray(START));
    });
  }
  await refusedAs(t, "malformed-response", (request, response) => {
    sendPart(request, response, FILE, { etag: ['"1"', '"2"'] });
  });
});

test("a status that will not pass is an error at once", async (t) => {
  for (const status of [204, 401, 403, 404, 412, 416, 501]) {
    const refused = await refusals(
      t,
      (_, response) => {
        response.writeHead(status);
        response.end();
      },
      { retries: 5 },
    );
    for (const { error, requests } of refused) {
      assert.deepEqual([error.code, error.status, requests], ["http-status", status, 1]);
    }
  }
});

// --- Answers that break off ---

/** Sends `nbytes` of the requested part, and closes the connection. */
function sendCut(request, response, nbytes, more = {}, file = FILE) {
  const [, first, last] = /^bytes=(\d+)-(\d+)$/.exec(request.headers.range).map(Number);
  const headers = { "content-range": `bytes ${first}-${last}/${file.length}`, "content-length": last + 1 - first };
  response.writeHead(206, { ...headers, etag: '"1"', ...more });
  // Close the connection only after the bytes were sent.
  response.write(file.subarray(first, first + nbytes), () => response.socket.end());
}

test("N7: what breaks off is asked for again from there, and no byte twice", async (t) => {
  for (const [way, read] of Object.entries(WAYS)) {
    const { source, ranges } = await opened(
      t,
      (request, response, count) => {
        if (count === 1) sendCut(request, response, 100_000);
        else sendPart(request, response, FILE);
      },
      { retries: 1 },
    );
    const found = await read(source, START, FILE.length);
    assert.equal(Buffer.compare(found, FILE.subarray(START)), 0, way);
    const last = FILE.length - 1;
    assert.deepEqual(ranges().slice(1), [`bytes=${START}-${last}`, `bytes=${START + 100_000}-${last}`], way);
  }
});

test("N7: and after the tries that are allowed it is an error", async (t) => {
  const cut = (request, response) => sendCut(request, response, 9);
  for (const { error, requests } of await refusals(t, cut, { retries: 1 })) {
    assert.deepEqual([error.code, requests], ["short-read", 2]);
  }
  for (
    const { error } of await refusals(t, (_, response) => {
      response.writeHead(206, WHOLE);
      response.end(FILE.subarray(START, START + 9));
    })
  ) {
    assert.deepEqual([error.code, error.expected, error.found], ["short-read", NBYTES, 9]);
  }
  for (
    const { error } of await refusals(t, (_, response) => {
      response.writeHead(206, WHOLE);
      response.end();
    })
  ) {
    assert.equal(error.code, "short-read");
  }
});

test("N9: the rest of an answer that broke off is of the same version, or refused", async (t) => {
  const two = FILE.slice(0, -1);
  const later = {
    "another ETag": (request, response) => sendPart(request, response, FILE, { etag: '"2"' }),
    "another size": (request, response) => sendPart(request, response, two),
    "the whole file": (_, response) => response.end(FILE),
  };
  for (const [what, answer] of Object.entries(later)) {
    const handle = (request, response, count) => {
      if (count === 1) sendCut(request, response, 1000);
      else answer(request, response);
    };
    const code = what === "the whole file" ? "range-ignored" : "changed";
    for (const { error, requests } of await refusals(t, handle, { retries: 3 })) {
      assert.deepEqual([error.code, requests], [code, 2], what);
    }
  }
});

test("tries are there again where one brought much, so that a long range outlives many cuts", async (t) => {
  const file = new Uint8Array(6 << 20).map((_, at) => at >> 9);
  const cut = (request, response) => sendCut(request, response, 1_200_000, {}, file);
  for (const [way, read] of Object.entries(WAYS)) {
    const { source, requests } = await opened(t, cut, { retries: 1 }, file);
    const found = await read(source, 100, file.length);
    assert.equal(Buffer.compare(found, file.subarray(100)), 0, way);
    assert.equal(requests.length, 1 + 6, way);
  }
});

test("N12: a busy server is asked again, and one that wants to be left alone for years is not", async (t) => {
  for (const [way, read] of Object.entries(WAYS)) {
    const { source } = await opened(
      t,
      (request, response, count) => {
        if (count > 1) return sendPart(request, response, FILE);
        response.writeHead(503, { "retry-after": "0" });
        response.end();
      },
      { retries: 1 },
    );
    assert.equal(Buffer.compare(await read(source, START, FILE.length), FILE.subarray(START)), 0, way);
  }
  const busy = (_, response) => {
    response.writeHead(429, { "retry-after": "315360000" });
    response.end();
  };
  for (const { error, requests } of await refusals(t, busy, { retries: 5 })) {
    assert.deepEqual([error.status, requests], [429, 1]);
  }
});

// --- Time ---

test("N10: a server that says nothing, stops midway or drips is left", async (t) => {
  // It is also that of the opening, which a busy machine must manage.
  const timeout = 1500;
  await refusedAs(t, "timeout", () => {}, { timeout });
  await refusedAs(
    t,
    "timeout",
    (_, response) => {
      response.writeHead(206, WHOLE);
      response.write(FILE.subarray(START, START + 50_000));
    },
    { timeout },
  );
  // No single pause is long, but the whole answer takes longer than the limit for its size.
  await refusedAs(
    t,
    "timeout",
    (_, response) => {
      response.writeHead(206, WHOLE);
      const drip = setInterval(() => response.write("x"), 20);
      response.on("close", () => clearInterval(drip));
    },
    { timeout },
  );
});

test("the time that the caller takes for a piece is not the server's", async (t) => {
  const { source } = await opened(t, (request, response) => sendPart(request, response, FILE), { timeout: 2800 });
  const parts = [];
  for await (const piece of streamRange(source, START, FILE.length, { pieceBytes: 100_000 })) {
    parts.push(Buffer.from(piece));
    if (parts.length < 3) await new Promise((resolve) => setTimeout(resolve, 1500));
  }
  assert.equal(Buffer.compare(Buffer.concat(parts), FILE.subarray(START)), 0);
});

test("the largest time that can be set is not none", async (t) => {
  const { source } = await opened(t, (request, response) => sendPart(request, response, FILE), {
    timeout: Number.MAX_SAFE_INTEGER,
  });
  assert.deepEqual(await readRange(source, START, FILE.length), FILE.slice(START));
});

// --- Signals ---

test("a signal ends the reading at any moment with its own reason, and the request with it", async (t) => {
  const reason = new Error("enough");
  const moments = {
    "before the answer": () => {},
    "within the body": (_, response) => {
      response.writeHead(206, WHOLE);
      response.write(FILE.subarray(START, START + 50_000));
    },
    "in a pause": (_, response) => {
      response.writeHead(503, { "retry-after": "9" });
      response.end();
    },
  };
  for (const [moment, handle] of Object.entries(moments)) {
    for (const [way, read] of Object.entries(WAYS)) {
      const controller = new AbortController();
      const { source, requests } = await opened(
        t,
        (request, response) => {
          handle(request, response);
          setTimeout(() => controller.abort(reason), 50);
        },
        { retries: 3 },
      );
      await assert.rejects(read(source, START, FILE.length, { signal: controller.signal }), reason, `${moment} ${way}`);
      assert.equal(requests.length, 2, "it is not tried again");
      const { response } = requests[1];
      if (moment !== "in a pause" && !response.destroyed) await once(response, "close");
    }
  }
});

test("a signal that is aborted already ends every source before it is read", async () => {
  const signal = AbortSignal.abort(new Error("enough"));
  const foreign = { name: null, size: 100, read: () => assert.fail("it was read") };
  for (const source of [new Uint8Array(100), new Blob([new Uint8Array(100)]), foreign]) {
    for (const read of Object.values(WAYS)) await assert.rejects(read(source, 0, 100, { signal }), signal.reason);
  }
  await assert.rejects(openSource("https://example.org/m", { signal, fetch: () => assert.fail() }), signal.reason);
});

test("a signal ends what a source of the caller, or a fetch that knows none, waits for", async () => {
  const reason = new Error("enough");
  const never = () => new Promise(() => {});
  const foreign = { name: "mine", size: 100, read: never };
  let asked = 0;
  const headers = { "content-range": `bytes 0-63/${FILE.length}` };
  const start = () => new Response(FILE.slice(0, 64), { status: 206, headers });
  const fetch = async () => (asked++ === 0 ? start() : never());
  const remote = await openSource("https://example.org/m", { fetch, firstBytes: 64 });
  for (const source of [foreign, remote]) {
    for (const read of Object.values(WAYS)) {
      const controller = new AbortController();
      setTimeout(() => controller.abort(reason), 20);
      await assert.rejects(read(source, 0, 100, { signal: controller.signal }), reason);
    }
  }
});

test("the signal of the opening is not that of later reads", async (t) => {
  const controller = new AbortController();
  const answer = (request, response) => sendPart(request, response, FILE);
  const { source } = await opened(t, answer, { signal: controller.signal });
  controller.abort();
  assert.deepEqual(await readRange(source, START, FILE.length), FILE.slice(START));
});

test("a loop that is left ends its request", async (t) => {
  const { source, requests } = await opened(t, (_, response) => {
    response.writeHead(206, WHOLE);
    response.write(FILE.subarray(START, START + 50_000));
  });
  for await (const piece of streamRange(source, START, FILE.length, { pieceBytes: 1000 })) {
    assert.equal(piece.length, 1000);
    break;
  }
  const { response } = requests[1];
  if (!response.destroyed) await once(response, "close");
  const idle = streamRange(source, START, FILE.length);
  await idle.return();
  assert.equal(requests.length, 2, "a stream that nobody reads asks for nothing");
});

// --- Files ---

test("a file on disk that changes is an error and no other bytes", async (t) => {
  const folder = await mkdtemp(join(tmpdir(), "source-"));
  t.after(() => rm(folder, { recursive: true }));
  const path = join(folder, "m.safetensors");
  await writeFile(path, FILE);
  const source = await openSource(await openAsBlob(path));
  await truncate(path, START + 10);
  for (const read of Object.values(WAYS)) {
    const error = await errorOf(() => read(source, START, FILE.length));
    assert.equal(error.code, "read");
    assert.ok(error.cause);
  }
});

test("a Blob whose stream fills no memory of its reader is read too", async () => {
  class Old extends Blob {
    slice(...range) {
      const part = super.slice(...range);
      const stream = () => {
        const [first, second] = [part.slice(0, 1000), part.slice(1000)].map((blob) => blob.arrayBuffer());
        return new ReadableStream({
          async start(controller) {
            const chunks = [await first, new ArrayBuffer(0), await second];
            for (const bytes of chunks) controller.enqueue(new Uint8Array(bytes));
            controller.close();
          },
        });
      };
      return Object.defineProperty(part, "stream", { value: stream });
    }
  }
  for (const read of Object.values(WAYS)) {
    assert.equal(Buffer.compare(await read(new Old([FILE]), START, FILE.length), FILE.subarray(START)), 0);
  }
});
