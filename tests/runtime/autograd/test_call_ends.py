"""When the gradients of what a call took have come, in graphs of a few nodes."""

from __future__ import annotations

import gc
import weakref
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_ptm.runtime.autograd.call_ends import CallCompletion
from lightning_ptm.runtime.tensors.autograd_graphs import OwnHook
from lightning_ptm.runtime.units.discovery import discover


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.part = nn.Linear(3, 3)


class Driven:
    """The root and one unit, and what was told of its calls."""

    def __init__(self) -> None:
        self.model = Model()
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
    it = Driven()
    first, second = made(), made()
    for each in (first, second):
        each.register_hook(OwnHook(lambda _: it.heard.append("begin")))
    number, output = it.call(first, second)
    output.sum().backward()
    assert it.heard == ["begin", f"come 1 {number}", "begin", f"done 1 {number}"]


def test_inputs_that_want_no_gradients_are_not_waited_for() -> None:
    it = Driven()
    number, output = it.call(torch.ones(3))
    assert number is None
    output.sum().backward()
    # The call is known by its graph, which nothing leaves, and ends with the pass.
    assert it.heard == [] and it.ends.calls.called(1) == 1


def test_what_no_argument_shows_is_waited_for_as_another_call() -> None:
    it = Driven()
    number, output = it.call(made(), hidden=made())
    assert number == 1
    output.sum().backward()
    assert sorted(it.heard) == ["come 1 1", "done 1 1", "done 1 2"]


def test_a_leaf_is_waited_for_by_the_way_that_leads_to_it() -> None:
    it = Driven()
    number, output = it.call(torch.ones(3, requires_grad=True))
    assert number == 1
    output.sum().backward()
    assert it.heard == ["done 1 2"]


@pytest.mark.parametrize("through", [True, False])
def test_a_pass_takes_part_in_what_its_graph_goes_through(through: bool) -> None:
    it = Driven()
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
    it, mark = Driven(), Mark()
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
    it = Driven()
    it.model.part.bias.requires_grad_(False)
    it.ends.call_begins(1)
    it.ends.calls.begin_pass()
    assert it.ends._trained(1) == 1
