"""Executor of the fetch policy in a run: fetches units before they compute, and records the trace.

Drives planning/fetch_policy.py, which decides what is fetched and evicted, with stores of pages, and waits for the unit that
computes. `Executor` owns the iteration in progress: its mode, whether it is traced, and which units were called in it. Its
parts: `PlanSelection` owns the plans in use, and the traces from which the next ones are made; `GuardPolicy` says when code
outside of a unit's calls may read its parameters; `ComputeTiming` measures ticks and stalls.

I1: a unit is live while one of its calls is in progress.
I2: with several ranks, all ranks agree on every all-gather before it starts.
I3: all ranks trace, and so make new plans, in the same iterations: the callers of `begin` and `end` have agreed on
    `trace` with all ranks, and say whether all ranks take part (`all_ranks`). A rank that continues alone for some
    batches makes its plans when all ranks take part again.
I4: this rank requests an all-gather of its own accord at occasions only. It reaches these at the same points of a
    module's calls, forward and backward, whatever it has fetched. User code between calls of units runs after one
    (`occasions`).
I5: a trace is planned at most once, in the order in which iterations were traced. A trace for which no plan fits leaves the
    old plan in use.
I6: parameters are open while a step, a backward pass or a call of their unit is in progress. A unit whose updates no step
    waits for (`late`) is opened by a step only once its update has been waited for.
I7: page bytes are measured for a tick only if the events have a listener.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Sequence
from time import perf_counter
from typing import TYPE_CHECKING

from lightning_ptm.comm import Agreement, NeededCollective
from lightning_ptm.errors import CapacityError, format_bytes
from lightning_ptm.events import Event, EventKind, Events
from lightning_ptm.planning.fetch_policy import FetchPolicy
from lightning_ptm.planning.plan import Plan
from lightning_ptm.planning.trace import Trace, one_pass
from lightning_ptm.runtime.fetching.tracer import Tracer
from lightning_ptm.runtime.units.store import UnitStore
from lightning_ptm.terms import Mode, Operation, Phase

if TYPE_CHECKING:
    from torch import Tensor

    from lightning_ptm.memory.paged_tensor import PagedTensor


_LEAST_STALL_S = 1e-5

"""Shortest wait that counts as a stall: the check for outstanding work itself takes about this long."""


@dataclasses.dataclass(frozen=True, slots=True)
class _OpenTick:
    """A tick in progress that listeners will receive."""

    track: str
    name: str
    began_s: float
    index: int
    tier_bytes: tuple[int, ...]


class ComputeTiming:
    """Timing of one rank's compute.

    Args:
        used_bytes: returns the bytes of pages in use, by tier.
    """

    def __init__(self, events: Events, used_bytes: Callable[[], tuple[int, ...]]) -> None:
        self.events = events
        self._used_bytes = used_bytes
        # state
        self.open_tick: _OpenTick | None = None
        """The tick in progress, while events have a listener. Others read it."""
        self.stall_s: dict[str, float] = {"fetch": 0.0, "update": 0.0}
        """Seconds that compute waited, by cause. Others read it."""

    def begin_tick(self, unit: str, phase: Phase, index: int, mode: Mode | None) -> None:
        """Begins a tick of the unit with this name.

        Args:
            mode: kind of the iteration; None: there is no iteration, and nothing is recorded.
        """
        if self.events.active and mode is not None:
            name = f"{unit or 'root'} {phase.value}"
            self.open_tick = _OpenTick(mode.value, name, perf_counter(), index, self._used_bytes())

    def end_tick(self) -> None:
        """Ends the tick in progress: nothing computes until the next tick."""
        opened, self.open_tick = self.open_tick, None
        if opened is not None:
            most = tuple(max(pair) for pair in zip(opened.tier_bytes, self._used_bytes(), strict=True))
            now_s = perf_counter()
            self.events.emit(
                Event(EventKind.TICK, opened.track, opened.name, opened.began_s, now_s, opened.index, tier_bytes=most)
            )

    def drop_tick(self) -> None:
        """Drops the tick in progress, which failed."""
        self.open_tick = None

    def stalled(self, cause: str, unit: str, began_s: float, end_s: float) -> None:
        """Records that compute has waited for the unit with this name."""
        self.stall_s[cause] += end_s - began_s
        if self.events.active and end_s - began_s > _LEAST_STALL_S:
            self.events.emit(Event(EventKind.STALL, cause, unit or "root", began_s, end_s))


class GuardPolicy:
    """The parameter guards of one rank's stores.

    Args:
        used: returns whether a call of a unit, or its backward, is in progress.
    """

    def __init__(self, stores: Sequence[UnitStore], used: Callable[[int], bool]) -> None:
        self._stores = stores
        self._used = used
        self._closing = [store for store in stores if store.closing]
        # state
        self._in_step = False
        self._in_backward = False
        self.computing = False
        """Whether a step or a backward pass is in progress. Others read it."""
        self.passes = 0
        """Number of backward passes of the iteration in progress that are over. Others read it."""
        self.waited_for: set[int] = set()
        """Units whose updates have been waited for in this iteration, since its last optimizer step. Others read it."""

    def begin_iteration(self) -> None:
        """Resets the counts of the iteration."""
        self.passes = 0
        self.waited_for.clear()

    def computation_begins(self, phase: Phase) -> None:
        """Opens parameters for a step, or a backward pass, whose code may read them."""
        if phase is Phase.BACKWARD:
            self._in_backward = True
        else:
            self._in_step = True
        self.computing = True
        for store in self._closing:
            if not store.opened and (not store.late or store.unit.index in self.waited_for):
                store.open()

    def computation_ends(self, phase: Phase) -> None:
        """Closes parameters after a step, or a backward pass; counts only a backward pass that had begun."""
        if phase is Phase.BACKWARD:
            self.passes += self._in_backward
            self._in_backward = False
        else:
            self._in_step = False
        self.computing = self._in_step or self._in_backward
        for store in self._closing if not self.computing else ():
            if store.opened and not self._used(store.unit.index):
                store.close()

    def updates_begin(self) -> None:
        """Closes `late` units, for whose updates an optimizer step does not wait.

        They have to be called, or held, before they can be read again.
        """
        self.waited_for.clear()
        for store in self._closing:
            if store.late and store.opened and not self._used(store.unit.index):
                store.close()

    def waited(self, store: UnitStore) -> None:
        """Records that a unit's update has been waited for."""
        self.waited_for.add(store.unit.index)
        if self.computing and not store.opened:
            store.open()

    def abandon(self) -> None:
        """Closes everything after a failed iteration."""
        self._in_step = self._in_backward = self.computing = False
        self.waited_for.clear()
        for store in self._stores:
            store.close()


class PlanSelection:
    """The plans and traces of one rank.

    Args:
        replan: makes a plan from a trace, and returns it with the trace that it is for (the first rank's); returns None
            if no plan fits, and the old plan, if any, stays. Collective.
    """

    def __init__(self, replan: Callable[[Mode, Trace], tuple[Plan, Trace] | None]) -> None:
        self._replan = replan
        # state
        self._made: dict[Mode, tuple[Plan, Trace]] = {}
        self._traced: dict[Mode, Trace] = {}
        self._due: list[tuple[Mode, Trace]] = []
        self._first: dict[Mode, Trace] = {}
        self.remade = 0
        """Number of plans made from traces. Others read it."""

    def adopt(self, mode: Mode, plan: Plan, trace: Trace) -> None:
        """Uses `plan`, which was made for `trace`, from the next iteration of `mode` on."""
        self._made[mode] = (plan, trace)

    def plan_later(self, mode: Mode, trace: Trace) -> None:
        """Leaves the plan for `trace` to the first iteration of `mode`, which may never come."""
        self._first[mode] = trace

    def planned(self, mode: Mode) -> tuple[Plan, Trace] | None:
        """Returns the plan in use, and the trace that it was made for."""
        return self._made.get(mode)

    def trace(self, mode: Mode) -> Trace | None:
        """Returns the newest complete trace of an iteration of `mode`; None after an iteration of another order."""
        return self._traced.get(mode)

    def add_trace(self, mode: Mode, trace: Trace) -> None:
        """Queues the trace of a complete iteration for planning."""
        if mode is Mode.FORWARD:
            trace = one_pass(trace)
        self._traced[mode] = trace
        self._due.append((mode, trace))

    def order_changed(self, mode: Mode) -> None:
        """Drops the newest trace, so that the next iteration is traced.

        Called after an iteration that followed neither its plan nor that trace.
        """
        self._traced.pop(mode, None)

    def make(self, beginning: Mode | None = None) -> None:
        """Makes the plans of the queued traces. Collective.

        Args:
            beginning: mode of the iteration that begins, whose first plan is made if it was left to that iteration.
        """
        if beginning is not None and beginning in self._first:
            made = self._replan(beginning, self._first.pop(beginning))
            if made is not None:
                self._made[beginning] = made
        due, self._due = self._due, []
        for mode, trace in due:
            made = self._replan(mode, trace)
            if made is not None:
                self._made[mode] = made
                self.remade += 1


class Executor:
    """The fetch executor of one rank, called by hooks.

    Args:
        stores: by unit.
        tracer: records the trace.
        agreement: ranks agree on all-gathers through it.
        update_pending: whether an update has not reached a unit's compute parameters yet; makes some progress with it.
        finish_update: blocks until it has, as far as a step requires it.
        finish_between_steps: blocks until all updates have, for readers of the unit between two steps.
        replan: makes a plan from a trace, and returns it with the trace that it is for.
        read: copies a paged tensor to memory of its own.
        reclaim: as in FetchPolicy.
        events: receives ticks and stalls.
        used_bytes: returns the bytes of pages in use, by tier.
        by_need: units that a plan cannot foresee.
        one_way: see FetchPolicy.
        at_tick: called at each tick with its unit and phase.
    """

    def __init__(
        self,
        stores: Sequence[UnitStore],
        tracer: Tracer,
        agreement: Agreement,
        update_pending: Callable[[int], bool],
        finish_update: Callable[[int], None],
        finish_between_steps: Callable[[int], None],
        replan: Callable[[Mode, Trace], tuple[Plan, Trace] | None],
        read: Callable[[PagedTensor], Tensor],
        reclaim: Callable[[bool], bool],
        events: Events,
        used_bytes: Callable[[], tuple[int, ...]],
        by_need: Collection[int] = (),
        *,
        one_way: bool = False,
        at_tick: Callable[[int, Phase], None] | None = None,
    ) -> None:
        self._stores = stores
        self._tracer = tracer
        self._finish_update = finish_update
        self._finish_between_steps = finish_between_steps
        self._read = read
        self._at_tick = at_tick
        self._by_need = frozenset(by_need)
        self._gathers = any(store.sharded for store in stores)

        def agree(unit: int) -> None:
            agreement.request(NeededCollective(Operation.GATHER, unit))

        self.fetching = FetchPolicy(stores, update_pending, reclaim, agree, by_need, one_way=one_way)
        self.refcounts = self.fetching.refcounts
        """What refers to each unit. Others read it."""
        self._cursor = self.fetching.plan_cursor
        self.plans = PlanSelection(replan)
        self.guard_policy = GuardPolicy(stores, self.refcounts.used)
        self.compute_timing = ComputeTiming(events, used_bytes)
        # state
        self._mode: Mode | None = None
        self._tracing = False
        self._called: set[int] = set()
        self._awaited: set[int] = set()
        """Units called in training iterations whose backward has not come since. A graph that the user keeps over iterations
        may bring it."""
        self._trained: set[int] = set()
        """Units called in training iterations. Graphs of several of their calls may be kept, or one for several backwards."""
        self._called_before: frozenset[int] = frozenset()
        """Those of earlier iterations, when the iteration in progress began."""
        self.occasions = 0
        """Number of times that this rank has reached a point after which it may request all-gathers (I4)."""
        self.backwards = 0
        """Number of units' backwards begun in this layout; read by others."""
        self.ever_called: set[int] = set()
        """Units called in this layout, without units that are fetched by need. Other classes read it."""

    @property
    def mode(self) -> Mode | None:
        return self._mode

    def wants_trace(self, mode: Mode) -> bool:
        """Returns whether the next iteration, of `mode`, should be traced.

        It should until an iteration has confirmed the plan, and after an iteration that neither followed the plan nor
        repeated this rank's newest trace (the plan is made for the first rank's trace).
        """
        if mode is self._mode:
            return not self._tracing and not self._cursor.followed and not self._cursor.repeated
        return self.plans.trace(mode) is None

    def begin(self, mode: Mode, *, trace: bool, all_ranks: bool = True) -> None:
        """Starts an iteration, and ends the one before if it is open.

        Args:
            trace: whether to trace it; all ranks have agreed on that (I3).
            all_ranks: whether all ranks take part, so that collectives are allowed.
        """
        if all_ranks:
            self.plans.make(beginning=mode)
        self.end(all_ranks=all_ranks)
        self._mode = mode
        self.guard_policy.begin_iteration()
        self.fetching.begin(self.plans.planned(mode), self.plans.trace(mode), may_repeat=mode is Mode.FORWARD)
        self._tracing = trace
        self._called.clear()
        self._called_before = frozenset(self._awaited)
        if self._tracing:
            self._tracer.start()

    def end(self, *, all_ranks: bool = True) -> None:
        """Ends the iteration: performs the plan's last tasks and makes a plan from the trace.

        Args:
            all_ranks: as in `begin`.
        """
        if self._mode is None:
            return
        self.compute_timing.end_tick()
        self.occasions += 1
        known = self._cursor.followed or self._cursor.repeated
        mode, self._mode = self._mode, None
        self.fetching.end()
        if self._tracing and self._cursor.tick:
            self.plans.add_trace(mode, self._tracer.finish())
            if all_ranks:
                self.plans.make()
        elif not known:
            self.plans.order_changed(mode)

    def abandon(self) -> None:
        """Drops a failed iteration, the references of its calls, and all graphs."""
        self._awaited.clear()
        self.compute_timing.drop_tick()
        self._mode = None
        self.pass_ended()
        self.fetching.abandon()
        self.guard_policy.abandon()

    def enter(self, unit: int, phase: Phase) -> None:
        """Begins a tick: `unit` starts to compute. Returns when its parameters are bound.

        `leave` must follow, in a backward `leave_backward`.
        """
        timing = self.compute_timing
        if timing.open_tick is not None:
            timing.end_tick()
        self.occasions += 1
        store = self._stores[unit]
        if self._gathers:  # the all-gathers that begin here wait for shards from disk, and for the other ranks
            started = perf_counter()
            index = self.fetching.enter(unit, phase)
            timing.stalled("fetch", store.unit.name, started, perf_counter())
        else:
            index = self.fetching.enter(unit, phase)
        if not store.opened:
            store.open()
        if phase is Phase.FORWARD:
            self._called.add(unit)
            if self._mode is Mode.TRAIN:
                self._awaited.add(unit)
                self._trained.add(unit)
            if unit not in self._by_need:
                self.ever_called.add(unit)
        else:
            self.backwards += 1
        self.require(unit)
        self.fetching.computes(unit)
        if self._tracing and unit not in self._by_need:
            live = [index for index in range(len(self._stores)) if self.refcounts.needed(index)]
            self._tracer.tick(
                unit, phase, tuple([index for index in live if index not in self._by_need]), self.guard_policy.passes
            )
        if timing.events.active:
            timing.begin_tick(store.unit.name, phase, index, self._mode)
        if self._at_tick is not None:
            self._at_tick(unit, phase)

    def enter_root(self) -> None:
        """Performs the root's tick, and holds the root: code outside any hooked forward uses it."""
        self.enter(0, Phase.FORWARD)
        self.refcounts.hold(0)
        self.leave(0)

    def use(self, unit: int) -> None:
        """Takes a reference on `unit` and opens its parameters, for a reader outside of ticks; fetches nothing. `leave` must
        follow."""
        self.refcounts.take(unit)
        self._stores[unit].open()
        self._called.add(unit)

    def leave(self, unit: int) -> None:
        """Ends the call that `enter` or `use` began."""
        self.occasions += 1
        self.refcounts.give_back(unit)
        self._close_unused(unit)

    def leave_backward(self, unit: int) -> None:
        """Ends the backward that `enter` began, or suspends it; does nothing where it has ended already."""
        if self.refcounts.give_back_backward(unit):
            self._close_unused(unit)

    def suspend_backward(self, unit: int) -> None:
        """Lets the unit be evicted, where nothing else can be, until `resume_backward` or the end of its backward.

        Called when the backward of one of its calls has ended, and that of an earlier call is still to come.
        """
        self.refcounts.suspend_backward(unit)

    def resume_backward(self, unit: int) -> None:
        """Continues the backward of a unit, if it is suspended: fetches the unit where it was evicted since."""
        if self.refcounts.suspended(unit):
            self.fetching.resume(unit)
            self.enter(unit, Phase.BACKWARD)

    def end_backward(self, unit: int) -> None:
        """Does what `leave_backward` does, and ends the hold of the unit."""
        self.leave_backward(unit)
        self._awaited.discard(unit)
        self.refcounts.unhold(unit)
        store = self._stores[unit]
        if store.read_in_place and not self.refcounts.referenced(unit):
            store.end_reads_in_place()

    def pass_ended(self) -> None:
        """Ends the reads of `read_in_place`."""
        for store in self._stores:
            if store.read_in_place:
                store.end_reads_in_place()

    def _close_unused(self, unit: int) -> None:
        store = self._stores[unit]
        if store.closing and store.opened and not self.guard_policy.computing and not self.refcounts.used(unit):
            store.close()
        if self._tracing:
            self._tracer.observe()

    def called(self, unit: int) -> bool:
        """Returns whether `unit` has had a forward in this iteration, or in an earlier one since its last backward."""
        return unit in self._called or unit in self._called_before

    def has_graphs(self, unit: int) -> bool:
        """Returns whether a backward may come through a call of `unit`, of this iteration or an earlier one."""
        return unit in self._called or unit in self._trained

    def hold(self, unit: int) -> None:
        """Keeps `unit` gathered until the iteration ends (it is used outside its own forward)."""
        self.refcounts.hold(unit)
        self.require(unit)
        self.fetching.mark_used(unit)

    def read_in_place(self, unit: int) -> None:
        """Keeps the pages of `unit` where they are, with their values, until its backward or the pass ends."""
        self.refcounts.resume_backward(unit)
        if not self.refcounts.referenced(unit):
            self.hold(unit)
        self._stores[unit].begin_reads_in_place()

    def keep_held(self, unit: int, *, held: bool) -> None:
        """Continues or ends the hold of `unit`; fetches it again where it was evicted since its backward ended."""
        if held:
            self.hold(unit)
        else:
            self.refcounts.unhold(unit)

    def expect(self, units: Sequence[int]) -> None:
        """Announces the units that are called next; see FetchPolicy."""
        self.occasions += 1
        self.fetching.expect(units)

    def note_saved_read(self, unit: int) -> bool:
        """Counts an occasion when a saved tensor of `unit` is read in a backward; returns whether it is used or held.

        `require` follows where the unit is not live. Ranks differ in that only where the unit has no reference (I4,
        I1).
        """
        referenced = self.refcounts.referenced(unit)
        self.occasions += not referenced
        return referenced

    def read_held(self, unit: int) -> None:
        """Makes a unit readable that is held and so is on the device: waits for its update.

        Within a step, the wait happens once after each optimizer step.
        """
        if not self.guard_policy.computing or unit not in self.guard_policy.waited_for:
            self.require(unit)

    def require(self, unit: int) -> None:
        """Makes `unit` live: waits for its update, fetches it if that has not begun, waits for the bytes."""
        self.occasions += 1
        store = self._stores[unit]
        if store.summoned:
            return  # gathered for the user until the block of full parameters ends
        timing, started = self.compute_timing, perf_counter()
        if self.guard_policy.computing:
            self._finish_update(unit)
        else:
            self._finish_between_steps(unit)
        after_update = perf_counter()
        timing.stalled("update", store.unit.name, started, after_update)
        if self.fetching.waiting:
            self.fetching.pump()
        self.guard_policy.waited(store)
        if not store.flats:
            return
        if store.live:
            self.fetching.note_kept()
            return
        self._bring(store)
        store.finish_fetch()
        timing.stalled("fetch", store.unit.name, after_update, perf_counter())

    def start_waiting_fetches(self) -> None:
        """Starts the fetches whose unit has its update by now, in the middle of another unit's call.

        Not where ranks agree on all-gathers: this is no occasion (I4), since ranks may have other numbers of slices.
        """
        if self.fetching.waiting and not self._gathers:
            self.fetching.pump()

    def _bring(self, store: UnitStore) -> None:
        try:
            self.fetching.bring(store.unit.index)
        except CapacityError as error:
            name = store.unit.name or "the root unit"
            raise CapacityError(
                f"{name} needs {format_bytes(store.full_bytes)} gathered on the device while it computes, and no "
                "other unit there can be evicted, so the step cannot go on; raise device_memory (host_memory without "
                f"a GPU), or choose smaller modules in units=[...] ({error})"
            ) from error

    def release_all(self) -> None:
        """Releases all full flats that are not in use.

        Called before an evaluation outside of the trainer's loops, and at the end of a run.
        """
        self.fetching.release_all()

    def take_part(self, unit: int) -> None:
        """Takes part in an all-gather that other ranks requested: keeps the result if there is room for it."""
        self._finish_update(unit)
        if not self.fetching.join_gather(unit):
            for flat in self._stores[unit].flats:
                flat.contribute(self._read)
