"""Print the expected results of a reader of headers, as JSON for the tests in JavaScript.

Usage: oracle.py vectors | indexes | counts | counted | rendered | values | elements | model.
Bytes are base64, and integers are text: the parser of JavaScript rounds those above 2^53.
"""

from __future__ import annotations

import base64
import json
import random
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from support.counted_models import BITS, Chance, zeros
from vectors.case import Vector, counts, indexes, vectors

DTYPES = [
    *("BOOL", "F4", "F6_E2M3", "F6_E3M2", "U8", "F8_E4M3", "F8_E8M0", "I16", "BF16", "F32", "C64", "U64"),
]
# Those of these dtypes that a .bt file supports.
IN_BINTENSORS = ["BOOL", "U8", "F8_E4M3", "I16", "BF16", "F32", "U64"]
CHARS = [*"abz.09_ ", '"', "\\", "/", "\n", "\x00", "\x1b", "é", "模", "\ue000", "\uffff", "🦀", "\U0010ffff"]


def of_vector(vector: Vector) -> dict[str, Any]:
    keys = vector.keys
    strict_code = "not-strict" if vector.accepted else vector.code
    return {
        "name": vector.name,
        "rule": keys["rule"],
        "format": vector.format,
        "file": text(vector.file()),
        "limit": vector.limit,
        "code": vector.code,
        "strictCode": None if vector.strictly_accepted else strict_code,
        "tensors": [row(*tensor) for tensor in keys["tensors"]] if "tensors" in keys else None,
        "metadata": sorted(keys["metadata"].items()) if "metadata" in keys else None,
        "error": None if vector.accepted else error(vector),
    }


def error(vector: Vector) -> dict[str, Any]:
    """Return ingot's error for a file."""
    from ingot import HeaderError
    from ingot._native import Checkpoint

    limit = {} if vector.limit is None else {"max_header_size": vector.limit}
    try:
        Checkpoint.from_buffer(vector.file(), **limit)
    except HeaderError as fault:
        sizes = {key: getattr(fault, key) for key in ("expected", "found", "begin", "end")}
        numbers = {key: None if size is None else str(size) for key, size in sizes.items()}
        return {"message": str(fault), "tensor": fault.tensor, **numbers}
    raise AssertionError(f"{vector.name} is accepted")


def of_index(case: dict[str, Any]) -> dict[str, Any]:
    given = {key: case.get(key) for key in ("name", "rule", "code", "metadata")}
    return {**given, "bytes": text(case["bytes"]), "weightMap": case.get("weight_map")}


def of_count(case: dict[str, Any]) -> dict[str, Any]:
    import ingot

    files = [
        {"shard": shard, "file": text(ingot.serialize(zeros(tensors), case.get("metadata")))}
        for shard, tensors in case["files"]
    ]
    names = [[tensor[0] for tensor in tensors] for _, tensors in case["files"]]
    given = {key: case.get(key) for key in ("name", "config", "index_metadata", "logical", "total", "stored")}
    return {**given, "files": files, "names": names}


def counted(count: int = 600) -> Iterator[dict[str, Any]]:
    """Return random models, with their parameters as Python counts them."""
    import ingot

    chance = Chance(11)
    with TemporaryDirectory() as folder:
        for number in range(count):
            tensors, config = chance.tensors(), chance.config()
            path = Path(folder, "model.safetensors")
            path.write_bytes(ingot.serialize(zeros(tensors), chance.metadata()))
            logical = ingot.inspect(path, config=config)
            stored = ingot.inspect(path, count="stored")
            yield {
                "name": f"model {number}",
                "file": text(path.read_bytes()),
                "config": json.dumps(config),
                "logical": logical.parameter_count,
                "total": logical.parameter_total,
                "stored": stored.parameter_count,
            }


def rendered(count: int = 200) -> Iterator[dict[str, Any]]:
    """Return files of random tensors written by ingot, with the values that ingot reads."""
    import ingot
    from ingot._native import Checkpoint

    chance = random.Random(7)
    for number in range(count):
        format = chance.choice(["safetensors", "bintensors"])
        names = {name(chance) for _ in range(chance.choice([0, 1, 3, 40]))} - {"__metadata__"}
        tensors = zeros([[name, *tensor(chance, format)] for name in names])
        metadata = {name(chance): name(chance) for _ in range(chance.choice([0, 0, 2, 9]))} or None
        file = ingot.serialize(tensors, metadata, format=format)
        checkpoint = Checkpoint.from_buffer(file)
        infos = [checkpoint.info(name) for name in checkpoint.offset_names()]
        yield {
            "name": f"rendered {number}",
            "format": format,
            "file": text(file),
            "tensors": [row(info.name, info.dtype, info.shape, info.begin, info.end) for info in infos],
            "byName": checkpoint.names(),
            "metadata": metadata and sorted(metadata.items()),
        }


#: The dtypes that ml_dtypes and NumPy decode, with elements of at least a byte.
KNOWN = {
    "F4": "float4_e2m1fn",
    "F6_E2M3": "float6_e2m3fn",
    "F6_E3M2": "float6_e3m2fn",
    "F8_E5M2": "float8_e5m2",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E8M0": "float8_e8m0fnu",
    "F8_E4M3FNUZ": "float8_e4m3fnuz",
    "F8_E5M2FNUZ": "float8_e5m2fnuz",
    "BF16": "bfloat16",
    "F16": "float16",
}
#: The tensor with the values of all others.
PLAIN = {
    "BOOL": "u1",
    "U8": "u1",
    "I8": "i1",
    "U16": "<u2",
    "I16": "<i2",
    "U32": "<u4",
    "I32": "<i4",
    "U64": "<u8",
    "I64": "<i8",
    "F32": "<f4",
    "C64": "<f4",
    "F64": "<f8",
}


def as_float32(dtype: str, patterns: Any) -> bytes:
    """The values of bit patterns, one in each element of `patterns`, by ml_dtypes and numpy."""
    import ml_dtypes
    import numpy

    kind = numpy.float16 if dtype == "F16" else getattr(ml_dtypes, KNOWN[dtype])
    with numpy.errstate(invalid="ignore"):
        return patterns.view(kind).astype("<f4").tobytes()


def values() -> Iterator[dict[str, Any]]:
    """The value of every bit pattern of the floats of up to 16 bits."""
    import numpy

    for dtype in KNOWN:
        patterns = numpy.arange(2 ** BITS[dtype], dtype="<u2" if BITS[dtype] == 16 else "u1")
        yield {"dtype": dtype, "bits": BITS[dtype], "values": text(as_float32(dtype, patterns))}


def elements() -> Iterator[dict[str, Any]]:
    """Return bytes of each dtype with their values: up to 16 bits every pattern, in random order."""
    import numpy

    chance = numpy.random.default_rng(3)
    for dtype, bits in BITS.items():
        if bits <= 16:
            patterns = chance.permutation(2**bits).astype("<u2" if bits == 16 else "u1")
            patterns = numpy.concatenate([patterns, patterns[: 2**bits // 4]])
            data = packed(patterns, bits)
            found = as_float32(dtype, patterns) if dtype in KNOWN else data
        else:
            # With the ends of the range, infinities and NaN among them.
            data = chance.bytes(8 * 500) + bytes(8) + b"\xff" * 8 + b"\0\0\x80\x7f\0\0\x80\xff" + b"\x80" * 8
            found = data
        yield {"dtype": dtype, "array": PLAIN.get(dtype, "<f4"), "bytes": text(data), "values": text(found)}


def packed(patterns: Any, bits: int) -> bytes:
    """FORMAT.md, "Packed dtypes", the slow way: one number of all bits, the first element lowest."""
    if bits >= 8:
        return bytes(patterns.tobytes())
    number = sum(int(pattern) << bits * place for place, pattern in enumerate(patterns))
    return number.to_bytes(len(patterns) * bits // 8, "little")


def model() -> Iterator[dict[str, Any]]:
    """Return a file that ingot wrote from NumPy arrays, and the values of each."""
    import ml_dtypes
    import numpy

    import ingot.numpy

    chance = numpy.random.default_rng(5)
    kinds = ["float8_e4m3fn", "float8_e5m2", "bfloat16"]
    arrays = {kind: chance.normal(size=(7, 12)).astype(getattr(ml_dtypes, kind)) for kind in kinds}
    arrays |= {kind: chance.normal(size=(5, 9)).astype(kind) for kind in ("float16", "float32", "float64")}
    arrays |= {kind: chance.integers(-99, 99, (3, 4)).astype(kind) for kind in ("int8", "int32", "int64")}
    doubles = {name: text(array.astype("<f8").tobytes()) for name, array in arrays.items()}
    yield {"file": text(ingot.numpy.save(arrays)), "values": doubles}


def name(chance: random.Random) -> str:
    # Some names have more than 250 bytes, for which a .bt file encodes lengths differently.
    length = chance.choice([0, 1, 5, 12, 300])
    return "".join(chance.choices(CHARS, k=length))


def tensor(chance: random.Random, format: str) -> tuple[str, list[int]]:
    dtype = chance.choice(IN_BINTENSORS if format == "bintensors" else DTYPES)
    shape = [chance.choice([0, 1, 2, 5, 30]) for _ in range(chance.choice([0, 1, 2, 5]))]
    # A multiple of four elements, so that they fill whole bytes.
    return dtype, ([4, *shape[:2]] if BITS[dtype] < 8 else shape[:2])


def row(name: str, dtype: str, shape: Any, begin: int, end: int) -> list[Any]:
    return [name, dtype, [str(dim) for dim in shape], str(begin), str(end)]


def text(data: bytes) -> str:
    return base64.b64encode(data).decode()


KINDS: dict[str, Callable[[], list[dict[str, Any]]]] = {
    "vectors": lambda: [of_vector(vector) for vector in vectors()],
    "indexes": lambda: [of_index(case) for case in indexes()],
    "counts": lambda: [of_count(case) for case in counts()],
    "counted": lambda: list(counted()),
    "rendered": lambda: list(rendered()),
    "values": lambda: list(values()),
    "elements": lambda: list(elements()),
    "model": lambda: list(model()),
}

if __name__ == "__main__":
    json.dump(KINDS[sys.argv[1]](), sys.stdout)
