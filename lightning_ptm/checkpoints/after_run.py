"""Sharded checkpoints that are saved after a run has ended, from the restored module and optimizers, by rank 0.

The pages no longer exist then, and only rank 0 has all optimizer states (restore.py). The folder is the same as that of
a checkpoint saved in the run, so any number of ranks can load it.
I1: optimizer states whose shape is not the parameter's are stored in Lightning's dictionary.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_ptm.checkpoints.folder_contents import StateFiles, index_of, write_dictionary
from lightning_ptm.checkpoints.optimizer_states import parameters_of, plain_optimizer
from lightning_ptm.config import Settings
from lightning_ptm.errors import UsageError, some
from lightning_ptm.runtime.engine.engine import Engine
from lightning_ptm.runtime.units.binding import set_data
from lightning_ptm.runtime.units.parameter_guard import AbsentTensor, GuardedParameter, reopen
from lightning_ptm.runtime.updates.audits import UpdateAudit
from lightning_ptm.sharded import without_parameters
from lightning_ptm.storage.folder import Draft
from lightning_ptm.storage.index import LIGHTNING, PARAMETERS, kind_of, write_ranges
from lightning_ptm.storage.writer import RangeWriter, SaveOps


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


@dataclass(frozen=True, slots=True)
class _States:
    unit: str
    kind: str
    values: dict[str, Tensor]

    @property
    def tensors(self) -> list[tuple[str, torch.dtype, tuple[int, ...]]]:
        return [(name, value.dtype, tuple(value.shape)) for name, value in self.values.items()]


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


def module_state(ended: EndedRun, module: LightningModule, settings: Settings, *, keep: bool) -> dict[str, Any]:
    """Returns the module's state for a checkpoint: its state dict, or for a sharded checkpoint the part of it that is
    stored in Lightning's dictionary.

    Args:
        keep: whether this rank saves; other ranks get an empty dictionary.

    Raises:
        UsageError: the weights were not restored, or are slices.
    """
    if ended.parts:
        raise UsageError(
            "the run has ended, and the module of each rank has slices of parameters that no rank has whole; save "
            "inside the run, as ModelCheckpoint does"
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
            "the run has ended and its weights were not restored to the module, so there is nothing to save; save "
            "inside the run, as ModelCheckpoint does"
        )
    if not keep:
        return {}
    if lacking:
        rank_zero_warn(
            f"{len(lacking)} frozen parameters ({some(lacking, 3)}) were not restored after the run, since RAM had no "
            "room for them, and are not in this checkpoint; load it over the base model with strict=False "
            "(strict_loading = False of the LightningModule)"
        )
    if settings.checkpoints.state_dict_type == "sharded":
        return without_parameters(module)
    state = module.state_dict()
    for name in [name for name, item in state.items() if isinstance(item, AbsentTensor)]:
        del state[name]
    return state


def give_storage(module: nn.Module) -> None:
    """Gives parameters that were not restored storage of their own, filled with NaN, so that values can be loaded."""
    for parameter in module.parameters():
        if reopen(parameter):
            set_data(parameter, torch.full(parameter.shape, float("nan"), dtype=parameter.dtype))


def optimizer_state(ended: EndedRun, optimizer: Optimizer, settings: Settings, *, keep: bool) -> dict[str, Any]:
    """Returns an optimizer's state for a checkpoint. Args: as for `module_state`.

    Raises:
        UsageError: its states were not restored.
    """
    if not ended.optimizer_states:
        raise UsageError(
            "the optimizer states ended with their run, since RAM had no room for a copy (for states on disk, no "
            "more than half of the free RAM is used); save inside the run, as ModelCheckpoint does, or give "
            "save_checkpoint(..., weights_only=True); if this came from scale_batch_size or lr_find, use a new "
            "Trainer"
        )
    if not keep:
        return {}
    sharded = settings.checkpoints.state_dict_type == "sharded"
    return optimizer_remainder(optimizer) if sharded else plain_optimizer(optimizer).state_dict()


def optimizer_remainder(optimizer: Optimizer) -> dict[str, Any]:
    """Returns the optimizer's state dict without element-wise states: groups, and states of other shapes (I1)."""
    optimizer = plain_optimizer(optimizer)
    result = optimizer.state_dict()
    parameters = parameters_of(optimizer)
    result["state"] = {
        place: {name: value for name, value in state.items() if not _is_slot(parameters[place], value)}
        for place, state in result["state"].items()
    }
    return result


def save(
    ended: EndedRun,
    module: LightningModule,
    optimizers: Sequence[Optimizer],
    checkpoint: Mapping[str, Any],
    path: Path,
    ops: SaveOps | None = None,
) -> None:
    """Writes the folder of a sharded checkpoint. Rank 0 only.

    Args:
        checkpoint: Lightning's dictionary, with the results of `sharded.without_parameters` and `optimizer_remainder`
            in place of state dicts.

    Raises:
        CheckpointError: it cannot be written; what was at `path` before is unchanged.
    """
    ops = ops or SaveOps()
    chosen = optimizers if "optimizer_states" in checkpoint else ()
    parameters = module.named_parameters()
    names = {id(parameter): name for name, parameter in parameters if not isinstance(parameter, GuardedParameter)}
    kinds = list(_kinds(ended, module, names, chosen))
    files = StateFiles.of(kinds)
    index = index_of(module, chosen, checkpoint, files, names=names, world_size=1, page_size=ended.page_size)
    draft = Draft(path)
    try:
        writer = RangeWriter(draft.folder, ops)
        try:
            files.create(writer)
            for file, layout, each in zip(files.files, files.layouts, kinds, strict=True):
                for stored, value in zip(layout.tensors, each.values.values(), strict=True):
                    writer.put(file.name, stored.start, value.detach().cpu().reshape(-1))
            ranges = writer.finish()
        finally:
            writer.abort()
        dictionary = write_dictionary(draft.folder / LIGHTNING, checkpoint, ops)
        write_ranges(draft.folder, 0, ranges, ops)
        replace(index, seals={LIGHTNING: dictionary, **files.seals()}).write(draft.folder, ops)
        draft.commit()
    except BaseException:
        draft.discard()
        raise


def _kinds(
    ended: EndedRun, module: nn.Module, names: Mapping[int, str], optimizers: Sequence[Optimizer]
) -> Iterator[_States]:
    """Yields every kind of every unit's states, unit by unit, as `AllShardedStates.kinds` does in a run."""
    slots: dict[int, dict[str, Tensor]] = {}
    of_earlier: set[int] = set()
    for number, optimizer in enumerate(optimizers):
        for owner, state in plain_optimizer(optimizer).state.items():
            of = number if id(owner) in of_earlier else None
            its = {kind_of(slot, of): value for slot, value in state.items() if _is_slot(owner, value)}
            slots.setdefault(id(owner), {}).update(its)
        of_earlier |= {id(parameter) for parameter in parameters_of(plain_optimizer(optimizer))}
    of_unit: dict[str, list[nn.Parameter]] = {unit: [] for unit in dict.fromkeys(ended.units.values())}
    for name, parameter in module.named_parameters():
        if not isinstance(parameter, GuardedParameter):
            of_unit.setdefault(ended.units.get(name, ""), []).append(parameter)
    for unit, parameters in of_unit.items():
        if parameters:
            yield _States(unit, PARAMETERS, {names[id(parameter)]: parameter for parameter in parameters})
        known = {names[id(parameter)]: slots.get(id(parameter), {}) for parameter in parameters}
        for slot in dict.fromkeys(slot for state in known.values() for slot in state):
            yield _States(unit, slot, {name: state[slot] for name, state in known.items() if slot in state})


def _is_slot(parameter: Tensor, value: Any) -> bool:
    """Returns whether a state is element-wise. A 0-d state is not: a step count has the shape of a 0-d parameter."""
    return isinstance(value, Tensor) and value.dim() > 0 and value.shape == parameter.shape
