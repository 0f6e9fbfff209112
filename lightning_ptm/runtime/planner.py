"""Makes the plans of one run, equal on all ranks, and refuses those that do not simulate.

Knows layout, placement and budgets; carries nothing out (executor.py does).
"""

from __future__ import annotations

import dataclasses

import torch

from lightning_ptm.comm import Communicator
from lightning_ptm.errors import CapacityError, RankError
from lightning_ptm.planning.plan import Plan
from lightning_ptm.planning.schedule import schedule
from lightning_ptm.planning.simulate import simulate
from lightning_ptm.planning.trace import Trace
from lightning_ptm.runtime.blueprint import Blueprint
from lightning_ptm.runtime.executor import Mode
from lightning_ptm.terms import Tier


def make_plan(drawn: Blueprint, mode: Mode, trace: Trace) -> Plan:
    """The plan of one iteration, and the simulator's consent. Pure: ranks need not be there.

    Raises:
        CapacityError: more is live at once than the budgets hold.
    """
    # Budgets are for pages; what lives beside them is reported, not planned.
    pages_only = Trace(tuple(dataclasses.replace(tick, non_model_bytes=0) for tick in trace.ticks), ())
    in_backward = mode is Mode.TRAIN and not drawn.placement.keeps_gradients
    try:
        room = drawn.placement.gather_bytes - drawn.by_need_bytes
        placement = dataclasses.replace(drawn.placement, gather_bytes=max(0, room))
        plan = schedule(
            drawn.layout, placement, pages_only, drawn.budget, update_in_backward=in_backward or mode is Mode.FORWARD
        )
    except CapacityError:
        if not drawn.by_need:
            raise
        # Too little for both: what the plan keeps only to save a fetch gives way to what is needed now.
        placement = drawn.placement
        plan = schedule(
            drawn.layout, placement, pages_only, drawn.budget, update_in_backward=in_backward or mode is Mode.FORWARD
        )
    simulate(drawn.layout, placement, plan, pages_only, drawn.budget, None)
    return plan


class Planner:
    """Traces in, plans out.

    Args:
        blueprint: what is planned for.
        communicator: plans are compared over it, and are made for what its first rank has traced; every method is
            collective.
    """

    def __init__(self, blueprint: Blueprint, communicator: Communicator) -> None:
        self._blueprint = blueprint
        self._communicator = communicator
        self._layout = blueprint.whole_layout.digest() if communicator.world_size > 1 else ""

    def plan(self, mode: Mode, trace: Trace) -> Plan:
        """The plan for iterations like the traced one.

        Raises:
            CapacityError: more is live at once than the budgets hold.
            RankError: other ranks have made another plan.
        """
        try:
            plan = make_plan(self._blueprint, mode, trace)
        except CapacityError as error:
            raise CapacityError(f"{error} ({self._blueprint.inventory.in_words(Tier.DEVICE)})") from error
        self._same_on_all_ranks(plan)
        return plan

    def replan(self, mode: Mode, trace: Trace) -> tuple[Plan, Trace] | None:
        """A plan, and the trace that it is for: the first rank's, also where this one has gone through its units in another
        order. None when no plan fits, so that fetch on use goes on."""
        if self._communicator.world_size > 1:
            trace = self._communicator.broadcast_object(trace)
        try:
            return self.plan(mode, trace), trace
        except CapacityError:
            return None

    def _same_on_all_ranks(self, plan: Plan) -> None:
        communicator = self._communicator
        if communicator.world_size == 1:
            return
        number = int(plan.digest()[:15], 16) ^ int(self._layout[:15], 16)
        pair = communicator.all_reduce(torch.tensor([number, -number], dtype=torch.int64), maximum=True).tolist()
        if pair[0] != -pair[1]:
            raise RankError(
                f"rank {communicator.rank} has made another plan than other ranks, or lays its weights out in another way; "
                f"do all ranks build the same model (names, shapes, memory formats) with the same settings?"
            )
