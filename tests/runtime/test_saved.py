"""Saved tensors of calls over pages of RAM: which are named, which are handed on, which go to RAM, and which stay."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from other_stream import OtherStream
from small_parts import Model, Parts, parts
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

from lightning_ptm.errors import InternalError, UsageError
from lightning_ptm.memory.backend import CpuBackend
from lightning_ptm.memory.streams import ComputeStream
from lightning_ptm.runtime.binding import Packed
from lightning_ptm.runtime.offload import SavedView
from lightning_ptm.runtime.saved import SavedTensors, inside_checkpoint
from lightning_ptm.terms import Tier

ROOT, FIRST, SECOND = 0, 1, 2


class Log:
    """Stands for the executor and for the offload: writes down what they are asked."""

    def __init__(self, made: Parts) -> None:
        self.parts = made
        self.asked: list[str] = []
        self.read: list[int] = []

    def require(self, unit: int) -> None:
        self.asked.append(f"require {unit}")
        fetch(self.parts, unit)

    def saved_is_read(self, unit: int) -> None:
        self.read.append(unit)

    def begin(self, name: str) -> None:
        self.asked.append(f"begin {name}")

    def end(self) -> None:
        self.asked.append("end")

    def begin_iteration(self) -> None:
        self.asked.append("begin iteration")

    def pack(self, tensor: Tensor) -> Tensor | SavedView:
        """What has an even number of elements goes."""
        if tensor.numel() % 2:
            return tensor
        self.asked.append(f"send {tensor.numel()}")
        return SavedView(tensor.clone(), None, tensor.dtype, 0, tuple(tensor.shape), ())  # type: ignore[arg-type]

    def unpack(self, sent: SavedView) -> Tensor:
        self.asked.append("bring")
        return sent.away  # type: ignore[return-value]

    def logged(self) -> list[str]:
        asked = list(self.asked)
        self.asked.clear()
        return asked


def fetch(made: Parts, unit: int) -> None:
    made.stores[unit].start_fetch(None)
    made.stores[unit].finish_fetch()


class Calls:
    """Two units of a weight and a bias each, behind a root without parameters."""

    def __init__(self, made: Parts, offloads: bool) -> None:
        self.parts = made
        self.log: Any = Log(made)
        self.saved = SavedTensors(
            made.stores, self.log, ComputeStream(CpuBackend()), made.views, self.log if offloads else None
        )

    @contextmanager
    def call(self, unit: int) -> Iterator[None]:
        self.saved.begin(unit)
        yield
        self.saved.end(unit)

    def fetched(self, unit: int) -> tuple[Tensor, Tensor]:
        """The weight, (1, n), and the bias of a unit that is live from here on."""
        store = self.parts.stores[unit]
        if not store.live:
            fetch(self.parts, unit)
        weight, bias = store.flats[0].binding.parameters
        return weight, bias


@contextmanager
def calls(*, offloads: bool = False, **settings: Any) -> Iterator[Calls]:
    with parts(Model(2), **settings) as made:
        it = Calls(made, offloads)
        yield it
        it.saved.abandon()


def product(weight: Tensor) -> tuple[Tensor, Tensor]:
    """A leaf, and what saves it and the weight's first five elements."""
    x = torch.arange(1.0, 6.0, requires_grad=True)
    return x, (x * weight[0, :5]).sum()


# -- what is named ----------------------------------------------------------------------------------------------------


def test_a_saved_weight_is_read_from_wherever_its_flat_is_in_the_backward() -> None:
    with calls() as it:
        weight, _ = it.fetched(FIRST)
        values = weight.detach()[0, :5].clone()
        with it.call(FIRST):
            x, output = product(weight)
        it.parts.stores[FIRST].release()  # poisons its pages
        output.backward()
        assert it.log.logged() == ["require 1"]  # I1
        assert x.grad is not None and torch.equal(x.grad, values)


def test_whatever_stream_reads_it_a_unit_is_asked_for_on_the_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    with calls() as it:
        weight, _ = it.fetched(FIRST)
        stream = it.saved._stream = OtherStream()
        stream.watch(monkeypatch, it.log, "require")
        with it.call(FIRST):
            _, output = product(weight)
        it.parts.stores[FIRST].release()
        output.backward()
        assert stream.noted == [("require", True)]


def test_a_unit_that_is_there_in_the_backward_is_not_asked_for() -> None:
    with calls() as it:
        weight, _ = it.fetched(FIRST)
        with it.call(FIRST):
            x, output = product(weight)
        output.backward()
        assert it.log.logged() == [] and x.grad is not None
        assert it.log.read == [FIRST]  # told all the same: another rank may have to ask for it


def test_a_call_names_its_own_parameters_and_those_of_the_calls_around_it() -> None:
    with calls() as it:
        outer, _ = it.fetched(FIRST)
        inner, _ = it.fetched(SECOND)
        own, alien = [], []
        with it.call(FIRST):
            own.append(product(outer))
            alien.append(product(inner))
            with it.call(SECOND):
                own += [product(outer), product(inner)]
            alien.append(product(inner))  # the inner call is over
        for unit in (FIRST, SECOND):
            it.parts.stores[unit].release()
        for _, output in own:
            output.backward()
        assert it.log.logged() == ["require 1", "require 2"]  # I1
        assert all(x.grad is not None and not x.grad.isnan().any() for x, _ in own)
        for unit in (FIRST, SECOND):
            it.parts.stores[unit].release()
        for x, output in alien:
            output.backward()
            assert x.grad is not None and x.grad.isnan().all()  # its storage was kept, and its pages given up
        assert it.log.logged() == []


def test_a_call_that_is_not_inside_of_ours_does_not_name_its_parameters() -> None:
    with calls() as it:
        outer, _ = it.fetched(FIRST)
        with it.call(FIRST), saved_tensors_hooks(lambda tensor: tensor, lambda tensor: tensor), it.call(SECOND):
            x, output = product(outer)  # theirs is between, and gets what is not the inner one's
        it.parts.stores[FIRST].release()
        output.backward()
        assert it.log.logged() == [] and x.grad is not None and x.grad.isnan().all()


def test_resident_units_have_nothing_to_name() -> None:
    for home, any_to_name in ((Tier.DEVICE, False), (Tier.HOST, True)):
        with calls(home=home) as it:
            assert it.saved.any_to_name is any_to_name
            assert [it.saved.hooks_in(unit) for unit in (ROOT, FIRST)] == [False, any_to_name]
    with calls(home=Tier.DEVICE, offloads=True) as it:
        assert it.saved.hooks_in(FIRST)


def test_a_named_tensor_of_a_flat_that_is_not_there_is_our_error() -> None:
    with calls() as it:
        it.fetched(FIRST)
        with pytest.raises(InternalError, match="unit 1 has no flat 7, of which a tensor was saved"):
            it.saved._unpack(Packed(FIRST, 7, 0, (1,), (1,)))


# -- hooks of others --------------------------------------------------------------------------------------------------


def test_what_is_no_parameter_goes_to_the_hooks_around_ours_and_what_is_one_does_not() -> None:
    seen: list[int] = []

    def pack(tensor: Tensor) -> tuple[Tensor]:
        seen.append(tensor.numel())
        return (tensor * 2,)

    with calls() as it:
        weight, _ = it.fetched(FIRST)
        values = weight.detach()[0, :5].clone()
        with saved_tensors_hooks(pack, lambda packed: packed[0]), it.call(FIRST), it.call(SECOND):
            x, output = product(weight)
            y = torch.ones(3, requires_grad=True)
            others = (y * torch.full((3,), 3.0)).sum()
        output.backward()
        others.backward()
        assert x.grad is not None and torch.equal(x.grad, values)
        assert y.grad is not None and y.grad.tolist() == [6.0] * 3  # as theirs has packed it: I2
        assert seen == [5, 3]  # x, for the weight's gradient, and the factor


def test_hooks_of_others_inside_of_a_call_are_left_to_themselves() -> None:
    with calls() as it:
        weight, _ = it.fetched(FIRST)
        with it.call(FIRST), saved_tensors_hooks(lambda tensor: tensor * 2, lambda tensor: tensor):
            x, output = product(weight)
        expected = 2 * weight.detach()[0, :5]
        output.backward()
        assert x.grad is not None and torch.equal(x.grad, expected)


def test_inside_of_a_checkpoint_that_recomputes_we_say_so() -> None:
    found = []

    def inside(x: Tensor) -> Tensor:
        found.append(inside_checkpoint())
        return x.sin()

    x = torch.ones(2, requires_grad=True)
    assert not inside_checkpoint()
    checkpoint(inside, x, use_reentrant=False).sum().backward()
    with saved_tensors_hooks(lambda tensor: tensor, lambda tensor: tensor):
        inside(x)
    assert found == [True, True, False]  # I4: recorded, recomputed, others' hooks


# -- what is neither --------------------------------------------------------------------------------------------------


def test_with_activations_in_ram_what_a_unit_saves_goes_there_but_for_the_roots() -> None:
    with calls(offloads=True) as it:
        x = torch.ones(4, requires_grad=True)
        with it.call(ROOT):
            (x * torch.full((4,), 2.0)).sum()
            assert it.log.logged() == []
            with it.call(FIRST):
                output = (x * torch.full((4,), 3.0)).sum()
        name = it.parts.units[FIRST].name
        assert it.log.logged() == [f"begin {name}", "send 4", "end"]  # I3
        output.backward()
        assert it.log.logged() == ["bring"] and x.grad is not None and x.grad.tolist() == [3.0] * 4


def test_parameters_are_named_and_others_hooks_served_before_anything_goes_to_ram() -> None:
    with calls(offloads=True) as it:
        weight, _ = it.fetched(FIRST)
        with it.call(FIRST):
            x = torch.ones(4, requires_grad=True)
            output = (x * weight.detach()[0, :4]).sum()
        assert [each for each in it.log.logged() if each.startswith("send")] == []
        it.parts.stores[FIRST].release()
        output.backward()
        assert it.log.logged() == ["require 1"]
        with saved_tensors_hooks(lambda tensor: tensor, lambda tensor: tensor), it.call(FIRST):
            (x * torch.full((4,), 3.0)).sum()
        assert [each for each in it.log.logged() if each.startswith("send")] == []  # I3


@pytest.mark.parametrize("offloads", [False, True])
def test_what_stays_and_is_changed_in_place_is_an_error_of_the_backward(offloads: bool) -> None:
    with calls(offloads=offloads) as it:
        with it.call(FIRST):
            factor = torch.ones(3)
            x = torch.ones(3, requires_grad=True)
            kept, changed = (x * factor).sum(), (x * factor).sum()
        kept.backward()
        factor.add_(1)
        with pytest.raises(
            UsageError, match=r"shape \(3,\) .* was changed in place after the forward \(version 1, not 0"
        ):
            changed.backward()


def test_an_output_that_its_own_node_saves_is_freed_without_a_backward() -> None:
    with calls() as it:
        with it.call(FIRST):
            output = torch.ones(3, requires_grad=True).exp()
        alive = weakref.ref(output)
        del output
        assert alive() is None  # it is in no cycle


# -- the ends of calls ------------------------------------------------------------------------------------------------


def in_force() -> Callable[[Tensor], Any] | None:
    hooks = torch._C._autograd._top_saved_tensors_default_hooks(True)
    return None if hooks is None else hooks[0]


def test_calls_end_in_the_reverse_order_and_once() -> None:
    with calls(offloads=True) as it:
        it.saved.begin(FIRST)
        outer = in_force()
        it.saved.begin(SECOND)
        assert outer is not None and in_force() is not outer
        it.log.logged()
        it.saved.end(FIRST)  # was not begun last
        assert in_force() is not outer and it.log.logged() == []
        it.saved.end(SECOND)
        assert in_force() is outer and it.log.logged() == ["end"]
        it.saved.end(FIRST)
        it.saved.end(FIRST)
        assert in_force() is None and it.log.logged() == ["end"]


def test_an_iteration_that_is_cut_short_leaves_no_hooks_behind() -> None:
    with calls(offloads=True) as it:
        for unit in (ROOT, FIRST, SECOND):
            it.saved.begin(unit)
        it.log.logged()
        it.saved.abandon()
        assert in_force() is None and it.log.logged() == ["begin iteration"]
        it.saved.end(SECOND)
        assert it.log.logged() == []
