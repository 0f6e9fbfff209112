"""Tokens and samples per second, and how much of the machine's arithmetic they use, in the progress bar and in the logs.

Owns a few times and counts and nothing on a device. I1: after the start it never waits for a device and never
communicates: it reads shapes and the clock. I2: time spent outside training (validation, checkpoints between epochs) is
not counted.
"""

from __future__ import annotations

import dataclasses
import math
import time
from collections import deque
from collections.abc import Iterable, Mapping
from typing import Any, Literal

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor

LOG_INTERVAL_S = 0.5
"""Least time between two looks at the speed: logging costs a few hundred microseconds, too much for steps of a few
milliseconds. In between, Lightning goes on showing and logging the last value."""


@dataclasses.dataclass(frozen=True, slots=True)
class _End:
    """The end of a batch, in seconds of the monotonic clock, and what the batch was on all ranks."""

    at_s: float
    tokens: int
    samples: int


class Throughput(Callback):
    """Logs `speed/tokens_per_s` and `speed/samples_per_s`, over all ranks, and shows the former in the progress bar as
    `ktokens/s`.

    The tokens of a batch are the elements of its first tensor, its samples that tensor's first dimension, and every rank is
    taken to have as many. For a model of images or tables the number of tokens reads as elements per second.

    Given what the machine can do (`matrix_flops_per_s`), it also logs `speed/model_TFLOP_per_s`, by the rule of 6 x
    parameters x tokens (2 forward, 4 backward; attention's products and recomputation not counted), and that divided by
    what all ranks can do as `speed/utilisation`. The rule is for dense models of tokens: where a token passes only some of
    the parameters (experts), both are too high.

    Args:
        window: Batches that the speed is averaged over. On CUDA, batches are launched ahead of the device, so a window
            of less than a few batches would measure launching.
        matrix_flops_per_s: floating-point operations per second that one rank's device does in matrix products; "measured"
            multiplies two matrices in bf16 (32-bit floats with a precision of 32 bits) for about a second at the start of
            fit; None logs no utilisation.
    """

    def __init__(self, window: int = 20, matrix_flops_per_s: float | Literal["measured"] | None = None) -> None:
        if window < 1:
            raise ValueError(f"Throughput got window={window}; it averages over at least 1 batch")
        if isinstance(matrix_flops_per_s, (int, float)) and not matrix_flops_per_s > 0:
            raise ValueError(
                f"Throughput got matrix_flops_per_s={matrix_flops_per_s}; utilisation is a share of that rate, so give one "
                f"above 0, or 'measured'"
            )
        self.matrix_flops_per_s = matrix_flops_per_s
        # The first entry only starts the clock.
        self._ends: deque[_End] = deque(maxlen=window + 1)
        self._logged_at_s = -math.inf
        self._rate: float | None = None
        self._parameters = 0

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Counts parameters and, if asked to, measures the rate."""
        self._parameters = sum(parameter.numel() for parameter in pl_module.parameters())
        if self.matrix_flops_per_s == "measured":
            dtype = torch.float32 if str(trainer.precision).startswith("32") else torch.bfloat16
            self._rate = measured_matrix_flops_per_s(trainer.strategy.root_device, dtype)
        else:
            self._rate = self.matrix_flops_per_s

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
        first = _first_tensor(batch)
        if first is None:
            return
        now_s = time.monotonic()
        ranks = trainer.world_size
        self._ends.append(_End(now_s, first.numel() * ranks, (first.shape[0] if first.ndim else 1) * ranks))
        if len(self._ends) < 2 or now_s - self._logged_at_s < LOG_INTERVAL_S:
            return
        seconds = self._ends[-1].at_s - self._ends[0].at_s
        window_tokens = sum(end.tokens for end in self._ends) - self._ends[0].tokens
        window_samples = sum(end.samples for end in self._ends) - self._ends[0].samples
        if seconds > 0:
            self._logged_at_s = now_s
            speed = window_tokens / seconds
            numbers = {"speed/tokens_per_s": speed, "speed/samples_per_s": window_samples / seconds}
            if self._rate is not None:
                flops_per_s = 6 * self._parameters * speed
                numbers["speed/model_TFLOP_per_s"] = flops_per_s / 1e12
                numbers["speed/utilisation"] = flops_per_s / (self._rate * ranks)
            pl_module.log_dict(numbers, batch_size=1)
            # The bar is narrow: three digits, in thousands, or it would show 2.16e+4.
            pl_module.log("ktokens/s", float(f"{speed / 1000:.3g}"), prog_bar=True, logger=False, batch_size=1)


def measured_matrix_flops_per_s(
    device: torch.device, dtype: torch.dtype, size: int = 2048, for_s: float = 1.0
) -> float:
    """The best of a few products of two square matrices, two operations an element and column, in
    `for_s` seconds."""
    left, right = (torch.ones(size, size, dtype=dtype, device=device) for _ in range(2))
    best_s = math.inf
    stop_s = time.perf_counter() + for_s
    while math.isinf(best_s) or time.perf_counter() < stop_s:
        started_s = time.perf_counter()
        product = left @ right
        product[0, 0].item()  # waits for the device
        best_s = min(best_s, time.perf_counter() - started_s)
    return 2 * size**3 / best_s


def _first_tensor(batch: Any) -> Tensor | None:
    """The first tensor in a batch of nested mappings and sequences; None when there is none."""
    if isinstance(batch, Tensor):
        return batch
    if isinstance(batch, Mapping):
        parts: Iterable[Any] = batch.values()
    elif isinstance(batch, (list, tuple)):
        parts = batch
    else:
        return None
    return next((first for part in parts if (first := _first_tensor(part)) is not None), None)


ThroughputMonitor = Throughput
"""Another name for it, as those of the other monitors."""
