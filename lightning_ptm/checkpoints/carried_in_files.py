"""Model states during a re-layout, stored in the files of a sharded checkpoint.

Used where the states are on devices, whose memory has no room for old and new pages at once. RAM holds no copy of them,
and each rank reads what it owns in the new layout.

Owns the files until `close`. I1: files that were not removed (the process was killed) are a partial checkpoint, which
the next run in that folder removes (storage/folder.py, I2).
"""

from __future__ import annotations

import gc
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from lightning.pytorch import LightningModule
from torch import Tensor
from torch.optim import Optimizer
from typing_extensions import override

from lightning_ptm.checkpoints.carried import Carried, pop_unpaged_states
from lightning_ptm.checkpoints.optimizer_states import plain_optimizer
from lightning_ptm.checkpoints.saving import Saving
from lightning_ptm.checkpoints.sharded import check
from lightning_ptm.runtime.engine.engine import Engine
from lightning_ptm.runtime.full_params.first_values import Given, Read
from lightning_ptm.storage.folder import Draft
from lightning_ptm.storage.index import PARAMETERS, slot_of
from lightning_ptm.storage.tensors import Mapped
from lightning_ptm.storage.verified import CheckedFolder
from lightning_ptm.storage.writer import SaveOps


class CarriedInFiles(Carried):
    """Model states in files. Collective.

    Args:
        optimizers: the optimizers whose states are in pages.
        folder: where to write the files; all ranks must see it.
        ranks_here: number of ranks that share this machine's RAM.
        ops: file calls, for tests.

    Raises:
        CheckpointError: on all ranks, if any could not write; the run can go on.
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
        for file in folder.index.files:
            known = folder.files[file.name]
            mapped = Mapped(known.path, known.layout)
            for name in mapped.names():
                yield file.kind, name, partial(self._read, file.kind, name, mapped)

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
