"""Carries a plan out: at each tick it issues the plan's tasks, waits for the unit that computes, and keeps the trace.

Owns the logical clock, the leases of units, and which of them hold device pages. It has no policy but one for when there is
no plan to follow (the order of units changed, or the plan left too little room): fetch on use, and give up the unit whose
next use lies farthest away (Belady). Never wrong, only slower; the next iteration is then planned anew from its trace.

I1: a unit is live while one of its calls is in progress, and not given up while anybody leases it.
I2: with several ranks every all-gather has been agreed on.
I3: all ranks trace, and so plan anew, in the same iterations: whoever calls `begin` has made them agree on `trace`, and
    tells whether they are `together`; a rank that goes on alone for some batches plans when they are.
I4: parameters that are not the precise ones are open while a step or a backward pass is in progress, or a call of their unit;
    those of a unit whose updates no step waits for once somebody has waited for it there (`require`).
I5: units in `by_need` (experts, which another batch may not need) are in no plan: they make no ticks, are fetched when
    somebody expects or calls them, and are the first to be given up.
"""

from __future__ import annotations

import dataclasses
import enum
from collections import deque
from collections.abc import Callable, Collection, Sequence
from functools import partial
from time import perf_counter
from typing import TYPE_CHECKING

from lightning_ptm.comm import Agreement, Request
from lightning_ptm.errors import CapacityError
from lightning_ptm.events import Event, EventKind, Events
from lightning_ptm.planning.leases import Leases
from lightning_ptm.planning.plan import Plan
from lightning_ptm.planning.trace import Trace, one_pass
from lightning_ptm.runtime.store import UnitStore
from lightning_ptm.runtime.tracer import Tracer
from lightning_ptm.terms import Kind, Operation, Phase

if TYPE_CHECKING:
    from torch import Tensor

    from lightning_ptm.memory import PagedTensor


_LEAST_STALL_S = 1e-5
"""Looking whether anything has to be waited for takes about this long; a shorter stall is none."""


class Mode(enum.Enum):
    """What kind of iteration runs; each has a plan of its own."""

    TRAIN = "train"
    FORWARD = "forward"


@dataclasses.dataclass(frozen=True, slots=True)
class _OpenTick:
    """A tick that somebody wants to hear of, when it is over."""

    track: str
    name: str
    began_s: float
    index: int
    tier_bytes: tuple[int, ...]


@dataclasses.dataclass(slots=True)
class Uses:
    """How often compute asked for a unit's parameters, by where it found them.

    Attributes:
        kept: on the device, since their last use or for good.
        ahead: there, or on their way, fetched before compute asked for them.
        late: elsewhere: their fetch began then.
    """

    kept: int = 0
    ahead: int = 0
    late: int = 0


class Executor:
    """The event loop of one rank, driven by hooks.

    Args:
        stores: by unit.
        tracer: records what happens.
        agreement: ranks agree on all-gathers through it; None on one rank.
        update_pending: whether a unit's update has not reached its compute parameters yet (after some progress).
        finish_update: blocks until it has.
        replan: makes a plan from a trace, and tells what trace the plan is for.
        read: brings a paged tensor to memory of its own.
        reclaim: gives back device pages of gradients that have left (or, with True, once they have); whether any came free.
        events: told of ticks and stalls.
        used_bytes: bytes of pages in use, by tier.
        by_need: units that a plan cannot foresee.
    """

    def __init__(
        self,
        stores: Sequence[UnitStore],
        tracer: Tracer,
        agreement: Agreement | None,
        update_pending: Callable[[int], bool],
        finish_update: Callable[[int], None],
        replan: Callable[[Mode, Trace], tuple[Plan, Trace] | None],
        read: Callable[[PagedTensor], Tensor],
        reclaim: Callable[[bool], bool],
        events: Events,
        used_bytes: Callable[[], tuple[int, ...]],
        by_need: Collection[int] = (),
    ) -> None:
        self._stores = stores
        self._leases = Leases(len(stores))
        self._tracer = tracer
        self._agreement = agreement
        self._update_pending = update_pending
        self._finish_update = finish_update
        self._replan = replan
        self._read = read
        self._reclaim = reclaim
        self._events = events
        self._used_bytes = used_bytes
        self._by_need = frozenset(by_need)
        # state
        self._mode: Mode | None = None
        self._tick = 0
        self._following = False
        self._repeating = False
        self._tracing = False
        self._passes = 0
        """Backward passes of the iteration in progress that are over."""
        self._plans: dict[Mode, tuple[Plan, Trace]] = {}
        self._traced: dict[Mode, Trace] = {}
        self._to_plan: list[tuple[Mode, Trace]] = []
        self._waiting: list[tuple[int, Callable[[], None]]] = []
        self._called: set[int] = set()
        self._computing: set[Phase] = set()
        self._waited_for: set[int] = set()
        """Units whose updates somebody has waited for in this iteration, since its last optimizer step."""
        self._closing = [store for store in stores if store.closes]
        self._expected: deque[int] = deque()
        self._open_tick: _OpenTick | None = None
        self.stall_s: dict[str, float] = {"fetch": 0.0, "update": 0.0}
        self.uses = Uses()
        self.fetch_misses = 0
        self.replans = 0

    @property
    def mode(self) -> Mode | None:
        return self._mode

    def adopt(self, mode: Mode, plan: Plan, trace: Trace) -> None:
        """From the next iteration of `mode` on, follow `plan`, which was made for `trace`."""
        self._plans[mode] = (plan, trace)

    def plan(self, mode: Mode) -> Plan | None:
        made = self._plans.get(mode)
        return made[0] if made else None

    def planned(self, mode: Mode) -> tuple[Plan, Trace] | None:
        """The plan that is followed, and the trace that it was made for."""
        return self._plans.get(mode)

    def trace(self, mode: Mode) -> Trace | None:
        """The newest complete trace of an iteration of `mode`, until one has not followed its plan."""
        return self._traced.get(mode)

    def wants_trace(self, mode: Mode) -> bool:
        """Whether the next iteration, one of `mode`, should be traced: until one has confirmed the plan that is followed,
        and after one that neither followed it nor was like the last one traced here (the plan is for the first rank's)."""
        if mode is self._mode:
            return not self._tracing and not self._followed and not self._repeated
        return mode not in self._traced

    @property
    def _followed(self) -> bool:
        """Whether the iteration in progress has gone through its plan, tick by tick, to the end."""
        made = None if self._mode is None else self._plans.get(self._mode)
        return self._following and made is not None and self._tick == made[0].tick_count

    @property
    def _repeated(self) -> bool:
        """Whether the iteration in progress has gone through the ticks of this rank's newest trace, to the end."""
        traced = None if self._mode is None else self._traced.get(self._mode)
        return self._repeating and traced is not None and self._tick == len(traced.ticks)

    def begin(self, mode: Mode, *, trace: bool, together: bool = True) -> None:
        """An iteration starts. The one before, if open, ends here."""
        if together:
            self._plan_anew()
        self.end(together=together)
        self._mode = mode
        self._tick = self._passes = 0
        self._following = mode in self._plans
        self._repeating = mode in self._traced
        self._tracing = trace
        self._called.clear()
        self._waited_for.clear()
        if self._tracing:
            self._tracer.start()

    def end(self, *, together: bool = True) -> None:
        """The iteration is over: run the plan's last tasks and learn from the trace."""
        if self._mode is None:
            return
        self.rest()
        followed, repeated = self._followed, self._repeated
        mode, self._mode = self._mode, None
        self._waiting = []
        self._expected.clear()
        if followed:
            self._perform(self._plans[mode][0], self._tick)
        self._leases.let_go_all()
        if self._tracing and self._tick:
            trace = self._tracer.finish()
            if mode is Mode.FORWARD:
                trace = one_pass(trace)
            self._traced[mode] = trace
            self._to_plan.append((mode, trace))
            if together:
                self._plan_anew()
        elif not followed and not repeated:
            self._traced.pop(mode, None)  # the order has changed: trace the next iteration again

    def _plan_anew(self) -> None:
        """Collective: makes the plans for what was traced."""
        to_plan, self._to_plan = self._to_plan, []
        for mode, trace in to_plan:
            made = self._replan(mode, trace)
            if made is not None:
                self._plans[mode] = made
                self.replans += 1

    def abandon(self) -> None:
        """The iteration failed: forget it, and let go of what its calls held."""
        self._open_tick = None
        self._mode = None
        self._waiting = []
        self._expected.clear()
        self._computing.clear()
        self._waited_for.clear()
        self._leases.forget()
        for store in self._stores:
            store.close()

    def computation_begins(self, phase: Phase) -> None:
        """Of a step, or of a backward pass: its code may read parameters that are there (I4)."""
        self._computing.add(phase)
        for store in self._closing:
            if not store.late or store.unit.index in self._waited_for:
                store.open()

    def updates_begin(self) -> None:
        """Of units, which an optimizer's step does not wait for: these have to be called, or held, to be read again."""
        self._waited_for.clear()
        for store in self._closing:
            if store.late and not self.used(store.unit.index):
                store.close()

    def computation_ends(self, phase: Phase) -> None:
        self._passes += phase is Phase.BACKWARD and phase in self._computing
        self._computing.discard(phase)
        for store in self._closing if not self._computing else ():
            if not self.used(store.unit.index):
                store.close()

    @property
    def computing(self) -> bool:
        """Whether a step or a backward pass is in progress."""
        return bool(self._computing)

    def enter(self, unit: int, phase: Phase) -> None:
        """Tick: `unit` starts to compute. Returns when its parameters are bound; `leave` must follow, or in a backward
        `leave_backward`."""
        self.rest()
        self._go_round(unit, phase)
        self._reclaim(False)  # as the plan has it: gradients have left before the tick's fetches
        store = self._stores[unit]
        if phase is Phase.FORWARD:
            self.use(unit)
            self._called.add(unit)
        else:
            self._leases.take_backward(unit)
            store.open()
        if unit in self._by_need:
            self.require(unit)
            self._has_come(unit)
            self._begin_tick(store, phase, max(0, self._tick - 1))  # a part of the tick around it
            return
        index = self._tick
        self._tick += 1
        if self._following and self._mode is not None:
            plan, trace = self._plans[self._mode]
            if _is_at(trace, index, unit, phase):
                self._perform(plan, index)
            else:
                self._following = False
        if self._repeating and self._mode is not None:
            self._repeating = _is_at(self._traced[self._mode], index, unit, phase)
        self.require(unit)
        if self._tracing:
            live = (index for index in range(len(self._stores)) if self._leases.leased(index))
            self._tracer.tick(unit, phase, tuple(index for index in live if index not in self._by_need), self._passes)
        self._begin_tick(store, phase, index)

    def _begin_tick(self, store: UnitStore, phase: Phase, index: int) -> None:
        if self._events.heard and self._mode is not None:
            name = f"{store.unit.name or 'root'} {phase.value}"
            self._open_tick = _OpenTick(self._mode.value, name, perf_counter(), index, self._used_bytes())

    def _go_round(self, unit: int, phase: Phase) -> None:
        """Where a forward plan, or this rank's own trace, has been gone through to its end and begins again behind the root's
        tick, in one iteration: as if that ended and another one began, but the root stays."""
        if self._mode is not Mode.FORWARD:
            return
        if self._followed:
            plan, trace = self._plans[Mode.FORWARD]
            if _is_at(trace, 1, unit, phase):
                self._perform(plan, self._tick)
                self._perform(plan, 0)
                self._tick = 1
        elif self._repeated and _is_at(self._traced[Mode.FORWARD], 1, unit, phase):
            self._tick = 1

    def rest(self) -> None:
        """Nothing computes from here to the next tick."""
        opened, self._open_tick = self._open_tick, None
        if opened is not None:
            most = tuple(max(pair) for pair in zip(opened.tier_bytes, self._used_bytes(), strict=True))
            now_s = perf_counter()
            self._events.tell(
                Event(EventKind.TICK, opened.track, opened.name, opened.began_s, now_s, opened.index, tier_bytes=most)
            )

    def use(self, unit: int) -> None:
        """Somebody reads `unit`, without a tick of its own; `leave` must follow."""
        self._leases.take(unit)
        self._stores[unit].open()

    def leave(self, unit: int) -> None:
        """The call that `enter` or `use` announced is over."""
        self._leases.give_back(unit)
        self._left(unit)

    def leave_backward(self, unit: int) -> None:
        """The backward that `enter` announced has ended, or waits for others; nothing happens where it has left."""
        if self._leases.in_backward(unit):
            self._leases.give_back_backward(unit)
            self._left(unit)

    def end_backward(self, unit: int) -> None:
        """As `leave_backward`, and nobody holds the unit any more."""
        self.leave_backward(unit)
        self._leases.let_go(unit)

    def _left(self, unit: int) -> None:
        if not self._computing and not self.used(unit):
            self._stores[unit].close()
        if self._tracing:
            self._tracer.observe()

    def used(self, unit: int) -> bool:
        """Whether a call of `unit`, or its backward, is in progress."""
        return self._leases.used(unit)

    def held(self, unit: int) -> bool:
        """Whether somebody holds `unit`."""
        return self._leases.held(unit)

    def _movable(self, store: UnitStore) -> bool:
        """Whether a unit's pages may be given up now (I1)."""
        return not self._leases.leased(store.unit.index) and store.movable

    def expect(self, units: Sequence[int]) -> None:
        """These will be called next, in this order: each is fetched while the one before computes."""
        self._expected = deque(units)
        self._fetch_expected()

    def _has_come(self, unit: int) -> None:
        if unit in self._expected:
            while self._expected.popleft() != unit:
                pass
            self._fetch_expected()

    def _fetch_expected(self) -> None:
        if self._expected:
            unit = self._expected[0]
            self._fetch_ahead(unit, partial(self._start, self._stores[unit]))

    def called(self, unit: int) -> bool:
        """Whether `unit` has had a forward in this iteration."""
        return unit in self._called

    def hold(self, unit: int) -> None:
        """Keeps `unit` gathered until the iteration ends (it is used outside its own forward)."""
        self._leases.hold(unit)
        self.require(unit)
        self._has_come(unit)

    def stay(self, unit: int, *, held: bool) -> None:
        """Whether somebody goes on to hold `unit`, which is there."""
        if held:
            self._leases.hold(unit)
        else:
            self._leases.let_go(unit)

    def require(self, unit: int) -> None:
        """Makes `unit` live: waits for its update, fetches it if nobody has, waits for the bytes."""
        store = self._stores[unit]
        if store.lent:
            return  # whole already, and the user's until the block ends
        started = perf_counter()
        self._finish_update(unit)
        self.pump()
        after_update = perf_counter()
        self.stall_s["update"] += after_update - started
        self._tell_stall("update", store, started, after_update)
        self._waited_for.add(unit)
        if self._computing:
            store.open()
        if store.live:
            self.uses.kept += bool(store.flats)
            return
        if store.fetched:
            self.uses.ahead += 1
        else:
            self.uses.late += 1
            self.fetch_misses += 1
            self._make_room_and_start(store)
        store.finish_fetch()
        ended = perf_counter()
        self.stall_s["fetch"] += ended - after_update
        self._tell_stall("fetch", store, after_update, ended)

    def _tell_stall(self, cause: str, store: UnitStore, began_s: float, end_s: float) -> None:
        if self._events.heard and end_s - began_s > _LEAST_STALL_S:
            self._events.tell(Event(EventKind.STALL, cause, store.unit.name or "root", began_s, end_s))

    def release_all(self) -> None:
        """Drops every full flat that is not in use (before evaluation by hand, at the end of a run)."""
        for store in self._stores:
            if self._movable(store):
                store.release()
            store.evict()

    def take_part(self, unit: int) -> None:
        """Takes part in an all-gather that other ranks asked for: keeps the result if there is room for it."""
        store = self._stores[unit]
        self._finish_update(unit)
        # An expert that nobody expects here would stay until room is short.
        wanted = unit not in self._by_need or unit in self._expected
        while wanted and not store.fetched:
            try:
                store.start_fetch(agree=None)
                return
            except CapacityError:
                if not self._reclaim(False) and not self._give_up_by_need():
                    break
        for flat in store.flats:
            flat.contribute(self._read)

    def pump(self) -> None:
        """Starts the fetches that waited for an update."""
        waiting, self._waiting = self._waiting, []
        for unit, start in waiting:
            self._fetch_ahead(unit, start)

    def _perform(self, plan: Plan, index: int) -> None:
        for task in plan.tasks_at(index):
            store = self._stores[task.unit]
            if task.operation is Operation.RELEASE:
                if self._movable(store):
                    store.release()
            elif task.operation is Operation.EVICT:
                store.evict()
            elif task.operation is Operation.FETCH and task.kind is Kind.PARAMETER:
                self._fetch_ahead(task.unit, store.fetch_shards)
            elif task.operation in (Operation.FETCH, Operation.GATHER):
                self._fetch_ahead(task.unit, partial(self._start, store))
            # REDUCE, OFFLOAD and UPDATE follow the gradients' own events (gradients.py), which is where the plan has
            # put them: right after the unit's last backward tick.

    def _fetch_ahead(self, unit: int, start: Callable[[], None]) -> None:
        if self._update_pending(unit):
            self._waiting.append((unit, start))
            return
        while True:
            try:
                start()
                return
            except CapacityError:
                if not self._reclaim(False) and not self._give_up_by_need():
                    # The plan counts whole units; pages that a late release still holds leave this one to `require`.
                    self.fetch_misses += 1
                    return

    def _give_up_by_need(self) -> bool:
        """Gives up a unit that is in no plan and that nobody expects; whether there was one."""
        for unit in self._by_need:
            store = self._stores[unit]
            if self._movable(store) and unit not in self._expected:
                store.release()
                store.evict()
                return True
        return False

    def _start(self, store: UnitStore) -> None:
        if not store.fetched:
            alone = self._agreement is None or not store.gathers
            store.start_fetch(None if alone else partial(self._agree, store.unit.index))

    def _agree(self, unit: int) -> None:
        assert self._agreement is not None
        # Meanwhile this rank may take part in what others asked for, which may look for pages to give up.
        self._leases.take(unit)
        try:
            self._agreement.request(Request(Operation.GATHER, unit))
        finally:
            self._leases.give_back(unit)

    def _make_room_and_start(self, store: UnitStore) -> None:
        """Gives units up, farthest next use first, until `store` fits; raises CapacityError if it cannot."""
        while True:
            try:
                self._start(store)
                return
            except CapacityError as error:
                if self._reclaim(True):
                    continue  # the shortest wait: these bytes are leaving anyway
                victims = [other for other in self._stores if self._movable(other) and other is not store]
                spare = [other for other in self._stores if other.has_spare_shards and other is not store]
                if not victims and spare:
                    # Fetched for an all-gather that the plan had next and that did not come.
                    for other in spare:
                        other.evict()
                    continue
                if not victims:
                    name = store.unit.name or "the root unit"
                    raise CapacityError(
                        f"{name} needs {store.full_bytes} bytes gathered on the device, and no other unit there can be "
                        f"given up ({error}); raise device_memory (host_memory on a CPU-only machine) or use smaller units"
                    ) from error
                victim = max(victims, key=lambda other: self._next_use(other.unit.index))
                victim.release()
                victim.evict()

    def _next_use(self, unit: int) -> int:
        made = self._plans.get(self._mode) if self._mode is not None else None
        if made is None:
            return unit
        ticks = made[1].ticks
        for index in range(self._tick, len(ticks)):
            if unit in ticks[index].live:
                return index
        return len(ticks) + next((i for i, tick in enumerate(ticks) if unit in tick.live), len(ticks))


def _is_at(trace: Trace, index: int, unit: int, phase: Phase) -> bool:
    """Whether a trace has this tick at this place."""
    return index < len(trace.ticks) and (trace.ticks[index].unit, trace.ticks[index].phase) == (unit, phase)
