"""Unpaged optimizers: optimizers whose update cannot be run page by page and whose own `step` runs on ordinary tensors.

This is possible with everything in RAM on one rank and without separate master weights: parameters and gradients are then
ordinary, unsharded tensors. The user's optimizer updates them as in plain training, and keeps its states outside pages.

Decides only. Knows optimizers; homes are the blueprint's.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.optim import Optimizer

from lightning_ptm.errors import ConfigError
from lightning_ptm.update.trial.probe import probe
from lightning_ptm.update.trial.traits import OptimizerTraits

if TYPE_CHECKING:
    from lightning_ptm.planning.layout import UnitSpec

Traits = dict[tuple[int, torch.dtype, torch.device], OptimizerTraits]
"""Traits of optimizers, by number of the optimizer, dtype that it updates, and device of the update."""


def reasons(
    optimizers: Sequence[Optimizer], dtype_of: Callable[[Tensor], torch.dtype], device: torch.device, known: Traits
) -> dict[int, ConfigError]:
    """Returns the optimizers that cannot be run page by page, by number, each with the error that says why.

    Args:
        dtype_of: returns the dtype in which a parameter is updated.
        device: device on which optimizers are tried.
        known: traits; those of the optimizers that can be run page by page are added.
    """
    members = [[parameter for group in each.param_groups for parameter in group["params"]] for each in optimizers]
    holders = Counter(id(parameter) for parameters in members for parameter in parameters)
    found: dict[int, ConfigError] = {}
    for index, parameters in enumerate(members):
        try:
            for dtype in {dtype_of(parameter) for parameter in parameters if parameter.requires_grad}:
                if (index, dtype, device) not in known:
                    known[index, dtype, device] = probe(optimizers[index], dtype=dtype, device=device)
                traits = known[index, dtype, device]
                for parameter in parameters if traits.whole else ():
                    if holders[id(parameter)] > 1:
                        raise in_two(tuple(parameter.shape), traits)
        except ConfigError as error:
            found[index] = error
    return _with_sharers(found, members)


def _with_sharers(found: dict[int, ConfigError], members: Sequence[Sequence[Tensor]]) -> dict[int, ConfigError]:
    """Adds the optimizers that share a parameter with an unpaged one: the parameter is not in pages, so that they are
    unpaged, too."""
    ids = [{id(parameter) for parameter in parameters} for parameters in members]
    unpaged = list(found)
    for index in unpaged:
        for other, theirs in enumerate(ids):
            if other not in found and theirs & ids[index]:
                found[other] = found[index]
                unpaged.append(other)
    return found


def in_two(shape: tuple[int, ...], traits: OptimizerTraits) -> ConfigError:
    """Returns the error for a parameter that is in two optimizers of which one updates it as a whole."""
    return ConfigError(
        f"a parameter of shape {shape} is in two optimizers, of which {traits.name} updates it as a whole "
        f"({traits.whole}), and pages can be cut for one of them only; leave it in one, use element-wise optimizers such as "
        f"torch.optim.AdamW, or keep everything in RAM, on one rank and in a true precision"
    )


def check_shared(specs: Iterable[UnitSpec], *, lock_free: bool, scaled: bool) -> None:
    """Checks that parameters of several optimizers are not combined with lock-free updates or loss scaling.

    Args:
        lock_free: whether updates run concurrently with compute.
        scaled: whether losses are scaled (fp16).

    Raises:
        ConfigError: they are.
    """
    shared = next((each for unit in specs for each in unit.parameters if len(each.optimizers) > 1), None)
    if shared is not None and lock_free:
        raise ConfigError(
            f"parameter {shared.name} is in two optimizers, and with lock_free=True the update by one would begin before "
            f"the other has written the parameter; use lock_free=False, or leave it in one"
        )
    if shared is not None and scaled:
        raise ConfigError(
            f"parameter {shared.name} is in two optimizers, and with precision='16-mixed' each would unscale the same "
            f"gradient; use precision='bf16-mixed' or '32-true', or leave it in one"
        )
