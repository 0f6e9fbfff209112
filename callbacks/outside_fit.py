"""The loops of validate, test and predict, for callbacks that log what happens in them.

Owns the number of batches since the run began. I1: a validation inside fit is none of these loops: its numbers are not
told. I2: nothing here is collective.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer


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
        loop = trainer.state.fn
        if numbers and loop is not None:
            for logger in trainer.loggers:
                logger.log_metrics({f"{name}/{loop.value}": value for name, value in numbers.items()}, self.batches)

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """The loop begins, if it is validate's."""
        if trainer.state.fn == "validate":
            self._begin_loop(trainer, pl_module)

    def on_test_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """The loop begins."""
        self._begin_loop(trainer, pl_module)

    def on_predict_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """The loop begins."""
        self._begin_loop(trainer, pl_module)

    def on_validation_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, *rest: Any
    ) -> None:
        """One batch more, if the loop is validate's."""
        if trainer.state.fn == "validate":
            self._count_batch(trainer, batch)

    def on_test_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, *rest: Any
    ) -> None:
        """One batch more."""
        self._count_batch(trainer, batch)

    def on_predict_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, *rest: Any
    ) -> None:
        """One batch more."""
        self._count_batch(trainer, batch)

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """The loop ends, if it is validate's."""
        if trainer.state.fn == "validate":
            self.loop_ends(trainer)

    def on_test_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """The loop ends."""
        self.loop_ends(trainer)

    def on_predict_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """The loop ends."""
        self.loop_ends(trainer)

    def _begin_loop(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.batches = 0
        self.loop_begins(trainer, pl_module)

    def _count_batch(self, trainer: Trainer, batch: Any) -> None:
        self.batches += 1
        self.loop_batch(trainer, batch)
