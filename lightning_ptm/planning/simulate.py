"""Simulator: replays a plan on page counts and checks every use of a page.

Owns an independent check: it shares no code with device_demand.py, placement.py or schedule.py, so that it detects a
mistake there. Decides nothing and changes nothing. The executor can carry out every plan that it accepts.

I1: at every tick all live units are whole on the device.
I2: no copy is fetched or gathered twice, and none is left over at the end.
I3: pages held, homes and staging never exceed a tier's budget, also at triggers.
I4: copies leave at the trigger after their last use. Gradients leave at the trigger after the last backward tick, or,
    where they stay on the device only for the update, after the unit's last tick. No plan has tasks for that: it
    happens by itself in a run. Sums of several passes in a tier that is not addressable are copied to the device for
    that trigger, for the addition.
I5: no two copies or gradients have a frame in common at the same time, and each is within the pool. A gradient takes its
    frames when its backward has ended, after the releases of the next trigger, and has them until the tick there is over;
    one that stays on the device for the update, until the tick after its unit's last is over.
I6: while a unit computes around others that no plan contains, the last frames of the pool are free for these.
"""

from __future__ import annotations

from dataclasses import dataclass

from lightning_ptm.errors import CapacityError, InternalError
from lightning_ptm.planning.capacity_words import device_capacity_error, format_bytes, tick_label
from lightning_ptm.planning.layout import FlatLayout, ModelLayout
from lightning_ptm.planning.placement_data import Budget, PassingPool, Placement
from lightning_ptm.planning.plan import GradientBuffer, GradientFrame, Plan, Task
from lightning_ptm.planning.trace import Tick, Trace
from lightning_ptm.terms import BLOCK_BYTES, Kind, Operation, Phase, Tier


@dataclass(frozen=True, slots=True)
class TierUse:
    """Use of one tier by a plan: its budget, its peak, the tick of the peak, and the most bytes at each tick.

    `bytes_per_tick` has one entry more than there are ticks: the trigger after the last one.
    """

    tier: Tier
    budget_bytes: int
    peak_bytes: int
    peak_tick: int
    bytes_per_tick: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Simulation:
    """The result of a replay: the use of each tier, fastest first."""

    tiers: tuple[TierUse, ...]

    def tier(self, tier: Tier) -> TierUse:
        """Returns one tier's use."""
        return next(use for use in self.tiers if use.tier is tier)


def simulate(
    layout: ModelLayout,
    placement: Placement,
    plan: Plan,
    trace: Trace,
    budget: Budget,
    pool: PassingPool | None = None,
) -> Simulation:
    """Replays a plan.

    Args:
        layout: the model on this world size.
        placement: homes of its units.
        plan: the plan under test.
        trace: the iteration that the plan is for.
        budget: bytes of this rank.
        pool: frames of passing pages; None: as many as `placement` has bytes for.

    Raises:
        CapacityError: a tier's budget is exceeded; names tick and setting.
        InternalError: the plan is wrong: it uses pages that are not on the device, moves some twice, leaves some over, or
            gives a frame to two copies at once.
    """
    return _Replay(layout, placement, trace, budget, pool).run(plan)


class _Replay:
    """One call of `simulate`: the pages that are on the device at the current trigger."""

    def __init__(
        self, layout: ModelLayout, placement: Placement, trace: Trace, budget: Budget, pool: PassingPool | None
    ) -> None:
        # Configuration.
        self._layout = layout
        self._placement = placement
        self._trace = trace
        self._budget = budget
        self._page_counts: dict[tuple[int, Kind], int] = {}
        """Cache of `_pages`."""
        self._gradients: dict[tuple[int, bool], list[FlatLayout]] = {}
        """Cache of `_gradients_of`."""
        self._reserved_bytes = placement.at_home_bytes[Tier.DEVICE] + placement.staged_bytes(Tier.DEVICE)
        self._limit = min(budget[Tier.DEVICE] - self._reserved_bytes, placement.gather_bytes) // layout.page_size
        self._pool = PassingPool(self._limit) if pool is None else pool
        self._flats = {flat.index: flat for flat in layout.flats}
        self._last_use: dict[int, int] = {}
        backward_ends: dict[int, dict[int, int]] = {}
        """By unit and backward pass, the unit's last tick in it."""
        for number, tick in enumerate(trace.ticks):
            for unit in tick.live:
                self._last_use[unit] = number
                if tick.phase is Phase.BACKWARD and self._pages(unit, Kind.GRADIENT):
                    backward_ends.setdefault(unit, {})[tick.passes] = number
        self._complete: dict[int, list[int]] = {}
        """Units whose gradients are complete after a tick, by tick.

        Complete in this backward pass, or, if the gradients pass through, in all passes.
        """
        for unit in sorted(backward_ends):
            ends = backward_ends[unit].values()
            for end in [max(ends)] if self._passes(unit) else ends:
                self._complete.setdefault(end, []).append(unit)
        # State.
        self._trigger = 0
        self._used = 0
        self._peak = 0
        self._leaving = 0
        """Pages that are freed when the current trigger's tick is over."""
        self._present: set[tuple[int, Kind]] = set()
        """(unit, kind) of the copies that are on the device."""
        self._gathered_at: dict[int, int] = {}
        self._gradient_pages: dict[int, int] = {}
        """Pages of full gradients by unit, in flats whose gradients other ranks have a part of."""
        self._own_gradient_pages: dict[int, int] = {}
        """Pages of full gradients by unit, in flats that no other rank shares."""
        self._frames: dict[tuple[str, int, str], range] = {}
        """Frames that are taken, by what has them: copies of a unit's flats, or gradients of a flat."""
        self._frames_until: dict[int, list[tuple[str, int, str]]] = {}
        """By trigger, the gradients whose frames are free from it on."""

    def run(self, plan: Plan) -> Simulation:
        """Replays all triggers, then checks that nothing is left over."""
        self._check_homes()
        if plan.tick_count != len(self._trace.ticks):
            raise InternalError(f"the plan has {plan.tick_count} ticks, the trace {len(self._trace.ticks)}")
        if self._limit < 0:
            raise self._too_many(0)
        triggers: list[list[Task]] = [[] for _ in range(plan.tick_count + 1)]
        last = 0
        for task in plan.tasks:
            if not last <= task.trigger <= plan.tick_count:
                raise InternalError(
                    f"{self._words(task)} comes after trigger {last} in the plan, which ends at trigger {plan.tick_count}"
                )
            last = task.trigger
            triggers[last].append(task)
        peaks: list[int] = []
        collected: dict[int, list[GradientFrame]] = {}
        for each in plan.gradients:
            collected.setdefault(each.tick + 1, []).append(each)
        for self._trigger, tasks in enumerate(triggers):
            self._used -= self._leaving
            self._leaving, self._peak = 0, self._used
            for held in self._frames_until.pop(self._trigger, ()):
                del self._frames[held]
            self._replay_trigger(tasks, collected.pop(self._trigger, []))
            peaks.append(self._peak)
        if collected:
            raise InternalError(f"gradients have frames after tick {min(collected) - 1}, which the plan does not have")
        self._check_end()
        return Simulation(self._tier_uses(peaks))

    def _replay_trigger(self, tasks: list[Task], collected: list[GradientFrame]) -> None:
        ticks = self._trace.ticks
        computes = [position for position, task in enumerate(tasks) if task.operation is Operation.COMPUTE]
        expected = [len(tasks) - 1] if self._trigger < len(ticks) else []
        if computes != expected:
            raise InternalError(
                f"{tick_label(self._layout, self._trace, self._trigger)} has {len(computes)} computes among "
                f"{len(tasks)} tasks; a tick has one, after all others"
            )
        given_up = (Operation.RELEASE, Operation.EVICT)
        for task in [task for task in tasks if task.operation in given_up]:
            self._leave(task)
        self._gradients_leave()
        for each in collected:
            self._collect_at(each)
        for task in [task for task in tasks if task.operation not in given_up]:
            match task.operation:
                case Operation.FETCH:
                    self._fetch(task)
                case Operation.GATHER:
                    self._gather(task)
                case Operation.COMPUTE:
                    self._compute(task, ticks[self._trigger])
                case _:
                    raise InternalError(f"{self._words(task)}: no plan issues that")

    def _fetch(self, task: Task) -> None:
        whole = not self._layout.gathers(task.unit)
        kind = Kind.FULL if whole else Kind.PARAMETER
        at_home = self._placement.homes[task.unit].parameter is Tier.DEVICE
        # A unit at home on the device is fetched to other pages there if it is quantized.
        if task.kind is not kind or (at_home and not (whole and self._pages(task.unit, kind))):
            raise InternalError(f"{self._words(task)}: there is nothing to fetch for a {task.kind.value} copy")
        self._put(task, kind)
        self._hold(self._pages(task.unit, kind))
        self._take_frames(task)

    def _gather(self, task: Task) -> None:
        if not self._layout.gathers(task.unit):
            raise InternalError(f"{self._words(task)}: no other rank shares the unit, so there is nothing to gather")
        at_home = self._placement.homes[task.unit].parameter is Tier.DEVICE
        if not at_home and (task.unit, Kind.PARAMETER) not in self._present:
            raise InternalError(f"{self._words(task)}: its shard pages are not on the device")
        self._put(task, Kind.FULL)
        self._hold(self._pages(task.unit, Kind.FULL))
        self._take_frames(task)
        self._gathered_at[task.unit] = self._trigger

    def _leave(self, task: Task) -> None:
        kind = Kind.FULL if task.operation is Operation.RELEASE else Kind.PARAMETER
        if task.kind is not kind or (task.unit, kind) not in self._present:
            raise InternalError(f"{self._words(task)}: these pages are not on the device")
        before = self._trigger - 1
        if kind is Kind.FULL:
            used_before = before >= 0 and task.unit in self._trace.ticks[before].live
        else:
            used_before = self._gathered_at.get(task.unit) == before
        if not used_before:
            raise InternalError(f"{self._words(task)}: the tick before did not use them, so they left late or unused")
        self._present.remove((task.unit, kind))
        self._used -= self._pages(task.unit, kind)
        for flat in self._layout.flats_of(task.unit):
            self._frames.pop((kind.value, flat.index, ""), None)

    def _take_frames(self, task: Task) -> None:
        """Takes the frames of a copy (I5)."""
        if not task.frames:
            return
        flats = self._moved_flats(task.unit, task.kind)
        if len(flats) != len(task.frames):
            raise InternalError(f"{self._words(task)} has frames for {len(task.frames)} flats, and moves {len(flats)}")
        for (flat, size), frame in zip(flats, task.frames, strict=True):
            self._claim((task.kind.value, flat.index, ""), frame, size, self._words(task))

    def _collect_at(self, place: GradientFrame) -> None:
        """Takes the frames of a gradient (I5)."""
        flat = self._flats.get(place.flat)
        words = f"{place.pages.value} of flat {place.flat} after tick {place.tick}"
        if flat is None or not flat.trainable or place.tick >= len(self._trace.ticks):
            raise InternalError(f"{words}: there is no such gradient")
        tick = self._trace.ticks[place.tick]
        if tick.phase is not Phase.BACKWARD or flat.unit not in tick.live:
            raise InternalError(f"{words}: that tick is not of its backward")
        sizes = {
            GradientBuffer.FULL: flat.padded_bytes,
            GradientBuffer.REDUCED: flat.longest_shard_bytes,
            GradientBuffer.PASSING: flat.padded_bytes
            if self._layout.needs_no_reduction(flat)
            else flat.longest_shard_bytes,
            GradientBuffer.SUM: flat.gradient_bytes,
        }
        until = self._last_use[flat.unit] if place.pages is GradientBuffer.PASSING else place.tick
        held = ("gradient", flat.index, place.pages.value)
        self._claim(held, place.frame, sizes[place.pages], words)
        self._frames_until.setdefault(until + 2, []).append(held)

    def _claim(self, held: tuple[str, int, str], frame: int, size: int, words: str) -> None:
        claimed = range(frame, frame + -(-size // self._layout.page_size))
        if frame < 0 or claimed.stop > self._pool.frames:
            raise InternalError(f"{words} takes frames {frame} to {claimed.stop - 1} of {self._pool.frames}")
        if held in self._frames:
            raise InternalError(f"{words} takes frames a second time")
        for (kind, flat, _), taken in self._frames.items():
            if taken.start < claimed.stop and claimed.start < taken.stop:
                raise InternalError(
                    f"{words} takes frames {frame} to {claimed.stop - 1}, of which the {kind} of flat {flat} has "
                    f"{taken.start} to {taken.stop - 1}"
                )
        self._frames[held] = claimed

    def _gradients_leave(self) -> None:
        """Reduces and offloads the gradients that are complete, and uses those that wait for the update alone (I4)."""
        before = self._trigger - 1
        complete = self._complete.get(before, [])
        for unit in complete:
            beside = self._beside_gradients(unit, needs_no_reduction=False)
            self._hold(beside)  # They are written while the full gradients are read.
            self._used -= self._gradient_pages.pop(unit, 0)
            if self._passes(unit):
                self._gradient_pages[unit] = beside
            else:
                self._leaving += beside
        for unit in complete:
            self._used -= self._beside_gradients(unit, needs_no_reduction=True)
            if not self._passes(unit):
                self._used -= self._own_gradient_pages.pop(unit, 0)
        for unit in {*self._gradient_pages, *self._own_gradient_pages}:
            if self._passes(unit) and self._last_use[unit] == before:
                self._leaving += self._gradient_pages.pop(unit, 0)
                self._used -= self._own_gradient_pages.pop(unit, 0)

    def _compute(self, task: Task, tick: Tick) -> None:
        if task.unit != tick.unit:
            raise InternalError(f"{self._words(task)}: the trace has {self._layout.units[tick.unit].name} in that tick")
        if tick.unit in self._pool.around:
            self._check_by_need(task)
        for unit in tick.live:
            if self._pages(unit, Kind.FULL) and (unit, Kind.FULL) not in self._present:
                raise InternalError(
                    f"{self._words(task)} uses {self._layout.units[unit].name}, which is not on the device"
                )
            if tick.phase is Phase.BACKWARD and self._pages(unit, Kind.GRADIENT):
                self._write_gradients(unit)
        for unit in self._complete.get(self._trigger, ()):
            # The unit's last gradient may arrive after autograd has entered the next unit.
            self._hold(self._beside_gradients(unit, needs_no_reduction=True))

    def _check_by_need(self, task: Task) -> None:
        """Checks that pages of units that no plan contains are free (I6)."""
        free_from = self._pool.frames - self._pool.by_need
        for (kind, flat, _), taken in self._frames.items():
            if taken.stop > free_from:
                raise InternalError(
                    f"{self._words(task)}: the {kind} of flat {flat} has frames {taken.start} to {taken.stop - 1}, and "
                    f"those from {free_from} on are for units that the plan does not contain"
                )

    def _write_gradients(self, unit: int) -> None:
        at_home = self._placement.homes[unit].gradient is Tier.DEVICE and self._placement.keeps_gradients
        if unit not in self._gradient_pages:
            self._gradient_pages[unit] = self._full_gradient_pages(unit, needs_no_reduction=False)
            self._hold(self._gradient_pages[unit])
        if unit not in self._own_gradient_pages and not at_home:
            self._own_gradient_pages[unit] = self._full_gradient_pages(unit, needs_no_reduction=True)
            self._hold(self._own_gradient_pages[unit])

    def _check_homes(self) -> None:
        """Checks that the bytes that the placement counts for homes suffice, and that the tiers can hold them."""
        need_bytes = dict.fromkeys(self._budget, 0)
        for flat in self._layout.flats:
            homes = self._placement.homes[flat.unit]
            shard_bytes = -(-flat.shard_bytes // BLOCK_BYTES) * BLOCK_BYTES
            need_bytes[homes.parameter] += shard_bytes
            if not flat.trainable:
                continue
            at_home = homes.gradient is not Tier.DEVICE and not self._placement.passing_bytes
            if self._placement.keeps_gradients or at_home:
                need_bytes[homes.gradient] += -(-flat.gradient_bytes // BLOCK_BYTES) * BLOCK_BYTES
            need_bytes[homes.master] += self._placement.master_bytes(flat)
        if self._placement.passing_bytes:
            need_bytes[Tier.HOST] += self._placement.passing_bytes
        for tier, size in need_bytes.items():
            home_bytes = self._placement.at_home_bytes[tier]
            if size > home_bytes:
                raise InternalError(
                    f"homes on the {tier.name.lower()} tier take {size} bytes, the placement counts {home_bytes}"
                )
            if tier is not Tier.DEVICE and home_bytes + self._placement.staged_bytes(tier) > self._budget[tier]:
                raise CapacityError(
                    f"model states and staging buffers need {format_bytes(home_bytes + self._placement.staged_bytes(tier))} "
                    f"{tier.place}, and pages may take {format_bytes(self._budget[tier])}; raise {tier.setting}"
                )

    def _check_end(self) -> None:
        if self._present:
            unit, kind = next(iter(self._present))
            raise InternalError(f"the {kind.value} copy of {self._layout.units[unit].name} is never freed")
        if left := {**self._gradient_pages, **self._own_gradient_pages}:
            unit = next(iter(left))
            raise InternalError(f"gradients of {self._layout.units[unit].name} are left over at the end")

    def _put(self, task: Task, kind: Kind) -> None:
        if (task.unit, kind) in self._present:
            raise InternalError(f"{self._words(task)}: these pages are on the device already")
        self._present.add((task.unit, kind))

    def _hold(self, pages: int) -> None:
        self._used += pages
        self._peak = max(self._peak, self._used)
        if self._used > self._limit:
            raise self._too_many(self._used)

    def _too_many(self, pages: int) -> CapacityError:
        return device_capacity_error(
            self._layout,
            self._trace,
            self._trigger,
            need_pages=pages,
            have_pages=self._limit,
            reserved_bytes=self._reserved_bytes,
            unified=self._placement.staging_tier.computes,
        )

    def _passes(self, unit: int) -> bool:
        return self._placement.homes[unit].gradient is Tier.DEVICE and not self._placement.keeps_gradients

    def _pages(self, unit: int, kind: Kind) -> int:
        """Returns the pages of a copy.

        Unshared flats do not count where their home is the device; otherwise they are fetched whole.
        """
        count = self._page_counts.get((unit, kind))
        if count is None:
            if kind in (Kind.FULL, Kind.PARAMETER):
                sizes = [size for _, size in self._moved_flats(unit, kind)]
            else:
                sizes = [flat.longest_shard_bytes for flat in self._layout.flats_of(unit) if flat.trainable]
            count = self._page_counts[unit, kind] = sum(-(-size // self._layout.page_size) for size in sizes)
        return count

    def _moved_flats(self, unit: int, kind: Kind) -> list[tuple[FlatLayout, int]]:
        """Returns the flats of a copy, with the bytes that it has of each."""
        flats = self._layout.flats_of(unit)
        if kind is Kind.PARAMETER:
            return [(flat, flat.longest_shard_bytes) for flat in flats if flat.shared]
        away = self._placement.homes[unit].parameter is not Tier.DEVICE
        return [(flat, flat.padded_bytes) for flat in flats if flat.shared or away or flat.code is not None]

    def _beside_gradients(self, unit: int, *, needs_no_reduction: bool) -> int:
        """Returns the pages that receive a unit's full gradients when they leave, by reduction or by addition to a sum.

        The addition to a shard happens after the full gradients are freed, and fits into their pages.
        """
        to_device = self._placement.sums_gradients and not self._placement.homes[unit].gradient.addressable
        pages = 0
        for flat in self._gradients_of(unit, needs_no_reduction=needs_no_reduction):
            reduced = 0 if needs_no_reduction else flat.longest_shard_bytes
            so_far = flat.gradient_bytes if to_device and not flat.shared else 0
            pages += -(-max(reduced, so_far) // self._layout.page_size)
        return pages

    def _full_gradient_pages(self, unit: int, *, needs_no_reduction: bool) -> int:
        flats = self._gradients_of(unit, needs_no_reduction=needs_no_reduction)
        return sum(-(-flat.padded_bytes // self._layout.page_size) for flat in flats)

    def _gradients_of(self, unit: int, *, needs_no_reduction: bool) -> list[FlatLayout]:
        """Returns the trainable flats whose gradient needs, or does not need, a reduction."""
        found = self._gradients.get((unit, needs_no_reduction))
        if found is None:
            flats = [flat for flat in self._layout.flats_of(unit) if flat.trainable]
            found = [flat for flat in flats if self._layout.needs_no_reduction(flat) is needs_no_reduction]
            self._gradients[unit, needs_no_reduction] = found
        return found

    def _tier_uses(self, peaks: list[int]) -> tuple[TierUse, ...]:
        uses: list[TierUse] = []
        for tier in self._budget:
            fixed = self._placement.at_home_bytes[tier] + self._placement.staged_bytes(tier)
            pages = peaks if tier is Tier.DEVICE else [0] * len(peaks)
            per_tick = [fixed + each * self._layout.page_size for each in pages]
            peak_bytes = max(per_tick)
            uses.append(TierUse(tier, self._budget[tier], peak_bytes, per_tick.index(peak_bytes), tuple(per_tick)))
        return tuple(uses)

    def _words(self, task: Task) -> str:
        return f"trigger {task.trigger}: {task.operation.value} of {self._layout.units[task.unit].name}"
