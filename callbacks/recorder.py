"""Base class of callbacks that draw timelines: records events of the runtime for a few batches of any loop.

Owns the events of the batches that are being recorded. I1: it listens only on rank 0 and during those batches. I2: the
recorded events are passed on once, also if the run fails or ends before the last batch.
"""

from __future__ import annotations

import dataclasses
from contextlib import ExitStack
from time import perf_counter
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.utilities import rank_zero_warn

from lightning_ptm import Event

from .where import loop_of, pages_of


@dataclasses.dataclass(frozen=True, slots=True)
class Batch:
    """One recorded batch: its number within the run, and the `perf_counter` times of its begin and end."""

    number: int
    begin_s: float
    end_s: float


class Recorder(Callback):
    """Calls `recorded` once per run, with the events of batches `start` to `start + count - 1`, counted from 0 over all
    epochs of fit; or in validate, test or predict. Does nothing with other strategies."""

    def __init__(self, start: int, count: int) -> None:
        if start < 0 or count < 1:
            raise ValueError(
                f"{type(self).__name__} got start={start}, count={count}; start must be at least 0 (batches are counted "
                f"from 0), and count at least 1"
            )
        self.start = start
        self.count = count
        self._listening = ExitStack()
        self._events: list[Event] = []
        self._batches: list[Batch] = []
        self._number = 0
        self._began_s = 0.0

    def recorded(self, trainer: Trainer, events: list[Event], batches: list[Batch]) -> None:
        """Hook, called on rank 0 only, with the events ordered by their ends, while the engine still exists."""
        raise NotImplementedError

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        self._listening.close()
        self._events, self._batches, self._number = [], [], 0

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        self._begin(trainer)

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self._end(trainer)

    def on_validation_batch_start(self, trainer: Trainer, *rest: Any) -> None:
        """Begins a batch, as in training, in loops outside of fit."""
        if loop_of(trainer):
            self._begin(trainer)

    def on_validation_batch_end(self, trainer: Trainer, *rest: Any) -> None:
        """Ends a batch, as in training, in loops outside of fit."""
        super().on_validation_batch_end(trainer, *rest)
        if loop_of(trainer):
            self._end(trainer)

    on_test_batch_start = on_predict_batch_start = on_validation_batch_start  # type: ignore[assignment]
    on_test_batch_end = on_predict_batch_end = on_validation_batch_end  # type: ignore[assignment]

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Passes on what was recorded, at the end of the run."""
        self._finish(trainer)

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Ends the recording, as after training, in loops outside of fit."""
        super().on_validation_end(trainer, pl_module)
        if loop_of(trainer):
            self._finish(trainer)

    on_test_end = on_predict_end = on_validation_end

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Passes on the events before the error."""
        self._give(trainer)

    def _begin(self, trainer: Trainer) -> None:
        strategy = pages_of(trainer)
        if strategy is not None and self._number == self.start and trainer.is_global_zero:
            self._listening.enter_context(strategy.trace_events(self._events.append))
        self._began_s = perf_counter()

    def _end(self, trainer: Trainer) -> None:
        if self.start <= self._number < self.start + self.count and pages_of(trainer) is not None:
            self._batches.append(Batch(self._number, self._began_s, perf_counter()))
        self._number += 1
        if self._number == self.start + self.count:
            self._give(trainer)

    def _finish(self, trainer: Trainer) -> None:
        self._give(trainer)
        loop = trainer.state.fn
        if self._number <= self.start and pages_of(trainer) is not None and loop is not None:
            rank_zero_warn(
                f"{type(self).__name__} records from batch {self.start} on (counted from 0; a fit traces and plans in the "
                f"first two), and {loop.value} ended after {self._number}, so there is nothing to show; let it "
                f"begin earlier, or run more batches"
            )

    def _give(self, trainer: Trainer) -> None:
        self._listening.close()
        events, self._events = self._events, []
        batches, self._batches = self._batches, []
        if events and trainer.is_global_zero:
            self.recorded(trainer, events, batches)
