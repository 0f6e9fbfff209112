"""Units of a virtual run (the protocol `Units` of planning/fetch_policy.py): page counts in place of the stores of a run.

Owns which units are gathered or fetched, and which shards were fetched for an all-gather.

I1: pages are allocated and freed in the order in which the runtime does it.
I2: nothing is late: updates and fetches have finished when a unit is needed.
"""

from __future__ import annotations

from collections.abc import Callable

from lightning_ptm.runtime.deciding.blueprint import Blueprint
from lightning_ptm.runtime.deciding.virtual_pool import DoneByNeed, VirtualPool
from lightning_ptm.terms import Kind, Operation, Tier


class VirtualUnits:
    """Page counts of the units of one rank.

    Args:
        reclaim: frees pages of gradients, when the policy requests it.
    """

    def __init__(
        self, blueprint: Blueprint, pool: VirtualPool, done: DoneByNeed, reclaim: Callable[[bool], bool]
    ) -> None:
        self._blueprint = blueprint
        self._layout = blueprint.layout
        self._pool = pool
        self._done = done
        self.reclaim = reclaim
        # state
        self._full: dict[int, int] = {}
        """Pages of gathered or fetched units."""
        self._shards: dict[int, int] = {}
        """Pages of shards that were fetched for an all-gather."""

    def gathers(self, unit: int) -> bool:
        return self._layout.gathers(unit)

    def live(self, unit: int) -> bool:
        return unit in self._full or not self._full_pages(unit)

    def fetched(self, unit: int) -> bool:
        return self.live(unit)

    def movable(self, unit: int) -> bool:
        return unit in self._full

    def has_spare_shards(self, unit: int) -> bool:
        return unit in self._shards

    def update_pending(self, unit: int) -> bool:
        return False

    def _full_pages(self, unit: int) -> int:
        return self._layout.full_pages(unit, in_place=not self._away(unit))

    def _away(self, unit: int) -> bool:
        return self._blueprint.placement.homes[unit].parameter is not Tier.DEVICE

    def start_fetch(self, unit: int, *, agreed: bool) -> None:
        layout = self._layout
        full, shards = self._full_pages(unit), unit in self._shards or not (layout.gathers(unit) and self._away(unit))
        self._pool.check_room(full + (0 if shards else layout.gathered_pages(unit)))
        self._full[unit] = full
        self._pool.take(full)
        if not shards:
            self.fetch_shards(unit)
        self._done.add(Operation.GATHER if layout.gathers(unit) else Operation.FETCH, unit, Kind.FULL)

    def fetch_shards(self, unit: int) -> None:
        if unit in self._shards or not (self._layout.gathers(unit) and self._away(unit)):
            return
        pages = self._layout.gathered_pages(unit)
        self._pool.check_room(pages)
        self._shards[unit] = pages
        self._pool.take(pages)
        self._done.add(Operation.FETCH, unit, Kind.PARAMETER)

    def release(self, unit: int) -> None:
        pages = self._full.pop(unit, 0)
        self._pool.give_back(pages)
        if pages:
            self._done.add(Operation.RELEASE, unit, Kind.FULL)

    def evict(self, unit: int) -> None:
        pages = self._shards.pop(unit, 0)
        self._pool.give_back(pages)
        if pages:
            self._done.add(Operation.EVICT, unit, Kind.PARAMETER)
