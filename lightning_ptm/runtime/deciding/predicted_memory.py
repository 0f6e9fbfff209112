"""Bytes of pages in use at each tick of a plan, as a run of a blueprint will have them; and of gradients beside the pages.

What is taken at the start is the blueprint's inventory; what comes and goes at ticks is an iteration on paper
(virtual_run.py).
Decides and allocates nothing. The simulator's bytes (planning/simulate.py) are another thing: the most that the plan may
come to, by which it is accepted; these are what it will come to.

I1: a traced iteration's order is the run's. In the one that is assumed before the first, the root's backward is the last,
    where a run has it first: that iteration leaves its plan there.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping

from lightning_ptm.planning.inventory import Lifetime
from lightning_ptm.planning.plan import Plan
from lightning_ptm.planning.trace import Trace
from lightning_ptm.runtime.deciding.blueprint import Blueprint
from lightning_ptm.runtime.deciding.virtual_run import VirtualRun
from lightning_ptm.terms import Phase, Tier


@dataclasses.dataclass(frozen=True, slots=True)
class PredictedMemory:
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


def predicted_memory(
    blueprint: Blueprint,
    plan: Plan,
    trace: Trace,
    again: Collection[int] = (),
    ends_with: Mapping[int, int] | None = None,
) -> PredictedMemory:
    """What a run takes that follows `plan`.

    Args:
        plan: made for `blueprint.planned(trace)`.
        trace: one iteration, units that are in no plan included.
        again: of these, those whose layer is computed again in the backward.
        ends_with: as `VirtualRun` takes it.
    """
    page = blueprint.layout.page_size
    lifetimes = (Lifetime.RUN, Lifetime.FIRST_GRADIENT)
    fixed = {tier: blueprint.inventory.held_bytes(tier, *lifetimes) // page for tier in blueprint.budget}
    paper = VirtualRun(blueprint, fixed[Tier.DEVICE], again, ends_with)
    if blueprint.placement.sums_gradients:
        paper.run(plan, trace, steps=False)  # to whose gradients others are added
    ticks = paper.run(plan, trace)
    if blueprint.layout.shared:
        order = _order_of_first(trace)
        first = Trace(tuple(trace.ticks[at] for at in order))
        beginning = VirtualRun(blueprint, fixed[Tier.DEVICE], again, ends_with)
        found = beginning.run(plan, first, trace, steps=not blueprint.reduced_at_step)
        for at, pages in zip((*order, len(order)), found, strict=True):
            ticks[at] = max(ticks[at], pages)
    return PredictedMemory(
        fixed={tier: size * page for tier, size in fixed.items()},
        device_per_tick=tuple((fixed[Tier.DEVICE] + more) * page for more in ticks),
        gradients_beside=_gradients_beside(blueprint),
        plan=paper.done(plan),
    )


def _order_of_first(trace: Trace) -> list[int]:
    """Places of a trace as a run comes to them: of the backward ticks, the root's first (I1)."""
    backward = [tick.phase is Phase.BACKWARD for tick in trace.ticks]
    return sorted(range(len(backward)), key=lambda at: (backward[at], backward[at] and trace.ticks[at].unit != 0))


def _gradients_beside(blueprint: Blueprint) -> int:
    """What waits in `.grad`: all of it until the step, or as much as may wait for updates behind the backward pass."""
    in_place: list[int] = []
    for unit in range(len(blueprint.units)):
        flats = [flat for flat in blueprint.layout.flats_of(unit) if blueprint.traits[flat.index]]
        whole = [flat for flat in flats if blueprint.route(flat).adds_up_in_grad]
        in_place.append(sum(flat.padded_numel * flat.gradient_itemsize for flat in whole))
    total = sum(in_place)
    if blueprint.placement.keeps_gradients or blueprint.reduced_at_step:
        return total
    most = in_place[0] + max(blueprint.gradient_room_bytes, 2 * max(in_place[1:], default=0))
    return min(total, most)
