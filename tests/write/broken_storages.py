"""Program of `test_broken_storages`: save every broken tensor in every way.

Prints a line of JSON with both names before each attempt, and one with the outcome after it. If the process
crashes, the last line names the attempt.
"""

from __future__ import annotations

import io
import json
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch._subclasses import FakeTensorMode

import ingot
import ingot.torch
from ingot import _native
from ingot.errors import SafetensorError

NAME = "broken"
# Made outside of all modes and transforms, which wrap tensors made inside.
GOOD = torch.ones(5), torch.zeros(2)
Use = Callable[[torch.Tensor], None]


def freed(tensor: torch.Tensor, base: torch.Tensor | None = None, nbytes: int = 0) -> torch.Tensor:
    """Shrink the storage of `base` to `nbytes`, and return `tensor`."""
    storage = (tensor if base is None else base).untyped_storage()
    storage.resize_(nbytes)
    return tensor


def cut(
    view: Callable[[torch.Tensor], torch.Tensor], nbytes: int = 0, dtype: Any = None
) -> Callable[[Use], None]:
    """Return a test of a view of a tensor, whose storage is shrunk after the view was made."""

    def use_it(use: Use) -> None:
        base = torch.ones(1000).to(dtype)
        use(freed(view(base), base, nbytes))

    return use_it


def inside(transform: Callable[..., Any], *arguments: Any) -> Callable[[Use], None]:
    """Return a test of the tensor that a transform passes to its function."""

    def use_it(use: Use) -> None:
        def function(tensor: torch.Tensor) -> torch.Tensor:
            use(tensor)
            return (tensor * 2).sum()

        wrapped = transform(function)
        wrapped(*arguments) if callable(wrapped) else None

    return use_it


def in_fake_mode(use: Use) -> None:
    with FakeTensorMode():
        use(torch.ones(3))


# Each calls its argument with a tensor without some or all of its values.
BROKEN: dict[str, Callable[[Use], None]] = {
    "freed": cut(lambda base: base),
    "freed-parameter": cut(torch.nn.Parameter),
    "freed-transposed": cut(lambda base: base.view(100, 10).t()),
    "freed-view": cut(lambda base: base[10:20]),
    "freed-far-view": cut(lambda base: base[990:]),
    "freed-expanded": cut(lambda base: base[:1].expand(5)),
    "freed-one-sized": cut(lambda base: base.view(1, 10, 1, 100)),
    "freed-bool": cut(lambda base: base, dtype=torch.bool),
    "freed-bfloat16": cut(lambda base: base, dtype=torch.bfloat16),
    "freed-float8": cut(lambda base: base, dtype=torch.float8_e4m3fn),
    "freed-complex": cut(lambda base: base, dtype=torch.complex64),
    "freed-conjugated": cut(lambda base: base.conj(), dtype=torch.complex64),
    "freed-negated": cut(lambda base: base.conj().imag, dtype=torch.complex64),
    "shrunk": cut(lambda base: base, 100),
    "shrunk-by-a-byte": cut(lambda base: base, 3999),
    "shrunk-below-a-view": cut(lambda base: base[10:20], 40),
    "shrunk-within-a-view": cut(lambda base: base[10:20], 79),
    "shrunk-below-the-steps": cut(lambda base: base[:20:2], 40),
    "shrunk-transposed": cut(lambda base: base.view(100, 10).t(), 2000),
    "zeros": lambda use: use(torch._efficientzerotensor((3,))),
    "meta": lambda use: use(torch.ones(3, device="meta")),
    "fake": in_fake_mode,
    "vmap": inside(torch.vmap, torch.ones(2, 3)),
    "grad": inside(torch.func.grad, torch.ones(3)),
    "functionalize": inside(torch.func.functionalize, torch.ones(3)),
    "jvp": lambda use: inside(lambda function: lambda x: torch.func.jvp(function, (x,), (x,)), torch.ones(3))(
        use
    ),
    "grad-of-vmap": inside(
        lambda function: torch.func.grad(lambda x: torch.vmap(function)(x).sum()), torch.ones(2, 3)
    ),
}

# Similar tensors that have all their values.
WHOLE: dict[str, Callable[[Use], None]] = {
    "plain": lambda use: use(torch.arange(3.0)),
    "view": lambda use: use(torch.arange(1000.0)[10:20]),
    "transposed": lambda use: use(torch.arange(6.0).view(2, 3).t()),
    "shrunk-up-to-the-view": cut(lambda base: base[10:20], 80),
    "shrunk-up-to-the-steps": cut(lambda base: base[:20:2], 76),
    "empty-and-freed": cut(lambda base: base[:0]),
}


def module_of(tensor: torch.Tensor) -> torch.nn.Module:
    """Return a module with this tensor only. In a transform, torch would wrap further tensors."""
    module = torch.nn.Module()
    module.register_buffer(NAME, tensor)
    return module


def ways(folder: Path) -> dict[str, Callable[[torch.Tensor], object]]:
    """Return every way to save a tensor, and every way to load into it."""
    path, small = folder / "there.safetensors", folder / "there.bt"

    def both(tensor: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"another": GOOD[0], NAME: tensor, "good": GOOD[1]}

    def save(**options: Any) -> Callable[[torch.Tensor], object]:
        return lambda tensor: ingot.torch.save_file(both(tensor), path, **options)

    def later(**options: Any) -> Callable[[torch.Tensor], object]:
        return lambda tensor: ingot.torch.save_file(both(tensor), path, background=True, **options).result()

    def filled(**options: Any) -> Callable[[torch.Tensor], object]:
        def fill(tensor: torch.Tensor) -> None:
            declared = {} if "write_options" in options else {"specs": {NAME: (tensor.dtype, tensor.shape)}}
            with ingot.Writer(path, **declared, **options, overwrite=True) as writer:
                writer.write(NAME, tensor)
                writer.commit()

        return fill

    def into_file(tensor: torch.Tensor) -> None:
        with torch._C._DisableTorchDispatch():
            good = torch.zeros(tuple(tensor.shape), dtype=tensor.dtype, device="cpu")
            ingot.torch.save_file({NAME: good}, folder / "source.safetensors")

    def out(tensor: torch.Tensor) -> None:
        into_file(tensor)
        ingot.torch.load_file(folder / "source.safetensors", out={NAME: tensor})

    def into(tensor: torch.Tensor) -> None:
        into_file(tensor)
        ingot.torch.load_into({NAME: tensor}, folder / "source.safetensors")

    def replace(tensor: torch.Tensor) -> None:
        into_file(tensor)
        ingot.replace_tensor(folder / "source.safetensors", NAME, tensor)

    def of_upstream(call: str) -> Callable[[torch.Tensor], object]:
        from ingot.compat.safetensors import torch as upstream

        if call == "save":
            return lambda tensor: upstream.save(both(tensor))
        return lambda tensor: upstream.save_file(both(tensor), path)

    return {
        "save": lambda tensor: ingot.torch.save(both(tensor)),
        "save-bt": lambda tensor: ingot.torch.save(both(tensor), format="bintensors"),
        "save-copy": lambda tensor: ingot.torch.save(both(tensor), shared="copy"),
        "save-file": save(),
        "durable": save(durable=True),
        "in-place": save(atomic=False),
        "forced": save(write_options={"replace_read_only": True}),
        "alias": save(shared="alias"),
        "copy": save(shared="copy"),
        "twice": lambda tensor: ingot.torch.save_file({NAME: tensor, "same": tensor}, path, shared="alias"),
        "checksums": save(checksums=True),
        "both-checksums": save(checksums=["sha256", "modelspec"]),
        "aligned": save(write_options={"align": 4096, "reserve_header": 100}),
        "progress": save(progress=lambda done, total: None),
        "bt": lambda tensor: ingot.torch.save_file(both(tensor), small),
        "background": later(),
        "background-checksums": later(checksums=True),
        "background-in-place": later(write_options={"snapshot": False}, atomic=False),
        "model": lambda tensor: ingot.torch.save_model(module_of(tensor), path),
        "sharded": lambda tensor: ingot.torch.save_sharded(
            both(tensor), folder / "sharded", 8, overwrite=True
        ),
        "sharded-once": lambda tensor: ingot.torch.save_sharded(
            both(tensor), folder / "sharded", overwrite=True
        ),
        "stream": lambda tensor: ingot.torch.save_file(both(tensor), io.BytesIO()),
        "writer": filled(),
        "writer-without-specs": filled(write_options={"reserve_header": 1000}),
        "replace": replace,
        "out": out,
        "load-into": into,
        "upstream-save": of_upstream("save"),
        "upstream-save-file": of_upstream("save-file"),
        "binding-capsule": lambda tensor: _native.serialize(
            {NAME: tensor}, lambda name, tensor: torch._C._to_dlpack(tensor), None, "safetensors"
        ),
    }


# Not detected: a capsule states no size of its memory, so that only a null pointer is found. This is about
# capsules that are passed to the extension module directly.
UNTOLD = {
    "binding-capsule": {
        name for name in BROKEN if "freed" not in name or "view" in name or name == "freed-negated"
    },
}


def contents(folder: Path) -> dict[str, bytes]:
    """Return the files, without those that a way makes for itself."""
    files = {str(path.relative_to(folder)): path for path in folder.rglob("*") if path.is_file()}
    return {name: path.read_bytes() for name, path in files.items() if not name.startswith("source.")}


def outcome(folder: Path, make: Callable[[Use], None], way: Callable[[torch.Tensor], object]) -> str:
    """Return the result: ``"saved"``, or the class of the error with the name of the tensor."""
    ingot.torch.save_file({"old": GOOD[0]}, folder / "there.safetensors")
    ingot.torch.save_file({"old": GOOD[0]}, folder / "there.bt")
    before = contents(folder)
    said = []

    def use(tensor: torch.Tensor) -> None:
        try:
            way(tensor)
            said.append("saved")
        except SafetensorError as error:
            said.append(f"{type(error).__name__} of {error.tensor} {error.code}")
        except Exception as error:
            said.append(f"{type(error).__name__}: {error}")

    make(use)
    if said[0] != "saved" and contents(folder) != before:
        return f"{said[0]}, and the files changed: {sorted(contents(folder))}"
    return said[0]


def main() -> None:
    for kinds in (BROKEN, WHOLE):
        for kind, make in kinds.items():
            with tempfile.TemporaryDirectory() as folder:
                for way, call in ways(Path(folder)).items():
                    if kind not in UNTOLD.get(way, ()):
                        print(json.dumps([kind, way, None]), flush=True)
                        print(json.dumps([kind, way, outcome(Path(folder), make, call)]), flush=True)


if __name__ == "__main__":
    main()
