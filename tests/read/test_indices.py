"""Every form of index, with `get_slice` and with `slices=`, compared with NumPy and torch."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import ingot
import ingot.numpy
import ingot.torch

SHAPES: dict[str, tuple[int, ...]] = {
    "line": (5,),
    "plane": (3, 4),
    "box": (2, 3, 4),
    "scalar": (),
    "none": (0, 3),
}
ARRAYS = {
    name: numpy.arange(numpy.prod(shape), dtype=numpy.float32).reshape(shape)
    for name, shape in SHAPES.items()
}

Door = Callable[..., Any]


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("indices") / "t.safetensors"
    ingot.numpy.save_file(ARRAYS, path)
    return path


def by_handle(path: Path, framework: str, name: str, index: Any, backend: str) -> Any:
    with ingot.safe_open(path, framework, backend=backend) as file:
        return file.get_slice(name)[index]


def by_slices(path: Path, framework: str, name: str, index: Any, backend: str) -> Any:
    module = {"np": ingot.numpy, "pt": ingot.torch}[framework]
    return module.load_file(path, backend=backend, keys=[name], slices={name: index})[name]


def by_progress(path: Path, framework: str, name: str, index: Any, backend: str) -> Any:
    """Return the part like `by_slices`, with `progress`, for which all bytes are counted before the read."""
    module = {"np": ingot.numpy, "pt": ingot.torch}[framework]
    told: list[int] = []
    found = module.load_file(
        path, backend=backend, slices={name: index}, progress=lambda done, total: told.append(total)
    )
    assert found.keys() == ARRAYS.keys()
    return found[name]


DOORS = {"get_slice": by_handle, "slices": by_slices, "slices with progress": by_progress}

INTS = st.integers(-6, 5) | st.integers(-6, 5).map(numpy.int64)
SPANS = st.slices(6).filter(lambda part: part.step is None or part.step > 0)
LISTS = st.lists(st.integers(-4, 3), max_size=4)
MASKS = st.lists(st.booleans(), min_size=1, max_size=5)
ONE = st.one_of(
    INTS,
    SPANS,
    st.none(),
    st.just(...),
    LISTS,
    MASKS,
    st.booleans(),
    MASKS.map(lambda mask: numpy.array(mask, bool)),
    LISTS.map(lambda positions: numpy.array(positions, numpy.int64)),
)
INDEX = ONE | st.lists(ONE, max_size=4).map(tuple)


def outcome(read: Callable[[], Any]) -> Any:
    """Return the part as an array, or the error."""
    try:
        return numpy.asarray(read())
    except (IndexError, TypeError, ValueError) as error:
        return f"refused: {error}"


def same(found: Any, expected: Any) -> bool:
    if isinstance(expected, str) or isinstance(found, str):
        return isinstance(expected, str) and isinstance(found, str)
    return found.shape == expected.shape and found.dtype == expected.dtype and bool((found == expected).all())


ORACLES: dict[str, Callable[[str, Any], Any]] = {
    "np": lambda name, index: ARRAYS[name][index],
    "pt": lambda name, index: torch.from_numpy(ARRAYS[name])[index],
}


@pytest.mark.parametrize("framework", ORACLES)
@pytest.mark.parametrize("backend", ["mmap", "pread"])
@settings(max_examples=300, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(name=st.sampled_from(list(SHAPES)), index=INDEX)
def test_index_equals_frameworks(file: Path, framework: str, backend: str, name: str, index: Any) -> None:
    expected = outcome(lambda: ORACLES[framework](name, index))
    if isinstance(index, tuple) and sum(part is ... for part in index) > 1:
        # torch accepts two ellipses. ingot rejects them, as NumPy does.
        expected = "refused"
    if "out of bounds" in str(outcome(lambda: ORACLES["np"](name, index))):
        # torch accepts positions beyond the end if another dimension of the part is empty.
        expected = "refused"
    for title, door in DOORS.items():
        found = outcome(lambda door=door: door(file, framework, name, index, backend))  # type: ignore[misc]
        assert same(found, expected), (title, index, found, expected)


@pytest.mark.parametrize("door", DOORS)
@pytest.mark.parametrize(
    "index",
    [
        None,
        (None,),
        (),
        ...,
        0,
        [0, 1],
        [[0, 1], [1, 0]],
        [True, False, True],
        numpy.array([True, False, True]),
    ],
    ids=repr,
)
def test_index_forms_work_in_every_function(file: Path, door: str, index: Any) -> None:
    found = DOORS[door](file, "np", "plane", index, "pread")
    numpy.testing.assert_array_equal(found, ARRAYS["plane"][index], strict=True)


def test_index_mask_applies_after_conversion(file: Path) -> None:
    mask = ARRAYS["plane"] > 5
    found = ingot.numpy.load_file(file, slices={"plane": mask}, dtype="F64")["plane"]
    numpy.testing.assert_array_equal(found, ARRAYS["plane"].astype(numpy.float64)[mask], strict=True)


def test_index_mask_with_a_destination_is_rejected_before_reading(file: Path) -> None:
    out = {"plane": numpy.full(6, -1, numpy.float32)}
    with pytest.raises(ingot.SliceError, match=r"tensor `plane`: .* only supported by frameworks") as caught:
        ingot.numpy.load_file(file, slices={"plane": ARRAYS["plane"] > 5}, out=out)
    assert (caught.value.code, caught.value.tensor) == ("index", "plane")
    assert (out["plane"] == -1).all()


@pytest.mark.parametrize("module", [ingot.numpy, ingot.torch])
def test_index_with_a_new_axis_fills_a_destination(file: Path, module: Any) -> None:
    empty = {ingot.numpy: numpy.empty((1, 5), numpy.float32), ingot.torch: torch.empty(1, 5)}[module]
    found = module.load_file(file, keys=["line"], slices={"line": None}, out={"line": empty})["line"]
    assert found is empty
    numpy.testing.assert_array_equal(numpy.asarray(found), ARRAYS["line"][None], strict=True)
