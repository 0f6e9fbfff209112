"""Model states during a re-layout: taken from the old engine, given to the new one.

There are two ways: from page to page (StatesInPages), in which states in a device's own memory wait in RAM, and through the
files of a sharded checkpoint (StatesInFiles) where RAM has no room for those. Otherwise RAM holds no copy of the states, and
each rank reads what it owns in the new layout. The strategy (trainer/relayout.py) decides when a re-layout happens.

I1: elements keep their bits; an optimizer's step counts are carried with them.
I2: page to page, a process that was killed leaves nothing on disk; its files are a partial checkpoint, which the next run
    in that folder removes (storage/folder.py, I2).
I3: page to page, the module can get its weights back (`rescue`) as long as no old page was freed.
"""

from __future__ import annotations

import abc
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
from torch import Tensor, nn
from torch.optim import Optimizer
from typing_extensions import override

from lightning_ptm.checkpoints.optimizer_states import opened, parameters_of, plain_optimizer
from lightning_ptm.checkpoints.saving import Saving
from lightning_ptm.checkpoints.sharded import check, mapped_tensors
from lightning_ptm.comm import SoloCommunicator
from lightning_ptm.errors import some
from lightning_ptm.runtime.engine.engine import Engine
from lightning_ptm.runtime.full_params.first_values import Given, Read
from lightning_ptm.runtime.machine.machine import free_host_bytes
from lightning_ptm.runtime.relayout.previous_state import PreviousState
from lightning_ptm.runtime.units.binding import set_data
from lightning_ptm.runtime.units.parameter_guard import GuardedParameter, reopen
from lightning_ptm.storage.folder import Draft
from lightning_ptm.storage.index import PARAMETERS, slot_of
from lightning_ptm.storage.tensors import Mapped
from lightning_ptm.storage.verified import CheckedFolder
from lightning_ptm.storage.writer import SaveOps


class CarriedStates(abc.ABC):
    """The model states of a run, from the drain of the old engine on. Collective.

    Args:
        optimizers: the optimizers whose states are in pages.
    """

    def __init__(self, engine: Engine, module: LightningModule, optimizers: Sequence[Optimizer]) -> None:
        names = engine.gathered_flats.names()
        self._names = {id(parameter): name for name, parameter in names}
        self._references = {id(parameter): weakref.ref(parameter) for _, parameter in names}
        parameters = [parameter for _, parameter in names]
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
        """Frees the old pages that the carried states do not need: all, if the states are in files. Called between the
        close of the old engine and the start of the new one."""

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
        if name in engine.gathered_parameters.resized and flat.states.remembers(place)
    ]
    if ending:
        rank_zero_warn(
            f"{some(ending, 3)} {'has' if len(ending) == 1 else 'have'} another shape than the states of "
            f"{type(optimizer).__name__}, which are dropped, so the optimizer starts with fresh states, where a plain "
            "Trainer raises at its next step; `del optimizer.state[parameter]` says that this is intended, and "
            "load_state_dict loads states of the new shape"
        )


class StatesInPages(CarriedStates):
    """Model states in the old pages, which this object owns until `close`. Collective."""

    def __init__(self, engine: Engine, module: LightningModule, optimizers: Sequence[Optimizer]) -> None:
        super().__init__(engine, module, optimizers)
        self._alone = engine.communicator.alone
        self._own_memory = engine.backend.has_own_memory
        self._handed = engine.hand_on()

    @property
    @override
    def handed(self) -> PreviousState:
        return self._handed

    @override
    def dtypes(self) -> dict[int, torch.dtype]:
        return {known: self._handed.dtype(known) for known in self._names}

    @override
    def given(self) -> Given | None:
        return None

    @override
    def old_engine_closed(self) -> None:
        self._handed.free_all_but_states()
        if self._own_memory:
            gc.collect()  # frees what the closed engine has on the device beside pages

    @override
    def rescue(self, module: nn.Module) -> bool:
        if (
            self._handed.resharder.irreversible
        ):  # the new engine may have had all values, and have restored them at its end
            return not any(isinstance(each, GuardedParameter) for each in module.parameters())
        known = [each for each in module.parameters() if each in self._handed]
        needed = sum(each.numel() * self._handed.dtype(id(each)).itemsize for each in known)
        if not self._alone or needed > free_host_bytes():
            return False
        for parameter in known:
            value = self._handed.precise(id(parameter), SoloCommunicator())
            reopen(parameter)
            set_data(parameter, value)
        return True

    @override
    def _removed_values(self, engine: Engine, wanted: Sequence[int]) -> Mapping[int, Tensor]:
        return {known: self._handed.precise_everywhere(known, engine.communicators) for known in wanted}

    @override
    def fill(self, engine: Engine, optimizers: Sequence[Optimizer]) -> None:
        before = {id(known): number for number, known in enumerate(self._handed.optimizers)}
        for optimizer, scalars in zip(optimizers, self._scalars, strict=True):
            plain = plain_optimizer(optimizer)
            index = engine.updates.groups.index_of(plain)
            outside = {known: state for known, state in pop_unpaged_states(engine, optimizer, scalars).items() if state}
            states = outside | scalars
            engine.optimizer_values.load(index, states, handed=self._handed, before=before[id(plain)])

    @override
    def close(self) -> None:
        self._handed.close()


class StatesInFiles(CarriedStates):
    """Model states of a run in a temporary sharded checkpoint, while a re-layout replaces the pages.

    The constructor writes the files, which this object owns until `close`. Collective.

    Args:
        optimizers: the optimizers whose states are in pages.
        folder: where to write the files; all ranks must see it.
        ranks_here: number of ranks that share this machine's RAM.
        ops: file calls, for tests.

    Raises:
        CheckpointError: on all ranks, if any rank could not write its files; the old pages are intact, so the run can
            continue.
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
        super().__init__(engine, module, optimizers)
        self._first = {
            id(parameter): number
            for number in reversed(range(len(engine.updates.groups.optimizers)))
            for parameter in engine.updates.groups.parameters_of(number)
        }
        """By id of a parameter, the number of the first optimizer that had states of it in pages."""
        self._strides = {True: engine.sharded_kinds.strides(PARAMETERS), False: engine.sharded_kinds.strides("")}
        """Strides of parameters (True) and of optimizer states (False), by name."""
        self._draft: Draft | None = None
        try:
            with engine.barriers.errors_on_all_ranks():
                if engine.communicator.rank == 0:
                    self._draft = Draft(folder / "carried", replace=False)
            held = engine.barriers.broadcast(None if self._draft is None else str(self._draft.folder))
            self._path = Path(held) / "states"
            # Saving writes optimizer states if the dictionary has this key; its other items are not needed.
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
        """Yields (kind of states, name of a parameter, function that reads them).

        Args:
            engine: if given, its ranks verify the files' checksums first, each rank a share of the files.
        """
        folder = CheckedFolder(self._path)
        if engine is not None:
            communicator = engine.communicator
            with engine.barriers.errors_on_all_ranks():
                check(folder, folder.index.files[communicator.rank :: communicator.world_size], engine.bars)
        for kind, name, mapped in mapped_tensors(folder):
            yield kind, name, partial(self._read, kind, name, mapped)

    @override
    def given(self) -> Given:
        """Returns first values of all parameters."""
        reads = {name: read for kind, name, read in self._tensors() if kind == PARAMETERS}
        return Given({known: reads[name] for known, name in self._names.items()})

    @override
    def dtypes(self) -> dict[int, torch.dtype]:
        """Returns the dtypes of all parameters, by id."""
        return {known: read().dtype for known, read in self.given().parameters.items()}

    @override
    def old_engine_closed(self) -> None:
        gc.collect()  # frees the closed engine's pages

    @override
    def _removed_values(self, engine: Engine, wanted: Sequence[int]) -> Mapping[int, Tensor]:
        reads = self.given().parameters
        return {known: reads[known]().clone() for known in wanted if self._references[known]() is not None}

    @override
    def fill(self, engine: Engine, optimizers: Sequence[Optimizer]) -> None:
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
            engine.optimizer_values.load(index, pop_unpaged_states(engine, optimizer, scalars) | states)

    @override
    def close(self) -> None:
        """Removes the files. Never raises."""
        draft, self._draft = self._draft, None
        if draft is not None:
            draft.discard()
