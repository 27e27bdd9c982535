"""Trees of state: every type comes back as it was, and a file that is no tree is rejected."""

from __future__ import annotations

import argparse
import ast
import enum
import io
import json
import math
import os
import struct
import subprocess
import sys
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import UTC, date, datetime, time, timedelta, timezone
from itertools import count
from pathlib import Path
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np
import pytest
import safetensors.torch
import torch
from hypothesis import HealthCheck, given, seed, settings
from hypothesis import strategies as st

import ingot
import ingot.numpy
import ingot.torch
from ingot._state import decoder, encoder
from ingot._write import states
from ingot.torch import load_state, save_state


def again(tree: Any, **options: Any) -> Any:
    file = io.BytesIO()
    save_state(tree, file)
    return load_state(file.getbuffer(), **options)


def same(found: Any, expected: Any) -> bool:
    """Return whether two trees are equal, with the types, the order and the bits of all values."""
    if type(found) is not type(expected):
        return False
    if isinstance(expected, torch.Tensor):
        return found.dtype == expected.dtype and torch.equal(found, expected)
    if isinstance(expected, np.ndarray):
        return found.dtype == expected.dtype and found.tobytes() == expected.tobytes()
    if isinstance(expected, float):
        return struct.pack("d", found) == struct.pack("d", expected)
    if isinstance(expected, complex):
        return same([found.real, found.imag], [expected.real, expected.imag])
    if isinstance(expected, dict):
        versions = getattr(expected, "_metadata", None)
        return same([*found.items()], [*expected.items()]) and getattr(found, "_metadata", None) == versions
    if isinstance(expected, set | frozenset):
        return same(sorted(found, key=repr), sorted(expected, key=repr))
    if isinstance(expected, deque) and found.maxlen != expected.maxlen:
        return False
    if isinstance(expected, list | tuple | deque):
        pairs = zip(found, expected, strict=False)
        return len(found) == len(expected) and all(same(one, other) for one, other in pairs)
    return bool(found == expected)


def versioned() -> OrderedDict[str, Any]:
    made = OrderedDict(b=1, a=2)
    made._metadata = OrderedDict({"": {"version": 2}})  # type: ignore[attr-defined]
    return made


NAN = struct.unpack("<d", bytes.fromhex("01000000000000f8")[::1])[0]
SIGNALLING = struct.unpack(">d", bytes.fromhex("7ff0000000000001"))[0]
VALUES: dict[str, Any] = {
    "none": None,
    "bools": [True, False],
    "numbers": [0, -1, 2**63 - 1, -(2**63), 0.1, -0.0, 1e300, 5e-324],
    "large numbers": [2**63, -(2**63) - 1, 10**5000, -(2**70)],
    "infinite": [math.inf, -math.inf, math.nan, -math.nan, NAN, SIGNALLING],
    "complex": [complex(1, -math.inf), complex(-0.0, math.nan)],
    "text": "a\n\u20ac\ud800 $ \U0001f600",
    "bytes": [b"", bytes(range(256)), bytearray(b"ab")],
    "tuple": (1, (2, []), [(3,)]),
    "sets": [set(), {1, "a", (2, 3)}, frozenset({1})],
    "dicts": [{}, {"a": {"b": 1}}, {1: "one", None: 0, (1, 2): 3, 2.5: False}, {True: 1}],
    "dollars": {"$tuple": [1], "a": {"$tensor": "b"}},
    "ordered": [OrderedDict([("z", 1), (0, 2)]), versioned()],
    "counter": Counter({4: 2, 7: 1}),
    "default": [defaultdict(list, {"a": [1]}), defaultdict(None, {1: 2}), defaultdict(tuple)],
    "deque": [deque([1, (2,)], 5), deque()],
    "times": [
        datetime(2026, 11, 28, 13, 48, 45, 7),
        datetime(2026, 1, 1, tzinfo=UTC),
        datetime(2026, 1, 1, fold=1, tzinfo=timezone(timedelta(hours=-3, seconds=5))),
        date(1, 2, 3),
        time(1, 2, 3, 4, fold=1),
        timedelta(-1, 2, 3),
    ],
    "path": Path("a") / "b",
    "torch": [torch.Size([2, 3]), torch.bfloat16, torch.device("cuda", 1), torch.device("cpu")],
    "dtypes": [np.dtype("float32"), np.dtype(ml_dtypes.bfloat16)],
    "scalars": [np.float64(-0.0), np.bool_(True), np.int8(-3), np.complex128(1j), ml_dtypes.bfloat16(2.5)],
    "arrays": [np.arange(6, dtype=np.int16).reshape(2, 3), np.array(3.0), np.zeros(0)],
    "tensors": [torch.ones(2, 3, dtype=torch.bfloat16), torch.tensor(3), torch.zeros(0, 2)],
    "long bytes": [bytes(5000), bytearray(5000)],
    "long lists": [list(range(500)), (0.5,) * 500, {*range(500)}, deque(range(500), 900), [True] * 500],
    "mixed lists": [[1, 2.0] * 500, [2**70] * 500, [0.0, -0.0, NAN, SIGNALLING] * 100],
    "long keys": {(*range(500),): bytes(5000)},
}


@pytest.mark.parametrize("name", VALUES)
def test_save_state_keeps_type_and_bits(name: str) -> None:
    assert same(again({"state": VALUES[name]}), {"state": VALUES[name]})


def test_save_state_takes_any_root() -> None:
    for root in (3, [1], (1, {2}), torch.ones(2), None):
        assert same(again(root), root)


def test_save_state_stores_long_bytes_and_numbers_as_tensors(path: Path) -> None:
    save_state({"ints": [*range(129)], "few": [*range(128)], "bytes": bytes(1025)}, path)
    with ingot.open(path) as file:
        found = {name: (file.info(name).dtype, file.info(name).shape) for name in file}
    assert found == {"ints": ("I64", (129,)), "bytes": ("U8", (1025,))}


def test_save_state_writes_equal_files_for_equal_trees() -> None:
    first, second = io.BytesIO(), io.BytesIO()
    save_state({"names": {"a", "bb", "ccc"}, "more": {(1,), "x"}}, first)
    save_state({"names": {"ccc", "bb", "a"}, "more": {"x", (1,)}}, second)
    assert first.getvalue() == second.getvalue()


def test_save_state_names_tensors_by_path() -> None:
    file = io.BytesIO()
    tree = {
        "state_dict": {"layer.weight": torch.ones(2)},
        "optimizer_states": [{"state": {0: {"step": torch.tensor(3.0)}}}],
        "__metadata__": torch.ones(1),
    }
    save_state(tree, file)
    names = ["__metadata__'", "optimizer_states.0.state.0.step", "state_dict.layer.weight"]
    assert ingot.open(file.getbuffer()).keys() == names
    assert same(load_state(file.getbuffer()), tree)


def test_save_state_tells_equal_names_apart() -> None:
    tree = {"a": {"b.c": torch.tensor(1), "b": {"c": torch.tensor(2)}}, "a.b": {"c": torch.tensor(3)}}
    assert same(again(tree), tree)


def test_save_state_stores_tied_tensors_once(path: Path) -> None:
    weight, array = torch.arange(6.0), np.arange(3)
    save_state({"a": weight, "b": weight, "c": [weight[2:4]], "d": array, "e": array}, path)
    assert len(ingot.open(path).keys()) == 2
    found = load_state(path)
    found["a"][2] = 9
    assert [found["b"][2], found["c"][0][0]] == [9, 9]
    assert found["d"] is found["e"]


def test_save_state_stores_a_long_tree_as_a_tensor(path: Path) -> None:
    tree = {"lines": [f"line {number}" for number in range(100_000)], "a": torch.ones(1)}
    save_state(tree, path)
    with ingot.open(path) as file:
        head = json.loads(file.metadata()["ingot.state"])  # type: ignore[index]
        assert head == {"version": 1, "framework": "torch", "tensor": "ingot.state"}
        assert file.info("ingot.state").dtype == "U8"
    assert same(load_state(path), tree)


class Point(NamedTuple):
    x: int
    y: Any


@dataclass
class Config:
    rate: float
    sizes: list[int] = field(default_factory=list)
    name: str = "new"
    hidden: int = field(default=3, init=False)


@dataclass(frozen=True, slots=True)
class Frozen:
    inner: Any


class Colour(enum.Enum):
    RED = 1
    BLUE = (1, 2)


class Bits(enum.IntFlag):
    A = 1
    B = 2


class Word(enum.StrEnum):
    ONE = "one"


OWN: dict[str, Any] = {
    "point": Point(1, torch.ones(2)),
    "config": Config(0.1, [1]),
    "frozen": Frozen({"a": (Point(1, 2),)}),
    "enums": [Colour.RED, Colour.BLUE, Bits.A | Bits.B, Bits(0), Word.ONE],
    "keys": {Colour.RED: 1, Point(1, 2): {Word.ONE}},
}
TYPES = [Point, Config, Frozen, Colour, Bits, Word]


def test_load_state_makes_objects_of_types() -> None:
    found = again(OWN, types=TYPES)
    assert repr(found) == repr(OWN)
    assert same([type(one) for one in found.values()], [type(one) for one in OWN.values()])


def test_load_state_takes_types_from_into() -> None:
    tree = {"point": OWN["point"], "config": OWN["config"], "colour": Colour.RED}
    into = {"point": Point(0, None), "config": Config(0), "colour": Colour.BLUE}
    assert repr(again(tree, into=into)) == repr(tree)


def test_load_state_reports_dicts_in_place_of_unknown_types() -> None:
    tree = {"all": [OWN["point"], OWN["config"]], "colours": (Colour.RED, Colour.BLUE)}
    found, report = again(tree, return_report=True)
    assert found["all"][1] == {"rate": 0.1, "sizes": [1], "name": "new", "hidden": 3}
    assert found["colours"][0] == {"class": "Colour", "name": "RED", "value": 1}
    kinds = {"all[0]": "Point", "all[1]": "Config", "colours[0]": "Colour", "colours[1]": "Colour"}
    assert report == ingot.StateReport(plain=kinds, missing=[])


def test_load_state_needs_types_of_keys() -> None:
    with pytest.raises(
        ingot.CheckpointError, match=r"`keys`: a key .* needs the class Colour.*types="
    ) as caught:
        again({"keys": {Colour.RED: 1}})
    assert caught.value.code == "unknown-class"


def test_load_state_takes_defaults_for_fields_that_the_file_lacks() -> None:
    @dataclass
    class Old:
        rate: float

    Old.__qualname__ = "Config"
    assert again(Old(0.5), types=[Config]) == Config(0.5)
    with pytest.raises(ingot.CheckpointError, match="has no field 'sizes'"):
        again(Config(1), types=[Old])


@pytest.mark.parametrize("types", [Point, [3], [dict], [Path], "Points"])
def test_load_state_rejects_wrong_types(types: Any) -> None:
    with pytest.raises(TypeError, match=r"load_state\(\): types must"):
        again(1, types=types)


def test_load_state_rejects_types_of_one_name() -> None:
    class Other(NamedTuple):
        a: int

    Other.__qualname__ = "Point"
    with pytest.raises(ingot.OptionError, match="two classes with the name 'Point'") as caught:
        again(1, types=[Point, Other])
    assert caught.value.code == "equal-types"


def test_load_state_of_numpy_reads_what_torch_wrote(path: Path) -> None:
    tree = {"a": torch.ones(2), "b": np.arange(3), "long": bytes(3000)}
    save_state(tree, path)
    found = ingot.numpy.load_state(path)
    assert same(found, {"a": np.ones(2, "f4"), "b": np.arange(3), "long": bytes(3000)})


def test_load_state_of_numpy_needs_no_torch(path: Path) -> None:
    tree = {
        "size": torch.Size([2]),
        "dtype": torch.bfloat16,
        "device": torch.device("cpu"),
        "a": torch.ones(1),
    }
    save_state(tree, path)
    program = f"""
import sys
from ingot.numpy import load_state
found, report = load_state({str(path)!r}, return_report=True)
assert "torch" not in sys.modules
print([found["size"], found["dtype"], found["device"], found["a"].tolist(), report.plain])
"""
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    plain = {"size": "torch.Size", "dtype": "torch.dtype", "device": "torch.device"}
    assert ast.literal_eval(ran.stdout) == [(2,), "torch.bfloat16", "cpu", [1], plain]


def test_load_state_selects_tensors(path: Path) -> None:
    tree = {
        "model": OrderedDict(a=torch.ones(1), b=torch.zeros(1)),
        "optimizer": {"state": {0: {"exp_avg": torch.ones(3)}}, "param_groups": [{"lr": 0.1}]},
        "list": [torch.ones(2), (3, torch.ones(4))],
        "step": 7,
        "rng": bytes(5000),
    }
    save_state(tree, path)
    assert same(load_state(path, keys="model.*"), {"model": tree["model"]})
    assert same(load_state(path, keys="list.1.1"), {"list": [None, (None, torch.ones(4))]})
    dropped = load_state(path, drop=ingot.glob("list.*", "optimizer.*"))
    assert same(dropped, {"model": tree["model"]})
    with pytest.raises(ingot.TensorNotFoundError):
        load_state(path, keys="weights.*")


def test_load_state_returns_memory_of_its_own(path: Path) -> None:
    save_state({"a": torch.arange(4.0)}, path)
    found = load_state(path)["a"]
    path.write_bytes(bytes(path.stat().st_size))
    assert found.tolist() == [0, 1, 2, 3]


def test_load_state_fills_arrays_and_tensors_in_place(path: Path) -> None:
    tree = {"a": torch.ones(2), "deep": [{"b": torch.arange(3.0)}], "n": np.arange(3)}
    save_state(tree, path)
    into = {"a": torch.zeros(2), "deep": [{"b": torch.zeros(3, dtype=torch.float64)}]}
    found = load_state(path, into=into)
    assert found["a"] is into["a"]
    assert found["deep"][0]["b"] is into["deep"][0]["b"]  # type: ignore[index]
    assert into["deep"][0]["b"].tolist() == [0, 1, 2]  # type: ignore[index,union-attr]
    arrays = {"n": np.zeros(3, int)}
    assert ingot.numpy.load_state(path, into=arrays)["n"] is arrays["n"]
    assert arrays["n"].tolist() == [0, 1, 2]


def test_load_state_checks_all_shapes_before_it_fills(path: Path) -> None:
    save_state({"a": torch.ones(2), "b": [torch.ones(3)]}, path)
    into = {"a": torch.zeros(2), "b": [torch.zeros(4)]}
    with pytest.raises(
        ingot.DestinationError, match=r"model\.safetensors: `b\[0\]`: expected shape \[4\], found \[3\]"
    ):
        load_state(path, into=into)
    assert into["a"].tolist() == [0, 0]  # type: ignore[attr-defined]


def test_load_state_keeps_values_that_only_into_has(path: Path) -> None:
    save_state({"a": {"x": 1}}, path)
    found, report = load_state(path, into={"a": {"x": 0, "y": 2}, "best": 0.5}, return_report=True)
    assert found == {"a": {"x": 1, "y": 2}, "best": 0.5}
    assert report.missing == ["a.y", "best"]
    with pytest.raises(
        ingot.CheckpointError, match="`t`: expected a tensor, found none in the file"
    ) as caught:
        load_state(path, into={"t": torch.ones(1)})
    assert caught.value.code == "state-missing"


def test_load_state_compares_digests_before_it_fills(path: Path) -> None:
    weight = torch.ones(2000)
    save_state({"a": weight, "b": [*range(500)], "c": weight, "lines": ["a"] * 500_000}, path, checksums=True)
    found = load_state(path, verify=True)
    assert same(found["b"], [*range(500)])
    assert found["a"].data_ptr() == found["c"].data_ptr()
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    into = {"a": torch.zeros(2000)}
    with pytest.raises(ingot.IntegrityError):
        load_state(path, into=into, verify=True)
    assert into["a"].sum() == 0


def test_save_state_in_background_returns_a_future(path: Path) -> None:
    tree = {"a": torch.zeros(1 << 20), "n": np.zeros(3), "long": [*range(1000)]}
    for snapshot in ("host", "device"):
        future = save_state(tree, path, background=True, write_options={"snapshot": snapshot})
        tree["a"].fill_(1)  # type: ignore[attr-defined]
        future.result()
        assert load_state(path)["a"].sum() == 0
        tree["a"].fill_(0)  # type: ignore[attr-defined]


# What is refused


class Own:
    """A class that a user defines."""


class Named(dict[str, int]):
    """A user's subclass of dict, whose class would be lost."""


REFUSED: dict[str, tuple[Any, str]] = {
    "object": (Own(), "test_trees.Own"),
    "class": (Own, "the class .*Own"),
    "arguments": (argparse.Namespace(rate=0.1), r"argparse.Namespace: save vars\(…\) of it instead"),
    "generator": (torch.Generator(), r"Generator: save what its get_state\(\) returns instead"),
    "function": (math.sqrt, "builtins.builtin_function_or_method"),
    "dict": (Named(a=1), "test_trees.Named"),
    "factory": (defaultdict(Own), "Own"),
    "zone": (datetime(2026, 1, 1, tzinfo=type("Zone", (type(UTC).__base__,), {})()), "Zone"),
    "texts of numpy": (np.array(["a"]), "dtype <U1 cannot be stored"),
    "tensor in a set": ({torch.ones(1)}, "torch.Tensor"),
    "tensor as a key": ({torch.ones(1): 1}, "torch.Tensor"),
    "record": (np.zeros(1, "i4,f4")[0], "numpy.void"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_save_state_rejects_a_value_by_its_path(name: str) -> None:
    value, called = REFUSED[name]
    with pytest.raises((ingot.SaveError, ingot.DtypeError), match=called) as caught:
        again({"optimizer": {"state": [0, {"hook": value}]}})
    assert "optimizer.state[1].hook" in str(caught.value) or caught.value.tensor == "optimizer.state.1.hook"
    assert caught.value.code in ("not-plain", "unsupported-dtype")


def test_save_state_rejects_cycles_and_depth() -> None:
    cycle: dict[str, Any] = {"a": []}
    cycle["a"].append(cycle["a"])
    deep: Any = 1
    for _ in range(101):
        deep = [deep]
    for tree in (cycle, deep):
        with pytest.raises(ingot.SaveError, match="deeper than 100 levels, or one contains itself") as caught:
            again(tree)
        assert caught.value.code == "state-too-large"


def test_save_state_rejects_too_many_values(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(encoder, "MAX_NODES", 1000)
    with pytest.raises(ingot.SaveError, match="more than 1,000 values"):
        again(["a"] * 1000)


# Files that are no trees


def with_tree(text: str) -> bytearray:
    return with_head(f'{{"version":1,"framework":"torch","tree":{text}}}')


def with_head(text: str) -> bytearray:
    tensors = {"t": torch.ones(2), "bytes": torch.ones(2, dtype=torch.uint8)}
    # A bytearray, since bytes would be a path. ingot's own functions write no record for other tensors.
    return bytearray(safetensors.torch.save(tensors, {"ingot.state": text}))


BROKEN: list[str] = [
    "", "{", '{"a": {"$tensor": "no"}}', '{"a": {"$tensor": ["no"]}}', '{"a": {"$tensor": ["t", "os"]}}',
    '{"a": {"$os": 1}}', '{"a": {"$tensor": 3}}', '{"a": {"$tensor": ["t", "numpy", 3]}}',
    '{"a": {"$tuple": [], "$set": []}}', '{"a": {"$tuple": [], "b": 1}}', '{"a": {"b": 1, "$tuple": []}}',
    '{"a": {"$tuple": 3}}', '{"a": {"$tuple": {}}}', '{"a": {"$dict": [[[], 1]]}}', '{"a": {"$dict": 3}}',
    '{"a": {"$dict": [[1, 1], [1, 2]]}}', '{"a": 1, "a": 2}', '{"a": {"$set": [1, 1]}}',
    '{"a": {"$dtype": "save"}}', '{"a": {"$dtype": "torch.save"}}', '{"a": {"$dtype": "numpy.object"}}',
    '{"a": {"$dtype": "numpy.i4,i4"}}', '{"a": {"$dtype": "numpy.finfo"}}', '{"a": {"$device": "nowhere"}}',
    '{"a": {"$bytes": 3}}', '{"a": {"$bytes": "%%%%"}}', '{"a": {"$bytes": {"$tensor": "t"}}}',
    '{"a": {"$bytes": {"$tensor": "no"}}}', '{"a": {"$numbers": "t"}}', '{"a": {"$numbers": "no"}}',
    '{"a": {"$default": ["eval", {}]}}', '{"a": {"$set": [{}]}}', '{"a": {"$path": 3}}',
    '{"a": {"$float": "one"}}', '{"a": {"$float": "00"}}', '{"a": {"$float": 1}}', '{"a": {"$int": "x"}}',
    '{"a": {"$ordered": []}}', '{"a": {"$size": ["b"]}}', '{"a": {"$counter": 3}}', '{"a": {"$deque": [[]]}}',
    '{"a": {"$complex": [1]}}', '{"a": {"$datetime": ["x", 0]}}', '{"a": {"$datetime": ["2026-01-01", 7]}}',
    '{"a": {"$timedelta": [9999999999, 0, 0]}}', '{"a": {"$scalar": ["object", "00"]}}',
    '{"a": {"$scalar": ["float32", "00"]}}', '{"a": {"$scalar": ["float32", "0000000000000000"]}}',
    '{"a": {"$enum": {}}}', '{"a": {"$enum": 3}}', '{"a": {"$namedtuple": {"class": "P"}}}',
    '{"a": {"$dataclass": {"fields": {}}}}', '{"a": {"$subclass": {"class": "P"}}}',
    '{"a": ' + "9" * 5000 + "}", '{"a": NaN}', '{"a": Infinity}',
    '{"a":' * 100_000 + "1" + "}" * 100_000, "[" * 100_000 + "]" * 100_000, "[" * 102 + "]" * 102,
]  # fmt: skip


@pytest.mark.parametrize("text", BROKEN, ids=lambda text: f"{text[:45]} {len(text)}")
def test_load_state_rejects_a_forged_tree(text: str) -> None:
    for load in (load_state, ingot.numpy.load_state):
        with pytest.raises(ingot.CheckpointError, match=r"^the file: ") as caught:
            load(with_tree(text))
        assert caught.value.code in ("invalid-state", "state-too-large", "unknown-class")


@pytest.mark.parametrize("keys", ["t", "*"])
def test_load_state_rejects_or_leaves_out_what_is_forged(keys: str) -> None:
    for text in BROKEN:
        with suppress(ingot.CheckpointError):
            assert load_state(with_tree(text), keys=keys) in ({}, {"a": {}}), text


HEADS = {
    "[]": "invalid-state",
    "3": "invalid-state",
    "{}": "invalid-state",
    '{"version":0,"tree":1}': "invalid-state",
    '{"version":true,"tree":1}': "invalid-state",
    '{"version":"1","tree":1}': "invalid-state",
    '{"version":2,"tree":1}': "later-state",
    '{"version":1}': "invalid-state",
    '{"version":1,"tensor":"no"}': "invalid-state",
    '{"version":1,"tensor":[]}': "invalid-state",
    '{"version":1,"tensor":"bytes"}': "invalid-state",
    '{"version":1,"tensor":"t"}': "invalid-state",
}


@pytest.mark.parametrize("head", HEADS)
def test_load_state_rejects_a_forged_head(head: str) -> None:
    with pytest.raises(ingot.CheckpointError) as caught:
        load_state(with_head(head))
    assert caught.value.code == HEADS[head]


def test_load_state_rejects_a_file_without_a_state(path: Path) -> None:
    ingot.torch.save_file({"a": torch.ones(1)}, path)
    with pytest.raises(
        ingot.CheckpointError, match=r"model\.safetensors: expected ingot\.state.*load_file"
    ) as caught:
        load_state(path)
    assert caught.value.code == "no-state"


def test_load_state_rejects_a_truncated_file(path: Path) -> None:
    save_state({"lines": ["a"] * 500_000}, path)
    path.write_bytes(path.read_bytes()[:-10])
    with pytest.raises(ingot.HeaderError):
        load_state(path)


def test_load_state_counts_values_before_it_makes_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decoder, "MAX_NODES", 1000)
    monkeypatch.setattr(states, "MAX_NODES", 1000)
    for text in ("[" + "[]," * 2000 + "1]", json.dumps({str(number): 1 for number in range(1001)})):
        with pytest.raises(ingot.CheckpointError, match="more than 1,000 values") as caught:
            load_state(with_tree(text))
        assert caught.value.code == "state-too-large"
    # Commas in a text do not count as values.
    assert load_state(with_tree(json.dumps(["," * 3000]))) == ["," * 3000]


def test_load_state_imports_and_calls_nothing_that_a_tree_names() -> None:
    before = set(sys.modules)
    for name in ("os.system", "antigravity", "__import__"):
        for tag in ("$tensor", "$dtype", "$default", f"${name}"):
            with pytest.raises(ingot.CheckpointError):
                load_state(with_tree(json.dumps({"a": {tag: [name, []]}})))
        shown = load_state(with_tree(json.dumps({"a": {"$dataclass": {"class": name, "fields": {"x": 1}}}})))
        assert shown == {"a": {"x": 1}}
    assert set(sys.modules) == before


# Any tree

KEYS = st.text(alphabet="$ab.", max_size=3)
LEAVES: Any = (
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5) | st.binary(max_size=5)
    | st.complex_numbers() | st.datetimes() | st.timedeltas() | st.dates()
    | st.sampled_from([torch.ones(2), np.arange(3), np.float32(2), torch.Size([1]), torch.float16, Path("x")])
)  # fmt: skip
HASHED: Any = st.integers() | st.text(max_size=3) | st.none() | st.tuples(st.integers(), st.text(max_size=2))


def trees(inner: Any) -> Any:
    return (
        st.lists(inner, max_size=4)
        | st.tuples(inner, inner)
        | st.dictionaries(KEYS, inner, max_size=4)
        | st.dictionaries(HASHED, inner, max_size=4)
        | st.dictionaries(KEYS, inner, max_size=3).map(OrderedDict)
        | st.sets(HASHED, max_size=4)
        | st.frozensets(HASHED, max_size=4)
        | st.lists(inner, max_size=3).map(lambda values: deque(values, 7))
        | st.dictionaries(KEYS, inner, max_size=2).map(lambda values: defaultdict(list, values))
        | st.builds(Point, st.integers(), inner)
        | st.builds(Frozen, inner)
    )


TREES: Callable[..., Any] = st.recursive(LEAVES, trees, max_leaves=25)  # type: ignore[assignment]


def unmade(value: Any) -> Any:
    """Return a tree with dicts in place of dataclasses, whose comparison fails for tensors."""
    if isinstance(value, Frozen):
        return ("Frozen", unmade(value.inner))
    if isinstance(value, Point):
        return ("Point", value.x, unmade(value.y))
    if isinstance(value, list | tuple):
        return type(value)(map(unmade, value))
    if isinstance(value, deque):
        return deque(map(unmade, value), value.maxlen)
    if isinstance(value, dict):
        made = value.copy()
        made.update({key: unmade(one) for key, one in value.items()})
        return made
    return value


@given(TREES)  # type: ignore[arg-type]
def test_any_tree_comes_back(tree: Any) -> None:
    assert same(unmade(again(tree, types=TYPES)), unmade(tree))


def nodes(value: Any) -> int:
    """Return how many values a tree has, with the containers."""
    if isinstance(value, Frozen):
        return 1 + nodes(value.inner)
    inner = value.values() if isinstance(value, dict) else value
    is_container = isinstance(value, dict | list | tuple | set | frozenset | deque)
    return 1 + sum(map(nodes, inner)) if is_container else 1


@pytest.mark.slow
def test_trees_of_many_nodes_come_back(record_property: Callable[[str, object], None]) -> None:
    """``INGOT_STATE_NODES=100000`` sets the number of nodes, ``INGOT_SEED`` other trees."""
    total, least = 0, int(os.environ.get("INGOT_STATE_NODES", "8000"))

    @settings(max_examples=100, suppress_health_check=[*HealthCheck])
    @given(st.lists(TREES, min_size=5, max_size=8))  # type: ignore[arg-type]
    def check(made: list[Any]) -> None:
        nonlocal total
        assert same(unmade(again(made, types=TYPES)), unmade(made))
        total += nodes(made)

    for number in count(int(os.environ.get("INGOT_SEED", "0"))):
        seed(number)(check)()
        if total >= least:
            break
    record_property("nodes", total)
