"""All headers of a sharded model of the Hub, each answer 30 ms away, against huggingface_hub's.

As a program: the table. Both sides resolve `owner/repo`, fetch the index and the headers of all
shards, and return dtype, shape and position of every tensor. Each run is a fresh process, timed after its
imports, with an empty cache; the sides alternate. Connecting to loopback takes no time, which favours the
side with more connections. huggingface.js, which asks three times for each shard, needs node and is not here.
"""

import hashlib
import statistics
import time
from collections.abc import Callable, Iterable
from pathlib import Path

import fresh
import options
from far_hub import serving
from goal import Goal
from turns import in_turn

#: What the slower side takes of the faster one's time, at least, and at best.
GOAL = Goal(5, 13)


def ingot_infos(repo: str) -> Iterable[tuple]:
    import ingot

    options = {"allow_private_redirects": True, "token": False}
    archive = ingot.safe_open(f"hf://{repo}", "np", storage_options=options)._checkpoint
    return ((info.name, info.dtype, info.shape, info.begin, info.end) for info in archive.infos())


def hub_infos(repo: str) -> Iterable[tuple]:
    import huggingface_hub

    found = huggingface_hub.get_safetensors_metadata(repo, token=False)
    return (
        (name, tensor.dtype, tuple(tensor.shape), *tensor.data_offsets)
        for file in found.files_metadata.values()
        for name, tensor in file.tensors.items()
    )


SIDES: dict[str, Callable[[str], Iterable[tuple]]] = {
    "ingot": ingot_infos,
    "huggingface_hub.get_safetensors_metadata": hub_infos,
}


def one(side: str) -> dict:
    import huggingface_hub  # noqa: F401

    import ingot.numpy  # noqa: F401

    begun = time.perf_counter()
    # Lazy, so that only the fetching is timed: each side has all of it in the form of its own.
    infos = SIDES[side]("me/far")
    seconds = time.perf_counter() - begun
    return {"seconds": seconds, "digest": hashlib.sha256(repr(sorted(infos)).encode()).hexdigest()}


def main() -> None:
    parser = options.parser(__doc__)
    parser.add_argument("--shards", type=int, default=163)
    parser.add_argument("--tensors", type=int, default=564, help="of each shard")
    parser.add_argument("--delay", type=float, default=0.03, help="seconds for each answer")
    given = parser.parse_args()
    with serving(given.shards, given.tensors, given.delay) as endpoint:

        def run(side: str) -> dict:
            with options.place() as home:
                hub = {"HF_ENDPOINT": endpoint, "HF_HOME": str(home), "HF_HUB_DISABLE_PROGRESS_BARS": "1"}
                return fresh.one(Path(__file__), side, **hub)

        found = in_turn(given.rounds, run, SIDES)
    assert len({run["digest"] for runs in found.values() for run in runs}) == 1, "other tensors are found"
    times = {side: [run["seconds"] for run in runs] for side, runs in found.items()}
    ours = statistics.median(times["ingot"])
    tensors = given.shards * given.tensors
    print(f"{given.shards} shards, {tensors} tensors, {given.delay * 1000:.0f} ms an answer")
    for side, taken in times.items():
        median = statistics.median(taken)
        verdict = "" if side == "ingot" else f"{median / ours:6.2f}x ({GOAL})"
        print(f"{side:42} {median:7.3f} s {min(taken):7.3f} to {max(taken):.3f} {verdict}")


if __name__ == "__main__":
    fresh.start(one, main)
