"""`save_state` and `load_state` against torch. Run: `python states.py [GiB] [rounds]`.

A model and AdamW's two moments, of 2 GiB in 201 tensors by default, on tmpfs. Prints medians of wall time as
multiples of ingot's. Both sides save with and without flushing, and load into memory of their own. Before
each turn as much memory is touched as it takes, since the host of a virtual machine may have taken it back.
"""

import gc
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path

import torch

import ingot.torch
import pages
import same
from turns import in_turn

COUNT = 67


def main(gib: float, rounds: int) -> None:
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
    for mine, other in zip(names[::2], names[1::2], strict=True):
        print(f"{mine:22} {medians[mine]:7.3f} s   {other:22} {medians[other] / medians[mine]:5.2f} x")


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


if __name__ == "__main__":
    main(float(sys.argv[1]) if len(sys.argv) > 1 else 2, int(sys.argv[2]) if len(sys.argv) > 2 else 7)
