"""Device pages that each unit needs at each instant: the least demand, and the demand with overlap.

Owns the translation of a unit's uses, and of the pages of its copies and gradients, into demands over instants
(page_occupancy.py). Placement adds the demands up to choose homes; schedule starts from them. The simulator does not use
this file.

I1: the least demand of a unit is what its plan holds when nothing is fetched before its need.
I2: the comfortable demand covers the least one; it adds a fetch one tick ahead, and a tick in which gradients leave.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from lightning_ptm.planning.layout import ModelLayout
from lightning_ptm.planning.lifetime import Span, UnitUse, Uses
from lightning_ptm.planning.page_occupancy import Occupancy, compute_instant, trigger_instant
from lightning_ptm.planning.placement_data import Gradients
from lightning_ptm.terms import Tier


@dataclass(frozen=True, slots=True)
class Demand:
    """`pages` device pages at each of the instants first..last."""

    first: int
    last: int
    pages: int

    def add_to(self, occupancy: Occupancy) -> None:
        """Adds the pages to the occupancy."""
        occupancy.add(self.first, self.last, self.pages)

    def take_from(self, occupancy: Occupancy) -> None:
        """Removes the pages from the occupancy."""
        occupancy.add(self.first, self.last, -self.pages)


def early_triggers(spans: tuple[Span, ...]) -> tuple[int, ...]:
    """Returns the trigger one tick before each span, or the first trigger.

    Spans of a unit never touch, so the tick before a span is outside the span before it.
    """
    return tuple(max(span.first - 1, 0) for span in spans)


def parameter_demands(
    layout: ModelLayout, uses: Uses, unit: int, parameter_home: Tier, *, comfortable: bool
) -> Iterator[Demand]:
    """Returns the demands of a unit's gathered flats, and of the shard pages that are fetched for the gather.

    Flats that no other rank shares are used in place if their home is the device; otherwise they are fetched straight
    into their full runs of pages.
    """
    full_pages = layout.full_pages(unit, in_place=parameter_home.computes)
    shard_pages = 0 if parameter_home.computes else layout.gathered_pages(unit)
    if not full_pages:
        return
    spans = uses.units[unit].spans()
    triggers = early_triggers(spans) if comfortable else tuple(span.first for span in spans)
    for span, trigger in zip(spans, triggers, strict=True):
        yield Demand(compute_instant(trigger), compute_instant(span.end), full_pages)
        if shard_pages:
            fetched = max(trigger - 1, 0) if comfortable else trigger
            # Until the need, though the gather may be done earlier, so that the least demand is covered (I2).
            yield Demand(compute_instant(fetched), compute_instant(span.first), shard_pages)


@dataclass(frozen=True, slots=True)
class Entered:
    """Pages of the gradients that a backward begins to write in a tick.

    Args:
        full: pages of the whole gradients.
        sums: pages through which they are added to sums, if these wait in a tier without addresses.
    """

    full: int = 0
    sums: int = 0


def entered_gradients(layout: ModelLayout, uses: Uses) -> Mapping[int, Entered]:
    """Returns the gradients that a backward begins to write, by the tick in which it begins."""

    def pages(size: int) -> int:
        return -(-size // layout.page_size)

    found: dict[int, Entered] = {}
    for unit, use in enumerate(uses.units):
        flats = [flat for flat in layout.flats_of(unit) if flat.trainable]
        full = sum(pages(flat.padded_bytes) for flat in flats)
        sums = sum(pages(flat.gradient_bytes) for flat in flats if not flat.shared)
        for written in use.backward:
            before = found.get(written.first, Entered())
            found[written.first] = Entered(before.full + full, before.sums + sums)
    return found


def gradient_demands(uses: Uses, unit: int, gradients: Gradients, entered: Mapping[int, Entered]) -> Iterator[Demand]:
    """Returns the demands of a unit's gradients.

    In each backward pass they last from the first tick that may write the gradients until these are at home or used up.
    Gradients that pass through hold their pages until the update.

    Args:
        entered: of `entered_gradients`.
    """
    use = uses.units[unit]
    passing = gradients.pass_through
    yield from full_gradient_demands(uses, unit, gradients)
    yield from _entering_demands(uses, unit, gradients, entered)
    reduced, added = gradients.beside(reduces=True), gradients.beside(reduces=False)
    for written in gradient_spans(use, passing=passing):
        # The destination of the reduction, or of the addition, exists while the full gradients are read.
        leaves = written.end + 1
        if reduced:
            yield Demand(trigger_instant(leaves), compute_instant(use.ticks[-1] + 1 if passing else leaves), reduced)
        if added:
            yield Demand(compute_instant(written.end), trigger_instant(leaves), added)


def full_gradient_demands(uses: Uses, unit: int, gradients: Gradients) -> Iterator[Demand]:
    """Returns the part of `gradient_demands` for full gradients.

    They end at the trigger at which they are reduced, offloaded or used.
    """
    use = uses.units[unit]
    passing = gradients.pass_through
    for reduces in (True, False):
        pages = gradients.full(reduces=reduces)
        if not pages:
            continue
        for written in gradient_spans(use, passing=passing):
            # If they pass through and no other rank shares them, the full gradients are the shard.
            end = written.end if reduces or not passing else use.ticks[-1]
            yield Demand(compute_instant(written.first), trigger_instant(end + 1), pages)


def _entering_demands(uses: Uses, unit: int, gradients: Gradients, entered: Mapping[int, Entered]) -> Iterator[Demand]:
    """Returns the demands of gradients that leave after the parameters of the next unit have come.

    The gradient of a unit's input, which ends its backward, starts that of the next unit, and a unit's gradients are
    collected after the next unit's parameters are fetched. Then the next unit has no gradients yet, so what is needed in
    addition is what it has fewer of: a next unit that is frozen has none.
    """
    passing = gradients.pass_through
    leaving = gradients.full(reduces=True if passing else None)
    added = 0 if passing else gradients.beside(reduces=False)
    for written in gradient_spans(uses.units[unit], passing=passing):
        tick = written.end + 1
        begun = entered.get(tick, Entered())
        more = leaving + added - begun.full - (begun.sums if added else 0)
        if more > 0 and tick < uses.tick_count:
            yield Demand(compute_instant(tick), compute_instant(tick), more)


def gradient_spans(use: UnitUse, *, passing: bool) -> tuple[Span, ...]:
    """Returns the ticks from the first that may write a unit's gradients to the last before they leave.

    That is one span for each backward pass, or one span for all passes if the gradients stay on the device until the
    update.
    """
    if not passing or not use.backward:
        return use.backward
    return (Span(use.backward[0].first, use.backward[-1].end),)


def gradient_linger(uses: Uses, unit: int, gradients: Gradients, entered: Mapping[int, Entered]) -> Iterator[Demand]:
    """Returns the demands of the tick in which a unit's gradients still leave while the next tick computes, in addition
    to `gradient_demands`.

    The plan reserves them if there is room; it does not need them.
    """
    counted = {demand.first: demand.pages for demand in _entering_demands(uses, unit, gradients, entered)}
    for full in full_gradient_demands(uses, unit, gradients):
        instant = full.last + 1
        pages = full.pages - counted.pop(instant, 0)
        if pages > 0:
            yield Demand(instant, instant, pages)
