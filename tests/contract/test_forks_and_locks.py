"""Every call releases its locks, and a forked child keeps none of them."""

from __future__ import annotations

import fcntl
import os
from contextlib import closing
from pathlib import Path

import pytest

import ingot
import ingot.numpy
from support.processes import run

if not hasattr(os, "fork"):
    pytest.skip("there is no fork", allow_module_level=True)

# Forks a child while a file is written. It lives until the end of the program, as a worker of a DataLoader.
FORKING = """
import os
# A wait for a lock that a child holds ends the program.
signal.alarm(120)
path, source = sys.argv[1:3]
tensors = {"w": numpy.ones(1 << 20, "f4"), "x": numpy.zeros(4, "f4")}
ingot.numpy.save_file(tensors, source)
until, gate = os.pipe()
children = []

def fork(*progress):
    if children:
        return
    child = os.fork()
    if child == 0:
        os.close(gate)
        os.read(until, 1)
        os._exit(0)
    children.append(child)

def serving(folder):
    import functools, http.server, threading
    class Quiet(http.server.SimpleHTTPRequestHandler):
        def log_message(self, *given): pass
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Quiet, directory=folder))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    return f"http://127.0.0.1:{server.server_port}/"
"""
# Another edit finds the file unlocked, and so does another save of each kind.
AFTER = """
assert len(children) == 1
assert ingot.update_metadata(path, {"a": "b"}) != "unchanged"
ingot.replace_tensor(path, "x", numpy.ones(4, "f4"))
ingot.numpy.save_file(tensors, path)
with ingot.Writer(path, {"x": ("F32", (4,))}, overwrite=True) as writer:
    writer.write("x", numpy.ones(4, "f4"))
    writer.commit()
say(sorted(os.listdir(os.path.dirname(path))))
os.close(gate)
assert os.waitpid(children[0], 0)[1] == 0
"""
WRITERS = {
    "save_file": "ingot.numpy.save_file(tensors, path, progress=fork)",
    "save_file_fast": "ingot.numpy.save_file(tensors, path, progress=fork, durable=False)",
    "save_file_over": "for tell in (False, fork): ingot.numpy.save_file(tensors, path, progress=tell)",
    "save_file_new": "ingot.rewrite(source, path, progress=fork)",
    "background": "ingot.numpy.save_file(tensors, path, progress=fork, background=True).result()",
    "merge": "ingot.merge([source], path, progress=fork)",
    "convert": "ingot.convert(source, path, progress=fork)",
    "repair": "ingot.repair(source, path, progress=fork)",
    "download": "ingot.download(serving(os.path.dirname(source)) + 'source', path, progress=fork)",
    "Writer": """
with ingot.Writer(path, {"w": ("F32", (1 << 20,)), "x": ("F32", (4,))}, overwrite=True) as writer:
    for name in tensors: writer.write(name, tensors[name])
    fork()
    writer.commit()
""",
    "Writer_without_specs": """
with ingot.Writer(path, write_options={"reserve_header": 1000}, overwrite=True) as writer:
    for name in tensors: writer.write(name, tensors[name])
    fork()
    writer.commit()
""",
    "Writer_left": """
ingot.numpy.save_file(tensors, path)
with ingot.Writer(path, {"w": ("F32", (1 << 20,))}, overwrite=True) as writer: fork()
""",
    "guest": """
with ingot.Writer(path, {"w": ("F32", (1 << 20,)), "x": ("F32", (4,))}, overwrite=True) as writer:
    with ingot.Writer.join(path) as guest:
        for name in tensors: guest.write(name, tensors[name])
        fork()
        guest.commit()
""",
}


@pytest.mark.parametrize("write", WRITERS.values(), ids=WRITERS)
def test_writer_beside_a_forked_child_leaves_no_lock(write: str, tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    ended = run(FORKING + write + AFTER, tmp_path / "out" / "w.safetensors", tmp_path / "source")
    assert ended.said() == ["w.safetensors"]


def test_edit_beside_forked_children_leaves_no_lock(tmp_path: Path) -> None:
    program = """
import os, threading
signal.alarm(120)
path = sys.argv[1]
ingot.numpy.save_file({"x": numpy.ones(4, "f4")}, path)
until, gate = os.pipe()
ends = threading.Event()

def edit():
    number = 0
    while not ends.is_set():
        number += 1
        ingot.update_metadata(path, {"a": str(number)}, atomic=number % 2 == 1, durable=False)

editing = threading.Thread(target=edit)
editing.start()
children = []
for _ in range(12):
    child = os.fork()
    if child == 0:
        os.close(gate)
        os.read(until, 1)
        os._exit(0)
    children.append(child)
    ends.wait(0.005)
ends.set()
editing.join()
say(ingot.update_metadata(path, {"b": "c"}))
os.close(gate)
assert [os.waitpid(child, 0)[1] for child in children] == [0] * len(children)
"""
    assert run(program, tmp_path / "w.safetensors").said() in ("in-place", "rewritten")


def test_child_of_a_fork_during_a_save_can_save_and_edit(tmp_path: Path) -> None:
    program = """
import os
signal.alarm(120)
path = sys.argv[1]
tensors = {"w": numpy.ones(1 << 20, "f4")}
ingot.numpy.save_file(tensors, path)
ended = []

def fork(*progress):
    if ended:
        return
    child = os.fork()
    if child == 0:
        ingot.update_metadata(path, {"a": "b"})
        ingot.numpy.save_file(tensors, path)
        ingot.numpy.save_file(tensors, path + "2", background=True).result()
        os._exit(0)
    ended.append(os.waitpid(child, 0)[1])

ingot.numpy.save_file(tensors, path, progress=fork)
say(ended)
"""
    assert run(program, tmp_path / "w.safetensors").said() == [0]


def test_wait_for_a_lock_is_interrupted(tmp_path: Path) -> None:
    program = """
import _thread, threading
try:
    threading.Timer(0.2, _thread.interrupt_main).start()
    ingot.update_metadata(sys.argv[1], {"a": "b"})
except KeyboardInterrupt:
    say("interrupted")
"""
    path = tmp_path / "w.safetensors"
    ingot.numpy.save_file({}, path)
    with path.open("rb") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        assert run(program, path).said() == "interrupted"


def test_busy_file_names_the_process_that_holds_it(tmp_path: Path) -> None:
    path = tmp_path / "w.safetensors"
    with closing(ingot.Writer(path, {"x": ("F32", (4,))}, overwrite=True)):
        with pytest.raises(ingot.StorageError) as raised:
            ingot.Writer(path, {"x": ("F32", (4,))}, overwrite=True)
        assert raised.value.code == "busy"
        assert str(path) in str(raised.value)
        if os.path.exists("/proc/locks"):
            assert f"in process {os.getpid()}" in str(raised.value)
