"""Prediction of the page bytes in use at each tick of a plan, of the gradients outside pages, and of bytes written to disk.

Memory that is allocated at set-up is counted by the blueprint's inventory; memory that is allocated and freed at ticks is
counted by a virtual run (virtual_run.py). Decides and allocates nothing. The simulator's bytes (planning/simulate.py) are an
upper bound, by which a plan is accepted; these are the bytes that a run will actually use.

I1: the order of a traced iteration is the order of the run. The trace that is assumed before the first iteration has the
    root's backward last, where the run has it first: the first iteration departs from its plan at that point.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Mapping, Sequence

import torch

from lightning_ptm.errors import CapacityError, UsageError
from lightning_ptm.planning.inventory import Lifetime
from lightning_ptm.planning.layout import FlatLayout, round_up
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
        gradients_beside: bytes of gradients that wait in `.grad`, outside pages, for the update: at most, or at the peak of
            a step (`gradients_at_peak`).
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
        adds_up = blueprint.holders.in_stages or blueprint.placement.sums_gradients
        found = beginning.run(plan, first, trace, steps=not (blueprint.reduced_at_step and adds_up))
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
    decided: Callable[[int], Blueprint],
    beside_bytes: int,
    agree: Callable[[bool], bool] = bool,
    below_bytes: Mapping[frozenset[int], int] | None = None,
    *,
    read: bool = False,
) -> tuple[Blueprint, int] | None:
    """Returns the decisions for the device memory that steps leave to pages and to gradients in `.grad`, and the bytes that
    they were made for. Gradients that the choice of homes does not count (they wait for updates during a backward pass) are
    subtracted from the memory of pages; what gradients do not take at the peak of steps is added to it. None: no decisions
    are found whose pages leave room for these gradients.

    Args:
        decided: makes the decisions for the bytes that steps take in addition to pages and gradients.
        beside_bytes: what the traced steps take.
        agree: whether all ranks say yes; collective.
        below_bytes: see `gradients_at_peak`.
        read: see `gradients_beside`.
    """
    limit_bytes, more_bytes, before_bytes = None, 0, None
    best: tuple[Blueprint, int] | None = None
    best_bytes = 0
    for _ in range(_MOST_DECISIONS):
        asked_bytes = max(0, beside_bytes + more_bytes)
        found = decided(asked_bytes)
        limit_bytes = found.device_limit_bytes if limit_bytes is None else limit_bytes
        pool_bytes, gradient_bytes = found.pool_bytes[Tier.DEVICE], gradients_at_peak(found, below_bytes, read=read)
        lacking_bytes = pool_bytes + gradient_bytes - limit_bytes
        if agree(lacking_bytes <= 0):
            if agree(best is not None and pool_bytes <= best_bytes):
                break
            best, best_bytes = (found, asked_bytes), pool_bytes
            # Homes count all gradients in `.grad` at once; as many as are not there at the peak make room for more homes.
            unused_bytes = min(-lacking_bytes, gradients_beside(found, read=read) - gradient_bytes)
            if agree(unused_bytes <= limit_bytes * _UNUSED_SHARE):
                break
            more_bytes = asked_bytes - beside_bytes - unused_bytes
        elif best is not None:
            more_bytes = (more_bytes + best[1] - beside_bytes) // 2
        elif lacking_bytes > 0:
            more_bytes += lacking_bytes
            if pool_bytes == before_bytes:  # homes change in whole units: a little less may change nothing
                more_bytes = max(more_bytes, gradient_bytes)
        before_bytes = pool_bytes
    if best is None or not best[0].placement.keeps_gradients:
        return best
    # Pages in which gradients leave take all that homes leave. The budget for a further unit's home may be larger by no more
    # than the unit's gradients, which homes count and pages do not have.
    asked_bytes = max(0, best[1] - max(_in_grad_by_unit(best[0])))
    found = decided(asked_bytes)
    taken_bytes = found.pool_bytes[Tier.DEVICE] + gradients_at_peak(found, below_bytes, read=read)
    more = found.placement.at_home_bytes[Tier.DEVICE] > best[0].placement.at_home_bytes[Tier.DEVICE]
    return (found, asked_bytes) if agree(more and taken_bytes <= (limit_bytes or 0)) else best


_BLOCK = 512
"""Bytes to which torch rounds up the memory of a tensor on a device."""
_MOST_DECISIONS = 6
_TEMPORARIES = 2
"""Tensors in which an optimizer computes, beside its states: those of the denominator in an Adam that is not fused."""
_UNUSED_SHARE = 1 / 256
"""Share of the device memory of pages for which no other decisions are made."""


def _order_of_first(trace: Trace) -> list[int]:
    """Returns the indices of a trace's ticks in the order of a run's first iteration: the root's backward tick comes before
    the other backward ticks (I1)."""
    backward = [tick.phase is Phase.BACKWARD for tick in trace.ticks]
    return sorted(range(len(backward)), key=lambda at: (backward[at], backward[at] and trace.ticks[at].unit != 0))


def gradients_beside(blueprint: Blueprint, *, read: bool = False) -> int:
    """Returns the peak bytes of gradients in `.grad`: all of them where they wait for the step, else as many as may wait for
    updates during the backward pass.

    Args:
        read: whether the user reads `.grad`, where gradients in pages then have copies.
    """
    in_place = _in_grad_by_unit(blueprint, read=read)
    return min(sum(in_place), _most_in_grad(blueprint, in_place))


def gradients_before_pages(blueprint: Blueprint) -> list[int]:
    """Returns, by unit, the bytes of gradients that autograd puts into `.grad` and that move to pages at the end of the
    unit's backward. They are no pages and no gradients that wait in `.grad`: a traced step has them among its activations."""
    return [
        sum(
            round_up(slot.numel * flat.itemsize, _BLOCK)
            for flat in blueprint.layout.flats_of(unit)
            if blueprint.traits[flat.index] and not blueprint.route(flat).adds_up_in_grad
            for slot in flat.slots
        )
        for unit in range(len(blueprint.units))
    ]


def gradients_at_peak(
    blueprint: Blueprint, below_bytes: Mapping[frozenset[int], int] | None, *, read: bool = False
) -> int:
    """Returns the bytes by which gradients in `.grad`, and updates on the device, raise the peak of a step.

    Args:
        below_bytes: by the units whose gradients may wait in `.grad` meanwhile, by how much less than at its peak a step
            takes without them. None: unknown, so that all of them may wait at the peak.
        read: see `gradients_beside`.
    """
    update_bytes = _update_bytes(blueprint)
    if below_bytes is None or blueprint.reduced_at_step:
        return gradients_beside(blueprint, read=read) + update_bytes
    in_place = _in_grad_by_unit(blueprint, read=read)
    most = _most_in_grad(blueprint, in_place)
    above = (min(most, sum([in_place[unit] for unit in units])) - below for units, below in below_bytes.items())
    at_peak = max(0, max(above, default=0))
    beside = max(update_bytes, max(in_place))  # at least a unit's, also where updates take less
    return max(min(sum(in_place), at_peak + beside), at_peak + update_bytes)


def _update_bytes(blueprint: Blueprint) -> int:
    """Returns the bytes outside of pages that updates on the device take: a block of gradients in the dtype of the states,
    which stays from step to step, and what the optimizer computes with. The first step may have no updates on the device, so
    its peak lacks them."""
    block, found = blueprint.device_block_numel, 0
    for flat in blueprint.trained_flats():
        if blueprint.traits[flat.index][0].device == torch.device("cpu"):
            continue
        itemsize = (blueprint.master_dtypes[flat.index] or blueprint.dtypes[flat.index]).itemsize
        fused = all(group.fused for traits in blueprint.traits[flat.index] for group in traits.groups)
        tensors = 0 if fused else _TEMPORARIES
        if flat.updated_whole:
            at_once = max(slot.numel for slot in flat.slots)
        else:
            at_once, tensors = min(block, flat.shard_numel), tensors + 1
        found = max(found, tensors * at_once * itemsize)
    return found


def _in_grad_by_unit(blueprint: Blueprint, *, read: bool = False) -> list[int]:
    """Returns, by unit, the bytes of gradients that are accumulated in `.grad`, or have copies there (`gradients_beside`)."""
    found: list[int] = []
    for unit in range(len(blueprint.units)):
        flats = [flat for flat in blueprint.layout.flats_of(unit) if blueprint.traits[flat.index]]
        whole = [flat for flat in flats if read or blueprint.route(flat).adds_up_in_grad]
        found.append(sum(map(_bytes_in_grad, whole)))
    return found


def _bytes_in_grad(flat: FlatLayout) -> int:
    of_tensors = sum(round_up(slot.numel * flat.gradient_itemsize, _BLOCK) for slot in flat.slots)
    return max(flat.padded_numel * flat.gradient_itemsize, of_tensors)


def _most_in_grad(blueprint: Blueprint, by_unit: Sequence[int]) -> int:
    """Returns a bound of the gradients in `.grad` at once."""
    if blueprint.placement.keeps_gradients or blueprint.reduced_at_step:
        return sum(by_unit)
    return by_unit[0] + max(blueprint.gradient_room_bytes, 2 * max(by_unit[1:], default=0))
