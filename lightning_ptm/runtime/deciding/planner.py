"""Planner of one run: makes plans from traces, checks them in the simulator, and compares them over ranks.

Knows layout, placement and budgets; executes nothing (executor.py does).

I1: a returned plan is the same on all ranks that follow it, and a checked layout is the same on all ranks. If ranks differ,
    all of them raise an error that names the first rank that differs, and the difference.
"""

from __future__ import annotations

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
    """Returns the plan of one iteration, after the simulator has accepted it. Pure; not collective.

    Raises:
        CapacityError: some tick needs more at once than the budgets hold.
    """
    pool = blueprint.passing_pool
    placement = blueprint.placement
    plan = schedule(blueprint.layout, placement, trace, blueprint.budget, pool)
    simulate(blueprint.layout, placement, plan, trace, blueprint.budget, pool)
    return plan


def check_layout(layout: ModelLayout, communicator: Communicator) -> None:
    """Checks that all ranks have the same layout, before the first collective over flats. Collective.

    Raises:
        RankError: the layouts differ.
    """
    _check_alike(layout_lines(layout), communicator, communicator.rank)


class Planner:
    """Turns traces into plans that are equal on all ranks of a communicator. Every method is collective.

    Args:
        blueprint: layout, placement and budgets of the run.
        communicator: ranks that compare their plans; its first rank's trace is the one that `replan` plans for.
        rank: global rank, for error messages.
    """

    def __init__(self, blueprint: Blueprint, communicator: Communicator, rank: int = 0) -> None:
        self._blueprint = blueprint
        self._communicator = communicator
        self._rank = rank

    def plan(self, mode: Mode, trace: Trace) -> Plan:
        """Returns the plan for iterations like the traced one.

        Raises:
            CapacityError: some tick needs more at once than the budgets hold.
            RankError: the ranks' plans differ.
        """
        try:
            plan = make_plan(self._blueprint, mode, trace)
        except CapacityError as error:
            contents = self._blueprint.inventory.in_words(Tier.DEVICE, self._blueprint.unified)
            raise CapacityError(f"{error} ({contents})") from error
        _check_alike(plan_lines(plan, self._blueprint.layout), self._communicator, self._rank)
        return plan

    def replan(self, mode: Mode, trace: Trace) -> tuple[Plan, Trace] | None:
        """Returns a plan and its trace, which is the first rank's even if this rank used its units in another order; None
        if no plan fits, in which case units continue to be fetched on use."""
        trace = self._communicator.broadcast_object(trace)
        try:
            return self.plan(mode, trace), trace
        except CapacityError:
            return None


def _check_alike(lines: Iterable[str], communicator: Communicator, rank: int) -> None:
    """Checks that all ranks have the same lines. Collective.

    Args:
        rank: global rank, for the error message.

    Raises:
        RankError: the lines of some rank differ from those of the first rank; raised on all ranks.
    """
    if communicator.alone:
        return
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
        f"rank {other} has {has}, where rank {first} has {instead}; their collectives would deadlock, so nothing is "
        f"trained; build the same model on all ranks (names, shapes, memory formats), freeze the same parameters, and use "
        f"the same settings and precision"
    )
