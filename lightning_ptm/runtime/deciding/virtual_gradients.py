"""Gradients of a virtual run: the device pages that they use from the end of a unit's backward until they are freed.

Owns which units' gradients are in pages, which of them leave the device after the tick, and which units have accumulated
gradients of earlier micro-batches.

I1: gradients use device pages from the time when they are copied into pages. On one rank until the next trigger, when they
    have left the device. On several ranks, both full and reduced: where updates run during the backward, until the next
    unit's gradients are in pages (an update is one unit late, engine.py); else until the end of the backward. `.grad`, which
    autograd fills before, is not in pages.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

from lightning_ptm.runtime.deciding.blueprint import Blueprint
from lightning_ptm.runtime.deciding.gradient_route import Waits
from lightning_ptm.runtime.deciding.virtual_pool import DoneByNeed, VirtualPool
from lightning_ptm.runtime.deciding.virtual_units import VirtualUnits
from lightning_ptm.terms import Kind, Operation, Tier


@dataclasses.dataclass(frozen=True, slots=True)
class LaidOut:
    """Device pages of a unit's gradients.

    Attributes:
        full: pages of the unsharded gradients.
        reduced: pages of the reduce-scatter's output.
        passing: pages of the gradients that wait for the update.
    """

    full: int
    reduced: int
    passing: int

    @property
    def pages(self) -> int:
        return self.full + self.reduced + self.passing


class VirtualGradients:
    """Page counts of the gradients of one rank.

    Args:
        units: units, which are released when their gradients have been passed to the update.
        release_all: releases every unit that is not in use.
    """

    def __init__(
        self,
        blueprint: Blueprint,
        pool: VirtualPool,
        done: DoneByNeed,
        units: VirtualUnits,
        release_all: Callable[[], None],
    ) -> None:
        self._blueprint = blueprint
        self._layout = blueprint.layout
        self._pool = pool
        self._done = done
        self._units = units
        self._release_all = release_all
        # state
        self._gradients: dict[tuple[int, bool], int] = {}
        """Pages by unit and by whether their flats are sharded over ranks."""
        self._accumulated: set[int] = set()
        """Units that have gradients of an earlier micro-batch of this step."""
        self._not_updated: list[int] = []
        """Units whose gradients are in pages and have not been passed to the update."""
        self._leaving: list[tuple[int, bool]] = []
        """Gradients that leave the device after the tick; keys of `_gradients`."""

    def end_backward(self, unit: int) -> None:
        """Allocates the pages of a unit's gradients, which are complete (I1)."""
        if not self._blueprint.placement.gradients[unit].rows:
            return
        shared, own = self._pages_of(unit, shared=True), self._pages_of(unit, shared=False)
        accumulating = self._accumulation_pages(unit)
        at_once = 0
        if accumulating or not self._gradients_leave(unit):  # unsharded gradients are copied or added at once
            at_once = own.full
        pages = shared.pages + own.pages + accumulating
        self._make_room(pages)
        self._pool.take(pages)
        self._pool.give_back(at_once)
        self._gradients[unit, True] = shared.pages
        self._gradients[unit, False] = own.pages + accumulating - at_once
        if self._gradients_leave(unit):
            self._leaving.append((unit, False))
        self._not_updated.append(unit)
        if not self._blueprint.outlive_backward and len(self._not_updated) > 1:
            self._update(self._not_updated.pop(0))

    def _pages_of(self, unit: int, *, shared: bool) -> LaidOut:
        """Returns the pages of the gradients of a unit's flats: of the sharded ones, or of the others."""
        full = reduced = passing = 0
        for row in self._blueprint.placement.gradients[unit].rows:
            flat = self._layout.flats[row.flat]
            if flat.shared is not shared:
                continue
            route = self._blueprint.route(flat)
            # An unsharded gradient on the device is copied from `.grad` straight into its pages, or stays in `.grad`.
            full += row.full if row.reduces or not route.tier.computes else 0
            reduced += row.shard if shared else 0
            passing += row.shard if route.waits is Waits.PASSING else 0
        return LaidOut(full, reduced, passing)

    def _gradients_leave(self, unit: int) -> bool:
        return self._blueprint.placement.homes[unit].gradient is not Tier.DEVICE

    def _update(self, unit: int) -> None:
        """Passes a unit's reduced gradients to the update, and releases the unit."""
        for shared in (True,) if self._gradients_leave(unit) else (True, False):
            held = self._gradients.get((unit, shared), 0)
            stays = min(held, self._after_reduction(unit, shared=shared))
            self._pool.give_back(held - stays)
            self._gradients[unit, shared] = stays
            self._leaving.append((unit, shared))
        self._units.release(unit)
        self._units.evict(unit)
        if self._layout.gathers(unit):
            self._done.add(Operation.REDUCE, unit, Kind.GRADIENT)
        if self._gradients_leave(unit):
            self._done.add(Operation.OFFLOAD, unit, Kind.GRADIENT)
        self._done.add(Operation.UPDATE, unit, Kind.MASTER)

    def _after_reduction(self, unit: int, *, shared: bool) -> int:
        """Returns the pages of the gradients that wait for the update, or to leave the device."""
        takes = self._pages_of(unit, shared=shared)
        return takes.reduced if shared and self._gradients_leave(unit) else takes.passing

    def step(self) -> None:
        """Runs the step: reduces the gradients that are reduced once per step, and updates the remaining units."""
        if self._blueprint.reduced_at_step:
            for unit in reversed(range(len(self._layout.units))):
                self.end_backward(unit)
        for unit in self._not_updated:
            self._update(unit)
        self._accumulated.clear()

    def _accumulation_pages(self, unit: int) -> int:
        """Returns the pages of the buffers in which a unit's gradients are accumulated, or converted to a wider dtype."""
        rows = self._blueprint.placement.gradients[unit].rows
        widened = any(self._layout.flats[row.flat].sums_gradients for row in rows)
        if not widened and unit not in self._accumulated:
            self._accumulated.add(unit)
            return 0
        return sum(row.sum for row in rows)

    def _make_room(self, pages: int) -> None:
        """Frees pages for gradients if needed, as reduction.py does."""
        if not self._pool.has(pages):
            self.reclaim(True)
            self._release_all()

    def end_iteration(self) -> None:
        """Ends the iteration: gradients that wait for the step no longer count."""
        self._not_updated.clear()

    def reclaim(self, wait: bool) -> bool:
        """Frees the pages of gradients that have left the device; returns whether there were any.

        Args:
            wait: also free those of reductions that are running.
        """
        freed = sum(self._gradients.pop(leaves, 0) for leaves in self._leaving)
        self._leaving.clear()
        if wait:
            for (unit, shared), pages in self._gradients.items():
                stays = min(pages, self._pages_of(unit, shared=shared).passing)
                self._gradients[unit, shared] = stays
                freed += pages - stays
        self._pool.give_back(freed)
        return freed > 0
