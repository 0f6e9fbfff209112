"""Model states of a run that is laid out anew, between its old pages and its new ones: in the files of a sharded checkpoint,
so that RAM holds them no second time, and each rank reads what it owns then.

Owns the files until `close`. What the new layout is, and when it is made, is the strategy's (trainer/rearranging.py).
I1: elements keep their bits; what an optimizer counts of a parameter goes with them. I2: files that nobody has closed (the
process was killed) are a partial checkpoint, which the next run there removes (storage/folder.py, I2).
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Collection, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor
from torch.optim import Optimizer

from lightning_ptm.checkpoints.optimizer_states import parameters_of, plain_optimizer
from lightning_ptm.checkpoints.saving import Saving
from lightning_ptm.errors import some
from lightning_ptm.runtime.closed import reopen
from lightning_ptm.runtime.engine import Engine
from lightning_ptm.runtime.materialize import Given, Read
from lightning_ptm.runtime.parameter_data import set_data
from lightning_ptm.sharded import check
from lightning_ptm.storage.checked import CheckedFolder
from lightning_ptm.storage.folder import Draft
from lightning_ptm.storage.index import PARAMETERS, slot_of
from lightning_ptm.storage.tensors import Mapped
from lightning_ptm.storage.writer import SaveOps
from lightning_ptm.trainer.paged_states import opened


class Carried:
    """The states of a run, from now on. Collective.

    Args:
        optimizers: whose states have pages.
        folder: where the files are to be; all ranks see it.
        ranks_here: of this machine, which share its free RAM.
        ops: file calls, for tests.

    Raises:
        CheckpointError: on all ranks, when any could not write; the run can go on.
    """

    def __init__(
        self,
        engine: Engine,
        module: LightningModule,
        optimizers: Sequence[Optimizer],
        folder: Path,
        *,
        ranks_here: int = 1,
        ops: SaveOps | None = None,
    ) -> None:
        self._names = {id(parameter): name for name, parameter in engine.wholes.names()}
        self._kept = {id(parameter): weakref.ref(parameter) for _, parameter in engine.wholes.names()}
        parameters = [parameter for _, parameter in engine.wholes.names()]
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
        self._first = {
            id(parameter): number
            for number in reversed(range(len(engine.updates.groups.optimizers)))
            for parameter in engine.updates.groups.parameters_of(number)
        }
        """By id of a parameter, the first of the optimizers that it had in pages."""
        self._strides = {True: engine.sharded_kinds.strides(PARAMETERS), False: engine.sharded_kinds.strides("")}
        """By whether it is of parameters or of what optimizers keep of them."""
        self._draft: Draft | None = None
        try:
            with engine.rendezvous.together():
                if engine.communicator.rank == 0:
                    self._draft = Draft(folder / "carried", replace=False)
            held = engine.rendezvous.told(None if self._draft is None else str(self._draft.folder))
            self._path = Path(held) / "states"
            # Lightning's dictionary stays where it is; with this key, states of optimizers are written.
            nothing: dict[str, Any] = {"optimizer_states": []}
            Saving(engine, module, optimizers, nothing, self._path, ranks_here=ranks_here, ops=ops)
        except BaseException:
            self.close()
            raise

    def _read(self, kind: str, name: str, mapped: Mapped) -> Tensor:
        tensor = mapped.tensor(name)
        stride = self._strides[kind == PARAMETERS].get(name)
        return tensor if stride is None else tensor.as_strided(tensor.shape, stride)

    def _tensors(self, engine: Engine | None = None) -> Iterator[tuple[str, str, Read]]:
        """(kind of states, name of a parameter, what reads them).

        Args:
            engine: of the ranks by which checksums are compared, each a share of the files.
        """
        folder = CheckedFolder(self._path)
        if engine is not None:
            communicator = engine.communicator
            with engine.rendezvous.together():
                check(folder, folder.index.files[communicator.rank :: communicator.world_size], engine.bars)
        for file in folder.index.files:
            known = folder.files[file.name]
            mapped = Mapped(known.path, known.layout)
            for name in mapped.names():
                yield file.kind, name, partial(self._read, file.kind, name, mapped)

    def given(self) -> Given:
        """First values of all parameters."""
        reads = {name: read for kind, name, read in self._tensors() if kind == PARAMETERS}
        return Given({known: reads[name] for known, name in self._names.items()})

    def dtypes(self) -> dict[int, torch.dtype]:
        """Of these, by id of parameter."""
        return {known: read().dtype for known, read in self.given().parameters.items()}

    def give_back(self, module: LightningModule, optimizers: Sequence[Optimizer]) -> None:
        """Parameters that the module has not any more, and somebody else has, are ordinary ones; whose states end is told.

        Args:
            optimizers: as they were given before.
        """
        gc.collect()  # of the engine that has been closed
        now = {id(parameter) for parameter in module.parameters()}
        given = self.given().parameters
        for known, kept in self._kept.items():
            parameter = kept()
            if parameter is not None and known not in now:
                reopen(parameter)
                set_data(parameter, given[known]().clone())
        for optimizer, removed in zip(map(plain_optimizer, optimizers), self._removed, strict=True):
            names = [name for known, name in removed if self._kept[known]() is not None]
            if names:
                rank_zero_warn(
                    f"{some(names, 3)} {'is' if len(names) == 1 else 'are'} in no group of {type(optimizer).__name__} any "
                    f"more, or in no module, and the states there end; added again, it begins with none, where a plain "
                    f"Trainer goes on with the old ones"
                )

    def fill(self, engine: Engine, optimizers: Sequence[Optimizer]) -> None:
        """Writes what optimizers keep into the new pages; parameters of which it keeps nothing start afresh. Collective.

        Args:
            optimizers: as they were given before.
        """
        first = {self._names[known]: number for known, number in self._first.items()}
        slots: dict[tuple[str, int], dict[str, Any]] = {}
        for kind, name, read in self._tensors(engine):
            if kind != PARAMETERS:
                slot, number = slot_of(kind)
                slots.setdefault((name, first[name] if number is None else number), {})[slot] = read()
        no_slots: Mapping[str, Any] = MappingProxyType({})
        for optimizer, scalars in zip(optimizers, self._scalars, strict=True):
            index = engine.updates.groups.index_of(plain_optimizer(optimizer))
            states = {
                known: {**each, **slots.get((self._names[known], index), no_slots)} for known, each in scalars.items()
            }
            engine.optimizer_values.load(index, _kept_outside(engine, optimizer, scalars) | states)

    def close(self) -> None:
        """Removes the files. Never raises."""
        draft, self._draft = self._draft, None
        if draft is not None:
            draft.discard()


def _kept_outside(engine: Engine, optimizer: Optimizer, inside: Collection[int]) -> dict[int, Mapping[str, Any]]:
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
        if name in engine.lending.resized and flat.states.remembers(place)
    ]
    if ending:
        rank_zero_warn(
            f"{some(ending, 3)} {'has' if len(ending) == 1 else 'have'} another shape than what {type(optimizer).__name__} "
            f"keeps of it, which ends, and it begins afresh, where a plain Trainer raises at its next step; `del "
            f"optimizer.state[parameter]` says that this is meant, and load_state_dict brings states of the new shape"
        )
