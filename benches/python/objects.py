"""Loading a whole file from fsspec's memory and from obstore's, against copying the bytes by hand.

"By hand" is a program without ingot: it gets the whole object from the store and copies it once, so that the
tensors have private memory. Both alternate in one process.
"""

import gc
import statistics
import time
from collections.abc import Callable

import fsspec
import numpy
import obstore.store

import ingot.numpy
import options
from goal import Goal
from turns import in_turn

NAME = "model.safetensors"
GOAL = Goal(0.5, 0.9)


def main() -> None:
    parser = options.parser(__doc__)
    parser.add_argument("--mib", type=int, default=1024, help="the size of the file")
    given = parser.parse_args()
    random = numpy.random.default_rng(0)
    count = max(1, given.mib // 32)
    tensors = {f"layer.{n}": random.integers(0, 255, (4096, 8192), numpy.uint8) for n in range(count)}
    data = ingot.numpy.save(tensors)
    nbytes = len(data)
    memory, store = fsspec.filesystem("memory"), obstore.store.MemoryStore()
    memory.pipe_file(f"/{NAME}", data)
    store.put(NAME, data)
    del data
    by_hand: dict[str, Callable[[], object]] = {
        "fsspec": lambda: memory.cat_file(f"/{NAME}"),
        "obstore": lambda: store.get_range(NAME, start=0, end=nbytes),
    }
    loads: dict[str, Callable[[], object]] = {
        f"{kind}, by hand": lambda get=get: numpy.frombuffer(get(), numpy.uint8).copy()  # type: ignore[misc]
        for kind, get in by_hand.items()
    }
    loads["fsspec, ingot"] = lambda: ingot.numpy.load_file(fsspec.open(f"memory://{NAME}"))
    loads["obstore, ingot"] = lambda: ingot.numpy.load_file(ingot.Ranges(store, NAME))

    def measured(side: str) -> float:
        gc.collect()
        begun = time.perf_counter()
        loaded = loads[side]()
        seconds = time.perf_counter() - begun
        if isinstance(loaded, dict):
            assert all((loaded[name] == tensor).all() for name, tensor in tensors.items()), side
        return seconds

    times = in_turn(given.rounds, measured, loads)
    medians = {side: statistics.median(times[side]) for side in loads}
    print(f"{nbytes / 2**20:.0f} MiB in memory, {given.rounds} rounds, medians")
    for kind in by_hand:
        hand, ours = medians[f"{kind}, by hand"], medians[f"{kind}, ingot"]
        print(
            f"{kind:8} by hand {nbytes / hand / 1e9:5.2f} GB/s   ingot {nbytes / ours / 1e9:5.2f} GB/s"
            f"   {hand / ours:.2f}x ({GOAL}): {GOAL.met(hand / ours)}"
        )


if __name__ == "__main__":
    main()
