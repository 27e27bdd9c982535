"""`ingot.compat`: `safetensors` for programs that import it, held against the wheel that is installed."""

from __future__ import annotations

import ctypes
import errno
import importlib
import importlib.metadata
import importlib.util
import inspect
import os
import pickle
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy
import pytest
import safetensors
import safetensors.numpy
import safetensors.torch
import torch
from torch import nn

import ingot
import ingot.compat
import ingot.torch
from ingot._frameworks import FRAMEWORKS

PACKAGE = Path(ingot.__file__).parent
# The wheel's, held here while the names stand for ingot's.
REAL = SimpleNamespace(top=safetensors, torch=safetensors.torch, numpy=safetensors.numpy)
RealError: type[Exception] = safetensors.SafetensorError


@pytest.fixture
def compat() -> Iterator[SimpleNamespace]:
    """The modules as a program sees them after `install`."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        ingot.compat.install()
    try:
        top = importlib.import_module("safetensors")
        assert top is not REAL.top
        yield SimpleNamespace(
            top=top,
            rust=importlib.import_module("safetensors._safetensors_rust"),
            torch=importlib.import_module("safetensors.torch"),
            numpy=importlib.import_module("safetensors.numpy"),
        )
    finally:
        ingot.compat.uninstall()


@pytest.fixture
def path(path: Path) -> Path:
    tensors = {"b": torch.arange(12.0).reshape(3, 4), "a": torch.arange(3), "s": torch.tensor(1.0)}
    ingot.torch.save_file(tensors, path, {"format": "pt"})
    return path


def in_a_fresh_process(*args: str, **variables: str) -> str:
    """What a Python with these arguments prints, ingot first on its path."""
    paths = [str(PACKAGE.parent), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), **variables}
    done = subprocess.run([sys.executable, *args], capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


# --- names and signatures ---


def own_names(module: Any) -> set[str]:
    """What a module has of its own: not the modules it imports, nor the names of `typing`."""
    return {
        name
        for name, value in vars(module).items()
        if not name.startswith("__")
        and not isinstance(value, ModuleType)
        and getattr(value, "__module__", None) not in ("typing", "collections")
        and name not in ("Any", "defaultdict")
    }


MADE_BY_OTHERS = {"PrefetchLoader", "PySafeSlice", "TensorMeta"}
# What 0.7 had, and what 0.9.0rc1 adds to 0.8.0.
MORE = {
    "top": {"PrefetchLoader", "PySafeSlice", "TensorMeta"},
    "rust": {"PrefetchLoader", "PySafeSlice", "TensorMeta", "TensorStream"},
    "torch": {"_flatten", "_tobytes"},
    "numpy": {"_tobytes"},
}


@pytest.mark.parametrize("module", ["top", "rust", "torch", "numpy"])
def test_every_name_is_there(compat: SimpleNamespace, module: str) -> None:
    real = REAL.top._safetensors_rust if module == "rust" else getattr(REAL, module)
    assert own_names(real) | MORE[module] <= set(dir(getattr(compat, module)))


def fits(ours: Any, theirs: Any) -> bool:
    """Whether ours can be called as theirs: by position in the same order, by the same names and defaults."""
    own, other = inspect.signature(ours).parameters, inspect.signature(theirs).parameters
    shared = [name for name in own if name in other]
    more = [own[name] for name in own if name not in other]
    by_position = [name for name in other if other[name].kind is not inspect.Parameter.KEYWORD_ONLY]
    return (
        shared == list(other)
        and list(own)[: len(by_position)] == by_position
        and all(own[name].kind in (other[name].kind, POSITIONAL_OR_KEYWORD) for name in shared)
        and all(own[name].default == other[name].default for name in shared)
        and all(parameter.default is not inspect.Parameter.empty for parameter in more)
    )


POSITIONAL_OR_KEYWORD = inspect.Parameter.POSITIONAL_OR_KEYWORD


@pytest.mark.parametrize("module", ["top", "torch", "numpy"])
def test_every_function_takes_what_the_wheels_does(compat: SimpleNamespace, module: str) -> None:
    checked = 0
    for name in sorted(own_names(getattr(REAL, module))):
        theirs, ours = getattr(getattr(REAL, module), name), getattr(getattr(compat, module), name)
        if callable(theirs) and theirs is not RealError and name not in MADE_BY_OTHERS:
            try:
                inspect.signature(theirs)
            except ValueError:
                continue
            assert fits(ours, theirs), f"{name}{inspect.signature(ours)} for {inspect.signature(theirs)}"
            checked += 1
    assert checked > 4


@pytest.mark.parametrize("kind", ["safe_open", "_safe_open_handle", "TensorSpec"])
def test_every_method_is_there(compat: SimpleNamespace, kind: str) -> None:
    theirs, ours = getattr(REAL.top, kind), getattr(compat.top, kind)
    for name in (
        name for name in vars(theirs) if not name.startswith("__") or name in ("__enter__", "__exit__")
    ):
        assert hasattr(ours, name), name
        if callable(getattr(theirs, name)) and name != "__exit__":
            assert fits(getattr(ours, name), getattr(theirs, name)), name


# What 0.9.0rc1 adds to 0.8.0: the classes, and their methods as they are called. All else is as it was.
HANDLE = {
    "prefetch": lambda self, /, plan=None, *, device=None, threads=8: ...,
    "get_tensor_meta": lambda self, /, name: ...,
}
ADDED = {
    "safe_open": HANDLE,
    "_safe_open_handle": HANDLE,
    "PrefetchLoader": {
        "names": lambda self, /: ...,
        "take": lambda self, /, name: ...,
        "close": lambda self, /: ...,
        "__iter__": lambda self, /: ...,
        "__len__": lambda self, /: ...,
        "__enter__": lambda self, /: ...,
        "__exit__": None,
    },
    "PySafeSlice": {
        "get_shape": lambda self, /: ...,
        "get_dtype": lambda self, /: ...,
        "__getitem__": lambda self, key, /: ...,
    },
    "TensorMeta": {"dtype": None, "shape": None, "data_offsets": None},
    "TensorStream": {"__iter__": lambda self, /: ..., "__next__": lambda self, /: ...},
}


@pytest.mark.parametrize("kind", ADDED)
def test_what_0_9_adds_is_there(compat: SimpleNamespace, kind: str) -> None:
    ours = getattr(compat.rust, kind)
    # Only the extension module has the class of what `iter(loader)` gives.
    assert kind == "TensorStream" or getattr(compat.top, kind) is ours
    for name, theirs in ADDED[kind].items():
        assert hasattr(ours, name), name
        if theirs is not None:
            assert fits(getattr(ours, name), theirs), f"{name}{inspect.signature(getattr(ours, name))}"


MISFITS = {
    "another order": lambda b=1, a=1: ...,
    "no names": lambda a, b=1, /: ...,
    "no place": lambda a, *, b=1: ...,
    "another default": lambda a, b=2: ...,
    "no default": lambda a, b: ...,
    "one more between": lambda a, c=0, b=1: ...,
    "one more without default": lambda a, b=1, *, c: ...,
    "one less": lambda a: ...,
}


@pytest.mark.parametrize("ours", MISFITS.values(), ids=MISFITS)
def test_a_signature_that_does_not_fit_is_noticed(ours: Any) -> None:
    def theirs(a: Any, b: int = 1) -> None: ...

    assert not fits(ours, theirs)
    assert fits(lambda a, b=1, *, c=0: ..., theirs)


def test_the_tables_have_what_the_wheels_have(compat: SimpleNamespace) -> None:
    # And nothing else: programs make sets of dtypes of them.
    assert compat.torch._TYPES == REAL.torch._TYPES
    assert compat.torch._SIZE == REAL.torch._SIZE
    assert compat.numpy._TYPES == REAL.numpy._TYPES
    for module in ("torch", "numpy"):
        tables = {name for name, value in vars(getattr(REAL, module)).items() if is_a_table(name, value)}
        assert {"_TYPES"} <= tables
        for name in tables:
            assert getattr(getattr(compat, module), name) == getattr(getattr(REAL, module), name), name


def is_a_table(name: str, value: Any) -> bool:
    return not name.startswith("__") and isinstance(value, (dict, set, frozenset, list, tuple))


@pytest.mark.parametrize("code", ["F4", "F8_E8M0"])
def test_a_dtype_can_be_added_that_upstream_does_not_load(compat: SimpleNamespace, code: str) -> None:
    assert code not in compat.torch._TYPES
    both = {code: ingot.torch.DTYPES[code] for code in ("F4", "F8_E8M0")}
    tensors = {name: torch.zeros(2, dtype=torch.uint8).view(dtype) for name, dtype in both.items()}
    data = ingot.torch.save(tensors)
    assert {name: tensor.dtype for name, tensor in compat.torch.load(data).items()} == both
    compat.torch._TYPES[code] = both[code]
    # Now by the table; the other one is still loaded.
    assert {name: tensor.dtype for name, tensor in compat.torch.load(data).items()} == both
    assert compat.torch._getdtype(code) is both[code]


# --- modules ---


def test_the_modules_say_where_they_are(compat: SimpleNamespace) -> None:
    for module in vars(compat).values():
        assert module.__name__.partition(".")[0] == "safetensors"
        assert module.__spec__.name == module.__name__
        assert Path(module.__file__).is_relative_to(PACKAGE)
    assert [Path(place) for place in compat.top.__path__] == [PACKAGE / "compat" / "safetensors"]
    spec = importlib.util.find_spec("safetensors.torch")
    assert spec is not None
    assert spec.origin == compat.torch.__file__
    # Modules that say `import safetensors` and use `safetensors.torch`.
    assert compat.top.torch is compat.torch
    assert compat.top._safetensors_rust is compat.rust


def test_the_version_is_that_of_the_distribution(compat: SimpleNamespace) -> None:
    assert compat.top.__version__ == importlib.metadata.version("safetensors")
    assert "__version__" in dir(compat.top)
    with pytest.raises(AttributeError, match="nope"):
        compat.top.nope  # noqa: B018


def test_uninstall_brings_everything_back() -> None:
    before = {name: module for name, module in sys.modules.items() if name.startswith("safetensors")}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        ingot.compat.install()
    assert "safetensors" not in sys.modules
    importlib.import_module("safetensors.torch")
    ingot.compat.install()
    ingot.compat.uninstall()
    ingot.compat.uninstall()
    after = {name: module for name, module in sys.modules.items() if name.startswith("safetensors")}
    assert after == before
    assert not issubclass(ingot.SafetensorError, RealError)
    assert importlib.import_module("safetensors") is REAL.top


def test_install_after_the_wheel_was_imported_says_who_has_it() -> None:
    library = ModuleType("some_library.inner")
    library.load = REAL.torch.load_file  # type: ignore[attr-defined]
    other = ModuleType("other_library")
    other.open = REAL.top.safe_open  # type: ignore[attr-defined]
    sys.modules.update({"some_library.inner": library, "other_library": other})
    try:
        with pytest.warns(RuntimeWarning, match=r"imported before.*other_library, .*some_library") as caught:
            ingot.compat.install()
        assert caught[0].filename == __file__
    finally:
        ingot.compat.uninstall()
        del sys.modules["some_library.inner"], sys.modules["other_library"]


def test_install_before_warns_of_nothing_and_imports_no_framework() -> None:
    script = """
import sys, warnings
warnings.simplefilter("error")
import ingot.compat
ingot.compat.install()
import safetensors
print(sorted({"torch", "numpy", "ctypes", "importlib.metadata"} & set(sys.modules)))
"""
    assert in_a_fresh_process("-c", script) == "[]"


# Without site-packages, so without the wheel.
ALONE = (
    f"import sys; sys.path.insert(0, {str(PACKAGE.parent)!r}); import ingot.compat; ingot.compat.install();"
)


def test_where_no_wheel_is_installed_programs_find_a_version_all_the_same() -> None:
    script = f"""{ALONE}
import importlib.metadata, safetensors, ingot
print(importlib.metadata.version("safetensors"), safetensors.__version__)
print(safetensors.SafetensorError is ingot.SafetensorError)
"""
    assert in_a_fresh_process("-I", "-S", "-c", script).split() == ["0.8.0", "0.8.0", "True"]


# --- starting programs ---


def test_a_script_runs_on_ingot(tmp_path: Path) -> None:
    (tmp_path / "beside.py").write_text("word = 'found'")
    script = tmp_path / "script.py"
    script.write_text(
        "import sys, beside, safetensors.torch\n"
        "print(__name__, sys.argv[1:], beside.word, safetensors.torch.__file__)\n"
        "assert sys.modules['__main__'].beside is beside\n"
    )
    printed = in_a_fresh_process("-m", "ingot.compat", str(script), "-x", "y")
    assert printed == f"__main__ ['-x', 'y'] found {PACKAGE / 'compat/safetensors/torch.py'}"


def test_a_module_runs_on_ingot(tmp_path: Path) -> None:
    (tmp_path / "tool.py").write_text(
        "import sys, safetensors\nprint(__name__, sys.argv, safetensors.__file__)\n"
    )
    printed = in_a_fresh_process(
        "-m", "ingot.compat", "-m", "tool", "-x", PYTHONPATH=f"{PACKAGE.parent}:{tmp_path}"
    )
    assert (
        printed == f"__main__ ['{tmp_path / 'tool.py'}', '-x'] {PACKAGE / 'compat/safetensors/__init__.py'}"
    )


def test_without_a_program_it_says_how_to_use_it() -> None:
    for args in ([], ["-m"], ["--help"]):
        done = subprocess.run(
            [sys.executable, "-m", "ingot.compat", *args],
            capture_output=True,
            text=True,
            env={**os.environ, "PYTHONPATH": str(PACKAGE.parent)},
        )
        assert done.returncode == 1
        assert "python -m ingot.compat (script.py | -m module)" in done.stderr


def documented_line() -> str:
    """The line for a .pth file, from the docstring that tells of it."""
    lines = (ingot.compat.__doc__ or "").splitlines()
    return next(line.strip() for line in lines if line.strip().startswith("import os;"))


@pytest.mark.parametrize(("value", "ours"), [("1", True), ("0", False)])
def test_the_environment_turns_it_on_in_every_process(tmp_path: Path, value: str, ours: bool) -> None:
    assert documented_line() in (PACKAGE.parents[1] / "README.md").read_text()
    (tmp_path / "ingot-compat.pth").write_text(documented_line() + "\n")
    script = f"""
import sys
before = set(sys.modules)
import site; site.addsitedir({str(tmp_path)!r})
print(any(name.startswith("ingot") for name in set(sys.modules) - before))
import pathlib, safetensors
print(pathlib.Path(safetensors.__file__).is_relative_to({str(PACKAGE)!r}))
"""
    assert in_a_fresh_process("-c", script, INGOT_COMPAT=value).split() == [str(ours), str(ours)]


# --- errors ---


def test_both_classes_catch_the_errors_of_both(compat: SimpleNamespace, path: Path) -> None:
    file = compat.top.safe_open(path, "pt")
    for kind in (RealError, compat.top.SafetensorError, compat.rust.SafetensorError, ingot.SafetensorError):
        with pytest.raises(kind):
            file.get_tensor("nope")
        with pytest.raises(kind):
            # ingot's own, for a library that was started without compat.
            ingot.safe_open(path, "pt").get_tensor("nope")
    # A library that took the real function before raises the real class.
    with pytest.raises(compat.top.SafetensorError):
        REAL.torch.load(b"")
    assert issubclass(ingot.TensorNotFoundError, (RealError, KeyError))


def test_errors_can_be_pickled_while_installed(compat: SimpleNamespace, path: Path) -> None:
    with pytest.raises(ingot.TensorNotFoundError) as caught:
        compat.top.safe_open(path, "pt").get_tensor("nope")
    again = pickle.loads(pickle.dumps(caught.value))
    assert (type(again), str(again), again.tensor) == (ingot.TensorNotFoundError, str(caught.value), "nope")
    text = compat.top.SafetensorError("text")
    assert str(pickle.loads(pickle.dumps(text))) == "text"


def with_header(header: bytes, data: bytes = b"", nbytes: int | None = None) -> bytes:
    return (len(header) if nbytes is None else nbytes).to_bytes(8, "little") + header + data


def entry(dtype: str = "F32", shape: str = "[1]", begin: int = 0, end: int = 4) -> bytes:
    text = f'{{"a":{{"dtype":"{dtype}","shape":{shape},"data_offsets":[{begin},{end}]}}}}'
    return text.encode()


BROKEN = {
    "HeaderTooSmall": b"abc",
    "HeaderTooLarge": with_header(b"{}", nbytes=2**40),
    "InvalidHeaderLength": with_header(b"{}", nbytes=200),
    "InvalidHeader": with_header(b'{"\xff": 1}'),
    "InvalidHeaderDeserialization": with_header(b"{nope"),
    "TensorInvalidInfo": with_header(entry(shape="[2]"), b"1234"),
    "InvalidOffset": with_header(entry(begin=4, end=8), b"12345678"),
    "ValidationOverflow": with_header(entry(shape=f"[{2**40},{2**40}]"), b"1234"),
    "MetadataIncompleteBuffer": with_header(entry(), b"12"),
}


def words(text: str) -> str:
    """Upstream's words for a fault, as far as they do not depend on its JSON reader."""
    return ":".join(text.split(":")[:2])


@pytest.mark.parametrize("old_name", BROKEN)
def test_header_errors_begin_with_the_words_of_the_wheel(
    compat: SimpleNamespace, old_name: str, tmp_path: Path
) -> None:
    data = BROKEN[old_name]
    path = tmp_path / "broken"
    path.write_bytes(data)
    readers: list[tuple[Callable[..., Any], Callable[..., Any], Any]] = [
        (REAL.torch.load_file, compat.torch.load_file, path),
        (REAL.numpy.load_file, compat.numpy.load_file, path),
        (REAL.torch.load, compat.torch.load, data),
        (REAL.numpy.load, compat.numpy.load, data),
        (REAL.top.deserialize, compat.top.deserialize, data),
    ]
    for theirs, ours, argument in readers:
        with pytest.raises(RealError) as wanted:
            theirs(argument)
        with pytest.raises(ingot.HeaderError) as found:
            ours(argument)
        assert str(found.value).startswith(words(str(wanted.value)))
        # What safetensors up to 0.5 printed, which programs look for.
        assert f"[{old_name}]" in str(found.value)
        if argument is path:
            assert str(path) in str(found.value)


def test_a_git_lfs_pointer_is_a_header_too_large_and_named(compat: SimpleNamespace, tmp_path: Path) -> None:
    (tmp_path / "t").write_bytes(b"version https://git-lfs.github.com/spec/v1\noid sha256:aa\nsize 12\n")
    with pytest.raises(RealError, match=r"^Error while deserializing header: header too large.*LFS"):
        compat.torch.load_file(tmp_path / "t")


CALLS: dict[str, Callable[[SimpleNamespace, Path], Any]] = {
    "missing tensor": lambda m, path: m.top.safe_open(path, "pt").get_tensor("nope"),
    "missing slice": lambda m, path: m.top.safe_open(path, "pt").get_slice("nope"),
    "framework": lambda m, path: m.top.safe_open(path, "foo"),
    "device": lambda m, path: m.top.safe_open(path, "pt", "foo"),
    "backend": lambda m, path: m.top.safe_open(path, "pt", backend="zzz"),
    "closed": lambda m, path: closed(m, path).get_tensor("a"),
    "closed keys": lambda m, path: closed(m, path).keys(),
    "closed metadata": lambda m, path: closed(m, path).metadata(),
    "spec": lambda m, path: m.top.TensorSpec(dtype="zzz", shape=[1], data_ptr=0, data_len=0),
    "size": lambda m, path: m.top.serialize(
        {"a": m.top.TensorSpec(dtype="float32", shape=[2], data_ptr=8, data_len=7)}
    ),
    "no folder": lambda m, path: m.torch.save_file({}, path.parent / "nope" / "t"),
    "not a dict": lambda m, path: m.torch.save([torch.ones(1)]),
    "not a tensor": lambda m, path: m.torch.save({"a": 3}),
    "nested": lambda m, path: m.torch.save({"a": {"b": torch.ones(1)}}),
    "sparse": lambda m, path: m.torch.save({"a": torch.eye(2).to_sparse()}),
    "strided": lambda m, path: m.torch.save({"layer": torch.ones(2, 3).t()}),
    "channels last": lambda m, path: m.torch.save(
        {"a": torch.ones(1, 2, 3, 3).to(memory_format=torch.channels_last)}
    ),
    "strided model": lambda m, path: m.torch.save_model(strided_model(), path, force_contiguous=False),
    "part of a storage": lambda m, path: m.torch.save_model(part_model(), path),
    "shared": lambda m, path: m.torch.save(dict.fromkeys("a", torch.ones(2)) | dict.fromkeys("ab", ONES)),
    "strict": lambda m, path: m.torch.load_model(nn.Linear(2, 2), path),
    "step": lambda m, path: m.top.safe_open(path, "pt").get_slice("b")[::-1],
}
ONES = torch.ones(2)


def closed(modules: SimpleNamespace, path: Path) -> Any:
    with modules.top.safe_open(path, "pt") as file:
        pass
    return file


def strided_model() -> nn.Module:
    model = nn.Module()
    model.register_buffer("turned", torch.ones(2, 3).t())
    return model


def part_model() -> nn.Module:
    model = nn.Module()
    model.register_buffer("row", torch.ones(20, 3)[1:2])
    return model


@pytest.mark.parametrize("call", CALLS)
def test_other_errors_are_of_the_wheels_class_and_begin_with_its_words(
    compat: SimpleNamespace, path: Path, call: str
) -> None:
    with pytest.raises(Exception) as wanted:  # noqa: PT011
        CALLS[call](REAL, path)
    with pytest.raises(wanted.type) as found:
        CALLS[call](compat, path)
    beginning = str(wanted.value)
    # Where it names a set, a temporary file, or goes on about its documentation.
    for stop in (
        " [{",
        " (os error",
        ": No such",
        " which ",
        " (expected",
        "amongst",
        "Supported",
        '"extra"',
    ):
        beginning = beginning.partition(stop)[0]
    assert str(found.value).startswith(beginning)
    assert len(beginning) > 8


@pytest.mark.parametrize(
    ("reach", "kind", "number"),
    [
        (lambda folder: folder / "nope", FileNotFoundError, errno.ENOENT),
        (lambda folder: folder / "file" / "nope", NotADirectoryError, errno.ENOTDIR),
        (lambda folder: folder / ("n" * 300), OSError, errno.ENAMETOOLONG),
    ],
)
def test_what_cannot_be_opened_is_what_the_system_says_too(
    compat: SimpleNamespace, tmp_path: Path, reach: Callable[[Path], Path], kind: type[OSError], number: int
) -> None:
    (tmp_path / "file").touch()
    path = reach(tmp_path)
    for read in (compat.torch.load_file, compat.numpy.load_file, lambda p: compat.top.safe_open(p, "pt")):
        with pytest.raises(FileNotFoundError) as caught:
            read(path)
        assert isinstance(caught.value, kind)
        assert (caught.value.errno, os.fsdecode(caught.value.filename)) == (number, str(path))
        assert str(caught.value).startswith(f"No such file or directory: {path}")
        again = pickle.loads(pickle.dumps(caught.value))
        assert (type(again), str(again), again.errno) == (type(caught.value), str(caught.value), number)


def test_a_shard_that_is_missing_is_still_named(compat: SimpleNamespace, tmp_path: Path) -> None:
    index = tmp_path / "model.safetensors.index.json"
    index.write_text('{"weight_map": {"a": "model-00001-of-00001.safetensors"}}')
    with pytest.raises(FileNotFoundError, match="model-00001-of-00001"):
        compat.torch.load_file(index)


def test_words_of_ones_own_are_a_note(compat: SimpleNamespace, path: Path) -> None:
    """Where the message is upstream's and nothing else, what ingot has to say is shown below it."""
    calls = {
        "You are trying to save a sparse": lambda: compat.torch.save({"t": torch.eye(2).to_sparse()}),
        "Cannot copy out of meta tensor": lambda: compat.torch.save({"t": torch.ones(2, device="meta")}),
        "torch.complex128": lambda: compat.torch.save({"t": torch.ones(2, dtype=torch.complex128)}),
        "index 9 is out of bounds": lambda: compat.top.safe_open(path, "pt").get_slice("b")[9],
        "Error during slicing [9]": lambda: compat.top.safe_open(path, "np").get_slice("b")[9],
    }
    for words, call in calls.items():
        with pytest.raises(RealError) as caught:
            call()
        assert isinstance(caught.value, ingot.SafetensorError)
        assert str(caught.value).startswith(words)
        assert caught.value.tensor in ("t", "b")
        if "sparse" not in words:
            assert any(f"tensor `{caught.value.tensor}`" in note for note in caught.value.__notes__)


@pytest.mark.parametrize("framework", sorted(FRAMEWORKS))
def test_a_file_is_listed_without_its_framework(framework: str, path: Path) -> None:
    """Upstream imports most of them with the first tensor."""
    packages = ["numpy", "torch", "jax", "flax", "tensorflow", "mlx", "paddle"]
    script = f"""
import sys
sys.modules.update(dict.fromkeys({packages!r}))
import ingot.compat
ingot.compat.install()
from safetensors import safe_open
with safe_open({str(path)!r}, {framework!r}) as file:
    part = file.get_slice("b")
    print(file.keys(), file.offset_keys(), file.metadata(), part.get_shape(), part.get_dtype())
    for read in (lambda: file.get_tensor("b"), lambda: part[0], lambda: file.get_tensors()):
        try:
            read()
        except ModuleNotFoundError as error:
            assert f"No module named {{error.name!r}}" in str(error), error
            assert f"pip install 'ingot-tensors[{{error.name}}]'" in str(error), error
        else:
            raise AssertionError
"""
    assert in_a_fresh_process("-c", script) == "['a', 'b', 's'] ['a', 'b', 's'] {'format': 'pt'} [3, 4] F32"


@pytest.mark.parametrize("framework", ["pt", "np"])
def test_listing_a_file_imports_no_framework(framework: str, path: Path) -> None:
    script = f"""
import sys, ingot.compat
ingot.compat.install()
from safetensors import safe_open
file = safe_open({str(path)!r}, {framework!r})
file.keys(), file.get_slice("b").get_shape()
print(sorted({{"numpy", "torch"}} & set(sys.modules)))
"""
    assert in_a_fresh_process("-c", script) == "[]"


def test_a_missing_file_is_a_file_not_found_error(compat: SimpleNamespace, tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="nope") as caught:
        compat.top.safe_open(tmp_path / "nope", "pt")
    assert not isinstance(caught.value, RealError)


@pytest.mark.parametrize("bad", [{"a": 1}, {1: "a"}, [1]])
def test_metadata_that_is_no_text_is_a_type_error(compat: SimpleNamespace, bad: Any, tmp_path: Path) -> None:
    for save in (compat.torch.save_file, compat.numpy.save_file, compat.top.serialize_file):
        with pytest.raises(TypeError):
            save({}, tmp_path / "t", bad)
    with pytest.raises(TypeError):
        compat.torch.save({3: torch.ones(1)})
    assert not (tmp_path / "t").exists()


# --- handles ---


def test_a_handle_does_what_the_wheels_does(compat: SimpleNamespace, path: Path) -> None:
    ours, theirs = compat.top.safe_open(path, "pt"), REAL.top.safe_open(path, "pt")
    assert ours.keys() == theirs.keys()
    assert ours.offset_keys() == theirs.offset_keys()
    assert ours.metadata() == theirs.metadata()
    ours.metadata().pop("format")
    assert ours.metadata() == {"format": "pt"}
    assert list(ours.get_tensors()) == list(theirs.get_tensors())
    for name in theirs.keys():  # noqa: SIM118
        assert torch.equal(ours.get_tensor(name), theirs.get_tensor(name))
    part, other = ours.get_slice("b"), theirs.get_slice("b")
    assert (part.get_shape(), part.get_dtype()) == (other.get_shape(), other.get_dtype()) == ([3, 4], "F32")
    indices: list[Any] = [
        0, -1, slice(1, None), slice(None, None, 2), (slice(None), slice(1, 3)), ..., None, [0, 2], (), True,
        slice(-2, None), slice(1, 100), slice(2, 1), (..., 0), (1, 2), [True, False, True], ([0], [1]),
        numpy.int64(1),
    ]  # fmt: skip
    for index in indices:
        assert torch.equal(part[index], other[index]), index
    for index in (5, (0, 9), (0, 0, 0)):
        with pytest.raises(IndexError):
            part[index]
    for step in (-1, 0):
        with pytest.raises(ValueError, match="step"):
            part[::step]
    ours.__exit__(None, None, None)
    ours.__exit__(None, None, None)
    with ours as again:
        assert again is ours
    # It is closed, and its slices are not.
    assert part[0].tolist() == [0, 1, 2, 3]


def test_keyword_arguments_are_those_of_the_wheel(compat: SimpleNamespace, path: Path) -> None:
    assert (
        compat.top.safe_open(filename=path, framework="pt", device="cpu", backend="pread").backend == "pread"
    )
    assert compat.torch.load_file(path, device="cpu", backend="mmap")["a"].tolist() == [0, 1, 2]
    assert compat.top.safe_open(str(path), framework="np", device=None).get_tensor("a").tolist() == [0, 1, 2]


def test_a_handle_can_be_kept_shared_and_sent(compat: SimpleNamespace, path: Path) -> None:
    file = compat.top.safe_open(path, "pt", backend="pread")
    assert file in {file}
    part = file.get_slice("b")
    with ThreadPoolExecutor(8) as pool:
        rows = list(pool.map(lambda row: part[row % 3].tolist(), range(300)))
    assert rows == [part[row % 3].tolist() for row in range(300)]
    again = pickle.loads(pickle.dumps(file))
    assert type(again) is compat.top.safe_open
    assert again is not file
    assert again.backend == "pread"
    file.__exit__(None, None, None)
    assert again.get_tensor("a").tolist() == [0, 1, 2]
    with pytest.raises(RealError, match="closed"):
        pickle.dumps(file)


def test_metadata_of_a_tensor(compat: SimpleNamespace, path: Path) -> None:
    file = compat.top.safe_open(path, "pt")
    meta = file.get_tensor_meta("b")
    assert (meta.dtype, meta.shape, meta.data_offsets) == ("F32", [3, 4], (24, 72))
    assert repr(meta) == 'TensorMeta { dtype: "F32", shape: [3, 4], data_offsets: (24, 72) }'
    with pytest.raises(RealError, match=r"^File does not contain tensor nope"):
        file.get_tensor_meta("nope")


def test_a_handle_of_an_open_file_reads_that_file(
    compat: SimpleNamespace, path: Path, tmp_path: Path
) -> None:
    with path.open("rb") as opened:
        opened.read(3)
        # Another file takes the name: not the one that was opened.
        ingot.torch.save_file({"other": torch.ones(1)}, tmp_path / "other")
        (tmp_path / "other").replace(path)
        file = compat.top._safe_open_handle(opened, "pt")
        assert opened.tell() == 3
    assert file.keys() == ["a", "b", "s"]
    assert file.get_tensor("a").tolist() == [0, 1, 2]
    assert file.get_slice("b")[1].tolist() == [4, 5, 6, 7]
    with pytest.raises(TypeError, match="pickle"):
        pickle.dumps(file)
    with file:
        pass
    with pytest.raises(RealError, match=r"^File is closed"):
        file.keys()


def test_a_handle_of_an_empty_file_is_refused(compat: SimpleNamespace, tmp_path: Path) -> None:
    (tmp_path / "empty").touch()
    with (tmp_path / "empty").open("rb") as opened, pytest.raises(RealError, match="header too small"):
        compat.top._safe_open_handle(opened, "np")


# --- prefetch ---


def test_prefetch_gives_each_tensor_once(compat: SimpleNamespace, path: Path) -> None:
    with compat.top.safe_open(path, "pt") as file, file.prefetch() as loader:
        assert loader.names() == file.offset_keys()
        assert len(loader) == 3
        assert loader.take("b").tolist() == torch.arange(12.0).reshape(3, 4).tolist()
        rest = dict(loader)
        assert {name: tensor.tolist() for name, tensor in rest.items()} == {"a": [0, 1, 2], "s": 1.0}
        assert list(loader) == []
        with pytest.raises(RealError, match="taken before"):
            loader.take("a")
        with pytest.raises(RealError, match=r"^tensor `nope` is not in the plan"):
            loader.take("nope")


def test_prefetch_follows_a_plan_and_outlives_its_handle(compat: SimpleNamespace, path: Path) -> None:
    with compat.top.safe_open(path, "np") as file:
        loader = file.prefetch({"b": slice(1, 3), "a": None}, device="cpu", threads=2)
    assert loader.names() == ["a", "b"]
    assert loader.take("b").tolist() == [[4, 5, 6, 7], [8, 9, 10, 11]]
    name, tensor = next(iter(loader))
    assert (name, tensor.tolist()) == ("a", [0, 1, 2])
    loader.close()
    loader.close()
    with pytest.raises(RealError, match="closed"):
        loader.take("nope")


def test_prefetch_hands_out_of_turn_what_is_asked_for(
    compat: SimpleNamespace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tensors = {f"t{i}": torch.full((1000,), i) for i in range(9)}
    compat.torch.save_file(tensors, tmp_path / "t")
    # Room for one, so that the last cannot have been read in its turn.
    monkeypatch.setattr("ingot.compat._prefetch.AHEAD", 8000)
    with compat.top.safe_open(tmp_path / "t", "pt", backend="pread").prefetch(threads=3) as loader:
        assert loader.take("t8")[0] == 8
        assert [(name, int(tensor[0])) for name, tensor in loader] == [(f"t{i}", i) for i in range(8)]


def test_prefetch_raises_where_the_tensor_is_asked_for(compat: SimpleNamespace, tmp_path: Path) -> None:
    tensors = {
        "bad": {"dtype": "F6_E2M3", "shape": [4], "data": b"123"},
        "good": {"dtype": "F32", "shape": [1], "data": bytes(4)},
    }
    ingot.serialize_file(tensors, tmp_path / "t")
    loader = compat.top.safe_open(tmp_path / "t", "pt").prefetch()
    assert loader.take("good").tolist() == [0]
    with pytest.raises(ingot.DtypeError, match="bad"):
        loader.take("bad")


@pytest.mark.parametrize(
    ("plan", "message"),
    [
        ({"nope": None}, "^File does not contain tensor nope"),
        ({"b": slice(0, 2, 2)}, "^prefetch plan slices must have step 1, got 2 for b"),
        ({"b": slice(0, 4)}, "^prefetch plan slice stop 4 for b is out of range for 3 rows"),
        ({"b": 3}, "^prefetch plan values must be None or a slice, got <class 'int'> for b"),
        ({"s": slice(0, 1)}, "cannot slice rows of the 0-d tensor s"),
    ],
)
def test_a_bad_plan_is_refused_in_the_words_of_0_9(
    compat: SimpleNamespace, path: Path, plan: Any, message: str
) -> None:
    with pytest.raises(RealError, match=message):
        compat.top.safe_open(path, "pt").prefetch(plan)


def test_a_plan_that_is_no_dict_is_a_type_error(compat: SimpleNamespace, path: Path) -> None:
    file = compat.top.safe_open(path, "pt")
    with pytest.raises(TypeError):
        file.prefetch(["a"])
    with pytest.raises(OverflowError):
        file.prefetch(threads=-1)


# --- buffers and addresses ---


def test_a_spec_is_a_tensor_by_its_address(compat: SimpleNamespace, tmp_path: Path) -> None:
    memory = ctypes.create_string_buffer(b"12345678", 8)
    arguments = {"dtype": "float32", "shape": (2,), "data_ptr": ctypes.addressof(memory), "data_len": 8}
    ours, theirs = compat.top.TensorSpec(**arguments), REAL.top.TensorSpec(**arguments)
    assert repr(ours) == repr(theirs)
    assert (ours.dtype, ours.shape, ours.data_ptr, ours.data_len) == (
        "F32", [2], arguments["data_ptr"], 8,
    )  # fmt: skip
    wanted = REAL.top.serialize({"a": theirs}, {"k": "v"})
    assert compat.top.serialize({"a": ours}, {"k": "v"}) == wanted
    compat.top.serialize_file({"a": ours}, tmp_path / "t.bt", metadata={"k": "v"})
    assert (tmp_path / "t.bt").read_bytes() == wanted
    assert compat.top.deserialize(wanted) == [("a", {"dtype": "F32", "shape": [2], "data": b"12345678"})]
    packed = compat.top.TensorSpec(dtype="float4_e2m1fn_x2", shape=[2, 4], data_ptr=8, data_len=8)
    assert (packed.dtype, packed.shape) == ("F4", [2, 8])
    with pytest.raises(TypeError):
        pickle.dumps(ours)
    with pytest.raises(AttributeError):
        ours.dtype = "F16"


def test_an_address_of_nothing_is_refused(compat: SimpleNamespace) -> None:
    spec = compat.top.TensorSpec(dtype="float32", shape=[2], data_ptr=0, data_len=8)
    with pytest.raises(RealError, match="its address is 0"):
        compat.top.serialize({"a": spec})
    empty = compat.top.TensorSpec(dtype="float32", shape=[0], data_ptr=0, data_len=0)
    assert compat.top.serialize({"a": empty}) == REAL.torch.save({"a": torch.ones(0)})
    with pytest.raises(OverflowError):
        compat.top.TensorSpec(dtype="float32", shape=[-2], data_ptr=0, data_len=8)


def test_buffers_as_0_7_took_them(compat: SimpleNamespace) -> None:
    tensors = {"a": torch.arange(3.0), "b": torch.ones(2, dtype=torch.bfloat16)}
    flat = compat.torch._flatten(tensors)
    assert flat["a"] == {"dtype": "float32", "shape": torch.Size([3]), "data": tensors["a"].numpy().tobytes()}
    assert compat.top.serialize(flat) == REAL.torch.save(tensors)


def test_tensors_as_0_8_hands_them_over(compat: SimpleNamespace) -> None:
    tensors = {"a": torch.arange(3.0), "b": torch.ones(2, dtype=torch.bfloat16), "e": torch.ones(0)}
    keep: list[Any] = []
    specs = compat.torch._flatten_as_ptr(tensors, keep)
    assert len(keep) == 3
    assert compat.top.serialize(specs) == REAL.torch.save(tensors)
    arrays = {"a": numpy.arange(3.0), "f": numpy.asfortranarray(numpy.ones((2, 3)))}
    specs = compat.numpy._flatten(arrays, keep)
    assert compat.top.serialize(specs) == ingot.numpy.save(arrays)
    for name, array in arrays.items():
        assert compat.numpy._tobytes(array) == numpy.ascontiguousarray(array).tobytes(), name
    with pytest.raises(ValueError, match="non contiguous tensor: `t`"):
        compat.torch._flatten_as_ptr({"t": torch.ones(2, 3).t()}, keep)


# --- torch and numpy ---


def test_files_are_those_of_the_wheel(compat: SimpleNamespace, tmp_path: Path) -> None:
    tensors = {"b": torch.arange(6.0).reshape(2, 3), "a": torch.ones(3, dtype=torch.int8)}
    arrays = {name: tensor.numpy() for name, tensor in tensors.items()}
    for texts in (None, {"format": "pt"}):
        wanted = REAL.torch.save(tensors, texts)
        assert compat.torch.save(tensors, texts) == wanted
        assert compat.numpy.save(arrays, texts) == wanted
        # The name says bintensors to ingot, and nothing to upstream.
        compat.torch.save_file(tensors, tmp_path / "t.bt", metadata=texts)
        assert (tmp_path / "t.bt").read_bytes() == wanted
        compat.numpy.save_file(arrays, tmp_path / "n.bt", metadata=texts)
        assert (tmp_path / "n.bt").read_bytes() == wanted
    assert compat.torch.load(wanted).keys() == REAL.torch.load(wanted).keys()
    assert compat.torch.save({}) == REAL.torch.save({})


def test_the_table_of_dtypes_can_be_changed(compat: SimpleNamespace) -> None:
    data = ingot.torch.save({"t": torch.ones(4, dtype=torch.float8_e4m3fn)})
    assert compat.torch.load(data)["t"].dtype == torch.float8_e4m3fn
    compat.torch._TYPES["F8_E4M3"] = torch.uint8
    assert compat.torch._getdtype("F8_E4M3") == torch.uint8
    assert compat.torch.load(data)["t"].dtype == torch.uint8
    array = ingot.numpy.save({"t": numpy.ones(2, numpy.int16)})
    compat.numpy._TYPES["I16"] = numpy.uint16
    assert compat.numpy.load(array)["t"].dtype == numpy.uint16
    with pytest.raises(KeyError):
        compat.torch._getdtype("F33")


@pytest.mark.parametrize("code", sorted(ingot.torch.DTYPES))
def test_every_dtype_by_every_way(compat: SimpleNamespace, code: str, tmp_path: Path) -> None:
    dtype = ingot.torch.DTYPES[code]
    tensor = torch.tensor([1, 0] * 4, dtype=torch.uint8).view(dtype)
    compat.torch.save_file({"t": tensor}, tmp_path / "t")
    data = (tmp_path / "t").read_bytes()
    loaded = [
        compat.torch.load_file(tmp_path / "t"),
        compat.torch.load_file(tmp_path / "t", backend="pread"),
        compat.torch.load(data),
        compat.torch._view2torch(compat.top.deserialize(data)),
        {"t": compat.top.safe_open(tmp_path / "t", "pt").get_slice("t")[:]},
    ]
    for tensors in loaded:
        assert tensors["t"].dtype == dtype
        assert tensors["t"].shape == tensor.shape
        assert tensors["t"].view(torch.uint8).tolist() == tensor.view(torch.uint8).tolist()
    keep: list[Any] = []
    assert compat.top.serialize(compat.torch._flatten_as_ptr({"t": tensor}, keep)) == data


WHOLE = torch.arange(6.0).reshape(2, 3)
STATES: dict[str, dict[str, torch.Tensor]] = {
    "twins": {"a": WHOLE, "b": WHOLE, "c": WHOLE.view(-1)},
    "part": {"a": WHOLE[:1], "b": WHOLE},
    "two groups": {"c": WHOLE, "b": WHOLE, "z": ONES, "y": ONES, "x": torch.ones(1)},
    "halves": {"a": WHOLE[:1], "b": WHOLE[1:]},
    "halves and whole": {"a": WHOLE[:1], "b": WHOLE[1:], "c": WHOLE},
    "meta": {"a": torch.ones(2, device="meta"), "b": torch.ones(2, device="meta")},
    "empty": {"a": torch.ones(0), "b": torch.ones(0)},
}


@pytest.mark.parametrize("state", STATES)
@pytest.mark.parametrize(
    "choice",
    [
        {},
        {"preferred_names": ["b"]},
        {"preferred_names": ["c", "b"]},
        {"preferred_names": ["a"], "discard_names": ["a"]},
        {"discard_names": ["a"]},
        {"discard_names": ["b", "c"]},
    ],
    ids=str,
)
def test_the_same_names_are_kept_and_dropped(
    compat: SimpleNamespace, state: str, choice: dict[str, Any]
) -> None:
    tensors = STATES[state]
    ours, theirs = compat.torch, REAL.torch
    found = sorted(map(sorted, ours._find_shared_tensors(tensors)))
    assert found == sorted(map(sorted, theirs._find_shared_tensors(tensors)))
    if state != "meta":
        groups = [set(tensors)]
        found = sorted(map(sorted, ours._filter_shared_not_shared(groups, tensors)))
        assert found == sorted(map(sorted, theirs._filter_shared_not_shared(groups, tensors)))
    for tensor in tensors.values():
        for name in ("_end_ptr", "_is_complete", "storage_ptr", "storage_size"):
            assert getattr(ours, name)(tensor) == getattr(theirs, name)(tensor), name
    try:
        wanted = theirs._remove_duplicate_names(tensors, **choice)
    except RuntimeError:
        with pytest.raises(RuntimeError):
            ours._remove_duplicate_names(tensors, **choice)
    else:
        assert ours._remove_duplicate_names(tensors, **choice) == wanted
        assert ours._remove_duplicate_names(tensors, **choice)["unknown"] == []


def test_models_are_saved_and_loaded_as_by_the_wheel(compat: SimpleNamespace, tmp_path: Path) -> None:
    model = nn.Module()
    model.a = model.c = nn.Linear(3, 3)
    model.b = nn.Linear(2, 2)
    texts = {"format": "pt"}
    compat.torch.save_model(model, tmp_path / "ours", metadata=texts)
    assert texts == {"format": "pt"}
    REAL.torch.save_model(model, str(tmp_path / "theirs"), metadata=dict(texts))
    ours, theirs = (REAL.top.safe_open(tmp_path / name, "pt") for name in ("ours", "theirs"))
    assert ours.metadata() == theirs.metadata()
    assert ours.keys() == theirs.keys()
    for load in (compat.torch.load_model, REAL.torch.load_model):
        assert load(model, tmp_path / "ours") == (set(), [])
        assert load(nn.Linear(2, 2), tmp_path / "ours", strict=False)[0] == {"weight", "bias"}
    with warnings.catch_warnings():
        # Upstream says nothing of another dtype.
        warnings.simplefilter("error")
        compat.torch.load_model(model.half(), tmp_path / "ours")


def test_bytes_of_a_tensor(compat: SimpleNamespace) -> None:
    for tensor in (
        torch.arange(3.0),
        torch.tensor(1.0),
        torch.ones(2, dtype=torch.bfloat16),
        torch.ones(0, 3),
    ):
        array, owner = compat.torch._to_ndarray(tensor)
        assert (
            array.tobytes()
            == compat.torch._tobytes(tensor, "t")
            == REAL.torch._to_ndarray(tensor)[0].tobytes()
        )
        assert isinstance(owner, torch.Tensor)
    with pytest.raises(ValueError, match="sparse tensor: `t`"):
        compat.torch._tobytes(torch.eye(2).to_sparse(), "t")


def test_numpy_privates(compat: SimpleNamespace) -> None:
    assert (
        compat.numpy._is_little_endian(numpy.ones(1)) is REAL.numpy._is_little_endian(numpy.ones(1)) is True
    )
    assert compat.numpy._is_little_endian(numpy.ones(1, ">f4")) is False
    views = compat.top.deserialize(ingot.torch.save({"t": torch.ones(2, dtype=torch.bfloat16)}))
    assert compat.numpy._view2np(views)["t"].astype(float).tolist() == [1, 1]
    assert compat.numpy._getdtype("F32") == REAL.numpy._getdtype("F32")
