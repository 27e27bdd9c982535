"""`ingot.compat`: names, modules and programs of `safetensors`, compared with the wheel."""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import inspect
import sys
import warnings
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from modules import PACKAGE, REAL, RealError, in_a_fresh_process

import ingot
import ingot.compat
import ingot.torch
from support.processes import python


def own_names(module: Any) -> set[str]:
    """Return the names that a module defines, without imported modules and names of `typing`."""
    return {
        name
        for name, value in vars(module).items()
        if not name.startswith("__")
        and not isinstance(value, ModuleType)
        and getattr(value, "__module__", None) not in ("typing", "collections")
        and name not in ("Any", "defaultdict")
    }


MADE_BY_OTHERS = {"PrefetchLoader", "PySafeSlice", "TensorMeta"}


# Names of 0.7, and names that 0.9.0rc1 adds to 0.8.0.
MORE = {
    "top": {"PrefetchLoader", "PySafeSlice", "TensorMeta"},
    "rust": {"PrefetchLoader", "PySafeSlice", "TensorMeta", "TensorStream"},
    "torch": {"_flatten", "_tobytes"},
    "numpy": {"_tobytes"},
}


@pytest.mark.parametrize("module", ["top", "rust", "torch", "numpy"])
def test_compat_has_every_name(compat: SimpleNamespace, module: str) -> None:
    real = REAL.top._safetensors_rust if module == "rust" else getattr(REAL, module)
    assert own_names(real) | MORE[module] <= set(dir(getattr(compat, module)))


def fits(ours: Any, theirs: Any) -> bool:
    """Return whether ours accepts every call of theirs: it has the same order, names and defaults."""
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
def test_compat_functions_have_the_wheels_parameters(compat: SimpleNamespace, module: str) -> None:
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
def test_compat_has_every_method(compat: SimpleNamespace, kind: str) -> None:
    theirs, ours = getattr(REAL.top, kind), getattr(compat.top, kind)
    for name in (
        name for name in vars(theirs) if not name.startswith("__") or name in ("__enter__", "__exit__")
    ):
        assert hasattr(ours, name), name
        if callable(getattr(theirs, name)) and name != "__exit__":
            assert fits(getattr(ours, name), getattr(theirs, name)), name


# Additions of 0.9.0rc1 to 0.8.0: the classes and their methods. Everything else is the same.
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
def test_compat_has_the_additions_of_0_9(compat: SimpleNamespace, kind: str) -> None:
    ours = getattr(compat.rust, kind)
    # Only the extension module has the class that `iter(loader)` returns.
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
def test_signature_check_finds_a_difference(ours: Any) -> None:
    def theirs(a: Any, b: int = 1) -> None: ...

    assert not fits(ours, theirs)
    assert fits(lambda a, b=1, *, c=0: ..., theirs)


def test_compat_tables_equal_the_wheels(compat: SimpleNamespace) -> None:
    # The tables have no further entries, since programs make sets of dtypes of them.
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
def test_compat_dtypes_table_can_be_extended(compat: SimpleNamespace, code: str) -> None:
    assert code not in compat.torch._TYPES
    both = {code: ingot.torch.DTYPES[code] for code in ("F4", "F8_E8M0")}
    tensors = {name: torch.zeros(2, dtype=torch.uint8).view(dtype) for name, dtype in both.items()}
    data = ingot.torch.save(tensors)
    assert {name: tensor.dtype for name, tensor in compat.torch.load(data).items()} == both
    compat.torch._TYPES[code] = both[code]
    # The changed table decides one dtype. The other one is still loaded.
    assert {name: tensor.dtype for name, tensor in compat.torch.load(data).items()} == both
    assert compat.torch._getdtype(code) is both[code]


def test_compat_modules_name_themselves(compat: SimpleNamespace) -> None:
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


def test_compat_version_is_that_of_the_distribution(compat: SimpleNamespace) -> None:
    assert compat.top.__version__ == importlib.metadata.version("safetensors")
    assert "__version__" in dir(compat.top)
    with pytest.raises(AttributeError, match="nope"):
        compat.top.nope  # noqa: B018


def test_uninstall_restores_everything() -> None:
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


def test_install_after_importing_the_wheel_warns() -> None:
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


def test_install_before_importing_the_wheel_is_silent() -> None:
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


def test_install_without_a_wheel_provides_a_version() -> None:
    script = f"""{ALONE}
import importlib.metadata, safetensors, ingot
print(importlib.metadata.version("safetensors"), safetensors.__version__)
print(safetensors.SafetensorError is ingot.SafetensorError)
"""
    assert in_a_fresh_process("-I", "-S", "-c", script).split() == ["0.8.0", "0.8.0", "True"]


def test_compat_runs_a_script(tmp_path: Path) -> None:
    (tmp_path / "beside.py").write_text("word = 'found'")
    script = tmp_path / "script.py"
    script.write_text(
        "import sys, beside, safetensors.torch\n"
        "print(__name__, sys.argv[1:], beside.word, safetensors.torch.__file__)\n"
        "assert sys.modules['__main__'].beside is beside\n"
    )
    printed = in_a_fresh_process("-m", "ingot.compat", str(script), "-x", "y")
    assert printed == f"__main__ ['-x', 'y'] found {PACKAGE / 'compat/safetensors/torch.py'}"


def test_compat_runs_a_module(tmp_path: Path) -> None:
    (tmp_path / "tool.py").write_text(
        "import sys, safetensors\nprint(__name__, sys.argv, safetensors.__file__)\n"
    )
    printed = in_a_fresh_process(
        "-m", "ingot.compat", "-m", "tool", "-x", PYTHONPATH=f"{PACKAGE.parent}:{tmp_path}"
    )
    assert (
        printed == f"__main__ ['{tmp_path / 'tool.py'}', '-x'] {PACKAGE / 'compat/safetensors/__init__.py'}"
    )


def test_compat_without_a_program_prints_usage() -> None:
    for args in ([], ["-m"], ["--help"]):
        done = python("-m", "ingot.compat", *args)
        assert done.code == 1
        assert "python -m ingot.compat (script.py | -m module)" in done.err


def documented_line() -> str:
    """Return the line for a .pth file from the docstring."""
    lines = (ingot.compat.__doc__ or "").splitlines()
    return next(line.strip() for line in lines if line.strip().startswith("import os;"))


@pytest.mark.parametrize(("value", "ours"), [("1", True), ("0", False)])
def test_compat_is_enabled_by_the_environment(tmp_path: Path, value: str, ours: bool) -> None:
    assert documented_line() in (PACKAGE.parents[1] / "docs" / "guides" / "compat.md").read_text()
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
