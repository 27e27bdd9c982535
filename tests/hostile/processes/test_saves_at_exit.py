"""`background=True` at the exit of the interpreter: the file is complete, or an error is printed."""

from __future__ import annotations

import itertools
import os
import sys
from pathlib import Path

import pytest

import ingot.numpy
from support.processes import python

pytestmark = pytest.mark.slow

# Imports of a program before it ends. `ingot` may be imported after `threading`, before it, or last.
IMPORTS = {
    "nothing": "",
    "threading": "import threading",
    "ingot": "import ingot.numpy",
    "what saves": "import ingot.numpy, ingot._write.background",
    "futures": "import concurrent.futures.thread",
}

SAVE = """
def save():
    import numpy
    import ingot.numpy
    for number in range(3):
        tensors = {"a": numpy.full(500_000, number, "f4")}
        made = ingot.numpy.save_file(tensors, "file", background=True)
        assert made is not None
    print("said")
"""

# Ways to call `save` while the interpreter exits.
CALLS = {
    "atexit": "import atexit; atexit.register(save)",
    "atexit, a method": """
import atexit
class Trainer:
    def stop(self):
        save()
atexit.register(Trainer().stop)
""",
    "atexit, an import": """
import atexit, importlib, sys
sys.path.insert(0, "")
with open("saves.py", "w") as module:
    module.write("import __main__; __main__.save()")
atexit.register(importlib.import_module, "saves")
""",
    "atexit, twice": "import atexit; atexit.register(save); atexit.register(save)",
    "weakref.finalize": """
import weakref
class Trainer: pass
trainer = Trainer()
weakref.finalize(trainer, save)
""",
    "after sys.exit": "import atexit, sys; atexit.register(save); sys.exit(0)",
    "a thread that goes on": """
import threading, time
def late():
    threading.main_thread().join()
    save()
threading.Thread(target=late).start()
""",
    "atexit, in a process of multiprocessing": """
import multiprocessing, multiprocessing.util
def child():
    multiprocessing.util.Finalize(None, save, exitpriority=1)
process = multiprocessing.get_context("fork").Process(target=child)
process.start()
process.join()
""",
    # Python only prints a message for errors in these two.
    "__del__": """
class Trainer:
    def __del__(self):
        save()
trainer = Trainer()
trainer.itself = trainer
""",
    "a module's end": """
import sys, types
class Trainer:
    def __del__(self, save=save):
        save()
sys.modules["trainer"] = types.ModuleType("trainer")
sys.modules["trainer"].trainer = Trainer()
""",
}


@pytest.mark.parametrize(("imports", "call"), list(itertools.product(IMPORTS, CALLS)))
def test_background_save_finishes_or_fails_loudly_at_exit(tmp_path: Path, imports: str, call: str) -> None:
    ended = python("-c", IMPORTS[imports] + SAVE + CALLS[call], folder=tmp_path, PYTHONSAFEPATH="1")
    if "said" in ended.out:
        assert (ended.code, ended.err) == (0, "")
        # Of several saves to one path, the last one stays.
        assert set(ingot.numpy.load_file(tmp_path / "file")["a"]) == {2.0}
    else:
        assert "Error" in ended.err
        assert call in ("__del__", "a module's end"), ended.err
    assert {name for name in os.listdir(tmp_path) if "ingot" in name} == set()


def test_background_save_of_a_daemon_thread_is_awaited_at_exit(tmp_path: Path) -> None:
    program = """
import atexit, os, threading, time
import numpy, ingot.numpy
os.mkfifo("pipe")
begun = threading.Event()
def daemon():
    threading.main_thread().join()
    begun.set()
    # It lasts until somebody reads, and whoever saves meanwhile finds the daemon at work.
    ingot.numpy.save_file({"a": numpy.zeros(3)}, "pipe", background=True)
def reader():
    begun.wait()
    time.sleep(0.5)
    open("pipe", "rb").read()
threading.Thread(target=daemon, daemon=True).start()
threading.Thread(target=reader, daemon=True).start()
@atexit.register
def late():
    begun.wait()
    time.sleep(0.2)
    ingot.numpy.save_file({"a": numpy.ones(3)}, "file", background=True)
"""
    ended = python("-c", program, folder=tmp_path)
    assert (ended.code, ended.err) == (0, "")
    assert ingot.numpy.load_file(tmp_path / "file")["a"].tolist() == [1.0] * 3


@pytest.mark.parametrize("started", ["-c", "-m", "script", "thread", "spawn", "forkserver"])
def test_background_save_before_exit_runs_in_the_background(tmp_path: Path, started: str) -> None:
    (tmp_path / "program.py").write_text(
        """
import os, sys
import numpy, ingot.numpy
def main():
    os.mkfifo("pipe")
    # Nobody reads yet: this would not come back if it were not in the background.
    future = ingot.numpy.save_file({"a": numpy.zeros(3)}, "pipe", background=True)
    assert len(open("pipe", "rb").read()) > 24
    future.result()
    print("said")
if __name__ == "__main__":
    how = sys.argv[1]
    if how in ("spawn", "forkserver"):
        import multiprocessing
        process = multiprocessing.get_context(how).Process(target=main)
        process.start()
        process.join()
    elif how == "thread":
        import threading
        thread = threading.Thread(target=main)
        thread.start()
        thread.join()
    else:
        main()
"""
    )
    path = os.pathsep.join([str(tmp_path), *sys.path])
    how = {"-c": ["-c", "import runpy, program; program.main()"], "-m": ["-m", "program"]}
    ended = python(*how.get(started, ["program.py"]), started, folder=tmp_path, PYTHONPATH=path)
    assert (ended.code, ended.out, ended.err) == (0, "said\n", "")
