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

from lightning_ptm.errors import UsageError
from lightning_ptm.memory.backend import CpuBackend
from lightning_ptm.memory.streams import ComputeStream
from lightning_ptm.runtime.autograd.offload import SavedView
from lightning_ptm.runtime.autograd.saved_tensors import SavedTensors, inside_checkpoint
from lightning_ptm.terms import Tier
from lightning_ptm.torch_internals import saving_hooks

ROOT, FIRST, SECOND = 0, 1, 2


class Log:
    """Stands for the executor and for the offload: writes down what they are asked."""

    def __init__(self, made: Parts) -> None:
        self.parts = made
        self.refcounts = self
        self.asked: list[str] = []
        self.in_use: set[int] = set()
        self.paused: set[int] = set()
        self.read: list[int] = []

    def require(self, unit: int) -> None:
        self.asked.append(f"require {unit}")
        fetch(self.parts, unit)

    def suspended(self, unit: int) -> bool:
        return unit in self.paused

    def resume_backward(self, unit: int) -> None:
        self.asked.append(f"resume {unit}")
        self.paused.discard(unit)
        fetch(self.parts, unit)

    def read_in_place(self, unit: int) -> None:
        self.asked.append(f"read_in_place {unit}")
        self.in_use.add(unit)

    def note_saved_read(self, unit: int) -> bool:
        self.read.append(unit)
        return unit in self.in_use

    def begin(self, name: str, tier: Tier | None) -> None:
        self.asked.append(f"begin {name}")

    def end(self) -> int:
        self.asked.append("end")
        return 0

    def begin_iteration(self) -> None:
        self.asked.append("begin iteration")

    def pack(self, tensor: Tensor) -> Tensor | SavedView:
        """Offloads tensors with an even number of elements."""
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
        self.tier = Tier.HOST if offloads else None
        self.log: Any = Log(made)
        self.saved = SavedTensors(
            made.stores, self.log, ComputeStream(CpuBackend()), made.views, self.log if offloads else None
        )

    @contextmanager
    def call(self, unit: int) -> Iterator[None]:
        self.saved.begin(unit, self.tier if unit else None)
        try:
            yield
        finally:  # a test that fails leaves no hooks to the tests after it
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


def test_a_call_names_parameters_of_every_unit() -> None:
    with calls() as it:
        outer, _ = it.fetched(FIRST)
        inner, _ = it.fetched(SECOND)
        products = []
        with it.call(FIRST):
            products += [product(outer), product(inner)]
            with it.call(SECOND):
                products += [product(outer), product(inner)]
        for unit in (FIRST, SECOND):
            it.parts.stores[unit].release()
        for _, output in products:
            output.backward()
        assert it.log.logged() == ["require 1", "require 2"]  # I1
        assert all(x.grad is not None and not x.grad.isnan().any() for x, _ in products)


LOOKS: dict[str, Callable[[Tensor], Tensor]] = {
    "complex": lambda weight: torch.view_as_complex(weight[0, :8].view(4, 2)),
    "conjugate": lambda weight: torch.view_as_complex(weight[0, :8].view(4, 2)).conj(),
    "imaginary part of the conjugate": lambda weight: torch.view_as_complex(weight[0, :8].view(4, 2)).conj().imag,
    "integers": lambda weight: weight.detach()[0, :4].view(torch.int32).to_dense(),
    "every second": lambda weight: weight[0, 1:9:2],
    "expanded": lambda weight: weight[0, :1].expand(4),
    "backwards": lambda weight: weight[0, :4].flip(0).as_strided((4,), (1,)),
    "overlapping": lambda weight: weight[0, :5].unfold(0, 2, 1).reshape(-1)[:4],
    "half of the bytes": lambda weight: weight.detach()[0, :2].view(torch.bfloat16),
}


@pytest.mark.parametrize("look", LOOKS)
@pytest.mark.parametrize("in_use", [False, True])
def test_a_weight_is_named_however_it_is_looked_at(look: str, in_use: bool) -> None:
    with calls() as it:
        weight, _ = it.fetched(FIRST)
        view = LOOKS[look](weight)
        expected = view.detach().clone().resolve_conj().resolve_neg()
        with it.call(FIRST):
            x = torch.ones(view.shape, dtype=view.dtype if view.is_complex() else torch.float32, requires_grad=True)
            output = (x * view).real.sum() if view.is_complex() else (x * view).sum()
        del view
        it.log.in_use |= {FIRST} if in_use else set()
        it.parts.stores[FIRST].release()
        output.backward()
        assert x.grad is not None
        # Halves of numbers may be none.
        got, wanted = x.grad.nan_to_num(7), expected.conj().to(x.dtype).nan_to_num(7)
        assert torch.equal(got, wanted)


def test_a_unit_that_nobody_uses_may_go_before_what_is_read_of_it_is_computed_with() -> None:
    with calls() as it:
        first, _ = it.fetched(FIRST)
        second, _ = it.fetched(SECOND)
        with it.call(FIRST):
            factor = torch.ones(5, requires_grad=True)
            output = (first[0, :5] * second[0, :5] * factor).sum()
        want = (first[0, :5] * second[0, :5]).detach()
        for unit in (FIRST, SECOND):
            it.parts.stores[unit].release()
        require = it.log.require
        # Each fetch takes the pages of the other unit.
        it.log.require = lambda unit: (it.parts.stores[FIRST + SECOND - unit].release(), require(unit))
        output.backward()
        assert factor.grad is not None and torch.equal(factor.grad, want)


def test_a_view_that_outlives_its_unit_is_refused_when_the_unit_goes() -> None:
    with calls() as it:
        weight, _ = it.fetched(FIRST)
        kept = [weight.detach()[0, :5]]
        with pytest.raises(
            UsageError, match=r"a view of .* still exists after the call .*`weight.detach\(\).clone\(\)`"
        ):
            it.parts.stores[FIRST].release()
        kept.append(kept.pop().clone())
        it.parts.stores[FIRST].release()


def test_a_view_in_a_cycle_that_nobody_reaches_is_none() -> None:
    with calls() as it:
        weight, _ = it.fetched(FIRST)
        cycle: list[Any] = [weight.detach()[0, :5]]
        cycle.append(cycle)
        del cycle
        it.parts.stores[FIRST].release()


def test_while_an_error_is_handled_views_in_its_frames_refuse_nothing() -> None:
    with calls() as it:
        weight, _ = it.fetched(FIRST)

        def fails(view: Tensor) -> None:
            raise ValueError(view.shape)

        try:
            fails(weight.detach()[0])
        except ValueError:
            it.parts.stores[FIRST].release()


def test_a_view_of_an_earlier_fetch_is_refused_when_it_is_saved(monkeypatch: pytest.MonkeyPatch) -> None:
    with calls() as it:
        weight, _ = it.fetched(FIRST)
        view = weight[0, :5]
        binding = it.parts.stores[FIRST].flats[0].binding
        monkeypatch.setattr(binding, "check_views", lambda: None)
        it.parts.stores[FIRST].release()
        with (
            it.call(FIRST),
            pytest.raises(
                UsageError, match=r"in a call of .* that is a view of .* released before the backward reads it"
            ),
        ):
            torch.ones(5, requires_grad=True) * view


@pytest.mark.parametrize("layout", ["coo", "csr"])
def test_sparse_tensors_are_kept_but_over_a_weight_refused(layout: str) -> None:
    dense = torch.eye(3)
    with calls() as it:
        weight, _ = it.fetched(FIRST)
        with it.call(FIRST):
            x = torch.ones(3, 2, requires_grad=True)
            sparse = dense.to_sparse() if layout == "coo" else dense.to_sparse_csr()
            output = (sparse @ x).sum()
            places = torch.arange(3)
            values = weight.detach()[0, :3]
            if layout == "coo":
                over = torch.sparse_coo_tensor(torch.stack((places, places)), values, (3, 3))
            else:
                over = torch.sparse_csr_tensor(torch.arange(4), places, values, (3, 3))
            with pytest.raises(UsageError, match=r"that is a view of .* or of a part of another tensor"):
                over @ x
        output.backward()
        assert x.grad is not None and torch.equal(x.grad, torch.ones(3, 2))


def test_values_that_have_changed_since_are_an_error_of_the_backward() -> None:
    with calls() as it:
        weight, _ = it.fetched(FIRST)
        with it.call(FIRST):
            _, output = product(weight)
            _, other = product(weight)
        binding = it.parts.stores[FIRST].flats[0].binding
        binding.values_change([1])  # of the bias
        output.backward()
        binding.values_change()
        with pytest.raises(RuntimeError, match=r"modified by an inplace operation: .* has changed 1 time since"):
            other.backward()


def test_resident_units_have_nothing_to_name() -> None:
    for home, releases_parameters in ((Tier.DEVICE, False), (Tier.HOST, True)):
        with calls(home=home) as it:
            assert it.saved.releases_parameters is releases_parameters
            for unit in (ROOT, FIRST):
                it.saved.begin(unit)
                assert (saving_hooks(True) is not None) is releases_parameters
                it.saved.end(unit)


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


def test_hooks_of_others_inside_of_a_call_get_all_but_page_memory() -> None:
    with calls() as it:
        weight, _ = it.fetched(FIRST)
        seen: list[int] = []

        def pack(tensor: Tensor) -> Tensor:
            seen.append(tensor.numel())
            return tensor

        theirs = saved_tensors_hooks(pack, lambda tensor: tensor * 2)
        values = weight.detach()[0, :5].clone()
        with it.saved.watching(), it.call(FIRST), theirs:
            x, output = product(weight)
            y = torch.ones(3, requires_grad=True)
            others = (y * torch.full((3,), 3.0)).sum()
        assert seen == [5, 3] and theirs.pack_hook is pack  # I2: x, for the weight's gradient, and the factor
        it.parts.stores[FIRST].release()
        output.backward()
        others.backward()
        assert x.grad is not None and torch.equal(x.grad, values)  # I1
        assert y.grad is not None and y.grad.tolist() == [6.0] * 3


def test_what_a_checkpoint_recomputes_with_stays_where_it_is() -> None:
    with calls() as it:
        weight, _ = it.fetched(FIRST)
        x = torch.arange(1.0, 6.0, requires_grad=True)
        with it.call(FIRST):
            output = checkpoint(lambda x: (x * weight[0, :5]).sum(), x, use_reentrant=False)
        with it.saved.watching():
            output.backward()
        assert it.log.logged() == ["read_in_place 1"]  # I4
        assert x.grad is not None and torch.equal(x.grad, weight.detach()[0, :5])


def test_others_hooks_are_entered_as_ever_behind_the_watch() -> None:
    enter = saved_tensors_hooks.__enter__
    with calls() as it, it.saved.watching(), it.saved.watching():
        assert saved_tensors_hooks.__enter__ is not enter
    assert saved_tensors_hooks.__enter__ is enter


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
        it.saved.begin(FIRST, it.tier)
        outer = in_force()
        it.saved.begin(SECOND, it.tier)
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
