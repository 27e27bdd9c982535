"""`save_sharded(..., background=True)` on all ranks. The program and its collectives continue meanwhile."""

from __future__ import annotations

import gc
import os
import re
import signal
import threading
import time

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

import ingot
from ingot import RankError, SaveError
from ingot._ranks import peers, plan
from ingot.torch import _save_by_ranks, save_sharded
from support.ranks import GONE, PROMPT, contents

OPTIONS = {"max_shard_size": "100KB", "metadata": {"made": "by hand"}}


def whole():
    generator = torch.Generator().manual_seed(0)
    return {
        "rows": torch.randn(103, 256, generator=generator),
        "columns": torch.randn(128, 514, generator=generator).bfloat16(),
        "replica": torch.randn(30, 1000, generator=generator),
        "scalar": torch.tensor(3.5),
        "plain": torch.arange(7) % 2 == 0,
    }


def placed(tensors):
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    over = {"rows": [Shard(0)], "columns": [Shard(1)], "replica": [Replicate()], "scalar": [Replicate()]}
    found = {name: distribute_tensor(tensors[name], mesh, over[name], src_data_rank=None) for name in over}
    return {name: found.get(name, tensor.clone()) for name, tensor in tensors.items()}


def change(tensors):
    for tensor in tensors.values():
        getattr(tensor, "to_local", lambda tensor=tensor: tensor)().zero_()


class Gate:
    """Make a method of `ingot.Writer` wait in its thread until the program opens it."""

    def __init__(self, method):
        self._method, self._plain = method, getattr(ingot.Writer, method)
        self._open, self.reached = threading.Event(), threading.Event()

    def __enter__(self):
        plain = self._plain

        def waits(writer, *arguments):
            self.reached.set()
            assert self._open.wait(30)
            return plain(writer, *arguments)

        setattr(ingot.Writer, self._method, waits)
        return self

    def open(self):
        self._open.set()

    def __exit__(self, *raised):
        self.open()
        setattr(ingot.Writer, self._method, self._plain)


def saves(folder, snapshot, nodes=None, window=None):
    rank = dist.get_rank()
    _save_by_ranks.this_node = lambda: "node" if nodes is None else f"node {nodes[rank]}"
    if window is not None:
        plan.WINDOW_NBYTES = _save_by_ranks.WINDOW_NBYTES = window
    tensors = placed(whole())
    try:
        future = save_sharded(
            tensors, folder, background=True, write_options={"snapshot": snapshot}, **OPTIONS
        )
        future.staged.result(60)
        change(tensors)
        assert future.result(60) is None
    finally:
        _save_by_ranks.this_node = peers.this_node
        plan.WINDOW_NBYTES = _save_by_ranks.WINDOW_NBYTES = 32 << 20
    return sorted(os.listdir(folder))


@pytest.mark.parametrize("snapshot", [True, "device", False])
@pytest.mark.parametrize(
    ("nodes", "window"),
    [(None, None), ([0, 0, 1, 1], None), ([0, 1, 2, 3], 4096)],
    ids=["one machine", "two machines", "four machines, small windows"],
)
def test_background_save_stores_the_values_of_the_call(four, tmp_path, snapshot, nodes, window):
    save_sharded(whole(), tmp_path / "one", **OPTIONS)
    found = four.run(saves, tmp_path / "all", snapshot, nodes, window)
    assert contents(tmp_path / "all") == contents(tmp_path / "one")
    assert found == [sorted(os.listdir(tmp_path / "one"))] * 4


def trains(folder):
    """Run collectives during a save. The ranks begin them at different times."""
    rank, size = dist.get_rank(), dist.get_world_size()
    tensors = placed(whole())
    with Gate("write") as gate:
        future = save_sharded(tensors, folder, background=True, write_options={"snapshot": False}, **OPTIONS)
        assert gate.reached.wait(30)
        assert not future.staged.done()
        assert not future.cancel()
        for step in range(20):
            time.sleep(0.002 * ((rank + step) % size))
            total = torch.tensor(float(rank + step))
            dist.all_reduce(total)
            assert total == sum(range(size)) + size * step
        dist.barrier()
        # The gate is still closed, so that no collective above waited for a save.
        assert not future.done()
    future.result(60)


def test_background_save_leaves_collectives_of_the_program_alone(four, tmp_path):
    four.run(trains, tmp_path / "all")
    save_sharded(whole(), tmp_path / "one", **OPTIONS)
    assert contents(tmp_path / "all") == contents(tmp_path / "one")


def stages(folder):
    tensors = placed(whole())
    with Gate("commit") as gate:
        future = save_sharded(tensors, folder, background=True, write_options={"snapshot": False}, **OPTIONS)
        future.staged.result(60)
        assert not future.done()
        change(tensors)
        assert os.listdir(folder)
        assert all(name.startswith(".") for name in os.listdir(folder))
        gate.open()
        future.result(60)


def test_background_save_is_staged_before_it_flushes(four, tmp_path):
    four.run(stages, tmp_path / "all")
    save_sharded(whole(), tmp_path / "one", **OPTIONS)
    assert contents(tmp_path / "all") == contents(tmp_path / "one")


def in_turn(folder):
    os.chdir(folder)
    tensors = placed(whole())
    with Gate("write"):
        futures = [
            save_sharded(tensors, name, overwrite=True, background=True, **OPTIONS)
            for name in ("first", "second", "first")
        ]
        os.chdir("/")
        assert not any(future.done() for future in futures)
    for future in futures:
        future.result(60)
    return peers._APART[dist.group.WORLD].number


def test_background_save_reuses_its_connections(four, tmp_path):
    save_sharded(whole(), tmp_path / "one", **OPTIONS)
    before = four.run(in_turn, tmp_path)
    for name in ("first", "second"):
        assert contents(tmp_path / name) == contents(tmp_path / "one")
    assert four.run(in_turn, tmp_path) == before
    assert len(set(before)) == 1


def cannot(folder, case):
    rank = dist.get_rank()
    tensors = placed(whole())
    if rank == 1 and case == "meta":
        tensors["plain"] = torch.zeros(3, device="meta")
    save_sharded(tensors, folder, background=rank != 1 or case != "at once")


def fails(folder, snapshot):
    plain = ingot.Writer.write
    if dist.get_rank() == 1:

        def full(writer, *arguments):
            raise OSError(28, "No space left on device")

        ingot.Writer.write = full
    try:
        future = save_sharded(
            placed(whole()), folder, overwrite=True, background=True, write_options={"snapshot": snapshot}
        )
        # After the copy, the tensors may change, even if the save fails.
        assert future.staged.done() or not snapshot
        fault = future.exception(60)
        assert future.staged.exception(0) is (None if snapshot else fault)
        raise fault
    finally:
        ingot.Writer.write = plain


@pytest.mark.parametrize("snapshot", [True, False])
def test_background_save_raises_on_all_ranks_and_keeps_the_old_checkpoint(four, tmp_path, snapshot):
    folder = tmp_path / "model"
    save_sharded({"old": torch.zeros(3)}, folder)
    before = contents(folder)
    for rank, found in enumerate(four.outcomes(fails, folder, snapshot)):
        if rank == 1:
            assert isinstance(found, OSError)
        else:
            assert isinstance(found, RankError)
            assert (found.rank, found.code) == (1, "rank-failed")
            assert re.search("rank 1 of 4 failed in writing: OSError: .*No space left", str(found))
            assert ".ingot" not in str(found)
    assert contents(folder) == before
    # Ranks that agreed on a failure go on.
    four.run(saves, tmp_path / "again", True)


@pytest.mark.parametrize(
    ("case", "own", "message"),
    [
        ("meta", SaveError, "`plain`: a meta tensor has no values"),
        ("at once", RankError, "rank 1 of 4 has another background than rank 0"),
    ],
)
def test_background_save_raises_planning_errors_at_once(four, tmp_path, case, own, message):
    for found in four.outcomes(cannot, tmp_path / "model", case):
        assert isinstance(found, (own, RankError))
        assert re.search(message, str(found)), found
    assert not (tmp_path / "model").exists()


def breaks(folder, step, nodes):
    """Kill rank 1 when its thread reaches its collective of this number."""
    rank = dist.get_rank()
    _save_by_ranks.this_node = lambda: f"node {nodes[rank]}"
    wait, steps = peers.Peers._wait, []

    def counted(self, begin, doing):
        if threading.current_thread() is not threading.main_thread():
            steps.append(doing)
            if rank == 1 and len(steps) > step:
                os.kill(os.getpid(), signal.SIGKILL)
        wait(self, begin, doing)

    peers.Peers._wait = counted
    future = save_sharded(placed(whole()), folder, overwrite=True, background=True)
    future.result(PROMPT)


KILLED = [(step, nodes) for step in (0, 1, 2, 3, 5, 6, 7) for nodes in ([0, 0, 0], [0, 1, 2])]


@pytest.mark.parametrize(
    ("step", "nodes"),
    [(4, [0, 0, 0]), *(pytest.param(*one, marks=pytest.mark.slow) for one in KILLED)],
)
def test_background_save_raises_if_a_rank_is_killed(some, tmp_path, step, nodes):
    folder = tmp_path / "model"
    save_sharded({"old": torch.zeros(5)}, folder)
    before = contents(folder)["model.safetensors"]
    found = some.outcomes(breaks, folder, step, nodes, seconds=30)
    save_sharded(whole(), tmp_path / "new")
    new = contents(tmp_path / "new")["model.safetensors"]
    if found[1] is GONE:
        for rank in (0, 2):
            assert isinstance(found[rank], RankError), found[rank]
            assert (found[rank].rank, found[rank].code) == (1, "rank-lost")
    else:
        # The save of rank 1 had no collective left at which it would be killed.
        assert found == [None] * 3
    assert contents(folder)["model.safetensors"] in (before, new)
    save_sharded({"next": torch.ones(5)}, folder, overwrite=True)
    assert sorted(os.listdir(folder)) == ["model.safetensors"]


def interrupted(folder):
    """Interrupt rank 1 after all ranks have agreed and before its thread gets the save."""
    # Finished saves must end without the garbage collector.
    gc.disable()
    if dist.get_rank() == 1:

        def put(work, future):
            raise KeyboardInterrupt

        _save_by_ranks.SAVES.put = put
    try:
        future = save_sharded(placed(whole()), folder, overwrite=True, background=True)
        with pytest.raises(RankError) as caught:
            future.result(30)
        return caught.value
    finally:
        vars(_save_by_ranks.SAVES).pop("put", None)


def saves_anew(folder):
    try:
        return saves(folder, True)
    finally:
        gc.enable()


def test_background_save_does_not_wait_for_an_interrupted_rank(four, tmp_path):
    folder = tmp_path / "model"
    save_sharded({"old": torch.zeros(3)}, folder)
    before = contents(folder)
    for rank, found in enumerate(four.outcomes(interrupted, folder)):
        assert isinstance(found, KeyboardInterrupt if rank == 1 else RankError)
        assert rank == 1 or (found.rank, found.code) == (1, "rank-lost")
    assert contents(folder) == before
    # The next save makes new connections.
    four.run(saves_anew, tmp_path / "again")


def leaves(folder):
    """Destroy the process groups while the save still runs."""
    tensors = placed(whole())
    with Gate("write") as gate:
        future = save_sharded(tensors, folder, background=True, **OPTIONS)
        assert gate.reached.wait(30)
        dist.destroy_process_group()
    future.result(60)


def test_background_save_outlives_its_process_groups(some, tmp_path):
    some.run(leaves, tmp_path / "all")
    save_sharded(whole(), tmp_path / "one", **OPTIONS)
    assert contents(tmp_path / "all") == contents(tmp_path / "one")


def asks_nobody(folder):
    """Save without waiting for the future."""
    save_sharded(placed(whole()), folder, background=True, **OPTIONS)


def test_background_save_is_whole_at_exit(some, tmp_path):
    some.run(asks_nobody, tmp_path / "all")
    some.close()
    save_sharded(whole(), tmp_path / "one", **OPTIONS)
    assert contents(tmp_path / "all") == contents(tmp_path / "one")
