"""An imitation of a distant Hub: every answer is delayed, and another host has the large files.

It serves one sharded model without tensors: headers like a large model's, and zeros for the data. It
runs in a separate process, in one thread that never blocks, so that its own time does not matter.
"""

import asyncio
import json
import multiprocessing
import re
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

COMMIT = "0123456789abcdef0123456789abcdef01234567"
INDEX = "model.safetensors.index.json"
REQUEST = re.compile(rb"(GET|HEAD) (\S+) HTTP/1\.1\r\n")
RANGE = re.compile(rb"\r\nrange: bytes=(\d+)-(\d+)\r\n", re.IGNORECASE)


@dataclass
class Model:
    """The index, and the header and the size of each shard."""

    index: bytes
    shards: dict[str, tuple[bytes, int]]

    @classmethod
    def of(cls, shards: int, tensors: int) -> "Model":
        """As mixtures of experts have it: many matrices in 8 bits, each with scales."""
        weight_map, files, layer = {}, {}, 0
        for number in range(shards):
            name = f"model-{number + 1:05d}-of-{shards:05d}.safetensors"
            header, end = {"__metadata__": {"format": "pt"}}, 0
            for rank in range(tensors):
                layer += rank % 2 == 0
                stem = f"model.layers.{number}.mlp.experts.{layer}.gate_proj.weight"
                tensor = stem if rank % 2 == 0 else f"{stem}_scale_inv"
                dtype, shape, nbytes = ("F8_E4M3", [2048, 7168], 2048 * 7168)
                if rank % 2:
                    dtype, shape, nbytes = ("F32", [16, 56], 16 * 56 * 4)
                header[tensor] = {"dtype": dtype, "shape": shape, "data_offsets": [end, end + nbytes]}
                weight_map[tensor] = name
                end += nbytes
            text = json.dumps(header, separators=(",", ":")).encode()
            text += b" " * (-len(text) % 8)
            files[name] = (len(text).to_bytes(8, "little") + text, 8 + len(text) + end)
        return cls(json.dumps({"metadata": {}, "weight_map": weight_map}).encode(), files)


class Connection(asyncio.Protocol):
    """One connection. Answers leave a while after their requests came."""

    def __init__(self, model: Model, delay: float, cdn: str) -> None:
        self.model, self.delay, self.cdn = model, delay, cdn
        self.came = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = transport

    def data_received(self, data: bytes) -> None:
        self.came += data
        while b"\r\n\r\n" in self.came:
            head, _, self.came = self.came.partition(b"\r\n\r\n")
            answer = self.answer(head + b"\r\n")
            asyncio.get_running_loop().call_later(self.delay, self.transport.write, answer)

    def answer(self, head: bytes) -> bytes:
        method, path = REQUEST.match(head).groups()
        name = path.decode().rpartition("/")[2]
        asked = RANGE.search(head)
        span = (int(asked[1]), int(asked[2]) + 1) if asked else None
        if path.startswith(b"/blob/"):
            return part(*self.model.shards[name], span)
        if name == INDEX:
            index = self.model.index
            more = [f'ETag: "{len(index)}"', f"X-Repo-Commit: {COMMIT}"]
            return part(index, len(index), span, more, body=method == b"GET")
        if name in self.model.shards:
            where = [f"Location: {self.cdn}/blob/{name}", f"X-Repo-Commit: {COMMIT}"]
            return response("302 Found", ["Content-Length: 0", *where])
        return response("404 Not Found", ["Content-Length: 0", "X-Error-Code: EntryNotFound"])


def part(
    start: bytes, nbytes: int, span: tuple[int, int] | None, more: list[str] | None = None, body: bool = True
) -> bytes:
    """A part of a file that begins with `start`, and then has zeros."""
    begin, end = span or (0, nbytes)
    end = min(end, nbytes)
    lines = [f"Content-Length: {end - begin}", *(more or [])]
    if span:
        lines.append(f"Content-Range: bytes {begin}-{end - 1}/{nbytes}")
    data = start[begin:end]
    head = response("206 Partial Content" if span else "200 OK", lines)
    return head + data + bytes(end - begin - len(data)) if body else head


def response(status: str, lines: list[str]) -> bytes:
    return "\r\n".join([f"HTTP/1.1 {status}", *lines, "\r\n"]).encode()


def serve(hub: socket.socket, cdn: socket.socket, shards: int, tensors: int, delay: float) -> None:
    model = Model.of(shards, tensors)
    url = "http://{}:{}".format(*cdn.getsockname())

    async def main() -> None:
        loop = asyncio.get_running_loop()
        for listening in (hub, cdn):
            await loop.create_server(lambda: Connection(model, delay, url), sock=listening, backlog=512)
        await asyncio.Event().wait()

    asyncio.run(main())


@contextmanager
def serving(shards: int, tensors: int, delay: float) -> Iterator[str]:
    """Run it, and yield the address of the Hub."""
    with socket.create_server(("127.0.0.1", 0)) as hub, socket.create_server(("127.0.0.1", 0)) as cdn:
        context = multiprocessing.get_context("fork")
        process = context.Process(target=serve, args=(hub, cdn, shards, tensors, delay), daemon=True)
        process.start()
        try:
            yield "http://{}:{}".format(*hub.getsockname())
        finally:
            process.terminate()
            process.join()
