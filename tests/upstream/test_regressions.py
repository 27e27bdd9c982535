"""What goes wrong with safetensors 0.8.0, 0.7.0 and bintensors 0.2.0, and does not with ingot.

One test for each defect; its docstring says what upstream does. Where the wheel can be made to show it, a
function marked `defect` does so beside it, and `test_upstream_still_does_this` asserts what it gives. When
upstream has mended something, that test fails, and the entry goes. `#N` is an issue of safetensors.
"""

from __future__ import annotations

import errno
import hashlib
import io
import json
import mmap
import os
import socket
import stat
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from subprocess import DEVNULL, Popen
from typing import Any

import bintensors
import bintensors.numpy
import ml_dtypes
import numpy
import pytest
import safetensors
import safetensors.numpy
import safetensors.torch
import torch

import ingot
import ingot.numpy
import ingot.torch
from support.processes import NOBODY, run
from vectors.case import Vector, vectors

Array = numpy.ndarray[Any, Any]
Measure = Callable[[Path], Any]
DEFECTS: list[Any] = []


def defect(expected: Any) -> Callable[[Measure], Measure]:
    """Marks what a wheel does wrong: the function is given an empty folder and gives `expected`."""

    def note(measure: Measure) -> Measure:
        DEFECTS.append(pytest.param(measure, expected, id=measure.__name__))
        return measure

    return note


def raised(call: Callable[[], Any]) -> str:
    """The class of what `call` raises, and the first words of it. Panics are no `Exception`."""
    try:
        call()
    except BaseException as error:
        return f"{type(error).__name__}: {error}"[:60].rstrip()
    return "nothing"


def file_of(header: Any, data: bytes = b"") -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + data


def entry(dtype: str, shape: list[int], begin: int, end: int) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


def vector(name: str) -> Vector:
    return next(vector for vector in vectors() if vector.name == name)


def mode(path: Path) -> str:
    return oct(stat.S_IMODE(path.lstat().st_mode))


@pytest.fixture
def umask() -> Iterator[None]:
    before = os.umask(0o022)
    yield
    os.umask(before)


ARRAY = numpy.arange(24, dtype=numpy.float32).reshape(6, 4)


# Saving: where the file goes


@pytest.mark.usefixtures("umask")
def test_a_new_file_can_be_read_by_others_as_the_umask_says(path: Path) -> None:
    """0.8.0 creates every file with mode 0600, so other users find no model (#782)."""
    ingot.numpy.save_file({"a": ARRAY}, path)
    assert mode(path) == "0o644"
    os.umask(0o007)
    ingot.torch.save_file({"a": torch.zeros(3)}, path.with_suffix(".bt"))
    assert mode(path.with_suffix(".bt")) == "0o660"


@pytest.mark.usefixtures("umask")
@pytest.mark.parametrize("bits", [0o600, 0o644, 0o666, 0o755])
def test_an_existing_file_keeps_its_mode(path: Path, bits: int) -> None:
    """0.8.0 makes it 0600 (#782)."""
    path.touch()
    path.chmod(bits)
    ingot.numpy.save_file({"a": ARRAY}, path)
    assert mode(path) == oct(bits)


@defect(["0o600", "0o600"])
def modes_of_a_new_file_and_an_existing_one(folder: Path) -> list[str]:
    path, existing = folder / "new", folder / "existing"
    existing.touch(0o644)
    for target in (path, existing):
        safetensors.numpy.save_file({"a": ARRAY}, target)
    return [mode(path), mode(existing)]


def test_a_symlink_is_followed_and_kept(tmp_path: Path) -> None:
    """0.8.0 replaces the link by the file, and what it led to stays as it was. 0.7.0 followed it."""
    link, target = tmp_path / "link", tmp_path / "elsewhere" / "target"
    target.parent.mkdir()
    ingot.numpy.save_file({"a": ARRAY}, target)
    link.symlink_to("elsewhere/target")
    ingot.numpy.save_file({"a": ARRAY + 1}, link)
    assert os.readlink(link) == "elsewhere/target"
    assert (ingot.numpy.load_file(target)["a"] == ARRAY + 1).all()


@defect([False, 0])
def link_is_kept_and_target_has(folder: Path) -> list[Any]:
    link, target = folder / "link", folder / "target"
    target.touch()
    link.symlink_to("target")
    safetensors.numpy.save_file({"a": ARRAY}, link)
    return [link.is_symlink(), target.stat().st_size]


def test_a_fifo_is_written_into(tmp_path: Path) -> None:
    """0.8.0 puts a file in place of the FIFO, and of a device."""
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    received: list[bytes] = []
    reader = threading.Thread(target=lambda: received.append(fifo.read_bytes()))
    reader.start()
    ingot.numpy.save_file({"a": ARRAY}, fifo)
    reader.join()
    assert fifo.is_fifo()
    assert received == [ingot.numpy.save({"a": ARRAY})]


@defect(False)
def fifo_is_still_a_fifo(folder: Path) -> bool:
    os.mkfifo(folder / "fifo")
    safetensors.numpy.save_file({"a": ARRAY}, folder / "fifo")
    return (folder / "fifo").is_fifo()


READ_ONLY = """
become_nobody()
found = []
for options in ({}, {"atomic": False}, {"force": True}):
    try:
        found.append(ingot.numpy.save_file({"a": numpy.ones(3)}, "t", **options))
    except PermissionError as fault:
        found.append([fault.filename, os.stat("t").st_size])
say([*found, ingot.numpy.load_file("t")["a"].tolist()])
"""


def read_only_file(folder: Path) -> Path:
    """A folder with a file that whoever `become_nobody` makes us may not write to, though to the folder."""
    (folder / "t").touch()
    if os.geteuid() == 0:
        os.chown(folder, NOBODY, NOBODY)
        os.chown(folder / "t", NOBODY, NOBODY)
    (folder / "t").chmod(0o444)
    return folder


def test_a_read_only_file_is_refused(tmp_path: Path) -> None:
    """0.8.0 replaces it without a word."""
    found = run(READ_ONLY, folder=read_only_file(tmp_path)).said()
    assert found == [["t", 0], ["t", 0], None, [1, 1, 1]]
    assert mode(tmp_path / "t") == "0o444"


@defect("nothing")
def replacing_a_read_only_file_raises(folder: Path) -> str:
    (folder / "t").touch(0o444)
    return raised(lambda: safetensors.numpy.save_file({"a": ARRAY}, folder / "t"))


def test_owner_group_and_extended_attributes_pass_on(path: Path) -> None:
    """0.8.0 loses all of them: the file belongs to whoever saved last."""
    ingot.numpy.save_file({"a": ARRAY}, path)
    if os.geteuid() == 0:
        os.chown(path, 1234, 1235)
    try:
        os.setxattr(path, "user.note", b"mine")
    except OSError as fault:
        pytest.skip(f"no extended attributes on the file system of {path.parent}: {fault}")
    owner = (path.stat().st_uid, path.stat().st_gid)
    ingot.numpy.save_file({"a": ARRAY + 1}, path)
    assert (path.stat().st_uid, path.stat().st_gid) == owner
    assert os.getxattr(path, "user.note") == b"mine"


@defect([])
def extended_attributes_left(folder: Path) -> list[str]:
    path = folder / "t"
    path.touch()
    try:
        os.setxattr(path, "user.note", b"mine")
    except OSError as fault:
        pytest.skip(f"no extended attributes on the file system of {folder}: {fault}")
    safetensors.numpy.save_file({"a": ARRAY}, path)
    return os.listxattr(path)


def test_a_failed_save_names_the_file_that_was_asked_for(tmp_path: Path) -> None:
    """0.8.0 names its temporary file, or none, and raises no `OSError`."""
    missing = tmp_path / "missing" / "model.safetensors"
    with pytest.raises(FileNotFoundError) as caught:
        ingot.numpy.save_file({"a": ARRAY}, missing)
    assert caught.value.filename == str(missing)
    with pytest.raises(IsADirectoryError) as directory:
        ingot.numpy.save_file({"a": ARRAY}, tmp_path)
    assert directory.value.filename == str(tmp_path)
    program = """
resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))
try:
    ingot.numpy.save_file({"a": numpy.zeros(100_000)}, "model.safetensors")
except ingot.StorageError as fault:
    say([str(fault), fault.errno, fault.filename, os.listdir()])
"""
    message, number, filename, left = run(program, folder=tmp_path).said()
    assert message.startswith("model.safetensors: could not ")
    assert "800" in message
    assert number == errno.EFBIG
    assert filename == "model.safetensors"
    assert left == []


@defect(["SafetensorError", True, False])
def class_and_temporary_file_and_own_file_in_message(folder: Path) -> list[Any]:
    with pytest.raises(safetensors.SafetensorError) as caught:
        safetensors.numpy.save_file({"a": ARRAY}, folder / "missing" / "model.safetensors")
    message = str(caught.value)
    return [type(caught.value).__name__, "/.tmp" in message, "model.safetensors" in message]


@pytest.mark.parametrize("backend", ["mmap", "pread"])
@pytest.mark.parametrize("module", [ingot.numpy, ingot.torch], ids=["numpy", "torch"])
def test_a_file_can_be_saved_over_itself(path: Path, module: Any, backend: str) -> None:
    """0.8.0rc0 wrote zeros, since it emptied the file that the tensors were still mapped from (#762)."""
    ingot.numpy.save_file({"a": ARRAY, "b": ARRAY * 2}, path)
    before = path.read_bytes()
    loaded = module.load_file(path, backend=backend)
    for options in ({}, {"atomic": False}):
        module.save_file(loaded, path, **options)
        assert path.read_bytes() == before
    assert (numpy.asarray(loaded["b"]) == ARRAY * 2).all()


# Saving: what the file holds


def layouts() -> dict[str, Array]:
    return {
        "fortran": numpy.asfortranarray(ARRAY),
        "strided": ARRAY[::2, ::3],
        "reversed": ARRAY[::-1, ::-1],
        "broadcast": numpy.broadcast_to(ARRAY[0], (5, 4)),
        "transposed": ARRAY.T,
        "big-endian": ARRAY.astype(">f4"),
        "big-endian, strided": ARRAY.astype(">f4")[::-2],
        "offset": ARRAY[1:, 1:3],
        "window": numpy.lib.stride_tricks.sliding_window_view(ARRAY, (2, 2)),
    }


@pytest.mark.parametrize("layout", layouts())
@pytest.mark.parametrize("format", ["safetensors", "bintensors"])
def test_the_file_holds_the_logical_array(path: Path, layout: str, format: Any) -> None:
    """0.8.0 writes memory as it lies: scrambled values (#825), and what the heap holds past the array."""
    array = layouts()[layout]
    ingot.numpy.save_file({"a": array}, path, format=format)
    assert path.read_bytes() == ingot.numpy.save({"a": array}, format=format)
    loaded = ingot.numpy.load_file(path)["a"]
    assert loaded.shape == array.shape
    assert (loaded == array).all()


@defect({"fortran": False, "strided": False, "transposed": False, "offset": False})
def layouts_that_come_back(folder: Path) -> dict[str, bool]:
    arrays = {name: layouts()[name] for name in ("fortran", "strided", "transposed", "offset")}
    loaded = safetensors.numpy.load(safetensors.numpy.save(arrays))
    return {name: bool((loaded[name] == array).all()) for name, array in arrays.items()}


@defect([False, False, "SIGSEGV"])
def layouts_read_past_the_array(folder: Path) -> list[Any]:
    reversed_ = """
import safetensors.numpy
array = numpy.arange(64, dtype=numpy.float32)[::-1]
say(bool((safetensors.numpy.load(safetensors.numpy.save({"a": array}))["a"] == array).all()))
"""
    strided = reversed_.replace("(64,", "(65,").replace("[::-1]", "[1::2]")
    broadcast = """
import safetensors.numpy
safetensors.numpy.save({"a": numpy.broadcast_to(numpy.float32(1), 1 << 28)})
"""
    return [run(reversed_).said(), run(strided).said(), run(broadcast).signal]


def test_a_numpy_scalar_is_a_tensor() -> None:
    """0.8.0: AttributeError, 'numpy.float32' object has no attribute 'ctypes'. 0.7.0 took it."""
    loaded = ingot.numpy.load(
        ingot.numpy.save({"a": numpy.float32(1.5), "b": numpy.int8(-3), "c": numpy.True_})
    )
    assert {name: (array.shape, array[()]) for name, array in loaded.items()} == {
        "a": ((), 1.5),
        "b": ((), -3),
        "c": ((), True),
    }


@defect("AttributeError: 'numpy.float32' object has no attribute 'cty")
def saving_a_scalar_raises(folder: Path) -> str:
    return raised(lambda: safetensors.numpy.save({"a": numpy.float32(1)}))


def test_the_same_tensors_give_the_same_file() -> None:
    """0.8.0 writes metadata in the order of a seeded hash: five saves, five hashes (#584)."""
    metadata = {str(number): str(number * number) for number in range(16)}
    tensors = dict.fromkeys("abc", ARRAY)
    files = {
        ingot.numpy.save(dict(order(tensors.items())), dict(order(metadata.items())))
        for order in (list, reversed)
        for _ in range(4)
    }
    assert len(files) == 1
    program = """
import hashlib
array = numpy.arange(24, dtype=numpy.float32).reshape(6, 4)
metadata = {str(number): str(number * number) for number in range(16)}
say(hashlib.sha256(ingot.numpy.save({name: array for name in set("abc")}, metadata)).hexdigest())
"""
    digest = hashlib.sha256(files.pop()).hexdigest()
    assert [run(program, PYTHONHASHSEED=seed).said() for seed in ("1", "2")] == [digest, digest]


@defect(True)
def same_tensors_give_many_files(folder: Path) -> bool:
    metadata = {str(number): "" for number in range(16)}
    return len({safetensors.numpy.save({"a": ARRAY}, metadata) for _ in range(8)}) > 1


def test_the_name_of_the_metadata_is_no_tensor(path: Path) -> None:
    """0.8.0 writes a tensor named `__metadata__`, and then cannot read the file (#849)."""
    for save in (ingot.numpy.save, lambda tensors: ingot.numpy.save_file(tensors, path)):
        with pytest.raises(ingot.SaveError) as caught:
            save({"__metadata__": ARRAY})
        assert caught.value.code == "reserved-name"
        assert caught.value.tensor == "__metadata__"
    assert not path.exists()


@defect("SafetensorError: Error while deserializing: invalid JSON in")
def reading_back_a_tensor_named_metadata(folder: Path) -> str:
    data = safetensors.numpy.save({"__metadata__": ARRAY})
    return raised(lambda: safetensors.numpy.load(data))


@pytest.mark.parametrize(
    ("value", "word"),
    [
        (numpy.array([None, "x"]), "object"),
        (numpy.zeros(2, [("x", "f4")]), "'x'"),
        (numpy.zeros(2, "M8[s]"), "datetime64"),
        (numpy.array(["text"]), "<U4"),
        (numpy.zeros(2, numpy.complex128), "complex128"),
        (numpy.zeros(2, numpy.longdouble), "float128"),
    ],
    ids=["object", "record", "date", "text", "complex128", "longdouble"],
)
def test_an_array_that_cannot_be_stored_is_named(path: Path, value: Array, word: str) -> None:
    """0.8.0 names the dtype and lists the others, but not the tensor."""
    if value.dtype.itemsize == 8 and word == "float128":
        pytest.skip("longdouble is float64 here")
    with pytest.raises((TypeError, ValueError), match=word) as caught:
        ingot.numpy.save_file({"good": ARRAY, "layer.bad": value}, path)
    assert isinstance(caught.value, ingot.SafetensorError)
    assert caught.value.tensor == "layer.bad"
    assert "`layer.bad`" in str(caught.value)
    assert not path.exists()


@defect(False)
def tensor_is_named(folder: Path) -> bool:
    return "layer.bad" in raised(lambda: safetensors.numpy.save({"layer.bad": numpy.array([None])}))


def test_nothing_is_written_before_everything_is_known_to_fit(path: Path) -> None:
    """Names and metadata that no header can hold: upstream too refuses them first."""
    path.write_bytes(b"old")
    for tensors, metadata in (
        ({"\ud800": ARRAY}, None),
        ({"a": ARRAY}, {"\ud800": ""}),
        ({"a": ARRAY}, {"k": 1}),
        ({1: ARRAY}, None),
        ({"a": ARRAY}, {"k": "x" * 100_000_000}),
        ({"a": "text"}, None),
    ):
        with pytest.raises((TypeError, ValueError)):
            ingot.numpy.save_file(tensors, path, metadata)  # type: ignore[arg-type]
    assert path.read_bytes() == b"old"
    assert os.listdir(path.parent) == [path.name]


def test_the_callers_metadata_stays_as_it_is(path: Path) -> None:
    """Upstream's helpers write into the dict that they are given (#814)."""
    metadata = {"b": "1", "a": "2"}
    ingot.torch.save_file({"a": torch.zeros(2)}, path, metadata)
    ingot.numpy.save({"a": ARRAY}, metadata)
    assert list(metadata.items()) == [("b", "1"), ("a", "2")]


@defect({"b": "a"})
def metadata_after_saving_a_model(folder: Path) -> dict[str, str]:
    class Tied(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a = torch.nn.Parameter(torch.zeros(2))
            self.b = self.a

    metadata: dict[str, str] = {}
    safetensors.torch.save_model(Tied(), str(folder / "t"), metadata)
    return metadata


def test_memory_is_never_taken_by_its_address() -> None:
    """0.8.0 takes a number for an address and reads there: a wrong one is a SIGSEGV."""
    for data in (0, 4096, None, "text"):
        with pytest.raises(TypeError, match="`a`"):
            ingot.serialize({"a": {"dtype": "F32", "shape": [1024], "data": data}})
    for nbytes in (0, 4095, 4097):
        with pytest.raises(ingot.SaveError, match="`a`") as caught:
            ingot.serialize({"a": {"dtype": "F32", "shape": [1024], "data": bytes(nbytes)}})
        assert f"needs 4096 bytes, the buffer has {nbytes}" in str(caught.value)


@defect("SIGSEGV")
def a_wrong_address_ends_the_process(folder: Path) -> str | None:
    return run("""
import safetensors
spec = safetensors.TensorSpec(dtype="float32", shape=[1024], data_ptr=64, data_len=4096)
safetensors.serialize({"a": spec})
""").signal


def test_saving_to_bytes_holds_the_tensors_once_more() -> None:
    """0.8.0 holds them twice more."""
    grown = run("""
array = numpy.ones(64 << 20, numpy.uint8)
forget_peak()
before = memory("VmRSS")
data = ingot.numpy.save({"a": array})
say((memory("VmHWM") - before) / array.nbytes)
""").said()
    assert grown < 1.25


@defect(True)
def saving_to_bytes_holds_the_tensors_twice_more(folder: Path) -> bool:
    return run("""
import safetensors.numpy
array = numpy.ones(64 << 20, numpy.uint8)
forget_peak()
before = memory("VmRSS")
data = safetensors.numpy.save({"a": array})
say((memory("VmHWM") - before) / array.nbytes > 1.75)
""").said()


def test_others_run_while_a_file_is_written(tmp_path: Path) -> None:
    """0.7.0 holds the GIL while it writes: nobody in the process could empty a FIFO that it writes into."""
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    received: list[int] = []

    def drain() -> None:
        with fifo.open("rb") as file:
            while part := file.read(1 << 16):
                received.append(len(part))

    reader = threading.Thread(target=drain)
    reader.start()
    ingot.numpy.save_file({"a": numpy.zeros(8 << 20, numpy.uint8)}, fifo)
    reader.join()
    assert sum(received) > 8 << 20


@pytest.mark.parametrize("framework", ["np", "pt"])
def test_others_run_while_a_file_is_read(path: Path, framework: str) -> None:
    """0.8.0 holds the GIL while it reads: other threads stall for 53 ms with a tensor of 64 MiB."""
    ingot.numpy.save_file({"a": numpy.zeros(16 << 20, numpy.uint8)}, path)
    before = sys.getswitchinterval()
    ran = threading.Event()
    go = threading.Lock()
    go.acquire()

    def other() -> None:
        go.acquire()
        ran.set()

    thread = threading.Thread(target=other)
    with ingot.safe_open(path, framework, backend="pread") as file:
        thread.start()
        # From here on another thread runs only when this one gives way by itself, as only reading does.
        sys.setswitchinterval(1e6)
        try:
            go.release()
            for _ in range(1000):
                file.get_tensors()
                if ran.is_set():
                    break
            assert ran.is_set()
        finally:
            sys.setswitchinterval(before)
    thread.join()


# Opening


def test_a_directory_says_that_it_is_one(tmp_path: Path) -> None:
    """0.8.0: OSError, No such device (os error 19) (#485)."""
    for load in (ingot.numpy.load_file, ingot.torch.load_file, lambda path: ingot.safe_open(path, "np")):
        with pytest.raises(IsADirectoryError) as caught:
            load(tmp_path)
        assert (caught.value.errno, caught.value.filename) == (errno.EISDIR, str(tmp_path))


@defect("OSError: No such device (os error 19)")
def opening_a_directory(folder: Path) -> str:
    return raised(lambda: safetensors.numpy.load_file(folder))


def test_what_is_no_regular_file_is_refused_at_once(tmp_path: Path) -> None:
    """0.8.0 waits for ever for somebody to write to a FIFO."""
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(os.path.relpath(tmp_path / "socket"))
        for special in (fifo, tmp_path / "socket", Path("/dev/zero"), Path("/dev/null")):
            for backend in ("auto", "mmap", "pread"):
                with pytest.raises(OSError, match=r".") as caught:
                    ingot.safe_open(special, "np", backend=backend)
                assert caught.value.filename == str(special)
                assert caught.value.errno in (errno.EINVAL, errno.ENXIO)


@defect(True)
def opening_a_fifo_waits_for_a_writer(folder: Path) -> bool:
    fifo = folder / "fifo"
    os.mkfifo(fifo)
    program = "import safetensors, sys; safetensors.safe_open(sys.argv[1], 'np')"
    with Popen([sys.executable, "-c", program, fifo], stderr=DEVNULL) as opener:
        # Opening for writing without waiting succeeds only where somebody waits to read.
        while opener.poll() is None:
            try:
                os.close(os.open(fifo, os.O_WRONLY | os.O_NONBLOCK))
            except OSError:
                continue
            return True
    return False


def paths_that_cannot_be_opened(folder: Path) -> dict[type[OSError], Path]:
    (folder / "loop").symlink_to("loop")
    (folder / "file").touch()
    return {
        FileNotFoundError: folder / "missing",
        NotADirectoryError: folder / "file" / "below",
        OSError: folder / "loop",
    }


def test_the_system_says_why_a_file_cannot_be_opened(tmp_path: Path) -> None:
    """0.8.0 raises FileNotFoundError for all of them, without an errno."""
    found = {}
    for kind, path in paths_that_cannot_be_opened(tmp_path).items():
        with pytest.raises(kind) as caught:
            ingot.safe_open(path, "np")
        assert caught.value.filename == str(path)
        assert not isinstance(caught.value, ingot.SafetensorError)
        found[caught.value.errno] = type(caught.value)
    with pytest.raises(OSError, match="too long") as caught:
        ingot.safe_open(tmp_path / ("x" * 300), "np")
    found[caught.value.errno] = type(caught.value)
    assert found == {
        errno.ENOENT: FileNotFoundError,
        errno.ENOTDIR: NotADirectoryError,
        errno.ELOOP: OSError,
        errno.ENAMETOOLONG: OSError,
    }


@defect([("FileNotFoundError", None)] * 4)
def classes_of_what_cannot_be_opened(folder: Path) -> list[tuple[str, int | None]]:
    found = []
    for path in (*paths_that_cannot_be_opened(folder).values(), folder / ("x" * 300)):
        with pytest.raises(OSError, match=r".") as caught:
            safetensors.safe_open(path, "np")
        found.append((type(caught.value).__name__, caught.value.errno))
    return found


FORBIDDEN = """
import safetensors
become_nobody()
for open in (safetensors.safe_open, ingot.safe_open):
    try:
        open("secret", "np")
    except OSError as fault:
        found = [type(fault).__name__, fault.errno, fault.filename]
    if open.__module__.startswith(sys.argv[1]):
        break
say(found)
"""


def test_a_file_that_may_not_be_read_says_so(tmp_path: Path) -> None:
    """0.8.0: FileNotFoundError, though it is there."""
    (tmp_path / "secret").write_bytes(ingot.numpy.save({"a": ARRAY}))
    (tmp_path / "secret").chmod(0)
    tmp_path.chmod(0o755)
    assert run(FORBIDDEN, "ingot", folder=tmp_path).said() == ["PermissionError", errno.EACCES, "secret"]


@defect(["FileNotFoundError", None, None])
def opening_a_file_that_may_not_be_read(folder: Path) -> list[Any]:
    (folder / "secret").touch(0)
    folder.chmod(0o755)
    return run(FORBIDDEN, "builtins", folder=folder).said()


def test_a_path_may_be_bytes_and_need_not_be_text(tmp_path: Path) -> None:
    """0.8.0 refuses bytes; its torch side refuses names that are not UTF-8."""
    path = os.fsencode(tmp_path) + b"/mod\xff\xfeel.safetensors"
    for spell in (path, os.fsdecode(path), Path(os.fsdecode(path))):
        ingot.torch.save_file({"a": torch.arange(3)}, spell)
        assert ingot.torch.load_file(spell)["a"].tolist() == [0, 1, 2]
        with ingot.safe_open(spell, "np") as file:
            assert os.fsencode(file.path) == path
            assert file["a"].tolist() == [0, 1, 2]
            with pytest.raises(ingot.TensorNotFoundError) as caught:
                file.get_tensor("nope")
        assert os.fsencode(caught.value.path or "") == path
        str(caught.value).encode()
    with pytest.raises(FileNotFoundError):
        ingot.safe_open(path + b"?", "np")


@defect("TypeError: argument 'filename': 'bytes' object is not an ins")
def opening_by_bytes(folder: Path) -> str:
    return raised(lambda: safetensors.safe_open(b"t", "np"))


def test_a_path_with_a_nul_is_a_value_error() -> None:
    """0.8.0: FileNotFoundError."""
    for path in ("a\0b", b"a\0b", Path("a\0b")):
        for call in (
            lambda path: ingot.safe_open(path, "np"),
            ingot.numpy.load_file,
            ingot.torch.load_file,
            lambda path: ingot.numpy.save_file({"a": ARRAY}, path),
            lambda path: ingot.torch.save_file({"a": torch.zeros(2)}, path),
            lambda path: ingot.serialize_file({}, path),
        ):
            with pytest.raises(ValueError, match="null") as caught:
                call(path)
            assert not isinstance(caught.value, OSError)


@defect("FileNotFoundError: No such file or directory: a\0b")
def opening_a_path_with_a_nul(folder: Path) -> str:
    return raised(lambda: safetensors.safe_open("a\0b", "np"))


FOREIGN = {
    "Git LFS": b"version https://git-lfs.github.com/spec/v1\noid sha256:" + b"ab" * 32 + b"\nsize 90868376\n",
    "HTML": b"<!DOCTYPE html>\n<html><head><title>404</title></head></html>" + b" " * 200,
    "ZIP": b"PK\x03\x04\x14\0\0\0\x08\0" + bytes(200),
    "PyTorch": b"PK\x03\x04\0\0\x08\x08\0\0" + bytes(16) + b"\x10\0\x12\0archive/data.pkl" + bytes(200),
    "pickle": b"\x80\x02}q\0(X\x01\0\0\0aq\x01K\x01u." + bytes(50),
    "GGUF": b"GGUF\x03\0\0\0" + bytes(100),
    "HDF5": b"\x89HDF\r\n\x1a\n" + bytes(100),
    "npy": b"\x93NUMPY\x01\0v\0{'descr': '<f4', 'fortran_order': False, 'shape': (3,), }\n" + bytes(60),
    "index": b'{"metadata": {"total_size": 1}, "weight_map": {"a": "model-00001-of-00002.safetensors"}}',
}


@pytest.mark.parametrize("kind", sorted(FOREIGN.keys() - {"index"}))
def test_another_kind_of_file_is_recognised(path: Path, kind: str) -> None:
    """0.8.0: header too large, or the like, and no path (#414)."""
    path.write_bytes(FOREIGN[kind])
    with pytest.raises(ingot.HeaderError, match=kind) as caught:
        ingot.torch.load_file(path)
    assert caught.value.code == "foreign-file"
    assert str(caught.value).startswith(f"{path}: ")
    with pytest.raises(ingot.HeaderError, match=kind):
        ingot.numpy.load(FOREIGN[kind])


def test_an_index_is_opened_as_one_under_any_name_and_is_none_of_tensors(path: Path) -> None:
    """0.8.0: header too large."""
    path.write_bytes(FOREIGN["index"])
    with pytest.raises(
        FileNotFoundError, match="1 of the 1 files that the index names are not there"
    ) as caught:
        ingot.torch.load_file(path)
    assert "model-00001-of-00002.safetensors" in str(caught.value)
    with pytest.raises(ingot.HeaderError, match="index") as refused:
        ingot.numpy.load(FOREIGN["index"])
    assert refused.value.code == "foreign-file"


@defect(["header too large"] * 9)
def what_is_said_of_other_kinds_of_file(folder: Path) -> list[str]:
    said = []
    for data in FOREIGN.values():
        with pytest.raises(safetensors.SafetensorError) as caught:
            safetensors.numpy.load(data)
        said.append(str(caught.value).rpartition(": ")[2])
    return said


WORDS = [
    ("header-far-past-the-end", ["99999999 bytes after the first 8", "found 2"]),
    ("name-twice-with-two-dtypes", ["`a`"]),
    ("name-twice-by-escape", ["`a`"]),
    ("metadata-key-twice", ["`k`"]),
    ("metadata-key-twice-by-escape", ["`k`"]),
    ("nul-padding", ["NUL"]),
    ("range-too-short", ["`a`", "24", "20", "[2, 3]", "F32"]),
    ("hole-in-the-middle", ["`b`", "1", "2"]),
    ("data-one-byte-short", ["`a`", "2", "1"]),
]


@pytest.mark.parametrize(("name", "words"), WORDS)
def test_a_broken_file_is_described(path: Path, name: str, words: list[str]) -> None:
    """0.8.0 names no file, seldom a tensor, and no numbers."""
    path.write_bytes(vector(name).file())
    with pytest.raises(ingot.HeaderError) as caught:
        ingot.numpy.load_file(path)
    message = str(caught.value)
    assert message.startswith(f"{path}: ")
    assert [word for word in words if word not in message.removeprefix(str(path))] == []
    assert caught.value.code == vector(name).code


@defect(False)
def the_file_is_named(folder: Path) -> bool:
    path = folder / "model.safetensors"
    path.write_bytes(vector("range-too-short").file())
    with pytest.raises(safetensors.SafetensorError) as caught:
        safetensors.numpy.load_file(path)
    return "model" in str(caught.value)


AMBIGUOUS = {
    "name-twice-with-two-dtypes": "duplicate-tensor",
    "name-twice-by-escape": "duplicate-tensor",
    "metadata-key-twice": "duplicate-metadata-key",
    "metadata-key-twice-by-escape": "duplicate-metadata-key",
    "entry-as-array": "invalid-entry",
    "dtype-as-map": "invalid-entry",
    "zero-dimension-order-first": "size-overflow",
    # bintensors 0.2.0
    "bt-metadata-key-twice": "duplicate-metadata-key",
    "bt-padding-hides-two-kilobytes": "invalid-padding",
    "bt-padding-is-a-second-list": "invalid-padding",
    "bt-number-small-in-three-bytes": "invalid-varint",
    "bt-count-not-shortest": "invalid-varint",
    "bt-zero-dimension-order-first": "size-overflow",
}


@pytest.mark.parametrize(("name", "code"), AMBIGUOUS.items())
def test_a_file_that_means_two_things_is_refused(path: Path, name: str, code: str) -> None:
    """0.8.0 takes the last of two; bintensors 0.2.0 skips bytes behind its entries and reads long varints."""
    path.write_bytes(vector(name).file())
    for backend in ("mmap", "pread"):
        with pytest.raises(ingot.HeaderError) as caught:
            ingot.safe_open(path, "np", backend=backend)
        assert caught.value.code == code
    with pytest.raises(ingot.HeaderError):
        ingot.torch.load(path.read_bytes())


@defect(dict.fromkeys(AMBIGUOUS, True))
def files_that_mean_two_things_are_read(folder: Path) -> dict[str, bool]:
    libraries = {"safetensors": safetensors.deserialize, "bintensors": bintensors.deserialize}
    read = {name: libraries[vector(name).format] for name in AMBIGUOUS}
    return {
        name: raised(lambda name=name: read[name](vector(name).file())) == "nothing" for name in AMBIGUOUS
    }


def test_the_order_of_a_zero_dimension_does_not_matter() -> None:
    """0.8.0 takes [0, 2**62, 4] and refuses [2**62, 4, 0]."""
    for shape in ([0, 2**62, 4], [2**62, 0, 4], [2**62, 4, 0]):
        with pytest.raises(ingot.HeaderError, match="overflows") as caught:
            ingot.numpy.load(file_of({"a": entry("U8", shape, 0, 0)}))
        assert caught.value.tensor == "a"


@defect([True, False])
def orders_of_a_zero_dimension(folder: Path) -> list[bool]:
    shapes = ([0, 2**63, 4], [2**63, 4, 0])
    files = [file_of({"a": entry("U8", shape, 0, 0)}) for shape in shapes]
    return [raised(lambda file=file: safetensors.deserialize(file)) == "nothing" for file in files]


# Reading


@pytest.mark.parametrize("backend", ["mmap", "pread"])
@pytest.mark.parametrize("framework", ["np", "pt"])
def test_a_file_cut_short_after_opening_is_an_error(path: Path, backend: str, framework: str) -> None:
    """0.8.0: SIGBUS ends the process."""
    ingot.numpy.save_file({"a": numpy.ones(1 << 20, numpy.uint8)}, path)
    nbytes = path.stat().st_size
    with ingot.safe_open(path, framework, backend=backend) as file:
        part = file.get_slice("a")
        os.truncate(path, 4096)
        for read in (
            lambda: file.get_tensor("a"),
            file.get_tensors,
            lambda: part[-5:],
            lambda: part[::2],
            lambda: part[[0, -1]],
        ):
            with pytest.raises(ingot.StorageError, match=f"{nbytes}.*4096") as caught:
                read()
            assert caught.value.path == str(path)
            assert caught.value.code == "changed"


CUT = """
import safetensors.numpy, safetensors.torch
safetensors.numpy.save_file({"a": numpy.ones(1 << 20, numpy.uint8)}, "t")
"""


@defect(["SIGBUS", "SIGBUS"])
def reading_a_file_cut_short(folder: Path) -> list[str | None]:
    opened = """
with safetensors.safe_open("t", "np") as file:
    os.truncate("t", 4096)
    file.get_tensor("a")
"""
    loaded = """
tensor = safetensors.torch.load_file("t")["a"]
os.truncate("t", 4096)
tensor.sum()
"""
    return [run(CUT + opened, folder=folder).signal, run(CUT + loaded, folder=folder).signal]


@pytest.mark.parametrize("framework", ["np", "pt"])
def test_what_pread_has_loaded_is_the_callers(path: Path, framework: str) -> None:
    """0.8.0: torch tensors are the mapped file, and a file cut short later is a SIGBUS."""
    ingot.numpy.save_file({"a": ARRAY}, path)
    with ingot.safe_open(path, framework, backend="pread") as file:
        tensor, part = file["a"], file.get_slice("a")[2:4]
    os.truncate(path, 0)
    assert tensor.tolist() == ARRAY.tolist()
    assert part.tolist() == ARRAY[2:4].tolist()


@pytest.mark.parametrize("backend", ["mmap", "pread"])
def test_a_file_replaced_after_opening_is_read_as_it_was(path: Path, backend: str) -> None:
    """As upstream."""
    ingot.numpy.save_file({"a": ARRAY}, path)
    with ingot.safe_open(path, "np", backend=backend) as file:
        ingot.numpy.save_file({"b": ARRAY + 1}, path)
        assert (file["a"] == ARRAY).all()
        path.unlink()
        assert (file["a"] == ARRAY).all()


@pytest.mark.parametrize("backend", ["mmap", "pread"])
def test_a_file_overwritten_after_opening_is_noticed(path: Path, backend: str) -> None:
    """0.8.0 gives old and new bytes together."""
    ingot.numpy.save_file({"a": ARRAY}, path)
    with ingot.safe_open(path, "np", backend=backend) as file:
        data = path.read_bytes()
        os.utime(path, ns=(0, 0))
        path.write_bytes(data[:-4] + b"\xff" * 4)
        with pytest.raises(ingot.StorageError) as caught:
            file.get_tensor("a")
        assert caught.value.code == "changed"


@defect("nothing")
def reading_a_file_overwritten(folder: Path) -> str:
    path = folder / "t"
    safetensors.numpy.save_file({"a": ARRAY}, path)
    with safetensors.safe_open(path, "np") as file:
        path.write_bytes(path.read_bytes()[:-4] + b"\xff" * 4)
        return raised(lambda: file.get_tensor("a"))


SLICES = [
    "[-2:]",
    "[:-1]",
    "[1:100]",
    "[2:1]",
    "[4:2]",
    "[4:2, 0]",
    "[:, ::2]",
    "[...]",
    "[None]",
    "[[0, 2]]",
]
SLICES += [
    "[True]",
    "[:, -1]",
    "[..., 0]",
    "[-6]",
    "[6:2]",
    "[4:2:2]",
    "[5:4, 3:1]",
    f"[{2**70}:]",
    f"[:{-(2**70)}]",
]


@pytest.mark.parametrize("index", SLICES)
@pytest.mark.parametrize("backend", ["mmap", "pread"])
@pytest.mark.parametrize("framework", ["np", "pt"])
def test_a_slice_is_what_numpy_says(path: Path, index: str, backend: str, framework: str) -> None:
    """0.8.0: OverflowError, SystemError, a panic, another part; 0.7.0 ignores the step (#439, #560, #561)."""
    ingot.numpy.save_file({"a": ARRAY}, path)
    with ingot.safe_open(path, framework, backend=backend) as file:
        found = eval(f"part{index}", {"part": file.get_slice("a")})
    expected = eval(f"array{index}", {"array": ARRAY})
    assert tuple(found.shape) == expected.shape
    assert found.tolist() == expected.tolist()


@pytest.mark.parametrize(
    "index", ["[6]", "[-7]", "[0, 4]", "[0, 0, 0]", "[::-1]", "[::0]", "[..., ...]", f"[{2**70}]"]
)
def test_an_index_that_does_not_fit_is_an_index_error(path: Path, index: str) -> None:
    """0.8.0: SafetensorError, ValueError or OverflowError."""
    ingot.numpy.save_file({"layer.a": ARRAY}, path)
    with ingot.safe_open(path, "np") as file, pytest.raises(IndexError, match=r"`layer\.a`") as caught:
        eval(f"part{index}", {"part": file.get_slice("layer.a")})
    assert isinstance(caught.value, ingot.SliceError)
    assert str(path) in str(caught.value)


@defect(
    {
        "[-2:]": "OverflowError: can't convert negative int to unsigned",
        "[:-1]": "OverflowError: can't convert negative int to unsigned",
        "[1:100]": "SafetensorError: Error during slicing [1:100] with shape [6,",
        "[2:1]": "SystemError: Negative size passed to PyByteArray_FromStringA",
        "[4:2]": "SystemError: Negative size passed to PyByteArray_FromStringA",
        "[4:2, 0]": "PanicException: capacity overflow",
        "[5:4, 3:1]": "PanicException: capacity overflow",
        "[4:2:2]": "ValueError: cannot reshape array of size 24 into shape (9223",
        "[True]": [4.0, 5.0, 6.0, 7.0],
        "[None]": "SafetensorError: Unsupported slice index at position 0: expe",
        "[[0, 2]]": "SafetensorError: Non empty lists are not implemented",
    }
)
def slices(folder: Path) -> dict[str, Any]:
    path, found = folder / "t", {}
    safetensors.numpy.save_file({"a": ARRAY}, path)
    with safetensors.safe_open(path, "np") as file:
        part = file.get_slice("a")
        for index in SLICES:
            try:
                value = eval(f"part{index}", {"part": part}).tolist()
            except BaseException as error:
                value = f"{type(error).__name__}: {error}"[:60].rstrip()
            if value != eval(f"array{index}", {"array": ARRAY}).tolist():
                found[index] = value
    return {index: value for index, value in found.items() if index not in ("[6:2]", SLICES[-1], SLICES[-2])}


def test_a_slice_of_four_bit_floats_is_read(path: Path) -> None:
    """0.8.0: RuntimeError, shape '[4, 4]' is invalid for input of size 8 (#783)."""
    path.write_bytes(file_of({"a": entry("F4", [4, 4], 0, 8)}, bytes(range(8))))
    with ingot.safe_open(path, "pt") as file:
        part = file.get_slice("a")
        assert part[1].view(torch.uint8).tolist() == [2, 3]
        assert part[:, 2:].view(torch.uint8).tolist() == [[1], [3], [5], [7]]
        assert part[...].dtype is torch.float4_e2m1fn_x2
        with pytest.raises(ingot.SliceError) as caught:
            part[:, 1:]
        assert caught.value.code == "partial-byte"


@defect("RuntimeError: shape '[4, 4]' is invalid for input of size 8")
def slicing_four_bit_floats(folder: Path) -> str:
    path = folder / "t"
    path.write_bytes(file_of({"a": entry("F4", [4, 4], 0, 8)}, bytes(8)))
    with safetensors.safe_open(path, "pt") as file:
        return raised(lambda: file.get_slice("a")[0])


SMALL = {"BF16": 2, "F8_E5M2": 1, "F8_E4M3": 1, "F8_E8M0": 1, "F8_E4M3FNUZ": 1, "F8_E5M2FNUZ": 1}


@pytest.mark.parametrize("code", SMALL)
def test_bytes_and_files_have_the_same_dtypes(path: Path, code: str) -> None:
    """0.8.0 reads them from a file by torch only, and not at all from bytes by numpy (#682, #839)."""
    data = file_of({"a": entry(code, [2], 0, 2 * SMALL[code])}, bytes(range(2 * SMALL[code])))
    path.write_bytes(data)
    for module in (ingot.numpy, ingot.torch):
        loaded = [module.load(data)["a"], module.load_file(path)["a"], ingot.safe_open(path, "np")["a"]]
        assert len({str(tensor.dtype).removeprefix("torch.") for tensor in loaded}) == 1
        assert all(module.save({"a": tensor}) == module.save({"a": loaded[0]}) for tensor in loaded[:2])
        assert ingot.deserialize(module.save({"a": loaded[0]}))[0][1]["data"] == data[-2 * SMALL[code] :]


@defect([f"KeyError: '{code}'" for code in SMALL])
def loading_small_floats_from_bytes_by_numpy(folder: Path) -> list[str]:
    files = [file_of({"a": entry(code, [2], 0, 2 * size)}, bytes(2 * size)) for code, size in SMALL.items()]
    return [raised(lambda file=file: safetensors.numpy.load(file)) for file in files]


@defect(["KeyError: 'F8_E8M0'", "KeyError: 'F4'"])
def loading_small_floats_from_bytes_by_torch(folder: Path) -> list[str]:
    files = [
        file_of({"a": entry(code, [2], 0, size)}, bytes(size)) for code, size in (("F8_E8M0", 2), ("F4", 1))
    ]
    return [raised(lambda file=file: safetensors.torch.load(file)) for file in files]


def test_four_bit_floats_are_read_from_bytes() -> None:
    """0.8.0: KeyError 'F4' (#840)."""
    data = file_of({"a": entry("F4", [4], 0, 2)}, b"\x21\x43")
    assert ingot.torch.load(data)["a"].view(torch.uint8).tolist() == [0x21, 0x43]
    assert ingot.numpy.load(data)["a"].view(numpy.uint8).tolist() == [1, 2, 3, 4]
    assert ingot.numpy.save(ingot.numpy.load(data)) == ingot.torch.save(ingot.torch.load(data))


BFLOAT = """
open("t", "wb").write(bytes.fromhex(sys.argv[1]))
assert "ml_dtypes" not in sys.modules
"""


def test_bfloat16_needs_no_import_by_the_caller(tmp_path: Path) -> None:
    """0.8.0: numpy reads it only when the caller has imported ml_dtypes."""
    data = file_of({"a": entry("BF16", [2], 0, 4)}, numpy.array([1, 2], ml_dtypes.bfloat16).tobytes())
    program = """
found = [ingot.numpy.load_file("t")["a"], ingot.safe_open("t", "np").get_slice("a")[:]]
say([[str(array.dtype), array.astype("f4").tolist()] for array in found])
"""
    assert run(BFLOAT + program, data.hex(), folder=tmp_path).said() == [["bfloat16", [1, 2]]] * 2


@defect("TypeError")
def reading_bfloat16_without_an_import(folder: Path) -> str:
    data = file_of({"a": entry("BF16", [2], 0, 4)}, bytes(4))
    program = """
import safetensors.numpy
try:
    safetensors.numpy.load_file("t")
except Exception as error:
    say(type(error).__name__)
"""
    return run(BFLOAT + program, data.hex(), folder=folder).said()


@pytest.mark.parametrize("framework", ["np", "pt"])
def test_one_unknown_dtype_does_not_block_the_file(path: Path, framework: str) -> None:
    """0.8.0 opens nothing of it."""
    header = {
        "good": entry("F32", [1], 0, 4),
        "bad": entry("F6_E2M3", [4], 4, 7),
        "b": entry("U8", [1], 7, 8),
    }
    path.write_bytes(file_of(header, bytes(8)))
    with ingot.safe_open(path, framework) as file:
        assert file.get_tensors(["b", "good"])["good"].tolist() == [0]
        assert file.get_slice("b")[:].tolist() == [0]
        assert file.info("bad").dtype == "F6_E2M3"
        for read in (lambda: file["bad"], file.get_tensors, lambda: file.get_slice("bad")[:]):
            with pytest.raises(ingot.DtypeError, match=r"`bad`.*F6_E2M3") as caught:
                read()
            assert (caught.value.tensor, caught.value.path) == ("bad", str(path))
    module = ingot.numpy if framework == "np" else ingot.torch
    with pytest.raises(ingot.DtypeError, match="`bad`"):
        module.load_file(path)


@defect("SafetensorError: Dtype not understood: F6_E2M3")
def loading_a_file_with_one_unknown_dtype(folder: Path) -> str:
    path = folder / "t"
    path.write_bytes(file_of({"b": entry("U8", [1], 0, 1), "c": entry("F6_E2M3", [4], 1, 4)}, bytes(4)))
    return raised(lambda: safetensors.numpy.load_file(path))


def test_a_shape_that_numpy_cannot_hold_blocks_only_its_tensor(path: Path) -> None:
    """0.8.0: a ValueError of numpy's, which says neither where nor what."""
    path.write_bytes(
        file_of({"deep": entry("F32", [1] * 65, 0, 4), "flat": entry("F32", [1], 4, 8)}, bytes(8))
    )
    with ingot.safe_open(path, "np") as file:
        assert file["flat"].tolist() == [0]
        assert file.info("deep").shape == (1,) * 65
        for read in (lambda: file["deep"], file.get_tensors, lambda: file.get_slice("deep")[...]):
            with pytest.raises(ingot.SafetensorError, match=r"`deep`.*64") as caught:
                read()
            assert caught.value.tensor == "deep"
            assert caught.value.path == str(path)
    assert ingot.torch.load_file(path)["deep"].ndim == 65


@defect("ValueError: maximum supported dimension for an ndarray is cu")
def loading_a_shape_that_numpy_cannot_hold(folder: Path) -> str:
    return raised(lambda: safetensors.numpy.load(file_of({"deep": entry("F32", [1] * 65, 0, 4)}, bytes(4))))


def test_any_buffer_is_loaded(path: Path) -> None:
    """0.8.0 takes bytes only (#529)."""
    data = ingot.numpy.save({"a": ARRAY})
    path.write_bytes(data)
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as mapped:
        buffers = [
            bytearray(data),
            memoryview(data),
            mapped,
            io.BytesIO(data).getbuffer(),
            numpy.frombuffer(data, "u1"),
        ]
        for buffer in buffers:
            assert (ingot.numpy.load(buffer)["a"] == ARRAY).all()
            assert (ingot.torch.load(buffer)["a"].numpy() == ARRAY).all()
            assert ingot.deserialize(buffer)[0][1]["data"] == ARRAY.tobytes()
            if isinstance(buffer, memoryview):
                buffer.release()


@defect(["TypeError"] * 2)
def loading_other_buffers(folder: Path) -> list[str]:
    data = safetensors.numpy.save({"a": ARRAY})
    return [
        raised(lambda kind=kind: safetensors.numpy.load(kind(data)))[:9] for kind in (bytearray, memoryview)
    ]


def test_a_buffer_that_changes_after_loading_changes_nothing() -> None:
    """What was checked is a copy."""
    data = bytearray(ingot.numpy.save({"a": ARRAY}))
    loaded, torch_loaded = ingot.numpy.load(data), ingot.torch.load(data)
    data[:] = b"\xff" * len(data)
    # And it is not held: a bytearray that is exported could not be emptied.
    data.clear()
    assert (loaded["a"] == ARRAY).all()
    assert (torch_loaded["a"].numpy() == ARRAY).all()


def test_an_open_file_is_a_mapping(path: Path) -> None:
    """0.8.0: no `in`, `len`, iteration, `[name]`, `items()` and `close()` (#328)."""
    ingot.numpy.save_file({"b": ARRAY, "a": ARRAY + 1}, path)
    with ingot.safe_open(path, "np") as file:
        assert "a" in file
        assert "c" not in file
        assert len(file) == 2
        assert list(file) == ["a", "b"]
        assert (file["b"] == ARRAY).all()
        assert {name: array[0, 0] for name, array in file.items()} == {"a": 1, "b": 0}
        assert set(dict(file)) == {"a", "b"}
    file.close()


@defect(["TypeError"] * 4 + ["AttributeError"] * 2)
def an_open_file_as_a_mapping(folder: Path) -> list[str]:
    safetensors.numpy.save_file({"a": ARRAY}, folder / "t")
    file: Any = safetensors.safe_open(folder / "t", "np")
    attempts = [lambda: "a" in file, lambda: len(file), lambda: list(file), lambda: file["a"]]
    attempts += [lambda: file.items(), lambda: file.close()]
    return [raised(attempt).partition(":")[0] for attempt in attempts]


def test_slices_and_arrays_outlive_the_file(path: Path) -> None:
    """As upstream: closing the file takes nothing from whoever holds a part of it."""
    ingot.numpy.save_file({"a": ARRAY}, path)
    for backend in ("mmap", "pread"):
        with ingot.safe_open(path, "np", backend=backend) as file:
            part, array = file.get_slice("a"), file["a"]
        with pytest.raises(ingot.ClosedError, match="closed"):
            file.get_tensor("a")
        assert (part[2] == ARRAY[2]).all()
        assert (array == ARRAY).all()


@pytest.mark.parametrize("nesting", ["[", '{"a":', '{"__metadata__":{"a":['])
def test_a_header_of_brackets_is_refused(nesting: str) -> None:
    """As upstream: no header is deep enough to exhaust the stack."""
    for text in (nesting * 1_000_000, '{"a":{"dtype":"U8","x":' + nesting * 1_000_000):
        with pytest.raises(ingot.HeaderError):
            ingot.numpy.load(file_of(text.encode()))


@pytest.mark.parametrize(("measure", "expected"), DEFECTS)
def test_upstream_still_does_this(measure: Measure, expected: Any, tmp_path: Path) -> None:
    assert measure(tmp_path) == expected, "upstream has changed: take the entry out, or correct it"


def test_nobody_is_who_the_programs_become() -> None:
    assert run("become_nobody(); say(os.geteuid())").said() == (NOBODY if os.geteuid() == 0 else os.geteuid())
