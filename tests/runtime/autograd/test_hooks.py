"""Hooks: what executor and listener hear of forward and backward passes, and the parts of hooks alone."""

from __future__ import annotations

import copy
import dataclasses
import gc
import weakref
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any

import pytest
import torch
from other_stream import OtherStream
from small_parts import Model, OnePage, parts
from torch import Tensor, nn
from torch.nn.utils import parametrize
from torch.utils.checkpoint import checkpoint

from lightning_ptm.errors import UsageError
from lightning_ptm.memory.backend import CpuBackend
from lightning_ptm.memory.streams import ComputeStream
from lightning_ptm.runtime.autograd.calls import Action, Calls
from lightning_ptm.runtime.autograd.hooks import (
    BackwardPass,
    CallCompletion,
    Hooks,
    SubmoduleHooks,
    parametrizing_is_no_write,
)
from lightning_ptm.runtime.tensors.autograd_graphs import OwnHook
from lightning_ptm.runtime.units.discovery import discover
from lightning_ptm.terms import Phase, Tier

FORWARD_OF_BOTH = ["forward 1", "leave 1", "forward 2", "leave 2"]


class Heard:
    """An executor and a listener that write down what they hear, but for progress; and which units are held."""

    def __init__(self) -> None:
        self.log: list[str] = []
        self.guard_policy = self
        self.computing = False
        self._suspended: set[int] = set()

    def suspend_backward(self, unit: int) -> None:
        self._suspended.add(unit)
        self.log.append(f"suspend {unit}")

    def resume_backward(self, unit: int) -> None:
        if unit in self._suspended:
            self._suspended.discard(unit)
            self.log.append(f"resume {unit}")

    def enter(self, unit: int, phase: Phase) -> None:
        self.log.append(f"{phase.value} {unit}")

    def leave(self, unit: int) -> None:
        self.log.append(f"leave {unit}")

    def hold(self, unit: int) -> None:
        self.log.append(f"hold {unit}")

    def leave_backward(self, unit: int) -> None:
        self.log.append(f"leave backward {unit}")

    def end_backward(self, unit: int) -> None:
        self.log.append(f"end {unit}")

    def computation_begins(self, phase: Phase) -> None:
        self.log.append(f"{phase.value} begins")

    def computation_ends(self, phase: Phase) -> None:
        self.log.append(f"{phase.value} ends")

    def backward_begins(self) -> None:
        self.log.append("unannounced")

    def adds_up(self, unit: int) -> bool:
        return True

    def another_gradient(self, unit: int, parameter: torch.Tensor) -> None:
        self.log.append(f"another gradient of {unit}")

    def call_begins(self, unit: int) -> None:
        pass

    def unit_backward_ended(self, unit: int) -> None:
        self.log.append(f"gradients of {unit}")

    def backward_ended(self) -> None:
        self.log.append("all gradients")

    def progress(self) -> None: ...

    def heard(self) -> list[str]:
        told = list(self.log)
        self.log.clear()
        return told


@contextmanager
def hooked(*, recompute: frozenset[int] = frozenset()) -> Iterator[tuple[Any, Heard, Hooks]]:
    """The units of a model of two, the root's index aside: `units[0]` is unit 1."""
    with parts(Model(2), home=Tier.DEVICE) as made:
        heard: Any = Heard()
        hooks = Hooks(made.units, made.stores, heard, heard, recompute, ComputeStream(CpuBackend()), made.views)
        try:
            yield made.module.parts, heard, hooks
        finally:
            hooks.close()


class Queued(Heard):
    """Writes down what it hears while the caller's stream is the current one."""

    def __init__(self, stream: OtherStream) -> None:
        super().__init__()
        aside: list[str] = []

        class Log(list[str]):
            def append(self, word: str) -> None:
                super().append(word)
                if not stream.here:
                    aside.append(word)

        self.aside, self.log = aside, Log()

    def progress(self) -> None:
        self.log.append("progress")


@contextmanager
def hooked_elsewhere(recompute: frozenset[int]) -> Iterator[tuple[Any, Any, Hooks]]:
    with parts(Model(2), home=Tier.DEVICE) as made:
        stream = OtherStream()
        heard: Any = Queued(stream)
        hooks = Hooks(made.units, made.stores, heard, heard, recompute, stream, made.views)
        try:
            yield made.module.parts, heard, hooks
        finally:
            hooks.close()


def x() -> torch.Tensor:
    return torch.ones(8, requires_grad=True)


def ended(unit: int) -> list[str]:
    return [f"end {unit}", f"gradients of {unit}"]


def test_plain_units() -> None:
    with hooked() as (units, heard, hooks):
        loss = units[1](units[0](x())).sum()
        assert heard.heard() == FORWARD_OF_BOTH
        with hooks.backward():
            loss.backward()
        told = heard.heard()
        assert told[:3] == ["backward begins", "backward 0", "backward 2"]
        assert [each for each in told if each.startswith(("backward ", "end", "gradients", "all"))] == [
            # One gives its leases back before the next begins; its gradients are laid out when that has.
            *("backward begins", "backward 0", "backward 2", "end 2", "backward 1", *ended(2), *ended(1), *ended(0)),
            *("backward ends", "all gradients"),
        ]
        # The gradients are there when the listener hears of it.
        assert all(parameter.grad is not None for unit in units for parameter in unit.parameters())


@pytest.mark.parametrize("trained", [True, False])
def test_an_input_that_another_unit_took_before_is_waited_for_only_where_weights_are_frozen(
    monkeypatch: pytest.MonkeyPatch, trained: bool
) -> None:
    """Blocks of a decoder take the encoder's output, whose gradient is whole after the first one's backward."""
    monkeypatch.setattr(OnePage, "forward", lambda it, x, more: (x + more) * it.weight[0, :8] + it.bias[:8])
    with hooked() as (units, heard, hooks):
        units[1].bias.requires_grad_(trained)
        source = 2 * x()
        loss = units[1](units[0](3 * x(), source), source).sum()
        assert heard.heard() == FORWARD_OF_BOTH
        with hooks.backward():
            loss.backward()
        told = [each for each in heard.heard() if each.startswith(("backward ", "end", "gradients"))]
        assert told[:3] == ["backward begins", "backward 0", "backward 2"]
        order = ["end 2", "backward 1"] if trained else ["backward 1", "end 2"]
        assert [each for each in dict.fromkeys(told) if each in order] == order


def test_a_backward_of_the_users_own_is_told_and_ends_by_itself() -> None:
    with hooked() as (units, heard, _):
        units[0](x()).sum().backward()
        told = heard.heard()
        assert told[2:4] == ["backward begins", "unannounced"]
        assert told[-2:] == ["backward ends", "all gradients"] and told.count("end 1") == 1


def test_a_shared_unit_ends_once_behind_all_its_calls() -> None:
    with hooked() as (units, heard, hooks):
        loss = units[0](units[1](units[0](x()))).sum()
        assert heard.heard() == ["forward 1", "leave 1", "forward 2", "leave 2", "forward 1", "leave 1"]
        with hooks.backward():
            loss.backward()
        told = heard.heard()
        assert told.count("end 1") == told.count("gradients of 1") == 1
        assert told.index("gradients of 2") < told.index("gradients of 1")


def test_a_recomputed_unit_stays_from_the_beginning_of_its_backward_to_its_end() -> None:
    with hooked(recompute=frozenset({1})) as (units, heard, hooks):
        loss = units[1](units[0](x())).sum()
        assert heard.heard() == FORWARD_OF_BOTH
        with hooks.backward():
            loss.backward()
        told = heard.heard()
        assert told.count("backward 1") == told.count("end 1") == 1 and "forward 1" not in told
        # What its recomputed forward saves is kept and not named, so its lease is not given back before.
        assert "leave backward 2" in told and "leave backward 1" not in told


def test_a_unit_under_a_reentrant_checkpoint_ends_before_the_next_begins() -> None:
    """The input of such a unit is a leaf of torch's own; gradients of all such units would wait for the end of the
    pass."""
    with hooked() as (units, heard, hooks):
        loss = checkpoint(units[1], checkpoint(units[0], x(), use_reentrant=True), use_reentrant=True).sum()
        with hooks.backward():
            loss.backward()
        told = heard.heard()
        assert told.index("end 2") < told.index("hold 1") < told.index("end 1") < told.index("end 0")


@pytest.mark.parametrize("recompute", [frozenset(), frozenset({1, 2})], ids=["kept", "recomputed"])
def test_a_call_without_gradients_outside_of_a_checkpoint_delays_no_end(recompute: frozenset[int]) -> None:
    """Evaluation within a step: units would else stay gathered until the pass is over."""
    with hooked(recompute=recompute) as (units, heard, hooks):
        with torch.no_grad():
            units[1](units[0](x()))
        loss = units[1](units[0](x())).sum()
        with hooks.backward():
            loss.backward()
        told = heard.heard()
        assert told.index("end 2") < told.index("backward 1") < told.index("end 1") < told.index("end 0")


@pytest.mark.parametrize("recompute", [frozenset(), frozenset({1, 2})], ids=["kept", "recomputed"])
@pytest.mark.parametrize("announced", [True, False], ids=["the loss's", "the user's own"])
def test_whatever_stream_calls_all_is_done_on_the_runs(recompute: frozenset[int], announced: bool) -> None:
    with hooked_elsewhere(recompute) as (units, heard, hooks):
        for _ in range(2):  # another gradient is added to the first
            loss = units[1](units[0](x())).sum() + units[0](x().detach()).sum()
            with hooks.backward() if announced else nullcontext():
                loss.backward()
        told = heard.heard()
        assert {"progress", "forward 2", "leave 1", "another gradient of 1", "end 1", "all gradients"} <= set(told)
        assert heard.aside == []


def test_what_is_recomputed_before_a_gradient_of_its_output_comes_is_fetched_on_the_runs_stream() -> None:
    """A loss that uses what a unit has kept beside its output causes such a recomputation."""
    with hooked_elsewhere(frozenset({1})) as (units, heard, hooks):
        loss = units[0](x()).sum()
        with hooks.backward():
            heard.heard()
            hooks._recompute_starts(1)
            assert heard.heard() == ["hold 1"]
            loss.backward()
        assert heard.aside == []


def test_a_unit_may_go_while_others_compute_between_its_calls() -> None:
    with hooked() as (units, heard, hooks):
        loss = units[0](units[1](units[0](x() + 0))).sum()
        heard.heard()
        with hooks.backward():
            loss.backward()
        told = [each for each in heard.heard() if not each.startswith(("gradients of 0", "leave"))]
        wanted = ["backward 1", "suspend 1", "backward 2", "end 2", "resume 1", "end 2", "gradients of 2", "end 1"]
        assert [each for each in told if each in wanted][: len(wanted)] == wanted


def test_an_unused_parameter_ends_with_the_pass() -> None:
    with hooked() as (units, heard, hooks):
        units[0].spare = None
        loss = (units[0](x() + 0) * 0 + units[1].weight[0, :8]).sum()
        with hooks.backward():
            loss.backward()
        told = heard.heard()
        # Of unit 2 the bias never comes, and it was not called.
        assert told.index("gradients of 1") < told.index("gradients of 2") < told.index("gradients of 0")


def test_without_gradients_there_is_a_forward_and_nothing_else() -> None:
    with hooked() as (units, heard, _), torch.no_grad():
        units[1](units[0](x()))
        assert heard.heard() == FORWARD_OF_BOTH


def test_a_call_that_fails_is_left() -> None:
    with hooked() as (units, heard, _):
        with pytest.raises(RuntimeError):
            units[0](torch.ones(3))
        assert heard.heard() == ["forward 1", "leave 1"]


def test_a_second_derivative_is_refused() -> None:
    with hooked() as (units, _, hooks):
        with pytest.raises(UsageError, match="create_graph=True"), hooks.backward():
            units[0](x()).square().sum().backward(create_graph=True)
        hooks.abandon()


def test_closed_hooks_leave_the_modules_as_they_were() -> None:
    with parts(Model(2), home=Tier.DEVICE) as made:
        before = [dict(module.__dict__) for module in made.module.modules()]
        heard: Any = Heard()
        hooks = Hooks(made.units, made.stores, heard, heard, frozenset({1}), ComputeStream(CpuBackend()), made.views)
        assert [dict(module.__dict__) for module in made.module.modules()] != before
        hooks.close()
        assert [dict(module.__dict__) for module in made.module.modules()] == before
        heard.heard()
        made.module.parts[0](x()).sum().backward()
        assert heard.heard() == []


@pytest.mark.parametrize("recompute", [frozenset(), frozenset({1})])
def test_a_copy_of_a_module_reports_no_events(recompute: frozenset[int]) -> None:
    with hooked(recompute=recompute) as (units, heard, _):
        other: OnePage = copy.deepcopy(units[0])
        assert torch.equal(other(x()), other.weight[0, :8] + other.bias[:8]) and heard.heard() == []


def test_what_cannot_be_hooked_leaves_no_hook_behind() -> None:
    with parts(Model(2), home=Tier.HOST) as made:
        weight = next(iter(made.units[2].parameters))
        no_leaf: Any = dataclasses.replace(weight, parameter=torch.ones(8, requires_grad=True) * 2)
        units = [*made.units[:2], dataclasses.replace(made.units[2], parameters=(weight, no_leaf))]
        heard: Any = Heard()
        with pytest.raises(RuntimeError, match="leaf"):
            Hooks(units, made.stores, heard, heard, frozenset({1}), ComputeStream(CpuBackend()), made.views)
        for module in made.module.modules():
            assert not {"_call_impl", "forward"} & set(vars(module))
        for parameter in made.module.parameters():
            assert not parameter._backward_hooks and not parameter._post_accumulate_grad_hooks


class Doubled(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return 2 * x


class Stored(Doubled):
    def right_inverse(self, x: Tensor) -> Tensor:
        return x / 2


def test_putting_one_on_and_taking_it_off_is_no_write_inside() -> None:
    layer = nn.Linear(2, 2)
    version = layer.weight._version
    with parametrizing_is_no_write():
        parametrize.register_parametrization(layer, "weight", Doubled())
        original = layer.parametrizations.weight.original
        assert original._version == version
        assert torch.equal(layer.weight, 2 * original)
        parametrize.remove_parametrizations(layer, "weight", leave_parametrized=False)
    assert layer.weight._version == version


def test_other_data_is_a_write() -> None:
    layer = nn.Linear(2, 2)
    version, values = layer.weight._version, layer.weight.detach().clone()
    with parametrizing_is_no_write():
        parametrize.register_parametrization(layer, "weight", Stored())
    original = layer.parametrizations.weight.original
    assert original._version > version and torch.equal(original, values / 2)


def test_torch_is_as_it_was_behind_it() -> None:
    before = parametrize._maybe_set
    with pytest.raises(ValueError, match="the user's"), parametrizing_is_no_write():
        assert parametrize._maybe_set is not before
        raise ValueError("the user's")
    assert parametrize._maybe_set is before


BEGINS = ["backward begins", "backward 0"]

ENDS = ["end 0", "gradients of 0", "backward ends", "all gradients"]


class Driven:
    """A pass over a root and a unit, of a parameter each."""

    def __init__(self) -> None:
        self.heard: Any = Heard()
        self.calls = Calls(2, lambda unit: 1, lambda call: True)
        self.it = BackwardPass(["", "block"], self.heard, self.heard, self.calls, ComputeStream(CpuBackend()))


def test_an_announced_pass_ends_when_it_is_said_to() -> None:
    driven = Driven()
    it, heard = driven.it, driven.heard
    with it.of_the_loss(nullcontext()):
        assert heard.heard() == BEGINS and it.begun and it.announced
        it.start()  # is in progress
        it.act(1, driven.calls.output(1))
        assert heard.heard() == ["backward 1"]
    assert heard.heard() == ["end 1", "gradients of 1", *ENDS] and not it.begun and not it.announced


def test_one_of_the_users_own_ends_when_autograd_is_through() -> None:
    driven = Driven()
    it, heard = driven.it, driven.heard
    x = torch.ones(1, requires_grad=True)
    x.register_hook(lambda _: it.start())
    (x * 2).sum().backward()
    assert heard.heard() == [BEGINS[0], "unannounced", BEGINS[1], *ENDS] and not it.begun


def test_whatever_stream_is_the_callers_a_pass_begins_and_ends_on_the_runs() -> None:
    stream = OtherStream()
    heard: Any = Queued(stream)
    it = BackwardPass(["", "block"], heard, heard, Calls(2, lambda unit: 1, lambda call: True), stream)
    with it.of_the_loss(nullcontext()):
        assert heard.heard() == BEGINS and heard.aside == []
    assert heard.heard() == ENDS and heard.aside == []


def test_a_failed_pass_is_dropped_and_reports_no_gradients() -> None:
    driven = Driven()
    it, heard = driven.it, driven.heard
    with pytest.raises(ValueError, match="in the pass"), it.of_the_loss(nullcontext()):
        heard.heard()
        raise ValueError("in the pass")
    assert heard.heard() == ["leave backward 0", "leave backward 1", "backward ends"]
    assert not it.begun and not it.announced
    with it.of_the_loss(nullcontext()):  # another may follow
        assert heard.heard() == BEGINS


def test_a_forgotten_pass_reports_no_events() -> None:
    driven = Driven()
    driven.it.announced = True
    driven.it.start()
    driven.heard.heard()
    driven.it.forget()
    assert not driven.it.begun and not driven.it.announced and driven.heard.heard() == []


def test_actions_are_done_in_their_order() -> None:
    driven = Driven()
    driven.it.act(1, (Action.HOLD, Action.ENTER, Action.LEAVE, Action.END))
    assert driven.heard.heard() == ["hold 1", "backward 1", "leave backward 1", "end 1", "gradients of 1"]
    with pytest.raises(UsageError, match="unit block got a gradient after its backward had ended"):
        driven.it.act(1, (Action.REFUSE,))


class Pair(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.part = nn.Linear(3, 3)


class DrivenCompletion:
    """The root and one unit, and what was told of its calls."""

    def __init__(self) -> None:
        self.model = Pair()
        self.heard: list[str] = []
        units = discover(self.model, ["Linear"])
        assert [unit.name for unit in units] == ["", "part"]
        self.ends = CallCompletion(units, self.come, self.done)

    def come(self, unit: int, call: int, gradients: Any) -> None:
        self.heard.append(f"come {unit} {call}")

    def done(self, unit: int, call: int, gradients: Any) -> None:
        self.heard.append(f"done {unit} {call}")

    def call(self, *inputs: Tensor, hidden: Tensor | None = None) -> tuple[int | None, Tensor]:
        """A call of the unit: its number, and its output; `hidden` comes into it by no argument."""
        number = self.ends.watch_inputs(1, inputs, {})
        output = self.model.part(sum(inputs))
        if hidden is not None:
            output = output * hidden
        self.ends.watch_graph_exits(1, number, [output])
        return number, output


class Mark:
    """Lives as long as the graph whose hook has it."""


def ignore(mark: Mark, gradient: Tensor) -> None: ...


def made() -> Tensor:
    return torch.ones(3, requires_grad=True) * 2


def test_a_call_has_come_before_the_unit_whose_output_it_took_begins_and_is_done_behind_that() -> None:
    it = DrivenCompletion()
    first, second = made(), made()
    for each in (first, second):
        each.register_hook(OwnHook(lambda _: it.heard.append("begin")))
    number, output = it.call(first, second)
    output.sum().backward()
    assert it.heard == ["begin", f"come 1 {number}", "begin", f"done 1 {number}"]


def test_inputs_that_want_no_gradients_are_not_waited_for() -> None:
    it = DrivenCompletion()
    number, output = it.call(torch.ones(3))
    assert number is None
    output.sum().backward()
    # The call is known by its graph, which nothing leaves, and ends with the pass.
    assert it.heard == [] and it.ends.calls.called(1) == 1


def test_what_no_argument_shows_is_waited_for_as_another_call() -> None:
    it = DrivenCompletion()
    number, output = it.call(made(), hidden=made())
    assert number == 1
    output.sum().backward()
    assert sorted(it.heard) == ["come 1 1", "done 1 1", "done 1 2"]


def test_a_leaf_is_waited_for_by_the_way_that_leads_to_it() -> None:
    it = DrivenCompletion()
    number, output = it.call(torch.ones(3, requires_grad=True))
    assert number == 1
    output.sum().backward()
    assert it.heard == ["done 1 2"]


@pytest.mark.parametrize("through", [True, False])
def test_a_pass_takes_part_in_what_its_graph_goes_through(through: bool) -> None:
    it = DrivenCompletion()
    number, output = it.call(made())
    _, other = it.call(made())
    assert number is not None
    found: list[bool] = []
    of_pass = output if through else other
    of_pass.register_hook(lambda _: found.append(it.ends._takes_part(number)))
    of_pass.sum().backward()
    assert found == [through]


@pytest.mark.parametrize("forgotten", [True, False])
def test_what_is_forgotten_tells_nobody_and_keeps_no_graph(forgotten: bool) -> None:
    it, mark = DrivenCompletion(), Mark()
    first, second = made(), made()
    first.register_hook(partial(ignore, mark))
    _, output = it.call(first, second)
    _, other = it.call(first, second)
    if forgotten:
        it.ends.forget()
    (output + other).sum().backward()
    assert bool(it.heard) is not forgotten
    kept = weakref.ref(mark)
    del mark, first, second, output, other
    gc.collect()
    assert (kept() is None) is forgotten


def test_trained_parameters_are_counted_when_a_pass_begins() -> None:
    it = DrivenCompletion()
    it.model.part.bias.requires_grad_(False)
    it.ends.call_begins(1)
    it.ends.calls.begin_pass()
    assert it.ends._trained(1) == 1


class HeardCalls:
    """An executor, and what a call of a unit is."""

    def __init__(self) -> None:
        self.in_use: set[int] = set()
        self.held_units: set[int] = set()
        self.guard_policy = self
        self.computing = True
        self.log: list[str] = []
        self.refcounts = self
        executor: Any = self
        self.submodule_hooks = SubmoduleHooks(
            ["", "a", "b"],
            executor,
            self.begins,
            self.ends,
            lambda: self.use(0),
            lambda: self.leave(0),
            ComputeStream(CpuBackend()),
        )

    def used(self, unit: int) -> bool:
        return unit in self.in_use

    def held(self, unit: int) -> bool:
        return unit in self.held_units

    def read_held(self, unit: int) -> None:
        self.log.append(f"read {unit}")

    def hold(self, unit: int) -> None:
        self.log.append(f"hold {unit}")

    def use(self, unit: int) -> None:
        self.log.append(f"use {unit}")

    def leave(self, unit: int) -> None:
        self.log.append(f"leave {unit}")

    def begins(self, unit: int, args: Any, kwargs: Any) -> int | None:
        self.log.append(f"begin {unit} {args} {kwargs}")
        return 10 + unit

    def ends(self, unit: int, call: int | None, output: Any) -> None:
        self.log.append(f"end {unit} {call} {output}")

    def heard(self) -> list[str]:
        log, self.log = self.log, []
        return log


def test_the_first_unit_of_an_owner_is_told_apart() -> None:
    it, owner = HeardCalls(), nn.Linear(1, 1)
    assert [
        it.submodule_hooks.add_owner(owner, 1),
        it.submodule_hooks.add_owner(owner, 2),
        it.submodule_hooks.add_owner(nn.Linear(1, 1), 1),
    ] == [True, False, True]


def test_a_call_from_outside_is_one_of_each_unit_and_ends_with_it() -> None:
    it, owner, inner = HeardCalls(), nn.Linear(1, 1), nn.Linear(1, 1)
    for module, unit in ((owner, 1), (owner, 2), (inner, 1)):
        it.submodule_hooks.add_owner(module, unit)
    it.submodule_hooks.call_begins(owner, "x")
    assert it.heard() == ["begin 1 x {}", "begin 2 x {}"]
    it.in_use = {1}
    it.submodule_hooks.call_begins(inner, "y")
    it.submodule_hooks.call_ends(inner, "z")  # was inside of the unit's call
    assert it.heard() == []
    it.submodule_hooks.call_ends(owner, "out")
    assert it.heard() == ["end 2 12 out", "end 1 11 out"]
    it.submodule_hooks.call_ends(owner, "out")
    assert it.heard() == []


def test_whatever_stream_calls_it_is_told_on_the_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    it, owner, stream = HeardCalls(), nn.Linear(1, 1), OtherStream()
    it.submodule_hooks.stream = stream
    it.submodule_hooks.add_owner(owner, 0)
    stream.watch(monkeypatch, it, "used", "held", "hold")
    it.submodule_hooks.call_begins(owner, "x")
    assert stream.noted == [("used", False), ("held", True), ("hold", True)]  # a count needs no stream


def test_a_held_unit_is_read() -> None:
    it, owner = HeardCalls(), nn.Linear(1, 1)
    it.submodule_hooks.add_owner(owner, 1)
    it.held_units = {1}
    it.submodule_hooks.call_begins(owner, ())
    it.submodule_hooks.call_ends(owner, ())
    assert it.heard() == ["read 1"]


@pytest.mark.parametrize(
    ("computing", "heard"), [(True, ["hold 0"]), (False, ["hold 0", "use 0", "leave 0"])], ids=["in a step", "outside"]
)
def test_the_root_stays_and_is_in_use_outside_of_a_step(computing: bool, heard: list[str]) -> None:
    it, owner = HeardCalls(), nn.Linear(1, 1)
    it.computing = computing
    it.submodule_hooks.add_owner(owner, 0)
    it.submodule_hooks.call_begins(owner, ())
    it.submodule_hooks.call_ends(owner, ())
    assert it.heard() == heard


def test_in_a_backward_pass_a_call_ends_with_its_unit() -> None:
    it, owner = HeardCalls(), nn.Linear(1, 1)
    it.submodule_hooks.add_owner(owner, 1)

    def again(_: Any) -> None:
        it.submodule_hooks.call_begins(owner, "x")
        it.submodule_hooks.call_ends(owner, "out")

    x = torch.ones(1, requires_grad=True)
    x.register_hook(again)
    x.sum().backward()
    assert it.heard() == ["begin 1 x {}"]


def test_calls_that_ended_in_an_error_are_left_or_forgotten() -> None:
    it, owner = HeardCalls(), nn.Linear(1, 1)
    it.submodule_hooks.add_owner(owner, 1)
    it.submodule_hooks.call_begins(owner, "x")
    it.submodule_hooks.give_up()
    assert it.heard() == ["begin 1 x {}", "leave 1"]
    it.submodule_hooks.call_begins(owner, "x")
    it.submodule_hooks.forget()
    it.submodule_hooks.give_up()
    assert it.heard() == ["begin 1 x {}"]


def test_inside_of_a_derivative_the_unit_is_named() -> None:
    it, owner = HeardCalls(), nn.Linear(1, 1)
    it.submodule_hooks.add_owner(owner, 2)

    def called(x: torch.Tensor) -> torch.Tensor:
        it.submodule_hooks.call_begins(owner, (x,))
        return x.sum()

    with pytest.raises(UsageError, match="b is called inside of a derivative"):
        torch.func.grad(called)(torch.ones(2))
