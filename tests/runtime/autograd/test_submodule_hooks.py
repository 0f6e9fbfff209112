"""Calls of submodules from outside of their unit, told to an executor that writes down what it hears."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from other_stream import OtherStream
from torch import nn

from lightning_ptm.errors import UsageError
from lightning_ptm.memory.backend import CpuBackend
from lightning_ptm.memory.streams import ComputeStream
from lightning_ptm.runtime.autograd.submodule_hooks import SubmoduleHooks


class Heard:
    """An executor, and what a call of a unit is."""

    def __init__(self) -> None:
        self.in_use: set[int] = set()
        self.held_units: set[int] = set()
        self.guard_policy = self
        self.computing = True
        self.log: list[str] = []
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
    it, owner = Heard(), nn.Linear(1, 1)
    assert [
        it.submodule_hooks.add_owner(owner, 1),
        it.submodule_hooks.add_owner(owner, 2),
        it.submodule_hooks.add_owner(nn.Linear(1, 1), 1),
    ] == [True, False, True]


def test_a_call_from_outside_is_one_of_each_unit_and_ends_with_it() -> None:
    it, owner, inner = Heard(), nn.Linear(1, 1), nn.Linear(1, 1)
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
    it, owner, stream = Heard(), nn.Linear(1, 1), OtherStream()
    it.submodule_hooks.stream = stream
    it.submodule_hooks.add_owner(owner, 0)
    stream.watch(monkeypatch, it, "used", "held", "hold")
    it.submodule_hooks.call_begins(owner, "x")
    assert stream.noted == [("used", True), ("held", True), ("hold", True)]


def test_a_held_unit_is_read() -> None:
    it, owner = Heard(), nn.Linear(1, 1)
    it.submodule_hooks.add_owner(owner, 1)
    it.held_units = {1}
    it.submodule_hooks.call_begins(owner, ())
    it.submodule_hooks.call_ends(owner, ())
    assert it.heard() == ["read 1"]


@pytest.mark.parametrize(
    ("computing", "heard"), [(True, ["hold 0"]), (False, ["hold 0", "use 0", "leave 0"])], ids=["in a step", "outside"]
)
def test_the_root_stays_and_is_in_use_outside_of_a_step(computing: bool, heard: list[str]) -> None:
    it, owner = Heard(), nn.Linear(1, 1)
    it.computing = computing
    it.submodule_hooks.add_owner(owner, 0)
    it.submodule_hooks.call_begins(owner, ())
    it.submodule_hooks.call_ends(owner, ())
    assert it.heard() == heard


def test_in_a_backward_pass_a_call_ends_with_its_unit() -> None:
    it, owner = Heard(), nn.Linear(1, 1)
    it.submodule_hooks.add_owner(owner, 1)

    def again(_: Any) -> None:
        it.submodule_hooks.call_begins(owner, "x")
        it.submodule_hooks.call_ends(owner, "out")

    x = torch.ones(1, requires_grad=True)
    x.register_hook(again)
    x.sum().backward()
    assert it.heard() == ["begin 1 x {}"]


def test_calls_that_ended_in_an_error_are_left_or_forgotten() -> None:
    it, owner = Heard(), nn.Linear(1, 1)
    it.submodule_hooks.add_owner(owner, 1)
    it.submodule_hooks.call_begins(owner, "x")
    it.submodule_hooks.give_up()
    assert it.heard() == ["begin 1 x {}", "leave 1"]
    it.submodule_hooks.call_begins(owner, "x")
    it.submodule_hooks.forget()
    it.submodule_hooks.give_up()
    assert it.heard() == ["begin 1 x {}"]


def test_inside_of_a_derivative_the_unit_is_named() -> None:
    it, owner = Heard(), nn.Linear(1, 1)
    it.submodule_hooks.add_owner(owner, 2)

    def called(x: torch.Tensor) -> torch.Tensor:
        it.submodule_hooks.call_begins(owner, (x,))
        return x.sum()

    with pytest.raises(UsageError, match="b is called inside of a derivative"):
        torch.func.grad(called)(torch.ones(2))
