"""Device pages that each unit needs at each instant: the least demand, and the demand with overlap.

Owns the translation of a unit's uses, and of the pages of its copies and gradients, into demands over instants
(page_occupancy.py). Placement adds the demands up to choose homes; schedule starts from them. The simulator does not use
this file.

I1: the least demand of a unit is what its plan holds when nothing is fetched before its need.
I2: the comfortable demand covers the least one; it adds a fetch one tick ahead, and a tick in which gradients leave.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from heapq import nlargest

from lightning_ptm.planning.layout import ModelLayout
from lightning_ptm.planning.lifetime import Span, UnitUse, Uses
from lightning_ptm.planning.page_occupancy import Occupancy, compute_instant, trigger_instant
from lightning_ptm.planning.placement_data import Gradients, PassingPages
from lightning_ptm.planning.plan import GradientBuffer
from lightning_ptm.planning.trace import Trace
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


def reserved_ticks(trace: Trace, units: Collection[int], pages: int) -> list[Demand]:
    """Returns the demand of `pages` while any of `units` computes."""
    ticks = [number for number, tick in enumerate(trace.ticks) if tick.unit in units] if pages else []
    return [Demand(compute_instant(number), compute_instant(number), pages) for number in ticks]


class AnyOrder:
    """Device pages that are needed at once if each unit may follow each other one.

    In a plan, where the backward begins with the root's: the root, a unit that is fetched, and the gradients of both. Without
    one: the root, a unit that computes, and the gradients of the unit before it while they leave.
    """

    def __init__(self) -> None:
        self._root = self._root_gradients = 0
        self._kinds: Counter[tuple[int, int, int, int]] = Counter()
        """Number of units by pages: of full flats, shards, gradients, and beside the gradients. They are of few kinds."""

    def add(self, unit: int, full: int, shards: int, gradients: PassingPages, *, count: int = 1) -> None:
        """Adds a unit; takes it away with a negative count."""
        if unit:
            self._kinds[full, shards, gradients.full, gradients.beside] += count
        else:  # its shards are fetched before all others
            self._root += count * full
            self._root_gradients += count * gradients.full

    def pages(self) -> int:
        """Returns the pages."""
        kinds = [(kind, count) for kind, count in self._kinds.items() if count]
        planned = max([full + shards + gradients for (full, shards, gradients, _), _ in kinds], default=0)
        most = planned + self._root_gradients
        after = nlargest(2, [kind[0] for kind, count in kinds for _ in range(min(count, 2))])
        for (full, _, gradients, beside), _ in kinds:  # the largest unit, but of itself the next largest
            others = after[1:] if full == after[0] else after
            most = max(most, (others[0] if others else 0) + gradients + beside)
        return self._root + most


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


_NOTHING = Entered()


def entered_gradients(layout: ModelLayout, uses: Uses) -> Mapping[int, Entered]:
    """Returns the gradients that a backward begins to write, by the tick in which it begins."""

    page = layout.page_size
    found: dict[int, Entered] = {}
    for unit, use in enumerate(uses.units):
        flats = [flat for flat in layout.flats_of(unit) if flat.trainable]
        full = sum([-(-flat.padded_bytes // page) for flat in flats])
        sums = sum([-(-flat.gradient_bytes // page) for flat in flats if not flat.shared])
        for written in use.backward:
            before = found.get(written.first, _NOTHING)
            found[written.first] = Entered(before.full + full, before.sums + sums)
    return found


@dataclass(frozen=True, slots=True)
class GradientDemands:
    """Demands of one unit's gradients.

    Args:
        least: what the plan cannot do without.
        linger: in addition, the ticks in which gradients still leave while the next tick computes. The plan reserves
            them if there is room.
    """

    least: Sequence[Demand] = ()
    linger: Sequence[Demand] = ()


_NONE = GradientDemands()


def gradient_demands(uses: Uses, unit: int, gradients: Gradients, entered: Mapping[int, Entered]) -> GradientDemands:
    """Returns the demands of a unit's gradients.

    In each backward pass they last from the first tick that may write the gradients until these are at home or used up.
    Gradients that pass through hold their pages until the update.

    Args:
        entered: of `entered_gradients`.
    """
    if not gradients.rows:
        return _NONE
    use, passing = uses.units[unit], gradients.pass_through
    spans = gradient_spans(use, passing=passing)
    entering = _entering_pages(uses, spans, gradients, entered)
    least = [Demand(instant, instant, pages) for instant, pages in entering.items()]
    linger: list[Demand] = []
    for pages, reduces in ((gradients.reduced.full, True), (gradients.unreduced.full, False)):
        for written in spans if pages else ():
            # Full gradients end at the trigger at which they are reduced, offloaded or used. If they pass through and no
            # other rank shares them, they are the shard.
            last = trigger_instant((written.end if reduces or not passing else use.ticks[-1]) + 1)
            least.append(Demand(compute_instant(written.first), last, pages))
            still = pages - entering.pop(last + 1, 0)
            if still > 0:
                linger.append(Demand(last + 1, last + 1, still))
    reduced, added = gradients.reduced.beside, gradients.unreduced.beside
    for written in spans:
        # The destination of the reduction, or of the addition, exists while the full gradients are read.
        leaves = written.end + 1
        if reduced:
            last = compute_instant(use.ticks[-1] + 1 if passing else leaves)
            least.append(Demand(trigger_instant(leaves), last, reduced))
        if added:
            least.append(Demand(compute_instant(written.end), trigger_instant(leaves), added))
    return GradientDemands(least, linger)


def _entering_pages(
    uses: Uses, spans: Iterable[Span], gradients: Gradients, entered: Mapping[int, Entered]
) -> dict[int, int]:
    """Returns, by instant, the pages of gradients that leave after the parameters of the next unit have come.

    The gradient of a unit's input, which ends its backward, starts that of the next unit, and a unit's gradients are
    collected after the next unit's parameters are fetched. Then the next unit has no gradients yet, so what is needed in
    addition is what it has fewer of: a next unit that is frozen has none.

    Args:
        spans: ticks that write the unit's gradients.
    """
    passing = gradients.pass_through
    leaving = gradients.reduced.full + (0 if passing else gradients.unreduced.full)
    added = 0 if passing else gradients.unreduced.beside
    found: dict[int, int] = {}
    for written in spans:
        tick = written.end + 1
        begun = entered.get(tick, _NOTHING)
        more = leaving + added - begun.full - (begun.sums if added else 0)
        if more > 0 and tick < uses.tick_count:
            found[compute_instant(tick)] = more
    return found


@dataclass(frozen=True, slots=True)
class GradientStay:
    """Pages of a flat's gradient, from the end of a backward pass on.

    Args:
        tick: last tick of the pass.
        last: last instant.
    """

    flat: int
    kind: GradientBuffer
    tick: int
    last: int
    pages: int

    @property
    def first(self) -> int:
        """First instant: after the releases of the next trigger, which a run does before it collects gradients."""
        return trigger_instant(self.tick + 1)


def gradient_stays(use: UnitUse, gradients: Gradients, in_grad: Collection[int]) -> Iterator[GradientStay]:
    """Returns the pages that a unit's gradients take when they are collected. They leave while the next tick computes, or,
    if they pass through, with the update after the unit's last tick. No instant has more of them than `gradient_demands`.

    Args:
        in_grad: flats whose gradients stay in `.grad`.
    """
    for row in gradients.rows if use.backward else ():
        if row.flat in in_grad:
            continue
        if gradients.pass_through:
            last = compute_instant(use.ticks[-1] + 1)
            pages = row.shard if row.reduces else row.full
            yield GradientStay(row.flat, GradientBuffer.PASSING, use.backward[0].end, last, pages)
        for written in use.backward:
            last = compute_instant(written.end + 1)
            if row.full and (row.reduces or not gradients.pass_through):
                yield GradientStay(row.flat, GradientBuffer.FULL, written.end, last, row.full)
            if row.reduces and not gradients.pass_through:
                yield GradientStay(row.flat, GradientBuffer.REDUCED, written.end, last, row.shard)
            if row.sum and not row.reduces and not gradients.pass_through:
                yield GradientStay(row.flat, GradientBuffer.SUM, written.end, last, row.sum)


def gradient_spans(use: UnitUse, *, passing: bool) -> tuple[Span, ...]:
    """Returns the ticks from the first that may write a unit's gradients to the last before they leave.

    That is one span for each backward pass, or one span for all passes if the gradients stay on the device until the
    update.
    """
    if not passing or not use.backward:
        return use.backward
    return (Span(use.backward[0].first, use.backward[-1].end),)
