"""Makes the plans of one run, equal on all ranks, and refuses those that do not simulate.

Knows layout, placement and budgets; carries nothing out (executor.py does).

I1: a plan that is returned is the same on all ranks that follow it; a layout that has passed is the same on all ranks.
Where one is not, all of them raise, and name the first rank that differs, and in what.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable

import torch

from lightning_ptm.comm import Communicator
from lightning_ptm.errors import CapacityError, RankError
from lightning_ptm.planning.layout import ModelLayout
from lightning_ptm.planning.plan import Plan
from lightning_ptm.planning.plan_diff import digest, first_difference, layout_lines, plan_lines
from lightning_ptm.planning.schedule import schedule
from lightning_ptm.planning.simulate import simulate
from lightning_ptm.planning.trace import Trace
from lightning_ptm.runtime.deciding.blueprint import Blueprint
from lightning_ptm.terms import Mode, Tier


def make_plan(blueprint: Blueprint, mode: Mode, trace: Trace) -> Plan:
    """The plan of one iteration, and the simulator's consent. Pure: ranks need not be there.

    Raises:
        CapacityError: more is live at once than the budgets hold.
    """
    try:
        room = blueprint.placement.gather_bytes - blueprint.by_need_bytes
        placement = dataclasses.replace(blueprint.placement, gather_bytes=max(0, room))
        plan = schedule(blueprint.layout, placement, trace, blueprint.budget)
    except CapacityError:
        if not blueprint.by_need:
            raise
        # Too little for both: what the plan keeps only to save a fetch gives way to what is needed now.
        placement = blueprint.placement
        plan = schedule(blueprint.layout, placement, trace, blueprint.budget)
    simulate(blueprint.layout, placement, plan, trace, blueprint.budget)
    return plan


def check_layout(layout: ModelLayout, communicator: Communicator) -> None:
    """Before anything that is laid out goes from rank to rank. Collective.

    Raises:
        RankError: ranks have laid out different models.
    """
    _check_alike(layout_lines(layout), communicator, communicator.rank)


class Planner:
    """Traces in, plans out.

    Args:
        blueprint: what is planned for.
        communicator: plans are compared over it, and are made for what its first rank has traced; every method is
            collective.
        rank: this one's number among all ranks.
    """

    def __init__(self, blueprint: Blueprint, communicator: Communicator, rank: int = 0) -> None:
        self._blueprint = blueprint
        self._communicator = communicator
        self._rank = rank

    def plan(self, mode: Mode, trace: Trace) -> Plan:
        """The plan for iterations like the traced one.

        Raises:
            CapacityError: more is live at once than the budgets hold.
            RankError: other ranks have made another plan.
        """
        try:
            plan = make_plan(self._blueprint, mode, trace)
        except CapacityError as error:
            told = self._blueprint.inventory.in_words(Tier.DEVICE, self._blueprint.unified)
            raise CapacityError(f"{error} ({told})") from error
        _check_alike(plan_lines(plan, self._blueprint.layout), self._communicator, self._rank)
        return plan

    def replan(self, mode: Mode, trace: Trace) -> tuple[Plan, Trace] | None:
        """A plan, and the trace that it is for: the first rank's, also where this one has gone through its units in another
        order. None when no plan fits, so that fetch on use goes on."""
        trace = self._communicator.broadcast_object(trace)
        try:
            return self.plan(mode, trace), trace
        except CapacityError:
            return None


def _check_alike(lines: Iterable[str], communicator: Communicator, rank: int) -> None:
    """Collective.

    Args:
        rank: this one's number, by which users know it.

    Raises:
        RankError: the lines of some rank are not those of the first; on all of them.
    """
    ours = list(lines)
    number = digest(ours)
    most, least = communicator.all_reduce(torch.tensor([number, -number], dtype=torch.int64), maximum=True).tolist()
    if most == -least:
        return
    first, theirs = communicator.broadcast_object((rank, ours))
    found = first_difference(ours, theirs)
    place = communicator.rank if found is not None else communicator.world_size
    differing = -int(communicator.all_reduce(torch.tensor([-place], dtype=torch.int64), maximum=True).item())
    other, (has, instead) = communicator.broadcast_object((rank, found), differing)
    raise RankError(
        f"rank {other} has {has}, where rank {first} has {instead}; they would wait for each other for ever, so nothing is "
        f"trained; build the same model on all ranks (names, shapes, memory formats), freeze the same parameters, and use "
        f"the same settings and precision"
    )
