"""Optimizers that take their steps themselves: those whose update cannot be run page by page, where that does no harm.

With everything in RAM on one rank, and no masters beside what computes, parameters and gradients are whole, ordinary tensors.
The step of the user's own optimizer does to them what it does anywhere; its states are its own, outside of pages.

Decides only. Knows optimizers; homes are the blueprint's.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.optim import Optimizer

from lightning_ptm.errors import ConfigError
from lightning_ptm.update import OptimizerTraits, probe

Traits = dict[tuple[int, torch.dtype], OptimizerTraits]
"""Of optimizers, by their number and the dtype that they update."""


def reasons(
    optimizers: Sequence[Optimizer], dtype_of: Callable[[Tensor], torch.dtype], device: torch.device, known: Traits
) -> dict[int, ConfigError]:
    """Why pages cannot have the update of some optimizers, by their number.

    Args:
        dtype_of: of a parameter while it is updated.
        device: where optimizers are tried.
        known: gets the traits of the others.
    """
    holders: dict[int, set[int]] = {}
    members = [[parameter for group in each.param_groups for parameter in group["params"]] for each in optimizers]
    for index, parameters in enumerate(members):
        for parameter in parameters:
            holders.setdefault(id(parameter), set()).add(index)
    found: dict[int, ConfigError] = {}
    for index, parameters in enumerate(members):
        shared = next((each for each in parameters if len(holders[id(each)]) > 1), None)
        if shared is not None:
            found[index] = in_two(shared)
            continue
        try:
            for dtype in {dtype_of(parameter) for parameter in parameters if parameter.requires_grad}:
                known[index, dtype] = probe(optimizers[index], dtype=dtype, device=device)
        except ConfigError as error:
            found[index] = error
    return found


def in_two(parameter: Tensor) -> ConfigError:
    """The refusal of a parameter that two optimizers have."""
    return ConfigError(
        f"a parameter of shape {tuple(parameter.shape)} is in two optimizers or parameter groups; its pages can have one "
        f"update only; leave it in one, or keep everything in RAM, on one rank and in a true precision"
    )
