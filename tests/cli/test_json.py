"""`--json` prints the fields of the object that the Python function of a command returns."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
import numpy
import pytest

import ingot
import ingot.lora
from ingot._write.upload import planned as planned_upload
from ingot.cli.program import COMMANDS, program
from support.commands import good, run
from support.models import save

C = "adapter.safetensors"
A, B, OUT, PATCH = "a.safetensors", "b.safetensors", "out.safetensors", "patch.safetensors"
# The words of the command, and a call of the function with the same result.
CASES: dict[str, tuple[list[str], Callable[[], Any]]] = {
    "cast": ([A, OUT, "--dtype", "F16"], lambda: ingot.cast(A, OUT, "F16", overwrite=True)),
    "check": ([A, "--values"], lambda: ingot.check(A, values=True)),
    "convert": ([A, OUT], lambda: ingot.convert(A, OUT, overwrite=True)),
    "diff": ([A, B, "--values"], lambda: ingot.diff(A, B, values=True)),
    "download": (
        [f"file:{A}", OUT],
        lambda: ingot.download(Path(A).absolute().as_uri(), OUT, overwrite=True),
    ),
    "lora convert": ([C, OUT, "--to", "kohya"], lambda: ingot.lora.convert(C, OUT, "kohya", overwrite=True)),
    "lora info": ([C], lambda: ingot.lora.info(C)),
    "lora merge": ([A, C, OUT], lambda: ingot.lora.merge(A, C, OUT, overwrite=True)),
    "delta info": ([PATCH], lambda: ingot.delta.info(PATCH)),
    "modelspec validate": ([A], lambda: ingot.modelspec.validate({"modelspec.date": "never"})),
    "repair": ([A, OUT], lambda: ingot.repair(A, OUT, overwrite=True)),
    "stats": ([A, "--all", "--bins", "3"], lambda: ingot.stats(A, bins=3)),
    "upload": ([A, "s3://bucket/run/", "--dry-run"], lambda: planned_upload(A, "s3://bucket/run/")),
    "verify": ([A], lambda: ingot.verify(A, raises=False)),
}
# Their functions return None or a str.
WITHOUT_RESULT = {
    *("hash", "merge", "rename", "rewrite", "split", "meta set", "meta rm", "meta clean", "modelspec set"),
    *("delta apply", "delta compose", "delta diff"),
}
# No Python function returns this output: there is no such function, or it combines several results.
WITHOUT_FUNCTION = {
    *("cat", "completion", "credentials", "doctor", "export", "info", "layers", "ls", "mem", "params"),
    *("summary", "tree", "view"),
    *("meta edit", "meta export", "meta get", "meta import"),
    *("modelspec show", "modelspec thumbnail"),
}


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    arrays = {
        "conv_in.weight": numpy.ones((2, 1), "f4"),
        "w": numpy.array([1.0, numpy.nan], "f4"),
        "odd": numpy.arange(3),
    }
    save(Path(A), arrays, {"modelspec.date": "never"})
    save(Path(B), {"w": numpy.array([[1.0]], "f4"), "odd": numpy.arange(1, 4)}, {})
    factors = {"lora_up.weight": numpy.ones((2, 1), "f4"), "lora_down.weight": numpy.ones((1, 1), "f4")}
    save(Path(C), {f"lora_unet_conv_in.{part}": factor for part, factor in factors.items()})
    ingot.delta.diff(A, B, PATCH, step=7)
    return tmp_path


def plain(value: Any) -> Any:
    """Return the JSON form of a result."""
    if dataclasses.is_dataclass(value):
        return {field.name: plain(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if hasattr(value, "_fields"):
        return {name: plain(getattr(value, name)) for name in value._fields}
    if isinstance(value, ingot.TensorInfo):
        names = ("name", "dtype", "shape", "begin", "end", "nbytes", "parameter_count")
        return {name: plain(getattr(value, name)) for name in names}
    if isinstance(value, dict):
        return {name: plain(one) for name, one in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(one) for one in value]
    return str(value) if isinstance(value, float) and value - value != 0 else value


@pytest.mark.parametrize("command", CASES)
def test_json_has_the_fields_of_the_result(command: str) -> None:
    words, call = CASES[command]
    words = [word.replace("file:", f"file://{Path.cwd()}/") for word in words]
    ended = run(*command.split(), *words, "--json")
    assert ended.err == "", ended
    assert ended.json() == json.loads(json.dumps(plain(call())))


def test_json_of_several_paths_is_an_array() -> None:
    for command in ("check", "verify"):
        both = run(command, A, B, "--json").json()
        assert both == [run(command, path, "--json").json() for path in (A, B)]


def test_json_of_a_missing_key_is_an_error() -> None:
    ended = run("meta", "get", A, "nope", "--json")
    assert (ended.code, ended.json()["exit_status"]) == (2, 2)
    assert ended.json()["error"].startswith(f"{A}: metadata has no key `nope`")
    assert good("meta", "get", A, "modelspec.date", "--json").json() == {
        "key": "modelspec.date",
        "value": "never",
    }


def test_json_is_tested_for_every_command_with_a_function() -> None:
    words = set()
    for name in COMMANDS:
        found = program.get_command(click.Context(program), name)
        inner = found.commands if isinstance(found, click.Group) else {"": None}
        words |= {f"{name} {one}".rstrip() for one in inner}
    assert words == {*CASES} | WITHOUT_RESULT | WITHOUT_FUNCTION
