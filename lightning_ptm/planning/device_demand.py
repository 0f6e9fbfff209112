"""What each unit asks of the device tier, and when: the least that its use takes, or what it takes with overlap.

Owns the translation of a unit's uses and homes into pages over instants (page_occupancy.py). Placement adds these up to
choose homes, schedule starts from them. The simulator knows nothing of this file.

I1: the least demand of a unit is what its plan holds when nothing is fetched before its need.
I2: the comfortable demand covers the least one; it adds a fetch one tick ahead, and a tick in which gradients leave.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from lightning_ptm.planning.layout import ModelLayout, round_up
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
        """Take the pages."""
        occupancy.add(self.first, self.last, self.pages)

    def take_from(self, occupancy: Occupancy) -> None:
        """Give the pages back."""
        occupancy.add(self.first, self.last, -self.pages)


def early_triggers(spans: tuple[Span, ...]) -> tuple[int, ...]:
    """Per span the trigger one tick before it, where there is one; spans of a unit never touch, so it is free."""
    return tuple(max(span.first - 1, 0) for span in spans)


def parameter_demands(
    layout: ModelLayout, uses: Uses, unit: int, offload_parameters: Tier, *, comfortable: bool
) -> Iterator[Demand]:
    """A unit's gathered flats, and the shard pages that are fetched for the gather.

    Flats that nobody shares are used where they lie, if that is the device, and are else fetched straight into their full
    runs.
    """
    full_pages = layout.full_pages(unit, in_place=offload_parameters.computes)
    shard_pages = 0 if offload_parameters.computes else layout.gathered_pages(unit)
    if not full_pages:
        return
    spans = uses.units[unit].spans()
    triggers = early_triggers(spans) if comfortable else tuple(span.first for span in spans)
    for span, trigger in zip(spans, triggers, strict=True):
        yield Demand(compute_instant(trigger), compute_instant(span.end), full_pages)
        if shard_pages:
            fetched = max(trigger - 1, 0) if comfortable else trigger
            # Until the need, though the gather may be done before: so the least demand is covered (I2).
            yield Demand(compute_instant(fetched), compute_instant(span.first), shard_pages)


def gradient_demands(layout: ModelLayout, uses: Uses, unit: int, gradients: Gradients) -> Iterator[Demand]:
    """A unit's gradients, in each backward pass from the first tick that may write them until they are at home or used up.

    Those that pass through hold pages until the update, taken for that time.
    """
    use = uses.units[unit]
    passing = gradients.pass_through
    yield from full_gradient_demands(layout, uses, unit, gradients)
    reduced = pages_beside_full_gradients(layout, unit, gradients, alone=False)
    added = pages_beside_full_gradients(layout, unit, gradients, alone=True)
    for written in gradient_spans(use, passing=passing):
        # What they are reduced to, or added to, is there while the full ones are read.
        leaves = written.end + 1
        if reduced:
            yield Demand(trigger_instant(leaves), compute_instant(use.ticks[-1] + 1 if passing else leaves), reduced)
        if added:
            # Autograd may enter the next unit before the last gradient comes: between two units of any sizes there is
            # room for this unit's parameters, or for the next one's gradients.
            yield Demand(compute_instant(written.end), trigger_instant(leaves), added)


def full_gradient_demands(layout: ModelLayout, uses: Uses, unit: int, gradients: Gradients) -> Iterator[Demand]:
    """Of these, the full gradients, which end at the trigger at which they are reduced, offloaded or used."""
    use = uses.units[unit]
    passing = gradients.pass_through
    for alone in (False, True):
        pages = layout.full_gradient_pages(unit, alone=alone)
        if not pages or (alone and gradients.home.computes and gradients.outlive_backward):
            continue  # written where they are at home
        for written in gradient_spans(use, passing=passing):
            # Passing, of this rank alone: the full gradients are the shard.
            end = use.ticks[-1] if passing and alone else written.end
            yield Demand(compute_instant(written.first), trigger_instant(end + 1), pages)


def pages_beside_full_gradients(
    layout: ModelLayout, unit: int, gradients: Gradients, *, alone: bool | None = None
) -> int:
    """Pages that a unit's gradients take beside the full ones where these leave: the shards to which ranks reduce them, and
    buffers in which whole ones are added to what comes from their home. A reduced one's buffer takes no more than the full
    ones, which are gone by then.

    Args:
        alone: of flats that are, or are not; None: of all (`ModelLayout.alone`).
    """
    pages = 0
    for flat in layout.flats_of(unit):
        if flat.trainable and alone in (None, layout.alone(flat)):
            reduced = 0 if layout.alone(flat) else flat.shard_pages
            whole = gradients.add_up_in_buffer and not flat.shared
            pages += max(reduced, round_up(flat.gradient_bytes, layout.page_size) // layout.page_size if whole else 0)
    return pages


def gradient_spans(use: UnitUse, *, passing: bool) -> tuple[Span, ...]:
    """From the first tick that may write a unit's gradients to the last before they leave: those of each backward pass, or,
    where they stay until the update, of all."""
    if not passing or not use.backward:
        return use.backward
    return (Span(use.backward[0].first, use.backward[-1].end),)


def gradient_linger(layout: ModelLayout, uses: Uses, unit: int, gradients: Gradients) -> Iterator[Demand]:
    """The tick in which a unit's gradients still leave while the next tick computes: wanted, not needed."""
    for full in full_gradient_demands(layout, uses, unit, gradients):
        yield Demand(full.last + 1, full.last + 1, full.pages)
