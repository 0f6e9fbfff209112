"""Runs that can do without pages: of which nothing is asked but that all model states are in RAM, on one rank.

Their parameters stay what their modules hold, and their optimizers step themselves.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from lightning_ptm.config import Settings
from lightning_ptm.errors import CapacityError
from lightning_ptm.planning.placement_data import Placement, PlacementWishes
from lightning_ptm.runtime.deciding.blueprint import Blueprint, Request
from lightning_ptm.runtime.deciding.budgets import wishes_of
from lightning_ptm.runtime.units.guarded_parameter import GuardedParameter
from lightning_ptm.terms import Tier


def may_be_outside(request: Request, blueprint: Blueprint) -> bool:
    """Whether a run can do without pages, of which nothing is asked but that all of them are in RAM."""
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
    """Whether updates may be outside of pages: nothing but their homes in RAM is asked of model states."""
    in_ram = {wishes.parameter, wishes.master} <= {None, Tier.DEVICE}
    return (
        in_ram
        and not (settings.lock_free or settings.encodes_states)
        and settings.checkpoints.state_dict_type == "full"
    )


def all_in_ram(place_with: Callable[..., Placement]) -> Placement | None:
    """The placement that keeps everything in RAM, gradients included, if there is one.

    Updates then wait for the step: behind the backward pass they would throw its weights and activations out of the
    CPU's cache (measured on two cores: a step of 124M parameters took 7 % longer).
    """
    try:
        placement = place_with(keep_gradients=True)
    except CapacityError:
        return None
    return placement if is_all_in_ram(placement) else None


def is_all_in_ram(placement: Placement) -> bool:
    """Of a placement whose device tier is RAM."""
    homes = {tier for home in placement.homes for tier in (home.parameter, home.gradient, home.master)}
    return homes == {Tier.DEVICE}
