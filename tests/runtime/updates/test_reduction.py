"""When gradients leave their parameters, alone and as one of two ranks; what is agreed on, and what waits."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from small_parts import NUMEL, Model, Parts, parts

from lightning_ptm.comm import NeededCollective
from lightning_ptm.comm.agreement import Decision
from lightning_ptm.errors import CapacityError, UsageError
from lightning_ptm.runtime.deciding.gradient_route import GradientUse, Passes, Until, route
from lightning_ptm.runtime.gradients.flat_gradient import FlatGradient
from lightning_ptm.runtime.gradients.store import InFlight
from lightning_ptm.runtime.updates.optimizer_groups import FlatUpdate
from lightning_ptm.runtime.updates.reduction import Reduction
from lightning_ptm.terms import Operation, Tier

NO_STATES: Any = None
"""Placeholder for optimizer states, which a reduction does not use."""


class Run:
    """Two units of one flat each; ranks agree at once, as `answers` say."""

    def __init__(self, made: Parts, home: Tier, absent: tuple[int, ...] = (), reduced_at_step: bool = False) -> None:
        self.parts = made
        self.requests: list[NeededCollective] = []
        self.answers: list[tuple[bool, int]] = []
        """(unanimous, flags of the other rank) of the next requests; without, all ranks ask alike."""
        self.given_up = 0
        self.in_the_way: list[Any] = []
        self.in_flight = InFlight()
        several = made.communicator.world_size > 1
        passes = Passes.COPIED if several else Passes.AS_LEFT
        use = GradientUse(until=Until.STEP, passes=passes, reduced_at_step=reduced_at_step)
        way = route(home, torch.float32, use)
        self.flats = [
            tuple(
                FlatUpdate(
                    flat,
                    FlatGradient(flat, way, made.allocator, made.sharing, made.supply(flat, way), self.in_flight),
                    NO_STATES,
                    0,
                )
                for flat in (() if store.unit.index in absent else store.flats)
            )
            for store in made.stores
        ]
        agreement: Any = self if several else None
        self.reduction = Reduction(self.flats, agreement, self.in_flight, self.give_up)

    def request(self, request: NeededCollective) -> Decision:
        self.requests.append(request)
        unanimous, flags = self.answers.pop(0) if self.answers else (True, 0)
        return Decision(request, unanimous, flags | request.flag)

    def give_up(self) -> bool:
        if self.in_the_way:
            self.given_up += 1
            self.parts.allocator.release(self.in_the_way.pop())
            return True
        return False

    def backward(self, unit: int, value: float, *, bias: bool = True) -> None:
        """Leaves gradients of `unit` in `.grad`."""
        for parameter in list(self.parts.module.parts[unit - 1].parameters())[: 1 + bias]:
            new = torch.full(parameter.shape, value)
            parameter.grad = new if parameter.grad is None else parameter.grad + new

    def values(self, unit: int) -> list[float]:
        (flat,) = self.flats[unit]
        return flat.gradient.shard.on_device().unique().tolist()

    def in_grad(self, unit: int) -> bool:
        return any(parameter.grad is not None for parameter in self.parts.module.parts[unit - 1].parameters())


@contextmanager
def alone(home: Tier = Tier.HOST, pages: int = 8, units: int = 2) -> Iterator[Run]:
    with parts(Model(units), device_pages=pages) as made:
        yield Run(made, home)


@contextmanager
def of_two(pages: int = 12, absent: tuple[int, ...] = (), *, reduced_at_step: bool = False) -> Iterator[Run]:
    with parts(Model(2, double=True), world_size=2, device_pages=pages) as made:
        yield Run(made, Tier.HOST, absent, reduced_at_step)


def asks(*units: int, missing: bool = False, last: bool = False) -> list[NeededCollective]:
    return [NeededCollective(Operation.REDUCE, unit, missing + 2 * last) for unit in units]


def test_alone_a_unit_is_collected_when_its_backward_ends() -> None:
    with alone() as it:
        it.backward(1, 2.0)
        it.backward(2, 3.0)
        it.reduction.collect(1)
        assert (it.in_grad(1), it.in_grad(2)) == (False, True) and it.values(1) == [2.0]
        it.backward(1, 1.0)
        it.reduction.collect(1)
        assert it.values(1) == [3.0]


def test_alone_what_waits_in_grad_stays() -> None:
    with alone(Tier.DEVICE) as it:
        it.backward(1, 2.0)
        it.reduction.collect(1)
        assert it.in_grad(1) and not it.flats[1][0].gradient.shard.in_flight


def test_alone_nothing_is_postponed() -> None:
    with alone() as it:
        with it.reduction.postponed():
            it.backward(1, 2.0)
            it.reduction.collect(1)
            assert not it.in_grad(1)
        it.reduction.collect_postponed()


def test_units_whose_gradients_all_stay_in_grad_have_none_to_reduce_at_the_step() -> None:
    with parts(Model(2)) as made:
        it = Run(made, Tier.DEVICE, reduced_at_step=True)
        with it.reduction.postponed():
            it.backward(1, 2.0)
            it.reduction.collect(1)
        it.reduction.collect_postponed()
        assert it.in_grad(1)


def test_ranks_agree_and_tell_whether_a_gradient_is_missing() -> None:
    with of_two() as it:
        it.backward(2, 2.0)
        it.reduction.collect(2)
        it.backward(1, 4.0, bias=False)
        it.parts.communicator.their_values = torch.tensor([0, 1])
        it.parts.communicator.theirs = torch.full((2 * NUMEL,), 2.0)
        it.reduction.collect(1)
        assert it.requests == [*asks(2), *asks(1, missing=True)]
        assert it.parts.communicator.issued == ["reduce 1", "maximum", "reduce 0"]
        assert it.values(2) == [1.0]
        assert list(it.flats[1][0].gradient.view.present()) == [True, True]  # one here, one there
        assert it.reduction.complete(1) and it.reduction.complete(2)


def test_a_rank_takes_part_with_zeros_and_more_may_come() -> None:
    with of_two() as it:
        it.parts.communicator.their_values = torch.tensor([1, 1])
        it.parts.communicator.theirs = torch.full((2 * NUMEL,), 6.0)
        it.reduction.take_part(Decision(asks(1)[0], unanimous=False, flags=0))
        assert it.requests == [] and it.values(1) == [3.0]
        assert not it.reduction.complete(1) and it.reduction.complete(2)  # I3
        it.backward(1, 2.0)
        it.reduction.collect(1)
        assert it.values(1) == [4.0] and not it.reduction.complete(1)
        it.reduction.begin_step()
        assert it.reduction.complete(1)


def test_a_unit_that_no_rank_has_gradients_of_gets_none() -> None:
    with of_two() as it:
        it.answers = [(False, 0)]
        it.reduction.collect(1)
        assert it.parts.communicator.issued == ["maximum"] and not it.flats[1][0].gradient.any


def test_a_rank_gives_nothing_for_a_unit_that_it_does_not_hold() -> None:
    with of_two(absent=(1,)) as it:
        it.reduction.take_part(Decision(asks(1)[0], unanimous=False, flags=1))
        assert it.parts.communicator.issued == [] and it.reduction.complete(1)


def test_postponed_gradients_are_reduced_once_last_unit_first() -> None:
    with of_two(reduced_at_step=True) as it:
        with it.reduction.postponed():
            for unit in (2, 1):
                it.backward(unit, 1.0)
                it.reduction.collect(unit)
            with pytest.raises(UsageError, match=r"inside no_sync\(\) \(`block_backward_sync`"):
                it.reduction.collect_postponed()
        assert it.requests == [] and it.in_grad(1) and it.in_grad(2)
        it.backward(1, 3.0)
        it.reduction.collect_postponed()
        assert it.requests == asks(2, 1, last=True) and it.parts.communicator.issued == ["reduce 1", "reduce 0"]
        assert (it.values(1), it.values(2)) == ([2.0], [0.5])
        it.reduction.collect_postponed()
        assert it.requests == asks(2, 1, last=True)


def test_what_each_pass_reduces_is_not_postponed() -> None:
    with of_two() as it, it.reduction.postponed():
        it.backward(1, 1.0)
        it.reduction.collect(1)
        assert it.requests == asks(1) and not it.in_grad(1)
        it.reduction.collect_postponed()


def test_the_units_next_gradients_take_postponed_ones_along() -> None:
    with of_two(reduced_at_step=True) as it:
        with it.reduction.postponed():
            it.backward(1, 1.0)
            it.reduction.collect(1)
        it.backward(1, 3.0)
        it.reduction.collect(1)
        assert it.values(1) == [2.0]
        it.reduction.collect_postponed()
        assert it.requests == [*asks(1), *asks(2, missing=True, last=True)]  # I2


def test_what_was_added_up_is_one_sum_where_ranks_do_not_end_a_unit_together() -> None:
    with of_two(reduced_at_step=True) as it:
        with it.reduction.postponed():
            it.backward(1, 4.0)
            it.reduction.collect(1)
        it.reduction.take_part(Decision(asks(1)[0], unanimous=False, flags=0))  # the other one ends it first
        it.backward(1, 2.0)
        it.answers = [(False, 0)]
        it.reduction.collect(1)
        assert it.in_grad(1) and it.parts.communicator.issued == [] and not it.reduction.complete(1)  # I4
        it.parts.communicator.their_values = torch.tensor([1, 1])
        it.reduction.take_part(
            Decision(asks(1, last=True)[0], unanimous=False, flags=2)
        )  # its list begins with another
        assert not it.in_grad(1) and it.values(1) == [3.0]
        it.requests.clear()
        it.reduction.collect_postponed()
        assert it.requests == asks(2, missing=True, last=True)


def test_a_failed_iteration_has_nothing_to_reduce() -> None:
    with of_two(reduced_at_step=True) as it:
        with it.reduction.postponed():
            it.backward(1, 1.0)
            it.reduction.collect(1)
        it.reduction.take_part(Decision(asks(2)[0], unanimous=False, flags=0))
        it.reduction.forget()
        it.reduction.collect_postponed()
        assert it.requests == [] and it.reduction.complete(2)


def test_units_give_way_to_gradients() -> None:
    with alone(pages=1) as it:
        it.in_the_way.append(it.parts.paged(torch.ones(8), Tier.DEVICE))
        it.backward(1, 2.0)
        it.reduction.collect(1)
        assert it.given_up == 1 and it.values(1) == [2.0]
        it.parts.paged(torch.ones(8), Tier.DEVICE)  # nobody gives this one up
        it.backward(1, 2.0)
        with pytest.raises(CapacityError, match="flat 0 full gradient"):
            it.reduction.collect(1)
        assert it.given_up == 1 and it.in_grad(1)


def test_gradients_on_their_way_give_way_to_the_next_ones() -> None:
    with alone(pages=1) as it:
        for unit in (1, 2):
            it.backward(unit, float(unit))
            it.reduction.collect(unit)
        assert (it.values(1), it.values(2)) == ([1.0], [2.0])


def test_a_gradient_waits_for_no_more_of_those_on_their_way_than_it_needs() -> None:
    with alone(pages=2, units=3) as it:
        for unit in (1, 2, 3):
            it.backward(unit, float(unit))
            it.reduction.collect(unit)
        assert [flat.gradient.shard.in_flight for unit in (1, 2, 3) for flat in it.flats[unit]] == [False, True, True]
        assert [it.values(unit) for unit in (1, 2, 3)] == [[1.0], [2.0], [3.0]]


def test_pages_of_gradients_that_have_left_are_reclaimed() -> None:
    with alone() as it:
        assert not it.in_flight.release(False)
        it.backward(1, 2.0)
        it.reduction.collect(1)
        assert it.parts.device_pages_free == 7
        assert it.in_flight.release(True) and it.parts.device_pages_free == 8
        assert not it.in_flight.release(True)
        it.backward(2, 2.0)
        it.reduction.collect(2)
        assert it.in_flight.release(False) and it.parts.device_pages_free == 8
