"""Parameters as views of a flat: bound, released, summoned and at the end of a run, and what users may not do."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
from small_parts import Model, Parts, parts
from torch import Tensor, nn

from lightning_ptm.errors import InternalError, UsageError
from lightning_ptm.planning.layout import FlatLayout, ParameterSpec, UnitSpec, build_layout
from lightning_ptm.planning.tensor_slices import TensorSlice
from lightning_ptm.runtime.gradients.view import GradPlaceholder
from lightning_ptm.runtime.units.binding import ENDED, Arrangement, Fingerprint, FlatBinding, over_own_storage, set_data
from lightning_ptm.runtime.units.parameter_guard import GuardedParameter

SHAPES = ((3, 5), (0,), (), (4, 2))

TURNED = (1, 4)

"""Strides of the last one: its columns lie end to end."""


def layout() -> FlatLayout:
    strides = (None, None, None, TURNED)
    specs = [
        ParameterSpec(f"p{index}", shape, "float32", 4, True, 0, stride=stride)
        for index, (shape, stride) in enumerate(zip(SHAPES, strides, strict=True))
    ]
    (flat,) = build_layout([UnitSpec("", tuple(specs))], page_size=65536, world_size=1).flats
    return flat


class Own(nn.Parameter):
    """A class of somebody's own."""


def made(**options: Any) -> FlatBinding:
    kinds = (nn.Parameter, Own, nn.Parameter, nn.Parameter)
    values = [torch.ones(shape) for shape in SHAPES[:3]] + [torch.ones(2, 4).t()]
    parameters = [kind(value) for kind, value in zip(kinds, values, strict=True)]
    return FlatBinding(layout(), parameters, torch.float32, torch.device("cpu"), **options)


def full() -> Tensor:
    return torch.arange(float(layout().padded_numel))


def test_bound_parameters_are_views_of_the_flat() -> None:
    binding, values = made(), full()
    before = list(map(id, binding.parameters))
    binding.bind(values)
    assert binding.bound and list(map(id, binding.parameters)) == before and type(binding.parameters[1]) is Own
    for slot, parameter in enumerate(binding.parameters):
        start = binding.layout.slots[slot].start
        assert tuple(parameter.shape) == SHAPES[slot]
        assert parameter.numel() == 0 or parameter.data_ptr() == values[start:].data_ptr()
        assert torch.equal(parameter, binding.arrangement.view(values, slot))
    first, _, scalar, turned = binding.parameters
    assert first.flatten().tolist() == list(range(15)) and scalar.item() == binding.layout.slots[2].start
    start = binding.layout.slots[3].start
    assert turned.stride() == TURNED and turned[:, 1].tolist() == [start + 4.0 + row for row in range(4)]  # I4
    other = full() + 1
    binding.bind(other)
    assert first[0, 0] == 1  # I1: the last one


def test_released_parameters_are_closed_and_keep_shape_and_class() -> None:
    binding = made()
    binding.bind(full())
    binding.unbind()
    assert not binding.bound
    for slot, parameter in enumerate(binding.parameters):
        assert isinstance(parameter, GuardedParameter) and isinstance(parameter, Own) == (slot == 1)
        assert tuple(parameter.shape) == SHAPES[slot]  # I3
        with torch._C.DisableTorchFunctionSubclass():
            assert parameter.isnan().all() and not any(parameter.stride())
    with pytest.raises(
        UsageError, match=r"p0 was read or written outside .* its values are in pages and not gathered; read and edit"
    ):
        binding.parameters[0] + 1
    binding.bind(full())
    assert type(binding.parameters[1]) is Own and binding.parameters[0].sum() == sum(range(15))


def test_what_closes_is_open_while_it_is_used() -> None:
    binding = made(closes=True)
    binding.bind(full())
    weight = binding.parameters[0]
    with pytest.raises(UsageError, match="the module has only a copy that may be rounded or out of date"):
        weight.sum()
    binding.parameter_guard.open()
    assert weight.sum() == sum(range(15))
    binding.parameter_guard.close()
    assert isinstance(weight, GuardedParameter)  # I2
    always = made()
    always.bind(full())
    always.parameter_guard.close()
    assert type(always.parameters[0]) is nn.Parameter


# -- what users do ----------------------------------------------------------------------------------------------------


def test_other_storage_is_refused_where_an_update_follows() -> None:
    binding = made()
    binding.bind(full())
    binding.check()
    binding.parameters[0].data = torch.zeros(3, 5)
    with pytest.raises(UsageError, match="the data of parameter p0 was replaced, and its values are in pages"):
        binding.check()
    binding.check(computes_only=True)
    binding.parameters[0].data = torch.zeros(5, 3)
    for computes_only in (False, True):
        with pytest.raises(UsageError, match=r"parameter p0 had shape \(3, 5\) at set-up and has \(5, 3\) now"):
            binding.check(computes_only=computes_only)
    with pytest.raises(UsageError, match="had shape"):
        binding.unbind()


def test_what_is_replaced_is_told_and_follows_edits() -> None:
    binding = made()
    binding.bind(full())
    theirs = torch.zeros(3, 5)
    binding.parameters[0].data = theirs
    assert [(slot, value.data_ptr()) for slot, value in binding.replaced().items()] == [(0, theirs.data_ptr())]
    binding.edited(full() + 7)
    assert theirs[0, 0] == 7
    copies = made(is_copy=True)
    copies.bind(full())
    copies.parameters[0].data = theirs
    with pytest.raises(UsageError, match="was replaced"):
        copies.replaced()


def test_other_memory_of_a_released_parameter_is_told_with_what_to_do() -> None:
    binding = made(is_copy=True)
    binding.bind(full())
    binding.unbind()
    with torch.no_grad():
        binding.parameters[0].set_(torch.zeros(3, 5))
    told = r"p0 was given other memory \(Tensor.set_, .* while its values were in pages and not gathered.* values copied into"
    for ask in (binding.check, binding.replaced, lambda: binding.summon([torch.zeros(shape) for shape in SHAPES])):
        with pytest.raises(UsageError, match=told):
            ask()


@pytest.mark.parametrize("is_copy", [False, True])
def test_writes_into_copies_are_found(is_copy: bool) -> None:
    binding = made(is_copy=is_copy)
    binding.bind(full())
    with torch.no_grad():
        binding.parameters[2].add_(1)
    if not is_copy:
        binding.check()
        return
    with pytest.raises(
        UsageError, match=r"p2 was written to.* \(Embedding and EmbeddingBag with max_norm\), leave that out"
    ):
        binding.check()
    assert binding.written == "p2"
    later = made(is_copy=True)
    later.bind(full())
    with torch.no_grad():
        later.parameters[0].add_(1)
    later.unbind()  # and nobody has asked before
    assert later.written == "p0"


def test_lent_parameters_are_the_users() -> None:
    binding = made(is_copy=True, closes=True)
    binding.bind(full())
    binding.summon([torch.zeros(shape) for shape in SHAPES])
    assert binding.summoned and type(binding.parameters[0]) is nn.Parameter
    with torch.no_grad():
        binding.parameters[0].add_(1)
    with pytest.raises(
        UsageError, match=r"a step begins inside `with strategy\.gathered\(module\):`, where p0 is whole"
    ):
        binding.check()
    binding.bind(full())
    assert not binding.summoned and isinstance(binding.parameters[0], GuardedParameter)
    binding.check()  # what was written into summoned parameters is no copy's


def test_what_was_replaced_is_replaced_again_behind_a_loan() -> None:
    binding = made()
    binding.bind(full())
    theirs = torch.zeros(3, 5)
    binding.parameters[0].data = theirs
    binding.summon([torch.ones(shape) for shape in SHAPES])
    assert list(binding.replaced()) == [0]
    binding.bind(full())
    assert binding.parameters[0].data_ptr() == theirs.data_ptr()


# -- saved tensors ----------------------------------------------------------------------------------------------------


def test_a_view_of_a_parameter_is_named_and_read_from_wherever_the_flat_is() -> None:
    binding = made()
    binding.bind(full())
    weight = binding.parameters[0]
    packed = binding.name(0, weight[1].detach())
    assert (packed.slot, packed.offset, packed.shape, packed.stride) == (0, 5, (5,), (1,))
    for copied in (False, True):
        binding.bind(full() + 1)
        assert binding.unpack(packed, copied=copied).tolist() == [6, 7, 8, 9, 10]
        inside = torch.cat((torch.zeros(64), full()))[64:]
        binding.bind(inside)
        assert binding.unpack(packed, copied=copied).tolist() == [5, 6, 7, 8, 9]
    inside[:15] += 1
    assert binding.unpack(packed, copied=False).tolist() == [6, 7, 8, 9, 10]
    binding.unbind()
    with pytest.raises(InternalError, match="p0 is not gathered while a saved tensor of it is read"):
        binding.unpack(packed, copied=False)


def test_a_parameter_in_pages_has_a_storage_of_its_own() -> None:
    binding = made()
    whole = full()
    for _ in range(2):
        binding.bind(whole)
        for parameter in binding.parameters:
            assert parameter.untyped_storage().nbytes() == parameter.numel() * parameter.itemsize
            assert parameter.storage_offset() == 0
        binding.parameters[0].data[0, 0] = 7
        assert whole[0] == 7  # the flat's own memory
        with pytest.raises(RuntimeError, match="out of bounds for storage"):
            binding.parameters[0].as_strided((1,), (1,), binding.parameters[0].numel())
        binding.unbind()


def test_values_that_change_are_counted_as_autograd_counts_writes() -> None:
    binding = made()
    binding.bind(full())
    before = [parameter._version for parameter in binding.parameters]
    binding.values_change([0, 3])
    assert [parameter._version - old for parameter, old in zip(binding.parameters, before, strict=True)] == [1, 0, 0, 1]
    assert binding.changes == [1, 0, 0, 1] and binding.written is None
    binding.unbind()
    binding.values_change()
    assert binding.changes == [2, 1, 1, 2]


# -- the end of a run -------------------------------------------------------------------------------------------------


def test_the_end_of_a_run() -> None:
    binding = made(closes=True)
    binding.bind(full())
    binding.unbind(absent=ENDED)
    with pytest.raises(UsageError, match="p3 was read or written, and its values ended with its run"):
        binding.parameters[3] * 2
    binding.restore(1, torch.zeros(0))
    binding.restore(0, torch.full((3, 5), 2.0))
    binding.forget()
    assert type(binding.parameters[1]) is Own and binding.parameters[0].sum() == 30 and not binding.bound


def test_as_many_parameters_as_slots() -> None:
    with pytest.raises(InternalError, match="flat 0 has 4 slots and 0 parameters"):
        FlatBinding(layout(), [], torch.float32, torch.device("cpu"))


def test_a_gradient_that_is_shown_of_pages_waits_for_its_device() -> None:
    """A full checkpoint summons parameters in RAM, in the middle of accumulation."""
    binding = made()
    base = torch.zeros(binding.layout.padded_numel)
    binding.bind(base)

    def never() -> Tensor:
        raise AssertionError("it was read")

    shown = GradPlaceholder(binding.parameters[0], never)
    binding.parameters[0].grad = shown
    binding.summon([torch.empty(shape, device="meta") for shape in SHAPES])
    assert binding.parameters[0].grad is None
    binding.bind(base)
    assert binding.parameters[0].grad is shown


def test_a_parameter_stays_itself_where_torch_refuses_it_another_device() -> None:
    """Torch refuses devices of other libraries, here `meta` and back: Module.to would make another object without
    hooks."""
    parameter = nn.Parameter(torch.ones(3))
    with pytest.raises(RuntimeError, match="incompatible tensor type"):
        parameter.data = torch.empty(3, device="meta")
    seen: list[str] = []
    parameter.register_hook(lambda gradient: seen.append("hook"))
    parameter.register_post_accumulate_grad_hook(lambda parameter: seen.append("later hook"))
    parameter.grad = torch.ones(3)

    assert set_data(parameter, torch.empty(3, device="meta")) is None
    assert type(parameter) is nn.Parameter
    assert parameter.is_meta
    assert parameter.is_leaf
    assert parameter.requires_grad
    assert parameter.grad.is_meta
    parameter.grad = None
    base = torch.full((5,), 2.0)
    set_data(parameter, base[1:4])
    base.add_(1)  # of which its own count of writes knows nothing
    version = parameter._version
    parameter.mul(parameter).sum().backward()
    assert seen == ["hook", "later hook"]
    assert parameter.grad.tolist() == [6.0] * 3
    base.add_(1)
    assert parameter._version == version

    frozen = nn.Parameter(torch.ones(3), requires_grad=False)
    set_data(frozen, torch.empty(3, device="meta"))
    assert not frozen.requires_grad
    with pytest.raises(RuntimeError, match="type"):
        set_data(nn.Parameter(torch.ones(3)), torch.ones(3, dtype=torch.int64))


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


def summed(self: Fingerprint, full: Tensor) -> Tensor:
    """The checksums that a device with memory of its own gets."""
    bits = full.view(torch.int32)
    return torch.stack([self._checksum(bits[start : start + numel]) for _, start, numel in self._slots])


@pytest.mark.parametrize("of", [Fingerprint.of, summed])
def test_one_element_and_two_that_change_places_are_found_when_every_one_is_looked_at(
    of: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Fingerprint, "of", of)
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


BOX = TensorSlice((8, 4), 0, 2, 1)
"""Slice of a parameter of which a rank has rows 4 to 7."""


def arranged() -> Arrangement:
    return Arrangement.of(layout(), [torch.ones(shape) for shape in SHAPES])


def arrangement_of(spec: ParameterSpec) -> Arrangement:
    """Returns the arrangement of a flat with one parameter."""
    (flat,) = build_layout([UnitSpec("", (spec,))], page_size=65536, world_size=2).flats
    return Arrangement.of(flat, [torch.ones(spec.shape)])


def test_parameters_are_views_in_their_shapes_and_strides() -> None:
    it, values = arranged(), full()
    for slot, shape in enumerate(SHAPES):
        view = it.view(values, slot)
        assert tuple(view.shape) == shape == it.shapes[slot]
        assert view.numel() == 0 or view.data_ptr() == values[it.layout.slots[slot].start :].data_ptr()
    assert it.view(values, 3).stride() == TURNED
    behind = torch.cat([torch.zeros(7), values])[7:]  # a flat that does not begin where its memory does
    assert all(torch.equal(it.view(behind, slot), it.view(values, slot)) for slot in range(len(SHAPES)))


def test_values_follow_the_order_of_memory() -> None:
    it, values = arranged(), full()
    turned = it.view(values, 3)
    start = it.layout.slots[3].start
    assert torch.equal(it.in_order(3, turned), values[start : start + 8])
    assert it.in_order(3, turned).data_ptr() == turned.data_ptr()  # a view, where they lie so
    assert torch.equal(it.in_order(3, turned.contiguous()), values[start : start + 8])
    assert it.in_order(0, torch.ones(3, 5)).shape == (15,)


def test_gradients_of_another_shape_are_left_to_who_reads_them() -> None:
    it = arranged()
    odd = torch.ones(2, 2)
    assert it.in_orders([None, None, None, odd])[3] is odd
    ordered = it.in_orders([None, None, None, it.view(full(), 3)])
    start = it.layout.slots[3].start
    assert ordered[:3] == [None] * 3
    assert ordered[3] is not None and torch.equal(ordered[3], full()[start : start + 8])


def test_a_sparse_gradient_is_refused_by_its_parameters_name() -> None:
    told = r"the gradient of p3 is sparse \(sparse_coo\), and pages hold dense gradients; use sparse=False"
    with pytest.raises(UsageError, match=told):
        arranged().in_orders([None, None, None, torch.ones(4, 2).to_sparse()])
    arranged().check_dense(3, torch.ones(4, 2))


def test_parts_of_larger_parameters_keep_their_shape() -> None:
    part = arrangement_of(ParameterSpec("part", (4, 4), "float32", 4, True, 0, box=BOX))
    whole = arrangement_of(ParameterSpec("turned", SHAPES[3], "float32", 4, True, 0, stride=TURNED))
    assert part.boxes == (BOX,) and whole.boxes == (None,)
    assert [part.fits(0, torch.ones(rows, 4)) for rows in (4, 8, 2)] == [True, True, False]
    assert [whole.fits(0, torch.ones(rows, 2)) for rows in (4, 8, 2)] == [True, False, False]
    (laid,) = part.as_laid([torch.arange(16.0).view(4, 4).t()])
    assert laid is not None and laid.is_contiguous() and laid[1].tolist() == [1.0, 5.0, 9.0, 13.0]
    (flat,) = whole.as_laid([torch.arange(8.0).view(4, 2)])
    assert flat is not None and flat.tolist() == [0.0, 2.0, 4.0, 6.0, 1.0, 3.0, 5.0, 7.0]
    assert part.as_laid([None]) == [None]


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
