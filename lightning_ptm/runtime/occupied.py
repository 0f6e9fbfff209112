"""Bytes of pages in use at each tick of a plan, as a run of a blueprint will have them; and of gradients beside the pages.

Counts on paper what pages.py and the updater take at the start, and what stores and gradients take and give back at ticks.
Decides and allocates nothing. The simulator's bytes (planning/simulate.py) are another thing: the most that the plan may
come to, by which it is accepted; these are what it will come to.

I1: homes and staging fill pages by the ledger's rule (memory/ledger.py): at most two tensors in a page.
I2: a unit's gradients take device pages from the end of its last backward tick, which is when they are laid out there, to
    the next trigger, when they have left. `.grad`, which autograd fills before that, is no page.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterator, Sequence

import torch

from lightning_ptm.planning.layout import FlatLayout, round_up
from lightning_ptm.planning.plan import Plan, Task
from lightning_ptm.planning.trace import Trace
from lightning_ptm.runtime.blueprint import Blueprint
from lightning_ptm.runtime.pieces import BUFFERS
from lightning_ptm.terms import BLOCK_BYTES, Kind, Operation, Phase, Tier


@dataclasses.dataclass(frozen=True, slots=True)
class Occupied:
    """Bytes of one rank.

    Attributes:
        fixed: by tier: pages that the run takes once and keeps.
        device_per_tick: of device pages at the worst moment of each tick, the fixed ones included; the last entry is after
            the last tick.
        gradients_beside: the most that gradients in `.grad` take outside of pages, where they wait there for the update.
    """

    fixed: dict[Tier, int]
    device_per_tick: tuple[int, ...]
    gradients_beside: int

    def peak(self, tier: Tier) -> int:
        """The most bytes of pages at once."""
        return max(self.device_per_tick) if tier is Tier.DEVICE else self.fixed[tier]

    def per_tick(self, tier: Tier) -> tuple[int, ...]:
        """Bytes of pages at each tick."""
        return self.device_per_tick if tier is Tier.DEVICE else (self.fixed[tier],) * len(self.device_per_tick)


def occupied(drawn: Blueprint, plan: Plan, trace: Trace) -> Occupied:
    """What a run takes that follows `plan`, which was made for `trace`."""
    page = drawn.layout.page_size
    fixed = _fixed_pages(drawn)
    return Occupied(
        fixed={tier: fixed[tier] * page for tier in Tier},
        device_per_tick=tuple((fixed[Tier.DEVICE] + more) * page for more in _Ticks(drawn, trace).run(plan)),
        gradients_beside=_gradients_beside(drawn),
    )


def _fixed_pages(drawn: Blueprint) -> Counter[Tier]:
    """Pages that are taken at the start, by tier, in the order in which the engine takes them."""
    ledgers = {tier: _Tail(drawn.layout.page_size) for tier in Tier}
    staging: Counter[tuple[Tier, torch.dtype]] = Counter()
    later: list[tuple[Tier, int]] = []
    homes = drawn.placement.homes
    for flat in drawn.layout.flats:
        ledgers[homes[flat.unit].parameter].add(flat.shard_bytes)
    for flat in _trained(drawn):
        for dtype in _master_dtypes(drawn, flat):
            ledgers[homes[flat.unit].master].add(flat.shard_numel * dtype.itemsize)
    chunk_numel = max(BLOCK_BYTES, drawn.layout.page_size // 4)
    for flat in _trained(drawn):
        gradient = _gradient_pages_tier(drawn, flat)
        if gradient is not None and drawn.lock_free is None:
            if drawn.keep_gradients:
                ledgers[gradient].add(flat.shard_bytes)
            elif gradient is not Tier.DEVICE:  # taken when the first gradient comes, and kept
                later.append((gradient, flat.shard_bytes))
        wanted = _staged(drawn, flat, gradient)
        for key, count in wanted.items():
            for _ in range(max(count - staging[key], 0) * drawn.staging_chunks):
                ledgers[key[0]].add(chunk_numel * key[1].itemsize)
            staging[key] = max(count, staging[key])
    for tier, size in reversed(later):
        ledgers[tier].add(size)
    pages = Counter({tier: ledger.pages for tier, ledger in ledgers.items()})
    ram = Tier.DEVICE if drawn.unified else Tier.HOST
    if drawn.lock_free is not None:
        for kind in (*drawn.lock_free.spares, *drawn.lock_free.gradients):
            pages[ram] += kind.count * -(-kind.numel * kind.dtype.itemsize // drawn.layout.page_size)
    if drawn.saves_behind and drawn.pool_bytes[Tier.DISK]:
        kinds = {
            dtype
            for flat in _trained(drawn)
            if homes[flat.unit].master is Tier.DISK
            for dtype in _master_dtypes(drawn, flat)
        }
        pages[ram] += sum(BUFFERS * -(-chunk_numel * dtype.itemsize // drawn.layout.page_size) for dtype in kinds)
    return pages


class _Tail:
    """Pages of one tier that is filled in a row: a tensor begins where the last one ended, unless two are there (I1)."""

    def __init__(self, page_size: int) -> None:
        self._page_size = page_size
        self.pages = 0
        self._left_bytes = 0
        """Of the last page, if one tensor is in it."""

    def add(self, size: int) -> None:
        size = round_up(size, BLOCK_BYTES)
        if not size:
            return
        shares = self._left_bytes > 0
        rest = size - self._left_bytes
        if shares and rest <= 0:
            self._left_bytes = 0
            return
        self.pages += -(-rest // self._page_size)
        self._left_bytes = -rest % self._page_size


def _trained(drawn: Blueprint) -> Iterator[FlatLayout]:
    return (flat for flat in drawn.layout.flats if drawn.traits[flat.index] is not None)


def _master_dtypes(drawn: Blueprint, flat: FlatLayout) -> list[torch.dtype]:
    """Of the paged tensors of a flat's master states."""
    traits, master = drawn.traits[flat.index], drawn.master_dtypes[flat.index]
    slots = [slot.dtype for slot in traits.slots] if traits is not None else []
    return [master, *slots] if master is not None else slots


def _gradient_pages_tier(drawn: Blueprint, flat: FlatLayout) -> Tier | None:
    """Where a flat's gradients wait for the update; None: in `.grad`."""
    home = drawn.gradient_home(flat.unit)
    return None if drawn.layout.world_size == 1 and home is Tier.DEVICE else home


def _staged(drawn: Blueprint, flat: FlatLayout, gradient: Tier | None) -> Counter[tuple[Tier, torch.dtype]]:
    """Buffers that one chunk of a flat's update takes: of what is not where the arithmetic is (update/updater.py)."""
    homes, dtype = drawn.placement.homes[flat.unit], drawn.dtypes[flat.index]
    masters = _master_dtypes(drawn, flat)
    home = homes.master if masters else homes.parameter
    place = drawn.placement.staging_tier if home is Tier.DISK else home
    if drawn.lock_free is not None:
        gradient = None  # in RAM, where they are used
    columns = [*((homes.master, master) for master in masters), (homes.parameter, dtype)]
    columns += [(gradient, dtype)] if gradient is not None else []
    return Counter((place, kind) for tier, kind in columns if tier is not place)


def _gradients_beside(drawn: Blueprint) -> int:
    """What waits in `.grad`: all of it until the step, or as much as may wait for updates behind the backward pass."""
    in_place: list[int] = []
    for unit in range(len(drawn.units)):
        flats = [flat for flat in drawn.layout.flats_of(unit) if drawn.traits[flat.index] is not None]
        whole = drawn.accumulates_whole or (flats and _gradient_pages_tier(drawn, flats[0]) is None)
        in_place.append(sum(flat.padded_bytes for flat in flats) if whole else 0)
    total = sum(in_place)
    if drawn.keep_gradients or drawn.accumulates_whole:
        return total
    most = in_place[0] + max(drawn.gradient_room_bytes, 2 * max(in_place[1:], default=0))
    return min(total, most)


class _Ticks:
    """Device pages at ticks, beside the fixed ones."""

    def __init__(self, drawn: Blueprint, trace: Trace) -> None:
        # Configuration.
        self._drawn = drawn
        self._one_rank = drawn.layout.world_size == 1
        last = {unit: at for at, tick in enumerate(trace.ticks) if tick.phase is Phase.BACKWARD for unit in tick.live}
        self._complete: list[list[int]] = [[] for _ in trace.ticks]
        """Units whose gradients are complete at the end of a tick."""
        for unit, at in last.items():
            self._complete[at].append(unit)
        # State.
        self._used = 0
        self._peak = 0
        self._gradients: dict[int, int] = {}

    def run(self, plan: Plan) -> list[int]:
        """Pages at the worst moment of each tick, and after the last."""
        triggers: list[list[Task]] = [[] for _ in range(plan.tick_count + 1)]
        for task in plan.tasks:
            triggers[task.trigger].append(task)
        found = []
        for trigger, tasks in enumerate(triggers):
            if self._one_rank:  # what the tick before has laid out has left
                self._used -= sum(self._gradients.values())
                self._gradients.clear()
            self._peak = self._used
            for task in tasks:
                self._take(task)
            for unit in self._complete[trigger] if trigger < plan.tick_count else ():
                self._lay_out_gradients(unit)
            found.append(self._peak)
        return found

    def _take(self, task: Task) -> None:
        layout, unit = self._drawn.layout, task.unit
        match task.operation:
            case Operation.FETCH | Operation.GATHER:
                full = task.kind is Kind.FULL
                self._hold(layout.full_pages(unit) if full else task.last_page - task.first_page)
            case Operation.RELEASE:
                self._used -= layout.full_pages(unit)
            case Operation.EVICT:
                self._used -= task.last_page - task.first_page
            case Operation.REDUCE:
                stays = layout.trainable_pages(unit) if self._passing(unit) else 0
                self._hold(layout.trainable_pages(unit))
                self._used -= self._gradients.pop(unit, 0) + layout.trainable_pages(unit) - stays
                self._gradients[unit] = stays
            case Operation.OFFLOAD | Operation.UPDATE:  # of several ranks
                self._used -= self._gradients.pop(unit, 0)

    def _lay_out_gradients(self, unit: int) -> None:
        flats: Sequence[FlatLayout] = [flat for flat in self._drawn.layout.flats_of(unit) if flat.trainable]
        if self._one_rank and all(_gradient_pages_tier(self._drawn, flat) is None for flat in flats):
            return
        self._gradients[unit] = self._drawn.layout.full_gradient_pages(unit)
        self._hold(self._gradients[unit])

    def _passing(self, unit: int) -> bool:
        return not self._drawn.keep_gradients and self._drawn.gradient_home(unit) is Tier.DEVICE

    def _hold(self, pages: int) -> None:
        self._used += pages
        self._peak = max(self._peak, self._used)
