"""Opening a file and listing its tensors."""

import bintensors
import safetensors

import ingot
import same
from duel import Duel, Samples
from workplace import Workplace


def names_of_safetensors(full: int):
    def measure(place: Workplace, rounds: int) -> Samples:
        path = place.small_torch(full)
        return _duel(path, safetensors.safe_open).run(rounds)

    return measure


def names_of_bintensors(full: int):
    def measure(place: Workplace, rounds: int) -> Samples:
        path = place.small_bt(full)
        return _duel(path, bintensors.safe_open).run(rounds)

    return measure


def _duel(path, peer) -> Duel:
    return Duel(lambda: _names(ingot.safe_open, path), lambda: _names(peer, path), same.names)


def _names(opener, path) -> list[str]:
    with opener(path, framework="pt") as file:
        return list(file.keys())
