"""Ctrl-C ends every long operation, and leaves nothing behind."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

import ingot
import ingot.numpy
import ingot.torch
from support.hostile_files import ARRAY, file_of
from support.processes import run

pytestmark = pytest.mark.slow

INTERRUPTED = """
def counted(name):
    with open("/proc/self/io") as file:
        return next(int(line.split()[1]) for line in file if line.startswith(name))

def interrupt(name, before, sent):
    # As Ctrl-C does, once 64 MiB have been moved: in the middle of what takes gigabytes.
    while counted(name) - before < 64 << 20:
        pass
    sent.append(counted(name))
    os.kill(os.getpid(), signal.SIGINT)

def interrupted(name, call):
    # Again where a busy machine let the thread that interrupts wait for long, which says nothing of the call.
    for _ in range(5):
        before, sent = counted(name), []
        thread = threading.Thread(target=interrupt, args=(name, before, sent))
        thread.start()
        try:
            call()
            thread.join()
        except KeyboardInterrupt:
            # Python raises it in any case, when all is done. Less than half must have been.
            if counted(name) - before < 1 << 30:
                return "interrupted"
            if sent[0] - before < 1 << 29:
                return "interrupted late"
        else:
            return "went on"
    return "never in the middle"
"""


def can_count_io() -> bool:
    return Path("/proc/self/io").exists()


# Calls that read the file `model.safetensors`, whose tensor `a` has 4 GiB.
LONG_READS = {
    "load": 'ingot.numpy.load_file(path, backend="pread")',
    "tensor": 'ingot.safe_open(path, "pt", backend="pread")["a"]',
    "slice": 'ingot.safe_open(path, "np", backend="pread").get_slice("a")[:, ::2]',
    "conversion": 'ingot.numpy.load_file(path, dtype="F16", backend="pread")',
    "verifying load": "ingot.numpy.load_file(path, verify=True)",
    "memory that is there": "ingot.numpy.load_file(path, out=out, keys=['a'], backend='pread')",
    "list": 'ingot.safe_open(path, "np", backend="pread").get_slice("a")[[0, 1, 0]]',
    "iterator": 'deque(ingot.safe_open(path, "np", backend="pread").prefetch(), maxlen=0)',
    "handle": 'ingot.safe_open(path, "np").warm()',
    "cache": "ingot.warm(path)",
    "hash": 'ingot.hash(path, "blake3")',
    "verification": "ingot.verify(path)",
}


@pytest.mark.skipif(not can_count_io(), reason="this kernel does not count what a process reads and writes")
def test_ctrl_c_ends_every_long_read(path: Path) -> None:
    # Made-up digests of the right length.
    record = '{\\"algorithm\\":\\"sha256\\",\\"tensors\\":{\\"a\\":\\"' + "0" * 64 + '\\"}}'
    header = f'{{"__metadata__":{{"ingot.checksums":"{record}"}},'
    header += f'"a":{{"dtype":"F32","shape":[2,{1 << 29}],"data_offsets":[0,{4 << 30}]}}}}'
    file_of(header.encode(), 4 << 30, path)
    program = """
from collections import deque
import ingot._read.handle, ingot._read.digest, ingot.torch
path = "model.safetensors"
# Pages that nobody has written to take no memory.
out = {"a": numpy.empty((2, 1 << 29), numpy.float32)}
ingot.safe_open(path, "np", backend="pread").get_slice("a")[:, 0]
before, found = held(), {}
for name, read in json.loads(sys.argv[1]).items():
    # Made of a text here, and not in the call: Python ends with what interrupted an `eval`, caught or not.
    how = interrupted("rchar", eval("lambda: " + read))
    found[name] = [how, settled(before) == before or held()]
say(found)
"""
    found = run(INTERRUPTED + program, json.dumps(LONG_READS), folder=path.parent).said()
    assert found == {name: ["interrupted", True] for name in LONG_READS}


# Calls that replace the file `model.safetensors` with 2 GiB and more.
LONG_SAVES = {
    "save": 'ingot.numpy.save_file({"a": array}, path)',
    "in place": 'ingot.numpy.save_file({"a": array}, path, atomic=False)',
    "digests": 'ingot.numpy.save_file({"a": array}, path, checksums="blake3")',
    "put in order": 'ingot.numpy.save_file({"a": array.reshape(2, -1).T}, path)',
    "buffers": 'ingot.serialize_file({"a": {"dtype": "U8", "shape": [2 << 30], "data": array}}, path)',
    "merge": 'ingot.merge([path, "large.safetensors"], path, overwrite=True)',
    "rewrite": 'ingot.rewrite("large.safetensors", path, overwrite=True)',
    "split": 'ingot.split("large.safetensors", "shards", "100MB")',
    "metadata": 'ingot.update_metadata("large.safetensors", {"k": "v"})',
    "tensor": 'ingot.replace_tensor("large.safetensors", "small", numpy.ones(5))',
    "stream": 'ingot.numpy.save_file({"a": array}, null)',
    "appender": "append()",
    "writer": "fill()",
}


@pytest.mark.skipif(not can_count_io(), reason="this kernel does not count what a process reads and writes")
def test_ctrl_c_ends_every_long_write(path: Path) -> None:
    space = os.statvfs(path.parent)
    if space.f_bavail * space.f_frsize < 9 << 30:
        pytest.skip(f"less than 9 GiB are free below {path.parent}")
    ingot.numpy.save_file({"b": ARRAY}, path)
    large = b'{"large":{"dtype":"U8","shape":[%d],"data_offsets":[0,%d]},' % (4 << 30, 4 << 30)
    large += b'"small":{"dtype":"F64","shape":[5],"data_offsets":[%d,%d]}}' % (4 << 30, (4 << 30) + 40)
    file_of(large, (4 << 30) + 40, path.parent / "large.safetensors")
    program = """
import ingot._write.edit, ingot._write.rearrange, ingot._write.shards, ingot._write.save, ingot._write.writer
path, array = "model.safetensors", numpy.zeros(2 << 30, numpy.uint8)
ingot.numpy.save({"a": numpy.ones((2, 2)).T})
null = open("/dev/null", "wb", buffering=0)

def append():
    with ingot.Writer(path, write_options={"reserve_header": 1000}, overwrite=True) as writer:
        writer.write("a", array)
        writer.commit()

def fill():
    with ingot.Writer(path, {"a": ("U8", [2 << 30])}, overwrite=True) as writer:
        writer.write("a", array)
        writer.commit()

def files():
    return {os.path.join(folder, name): os.stat(os.path.join(folder, name)).st_mtime_ns
            for folder, _, names in os.walk(".") for name in names}

before, stood, found = held(), files(), {}
for name, write in json.loads(sys.argv[1]).items():
    how = interrupted("wchar", eval("lambda: " + write))
    found[name] = [how, settled(before) == before or held(), files() == stood or sorted(files())]
say(found)
"""
    found = run(INTERRUPTED + program, json.dumps(LONG_SAVES), folder=path.parent).said()
    assert found == {name: ["interrupted", True, True] for name in LONG_SAVES}


def test_ctrl_c_ends_a_snapshot(tmp_path: Path) -> None:
    program = """
import ingot._write.background
# Pages that nobody has written to take no memory, but their copies do.
array = numpy.zeros(2 << 30, numpy.uint8)
holds = held()
forget_peak()
before = memory("VmRSS")

def interrupt():
    while memory("VmHWM") - before < 64 << 20:
        time.sleep(0.001)
    os.kill(os.getpid(), signal.SIGINT)

threading.Thread(target=interrupt).start()
try:
    ingot.numpy.save_file({"a": array}, "model.safetensors", background=True)
except KeyboardInterrupt:
    say([memory("VmHWM") - before < 1 << 30, settled(holds) == holds or held(), os.listdir()])
"""
    assert run(program, folder=tmp_path).said() == [True, True, []]


def test_save_allocates_bytes_as_it_fills_them(tmp_path: Path) -> None:
    # To touch all memory at its allocation would block every other thread meanwhile.
    program = """
import ingot._native
nbytes, taken = 256 << 20, []
before = memory("VmRSS")

def fetch(begin, end):
    taken.append(memory("VmRSS") - before)
    return numpy.full(end - begin, 7, numpy.uint8)

whole = ingot._native.serialize({"a": 0}, lambda name, _: ("U8", [nbytes], fetch), None, "safetensors")
say([taken[0] < 64 << 20, taken[-1] > 192 << 20, whole[-nbytes:] == bytes([7]) * nbytes])
"""
    assert run(program, folder=tmp_path).said() == [True, True, True]


def test_ctrl_c_ends_a_save_to_memory(tmp_path: Path) -> None:
    program = """
# Put in order while it is copied, which takes long.
array = numpy.zeros((1 << 15, 1 << 15), numpy.uint8)
ingot.numpy.save({"a": array[:2, :2].T})
handler, heard = signal.getsignal(signal.SIGINT), []
asked = time.monotonic()

def note(*arguments):
    heard.append(time.monotonic() - asked)
    handler(*arguments)

signal.signal(signal.SIGINT, note)
try:
    threading.Timer(1, os.kill, (os.getpid(), signal.SIGINT)).start()
    for _ in range(1000):
        ingot.numpy.save({"a": array.T})
except KeyboardInterrupt:
    say(len(heard))
"""
    assert run(program, folder=tmp_path).said() == 1


def test_ctrl_c_leaves_an_awaited_background_save(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo")
    program = """
saved = ingot.numpy.save_file({"a": numpy.ones(3)}, "fifo", background=True)
try:
    threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGINT)).start()
    saved.result()
except KeyboardInterrupt:
    threading.Thread(target=lambda: open("fifo", "rb").read()).start()
    say([saved.result(60), saved.done()])
"""
    assert run(program, folder=tmp_path).said() == [None, True]


def test_ctrl_c_ends_a_save_of_python_buffers(tmp_path: Path) -> None:
    program = """
array = numpy.zeros((1 << 13, 1 << 13), ">f4")
timer = threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT))
try:
    timer.start()
    while True:
        ingot.numpy.save_file({"a": array.T}, "t")
        os.unlink("t")
except KeyboardInterrupt:
    timer.join()
    say([thread.name for thread in threading.enumerate()])
"""
    assert run(program, folder=tmp_path).said() == ["MainThread"]
    assert set(os.listdir(tmp_path)) <= {"t"}
