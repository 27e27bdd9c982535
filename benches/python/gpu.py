"""Loading onto a GPU and saving from one, against pinned copies of the same bytes and against peers.

Bytes are compared before anything is timed. The peers are safetensors (from 0.9 on by `prefetch` with a plan
of all tensors), and fastsafetensors, InstantTensor and runai-model-streamer where they are installed, each
with its makers' settings for a file in the page cache; "pinned copies" are torch's copies of the same bytes
from pinned memory, the upper limit for every loader. Files are in the page cache, and synced.
`benches/gpu/fair.py` runs each loader in a process of its own.
`--device cpu --mib 64` tries the program where there is no GPU; `--loads` makes the row of whole loads
only, for another release of safetensors.
"""

import gc
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import load_file as load_with_safetensors

import ingot.torch
import options
from goal import Goal
from turns import in_turn

FIRST = """
import json, sys, time
import torch
import ingot.torch
device, path = sys.argv[1:]
torch.empty(1, device=device)
times = []
for _ in range(6):
    begun = time.perf_counter()
    loaded = ingot.torch.load_file(path, device=device)
    if device != "cpu":
        torch.cuda.synchronize()
    times.append(time.perf_counter() - begun)
    del loaded
print(json.dumps(times))
"""


Loaded = dict[str, torch.Tensor]

# Without them these peers read past the page cache, at the speed of the disk. They read the variables when
# they are imported.
BUFFERED = {
    "FASTSAFETENSORS_ODIRECT": "0",
    "RUNAI_STREAMER_FS_STRATEGY": "io_uring_buffered,sync_buffered",
    "INSTANTTENSOR_BACKEND": "BUFFERED",
}


class Bench:
    """The state that the rows share: the device, and their results."""

    def __init__(self, device: str, rounds: int, folder: Path) -> None:
        self.device, self.rounds, self.folder = torch.device(device), rounds, folder
        self.rows: list[dict[str, Any]] = []
        #: What a plot shows: the seconds of each side.
        self.loads: dict[str, dict[str, Any]] = {}

    def load(self, path: Path) -> Loaded:
        return ingot.torch.load_file(path, device=self.device)

    def settle(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def timed(self, work: Callable[[], object]) -> float:
        gc.collect()
        self.settle()
        begun = time.perf_counter()
        kept = work()
        self.settle()
        seconds = time.perf_counter() - begun
        del kept
        return seconds

    def samples(self, sides: dict[str, Callable[[], object]]) -> dict[str, list[float]]:
        """The seconds of each side, in turn, after one round that is not counted."""
        found = in_turn(self.rounds + 1, lambda side: self.timed(sides[side]), sides)
        return {side: times[1:] for side, times in found.items()}

    def medians(self, sides: dict[str, Callable[[], object]]) -> dict[str, float]:
        """The median of each side."""
        return {side: statistics.median(times) for side, times in self.samples(sides).items()}

    def tell(self, what: str, figure: float, unit: str, goal: Goal, **facts: float) -> None:
        """Print a row, and keep it."""
        verdict = goal.met(figure)
        self.rows.append({"what": what, "figure": figure, "unit": unit, "verdict": verdict, **facts})
        more = "   ".join(f"{name} {value:.4g}" for name, value in facts.items())
        print(f"{what:52} {figure:8.3g} {unit:6} ({goal}): {verdict}   {more}", flush=True)


def file_of(bench: Bench, name: str, count: int, nbytes: int) -> tuple[Path, Loaded]:
    """Write a file of `count` tensors of `nbytes` bytes each, and return it with its tensors."""
    random = torch.Generator().manual_seed(count)
    # Eight bytes at a time: random bytes of 8 GiB would take longer than all rows.
    limits = torch.iinfo(torch.int64)
    tensors = {
        f"layer.{number:05}": torch.randint(
            limits.min, limits.max, (nbytes // 8,), dtype=torch.int64, generator=random
        ).view(torch.uint8)
        for number in range(count)
    }
    path = bench.folder / name
    ingot.torch.save_file(tensors, path)
    return path, tensors


def assert_same(loaded: Loaded, tensors: Loaded, device: torch.device) -> None:
    assert loaded.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert loaded[name].device.type == device.type
        assert torch.equal(loaded[name].cpu(), tensor), name


def peers(path: Path, device: torch.device) -> dict[str, Callable[[], Loaded]]:
    """Other loaders that are installed."""
    os.environ.update(BUFFERED)
    found: dict[str, Callable[[], Loaded]] = {}
    if hasattr(safe_open, "prefetch"):

        def prefetched() -> Loaded:
            with safe_open(path, "pt") as file:
                plan = dict.fromkeys(file.keys())
                with file.prefetch(plan, device=str(device)) as loader:
                    return dict(loader)

        found["safetensors"] = prefetched
    else:
        found["safetensors"] = lambda: load_with_safetensors(path, device=str(device))
    try:
        from fastsafetensors import SafeTensorsFileLoader, SingleGroup
    except ImportError:
        pass
    else:

        def fast() -> Loaded:
            loader = SafeTensorsFileLoader(SingleGroup(), device, nogds=True)
            loader.add_filenames({0: [str(path)]})
            files = loader.copy_files_to_device()
            # Cloned, like the other sides' tensors: these are freed with the loader.
            return {name: files.get_tensor(name).clone() for name in files.key_to_rank_lidx}

        found["fastsafetensors"] = fast
    try:
        from instanttensor import safe_open as instant_open
    except ImportError:
        pass
    else:

        def instant() -> Loaded:
            with instant_open(str(path), framework="pt", device=device.index or 0) as file:
                return dict(file.tensors())

        found["instanttensor"] = instant
    try:
        from runai_model_streamer import SafetensorsStreamer
    except ImportError:
        pass
    else:

        def streamed() -> Loaded:
            with SafetensorsStreamer() as streamer:
                streamer.stream_file(str(path), device=str(device))
                return dict(streamer.get_tensors())

        found["runai-model-streamer"] = streamed
    return found


def whole(bench: Bench, mib: int) -> None:
    """Compare the load of a whole file with pinned copies and with the fastest peer."""
    path, tensors = file_of(bench, "whole.safetensors", max(1, mib // 64), 64 << 20)
    nbytes = sum(tensor.nbytes for tensor in tensors.values())
    others = peers(path, bench.device)
    loads = {"ingot": lambda: bench.load(path), **others}
    for load in loads.values():
        assert_same(load(), tensors, bench.device)
    is_gpu = bench.device.type == "cuda"
    pinned = {name: tensor.pin_memory() if is_gpu else tensor for name, tensor in tensors.items()}
    sides: dict[str, Callable[[], object]] = {
        **loads,
        "pinned": lambda: {
            name: one.to(bench.device, non_blocking=True, copy=True) for name, one in pinned.items()
        },
    }
    samples = bench.samples(sides)
    found = {side: statistics.median(times) for side, times in samples.items()}
    bench.loads = {
        {"pinned": "raw: torch, from pinned memory"}.get(side, side): {
            "seconds": found[side],
            "samples": times,
            "ratio": found[side] / found["ingot"],
        }
        for side, times in samples.items()
    }
    speeds = {f"{side} GB/s": nbytes / seconds / 1e9 for side, seconds in found.items()}
    gib = nbytes / 2**30
    bench.tell(
        f"load of {gib:.3g} GiB over pinned copies",
        found["pinned"] / found["ingot"],
        "x",
        Goal(0.9, 0.97),
        **speeds,
    )
    bench.tell("the same over safetensors", found["safetensors"] / found["ingot"], "x", Goal(8, 10))
    best = min((seconds, peer) for peer, seconds in found.items() if peer in others)
    bench.tell(f"the same over the best peer, {best[1]}", best[0] / found["ingot"], "x", Goal(1.1, 1.5))
    if is_gpu:
        torch.cuda.reset_peak_memory_stats(bench.device)
        before = torch.cuda.memory_allocated(bench.device)
        loaded = loads["ingot"]()
        peak = torch.cuda.max_memory_allocated(bench.device) - before - nbytes
        bench.tell(
            "memory of the device at peak, beside the tensors", peak / 2**20, "MiB", Goal(64, 0, of="figure")
        )
        del loaded


def first(bench: Bench, mib: int) -> None:
    """The first load of a process against the later ones."""
    path, _ = file_of(bench, "first.safetensors", 16, max(1, mib // 16) << 20)
    command = [sys.executable, "-c", FIRST, str(bench.device), str(path)]
    ratios = []
    for _ in range(bench.rounds):
        ended = subprocess.run(command, capture_output=True, text=True, check=True)
        begun, *later = json.loads(ended.stdout)
        ratios.append(begun / statistics.median(later))
    bench.tell(
        "first load of a process over later ones", statistics.median(ratios), "x", Goal(1.3, 1.1, of="figure")
    )


def small(bench: Bench, count: int) -> None:
    """Measure the overhead for each tensor."""
    path, tensors = file_of(bench, "small.safetensors", count, 40 << 10)
    together, one = file_of(bench, "together.safetensors", 1, count * (40 << 10))
    assert_same(bench.load(path), tensors, bench.device)
    assert_same(bench.load(together), one, bench.device)
    found = bench.medians({"apart": lambda: bench.load(path), "together": lambda: bench.load(together)})
    each = (found["apart"] - found["together"]) / count * 1e6
    bench.tell(f"{count} tensors of 40 KiB: each, beside its bytes", each, "us", Goal(5, 2, of="figure"))


def saves(bench: Bench, mib: int) -> None:
    """Compare saves from the device and from the host, and measure how long a background save blocks."""
    _, tensors = file_of(bench, "host.safetensors", max(1, mib // 64), 64 << 20)
    moved = {name: tensor.to(bench.device) for name, tensor in tensors.items()}
    nbytes = sum(tensor.nbytes for tensor in tensors.values())
    path = bench.folder / "saved.safetensors"
    ingot.torch.save_file(moved, path, durable=False)
    assert_same(ingot.torch.load_file(path), tensors, torch.device("cpu"))
    sides: dict[str, Callable[[], object]] = {
        "device": lambda: ingot.torch.save_file(moved, path, durable=False),
        "host": lambda: ingot.torch.save_file(tensors, path, durable=False),
    }
    found = bench.medians(sides)
    speeds = {f"{side} GB/s": nbytes / seconds / 1e9 for side, seconds in found.items()}
    ratio = found["host"] / found["device"]
    bench.tell("save from the device over one from the host", ratio, "x", Goal(0.9, 1), **speeds)
    for snapshot in ("device", "host", False):
        blocked, staged = [], []
        for _ in range(bench.rounds):
            bench.settle()
            begun = time.perf_counter()
            future = ingot.torch.save_file(
                moved, path, background=True, write_options={"snapshot": snapshot}, durable=False
            )
            blocked.append(time.perf_counter() - begun)
            future.staged.result()
            staged.append(time.perf_counter() - begun)
            future.result()
        assert_same(ingot.torch.load_file(path), tensors, torch.device("cpu"))
        until = {"blocked": statistics.median(blocked), "staged": statistics.median(staged)}
        bench.tell(
            f"save in the background, snapshot={snapshot!r}: bytes over the time blocked",
            nbytes / until["blocked"] / 1e9,
            "GB/s",
            Goal(40, 400),
            **{f"ms until {what}": seconds * 1e3 for what, seconds in until.items()},
        )


def installed(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def main() -> None:
    parser = options.parser(__doc__)
    parser.add_argument("--device", default="cuda:0", help="with its number, which fastsafetensors asks for")
    parser.add_argument("--mib", type=int, default=8192, help="the size of the large file")
    parser.add_argument("--loads", action="store_true", help="whole loads only")
    parser.add_argument("--json", type=Path, help="where the record goes")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="ingot-bench-") as folder:
        bench = Bench(given.device, given.rounds, Path(folder))
        whole(bench, given.mib)
        if given.loads:
            return
        first(bench, min(1024, given.mib))
        small(bench, 20_000 if given.mib >= 1024 else 500)
        saves(bench, given.mib)
    if given.json is not None:
        device = torch.cuda.get_device_name() if given.device != "cpu" else "cpu"
        packages = ("torch", "safetensors", "fastsafetensors", "instanttensor", "runai-model-streamer")
        record = {
            "machine": {"device": device, "cores": os.cpu_count()},
            "versions": {name: version for name in packages if (version := installed(name))},
            "rows": bench.rows,
            "gpu": bench.loads,
        }
        given.json.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
