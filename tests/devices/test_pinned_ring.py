"""The order of copies to and from devices, on streams that run operations as late as allowed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import ingot
from ingot._adapters import pieces

torch = pytest.importorskip("torch")

from ingot import torch as framework  # noqa: E402  # It is there, as the line above found.
from ingot.torch import _devices, _filling, _link, _tensors  # noqa: E402
from support.progress import Stopped, stop  # noqa: E402

from . import far  # noqa: E402  # It makes the device.
from .streams import Streams  # noqa: E402

SEEDS = range(60)
GENERATOR = torch.Generator().manual_seed(5)
TENSORS: dict[str, Any] = {
    "large": torch.randn(40, 100, generator=GENERATOR),
    "half": torch.randn(33, 50, generator=GENERATOR).bfloat16(),
    "bytes": torch.arange(5000).to(torch.uint8),
    "scalar": torch.tensor(2.5),
}


@pytest.fixture(autouse=True)
def _small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pieces, "PIECE_NBYTES", 2048)


@pytest.fixture
def path(path: Path) -> Path:
    framework.save_file(TENSORS, path)
    return path


Make = Callable[[int], Streams]


@pytest.fixture
def make(monkeypatch: pytest.MonkeyPatch) -> Make:
    """Replace the streams of the device."""

    def made(seed: int) -> Streams:
        streams = Streams(seed)

        def link(device: Any) -> Streams | None:
            return streams if device.type == "far" else None

        for module in (_devices, _filling, _tensors):
            monkeypatch.setattr(module, "link", link)
        return streams

    return made


def all_same(found: dict[str, Any], streams: Streams) -> bool:
    streams.finish()
    return all(torch.equal(far.host(found[name]), tensor) for name, tensor in TENSORS.items())


def corrupted(path: Path, make: Make) -> int:
    """Return the number of seeds with which a load has wrong bytes."""
    count = 0
    for seed in SEEDS:
        streams = make(seed)
        count += not all_same(framework.load_file(path, "far"), streams)
    return count


def test_load_file_is_ordered_before_later_work(path: Path, make: Make) -> None:
    assert corrupted(path, make) == 0


def test_handles_and_prefetch_are_ordered_before_later_work(path: Path, make: Make) -> None:
    for seed in SEEDS:
        streams = make(seed)
        with ingot.safe_open(path, "pt", "far") as file:
            assert all_same({name: file[name] for name in file}, streams)
            assert all_same(dict(file.prefetch()), streams)
        out = {name: torch.zeros_like(tensor).to("far") for name, tensor in TENSORS.items()}
        assert all_same(framework.load_file(path, out=out), streams)


def test_simulator_finds_an_early_reuse(path: Path, make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    def take(self: Any) -> Any:
        if len(self._used) < _link.RING:
            return self._fresh()
        return self._used.popleft()[0]

    monkeypatch.setattr(_link.Ring, "take", take)
    assert corrupted(path, make) > len(SEEDS) // 2


def test_simulator_finds_an_early_free(path: Path, make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_link.Ring, "__exit__", lambda self, *error: self._used.clear())
    assert corrupted(path, make) > len(SEEDS) // 2


def test_load_file_pins_two_pieces_and_frees_them(path: Path, make: Make) -> None:
    streams = make(1)
    found = framework.load_file(path, "far")
    assert streams.most_pinned == _link.RING * 2048
    assert streams.pinned == 0
    # One wait for each slot that is used again, and one at the end.
    total = sum(tensor.nbytes for tensor in TENSORS.values())
    assert streams.waits <= 1.2 * total / 2048
    del found
    # A small tensor pins no more bytes than it has.
    with ingot.safe_open(path, "pt", "far") as file:
        streams.most_pinned = 0
        file["scalar"]
    assert 4 <= streams.most_pinned <= 64


@pytest.mark.parametrize("room", [0, 2048, 3000])
def test_load_file_works_if_memory_cannot_be_pinned(path: Path, make: Make, room: int) -> None:
    for seed in SEEDS:
        streams = make(seed)
        streams.room = room
        assert all_same(framework.load_file(path, "far"), streams)
        assert streams.most_pinned <= room


def test_load_file_that_fails_leaves_no_pinned_memory(path: Path, make: Make) -> None:
    for seed in SEEDS:
        streams = make(seed)
        with pytest.raises(Stopped):
            framework.load_file(path, "far", progress=stop)
        assert not any(streams._queues)
        assert streams.pinned == 0


@pytest.mark.parametrize("background", [False, True], ids=["now", "background"])
def test_save_file_follows_the_callers_stream(tmp_path: Path, make: Make, background: bool) -> None:
    for seed in SEEDS:
        streams = make(seed)
        weight = torch.zeros(64, 32).to("far")
        streams.later(lambda weight=weight: far.host(weight).fill_(7))
        future = framework.save_file({"weight": weight}, tmp_path / "saved", background=background)
        streams.later(lambda weight=weight: far.host(weight).fill_(9))
        streams.finish()
        if background:
            future.result()
        assert (framework.load_file(tmp_path / "saved")["weight"] == 7).all(), seed
        assert (far.host(weight) == 9).all()
        assert streams.pinned == 0


@pytest.fixture
def group() -> Iterator[Any]:
    """Make a process group of this process alone."""
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    yield torch.distributed.group.WORLD
    torch.distributed.destroy_process_group()


# A copy on the device is made by torch, in the order of its stream.
@pytest.mark.parametrize("snapshot", ["host", False])
def test_save_sharded_follows_the_stream(tmp_path: Path, make: Make, group: Any, snapshot: Any) -> None:
    for seed in SEEDS:
        streams = make(seed)
        weight = torch.zeros(64, 32).to("far")
        streams.later(lambda weight=weight: far.host(weight).fill_(7))
        future = framework.save_sharded(
            {"weight": weight},
            tmp_path / "saved",
            overwrite=True,
            process_group=group,
            background=True,
            write_options={"snapshot": snapshot},
        )
        future.staged.result(60)
        streams.later(lambda weight=weight: far.host(weight).fill_(9))
        streams.finish()
        future.result(60)
        assert (framework.load_file(tmp_path / "saved")["weight"] == 7).all(), seed
        assert streams.pinned == 0


def test_simulator_finds_an_early_copy(tmp_path: Path, make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_link.Link, "pull", lambda self, since, values: values().cpu())
    wrong = 0
    for seed in SEEDS:
        streams = make(seed)
        weight = torch.zeros(64, 32).to("far")
        streams.later(lambda weight=weight: far.host(weight).fill_(7))
        framework.save_file({"weight": weight}, tmp_path / "saved")
        wrong += not (framework.load_file(tmp_path / "saved")["weight"] == 7).all()
    assert wrong > len(SEEDS) // 4
