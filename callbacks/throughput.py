"""Callbacks that show tokens and samples per second, and the use of the machine's arithmetic, in progress bar and logs.

Owns a few times and counts, and nothing on a device. I1: after the start it never waits for a device and never
communicates: it reads shapes and the clock. I2: time outside of training (validation, checkpoints between epochs) is
not counted.
"""

from __future__ import annotations

import dataclasses
import math
from collections import deque
from collections.abc import Iterable, Mapping
from pathlib import Path
from time import monotonic, perf_counter
from typing import Any

import torch
import yaml  # type: ignore[import-untyped,unused-ignore]
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.utilities import rank_zero_info
from torch import Tensor

from lightning_ptm import ConfigError

from .outside_fit import OutsideFit
from .where import pages_of

_DTYPES = {"32": torch.float32, "64": torch.float64, "16": torch.float16, "bf16": torch.bfloat16}
BATCHES_TO_JUDGE_BY = 5
"""Number of batches, after the first, from which the duration of training is estimated."""

WORTH_TELLING_S = 30.0
"""A shorter training is not announced."""

LOG_INTERVAL_S = 0.5
"""Least time between two logged values: logging takes a few hundred microseconds, too much for steps of a few
milliseconds. In between, Lightning continues to show and log the last value."""


@dataclasses.dataclass(frozen=True, slots=True)
class _End:
    """The end of a batch, in seconds of the monotonic clock, and its tokens and samples on all ranks."""

    at_s: float
    tokens: int
    samples: int


class Throughput(OutsideFit):
    """Logs `speed/tokens_per_s` and `speed/samples_per_s`, over all ranks, and shows the former in the progress bar as
    `ktokens/s`. After a few batches it announces once how long training will take. In validate, test and predict they are
    logged as `speed/tokens_per_s/<loop>`...

    The tokens of a batch are the elements of its first tensor, its samples that tensor's first dimension; every rank is
    assumed to have the same number. For a model of images or tables the number of tokens means elements.

    With the machine's rate (`matrix_flops_per_s`), it also logs `speed/model_TFLOP_per_s`, by the rule of 6 x
    parameters x tokens (2 forward, 4 backward, which only training has; attention's products and recomputation not
    counted), and its ratio to the rate of all ranks as `speed/utilisation`. The rule is for dense models of tokens:
    if a token passes only some of the parameters (experts), both are too high.

    Args:
        window: number of batches that the speed is averaged over. On CUDA, batches are launched ahead of the device, so a
            window of less than a few batches would measure launching.
        matrix_flops_per_s: floating-point operations per second of one rank's device in matrix products, in the dtype that
            `precision` computes in; or the path of a hardware file that has it (`lightning-ptm probe > my.yaml`);
            "measured" multiplies two matrices for about half a second at the start; None logs no utilisation.
    """

    def __init__(self, window: int = 20, matrix_flops_per_s: float | str | None = None) -> None:
        super().__init__()
        if window < 1:
            raise ValueError(f"Throughput got window={window}; it averages over at least 1 batch")
        if isinstance(matrix_flops_per_s, (int, float)) and not matrix_flops_per_s > 0:
            raise ValueError(
                f"Throughput got matrix_flops_per_s={matrix_flops_per_s}; utilisation is a ratio to that rate, so give one "
                f"above 0, the path of a hardware file, or 'measured'"
            )
        self.matrix_flops_per_s = matrix_flops_per_s
        # The first entry only starts the clock.
        self._ends: deque[_End] = deque(maxlen=window + 1)
        self._logged_at_s = -math.inf
        self._rate: float | None = None
        self._rate_of: torch.dtype | None = None
        self._parameters = 0
        self._announced_duration = False

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Counts parameters and, if requested, measures the rate."""
        self._start(trainer, pl_module)
        self._announced_duration = False

    def loop_begins(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._start(trainer, pl_module)
        self._ends.clear()
        # The window begins here, since no batch has ended before.
        self._logged_at_s = monotonic()
        self._ends.append(_End(self._logged_at_s, 0, 0))

    def loop_batch(self, trainer: Trainer, batch: Any) -> None:
        self.log_loop(trainer, self._numbers(trainer, batch, operations=2))

    def loop_ends(self, trainer: Trainer) -> None:
        """Logs the last batches; all of them, if they took no longer than the interval between logs."""
        if self._ends and self._ends[-1].at_s > self._logged_at_s:
            self.log_loop(trainer, self._speed(trainer, operations=2))

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Starts a new window; Lightning has dropped the last epoch's value."""
        self._ends.clear()
        self._logged_at_s = -math.inf

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Starts a new window, since validation is not training time."""
        super().on_validation_end(trainer, pl_module)
        self._ends.clear()

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Records the batch, and at intervals logs the speed, from the second batch of a window on."""
        numbers = self._numbers(trainer, batch, operations=6)
        if not self._announced_duration and len(self._ends) > BATCHES_TO_JUDGE_BY:
            self._announced_duration = True
            self._announce_duration(trainer)
        if numbers:
            pl_module.log_dict(numbers, batch_size=1)
            # The bar is narrow: three digits, in thousands, or it would show 2.16e+4.
            speed = float(f"{numbers['speed/tokens_per_s'] / 1000:.3g}")
            pl_module.log("ktokens/s", speed, prog_bar=True, logger=False, batch_size=1)

    def _announce_duration(self, trainer: Trainer) -> None:
        batch_s = (self._ends[-1].at_s - self._ends[0].at_s) / (len(self._ends) - 1)
        steps = trainer.estimated_stepping_batches - trainer.global_step
        seconds = steps * trainer.accumulate_grad_batches * batch_s
        if WORTH_TELLING_S <= seconds < math.inf:
            rank_zero_info(
                f"{steps:.0f} more steps take about {_duration(seconds)} at {batch_s:.2g} s a batch, validation not counted"
            )

    def _start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        strategy = pages_of(trainer)
        boxes = {} if strategy is None else strategy.boxes()  # of parameters that are parts of larger ones
        self._parameters = sum(
            parameter.numel() * (boxes[name].parts if name in boxes else 1)
            for name, parameter in pl_module.named_parameters()
        )
        given, dtype = self.matrix_flops_per_s, _DTYPES.get(str(trainer.precision).partition("-")[0], torch.bfloat16)
        if not isinstance(given, str):
            self._rate = given
        elif self._rate is None or self._rate_of is not dtype:
            device = trainer.strategy.root_device
            with trainer.precision_plugin.forward_context():  # as the run computes products
                measured = measured_matrix_flops_per_s(device, dtype) if given == "measured" else None
            self._rate = _rate_in(given, dtype) if measured is None else measured
            self._rate_of = dtype

    def _numbers(self, trainer: Trainer, batch: Any, operations: int) -> dict[str, float]:
        """Records the end of a batch; returns the values to log now, often none."""
        first = _first_tensor(batch)
        if first is None:
            return {}
        now_s = monotonic()
        ranks = (trainer.distributed_sampler_kwargs or {}).get("num_replicas", 1)  # those with batches of their own
        self._ends.append(_End(now_s, first.numel() * ranks, (first.shape[0] if first.ndim else 1) * ranks))
        if now_s - self._logged_at_s < LOG_INTERVAL_S:
            return {}
        numbers = self._speed(trainer, operations)
        if numbers:
            self._logged_at_s = now_s
        return numbers

    def _speed(self, trainer: Trainer, operations: int) -> dict[str, float]:
        """Speed over the window.

        Args:
            operations: number per parameter and token.
        """
        seconds = self._ends[-1].at_s - self._ends[0].at_s if self._ends else 0.0
        if seconds <= 0:
            return {}
        speed = (sum(end.tokens for end in self._ends) - self._ends[0].tokens) / seconds
        samples = (sum(end.samples for end in self._ends) - self._ends[0].samples) / seconds
        numbers = {"speed/tokens_per_s": speed, "speed/samples_per_s": samples}
        if self._rate is not None:
            flops_per_s = operations * self._parameters * speed
            numbers["speed/model_TFLOP_per_s"] = flops_per_s / 1e12
            numbers["speed/utilisation"] = flops_per_s / (self._rate * trainer.world_size)
        return numbers


class ThroughputMonitor(Throughput):
    """`Throughput` that measures the device's rate of matrix products at the start, and so logs utilisation without
    arguments."""

    def __init__(self, window: int = 20, matrix_flops_per_s: float | str | None = "measured") -> None:
        super().__init__(window, matrix_flops_per_s)


def measured_matrix_flops_per_s(
    device: torch.device, dtype: torch.dtype, size: int = 2048, for_s: float = 0.5
) -> float:
    """The best rate of several products of two square matrices in `for_s` seconds, counting two operations per element and
    column."""
    left, right = (torch.ones(size, size, dtype=dtype, device=device) for _ in range(2))
    best_s = math.inf
    stop_s = perf_counter() + for_s
    while math.isinf(best_s) or perf_counter() < stop_s:
        started_s = perf_counter()
        product = left @ right
        product[0, 0].item()  # waits for the device
        best_s = min(best_s, perf_counter() - started_s)
    return 2 * size**3 / best_s


def _duration(seconds: float) -> str:
    """`95` -> `1 min 40 s`, `7300` -> `2 h 1 min`; rounded as befits an estimate."""
    minutes, rest = divmod(round(seconds, -1), 60)
    if minutes < 60:
        return f"{minutes:.0f} min {rest:.0f} s" if minutes else f"{rest:.0f} s"
    return f"{minutes // 60:.0f} h {minutes % 60:.0f} min"


def _rate_in(path: str, dtype: torch.dtype) -> float:
    """The matrix rate of one rank in a hardware file.

    Raises:
        ConfigError: the file or the rate does not exist.
    """
    name = str(dtype).removeprefix("torch.")
    try:
        rates = yaml.safe_load(Path(path).read_text())["compute_flops_per_s"]
        rate = float(rates[name])  # YAML reads 1e12 as text
    except OSError as error:
        raise ConfigError(
            f"Throughput: matrix_flops_per_s={path!r} is no hardware file that can be read ({error}), so there is no rate "
            f"that utilisation is a share of; write one with `lightning-ptm probe > mine.yaml`, or give 'measured'"
        ) from error
    except (yaml.YAMLError, UnicodeDecodeError, LookupError, TypeError, ValueError) as error:
        raise ConfigError(
            f"Throughput: {path} has no number compute_flops_per_s: {name}, in which this run computes, so there is no rate "
            f"that utilisation is a share of; add it, or give matrix_flops_per_s: measured"
        ) from error
    if not 0 < rate < math.inf:
        raise ConfigError(
            f"Throughput: {path} has compute_flops_per_s: {name}: {rate}, and utilisation is a share of it; give one above 0"
        )
    return rate


def _first_tensor(batch: Any) -> Tensor | None:
    """The first tensor in a batch of nested mappings and sequences; None if there is none."""
    if isinstance(batch, Tensor):
        return batch
    if isinstance(batch, Mapping):
        parts: Iterable[Any] = batch.values()
    elif isinstance(batch, (list, tuple)):
        parts = batch
    else:
        return None
    return next((first for part in parts if (first := _first_tensor(part)) is not None), None)
