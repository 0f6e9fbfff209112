"""Plans of one rank and of several that must be equal: what is refused, and what is told of ranks that differ."""

from __future__ import annotations

import dataclasses
import re
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from decided_by_hand import CLUSTER, Net, decided
from torch import Tensor

from lightning_ptm.comm import SoloCommunicator
from lightning_ptm.errors import CapacityError, InternalError, RankError
from lightning_ptm.planning.plan import Plan
from lightning_ptm.planning.trace import Trace
from lightning_ptm.runtime.deciding import planner
from lightning_ptm.runtime.deciding.blueprint import Blueprint
from lightning_ptm.runtime.deciding.planner import Planner, check_layout, make_plan
from lightning_ptm.terms import Mode, Operation

ON_HOST: dict[str, Any] = {"machine": CLUSTER, "ranks": 3, "offload_parameters": "host", "offload_optimizer": "host"}


class Ranks:
    """Three ranks as threads of one process: `swap` gives each rank the values of all."""

    world_size = 3

    def __init__(self) -> None:
        self.barrier = threading.Barrier(self.world_size, timeout=30)
        self.given: list[Any] = [None] * self.world_size

    def swap(self, rank: int, value: Any) -> list[Any]:
        self.given[rank] = value
        self.barrier.wait()
        seen = list(self.given)
        self.barrier.wait()
        return seen

    def each(self, act: Callable[[Any], Any]) -> list[Any]:
        """Returns the results or errors of `act` on each rank."""

        def outcome(rank: int) -> Any:
            try:
                return act(Rank(self, rank))
            except (CapacityError, RankError) as error:
                return error

        with ThreadPoolExecutor(self.world_size) as threads:
            return list(threads.map(outcome, range(self.world_size)))


@dataclasses.dataclass
class Rank:
    """One's communicator."""

    ranks: Ranks
    rank: int
    world_size: int = Ranks.world_size
    alone: bool = False

    def all_reduce(self, values: Tensor, *, maximum: bool = False) -> Tensor:
        assert maximum
        return values.copy_(torch.stack(self.ranks.swap(self.rank, values.clone())).amax(0))

    def broadcast_object(self, value: Any, source: int = 0) -> Any:
        return self.ranks.swap(self.rank, value)[source]


def of_three(found: Callable[[int], Blueprint], numbers: tuple[int, int, int] = (0, 1, 2)) -> list[Any]:
    """Each rank's plan, or error; each rank has another number among all."""

    def plan(communicator: Any) -> Plan:
        own = found(communicator.rank)
        return Planner(own, communicator, numbers[communicator.rank]).plan(Mode.TRAIN, own.trace)

    return Ranks().each(plan)


def test_a_plan_of_one_rank_is_the_pure_one() -> None:
    found = decided(device_memory="8MiB", offload_parameters="host")
    made = Planner(found, SoloCommunicator())
    assert made.plan(Mode.TRAIN, found.trace) == make_plan(found, Mode.TRAIN, found.trace)
    assert made.replan(Mode.TRAIN, found.trace) == (make_plan(found, Mode.TRAIN, found.trace), found.trace)


def test_a_plan_that_does_not_fit_is_told_with_what_has_the_pages() -> None:
    found = decided(device_memory="8MiB", offload_parameters="host")
    narrow = dataclasses.replace(found, placement=dataclasses.replace(found.placement, gather_bytes=0))
    made = Planner(narrow, SoloCommunicator())
    with pytest.raises(CapacityError, match=r"raise device_memory \(the device tier is for gathered units .*\)$"):
        made.plan(Mode.TRAIN, found.trace)
    assert made.replan(Mode.TRAIN, found.trace) is None


def test_ranks_that_agree_have_their_plan() -> None:
    found = decided(**ON_HOST)
    assert of_three(lambda rank: found) == [make_plan(found, Mode.TRAIN, found.trace)] * 3


def test_the_first_rank_that_plans_otherwise_is_named_with_what_it_plans() -> None:
    alike, other = decided(**ON_HOST), decided(**{**ON_HOST, "offload_parameters": "device"})
    errors = of_three(lambda rank: alike if rank == 0 else other, numbers=(4, 5, 6))
    first = make_plan(other, Mode.TRAIN, other.trace), make_plan(alike, Mode.TRAIN, alike.trace)
    assert first[0] != first[1]
    assert {str(error) for error in errors} == {str(errors[0])}
    assert all(isinstance(error, RankError) for error in errors)
    assert re.match(
        r"rank 5 has \w+ of \S+ \(\w+\) at tick 0, to frames \d+, "
        r"where rank 4 has \w+ of \S+ \(\w+\) at tick 0, to frames \d+; their",
        str(errors[0]),
    )


def test_plans_are_for_what_the_first_rank_has_traced() -> None:
    found = decided(**ON_HOST)
    half = len(found.trace.ticks) // 2
    other = Trace((*found.trace.ticks[:half], *found.trace.ticks[half:][::-1]))
    plans = Ranks().each(
        lambda each: Planner(found, each, each.rank).replan(Mode.TRAIN, found.trace if each.rank == 0 else other)
    )
    assert plans == [(make_plan(found, Mode.TRAIN, found.trace), found.trace)] * 3


def test_layouts_that_differ_are_refused_on_all_ranks() -> None:
    layouts = [decided(Net(2 + (rank == 2)), **ON_HOST).layout for rank in range(3)]
    errors = Ranks().each(lambda each: check_layout(layouts[each.rank], each))
    assert all(isinstance(error, RankError) for error in errors)
    (text,) = {str(error) for error in errors}
    assert text.startswith(
        "rank 2 has blocks.2.weight of shape (3, 16384), float32, trained by optimizer 0, at element 0 of flat 3, "
        "where rank 0 has nothing more; their collectives would deadlock, so nothing is trained; build the same model "
        "on all ranks"
    )
    assert Ranks().each(lambda each: check_layout(layouts[0], each)) == [None] * 3


def test_a_plan_that_does_not_simulate_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    """The scheduler's faults are found by code that it shares nothing with."""
    found = decided(device_memory="8MiB", offload_parameters="host")
    right = make_plan(found, Mode.TRAIN, found.trace)
    assert right.tasks[0].operation is Operation.FETCH
    wrong = Plan(right.tasks[1:], right.tick_count)
    monkeypatch.setattr(planner, "schedule", lambda *_: wrong)
    with pytest.raises(InternalError):
        make_plan(found, Mode.TRAIN, found.trace)
