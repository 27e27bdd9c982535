"""A model with more shards than a process may open files: every operation keeps few of them open."""

from __future__ import annotations

import json
import struct
from pathlib import Path

import pytest

from support.processes import run
from support.servers import serving
from support.shards import folder as files_of

pytestmark = pytest.mark.slow

COUNT = 3000
# The usual limit of open files, and the limit that ingot promises.
ALLOWED, OWED = 1024, 128

if not Path("/proc/self/fd").exists():
    pytest.skip("this system does not list what a process has open", allow_module_level=True)


def shard(number: int, first: float) -> bytes:
    header = b'{"t%05d":{"dtype":"F32","shape":[4],"data_offsets":[0,16]}}' % number
    return struct.pack("<Q", len(header)) + header + struct.pack("<4f", first, number, 2, 3)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("shards")
    names = [f"model-{number + 1:05}-of-{COUNT:05}.safetensors" for number in range(COUNT)]
    for number, name in enumerate(names):
        (folder / name).write_bytes(shard(number, 1))
    index = {
        "metadata": {"total_size": 16 * COUNT},
        "weight_map": {f"t{number:05}": name for number, name in enumerate(names)},
    }
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return folder


# Count the open files continuously while the call runs.
PROGRAM = f"""
import faulthandler, shutil, tempfile
COUNT, ALLOWED, OWED = {COUNT}, {ALLOWED}, {OWED}
INDEX = "model.safetensors.index.json"
NAMES = [f"t{{number:05}}" for number in range(COUNT)]
FILES = [f"model-{{number + 1:05}}-of-{{COUNT:05}}.safetensors" for number in range(COUNT)]
most, over, counted = 0, threading.Event(), 0

def count(*_):
    global most, counted
    most, counted = max(most, descriptors()), counted + 1

def sample():
    while not over.is_set():
        count()
        time.sleep(0.0005)

def check(tensors):
    assert sorted(tensors) == NAMES
    for number, name in enumerate(NAMES):
        assert [*map(float, tensors[name])] == [1, number, 2, 3], name

def watched(work):
    resource.setrlimit(resource.RLIMIT_NOFILE, (ALLOWED, ALLOWED))
    sampler = threading.Thread(target=sample)
    sampler.start()
    try:
        work()
    finally:
        over.set()
        sampler.join()
    count()
    assert counted > 2
    say(most)

def into(name):
    return os.path.join(OUT, name)

OUT = sys.argv[1]
"""

READS = {
    "load": "check(ingot.numpy.load_file(INDEX, backend=BACKEND, progress=count))",
    "one_by_one": """
with ingot.safe_open(INDEX, "np", backend=BACKEND) as file:
    for _ in range(2):
        check({name: file[name] for name in file.keys()})
    assert file.get_slice(NAMES[7])[1:2].tolist() == [7]
""",
    "slices": """
wanted = dict.fromkeys(NAMES, slice(1, 2))
found = ingot.numpy.load_file(INDEX, backend=BACKEND, slices=wanted, progress=count)
assert [found[name].item() for name in NAMES] == [*range(COUNT)]
""",
    "out": """
out = {name: numpy.empty(4, numpy.float32) for name in NAMES}
check(ingot.numpy.load_file(INDEX, backend=BACKEND, out=out, progress=count))
check(out)
""",
    "iterated": """
with ingot.safe_open(INDEX, "np", backend=BACKEND) as file:
    check(dict(file.prefetch()))
""",
    "threads": """
with ingot.safe_open(INDEX, "np", backend=BACKEND) as file:
    def work(start):
        for number in range(start, COUNT, 4):
            assert float(file[NAMES[number]][1]) == number
            count()
        done.append(start)
    done = []
    threads = [threading.Thread(target=work, args=(start,)) for start in range(4)]
    [thread.start() for thread in threads]
    [thread.join() for thread in threads]
    assert sorted(done) == [0, 1, 2, 3]
""",
    "a_process_that_was_forked": """
with ingot.safe_open(INDEX, "np", backend=BACKEND) as file:
    check({name: file[name] for name in NAMES})
    child = os.fork()
    if child == 0:
        try:
            check({name: file[name] for name in NAMES})
            os._exit(0)
        except BaseException:
            faulthandler.dump_traceback()
            os._exit(1)
    check({name: file[name] for name in reversed(NAMES)})
    assert os.waitpid(child, 0)[1] == 0
""",
    "another_working_directory": """
with ingot.safe_open(INDEX, "np", backend=BACKEND) as file:
    check({name: file[name] for name in NAMES})
    os.chdir("/")
    check({name: file[name] for name in NAMES})
""",
    "confined": """
with ingot.safe_open(INDEX, "np", backend=BACKEND, confine=True) as file:
    for _ in range(2):
        check({name: file[name] for name in NAMES})
""",
}


@pytest.mark.parametrize("what", READS)
def test_load_file_reads_shards_with_few_descriptors(
    folder: Path, tmp_path: Path, what: str, backend: str
) -> None:
    work = f"BACKEND = {backend!r}\ndef work():\n    " + READS[what].strip().replace("\n", "\n    ")
    found = run(PROGRAM + work + "\nwatched(work)", tmp_path, folder=folder).said()
    assert found <= OWED


WRITES = {
    "merge_an_index": "ingot.merge([INDEX], into('one.safetensors'), progress=count)",
    "merge_files": "ingot.merge(FILES, into('one.safetensors'), progress=count)",
    "split": """
ingot.split(INDEX, into('again'), 16, progress=count)
assert len(os.listdir(into('again'))) == COUNT + 1
shutil.rmtree(into('again'))
ingot.merge([INDEX], into('one.safetensors'))
""",
    "convert": "ingot.convert(INDEX, into('one.safetensors'))",
    "verify": """
ingot.verify(INDEX, raises=False)
ingot.merge([INDEX], into('one.safetensors'))
""",
}


@pytest.mark.parametrize("what", WRITES)
def test_copies_of_shards_take_few_descriptors(folder: Path, tmp_path: Path, what: str) -> None:
    work = "def work():\n    " + WRITES[what].strip().replace("\n", "\n    ")
    work += "\n    check(ingot.numpy.load_file(into('one.safetensors')))\nwatched(work)"
    found = run(PROGRAM + work, tmp_path, folder=folder).said()
    assert found <= OWED


def test_stats_of_shards_take_few_descriptors(folder: Path, tmp_path: Path) -> None:
    program = """
def work():
    from ingot import _native
    found = _native.statistics(_native.Checkpoint.open(INDEX), progress=count)
    assert [one['max'] for one in found] == [max(3, number) for number in range(COUNT)]

watched(work)
"""
    assert run(PROGRAM + program, tmp_path, folder=folder).said() <= OWED


def test_save_sharded_takes_few_descriptors(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    program = """
import torch, ingot.torch

def work():
    tensors = {name: torch.tensor([1.0, number, 2, 3]) for number, name in enumerate(NAMES)}
    ingot.torch.save_sharded(tensors, OUT, 16)
    assert len(os.listdir(OUT)) == COUNT + 1
    check(ingot.torch.load_file(into(INDEX)))

watched(work)
"""
    assert run(PROGRAM + program, tmp_path).said() <= OWED


def test_download_of_shards_takes_few_descriptors(folder: Path, tmp_path: Path) -> None:
    files = {path.name: path.read_bytes() for path in folder.iterdir()}
    program = """
class Enough(Exception):
    pass

def half(done, total):
    count()
    if done > total / 2:
        raise Enough

def work():
    try:
        ingot.download(URL, OUT, progress=half)
    except Enough:
        pass
    else:
        raise AssertionError("it was not broken off")
    assert INDEX not in os.listdir(OUT)
    ingot.download(URL, OUT, progress=count)
    assert sorted(os.listdir(OUT)) == sorted([*FILES, INDEX])
    check(ingot.numpy.load_file(into(INDEX)))

watched(work)
"""
    with serving(files_of(files)) as server:
        url = f"URL = {server.url('/model/model.safetensors.index.json')!r}\n"
        assert run(PROGRAM + url + program, tmp_path).said() <= OWED


def test_shards_are_handled_with_few_descriptors_allowed(folder: Path, tmp_path: Path) -> None:
    program = """
ALLOWED = 48
def work():
    with ingot.safe_open(INDEX, "np", backend="pread") as file:
        for _ in range(2):
            check({name: file[name] for name in NAMES})
    ingot.merge([INDEX], into('one.safetensors'))
    check(ingot.numpy.load_file(into('one.safetensors')))

watched(work)
"""
    assert run(PROGRAM + program, tmp_path, folder=folder).said() < 48


def test_load_file_rejects_a_replaced_shard(folder: Path, tmp_path: Path, backend: str) -> None:
    name = f"model-00006-of-{COUNT:05}.safetensors"
    (tmp_path / "other").write_bytes(shard(5, 7))
    program = f"""
resource.setrlimit(resource.RLIMIT_NOFILE, (ALLOWED, ALLOWED))
name, other, aside = {name!r}, into("other"), into("aside")
found = []
with ingot.safe_open(INDEX, "np", backend={backend!r}) as file:
    check({{name: file[name] for name in NAMES}})
    before = os.stat(name)
    os.utime(other, ns=(before.st_atime_ns, before.st_mtime_ns))
    shutil.move(name, aside)
    try:
        # Another file of the same size and the same time.
        shutil.copy2(other, name)
        try:
            found.append(file["t00005"].tolist())
        except ingot.StorageError as fault:
            found += [fault.code, os.path.basename(fault.path)]
        os.remove(name)
        try:
            found.append(file["t00005"].tolist())
        except OSError as fault:
            found.append(type(fault).__name__)
    finally:
        os.rename(aside, name)
    found.append(file["t00005"].tolist())
say(found)
"""
    # A move within a file system keeps the inode.
    found = run(PROGRAM + program, tmp_path, folder=folder).said()
    assert found == ["changed", name, "StorageError", [1, 5, 2, 3]]
