"""Files and open handles under any order of everything that writes files, held against dicts.

`Files` is a state machine of hypothesis. Its model of a file is a dict of arrays, all of which are numbered,
so that bytes of one save tell from those of any other. Its model of an open handle is that of the file that
was opened: whatever is done to the file since, the handle gives those bytes or says that it was changed.
"""

from __future__ import annotations

import json
import math
import os
import pickle
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any, ClassVar

import numpy
import pytest
import torch
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

import ingot
import ingot.numpy
import ingot.torch

Array = numpy.ndarray[Any, numpy.dtype[Any]]
Tensors = dict[str, Array]

# By their codes in a header. bintensors has all of them too.
DTYPES = {"U8": "u1", "I16": "<i2", "F16": "<f2", "F32": "<f4", "F64": "<f8", "I64": "<i8", "BOOL": "?"}
CODES = {numpy.dtype(dtype): code for code, dtype in DTYPES.items()}
# The last takes many pages.
SHAPES = [(), (0,), (3,), (2, 3), (5, 1, 2), (40, 50), (70_000,)]
NAMES = ["a", "b", "c.weight", 'quo"te', "ö"]
FILES = ["a.safetensors", "b.safetensors", "c.bt"]
# Each has files of one pattern: others would stay beside them.
FOLDERS = {"s": "model{suffix}.safetensors", "t": "model{suffix}.bt"}
MOST_HANDLES = 6
# What a handle says of a file that was written to. A checkpoint opens its files when it needs them, and by
# then there may be none of that name, or one with other tensors.
CHANGED = (ingot.StorageError, ingot.CheckpointError, FileNotFoundError)


def numbered(number: int, dtype: str, shape: Sequence[int]) -> Array:
    """An array that hardly any other number gives, nor any other place in it."""
    values = (numpy.arange(math.prod(shape)) * 7 + number * 13) % 113
    return values.astype(dtype).reshape(shape)


SPECS = st.dictionaries(
    st.sampled_from(NAMES),
    st.tuples(st.sampled_from(sorted(DTYPES.values())), st.sampled_from(SHAPES)),
    max_size=4,
)
TEXTS = st.sampled_from(["", "x", "ü" * 30, "long" * 700])
METADATA = st.dictionaries(st.sampled_from(["k", "step", "ö"]), TEXTS, max_size=2)
LAYOUT = st.fixed_dictionaries(
    {},
    optional={
        "checksums": st.sampled_from([True, "xxh3", ["sha256", "modelspec"]]),
        "reserve_header": st.sampled_from([0, 100, 5000]),
        "align": st.sampled_from([8, 64, 4096]),
    },
)
# One of what there is, by its number modulo how many there are.
ANY = st.integers(0, 59)
FILE = st.sampled_from(FILES)
BACKEND = st.sampled_from(["auto", "mmap", "pread"])


@dataclass(frozen=True)
class Model:
    """What a file, or a checkpoint in a folder, has to hold. Nothing in it changes."""

    tensors: Tensors
    #: None where it is spread over an index and its files.
    metadata: dict[str, str] | None


@dataclass
class Held:
    """An open handle, and the file that it was opened on."""

    handle: ingot.safe_open[Any]
    model: Model
    #: The number of the file, or of the folder, on its disk.
    inode: int
    #: Whether that file, and none in its place, was written to since; or anything in that folder.
    is_written: bool = False
    #: What it gave, and what that has to be for ever.
    given: list[tuple[Array, Array]] = field(default_factory=list)

    def check(self, found: Tensors, expected: Tensors) -> None:
        assert_same(found, expected)
        self.given += [(found[name], expected[name]) for name in found]
        del self.given[:-20]


def assert_same(found: Tensors, expected: Tensors) -> None:
    assert found.keys() == expected.keys()
    for name, array in expected.items():
        assert (found[name].dtype, found[name].shape) == (array.dtype, array.shape), name
        assert found[name].tobytes() == array.tobytes(), name


def texts(metadata: dict[str, Any] | None) -> dict[str, str]:
    """What a caller stored, without what ingot keeps of the tensors."""
    return {
        key: text for key, text in (metadata or {}).items() if not key.startswith(("ingot.", "modelspec."))
    }


def read_plainly(path: Path) -> Model:
    """A file of safetensors, by nothing of ingot's."""
    data = path.read_bytes()
    start = 8 + int.from_bytes(data[:8], "little")
    header = json.loads(data[8:start])
    metadata = texts(header.pop("__metadata__", {}))
    tensors = {}
    for name, entry in header.items():
        begin, end = entry["data_offsets"]
        array = numpy.frombuffer(data[start + begin : start + end], DTYPES[entry["dtype"]])
        tensors[name] = array.reshape(entry["shape"])
    return Model(tensors, metadata)


HELPER = """
import machine
for line in sys.stdin:
    path, writes, commits = json.loads(line)
    with ingot.Writer.join(path) as guest:
        for name, number, dtype, shape, begin, end in writes:
            guest.write(name, machine.numbered(number, dtype, shape)[begin:end], slice(begin, end))
        if commits:
            guest.commit()
    say("done")
"""


class Helper:
    """A process that joins writers, again and again."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self.process = process

    def write(self, path: Path, writes: list[Any], commits: bool) -> None:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(json.dumps([str(path), writes, commits]) + "\n")
        self.process.stdin.flush()
        assert self.process.stdout.readline() == '"done"\n'


@contextmanager
def helpers(count: int) -> Iterator[list[Helper]]:
    from support.processes import PRELUDE

    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-c", PRELUDE + HELPER]
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    processes = [subprocess.Popen(command, env=environment, **pipes) for _ in range(count)]
    try:
        yield [Helper(process) for process in processes]
    finally:
        for process in processes:
            process.communicate()


class Stopped(Exception):
    """What a caller's `progress` raises."""


def stop(done: int, total: int) -> None:
    raise Stopped


class Files(RuleBasedStateMachine):
    """A folder with a few files and checkpoints in it, and handles that are open on what was there."""

    root: ClassVar[Path]
    helpers: ClassVar[Sequence[Helper]]
    #: Of all machines.
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

    def teardown(self) -> None:
        try:
            for held in self.held:
                self.read_or_be_told("all", held)
                self.let_go(held)
        finally:
            shutil.rmtree(self.folder)

    # --- what there is to choose from ---

    def pick(self, number: int, names: Sequence[str] = (*FILES, *FOLDERS)) -> str:
        there = [name for name in names if name in self.models]
        return there[number % len(there)]

    def made(self, specs: dict[str, tuple[str, tuple[int, ...]]]) -> Tensors:
        tensors = {}
        for name, (dtype, shape) in specs.items():
            self.number += 1
            tensors[name] = numbered(self.number, dtype, shape)
        return tensors

    def has_any(self) -> bool:
        return bool(self.models)

    def has_file(self) -> bool:
        return any(name in self.models for name in FILES)

    def has_held(self) -> bool:
        return bool(self.held)

    def settle(self, name: str, tensors: Tensors, metadata: dict[str, str] | None) -> None:
        """`name` was written, and holds this."""
        self.models[name] = Model(tensors, metadata)
        self.check(name)

    def check(self, name: str) -> None:
        model, path = self.models[name], self.folder / name
        if name.endswith(".safetensors"):
            found = read_plainly(path)
        else:
            found = Model(ingot.numpy.load_file(path, backend="pread"), texts(ingot.read_metadata(path)))
        assert_same(found.tensors, model.tensors)
        if model.metadata is not None:
            assert found.metadata == model.metadata

    def written_into(self, name: str, *, into_data: bool) -> None:
        """The file `name` is about to be written to, where it stands; or files in that folder replaced."""
        path = self.folder / name
        inode = path.stat().st_ino if path.exists() else None
        for held in self.held:
            if held.inode == inode:
                held.is_written = True
                if into_data:
                    # Views of the mapping show what is written: SECURITY.md, "What is not promised".
                    held.given.clear()

    # --- what writes ---

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
        """Over its own file too, of which the arrays may be views."""
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
        """Several at once, of which the last stays; what they save changes at once, or when it may."""
        futures, path = [], self.folder / name
        if path.suffix == ".bt":
            layout = {}
        for turn, specs in enumerate(turns):
            tensors = self.made(specs)
            live = {key: torch.from_numpy(array.copy()) for key, array in tensors.items()}
            pairs = {"step": str(turn)}
            future = ingot.torch.save_file(live, path, pairs, background=True, snapshot=snapshot, **layout)
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
    @rule(
        number=ANY,
        pairs=METADATA,
        gone=st.sampled_from([[], ["k"], ["step", "nope"]]),
        in_place=st.booleans(),
    )
    def update_metadata(self, number: int, pairs: Any, gone: list[str], in_place: bool) -> None:
        name = self.pick(number, FILES)
        model = self.models[name]
        assert model.metadata is not None
        before = (self.folder / name).stat().st_ino
        done = ingot.update_metadata(self.folder / name, pairs, gone, in_place=in_place)
        assert done != "in-place" or in_place
        assert ((self.folder / name).stat().st_ino == before) == (done != "rewritten")
        if done == "in-place":
            self.written_into(name, into_data=False)
        left = {key: text for key, text in (model.metadata | pairs).items() if key not in gone}
        assert done != "unchanged" or left == model.metadata
        self.settle(name, model.tensors, left)

    @precondition(has_file)
    @rule(number=ANY, which=ANY)
    def replace_tensor(self, number: int, which: int) -> None:
        name = self.pick(number, FILES)
        model = self.models[name]
        if model.tensors:
            key = sorted(model.tensors)[which % len(model.tensors)]
            old = model.tensors[key]
            tensors = self.made({key: (old.dtype.str, old.shape)})
            ingot.replace_tensor(self.folder / name, key, tensors[key])
            self.settle(name, model.tensors | tensors, model.metadata)

    @precondition(has_any)
    @rule(
        number=ANY,
        name=FILE,
        kept=st.sets(st.sampled_from(NAMES)),
        turned=st.booleans(),
        layout=LAYOUT,
    )
    def rewrite(self, number: int, name: str, kept: set[str], turned: bool, layout: Any) -> None:
        source = self.pick(number)
        model = self.models[source]
        new = dict(zip(NAMES, NAMES[1:] + NAMES[:1], strict=True)) if turned else {}
        options = {key: value for key, value in layout.items() if key != "checksums" and name != "c.bt"}
        if model.metadata is None:
            options["metadata"] = {"k": "rewritten"}
        ingot.rewrite(
            self.folder / source,
            self.folder / name,
            rename=lambda key: new.get(key, key),
            keep=lambda key: key in kept,
            overwrite=True,
            **options,
        )
        tensors = {new.get(key, key): array for key, array in model.tensors.items() if key in kept}
        self.settle(name, tensors, options.get("metadata", model.metadata))

    @precondition(has_any)
    @rule(
        numbers=st.lists(ANY, max_size=3),
        name=FILE,
        wins=st.sampled_from(["first", "last", "error"]),
        says=st.booleans(),
    )
    def merge(self, numbers: list[int], name: str, wins: Any, says: bool) -> None:
        sources = [self.pick(number) for number in numbers]
        models = [self.models[source] for source in sources]
        options: dict[str, Any] = {"overwrite": True, "on_duplicate": wins}
        if says or any(model.metadata is None for model in models):
            options["metadata"] = {"k": "merged"}

        def call() -> None:
            ingot.merge([self.folder / source for source in sources], self.folder / name, **options)

        pairs = [pair for model in models for pair in (model.metadata or {}).items()]
        tensors: Tensors = {}
        for model in models if wins == "last" else reversed(models):
            tensors |= model.tensors
        twice = wins == "error" and len(tensors) < sum(len(model.tensors) for model in models)
        at_odds = "metadata" not in options and len(set(pairs)) > len(dict(pairs))
        if twice or at_odds:
            self.refused(["duplicate-tensor"] * twice + ["metadata-conflict"] * at_odds, call, name)
        else:
            call()
            self.settle(name, tensors, options.get("metadata", dict(pairs)))

    @precondition(has_any)
    @rule(number=ANY, name=st.sampled_from(sorted(FOLDERS)), size=st.sampled_from([1, 5000, "1MB"]))
    def split(self, number: int, name: str, size: Any) -> None:
        source = self.pick(number)
        tensors, path = self.models[source].tensors, self.folder / name
        self.written_into(name, into_data=False)
        ingot.split(self.folder / source, path, size, filename_pattern=FOLDERS[name], overwrite=True)
        self.settle(name, tensors, None)

    @precondition(has_file)
    @rule(number=ANY, name=FILE, dtype=st.sampled_from([None, "F32", "F16"]), verify=st.booleans())
    def convert(self, number: int, name: str, dtype: str | None, verify: bool) -> None:
        source = self.pick(number, FILES)
        model = self.models[source]
        if not model.tensors:
            return
        ingot.convert(
            self.folder / source,
            self.folder / name,
            source_format="bintensors" if source == "c.bt" else "safetensors",
            dtype=dtype,
            verify=verify,
            overwrite=True,
        )
        tensors = {
            key: array.astype(DTYPES[dtype]) if dtype and array.dtype.kind == "f" else array
            for key, array in model.tensors.items()
        }
        self.settle(name, tensors, model.metadata)

    @rule(
        name=FILE, specs=SPECS, ends=st.sampled_from(["commit", "guest commits", "abandon", "abandon half"])
    )
    def write_by_several_processes(self, name: str, specs: Any, ends: str) -> None:
        tensors, path, first = self.made(specs), self.folder / name, self.number - len(specs) + 1
        shares: list[list[Any]] = [[] for _ in range(len(self.helpers) + 1)]
        for number, (key, array) in enumerate(tensors.items(), start=first):
            if array.ndim == 0:
                continue
            borders = [len(array) * part // len(shares) for part in range(len(shares) + 1)]
            for share, (begin, end) in zip(shares, pairwise(borders), strict=True):
                share.append((key, number, array.dtype.str, array.shape, begin, end))
        with ingot.Writer(path, tensors, {"k": "written"}) as writer:
            for helper, share in zip(self.helpers, shares, strict=False):
                helper.write(path, share, commits=False)
                if ends == "abandon half":
                    break
            else:
                for key, *_, begin, end in shares[-1]:
                    writer.write(key, tensors[key][begin:end], slice(begin, end))
                for key, array in tensors.items():
                    if array.ndim == 0:
                        writer.write(key, array)
            if ends == "commit":
                writer.commit()
            elif ends == "guest commits":
                self.helpers[0].write(path, [], commits=True)
        if "commit" in ends:
            self.settle(name, tensors, {"k": "written"})
        elif name in self.models:
            self.check(name)

    @rule(name=st.sampled_from(FILES[:2]), specs=SPECS, commits=st.booleans())
    def append(self, name: str, specs: Any, commits: bool) -> None:
        tensors = self.made(specs)
        with ingot.Writer(self.folder / name, metadata={"k": "appended"}, reserve=1000) as writer:
            for key, array in tensors.items():
                writer.write(key, array)
            if commits:
                writer.commit()
        if commits:
            self.settle(name, tensors, {"k": "appended"})
        elif name in self.models:
            self.check(name)

    @precondition(has_file)
    @rule(number=ANY, name=st.sampled_from(FILES[:2]), gone=st.booleans())
    def move(self, number: int, name: str, gone: bool) -> None:
        """What others do to files."""
        source = self.pick(number, FILES[:2]) if self.models.keys() & set(FILES[:2]) else None
        if source is None:
            return
        if gone:
            (self.folder / source).unlink()
            del self.models[source]
        else:
            (self.folder / source).replace(self.folder / name)
            self.settle(name, *vars(self.models.pop(source)).values())

    # --- what must not write ---

    def refused(self, codes: list[str], call: Callable[[], object], name: str) -> None:
        with pytest.raises(ingot.SafetensorError) as caught:
            call()
        assert caught.value.code in codes
        if name in self.models:
            self.check(name)

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

    # --- what reads ---

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
            self.let_go(self.held.pop(0))

    @precondition(has_held)
    @rule(which=ANY)
    def close(self, which: int) -> None:
        self.let_go(self.held.pop(which % len(self.held)))

    def let_go(self, held: Held) -> None:
        held.handle.close()
        with pytest.raises(ingot.ClosedError):
            held.handle.keys()
        for found, expected in held.given:
            assert found.tobytes() == expected.tobytes()

    @precondition(has_held)
    @rule(which=ANY, way=st.sampled_from(["all", "one by one", "rows", "iterated", "fetched", "header"]))
    def read(self, which: int, way: str) -> None:
        """What was opened, or that it was changed."""
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
            held.check(dict(handle.iter_tensors()), tensors)
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
            report = ingot.verify(path)
            assert not [one for one in (report.shards or {"": report}).values() if one.bad or one.missing]
        assert_same(ingot.numpy.load_file(path, **options), tensors)

    @invariant()
    def nothing_else_is_there(self) -> None:
        type(self).steps += 1
        assert set(os.listdir(self.folder)) == self.models.keys()
