"""Every function and every command that selects tensors takes the same selectors."""

from __future__ import annotations

import json
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy
import pytest

import ingot
import ingot.numpy
from ingot._native import TensorInfo
from ingot.cli import program

pytestmark = pytest.mark.filterwarnings("ignore:rewrite. .*change nothing")

NAMES = ("encoder.0.weight", "encoder.0.bias", "encoder.1.weight", "decoder[0].w", "a*b", "axb", "head")
# The sizes differ, so that a sum of bytes identifies the tensors that were read.
TENSORS = {name: numpy.zeros(1 << rank, numpy.float32) for rank, name in enumerate(NAMES)}


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("keys") / "model.safetensors"
    ingot.numpy.save_file(TENSORS, made)
    return made


def sized(nbytes: int) -> list[str]:
    """Return the names of the tensors whose sizes add up to `nbytes`."""
    return [name for rank, name in enumerate(NAMES) if nbytes // 4 >> rank & 1]


def written(path: Path) -> list[str]:
    with ingot.safe_open(path, "np") as file:
        return file.keys()


def load_file(path: Path, **selection: Any) -> list[str]:
    return list(ingot.numpy.load_file(path, **selection))


def load_torch_file(path: Path, **selection: Any) -> list[str]:
    return list(pytest.importorskip("ingot.torch").load_file(path, **selection))


def load_model(path: Path, **selection: Any) -> list[str]:
    torch = pytest.importorskip("torch")
    import ingot.torch

    # The module has no tensors, so that all loaded names are unexpected.
    return ingot.torch.load_model(torch.nn.Identity(), path, strict=False, **selection)[1]


def get_tensors(path: Path, **selection: Any) -> list[str]:
    with ingot.safe_open(path, "np") as file:
        return list(file.get_tensors(**selection))


def prefetch(path: Path, **selection: Any) -> list[str]:
    with ingot.safe_open(path, "np") as file, file.prefetch(**selection) as loader:
        assert loader.names() == list(dict(loader))
        return loader.names()


def warm_handle(path: Path, **selection: Any) -> list[str]:
    with ingot.safe_open(path, "np") as file:
        return sized(file.warm(**selection))


def warm(path: Path, **selection: Any) -> list[str]:
    return sized(ingot.warm(path, **selection))


def rewrite(path: Path, **selection: Any) -> list[str]:
    out = path.with_suffix(".rewritten")
    ingot.rewrite(path, out, overwrite=True, **selection)
    return written(out)


def convert(path: Path, **selection: Any) -> list[str]:
    out = path.with_suffix(".bt")
    done = ingot.convert(path, out, overwrite=True, **selection)
    assert {*done.dropped} == {*NAMES} - {*written(out)}
    return written(out)


def stats(path: Path, **selection: Any) -> list[str]:
    return list(ingot.stats(path, **selection).tensors)


def diff(path: Path, **selection: Any) -> list[str]:
    return list(ingot.diff(path, bytearray(ingot.numpy.save({})), **selection).tensors)


FUNCTIONS: dict[str, Callable[..., list[str]]] = {
    function.__name__: function
    for function in (
        load_file,
        load_torch_file,
        load_model,
        get_tensors,
        prefetch,
        warm_handle,
        warm,
        rewrite,
        convert,
        stats,
        diff,
    )
}
ORDERED = (load_file, load_torch_file, get_tensors, prefetch)


def is_head(info: TensorInfo) -> object:
    assert (info.dtype, info.nbytes) == ("F32", 4 * info.parameter_count)
    return info.name == "head"


# How to make each selector, and the names that it selects.
SELECTORS: dict[str, tuple[Callable[[], Any], set[str]]] = {
    "name": (lambda: "head", {"head"}),
    "name with a star": (lambda: "a*b", {"a*b"}),
    "name with brackets": (lambda: "decoder[0].w", {"decoder[0].w"}),
    "pattern": (lambda: "encoder.*", {"encoder.0.weight", "encoder.0.bias", "encoder.1.weight"}),
    "pattern of one character": (lambda: "encoder.?.weight", {"encoder.0.weight", "encoder.1.weight"}),
    "pattern with brackets": (lambda: "*[0]*", {"decoder[0].w"}),
    "pattern of everything": (lambda: "*", {*NAMES}),
    "glob": (lambda: ingot.glob("head", "*.bias", "a?b"), {"head", "encoder.0.bias", "a*b", "axb"}),
    "pickled glob": (lambda: pickle.loads(pickle.dumps(ingot.glob("a*b"))), {"a*b"}),
    "list": (lambda: ["head", "encoder.0.bias", "head"], {"head", "encoder.0.bias"}),
    "set": (lambda: {"a*b"}, {"a*b"}),
    "iterator": (lambda: iter(("axb", "encoder.1.weight")), {"axb", "encoder.1.weight"}),
    "dict": (lambda: {"head": 1}, {"head"}),
    "array": (lambda: numpy.array(["head", "axb"]), {"head", "axb"}),
    "callable": (lambda: is_head, {"head"}),
}
COMMON = {name: case for name, case in SELECTORS.items() if name != "pattern of everything"}


# A rewrite that selects everything warns that it changes nothing.
@pytest.mark.filterwarnings("ignore:rewrite")
@pytest.mark.parametrize("selector", SELECTORS)
@pytest.mark.parametrize("function", FUNCTIONS.values(), ids=FUNCTIONS)
def test_keys_selects_the_same_in_every_function(
    function: Callable[..., list[str]], selector: str, path: Path
) -> None:
    make, expected = SELECTORS[selector]
    found = function(path, keys=make())
    assert {*found} == expected
    assert len(found) == len(expected)


@pytest.mark.parametrize("selector", COMMON)
@pytest.mark.parametrize("function", FUNCTIONS.values(), ids=FUNCTIONS)
def test_drop_leaves_out_the_same_in_every_function(
    function: Callable[..., list[str]], selector: str, path: Path
) -> None:
    make, dropped = COMMON[selector]
    assert {*function(path, drop=make())} == {*NAMES} - dropped


@pytest.mark.parametrize("function", ORDERED)
def test_keys_in_an_iterable_set_the_order(function: Callable[..., list[str]], path: Path) -> None:
    order = ["head", "a*b", "encoder.0.bias"]
    assert function(path, keys=order) == order
    assert function(path, keys=order, drop="a*b") == ["head", "encoder.0.bias"]
    in_file = ingot.safe_open(path, "np").offset_keys()
    for keys in ("*", ingot.glob(*reversed(NAMES)), lambda info: True):
        assert function(path, keys=keys) == in_file


@pytest.mark.parametrize("function", FUNCTIONS.values(), ids=FUNCTIONS)
def test_drop_applies_after_keys(function: Callable[..., list[str]], path: Path) -> None:
    found = function(path, keys="encoder.*", drop=ingot.glob("*.bias", "head"))
    assert {*found} == {"encoder.0.weight", "encoder.1.weight"}


@pytest.mark.parametrize("function", [load_file, load_torch_file, get_tensors, prefetch, warm, warm_handle])
def test_keys_callable_and_empty_iterable_may_select_nothing(
    function: Callable[..., list[str]], path: Path
) -> None:
    for nothing in ([], lambda info: False):
        assert function(path, keys=nothing) == []
    assert function(path, drop=lambda info: True) == []


def test_keys_callable_that_raises_raises_through(path: Path) -> None:
    def fail(info: TensorInfo) -> bool:
        raise ZeroDivisionError(info.name)

    for function in FUNCTIONS.values():
        for option in ("keys", "drop"):
            with pytest.raises(ZeroDivisionError):
                function(path, **{option: fail})


# Selectors that match nothing, and the tensor and the hint of the error.
MISSES: dict[str, tuple[Any, str, str]] = {
    "name": ("haed", "haed", "has no such tensor — did you mean `head`?"),
    "prefix": (
        "encoder.",
        "encoder.",
        "no such tensor — did you mean `encoder.0.bias`? use `encoder.*` for the names that begin with it",
    ),
    "pattern": ("*.wieght", "*.wieght", "matches this pattern — did you mean `encoder."),
    "brackets": ("[h]ead", "[h]ead", "no such tensor — did you mean `head`?"),
    "glob": (ingot.glob("*.bias", "q*"), "q*", "no name in the file matches this pattern"),
    "list": (["head", "haed"], "haed", "has no such tensor — did you mean `head`?"),
    "pattern in a list": (
        ["encoder.*"],
        "encoder.*",
        "an iterable has exact names: use `ingot.glob('encoder.*')` for a pattern",
    ),
    "prefix in a list": (
        ["decoder"],
        "decoder",
        "use `ingot.glob('decoder*')` for the names that begin with",
    ),
}


@pytest.mark.parametrize("miss", MISSES)
@pytest.mark.parametrize("option", ["keys", "drop"])
def test_keys_that_miss_are_the_same_error_in_every_function(miss: str, option: str, path: Path) -> None:
    given, tensor, hint = MISSES[miss]
    said = set()
    for function in FUNCTIONS.values():
        with pytest.raises(ingot.TensorNotFoundError) as caught:
            function(path, **{option: given})
        assert (caught.value.code, caught.value.tensor) == ("unknown-tensor", tensor)
        assert caught.value.path == str(path)
        assert hint in str(caught.value)
        said.add(str(caught.value))
    assert len(said) == 1


WRONG: dict[str, Any] = {
    "bytes": b"head",
    "int": 3,
    "float": 0.5,
    "list of list": [["head"]],
    "list of bytes": ["head", b"head"],
    "tuple of int": (1, 2),
    "list of NoneType": [None],
}


@pytest.mark.parametrize("found", WRONG)
@pytest.mark.parametrize("option", ["keys", "drop"])
def test_keys_of_a_wrong_type_are_the_same_error_in_every_function(
    found: str, option: str, path: Path
) -> None:
    said = set()
    for function in FUNCTIONS.values():
        with pytest.raises(
            TypeError, match=rf"{option} takes a str .*ingot.glob.*: found {found}$"
        ) as caught:
            function(path, **{option: WRONG[found]})
        # Functions put their name before it.
        said.add(str(caught.value).rpartition("(): ")[2])
    assert len(said) == 1


def test_glob_takes_names_and_patterns_only() -> None:
    for wrong in ((), (3,), ("a", None), (["a"],)):
        with pytest.raises(TypeError, match=r"glob\(\) takes"):
            ingot.glob(*wrong)
    assert ingot.glob("a", "b") == ingot.glob("a", "b") != ingot.glob("b", "a")
    assert len({ingot.glob("a"), ingot.glob("a"), ingot.glob("b")}) == 2
    assert repr(ingot.glob("a*")) == "ingot.glob('a*')"
    assert len(repr(ingot.glob(*map(str, range(2000))))) < 80
    assert len(repr(ingot.glob("x" * 10_000))) < 100


def test_keys_select_an_alias_by_its_own_name(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    import ingot.torch

    path, weight = tmp_path / "tied.safetensors", torch.zeros(2, 3)
    ingot.torch.save_file(
        {"decoder": weight, "encoder": weight, "other": torch.ones(1)}, path, shared="alias"
    )
    stored = {name for name in written(path) if name != "other"}
    assert len(stored) == 1
    seen: list[TensorInfo] = []
    for keys in ("encoder", "enc*", ["encoder"], lambda info: seen.append(info) or info.name == "encoder"):
        for function in (load_torch_file, rewrite):
            assert function(path, keys=keys) == ["encoder"]
        assert {*load_torch_file(path, drop=keys)} == {"decoder", "other"}
    assert {(info.name, info.dtype, info.shape, info.nbytes) for info in seen} == {
        ("decoder", "F32", (2, 3), 24),
        ("encoder", "F32", (2, 3), 24),
        ("other", "F32", (1,), 4),
    }


# Maps of devices, and commands: names and patterns only ---------------------------------------------------


def by_device(path: Path, *patterns: str) -> list[str]:
    torch = pytest.importorskip("ingot.torch")
    found = torch.load_file(path, device={ingot.glob(*patterns): "meta", "*": "cpu"})
    return [name for name, tensor in found.items() if tensor.is_meta]


def typed(*words: object) -> int:
    return program.run(list(map(str, words)))


def by_option(path: Path, option: str, patterns: tuple[str, ...]) -> list[str]:
    return [word for pattern in patterns for word in (option, pattern)]


def of_answer(capsys: pytest.CaptureFixture[str]) -> Any:
    out, err = capsys.readouterr()
    answer = json.loads(out)
    if "error" in answer:
        assert err == f"error: {answer['error']}\n"
        raise ingot.TensorNotFoundError(answer["error"], code=answer["code"])
    return answer


def listed(capsys: pytest.CaptureFixture[str], *words: object) -> list[str]:
    typed(*words, "--json")
    return [tensor["name"] for tensor in of_answer(capsys)["tensors"]]


def of_modules(modules: list[dict[str, Any]]) -> list[str]:
    return [
        name
        for module in modules
        for name in ([module["path"]] if module["shape"] is not None else of_modules(module["modules"]))
    ]


def ls(capsys: Any, path: Path, words: list[str]) -> list[str]:
    return listed(capsys, "ls", path, *words)


def tree(capsys: Any, path: Path, words: list[str]) -> list[str]:
    typed("tree", path, *words, "--expand", "--json")
    return of_modules(of_answer(capsys)["modules"])


def stats_command(capsys: Any, path: Path, words: list[str]) -> list[str]:
    typed("stats", path, *words, *([] if "--keys" in words else ["--all"]), "--json")
    return [*of_answer(capsys)["tensors"]]


def export(capsys: Any, path: Path, words: list[str]) -> list[str]:
    every = [] if "--keys" in words else ["*"]
    typed("export", path, *every, *words, "-d", path.parent, "--dry-run", "--json")
    return [file["name"] for file in of_answer(capsys)["files"]]


def cast(capsys: Any, path: Path, words: list[str]) -> list[str]:
    out = path.with_suffix(".cast")
    words = ["--except" if word == "--drop" else word for word in words]
    typed("cast", path, out, *words, "--dtype", "F16", "--overwrite", "--json")
    of_answer(capsys)
    with ingot.safe_open(out, "np") as file:
        assert {*file} == {*NAMES}
        return [name for name in file if file.info(name).dtype == "F16"]


def convert_command(capsys: Any, path: Path, words: list[str]) -> list[str]:
    out = path.with_suffix(".converted.safetensors")
    typed("convert", path, out, *words, "--overwrite", "--json")
    of_answer(capsys)
    return written(out)


def diff_command(capsys: Any, path: Path, words: list[str]) -> list[str]:
    other = path.with_name("other.safetensors")
    ingot.numpy.save_file({"other": numpy.zeros(1, numpy.float32)}, other)
    typed("diff", path, other, *words, "--json")
    tensors = of_answer(capsys)["tensors"]
    return [name for name, (_, in_other) in tensors.items() if in_other is None]


COMMANDS = {
    function.__name__: function
    for function in (ls, tree, stats_command, export, cast, convert_command, diff_command)
}
PATTERNS = {
    "name": ("head",),
    "name with a star": ("a*b",),
    "name with brackets": ("decoder[0].w",),
    "pattern": ("encoder.*",),
    "pattern with brackets": ("*[0]*",),
    "several": ("head", "*.bias", "a?b"),
}


@pytest.mark.parametrize("case", PATTERNS)
@pytest.mark.parametrize("command", COMMANDS.values(), ids=COMMANDS)
def test_commands_select_what_functions_do(
    command: Callable[..., list[str]], case: str, path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    patterns = PATTERNS[case]
    expected = {*load_file(path, keys=ingot.glob(*patterns))}
    assert {*command(capsys, path, by_option(path, "--keys", patterns))} == expected
    assert {*by_device(path, *patterns)} == expected
    assert {*command(capsys, path, by_option(path, "--drop", patterns))} == {*NAMES} - expected


@pytest.mark.parametrize("miss", ["haed", "encoder.", "*.wieght", "[h]ead"])
def test_commands_report_a_miss_as_functions_do(
    miss: str, path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(ingot.TensorNotFoundError) as expected:
        load_file(path, keys=miss)
    with pytest.raises(ingot.TensorNotFoundError) as of_device:
        by_device(path, miss)
    assert str(of_device.value) == str(expected.value)
    for command in COMMANDS.values():
        for option in ("--keys", "--drop"):
            with pytest.raises(ingot.TensorNotFoundError) as caught:
                command(capsys, path, [option, miss])
            words = str(expected.value).partition(": ")[2]
            assert str(caught.value).partition(": ")[2].replace(" and other.safetensors", "") == words
