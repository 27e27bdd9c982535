"""Trains a small model under FSDP2, saves it by all ranks, and loads it on another mesh.

``make demo-ranks`` runs it: ``torchrun --nproc-per-node 4 examples/ranks.py``. The ranks are processes of
this machine, on the CPU. What they write stays in ``demo/ranks``: ordinary files, which any program reads.
"""

import argparse
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import ingot.torch

STEPS, WIDTH = 5, 512


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 4 * WIDTH)
        self.down = nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(self.up(self.norm(x)).relu())


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(8))
        self.head = nn.Linear(WIDTH, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def by_rows() -> Model:
    """A model whose parameters are cut by rows, over all ranks."""
    torch.manual_seed(0)
    model, mesh = Model(), init_device_mesh("cpu", (dist.get_world_size(),))
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


def by_grid() -> Model:
    """One without values yet: tensor parallel over two ranks each, and cut again over the others."""
    mesh = init_device_mesh("cpu", (dist.get_world_size() // 2, 2), mesh_dim_names=("data", "tensor"))
    with torch.device("meta"):
        model = Model()
    for block in model.blocks:
        parallelize_module(block, mesh["tensor"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
        fully_shard(block, mesh=mesh["data"])
    fully_shard(model, mesh=mesh["data"])
    return model.to_empty(device="cpu")


def train(model: Model) -> float:
    """A few steps towards labels that are made up; gives the last loss."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    generator = torch.Generator().manual_seed(dist.get_rank())
    for _ in range(STEPS):
        x = torch.randn(32, WIDTH, generator=generator)
        labels = x[:, :10].argmax(1)
        loss = nn.functional.cross_entropy(model(x), labels)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return loss.item()


def timed(work: Callable[[], object]) -> float:
    """Milliseconds until all ranks are done."""
    dist.barrier()
    begun = time.perf_counter()
    work()
    dist.barrier()
    return (time.perf_counter() - begun) * 1e3


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("folder", nargs="?", type=Path, default=Path("demo/ranks"))
    folder = parser.parse_args().folder
    dist.init_process_group("gloo")

    def say(text: str) -> None:
        if dist.get_rank() == 0:
            print(text, flush=True)

    model = by_rows()
    say(f"trained {STEPS} steps on {dist.get_world_size()} ranks, loss {train(model):.3f}")

    state = model.state_dict()
    took = timed(lambda: ingot.torch.save_sharded(state, folder, max_shard_size="20MB", overwrite=True))
    files = sorted(path.name for path in folder.iterdir())
    nbytes = sum((folder / name).stat().st_size for name in files)
    say(f"saved {nbytes / 1e6:.0f} MB by all ranks in {took:.0f} ms: {', '.join(files)}")

    again = by_grid()
    took = timed(lambda: ingot.torch.load_into(again, folder))
    say(f"loaded on a mesh of {dist.get_world_size() // 2} × 2 in {took:.0f} ms")

    for name, tensor in again.state_dict().items():
        assert torch.equal(tensor.full_tensor(), state[name].full_tensor()), f"{name}: values differ"
    if dist.get_rank() == 0:
        whole = ingot.torch.load_file(folder)
        assert all(whole[name].shape == tensor.shape for name, tensor in state.items())
    say(f"all {len(state)} tensors are the same on both meshes, and one process reads the files as well")
    # A worker of gloo may still hold the tensors of the last gather, and torch aborts a process that ends
    # before it has let go of them (2.13). Rank 0 comes last, and the others wait here without the GIL.
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
