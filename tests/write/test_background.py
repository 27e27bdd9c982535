"""Saving in the background, and the progress of saves."""

from __future__ import annotations

import io
import os
import sys
import threading
import types
from concurrent.futures import CancelledError, Future
from pathlib import Path
from typing import Any

import numpy
import pytest

import ingot
import ingot.numpy
from ingot._base import progress as _progress
from ingot._write.background import Line
from support.processes import run
from support.progress import Progress

MIB = 1 << 20


def pipe(folder: Path) -> tuple[Path, threading.Thread, list[bytes]]:
    """A pipe whose reader starts later, so that a save into it blocks until then."""
    path, found = folder / "pipe", []
    os.mkfifo(path)
    return path, threading.Thread(target=lambda: found.append(path.read_bytes())), found


def threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("ingot")]


def wait_for_no_threads() -> None:
    for thread in threading.enumerate():
        if thread.name.startswith("ingot"):
            thread.join()


@pytest.mark.parametrize("nbytes", [0, 3, 5 * MIB, 70 * MIB])
@pytest.mark.parametrize("durable", [True, False])
def test_background_save_stores_the_values_of_the_call(tmp_path: Path, nbytes: int, durable: bool) -> None:
    array = numpy.arange(nbytes, dtype=numpy.uint8)
    expected = ingot.numpy.save({"a": array, "t": numpy.arange(6.0).reshape(2, 3).T})
    future = ingot.numpy.save_file(
        {"a": array, "t": numpy.arange(6.0).reshape(2, 3).T}, tmp_path / "t", background=True, durable=durable
    )
    array[:] = 77
    assert future.result() is None
    assert (tmp_path / "t").read_bytes() == expected
    wait_for_no_threads()
    assert os.listdir(tmp_path) == ["t"]


def test_background_save_without_a_snapshot_copies_nothing(tmp_path: Path) -> None:
    path, reader, found = pipe(tmp_path)
    array = numpy.zeros(3, numpy.uint8)
    future = ingot.numpy.save_file({"a": array}, path, background=True, write_options={"snapshot": False})
    # Without a snapshot the file has this change, since the save has not read the array yet.
    array[:] = 1
    reader.start()
    future.result()
    reader.join()
    assert found == [ingot.numpy.save({"a": array})]


def test_background_save_is_staged_before_it_is_done(tmp_path: Path) -> None:
    copied = ingot.numpy.save_file({"a": numpy.zeros(3)}, tmp_path / "copied", background=True)
    assert copied.staged.done()
    assert copied.staged.result() is None
    path, reader, found = pipe(tmp_path)
    array = numpy.zeros(3, numpy.uint8)
    expected = ingot.numpy.save({"a": array})
    future = ingot.numpy.save_file({"a": array}, path, background=True, write_options={"snapshot": False})
    waiting = ingot.numpy.save_file(
        {"a": array}, tmp_path / "t", background=True, write_options={"snapshot": False}
    )
    assert not future.staged.done()
    # The inner future only reports progress. Cancelling it does not stop the save.
    assert not future.staged.cancel()
    assert waiting.cancel()
    with pytest.raises(CancelledError):
        waiting.staged.result(60)
    reader.start()
    assert future.staged.result(60) is None
    array[:] = 1
    future.result()
    reader.join()
    assert found == [expected]


def test_background_save_that_fails_raises_from_staged(tmp_path: Path) -> None:
    future = ingot.numpy.save_file(
        {"a": numpy.zeros(3)}, tmp_path / "nowhere" / "t", background=True, write_options={"snapshot": False}
    )
    with pytest.raises(FileNotFoundError):
        future.staged.result(60)

    def stop(done: int, total: int) -> None:
        if done == total:
            raise ZeroDivisionError

    future = ingot.numpy.save_file(
        {"a": numpy.zeros(3)},
        tmp_path / "t",
        background=True,
        write_options={"snapshot": False},
        progress=stop,
    )
    # All bytes had been written when the save was stopped.
    assert future.staged.result(60) is None
    assert isinstance(future.exception(60), ZeroDivisionError)


def test_background_save_copies_torch_tensors_on_their_device(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    import ingot.torch

    path, reader, found = pipe(tmp_path)
    tensors = {"a": torch.arange(6.0), "t": torch.arange(6.0).view(2, 3).T}
    expected = ingot.torch.save(tensors)
    future = ingot.torch.save_file(tensors, path, background=True, write_options={"snapshot": "device"})
    assert future.staged.done()
    for tensor in tensors.values():
        tensor.zero_()
    reader.start()
    future.result()
    reader.join()
    assert found == [expected]
    both = torch.zeros(3)
    with pytest.raises(ingot.SharedMemoryError):
        ingot.torch.save_file(
            {"a": both, "b": both}, tmp_path / "t", background=True, write_options={"snapshot": "device"}
        )
    with pytest.raises(ingot.SaveError, match="meta"):
        ingot.torch.save_file(
            {"a": torch.zeros(3, device="meta")},
            tmp_path / "t",
            background=True,
            write_options={"snapshot": "device"},
        )


def test_background_saves_of_one_path_run_in_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wait_for_no_threads()
    slow, reader, _ = pipe(tmp_path)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "link").symlink_to("t")
    first = ingot.numpy.save_file({}, slow, background=True)
    spellings: list[Any] = ["t", "./t", "link", tmp_path / "t", b"t"]
    saves = [
        ingot.numpy.save_file({"a": numpy.full(3, number)}, path, background=True)
        for number, path in enumerate(spellings)
    ]
    # A relative path is resolved when the function is called.
    monkeypatch.chdir("/")
    assert not any(future.done() for future in [first, *saves])
    assert threads() == ["ingot-background"]
    reader.start()
    for future in [first, *saves]:
        future.result()
    reader.join()
    assert ingot.numpy.load_file(tmp_path / "t")["a"].tolist() == [len(spellings) - 1] * 3
    wait_for_no_threads()


def test_background_save_raises_the_errors_of_a_plain_save(tmp_path: Path) -> None:
    path = tmp_path / "nowhere" / "t"
    with pytest.raises(FileNotFoundError) as plain:
        ingot.numpy.save_file({"a": numpy.zeros(3)}, path)
    fault = ingot.numpy.save_file({"a": numpy.zeros(3)}, path, background=True).exception()
    assert type(fault) is type(plain.value)
    assert str(fault) == str(plain.value)
    # Errors of the tensors are raised at once.
    with pytest.raises(ingot.DtypeError):
        ingot.numpy.save_file({"a": numpy.array([None])}, path, background=True)


def test_background_save_that_waits_is_cancelled(tmp_path: Path) -> None:
    slow, reader, _ = pipe(tmp_path)
    first = ingot.numpy.save_file({}, slow, background=True)
    second = ingot.numpy.save_file({}, tmp_path / "t", background=True)
    assert second.cancel()
    reader.start()
    first.result()
    reader.join()
    wait_for_no_threads()
    with pytest.raises(CancelledError):
        second.result()
    assert not (tmp_path / "t").exists()


def test_background_save_is_awaited_at_exit(tmp_path: Path) -> None:
    program = """
array = numpy.ones(40 << 20, numpy.uint8)
ingot.numpy.save_file({"a": array}, "one", background=True)
ingot.numpy.save_file({"a": array}, "two", background=True, write_options={"snapshot": False})
import atexit
# At exit, no new thread can start.
atexit.register(lambda: ingot.numpy.save_file({"a": array[:3]}, "three", background=True))
say("exits")
"""
    assert run(program, folder=tmp_path).said() == "exits"
    assert sorted(os.listdir(tmp_path)) == ["one", "three", "two"]
    for name in ("one", "two"):
        assert ingot.numpy.load_file(tmp_path / name)["a"].shape == (40 << 20,)
    assert ingot.numpy.load_file(tmp_path / "three")["a"].tolist() == [1] * 3


def test_background_save_of_a_parent_is_left_alone_by_a_child(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    program = """
signal.alarm(60)
options = {"background": True, "write_options": {"snapshot": False}}
running = ingot.numpy.save_file({}, "pipe", **options)
waiting = ingot.numpy.save_file({"a": numpy.ones(3)}, "parent", **options)
staged = [running.staged, waiting.staged]
child = os.fork()
if child == 0:
    try:
        for future in (running, waiting, *staged):
            assert isinstance(future.exception(timeout=10), RuntimeError)
        ingot.numpy.save_file({"a": numpy.ones(3)}, "child", background=True).result(10)
        assert not os.path.exists("parent")
        os._exit(0)
    finally:
        os._exit(1)
code = os.waitpid(child, 0)[1]
threading.Thread(target=lambda: open("pipe", "rb").read()).start()
say([code, running.result(10), waiting.result(10)])
"""
    assert run(program, folder=tmp_path).said() == [0, None, None]
    assert sorted(os.listdir(tmp_path)) == ["child", "parent", "pipe"]


def test_background_save_releases_finished_calls() -> None:
    line = Line("ingot-test")

    class Held:
        pass

    import weakref

    held = Held()
    gone = weakref.ref(held)
    future: Future[None] = line.put(lambda held=held: None, Future())
    del held
    future.result()
    wait_for_no_threads()
    assert gone() is None


@pytest.mark.parametrize("started", [False, True])
def test_background_save_after_an_interrupted_start_runs(
    monkeypatch: pytest.MonkeyPatch, started: bool
) -> None:
    line, called, others = Line("ingot-test"), [], []
    may_go = threading.Event()
    start = threading.Thread.start

    def interrupted(thread: threading.Thread) -> None:
        monkeypatch.undo()
        if started:
            start(thread)
        # Signal handlers: one saves, one raises.
        others.append(line.put(lambda: called.append("handler"), Future()))
        raise KeyboardInterrupt

    def first() -> None:
        may_go.wait()
        called.append("first")

    monkeypatch.setattr(threading.Thread, "start", interrupted)
    with pytest.raises(KeyboardInterrupt):
        line.put(first, Future())
    others.append(line.put(lambda: called.append("later"), Future()))
    may_go.set()
    for future in others:
        future.result(60)
    wait_for_no_threads()
    # A call that had begun continues. A call that had not begun is skipped.
    assert called[-2:] == ["handler", "later"]
    assert called[:-2] in ([], ["first"])
    assert line.put(lambda: 5, Future()).result(60) == 5
    wait_for_no_threads()


# Progress


def test_progress_receives_bytes_up_to_the_total(tmp_path: Path) -> None:
    told = Progress()
    for options in ({}, {"background": True}, {"atomic": False}):
        told.clear()
        future = ingot.numpy.save_file(
            {"a": numpy.zeros(40 * MIB, numpy.uint8)},
            tmp_path / "t",
            progress=told,
            **options,  # type: ignore[call-overload]
        )
        if future is not None:
            future.result()
        total = (tmp_path / "t").stat().st_size
        told.assert_complete(total)


@pytest.mark.parametrize("background", [False, True])
@pytest.mark.parametrize("nbytes", [3, 40 * MIB])
@pytest.mark.parametrize("options", [{}, {"durable": False}, {"atomic": False}])
def test_progress_that_raises_stops_the_save(
    tmp_path: Path, background: bool, nbytes: int, options: Any
) -> None:
    path = tmp_path / "t"
    ingot.numpy.save_file({"a": numpy.zeros(3)}, path)
    before = path.read_bytes()

    class Stop(Exception):
        pass

    def save(stop: Any) -> None:
        tensors = {"a": numpy.zeros(nbytes, numpy.uint8)}
        future = ingot.numpy.save_file(tensors, path, progress=stop, background=background, **options)
        assert future is not None
        future.result()

    def at_once(done: int, total: int) -> None:
        raise Stop

    def at_the_end(done: int, total: int) -> None:
        # All bytes are written, and only the rename is missing.
        if done == total:
            raise Stop

    for stop in (at_once, at_the_end):
        with pytest.raises(Stop):
            save(stop)
        assert path.read_bytes() == before
        assert os.listdir(tmp_path) == ["t"]


def test_progress_bar_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    # The same output as without tqdm.
    monkeypatch.setitem(sys.modules, "tqdm", None)
    monkeypatch.setitem(sys.modules, "tqdm.auto", None)
    ingot.numpy.save_file({"a": numpy.zeros(3 * MIB, numpy.uint8)}, tmp_path / "m.bt", progress=True)
    assert capsys.readouterr().err == "Saving m.bt: 100 % of 3.0 MiB\n"


def test_progress_bar_grows_in_a_terminal() -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    out = Terminal()
    line = _progress._Line("Saving t", out)
    for done in (0, 5, 5, 10):
        line.tell(done, 10)
    line.close()
    assert out.getvalue() == ("\rSaving t:   0 % of 10 B\rSaving t:  50 % of 10 B\rSaving t: 100 % of 10 B\n")


def test_progress_bar_of_tqdm_receives_the_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bars: list[Any] = []

    class Tqdm:
        def __init__(self, **options: Any) -> None:
            self.n, self.total, self.closed = 0, None, False
            bars.append(self)

        def update(self, more: int) -> None:
            self.n += more

        def close(self) -> None:
            self.closed = True

    module = types.ModuleType("tqdm.auto")
    module.tqdm = Tqdm  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "tqdm.auto", module)
    path = tmp_path / "t"
    ingot.numpy.save_file({"a": numpy.zeros(3)}, path, progress=True)
    (bar,) = bars
    assert bar.n == bar.total == path.stat().st_size
    assert bar.closed


FAILING = """
import warnings
# A limit of file sizes, which the background saves exceed.
path = sys.argv[1]
tensors = {"a": numpy.ones(10_000)}
resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
def save(number):
    return ingot.numpy.save_file(tensors, f"{path}-{number}", background=True)
def wait(future):
    while not future.done(): time.sleep(0.01)
"""


def test_background_save_that_failed_unread_warns(tmp_path: Path) -> None:
    ended = run(
        FAILING
        + """
wait(save(1))
found = []
for save_next in (lambda: save(2), lambda: ingot.numpy.save_file({}, path)):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        future = save_next()
    if future is not None: wait(future)
    found.append([[one.category.__name__, str(one.message)] for one in caught])
say(found)
""",
        tmp_path / "file",
    )
    for number, warned in enumerate(ended.said(), 1):
        ((category, message),) = warned
        assert category == "RuntimeWarning"
        assert f"{tmp_path / 'file'}-{number}" in message


def test_background_save_that_failed_unread_is_printed_at_exit(tmp_path: Path) -> None:
    ended = run(
        FAILING + "warnings.simplefilter('ignore')\nfor number in range(3): save(number)", tmp_path / "file"
    )
    assert ended.code == 0
    lines = ended.err.splitlines()
    assert len(lines) == 3
    for number, line in enumerate(lines):
        assert f"{tmp_path / 'file'}-{number}" in line


@pytest.mark.parametrize(
    "asking",
    [
        "try: future.result()\nexcept OSError: pass",
        "future.exception()",
        "wait(future); future.exception()",
        "try: future.staged.result()\nexcept OSError: pass",
        "import asyncio\nasync def main():\n try: await asyncio.wrap_future(future)\n except OSError: pass\n"
        "asyncio.run(main())",
    ],
)
def test_background_save_that_failed_is_reported_once(asking: str, tmp_path: Path) -> None:
    ended = run(FAILING + "warnings.simplefilter('error')\nfuture = save(1)\n" + asking, tmp_path / "file")
    assert (ended.code, ended.err) == (0, "")


def test_background_save_of_a_parent_is_not_reported_by_a_child(tmp_path: Path) -> None:
    program = """
wait(save(1))
child = os.fork()
if child: os.waitpid(child, 0)
"""
    ended = run(FAILING + program, tmp_path / "file")
    assert len(ended.err.splitlines()) == 1
