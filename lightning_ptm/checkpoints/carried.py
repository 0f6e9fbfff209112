"""Model states during a re-layout: taken from the old engine, given to the new one.

There are two ways: from page to page (carried_in_pages.py), and through the files of a sharded checkpoint
(carried_in_files.py) where old and new pages do not fit at the same time. The strategy (trainer/rearranging.py) decides
when a re-layout happens.
I1: elements keep their bits; an optimizer's step counts are carried with them.
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
from lightning_ptm.runtime.units.binding import set_data
from lightning_ptm.runtime.units.parameter_guard import reopen
from lightning_ptm.trainer.paged_optimizer_state import opened


class Carried(abc.ABC):
    """The model states of a run, from the drain of the old engine on. Collective.

    Args:
        optimizers: the optimizers whose states are in pages.
    """

    def __init__(self, engine: Engine, module: LightningModule, optimizers: Sequence[Optimizer]) -> None:
        self._names = {id(parameter): name for name, parameter in engine.gathered_flats.names()}
        self._references = {id(parameter): weakref.ref(parameter) for _, parameter in engine.gathered_flats.names()}
        parameters = [parameter for _, parameter in engine.gathered_flats.names()]
        engine.drain("states before a re-layout")
        self._removed = [_drop_removed(engine, module, plain_optimizer(each)) for each in optimizers]
        """By optimizer, (id, name) of parameters whose states are dropped."""
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
        """Returns the dtypes of the precise values of all parameters, by id."""

    @abc.abstractmethod
    def given(self) -> Given | None:
        """Returns first values for the new engine, if they are in files; None if they are in pages."""

    @property
    def handed(self) -> PreviousState | None:
        """The old pages, if the states are carried in pages."""
        return None

    @abc.abstractmethod
    def old_engine_closed(self) -> None:
        """Frees what the old engine held in addition to its states. Called when it is closed."""

    def rescue(self, module: nn.Module) -> bool:
        """Gives the module its weights back if no new engine can be built; returns whether the module has them."""
        return False

    @abc.abstractmethod
    def _removed_values(self, engine: Engine, wanted: Sequence[int]) -> Mapping[int, Tensor]:
        """Returns precise, whole values of parameters in new memory. Collective.

        Args:
            wanted: ids of parameters, in the same order on all ranks. A rank may get values that it does not use.
        """

    def restore_removed(self, engine: Engine, module: LightningModule, optimizers: Sequence[Optimizer]) -> None:
        """Restores parameters that were removed from the module but still exist, and warns of optimizer states that are
        dropped. Collective.

        Args:
            engine: the new engine.
            optimizers: the same as in the constructor.
        """
        now = {id(parameter) for parameter in module.parameters()}
        gone = [known for known in self._names if known not in now]
        if gone:
            gc.collect()  # the closed engine refers to parameters in cycles
        alive = torch.tensor([int(self._references[known]() is not None) for known in gone], dtype=torch.int64)
        if gone:
            engine.communicator.all_reduce(alive, maximum=True)
        wanted = [known for known, anywhere in zip(gone, alive.tolist(), strict=True) if anywhere]
        for known, value in self._removed_values(engine, wanted).items():
            parameter = self._references[known]()
            if parameter is not None:
                reopen(parameter)
                set_data(parameter, value)
        for optimizer, removed in zip(map(plain_optimizer, optimizers), self._removed, strict=True):
            names = [name for known, name in removed if self._references[known]() is not None]
            if names:
                rank_zero_warn(
                    f"{some(names, 3)} {'is' if len(names) == 1 else 'are'} in no group of {type(optimizer).__name__} "
                    "any more, or in no module, and the optimizer states there are dropped; if added again, it starts "
                    "without states, where a plain Trainer would go on with the old ones"
                )

    @abc.abstractmethod
    def fill(self, engine: Engine, optimizers: Sequence[Optimizer]) -> None:
        """Writes optimizer states to the new pages; parameters without states start with fresh ones. Collective.

        Args:
            optimizers: the same as in the constructor.
        """

    @abc.abstractmethod
    def close(self) -> None:
        """Frees the pages, or removes the files, that carried the states."""


def pop_unpaged_states(engine: Engine, optimizer: Optimizer, inside: Collection[int]) -> dict[int, Mapping[str, Any]]:
    """Returns and removes states, by id of parameter, that an optimizer itself holds for parameters that were frozen
    until now: loaded, or of an earlier run.

    Args:
        inside: ids of parameters whose states were in pages.
    """
    plain = plain_optimizer(optimizer)
    groups = engine.updates.groups
    paged = [each for each in groups.parameters_of(groups.index_of(plain)) if id(each) not in inside]
    with opened(plain):
        return {id(parameter): plain.state.pop(parameter) for parameter in paged if parameter in plain.state}


def _drop_removed(engine: Engine, module: LightningModule, optimizer: Optimizer) -> list[tuple[int, str]]:
    """Drops the optimizer's states of parameters that are in none of its groups any more.

    Returns:
        (id, name) of the parameters that had states and are in no group, or in no module.
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
    """Warns of optimizer states that are dropped because their parameters have another shape now."""
    ending = [
        name
        for _, flat in engine.updates.groups.flats_of(engine.updates.groups.index_of(optimizer))
        for place, name in enumerate(slot.spec.name for slot in flat.store.binding.layout.slots)
        if name in engine.lent_parameters.resized and flat.states.remembers(place)
    ]
    if ending:
        rank_zero_warn(
            f"{some(ending, 3)} {'has' if len(ending) == 1 else 'have'} another shape than the states of "
            f"{type(optimizer).__name__}, which are dropped, so the optimizer starts with fresh states, where a plain "
            "Trainer raises at its next step; `del optimizer.state[parameter]` says that this is intended, and "
            "load_state_dict loads states of the new shape"
        )
