"""Small files that expand to large ones: the budget rejects each before it takes memory or time."""

from __future__ import annotations

import io
import zipfile
from collections.abc import Callable
from pathlib import Path

import msgpack
import pytest
import torch

from ingot._convert.limits import ALWAYS_HELD_NBYTES
from support.processes import run

# Memory that a rejection may take beyond the budget: copies of a growing list, and the file itself.
ROOM = 256 << 20


def program(*opcodes: bytes) -> bytes:
    return b"\x80\x02" + b"".join(opcodes) + b"."


def number(value: int) -> bytes:
    raw = value.to_bytes(8, "little", signed=True)
    return b"\x8a" + bytes([len(raw)]) + raw


def text(value: str) -> bytes:
    raw = value.encode()
    return b"X" + len(raw).to_bytes(4, "little") + raw


def called(name: str, *arguments: bytes) -> bytes:
    module, _, function = name.rpartition(".")
    return f"c{module}\n{function}\n".encode() + b"(" + b"".join(arguments) + b"tR"


def kept(slot: int, value: bytes) -> bytes:
    """Return opcodes that store a value in a slot of the memo."""
    return value + b"r" + slot.to_bytes(4, "little")


def again(slot: int) -> bytes:
    return b"j" + slot.to_bytes(4, "little")


def listed(*values: bytes) -> bytes:
    return b"](" + b"".join(values) + b"e"


def doubled(levels: int, begin: bytes, pair: Callable[[bytes], bytes], last: bytes = b"") -> bytes:
    """Return opcodes of nested lists: each level has the level before twice, and takes a few bytes."""
    above = [kept(level + 1, pair(again(level))) for level in range(levels)]
    return listed(kept(0, begin), *above, last)


ARRAY = (
    b"cnumpy.core.multiarray\n_reconstruct\ncnumpy\nndarray\nK\x00\x85C\x01b\x87R(K\x01K\x00\x85cnumpy\ndtype\n"
    + text("f4")
    + b"\x85R\x89C\x00tb"
)
BOTH = {
    "one text in bytes, thousands of times": lambda: program(
        listed(kept(0, text("x" * 1_000_000)), *[called("_codecs.encode", again(0), text("latin1"))] * 6000)
    ),
    "lists that stand in each other": lambda: program(
        doubled(60, b"]", lambda one: listed(one, one, text("x")))
    ),
    "a key that stands for as many": lambda: program(
        doubled(40, b")", lambda one: b"(" + one + one + b"t", b"}" + again(40) + b"K\x01s")
    ),
    "empty lists": lambda: program(b"](" + b"]" * 1_500_000 + b"e"),
    "marks": lambda: program(b"(" * 1_500_000),
    "slots": lambda: program(b"]" + b"".join(b"r" + i.to_bytes(4, "little") for i in range(500_000))),
    "one list as dict, thousands of times": lambda: program(
        listed(
            kept(0, listed(*[b"K" + bytes([i % 256]) + text(f"{i:5}") + b"\x86" for i in range(50_000)])),
            *[called("collections.OrderedDict", again(0))] * 5000,
        )
    ),
}
OF_TORCH = BOTH | {
    "bytes by their number": lambda: program(called("builtins.bytearray", number(5 << 30))),
    "bytes of bytes": lambda: program(
        listed(
            kept(0, called("builtins.bytearray", text("x" * 1_000_000), text("latin1"))),
            *[called("builtins.bytearray", again(0))] * 6000,
        )
    ),
    "bytes by way of another call": lambda: program(
        called(
            "torch._tensor._rebuild_from_type_v2",
            b"cbuiltins\nbytearray\n",
            b"ctorch\nTensor\n",
            number(5 << 30) + b"\x85",
            b"}",
        )
    ),
    "a tensor by its size": lambda: program(called("torch.FloatTensor", number(1 << 16), number(1 << 16))),
    "a new tensor by its size": lambda: program(b"ctorch\nFloatTensor\n", number(5 << 30), b"\x85\x81"),
    "sets of one list": lambda: program(
        listed(
            kept(0, listed(*[text(f"{i}") for i in range(50_000)])),
            *[called("builtins.set", again(0))] * 5000,
        )
    ),
    "an attribute of every list": lambda: program(
        listed(
            kept(0, b"}(" + b"".join(text(f"{i}") + b"N" for i in range(50_000)) + b"u"),
            *[called("collections.OrderedDict") + again(0) + b"b"] * 5000,
        )
    ),
    "tensors below a long key": lambda: long_key(),
    "tensors in lists that stand in each other": lambda: program(
        doubled(20, tensor(), lambda one: listed(one, one))
    ),
}


def tensor() -> bytes:
    """Return opcodes of an empty tensor."""
    return called(
        "torch._utils._rebuild_tensor_v2",
        b"(" + text("storage") + b"ctorch\nFloatStorage\n" + text("0") + text("cpu") + b"K\x00tQ",
        *(b"K\x00", b"K\x00\x85", b"K\x01\x85", b"\x89", called("collections.OrderedDict")),
    )


def long_key() -> bytes:
    return program(b"}" + text("k" * 1_000_000) + listed(kept(0, tensor()), *[again(0)] * 5000) + b"s")


def torch_archive(pickled: bytes, method: int = zipfile.ZIP_STORED) -> bytes:
    torch.save({}, buffer := io.BytesIO())
    out = io.BytesIO()
    with zipfile.ZipFile(buffer) as old, zipfile.ZipFile(out, "w", method) as new:
        for info in old.infolist():
            new.writestr(info.filename, pickled if info.filename.endswith("data.pkl") else old.read(info))
        new.writestr(old.namelist()[0].partition("/")[0] + "/data/0", b"")
    return out.getvalue()


def old_torch(pickled: bytes) -> bytes:
    torch.save({}, buffer := io.BytesIO(), _use_new_zipfile_serialization=False)
    # Three pickles, then the pickle of the objects, which is an empty dict here.
    at = buffer.getvalue().rindex(b"\x80\x02}")
    end = buffer.getvalue().index(b".", at) + 1
    return buffer.getvalue()[:at] + pickled + buffer.getvalue()[end:]


def storage_of(count: int) -> bytes:
    storage = b"(" + text("storage") + b"ctorch\nDoubleStorage\n" + text("0") + text("cpu") + number(count)
    return program(storage + b"NtQ")


MSGPACK = {
    "empty lists": lambda: b"\x81\xa1a\xdd" + (8 << 20).to_bytes(4, "big") + b"\x90" * (8 << 20),
    "empty dicts": lambda: b"\x81\xa1a\xdd" + (4 << 20).to_bytes(4, "big") + b"\x80" * (4 << 20),
    "dimensions": lambda: msgpack.packb(
        {"a": msgpack.ExtType(1, msgpack.packb(([2**63 - 1] * 500_000, "float32", b"")))}
    ),
}


def files() -> dict[str, bytes]:
    """Every hostile file, by its name."""
    made: dict[str, bytes] = {}
    for name, make in OF_TORCH.items():
        made[f"{name}.pt"] = torch_archive(make())
    made["packed.pt"] = torch_archive(program(b"]" * 300_000_000), zipfile.ZIP_DEFLATED)
    for name in ("bytes by their number", "lists that stand in each other"):
        made[f"old {name}.pt"] = old_torch(OF_TORCH[name]())
    made["old storage.pt"] = old_torch(storage_of(1 << 30))
    for name, make in BOTH.items():
        made[f"{name}.pdparams"] = make()
    largest = b"\x8a\x08" + b"\xff" * 7 + b"\x7f"
    made["dimensions.pdparams"] = program(
        b"}" + text("a"),
        b"cnumpy.core.multiarray\n_reconstruct\ncnumpy\nndarray\nK\x00\x85C\x01b\x87R(K\x01(",
        largest * 300_000,
        b"tcnumpy\ndtype\n" + text("f4") + b"\x85R\x89C\x00tbs",
    )
    made["arrays in lists that stand in each other.pdparams"] = program(
        doubled(20, ARRAY, lambda one: listed(one, one))
    )
    made |= {f"{name}.msgpack": make() for name, make in MSGPACK.items()}
    return made


@pytest.mark.slow
def test_convert_limits_every_unpacking(tmp_path: Path) -> None:
    hostile = files()
    for name, data in hostile.items():
        (tmp_path / name).write_bytes(data)
    program = """
import torch
import ingot._convert
torch.save({"a": torch.ones(1)}, "warm.pt")
ingot.convert("warm.pt", "warm.safetensors")
limit = memory("VmSize") + (2 << 30)
resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
found = {}
for name in sys.argv[1:]:
    gc.collect()
    forget_peak()
    before, began = memory("VmRSS"), time.process_time()
    try:
        ingot.convert(name, "out.safetensors", overwrite=True)
        code = "converted"
    except ingot.ConversionError as refused:
        code = refused.code
        del refused
    found[name] = [code, memory("VmHWM") - before, time.process_time() - began]
say([found, sorted(name for name in os.listdir() if name.startswith((".", "out")))])
"""
    found, left = run(program, *hostile, folder=tmp_path).said()
    assert left == []
    for name, (code, nbytes, seconds) in found.items():
        print(f"{name:45} {len(hostile[name]):10,} bytes {code:12} {nbytes >> 20:6,} MiB {seconds:6.2f} s")
    for name, (code, nbytes, seconds) in found.items():
        admitted = ALWAYS_HELD_NBYTES + 3 * len(hostile[name])
        assert code in {
            "too-large",
            "unreadable",
            "too-deep",
            "no-tensors",
            "size-mismatch",
            "unsafe-pickle",
        }, (name, code)
        assert nbytes < admitted + ROOM, (name, nbytes)
        # A generous limit: without the budget, these files take minutes or never end.
        assert seconds < 60, name
