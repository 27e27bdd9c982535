"""Checkpoints of many sparse files (tests/support/sparse_models.py).

As a program: one measurement of memory.
"""

import json
import sys
from pathlib import Path

import fresh
from turns import in_turn

sys.path.append(str(Path(__file__).parents[2] / "tests"))

MIB = 1 << 20
SHARDS = 163
PART_NBYTES = 4 << 20


def names_of_experts(full: int, *, by_name: bool):
    """Open a checkpoint and list all names: ours from the index, the peer's from each shard."""

    def measure(place, rounds: int):
        import same
        from duel import Duel

        directory = _experts(place, full, by_name=by_name)
        return Duel(lambda: _names(directory), lambda: _names_by_shard(directory), same.names).run(rounds)

    return measure


def proven_names_of_experts(full: int):
    """The same, with every shard opened and compared with the index."""

    def measure(place, rounds: int):
        import same
        from duel import Duel

        directory = _experts(place, full, by_name=True)
        return Duel(
            lambda: _names(directory, proven=True), lambda: _names_by_shard(directory), same.names
        ).run(rounds)

    return measure


def index(full: int, *, by_name: bool):
    """Read an index alone."""

    def measure(place, rounds: int):
        import ingot
        from duel import Duel

        path = _index(place, full, by_name=by_name)

        def read():
            return ingot.inspect(path, shards=False)

        return Duel(read, lambda: _loaded(path), _assert_same_index).run(rounds)

    return measure


def index_memory(full: int):
    """The same in fresh processes: memory."""

    def measure(place, rounds: int):
        from duel import Samples

        path = str(_index(place, full, by_name=True))
        found = in_turn(rounds, lambda side: fresh.run(Path(__file__), side, path), ("ingot", "safetensors"))
        ours, theirs = ([run["peak_nbytes"] / MIB for run in runs] for runs in found.values())
        return Samples(ours, theirs, "MiB")

    return measure


def loaded_shards(full: int):
    """Load a checkpoint of 8 shards into private memory, as the first load of a new process.

    The peer loads one shard after the other.
    """

    def measure(place, rounds: int):
        from duel import Samples

        directory = str(_written(place, full))
        found = in_turn(rounds, lambda side: fresh.run(Path(__file__), side, directory), tuple(LOADS))
        assert len({run["digest"] for runs in found.values() for run in runs}) == 1, "the bytes differ"
        return Samples(*([run["seconds"] for run in runs] for runs in found.values()))

    return measure


def _load(directory: str):
    import ingot.torch

    return ingot.torch.load_file(directory, backend="pread")


def _load_by_shard(directory: str):
    import safetensors.torch

    tensors = {}
    for path in sorted(Path(directory).glob("*.safetensors")):
        # Copied, since ingot's result is a copy too: the peer's load returns views of a mapping.
        tensors |= {name: own.clone() for name, own in safetensors.torch.load_file(path).items()}
    return tensors


LOADS = {"load-ingot": _load, "load-safetensors": _load_by_shard}


def _experts(place, full: int, *, by_name: bool) -> Path:
    from support import sparse_models

    count = place.count(full)
    directory = place.directory / f"experts-{count}-{_order(by_name)}"
    if not directory.exists():
        directory.mkdir()
        sparse_models.write_checkpoint(directory, sparse_models.experts(count, SHARDS), by_name=by_name)
    return directory


def _index(place, full: int, *, by_name: bool) -> Path:
    from support import sparse_models

    count = place.count(full)

    def write(path: Path) -> None:
        weight_map = {name: file for file, own in sparse_models.experts(count).items() for name in own}
        if by_name:
            weight_map = dict(sorted(weight_map.items()))
        path.write_text(json.dumps({"metadata": {}, "weight_map": weight_map}, indent=2))

    return place.made(f"{count}-{_order(by_name)}.safetensors.index.json", write)


def _order(by_name: bool) -> str:
    return "by-name" if by_name else "by-shard"


def _written(place, full: int) -> Path:
    """A checkpoint of so many bytes in 8 shards."""
    import torch

    import ingot.torch

    directory = place.directory / f"shards-{place.scale}"
    if not directory.exists():
        count = max(8, place.count(full) // PART_NBYTES)
        state = {f"{number}": torch.full((PART_NBYTES // 4,), float(number)) for number in range(count)}
        ingot.torch.save_sharded(state, directory, -(-count // 8) * PART_NBYTES, durable=False)
    return directory


def _names(directory: Path, *, proven: bool = False) -> list[str]:
    import ingot

    with ingot.safe_open(directory, "np") as file:
        if proven:
            file.parameter_count()
        return file.keys()


def _names_by_shard(directory: Path) -> list[str]:
    import safetensors

    names = []
    for path in directory.glob("*.safetensors"):
        with safetensors.safe_open(path, "np") as file:
            names += file.keys()
    return names


def _loaded(path: Path) -> dict[str, str]:
    with path.open(encoding="utf-8") as file:
        return json.load(file)["weight_map"]


def _assert_same_index(ours, theirs: dict[str, str]) -> None:
    assert ours.weight_map == theirs


def main(side: str, path: str) -> None:
    import ingot

    if side in LOADS:
        print(json.dumps(_first_load(side, path)))
        return
    # Import lazy modules now, so that they do not count as memory of the work.
    inspect = ingot.inspect
    held, found = fresh.measured(
        lambda: inspect(path, shards=False) if side == "ingot" else _loaded(Path(path))
    )
    print(json.dumps(found | {"tensors": len(held.weight_map if side == "ingot" else held)}))


def _first_load(side: str, directory: str) -> dict:
    """The first load of this process, which has just touched and freed twice as much memory."""
    import safetensors.torch  # noqa: F401

    import ingot.torch  # noqa: F401
    import pages
    import same

    pages.touch(2 * sum(path.stat().st_size for path in Path(directory).iterdir()))
    tensors, found = fresh.measured(lambda: LOADS[side](directory))
    return found | {"digest": same.digest(tensors)}


if __name__ == "__main__":
    main(*sys.argv[1:])
