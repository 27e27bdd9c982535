"""Saving whole files."""

from collections.abc import Callable
from pathlib import Path

import bintensors.torch
import safetensors.numpy
import safetensors.torch

import ingot.numpy
import ingot.torch
import pages
import same
from duel import Duel, Samples
from workplace import Workplace, small_tensors

Write = Callable[[Path], object]
Compare = Callable[[Path, Path], None]


def torch_small(full: int):
    return _saving(
        lambda place: small_tensors(place.count(full)), ingot.torch.save_file, safetensors.torch.save_file
    )


def as_new_files(
    place: Workplace,
    name: str,
    ours: Write,
    theirs: Write,
    assert_same: Compare,
    rounds: int,
    touched_nbytes: int = 0,
) -> Samples:
    """Both write a new file in every round.

    Renaming over an old one makes some file systems flush the data first, and the row would time the disk.
    Just before, so much memory is touched and freed, or a large row would time how fast a host finds some for
    the page cache.
    """
    our_path, their_path = (place.directory / f"{who}-{name}" for who in ("ours", "theirs"))

    def clear() -> None:
        our_path.unlink(missing_ok=True)
        their_path.unlink(missing_ok=True)

    def reset() -> None:
        clear()
        if touched_nbytes:
            pages.touch(touched_nbytes)

    def assert_written(_ours: object, _theirs: object) -> None:
        # What the call under the clock wrote is gone by now, so both write once more.
        ours(our_path)
        theirs(their_path)
        assert_same(our_path, their_path)

    try:
        return Duel(lambda: ours(our_path), lambda: theirs(their_path), assert_written, reset).run(rounds)
    finally:
        clear()


def _saving(tensors, ours, theirs, suffix: str = ".safetensors", durable: bool = False):
    def measure(place: Workplace, rounds: int) -> Samples:
        held = tensors(place)
        return as_new_files(
            place,
            f"saved{suffix}",
            lambda path: ours(held, path, durable=durable),
            lambda path: theirs(held, path),
            same.files,
            rounds,
        )

    return measure


def _torch_model(place: Workplace):
    # Cloned, so that the tensors are in memory and are not read from the model's file.
    return {name: tensor.clone() for name, tensor in safetensors.torch.load_file(place.model()).items()}


def _numpy_model(place: Workplace):
    return safetensors.numpy.load_file(place.model())


torch_model = _saving(_torch_model, ingot.torch.save_file, safetensors.torch.save_file)
torch_model_durable = _saving(_torch_model, ingot.torch.save_file, safetensors.torch.save_file, durable=True)
torch_model_bt = _saving(_torch_model, ingot.torch.save_file, bintensors.torch.save_file, ".bt")
numpy_model = _saving(_numpy_model, ingot.numpy.save_file, safetensors.numpy.save_file)
