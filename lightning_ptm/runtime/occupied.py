"""Bytes of pages in use at each tick of a plan, as a run of a blueprint will have them; and of gradients beside the pages.

Counts on paper what pages.py and the updater take at the start; what stores and gradients take and give back at ticks
is replay.py's.
Decides and allocates nothing. The simulator's bytes (planning/simulate.py) are another thing: the most that the plan may
come to, by which it is accepted; these are what it will come to.

I1: homes and staging fill pages by the ledger's rule (memory/ledger.py): at most two tensors in a page.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Collection, Iterator

import torch

from lightning_ptm.planning.layout import FlatLayout, round_up
from lightning_ptm.planning.plan import Plan
from lightning_ptm.planning.trace import Trace
from lightning_ptm.runtime.blueprint import Blueprint
from lightning_ptm.runtime.pieces import BUFFERS
from lightning_ptm.runtime.replay import Replay
from lightning_ptm.terms import BLOCK_BYTES, Tier


@dataclasses.dataclass(frozen=True, slots=True)
class Occupied:
    """Bytes of one rank.

    Attributes:
        fixed: by tier: pages that the run takes once and keeps.
        device_per_tick: of device pages at the worst moment of each tick of any iteration, the fixed ones included; the
            last entry is after the last tick.
        gradients_beside: the most that gradients in `.grad` take outside of pages, where they wait there for the update.
        plan: what is done in the iteration: the plan, and what is done for units that are in none.
    """

    fixed: dict[Tier, int]
    device_per_tick: tuple[int, ...]
    gradients_beside: int
    plan: Plan

    def peak(self, tier: Tier) -> int:
        """The most bytes of pages at once."""
        return max(self.device_per_tick) if tier is Tier.DEVICE else self.fixed[tier]

    def per_tick(self, tier: Tier) -> tuple[int, ...]:
        """Bytes of pages at each tick."""
        return self.device_per_tick if tier is Tier.DEVICE else (self.fixed[tier],) * len(self.device_per_tick)


def occupied(drawn: Blueprint, plan: Plan, trace: Trace, again: Collection[int] = ()) -> Occupied:
    """What a run takes that follows `plan`.

    Args:
        plan: made for `drawn.planned(trace)`.
        trace: one iteration, units that are in no plan included.
        again: of these, those whose layer is computed again in the backward.
    """
    page = drawn.layout.page_size
    fixed = _fixed_pages(drawn)
    ticks, done = Replay(drawn, trace, fixed[Tier.DEVICE], again).run(plan)
    if drawn.layout.world_size > 1:
        first, _ = Replay(drawn, trace, fixed[Tier.DEVICE], again, follows=False).run(plan)
        ticks = [max(pair) for pair in zip(ticks, first, strict=True)]
    return Occupied(
        fixed={tier: fixed[tier] * page for tier in Tier},
        device_per_tick=tuple((fixed[Tier.DEVICE] + more) * page for more in ticks),
        gradients_beside=_gradients_beside(drawn),
        plan=done,
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
                ledgers[gradient].add(flat.gradient_bytes)
            elif gradient is not Tier.DEVICE:  # taken when the first gradient comes, and kept
                later.append((gradient, flat.gradient_bytes))
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
    return None if drawn.layout.world_size == 1 and home is Tier.DEVICE and not flat.sums_gradients else home


def _staged(drawn: Blueprint, flat: FlatLayout, gradient: Tier | None) -> Counter[tuple[Tier, torch.dtype]]:
    """Buffers that one chunk of a flat's update takes: of what is not where the arithmetic is (update/updater.py)."""
    homes, dtype = drawn.placement.homes[flat.unit], drawn.dtypes[flat.index]
    masters = _master_dtypes(drawn, flat)
    home = homes.master if masters else homes.parameter
    place = drawn.placement.staging_tier if home is Tier.DISK else home
    if drawn.lock_free is not None:
        gradient = None  # in RAM, where they are used
    columns = [*((homes.master, master) for master in masters), (homes.parameter, dtype)]
    columns += [(gradient, drawn.gradient_dtypes[flat.index])] if gradient is not None else []
    return Counter((place, kind) for tier, kind in columns if tier is not place)


def _gradients_beside(drawn: Blueprint) -> int:
    """What waits in `.grad`: all of it until the step, or as much as may wait for updates behind the backward pass."""
    in_place: list[int] = []
    for unit in range(len(drawn.units)):
        flats = [flat for flat in drawn.layout.flats_of(unit) if drawn.traits[flat.index] is not None]
        whole = [flat for flat in flats if drawn.accumulates_whole or _gradient_pages_tier(drawn, flat) is None]
        in_place.append(sum(flat.padded_numel * flat.gradient_itemsize for flat in whole))
    total = sum(in_place)
    if drawn.keep_gradients or drawn.accumulates_whole:
        return total
    most = in_place[0] + max(drawn.gradient_room_bytes, 2 * max(in_place[1:], default=0))
    return min(total, most)
