"""Files that change while they are open, threads, and forks."""

from __future__ import annotations

import random
import threading
from pathlib import Path
from typing import Any

import numpy
import pytest

import ingot
import ingot.numpy
import ingot.torch
from support.hostile_files import ARRAY, file_of
from support.processes import run

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("keep", [0, 7, 100, 4096, 500_000])
def test_truncated_file_is_an_error_and_no_signal(path: Path, backend: str, keep: int) -> None:
    tensors = {name: numpy.ones((500, 500), numpy.uint8) for name in "abcd"}
    ingot.numpy.save_file(tensors, path)
    program = """
backend, keep = sys.argv[1], int(sys.argv[2])
file = ingot.safe_open("model.safetensors", "np", backend=backend)
parts = {name: file.get_slice(name) for name in file}
os.truncate("model.safetensors", keep)
reads = [lambda: file["d"], lambda: file["a"], file.get_tensors, lambda: list(file.items())]
at = numpy.s_
for index in (at[0], at[::2], at[:, ::3], at[[1, 0]], at[..., None], at[-1, -1]):
    reads += [lambda index=index, name=name: parts[name][index] for name in "ad"]
found = set()
for read in reads:
    try:
        read()
        found.add("read")
    except ingot.StorageError as fault:
        found.add(fault.code)
say([sorted(found), file.keys(), len(file), list(file.info("a").shape)])
"""
    found = run(program, backend, keep, folder=path.parent).said()
    # The handle has a copy of the header, so its properties still work.
    assert found == [["changed"], ["a", "b", "c", "d"], 4, [500, 500]]


def test_truncated_unaligned_file_is_an_error_and_no_signal(path: Path) -> None:
    # Tensors of a file that may change are copied out of the mapping.
    header = b'{"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]},'
    header += b'"b":{"dtype":"F64","shape":[50000],"data_offsets":[1,400001]}}'
    file_of(header, 400_001, path)
    program = """
file = ingot.safe_open("model.safetensors", "np", backend="mmap")
before = file["b"]
os.truncate("model.safetensors", 200)
found = [float(before.sum())]
part = file.get_slice("b")
for read in (lambda: file["b"], file.get_tensors, lambda: part[1:], lambda: part[::7]):
    try:
        found.append(len(read()))
    except ingot.StorageError as fault:
        found.append(fault.code)
say(found)
"""
    assert run(program, folder=path.parent).said() == [0.0, *["changed"] * 4]


CUT_BY_ANOTHER = """
stop = threading.Event()
def cut():
    # Cuts the file to one page and mends it, again and again.
    with open("model.safetensors", "r+b") as file:
        whole = file.read()
        while not stop.is_set():
            file.truncate(4096)
            file.seek(4096)
            file.write(whole[4096:])
            file.flush()
thread = threading.Thread(target=cut)
thread.start()
codes = set()
for _ in range(300):
    try:
        with ingot.safe_open("model.safetensors", "np", backend=sys.argv[1]) as file:
            part = file.get_slice("a")
            array = eval(sys.argv[2])
        codes.add("read")
    except ingot.SafetensorError as fault:
        codes.add(fault.code)
stop.set()
thread.join()
say(sorted(codes))
"""


@pytest.mark.parametrize(
    ("backend", "read"),
    [("pread", 'file["a"]'), ("pread", "part[::2]"), ("mmap", "part[::2]"), ("mmap", "part[[0, -1]]")],
)
def test_copy_of_a_shrinking_file_is_an_error(path: Path, backend: str, read: str) -> None:
    ingot.numpy.save_file({"a": numpy.ones((1000, 1000), numpy.uint8)}, path)
    found = run(CUT_BY_ANOTHER, backend, read, folder=path.parent)
    # If the file is restored within the resolution of its time stamps, it looks unchanged. Then the error is
    # "short-read".
    assert set(found.said()) <= {"read", "changed", "short-read", "read-failed", "truncated"}


@pytest.mark.parametrize("module", [ingot.numpy, ingot.torch], ids=["numpy", "torch"])
def test_save_over_a_mapped_file_keeps_the_old_tensors(path: Path, module: Any, backend: str) -> None:
    ingot.numpy.save_file({"a": ARRAY}, path)
    old = module.load_file(path, backend=backend)
    for number in range(1, 20):
        ingot.numpy.save_file({"a": ARRAY + number}, path)
        assert (ingot.numpy.load_file(path)["a"] == ARRAY + number).all()
    assert (numpy.asarray(old["a"]) == ARRAY).all()


@pytest.mark.parametrize("framework", ["np", "pt"])
def test_handle_is_closed_while_64_threads_use_it(path: Path, backend: str, framework: str) -> None:
    arrays = {f"t{number}": numpy.full((50, number + 1), number, numpy.int32) for number in range(20)}
    ingot.numpy.save_file(arrays, path, {"k": "v"})
    handles = [ingot.safe_open(path, framework, backend=backend) for _ in range(4)]
    start = threading.Barrier(64)
    faults: list[BaseException] = []
    closed = [0]

    def use(number: int) -> None:
        chance = random.Random(number)
        try:
            start.wait()
            for round in range(60):
                file = handles[round // 15]
                name = chance.choice(list(arrays))
                expected = arrays[name]
                try:
                    action = chance.randrange(7)
                    if action == 0:
                        assert file.get_tensor(name).tolist() == expected.tolist()
                    elif action == 1:
                        part = file.get_slice(name)
                        if number % 16 == 0 and round % 15 == 14:
                            file.close()
                        assert part[3:40:7].tolist() == expected[3:40:7].tolist()
                    elif action == 2:
                        assert file.keys() == sorted(arrays)
                    elif action == 3:
                        found = file.get_tensors([name, "t0"])
                        assert found[name].tolist() == expected.tolist()
                    elif action == 4:
                        assert file.metadata() == {"k": "v"}
                    elif action == 5:
                        assert tuple(file.info(name).shape) == expected.shape
                    elif round % 15 == 14 and number % 8 == 0:
                        file.close()
                except ingot.ClosedError:
                    closed[0] += 1
        except BaseException as fault:
            faults.append(fault)

    threads = [threading.Thread(target=use, args=(number,)) for number in range(64)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert faults == []
    for handle in handles:
        handle.close()


FORK = """
backend, framework = sys.argv[1:]
if framework == "pt":
    import ingot.torch
file = ingot.safe_open("model.safetensors", framework, backend=backend)
part = file.get_slice("b")
# Whatever threads ingot keeps are running now.
file.get_tensors()
stop = threading.Event()
def read():
    while not stop.is_set():
        file.get_tensors()
threads = [threading.Thread(target=read) for _ in range(3)]
for thread in threads:
    thread.start()
codes = []
for _ in range(10):
    child = os.fork()
    if child == 0:
        # Nothing of the parent's locks and threads may be waited for.
        signal.alarm(120)
        tensors = file.get_tensors(["a", "b"]).values()
        ok = all((numpy.asarray(tensor) == number).all() for number, tensor in enumerate(tensors))
        ok &= (numpy.asarray(part[::2]) == 1).all() and file.keys() == ["a", "b"]
        with ingot.safe_open("model.safetensors", framework, backend=backend) as again:
            ok &= (numpy.asarray(again["b"]) == 1).all()
        ingot.numpy.save_file({"a": numpy.ones(5_000_000)}, "child")
        ok &= bool((ingot.numpy.load_file("child", backend=backend)["a"] == 1).all())
        file.close()
        os._exit(0 if ok else 1)
    codes.append(os.waitpid(child, 0)[1])
stop.set()
for thread in threads:
    thread.join()
# What the child closed is still open here.
say([codes, bool((numpy.asarray(file["b"]) == 1).all())])
"""


@pytest.mark.parametrize("framework", ["np", "pt"])
def test_child_of_a_fork_reads_and_saves(path: Path, backend: str, framework: str) -> None:
    arrays = {name: numpy.full(3_000_000, number, numpy.uint8) for number, name in enumerate("ab")}
    ingot.numpy.save_file(arrays, path)
    assert run(FORK, backend, framework, folder=path.parent).said() == [[0] * 10, True]
