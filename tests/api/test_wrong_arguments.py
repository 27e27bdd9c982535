"""Arguments of a wrong kind: each error names the function, the argument and the value."""

import asyncio
import inspect
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from typing import Any

import numpy
import pytest

import ingot
from ingot._adapters.face import Whole
from ingot.numpy import mover, payload, wrap
from support.public_api import public_api

torch = pytest.importorskip("torch")

from ingot.torch import load_file, load_into, load_model, save_file, save_model  # noqa: E402

MODULE = r"must be a torch\.nn\.Module, found "
CASES: dict[str, tuple[Callable[[str], Any], str]] = {
    "save_model of a state_dict": (
        lambda path: save_model(torch.nn.Linear(1, 1).state_dict(), path),
        rf"save_model\(\): model {MODULE}OrderedDict",
    ),
    "save_model with swapped arguments": (
        lambda path: save_model(path, torch.nn.Linear(1, 1)),
        rf"save_model\(\): model {MODULE}str",
    ),
    "load_model with swapped arguments": (
        lambda path: load_model(path, torch.nn.Linear(1, 1)),
        rf"load_model\(\): model {MODULE}str",
    ),
    "load_into a str": (
        lambda path: load_into("abc", path),
        r"load_into\(\): into must be a torch\.nn\.Module or a dict .*, found str",
    ),
    "merge of one path": (
        lambda path: ingot.merge(path, path + ".out"),
        r"merge\(\): sources: expected an iterable of sources, found one str",
    ),
    "rewrite with a number as a name": (
        lambda path: ingot.rewrite(path, path + ".out", rename={1: "w"}),
        r"rewrite\(\): rename must be a dict of str to str, found the key 1",
    ),
    "load_file of a number of NumPy": (
        lambda path: load_file(numpy.int64(3)),
        r"load_file\(\): filename: expected a path .*, found int64",
    ),
    "modelspec of a dict with a number": (
        lambda path: ingot.modelspec.read({1: "a"}),
        r"read\(\): source: expected a dict of str to str, found the key 1",
    ),
}


@pytest.fixture
def path(path: Path) -> Path:
    save_file({"a": torch.zeros(2)}, path)
    return path


@pytest.mark.parametrize("case", CASES)
def test_wrong_argument_is_a_type_error_that_names_it(case: str, path: Path) -> None:
    call, message = CASES[case]
    with pytest.raises(TypeError, match=message):
        call(str(path))
    assert [*path.parent.iterdir()] == [path]


@pytest.mark.parametrize("wrong", [slice(1.0, 2.0), slice("a"), (0, slice(None, None, 0.5))])
def test_slice_with_floats_names_tensor_and_slice(wrong: Any, path: Path) -> None:
    save_file({"a": torch.zeros(2, 2)}, path)
    with ingot.open(path) as file, closing(ingot.Writer(path, {"a": ("F32", [2, 2])}, overwrite=True)) as new:
        for call in (
            lambda: file.get_slice("a")[wrong],
            lambda: load_file(path, slices={"a": wrong}),
            lambda: new.write("a", torch.zeros(2, 2), wrong),
        ):
            with pytest.raises(
                TypeError, match=r"tensor `a`: index: a slice must have ints or None, found slice\("
            ):
                call()


@pytest.mark.parametrize("record", ["{}", "no JSON", '{"algorithm":"md5","tensors":{}}'])
def test_update_metadata_rejects_a_record_that_no_reader_verifies(record: str, path: Path) -> None:
    before = path.read_bytes()
    with pytest.raises(ingot.IntegrityError) as caught:
        ingot.update_metadata(path, {"ingot.checksums": record})
    assert caught.value.code == "invalid-checksums"
    assert path.read_bytes() == before


@pytest.mark.parametrize("given", [torch.float32, numpy.float32, numpy.dtype("f4"), "F32"])
def test_replace_tensor_rejects_a_dtype(given: Any, path: Path) -> None:
    with pytest.raises(TypeError, match=rf"tensor.* found {type(given).__name__}"):
        ingot.replace_tensor(path, "a", given)


def test_open_handle_as_a_source_has_a_hint(path: Path) -> None:
    with ingot.open(path) as file:
        for call in (ingot.inspect, load_file, ingot.verify, ingot.modelspec.read):
            with pytest.raises(TypeError, match="found safe_open — an open handle is not a source"):
                call(file)


def test_update_metadata_takes_a_record_of_digests(path: Path) -> None:
    other = path.with_name("b.safetensors")
    save_file({"a": torch.zeros(2)}, other, checksums=True)
    ingot.update_metadata(path, ingot.inspect(other).metadata)
    assert ingot.verify(path).ok


@pytest.mark.parametrize(
    ("call", "hint"),
    [
        (lambda path: ingot.hash(path, "SHA256"), "did you mean 'sha256'?"),
        (lambda path: load_file(path, backend="MMAP"), "did you mean 'mmap'?"),
        (lambda path: ingot.Writer(path + ".new", {"a": ("F33", [2])}), "expected one of BOOL, U8"),
    ],
)
def test_unknown_word_names_choices_and_nearest(call: Callable[[str], Any], hint: str, path: Path) -> None:
    with pytest.raises(ingot.SafetensorError) as caught:
        call(str(path))
    assert hint in str(caught.value)
    assert "expected one of" in str(caught.value)


def test_load_into_error_gives_no_advice_for_saving(path: Path) -> None:
    with pytest.raises(ingot.DestinationError) as caught:
        load_into({"a": torch.zeros(2).to_sparse()}, path)
    assert not {"save", "saving", "saves"} & {*str(caught.value).split()}
    assert "expected a plain tensor" in str(caught.value)


@pytest.mark.parametrize(
    ("method", "name"), [("get_tensor", "a"), ("info", "a"), ("get_slice", "a"), ("shard_of", "a")]
)
def test_wrong_keyword_lists_the_arguments(method: str, name: str, path: Path) -> None:
    message = rf"{method}\(\) got an unexpected keyword .* It takes name"
    with ingot.open(path) as file, pytest.raises(TypeError, match=message):
        getattr(file, method)(name, dtype="F16")


# --- every positional argument of every public function

ARRAY = numpy.ones(2, numpy.float32)
BUFFER = {"dtype": "F32", "shape": [2], "data": bytes(8)}


class Store:
    """A store with nothing in it."""

    def get_ranges(self, path: str, *, starts: list[int], ends: list[int]) -> list[bytes]:
        raise FileNotFoundError(path)


def tensors_for(name: str) -> dict[str, Any]:
    if "serialize" in name:
        return {"a": BUFFER}
    return {"a": torch.from_numpy(ARRAY) if "torch" in name else ARRAY}


def right(name: str, argument: str, path: Path) -> Any:
    """Return a value that a function takes for a positional argument."""
    values = {
        "adapter": path,
        "algorithm": "sha256",
        "arrays": tensors_for(name),
        "base": path,
        "data": path.read_bytes(),
        "destination": path.with_name("new.safetensors"),
        "dtype": "F16",
        "filename": path,
        "metadata": None,
        "model": torch.nn.Linear(1, 1),
        "name": "a",
        "other": path,
        "patch": path,
        "path": "m.safetensors",
        "scale": 1.0,
        "set": {"k": "v"},
        "source": path,
        "step": 1,
        "sources": [path],
        "specs": {"b": ("F32", [2])},
        "directory": path.with_name("run"),
        "keep": 3,
        "keep_every": None,
        "state": {"a": torch.zeros(2), "step": 3},
        "store": Store(),
        "into": {"a": torch.zeros(2)},
        "tensor": ARRAY,
        "tensor_dict": tensors_for(name),
        "tensors": tensors_for(name),
        "to": "kohya",
    }
    if argument == "accelerator":
        # With the library, tests/peers/clients tests the argument after it.
        pytest.skip("accelerate is not installed")
    if name == "ingot.download" and argument == "source":
        return "http://127.0.0.1:1/m.safetensors"
    return values[argument]


def positional(function: Any) -> list[inspect.Parameter]:
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    given = inspect.signature(function).parameters.values()
    return [one for one in given if one.kind in kinds and one.name not in ("self", "cls")]


# Arguments for which every value is right, or which a framework judges.
FREE = {"default", "device", "state"}
# Values that are right.
FITTING = [
    ("max_shard_size", 5),
    ("scale", 5),
    ("scale", 1.5),
    ("index", 5),
    ("index", [5]),
    ("index", None),
    ("keep", 5),
    ("keep", None),
    ("metadata", None),
    ("keep_every", 5),
    ("signal", 5),
    ("step", 5),
    ("timeout", 5),
    ("timeout", 1.5),
]


@contextmanager
def called(name: str, path: Path) -> Iterator[Any]:
    """Yield a function, bound to an object if it is a method."""
    function = public_api()[name]
    owner, _, method = name.rpartition(".")
    with ExitStack() as stack:
        if owner == "ingot.safe_open":
            function = getattr(stack.enter_context(ingot.open(path)), method)
        elif owner == "ingot.PrefetchLoader":
            file = stack.enter_context(ingot.open(path))
            function = getattr(stack.enter_context(file.prefetch()), method)
        elif owner == "ingot.torch.DeltaWriter":
            function = getattr(ingot.torch.DeltaWriter({}, path.with_name("run")), method)
        elif owner == "ingot.Checkpoints":
            function = getattr(ingot.Checkpoints(path.with_name("run")), method)
        elif name == "ingot.Writer.write":
            writer = ingot.Writer(path.with_name("w"), {"a": ("F32", [2])})
            stack.callback(writer.close)
            function = writer.write
        elif name == "ingot.Writer.join":
            function = ingot.Writer.join
        elif owner == "ingot.<framework>":
            function = getattr(Whole(wrap, mover, lambda array, index: array[index], payload), method)
        elif name == "ingot.inspect_async":
            yield lambda source: asyncio.run(ingot.inspect_async(source))
            return
        yield function


def every_positional() -> list[tuple[str, str]]:
    return [
        (name, one.name)
        for name, function in public_api().items()
        for one in positional(function)
        # As in a dict, `get` returns its default for a key that is no name.
        if one.name not in FREE and name != "ingot.safe_open.get"
    ]


@pytest.mark.parametrize(("name", "argument"), every_positional())
def test_wrong_positional_argument_is_named(name: str, argument: str, path: Path) -> None:
    given = positional(public_api()[name])
    place = [one.name for one in given].index(argument)
    before = [right(name, one.name, path) for one in given[:place]]
    required = [one.name for one in given[place + 1 :] if one.default is one.empty]
    after = {one: right(name, one, path) for one in required}
    with called(name, path) as function:
        for wrong in (5, 1.5, object(), [5], None):
            if (argument, wrong) in FITTING or wrong is given[place].default:
                continue
            with pytest.raises((TypeError, ValueError)) as caught:
                function(*before, wrong, **after)
            where = f"{argument}={wrong!r}: {caught.value!r}"
            assert str(caught.value).startswith(f"{name.rpartition('.')[2]}(): "), where
            assert argument in str(caught.value), where
            found = (type(wrong).__name__, repr(wrong), *(["int"] if wrong == [5] else []))
            assert any(one in str(caught.value) for one in found), where
    assert not path.with_name("new.safetensors").exists()
