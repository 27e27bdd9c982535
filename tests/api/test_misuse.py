"""Frequent wrong arguments, and the errors that they raise."""

from __future__ import annotations

import ast
import io
import pickle
import re
import zipfile
from pathlib import Path
from typing import Any

import numpy
import pytest

import ingot
import ingot.numpy
from ingot.cli.program import run
from ingot.cli.screen import in_options

ONES = numpy.ones((2, 3), numpy.float32)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "model.safetensors"
    ingot.numpy.save_file({"encoder.a": ONES, "decoder.b": ONES}, path, checksums=True)
    return path


def npz(*, compressed: bool = False) -> bytes:
    out = io.BytesIO()
    (numpy.savez_compressed if compressed else numpy.savez)(out, a=ONES)
    return out.getvalue()


def archive(name: str) -> bytes:
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w") as zipped:
        zipped.writestr(name, b"x" * 100)
    return out.getvalue()


@pytest.mark.parametrize(
    ("data", "what"),
    [
        (archive("archive/data.pkl"), "a PyTorch checkpoint"),
        (npz(), "a NumPy .npz archive"),
        (npz(compressed=True), "a NumPy .npz archive"),
        (archive("model.h5"), "a ZIP archive"),
        (pickle.dumps({"a": [1.0] * 9}, 4), "a Python pickle"),
        (b"GGUF" + bytes(range(1, 60)), "a GGUF model"),
        (b"\x89HDF\r\n\x1a\n" + bytes(60), "an HDF5 file"),
        (b"\x93NUMPY\1\0v\0{'descr': '<f4'}", "a NumPy .npy array"),
    ],
    ids=["torch", "npz", "compressed npz", "zip", "pickle", "gguf", "hdf5", "npy"],
)
def test_load_file_names_the_converter_of_a_foreign_file(data: bytes, what: str, tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    path.write_bytes(data)
    for load in (
        lambda: ingot.numpy.load(data),
        lambda: ingot.numpy.load_file(path),
        lambda: ingot.hash(path, "autov3"),
    ):
        with pytest.raises(ingot.HeaderError, match=f"this is {re.escape(what)}.*`ingot convert`") as caught:
            load()
        assert caught.value.code == "foreign-file"


@pytest.mark.parametrize("nbytes", [9, 100, 1 << 20])
def test_load_file_recognises_a_file_of_zeros(nbytes: int, tmp_path: Path) -> None:
    path = tmp_path / "zeros.safetensors"
    path.write_bytes(bytes(nbytes))
    with pytest.raises(ingot.HeaderError, match="only zeros"):
        ingot.numpy.load_file(path)


def test_open_file_as_a_path_is_an_error_with_a_hint(file: Path) -> None:
    with file.open("rb") as opened:
        for given in (io.BytesIO(file.read_bytes()), opened, io.StringIO()):
            for call in (
                ingot.warm,
                lambda path: ingot.update_metadata(path, {}),
                lambda path: ingot.Writer(path, {}, overwrite=True),
                lambda path: ingot.merge([file], path),
                lambda path: ingot.split(file, path),
            ):
                with pytest.raises(
                    TypeError, match=r"load\(file\.read\(\)\).*save_file\(tensors, file\)"
                ) as caught:
                    call(given)
                assert type(given).__name__ in str(caught.value)


def test_bytes_as_a_path_are_an_error_with_a_hint(file: Path) -> None:
    data = file.read_bytes()
    with pytest.raises(ValueError, match=r"embedded null byte.*`load\(data\)`"):
        ingot.numpy.load_file(data)
    for given in (bytearray(data), memoryview(data)):
        with pytest.raises(TypeError, match=r"found (bytearray|memoryview).*`load\(data\)`"):
            ingot.warm(given)  # type: ignore[arg-type]


@pytest.mark.parametrize("given", ["model.safetensors", Path("model.safetensors")])
def test_path_as_bytes_is_an_error_with_a_hint(given: object) -> None:
    with pytest.raises(TypeError, match="load_file"):
        ingot.numpy.load(given)


@pytest.mark.parametrize("given", [0, None, b"encoder.a", 1.5, ("encoder.a",)])
def test_name_that_is_no_str_is_an_error(given: Any, file: Path) -> None:
    with ingot.safe_open(file, "np") as opened:
        for call in (
            opened.__getitem__,
            opened.get_tensor,
            opened.get_slice,
            opened.info,
            opened.shard_of,
        ):
            with pytest.raises(
                TypeError, match=f"name of a tensor as a str, found {type(given).__name__}.*keys"
            ):
                call(given)


# The command ---------------------------------------------------------------------------------------------


def test_commands_name_their_options(file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    there = tmp_path / "there.bt"
    there.touch()
    for typed, words in (
        (["convert", file, there], "--overwrite replaces it"),
        (["convert", file, tmp_path / "x"], "or a folder with --max-shard-size"),
        (["convert", file, tmp_path / "x.bt", "--max-nbytes", "1"], "--max-nbytes 48 admits it"),
        (
            ["split", file, tmp_path / "x", "--max-shard-size", "1 apple"],
            "--max-shard-size '1 apple' is not a size",
        ),
        (["verify", file, "--expected-sha256", "x"], "--expected-sha256 `x` is not a SHA-256"),
    ):
        assert run([str(word) for word in typed]) != 0
        told = capsys.readouterr().err
        assert words in told
        assert not re.search(r"\w=", told), told


# The modules that commands call. Users of the command read their messages.
CALLED = (
    "_convert",
    "_write/download.py",
    "_write/edit.py",
    "_read/digest.py",
    "_write/rearrange.py",
    "_write/shards.py",
    "_write/upload.py",
    "modelspec.py",
)
# The names of functions that make an error, and of variables that hold a message.
MAKER = r"Error$|^refused$|^located$"
PARTS = ("message", "reason", "why", "way_out")
# An argument with its value, as in `overwrite=True` or `say which by metadata=`.
NAMED = re.compile(r"(?<![\w`.({])[a-z_]+=(?:True|False|…|\.\.\.|\{|$|[ ,;)])")


def messages() -> list[str]:
    """Return the texts of all exceptions that these modules raise."""
    package = Path(ingot.__file__).parent
    paths = [path for name in CALLED for path in (sorted((package / name).rglob("*.py")) or [package / name])]
    found = []
    for path in paths:
        for node in ast.walk(ast.parse(path.read_text())):
            parts: list[ast.expr] = []
            if isinstance(node, ast.Call) and re.search(MAKER, getattr(node.func, "id", "")):
                parts = node.args
            if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) in PARTS:
                parts = [node.value]
            texts = (part for part in parts if isinstance(part, ast.JoinedStr | ast.Constant))
            found += [ast.unparse(text).strip("f'\"") for text in texts]
    return found


def test_commands_name_no_python_arguments() -> None:
    named = [message for message in messages() if NAMED.search(message)]
    assert len(named) >= 4, "the pattern finds nothing any more"
    # The numbers in place of the braces.
    spoken = [in_options(re.sub(r"\{[^}]*\}", "7", message)) for message in named]
    assert [message for message in spoken if NAMED.search(message)] == []


def test_commands_keep_the_names_of_tensors() -> None:
    assert (
        in_options("tensor `overwrite=True`: max_nbytes=3 is it")
        == "tensor `overwrite=True`: --max-nbytes 3 is it"
    )
