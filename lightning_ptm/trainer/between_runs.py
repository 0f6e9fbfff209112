"""What a strategy keeps from one run to the next: what became of the last one, and what settings of "auto" came to."""

from __future__ import annotations

import dataclasses
import weakref
from typing import Any

from lightning.pytorch import LightningModule

from lightning_ptm.checkpoints.after_run import EndedRun


class BetweenRuns:
    """Made with the strategy; each of its runs reads and changes it."""

    def __init__(self) -> None:
        self.ended = EndedRun()
        """The last run; read by whoever saves or loads without one."""
        self.page_bytes: int | None = None
        """What `page_size="auto"` has come to."""
        self.wide_matmuls: bool | None = None
        """What `matmul_precision="auto"` has come to."""
        self._module: weakref.ref[LightningModule] | None = None

    @property
    def ran(self) -> bool:
        """Whether there was a run."""
        return self._module is not None

    def had(self, module: LightningModule) -> bool:
        """Whether the last run was of this module, which may have learnt since its values were given."""
        return self._module is not None and self._module() is module

    def begin(self, module: LightningModule) -> None:
        """A run of this module has begun."""
        self._module = weakref.ref(module)

    def choose(self, *, page_bytes: int | None, wide_matmuls: bool | None) -> None:
        """What "auto" comes to, for all runs of this strategy."""
        self.page_bytes, self.wide_matmuls = page_bytes, wide_matmuls

    def end(self, ended: EndedRun) -> None:
        """A run is about to end."""
        self.ended = ended

    def note(self, **changes: Any) -> None:
        """What has changed of what is remembered: fields of `EndedRun`."""
        self.ended = dataclasses.replace(self.ended, **changes)

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_module": None}  # a copy has been in no run

    def copy(self, ended: EndedRun) -> BetweenRuns:
        """What a copy of the strategy keeps that is made in a run."""
        found = BetweenRuns()
        found.ended, found.page_bytes, found.wide_matmuls = ended, self.page_bytes, self.wide_matmuls
        return found
