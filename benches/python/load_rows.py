"""Loading whole files."""

import bintensors.torch
import numpy as np
import safetensors.numpy
import safetensors.torch

import ingot.numpy
import ingot.torch
import same
from duel import Duel, Samples
from ingot.compat.safetensors import torch as compat
from workplace import Workplace


def torch_small(full: int):
    return _torch(lambda place: place.small_torch(full))


def numpy_small(full: int):
    return _numpy(lambda place: place.small_numpy(full))


def _torch(file, peer=safetensors.torch.load_file):
    def measure(place: Workplace, rounds: int) -> Samples:
        path = file(place)
        return Duel(lambda: ingot.torch.load_file(path), lambda: peer(path), same.tensors).run(rounds)

    return measure


def _numpy(file, **options: str):
    def measure(place: Workplace, rounds: int) -> Samples:
        path = file(place)
        return Duel(
            lambda: ingot.numpy.load_file(path, **options),
            lambda: safetensors.numpy.load_file(path),
            same.arrays,
        ).run(rounds)

    return measure


def through_compat(full: int):
    """What programs call that import safetensors, against what they would call in ingot."""

    def measure(place: Workplace, rounds: int) -> Samples:
        path = place.small_vectors(full)
        return Duel(lambda: compat.load_file(path), lambda: ingot.torch.load_file(path), same.tensors).run(
            rounds
        )

    return measure


torch_model = _torch(Workplace.model)
torch_model_bt = _torch(Workplace.model_bt, bintensors.torch.load_file)
numpy_model = _numpy(Workplace.model)
numpy_large = _numpy(Workplace.one_gib)
numpy_large_owned = _numpy(Workplace.one_gib, backend="pread")


def numpy_large_touched(place: Workplace, rounds: int) -> Samples:
    """A mapped file costs nothing until it is read, so here both read it all."""
    path = place.one_gib()

    def total(load) -> dict[str, np.ndarray]:
        return {name: array.view(np.uint64).sum() for name, array in load(path).items()}

    def assert_same(ours, theirs) -> None:
        assert ours == theirs, "the sums differ"

    return Duel(
        lambda: total(ingot.numpy.load_file), lambda: total(safetensors.numpy.load_file), assert_same
    ).run(rounds)
