"""Four ranks of one machine: loading and saving DTensors, against torch's checkpoints and safetensors.

`python benches/python/ranks.py` prints the table. The ranks are processes with gloo between them, started
once; the sides alternate, and every load is compared with the saved tensors before its time counts.
Destinations are touched before the clock starts, and a time is the slowest rank's.

Several nodes are simulated: ranks claim to be on different ones, and an object in place of the storage counts
its bytes.
"""

import os
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import safetensors
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.multiprocessing
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader, HuggingFaceStorageWriter
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.futures import Future

import ingot
import ingot.dcp
import ingot.torch
import options
from goal import Goal
from ingot._ranks import peers
from ingot._ranks.placements import part
from ingot._ranks.plan import Tensor, Wants, plan
from ingot.torch import _load_by_ranks
from turns import in_turn

SIZE = 4
# Of bf16: 8 MiB each.
MATRICES, SIDE, SMALL = 16, 2048, 500
Tensors = dict[str, torch.Tensor]


def model() -> Tensors:
    """Return 256 MiB of matrices, half sharded by rows and half by columns, and small tensors."""
    generator = torch.Generator().manual_seed(0)
    shape = SIDE, SIDE
    tensors = {}
    for number in range(MATRICES):
        for kind in ("rows", "columns"):
            random = torch.randint(-(2**15), 2**15, shape, dtype=torch.int16, generator=generator)
            tensors[f"layers.{number}.{kind}"] = random.view(torch.bfloat16)
    return tensors | {f"layers.{number}.norm": torch.full((256,), float(number)) for number in range(SMALL)}


def placed(tensors: Tensors, only: str = "") -> Tensors:
    """Return the part of each tensor on this rank."""
    mesh = init_device_mesh("cpu", (SIZE,))
    kinds = {"rows": [Shard(0)], "columns": [Shard(1)], "norm": [Replicate()]}
    return {
        name: distribute_tensor(tensor, mesh, kinds[name.rpartition(".")[2]], src_data_rank=None)
        for name, tensor in tensors.items()
        if only in name
    }


def local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def touched(tensors: Tensors) -> Tensors:
    """Return zero tensors like these, whose memory is touched already."""
    found = {name: torch.zeros_like(tensor) for name, tensor in tensors.items()}
    for tensor in found.values():
        local(tensor).zero_()
    return found


def same(found: Tensors, expected: Tensors) -> None:
    for name, tensor in expected.items():
        one, other = local(found[name]), local(tensor)
        assert torch.equal(one.view(torch.uint8), other.view(torch.uint8)), f"{name}: bytes differ"


def of_all(figure: float) -> list[float]:
    """The figures of all ranks."""
    found = [torch.zeros(1, dtype=torch.float64) for _ in range(SIZE)]
    dist.all_gather(found, torch.tensor([figure], dtype=torch.float64))
    return [float(one) for one in found]


def timed(work: Callable[[], Any]) -> list[float]:
    """Seconds of each rank, which begin together."""
    dist.barrier()
    begun = time.perf_counter()
    work()
    return of_all(time.perf_counter() - begun)


def drop_caches(folder: Path) -> None:
    """Drop the files from the page cache, so that the next reads come from the disk."""
    dist.barrier()
    if dist.get_rank() == 0:
        for path in folder.iterdir():
            file = os.open(path, os.O_RDONLY)
            os.fsync(file)
            os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(file)
    dist.barrier()


class Counting:
    """Storage that many nodes share. It counts the bytes that a rank reads, without headers."""

    def __init__(self, path: Path) -> None:
        self.path, self.nbytes = path, 0

    def head(self, path: str) -> dict[str, int]:
        return {"size": self.path.stat().st_size}

    def get_ranges(self, path: str, *, starts: list[int], ends: list[int]) -> list[bytes]:
        if min(starts) > 0:
            self.nbytes += sum(ends) - sum(starts)
        with self.path.open("rb") as file:
            ranges = zip(starts, ends, strict=True)
            return [os.pread(file.fileno(), end - start, start) for start, end in ranges]


class Nothing(ingot.dcp.Reader):
    """A reader that returns metadata and reads no data, to measure the time of `dcp.load` itself."""

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        done: Future[None] = Future()
        done.set_result(None)
        return done


def loads(folder: Path, expected: Tensors, rounds: int, cold: bool) -> dict[str, Any]:
    """Load by load_into, and by torch.distributed.checkpoint with our reader, torch's, and `Nothing`."""

    def load(side: str) -> list[float]:
        target = touched(expected)
        if cold:
            drop_caches(folder)
        works = {
            "load_into": lambda: ingot.torch.load_into(target, folder),
            "ingot.dcp.Reader": lambda: dcp.load(target, storage_reader=ingot.dcp.Reader(folder)),
            "HuggingFaceStorageReader": lambda: dcp.load(
                target, storage_reader=HuggingFaceStorageReader(str(folder))
            ),
            "dcp.load of nothing": lambda: dcp.load(target, storage_reader=Nothing(folder)),
        }
        seconds = timed(works[side])
        if side != "dcp.load of nothing":
            same(target, expected)
        return seconds

    sides = ("load_into", "ingot.dcp.Reader", "HuggingFaceStorageReader", "dcp.load of nothing")
    return in_turn(rounds, load, sides)


def columns(folder: Path, rounds: int) -> dict[str, Any]:
    """64 MiB of each rank in runs of 2 KiB."""
    rank, width = dist.get_rank(), 1024
    rows = (64 << 20) // (2 * width)
    path = folder / "columns" / "model.safetensors"
    if rank == 0:
        path.parent.mkdir()
        whole = torch.arange(rows * width * SIZE, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
        ingot.torch.save_file({"w": whole.view(rows, width * SIZE)}, path)
    dist.barrier()
    mesh = init_device_mesh("cpu", (SIZE,))
    shape = torch.Size([rows, width * SIZE])
    begin = rank * width

    def load(side: str) -> list[float]:
        memory = torch.zeros(rows, width, dtype=torch.bfloat16)

        def peer() -> None:
            with safetensors.safe_open(path, "pt") as file:
                memory.copy_(file.get_slice("w")[:, begin : begin + width])

        def ours() -> None:
            tensor = DTensor.from_local(
                memory, mesh, [Shard(1)], run_check=False, shape=shape, stride=(shape[1], 1)
            )
            ingot.torch.load_into({"w": tensor}, path)

        seconds = timed(ours if side == "load_into" else peer)
        ends = torch.arange(begin, begin + width, dtype=torch.int32).to(torch.int16)
        assert torch.equal(memory[0].view(torch.int16), ends)
        return seconds

    return in_turn(rounds, load, ("load_into", "get_slice and copy"))


def asked_for(path: Path, expected: Tensors, how: str, nodes: list[int]) -> float:
    """Return the bytes that all ranks together read from storage."""
    store = Counting(path)
    _load_by_ranks.this_node = lambda: f"node {nodes[dist.get_rank()]}"
    try:
        if how == "all":
            ingot.torch.load_file(ingot.Ranges(store, "model"))
        else:
            target = touched(expected)
            source = ingot.Ranges(store, "model")
            ingot.torch.load_into(target, source, strict=False, read_once=False if how == "slices" else how)
            same(target, expected)
    finally:
        _load_by_ranks.this_node = peers.this_node
    return sum(of_all(store.nbytes))


def written() -> int:
    """Return the bytes that this process has written to storage."""
    lines = Path("/proc/self/io").read_text().splitlines()
    return int(next(line for line in lines if line.startswith("write_bytes:")).split()[1])


def memory(field: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith(field + ":")).split()[1]) << 10


def saves(folder: Path, tensors: Tensors, rounds: int) -> dict[str, Any]:
    """By save_sharded, with ranks on one machine and on one each, and by torch's writer and consolidation."""

    def save(side: str) -> dict[str, Any]:
        place = folder / f"save {len(list(folder.iterdir())) if dist.get_rank() == 0 else 0}"
        shared = [place]
        dist.broadcast_object_list(shared)
        (place,) = shared
        if side == "HuggingFaceStorageWriter":
            writer = HuggingFaceStorageWriter(str(place), save_distributed=True, enable_consolidation=True)
            work: Callable[[], Any] = lambda: dcp.save(tensors, storage_writer=writer)  # noqa: E731
        else:
            work = lambda: ingot.torch.save_sharded(tensors, place)  # noqa: E731
        from ingot.torch import _save_by_ranks

        _save_by_ranks.this_node = lambda: f"node {dist.get_rank()}" if "sent" in side else "node"
        Path("/proc/self/clear_refs").write_text("5")
        before, resident = written(), memory("VmRSS")
        seconds = timed(work)
        _save_by_ranks.this_node = peers.this_node
        found = {
            "seconds": seconds,
            "written": sum(of_all(written() - before)),
            "peak": max(of_all(memory("VmHWM") - resident)),
        }
        if dist.get_rank() == 0:
            if side != "HuggingFaceStorageWriter":
                whole = ingot.torch.load_file(place)
                for name, tensor in model().items():
                    assert torch.equal(whole[name].view(torch.uint8), tensor.view(torch.uint8)), name
            del place
        dist.barrier()
        if dist.get_rank() == 0:
            import shutil

            shutil.rmtree(shared[0])
        dist.barrier()
        return found

    sides = ("save_sharded", "save_sharded, sent", "HuggingFaceStorageWriter")
    return in_turn(rounds, save, sides)


def work(rank: int, folder: Path, rounds: int, found: Any) -> None:
    torch.set_num_threads(1)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    dist.init_process_group(
        "gloo", store=dist.FileStore(str(folder / "store"), SIZE), rank=rank, world_size=SIZE
    )
    whole = model()
    checkpoint = folder / "model"
    if rank == 0:
        ingot.torch.save_sharded(whole, checkpoint)
    dist.barrier()
    tensors, path = placed(whole), checkpoint / "model.safetensors"
    figures: dict[str, Any] = {
        "warm": loads(checkpoint, tensors, rounds, cold=False),
        "cold": loads(checkpoint, tensors, rounds, cold=True),
        "columns": columns(folder, rounds),
        "bytes": path.stat().st_size,
        "read once": asked_for(path, tensors, "job", [0, 0, 0, 0]),
    }
    of_columns = placed(whole, "columns")
    figures["nodes"] = {
        "needed": sum(one.nbytes for name, one in whole.items() if "columns" in name),
        **{how: asked_for(path, of_columns, how, [0, 1, 2, 3]) for how in ("job", "slices")},
        "all": asked_for(path, of_columns, "all", [0, 1, 2, 3]),
    }
    saved = folder / "saves"
    saved.mkdir(exist_ok=True)
    figures["saves"] = saves(saved, tensors, rounds)
    if rank == 0:
        found.update(figures)
    dist.barrier()
    dist.destroy_process_group()


def planning() -> float:
    """Seconds for 100,000 tensors and 64 ranks."""
    shapes = [(2048, 1024), (1024, 2048), (4096,), (512, 512), (128,), (4096, 4096)]
    over = [[Shard(0), Shard(0)], [Replicate(), Shard(0)], [Replicate(), Replicate()]]
    kinds = [(shape, over[number % 3]) for number, shape in enumerate(shapes)]
    tensors = [Tensor(shapes[number % 6], 2) for number in range(100_000)]
    wants = [
        Wants(
            [part(shape, [8, 8], divmod(rank, 8), placements) for shape, placements in kinds],
            [number % 6 + 1 for number in range(100_000)],
        )
        for rank in range(64)
    ]
    begun = time.perf_counter()
    plan(tensors, wants, [rank // 8 for rank in range(64)], "job", 0)
    return time.perf_counter() - begun


def slowest(runs: list[list[float]]) -> float:
    return statistics.median(max(run) for run in runs)


def against(figures: dict[str, Any], ours: str, peer: str) -> float:
    return slowest(figures[peer]) / slowest(figures[ours])


def line(what: str, figure: float, goal: Goal, unit: str = " x") -> None:
    print(f"    {what:<62} {figure:6.2f}{unit} ({goal}): {goal.met(figure)}", flush=True)


def show(figures: dict[str, Any]) -> None:
    for what in ("warm", "cold", "columns"):
        for side, runs in figures[what].items():
            print(f"{what:<8} {side:<28} {slowest(runs) * 1e3:8.1f} ms, slowest rank")
    for side, runs in figures["saves"].items():
        one = {key: statistics.median(run[key] for run in runs) for key in ("written", "peak")}
        print(
            f"save     {side:<28} {slowest([run['seconds'] for run in runs]) * 1e3:8.1f} ms, slowest rank, "
            f"{one['written'] / 2**20:.0f} MiB written, peak +{one['peak'] / 2**20:.0f} MiB"
        )
    nodes, peer = figures["nodes"], "HuggingFaceStorageReader"
    line(
        "bytes read of those wanted, read once",
        figures["read once"] / figures["bytes"],
        Goal(1.02, 1, "figure"),
    )
    line("load, warm, against dcp.load", against(figures["warm"], "load_into", peer), Goal(3, 6))
    line("load, cold, against dcp.load", against(figures["cold"], "load_into", peer), Goal(1.5, 2))
    line("dcp.load by ingot.dcp.Reader, warm", against(figures["warm"], "ingot.dcp.Reader", peer), Goal(3, 6))
    most = against(figures["warm"], "dcp.load of nothing", peer)
    print(f"    {'the most that any reader can win of dcp.load, warm':<62} {most:6.2f} x", flush=True)
    line(
        "bytes of 4 nodes, column shards: slices over read once", nodes["slices"] / nodes["job"], Goal(3.5, 4)
    )
    line("bytes of 4 nodes, column shards: all over read once", nodes["all"] / nodes["job"], Goal(4, 4))
    line(
        "64 MiB of 2 KiB column runs, warm",
        against(figures["columns"], "load_into", "get_slice and copy"),
        Goal(4, 8),
    )
    spreads = [(max(run) - min(run)) / max(run) for run in figures["warm"]["load_into"]]
    line("spread between ranks, warm load", 100 * statistics.median(spreads), Goal(10, 5, "figure"), " %")
    saved = {side: [run["seconds"] for run in runs] for side, runs in figures["saves"].items()}
    line(
        "save, durable, against DCP and consolidation",
        against(saved, "save_sharded", "HuggingFaceStorageWriter"),
        Goal(2.5, 4),
    )
    ours = figures["saves"]["save_sharded"]
    bytes_written = statistics.median(run["written"] for run in ours)
    line("bytes written of those of the files", bytes_written / figures["bytes"], Goal(1.02, 1, "figure"))
    peak = statistics.median(run["peak"] for run in ours) / 2**20
    line("peak beyond the tensors", peak, Goal(128, 64, "figure"), " MiB")
    line("planning 100,000 tensors for 64 ranks", figures["planning"], Goal(1, 0.3, "figure"), " s")


def main() -> None:
    import record

    given = options.parser(__doc__, room="2 GiB", figures=True).parse_args()
    with options.place(given.dir) as directory:
        figures = record.conditions(directory, 1)
        figures["planning"] = statistics.median(planning() for _ in range(3))
        with torch.multiprocessing.Manager() as manager:
            found = manager.dict()
            torch.multiprocessing.spawn(work, (directory, given.rounds, found), SIZE)
            figures |= dict(found)
    show(figures)
    if given.json:
        record.keep(figures, given.json)


if __name__ == "__main__":
    main()
