"""Model states during a re-layout, copied from the old pages to the new ones.

Owns the old pages until `close`. I1: no files are written, so a process that was killed leaves nothing on disk.
I2: as long as no old page was freed, the module can get its weights back (`rescue`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.optim import Optimizer
from typing_extensions import override

from lightning_ptm.checkpoints.carried import Carried, pop_unpaged_states
from lightning_ptm.checkpoints.optimizer_states import plain_optimizer
from lightning_ptm.comm import SoloCommunicator
from lightning_ptm.runtime.engine.engine import Engine
from lightning_ptm.runtime.full_params.first_values import Given
from lightning_ptm.runtime.machine.machine import free_host_bytes
from lightning_ptm.runtime.relayout.previous_state import PreviousState
from lightning_ptm.runtime.units.binding import set_data
from lightning_ptm.runtime.units.parameter_guard import GuardedParameter, reopen


class CarriedInPages(Carried):
    """Model states in the old pages. Collective."""

    def __init__(self, engine: Engine, module: LightningModule, optimizers: Sequence[Optimizer]) -> None:
        super().__init__(engine, module, optimizers)
        self._alone = engine.communicator.alone
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
            engine.optimizer_values.take_over(index, self._handed, before[id(plain)], states)

    @override
    def close(self) -> None:
        self._handed.close()
