"""Executor of the fetch policy in a run: fetches units before they compute, and records the trace.

Drives planning/fetch_policy.py with stores of pages, and waits for the unit that computes. Owns the iteration in
progress: its mode, whether it is traced, and which units were called in it. The policy decides what is fetched and
evicted. Other files own the choice of the next plan (plan_selection.py), the opening of parameter guards
(guard_policy.py), and the timing of ticks and stalls (compute_timing.py).

I1: a unit is live while one of its calls is in progress.
I2: with several ranks, all ranks agree on every all-gather before it starts.
I3: all ranks trace, and so make new plans, in the same iterations: the callers of `begin` and `end` have agreed on
    `trace` with all ranks, and say whether all ranks take part (`all_ranks`). A rank that continues alone for some
    batches makes its plans when all ranks take part again.
I4: this rank requests an all-gather of its own accord at occasions only. It reaches these at the same points of a
    module's calls, forward and backward, whatever it has fetched. User code between calls of units runs after one
    (`occasions`).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from time import perf_counter
from typing import TYPE_CHECKING

from lightning_ptm.comm import Agreement
from lightning_ptm.errors import CapacityError
from lightning_ptm.events import Events
from lightning_ptm.planning.fetch_policy import FetchPolicy
from lightning_ptm.planning.plan import Plan
from lightning_ptm.planning.trace import Trace
from lightning_ptm.runtime.fetching.compute_timing import ComputeTiming
from lightning_ptm.runtime.fetching.guard_policy import GuardPolicy
from lightning_ptm.runtime.fetching.plan_selection import PlanSelection
from lightning_ptm.runtime.fetching.policy_units import PolicyUnits
from lightning_ptm.runtime.fetching.tracer import Tracer
from lightning_ptm.runtime.units.store import UnitStore
from lightning_ptm.terms import Mode, Phase

if TYPE_CHECKING:
    from torch import Tensor

    from lightning_ptm.memory.paged_tensor import PagedTensor


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
        reclaim: frees device pages of gradients that have left (with True, once they have); returns whether any were
            freed.
        events: receives ticks and stalls.
        used_bytes: returns the bytes of pages in use, by tier.
        by_need: units that a plan cannot foresee.
        one_way: see FetchPolicy.
        at_tick: called at each tick.
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
        at_tick: Callable[[], None] = lambda: None,
    ) -> None:
        self._stores = stores
        self._tracer = tracer
        self._finish_update = finish_update
        self._finish_between_steps = finish_between_steps
        self._read = read
        self._at_tick = at_tick
        self._by_need = frozenset(by_need)
        units = PolicyUnits(stores, agreement, update_pending, reclaim)
        self.fetching = FetchPolicy(units, len(stores), by_need, one_way=one_way)
        self._refcounts = self.fetching.refcounts
        self.plans = PlanSelection(replan)
        self.guard_policy = GuardPolicy(stores, self._refcounts.used)
        self.compute_timing = ComputeTiming(events, used_bytes)
        # state
        self._mode: Mode | None = None
        self._tracing = False
        self._called: set[int] = set()
        self.occasions = 0
        """How often this rank has reached a point after which it may request all-gathers (I4)."""

    @property
    def mode(self) -> Mode | None:
        return self._mode

    def wants_trace(self, mode: Mode) -> bool:
        """Returns whether the next iteration, of `mode`, should be traced.

        It should until an iteration has confirmed the plan, and after an iteration that neither followed the plan nor
        repeated this rank's newest trace (the plan is made for the first rank's trace).
        """
        if mode is self._mode:
            return (
                not self._tracing and not self.fetching.plan_cursor.followed and not self.fetching.plan_cursor.repeated
            )
        return self.plans.trace(mode) is None

    def begin(self, mode: Mode, *, trace: bool, all_ranks: bool = True) -> None:
        """Starts an iteration, and ends the one before if it is open.

        Args:
            trace: whether to trace it; all ranks have agreed on that (I3).
            all_ranks: whether all ranks take part, so that collectives are allowed.
        """
        if all_ranks:
            self.plans.make()
        self.end(all_ranks=all_ranks)
        self._mode = mode
        self.guard_policy.begin_iteration()
        self.fetching.begin(self.plans.planned(mode), self.plans.trace(mode), may_repeat=mode is Mode.FORWARD)
        self._tracing = trace
        self._called.clear()
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
        known = self.fetching.plan_cursor.followed or self.fetching.plan_cursor.repeated
        mode, self._mode = self._mode, None
        self.fetching.end()
        if self._tracing and self.fetching.plan_cursor.tick:
            self.plans.add_trace(mode, self._tracer.finish())
            if all_ranks:
                self.plans.make()
        elif not known:
            self.plans.order_changed(mode)

    def abandon(self) -> None:
        """Drops a failed iteration, and the references of its calls."""
        self.compute_timing.drop_tick()
        self._mode = None
        self.fetching.abandon()
        self.guard_policy.abandon()

    def enter(self, unit: int, phase: Phase) -> None:
        """Begins a tick: `unit` starts to compute. Returns when its parameters are bound.

        `leave` must follow, in a backward `leave_backward`.
        """
        self.compute_timing.end_tick()
        self.occasions += 1
        index = self.fetching.enter(unit, phase)
        store = self._stores[unit]
        store.open()
        if phase is Phase.FORWARD:
            self._called.add(unit)
        self.require(unit)
        self.fetching.computes(unit)
        if self._tracing and unit not in self._by_need:
            live = (index for index in range(len(self._stores)) if self._refcounts.referenced(index))
            self._tracer.tick(
                unit, phase, tuple(index for index in live if index not in self._by_need), self.guard_policy.passes
            )
        self.compute_timing.begin_tick(store.unit.name, phase, index, self._mode)
        self._at_tick()

    def use(self, unit: int) -> None:
        """Takes a reference on `unit` for a reader outside of ticks; `leave` must follow."""
        self._refcounts.take(unit)
        self._stores[unit].open()
        self._called.add(unit)

    def leave(self, unit: int) -> None:
        """Ends the call that `enter` or `use` began."""
        self.occasions += 1
        self._refcounts.give_back(unit)
        self._close_unused(unit)

    def leave_backward(self, unit: int) -> None:
        """Ends the backward that `enter` began, or suspends it; does nothing where it has ended already."""
        if self._refcounts.in_backward(unit):
            self._refcounts.give_back_backward(unit)
            self._close_unused(unit)

    def end_backward(self, unit: int) -> None:
        """Ends the backward as `leave_backward`, and the hold of the unit."""
        self.leave_backward(unit)
        self._refcounts.unhold(unit)

    def _close_unused(self, unit: int) -> None:
        if not self.guard_policy.computing and not self.used(unit):
            self._stores[unit].close()
        if self._tracing:
            self._tracer.observe()

    def used(self, unit: int) -> bool:
        """Returns whether a call of `unit`, or its backward, is in progress."""
        return self._refcounts.used(unit)

    def referenced(self, unit: int) -> bool:
        """Returns whether `unit` is used or held, and so is not evicted."""
        return self._refcounts.referenced(unit)

    def held(self, unit: int) -> bool:
        """Returns whether `unit` is held."""
        return self._refcounts.held(unit)

    def called(self, unit: int) -> bool:
        """Returns whether `unit` has had a forward in this iteration."""
        return unit in self._called

    def hold(self, unit: int) -> None:
        """Keeps `unit` gathered until the iteration ends (it is used outside its own forward)."""
        self._refcounts.hold(unit)
        self.require(unit)
        self.fetching.mark_used(unit)

    def keep_held(self, unit: int, *, held: bool) -> None:
        """Continues or ends the hold of `unit`; fetches it again where it was evicted since its backward ended."""
        if held:
            self.hold(unit)
        else:
            self._refcounts.unhold(unit)

    def expect(self, units: Sequence[int]) -> None:
        """Announces the units that are called next; see FetchPolicy."""
        self.occasions += 1
        self.fetching.expect(units)

    def note_saved_read(self, unit: int) -> None:
        """Counts an occasion when a saved tensor of `unit` is read in a backward.

        `require` follows where the unit is not live. Ranks differ in that only where the unit has no reference (I4,
        I1).
        """
        self.occasions += not self._refcounts.referenced(unit)

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
        if store.lent:
            return  # gathered for the user until the block of full parameters ends
        started = perf_counter()
        if self.guard_policy.computing:
            self._finish_update(unit)
        else:
            self._finish_between_steps(unit)
        self.fetching.pump()
        after_update = perf_counter()
        self.compute_timing.stalled("update", store.unit.name, started, after_update)
        self.guard_policy.waited(store)
        waits = not store.live
        self._bring(store)
        if not waits:
            return
        store.finish_fetch()
        self.compute_timing.stalled("fetch", store.unit.name, after_update, perf_counter())

    def _bring(self, store: UnitStore) -> None:
        if not store.flats:
            return
        try:
            self.fetching.bring(store.unit.index)
        except CapacityError as error:
            name = store.unit.name or "the root unit"
            raise CapacityError(
                f"{name} needs {store.full_bytes} bytes gathered on the device, and no other unit there can be evicted "
                f"({error}); raise device_memory (host_memory on a CPU-only machine) or use smaller units"
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
