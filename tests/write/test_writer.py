"""Files that are filled tensor by tensor. The wheel of safetensors reads every result."""

from __future__ import annotations

import pickle
import random
import threading
from collections.abc import Callable
from contextlib import closing, nullcontext
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy
import pytest
import safetensors.numpy
import safetensors.torch
import torch

import ingot
import ingot.numpy
import ingot.torch
from support.errors import raises
from support.processes import run


def tensors() -> dict[str, torch.Tensor]:
    return {
        "matrix": torch.arange(600.0).reshape(20, 30),
        "half": torch.arange(30, dtype=torch.bfloat16),
        "mask": torch.tensor([True, False, True]),
        "step": torch.tensor(7),
        "nothing": torch.zeros(0, 4),
    }


SPECS = {
    "matrix": ("F32", [20, 30]),
    "half": (torch.bfloat16, (30,)),
    "mask": (numpy.dtype(bool), torch.Size([3])),
    "step": torch.tensor(0, device="meta"),
    "nothing": ("float32", [0, 4]),
}


def fill(writer: ingot.Writer, *but: str) -> None:
    for name, tensor in tensors().items():
        if name not in but:
            writer.write(name, tensor)


def names_in(folder: Path) -> list[str]:
    return sorted(file.name for file in folder.iterdir())


@pytest.mark.parametrize("suffix", [".safetensors", ".bt"])
def test_writer_equals_save_file(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"t{suffix}"
    with ingot.Writer(path, SPECS, {"k": "v"}, durable=True, overwrite=True) as writer:
        matrix = tensors()["matrix"]
        fill(writer, "matrix")
        writer.write("matrix", matrix[10:, ::2].numpy(), (slice(10, None), slice(None, None, 2)))
        writer.write("matrix", matrix[10:, 1::2], (slice(10, None), slice(1, None, 2)))
        writer.write("matrix", matrix[[3, 1, 2, 0]], [3, 1, 2, 0])
        writer.write("matrix", matrix[4:10], slice(-16, -10))
        assert not path.exists()
        writer.commit()
    ingot.torch.save_file(tensors(), tmp_path / f"saved{suffix}", {"k": "v"})
    assert path.read_bytes() == (tmp_path / f"saved{suffix}").read_bytes()
    assert names_in(tmp_path) == sorted([f"t{suffix}", f"saved{suffix}"])


def test_writer_reserves_and_aligns_like_save_file(tmp_path: Path) -> None:
    options: dict[str, Any] = {"write_options": {"reserve_header": 300, "align": 4096}}
    with ingot.Writer(tmp_path / "t.safetensors", SPECS, **options, overwrite=True) as writer:
        fill(writer)
        writer.commit()
    ingot.torch.save_file(tensors(), tmp_path / "saved.safetensors", **options)
    assert (tmp_path / "t.safetensors").read_bytes() == (tmp_path / "saved.safetensors").read_bytes()


def test_writer_takes_specs_in_every_form(tmp_path: Path) -> None:
    source = tmp_path / "source.safetensors"
    arrays = {
        "bf16": numpy.zeros(4, ml_dtypes.bfloat16),
        "f4": numpy.zeros((2, 4), ml_dtypes.float4_e2m1fn),
        "u2": numpy.zeros((3, 1), numpy.uint16),
    }
    ingot.numpy.save_file(arrays, source)
    with ingot.safe_open(source, "np") as file:
        by_info = {name: file.info(name) for name in file}
    by_class = {"bf16": (ml_dtypes.bfloat16, [4]), "f4": ("F4", [2, 4]), "u2": (numpy.uint16, (3, 1))}
    packed = {**by_class, "f4": (torch.float4_e2m1fn_x2, [2, 2])}
    for specs in (arrays, by_info, by_class, packed):
        with ingot.Writer(tmp_path / "t", specs, overwrite=True) as writer:
            for name, array in arrays.items():
                writer.write(name, array)
            writer.commit()
        assert (tmp_path / "t").read_bytes() == source.read_bytes()


@pytest.mark.parametrize(
    ("specs", "kind"),
    [
        ({"a": ("F33", [1])}, ingot.SaveError),
        ({"a": ("F32", [2**63])}, ingot.SaveError),
        ({"__metadata__": ("F32", [1])}, ingot.SaveError),
        ({"a": ("F32", [-1, 64])}, ingot.SaveError),
        ({"a": ("F32", [2**70])}, ingot.SaveError),
        ({"a": ("F32", [1.5])}, TypeError),
        ({"a": ("F32", "12")}, TypeError),
        ({"a": "F32"}, TypeError),
        ({3: ("F32", [1])}, TypeError),
        (["a"], TypeError),
    ],
)
def test_writer_rejects_invalid_specs(tmp_path: Path, specs: Any, kind: Any) -> None:
    with pytest.raises(kind):
        ingot.Writer(tmp_path / "t", specs, overwrite=True)
    assert names_in(tmp_path) == []


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        ({}, "specs-or-reserve"),
        ({"write_options": {"reserve_header": 100}, "format": "bintensors"}, "no-room"),
        ({"write_options": {"reserve_header": 100}, "aliases": {"b": "a"}}, "specs-or-reserve"),
        ({"write_options": {"reserve_header": 100, "align": 64}}, "specs-or-reserve"),
    ],
)
def test_writer_without_specs_needs_room(arguments: dict[str, Any], code: str, tmp_path: Path) -> None:
    with raises(ingot.OptionError, code=code):
        ingot.Writer(tmp_path / "t", **arguments, overwrite=True)
    assert names_in(tmp_path) == []


def test_writer_names_missing_and_repeated_tensors(tmp_path: Path) -> None:
    path = tmp_path / "t.safetensors"
    path.write_bytes(b"old")
    with ingot.Writer(path, SPECS, overwrite=True) as writer:
        fill(writer, "matrix", "half")
        writer.write("half", tensors()["half"][:10], slice(10))
        refused: list[tuple[Callable[[], object], str, str]] = [
            (writer.commit, "never-filled", "matrix"),
            (lambda: writer.write("half", tensors()["half"][9:11], slice(9, 11)), "filled-twice", "half"),
            (lambda: writer.write("mask", tensors()["mask"]), "filled-twice", "mask"),
            (lambda: writer.write("matrix", torch.zeros(30, 20)), "mismatch", "matrix"),
            (lambda: writer.write("matrix", torch.zeros(20, 30).double()), "mismatch", "matrix"),
            (lambda: writer.write("matrix", torch.zeros(1, 30), 0), "mismatch", "matrix"),
        ]
        for attempt, code, name in refused:
            with raises(ingot.SaveError, f"`{name}`", code=code, tensor=name):
                attempt()
        with pytest.raises(ingot.TensorNotFoundError):
            writer.write("other", torch.zeros(1))
        with pytest.raises(ingot.SliceError):
            writer.write("matrix", torch.zeros(30), 20)
        with pytest.raises(TypeError, match="`matrix`"):
            writer.write("matrix", torch.zeros(20, 30), torch.zeros(20) > 1)
        writer.write("matrix", tensors()["matrix"])
        with raises(ingot.SaveError, "`half`", code="partly-filled", expected=60, found=20):
            writer.commit()
        assert path.read_bytes() == b"old"
        writer.write("half", tensors()["half"][10:], slice(10, None))
        writer.commit()
        for late in (writer.commit, lambda: writer.write("mask", tensors()["mask"])):
            with raises(ingot.ClosedError, code="committed"):
                late()
    with pytest.raises(ingot.ClosedError):
        writer.commit()
    assert safetensors.torch.load_file(path).keys() == tensors().keys()


def test_writer_without_commit_keeps_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "t.safetensors"
    path.write_bytes(b"old")
    with pytest.warns(RuntimeWarning, match=f"{path}: the with block ended without commit"):  # noqa: SIM117
        with ingot.Writer(path, SPECS, overwrite=True) as writer:
            fill(writer)
    with pytest.raises(KeyError, match="mine"), ingot.Writer(path, SPECS, overwrite=True) as writer:
        raise KeyError("mine")
    lost = ingot.Writer(path, SPECS, overwrite=True)
    with raises(ingot.StorageError, code="busy"):
        ingot.Writer(path, SPECS, overwrite=True)
    with pytest.warns(RuntimeWarning, match=f"{path}: the writer was deleted without commit"):
        del lost
    ingot.Writer(path, SPECS, overwrite=True).close()
    assert path.read_bytes() == b"old"
    assert names_in(tmp_path) == ["t.safetensors"]


@pytest.mark.parametrize("shard_nbytes", [16, 1 << 20], ids=["shards", "one file"])
@pytest.mark.parametrize("is_joined", [False, True], ids=["writer", "joined"])
@pytest.mark.parametrize("is_commit_last", [False, True], ids=["save last", "commit last"])
def test_writer_and_save_sharded_leave_one_whole_checkpoint(
    tmp_path: Path, shard_nbytes: int, is_joined: bool, is_commit_last: bool
) -> None:
    def save() -> None:
        state = {name: torch.full((4,), 2.0) for name in "ab"}
        ingot.torch.save_sharded(state, tmp_path, shard_nbytes, overwrite=True)

    path = tmp_path / "model.safetensors"
    specs = dict.fromkeys("ab", ("F32", [4]))
    with ingot.Writer(path, specs, overwrite=True) as writer:
        # The save does not wait for the writer, and keeps the writer's temporary file.
        save()
        with ingot.Writer.join(path) if is_joined else nullcontext(writer) as own:
            writer.write("a", numpy.ones(4, numpy.float32))
            own.write("b", numpy.ones(4, numpy.float32))
            own.commit()
        if not is_commit_last:
            save()
    # With shards, the index names the files of the save, not the file of the writer.
    expected = 2.0 if shard_nbytes == 16 or not is_commit_last else 1.0
    assert {value for tensor in ingot.numpy.load_file(tmp_path).values() for value in tensor} == {expected}
    assert not [name for name in names_in(tmp_path) if name.startswith(".")]


def test_writer_is_filled_by_threads(tmp_path: Path) -> None:
    path = tmp_path / "t.safetensors"
    whole = torch.arange(64 * 1000.0).reshape(64, 1000)
    refused = []
    with ingot.Writer(path, {"whole": whole}, overwrite=True) as writer:

        def work(seed: int) -> None:
            rows = list(range(64))
            random.Random(seed).shuffle(rows)
            for row in rows:
                try:
                    writer.write("whole", whole[row], row)
                except ingot.SaveError as error:
                    refused.append(error.code)

        threads = [threading.Thread(target=work, args=(seed,)) for seed in range(6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        writer.commit()
    assert refused == ["filled-twice"] * 5 * 64
    assert torch.equal(safetensors.torch.load_file(path)["whole"], whole)


def test_writer_guest_may_commit(tmp_path: Path) -> None:
    path = tmp_path / "t.safetensors"
    with raises(ingot.StorageError, code="nothing-to-join"):
        ingot.Writer.join(path)
    writer = ingot.Writer(path, SPECS, overwrite=True)
    with ingot.Writer.join(path) as guest:
        fill(guest, "mask")
    with ingot.Writer.join(path) as guest:
        guest.write("mask", tensors()["mask"])
        guest.commit()
    with pytest.raises(ingot.ClosedError):
        writer.write("mask", tensors()["mask"])
    del writer
    assert len(safetensors.torch.load_file(path)) == 5
    with closing(ingot.Writer(path, SPECS, overwrite=True)):
        guest = ingot.Writer.join(path)
    with raises(ingot.StorageError, code="abandoned"):
        fill(guest)
    assert names_in(tmp_path) == ["t.safetensors"]


@pytest.mark.filterwarnings("ignore")
def test_temporary_file_is_committed_by_its_own_process(tmp_path: Path) -> None:
    path = tmp_path / "t.json"
    program = """
temporary = ingot._native.TemporaryFile.create(sys.argv[1])
with open(temporary.temporary_path, "w") as file:
    file.write("whole")
child = os.fork()
if child == 0:
    try:
        temporary.commit()
    except ingot.ClosedError as error:
        os._exit(0 if error.code == "forked" else 2)
    os._exit(1)
assert os.waitpid(child, 0)[1] == 0
assert not os.path.exists(sys.argv[1])
temporary.commit()
temporary.close()
"""
    assert run(program, path).code == 0
    assert path.read_text() == "whole"


@pytest.mark.filterwarnings("ignore")
def test_writer_in_a_forked_child_must_join(tmp_path: Path) -> None:
    path = tmp_path / "t.safetensors"
    program = """
writer = ingot.Writer(sys.argv[1], {"a": ("F32", [4])}, overwrite=True)
child = os.fork()
if child == 0:
    try:
        writer.write("a", numpy.ones(4, "f4"))
    except ingot.ClosedError as error:
        assert error.code == "forked"
        writer.close()
        with ingot.Writer.join(sys.argv[1]) as guest:
            guest.write("a", numpy.ones(4, "f4"))
        os._exit(0)
    os._exit(1)
assert os.waitpid(child, 0)[1] == 0
writer.commit()
writer.close()
say(ingot.numpy.load_file(sys.argv[1])["a"].tolist())
"""
    assert run(program, path).said() == [1.0] * 4
    with pytest.raises(TypeError, match="cannot be pickled"):
        pickle.dumps(ingot.Writer(path, SPECS, overwrite=True))


def test_writer_appends_until_the_header_is_full(tmp_path: Path) -> None:
    path = tmp_path / "t.safetensors"
    path.write_bytes(b"old")
    expected = {}
    with ingot.Writer(
        path, metadata={"k": "v"}, write_options={"reserve_header": 2000}, overwrite=True
    ) as writer:

        def go_on() -> None:
            for step in range(1000):
                array = numpy.full((step, 3), step, numpy.float16)
                writer.write(f"step {step}", torch.from_numpy(array) if step % 2 else array)
                expected[f"step {step}"] = array

        with raises(ingot.SaveError, code="reserve-full") as caught:
            go_on()
        assert caught.value.tensor == f"step {len(expected)}"
        assert len(expected) > 20
        with raises(ingot.SaveError, code="duplicate-tensor"):
            writer.write("step 1", numpy.zeros(1))
        with pytest.raises(ingot.OptionError):
            writer.write("part", numpy.zeros(1), 0)
        assert path.read_bytes() == b"old"
        writer.commit()
        with pytest.raises(ingot.ClosedError):
            writer.write("late", numpy.zeros(1))
    with safetensors.safe_open(path, "np") as file:
        assert file.metadata() == {"k": "v"}
        assert len(file.keys()) == len(expected)
        for name, array in expected.items():
            assert numpy.array_equal(file.get_tensor(name), array)
    with pytest.raises(ingot.SaveError):
        ingot.Writer(path, write_options={"reserve_header": 200_000_000}, overwrite=True)
    with pytest.warns(RuntimeWarning, match="without commit"):  # noqa: SIM117
        with ingot.Writer(path, write_options={"reserve_header": 1000}, overwrite=True) as writer:
            writer.write("a", numpy.zeros(1))
    assert len(safetensors.numpy.load_file(path)) == len(expected)
    assert names_in(tmp_path) == ["t.safetensors"]


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="no way to measure peak memory")
@pytest.mark.parametrize("how", ["specs", "appended"])
def test_writer_of_many_tensors_takes_the_memory_of_one(tmp_path: Path, how: str) -> None:
    program = """
count, nbytes = 24, 16 << 20
forget_peak()
before = memory("VmRSS")
specs = {f"t{n}": ("U8", [nbytes]) for n in range(count)}
options = {"specs": specs} if sys.argv[2] == "specs" else {"write_options": {"reserve_header": 1 << 20}}
with ingot.Writer(sys.argv[1], **options, overwrite=True) as writer:
    for n in range(count):
        writer.write(f"t{n}", numpy.full(nbytes, n, numpy.uint8))
    writer.commit()
say(memory("VmHWM") - before)
"""
    path = tmp_path / "t.safetensors"
    assert run(program, path, how).said() < (16 << 20) + (64 << 20)
    with safetensors.safe_open(path, "np") as file:
        assert all((file.get_tensor(f"t{n}") == n).all() for n in range(24))
