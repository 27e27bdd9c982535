"""Every option of every command has the name of the Python argument and has an effect."""

from __future__ import annotations

import inspect
import itertools
import os
import shutil
import sys
from base64 import b64encode
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import click
import numpy
import pytest

import ingot
import ingot.lora
import ingot.modelspec
from ingot._base.checks import Existing
from ingot._convert import planned as planned_conversion
from ingot._convert.write import Destination
from ingot._write.cast import planned as planned_cast
from ingot._write.download import planned as planned_download
from ingot._write.shards import Place
from ingot._write.upload import planned as planned_upload
from ingot.cli import arguments
from ingot.cli.program import program
from support import stores
from support.commands import Ended, every, run
from support.models import save
from support.stores import Store

COMMANDS = dict(every(program))

# The Python function of each command. Commands without one print data from headers.
FUNCTIONS: dict[tuple[str, ...], Any] = {
    ("stats",): ingot.stats,
    ("check",): ingot.check,
    ("verify",): ingot.verify,
    ("hash",): ingot.hash,
    ("diff",): ingot.diff,
    ("meta", "set"): ingot.update_metadata,
    ("meta", "rm"): ingot.update_metadata,
    ("meta", "edit"): ingot.update_metadata,
    ("meta", "import"): ingot.update_metadata,
    ("meta", "clean"): ingot.rewrite,
    ("lora", "merge"): ingot.lora.merge,
    ("lora", "info"): ingot.lora.info,
    ("lora", "convert"): ingot.lora.convert,
    ("modelspec", "validate"): ingot.modelspec.validate,
    ("modelspec", "set"): ingot.update_metadata,
    ("convert",): ingot.convert,
    ("split",): ingot.split,
    ("merge",): ingot.merge,
    ("rename",): ingot.rewrite,
    ("rewrite",): ingot.rewrite,
    ("cast",): ingot.cast,
    ("delta", "diff"): ingot.delta.diff,
    ("delta", "apply"): ingot.delta.apply,
    ("delta", "compose"): ingot.delta.compose,
    ("delta", "info"): ingot.delta.info,
    ("repair",): ingot.repair,
    ("download",): ingot.download,
    ("upload",): ingot.upload,
}
# Options without an argument in Python, with the reason.
EVERYWHERE = {
    "json": "the form of the output",
    "quiet": "the form of the output",
    "csv": "the form of the output",
    "dry_run": "functions are called with the arguments that the user has already seen",
    "replace_read_only": "a key of write_options",
}
OWN = {
    ("stats", "all"): "the default of keys, which prints too much to be the default of a command",
    ("hash", "all"): "ingot.hash computes one hash",
    ("meta", "set", "files"): "update_metadata takes one file",
    ("meta", "rm", "files"): "update_metadata takes one file",
    ("meta", "import", "replace"): "it chooses the keys of remove",
    ("meta", "clean", "all"): "it chooses the keys of metadata",
    ("meta", "clean", "output"): "destination, which is optional",
    ("meta", "clean", "training"): "it chooses the keys of metadata",
    ("modelspec", "set", "thumbnail"): "a value that is read from a file",
    ("modelspec", "set", "hash"): "checksums computes it while a file is saved",
    ("lora", "merge", "also"): "a pair of adapter",
    ("merge", "output"): "destination, after any number of sources",
    ("delta", "diff", "output"): "destination",
    ("delta", "apply", "output"): "destination, which is optional",
    ("delta", "compose", "output"): "destination, after any number of sources",
    ("rename", "name"): "a pair of rename",
    ("rename", "sub"): "a callable as rename",
    ("rewrite", "dtype"): "a value of dequantize",
    ("cast", "except"): "ingot.cast has no drop: its keys are those without these",
}
# Arguments without an option, with the reason.
SET_BY_THE_COMMAND = {
    "progress": "the command shows a bar on a terminal",
    "storage_options": "they come from environment variables and the vendors' files",
    "write_options": "--replace-read-only is its key",
    "backend": "the command chooses it; INGOT_BACKEND sets it",
    "threads": "the command uses all processors",
    "max_header_size": "the default is large enough for all real files",
    "durable": "INGOT_DURABLE sets it",
    "atomic": "a command never leaves a damaged file",
    "checksums": "it keeps existing digests",
    "format": "the name of the destination decides",
    "metadata": "`ingot meta` changes it",
    "raises": "the exit status reports it",
    "strict": "--drop leaves out what matches nothing",
    "set": "an argument of the command",
    "remove": "an argument of the command",
    "rename": "--name and --sub",
    "remap": "`ingot rewrite` takes a file of rules",
    "dequantize": "the values change, and only `ingot.rewrite` returns the names that it leaves out",
    "keys": "the command concerns the metadata",
    "drop": "the command concerns the metadata",
    "dtype": "an option of the command",
}


def options_of(words: tuple[str, ...]) -> dict[str, click.Option]:
    """The options of a command by their long names, with underscores."""
    found = {}
    for parameter in COMMANDS[words].params:
        if isinstance(parameter, click.Option):
            found[max(parameter.opts, key=len).lstrip("-").replace("-", "_")] = parameter
    return found


@pytest.mark.parametrize("words", FUNCTIONS, ids=" ".join)
def test_command_options_are_named_as_in_python(words: tuple[str, ...]) -> None:
    own = [*options_of(words)]
    taken = inspect.signature(FUNCTIONS[words]).parameters
    unknown = {name for name in own if name not in taken and name not in EVERYWHERE}
    assert {(*words, name) for name in unknown} == {key for key in OWN if key[:-1] == words}
    lacking = {
        name
        for name, parameter in taken.items()
        if parameter.kind is parameter.KEYWORD_ONLY and name not in own
    }
    assert lacking <= SET_BY_THE_COMMAND.keys()


# Every option has an effect --------------------------------------------------------------------------------

PATH, OTHER, CUT = "model.safetensors", "other.safetensors", "cut.safetensors"
LORA = "lora.safetensors"
PACKED = "packed.safetensors"
PATCH = "patch.safetensors"
URL = "URL"


class Case(NamedTuple):
    """A command that succeeds, and values for each of its options that differ from the defaults."""

    base: list[str]
    options: dict[str, list[str]] = {}  # noqa: RUF012 - nothing changes it


DROPPING = {"drop": ["--drop", "*.1.*"]}
SELECTING = {"keys": ["--keys", "h.*"], "drop": ["--drop", "*.0.*"]}
CASES: dict[tuple[str, ...], Case] = {
    ("summary",): Case([PATH]),
    ("ls",): Case([PATH], {"sort": ["--sort", "size"], **SELECTING}),
    ("tree",): Case([PATH], {"depth": ["-L", "2"], **SELECTING}),
    ("info",): Case([PATH, "a"]),
    ("params",): Case([PATH]),
    ("layers",): Case([PATH]),
    ("stats",): Case(
        [PATH, "h.0.w"], {"bins": ["--bins", "3"], "keys": ["--keys", "a"], "drop": ["--drop", "a"]}
    ),
    ("cat",): Case([PATH, "a"]),
    ("mem",): Case([PATH]),
    ("view",): Case([PATH, "--html", "out.html"], {"port": ["--port", "1"], "html": ["--html", "x.html"]}),
    ("check",): Case([PATH], {**SELECTING}),
    ("verify",): Case([PATH], {"expected_sha256": ["--expected-sha256", "0" * 64]}),
    ("hash",): Case([PATH], {"algorithm": ["-a", "xxh3"]}),
    ("diff",): Case([PATH, OTHER], {**SELECTING}),
    ("doctor",): Case([PATH]),
    ("meta", "get"): Case([PATH]),
    ("meta", "set"): Case([PATH, "k=v"]),
    ("meta", "rm"): Case([PATH, "note"]),
    ("meta", "edit"): Case([PATH]),
    ("meta", "import"): Case([PATH, "pairs.json"]),
    ("meta", "export"): Case([PATH, "out.json"]),
    ("meta", "clean"): Case([PATH], {"output": ["-o", "out.safetensors"]}),
    ("lora", "merge"): Case(
        [PATH, LORA, "out.bt"],
        {
            "scale": ["--scale", "0.5"],
            "also": ["--also", LORA, "0.5"],
            "keys": ["--keys", "*layers_0*"],
            "drop": ["--drop", "*layers_1*"],
        },
    ),
    ("lora", "info"): Case([LORA]),
    ("lora", "convert"): Case(
        [LORA, "out.bt", "--to", "kohya"],
        {"to": ["--to", "diffusers"], "keys": ["--keys", "*layers_0*"], "drop": ["--drop", "*layers_1*"]},
    ),
    ("modelspec", "show"): Case([OTHER]),
    ("modelspec", "validate"): Case([OTHER]),
    ("modelspec", "set"): Case([PATH, "title=x"], {"thumbnail": ["--thumbnail", "image.gif"]}),
    ("modelspec", "thumbnail"): Case([OTHER, "-o", "out.gif"], {"output": ["-o", "x.gif"]}),
    ("convert",): Case(
        [PATH, "out.bt"],
        {
            "source_format": ["--source-format", "bintensors"],
            "dtype": ["--dtype", "F16"],
            "max_shard_size": ["--max-shard-size", "100"],
            "root": ["--root", "h"],
            "strip_prefix": ["--strip-prefix", "h."],
            "max_nbytes": ["--max-nbytes", "1"],
            "verify": ["--no-verify"],
            **SELECTING,
        },
    ),
    ("export",): Case(
        [PATH, "h.0.w", "h.1.w"],
        {"output": ["-o", "out"], "directory": ["-d", "sub"], "keys": ["--keys", "a"], **DROPPING},
    ),
    ("split",): Case(
        [PATH, "out"],
        {
            "max_shard_size": ["--max-shard-size", "100"],
            "filename_pattern": ["--filename-pattern", "x{suffix}.bt"],
        },
    ),
    ("merge",): Case(
        [PATH, OTHER, "-o", "out.bt"], {"output": ["-o", "x.bt"], "on_duplicate": ["--on-duplicate", "last"]}
    ),
    ("rename",): Case(
        [PATH, "out.bt", "-s", "h", "g"], {"name": ["-n", "a", "b"], "sub": ["-s", "w", "v"], **SELECTING}
    ),
    ("rewrite",): Case(
        [PACKED, "out.bt", "--remap", "rules.json"],
        {"remap": ["--remap", "others.json"], "dtype": ["--dtype", "F64"], **SELECTING},
    ),
    ("cast",): Case(
        [PATH, "out.bt", "--dtype", "F16"],
        {"dtype": ["--dtype", "BF16"], "keys": SELECTING["keys"], "except": ["--except", "*.1.*"]},
    ),
    ("delta", "diff"): Case([PATH, OTHER, "-o", "out"], {"output": ["-o", "x"], "step": ["--step", "7"]}),
    ("delta", "apply"): Case([PATH, PATCH, "-o", "out"], {"output": ["-o", "x"]}),
    ("delta", "compose"): Case([PATCH, "-o", "out"], {"output": ["-o", "x"]}),
    ("delta", "info"): Case([PATCH]),
    ("repair",): Case([CUT, "out.bt"]),
    ("download",): Case(
        [URL, "out.bt"],
        {"threads": ["--threads", "2"], "expected_sha256": ["--expected-sha256", "0" * 64]},
    ),
    ("upload",): Case([PATH, "s3://bucket/run/"]),
    ("completion",): Case(["bash"]),
}
# Pairs of options: the first has no effect with the second, and is accepted for the given reason.
WITHOUT_EFFECT = {
    ("ls", "long", "json"): "JSON has the columns that --long adds",
    ("ls", "long", "quiet"): "--quiet prints the names",
    ("cat", "quiet"): "the next command needs all of the output",
    ("merge", "on_duplicate", "dry_run"): "these files have no common name: the next test has some",
    ("meta", "set", "files", "quiet"): "the model is one file",
    ("meta", "rm", "files", "quiet"): "the model is one file",
    ("download", "threads", "dry_run"): "threads change how files are fetched, not which",
    ("upload", "overwrite", "dry_run"): "a dry run makes no request",
}


WEIGHTS = {
    f"text_model.encoder.layers.{layer}.mlp.fc1.weight": numpy.zeros((3, 3), "f4") for layer in range(2)
}
FILES = (PATH, OTHER, CUT, LORA, PACKED, PATCH, "pairs.json", "rules.json", "others.json", "image.gif", "sub")


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("sources")
    # The last layer is larger than the others.
    arrays = {f"h.{at}.w": numpy.arange(20.0) for at in range(3)} | {"h.3.w": numpy.arange(30.0)}
    arrays |= {name.replace("w", "b"): array[:2] for name, array in arrays.items()}
    whole = save(
        folder / PATH, arrays | {"a": numpy.zeros((3, 3), "f4")} | WEIGHTS, {"format": "pt", "note": "one"}
    )
    (folder / CUT).write_bytes(whole.read_bytes()[:-10])
    (folder / "sub").mkdir()
    (folder / "image.gif").write_bytes(b"GIF89a")
    thumbnail = f"data:image/gif;base64,{b64encode(b'GIF87a').decode()}"
    metadata = {"format": "pt", "modelspec.title": "x", "modelspec.thumbnail": thumbnail}
    save(folder / OTHER, {"z": numpy.ones(20)}, metadata)
    save(folder / LORA, adapter())
    scales = {f"h.{at}.w_scale": numpy.ones(1, "f4") for at in range(2)}
    save(
        folder / PACKED,
        {"a": numpy.ones(3), **{name[:5]: numpy.ones((3, 3), "i1") for name in scales}, **scales},
    )
    (folder / "pairs.json").write_text('{"k": "v"}')
    ingot.delta.diff(folder / PATH, folder / OTHER, folder / PATCH)
    (folder / "rules.json").write_text('[{"select": "*"}]')
    (folder / "others.json").write_text('[{"cast": "h.*", "dtype": "F16"}, {"select": "*"}]')
    return folder


def adapter() -> dict[str, Any]:
    """Return an adapter of `WEIGHTS`."""
    start = "lora_te_text_model_encoder_layers_"
    factors = {"lora_up.weight": numpy.ones((3, 2), "f4"), "lora_down.weight": numpy.ones((2, 3), "f4")}
    return {
        f"{start}{layer}_mlp_fc1.{part}": factor for layer in range(2) for part, factor in factors.items()
    }


def test_command_options_all_have_a_case() -> None:
    # tests/remote/test_providers.py runs `credentials` with identities, which the options of the command
    # need.
    assert CASES.keys() == COMMANDS.keys() - {("credentials",)}
    for words, case in CASES.items():
        flags = {name for name, option in options_of(words).items() if option.is_flag}
        assert {*case.options} | flags == {*options_of(words)}, words


RECORDED: dict[Any, str] = {
    inspect.unwrap(function).__code__: name
    for name, function in {
        **{" ".join(words): function for words, function in FUNCTIONS.items()},
        "cast --dry-run": planned_cast,
        "convert --dry-run": planned_conversion,
        "lora merge --dry-run": ingot.lora.planned,
        "lora convert --dry-run": ingot.lora.renamed,
        "download --dry-run": planned_download,
        "upload --dry-run": planned_upload,
        "target": arguments.target,
        "existing": Existing.check,
        "place": Place.check,
        "destination": Destination.check,
    }.items()
}


class Outcome(NamedTuple):
    """The effects of a command: output, exit status and files."""

    ended: Ended
    calls: list[str]
    files: dict[str, bytes]


def outcome(words: list[str], sources: Path, folder: Path) -> Outcome:
    """Run a command in a new folder with the same sources."""
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(sources, folder)
    os.chdir(folder)
    calls: list[str] = []

    def record(frame: Any, event: str, argument: object) -> None:
        if event == "call" and frame.f_code in RECORDED:
            given = {name: value for name, value in frame.f_locals.items() if name != "progress"}
            given = {name: getattr(value, "patterns", value) for name, value in given.items()}
            given["options"] = {
                name: value for name, value in given.get("options", {}).items() if name != "progress"
            }
            calls.append(f"{RECORDED[frame.f_code]} {given}")

    sys.setprofile(record)
    try:
        ended = run(*(f"file://{folder}/{PATH}" if word == URL else word for word in words))
    finally:
        sys.setprofile(None)
    files = {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    return Outcome(ended, calls, files)


def typed(words: tuple[str, ...], name: str) -> list[str]:
    option = options_of(words)[name]
    return CASES[words].options.get(name, [option.opts[-1]])


def ignored(words: tuple[str, ...], run_with: Callable[..., Outcome]) -> Iterator[tuple[str, ...]]:
    """Return the options that change nothing, alone or with another one, and are accepted."""
    names = [*options_of(words)]
    alone = {name: run_with(name) for name in names}
    base = run_with()
    assert base.ended.code in (0, 1), base
    yield from ((*words, name) for name in names if alone[name] == base)
    for one, other in itertools.combinations(names, 2):
        both = run_with(one, other)
        if not both.ended.err.startswith("error: "):
            yield from ((*words, one, other) for _ in range(both == alone[other]))
            yield from ((*words, other, one) for _ in range(both == alone[one]))


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> Iterator[Store]:
    with stores.running(is_signed=False) as store:
        for name, value in store.environment.items():
            monkeypatch.setenv(name, value)
        yield store


@pytest.mark.parametrize("words", CASES, ids=" ".join)
def test_command_options_all_have_an_effect(
    words: tuple[str, ...], sources: Path, store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("INGOT_DURABLE", "0")
    monkeypatch.setenv("VISUAL", "sed -i s/one/two/")

    def run_with(*names: str) -> Outcome:
        added = [word for name in names for word in typed(words, name)]
        folder = tmp_path / "x"
        store.objects.clear()
        found: Outcome = outcome([*words, *CASES[words].base, *added], sources, folder)
        return found

    assert {*ignored(words, run_with)} == {key for key in WITHOUT_EFFECT if key[: len(words)] == words}


def test_merge_dry_run_takes_on_duplicate(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    save(tmp_path / "a", {"t": numpy.zeros(1)})
    save(tmp_path / "b", {"t": numpy.zeros(5)})
    words = ["merge", "a", "b", "-o", "out.bt", "--json"]
    for kept, size in (("first", 8), ("last", 40)):
        for dry in ([], ["--dry-run"]):
            ended = run(*words, "--on-duplicate", kept, "--overwrite", *dry)
            assert ended.json()["nbytes"] == size
    for dry in ([], ["--dry-run"]):
        ended = run(*words, "--overwrite", *dry)
        assert (ended.code, ended.json()["code"]) == (1, "duplicate-tensor")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["ls", PATH, "--sort", "name", "--sort", "size"], "--sort is given twice"),
        (["meta", "set", PATH, "a=b", "a=c"], "key `a` is given twice"),
        (["export", PATH, "a", "-o", "x", "-d", "."], "--directory has no effect with --output"),
        (["meta", "clean", PATH, "--overwrite"], "--overwrite has no effect without --output"),
        (["merge", PATH, "-o", "x", "--replace-read-only"], "no effect without --overwrite"),
        (["ls", PATH, "--json", "--quiet"], "--quiet has no effect with --json"),
    ],
    ids=" ".join,
)
def test_command_options_that_would_be_ignored_are_rejected(
    words: list[str], message: str, sources: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(sources)
    ended = run(*words)
    assert ended.code == 2
    assert message in ended.err
    assert sorted(os.listdir()) == sorted(FILES)
