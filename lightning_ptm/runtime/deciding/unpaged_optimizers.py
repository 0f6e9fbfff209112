"""Optimizers that take their steps themselves: those whose update cannot be run page by page, where that does no harm.

With everything in RAM on one rank, and no masters beside what computes, parameters and gradients are whole, ordinary tensors.
The step of the user's own optimizer does to them what it does anywhere; its states are its own, outside of pages.

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
"""Of optimizers, by their number, the dtype that they update, and where they do."""


def reasons(
    optimizers: Sequence[Optimizer], dtype_of: Callable[[Tensor], torch.dtype], device: torch.device, known: Traits
) -> dict[int, ConfigError]:
    """Why pages cannot have the update of some optimizers, by their number.

    Args:
        dtype_of: of a parameter while it is updated.
        device: where optimizers are tried.
        known: gets the traits of the others.
    """
    members = [[parameter for group in each.param_groups for parameter in group["params"]] for each in optimizers]
    holders = Counter(id(parameter) for parameters in members for parameter in parameters)
    found: dict[int, ConfigError] = {}
    for index, parameters in enumerate(members):
        try:
            for dtype in {dtype_of(parameter) for parameter in parameters if parameter.requires_grad}:
                traits = known[index, dtype, device] = probe(optimizers[index], dtype=dtype, device=device)
                for parameter in parameters if traits.whole else ():
                    if holders[id(parameter)] > 1:
                        raise in_two(tuple(parameter.shape), traits)
        except ConfigError as error:
            found[index] = error
    return _with_sharers(found, members)


def _with_sharers(found: dict[int, ConfigError], members: Sequence[Sequence[Tensor]]) -> dict[int, ConfigError]:
    """One that has a parameter together with another which steps itself does so, too: what that one steps is in no page."""
    ids = [{id(parameter) for parameter in parameters} for parameters in members]
    drawn_in = list(found)
    for index in drawn_in:
        for other, theirs in enumerate(ids):
            if other not in found and theirs & ids[index]:
                found[other] = found[index]
                drawn_in.append(other)
    return found


def in_two(shape: tuple[int, ...], traits: OptimizerTraits) -> ConfigError:
    """The refusal of a parameter that two optimizers have, of which one updates it as a whole."""
    return ConfigError(
        f"a parameter of shape {shape} is in two optimizers, of which {traits.name} updates it as a whole "
        f"({traits.whole}), and pages are cut for one of them; leave it in one, use optimizers that treat each element on "
        f"its own, such as torch.optim.AdamW, or keep everything in RAM, on one rank and in a true precision"
    )


def check_shared(specs: Iterable[UnitSpec], *, lock_free: bool, scaled: bool) -> None:
    """What parameters of several optimizers cannot be together with.

    Args:
        lock_free: updates run beside compute.
        scaled: losses are scaled (fp16).

    Raises:
        ConfigError: it is asked for.
    """
    shared = next((each for unit in specs for each in unit.parameters if len(each.optimizers) > 1), None)
    if shared is not None and lock_free:
        raise ConfigError(
            f"parameter {shared.name} is in two optimizers, and with lock_free=True the update of one would begin before "
            f"that of the other has changed what both start from; use lock_free=False, or leave it in one"
        )
    if shared is not None and scaled:
        raise ConfigError(
            f"parameter {shared.name} is in two optimizers, and with precision='16-mixed' each takes the loss scale off its "
            f"gradient, of which there is one; use precision='bf16-mixed' or '32-true', or leave it in one"
        )
