"""Reading from objects: open files, buffers, files of fsspec, and files of a store."""

from __future__ import annotations

import errno
import io
import os
import pickle
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import fsspec
import numpy
import obstore.store
import pytest
import torch
from fsspec.implementations.memory import MemoryFileSystem

import ingot
import ingot.numpy
import ingot.torch
from support.objects import (
    NAME,
    OBJECTS,
    Counting,
    Dribbling,
    in_memory_of_fsspec,
    in_obstore,
    opened,
    written,
)
from support.processes import run

SECRET = "sig=hidden"


def tensors() -> dict[str, numpy.ndarray[Any, Any]]:
    random = numpy.random.default_rng(7)
    return {
        "big": random.integers(0, 255, (1024, 3000), numpy.uint8),
        "empty": numpy.zeros((0, 3), numpy.float32),
        "half": random.random((40, 50)).astype(numpy.float16),
        "wide": random.random((300, 2000)),
    }


@pytest.fixture
def data() -> bytes:
    return ingot.numpy.save(tensors(), {"made": "by hand"})


class CountingFiles(MemoryFileSystem):  # type: ignore[misc]
    """A file system of fsspec that records the requested ranges."""

    protocol = "memory"

    def __init__(self) -> None:
        super().__init__()
        self.asked: list[tuple[int, int]] = []

    def cat_ranges(self, paths: Any, starts: Any, ends: Any, **options: Any) -> Any:
        self.asked += zip(starts, ends, strict=True)
        return super().cat_ranges(paths, starts, ends, **options)


@pytest.fixture(params=OBJECTS)
def given(request: pytest.FixtureRequest, data: bytes, tmp_path: Path) -> Any:
    found = OBJECTS[request.param](data, tmp_path)
    yield found
    close = getattr(found, "close", None)
    if close is not None and not isinstance(found, fsspec.core.OpenFile):
        close()


def test_convert_reads_a_torch_pickle_from_an_object(tmp_path: Path) -> None:
    saved = io.BytesIO()
    torch.save({"a": torch.arange(5)}, saved)
    store = obstore.store.MemoryStore()
    store.put("folder/model.bin", saved.getvalue())
    report = ingot.convert(ingot.Ranges(store, "folder/model.bin"), tmp_path / "a.safetensors")
    assert report.source == "folder/model.bin"
    assert ingot.torch.load_file(tmp_path / "a.safetensors")["a"].tolist() == [0, 1, 2, 3, 4]


def counted(kind: str, data: bytes) -> tuple[Any, list[tuple[int, int]]]:
    if kind == "obstore":
        store = Counting(data)
        return ingot.Ranges(store, NAME), store.asked
    # fsspec would otherwise reuse one instance.
    files = CountingFiles(skip_instance_cache=True)
    return fsspec.core.OpenFile(files, in_memory_of_fsspec(data).removeprefix("memory:/")), files.asked


@pytest.mark.parametrize("kind", ["obstore", "fsspec"])
def test_get_slice_requests_the_header_and_its_bytes(kind: str, data: bytes) -> None:
    given, asked = counted(kind, data)
    with ingot.safe_open(given, "np") as file:
        info, start = file.info("big"), len(data) - max(file.info(name).end for name in file)
        assert asked == [(0, 64 << 10)]
        numpy.testing.assert_array_equal(file.get_slice("big")[100:200], tensors()["big"][100:200])
        begin = start + info.begin + 100 * 3000
        assert asked[1:] == [(begin, begin + 100 * 3000)]


@pytest.mark.parametrize("kind", ["obstore", "fsspec"])
@pytest.mark.parametrize("option", ["whole", "dtype", "out", "slices"])
def test_load_file_requests_few_ranges(kind: str, option: str) -> None:
    arrays = {f"layers.{n:04}": numpy.full((16, 16), n, numpy.float32) for n in range(2000)}
    given, asked = counted(kind, ingot.numpy.save(arrays))
    options: dict[str, Any] = {
        "whole": {},
        "dtype": {"dtype": "F16"},
        "out": {"out": {name: numpy.empty_like(array) for name, array in arrays.items()}},
        "slices": {"slices": dict.fromkeys(arrays, numpy.s_[:, 8:])},
    }[option]
    loaded = ingot.numpy.load_file(given, **options)
    assert all((loaded[name] == array.flat[0]).all() for name, array in arrays.items())
    # The header is longer than the first request of 64 KiB, so that it takes two.
    assert len(asked) <= 2 + 4


def test_get_slice_requests_several_ranges_at_once(data: bytes) -> None:
    class Together(Counting):
        both = threading.Barrier(2)

        def get_ranges(self, path: str, *, starts: list[int], ends: list[int]) -> list[Any]:
            if starts[0] > 0:
                # Answer only when two requests wait, which shows that they run in parallel.
                self.both.wait(60)
            return super().get_ranges(path, starts=starts, ends=ends)

    with ingot.safe_open(ingot.Ranges(Together(data), NAME), "np") as file:
        part = file.get_slice("wide")[::150]
    numpy.testing.assert_array_equal(part, tensors()["wide"][::150])


class Failing(Counting):
    """A store that fails after the header, in the way of `how`."""

    def __init__(self, data: bytes, how: Callable[[list[Any]], Any]) -> None:
        super().__init__(data)
        self.how = how

    def get_ranges(self, path: str, *, starts: list[int], ends: list[int]) -> list[Any]:
        found = super().get_ranges(path, starts=starts, ends=ends)
        return found if starts[0] == 0 else self.how(found)  # type: ignore[no-any-return]


def test_load_file_chains_the_error_of_a_store(data: bytes, tmp_path: Path) -> None:
    fault = RuntimeError(f"GET https://host/{NAME}?{SECRET}")

    def fail(found: object) -> Any:
        raise fault

    given = ingot.Ranges(Failing(data, fail), f"folder/{NAME}")
    given.store.store.put(f"folder/{NAME}", data)
    calls: list[Callable[[], object]] = [
        lambda: ingot.numpy.load_file(given),
        lambda: ingot.safe_open(given, "np")["big"],
        lambda: ingot.safe_open(given, "np").get_slice("big")[3],
    ]
    for call in calls:
        with pytest.raises(ingot.StorageError, match=rf"^folder/{NAME}: .*RuntimeError") as caught:
            call()
        assert caught.value.__cause__ is fault
        assert caught.value.path == f"folder/{NAME}"
        assert SECRET not in str(caught.value)
    large = ingot.Ranges(Failing(data * 4, fail), NAME)
    with pytest.raises(ingot.StorageError, match="RuntimeError") as caught:
        ingot.convert(large, tmp_path / "new.bt", source_format="safetensors")
    assert caught.value.__cause__ is fault
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(("how", "difference"), [(lambda b: b[:-5], -5), (lambda b: b + b"x", 1)])
def test_get_tensor_names_an_answer_of_wrong_length(
    how: Callable[[bytes], bytes], difference: int, data: bytes
) -> None:
    given = ingot.Ranges(Failing(data, lambda found: [how(bytes(found[0]))]), NAME)
    message = rf"^{NAME}: tensor `half`: .*expected 4000 bytes of the object, found {4000 + difference}$"
    with ingot.safe_open(given, "np") as file, pytest.raises(ingot.StorageError, match=message) as caught:
        file.get_tensor("half")
    assert (caught.value.expected, caught.value.found) == (4000, 4000 + difference)


@pytest.mark.parametrize("answer", [None, "text", ["", ""], [1.5]])
def test_load_file_rejects_an_answer_that_is_no_bytes(answer: Any, data: bytes) -> None:
    given = ingot.Ranges(Failing(data, lambda found: answer), NAME)
    with pytest.raises(ingot.StorageError, match=r"the object raised (Type|Value)Error"):
        ingot.numpy.load_file(given)


def test_load_file_raises_file_not_found_for_a_missing_object() -> None:
    for given in (ingot.Ranges(in_obstore(b""), "none"), fsspec.open("memory://ingot-tests/none")):
        with pytest.raises(FileNotFoundError, match=r"No such file or directory: '.*none'$") as caught:
            ingot.numpy.load_file(given)
        assert caught.value.errno == errno.ENOENT
        assert isinstance(caught.value.__cause__, FileNotFoundError)


def test_safe_open_chains_the_error_of_a_size_request(data: bytes) -> None:
    fault = PermissionError(f"HEAD https://host/{NAME}?{SECRET}")

    class Denied(Failing):
        def head(self, path: str) -> Any:
            raise fault

    with pytest.raises(ingot.StorageError, match=rf"^{NAME}: .*PermissionError$") as caught:
        ingot.safe_open(ingot.Ranges(Denied(data, lambda found: found), NAME), "np")
    assert caught.value.__cause__ is fault


def replaced_in_obstore(data: bytes) -> tuple[Any, Callable[[bytes], object]]:
    store = in_obstore(data)
    return ingot.Ranges(store, NAME), lambda new: store.put(NAME, new)


def replaced_in_fsspec(data: bytes) -> tuple[Any, Callable[[bytes], object]]:
    return fsspec.open(in_memory_of_fsspec(data)), in_memory_of_fsspec


@pytest.mark.parametrize("store", [replaced_in_obstore, replaced_in_fsspec])
def test_get_tensor_notices_a_replaced_object(
    store: Callable[[bytes], tuple[Any, Callable[[bytes], object]]], data: bytes
) -> None:
    for new, found in ((bytes(len(data)), None), (data + b"x", len(data) + 1)):
        given, replace = store(data)
        with ingot.safe_open(given, "np") as file:
            assert file["half"].shape == (40, 50)
            replace(new)
            with pytest.raises(ingot.StorageError, match=NAME) as caught:
                file.get_tensor("half")
        assert caught.value.code == "changed"
        assert caught.value.found == found


def test_get_tensors_reports_a_shrunk_object(data: bytes, tmp_path: Path) -> None:
    with opened(data, tmp_path) as given, ingot.safe_open(given, "np") as file:
        os.truncate(tmp_path / NAME, len(data) // 2)
        with pytest.raises(ingot.StorageError, match=r"expected \d+ bytes of the object, found"):
            file.get_tensors()
    memory = io.BytesIO(data)
    with ingot.safe_open(memory, "np") as file:
        memory.truncate(len(data) // 2)
        with pytest.raises(ingot.StorageError, match=r"^<BytesIO>: "):
            file.get_tensors()


@pytest.mark.parametrize(
    "code", ["text", "text by mode", "closed", "not-seekable", "not-readable", "compressed"]
)
def test_load_file_explains_an_unreadable_object(code: str, data: bytes, tmp_path: Path) -> None:
    path = written(data, tmp_path)

    class Pipe(io.BytesIO):
        getbuffer = None  # type: ignore[assignment]

        def seekable(self) -> bool:
            return False

    refused: dict[str, tuple[type[Exception], list[Callable[[], Any]]]] = {
        "text": (TypeError, [lambda: path.open(encoding="latin-1"), io.StringIO]),
        "text by mode": (TypeError, [lambda: fsspec.open(in_memory_of_fsspec(data), "rt")]),
        "closed": (ingot.ClosedError, [lambda: path.open("rb"), lambda: io.BytesIO(data)]),
        "not-seekable": (ingot.OptionError, [lambda: Pipe(data)]),
        "not-readable": (
            ingot.OptionError,
            [lambda: path.open("ab"), lambda: fsspec.open(in_memory_of_fsspec(data), "wb")],
        ),
        "compressed": (ingot.OptionError, [lambda: fsspec.open("memory://a.gz", compression="gzip")]),
    }
    error, objects = refused[code]
    for make in objects:
        given = make()
        if code == "closed":
            given.close()
        for call in (ingot.numpy.load_file, lambda given: ingot.convert(given, tmp_path / "new.bt")):
            with pytest.raises(error) as caught:
                call(given)
            assert getattr(caught.value, "code", code) == code
        if isinstance(given, io.IOBase):
            given.close()


def test_get_tensor_names_a_closed_object(data: bytes, tmp_path: Path) -> None:
    given = opened(data, tmp_path)
    with ingot.safe_open(given, "np") as file:
        given.close()
        with pytest.raises(ingot.ClosedError, match=f"{NAME}: the BufferedReader is closed"):
            file.get_tensor("half")


def test_load_file_notices_a_moved_position(data: bytes) -> None:
    class Moving(Dribbling):
        def read(self, size: int | None = -1) -> bytes:
            found = super().read(size)
            self.seek(3, io.SEEK_CUR)
            return found

    with pytest.raises(ingot.StorageError, match="position was moved") as caught:
        ingot.numpy.load_file(Moving(data))
    assert caught.value.code == "moved"


def test_load_file_rejects_mapping_an_object(data: bytes) -> None:
    with pytest.raises(ingot.OptionError, match="a BytesIO cannot be mapped"):
        ingot.numpy.load_file(io.BytesIO(data), backend="mmap")


def test_ranges_rejects_invalid_stores() -> None:
    with pytest.raises(TypeError, match=r"get_ranges.*found dict"):
        ingot.Ranges({}, NAME)
    with pytest.raises(TypeError, match="must be a str, found int"):
        ingot.Ranges(Counting(b""), 3)  # type: ignore[arg-type]
    with pytest.raises(ingot.OptionError, match="nbytes -1"):
        ingot.Ranges(Counting(b""), NAME, nbytes=-1)

    class Unmeasured:
        def get_ranges(self, path: str, *, starts: list[int], ends: list[int]) -> list[bytes]:
            return []

    with pytest.raises(TypeError, match="nbytes="):
        ingot.numpy.load_file(ingot.Ranges(Unmeasured(), NAME))


def test_ranges_with_nbytes_requests_no_size(data: bytes) -> None:
    store = Counting(data)
    ingot.numpy.load_file(ingot.Ranges(store, NAME, nbytes=len(data)))
    assert store.heads == 0


def test_safe_open_requests_a_long_header_in_two_ranges() -> None:
    given, asked = counted("obstore", ingot.numpy.save({"a": numpy.zeros(3)}, {"note": "x" * 1_000_000}))
    assert ingot.safe_open(given, "np").metadata() == {"note": "x" * 1_000_000}
    assert len(asked) == 2


def test_safe_open_of_an_object_is_pickled(data: bytes, tmp_path: Path) -> None:
    for given in (fsspec.open(in_memory_of_fsspec(data)), io.BytesIO(data)):
        file = ingot.safe_open(given, "np")
        again = pickle.loads(pickle.dumps(file))
        part = pickle.loads(pickle.dumps(file.get_slice("half")))
        numpy.testing.assert_array_equal(again["half"], tensors()["half"])
        numpy.testing.assert_array_equal(part[3], tensors()["half"][3])
    with opened(data, tmp_path) as given, pytest.raises(TypeError, match="pickle"):
        pickle.dumps(ingot.safe_open(given, "np"))


def test_safe_open_releases_its_object_on_close(data: bytes) -> None:
    given = bytearray(data)
    file = ingot.safe_open(given, "np")
    with pytest.raises(BufferError):
        given.append(0)
    file.close()
    given.append(0)


# A store that returns bytes after the header once `over` is set, and a handle on a file in it.
SLOW = """
import io

class Store:
    over = threading.Event()
    def get_ranges(self, path, *, starts, ends):
        if starts[0] > 0:
            self.over.wait(float(sys.argv[1]))
        return [data[starts[0]:ends[0]]]

data = ingot.numpy.save({f"t{n}": numpy.full(1 << 17, n, "f4") for n in range(8)})
file = ingot.safe_open(ingot.Ranges(Store(), "m", nbytes=len(data)), "np")
"""


@pytest.mark.parametrize("end", ["", "del iterator", "iterator.close()", "iterator = None; file.close()"])
def test_prefetch_ends_when_its_iterator_is_dropped(end: str) -> None:
    # The reading thread needs the GIL, which the thread that drops the iterator holds.
    program = SLOW + f"iterator = file.prefetch()\ntime.sleep(0.1)\n{end}\nsay('ended')"
    assert run(program, 0.3).said() == "ended"


@pytest.mark.filterwarnings("ignore")
def test_safe_open_of_an_object_reopens_in_a_forked_child() -> None:
    program = (
        SLOW
        + """
memory = ingot.safe_open(io.BytesIO(data), "np")
Store.over.set()
child = os.fork()
if child == 0:
    try:
        file.get_tensor("t3")
    except ingot.ClosedError as error:
        assert error.code == "forked"
        again = ingot.safe_open(ingot.Ranges(Store(), "m", nbytes=len(data)), "np")
        assert again["t3"][5] == memory["t3"][5] == 3
        os._exit(0)
    os._exit(1)
assert os.waitpid(child, 0)[1] == 0
say(float(file["t3"][5]))
"""
    )
    assert run(program, 60).said() == 3.0


def test_compat_takes_paths_only(data: bytes) -> None:
    import ingot.compat.safetensors.numpy as upstream

    for call in (upstream.load_file, lambda given: upstream.safe_open(given, "np")):
        with pytest.raises(TypeError):
            call(io.BytesIO(data))
