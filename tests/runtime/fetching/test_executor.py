"""The executor on pages of RAM: it follows a plan, fetches on use where there is none, and gives up what nobody leases.

Four units of a page each, behind a root without parameters. What moved is written down by the stores
(`SequenceParts.logged`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from small_parts import Model, Parts, parts

from lightning_ptm.comm import NeededCollective
from lightning_ptm.errors import CapacityError, UsageError
from lightning_ptm.events import Event, EventKind, Events
from lightning_ptm.memory.backend import CpuBackend
from lightning_ptm.planning.plan import Plan, Task
from lightning_ptm.planning.trace import Tick, Trace
from lightning_ptm.runtime.fetching import executor as executor_module
from lightning_ptm.runtime.fetching.executor import ComputeTiming, Executor, GuardPolicy, PlanSelection
from lightning_ptm.runtime.fetching.tracer import Tracer
from lightning_ptm.runtime.units.store import FlatStore
from lightning_ptm.terms import Kind, Mode, Operation, Phase, Tier

F, B = Phase.FORWARD, Phase.BACKWARD

TRAIN, FORWARD = Mode.TRAIN, Mode.FORWARD


class Run:
    """An executor over some units. What it asks of others is answered from fields."""

    def __init__(self, made: Parts, by_need: tuple[int, ...] = ()) -> None:
        self.parts = made
        self.events = Events()
        self.updating: set[int] = set()
        self.finished: list[int] = []
        self.between_steps: list[int] = []
        """Units that somebody read while neither a step nor a backward pass was in progress."""
        self.reclaimed: list[bool] = []
        self.leaving: list[Any] = []
        """Gradients on the device, which `reclaim` gives back one by one."""
        self.traced: list[tuple[Mode, Trace]] = []
        self.made: Plan | None = None
        self.agreed: list[NeededCollective] = []
        agreement: Any = self if made.communicator.world_size > 1 else None
        tracer = Tracer(made.units, lambda: 0, CpuBackend())
        self.executor = Executor(
            made.stores,
            tracer,
            agreement,
            self.updating.__contains__,
            self.finish,
            self.finish_between_steps,
            self.replan,
            made.read,
            self.reclaim,
            self.events,
            lambda: (0, 0, 0),
            by_need,
        )

    def request(self, request: NeededCollective) -> None:
        assert self.executor.refcounts.used(request.unit)  # its pages are not given up while other ranks come
        self.agreed.append(request)

    def finish(self, unit: int) -> None:
        self.finished.append(unit)
        self.updating.discard(unit)

    def finish_between_steps(self, unit: int) -> None:
        self.between_steps.append(unit)
        self.updating.discard(unit)

    def replan(self, mode: Mode, trace: Trace) -> tuple[Plan, Trace] | None:
        self.traced.append((mode, trace))
        return None if self.made is None else (self.made, trace)

    def reclaim(self, wait: bool) -> bool:
        self.reclaimed.append(wait)
        if wait and self.leaving:
            self.parts.allocator.release(self.leaving.pop())
            return True
        return False

    def forward(self, *units: int) -> list[list[str]]:
        """Calls of units, one behind the other; what moved at each, and a look at the values of each."""
        return [self.call(unit) for unit in units]

    def call(self, unit: int, phase: Phase = F) -> list[str]:
        self.executor.enter(unit, phase)
        for flat in self.parts.stores[unit].flats:
            assert torch.equal(flat.full()[: flat.layout.shard_numel], self.parts.values[flat.layout.index])
        if phase is F:
            self.executor.leave(unit)
        else:
            self.executor.leave_backward(unit)
        return self.parts.logged()


@contextmanager
def run(count: int = 3, *, by_need: tuple[int, ...] = (), double: bool = False, **settings: Any) -> Iterator[Run]:
    with parts(Model(count, double), world_size=1 + double, **settings) as made:
        yield Run(made, by_need)


def plan(text: str) -> Plan:
    """`fetch 1 | release 1, fetch 2 |`: tasks by trigger; the last trigger is behind the last tick."""
    triggers = [[task.split() for task in each.split(",") if task.strip()] for each in text.split("|")]
    tasks = [
        Task(Operation(word), int(unit), Kind(*kind or ["full"]), trigger)
        for trigger, each in enumerate(triggers)
        for word, unit, *kind in each
    ]
    return Plan(tuple(tasks), len(triggers) - 1)


def trace(*ticks: tuple[int, Phase]) -> Trace:
    return Trace(tuple(Tick(unit, phase, tuple(sorted({0, unit}))) for unit, phase in ticks))


def forwards(*units: int) -> Trace:
    return trace(*((unit, F) for unit in units))


AHEAD = "fetch 1 | fetch 2 | release 1, fetch 3 | release 2 | release 3"

"""Plan of a forward of the root and three units, of which two are on the device at once."""


# -- a plan ---------------------------------------------------------------------------------------------------------------


def test_a_plan_is_followed_tick_by_tick() -> None:
    with run(device_pages=2) as it:
        it.executor.plans.adopt(TRAIN, plan(AHEAD), forwards(0, 1, 2, 3))
        for _ in range(2):
            it.executor.begin(TRAIN, trace=False)
            moved = it.forward(0, 1, 2, 3)
            assert moved == [["fetch 1"], ["fetch 2"], ["release 1", "fetch 3"], ["release 2"]]
            it.executor.end()
            assert it.parts.logged() == ["release 3"] and it.parts.live == []
        uses = it.executor.fetching.lookups
        assert (uses.kept, uses.ahead, uses.late, it.executor.fetching.misses) == (0, 6, 0, 0)


def test_a_plan_of_several_ranks_fetches_shards_and_agrees_on_gathers() -> None:
    steps = "fetch 1 parameter, gather 1 | fetch 2 parameter | release 1, evict 1, gather 2 | release 2, evict 2"
    with run(2, double=True, device_pages=6) as it:
        it.executor.plans.adopt(TRAIN, plan(steps), forwards(0, 1, 2))
        it.executor.begin(TRAIN, trace=False)
        assert it.forward(0, 1, 2) == [["fetch 1"], [], ["release 1", "evict 1", "fetch 2"]]
        it.executor.end()
        assert it.parts.device_pages_free == 6
        assert it.agreed == [NeededCollective(Operation.GATHER, 1), NeededCollective(Operation.GATHER, 2)]  # I2
        assert it.parts.communicator.issued == ["gather 0", "gather 1"]


def test_another_order_is_slower_and_never_wrong() -> None:
    with run(device_pages=2) as it:
        it.executor.plans.adopt(TRAIN, plan(AHEAD), forwards(0, 1, 2, 3))
        it.executor.begin(TRAIN, trace=False)
        assert it.forward(0, 2, 1, 3, 1)[1:] == [["fetch 2"], [], ["release 2", "fetch 3"], []]
        it.executor.end()
        assert it.executor.fetching.lookups.late == 2 and it.executor.fetching.misses == 2
        it.executor.begin(TRAIN, trace=False)  # the next one may follow it again
        it.parts.logged()
        it.executor.release_all()
        it.parts.logged()
        assert it.forward(0, 1, 2) == [["fetch 1"], ["fetch 2"], ["release 1", "fetch 3"]]


def test_a_plan_that_was_left_is_not_taken_up_again() -> None:
    with run(device_pages=2) as it:
        it.executor.plans.adopt(TRAIN, plan(AHEAD), forwards(0, 1, 2, 3))
        it.executor.begin(TRAIN, trace=False)
        assert it.forward(0, 2, 2, 3)[1:] == [["fetch 2"], [], ["release 2", "fetch 3"]]


def test_what_is_leased_is_not_released_by_a_plan() -> None:
    with run(device_pages=3) as it:
        it.executor.plans.adopt(TRAIN, plan(AHEAD), forwards(0, 1, 2, 3))
        it.executor.begin(TRAIN, trace=False)
        it.forward(0)
        it.executor.use(1)
        assert it.forward(1, 2, 3) == [["fetch 2"], ["fetch 3"], ["release 2"]]
        assert it.parts.live == [1, 3]
        it.executor.leave(1)
        it.executor.end()


def test_a_fetch_without_room_is_left_to_its_use() -> None:
    with run(device_pages=1) as it:
        it.executor.plans.adopt(TRAIN, plan("fetch 1, fetch 2 | | release 1 |"), forwards(0, 1, 2))
        it.executor.begin(TRAIN, trace=False)
        assert it.forward(0, 1, 2) == [["fetch 1"], [], ["release 1", "fetch 2"]]
        assert it.executor.fetching.misses == 2  # in vain, and late


def test_a_forward_plan_begins_again_behind_the_root() -> None:
    with run(2, device_pages=2) as it:
        it.executor.plans.adopt(FORWARD, plan("fetch 1 | fetch 2 | release 1 | release 2"), forwards(0, 1, 2))
        it.executor.begin(FORWARD, trace=False)
        it.executor.enter(0, F)  # stays for all passes
        assert it.parts.logged() == ["fetch 1"]
        one_pass = [["release 2", "fetch 1", "fetch 2"], ["release 1"]]
        assert it.forward(1, 2, 1, 2, 1, 2) == [["fetch 2"], ["release 1"], *one_pass, *one_pass]
        assert not it.executor.wants_trace(FORWARD)
        it.executor.end()
        assert it.executor.fetching.lookups.late == 0


def test_a_training_plan_does_not_begin_again() -> None:
    with run(2, device_pages=2) as it:
        it.executor.plans.adopt(TRAIN, plan("fetch 1 | fetch 2 | release 1 | release 2"), forwards(0, 1, 2))
        it.executor.begin(TRAIN, trace=False)
        assert it.forward(0, 1, 2, 1, 2)[3:] == [["fetch 1"], []]
        assert it.executor.wants_trace(TRAIN)


# -- without one ----------------------------------------------------------------------------------------------------------


def test_units_are_fetched_on_use_and_given_up_farthest_use_first() -> None:
    ticks = trace((0, F), (1, F), (2, F), (3, F), (3, B), (2, B), (1, B))
    with run(device_pages=2) as it:
        it.executor.plans.adopt(TRAIN, plan("|||||||"), ticks)
        it.executor.begin(TRAIN, trace=False)
        # At the third, the first is needed last; in the backward the third, in the next iteration.
        assert it.forward(0, 1, 2, 3) == [[], ["fetch 1"], ["fetch 2"], ["release 1", "fetch 3"]]
        assert it.call(3, B) == [] == it.call(2, B)
        assert it.call(1, B) == ["release 3", "fetch 1"]
        uses = it.executor.fetching.lookups
        assert (uses.kept, uses.ahead, uses.late) == (2, 0, 4)


def test_gradients_that_leave_give_way_before_units() -> None:
    with run(device_pages=2) as it:
        it.executor.begin(TRAIN, trace=False)
        it.forward(1)
        it.leaving.append(it.parts.paged(torch.ones(8), Tier.DEVICE))
        assert it.forward(2) == [["fetch 2"]]
        assert it.leaving == [] and it.parts.live == [1, 2]
        assert it.forward(3) == [["release 2", "fetch 3"]]


def test_spare_shards_give_way_where_no_unit_can() -> None:
    with run(2, double=True, device_pages=3) as it:
        it.executor.begin(TRAIN, trace=False)
        it.parts.stores[1].fetch_shards()
        assert it.forward(2) == [["evict 1", "fetch 2"]]


def reads(executor: Executor, unit: int) -> None:
    executor.use(unit)
    executor.require(unit)


LEASES: dict[str, tuple[Callable[[Executor], None], Callable[[Executor], None]]] = {
    "a call": (lambda it: it.enter(1, F), lambda it: it.leave(1)),
    "a backward": (lambda it: it.enter(1, B), lambda it: it.leave_backward(1)),
    "the end of a backward": (lambda it: it.enter(1, B), lambda it: it.end_backward(1)),
    "one who reads": (lambda it: reads(it, 1), lambda it: it.leave(1)),
    "one who holds": (lambda it: it.hold(1), lambda it: it.keep_held(1, held=False)),
    "one who reads in place": (lambda it: it.read_in_place(1), lambda it: it.end()),
    "the end of a held backward": (lambda it: it.hold(1), lambda it: it.end_backward(1)),
    "the iteration": (lambda it: it.hold(1), lambda it: it.end()),
    "one that failed": (lambda it: it.enter(1, B), lambda it: it.abandon()),
}


@pytest.mark.parametrize("lease", LEASES)
def test_a_leased_unit_is_not_given_up(lease: str) -> None:
    take, give_back = LEASES[lease]
    with run(2, device_pages=1) as it:
        it.executor.begin(TRAIN, trace=False)
        take(it.executor)
        with pytest.raises(CapacityError, match=r"parts\.1 needs 64 KiB gathered .* raise device_memory"):
            it.executor.enter(2, F)
        assert it.parts.live == [1]
        it.executor.leave(2)
        it.executor.release_all()
        assert it.parts.live == [1]
        give_back(it.executor)
        it.parts.logged()
        assert it.forward(2) == [["release 1", "fetch 2"]]


def test_pages_are_read_in_place_until_the_backward_or_the_pass_ends() -> None:
    with run() as it:
        it.executor.begin(TRAIN, trace=False)
        first, second = it.parts.stores[1:3]
        it.executor.enter(1, B)
        it.executor.read_in_place(1)
        it.executor.read_in_place(2)
        assert first.read_in_place and second.read_in_place and it.executor.refcounts.held(2)
        it.executor.end_backward(1)
        assert not first.read_in_place and second.read_in_place
        it.executor.pass_ended()
        assert not second.read_in_place


def test_a_unit_is_leased_as_often_as_it_is_called() -> None:
    with run() as it:
        it.executor.begin(TRAIN, trace=False)
        it.executor.enter(1, F)
        it.executor.enter(1, F)
        it.executor.leave(1)
        it.executor.release_all()
        assert it.executor.refcounts.used(1) and it.parts.live == [1]
        it.executor.leave(1)
        it.executor.leave_backward(1)  # it has none
        it.executor.release_all()
        assert not it.executor.refcounts.used(1) and it.parts.live == []


# -- updates --------------------------------------------------------------------------------------------------------------


def test_a_planned_fetch_waits_for_the_units_update() -> None:
    with run() as it:
        it.executor.plans.adopt(TRAIN, plan("fetch 1, fetch 2, fetch 3 | | |"), forwards(0, 1, 2))
        it.executor.begin(TRAIN, trace=False)
        it.executor.guard_policy.computation_begins(F)
        it.updating.update((1, 2, 3))
        assert it.forward(0) == [[]]
        it.updating.discard(2)
        it.executor.fetching.pump()
        assert it.parts.logged() == ["fetch 2"]
        assert it.forward(1) == [["fetch 1"]] and it.finished == [0, 1]
        it.executor.end()
        it.updating.discard(3)
        it.executor.fetching.pump()  # of an iteration that is over
        assert it.parts.logged() == []


def test_a_unit_is_read_when_its_update_is_done() -> None:
    with run() as it:
        it.executor.begin(TRAIN, trace=False)
        it.executor.guard_policy.computation_begins(F)
        it.forward(1)
        it.updating.add(1)
        it.executor.enter(1, F)  # live, and yet
        assert it.finished == [1, 1] and not it.updating


def test_between_two_steps_a_unit_has_had_every_update_when_it_is_read() -> None:
    with run() as it:
        it.executor.begin(TRAIN, trace=False)
        it.executor.guard_policy.computation_begins(F)
        it.executor.hold(0)
        it.executor.read_held(0)
        assert it.finished == [0], "once in a step"
        it.executor.guard_policy.computation_ends(F)
        it.forward(1)
        it.executor.read_held(0)
        it.executor.read_held(0)
        assert it.finished == [0] and it.between_steps == [1, 0, 0]


# -- traces ---------------------------------------------------------------------------------------------------------------


def ticks(found: Trace | None) -> list[tuple[int, Phase, tuple[int, ...]]]:
    assert found is not None
    return [(tick.unit, tick.phase, tick.live) for tick in found.ticks]


def test_a_traced_iteration_is_planned_anew() -> None:
    with run(2) as it:
        it.made = plan("fetch 1 | | | |")
        assert it.executor.wants_trace(TRAIN) and it.executor.plans.trace(TRAIN) is None
        it.executor.begin(TRAIN, trace=True)
        it.executor.enter(0, F)
        it.forward(1)
        it.executor.hold(2)
        it.executor.guard_policy.computation_begins(B)
        it.call(1, B)
        it.executor.guard_policy.computation_ends(B)
        it.executor.guard_policy.computation_ends(B)  # one that never began
        it.executor.leave(0)
        it.forward(2)
        it.executor.end()
        seen = it.executor.plans.trace(TRAIN)
        assert ticks(seen) == [(0, F, (0,)), (1, F, (0, 1)), (1, B, (0, 1, 2)), (2, F, (2,))]
        assert seen is not None and [tick.passes for tick in seen.ticks] == [0, 0, 0, 1]
        assert it.traced == [(TRAIN, seen)] and it.executor.plans.planned(TRAIN) == (it.made, seen)
        assert it.executor.plans.remade == 1 and not it.executor.wants_trace(TRAIN) and it.executor.wants_trace(FORWARD)


def test_a_trace_that_fits_no_plan_leaves_the_old_one() -> None:
    with run(1) as it:
        it.executor.plans.adopt(TRAIN, plan("|"), forwards(1))
        it.executor.begin(TRAIN, trace=True)
        it.forward(0, 1)
        it.executor.end()
        assert len(it.traced) == 1 and it.executor.plans.remade == 0
        assert it.executor.plans.planned(TRAIN) == (plan("|"), forwards(1))


@pytest.mark.parametrize(("second", "wanted"), [((0, 1, 2), False), ((0, 2, 1), True), ((0, 1), True)])
def test_an_iteration_is_traced_again_once_the_order_has_changed(second: tuple[int, ...], wanted: bool) -> None:
    with run(2) as it:
        it.executor.begin(TRAIN, trace=True)
        it.forward(0, 1, 2)
        it.executor.begin(TRAIN, trace=False)
        it.forward(*second)
        assert it.executor.wants_trace(TRAIN) == wanted
        it.executor.end()
        assert it.executor.wants_trace(TRAIN) == wanted
        assert (it.executor.plans.trace(TRAIN) is None) == wanted


def test_a_rank_alone_plans_when_all_are_together() -> None:
    with run(2) as it:
        it.executor.begin(TRAIN, trace=True, all_ranks=False)
        it.forward(0, 1)
        it.executor.begin(TRAIN, trace=False, all_ranks=False)
        it.executor.end(all_ranks=False)
        assert it.traced == []
        it.executor.begin(FORWARD, trace=False)
        assert [(mode, [tick.unit for tick in each.ticks]) for mode, each in it.traced] == [(TRAIN, [0, 1])]


def test_of_forward_passes_that_repeat_the_first_is_traced() -> None:
    with run(2) as it:
        it.executor.begin(FORWARD, trace=True)
        it.executor.enter(0, F)
        it.forward(1, 2, 1, 2)
        it.executor.leave(0)
        it.executor.begin(FORWARD, trace=False)
        assert ticks(it.executor.plans.trace(FORWARD)) == [(0, F, (0,)), (1, F, (0, 1)), (2, F, (0, 2))]
        it.forward(0, 1, 2, 1, 2, 1, 2)
        assert not it.executor.wants_trace(FORWARD)
        it.forward(1)
        assert it.executor.wants_trace(FORWARD)  # cut short


def test_a_failed_iteration_is_forgotten() -> None:
    with run(2) as it:
        it.executor.begin(TRAIN, trace=True)
        it.executor.guard_policy.computation_begins(B)
        it.forward(0, 1)
        it.executor.abandon()
        assert it.executor.mode is None and not it.executor.guard_policy.computing
        it.executor.begin(TRAIN, trace=False)
        assert it.traced == [] and it.executor.plans.trace(TRAIN) is None and not it.executor.called(1)


# -- units that no plan foresees --------------------------------------------------------------------------------------------


def test_expected_units_come_one_ahead_and_make_no_ticks() -> None:
    with run(4, by_need=(2, 3, 4)) as it:
        it.executor.plans.adopt(TRAIN, plan("|fetch 1||"), forwards(0, 1, 1))
        it.executor.begin(TRAIN, trace=True)
        it.forward(0, 1)
        it.executor.fetching.expect([2, 4, 3])
        assert it.parts.logged() == ["fetch 2"]
        assert it.forward(2, 4, 3) == [["fetch 4"], ["fetch 3"], []]
        assert it.executor.fetching.lookups.ahead == 4 and it.executor.fetching.lookups.late == 0
        it.forward(1)
        assert not it.executor.wants_trace(TRAIN)  # the plan was followed all along
        it.executor.end()
        assert ticks(it.executor.plans.trace(TRAIN)) == [(0, F, (0,)), (1, F, (1,)), (1, F, (1,))]


def test_expected_units_that_are_left_out_are_passed_over() -> None:
    with run(4, by_need=(2, 3, 4)) as it:
        it.executor.begin(TRAIN, trace=False)
        it.executor.fetching.expect([2, 3, 4])
        it.parts.logged()
        assert it.forward(3) == [["fetch 3", "fetch 4"]]
        it.executor.fetching.expect([2, 4])
        it.parts.logged()
        it.executor.end()
        it.executor.release_all()
        it.parts.logged()
        assert it.forward(2) == [["fetch 2"]]  # nothing is expected any more


def test_units_by_need_are_given_up_for_a_planned_fetch_unless_expected() -> None:
    with run(3, by_need=(2, 3), device_pages=2) as it:
        it.executor.plans.adopt(TRAIN, plan("| | fetch 1 | |"), forwards(0, 0, 0, 0))
        it.executor.begin(TRAIN, trace=False)
        it.forward(0, 2, 3)
        it.executor.fetching.expect([2])
        assert it.forward(0, 0) == [[], ["release 3", "fetch 1"]]
        assert it.parts.live == [2] and it.executor.fetching.misses == 2


def test_a_unit_by_need_that_computes_is_not_given_up() -> None:
    with run(2, by_need=(2,), device_pages=1) as it:
        it.executor.plans.adopt(TRAIN, plan("| fetch 1 |"), forwards(0, 0))
        it.executor.begin(TRAIN, trace=False)
        it.forward(0)
        it.executor.enter(2, F)
        it.parts.logged()
        assert it.forward(0) == [[]]
        assert it.parts.live == [2]


# -- several ranks --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("pages", "by_need", "expected", "kept"),
    [(6, (), (), True), (1, (), (), False), (6, (1,), (), False), (6, (1,), (2, 1), True)],
    ids=["room", "no room", "by need", "by need and expected"],
)
def test_taking_part_keeps_what_there_is_room_for(
    pages: int, by_need: tuple[int, ...], expected: tuple[int, ...], kept: bool
) -> None:
    with run(2, double=True, device_pages=pages, by_need=by_need) as it:
        it.executor.begin(TRAIN, trace=False)
        it.executor.fetching.expect(expected)
        it.updating.add(1)
        it.parts.communicator.issued.clear()
        it.executor.take_part(1)
        assert it.parts.communicator.issued == ["gather 0"]
        assert (1 in it.finished, it.parts.stores[1].fetched) == (True, kept)
        assert NeededCollective(Operation.GATHER, 1) not in it.agreed  # the others have, already
        if kept:
            it.executor.require(1)
            assert it.parts.communicator.issued == ["gather 0"]


# -- parameters that close
# ----------------------------------------------------------------------------------


def is_open(it: Run, unit: int) -> bool:
    try:
        it.parts.module.parts[unit - 1].weight.sum()
    except UsageError:
        return False
    return True


def test_parameters_are_open_while_something_computes_with_them() -> None:
    with run(2, home=Tier.DEVICE, closes=True) as it:
        assert not is_open(it, 1)
        it.executor.begin(TRAIN, trace=False)
        it.executor.enter(1, F)
        assert is_open(it, 1) and not is_open(it, 2)
        it.executor.leave(1)
        assert not is_open(it, 1)
        it.executor.guard_policy.computation_begins(F)
        it.executor.guard_policy.computation_begins(B)
        assert is_open(it, 1) and is_open(it, 2)
        it.executor.use(2)
        it.executor.guard_policy.computation_ends(B)
        assert is_open(it, 1)
        it.executor.guard_policy.computation_ends(F)
        assert not is_open(it, 1) and is_open(it, 2)
        it.executor.leave(2)
        assert not is_open(it, 2)


def test_late_parameters_open_when_somebody_has_waited_for_their_update() -> None:
    with run(2, home=Tier.DEVICE, closes=True, late=(1,)) as it:
        it.executor.begin(TRAIN, trace=False)
        it.executor.guard_policy.computation_begins(F)
        assert not is_open(it, 1) and is_open(it, 2)
        it.executor.require(1)
        assert is_open(it, 1)
        it.executor.guard_policy.computation_begins(B)
        it.executor.guard_policy.updates_begin()
        assert not is_open(it, 1) and is_open(it, 2)
        it.executor.guard_policy.computation_begins(F)
        assert not is_open(it, 1)


def test_a_failed_iteration_leaves_nothing_open() -> None:
    with run(2, home=Tier.DEVICE, closes=True) as it:
        it.executor.begin(TRAIN, trace=False)
        it.executor.guard_policy.computation_begins(F)
        it.executor.enter(1, F)
        it.executor.abandon()
        assert not is_open(it, 1) and not is_open(it, 2)


# -- events ---------------------------------------------------------------------------------------------------------------


def test_ticks_are_told_when_they_are_over() -> None:
    with run(2) as it:
        told: list[Event] = []
        it.executor.begin(TRAIN, trace=False)
        it.forward(0)
        with it.events.subscribed(told.append):
            it.executor.enter(1, F)
            it.executor.leave(1)
            assert [event for event in told if event.kind is EventKind.TICK] == []
            it.executor.enter(2, B)
            it.executor.compute_timing.end_tick()
            it.executor.compute_timing.end_tick()
        assert [(e.track, e.name, e.index) for e in told if e.kind is EventKind.TICK] == [
            ("train", "parts.0 forward", 1),
            ("train", "parts.1 backward", 2),
        ]


def test_compute_time_that_was_lost_is_told_by_cause() -> None:
    with run(2) as it:
        it.executor.begin(TRAIN, trace=False)
        it.forward(1)
        fetched_s = it.executor.compute_timing.stall_s["fetch"]
        assert fetched_s > 0
        it.forward(1)
        assert it.executor.compute_timing.stall_s["fetch"] == fetched_s


F, B = Phase.FORWARD, Phase.BACKWARD


class Driven:
    def __init__(self) -> None:
        self.events = Events()
        self.told: list[Event] = []
        self.bytes = (0, 0)
        self.asked = 0
        self.it = ComputeTiming(self.events, self.used_bytes)

    def used_bytes(self) -> tuple[int, ...]:
        self.asked += 1
        return self.bytes


def test_a_tick_is_told_once_when_it_is_over_with_the_most_bytes_at_its_ends() -> None:
    its = Driven()
    with its.events.subscribed(its.told.append):
        its.bytes = (5, 1)
        its.it.begin_tick("block", F, 3, Mode.TRAIN)
        assert its.told == []
        its.bytes = (2, 4)
        its.it.end_tick()
        its.it.end_tick()
        its.it.begin_tick("", B, 4, Mode.FORWARD)
        its.it.end_tick()
    told = [(each.kind, each.track, each.name, each.index, each.tier_bytes) for each in its.told]
    assert told == [
        (EventKind.TICK, "train", "block forward", 3, (5, 4)),
        (EventKind.TICK, "forward", "root backward", 4, (2, 4)),
    ]
    assert its.told[0].begin_s <= its.told[0].end_s <= its.told[1].begin_s


def test_outside_of_an_iteration_and_where_nobody_listens_nothing_is_measured() -> None:
    its = Driven()
    its.it.begin_tick("block", F, 0, Mode.TRAIN)
    its.it.end_tick()
    with its.events.subscribed(its.told.append):
        its.it.begin_tick("block", F, 0, None)
        its.it.end_tick()
    assert its.told == [] and its.asked == 0


def test_a_tick_that_failed_is_not_told() -> None:
    its = Driven()
    with its.events.subscribed(its.told.append):
        its.it.begin_tick("block", F, 0, Mode.TRAIN)
        its.it.drop_tick()
        its.it.end_tick()
    assert its.told == []


def test_lost_seconds_are_added_up_by_cause_and_told_where_they_are_a_stall() -> None:
    its = Driven()
    with its.events.subscribed(its.told.append):
        its.it.stalled("fetch", "block", 1.0, 3.0)
        its.it.stalled("update", "", 3.0, 3.5)
        its.it.stalled("fetch", "block", 4.0, 4.000001)
    its.it.stalled("fetch", "block", 5.0, 6.0)
    assert its.it.stall_s == {"fetch": 2.0 + (4.000001 - 4.0) + 1.0, "update": 0.5}
    assert [(each.kind, each.track, each.name, each.begin_s, each.end_s) for each in its.told] == [
        (EventKind.STALL, "fetch", "block", 1.0, 3.0),
        (EventKind.STALL, "update", "root", 3.0, 3.5),
    ]


F, B = Phase.FORWARD, Phase.BACKWARD


class DrivenGuards:
    def __init__(self, made: Any) -> None:
        self.made = made
        self.in_use: set[int] = set()
        self.it = GuardPolicy(made.stores, self.in_use.__contains__)

    def is_open(self) -> list[bool]:
        """Whether the parameters of each unit can be read."""
        return [self._can_be_read(part) for part in self.made.module.parts]

    @staticmethod
    def _can_be_read(part: Any) -> bool:
        try:
            part.weight.sum()
        except UsageError:
            return False
        return True


@contextmanager
def driven(**settings: Any) -> Iterator[DrivenGuards]:
    with parts(Model(2), home=Tier.DEVICE, closes=True, **settings) as made:
        for store in made.stores:
            store.close()
        yield DrivenGuards(made)


def test_parameters_are_open_from_the_first_computation_to_the_end_of_the_last() -> None:
    with driven() as its:
        assert its.is_open() == [False, False] and not its.it.computing
        its.it.computation_begins(F)
        its.it.computation_begins(B)
        its.it.computation_ends(B)
        assert its.is_open() == [True, True] and its.it.computing
        its.in_use.add(2)
        its.it.computation_ends(F)
        assert its.is_open() == [False, True] and not its.it.computing


def test_passes_that_are_over_are_counted_in_an_iteration() -> None:
    with driven() as its:
        for phase in (F, B):
            its.it.computation_begins(phase)
        for _ in range(2):  # the second never began
            its.it.computation_ends(B)
        its.it.computation_ends(F)
        assert its.it.passes == 1
        its.it.begin_iteration()
        assert its.it.passes == 0


def test_late_parameters_open_once_somebody_has_waited_for_their_update() -> None:
    with driven(late=(1,)) as its:
        its.it.waited(its.made.stores[1])
        assert its.is_open() == [False, False]  # nothing computes
        its.it.computation_begins(F)
        assert its.is_open() == [True, True]
        its.it.updates_begin()
        assert its.is_open() == [False, True] and its.it.waited_for == set()
        its.it.computation_begins(B)
        assert its.is_open() == [False, True]
        its.it.waited(its.made.stores[1])
        assert its.is_open() == [True, True] and its.it.waited_for == {1}
        its.in_use.add(1)
        its.it.updates_begin()
        assert its.is_open() == [True, True]
        its.it.begin_iteration()
        assert its.it.waited_for == set()


def test_a_failed_iteration_leaves_no_guard_open() -> None:
    with driven() as its:
        its.it.computation_begins(B)
        its.it.waited(its.made.stores[1])
        its.in_use.add(1)
        its.it.abandon()
        assert its.is_open() == [False, False] and not its.it.computing and its.it.waited_for == set()
        its.it.computation_ends(B)
        assert its.it.passes == 0


TRAIN, FORWARD = Mode.TRAIN, Mode.FORWARD


def planned_trace(*units: int) -> Trace:
    return Trace(tuple(Tick(unit, Phase.FORWARD, tuple(sorted({0, unit}))) for unit in units))


class Planner:
    def __init__(self) -> None:
        self.asked: list[tuple[Mode, Trace]] = []
        self.fits = True
        self.plans = PlanSelection(self.plan)

    def plan(self, mode: Mode, seen: Trace) -> tuple[Plan, Trace] | None:
        self.asked.append((mode, seen))
        return (Plan((), len(seen.ticks)), seen) if self.fits else None


def test_a_trace_is_planned_once_when_ranks_are_together() -> None:
    it = Planner()
    it.plans.add_trace(TRAIN, planned_trace(0, 1))
    it.plans.add_trace(TRAIN, planned_trace(0, 2))
    assert it.asked == [] and it.plans.planned(TRAIN) is None and it.plans.trace(TRAIN) == planned_trace(0, 2)
    it.plans.make()
    it.plans.make()
    assert it.asked == [(TRAIN, planned_trace(0, 1)), (TRAIN, planned_trace(0, 2))] and it.plans.remade == 2
    assert it.plans.planned(TRAIN) == (Plan((), 2), planned_trace(0, 2)) and it.plans.planned(FORWARD) is None


def test_what_fits_in_no_plan_leaves_the_old_one() -> None:
    it = Planner()
    it.plans.adopt(TRAIN, Plan((), 1), planned_trace(0))
    it.fits = False
    it.plans.add_trace(TRAIN, planned_trace(0, 1))
    it.plans.make()
    assert it.plans.planned(TRAIN) == (Plan((), 1), planned_trace(0)) and it.plans.remade == 0


def test_a_plan_is_left_to_the_first_iteration_that_needs_it() -> None:
    it = Planner()
    it.plans.plan_later(FORWARD, planned_trace(0, 1))
    it.plans.make(beginning=TRAIN)
    assert it.asked == [] and it.plans.planned(FORWARD) is None
    it.plans.make(beginning=FORWARD)
    it.plans.make(beginning=FORWARD)
    assert it.asked == [(FORWARD, planned_trace(0, 1))] and it.plans.remade == 0
    assert it.plans.planned(FORWARD) == (Plan((), 2), planned_trace(0, 1)) and it.plans.trace(FORWARD) is None


def test_of_equal_forward_passes_one_is_planned() -> None:
    it = Planner()
    for mode in (TRAIN, FORWARD):
        it.plans.add_trace(mode, planned_trace(0, 1, 2, 1, 2))
    assert it.plans.trace(TRAIN) == planned_trace(0, 1, 2, 1, 2) and it.plans.trace(FORWARD) == planned_trace(0, 1, 2)
    it.plans.make()
    assert it.asked[1] == (FORWARD, planned_trace(0, 1, 2))


def test_a_changed_order_forgets_the_trace_and_keeps_the_plan() -> None:
    it = Planner()
    it.plans.add_trace(TRAIN, planned_trace(0, 1))
    it.plans.make()
    it.plans.order_changed(TRAIN)
    it.plans.order_changed(TRAIN)
    assert it.plans.trace(TRAIN) is None and it.plans.planned(TRAIN) is not None


def test_a_wait_for_a_shard_is_one_for_parameters(monkeypatch: pytest.MonkeyPatch) -> None:
    """An all-gather that is prefetched at another unit's tick waits there until this rank's shard has come from disk."""
    now_s = [0.0]
    shard_tensor = FlatStore._shard_tensor

    def slow(flat: FlatStore) -> torch.Tensor:
        now_s[0] += 0.5
        return shard_tensor(flat)

    monkeypatch.setattr(executor_module, "perf_counter", lambda: now_s[0])
    monkeypatch.setattr(FlatStore, "_shard_tensor", slow)
    with run(double=True) as made:
        made.executor.plans.adopt(FORWARD, plan("fetch 1, fetch 2 | | | | "), trace((1, F), (2, F), (3, F)))
        made.executor.begin(FORWARD, trace=False)
        made.forward(1)
        assert made.executor.compute_timing.stall_s == {"fetch": 1.0, "update": 0.0}
        made.forward(2)
        assert made.executor.compute_timing.stall_s == {"fetch": 1.0, "update": 0.0}
