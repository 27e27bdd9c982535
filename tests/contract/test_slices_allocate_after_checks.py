"""Nothing is allocated for an index before it is compared with the shape."""

from __future__ import annotations

from pathlib import Path

import pytest

from support.processes import run

# Reads by random indices, in which numbers and ranges are of any size, in every way that takes one.
PROGRAM = """
import random

path, framework, steps = sys.argv[1:]
if framework == "pt":
    import torch, ingot.torch
random.seed(framework)
arrays = {
    "box": numpy.arange(60.0).reshape(3, 4, 5),
    "empty": numpy.zeros((0, 4)),
    "wide": numpy.zeros((1 << 40, 0), "u1"),
    "scalar": numpy.array(1.0),
}
ingot.numpy.save_file(arrays, path)
module = ingot.numpy if framework == "np" else ingot.torch
SMALL = [*range(-5, 6)]
HUGE = [sign * (1 << n) + off for n in (31, 33, 40, 62, 63, 64, 70) for sign in (1, -1) for off in (-1, 0, 1)]

def number():
    return random.choice(random.choice([SMALL, HUGE]))

def spread():
    return range(number(), number(), random.choice([number(), 1, -1, 2]) or 1)

def place():
    return random.choice([
        number, spread, lambda: numpy.int64(random.choice(SMALL)), lambda: numpy.uint64(1 << 63),
    ])()

def listed():
    return [place() for _ in range(random.randint(0, 3))]

def part():
    return random.choice([
        number, spread, listed, listed,
        lambda: [listed(), listed()],
        lambda: [[spread()]],
        lambda: slice(number(), number(), random.choice([None, 1, number()])),
        lambda: None, lambda: ...,
        lambda: numpy.array([random.choice(SMALL)]),
        lambda: numpy.array([1 << 62]),
        lambda: [random.choice([True, False]) for _ in range(3)],
    ])()

def ways(backend, name, index):
    file = files[backend]
    yield lambda: file.get_slice(name)[index]
    yield lambda: module.load_file(path, backend=backend, slices={name: index}, keys=[name])[name]
    yield lambda: [*file.prefetch({name: index})]
    whole = numpy.zeros((3, 4, 5))
    out = whole if framework == "np" else torch.from_numpy(whole)
    yield lambda: module.load_file(path, backend=backend, slices={name: index}, out={name: out}, keys=[name])

# What is loaded by now, and a little more.
limit = memory("VmSize") + (1 << 30)
resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
refused = 0
files = {backend: ingot.safe_open(path, framework, backend=backend) for backend in ("mmap", "pread")}
for _ in range(int(steps)):
    name = random.choice(["box", "box", "empty", "wide", "scalar"])
    index = tuple(part() for _ in range(random.randint(1, 4))) if random.random() < 0.7 else part()
    for way in ways(random.choice([*files]), name, index):
        try:
            way()
        except (IndexError, ValueError, TypeError, RuntimeError, ingot.SafetensorError):
            refused += 1
        except BaseException as error:
            # NumPy's own refusal, for an array among the indices of what has no elements.
            if not (name == "wide" and str(error).startswith("Unable to allocate")):
                raise AssertionError(f"{name}[{index}]") from error
say(refused)
"""


@pytest.mark.parametrize("framework", ["np", "pt"])
def test_get_slice_and_load_file_compare_an_index_before_they_allocate(
    tmp_path: Path, framework: str
) -> None:
    """`MemoryError` is a failure: rejected slices need no memory, and the slices read here are small."""
    refused = run(PROGRAM, tmp_path / "m.safetensors", framework, 500).said()
    assert refused > 500
