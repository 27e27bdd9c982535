"""Python's garbage collector rests while many tensors are made, and is then as it was before."""

import gc

import numpy as np
import pytest

import ingot
import ingot.numpy


@pytest.fixture
def path(tmp_path):
    path = tmp_path / "some.safetensors"
    ingot.numpy.save_file({"a": np.zeros(2, np.float32), "b": np.zeros(3, np.float32)}, path)
    return path


def _load_and_note(path, states, fails=False):
    def make(shape, dtype, buffer, at):
        states.append(gc.isenabled())
        if fails:
            raise RuntimeError("no tensor")
        return shape

    wrap = ingot._native.Wrap.buffer(make, str)
    return ingot._native.Archive.open(path).tensors(None, wrap)


def test_it_rests_while_tensors_are_made_and_runs_again_afterwards(path):
    states = []
    assert gc.isenabled()
    assert _load_and_note(path, states) == {"a": (2,), "b": (3,)}
    assert states == [False, False]
    assert gc.isenabled()


def test_it_runs_again_when_a_tensor_cannot_be_made(path):
    with pytest.raises(ingot.DtypeError, match="no tensor"):
        _load_and_note(path, [], fails=True)
    assert gc.isenabled()


def test_it_stays_off_where_the_caller_turned_it_off(path):
    gc.disable()
    try:
        _load_and_note(path, [])
        assert not gc.isenabled()
    finally:
        gc.enable()
