"""Savers and readers share a directory, and some are killed. Every load returns one complete checkpoint.

`INGOT_SAVES` is the number of steps, each a save or a load. For many steps, pass `-o faulthandler_timeout=0`.
"""

from __future__ import annotations

import faulthandler
import json
import os
import random
import signal
import time
import traceback
import warnings
from contextlib import ExitStack, nullcontext
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

import ingot
import ingot.dcp
from ingot.torch import load_file, load_into, save_file, save_sharded
from support.ranks import _context
from support.record import note

STEPS = int(os.environ.get("INGOT_SAVES", "300"))
STEPS_OF_AN_ACTOR = 25
#: Seconds that a round may take: a hang fails.
SECONDS = 120
NAMES = [f"layers.{number}.weight" for number in range(5)]
SHAPE = (6, 3)
FILE = "model.safetensors"


def state(version, mesh=None):
    whole = {name: torch.full(SHAPE, float(version)) for name in NAMES}
    if mesh is None:
        return whole
    return {
        name: distribute_tensor(tensor, mesh, [Shard(0)], src_data_rank=None)
        for name, tensor in whole.items()
    }


def size(chance):
    """Return a maximum size of files: for one file, or for several."""
    return chance.choice([72, 150, 1 << 20])


def save_whole(folder, version, chance, mesh):
    save_sharded(state(version, mesh), folder, size(chance), overwrite=True)


def save_by_dcp(folder, version, chance, mesh, whole=True, **options):
    writer = ingot.dcp.Writer(folder, size(chance), overwrite=True, whole=whole)
    dcp.save(state(version, mesh), storage_writer=writer, no_dist=mesh is None, **options)


def save_parts(folder, version, chance, mesh):
    save_by_dcp(folder, version, chance, mesh, whole=False)


def save_parts_alone(folder, version, chance, mesh):
    options = {} if mesh is None else {"use_collectives": False}
    save_by_dcp(folder, version, chance, mesh, whole=False, **options)


def save_joined(folder, version, chance, mesh):
    """Fill one file with a writer on one rank and guests on all others. One rank commits it.

    An index in the directory still names the other files.
    """
    rank, ranks = (0, 1) if mesh is None else (dist.get_rank(), dist.get_world_size())
    with ExitStack() as leaving:
        writer = None if rank else leaving.enter_context(begun(folder))
        if not agreed(writer is not None, mesh):
            # Another actor fills the file.
            return
        if rank or ranks == 1:
            joined = leaving.enter_context(ingot.Writer.join(folder / FILE))
        own = joined if rank else writer
        for number, (name, tensor) in enumerate(state(version).items()):
            if number % ranks == rank:
                (joined if ranks == 1 and number % 2 else own).write(name, tensor)
        agreed(True, mesh)
        if version % ranks == rank:
            own.commit()
        agreed(True, mesh)


def begun(folder):
    """Return a writer that other ranks can join, or an empty context if another actor is writing the file."""
    try:
        return ingot.Writer(folder / FILE, dict.fromkeys(NAMES, ("F32", SHAPE)), overwrite=True)
    except ingot.StorageError as fault:
        if fault.code != "busy":
            raise
        return nullcontext()


def agreed(value, mesh):
    """Wait for all ranks, and return the value of the first rank."""
    values = [value]
    if mesh is not None:
        dist.broadcast_object_list(values)
        dist.barrier()
    return values[0]


def read_file(folder, chance):
    return load_file(folder, backend=chance.choice(["mmap", "pread", "auto"]))


def read_into(folder, chance):
    found = state(-1)
    load_into(found, folder)
    return found


def read_handle(folder, chance):
    with ingot.safe_open(folder, "pt") as file:
        return {name: file.get_tensor(name) for name in file}


def read_by_dcp(folder, chance):
    found = state(-1)
    dcp.load(found, storage_reader=ingot.dcp.Reader(folder), no_dist=True)
    return found


WHOLE = [save_whole, save_by_dcp, save_joined]
ANY = [save_whole, save_by_dcp, save_parts, save_parts_alone]
READERS = [read_file, read_into, read_handle]


class Shared:
    """State shared by actors and the test: counts and problems, in files.

    It uses no locks, since a process that is killed would never release its lock.
    """

    def __init__(self, folder: Path) -> None:
        self._versions, self._steps = folder / "versions", folder / "steps"
        self.problems = folder / "problems"
        _appended(self._versions)

    @property
    def steps(self) -> int:
        return self._steps.stat().st_size if self._steps.exists() else 0

    def version(self) -> int:
        return _appended(self._versions)

    def count(self) -> None:
        _appended(self._steps)

    def report(self, kind: str, text: str) -> None:
        with open(self.problems, "a") as file:
            file.write(json.dumps([kind, text]) + "\n")


def _appended(path: Path) -> int:
    """Append a byte to a file and return its new size, which no other process gets."""
    file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    try:
        os.write(file, b".")
        return os.lseek(file, 0, os.SEEK_CUR)
    finally:
        os.close(file)


def prepare():
    faulthandler.register(signal.SIGUSR1)
    os.environ["INGOT_DURABLE"] = "0"
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)


def reads(folder, seed, shared, readers):
    prepare()
    chance = random.Random(seed)
    for _ in range(STEPS_OF_AN_ACTOR):
        read = chance.choice(readers)
        try:
            found = read(folder, chance)
        except BaseException:
            shared.report("broken", f"{read.__name__}: {traceback.format_exc()}")
        else:
            values = sorted({float(value) for tensor in found.values() for value in tensor.flatten()})
            if sorted(found) != NAMES or len(values) != 1:
                shared.report("mixed", f"{read.__name__}: {sorted(found)}: {values}")
        shared.count()
        time.sleep(chance.random() * 0.004)


def saves(folder, seed, shared, savers, rank=0, ranks=1, store=""):
    prepare()
    mesh = None
    if ranks > 1:
        os.environ["GLOO_SOCKET_IFNAME"] = "lo"
        # torch may wait without a limit for a rank that is killed while the ranks meet: the alarm ends it.
        signal.alarm(SECONDS // 3)
        try:
            mesh = init_group(store, rank, ranks)
        except (RuntimeError, dist.DistError):
            # A rank was killed before the ranks met.
            os._exit(0)
        signal.alarm(0)
    # All ranks make the same choices.
    chance = random.Random(seed)
    for _ in range(STEPS_OF_AN_ACTOR):
        save, version = chance.choice(savers), shared.version()
        try:
            save(folder, agreed(version, mesh), chance, mesh)
        except BaseException as error:
            shared.report("refused", f"{save.__name__}: {type(error).__name__}: {traceback.format_exc()}")
            if mesh is not None:
                break
        if not rank:
            shared.count()
        time.sleep(chance.random() * 0.004)
    os._exit(0)


def init_group(store, rank, ranks):
    timeout = timedelta(seconds=SECONDS / 4)
    dist.init_process_group(
        "gloo", store=dist.FileStore(store, ranks), rank=rank, world_size=ranks, timeout=timeout
    )
    return init_device_mesh("cpu", (ranks,))


def actor(number, chance, folder, scratch, shared, savers, readers):
    """Start an actor: the process of a reader or of a saver, or ranks that save together."""
    seed = chance.random()
    if number == 0:
        calls = [(reads, (folder, seed, shared, readers))]
    else:
        ranks = chance.choice([1, 1, 2, 3])
        store = str(scratch / f"store{seed}")
        calls = [(saves, (folder, seed, shared, savers, rank, ranks, store)) for rank in range(ranks)]
        if number > 1 and chance.random() < 0.3:
            calls = [(reads, (folder, seed, shared, readers))]
    processes = [_context.Process(target=call, args=given, daemon=True) for call, given in calls]
    for process in processes:
        process.start()
    return processes


def play(chance, folder, scratch, shared):
    """Have some actors save and load, and kill some of them."""
    savers, readers = chance.choice([(WHOLE, [*READERS, read_by_dcp]), (ANY, [read_by_dcp])])
    save_sharded(state(1), folder, size(chance), overwrite=True)
    count = chance.randint(2, 4)
    actors = [actor(number, chance, folder, scratch, shared, savers, readers) for number in range(count)]
    killed = []
    until = time.monotonic() + SECONDS
    kills = sorted(time.monotonic() + chance.random() * 1.5 for _ in range(chance.randint(0, 2)))
    while any(process.is_alive() for processes in actors for process in processes):
        if time.monotonic() > until:
            print_stacks(actors)
            pytest.fail("an actor hangs")
        time.sleep(0.01)
        if kills and time.monotonic() > kills[0]:
            kills.pop(0)
            processes = chance.choice(actors[1:])
            killed.append(processes)
            for process in chance.sample(processes, chance.randint(1, len(processes))):
                process.kill()
    return len(killed)


def print_stacks(actors):
    """Have every living process print its stacks."""
    for process in (process for processes in actors for process in processes if process.is_alive()):
        os.kill(process.pid, signal.SIGUSR1)
        time.sleep(0.5)


def test_load_file_loads_one_whole_checkpoint_beside_savers(tmp_path: Path) -> None:
    seed = int(os.environ.get("INGOT_SEED", str(random.randrange(1 << 30))))
    chance, shared, kills, rounds = random.Random(seed), Shared(tmp_path), 0, 0
    print(f"INGOT_SEED={seed}")
    while shared.steps < STEPS:
        rounds += 1
        folder = tmp_path / f"step-{rounds}"
        kills += play(chance, folder, tmp_path, shared)
        problems = (
            [json.loads(line) for line in shared.problems.read_text().splitlines()]
            if shared.problems.exists()
            else []
        )
        serious = [one for one in problems if not is_told_of_kill(one)]
        assert not serious, f"INGOT_SEED={seed}, round {rounds}: {serious[0][0]}: {serious[0][1]}"
        # The next saves remove the leftovers of killed processes.
        save_file(state(1), folder / FILE)
        save_sharded(state(1), folder, 72, overwrite=True)
        left = [name for name in os.listdir(folder) if name.startswith(".")]
        assert not left, f"INGOT_SEED={seed}, round {rounds}: {left}"
    note("steps of savers and readers", shared.steps, 0, rounds=rounds, kills=kills)


def is_told_of_kill(problem):
    """Return whether a rank reported an error because another rank was killed."""
    return problem[0] == "refused" and any(
        text in problem[1]
        for text in (
            "Connection closed by peer",
            "rank-lost",
            "Connection reset",
            "was lost or does not answer",
            "was killed",
        )
    )
