"""The process of a writer is killed. Its data is never mixed with the data of another run."""

from __future__ import annotations

import errno
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy
import pytest

import ingot
import ingot.numpy
from support.processes import PRELUDE
from support.traced import traced

pytestmark = pytest.mark.slow

if not hasattr(os, "fork"):
    pytest.skip("ingot.Writer needs what Unix has", allow_module_level=True)

ROWS = 24
SPECS = {"rows": ("F32", [ROWS, 8])}
ENVIRONMENT = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}

# Begins the file and writes the first of its rows, all of one value.
CREATOR = f"""
path, rows, value = sys.argv[1], int(sys.argv[2]), float(sys.argv[3])
writer = ingot.Writer(path, {{"rows": ("F32", [{ROWS}, 8])}}, overwrite=True)
for row in range(rows):
    writer.write("rows", numpy.full(8, value, "f4"), row)
"""
WAIT = """
say("ready")
sys.stdin.read()
"""


@contextmanager
def running(program: str, *arguments: object) -> Iterator[subprocess.Popen[str]]:
    """Run a program until it reports that it is ready. Kill it at the end of the block."""
    process = subprocess.Popen(
        [sys.executable, "-c", PRELUDE + program, *map(str, arguments)],
        env=ENVIRONMENT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        with process.stdin, process.stdout:
            assert process.stdout.readline() == '"ready"\n'
            yield process
    finally:
        process.kill()
        process.wait()


def killed(process: subprocess.Popen[str]) -> None:
    process.send_signal(signal.SIGKILL)
    process.wait()


def orphan(path: Path, rows: int, value: float = 1.0) -> None:
    """Leave an unfinished file whose writer wrote `rows` rows before it was killed."""
    with running(CREATOR + WAIT, path, rows, value) as creator:
        killed(creator)


def refusal(call: Callable[[], object]) -> ingot.StorageError:
    with pytest.raises(ingot.StorageError) as caught:
        call()
    return caught.value


def fill(writer: ingot.Writer, value: float) -> list[int]:
    """Write every missing row, and return their numbers."""
    written = []
    for row in range(ROWS):
        try:
            writer.write("rows", numpy.full(8, value, "f4"), row)
            written.append(row)
        except ingot.SaveError as error:
            if error.code != "filled-twice":
                raise
    return written


def values(path: Path) -> list[float]:
    rows = ingot.numpy.load_file(path)["rows"]
    assert (rows == rows[:, :1]).all()
    return list(rows[:, 0])


@pytest.fixture
def path(path: Path) -> Path:
    ingot.numpy.save_file({"rows": numpy.zeros((ROWS, 8), "f4")}, path)
    return path


@pytest.mark.parametrize("rows", [0, 1, ROWS // 2, ROWS])
def test_writer_join_without_a_creator_mixes_no_runs(path: Path, rows: int) -> None:
    orphan(path, rows)
    for _ in range(2):
        error = refusal(lambda: ingot.Writer.join(path))
        assert error.code == "orphaned"
        assert error.path == str(path)
        assert "killed" in str(error)
        assert 'orphaned="finish"' in str(error)
    assert set(values(path)) == {0.0}
    # The next run starts a new file, which its helpers join.
    with ingot.Writer(path, SPECS, overwrite=True) as writer, ingot.Writer.join(path) as guest:
        assert fill(guest, 2.0) == list(range(ROWS))
        writer.commit()
    assert set(values(path)) == {2.0}
    assert os.listdir(path.parent) == [path.name]


@pytest.mark.parametrize("rows", [0, 1, ROWS // 2, ROWS])
@pytest.mark.parametrize("commits", [True, False])
def test_writer_join_finishes_an_orphaned_file(path: Path, rows: int, commits: bool) -> None:
    orphan(path, rows)
    with ingot.Writer.join(path, orphaned="finish") as writer:
        # This writer is the creator now: other processes cannot start the file, but may join it.
        assert refusal(lambda: ingot.Writer(path, SPECS, overwrite=True)).code == "busy"
        with ingot.Writer.join(path) as guest:
            assert fill(guest, 2.0) == list(range(rows, ROWS))
        if commits:
            writer.commit()
    assert values(path) == ([1.0] * rows + [2.0] * (ROWS - rows) if commits else [0.0] * ROWS)
    assert os.listdir(path.parent) == [path.name]
    assert refusal(lambda: ingot.Writer.join(path, orphaned="finish")).code == "nothing-to-join"


def test_writer_finish_joins_a_living_creator(path: Path) -> None:
    with ingot.Writer(path, SPECS, overwrite=True) as writer:
        with ingot.Writer.join(path, orphaned="finish") as guest:
            fill(guest, 3.0)
        assert set(values(path)) == {0.0}
        writer.commit()
    assert set(values(path)) == {3.0}
    for wrong in ("yes", "", "Finish"):
        with pytest.raises(ingot.OptionError, match="orphaned"):
            ingot.Writer.join(path, orphaned=wrong)  # type: ignore[arg-type]


@pytest.mark.parametrize("rows", [ROWS // 2, ROWS])
def test_writer_guests_stop_without_the_creator(path: Path, rows: int) -> None:
    with running(CREATOR + WAIT, path, rows, 1.0) as creator:
        guests = [ingot.Writer.join(path, orphaned="finish") for _ in range(3)]
        killed(creator)
    for guest in guests:
        for call in (guest.commit, lambda guest=guest: guest.write("rows", numpy.zeros((0, 8), "f4"), [])):
            assert refusal(call).code == "orphaned"
        assert refusal(lambda: ingot.Writer(path, SPECS, overwrite=True)).code == "busy"
        # A save does not remove unfinished files that a guest may still finish.
        ingot.numpy.save_file({"rows": numpy.zeros((ROWS, 8), "f4")}, path)
        if guest is not guests[-1]:
            guest.close()
    # While one guest has the file open, the others do not know whether it still writes.
    error = refusal(lambda: ingot.Writer.join(path, orphaned="finish"))
    assert error.code == "orphaned"
    assert "others" in str(error)
    guests[-1].close()
    with ingot.Writer.join(path, orphaned="finish") as writer:
        fill(writer, 2.0)
        writer.commit()
    assert values(path) == [1.0] * rows + [2.0] * (ROWS - rows)
    assert os.listdir(path.parent) == [path.name]


FINISHER = f"""
say("ready")
sys.stdin.readline()
writer = ingot.Writer.join(sys.argv[1], orphaned="finish")
won = 0
for row in range({ROWS}):
    try:
        writer.write("rows", numpy.full(8, 2, "f4"), row)
        won += 1
    except ingot.SaveError as error:
        assert error.code == "filled-twice", error
say(won)
sys.stdin.readline()
"""


def test_writer_finish_has_one_creator(path: Path) -> None:
    orphan(path, 5)
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", PRELUDE + FINISHER, str(path)],
            env=ENVIRONMENT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for _ in range(6)
    ]

    def said() -> list[str]:
        return [process.stdout.readline() for process in processes]  # type: ignore[union-attr]

    def tell() -> None:
        for process in processes:
            assert process.stdin is not None
            process.stdin.write("go\n")
            process.stdin.flush()

    try:
        assert said() == ['"ready"\n'] * 6
        tell()
        assert sum(map(int, said())) == ROWS - 5
        with ingot.Writer.join(path) as guest:
            guest.commit()
        tell()
        assert [process.wait() for process in processes] == [0] * 6
    finally:
        for process in processes:
            process.kill()
            process.communicate()
    assert values(path) == [1.0] * 5 + [2.0] * (ROWS - 5)
    assert os.listdir(path.parent) == [path.name]


FORKS = """
# A forked child must not count as the creator, and must not keep other processes from the file.
reading, writing = os.pipe()
if os.fork() == 0:
    os.close(writing)
    try:
        writer.commit()
    except ingot.ClosedError as error:
        assert error.code == "forked", error
        say("ready")
    os.read(reading, 1)
    say("orphan ends")
    os._exit(0)
os.close(reading)
sys.stdin.read()
"""


@pytest.mark.parametrize("kind", ["writer", "guest", "appender"])
def test_writer_fork_is_not_the_creator(path: Path, kind: str) -> None:
    makes = {
        "writer": CREATOR,
        "guest": CREATOR + "owner, writer = writer, ingot.Writer.join(path)\n",
        "appender": 'room = {"reserve_header": 1000}\n'
        "writer = ingot.Writer(sys.argv[1], write_options=room, overwrite=True)\n"
        'writer.write("a", numpy.zeros(3))\n',
    }
    with running(makes[kind] + FORKS, path, 4, 1.0) as creator:
        # The forked child ends soon after the creator, and may still run during the calls below.
        os.kill(creator.pid, signal.SIGSTOP)
        assert creator.stdout is not None
        killed(creator)
        expected = "nothing-to-join" if kind == "appender" else "orphaned"
        assert refusal(lambda: ingot.Writer.join(path)).code == expected
        with ingot.Writer(path, SPECS, overwrite=True) as writer:
            fill(writer, 2.0)
            writer.commit()
        assert select.select([creator.stdout], [], [], 60)[0]
    assert set(values(path)) == {2.0}
    assert os.listdir(path.parent) == [path.name]


# The call in which the creator is killed, and the number of complete rows: it has begun the third row, or has
# written all rows and not renamed the file.
MOMENTS = {"a row": ("pwrite64:delay_enter=60s:when=4", 2), "the name": ("renameat:delay_enter=60s", ROWS)}


@pytest.mark.skipif(sys.platform != "linux", reason="strace traces Linux")
@pytest.mark.parametrize("moment", MOMENTS)
def test_writer_rewrites_what_the_creator_began(path: Path, moment: str) -> None:
    inject, rows = MOMENTS[moment]
    program = "import os; print(os.getpid(), flush=True)" + PRELUDE + CREATOR + "writer.commit()"
    try:
        strace = subprocess.Popen(
            ["strace", "-f", "-o", path.parent.with_suffix(".strace"), "-e", f"inject={inject}"]
            + [sys.executable, "-c", program, str(path), str(ROWS), "1"],
            env=ENVIRONMENT,
            stdout=subprocess.PIPE,
            text=True,
        )
    except FileNotFoundError:
        pytest.skip("strace is not installed")
    with strace:
        assert strace.stdout is not None
        creator = strace.stdout.readline()
        if not creator:
            pytest.skip("strace cannot do this here")
        # strace has stopped the creator in that call once its state stays the same.
        held = 0
        while held < 30:
            held = held + 1 if state(int(creator)) == "t" else 0
            time.sleep(0.01)
        os.kill(int(creator), signal.SIGKILL)
        # strace would delay the call for the rest of the minute.
        strace.kill()
    # Every thread of the creator keeps the files open until it has ended.
    while threads(int(creator)) > 1 or state(int(creator)) not in ("gone", "Z"):
        time.sleep(0.01)
    assert refusal(lambda: ingot.Writer.join(path)).code == "orphaned"
    with ingot.Writer.join(path, orphaned="finish") as writer:
        assert fill(writer, 2.0) == list(range(rows, ROWS))
        writer.commit()
    assert values(path) == [1.0] * rows + [2.0] * (ROWS - rows)
    assert os.listdir(path.parent) == [path.name]


def threads(pid: int) -> int:
    """Return the number of threads that a process has left. A zombie has one."""
    try:
        return len(os.listdir(f"/proc/{pid}/task"))
    except (FileNotFoundError, ProcessLookupError):
        return 0


def state(pid: int) -> str:
    """Return the state of a process: ``"t"`` if strace has stopped it, ``"Z"`` if it has ended."""
    try:
        return Path(f"/proc/{pid}/status").read_text().partition("State:\t")[2][:1]
    except (FileNotFoundError, ProcessLookupError):
        return "gone"


@pytest.mark.skipif(sys.platform != "linux", reason="strace traces Linux")
@pytest.mark.parametrize("orphaned", ["refuse", "finish"])
def test_writer_join_needs_locks(path: Path, orphaned: str) -> None:
    program = """
writer = ingot.Writer(sys.argv[1], {"a": ("F32", [4])}, overwrite=True)
try:
    ingot.Writer.join(sys.argv[1], orphaned=sys.argv[2])
except ingot.StorageError as error:
    found = [error.code, error.errno, str(error)]
writer.write("a", numpy.ones(4, "f4"))
writer.commit()
say(found)
"""
    ended = traced(program, path, orphaned, folder=path.parent, inject=["flock:error=ENOLCK"])
    code, number, message = ended.said()
    assert (code, number) == ("write", errno.ENOLCK)
    assert "lock" in message
    assert ingot.numpy.load_file(path)["a"].tolist() == [1.0] * 4
