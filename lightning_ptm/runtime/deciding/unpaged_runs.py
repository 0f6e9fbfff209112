"""Conditions under which model states can stay outside pages, in ordinary tensors in RAM, on one rank.

Outside (`may_be_outside`, docs/limits.md: plain fp32 weights): the whole run. Modules keep their own parameter tensors, and
all optimizers run their own `step`. Unpaged (`may_be_unpaged`, plain weights): the updates of optimizers that cannot update
pages (LBFGS), in any `-true` precision. Decides only.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from lightning_ptm.config import Settings
from lightning_ptm.errors import CapacityError
from lightning_ptm.planning.placement_data import Placement, PlacementWishes
from lightning_ptm.runtime.deciding.blueprint import Blueprint, Request
from lightning_ptm.runtime.deciding.budgets import wishes_of
from lightning_ptm.runtime.units.parameter_guard import GuardedParameter
from lightning_ptm.terms import Tier


def may_be_outside(request: Request, blueprint: Blueprint) -> bool:
    """Whether a run can work without pages: one rank, everything in RAM, `32-true`, no parameter on the meta device, and no
    setting that needs pages."""
    wishes = wishes_of(request.settings, blueprint.unified, lock_free=blueprint.lock_free is not None)
    parameters = [item.parameter for unit in blueprint.units for item in unit.parameters]
    return (
        blueprint.unified
        and not blueprint.layout.shared
        and not request.mixed
        and request.compute is torch.float32  # nothing is converted
        and request.settings.weights is None
        and not any(flat.code for flat in blueprint.layout.flats)
        and request.settings.tuning.restore_weights
        and may_be_unpaged(request.settings, wishes)
        and is_all_in_ram(blueprint.placement)
        and not any(each.is_meta or isinstance(each, GuardedParameter) for each in parameters)
    )


def may_be_unpaged(settings: Settings, wishes: PlacementWishes) -> bool:
    """Whether the settings allow updates outside pages: homes in RAM, no lock-free updates, encodings or sharded files."""
    in_ram = {wishes.parameter, wishes.master} <= {None, Tier.DEVICE}
    return in_ram and not (settings.lock_free or settings.encodes_states) and not settings.checkpoints.from_pages


def all_in_ram(place_with: Callable[..., Placement]) -> Placement | None:
    """Returns the placement that keeps everything in RAM, including gradients; None if it does not fit.

    Updates then run at the step: during the backward pass they would evict its weights and activations from the CPU's
    cache (measured on two cores: a step of 124M parameters took 7 % longer).
    """
    try:
        placement = place_with(keep_gradients=True)
    except CapacityError:
        return None
    return placement if is_all_in_ram(placement) else None


def is_all_in_ram(placement: Placement) -> bool:
    """Whether all homes of a placement are in RAM. For placements whose device tier is RAM."""
    homes = {tier for home in placement.homes for tier in (home.parameter, home.gradient, home.master)}
    return homes == {Tier.DEVICE}
