"""Calls of safetensors that go wrong, or nearly: every public function with odd values for each argument.

Each takes the modules to call, the wheel's or ours, and a folder that `furnish` has filled.
"""

from __future__ import annotations

import io
import pathlib
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import numpy
import torch

from peers.safetensors.givens import (
    ARRAYS,
    BACKENDS,
    BROKEN,
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
    SPECS,
    STATES,
    closed,
    given,
    model,
    opened,
    spec,
)

Call = Callable[[SimpleNamespace, pathlib.Path], Any]


def _opening() -> Iterator[tuple[str, Call]]:
    for title, value in PATHS.items():
        for framework in ("pt", "np"):
            yield (
                f"safe_open(filename={title}, {framework})",
                lambda m, place, v=value, f=framework: m.top.safe_open(given(v, place), f),
            )
        yield (
            f"safe_open(filename={title}, backend=pread)",
            lambda m, place, v=value: m.top.safe_open(given(v, place), "pt", backend="pread"),
        )
    for title, value in FRAMEWORKS.items():
        yield (
            f"safe_open(framework={title})",
            lambda m, place, v=value: m.top.safe_open(place / "good", v),
        )
        yield (
            f"safe_open(filename=missing, framework={title})",
            lambda m, place, v=value: m.top.safe_open(place / "nope", v),
        )
    for title, value in DEVICES.items():
        for framework in ("pt", "np"):
            yield (
                f"safe_open(device={title}, {framework})",
                lambda m, place, v=value, f=framework: m.top.safe_open(place / "good", f, v),
            )
    for title, value in BACKENDS.items():
        yield (
            f"safe_open(backend={title})",
            lambda m, place, v=value: m.top.safe_open(place / "good", "pt", backend=v),
        )
    for number, title in enumerate(BROKEN):
        for framework, backend in (("pt", "mmap"), ("np", "pread")):
            yield (
                f"safe_open({title}, {framework}, {backend})",
                lambda m, place, n=number, f=framework, b=backend: m.top.safe_open(
                    place / f"broken{n}", f, backend=b
                ),
            )
        yield (
            f"_safe_open_handle({title})",
            lambda m, place, n=number: _by_handle(m, place / f"broken{n}"),
        )
    for title, value in {"None": None, "int": 3, "path": "good", "BytesIO": io.BytesIO(b"abc")}.items():
        yield (
            f"_safe_open_handle(f={title})",
            lambda m, place, v=value: m.top._safe_open_handle(v, "pt"),
        )
    for framework in MISSING_FRAMEWORKS:
        for title, use in HANDLE_USES.items():
            yield (
                f"safe_open({framework}).{title}",
                lambda m, place, f=framework, u=use: u(m.top.safe_open(place / "good", f)),
            )
        yield (
            f"safe_open({framework}, device=cuda)",
            lambda m, place, f=framework: m.top.safe_open(place / "good", f, "cuda:0"),
        )


def _by_handle(m: SimpleNamespace, path: pathlib.Path) -> Any:
    with path.open("rb") as file:
        return m.top._safe_open_handle(file, "pt")


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


def _loading() -> Iterator[tuple[str, Call]]:
    for module in ("torch", "numpy"):
        for title, value in PATHS.items():
            yield (
                f"{module}.load_file(filename={title})",
                lambda m, place, v=value, k=module: getattr(m, k).load_file(given(v, place)),
            )
        for title, value in BACKENDS.items():
            yield (
                f"{module}.load_file(backend={title})",
                lambda m, place, v=value, k=module: getattr(m, k).load_file(place / "good", backend=v),
            )
        for number, (title, data) in enumerate(BROKEN.items()):
            yield (
                f"{module}.load_file({title})",
                lambda m, place, n=number, k=module: getattr(m, k).load_file(place / f"broken{n}"),
            )
            yield (
                f"{module}.load({title})",
                lambda m, place, d=data, k=module: getattr(m, k).load(d),
            )
        for title, value in DATA.items():
            yield (
                f"{module}.load(data={title})",
                lambda m, place, v=value, k=module: getattr(m, k).load(v),
            )
        for code in ("F8_E4M3", "BF16", "F8_E8M0", "F6_E2M3", "F4", "C64", "U64"):
            yield (
                f"{module}.load_file({code})",
                lambda m, place, c=code, k=module: getattr(m, k).load_file(place / c),
            )
            yield (
                f"{module}.load({code})",
                lambda m, place, c=code, k=module: getattr(m, k).load((place / c).read_bytes()),
            )
            yield (
                f"{module}.get_slice({code})[1:]",
                lambda m, place, c=code, k=module: opened(m, place, FRAMEWORK_OF[k], c).get_slice("a")[1:],
            )
    for title in NO_DEVICES:
        yield (
            f"torch.load_file(device={title})",
            lambda m, place, v=DEVICES[title]: m.torch.load_file(place / "good", v),
        )
    for title, data in {**BROKEN, **DATA}.items():
        yield f"deserialize({title})", lambda m, place, d=data: m.top.deserialize(d)


FRAMEWORK_OF = {"torch": "pt", "numpy": "np"}


def _saving() -> Iterator[tuple[str, Call]]:
    for module, states in (("torch", STATES), ("numpy", ARRAYS)):
        for title, make in states.items():
            yield (
                f"{module}.save({title})",
                lambda m, place, v=make, k=module: getattr(m, k).save(v()),
            )
            yield (
                f"{module}.save_file({title})",
                lambda m, place, v=make, k=module: getattr(m, k).save_file(v(), place / "out"),
            )
        tensor = {"torch": torch.ones(1), "numpy": numpy.ones(1)}[module]
        for title, value in METADATA.items():
            yield (
                f"{module}.save(metadata={title})",
                lambda m, place, v=value, k=module, t=tensor: getattr(m, k).save({"t": t}, v),
            )
            yield (
                f"{module}.save_file(metadata={title})",
                lambda m, place, v=value, k=module, t=tensor: getattr(m, k).save_file(
                    {"t": t}, place / "out", v
                ),
            )
        for title, value in PATHS.items():
            # The last names a file of the working directory, which would stay.
            if title not in ("missing", "missing, as bytes", "os.PathLike"):
                yield (
                    f"{module}.save_file(filename={title})",
                    lambda m, place, v=value, k=module, t=tensor: getattr(m, k).save_file(
                        {"t": t}, given(v, place)
                    ),
                )
    for title, make_arguments in SPECS.items():
        yield f"TensorSpec({title})", lambda m, place, a=make_arguments: spec(m, **a)
    for title, make_dict in SERIALIZED.items():
        yield f"serialize({title})", lambda m, place, v=make_dict: m.top.serialize(v(m))
        yield (
            f"serialize_file({title})",
            lambda m, place, v=make_dict: m.top.serialize_file(v(m), place / "out"),
        )
    for title, value in METADATA.items():
        yield f"serialize(metadata={title})", lambda m, place, v=value: m.top.serialize({}, v)
        yield (
            f"serialize_file(metadata={title})",
            lambda m, place, v=value: m.top.serialize_file({}, place / "out", v),
        )


def _handles() -> Iterator[tuple[str, Call]]:
    for framework in ("pt", "np"):
        for title, name in NAMES.items():
            for method in ("get_tensor", "get_slice"):
                yield (
                    f"{method}({title}, {framework})",
                    lambda m, place, v=name, f=framework, k=method: getattr(opened(m, place, f), k)(v),
                )
    for title, use in HANDLE_USES.items():
        yield f"closed.{title}", lambda m, place, u=use: u(closed(m, place))
    for title, use in CLOSING.items():
        yield f"closed: {title}", lambda m, place, u=use: u(closed(m, place))
    for title, use in CLOSING.items():
        yield f"open: {title}", lambda m, place, u=use: u(opened(m, place))


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


def _slices() -> Iterator[tuple[str, Call]]:
    for framework in ("pt", "np"):
        for name in ("a", "b", "c", "s", "z"):
            for title, index in INDICES.items():
                yield (
                    f"get_slice({name})[{title}], {framework}",
                    lambda m, place, i=index, f=framework, n=name: opened(m, place, f).get_slice(n)[i],
                )
        yield (
            f"get_slice.iter, {framework}",
            lambda m, place, f=framework: list(opened(m, place, f).get_slice("b")),
        )


def _models() -> Iterator[tuple[str, Call]]:
    for title, make in MODULES.items():
        for force in (True, False):
            yield (
                f"save_model({title}, force_contiguous={force})",
                lambda m, place, v=make, f=force: m.torch.save_model(v(), place / "out", force_contiguous=f),
            )
        yield (
            f"load_model({title})",
            lambda m, place, v=make: m.torch.load_model(v(), place / "linear"),
        )
    for title, value in METADATA.items():
        yield (
            f"save_model(metadata={title})",
            lambda m, place, v=value: m.torch.save_model(model(), place / "out", v),
        )
    for title, value in PATHS.items():
        yield (
            f"load_model(filename={title})",
            lambda m, place, v=value: m.torch.load_model(model(), given(v, place)),
        )
        # The last names a file of the working directory, which would stay.
        if title not in ("missing", "missing, as bytes", "os.PathLike"):
            yield (
                f"save_model(filename={title})",
                lambda m, place, v=value: m.torch.save_model(model(), given(v, place)),
            )
    for title, file in FILES.items():
        for strict in (True, False):
            yield (
                f"load_model({title}, strict={strict})",
                lambda m, place, n=file, s=strict: m.torch.load_model(model(), place / n, s),
            )
    for title, value in {"foo": "foo", "float": 1.5, "None": None}.items():
        yield (
            f"load_model(device={title})",
            lambda m, place, v=value: m.torch.load_model(model(), place / "linear", device=v),
        )


def _privates() -> Iterator[tuple[str, Call]]:
    for module in ("torch", "numpy"):
        for code in ("F33", "f32", "", None, 3, "F4", "F8_E8M0", "F6_E2M3", "BF16", "F8_E4M3", "C64", "U64"):
            yield (
                f"{module}._getdtype({code})",
                lambda m, place, c=code, k=module: getattr(m, k)._getdtype(c),
            )
    for title in LAID_OUT:
        for function in ("_evaluate_tensors_for_save", "_find_shared_tensors", "_remove_duplicate_names"):
            yield (
                f"torch.{function}({title})",
                lambda m, place, v=STATES[title], f=function: getattr(m.torch, f)(v()),
            )
        yield (
            f"torch._flatten_as_ptr({title})",
            lambda m, place, v=STATES[title]: m.torch._flatten_as_ptr(v(), []),
        )
        for function in ("storage_ptr", "storage_size", "_is_complete", "_end_ptr", "_to_ndarray"):
            yield (
                f"torch.{function}({title})",
                lambda m, place, v=STATES[title], f=function: getattr(m.torch, f)(_first(v())),
            )
    for title, make in ARRAYS.items():
        yield (
            f"numpy._is_little_endian({title})",
            lambda m, place, v=make: m.numpy._is_little_endian(_first(v())),
        )
    for choice in ({"preferred_names": ["x"]}, {"discard_names": ["a", "b"]}, {"preferred_names": 3}):
        for title in ("shared", "part and whole", "overlap"):
            yield (
                f"torch._remove_duplicate_names({title}, {choice})",
                lambda m, place, v=STATES[title], c=choice: m.torch._remove_duplicate_names(v(), **c),
            )


def _first(state: Any) -> Any:
    return next(iter(state.values())) if isinstance(state, dict) else state


# Tensors in every layout that callers have.
LAID_OUT = ("meta", "conj", "strided", "channels last", "expanded", "step", "shared", "two crowds", "overlap")


def _prefetching() -> Iterator[tuple[str, Call]]:
    for title, plan in PLANS.items():
        yield (
            f"prefetch(plan={title})",
            lambda m, place, p=plan: opened(m, place).prefetch(p, device="cuda:0"),
        )
    for title, options in PREFETCHING.items():
        yield (
            f"prefetch({title})",
            lambda m, place, o=options: opened(m, place).prefetch({"b": None}, **o),
        )
        yield (
            f"closed.prefetch({title})",
            lambda m, place, o=options: closed(m, place).prefetch(**o),
        )
    yield "prefetch(np)", lambda m, place: opened(m, place, "np").prefetch()
    for title, name in {"there": "b", **NAMES}.items():
        yield (
            f"get_tensor_meta({title})",
            lambda m, place, n=name: _meta(opened(m, place), n),
        )
    yield "closed.get_tensor_meta", lambda m, place: _meta(closed(m, place), "b")
    for name in ("PrefetchLoader", "TensorMeta", "PySafeSlice"):
        yield f"{name}()", lambda m, place, n=name: getattr(m.top, n)()


def _meta(file: Any, name: Any) -> Any:
    found = file.get_tensor_meta(name)
    return found.dtype, found.shape, found.data_offsets


def are_there(group: str, m: SimpleNamespace) -> bool:
    """Whether a wheel has what the calls of a group call. `prefetch` is called as where there is no CUDA."""
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
