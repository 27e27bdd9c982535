"""Changing, merging and filling large files. As a program: one of these in a fresh process, for memory."""

import itertools
import json
import os
import sys
from pathlib import Path

import fresh
from turns import in_turn

TENSORS = 8
MIB = 1 << 20


def updated(*, room: bool, durable: bool):
    """Add a key to the metadata of a file of 2 GiB. The peer must load and save the file."""

    def measure(place, rounds: int):
        import safetensors.torch

        import ingot
        import pages
        from duel import Duel

        path = place.made(
            f"edited-{place.scale}.safetensors", lambda path: _write(path, place.count(256 * MIB), ["layers"])
        )
        theirs_at = place.directory / "edited-by-peer.safetensors"
        # Two processes may edit one file in turn (builds.py), and no edit may find its own value there.
        steps = (f"{os.getpid()}.{number}" for number in itertools.count())
        # One edit before the clock starts, which uses the reserved space or adds some.
        ingot.update_metadata(path, {"step": "-"}, atomic=True, durable=True)
        expected = "in-place" if room else "rewritten"

        def ours() -> None:
            done = ingot.update_metadata(path, {"step": next(steps)}, atomic=not room, durable=durable)
            assert done == expected, f"expected {expected}, it was {done}"

        def theirs() -> None:
            tensors = safetensors.torch.load_file(path)
            safetensors.torch.save_file(tensors, theirs_at, {"step": next(steps)})

        def reset() -> None:
            theirs_at.unlink(missing_ok=True)
            if not room:
                # Both sides fill the page cache, and the host of a virtual machine may be slow to provide
                # that memory.
                pages.touch(2 * path.stat().st_size)

        try:
            return Duel(ours, theirs, lambda *_: _assert_same(path, theirs_at), reset).run(rounds)
        finally:
            theirs_at.unlink(missing_ok=True)

    return measure


def merged(*, durable: bool):
    """Eight files of 256 MiB become one."""

    def measure(place, rounds: int):
        import ingot
        import save_rows

        paths = _shards(place)
        return save_rows.as_new_files(
            place,
            "merged.safetensors",
            lambda out: ingot.merge(paths, out, durable=durable),
            lambda out: _load_and_save(paths, out),
            _assert_same,
            rounds,
            touched_nbytes=2 * sum(path.stat().st_size for path in paths),
        )

    return measure


def merged_memory(place, rounds: int):
    """The same in fresh processes: memory."""
    paths = _shards(place)
    out = place.directory / "merged.safetensors"
    try:
        return _memory(rounds, lambda side: (f"merge-{side}", str(out), *map(str, paths)))
    finally:
        out.unlink(missing_ok=True)


def streamed_memory(place, rounds: int):
    """Write 4 GiB in 16 tensors, each made when it is written: the memory beyond one tensor."""
    nbytes = place.count(256 * MIB)
    out = place.directory / "streamed.safetensors"
    try:
        return _memory(rounds, lambda side: (f"stream-{side}", str(out), str(nbytes)), less=nbytes)
    finally:
        out.unlink(missing_ok=True)


def _memory(rounds: int, arguments, less: int = 0):
    from duel import Samples

    found = in_turn(
        rounds, lambda side: fresh.run(Path(__file__), *arguments(side)), ("ingot", "safetensors")
    )
    ours, theirs = ([(run["peak_nbytes"] - less) / MIB for run in runs] for runs in found.values())
    return Samples(ours, theirs, "MiB")


def _shards(place) -> list[Path]:
    return [
        place.made(
            f"shard-{number}-{place.scale}.safetensors",
            lambda path, number=number: _write(path, place.count(32 * MIB), [f"layers.{number}"]),
        )
        for number in range(8)
    ]


def _write(path: Path, nbytes: int, prefixes: list[str]) -> None:
    """Eight tensors of so many bytes under each prefix."""
    import safetensors.torch
    import torch

    tensors = {
        f"{prefix}.{number}.weight": torch.full((max(1, nbytes // 4),), float(number))
        for prefix in prefixes
        for number in range(TENSORS)
    }
    safetensors.torch.save_file(tensors, path)


def _load_and_save(paths: list[Path], out: Path) -> None:
    import safetensors.torch

    tensors = {}
    for path in paths:
        tensors |= safetensors.torch.load_file(path)
    safetensors.torch.save_file(tensors, out)


def _assert_same(ours: Path, theirs: Path) -> None:
    import safetensors.torch

    import same

    same.tensors(safetensors.torch.load_file(ours), safetensors.torch.load_file(theirs))


def _stream(side: str, out: str, nbytes: int) -> None:
    import numpy

    import ingot

    names = [f"layers.{number}.weight" for number in range(16)]
    if side == "safetensors":
        import safetensors.numpy

        safetensors.numpy.save_file({name: numpy.ones(nbytes, numpy.uint8) for name in names}, out)
        return
    with ingot.Writer(out, {name: ("U8", [nbytes]) for name in names}, overwrite=True) as writer:
        for name in names:
            writer.write(name, numpy.ones(nbytes, numpy.uint8))
        writer.commit()


def main(task: str, out: str, *rest: str) -> None:
    action, side = task.split("-")

    import ingot

    # Import lazy modules now, so that they do not count as memory of the work.
    ingot.merge  # noqa: B018

    def done() -> None:
        if action == "stream":
            _stream(side, out, int(rest[0]))
        elif side == "ingot":
            ingot.merge(rest, out, overwrite=True)
        else:
            _load_and_save([Path(path) for path in rest], Path(out))

    print(json.dumps(fresh.measured(done)[1]))


if __name__ == "__main__":
    main(*sys.argv[1:])
