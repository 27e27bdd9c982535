// Servers on loopback: a correct one, and helpers for hostile ones, which each differ from it in one respect.

import { once } from "node:events";
import { createServer } from "node:http";

/** Runs a server during a test. `handle` answers a request; `requests` records all requests. */
export async function serve(t, handle) {
  const requests = [];
  const server = createServer((request, response) => {
    requests.push({ path: request.url, headers: request.headers, response });
    // A client may close a connection early.
    response.on("error", () => {});
    handle(request, response, requests.length);
  });
  server.listen(0, "127.0.0.1");
  await once(server, "listening");
  t.after(() => {
    server.closeAllConnections();
    server.close();
  });
  const { port } = server.address();
  const ranges = () => requests.map(({ headers }) => headers.range);
  return { url: `http://127.0.0.1:${port}`, requests, ranges };
}

/** Sends the requested part of `file` as a correct server does. `more` has additional headers. */
export function sendPart(request, response, file, more = {}) {
  const [, first, last] = /^bytes=(\d+)-(\d+)$/.exec(request.headers.range ?? "")?.map(Number) ?? [];
  if (first === undefined) {
    response.writeHead(200, { "content-length": file.length, etag: '"1"', ...more });
    response.end(file);
  } else if (first >= file.length) {
    response.writeHead(416, { "content-range": `bytes */${file.length}`, ...more });
    response.end();
  } else {
    const part = file.subarray(first, last + 1);
    const range = `bytes ${first}-${first + part.length - 1}/${file.length}`;
    response.writeHead(206, { "content-range": range, "content-length": part.length, etag: '"1"', ...more });
    response.end(part);
  }
}

/** A server of some files by their paths. */
export function serveFiles(t, files) {
  return serve(t, (request, response) => {
    const { pathname } = new URL(request.url, "http://localhost");
    const file = files[pathname];
    if (file === undefined) {
      response.writeHead(404, { "x-error-code": "EntryNotFound" });
      response.end("no such file");
    } else {
      sendPart(request, response, typeof file === "string" ? Buffer.from(file) : file);
    }
  });
}
