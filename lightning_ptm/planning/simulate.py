"""A plan replayed on paper: bytes per tier per tick, and every page checked to be there when it is used.

Owns the second opinion: it shares no code with demand.py, placement.py or schedule.py, so a
mistake there shows here. Decides nothing and touches nothing. What it accepts, the executor can carry out.

I1: at every tick all live units are whole on the device, and no unit is used after its update.
I2: nothing is fetched, gathered, reduced, offloaded or updated twice; nothing is left behind.
I3: pages held, homes, staging and non-model data never exceed a tier's budget, at triggers included.
I4: copies leave at the trigger after their last use, gradients at the trigger after the last backward tick.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass

from lightning_ptm.errors import CapacityError, InternalError
from lightning_ptm.planning.homes import Budget, Placement
from lightning_ptm.planning.layout import ModelLayout
from lightning_ptm.planning.plan import Plan, Task
from lightning_ptm.planning.report import device_refusal, format_bytes, tick_label
from lightning_ptm.planning.timing import Clock, Hardware, Timing
from lightning_ptm.planning.trace import Tick, Trace
from lightning_ptm.terms import BLOCK_BYTES, Kind, Operation, Phase, Tier


@dataclass(frozen=True, slots=True)
class TierUse:
    """One tier through the plan: its budget, its peak, the tick of the peak, and bytes at each tick's worst moment.

    `bytes_per_tick` has one entry more than there are ticks: the trigger after the last one.
    """

    tier: Tier
    budget_bytes: int
    peak_bytes: int
    peak_tick: int
    bytes_per_tick: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Simulation:
    """What a plan takes: each tier, fastest first, and its time where hardware was given."""

    tiers: tuple[TierUse, ...]
    timing: Timing | None

    def tier(self, tier: Tier) -> TierUse:
        """One tier's use."""
        return self.tiers[tier]


class _Progress(enum.Enum):
    """How far a unit's gradients have come."""

    NONE = "none"
    WRITTEN = "written"
    REDUCED = "reduced"
    OFFLOADED = "offloaded"
    UPDATED = "updated"


def simulate(
    layout: ModelLayout,
    placement: Placement,
    plan: Plan,
    trace: Trace,
    budget: Budget,
    hardware: Hardware | None = None,
) -> Simulation:
    """Replay a plan.

    Args:
        layout: the model on this world size.
        placement: homes of its units.
        plan: the plan under test.
        trace: the iteration that the plan is for.
        budget: bytes of this rank.
        hardware: link rates; None leaves the timing out.

    Raises:
        CapacityError: a tier's budget is exceeded; names tick and setting.
        InternalError: the plan is wrong: it uses pages that are not there, moves some twice, or leaves some behind.
    """
    clock = None if hardware is None else Clock(layout, placement, budget, hardware)
    return _Replay(layout, placement, trace, budget, clock).run(plan)


class _Replay:
    """One call of `simulate`: what lies on the device now."""

    def __init__(
        self, layout: ModelLayout, placement: Placement, trace: Trace, budget: Budget, clock: Clock | None
    ) -> None:
        # Configuration.
        self._layout = layout
        self._placement = placement
        self._trace = trace
        self._budget = budget
        self._clock = clock
        self._one_rank = layout.world_size == 1
        self._page_counts: dict[tuple[int, Kind], int] = {}
        """As far as they were asked for."""
        non_model_bytes = max([placement.non_model_peak_bytes] + [tick.non_model_bytes for tick in trace.ticks])
        self._reserved_bytes = placement.device_home_bytes + placement.staged_bytes(Tier.DEVICE) + non_model_bytes
        self._limit = min(budget.device_bytes - self._reserved_bytes, placement.gather_bytes) // layout.page_size
        self._last_use: dict[int, int] = {}
        self._backward_ends: dict[int, dict[int, int]] = {}
        """By unit and backward pass, the unit's last tick in it."""
        for number, tick in enumerate(trace.ticks):
            for unit in tick.live:
                self._last_use[unit] = number
                if tick.phase is Phase.BACKWARD and self._pages(unit, Kind.GRADIENT):
                    self._backward_ends.setdefault(unit, {})[tick.passes] = number
        # State.
        self._trigger = 0
        self._used = 0
        self._peak = 0
        self._leaving = 0
        """Pages that are given back when the current trigger's tick is over."""
        self._present: dict[tuple[int, Kind], int] = {}
        """Bit k of a unit's kind is set while its page k is on the device as a copy."""
        self._gathered_at: dict[int, int] = {}
        self._gradient_pages: dict[int, int] = {}
        self._written_in: dict[int, int] = {}
        """By unit, the backward pass that its newest gradients are of."""
        self._progress = dict.fromkeys(range(len(layout.units)), _Progress.NONE)

    def run(self, plan: Plan) -> Simulation:
        """Replay all triggers, then look for what was left behind."""
        self._check_homes()
        if plan.tick_count != len(self._trace.ticks):
            raise InternalError(f"the plan has {plan.tick_count} ticks, the trace {len(self._trace.ticks)}")
        if self._limit < 0:
            raise self._too_many(0)
        triggers: list[list[Task]] = [[] for _ in range(plan.tick_count + 1)]
        last = 0
        for task in plan.tasks:
            if not last <= task.trigger <= plan.tick_count:
                raise InternalError(f"{self._words(task)} stands behind trigger {last} of {plan.tick_count}")
            last = task.trigger
            triggers[last].append(task)
        peaks: list[int] = []
        for self._trigger, tasks in enumerate(triggers):
            self._used -= self._leaving
            self._leaving, self._peak = 0, self._used
            self._replay_trigger(tasks)
            peaks.append(self._peak)
        self._check_end()
        timing = None if self._clock is None else self._clock.finish()
        return Simulation(self._tier_uses(peaks), timing)

    def _replay_trigger(self, tasks: list[Task]) -> None:
        ticks = self._trace.ticks
        computes = [position for position, task in enumerate(tasks) if task.operation is Operation.COMPUTE]
        expected = [len(tasks) - 1] if self._trigger < len(ticks) else []
        if computes != expected:
            raise InternalError(
                f"{tick_label(self._layout, self._trace, self._trigger)} has {len(computes)} computes among "
                f"{len(tasks)} tasks; a tick has one, behind all others"
            )
        for task in tasks:
            self._check_range(task)
            match task.operation:
                case Operation.FETCH:
                    self._fetch(task)
                case Operation.GATHER:
                    self._gather(task)
                case Operation.RELEASE | Operation.EVICT:
                    self._leave(task)
                case Operation.REDUCE:
                    self._reduce(task)
                case Operation.OFFLOAD:
                    self._offload(task)
                case Operation.UPDATE:
                    self._update(task)
                case Operation.COMPUTE:
                    self._compute(task, ticks[self._trigger])
            if self._clock is not None and task.operation is not Operation.COMPUTE:
                self._clock.issue(task)

    def _fetch(self, task: Task) -> None:
        whole = not self._layout.gathers(task.unit)
        kind = Kind.FULL if whole else Kind.PARAMETER
        if task.kind is not kind or self._placement.homes[task.unit].parameter is Tier.DEVICE:
            raise InternalError(f"{self._words(task)}: there is nothing to fetch for a {task.kind.value} copy")
        self._put(task, kind)
        if whole:
            self._check_whole(task)
            self._hold(self._run_pages(task.unit, gradient=False))
        else:
            self._hold(task.last_page - task.first_page)

    def _gather(self, task: Task) -> None:
        if not self._layout.gathers(task.unit):
            raise InternalError(f"{self._words(task)}: one rank has nobody to gather from")
        self._check_whole(task)
        at_home = self._placement.homes[task.unit].parameter is Tier.DEVICE
        if not at_home and self._present.get((task.unit, Kind.PARAMETER), 0) != self._mask(task):
            raise InternalError(f"{self._words(task)}: its pages are not on the device")
        self._put(task, Kind.FULL)
        self._hold(self._run_pages(task.unit, gradient=False))
        self._gathered_at[task.unit] = self._trigger

    def _leave(self, task: Task) -> None:
        kind = Kind.FULL if task.operation is Operation.RELEASE else Kind.PARAMETER
        if task.kind is not kind or self._present.get((task.unit, kind), 0) != self._mask(task):
            raise InternalError(f"{self._words(task)}: these pages are not on the device")
        before = self._trigger - 1
        if kind is Kind.FULL:
            used_before = before >= 0 and task.unit in self._trace.ticks[before].live
        else:
            used_before = self._gathered_at.get(task.unit) == before
        if not used_before:
            raise InternalError(f"{self._words(task)}: the tick before did not use them, so they left late or unused")
        del self._present[task.unit, kind]
        pages = self._run_pages(task.unit, gradient=False) if kind is Kind.FULL else task.last_page
        self._used -= pages

    def _reduce(self, task: Task) -> None:
        if self._one_rank:
            raise InternalError(f"{self._words(task)}: one rank has nobody to reduce with")
        self._step(task, _Progress.WRITTEN, _Progress.REDUCED)
        self._check_gradients_complete(task)
        full_pages = self._gradient_pages.pop(task.unit)
        shard_pages = task.last_page
        self._hold(shard_pages)  # Written while the full gradients are read.
        self._used -= full_pages
        if self._passes(task.unit):
            self._gradient_pages[task.unit] = shard_pages
        else:
            self._leaving += shard_pages

    def _offload(self, task: Task) -> None:
        if self._placement.homes[task.unit].gradient is Tier.DEVICE:
            raise InternalError(f"{self._words(task)}: these gradients are at home on the device")
        self._step(task, _Progress.WRITTEN if self._one_rank else _Progress.REDUCED, _Progress.OFFLOADED)
        self._check_gradients_complete(task)
        self._used -= self._gradient_pages.pop(task.unit, 0)

    def _update(self, task: Task) -> None:
        self._step(task, self._arrived(task.unit), _Progress.UPDATED)
        if self._trigger not in (self._last_use[task.unit] + 1, len(self._trace.ticks)):
            raise InternalError(f"{self._words(task)}: an update follows the unit's last use, or the last tick")
        pages = self._gradient_pages.pop(task.unit, 0)
        if self._one_rank:
            self._used -= pages
        else:
            self._leaving += pages

    def _compute(self, task: Task, tick: Tick) -> None:
        if task.unit != tick.unit:
            raise InternalError(f"{self._words(task)}: the trace has {self._layout.units[tick.unit].name} there")
        for unit in tick.live:
            if self._progress[unit] is _Progress.UPDATED:
                raise InternalError(f"{self._words(task)} uses {self._layout.units[unit].name} after its update")
            resident = not self._layout.gathers(unit) and self._placement.homes[unit].parameter is Tier.DEVICE
            whole = (1 << self._pages(unit, Kind.FULL)) - 1
            if not resident and self._present.get((unit, Kind.FULL), 0) != whole:
                raise InternalError(f"{self._words(task)} uses {self._layout.units[unit].name}, which is not there")
            if tick.phase is Phase.BACKWARD and self._pages(unit, Kind.GRADIENT):
                self._write_gradients(task, unit, tick.passes)
        if self._clock is not None:
            self._clock.compute(tick)

    def _arrived(self, unit: int) -> _Progress:
        """How far gradients have come that an update, or those of another pass that are added to them, may follow."""
        if self._placement.homes[unit].gradient is not Tier.DEVICE:
            return _Progress.OFFLOADED
        return _Progress.WRITTEN if self._one_rank else _Progress.REDUCED

    def _write_gradients(self, task: Task, unit: int, backward_pass: int) -> None:
        before, self._written_in[unit] = self._written_in.get(unit), backward_pass
        progress = self._progress[unit]
        if progress is _Progress.WRITTEN and (before == backward_pass or self._passes(unit)):
            return
        added = before != backward_pass and progress is self._arrived(unit) and not self._passes(unit)
        if progress is not _Progress.NONE and not added:
            raise InternalError(
                f"{self._words(task)} writes gradients of {self._layout.units[unit].name}, which are {progress.value}"
            )
        self._progress[unit] = _Progress.WRITTEN
        at_home = self._placement.homes[unit].gradient is Tier.DEVICE and self._placement.keeps_gradients
        if not (self._one_rank and at_home):
            self._gradient_pages[unit] = self._run_pages(unit, gradient=True)
            self._hold(self._gradient_pages[unit])

    def _step(self, task: Task, before: _Progress, after: _Progress) -> None:
        if self._progress[task.unit] is not before:
            raise InternalError(
                f"{self._words(task)}: its gradients are {self._progress[task.unit].value}, not {before.value}"
            )
        self._progress[task.unit] = after
        self._check_whole(task)

    def _check_gradients_complete(self, task: Task) -> None:
        ends = sorted(self._backward_ends[task.unit].values())
        if self._trigger - 1 not in (ends[-1:] if self._passes(task.unit) else ends):
            raise InternalError(
                f"{self._words(task)}: its backward ends with ticks {ends}, so its gradients leave at the trigger after"
            )

    def _check_range(self, task: Task) -> None:
        pages = self._pages(task.unit, task.kind)
        if not 0 <= task.first_page <= task.last_page <= pages:
            raise InternalError(f"{self._words(task)}: the unit has {pages} such pages")

    def _check_whole(self, task: Task) -> None:
        if (task.first_page, task.last_page) != (0, self._pages(task.unit, task.kind)):
            raise InternalError(f"{self._words(task)}: it has to concern all of the unit's pages at once")

    def _check_homes(self) -> None:
        """The homes that the placement counts on hold the states, and the tiers hold the homes."""
        need_bytes = dict.fromkeys(Tier, 0)
        for flat in self._layout.flats:
            homes = self._placement.homes[flat.unit]
            shard_bytes = -(-flat.shard_bytes // BLOCK_BYTES) * BLOCK_BYTES
            need_bytes[homes.parameter] += shard_bytes
            if not flat.trainable:
                continue
            if self._placement.keeps_gradients or homes.gradient is not Tier.DEVICE:
                need_bytes[homes.gradient] += -(-flat.gradient_bytes // BLOCK_BYTES) * BLOCK_BYTES
            need_bytes[homes.master] += flat.shard_numel * self._placement.master_bytes_per_element[flat.index]
        for tier, size in need_bytes.items():
            home_bytes = self._placement.home_bytes(tier)
            if size > home_bytes:
                raise InternalError(
                    f"homes on the {tier.name.lower()} tier take {size} bytes, {home_bytes} are set off"
                )
            if tier is not Tier.DEVICE and home_bytes + self._placement.staged_bytes(tier) > self._budget.of(tier):
                raise CapacityError(
                    f"homes on the {tier.name.lower()} tier take {format_bytes(home_bytes)}, it has "
                    f"{format_bytes(self._budget.of(tier))}; raise {tier.name.lower()}_memory"
                )

    def _check_end(self) -> None:
        if self._present:
            unit, kind = next(iter(self._present))
            raise InternalError(f"the {kind.value} copy of {self._layout.units[unit].name} is never given back")
        for unit in self._backward_ends:
            if self._progress[unit] is not _Progress.UPDATED:
                raise InternalError(
                    f"gradients of {self._layout.units[unit].name} are {self._progress[unit].value} at the end, "
                    "and never reach an update"
                )

    def _put(self, task: Task, kind: Kind) -> None:
        held = self._present.get((task.unit, kind), 0)
        if held & self._mask(task):
            raise InternalError(f"{self._words(task)}: these pages are on the device already")
        self._present[task.unit, kind] = held | self._mask(task)

    def _hold(self, pages: int) -> None:
        self._used += pages
        self._peak = max(self._peak, self._used)
        if self._used > self._limit:
            raise self._too_many(self._used)

    def _too_many(self, pages: int) -> CapacityError:
        return device_refusal(
            self._layout,
            self._trace,
            self._trigger,
            need_pages=pages,
            have_pages=self._limit,
            reserved_bytes=self._reserved_bytes,
        )

    def _passes(self, unit: int) -> bool:
        return self._placement.homes[unit].gradient is Tier.DEVICE and not self._placement.keeps_gradients

    def _mask(self, task: Task) -> int:
        return (1 << task.last_page) - (1 << task.first_page)

    def _pages(self, unit: int, kind: Kind) -> int:
        count = self._page_counts.get((unit, kind))
        if count is None:
            trainable_only = kind in (Kind.GRADIENT, Kind.MASTER)
            flats = [flat for flat in self._layout.flats_of(unit) if flat.trainable or not trainable_only]
            count = sum(-(-flat.shard_bytes // self._layout.page_size) for flat in flats)
            self._page_counts[unit, kind] = count
        return count

    def _run_pages(self, unit: int, *, gradient: bool) -> int:
        flats = [flat for flat in self._layout.flats_of(unit) if flat.trainable or not gradient]
        return sum(-(-flat.padded_bytes // self._layout.page_size) for flat in flats)

    def _tier_uses(self, peaks: list[int]) -> tuple[TierUse, ...]:
        uses: list[TierUse] = []
        non_model = [tick.non_model_bytes for tick in self._trace.ticks] + [0]
        for tier in Tier:
            fixed = self._placement.home_bytes(tier) + self._placement.staged_bytes(tier)
            per_tick = [fixed] * len(peaks)
            if tier is Tier.DEVICE:
                page = self._layout.page_size
                per_tick = [fixed + more + pages * page for more, pages in zip(non_model, peaks, strict=True)]
            peak_bytes = max(per_tick)
            uses.append(TierUse(tier, self._budget.of(tier), peak_bytes, per_tick.index(peak_bytes), tuple(per_tick)))
        return tuple(uses)

    def _words(self, task: Task) -> str:
        return f"trigger {task.trigger}: {task.operation.value} of {self._layout.units[task.unit].name}"
