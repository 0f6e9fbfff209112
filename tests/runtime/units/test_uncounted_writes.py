"""Writes that torch does not count are found by what a flat's values were: samples by default, every element when asked."""

from __future__ import annotations

import pytest
import torch
from small_parts import Model, parts
from torch import Tensor

from lightning_ptm.planning.layout import FlatLayout
from lightning_ptm.runtime.units.uncounted_writes import Fingerprint

CPU = torch.device("cpu")


def flat(dtype: torch.dtype = torch.float32) -> tuple[FlatLayout, Tensor]:
    with parts(Model(1)) as made:
        layout = made.stores[1].flats[0].layout
    values = torch.randn(layout.padded_numel, generator=torch.Generator().manual_seed(1))
    return layout, values.to(dtype)


@pytest.mark.parametrize("every_element", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64, torch.complex64, torch.complex128])
def test_a_parameter_that_was_written_to_is_named(dtype: torch.dtype, every_element: bool) -> None:
    layout, values = flat(dtype)
    known = Fingerprint(layout, CPU, every_element=every_element)
    before = known.of(values)
    assert known.differs(values, before) is None
    for slot, place in enumerate(layout.slots):
        other = values.clone()
        other[place.start : place.start + place.numel] *= 0.5
        assert known.differs(other, before) == slot


def test_one_element_and_two_that_change_places_are_found_when_every_one_is_looked_at() -> None:
    layout, values = flat()
    known = Fingerprint(layout, CPU, every_element=True)
    before = known.of(values)
    place = layout.slots[0]
    for at in range(place.start, place.start + place.numel, 17):
        other = values.clone()
        other[at] += 1e-6
        assert known.differs(other, before) == 0
    other = values.clone()
    other[place.start], other[place.start + 1] = values[place.start + 1], values[place.start]
    assert known.differs(other, before) == 0


def test_padding_is_nobodys() -> None:
    layout, values = flat()
    covered = torch.zeros(layout.padded_numel, dtype=torch.bool)
    for place in layout.slots:
        covered[place.start : place.start + place.numel] = True
    for every_element in (False, True):
        known = Fingerprint(layout, CPU, every_element=every_element)
        other = torch.where(covered, values, torch.full_like(values, 7))
        assert known.differs(other, known.of(values)) is None
