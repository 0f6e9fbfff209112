"""Base class of callbacks that log in validate, test and predict.

Owns the number of batches since the run began. I1: a validation inside fit is none of these loops: its numbers are not
logged. I2: nothing here is collective.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer

from .where import loop_of


class OutsideFit(Callback):
    """Calls `loop_begins`, `loop_batch` after each batch, and `loop_ends` in validate, test and predict."""

    def __init__(self) -> None:
        super().__init__()
        self.batches = 0
        """Batches of the loop so far."""

    def loop_begins(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Hook, called before the first batch."""

    def loop_batch(self, trainer: Trainer, batch: Any) -> None:
        """Hook, called after each batch, which `self.batches` includes."""

    def loop_ends(self, trainer: Trainer) -> None:
        """Hook, called after the last batch."""

    def log_loop(self, trainer: Trainer, numbers: Mapping[str, float]) -> None:
        """Logs `numbers` as `<name>/<loop>`, which keeps them apart from those of fit, at the number of batches so far.
        (`LightningModule.log` averages over the loop, and is refused in predict.) Loggers write on rank 0."""
        loop = loop_of(trainer)
        if numbers and loop:
            for logger in trainer.loggers:
                logger.log_metrics({f"{name}/{loop}": value for name, value in numbers.items()}, self.batches)

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Begins the loop (I1)."""
        if loop_of(trainer):
            self.batches = 0
            self.loop_begins(trainer, pl_module)

    def on_validation_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, *rest: Any
    ) -> None:
        """Counts the batch (I1)."""
        if loop_of(trainer):
            self.batches += 1
            self.loop_batch(trainer, batch)

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Ends the loop (I1)."""
        if loop_of(trainer):
            self.loop_ends(trainer)

    on_test_start = on_predict_start = on_validation_start
    on_test_batch_end = on_predict_batch_end = on_validation_batch_end  # type: ignore[assignment]
    on_test_end = on_predict_end = on_validation_end
