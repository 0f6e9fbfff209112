"""What executor and listener hear of forward and backward passes: of a plain unit, a shared one, a recomputed one."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import pytest
import torch
from other_stream import OtherStream
from small_parts import Model, OnePage, parts
from torch.utils.checkpoint import checkpoint

from lightning_ptm.errors import UsageError
from lightning_ptm.memory.backend import CpuBackend
from lightning_ptm.memory.streams import ComputeStream
from lightning_ptm.runtime.autograd.hooks import Hooks
from lightning_ptm.terms import Phase, Tier

FORWARD_OF_BOTH = ["forward 1", "leave 1", "forward 2", "leave 2"]


class Heard:
    """An executor and a listener that write down what they hear, but for progress; and which units are held."""

    def __init__(self) -> None:
        self.log: list[str] = []
        self.guard_policy = self
        self.computing = False

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

    def another_gradient(self, unit: int, parameter: torch.Tensor) -> None:
        self.log.append(f"another gradient of {unit}")

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
    """Its input there is a leaf of torch's own; gradients of all such units would wait for the end of the pass."""
    with hooked() as (units, heard, hooks):
        loss = checkpoint(units[1], checkpoint(units[0], x(), use_reentrant=True), use_reentrant=True).sum()
        with hooks.backward():
            loss.backward()
        told = heard.heard()
        assert told.index("end 2") < told.index("hold 1") < told.index("end 1") < told.index("end 0")


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
    """As where a loss uses what a unit has kept beside its output."""
    with hooked_elsewhere(frozenset({1})) as (units, heard, hooks):
        loss = units[0](x()).sum()
        with hooks.backward():
            heard.heard()
            hooks._recompute_starts(1)
            assert heard.heard() == ["hold 1"]
            loss.backward()
        assert heard.aside == []


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
def test_a_copy_of_a_module_tells_nobody(recompute: frozenset[int]) -> None:
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
