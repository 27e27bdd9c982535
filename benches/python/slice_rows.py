"""Reading a part of one tensor."""

import safetensors
import torch

import ingot
import same
from duel import Duel, Samples
from workplace import Workplace


def rows(place: Workplace, rounds: int) -> Samples:
    return _part(place, rounds, (slice(100, 164),))


def columns(place: Workplace, rounds: int) -> Samples:
    return _part(place, rounds, (slice(None), slice(100, 164)))


def _part(place: Workplace, rounds: int, index: tuple[slice, ...]) -> Samples:
    path = place.one_gib()

    def read(opener) -> torch.Tensor:
        with opener(path, framework="pt") as file:
            # Cloned, since a view of the mapping would not have read anything yet.
            return file.get_slice("layers.3.weight")[index].clone(memory_format=torch.contiguous_format)

    return Duel(lambda: read(ingot.safe_open), lambda: read(safetensors.safe_open), same.tensor_).run(rounds)
