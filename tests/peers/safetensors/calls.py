"""Calls of safetensors that go wrong, or nearly: every public function with odd values for each argument.

Each call takes the modules to use, the wheel's or ours, and a folder that `furnish` has filled.
"""

from __future__ import annotations

import io
import pathlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from itertools import product as combinations
from types import SimpleNamespace
from typing import Any

import numpy
import torch

from peers.safetensors.givens import (
    ARRAYS,
    BACKENDS,
    BROKEN,
    CHOICES,
    DATA,
    DEVICES,
    FILES,
    FRAMEWORKS,
    INDICES,
    METADATA,
    MISSING_FRAMEWORKS,
    MODULES,
    NAMES,
    NO_DEVICES,
    PATHS,
    PLANS,
    PREFETCHING,
    SERIALIZED,
    SHARED,
    SPECS,
    STATES,
    closed,
    given,
    model,
    opened,
    spec,
)

Call = Callable[[SimpleNamespace, pathlib.Path], Any]
#: The values of an argument, by the words for them in the name of a call.
Axis = Mapping[str, Any] | Sequence[Any]


def each(name: str, call: Callable[..., Any], **axes: Axis) -> Iterator[tuple[str, Call]]:
    """Yield `call` with every combination of the values in `axes`, and its name with their words."""
    words = [
        axis.items() if isinstance(axis, Mapping) else zip(axis, axis, strict=True) for axis in axes.values()
    ]
    for chosen in combinations(*words):
        titles = dict(zip(axes, (title for title, _ in chosen), strict=True))
        values = dict(zip(axes, (value for _, value in chosen), strict=True))
        yield name.format(**titles), partial(call, **values)


def _by_handle(m: SimpleNamespace, path: pathlib.Path) -> Any:
    with path.open("rb") as file:
        return m.top._safe_open_handle(file, "pt")


BROKEN_FILES = {title: f"broken{number}" for number, title in enumerate(BROKEN)}
# The last of `PATHS` name files of the working directory, which would stay.
WRITABLE = {
    title: path
    for title, path in PATHS.items()
    if title not in ("missing", "missing, as bytes", "os.PathLike")
}
HANDLE_USES: dict[str, Callable[[Any], Any]] = {
    "keys": lambda file: file.keys(),
    "offset_keys": lambda file: file.offset_keys(),
    "metadata": lambda file: file.metadata(),
    "get_tensor": lambda file: file.get_tensor("a"),
    "get_tensors": lambda file: file.get_tensors(),
    "get_slice": lambda file: file.get_slice("a").get_shape(),
    "get_slice.get_dtype": lambda file: file.get_slice("a").get_dtype(),
    "get_slice[:]": lambda file: file.get_slice("a")[:],
    "missing": lambda file: file.get_tensor("nope"),
}
CLOSING: dict[str, Callable[[Any], Any]] = {
    "enter": lambda file: file.__enter__(),
    "exit": lambda file: file.__exit__(None, None, None),
    "exit without": lambda file: file.__exit__(),
    "get_tensor()": lambda file: file.get_tensor(),
    "nope": lambda file: file.nope,
    "iter": lambda file: iter(file),
    "len": lambda file: len(file),
    "index": lambda file: file["a"],
}
NO_FILES = {"None": None, "int": 3, "path": "good", "BytesIO": io.BytesIO(b"abc")}
BOTH = ("pt", "np")
MODULES_OF = ("torch", "numpy")
FRAMEWORK_OF = {"torch": "pt", "numpy": "np"}
CODES = ("F8_E4M3", "BF16", "F8_E8M0", "F6_E2M3", "F4", "C64", "U64")
OTHER_CODES = ("F33", "f32", "", None, 3, "F4", "F8_E8M0", "F6_E2M3", "BF16", "F8_E4M3", "C64", "U64")
TENSOR_OF = {"torch": torch.ones(1), "numpy": numpy.ones(1)}
# Tensors in every layout that callers have.
LAID_OUT = ("meta", "conj", "strided", "channels last", "expanded", "step", "shared", "two crowds", "overlap")
OF_STATES = ("_evaluate_tensors_for_save", "_find_shared_tensors", "_remove_duplicate_names")
OF_TENSORS = ("storage_ptr", "storage_size", "_is_complete", "_end_ptr", "_to_ndarray")


def _opening() -> Iterator[tuple[str, Call]]:
    yield from each(
        "safe_open(filename={v}, {f})",
        lambda m, place, v, f: m.top.safe_open(given(v, place), f),
        v=PATHS,
        f=BOTH,
    )
    yield from each(
        "safe_open(filename={v}, backend=pread)",
        lambda m, place, v: m.top.safe_open(given(v, place), "pt", backend="pread"),
        v=PATHS,
    )
    for title, file in (("", "good"), ("filename=missing, ", "nope")):
        yield from each(
            f"safe_open({title}framework={{v}})",
            lambda m, place, v, file: m.top.safe_open(place / file, v),
            v=FRAMEWORKS,
            file=(file,),
        )
    yield from each(
        "safe_open(device={v}, {f})",
        lambda m, place, v, f: m.top.safe_open(place / "good", f, v),
        v=DEVICES,
        f=BOTH,
    )
    yield from each(
        "safe_open(backend={v})",
        lambda m, place, v: m.top.safe_open(place / "good", "pt", backend=v),
        v=BACKENDS,
    )
    for framework, backend in (("pt", "mmap"), ("np", "pread")):
        yield from each(
            f"safe_open({{n}}, {framework}, {backend})",
            lambda m, place, n, f, b: m.top.safe_open(place / n, f, backend=b),
            n=BROKEN_FILES,
            f=(framework,),
            b=(backend,),
        )
    yield from each("_safe_open_handle({n})", lambda m, place, n: _by_handle(m, place / n), n=BROKEN_FILES)
    yield from each(
        "_safe_open_handle(f={v})", lambda m, place, v: m.top._safe_open_handle(v, "pt"), v=NO_FILES
    )
    yield from each(
        "safe_open({f}).{u}",
        lambda m, place, f, u: u(m.top.safe_open(place / "good", f)),
        f=MISSING_FRAMEWORKS,
        u=HANDLE_USES,
    )
    yield from each(
        "safe_open({f}, device=cuda)",
        lambda m, place, f: m.top.safe_open(place / "good", f, "cuda:0"),
        f=MISSING_FRAMEWORKS,
    )


def _loading() -> Iterator[tuple[str, Call]]:
    k = MODULES_OF
    yield from each(
        "{k}.load_file(filename={v})",
        lambda m, place, k, v: getattr(m, k).load_file(given(v, place)),
        k=k,
        v=PATHS,
    )
    yield from each(
        "{k}.load_file(backend={v})",
        lambda m, place, k, v: getattr(m, k).load_file(place / "good", backend=v),
        k=k,
        v=BACKENDS,
    )
    yield from each(
        "{k}.load_file({n})", lambda m, place, k, n: getattr(m, k).load_file(place / n), k=k, n=BROKEN_FILES
    )
    yield from each("{k}.load({d})", lambda m, place, k, d: getattr(m, k).load(d), k=k, d=BROKEN)
    yield from each("{k}.load(data={v})", lambda m, place, k, v: getattr(m, k).load(v), k=k, v=DATA)
    yield from each(
        "{k}.load_file({c})", lambda m, place, k, c: getattr(m, k).load_file(place / c), k=k, c=CODES
    )
    yield from each(
        "{k}.load({c})", lambda m, place, k, c: getattr(m, k).load((place / c).read_bytes()), k=k, c=CODES
    )
    yield from each(
        "{k}.get_slice({c})[1:]",
        lambda m, place, k, c: opened(m, place, k, c).get_slice("a")[1:],
        k=FRAMEWORK_OF,
        c=CODES,
    )
    yield from each(
        "torch.load_file(device={v})",
        lambda m, place, v: m.torch.load_file(place / "good", v),
        v={title: DEVICES[title] for title in NO_DEVICES},
    )
    yield from each("deserialize({d})", lambda m, place, d: m.top.deserialize(d), d={**BROKEN, **DATA})


def _saving() -> Iterator[tuple[str, Call]]:
    for k, states in (("torch", STATES), ("numpy", ARRAYS)):
        of: dict[str, Axis] = {"k": (k,), "t": (TENSOR_OF[k],)}
        yield from each("{k}.save({v})", lambda m, place, k, v: getattr(m, k).save(v()), k=(k,), v=states)
        yield from each(
            "{k}.save_file({v})",
            lambda m, place, k, v: getattr(m, k).save_file(v(), place / "out"),
            k=(k,),
            v=states,
        )
        yield from each(
            "{k}.save(metadata={v})",
            lambda m, place, k, t, v: getattr(m, k).save({"t": t}, v),
            **of,
            v=METADATA,
        )
        yield from each(
            "{k}.save_file(metadata={v})",
            lambda m, place, k, t, v: getattr(m, k).save_file({"t": t}, place / "out", v),
            **of,
            v=METADATA,
        )
        yield from each(
            "{k}.save_file(filename={v})",
            lambda m, place, k, t, v: getattr(m, k).save_file({"t": t}, given(v, place)),
            **of,
            v=WRITABLE,
        )
    yield from each("TensorSpec({a})", lambda m, place, a: spec(m, **a), a=SPECS)
    yield from each("serialize({v})", lambda m, place, v: m.top.serialize(v(m)), v=SERIALIZED)
    yield from each(
        "serialize_file({v})", lambda m, place, v: m.top.serialize_file(v(m), place / "out"), v=SERIALIZED
    )
    yield from each("serialize(metadata={v})", lambda m, place, v: m.top.serialize({}, v), v=METADATA)
    yield from each(
        "serialize_file(metadata={v})",
        lambda m, place, v: m.top.serialize_file({}, place / "out", v),
        v=METADATA,
    )


def _handles() -> Iterator[tuple[str, Call]]:
    yield from each(
        "{k}({v}, {f})",
        lambda m, place, k, v, f: getattr(opened(m, place, f), k)(v),
        f=BOTH,
        v=NAMES,
        k=("get_tensor", "get_slice"),
    )
    yield from each("open.{u}", lambda m, place, u: u(opened(m, place)), u=HANDLE_USES)
    yield from each("closed.{u}", lambda m, place, u: u(closed(m, place)), u=HANDLE_USES)
    yield from each("closed: {u}", lambda m, place, u: u(closed(m, place)), u=CLOSING)
    yield from each("open: {u}", lambda m, place, u: u(opened(m, place)), u=CLOSING)


def _slices() -> Iterator[tuple[str, Call]]:
    yield from each(
        "get_slice({n})[{i}], {f}",
        lambda m, place, n, i, f: opened(m, place, f).get_slice(n)[i],
        f=BOTH,
        n=("a", "b", "c", "s", "z"),
        i=INDICES,
    )
    yield from each(
        "get_slice.iter, {f}", lambda m, place, f: list(opened(m, place, f).get_slice("b")), f=BOTH
    )


def _models() -> Iterator[tuple[str, Call]]:
    yield from each(
        "save_model({v}, force_contiguous={f})",
        lambda m, place, v, f: m.torch.save_model(v(), place / "out", force_contiguous=f),
        v=MODULES,
        f=(True, False),
    )
    yield from each(
        "load_model({v})", lambda m, place, v: m.torch.load_model(v(), place / "linear"), v=MODULES
    )
    yield from each(
        "save_model(metadata={v})",
        lambda m, place, v: m.torch.save_model(model(), place / "out", v),
        v=METADATA,
    )
    yield from each(
        "load_model(filename={v})", lambda m, place, v: m.torch.load_model(model(), given(v, place)), v=PATHS
    )
    yield from each(
        "save_model(filename={v})",
        lambda m, place, v: m.torch.save_model(model(), given(v, place)),
        v=WRITABLE,
    )
    yield from each(
        "load_model({n}, strict={s})",
        lambda m, place, n, s: m.torch.load_model(model(), place / n, s),
        n=FILES,
        s=(True, False),
    )
    yield from each(
        "load_model(device={v})",
        lambda m, place, v: m.torch.load_model(model(), place / "linear", device=v),
        v={"foo": "foo", "float": 1.5, "None": None},
    )


def _privates() -> Iterator[tuple[str, Call]]:
    # Both sides get the same tensors, since some of the results are addresses.
    states = {
        title: make() for title, make in {**{name: STATES[name] for name in LAID_OUT}, **SHARED}.items()
    }
    firsts = {title: _first(state) for title, state in states.items()}
    yield from each(
        "{k}._getdtype({c})", lambda m, place, k, c: getattr(m, k)._getdtype(c), k=MODULES_OF, c=OTHER_CODES
    )
    yield from each("torch.{f}({v})", lambda m, place, v, f: getattr(m.torch, f)(v), v=states, f=OF_STATES)
    yield from each(
        "torch._flatten_as_ptr({v})", lambda m, place, v: m.torch._flatten_as_ptr(v, []), v=states
    )
    yield from each("torch.{f}({v})", lambda m, place, v, f: getattr(m.torch, f)(v), v=firsts, f=OF_TENSORS)
    yield from each(
        "torch._filter_shared_not_shared({v})",
        lambda m, place, v: m.torch._filter_shared_not_shared([set(v)], v),
        v={title: states[title] for title in SHARED if "meta" not in title},
    )
    yield from each(
        "numpy._is_little_endian({v})", lambda m, place, v: m.numpy._is_little_endian(_first(v())), v=ARRAYS
    )
    yield from each(
        "torch._remove_duplicate_names({v}, {c})",
        lambda m, place, c, v: m.torch._remove_duplicate_names(v(), **c),
        c=CHOICES,
        v=SHARED,
    )


def _first(state: Any) -> Any:
    return next(iter(state.values())) if isinstance(state, dict) else state


def _prefetching() -> Iterator[tuple[str, Call]]:
    yield from each(
        "prefetch(plan={p})", lambda m, place, p: opened(m, place).prefetch(p, device="cuda:0"), p=PLANS
    )
    yield from each(
        "prefetch({o})", lambda m, place, o: opened(m, place).prefetch({"b": None}, **o), o=PREFETCHING
    )
    yield from each("closed.prefetch({o})", lambda m, place, o: closed(m, place).prefetch(**o), o=PREFETCHING)
    yield "prefetch(np)", lambda m, place: opened(m, place, "np").prefetch()
    yield from each(
        "get_tensor_meta({n})", lambda m, place, n: _meta(opened(m, place), n), n={"there": "b", **NAMES}
    )
    yield "closed.get_tensor_meta", lambda m, place: _meta(closed(m, place), "b")
    yield from each(
        "{n}()", lambda m, place, n: getattr(m.top, n)(), n=("PrefetchLoader", "TensorMeta", "PySafeSlice")
    )


def _meta(file: Any, name: Any) -> Any:
    found = file.get_tensor_meta(name)
    return found.dtype, found.shape, found.data_offsets


def are_there(group: str, m: SimpleNamespace) -> bool:
    """Return whether a wheel has the functions of a group. `prefetch` is called without CUDA."""
    return group != "prefetching" or (hasattr(m.top, "PrefetchLoader") and not torch.cuda.is_available())


# All of them, each with its name.
GROUPS: dict[str, dict[str, Call]] = {
    "opening": dict(_opening()),
    "loading": dict(_loading()),
    "saving": dict(_saving()),
    "handles": dict(_handles()),
    "slices": dict(_slices()),
    "models": dict(_models()),
    "prefetching": dict(_prefetching()),
    "privates": dict(_privates()),
}
