"""Rules that save a caller's tensors in every way, and saves that fail."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from hypothesis import strategies as st
from hypothesis.stateful import precondition, rule

import ingot
import ingot.numpy
import ingot.torch

from .content import CODES, Model, Tensors
from .drawn import ANY, BACKEND, FILE, FILES, FOLDERS, LAYOUT, METADATA, SPECS
from .folder import Folder, has_any, has_file


class Stopped(Exception):
    """The error of a caller's `progress`."""


def stop(done: int, total: int) -> None:
    raise Stopped


class Saves(Folder):
    """Rules that save."""

    @rule(
        name=FILE,
        specs=SPECS,
        metadata=METADATA,
        layout=LAYOUT,
        way=st.sampled_from(["numpy", "numpy", "torch", "buffers", "stream", "in place"]),
    )
    def save(self, name: str, specs: Any, metadata: Any, layout: Any, way: str) -> None:
        tensors, path = self.made(specs), self.folder / name
        self.save_as(way, tensors, path, metadata, layout)
        self.settle(name, tensors, metadata)

    def save_as(self, way: str, tensors: Tensors, path: Path, metadata: Any, layout: Any) -> None:
        if path.suffix == ".bt":
            layout = {key: value for key, value in layout.items() if key == "checksums"}
        if way == "torch":
            state = {name: torch.from_numpy(array) for name, array in tensors.items()}
            ingot.torch.save_file(state, path, metadata, **layout)
        elif way == "buffers":
            buffers = {
                name: {"dtype": CODES[array.dtype], "shape": array.shape, "data": array.tobytes()}
                for name, array in tensors.items()
            }
            ingot.serialize_file(buffers, path, metadata, **layout)
        elif way == "stream":
            format = "bintensors" if path.suffix == ".bt" else "safetensors"
            self.written_into(path.name, into_data=True)
            with path.open("wb") as file:
                ingot.numpy.save_file(tensors, file, metadata, format=format, **layout)
        else:
            if way == "in place":
                self.written_into(path.name, into_data=True)
            ingot.numpy.save_file(tensors, path, metadata, atomic=way != "in place", **layout)

    @precondition(has_any)
    @rule(number=ANY, name=FILE, backend=BACKEND, way=st.sampled_from(["numpy", "torch", "in place"]))
    def save_what_was_loaded(self, number: int, name: str, backend: str, way: str) -> None:
        """Save loaded arrays, also over their own file, which they may be views of."""
        source = self.pick(number)
        found = ingot.numpy.load_file(self.folder / source, backend=backend)
        model = self.models[source]
        self.save_as(way, found, self.folder / name, {"k": "loaded"}, {})
        self.settle(name, model.tensors, {"k": "loaded"})

    @rule(
        name=FILE,
        turns=st.lists(SPECS, min_size=1, max_size=3),
        snapshot=st.sampled_from([True, False, "device"]),
        layout=LAYOUT,
    )
    def save_in_the_background(self, name: str, turns: Any, snapshot: Any, layout: Any) -> None:
        """Start several saves; the last one stays. The tensors change as soon as each save allows it."""
        futures, path = [], self.folder / name
        if path.suffix == ".bt":
            layout = {}
        for turn, specs in enumerate(turns):
            tensors = self.made(specs)
            live = {key: torch.from_numpy(array.copy()) for key, array in tensors.items()}
            pairs = {"step": str(turn)}
            rare = {**layout.get("write_options", {}), "snapshot": snapshot}
            future = ingot.torch.save_file(
                live, path, pairs, background=True, **{**layout, "write_options": rare}
            )
            assert future is not None
            if snapshot is False:
                future.staged.result()
            for tensor in live.values():
                tensor.zero_()
            futures.append(future)
            self.models[name] = Model(tensors, pairs)
        for future in futures:
            future.result()
        self.check(name)

    @rule(name=st.sampled_from(sorted(FOLDERS)), specs=SPECS, size=st.sampled_from([1, 5000, "1MB"]))
    def save_sharded(self, name: str, specs: Any, size: Any) -> None:
        tensors = self.made(specs)
        state = {key: torch.from_numpy(array) for key, array in tensors.items()}
        path = self.folder / name
        self.written_into(name, into_data=False)
        ingot.torch.save_sharded(state, path, size, filename_pattern=FOLDERS[name], overwrite=True)
        self.settle(name, tensors, None)

    @precondition(has_file)
    @rule(number=ANY, way=st.sampled_from(["stopped", "stopped merge", "unknown dtype", "reserved", "there"]))
    def fail(self, number: int, way: str) -> None:
        name = self.pick(number, FILES)
        path, tensors = self.folder / name, self.made({"a": ("u1", (70_000,))})
        if way == "stopped":
            with pytest.raises(Stopped):
                ingot.numpy.save_file(tensors, path, progress=stop)
        elif way == "stopped merge":
            with pytest.raises(Stopped):
                ingot.merge([path], path, overwrite=True, progress=stop)
        elif way == "unknown dtype":
            with pytest.raises(TypeError):
                ingot.numpy.save_file({**tensors, "b": numpy.array([None])}, path)
        elif way == "reserved":
            with pytest.raises(ingot.SaveError):
                ingot.numpy.save_file({"__metadata__": tensors["a"]}, path, format="safetensors")
        else:
            with pytest.raises(FileExistsError):
                ingot.merge([path], path)
        self.check(name)
