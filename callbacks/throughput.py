"""Tokens per second in the progress bar and in the logs.

Owns a few (time, tokens) pairs and nothing on a device. I1: it never waits for a device and never communicates: it
reads shapes and the clock. I2: time spent outside training (validation, checkpoints between epochs) is not counted.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Iterable, Mapping
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor

LOG_INTERVAL_S = 0.5
"""Least time between two looks at the speed: logging costs a few hundred microseconds, too much for steps of a few
milliseconds. In between, Lightning goes on showing and logging the last value."""


class Throughput(Callback):
    """Logs `speed/tokens_per_s`, over all ranks, and shows it in the progress bar as `ktokens/s`.

    The tokens of a batch are the elements of its first tensor, and every rank is taken to have as many. For a model
    of images or tables the number reads as elements per second.

    Args:
        window: Batches that the speed is averaged over. On CUDA, batches are launched ahead of the device, so a window
            of less than a few batches would measure launching.
    """

    def __init__(self, window: int = 20) -> None:
        if window < 1:
            raise ValueError(f"Throughput got window={window}; it averages over at least 1 batch")
        # (end of a batch in seconds of the monotonic clock, its tokens); the first pair only starts the clock.
        self._ends: deque[tuple[float, int]] = deque(maxlen=window + 1)
        self._logged_at_s = -math.inf

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Starts a new window; Lightning has dropped the last epoch's value."""
        self._ends.clear()
        self._logged_at_s = -math.inf

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Starts a new window: the validation was no training time."""
        self._ends.clear()

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Notes the batch, and now and then logs the speed, from the second batch of a window on."""
        tokens = _first_tensor_numel(batch)
        if tokens is None:
            return
        now_s = time.monotonic()
        self._ends.append((now_s, tokens * trainer.world_size))
        if len(self._ends) < 2 or now_s - self._logged_at_s < LOG_INTERVAL_S:
            return
        seconds = self._ends[-1][0] - self._ends[0][0]
        window_tokens = sum(tokens for _, tokens in self._ends) - self._ends[0][1]
        if seconds > 0:
            self._logged_at_s = now_s
            speed = window_tokens / seconds
            pl_module.log("speed/tokens_per_s", speed, batch_size=1)
            # The bar is narrow: three digits, in thousands, or it would show 2.16e+4.
            pl_module.log("ktokens/s", float(f"{speed / 1000:.3g}"), prog_bar=True, logger=False, batch_size=1)


def _first_tensor_numel(batch: Any) -> int | None:
    """Elements of the first tensor in a batch of nested mappings and sequences; None when there is none."""
    if isinstance(batch, Tensor):
        return batch.numel()
    if isinstance(batch, Mapping):
        parts: Iterable[Any] = batch.values()
    elif isinstance(batch, (list, tuple)):
        parts = batch
    else:
        return None
    return next((numel for part in parts if (numel := _first_tensor_numel(part)) is not None), None)
