"""The folder of one machine: its files, their expected contents, and the open handles."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import pytest
from hypothesis.stateful import RuleBasedStateMachine, invariant

import ingot
import ingot.numpy

from .content import Array, Model, Tensors, assert_same, numbered, read_plainly, texts
from .drawn import FILES, FOLDERS


@dataclass
class Held:
    """An open handle, and the file that it was opened on."""

    handle: ingot.safe_open[Any]
    model: Model
    #: The inode of the file or of the folder.
    inode: int
    #: Whether the opened file itself was written to since, or any file of the opened folder.
    is_written: bool = False
    #: Arrays that the handle returned, with their expected values, which never change.
    given: list[tuple[Array, Array]] = field(default_factory=list)

    def check(self, found: Tensors, expected: Tensors) -> None:
        assert_same(found, expected)
        self.given += [(found[name], expected[name]) for name in found]
        del self.given[:-20]


class Folder(RuleBasedStateMachine):
    """State of the folder for all rules."""

    root: ClassVar[Path]
    #: Counters over all machines.
    steps: ClassVar[int] = 0
    machines: ClassVar[int] = 0

    def __init__(self) -> None:
        super().__init__()
        type(self).machines += 1
        # The invariants hold before the first step too.
        type(self).steps -= 1
        self.folder = self.root / str(self.machines)
        self.folder.mkdir()
        self.number = 0
        self.models: dict[str, Model] = {}
        self.held: list[Held] = []

    # --- choices ---

    def pick(self, number: int, names: Sequence[str] = (*FILES, *FOLDERS)) -> str:
        there = [name for name in names if name in self.models]
        return there[number % len(there)]

    def made(self, specs: dict[str, tuple[str, tuple[int, ...]]]) -> Tensors:
        tensors = {}
        for name, (dtype, shape) in specs.items():
            self.number += 1
            tensors[name] = numbered(self.number, dtype, shape)
        return tensors

    def settle(self, name: str, tensors: Tensors, metadata: dict[str, str] | None) -> None:
        """Record that `name` was written with these contents, and check it."""
        self.models[name] = Model(tensors, metadata)
        self.check(name)

    def check(self, name: str) -> None:
        model, path = self.models[name], self.folder / name
        if name.endswith(".safetensors"):
            found = read_plainly(path)
        else:
            found = Model(ingot.numpy.load_file(path, backend="pread"), texts(ingot.inspect(path).metadata))
        assert_same(found.tensors, model.tensors)
        if model.metadata is not None:
            assert found.metadata == model.metadata

    def written_into(self, name: str, *, into_data: bool) -> None:
        """Record that `name` will be written in place or, if a folder, that its files will be replaced."""
        path = self.folder / name
        inode = path.stat().st_ino if path.exists() else None
        for held in self.held:
            if held.inode == inode:
                held.is_written = True
                if into_data:
                    # Views of the mapping show later writes: see SECURITY.md, "What is not promised".
                    held.given.clear()

    def refused(self, codes: list[str], call: Callable[[], object], name: str) -> None:
        with pytest.raises(ingot.SafetensorError) as caught:
            call()
        assert caught.value.code in codes
        if name in self.models:
            self.check(name)

    @invariant()
    def nothing_else_is_there(self) -> None:
        type(self).steps += 1
        assert set(os.listdir(self.folder)) == self.models.keys()


def has_any(machine: Folder) -> bool:
    return bool(machine.models)


def has_file(machine: Folder) -> bool:
    return any(name in machine.models for name in FILES)


def has_held(machine: Folder) -> bool:
    return bool(machine.held)
