"""Drives the policy of fetching (planning/fetching.py) with stores of pages, waits for the unit that computes, and keeps the
trace.

Owns which plan is followed next, and when parameters are open. What is fetched and what is given up is the policy's.

I1: a unit is live while one of its calls is in progress.
I2: with several ranks every all-gather has been agreed on.
I3: all ranks trace, and so plan anew, in the same iterations: whoever calls `begin` has made them agree on `trace`, and
    tells whether they are `together`; a rank that goes on alone for some batches plans when they are.
I4: this rank asks others for an all-gather of its own accord on occasions only, and comes to these at the same points of a
    module's calls, forward and backward, whatever it has fetched; code between calls of units runs behind one (`occasions`).
I5: parameters that are not the precise ones are open while a step or a backward pass is in progress, or a call of their unit;
    those of a unit whose updates no step waits for once somebody has waited for it there (`require`).
"""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Callable, Collection, Sequence
from functools import partial
from time import perf_counter
from typing import TYPE_CHECKING

from lightning_ptm.comm import Agreement, NeededCollective
from lightning_ptm.errors import CapacityError
from lightning_ptm.events import Event, EventKind, Events
from lightning_ptm.planning.fetching import Fetching
from lightning_ptm.planning.plan import Plan
from lightning_ptm.planning.trace import Trace, one_pass
from lightning_ptm.runtime.store import UnitStore
from lightning_ptm.runtime.tracer import Tracer
from lightning_ptm.terms import Operation, Phase

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


class _Stores:
    """The stores of a run as the policy's units.

    Args:
        stores: by unit.
        agreement: ranks agree on all-gathers through it.
        update_pending: whether a unit's update has not reached its compute parameters yet (after some progress).
        reclaim: as the policy's.
    """

    def __init__(
        self,
        stores: Sequence[UnitStore],
        agreement: Agreement,
        update_pending: Callable[[int], bool],
        reclaim: Callable[[bool], bool],
    ) -> None:
        self._stores = stores
        self._agreement = agreement
        self.update_pending = update_pending
        self.reclaim = reclaim

    def gathers(self, unit: int) -> bool:
        return self._stores[unit].gathers

    def live(self, unit: int) -> bool:
        return self._stores[unit].live

    def fetched(self, unit: int) -> bool:
        return self._stores[unit].fetched

    def movable(self, unit: int) -> bool:
        return self._stores[unit].movable

    def has_spare_shards(self, unit: int) -> bool:
        return self._stores[unit].has_spare_shards

    def start_fetch(self, unit: int, *, agreed: bool) -> None:
        store = self._stores[unit]
        store.start_fetch(partial(self._agree, unit) if store.gathers and not agreed else None)

    def _agree(self, unit: int) -> None:
        self._agreement.request(NeededCollective(Operation.GATHER, unit))

    def fetch_shards(self, unit: int) -> None:
        self._stores[unit].fetch_shards()

    def release(self, unit: int) -> None:
        self._stores[unit].release()

    def evict(self, unit: int) -> None:
        self._stores[unit].evict()


class Executor:
    """The event loop of one rank, driven by hooks.

    Args:
        stores: by unit.
        tracer: records what happens.
        agreement: ranks agree on all-gathers through it.
        update_pending: whether a unit's update has not reached its compute parameters yet (after some progress).
        finish_update: blocks until it has.
        replan: makes a plan from a trace, and tells what trace the plan is for.
        read: brings a paged tensor to memory of its own.
        reclaim: gives back device pages of gradients that have left (or, with True, once they have); whether any came free.
        events: told of ticks and stalls.
        used_bytes: bytes of pages in use, by tier.
        by_need: units that a plan cannot foresee.
        one_way: as the policy's.
    """

    def __init__(
        self,
        stores: Sequence[UnitStore],
        tracer: Tracer,
        agreement: Agreement,
        update_pending: Callable[[int], bool],
        finish_update: Callable[[int], None],
        replan: Callable[[Mode, Trace], tuple[Plan, Trace] | None],
        read: Callable[[PagedTensor], Tensor],
        reclaim: Callable[[bool], bool],
        events: Events,
        used_bytes: Callable[[], tuple[int, ...]],
        by_need: Collection[int] = (),
        *,
        one_way: bool = False,
    ) -> None:
        self._stores = stores
        self._tracer = tracer
        self._finish_update = finish_update
        self._replan = replan
        self._read = read
        self._events = events
        self._used_bytes = used_bytes
        self._by_need = frozenset(by_need)
        units = _Stores(stores, agreement, update_pending, reclaim)
        self.fetching = Fetching(units, len(stores), by_need, one_way=one_way)
        self._leases = self.fetching.leases
        # state
        self._mode: Mode | None = None
        self._tracing = False
        self._passes = 0
        """Backward passes of the iteration in progress that are over."""
        self._plans: dict[Mode, tuple[Plan, Trace]] = {}
        self._traced: dict[Mode, Trace] = {}
        self._to_plan: list[tuple[Mode, Trace]] = []
        self._called: set[int] = set()
        self._computing: set[Phase] = set()
        self._waited_for: set[int] = set()
        """Units whose updates somebody has waited for in this iteration, since its last optimizer step."""
        self._closing = [store for store in stores if store.closes]
        self._open_tick: _OpenTick | None = None
        self.occasions = 0
        """How often this rank has come to a point from which on it may ask others for all-gathers (I4)."""
        self.stall_s: dict[str, float] = {"fetch": 0.0, "update": 0.0}
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
            return not self._tracing and not self.fetching.followed and not self.fetching.repeated
        return mode not in self._traced

    def begin(self, mode: Mode, *, trace: bool, together: bool = True) -> None:
        """An iteration starts. The one before, if open, ends here."""
        if together:
            self._plan_anew()
        self.end(together=together)
        self._mode = mode
        self._passes = 0
        self.fetching.begin(self._plans.get(mode), self._traced.get(mode), begins_again=mode is Mode.FORWARD)
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
        self.occasions += 1
        known = self.fetching.followed or self.fetching.repeated
        mode, self._mode = self._mode, None
        self.fetching.end()
        if self._tracing and self.fetching.tick:
            trace = self._tracer.finish()
            if mode is Mode.FORWARD:
                trace = one_pass(trace)
            self._traced[mode] = trace
            self._to_plan.append((mode, trace))
            if together:
                self._plan_anew()
        elif not known:
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
        self._computing.clear()
        self._waited_for.clear()
        self.fetching.abandon()
        for store in self._stores:
            store.close()

    def computation_begins(self, phase: Phase) -> None:
        """Of a step, or of a backward pass: its code may read parameters that are there (I5)."""
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
        self.occasions += 1
        index = self.fetching.enter(unit, phase)
        store = self._stores[unit]
        store.open()
        if phase is Phase.FORWARD:
            self._called.add(unit)
        self.require(unit)
        self.fetching.computes(unit)
        if self._tracing and unit not in self._by_need:
            live = (index for index in range(len(self._stores)) if self._leases.leased(index))
            self._tracer.tick(unit, phase, tuple(index for index in live if index not in self._by_need), self._passes)
        self._begin_tick(store, phase, index)

    def _begin_tick(self, store: UnitStore, phase: Phase, index: int) -> None:
        if self._events.heard and self._mode is not None:
            name = f"{store.unit.name or 'root'} {phase.value}"
            self._open_tick = _OpenTick(self._mode.value, name, perf_counter(), index, self._used_bytes())

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
        self.occasions += 1
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

    def called(self, unit: int) -> bool:
        """Whether `unit` has had a forward in this iteration."""
        return unit in self._called

    def hold(self, unit: int) -> None:
        """Keeps `unit` gathered until the iteration ends (it is used outside its own forward)."""
        self._leases.hold(unit)
        self.require(unit)
        self.fetching.has_come(unit)

    def stay(self, unit: int, *, held: bool) -> None:
        """Whether somebody goes on to hold `unit`; it comes back where it was given up since its backward ended."""
        if held:
            self.hold(unit)
        else:
            self._leases.let_go(unit)

    def expect(self, units: Sequence[int]) -> None:
        """As the policy's."""
        self.occasions += 1
        self.fetching.expect(units)

    def saved_is_read(self, unit: int) -> None:
        """Of `unit`, a tensor that autograd has saved; `require` follows where it is not live. That differs between ranks
        only where it is not leased (I4, I1)."""
        self.occasions += not self._leases.leased(unit)

    def read_held(self, unit: int) -> None:
        """Somebody reads `unit`, which is held, so that it is there: its update is waited for, once behind each step."""
        if unit not in self._waited_for:
            self.require(unit)

    def require(self, unit: int) -> None:
        """Makes `unit` live: waits for its update, fetches it if nobody has, waits for the bytes."""
        self.occasions += 1
        store = self._stores[unit]
        if store.lent:
            return  # whole already, and the user's until the block ends
        started = perf_counter()
        self._finish_update(unit)
        self.fetching.pump()
        after_update = perf_counter()
        self.stall_s["update"] += after_update - started
        self._tell_stall("update", store, started, after_update)
        self._waited_for.add(unit)
        if self._computing:
            store.open()
        waits = not store.live
        self._bring(store)
        if not waits:
            return
        store.finish_fetch()
        ended = perf_counter()
        self.stall_s["fetch"] += ended - after_update
        self._tell_stall("fetch", store, after_update, ended)

    def _bring(self, store: UnitStore) -> None:
        if not store.flats:
            return
        try:
            self.fetching.bring(store.unit.index)
        except CapacityError as error:
            name = store.unit.name or "the root unit"
            raise CapacityError(
                f"{name} needs {store.full_bytes} bytes gathered on the device, and no other unit there can be given up "
                f"({error}); raise device_memory (host_memory on a CPU-only machine) or use smaller units"
            ) from error

    def _tell_stall(self, cause: str, store: UnitStore, began_s: float, end_s: float) -> None:
        if self._events.heard and end_s - began_s > _LEAST_STALL_S:
            self._events.tell(Event(EventKind.STALL, cause, store.unit.name or "root", began_s, end_s))

    def release_all(self) -> None:
        """Drops every full flat that is not in use (before evaluation by hand, at the end of a run)."""
        self.fetching.release_all()

    def take_part(self, unit: int) -> None:
        """Takes part in an all-gather that other ranks asked for: keeps the result if there is room for it."""
        self._finish_update(unit)
        if not self.fetching.take_part(unit):
            for flat in self._stores[unit].flats:
                flat.contribute(self._read)
