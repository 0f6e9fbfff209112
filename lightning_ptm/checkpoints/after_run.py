"""Record of how a run has ended: whether its weights and optimizer states can still be saved.

The pages no longer exist then: checkpoints are saved from the module and the optimizers, as far as these were restored
(restore.py), and only rank 0 has all optimizer states.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.utilities import rank_zero_warn
from torch import nn

from lightning_ptm.errors import UsageError, some
from lightning_ptm.runtime.engine.engine import Engine
from lightning_ptm.runtime.units.binding import set_data
from lightning_ptm.runtime.units.parameter_guard import GuardedParameter, reopen
from lightning_ptm.runtime.updates.audits import UpdateAudit


@dataclass(frozen=True, slots=True)
class EndedRun:
    """State of a finished run that later checkpoints need. The defaults describe a module that has not been in a run.

    Args:
        units: name of the unit of each parameter, by the parameter's name.
        page_size: bytes of a page.
        weights: whether the trained parameters of the module have their values.
        path: folder to which the weights were written instead, if RAM had no room for them.
        of_files: ids of frozen parameters whose values equal those of the files that provided them.
        optimizer_states: whether the optimizers have their states.
        torn: whether some weights are of one step and some of the next.
        parts: whether the module has slices of larger parameters (tensor parallelism).
        audits: which updates each flat had received at the last drain.
    """

    units: Mapping[str, str] = field(default_factory=dict)
    page_size: int = 0
    weights: bool = True
    path: str = ""
    of_files: frozenset[int] = frozenset()
    optimizer_states: bool = False
    torn: bool = False
    parts: bool = False
    audits: tuple[UpdateAudit, ...] = ()


def remember(engine: Engine, *, torn: bool) -> EndedRun:
    """Returns what later checkpoints need to know of a run that is about to end. Called before anything is restored."""
    units = {
        slot.spec.name: store.unit.name
        for store in engine.stores
        for binding in store.bindings
        for slot in binding.layout.slots
    }
    return EndedRun(
        units, engine.allocator.page_size, weights=False, torn=torn, parts=engine.blueprint.holders.in_parts
    )


def check_weights(ended: EndedRun, module: LightningModule, *, warn: bool) -> None:
    """Checks before a save that the module has its weights.

    Args:
        warn: warn of frozen weights that it does not have.

    Raises:
        UsageError: the weights were not restored, or are slices.
    """
    if ended.parts:
        raise UsageError(
            "the run has ended, and each rank's module has only its slices of parameters (tensor parallelism), so no "
            "whole weights can be saved; save inside the run, as ModelCheckpoint does"
        )
    if ended.path:
        raise UsageError(
            f"the run has ended, and its weights were written to {ended.path}, since RAM had no room for them; "
            f"load them from that checkpoint: weights={str(ended.path)!r} in the next run, "
            "`lightning_ptm.sharded.load`, or `lightning-ptm export`"
        )
    parameters = list(module.parameters())
    lacking = [name for name, each in module.named_parameters() if isinstance(each, GuardedParameter)]
    if not ended.weights or (lacking and len(lacking) == len(parameters)):
        raise UsageError(
            "the run has ended and its weights were not restored to the module (tuning=Tuning(restore_weights=False), "
            "or the run failed), so there is nothing to save; save inside the run, as ModelCheckpoint does"
        )
    if lacking and warn:
        rank_zero_warn(
            f"{len(lacking)} frozen parameters ({some(lacking, 3)}) were not restored after the run, since RAM had no "
            "room for them, and are not in this checkpoint; load it over the base model with strict=False "
            "(strict_loading = False of the LightningModule)"
        )


def give_storage(module: nn.Module) -> None:
    """Gives parameters that were not restored storage of their own, filled with NaN, so that values can be loaded."""
    for parameter in module.parameters():
        if reopen(parameter):
            set_data(parameter, torch.full(parameter.shape, float("nan"), dtype=parameter.dtype))


def check_optimizer_states(ended: EndedRun) -> None:
    """Checks before a save that the optimizers have their states.

    Raises:
        UsageError: they were not restored.
    """
    if not ended.optimizer_states:
        raise UsageError(
            "the optimizer states ended with their run, since RAM had no room for a copy (for states on disk, no "
            "more than half of the free RAM is used); save inside the run, as ModelCheckpoint does, or give "
            "save_checkpoint(..., weights_only=True); if this came from scale_batch_size or lr_find, use a new "
            "Trainer"
        )
