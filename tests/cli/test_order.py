"""The order of names, how they are grouped, and how sizes are written."""

from __future__ import annotations

import random

import numpy
from hypothesis import given, settings
from hypothesis import strategies as st

import ingot
from ingot._native import in_natural_order
from ingot.cli.screen import cell_width, count, cut, nbytes
from support.commands import good
from support.models import save


def test_numbers_are_in_the_order_of_their_values() -> None:
    names = ["h.2", "h.10", "h.1", "h", "h.1.b", "h.01", "head", "h.9999999999999999999999", "a10b", "a9b"]
    expected = ["a9b", "a10b", "h", "h.01", "h.1", "h.1.b", "h.2", "h.10", "h.9999999999999999999999", "head"]
    for _ in range(10):
        random.shuffle(names)
        assert in_natural_order(names) == expected


def test_ls_gives_the_names_in_natural_order_whatever_file_they_are_in(tmp_path) -> None:  # type: ignore[no-untyped-def]
    names = [
        f"h.{layer}.{part}{number}" for layer in (0, 2, 10, 100) for part in "wb" for number in (1, 10, 2)
    ]
    path = save(tmp_path / "model.safetensors", {name: numpy.zeros(4, "f4") for name in names})
    ingot.split(path, tmp_path / "shards", 48)
    expected = in_natural_order(names[::-1])
    assert expected[:4] == ["h.0.b1", "h.0.b2", "h.0.b10", "h.0.w1"]
    for model in (path, tmp_path / "shards"):
        assert good("ls", "-q", model).out.splitlines() == expected


def test_only_modules_that_are_alike_and_follow_each_other_are_one(tmp_path) -> None:  # type: ignore[no-untyped-def]
    sizes = {"0": 4, "1": 4, "2": 4, "3": 5, "4": 4, "6": 4, "7": 4, "07": 4, "x": 4}
    arrays = {f"h.{number}.w": numpy.zeros(size, "f4") for number, size in sizes.items()}
    path = save(tmp_path / "model.safetensors", arrays)
    rows = good("tree", path).rows()
    assert [row[0] for row in rows] == [
        "h",
        "h.0-2.w",
        "h.3.w",
        "h.4.w",
        "h.6.w",
        "h.07.w",
        "h.7.w",
        "h.x.w",
    ]
    assert [row[1] for row in rows] == ["9", "3", "1", "1", "1", "1", "1", "1"]


def test_the_numbers_of_a_tree_add_up(tmp_path) -> None:  # type: ignore[no-untyped-def]
    arrays = {
        f"model.{layer}.experts.{expert}.{name}": numpy.zeros(3, "f4")
        for layer in range(3)
        for expert in range(4)
        for name in ("up", "down")
    }
    path = save(tmp_path / "model.safetensors", arrays | {"model.norm": numpy.zeros(2, "f4")})

    def check(module: dict[str, object]) -> None:
        children = module["modules"]
        assert isinstance(children, list)
        if children and module["shape"] is None:
            for field in ("tensors", "parameters", "nbytes"):
                assert module[field] == sum(child[field] for child in children)
        for child in children:
            check(child)

    for form in ([], ["--expand"]):
        for module in good("tree", path, "--json", *form).json()["modules"]:
            assert module["tensors"] == 25
            check(module)


def test_sizes_are_written_in_three_digits() -> None:
    written = [
        nbytes(size) for size in (0, 999, 1000, 1005, 9994, 9995, 99_949, 99_950, 999_499, 999_500, 10**30)
    ]
    assert written[:4] == ["0 B", "999 B", "1.00 kB", "1.00 kB"]
    assert written[4:10] == ["9.99 kB", "10.0 kB", "99.9 kB", "100 kB", "999 kB", "1.00 MB"]
    assert count(22_713_728) == "22.7M"
    assert count(7_000_000_000) == "7.00B"


@settings(max_examples=50)
@given(st.text(), st.integers(2, 30))
def test_what_is_cut_fits(text: str, width: int) -> None:
    found = cut(text, width)
    assert cell_width(found) <= width
    assert found == text or "…" in found
