"""State that a strategy keeps between runs: how the last run ended, and the values chosen for settings of "auto"."""

from __future__ import annotations

import dataclasses
import weakref
from collections.abc import Callable, Mapping
from typing import Any

from lightning.pytorch import LightningModule, Trainer

from lightning_ptm.checkpoints.after_run import EndedRun
from lightning_ptm.config import Settings
from lightning_ptm.trainer.ranks import RankPlace


@dataclasses.dataclass(frozen=True, slots=True)
class RunChoice:
    """Choice of `parallel="auto"`: settings with their values, and the same in words, with the prediction."""

    changes: Mapping[str, Any]
    said: str


ParallelChooser = Callable[[Trainer, LightningModule, Settings, RankPlace, Callable[[], None]], RunChoice]
"""Chooses the settings of a fit that begins; the last argument waits for the other ranks. Collective."""


class BetweenRuns:
    """Record of the last run; created with the strategy, read and changed by each of its runs."""

    def __init__(self) -> None:
        self.ended = EndedRun()
        """Record of how the last run ended; saving and loading outside of runs read it."""
        self.page_bytes: int | None = None
        """The page size chosen for `page_size="auto"`."""
        self.wide_matmuls: bool | None = None
        """The choice made for `matmul_precision="auto"`."""
        self._module: weakref.ref[LightningModule] | None = None

    @property
    def ran(self) -> bool:
        """Whether the strategy has had a run."""
        return self._module is not None

    def had(self, module: LightningModule) -> bool:
        """Whether the last run was of this module, so that its values may be trained ones."""
        return self._module is not None and self._module() is module

    def begin(self, module: LightningModule) -> None:
        """Records that a run of this module has begun."""
        self._module = weakref.ref(module)

    def choose(self, *, page_bytes: int | None, wide_matmuls: bool | None) -> None:
        """Records the choices for settings of "auto", for all runs of this strategy."""
        self.page_bytes, self.wide_matmuls = page_bytes, wide_matmuls

    def end(self, ended: EndedRun) -> None:
        """Records how a run ends, just before it does."""
        self.ended = ended

    def note(self, **changes: Any) -> None:
        """Changes fields of the recorded `EndedRun`."""
        self.ended = dataclasses.replace(self.ended, **changes)

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_module": None}  # a copy of the strategy has had no run

    def copy(self, ended: EndedRun) -> BetweenRuns:
        """The record for a copy of the strategy that is made during a run."""
        found = BetweenRuns()
        found.ended, found.page_bytes, found.wide_matmuls = ended, self.page_bytes, self.wide_matmuls
        return found
