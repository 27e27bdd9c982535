"""Training states. Run: `python states.py [speed|blocked|copied|header] [size] [rounds]`.

All files are on tmpfs, and all limits are printed beside the figures.

`speed` compares `save_state` and `load_state` with torch: a model and AdamW's two moments, of `size` = 2 GiB
in 201 tensors. Prints medians of wall time as multiples of ingot's. Both sides save with and without
flushing, and load into memory of their own. Before each turn as much memory is touched as it takes, since the
host of a virtual machine may have taken it back.

`blocked` prints the seconds for which `Checkpoints.save` in the background blocks the loops of two ranks: a
model and AdamW with `size` = 100,000 tensors of 256 bytes, sharded or the same on both ranks, for the first
save and for later ones of the same structure.

`copied` does so for `size` = 2 GiB in 200 tensors, against a copy of these on both ranks.

`header` prints the size of the header of a state with `size` = 100,000 tensors and a list of 10 MB, and the
time to open it.
"""

import gc
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

import ingot.torch
import pages
import same
from turns import in_turn

COUNT = 67


def speed(gib: float, rounds: int) -> None:
    numel = int(gib * 2**30) // (4 * 3 * COUNT)
    model = torch.nn.ParameterDict({f"layer{place}": torch.rand(numel) for place in range(COUNT)})
    optimizer = torch.optim.AdamW(model.parameters())
    for parameter in model.parameters():
        moments = {"exp_avg": torch.rand(numel), "exp_avg_sq": torch.rand(numel)}
        optimizer.state[parameter] = {"step": torch.tensor(7.0), **moments}
    live = {"model": model, "optimizer": optimizer, "step": 7}
    plain = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": 7}
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        ours, theirs = Path(folder, "state.safetensors"), Path(folder, "state.pt")
        actions = {
            "save_state": lambda: ingot.torch.save_state(live, ours, durable=False),
            "torch.save": lambda: torch.save(plain, theirs),
            "save_state, flushed": lambda: ingot.torch.save_state(live, ours, durable=True),
            "torch.save, flushed": lambda: flushed(plain, theirs),
            "load_state": lambda: ingot.torch.load_state(ours),
            "torch.load": lambda: torch.load(theirs, weights_only=True),
        }
        for name in ("save_state", "torch.save"):
            actions[name]()
        same.tensors(ingot.torch.load_state(ours)["model"], torch.load(theirs, weights_only=True)["model"])
        nbytes = ours.stat().st_size
        seconds = in_turn(rounds, lambda name: timed(actions[name], nbytes), actions)
    medians = {name: statistics.median(seconds[name]) for name in actions}
    names = [*actions]
    for mine, other, least in zip(names[::2], names[1::2], (1.5, 1.5, 2.0), strict=True):
        ratio = f"{medians[other] / medians[mine]:5.2f} x (at least {least})"
        print(f"{mine:22} {medians[mine]:7.3f} s   {other:22} {ratio}")


def flushed(state: object, path: Path) -> None:
    """Save as `torch.save` does, and flush the file to the disk."""
    with path.open("wb") as file:
        torch.save(state, file)
        file.flush()
        os.fsync(file.fileno())


def timed(action, nbytes: int) -> float:
    """Return the seconds that a call takes, which fills about `nbytes` of memory."""
    gc.collect()
    pages.touch(nbytes)
    begin = time.perf_counter()
    result = action()
    seconds = time.perf_counter() - begin
    del result
    return seconds


def blocked(count: float, rounds: int) -> None:
    for kind in ("sharded", "replicated"):
        with by_ranks(many_small, kind, int(count), rounds) as found:
            # The slower rank decides.
            first, *later = (max(of) for of in zip(*found, strict=True))
        again = statistics.median(later)
        print(f"{kind:10} first {first:6.3f} s (at most 2)   later {again:6.3f} s (at most 1)")


def copied(gib: float, rounds: int) -> None:
    with by_ranks(few_large, gib, rounds) as found:
        ours, theirs = (
            statistics.median(max(of) for of in zip(*side, strict=True)) for side in zip(*found, strict=True)
        )
    print(f"blocked {ours:6.3f} s   copied {theirs:6.3f} s   {ours / theirs:5.2f} x (at most 1.2)")


@contextmanager
def by_ranks(work: Callable[..., object], *arguments: object) -> Iterator[list[list[float]]]:
    """Run `work` on two ranks. Yields the result of each."""
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        mp.spawn(rank_of, (folder, work, arguments), nprocs=2)
        yield [json.loads(Path(folder, f"result-{rank}").read_text()) for rank in range(2)]


def rank_of(rank: int, folder: str, work: Callable[..., object], arguments: tuple[object, ...]) -> None:
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    Path(folder, f"result-{rank}").write_text(json.dumps(work(Path(folder, "run"), *arguments)))
    dist.barrier()
    dist.destroy_process_group()


class Layer(torch.nn.Module):
    def __init__(self, made: Callable[[], torch.Tensor]) -> None:
        super().__init__()
        self.weight, self.bias = torch.nn.Parameter(made()), torch.nn.Parameter(made())


def many_small(folder: Path, kind: str, count: int, rounds: int) -> list[float]:
    mesh = init_device_mesh("cpu", (2,))

    def made() -> torch.Tensor:
        own = torch.rand(64, generator=generator)
        return own if kind == "replicated" else DTensor.from_local(own, mesh, [Shard(0)], run_check=False)

    generator = torch.Generator().manual_seed(0)
    model = torch.nn.ModuleList(Layer(made) for _ in range(count // 6))
    optimizer = torch.optim.AdamW(model.parameters())
    for parameter in model.parameters():
        optimizer.state[parameter] = {"step": torch.tensor(7.0), "exp_avg": made(), "exp_avg_sq": made()}
    state = {"model": model, "optimizer": optimizer, "step": 7}
    return saves(folder, state, rounds + 1, 0, lambda: None)[0]


def few_large(folder: Path, gib: float, rounds: int) -> list[list[float]]:
    mesh, numel = init_device_mesh("cpu", (2,)), int(gib * 2**30) // (4 * 200 * 2)
    local = [torch.rand(numel) for _ in range(200)]
    state = [DTensor.from_local(one, mesh, [Shard(0)], run_check=False) for one in local]
    found = saves(folder, state, rounds + 1, 200 * 4 * numel, lambda: [one.clone() for one in local])
    # The first turn plans.
    return [side[1:] for side in found]


def saves(
    folder: Path, state: object, rounds: int, nbytes: int, copy: Callable[[], object]
) -> tuple[list[float], list[float]]:
    """Return the seconds for which each save blocks, and those that each copy takes, of `nbytes` bytes."""
    ours, theirs = [], []
    with ingot.Checkpoints(folder, keep=1) as checkpoints:
        for step in range(rounds):
            for seconds, work in ((theirs, copy), (ours, partial(checkpoints.save, step, state))):
                dist.barrier()
                seconds.append(timed(work, nbytes))
            checkpoints.wait()
    return ours, theirs


def header(count: float, rounds: int) -> None:
    names = [f"layers.{place}.weight" for place in range(int(count) // 3)]
    moments = {"exp_avg": torch.zeros(1), "exp_avg_sq": torch.zeros(1)}
    optimizer = {
        "state": {name: {key: one.clone() for key, one in moments.items()} for name in names},
        "param_groups": [{"lr": 0.1, "betas": (0.9, 0.999), "params": names}],
    }
    state = {"model": {name: torch.zeros(1) for name in names}, "optimizer": optimizer}
    loader = {"seen": list(range(1_250_000)), "text": ["shard"] * 1_000}
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        for what, tree in (("tensors", state), ("a list of 10 MB", loader)):
            path = Path(folder, "state.safetensors")
            ingot.torch.save_state(tree, path, durable=False)
            nbytes = int.from_bytes(path.read_bytes()[:8], "little")
            seconds = statistics.median(timed(partial(opened, path), 0) for _ in range(rounds))
            figures = (
                f"header {nbytes / 1e6:6.2f} MB (at most 20)   opens in {1e3 * seconds:6.2f} ms (at most 50)"
            )
            print(f"{what:16} {figures}")


def opened(path: Path) -> None:
    with ingot.safe_open(path, "pt") as file:
        file.keys()


# The default size and number of rounds of each.
PARTS = {speed: (2, 7), blocked: (100_000, 5), copied: (2, 5), header: (100_000, 15)}


def main(name: str = "speed", *numbers: str) -> None:
    part, defaults = next((part, defaults) for part, defaults in PARTS.items() if part.__name__ == name)
    size, rounds = (*numbers, *map(str, defaults[len(numbers) :]))
    part(float(size), int(rounds))


if __name__ == "__main__":
    main(*sys.argv[1:])
