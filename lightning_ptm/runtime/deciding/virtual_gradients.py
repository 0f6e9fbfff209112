"""Gradients on paper: the device pages that they take from the end of a unit's backward until they have left.

Owns which units' gradients were laid out, which of them leave behind the tick, and of which there are sums already.

I1: gradients take device pages from when they are laid out there. On one rank until the next trigger, when they have left. On
    several, whole and reduced: until the next unit's have been laid out where updates run behind the backward (an update is
    one unit behind, engine.py), else to the end of the backward. `.grad`, which autograd fills before that, is no page.
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
    """Of gradients on the device: as they are laid out, what ranks reduce them to, and what waits for the update."""

    full: int
    reduced: int
    passing: int

    @property
    def pages(self) -> int:
        return self.full + self.reduced + self.passing


class VirtualGradients:
    """Of one rank.

    Args:
        units: are given up when their gradients have gone to the update.
        release_all: gives up every unit that is not in use.
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
        """By unit, of flats that several ranks share, and of others."""
        self._summed: set[int] = set()
        """Units that have gradients of this step already."""
        self._behind: list[int] = []
        """Units whose gradients were laid out and have not gone to the update."""
        self._leaving: list[tuple[int, bool]] = []
        """Of units, those that leave behind the tick."""

    def end_backward(self, unit: int) -> None:
        """All gradients of a unit are there, to be laid out (I1)."""
        if not self._layout.trainable_pages(unit):
            return
        shared, own = self._laid_out(unit, shared=True), self._laid_out(unit, shared=False)
        so_far = self._so_far(unit)
        at_once = 0
        if so_far or not self._gradients_leave(unit):  # whole on this rank: it is copied, or added, at once
            at_once = own.full
        pages = shared.pages + own.pages + so_far
        self._make_room(pages)
        self._pool.take(pages)
        self._pool.give_back(at_once)
        self._gradients[unit, True] = shared.pages
        self._gradients[unit, False] = own.pages + so_far - at_once
        if self._gradients_leave(unit):
            self._leaving.append((unit, False))
        self._behind.append(unit)
        if not self._blueprint.outlive_backward and len(self._behind) > 1:
            self._update(self._behind.pop(0))

    def _laid_out(self, unit: int, *, shared: bool) -> LaidOut:
        """What laying out the gradients of a unit's flats takes, of those that several ranks share, or of the others."""
        blueprint, layout = self._blueprint, self._layout
        full = reduced = passing = 0
        for flat in layout.flats_of(unit):
            if flat.shared is not shared or not blueprint.traits[flat.index]:
                continue
            route = blueprint.route(flat)
            # Such a gradient goes from `.grad` into its pages, or stays there.
            if not (layout.needs_no_reduction(flat) and route.tier.computes):
                full += -(-flat.padded_bytes // layout.page_size)
            reduced += flat.shard_pages if shared else 0
            passing += flat.shard_pages if route.waits is Waits.PASSING else 0
        return LaidOut(full, reduced, passing)

    def _gradients_leave(self, unit: int) -> bool:
        return self._blueprint.gradient_home(unit) is not Tier.DEVICE

    def _update(self, unit: int) -> None:
        """A unit's reduction has ended, and its gradients go to the update: it is given up."""
        blueprint, layout = self._blueprint, self._layout
        for shared in (True,) if self._gradients_leave(unit) else (True, False):
            held = self._gradients.get((unit, shared), 0)
            stays = min(held, self._after_reduction(unit, shared=shared))
            self._pool.give_back(held - stays)
            self._gradients[unit, shared] = stays
            self._leaving.append((unit, shared))
        self._units.release(unit)
        self._units.evict(unit)
        if layout.gathers(unit):
            self._done.add(Operation.REDUCE, unit, Kind.GRADIENT)
        if blueprint.placement.homes[unit].gradient is not Tier.DEVICE:
            self._done.add(Operation.OFFLOAD, unit, Kind.GRADIENT)
        self._done.add(Operation.UPDATE, unit, Kind.MASTER)

    def _after_reduction(self, unit: int, *, shared: bool) -> int:
        """Pages that wait for the update, or to leave."""
        takes = self._laid_out(unit, shared=shared)
        return takes.reduced if shared and self._gradients_leave(unit) else takes.passing

    def step(self) -> None:
        """What is reduced once a step is reduced now, and what was not updated behind the backward is."""
        if self._blueprint.reduced_at_step:
            for unit in reversed(range(len(self._layout.units))):
                self.end_backward(unit)
        for unit in self._behind:
            self._update(unit)
        self._summed.clear()

    def _so_far(self, unit: int) -> int:
        """Pages of the buffers in which a unit's gradients are added to those of earlier passes, or widened."""
        gradients = self._blueprint.placement.gradients(unit)
        flats = [flat for flat in self._layout.flats_of(unit) if flat.trainable and not flat.shared]
        if not gradients.add_up_in_buffer or not flats:
            return 0
        if not any(flat.sums_gradients for flat in flats) and unit not in self._summed:
            self._summed.add(unit)
            return 0
        return sum(-(-flat.gradient_bytes // self._layout.page_size) for flat in flats)

    def _make_room(self, pages: int) -> None:
        """For gradients, as reduction.py does."""
        if not self._pool.has(pages):
            self.reclaim(True)
            self._release_all()

    def end_iteration(self) -> None:
        """What has not gone to the update waits for it elsewhere."""
        self._behind.clear()

    def reclaim(self, wait: bool) -> bool:
        """Pages of gradients that have left come back (or, with True, of those under way, too); whether any did."""
        freed = sum(self._gradients.pop(leaves, 0) for leaves in self._leaving)
        self._leaving.clear()
        if wait:  # for reductions under way
            for (unit, shared), pages in self._gradients.items():
                stays = min(pages, self._laid_out(unit, shared=shared).passing)
                self._gradients[unit, shared] = stays
                freed += pages - stays
        self._pool.give_back(freed)
        return freed > 0
