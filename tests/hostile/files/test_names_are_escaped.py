"""Names come from files and messages go to terminals: no name may control a terminal or hide text."""

from __future__ import annotations

import json
import os
import pickle
import sys
import unicodedata
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch

import ingot
import ingot.numpy
import ingot.torch

# Colours, a title, the clipboard, new lines, overprinting, right-to-left and invisible characters.
HOSTILE = {
    "escape": "\x1b[31mred\x1b[0m",
    "title": "\x1b]0;title\x07",
    "clipboard": "\x1b]52;c;cm0gLXJm\x1b\\",
    "one-byte escape": "\x9b31m\x9d0;x\x9c",
    "lines": "a\r\nTraceback: all is well\n",
    "backspace": "evil\b\b\b\bgood",
    "nul and delete": "a\x00b\x7f",
    "next line": "a\x85b\u2028c\u2029d",
    "bidirectional": "\u202egnp.exe\u202c\u2066x\u2069\u200f\u061c",
    "zero width": "a\u200bb\u200d\u2060\ufeffc\u00ad",
    "tags": "a\U000e0041\U000e007fb",
    "annotation": "a\ufff9b\ufffac\ufffb",
    "noncharacter": "a\ufffe\uffff",
    "private": "a\ue000\U0010fffd",
    "format": "%s%n{0}{name}`tick`",
}
# Text in all scripts is shown unchanged.
HARMLESS = "café 模型 модель मॉडल 🦀 e\u0301"


def file_of(header: bytes, data: bytes = b"") -> bytes:
    return len(header).to_bytes(8, "little") + header + data


# Visible characters of category Cf: signs before numbers in Arabic, and joiners of hieroglyphs.
SEEN = {*range(0x600, 0x606), 0x6DD, 0x70F, 0x890, 0x891, 0x8E2, 0x110BD, 0x110CD, *range(0x13430, 0x13440)}
# Invisible characters of other categories: fillers, joiners, inherent vowels, variation selectors.
UNSEEN = {
    0x34F,
    0x115F,
    0x1160,
    0x17B4,
    0x17B5,
    *range(0x180B, 0x1810),
    0x3164,
    0xFFA0,
    *range(0xFE00, 0xFE10),
}
UNSEEN |= {*range(0xE0100, 0xE01F0)}


def steers_or_hides(char: str) -> bool:
    if unicodedata.category(char) == "Cf":
        return ord(char) not in SEEN
    return unicodedata.category(char) in ("Cc", "Cs", "Zl", "Zp") or ord(char) in UNSEEN


def shown(text: str) -> bool:
    """Return whether a terminal shows all of `text` in place: no controls, nothing invisible, one line."""
    return not any(map(steers_or_hides, text))


def entry(dtype: str = "U8", begin: int = 0, end: int = 1, **more: Any) -> dict[str, Any]:
    return {"dtype": dtype, "shape": [1], "data_offsets": [begin, end], **more}


def broken(name: str) -> dict[str, bytes]:
    """Return files with one fault each, with `name` at every position for a name."""
    key = json.dumps(name, ensure_ascii=False).encode()
    good = json.dumps(entry()).encode()
    one = b"{" + key.replace(b"%", b"%%") + b":%s}"
    metadata = b'{"__metadata__":{%s}}'
    return {
        "duplicate-tensor": b"{" + key + b":" + good + b"," + key + b":" + good + b"}",
        "duplicate-metadata-key": metadata % (key + b':"",' + key + b':""'),
        "invalid-metadata": metadata % (key + b":1"),
        "invalid-entry": one % b"[]",
        "missing-field": one % b'{"dtype":"U8"}',
        "duplicate-field": one % (b'{"dtype":"U8","dtype":"U8","shape":[1],"data_offsets":[0,1]}'),
        "unknown-dtype": one % (b'{"dtype":' + key + b',"shape":[1],"data_offsets":[0,1]}'),
        "size-overflow": one % b'{"dtype":"U8","shape":[9223372036854775807,9],"data_offsets":[0,1]}',
        "partial-byte": one % b'{"dtype":"F4","shape":[1],"data_offsets":[0,1]}',
        "size-mismatch": one % b'{"dtype":"U8","shape":[1],"data_offsets":[0,2]}',
        "reversed-range": one % b'{"dtype":"U8","shape":[1],"data_offsets":[1,0]}',
        "hole": one % b'{"dtype":"U8","shape":[1],"data_offsets":[1,2]}',
        "overlap": b'{"a":' + good + b"," + key + b":" + good + b"}",
        "truncated": one % b'{"dtype":"U8","shape":[4],"data_offsets":[0,4]}',
        "not-strict": one % (b'{"dtype":"U8","shape":[1],"data_offsets":[0,1],' + key + b":1}"),
    }


CODES = list(broken("x"))


@pytest.mark.parametrize("kind", HOSTILE)
@pytest.mark.parametrize("code", CODES)
def test_names_are_escaped_in_every_rule(kind: str, code: str, tmp_path: Path) -> None:
    name = HOSTILE[kind]
    data = file_of(broken(name)[code], b"\0")
    path = tmp_path / "model.safetensors"
    path.write_bytes(data)
    with pytest.raises(ingot.HeaderError) as caught:
        ingot.safe_open(path, "np", strict=code == "not-strict")
    message = str(caught.value)
    assert caught.value.code == code
    assert shown(message), ascii(message)
    # The attribute `tensor` has the unescaped name.
    if caught.value.tensor is not None:
        assert caught.value.tensor == name


def test_names_have_every_hostile_character_escaped() -> None:
    every = [chr(point) for point in range(sys.maxunicode + 1)]
    bad = "".join(char for char in every if steers_or_hides(char) and unicodedata.category(char) != "Cs")
    for begin in range(0, len(bad), 20):
        part = bad[begin : begin + 20]
        entries = {part: entry(end=2)}
        with pytest.raises(ingot.HeaderError) as caught:
            ingot.numpy.load(file_of(json.dumps(entries, ensure_ascii=True).encode(), b"\0\0"))
        assert shown(str(caught.value)), ascii(str(caught.value))
        with pytest.raises(TypeError) as refused:
            ingot.numpy.save({part: 1})
        assert shown(str(refused.value)), ascii(str(refused.value))


def test_names_of_all_languages_are_shown() -> None:
    with pytest.raises(ingot.HeaderError) as caught:
        ingot.numpy.load(file_of(broken(HARMLESS)["invalid-entry"], b"\0"))
    assert HARMLESS in str(caught.value)


@pytest.mark.parametrize("kind", [kind for kind in HOSTILE if "nul" not in kind])
def test_names_are_escaped_in_paths(kind: str, tmp_path: Path) -> None:
    folder = tmp_path / HOSTILE[kind].replace("/", "-")
    folder.mkdir()
    empty = folder / "empty"
    empty.mkdir()
    path = folder / "model.safetensors"
    ingot.numpy.save_file({"a": numpy.ones(3)}, path)
    file = ingot.safe_open(path, "np")
    part = file.get_slice("a")
    attempts: list[Callable[[], Any]] = [
        lambda: file["nope"],
        lambda: part[9],
        lambda: part[1.5],
        lambda: ingot.safe_open(empty, "np"),
        lambda: ingot.safe_open(folder / "missing", "np"),
        lambda: ingot.safe_open(os.fsencode(folder / "missing"), "np"),
        lambda: ingot.numpy.save_file({}, folder),
        lambda: ingot.numpy.save_file({}, folder / "missing" / "t"),
        lambda: os.truncate(path, 40) or file["a"],
        lambda: ingot.torch.load_file(path),
        lambda: file.close() or file.keys(),
        lambda: pickle.dumps(file),
    ]
    assert shown(repr(file))
    assert shown(file.why)
    for number, attempt in enumerate(attempts):
        with pytest.raises((OSError, ingot.SafetensorError)) as caught:
            attempt()
        assert shown(str(caught.value)), (number, ascii(str(caught.value)))
    assert shown(repr(file))


@pytest.mark.parametrize("kind", HOSTILE)
def test_names_are_escaped_in_read_errors(kind: str, tmp_path: Path) -> None:
    name, path = HOSTILE[kind], tmp_path / "model.bt"
    for format in ("safetensors", "bintensors"):
        spec = {"dtype": "U8", "shape": [4], "data": b"abcd"}
        ingot.serialize_file({name: spec}, path, {name: name}, format=format)
        with ingot.safe_open(path, "np") as file:
            assert (file.keys(), file.metadata()) == ([name], {name: name})
            part = file.get_slice(name)
            attempts: list[Callable[[], Any]] = [
                partial(file.get_tensor, name + "x"),
                partial(file.get_tensors, [name, "\x1b"]),
                partial(part.__getitem__, 4),
                partial(part.__getitem__, slice(None, None, -1)),
                partial(part.__getitem__, "\x1b"),
            ]
            for attempt in attempts:
                with pytest.raises(ingot.SafetensorError) as caught:
                    attempt()
                assert shown(str(caught.value)), ascii(str(caught.value))
            os.truncate(path, 60)
            with pytest.raises(ingot.StorageError) as changed:
                file.get_tensor(name)
            assert shown(str(changed.value))
            for thing in (part, file, file.info(name)):
                assert shown(repr(thing)), ascii(repr(thing))


@pytest.mark.parametrize("kind", HOSTILE)
def test_names_are_escaped_in_save_errors(kind: str, tmp_path: Path) -> None:
    name, small = HOSTILE[kind], torch.zeros(2)
    attempts: list[Callable[[], Any]] = [
        lambda: ingot.numpy.save({name: 1}),
        lambda: ingot.numpy.save({name: numpy.zeros(1, object)}),
        lambda: ingot.numpy.save({name: numpy.zeros(1, [(name.replace("\0", ""), "f4")])}),
        lambda: ingot.numpy.save({name: numpy.zeros(1, complex)}),
        lambda: ingot.numpy.save({"a": numpy.zeros(1)}, {name: 1}),  # type: ignore[dict-item]
        lambda: ingot.numpy.save({"a": numpy.zeros(1)}, {name: "\ud800"}),
        lambda: ingot.numpy.save({name + "\ud800": numpy.zeros(1)}),
        lambda: ingot.numpy.save({name.encode(): numpy.zeros(1)}),  # type: ignore[dict-item]
        lambda: ingot.torch.save({name: small, "b": small}),
        lambda: ingot.torch.save({name: small.to_sparse()}),
        lambda: ingot.torch.save({name: torch.zeros(1, dtype=torch.complex128)}),
        lambda: ingot.serialize({name: {"dtype": name, "shape": [1], "data": b""}}),
        lambda: ingot.serialize({name: {"dtype": "F32", "shape": [1], "data": b""}}),
        lambda: ingot.serialize({name: {"dtype": "F32", "shape": [-1], "data": b""}}),
        lambda: ingot.serialize({name: {"dtype": "F4", "shape": [1], "data": b""}}),
        lambda: ingot.serialize({name: {"dtype": "F4", "shape": [2], "data": b"a"}}, format="bintensors"),
        lambda: ingot.serialize({name: {}}),
        lambda: ingot.numpy.save({}, format=name),  # type: ignore[arg-type]
        lambda: ingot.safe_open("t", name),
        lambda: ingot.safe_open("t", "np", name),
        lambda: ingot.safe_open("t", "pt", name),
        lambda: ingot.safe_open(tmp_path / "t", "np", backend=name),
    ]
    ingot.numpy.save_file({}, tmp_path / "t")
    for number, attempt in enumerate(attempts):
        with pytest.raises((TypeError, ValueError, OverflowError)) as caught:
            attempt()
        assert shown(str(caught.value)), (number, ascii(str(caught.value)))
