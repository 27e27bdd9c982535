"""Every way to write a file or a checkpoint, for tests that make their calls fail or kill them."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import numpy

import ingot
import ingot._write.background
import ingot._write.edit
import ingot._write.rearrange
import ingot._write.shards
import ingot._write.writer
import ingot.numpy

SMALL = {"a": numpy.full(3000, 2.0), "b": numpy.full(500, 3, numpy.int16).reshape(5, 100).T}
# Large enough to be written by several threads, and around the page cache where the file system permits.
LARGE = {"a": numpy.full(36 << 20, 2, numpy.uint8), "b": numpy.zeros((7, 3)).T}
# The file behind the URL in the environment. Saving an array makes NumPy import its last modules.
SERVED = ingot.numpy.save(SMALL, {"from": "elsewhere"})
# Three pieces of a block of a cache, and more bytes than the request for the header returns.
STORED = ingot.numpy.save({"a": numpy.arange(75_000, dtype=numpy.int32)})

Writers = dict[str, Callable[[], object]]


def savers(path: str, durable: bool, **options: Any) -> Writers:
    """Ways to save arrays at `path`."""

    def save(tensors: dict[str, Any], **others: Any) -> None:
        saved = ingot.numpy.save_file(tensors, path, durable=durable, **options, **others)
        if saved is not None:
            saved.result()

    return {
        "small": lambda: save(SMALL),
        "large": lambda: save(LARGE),
        "background": lambda: save(LARGE, background=True),
        "background without snapshot": lambda: save(
            SMALL, background=True, write_options={"snapshot": False}
        ),
        "checksums": lambda: save(SMALL, checksums=True),
        "large with checksums": lambda: save(LARGE, checksums=["sha256", "modelspec"]),
        "bintensors": lambda: save(SMALL, format="bintensors"),
    }


def fill(writer: ingot.Writer) -> None:
    with writer:
        for name, tensor in SMALL.items():
            writer.write(name, tensor)
        writer.commit()


def fill_together(path: str, durable: bool) -> None:
    with ingot.Writer(path, SMALL, durable=durable, overwrite=True) as writer:
        with ingot.Writer.join(path) as other:
            other.write("b", SMALL["b"])
        writer.write("a", SMALL["a"])
        writer.commit()


def writers(path: str, durable: bool) -> Writers:
    """Return ways to write the file at `path`, with new contents; `other.safetensors` is a second source."""
    spec = {"a": {"dtype": "U8", "shape": [3], "data": b"abc"}}
    anew: dict[str, Any] = {"durable": durable, "overwrite": True}
    return savers(path, durable) | {
        "buffers": lambda: ingot.serialize_file(spec, path, durable=durable),
        "merge": lambda: ingot.merge(["model.safetensors", "other.safetensors"], path, **anew),
        "rewrite": lambda: ingot.rewrite("other.safetensors", path, rename=str.upper, **anew),
        "download": lambda: ingot.download(os.environ["URL"], path, **anew),
        "writer": lambda: fill(ingot.Writer(path, SMALL, durable=durable, overwrite=True)),
        "joined": lambda: fill_together(path, durable),
        "appender": lambda: fill(
            ingot.Writer(path, write_options={"reserve_header": 500}, durable=durable, overwrite=True)
        ),
    }


def editors(path: str, durable: bool) -> Writers:
    """Ways to change the file that is at `path`, and to make a checkpoint of it."""
    return {
        "metadata": lambda: ingot.update_metadata(path, {"k": "v" * 5000}, durable=durable),
        "tensor": lambda: ingot.replace_tensor(path, "a", numpy.zeros(20_000), durable=durable),
        "split": lambda: ingot.split(path, "shards", 50, durable=durable, overwrite=True),
    }
