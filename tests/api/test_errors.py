"""The classes of ingot.errors, and their messages."""

from __future__ import annotations

import copy
import errno
import pickle
import re
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch

import ingot
import ingot.numpy
import ingot.torch
from ingot import errors
from support.errors import raises
from support.scripts import script

BUILTIN = {
    "RemapError": (ValueError,),
    "SafetensorError": (Exception,),
    "CheckpointError": (ValueError,),
    "HeaderError": (ValueError,),
    "IntegrityError": (ValueError,),
    "TensorNotFoundError": (KeyError,),
    "SliceError": (IndexError,),
    "StorageError": (OSError,),
    "DestinationError": (BufferError,),
    "SaveError": (ValueError,),
    "SharedMemoryError": (ValueError, RuntimeError, errors.SaveError),
    "DtypeError": (TypeError,),
    "ConversionError": (ValueError,),
    "AdapterError": (ValueError,),
    "OptionError": (ValueError,),
    "ClosedError": (ValueError,),
    "DeviceError": (RuntimeError,),
    "RankError": (RuntimeError,),
}
CLASSES = [getattr(errors, name) for name in BUILTIN]


@pytest.fixture
def path(path: Path) -> Path:
    ingot.numpy.save_file({"weight": numpy.zeros((2, 3), numpy.float32)}, path)
    return path


def test_errors_lists_every_class() -> None:
    assert set(BUILTIN) == set(errors.__all__)
    assert all(getattr(ingot, name) is getattr(errors, name) for name in errors.__all__)


@pytest.mark.parametrize("kind", CLASSES)
def test_errors_derive_from_safetensor_error_and_a_builtin(kind: type[Exception]) -> None:
    assert issubclass(kind, ingot.SafetensorError)
    assert issubclass(kind, BUILTIN[kind.__name__])
    assert kind.__module__ == "ingot.errors"
    assert kind.__doc__


@pytest.mark.parametrize("kind", CLASSES)
@pytest.mark.parametrize("clone", [copy.copy, lambda error: pickle.loads(pickle.dumps(error))])
def test_errors_are_pickled_whole(kind: type[ingot.SafetensorError], clone: Callable[[Any], Any]) -> None:
    fields: dict[str, Any] = {
        "code": "hole",
        "path": "model.safetensors",
        "tensor": "wte",
        "expected": 24,
        "found": (1, 2),
        "begin": 0,
        "end": 20,
    }
    error = kind("model.safetensors: tensor `wte`: a hole", **fields)
    for one in (error, clone(error)):
        assert type(one) is kind
        # `KeyError` would have put quotes round it.
        assert str(one) == "model.safetensors: tensor `wte`: a hole"
        assert {name: getattr(one, name) for name in fields} == fields
    assert kind("text").code is None


def test_storage_error_has_the_fields_of_os_error() -> None:
    error = errors.StorageError("model: no space", errno=errno.ENOSPC, path="model", code="write")
    for one in (error, pickle.loads(pickle.dumps(error))):
        assert one.errno == errno.ENOSPC
        assert one.filename == "model"
        assert str(one) == "model: no space"


@pytest.mark.parametrize(
    ("kind", "path"), [(FileNotFoundError, "absent.safetensors"), (IsADirectoryError, ".")]
)
def test_open_raises_the_error_of_the_system(kind: type[OSError], path: str, tmp_path: Path) -> None:
    target = tmp_path / path
    for open_it in (
        lambda: ingot.safe_open(target, "np"),
        lambda: ingot.numpy.load_file(target),
        lambda: ingot.torch.load_file(target),
    ):
        with pytest.raises(kind) as caught:
            open_it()
        assert not isinstance(caught.value, ingot.SafetensorError)
        assert caught.value.errno in (errno.ENOENT, errno.EISDIR)
        assert caught.value.filename == str(target)


def test_header_error_names_file_and_rule(tmp_path: Path) -> None:
    path = tmp_path / "broken.safetensors"
    path.write_bytes(b"\x02\0\0\0\0\0\0\0[]")
    with raises(ingot.HeaderError, "broken", code="invalid-json", path=str(path)):
        ingot.numpy.load_file(path)
    with pytest.raises(ingot.HeaderError) as caught:
        ingot.numpy.load(path.read_bytes())
    assert caught.value.path is None


def test_tensor_not_found_error_names_the_nearest(path: Path) -> None:
    with ingot.safe_open(path, "np") as file:
        for ask in (
            file.get_tensor,
            file.get_slice,
            file.info,
            file.__getitem__,
            lambda n: file.get_tensors([n]),
        ):
            with raises(ingot.TensorNotFoundError, "`weight`", tensor="weihgt", path=str(path)):
                ask("weihgt")


def test_slice_error_explains_the_index(path: Path) -> None:
    with ingot.safe_open(path, "np") as file, pytest.raises(ingot.SliceError, match="`weight`") as caught:
        file.get_slice("weight")[5]
    assert caught.value.code == "index-out-of-range"
    assert caught.value.path == str(path)


def test_load_file_reads_the_tensors_beside_a_shape_that_numpy_rejects(tmp_path: Path) -> None:
    path = tmp_path / "deep.safetensors"
    deep = {"dtype": "U8", "shape": [1] * 65, "data": b"x"}
    ingot.serialize_file({"deep": deep, "flat": deep | {"shape": [1]}}, path)
    with ingot.safe_open(path, "np") as file:
        assert file["flat"].tolist() == [ord("x")]
        reads: list[Callable[[], Any]] = [
            lambda: file["deep"],
            file.get_tensors,
            lambda: file.get_slice("deep")[...],
            lambda: ingot.numpy.load_file(path),
        ]
        for read in reads:
            with raises(ingot.DtypeError, "`deep`", code="shape-not-in-framework", path=str(path)):
                read()
    assert ingot.torch.load_file(path)["deep"].ndim == 65


HOSTILE = "a\x1b[31m\r\n\u202eb\x9b"


def test_messages_escape_control_characters(tmp_path: Path) -> None:
    path = tmp_path / f"{HOSTILE}.safetensors"
    ingot.serialize_file({HOSTILE: {"dtype": "F6_E2M3", "shape": [4], "data": b"abc"}}, path, {"k": "v"})
    file = ingot.safe_open(path, "np")
    part = file.get_slice(HOSTILE)
    small = torch.zeros(2)
    attempts: list[Callable[[], Any]] = [
        lambda: file.get_tensor(HOSTILE),
        lambda: file.get_tensor(HOSTILE + "?"),
        lambda: part[9],
        lambda: part[[0], [9]],
        lambda: ingot.numpy.load_file(path),
        lambda: ingot.numpy.save({HOSTILE: "text"}),
        lambda: ingot.numpy.save({HOSTILE: numpy.zeros(1, object)}),
        lambda: ingot.numpy.save({HOSTILE: numpy.zeros(1, complex)}),
        lambda: ingot.numpy.save({"t": numpy.zeros(1)}, {HOSTILE: 1}),  # type: ignore[dict-item]
        lambda: ingot.torch.save({HOSTILE: 1}),  # type: ignore[dict-item]
        lambda: ingot.torch.save({HOSTILE: torch.zeros(1, device="meta")}),
        lambda: ingot.torch.save({HOSTILE: small, "b": small}),
        lambda: ingot.torch.save({HOSTILE: small, "b": small.expand(2, 2)}),
        lambda: ingot.serialize({HOSTILE: {"dtype": "F32"}}),
        lambda: ingot.serialize({HOSTILE: {"dtype": "F32", "shape": [2], "data": b""}}),
        lambda: ingot.serialize({HOSTILE: {"dtype": HOSTILE, "shape": [2], "data": b""}}),
        lambda: file.close() or file.keys(),
        file.__enter__,
        lambda: pickle.dumps(file),
    ]
    for number, attempt in enumerate(attempts):
        with pytest.raises((ingot.SafetensorError, TypeError, ValueError)) as caught:
            attempt()
        message = str(caught.value)
        assert "\\x1b[31m" in message, number
        assert message.isprintable(), number
    assert repr(file).isprintable()
    assert repr(part).isprintable()


def test_messages_cut_long_names() -> None:
    with pytest.raises(TypeError) as caught:
        ingot.numpy.save({"x" * 60_000: 1})
    assert len(str(caught.value)) < 400
    assert "…" in str(caught.value)


def test_messages_escape_lone_surrogates() -> None:
    with pytest.raises(ValueError, match="ud800") as caught:
        ingot.numpy.save({"\ud800": numpy.zeros(1)})
    str(caught.value).encode()


ROOT = Path(__file__).parents[2]


CODES = script("codes")
WORDS: dict[str, dict[str, Any]] = tomllib.loads(CODES.WORDS.read_text("utf-8"))


def test_codes_page_agrees_with_the_sources() -> None:
    found = CODES.Found()
    assert CODES.faults(found, WORDS) == []
    assert CODES.PAGE.read_text("utf-8") == CODES.rendered(found, WORDS), "run scripts/codes"


@pytest.mark.parametrize("missing", ["cause", "mend"])
def test_codes_script_reports_a_code_without_cause_or_remedy(missing: str) -> None:
    found = CODES.Found()
    words = {**WORDS, "hole": {key: text for key, text in WORDS["hole"].items() if key != missing}}
    assert CODES.faults(found, words) == ["hole: no cause or no remedy in docs/reference/codes.toml"]


def test_codes_script_reports_new_codes() -> None:
    found = CODES.Found()
    found.classes["new-in-rust"].add("HeaderError")
    assert CODES.faults(found, WORDS) == ["new-in-rust: no cause or no remedy in docs/reference/codes.toml"]


def test_codes_script_reports_unused_codes() -> None:
    said = CODES.faults(CODES.Found(), {**WORDS, "gone": {"cause": "A.", "mend": "B."}})
    assert said == ["gone: is in docs/reference/codes.toml, but not in the sources"]


def test_codes_page_has_every_code_of_vectors_and_format() -> None:
    vectors = [path.read_text("utf-8") for path in (ROOT / "tests" / "vectors").glob("*.toml")]
    named = set(re.findall(r'^code = "([a-z-]+)"', "\n".join(vectors), re.MULTILINE))
    assert len(named) > 20
    assert named | CODES.rules().keys() <= WORDS.keys()


def test_errors_have_the_class_on_the_codes_page(tmp_path: Path) -> None:
    broken = tmp_path / "broken.safetensors"
    broken.write_bytes(b"\x02\0\0\0\0\0\0\0[]")
    with pytest.raises(ingot.HeaderError) as caught:
        ingot.safe_open(broken, "np")
    page = CODES.PAGE.read_text("utf-8")
    section = page.partition(f"## `{caught.value.code}`\n")[2].partition("\n## ")[0]
    assert "`HeaderError`" in section.splitlines()[1]
