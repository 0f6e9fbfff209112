"""Storages of parameters in pages: each its own bytes, known by whose they are, and who else holds them."""

from __future__ import annotations

import gc

import torch
from small_parts import Model, Parts, parts
from torch import Tensor

from lightning_ptm.runtime.units.binding import FlatBinding
from lightning_ptm.runtime.units.page_views import over_own_storage


def bound(made: Parts, unit: int) -> FlatBinding:
    store = made.stores[unit]
    store.start_fetch(None)
    store.finish_fetch()
    return store.flats[0].binding


def test_a_parameter_is_found_by_its_storage_in_whatever_form() -> None:
    with parts(Model(2)) as made:
        first, second = bound(made, 1), bound(made, 2)
        for binding in (first, second):
            for slot, parameter in enumerate(binding.parameters):
                looks: list[Tensor] = [parameter, parameter.detach(), parameter.T, parameter.detach().view(torch.uint8)]
                for look in looks:
                    assert made.views.holds(look)
                    assert made.views.find(look) == (binding, slot)
        assert not made.views.holds(torch.ones(3))


def test_what_is_made_to_be_computed_with_at_once_is_found_by_its_address() -> None:
    with parts(Model(2)) as made:
        binding = bound(made, 1)
        whole = binding.layout.slots[1]
        full = made.stores[1].flats[0].full()
        own = over_own_storage(full[whole.start : whole.start + whole.numel])
        assert own.untyped_storage()._cdata != binding.parameters[1].untyped_storage()._cdata
        assert made.views.find(own) == (binding, 1)
        made.stores[1].release()
        assert made.views.find(own) is None


def test_a_storage_stays_that_of_its_parameter_when_the_flat_comes_back() -> None:
    with parts(Model(2)) as made:
        binding = bound(made, 1)
        before = binding.parameters[0].untyped_storage()._cdata
        made.stores[1].release()
        assert bound(made, 1).parameters[0].untyped_storage()._cdata == before


def test_only_so_many_addresses_are_kept() -> None:
    with parts(Model(2)) as made:
        binding = made.stores[1].flats[0].binding
        full_flats = [torch.zeros(binding.layout.padded_numel) for _ in range(12)]
        for whole in full_flats:
            binding.bind(whole)
        known = [each for each in made.views._known.values() if each[0] is binding]
        assert len(known) == 8 * len(binding.parameters)
        binding.unbind(absent="is gone")
        assert not [each for each in made.views._known.values() if each[0] is binding]


def test_who_else_holds_a_storage() -> None:
    with parts(Model(2)) as made:
        binding = bound(made, 1)
        base = made.stores[1].flats[0].full()
        views = binding._views
        assert list(views.held_beside(base)) == []
        kept = binding.parameters[1].detach()
        array = binding.parameters[0].detach().numpy()
        assert list(views.held_beside(base)) == [0, 1]
        del kept, array
        gc.collect()
        assert list(views.held_beside(base)) == []


def test_in_inference_mode_no_inference_tensor_is_made() -> None:
    with parts(Model(2)) as made, torch.inference_mode():
        assert not any(parameter.is_inference() for parameter in bound(made, 1).parameters)


def test_a_parameter_without_elements_has_a_storage_without_bytes() -> None:
    empty = over_own_storage(torch.zeros(0))
    assert empty.numel() == 0 and empty.untyped_storage().nbytes() == 0


def test_every_dtype_of_parameters_can_have_one() -> None:
    for dtype in (torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.float8_e4m3fn):
        part = torch.ones(8, dtype=torch.float32).to(dtype)[2:6]
        own = over_own_storage(part)
        assert own.dtype is dtype and own.data_ptr() == part.data_ptr()
        assert own.untyped_storage().nbytes() == 4 * dtype.itemsize
