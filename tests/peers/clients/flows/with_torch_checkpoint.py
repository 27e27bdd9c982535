"""torch.distributed.checkpoint with Hugging Face storage, by one process and by two ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from flow import Note, main
from safetensors.torch import load_file
from torch.distributed.checkpoint import HuggingFaceStorageReader, HuggingFaceStorageWriter
from torch.distributed.checkpoint._consolidate_hf_safetensors import consolidate_safetensors_files
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.multiprocessing import start_processes

RANKS = 2
PLACES = {"rows": Shard(0), "columns": Shard(1), "all": Replicate()}
# The file that each tensor goes to, from 1 on.
FILES = {"rows": 1, "columns": 2, "all": 2}

State = dict[str, torch.Tensor]


def values() -> State:
    return {
        "rows": torch.arange(24.0).reshape(6, 4),
        "columns": torch.arange(40.0).reshape(5, 8).to(torch.bfloat16),
        # Consolidation knows floating-point dtypes only.
        "all": torch.arange(7.0).to(torch.float16),
    }


def zeros() -> State:
    return {name: torch.zeros_like(tensor) for name, tensor in values().items()}


@contextmanager
def on_all_ranks(work: Callable[[Path, Path], None], folder: Path) -> Iterator[Path]:
    """Run `work` on every rank, in a directory of their own, and return the directory."""
    with TemporaryDirectory() as own:
        # Forked, because a fresh process would import another `safetensors`.
        start_processes(joined, (work, folder, Path(own)), nprocs=RANKS, start_method="fork")
        yield Path(own)


def joined(rank: int, work: Callable[[Path, Path], None], folder: Path, own: Path) -> None:
    dist.init_process_group("gloo", init_method=f"file://{own}/meeting", rank=rank, world_size=RANKS)
    work(folder, own)
    dist.destroy_process_group()


def save_shards(folder: Path, own: Path) -> None:
    mesh = init_device_mesh("cpu", (RANKS,))
    state = {name: distribute_tensor(tensor, mesh, [PLACES[name]]) for name, tensor in values().items()}
    sharded = HuggingFaceStorageWriter(str(folder / "sharded"), FILES, save_distributed=True)
    dcp.save(state, storage_writer=sharded)
    consolidated = HuggingFaceStorageWriter(
        str(folder / "consolidated"), FILES, save_distributed=True, enable_consolidation=True
    )
    dcp.save(state, storage_writer=consolidated)


def load_shards(folder: Path, own: Path) -> None:
    """Load each tensor sharded along another dimension than the saved one."""
    mesh = init_device_mesh("cpu", (RANKS,))
    places = {"rows": Shard(1), "columns": Shard(0), "all": Shard(0)}
    state = {name: distribute_tensor(tensor, mesh, [places[name]]) for name, tensor in zeros().items()}
    dcp.load(state, storage_reader=HuggingFaceStorageReader(str(folder / "sharded")))
    local = {name: tensor.to_local() for name, tensor in state.items()}
    torch.save(local, own / f"{dist.get_rank()}.pt")


def save(folder: Path, note: Note) -> None:
    with on_all_ranks(save_shards, folder):
        pass
    dcp.save(values(), storage_writer=HuggingFaceStorageWriter(str(folder / "whole")), no_dist=True)
    dcp.save(values(), storage_writer=HuggingFaceStorageWriter(str(folder / "parted"), FILES), no_dist=True)
    (folder / "consolidated later").mkdir()
    consolidate_safetensors_files(str(folder / "sharded"), str(folder / "consolidated later"), FILES)
    note("files", sorted(str(path.relative_to(folder)) for path in folder.rglob("*.safetensors")))


def load(folder: Path, note: Note) -> None:
    for name in ("whole", "parted", "sharded", "consolidated", "consolidated later"):
        state = zeros()
        reader = HuggingFaceStorageReader(str(folder / name), thread_count=2)
        dcp.load(state, storage_reader=reader, no_dist=True)
        assert all(torch.equal(state[key], tensor) for key, tensor in values().items()), name
        note(name, state)
    for file in sorted(folder.glob("consolidated*/*.safetensors")):
        note(str(file.relative_to(folder)), load_file(file))
    with on_all_ranks(load_shards, folder) as own:
        for rank in range(RANKS):
            note(f"rank {rank}", torch.load(own / f"{rank}.pt"))


if __name__ == "__main__":
    main("torch", save, load)
