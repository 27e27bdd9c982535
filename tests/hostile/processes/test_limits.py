"""Limits of addresses, descriptors and memory, and the memory of huge headers."""

from __future__ import annotations

import errno
import os
import sys
from pathlib import Path

import numpy
import pytest

import ingot
import ingot.numpy
import ingot.torch
from support.hostile_files import ARRAY, file_of
from support.processes import Ended, run

pytestmark = pytest.mark.slow


def one_tensor(path: Path, nbytes: int) -> None:
    file_of(b'{"a":{"dtype":"U8","shape":[%d],"data_offsets":[0,%d]}}' % (nbytes, nbytes), nbytes, path)


def test_handle_reads_the_end_of_a_tebibyte(path: Path, backend: str) -> None:
    nbytes = 1 << 40
    try:
        file_of(
            b'{"a":{"dtype":"U8","shape":[%d],"data_offsets":[0,%d]},'
            b'"b":{"dtype":"I16","shape":[1],"data_offsets":[%d,%d]}}' % (nbytes, nbytes, nbytes, nbytes + 2),
            nbytes + 2,
            path,
        )
    except OSError as fault:
        pytest.skip(f"the file system of {path.parent} holds no file of 1 TiB: {fault}")
    with path.open("r+b") as data:
        data.seek(-2, os.SEEK_END)
        data.write(b"\x01\x02")
        data.seek(-5, os.SEEK_END)
        data.write(b"\x07")
    for framework in ("np", "pt"):
        with ingot.safe_open(path, framework, backend=backend) as file:
            assert file["b"].tolist() == [0x0201]
            part = file.get_slice("a")
            assert part[-3:].tolist() == [7, 0, 0]
            assert part[nbytes - 4 : nbytes + 10 : 2].tolist() == [0, 0]
            assert part[:: nbytes // 4].tolist() == [0] * 4
            assert part[[0, -3]].tolist() == [0, 7]
    if backend == "pread":
        program = """
resource.setrlimit(resource.RLIMIT_AS, (8 << 30, 8 << 30))
with ingot.safe_open("model.safetensors", "np", backend="pread") as file:
    try:
        file["a"]
    except MemoryError as fault:
        say(str(fault))
"""
        message = run(program, folder=path.parent).said()
        assert message.startswith("model.safetensors: ")
        assert str(nbytes) in message


def test_auto_reads_where_address_space_is_short(path: Path) -> None:
    one_tensor(path, 1 << 30)
    program = """
limit = memory("VmSize") + (512 << 20)
resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
with ingot.safe_open("model.safetensors", "np") as file:
    part = file.get_slice("a")
    found = [file.backend, file.why, part[-2:].tolist(), part[:: 1 << 29].tolist()]
    try:
        file["a"]
    except MemoryError as fault:
        found.append(str(fault))
try:
    ingot.safe_open("model.safetensors", "np", backend="mmap")
except OSError as fault:
    found += [fault.errno, fault.filename]
say(found)
"""
    backend, why, end, some, message, number, filename = run(
        program, folder=path.parent, INGOT_BACKEND=""
    ).said()
    assert backend == "pread"
    assert "mapping the file failed" in why
    assert (end, some) == ([0, 0], [0, 0])
    assert "model.safetensors" in message
    assert (number, filename) == (errno.ENOMEM, "model.safetensors")


def test_too_many_open_files_is_an_error(path: Path) -> None:
    ingot.numpy.save_file({"a": ARRAY}, path)
    program = """
# What NumPy imports when an array is first saved.
ingot.numpy.save({"a": numpy.ones(2)})
resource.setrlimit(resource.RLIMIT_NOFILE, (descriptors() + 20, descriptors() + 20))
found, files = [], []
try:
    while True:
        files.append(ingot.safe_open("model.safetensors", "np"))
except OSError as fault:
    found.append([fault.errno, fault.filename])
try:
    ingot.numpy.save_file({"a": numpy.ones(2)}, "other")
except OSError as fault:
    found.append([fault.errno, fault.filename])
found.append(files[-1]["a"].tolist() == files[0]["a"].tolist())
for file in files:
    file.close()
found.append(ingot.safe_open("model.safetensors", "np")["a"].shape[0])
say([*found, os.listdir()])
"""
    found = run(program, folder=path.parent).said()
    assert found == [[errno.EMFILE, "model.safetensors"], [errno.EMFILE, "other"], True, 6, [path.name]]


def empty(number: int, shape: str = "0") -> str:
    """An entry of a header, for a tensor without elements."""
    return f'"{number:x}":{{"dtype":"U8","shape":[{shape}],"data_offsets":[0,0]}}'


OPENED = """
with open("model.safetensors", "rb") as file:
    nbytes = int.from_bytes(file.read(8), "little")
gc.collect()
forget_peak()
before = memory("VmRSS")
file = ingot.safe_open("model.safetensors", "np")
peak, after = memory("VmHWM"), memory("VmRSS")
say([len(file), len(file.metadata() or {}), nbytes, peak - before, after - before])
"""


def opened_at(path: Path, times: float = 4) -> tuple[int, int]:
    """Return the numbers of tensors and metadata keys. Opening may take `times` the header's size at most."""
    tensors, keys, nbytes, peak, after = run(OPENED, folder=path.parent).said()
    print(f"peak {peak / nbytes:.2f} times the header, {after / nbytes:.2f} held")
    assert peak <= times * nbytes
    return tensors, keys


def test_header_of_many_empty_tensors_takes_little_memory(path: Path) -> None:
    count = 1_750_000
    entries = map(empty, range(count))
    file_of(("{" + ",".join(entries) + "}").encode(), 0, path)
    assert path.stat().st_size > 94_000_000
    assert opened_at(path) == (count, 0)


@pytest.mark.parametrize("spelled", ["compact", "spaced"])
def test_header_of_many_metadata_keys_takes_little_memory(path: Path, spelled: str) -> None:
    # Headers with white space between tokens are read by another parser.
    pair, count = ('"%x":""', 8_000_000) if spelled == "compact" else ('"%x" : ""', 7_000_000)
    pairs = ",".join(pair % number for number in range(count))
    file_of(('{"__metadata__":{' + pairs + "}}").encode(), 0, path)
    assert path.stat().st_size > 80_000_000
    assert opened_at(path) == (0, count)


def test_header_of_many_unordered_tensors_takes_little_memory(path: Path) -> None:
    # Like the headers above, for the general parser: with white space, and other keys before the usual ones.
    count = 1_200_000
    entries = (
        f'"{number * 7919 % count:07}" : {{"shape" : [0], "data_offsets":[0,0], "dtype":"U8" }}'
        for number in range(count)
    )
    file_of(("{" + ",".join(entries) + "}").encode(), 0, path)
    assert opened_at(path) == (count, 0)


@pytest.mark.parametrize(("rank", "count"), [(100, 300_000), (40_000_000, 1)])
def test_header_of_long_shapes_takes_a_little_more_memory(path: Path, rank: int, count: int) -> None:
    shape = ",".join("0" * rank)
    entries = (empty(number, shape) for number in range(count))
    file_of(("{" + ",".join(entries) + "}").encode(), 0, path)
    # A dimension takes 8 bytes in memory and 2 in the file: 4 times the header, besides the header itself.
    assert opened_at(path, 5.1) == (count, 0)


def test_header_of_many_bt_tensors_takes_no_more_memory_than_the_limit(path: Path) -> None:
    # An entry of a `.bt` file may take 9 bytes. Upstream's limit bounds the memory: the parsed header may
    # take
    # 100 MB, in addition to the bytes of the header.
    count = 1_500_000
    spec = {"dtype": "U8", "shape": [0], "data": b""}
    path.write_bytes(ingot.serialize({f"{number:x}": spec for number in range(count)}, format="bintensors"))
    tensors, _, nbytes, peak, _ = run(OPENED, folder=path.parent).said()
    assert tensors == count
    assert peak <= 100_000_000 + nbytes


@pytest.mark.parametrize("refused", ["duplicate", "unknown dtype", "cut"])
def test_header_that_is_rejected_takes_little_memory(path: Path, refused: str) -> None:
    count = 1_750_000
    entries = [empty(number) for number in range(count)]
    if refused == "duplicate":
        entries[-1] = entries[0]
    elif refused == "unknown dtype":
        entries[-1] = entries[-1].replace("U8", "U9")
    text = "{" + ",".join(entries) + ("" if refused == "cut" else "}")
    file_of(text.encode(), 0, path)
    opening = 'file = ingot.safe_open("model.safetensors", "np")'
    refusal = """
try:
    ingot.safe_open("model.safetensors", "np")
except ingot.HeaderError as fault:
    file = {}
    assert len(str(fault)) < 1000
"""
    program = OPENED.replace(opening, refusal).replace("file.metadata() or {}", "{}")
    _, _, nbytes, peak, after = run(program, folder=path.parent).said()
    print(f"peak {peak / nbytes:.2f} times the header, {after / nbytes:.2f} held")
    assert peak <= 4 * nbytes
    assert after <= nbytes / 2


def test_load_file_by_pread_takes_the_tensors_and_little_more(path: Path) -> None:
    tensors = {f"t{number}": numpy.ones(4 << 20, numpy.uint8) for number in range(32)}
    ingot.numpy.save_file(tensors, path)
    program = """
forget_peak()
before = memory("VmRSS")
loaded = ingot.numpy.load_file("model.safetensors", backend="pread")
say((memory("VmHWM") - before) / (128 << 20))
"""
    assert run(program, folder=path.parent).said() < 1.2


@pytest.mark.parametrize("durable", [True, False])
def test_save_file_takes_little_memory(tmp_path: Path, durable: bool) -> None:
    program = """
durable = sys.argv[1] == "True"
def taken(array):
    # What the first save ever takes, such as the stacks of threads, is not its.
    ingot.numpy.save_file({"a": array[:64, :64]}, "t", durable=durable)
    forget_peak()
    before = memory("VmRSS")
    ingot.numpy.save_file({"a": array}, "t", durable=durable)
    return (memory("VmHWM") - before) >> 20

array = numpy.ones((8192, 16384), numpy.float32)
say([taken(array), taken(array.T), taken(array[::-1]), taken(array.view(">f4"))])
"""
    # The array has 512 MiB.
    assert max(run(program, durable, folder=tmp_path).said()) < 64


LEAKS = """
backend, framework = sys.argv[1:]
if framework == "pt":
    import ingot.torch
def cycle():
    file = ingot.safe_open("model.safetensors", framework, backend=backend)
    tensors, part = file.get_tensors(), file.get_slice("a")
    part[::2], part[1:3], file.keys(), file.metadata(), file.info("a")
    for wrong in (lambda: file["nope"], lambda: part[99], lambda: ingot.safe_open("broken", framework)):
        try:
            wrong()
        except ingot.SafetensorError:
            pass
    data = ingot.numpy.save({"a": numpy.ones(20_000)}, {"k": "v"})
    ingot.numpy.load(data), ingot.deserialize(data)
    ingot.numpy.save_file({"a": numpy.ones(20_000)}, "saved")

def measured(cycles):
    for _ in range(cycles):
        cycle()
    gc.collect()
    with open("/proc/self/maps") as maps:
        mapped = sum("model.safetensors" in line for line in maps)
    return descriptors(), mapped, memory("VmRSS")

first = measured(200)
last = measured(1500)
say([first[0], last[0], first[1], last[1], last[2] - first[2]])
"""


@pytest.mark.parametrize("framework", ["np", "pt"])
def test_open_and_save_leak_nothing(path: Path, backend: str, framework: str) -> None:
    ingot.numpy.save_file({"a": numpy.ones((100, 100)), "b": numpy.ones(20_000)}, path, {"k": "v"})
    (path.parent / "broken").write_bytes(b"\x02\0\0\0\0\0\0\0[]")
    before, after, mapped, still_mapped, grown = run(LEAKS, backend, framework, folder=path.parent).said()
    assert before == after
    assert mapped == still_mapped == 0
    # 1500 leaked files of 240 kB would be 360 MB. 1500 leaked messages would still exceed this limit.
    assert grown < 4 << 20


def test_garbage_collection_closes_handles(path: Path, backend: str) -> None:
    ingot.numpy.save_file({"a": ARRAY}, path)
    program = """
def state():
    with open("/proc/self/maps") as maps:
        mapped = sum("model.safetensors" in line for line in maps)
    with os.scandir("/proc/self/fd") as links:
        targets = [os.readlink(link.path) for link in links if os.path.islink(link.path)]
    opened = sum("model.safetensors" in target for target in targets)
    return [opened, mapped]

mapping = int(sys.argv[1] == "mmap")
assert state() == [0, 0]
file = ingot.safe_open("model.safetensors", "np", backend=sys.argv[1])
assert state() == [1, mapping], state()
array = file["a"]
del file
# The array needs the mapping, and nobody the descriptor.
assert state() == [0, mapping], state()
view = array[1:]
del array
assert state() == [0, mapping], state()
del view
assert state() == [0, 0], state()
file = ingot.safe_open("model.safetensors", "np", backend=sys.argv[1])
part = file.get_slice("a")
file.close()
assert state() == [1, mapping], state()
assert part[0].tolist() == [0, 1, 2, 3]
del part
assert state() == [0, 0], state()
cycle = [ingot.safe_open("model.safetensors", "np", backend=sys.argv[1])]
cycle.append(cycle)
del cycle
gc.collect()
assert state() == [0, 0], state()
say("closed")
"""
    assert run(program, backend, folder=path.parent).said() == "closed"


ROUND_TRIP = """
import ingot.torch, torch, ml_dtypes
dtypes, shapes = ("u1", "<f4", ">f8", "?", ml_dtypes.bfloat16), ((), (0, 3), (5, 7))
arrays = {f"{dtype}-{shape}": numpy.ones(shape, dtype) for dtype in dtypes for shape in shapes}
arrays["f"] = numpy.asfortranarray(numpy.arange(12.0).reshape(3, 4))
for format in ("safetensors", "bintensors"):
    data = ingot.numpy.save(arrays, {"k": "v"}, format=format)
    assert all((array == arrays[name]).all() for name, array in ingot.numpy.load(data).items())
    assert ingot.torch.save(ingot.torch.load(data), {"k": "v"}, format=format) == data
    ingot.numpy.save_file(arrays, "t", {"k": "v"}, format=format)
    with open("t", "rb") as file:
        assert file.read() == data
    for backend in ("mmap", "pread"):
        for framework in ("np", "pt"):
            with ingot.safe_open("t", framework, backend=backend) as file:
                tensors = file.get_tensors()
                part = file.get_slice("f")
            del file
            gc.collect()
            assert part[::2, 1:3].tolist() == arrays["f"][::2, 1:3].tolist()
            assert part[[0, 2]].tolist() == arrays["f"][[0, 2]].tolist()
            tensors["f"][0] = 9
        for broken in (data[:-1], data[:20], b"", data + b"x", data[:8] + bytes(len(data) - 8)):
            with open("broken", "wb") as file:
                file.write(broken)
            for load in (ingot.numpy.load, lambda _: ingot.torch.load_file("broken", backend=backend)):
                try:
                    load(broken)
                    assert False
                except ingot.HeaderError as fault:
                    str(fault)
say("came back")
"""


@pytest.mark.parametrize(
    "variables", [{"PYTHONMALLOC": "debug"}, {"PYTHONDEVMODE": "1", "MALLOC_PERTURB_": "165"}]
)
def test_round_trip_survives_debugging_allocators(tmp_path: Path, variables: dict[str, str]) -> None:
    ended: Ended = run(ROUND_TRIP, folder=tmp_path, **variables)
    assert ended.said() == "came back"
    assert "ResourceWarning" not in ended.err


def test_extension_is_unloaded_in_order(path: Path) -> None:
    # Handles, slices and tensors that live until the interpreter ends.
    ingot.numpy.save_file({"a": ARRAY}, path)
    program = """
import ingot.torch
keep = []
for backend in ("mmap", "pread"):
    for framework in ("np", "pt"):
        file = ingot.safe_open("model.safetensors", framework, backend=backend)
        keep += [file, file.get_slice("a"), file["a"], iter(file), file.items()]
keep.append(keep)
sys.keep = keep
def load():
    while True:
        ingot.numpy.load_file("model.safetensors", backend="pread")
threading.Thread(target=load, daemon=True).start()
say("ends")
"""
    ended = run(program, folder=path.parent)
    assert ended.said() == "ends"
    assert ended.err == ""


if sys.platform != "linux":
    pytest.skip("limits and /proc as Linux has them", allow_module_level=True)
