"""All writers treat an existing file alike. `writers.toml` has the outcomes, and the exceptions."""

from __future__ import annotations

import ctypes
import errno
import hashlib
import os
import re
import signal
import subprocess
import sys
import tempfile
import tomllib
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy
import pytest

import ingot
import ingot.numpy
from ingot.cli.program import _invoked
from support.processes import NOBODY
from support.servers import good, serving
from support.small_disk import small_disk
from support.supervised import KILL, supervised

torch = pytest.importorskip("torch")
import ingot.torch  # noqa: E402

if sys.platform == "win32":
    pytest.skip("modes, links and users are those of POSIX", allow_module_level=True)

TABLE = tomllib.loads(Path(__file__).with_name("writers.toml").read_text("utf-8"))

# Large enough for several writes, and too large for a full disk.
OLD = {"a": numpy.zeros(16_000, "f4"), "b": numpy.zeros(16_000, "f4")}
NEW = {"a": numpy.ones(16_000, "f4"), "b": numpy.ones(16_000, "f4")}
STATE = {name: torch.from_numpy(array) for name, array in NEW.items()}
SHARD_NBYTES = 70_000
MODEL = "model.safetensors"

Outcome = dict[str, Any]


# One function for each writer, with the names that its options have.


def existing(options: dict[str, Any]) -> dict[str, Any]:
    """Return the options as functions take them, which replace the file unless a case says otherwise."""
    rare = {name: options.pop(name) for name in ("replace_read_only", "reserve_header") if name in options}
    return {"overwrite": True, **options, "write_options": rare}


def save_model(path: Path, **options: bool) -> None:
    model = torch.nn.Module()
    for name, tensor in STATE.items():
        model.register_parameter(name, torch.nn.Parameter(tensor))
    ingot.torch.save_model(model, path, **existing(options))


def serialize_file(path: Path, **options: bool) -> None:
    spec = {
        name: {"dtype": "F32", "shape": [*array.shape], "data": array.tobytes()}
        for name, array in NEW.items()
    }
    ingot.serialize_file(spec, path, **existing(options))


def fill(writer: ingot.Writer) -> None:
    with writer:
        for name, array in NEW.items():
            writer.write(name, array)
        writer.commit()


def save_in_background(path: Path, **options: bool) -> None:
    ingot.numpy.save_file(NEW, path, background=True, **existing(options)).result()


def command(*arguments: object, overwrite: bool = True, replace_read_only: bool = False) -> None:
    flags = ["--overwrite"] * overwrite + ["--replace-read-only"] * replace_read_only
    assert _invoked([*map(str, arguments), *flags]) == 0


def convert(path: Path, **options: Any) -> None:
    kind = "safetensors" if "max_shard_size" in options else None
    ingot.convert(SOURCE, path, format=options.pop("format", kind), **existing(options))


@dataclass(frozen=True)
class Writer:
    """A way to write a file, or a checkpoint to a directory."""

    write: Callable[..., object]
    is_directory: bool = False

    def __call__(self, path: Path, **options: bool) -> object:
        return self.write(path.parent if self.is_directory else path, **options)

    def path(self, folder: Path) -> Path:
        """Return the path of the file, or of the first file of the checkpoint."""
        return folder / ("model-00001-of-00002.safetensors" if self.is_directory else MODEL)

    def furnish(self, folder: Path) -> Path:
        """Make a folder that has the old file or the old checkpoint. Return its path."""
        folder.mkdir()
        path = self.path(folder)
        if self.is_directory:
            ingot.split(OLD_SOURCE, folder, SHARD_NBYTES)
        else:
            path.write_bytes(OLD_SOURCE.read_bytes())
        return path

    def state(self, path: Path) -> str:
        """Return what readers find: "old" or "new", whole, or the fault."""
        if not self.is_directory:
            found = path.read_bytes()
            return "old" if found == OLD_SOURCE.read_bytes() else "new" if self.is_new(found) else "broken"
        try:
            loaded = ingot.numpy.load_file(path.parent)
        except (ingot.SafetensorError, OSError) as error:
            return f"broken: {error}"
        values = {float(value) for array in loaded.values() for value in (array.min(), array.max())}
        known = {(0.0,): "old", (1.0,): "new"}
        return known.get(tuple(values), "mixed") if loaded.keys() == OLD.keys() else "broken"

    def is_new(self, content: bytes) -> bool:
        """Return whether the writer supports the case."""
        if self not in WRITTEN:
            with fresh() as folder:
                path = self.furnish(folder / "written")
                self(path)
                WRITTEN[self] = path.read_bytes()
        return content == WRITTEN[self]


WRITERS = {
    "save_file": Writer(lambda path, **options: ingot.numpy.save_file(NEW, path, **existing(options))),
    "save_file_background": Writer(save_in_background),
    "save_model": Writer(save_model),
    "save_state": Writer(lambda path, **options: ingot.torch.save_state(STATE, path, **existing(options))),
    "serialize_file": Writer(serialize_file),
    "save_sharded": Writer(
        lambda path, **options: ingot.torch.save_sharded(STATE, path, SHARD_NBYTES, **existing(options)), True
    ),
    "split": Writer(
        lambda path, **options: ingot.split(SOURCE, path, SHARD_NBYTES, **existing(options)), True
    ),
    "merge": Writer(lambda path, **options: ingot.merge([SOURCE], path, **existing(options))),
    "rewrite": Writer(lambda path, **options: ingot.rewrite(SOURCE, path, **existing(options))),
    "repair": Writer(lambda path, **options: ingot.repair(SOURCE, path, **existing(options))),
    "convert": Writer(convert),
    "convert_to_npz": Writer(lambda path, **options: convert(path, format="npz", **options)),
    "convert_to_shards": Writer(
        lambda path, **options: convert(path, max_shard_size=SHARD_NBYTES, **options), True
    ),
    "Writer": Writer(lambda path, **options: fill(ingot.Writer(path, NEW, **existing(options)))),
    "Writer_without_specs": Writer(
        lambda path, **options: fill(ingot.Writer(path, **existing({**options, "reserve_header": 900})))
    ),
    "update_metadata": Writer(lambda path, **options: ingot.update_metadata(path, {"k": "v"}, atomic=True)),
    "replace_tensor": Writer(lambda path, **options: ingot.replace_tensor(path, "a", NEW["a"])),
    "download": Writer(lambda path, **options: ingot.download(os.environ["URL"], path, **existing(options))),
    "cast": Writer(lambda path, **options: command("cast", "-q", SOURCE, path, "--dtype", "F64", **options)),
    "export": Writer(lambda path, **options: command("export", "-q", SOURCE, "a", "-o", path, **options)),
    "export_raw": Writer(
        lambda path, **options: command("export", "-q", SOURCE, "a", "--raw", "-o", path, **options)
    ),
    "meta_export": Writer(lambda path, **options: command("meta", "export", SOURCE, path, **options)),
    "view_html": Writer(lambda path, **options: command("view", "-q", SOURCE, "--html", path, **options)),
}
# The output of each writer, filled on first use.
WRITTEN: dict[Writer, bytes] = {}


# The files that writers read, which a fixture makes.
BASE = Path(tempfile.gettempdir()) / f"ingot-writers-{os.getpid()}"
SOURCE, OLD_SOURCE = BASE / "source.safetensors", BASE / "old.safetensors"


@contextmanager
def fresh(parent: Path = BASE) -> Iterator[Path]:
    """Yield a folder that every user may enter and write to, and remove it afterwards."""
    with tempfile.TemporaryDirectory(dir=parent) as name:
        Path(name).chmod(0o777)
        yield Path(name)


@pytest.fixture(scope="module", autouse=True)
def sources() -> Iterator[None]:
    """Make the files that writers read, and import the modules that they import late."""
    BASE.mkdir(mode=0o755)
    try:
        ingot.numpy.save_file(OLD, OLD_SOURCE)
        ingot.numpy.save_file(NEW, SOURCE, {"text": "t" * 60_000})
        with serving(good(SOURCE.read_bytes())) as server:
            os.environ["URL"] = server.url(f"/{MODEL}")
            for writer in WRITERS.values():
                writer.is_new(b"")
            yield
    finally:
        subprocess.run(["rm", "-r", BASE], check=True)


@contextmanager
def nobody() -> Iterator[None]:
    """Become an unprivileged user if this is root, which may write to all files."""
    if os.geteuid() != 0:
        yield
        return
    os.setegid(NOBODY)
    os.seteuid(NOBODY)
    try:
        yield
    finally:
        os.seteuid(0)
        os.setegid(0)
        # A change of the user clears the flag "dumpable", without which /proc/self is inaccessible.
        ctypes.CDLL(None).prctl(4, 1, 0, 0, 0)


def spoken(error: BaseException, path: Path) -> str:
    """Return the class, code, number and text of an error, without names and numbers that change."""
    assert os.fspath(path.parent) in str(error) or isinstance(error, KeyboardInterrupt), str(error)
    parts = [type(error).__name__, getattr(error, "code", None)]
    number = getattr(error, "errno", None)
    parts.append(errno.errorcode[number] if number else None)
    words = str(getattr(error, "strerror", None) or error)
    words = re.sub(rf"{re.escape(os.fspath(path.parent))}[\w./-]*: ", "", words)
    return f"{' '.join(filter(None, parts))}: {re.sub(r'[0-9,]{3,}', 'N', words)}"


def attempt(writer: Writer, path: Path, **options: bool) -> str:
    """Write, and return the error, or an empty text."""
    try:
        writer(path, **options)
    except (ingot.SafetensorError, OSError, KeyboardInterrupt) as error:
        return spoken(error, path)
    return ""


def leftovers(path: Path) -> list[str]:
    """Return the names of temporary files."""
    return sorted(
        re.sub(r"[0-9a-f]{8,}", "N", one.name) for one in path.parent.iterdir() if one.name[0] == "."
    )


def mode(path: Path) -> str:
    return f"{path.stat().st_mode & 0o777:04o}"


def described(writer: Writer, path: Path, error: str) -> Outcome:
    return {"error": error, "file": writer.state(path), "leftovers": leftovers(path)}


# One function for each case.


def refused(writer: Writer, folder: Path) -> Outcome:
    path = writer.furnish(folder / "x")
    return described(writer, path, attempt(writer, path, overwrite=False))


def replaced(writer: Writer, folder: Path) -> Outcome:
    path = writer.furnish(folder / "x")
    return described(writer, path, attempt(writer, path))


def mode_0600(writer: Writer, folder: Path) -> Outcome:
    path = writer.furnish(folder / "x")
    for file in path.parent.iterdir():
        file.chmod(0o600)
    error = attempt(writer, path)
    found = {mode(file) for file in path.parent.iterdir()}
    return described(writer, path, error) | {"modes": sorted(found)}


def symlink(writer: Writer, folder: Path) -> Outcome:
    path = writer.furnish(folder / "x")
    target = path.rename(folder / "target")
    target.chmod(0o640)
    path.symlink_to("../target")
    error = attempt(writer, path)
    kept = {"link": path.is_symlink(), "mode": mode(path)}
    return described(writer, path, error) | kept | {"beside_target": leftovers(target)}


def snapshot(writer: Writer, folder: Path) -> Outcome:
    """The destination is a link to a blob of the Hugging Face cache."""
    path = writer.furnish(folder / "snapshots")
    content = path.read_bytes()
    (folder / "blobs").mkdir()
    blob = path.rename(folder / "blobs" / hashlib.sha256(content).hexdigest())
    path.symlink_to(blob)
    error = attempt(writer, path)
    kept = {"link": path.is_symlink(), "blob": "old" if blob.read_bytes() == content else "changed"}
    return described(writer, path, error) | kept


def dangling_link(writer: Writer, folder: Path) -> Outcome:
    """The destination is a link to no file. Nothing would be replaced."""
    path = writer.furnish(folder / "x")
    path.unlink()
    path.symlink_to("../target")
    error = attempt(writer, path, overwrite=False)
    return {"error": error, "link": path.is_symlink(), "target": path.exists(), "leftovers": leftovers(path)}


def hard_link(writer: Writer, folder: Path) -> Outcome:
    path = writer.furnish(folder / "x")
    content = path.read_bytes()
    os.link(path, folder / "other")
    error = attempt(writer, path)
    same = (folder / "other").read_bytes() == content
    return described(writer, path, error) | {"other": "old" if same else "changed"}


def read_only(writer: Writer, folder: Path, **options: bool) -> Outcome:
    path = writer.furnish(folder / "x")
    path.parent.chmod(0o777)
    path.chmod(0o444)
    with nobody():
        error = attempt(writer, path, **options)
    return described(writer, path, error) | {"mode": mode(path)}


def read_only_replaced(writer: Writer, folder: Path) -> Outcome:
    return read_only(writer, folder, replace_read_only=True)


def read_only_directory(writer: Writer, folder: Path) -> Outcome:
    path = writer.furnish(folder / "x")
    for file in path.parent.iterdir():
        file.chmod(0o666)
    path.parent.chmod(0o555)
    with nobody():
        error = attempt(writer, path)
    return described(writer, path, error)


def full_disk(writer: Writer, folder: Path) -> Outcome:
    with small_disk(folder / "disk", 2) as place:
        path = writer.furnish(place / "x")
        free = os.statvfs(place).f_bfree * os.statvfs(place).f_bsize
        (place / "filler").write_bytes(bytes(free - 16_384))
        return described(writer, path, attempt(writer, path))


@dataclass
class Child:
    """A child process that runs a writer under supervision of its system calls."""

    writer: Writer
    path: Path
    seen: list[str] = field(default_factory=list)

    def run(self, decide: Callable[[str], int]) -> str | None:
        """Return the child's error, empty if it has none. None if it was killed."""

        def work() -> str:
            (self.path.parent.parent / "pid").write_text(str(os.getpid()))
            signal.signal(signal.SIGINT, signal.default_int_handler)
            return attempt(self.writer, self.path)

        with warnings.catch_warnings():
            # pytest's process has threads.
            warnings.simplefilter("ignore", DeprecationWarning)
            ended = supervised(work, self.path.parent, lambda name, nth, number: decide(name))
        if ended is None:
            pytest.skip("the calls of a process cannot be seen here")
        assert self.seen, f"no such call: {ended.calls}"
        return ended.said

    def before_first(self, names: tuple[str, ...], act: Callable[[], int]) -> str | None:
        """Run the child, and call `act` before its first call of one of these."""

        def decide(name: str) -> int:
            if name not in names or self.seen:
                return 0
            self.seen.append(name)
            return act()

        return self.run(decide)


def killed(writer: Writer, folder: Path) -> Outcome:
    """The process is killed before the complete file is renamed."""
    child = Child(writer, writer.furnish(folder / "x"))
    assert child.before_first(("rename", "renameat", "renameat2"), lambda: KILL) is None
    found = writer.state(child.path)
    return {"file": found, "next": described(writer, child.path, attempt(writer, child.path))}


WRITES = ("write", "pwrite64", "writev", "pwritev", "pwritev2", "fallocate", "ftruncate", "copy_file_range")


def interrupted(writer: Writer, folder: Path) -> Outcome:
    """Ctrl-C comes with the first write."""
    child = Child(writer, writer.furnish(folder / "x"))

    def interrupt() -> int:
        os.kill(int((folder / "pid").read_text()), signal.SIGINT)
        return 0

    error = child.before_first(WRITES, interrupt)
    return described(writer, child.path, error or "written")


def durable(writer: Writer, folder: Path) -> Outcome:
    """The file is flushed before it is renamed, and the directory afterwards."""
    child = Child(writer, writer.furnish(folder / "x"))
    steps = {"fsync": "flush", "fdatasync": "flush", "rename": "rename", "renameat": "rename"}

    def decide(name: str) -> int:
        if name in steps and child.seen[-1:] != [steps[name]]:
            child.seen.append(steps[name])
        return 0

    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("INGOT_DURABLE")
        error = child.run(decide)
    # A checkpoint renames more than once, with a flush in between.
    return described(writer, child.path, error or "") | {"first": child.seen[:2], "last": child.seen[-2:]}


CASES: dict[str, Callable[[Writer, Path], Outcome]] = {
    case.__name__: case
    for case in (
        refused,
        replaced,
        mode_0600,
        symlink,
        dangling_link,
        snapshot,
        hard_link,
        read_only,
        read_only_replaced,
        read_only_directory,
        full_disk,
        killed,
        interrupted,
        durable,
    )
}


@pytest.mark.parametrize("writer", WRITERS)
@pytest.mark.parametrize("case", CASES)
def test_writers_have_the_outcome_of_the_table(case: str, writer: str) -> None:
    exception = TABLE["exceptions"].get(writer, {}).get(case, {})
    if "skipped" in exception:
        pytest.skip(exception["skipped"])
    expected = TABLE["outcomes"][case] | {key: exception[key] for key in exception if key != "reason"}
    with fresh() as folder:
        assert CASES[case](WRITERS[writer], folder) == expected


def test_writers_table_is_complete() -> None:
    assert TABLE["outcomes"].keys() == CASES.keys()
    for writer, exceptions in TABLE["exceptions"].items():
        assert writer in WRITERS
        for case, exception in exceptions.items():
            assert case in CASES
            assert exception.get("reason") or exception.get("skipped"), f"{writer}.{case} has no reason"
