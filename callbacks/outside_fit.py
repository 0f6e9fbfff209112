"""The loops of validate, test and predict, for callbacks that log what happens in them.

Owns the number of batches since the run began. I1: a validation inside fit is none of these loops: its numbers are not
told. I2: nothing here is collective.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer

from .where import loop_of


class OutsideFit(Callback):
    """Calls `loop_begins`, `loop_batch` behind each batch, and `loop_ends` in validate, test and predict."""

    def __init__(self) -> None:
        super().__init__()
        self.batches = 0
        """Batches of the loop so far."""

    def loop_begins(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Before the first batch."""

    def loop_batch(self, trainer: Trainer, batch: Any) -> None:
        """Behind each batch; `self.batches` counts it."""

    def loop_ends(self, trainer: Trainer) -> None:
        """Behind the last."""

    def log_loop(self, trainer: Trainer, numbers: Mapping[str, float]) -> None:
        """Gives `numbers` to the loggers, as `<name>/<loop>`, so that they stay apart from those of fit, at the number of
        batches so far. (`LightningModule.log` averages over the loop, and predict refuses it.) Loggers write on rank 0."""
        loop = loop_of(trainer)
        if numbers and loop:
            for logger in trainer.loggers:
                logger.log_metrics({f"{name}/{loop}": value for name, value in numbers.items()}, self.batches)

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """The loop begins (I1)."""
        if loop_of(trainer):
            self.batches = 0
            self.loop_begins(trainer, pl_module)

    def on_validation_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, *rest: Any
    ) -> None:
        """One batch more (I1)."""
        if loop_of(trainer):
            self.batches += 1
            self.loop_batch(trainer, batch)

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """The loop ends (I1)."""
        if loop_of(trainer):
            self.loop_ends(trainer)

    on_test_start = on_predict_start = on_validation_start
    on_test_batch_end = on_predict_batch_end = on_validation_batch_end  # type: ignore[assignment]
    on_test_end = on_predict_end = on_validation_end
