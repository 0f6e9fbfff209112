"""Prediction of the page bytes in use at each tick of a plan, of the gradients outside pages, and of bytes written to disk.

Memory that is allocated at set-up is counted by the blueprint's inventory; memory that is allocated and freed at ticks is
counted by a virtual run (virtual_run.py). Decides and allocates nothing. The simulator's bytes (planning/simulate.py) are an
upper bound, by which a plan is accepted; these are the bytes that a run will actually use.

I1: the order of a traced iteration is the order of the run. The trace that is assumed before the first iteration has the
    root's backward last, where the run has it first: the first iteration departs from its plan at that point.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Mapping

from lightning_ptm.errors import CapacityError, UsageError
from lightning_ptm.planning.inventory import Lifetime
from lightning_ptm.planning.plan import Plan
from lightning_ptm.planning.trace import Trace
from lightning_ptm.runtime.deciding.blueprint import Blueprint
from lightning_ptm.runtime.deciding.planner import make_plan
from lightning_ptm.runtime.engine.disk_writes import DiskWrites
from lightning_ptm.runtime.engine.virtual_run import VirtualRun
from lightning_ptm.terms import Mode, Phase, Tier


@dataclasses.dataclass(frozen=True, slots=True)
class PredictedMemory:
    """Predicted bytes of one rank.

    Attributes:
        fixed: bytes of pages allocated once for the run, by tier.
        device_per_tick: peak bytes of device pages in each tick, over all iterations, including the fixed ones; the last
            entry is after the last tick.
        gradients_beside: peak bytes of gradients that wait in `.grad`, outside pages, for the update.
        plan: tasks of the iteration: those of the plan, and those for units that no plan contains.
        disk_writes: bytes that a step writes to the disk tier.
    """

    fixed: dict[Tier, int]
    device_per_tick: tuple[int, ...]
    gradients_beside: int
    plan: Plan
    disk_writes: DiskWrites

    def peak(self, tier: Tier) -> int:
        """Returns the peak bytes of pages in a tier."""
        return max(self.device_per_tick) if tier is Tier.DEVICE else self.fixed[tier]

    def per_tick(self, tier: Tier) -> tuple[int, ...]:
        """Returns the bytes of pages in a tier at each tick."""
        return self.device_per_tick if tier is Tier.DEVICE else (self.fixed[tier],) * len(self.device_per_tick)


def predicted_memory(
    blueprint: Blueprint,
    plan: Plan,
    trace: Trace,
    again: Collection[int] = (),
    ends_with: Mapping[int, int] | None = None,
    folders: int = 1,
) -> PredictedMemory:
    """Returns the memory of a run that follows `plan`.

    Args:
        plan: plan of `blueprint.planned(trace)`.
        trace: trace of one iteration, including units that no plan contains.
        again: units that no plan contains and whose layer is recomputed in the backward (activation checkpointing).
        ends_with: see `VirtualRun`.
        folders: number of folders of the disk tier.
    """
    page = blueprint.layout.page_size
    lifetimes = (Lifetime.RUN, Lifetime.FIRST_GRADIENT)
    fixed = {tier: blueprint.inventory.held_bytes(tier, *lifetimes) // page for tier in blueprint.budget}
    virtual = VirtualRun(blueprint, again, ends_with)
    if blueprint.placement.sums_gradients:
        virtual.run(plan, trace, steps=False)  # the first micro-batch, to whose gradients the next one adds
    ticks = virtual.run(plan, trace)
    order = _order_of_first(trace)
    if order != [*range(len(order))]:
        first = Trace(tuple(trace.ticks[at] for at in order))
        beginning = VirtualRun(blueprint, again, ends_with)
        found = beginning.run(plan, first, trace, steps=not blueprint.reduced_at_step)
        for at, pages in zip((*order, len(order)), found, strict=True):
            ticks[at] = max(ticks[at], pages)
    return PredictedMemory(
        fixed={tier: size * page for tier, size in fixed.items()},
        device_per_tick=tuple((fixed[Tier.DEVICE] + more) * page for more in ticks),
        gradients_beside=gradients_beside(blueprint),
        plan=virtual.done(plan),
        disk_writes=virtual.disk_writes(folders),
    )


SHARES_LEFT = (0.0, 1 / 32, 1 / 16, 1 / 8, 1 / 4)
"""Shares of a device's budget that are given back in turn until `has_runs_of_pages`."""


def has_runs_of_pages(blueprint: Blueprint, again: Collection[int] = ()) -> bool:
    """Returns whether an iteration finds pages in a row where it needs them: plans count free pages only.

    Args:
        again: see `predicted_memory`.
    """
    try:
        plan = make_plan(blueprint, Mode.TRAIN, blueprint.planned(blueprint.trace))
        predicted_memory(blueprint, plan, blueprint.trace, again)
    except (CapacityError, UsageError):  # no run of pages is free, or only scattered pages
        return False
    return True


def decided_beside(
    decided: Callable[[int], Blueprint], beside_bytes: int, agree: Callable[[bool], bool] = bool
) -> Blueprint | None:
    """Returns the decisions for the device memory that steps leave to pages and to gradients in `.grad`. Gradients that the
    choice of homes does not count (they wait for updates during a backward pass) are subtracted from the memory of pages.
    None: no decisions are found whose pages leave room for these gradients.

    Args:
        decided: makes the decisions for the bytes that steps take in addition to pages and gradients.
        beside_bytes: what the traced steps take.
        agree: whether all ranks say yes; collective.
    """
    limit_bytes, more_bytes, before_bytes = None, 0, None
    for _ in range(_MOST_DECISIONS):
        found = decided(beside_bytes + more_bytes)
        limit_bytes = found.device_limit_bytes if limit_bytes is None else limit_bytes
        pool_bytes, gradient_bytes = found.pool_bytes[Tier.DEVICE], gradients_beside(found)
        lacking_bytes = pool_bytes + gradient_bytes - limit_bytes
        if agree(lacking_bytes <= 0):
            return found
        if lacking_bytes > 0:
            more_bytes += lacking_bytes
            if pool_bytes == before_bytes:  # homes change in whole units: a little less may change nothing
                more_bytes = max(more_bytes, gradient_bytes)
        before_bytes = pool_bytes
    return None


_MOST_DECISIONS = 6


def _order_of_first(trace: Trace) -> list[int]:
    """Returns the indices of a trace's ticks in the order of a run's first iteration: the root's backward tick comes before
    the other backward ticks (I1)."""
    backward = [tick.phase is Phase.BACKWARD for tick in trace.ticks]
    return sorted(range(len(backward)), key=lambda at: (backward[at], backward[at] and trace.ticks[at].unit != 0))


def gradients_beside(blueprint: Blueprint) -> int:
    """Returns the peak bytes of gradients in `.grad`: all of them where they wait for the step, else as many as may wait for
    updates during the backward pass."""
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
