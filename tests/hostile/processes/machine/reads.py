"""Rules that open, read and load, also through handles on changed files."""

from __future__ import annotations

import pickle
import shutil
from typing import Any

import numpy
import pytest
from hypothesis import strategies as st
from hypothesis.stateful import precondition, rule

import ingot
import ingot.numpy

from .content import assert_same, texts
from .drawn import ANY, BACKEND
from .folder import Folder, Held, has_any, has_held

MOST_HANDLES = 6
# The errors of a handle whose file was written to. A checkpoint opens its files when it needs them. By then a
# file may be missing, or have other tensors.
CHANGED = (ingot.StorageError, ingot.CheckpointError, FileNotFoundError)


class Reads(Folder):
    """Rules that read, while and after others write."""

    def teardown(self) -> None:
        try:
            for held in self.held:
                self.read_or_be_told("all", held)
                self.release(held)
        finally:
            shutil.rmtree(self.folder)

    @precondition(has_any)
    @rule(number=ANY, backend=BACKEND, pickled=st.booleans())
    def open(self, number: int, backend: str, pickled: bool) -> None:
        name = self.pick(number)
        path = self.folder / name
        handle = ingot.safe_open(path, "np", backend=backend)
        if pickled:
            handle = pickle.loads(pickle.dumps(handle))
        self.held.append(Held(handle, self.models[name], path.stat().st_ino))
        if len(self.held) > MOST_HANDLES:
            self.release(self.held.pop(0))

    @precondition(has_held)
    @rule(which=ANY)
    def close(self, which: int) -> None:
        self.release(self.held.pop(which % len(self.held)))

    def release(self, held: Held) -> None:
        held.handle.close()
        with pytest.raises(ingot.ClosedError):
            held.handle.keys()
        for found, expected in held.given:
            assert found.tobytes() == expected.tobytes()

    @precondition(has_held)
    @rule(which=ANY, way=st.sampled_from(["all", "one by one", "rows", "iterated", "fetched", "header"]))
    def read(self, which: int, way: str) -> None:
        """Check that the handle returns the opened file, or reports a change."""
        held = self.held[which % len(self.held)]
        self.read_or_be_told(way, held)
        for found, expected in held.given:
            assert found.tobytes() == expected.tobytes()

    def read_or_be_told(self, way: str, held: Held) -> None:
        try:
            self.read_as(way, held)
        except CHANGED:
            if not held.is_written:
                raise

    def read_as(self, way: str, held: Held) -> None:
        handle, tensors = held.handle, held.model.tensors
        if way == "all":
            held.check(handle.get_tensors(), tensors)
        elif way == "one by one":
            for name in tensors:
                held.check({name: handle[name]}, {name: tensors[name]})
        elif way == "rows":
            for name, array in tensors.items():
                if array.ndim:
                    held.check({name: handle.get_slice(name)[1:3]}, {name: array[1:3]})
        elif way == "iterated":
            held.check(dict(handle.prefetch()), tensors)
        elif way == "fetched":
            with handle.prefetch() as loader:
                held.check({name: loader.take(name) for name in tensors}, tensors)
        else:
            assert handle.keys() == sorted(tensors)
            if held.model.metadata is not None:
                assert texts(handle.metadata()) == held.model.metadata
            for name, array in tensors.items():
                assert tuple(handle.info(name).shape) == array.shape

    @precondition(has_any)
    @rule(number=ANY, backend=BACKEND, way=st.sampled_from(["some", "rows", "into", "cast", "verified"]))
    def load(self, number: int, backend: str, way: str) -> None:
        name = self.pick(number)
        path, tensors = self.folder / name, self.models[name].tensors
        options: dict[str, Any] = {"backend": backend}
        if way == "some":
            tensors = dict(sorted(tensors.items())[::2])
            options["keys"] = list(tensors)
        elif way == "rows":
            options["slices"] = {key: slice(-2, None) for key, array in tensors.items() if array.ndim}
            tensors = {key: array[-2:] if array.ndim else array for key, array in tensors.items()}
        elif way == "into":
            options["out"] = {key: numpy.empty_like(array) for key, array in tensors.items()}
        elif way == "cast":
            options["dtype"] = "F32"
            tensors = {
                key: array.astype("<f4") if array.dtype.kind == "f" else array
                for key, array in tensors.items()
            }
        else:
            report = ingot.verify(path, raises=False)
            assert not [one for one in (report.shards or {"": report}).values() if one.bad or one.missing]
        assert_same(ingot.numpy.load_file(path, **options), tensors)
