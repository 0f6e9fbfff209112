"""Places of a part's elements in the whole, against torch's own slicing."""

from __future__ import annotations

import math
from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from lightning_ptm.errors import ConfigError
from lightning_ptm.planning.tensor_slices import TensorSlice


@st.composite
def boxes(draw: st.DrawFn) -> TensorSlice:
    parts, sections = draw(st.integers(1, 4)), draw(st.integers(1, 3))
    shape = draw(st.lists(st.integers(0, 4), min_size=1, max_size=4))
    dimension = draw(st.integers(0, len(shape) - 1))
    shape[dimension] *= parts * sections
    return TensorSlice(tuple(shape), dimension, parts, draw(st.integers(0, parts - 1)), sections)


def numbered(box: TensorSlice) -> Tensor:
    return torch.arange(math.prod(box.shape)).view(box.shape)


def part_of(box: TensorSlice, whole: Tensor) -> Tensor:
    """Returns the part as one would cut it by hand."""
    tensors = whole.chunk(box.sections, box.dimension) if whole.numel() else [whole] * box.sections
    size = whole.shape[box.dimension] // (box.parts * box.sections)
    return torch.cat([each.narrow(box.dimension, box.index * size, size) for each in tensors], box.dimension)


@given(boxes(), st.data())
def test_stretches_are_what_slicing_gives(box: TensorSlice, data: st.DataObject) -> None:
    part = part_of(box, numbered(box))
    assert box.part_shape == tuple(part.shape) and box.numel == part.numel()
    assert TensorSlice.around(box.part_shape, box.dimension, box.parts, box.index, box.sections) == box
    start = data.draw(st.integers(0, box.numel))
    numel = data.draw(st.integers(0, box.numel - start))
    found = list(box.stretches(start, numel))
    places = [place for each in found for place in range(each.whole_start, each.whole_start + each.numel)]
    assert places == part.reshape(-1)[start : start + numel].tolist()
    assert [each.start for each in found] == [start + sum(e.numel for e in found[:at]) for at in range(len(found))]


@given(boxes())
def test_stretches_do_not_touch_and_are_not_empty(box: TensorSlice) -> None:
    found = list(box.stretches(0, box.numel))
    assert all(each.numel for each in found)
    assert all(a.whole_start + a.numel < b.whole_start for a, b in pairwise(found))


@given(boxes())
def test_a_part_is_a_column_of_the_table_of_runs(box: TensorSlice) -> None:
    whole = numbered(box)
    column = whole.view(box.rows, box.parts, box.run_numel)[:, box.index]
    assert torch.equal(column.reshape(-1), part_of(box, whole).reshape(-1))


@given(boxes())
def test_the_parts_are_the_whole(box: TensorSlice) -> None:
    all_parts = [TensorSlice(box.shape, box.dimension, box.parts, index, box.sections) for index in range(box.parts)]
    stretches = [each for part in all_parts for each in part.stretches(0, part.numel)]
    places = [place for each in stretches for place in range(each.whole_start, each.whole_start + each.numel)]
    assert sorted(places) == list(range(math.prod(box.shape)))
    assert {part.cut for part in all_parts} == {box.cut}


def test_rows_are_one_stretch_and_columns_one_each_row() -> None:
    rows = TensorSlice((4, 6), 0, 2, 1)
    assert [(each.whole_start, each.numel) for each in rows.stretches(0, 12)] == [(12, 12)]
    columns = TensorSlice((4, 6), 1, 2, 1)
    assert [(each.whole_start, each.numel) for each in columns.stretches(0, 12)] == [(3, 3), (9, 3), (15, 3), (21, 3)]
    packed = TensorSlice((12, 2), 0, 2, 1, sections=3)
    assert [(each.whole_start, each.numel) for each in packed.stretches(0, 12)] == [(4, 4), (12, 4), (20, 4)]


@pytest.mark.parametrize(
    ("box", "words"),
    [
        (((4, 6), 2, 2, 0), r"\(4, 6\) has no dimension 2"),
        (((4, 6), -1, 2, 0), "no dimension -1"),
        (((), 0, 2, 0), "no dimension 0"),
        (((4, 6), 0, 3, 0), "dimension 0 .* no 3 equal parts in each of 1 sections; use a size that 3 divides"),
        (((4, 6), 1, 2, 0, 2), "no 2 equal parts in each of 2 sections"),
        (((4, 6), 0, 2, 2), "part 2 of 2"),
        (((4, 6), 0, 0, 0), "part 0 of 0"),
        (((4, 6), 0, 2, 0, 0), "0 sections"),
    ],
)
def test_what_cannot_be_cut_is_refused(box: tuple, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        TensorSlice(*box)


def test_a_part_whose_sections_do_not_fit_is_refused() -> None:
    with pytest.raises(ConfigError, match="no 2 equal parts in each of 3 sections"):
        TensorSlice.around((4, 2), 0, 2, 0, sections=3)


@given(boxes(), st.data())
def test_full_rows_are_the_runs_that_lie_whole_in_a_stretch(box: TensorSlice, data: st.DataObject) -> None:
    start = data.draw(st.integers(0, box.numel))
    numel = data.draw(st.integers(0, box.numel - start))
    if box.run_numel:
        expected = [
            row
            for row in range(box.rows)
            if start <= row * box.run_numel and (row + 1) * box.run_numel <= start + numel
        ]
        assert list(box.full_rows(start, numel)) == expected
