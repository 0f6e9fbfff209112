"""Parameter groups of a run's optimizers: the current ones, and those that the flats' states were built with.

Owns the membership of parameters in groups.

I1: each parameter is updated with the hyper-parameters of the group that it is in when the step is taken.
"""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch
from torch.optim import Optimizer

from lightning_ptm.errors import ConfigError, UsageError
from lightning_ptm.update.shadow import GroupValues
from lightning_ptm.update.trial.traits import same_value

if TYPE_CHECKING:
    from lightning_ptm.runtime.gradients.flat_gradient import FlatGradient
    from lightning_ptm.runtime.units.store import FlatStore
    from lightning_ptm.update.flat_states import FlatStates


@dataclasses.dataclass(frozen=True, slots=True)
class FlatUpdate:
    """A trainable flat as one optimizer updates it: parameters, gradients and master states.

    Optimizers that update the same flat share its master weights.
    """

    store: FlatStore
    gradient: FlatGradient
    states: FlatStates
    optimizer: int


class OptimizerGroups:
    """The parameter groups of all optimizers of a run.

    Args:
        flats: all trainable flats, by unit.
        optimizers: the user's own.
    """

    def __init__(self, flats: Sequence[Sequence[FlatUpdate]], optimizers: Sequence[Optimizer]) -> None:
        self.optimizers = list(optimizers)
        self._flats_of: list[list[tuple[int, FlatUpdate]]] = [
            [(unit, flat) for unit in reversed(range(len(flats))) for flat in flats[unit] if flat.optimizer == index]
            for index in range(len(optimizers))
        ]
        self._members = [_members(optimizer) for optimizer in optimizers]
        """Members of each optimizer's groups, as the flats' states know them."""

    def index_of(self, optimizer: Optimizer) -> int:
        """Index of an optimizer of the run (a LightningOptimizer counts as the one it wraps)."""
        inner = getattr(optimizer, "optimizer", None)
        for index, known in enumerate(self.optimizers):
            if known is optimizer or known is inner:
                return index
        raise ConfigError(
            f"{type(inner or optimizer).__name__} was not returned by configure_optimizers, so it has no pages; return it "
            f"from there"
        )

    def parameters_of(self, optimizer: int) -> list[torch.nn.Parameter]:
        """The parameters in pages that an optimizer updates."""
        return [parameter for _, flat in self.flats_of(optimizer) for parameter in flat.store.binding.parameters]

    def flats_of(self, optimizer: int) -> Sequence[tuple[int, FlatUpdate]]:
        """(unit, flat) of an optimizer, last unit first: the order in which the backward computes gradients."""
        return self._flats_of[optimizer]

    def follow(self, optimizer: int, finish_all: Callable[[], None]) -> None:
        """Assigns parameters that were moved between groups since the last step to their new group (I1).

        Args:
            finish_all: waits for all updates.
        """
        before, now = self._members[optimizer], _members(self.optimizers[optimizer])
        # a change in the number of groups is refused later
        if all(map(_same_objects, before, now)) or len(before) != len(now):
            return
        finish_all()
        known = {id(each) for members in before for each in members}
        group_of = {id(each): group for group, members in enumerate(now) for each in members}
        for _, flat in self.flats_of(optimizer):
            flat.states.regroup([group_of.pop(id(parameter), None) for parameter in flat.store.binding.parameters])
        for parameter in (each for members in now for each in members if id(each) in group_of.keys() - known):
            if parameter.requires_grad:
                raise UsageError(
                    f"a parameter of shape {tuple(parameter.shape)} was put into a group of "
                    f"{type(self.optimizers[optimizer]).__name__} during a batch, so it has no master states of that "
                    "optimizer; put it there between two batches (on_train_epoch_start, on_train_batch_start)"
                )
        self._members[optimizer] = now

    def outgrown(self, optimizer: int) -> bool:
        """Whether an optimizer has more or fewer groups than when the run began, or new parameters in them."""
        before, now = self._members[optimizer], _members(self.optimizers[optimizer])
        if len(before) != len(now) or all(map(_same_objects, before, now)):
            return len(before) != len(now)
        known = {id(parameter) for members in before for parameter in members}
        return any(id(parameter) not in known for members in now for parameter in members)

    def check_unchanged(self, optimizer: int, hyper: GroupValues) -> None:
        """Raises UsageError if a group has changed since units were updated during the backward pass, with `hyper`."""
        groups = self.optimizers[optimizer].param_groups
        # The snapshot has fixed these, or has advanced them in the user's groups.
        settled = {"params", "fused", *self.flats_of(optimizer)[0][1].states.traits.group_slots}
        changed = {
            key
            for group, used in zip(groups, hyper.groups, strict=False)
            for key, value in group.items()
            if key not in settled and key in used and not (value is used[key] or same_value(value, used[key]))
        }
        if not all(map(_same_objects, self._members[optimizer], _members(self.optimizers[optimizer]))):
            changed.add("params")
        if changed:
            raise UsageError(
                f"{', '.join(sorted(changed))} in the optimizer's param_groups changed between the backward pass and "
                "the step, but units were updated during the backward already, with the old values; change it before "
                "the backward pass, or in on_before_optimizer_step: if the module or a callback has this hook, units "
                "are updated after it"
            )


def _members(optimizer: Optimizer) -> list[list[torch.Tensor]]:
    return [list(group["params"]) for group in optimizer.param_groups]


def _same_objects(first: Sequence[object], second: Sequence[object]) -> bool:
    return len(first) == len(second) and all(map(operator.is_, first, second))
