"""Model states of a run that is laid out anew, between its old pages and its new ones.

Two ways, which do the same: from page to page (carried_in_pages.py), and through the files of a sharded checkpoint
(carried_in_files.py), where old pages cannot stay while new ones are made. What the new layout is, and when it is made, is
the strategy's (trainer/rearranging.py).
I1: elements keep their bits; what an optimizer counts of a parameter goes with them.
"""

from __future__ import annotations

import abc
import gc
import weakref
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_ptm.checkpoints.optimizer_states import parameters_of, plain_optimizer
from lightning_ptm.errors import some
from lightning_ptm.runtime.engine.engine import Engine
from lightning_ptm.runtime.full_params.first_values import Given
from lightning_ptm.runtime.relayout.previous_state import PreviousState
from lightning_ptm.runtime.tensors.parameter_data import set_data
from lightning_ptm.runtime.units.guarded_parameter import reopen
from lightning_ptm.trainer.paged_optimizer_state import opened


class Carried(abc.ABC):
    """The states of a run, from now on. Collective.

    Args:
        optimizers: whose states have pages.
    """

    def __init__(self, engine: Engine, module: LightningModule, optimizers: Sequence[Optimizer]) -> None:
        self._names = {id(parameter): name for name, parameter in engine.gathered_flats.names()}
        self._kept = {id(parameter): weakref.ref(parameter) for _, parameter in engine.gathered_flats.names()}
        parameters = [parameter for _, parameter in engine.gathered_flats.names()]
        engine.drain("states before they are laid out anew")
        self._removed = [_let_go_of_removed(engine, module, plain_optimizer(each)) for each in optimizers]
        """By optimizer, (id, name) of parameters of which the states in pages end."""
        self._scalars = [
            {
                id(parameters[place]): scalars
                for place, scalars in engine.optimizer_values.scalars_in_order(
                    engine.updates.groups.index_of(plain_optimizer(optimizer)), parameters
                ).items()
            }
            for optimizer in optimizers
        ]

    @abc.abstractmethod
    def dtypes(self) -> dict[int, torch.dtype]:
        """Of the precise values of all parameters, by their ids."""

    @abc.abstractmethod
    def given(self) -> Given | None:
        """First values, where files have them."""

    @property
    def handed(self) -> PreviousState | None:
        """Pages that have them."""
        return None

    @abc.abstractmethod
    def left(self) -> None:
        """The old engine is closed."""

    def rescue(self, module: nn.Module) -> bool:
        """There will be no new engine: the module gets its weights back, where that can be; whether it has them."""
        return False

    @abc.abstractmethod
    def _removed_values(self, engine: Engine, wanted: Sequence[int]) -> Mapping[int, Tensor]:
        """Precise values of parameters, whole, in memory of their own. Collective.

        Args:
            wanted: their ids, in an order that is the same on all ranks; of some, this rank may want nothing.
        """

    def give_back(self, engine: Engine, module: LightningModule, optimizers: Sequence[Optimizer]) -> None:
        """Parameters that the module has not any more, and somebody else has, are ordinary ones; whose states end is told.
        Collective.

        Args:
            engine: the new one.
            optimizers: as they were given before.
        """
        now = {id(parameter) for parameter in module.parameters()}
        gone = [known for known in self._names if known not in now]
        if gone:
            gc.collect()  # of the engine that has been closed
        alive = torch.tensor([int(self._kept[known]() is not None) for known in gone], dtype=torch.int64)
        if gone:
            engine.communicator.all_reduce(alive, maximum=True)
        wanted = [known for known, anywhere in zip(gone, alive.tolist(), strict=True) if anywhere]
        for known, value in self._removed_values(engine, wanted).items():
            parameter = self._kept[known]()
            if parameter is not None:
                reopen(parameter)
                set_data(parameter, value)
        for optimizer, removed in zip(map(plain_optimizer, optimizers), self._removed, strict=True):
            names = [name for known, name in removed if self._kept[known]() is not None]
            if names:
                rank_zero_warn(
                    f"{some(names, 3)} {'is' if len(names) == 1 else 'are'} in no group of {type(optimizer).__name__} any "
                    f"more, or in no module, and the states there end; added again, it begins with none, where a plain "
                    f"Trainer goes on with the old ones"
                )

    @abc.abstractmethod
    def fill(self, engine: Engine, optimizers: Sequence[Optimizer]) -> None:
        """Writes what optimizers keep into the new pages; parameters of which it keeps nothing start afresh. Collective.

        Args:
            optimizers: as they were given before.
        """

    @abc.abstractmethod
    def close(self) -> None:
        """What has carried the states goes."""


def kept_outside(engine: Engine, optimizer: Optimizer, inside: Collection[int]) -> dict[int, Mapping[str, Any]]:
    """States, by id of parameter, that the optimizer itself has kept while these were frozen: loaded, or of an earlier run.

    Args:
        inside: parameters, by id, whose states were in pages.
    """
    plain = plain_optimizer(optimizer)
    groups = engine.updates.groups
    paged = [each for each in groups.parameters_of(groups.index_of(plain)) if id(each) not in inside]
    with opened(plain):
        return {id(parameter): plain.state.pop(parameter) for parameter in paged if parameter in plain.state}


def _let_go_of_removed(engine: Engine, module: LightningModule, optimizer: Optimizer) -> list[tuple[int, str]]:
    """Parameters that are in no group of an optimizer any more have no states of it.

    Returns:
        (id, name) of those, and of what no module has any more, that had some.
    """
    left = {id(parameter) for parameter in parameters_of(optimizer)}
    here = {id(parameter) for parameter in module.parameters()}
    removed: list[tuple[int, str]] = []
    for _, flat in engine.updates.groups.flats_of(engine.updates.groups.index_of(optimizer)):
        known = list(zip(flat.store.binding.parameters, flat.states.groups, strict=True))
        removed += [
            (id(parameter), slot.spec.name)
            for place, (slot, (parameter, group)) in enumerate(zip(flat.store.binding.layout.slots, known, strict=True))
            if group is not None and id(parameter) not in here & left and flat.states.remembers(place)
        ]
        flat.states.regroup([group if id(parameter) in left else None for parameter, group in known])
    return removed


def warn_of_resized(engine: Engine, optimizer: Optimizer) -> None:
    """States of parameters that have another shape now will end."""
    ending = [
        name
        for _, flat in engine.updates.groups.flats_of(engine.updates.groups.index_of(optimizer))
        for place, name in enumerate(slot.spec.name for slot in flat.store.binding.layout.slots)
        if name in engine.lent_parameters.resized and flat.states.remembers(place)
    ]
    if ending:
        rank_zero_warn(
            f"{some(ending, 3)} {'has' if len(ending) == 1 else 'have'} another shape than what {type(optimizer).__name__} "
            f"keeps of it, which ends, and it begins afresh, where a plain Trainer raises at its next step; `del "
            f"optimizer.state[parameter]` says that this is meant, and load_state_dict brings states of the new shape"
        )
