"""Where the elements of a piece are."""

from __future__ import annotations

from math import prod

import numpy
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ingot._write.save import boxes

SHAPES = st.lists(st.integers(0, 7), max_size=4).map(tuple)


@given(SHAPES, st.data())
def test_boxes_hold_the_elements_in_their_order(shape: tuple[int, ...], data: st.DataObject) -> None:
    array = numpy.arange(prod(shape)).reshape(shape)
    begin = data.draw(st.integers(0, array.size))
    end = data.draw(st.integers(begin, array.size))
    found = boxes(shape, begin, end)
    assert len(found) <= 2
    assert sum(prod(box.sizes) for box in found) <= 3 * (end - begin) or not shape
    parts = [array[box.slices].reshape(-1)[box.within] for box in found]
    assert numpy.concatenate(parts).tolist() == list(range(begin, end))
    for box in found:
        assert array[box.slices].shape == box.sizes


@pytest.mark.parametrize("shape", [(100, 7), (7, 100), (3, 4, 50), (97, 61)])
def test_how_much_a_box_takes_does_not_depend_on_where_it_begins(shape: tuple[int, ...]) -> None:
    count = 60
    found = [boxes(shape, begin, begin + count) for begin in range(0, prod(shape) - count, 17)]
    assert len({each[0].sizes for each in found if len(each) == 1}) == 1
