"""How parameters lie in a flat: views of it, and values in the order of its elements."""

from __future__ import annotations

import pytest
import torch
from test_binding import SHAPES, TURNED, full, layout

from lightning_ptm.errors import UsageError
from lightning_ptm.planning.layout import ParameterSpec, UnitSpec, build_layout
from lightning_ptm.planning.tensor_slices import TensorSlice
from lightning_ptm.runtime.units.arrangement import Arrangement

BOX = TensorSlice((8, 4), 0, 2, 1)
"""Slice of a parameter of which a rank has rows 4 to 7."""


def made() -> Arrangement:
    return Arrangement.of(layout(), [torch.ones(shape) for shape in SHAPES])


def of(spec: ParameterSpec) -> Arrangement:
    """Returns the arrangement of a flat with one parameter."""
    (flat,) = build_layout([UnitSpec("", (spec,))], page_size=65536, world_size=2).flats
    return Arrangement.of(flat, [torch.ones(spec.shape)])


def test_parameters_are_views_in_their_shapes_and_strides() -> None:
    it, values = made(), full()
    for slot, shape in enumerate(SHAPES):
        view = it.view(values, slot)
        assert tuple(view.shape) == shape == it.shapes[slot]
        assert view.numel() == 0 or view.data_ptr() == values[it.layout.slots[slot].start :].data_ptr()
    assert it.view(values, 3).stride() == TURNED
    behind = torch.cat([torch.zeros(7), values])[7:]  # a flat that does not begin where its memory does
    assert all(torch.equal(it.view(behind, slot), it.view(values, slot)) for slot in range(len(SHAPES)))


def test_values_follow_the_order_of_memory() -> None:
    it, values = made(), full()
    turned = it.view(values, 3)
    start = it.layout.slots[3].start
    assert torch.equal(it.in_order(3, turned), values[start : start + 8])
    assert it.in_order(3, turned).data_ptr() == turned.data_ptr()  # a view, where they lie so
    assert torch.equal(it.in_order(3, turned.contiguous()), values[start : start + 8])
    assert it.in_order(0, torch.ones(3, 5)).shape == (15,)


def test_gradients_of_another_shape_are_left_to_who_reads_them() -> None:
    it = made()
    odd = torch.ones(2, 2)
    assert it.in_orders([None, None, None, odd])[3] is odd
    ordered = it.in_orders([None, None, None, it.view(full(), 3)])
    start = it.layout.slots[3].start
    assert ordered[:3] == [None] * 3
    assert ordered[3] is not None and torch.equal(ordered[3], full()[start : start + 8])


def test_a_sparse_gradient_is_refused_by_its_parameters_name() -> None:
    told = r"the gradient of p3 is sparse \(sparse_coo\), and pages hold dense gradients; use sparse=False"
    with pytest.raises(UsageError, match=told):
        made().in_orders([None, None, None, torch.ones(4, 2).to_sparse()])
    made().check_dense(3, torch.ones(4, 2))


def test_parts_of_larger_parameters_keep_their_shape() -> None:
    part = of(ParameterSpec("part", (4, 4), "float32", 4, True, 0, box=BOX))
    whole = of(ParameterSpec("turned", SHAPES[3], "float32", 4, True, 0, stride=TURNED))
    assert part.boxes == [BOX] and whole.boxes == [None]
    assert [part.fits(0, torch.ones(rows, 4)) for rows in (4, 8, 2)] == [True, True, False]
    assert [whole.fits(0, torch.ones(rows, 2)) for rows in (4, 8, 2)] == [True, False, False]
    (laid,) = part.as_laid([torch.arange(16.0).view(4, 4).t()])
    assert laid is not None and laid.is_contiguous() and laid[1].tolist() == [1.0, 5.0, 9.0, 13.0]
    (flat,) = whole.as_laid([torch.arange(8.0).view(4, 2)])
    assert flat is not None and flat.tolist() == [0.0, 2.0, 4.0, 6.0, 1.0, 3.0, 5.0, 7.0]
    assert part.as_laid([None]) == [None]
