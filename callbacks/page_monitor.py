"""What the pages do, in the logs: traffic and bandwidth of each link, stalls of compute, staleness of lock-free updates.

Owns the numbers of the last log, to log differences. I1: it reads counters; it waits for nothing and never communicates.
"""

from __future__ import annotations

from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer


class PageMonitor(Callback):
    """Logs what `AngelPTMStrategy.statistics()` says, whenever the Trainer logs (`log_every_n_steps`), for rank 0:

    - `pages/<from>_to_<to>_MB_per_step` and `pages/<from>_to_<to>_GB_per_s`: bytes over each link since the last log, a
      step, and their bandwidth while the link was busy.
    - `stall/fetch_s_per_step`, `stall/update_s_per_step`, `stall/save_s_per_step`: seconds a step that compute waited for
      parameters, for an update of them (with lock-free updates: because `max_staleness` was reached), or for checkpoints.
    - `update/arithmetic_s_per_step`; and with lock-free updates `update/updates_per_step`, `staleness/mean` (since the last
      log) and `staleness/max` (since the run began), in steps.

    Does nothing with other strategies.
    """

    def __init__(self) -> None:
        self._last: Any = None
        self._last_step = 0

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Starts to count."""
        self._last = self._now(trainer)
        self._last_step = trainer.global_step

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Logs what has happened since the last log."""
        steps = trainer.global_step - self._last_step
        if steps < trainer.log_every_n_steps or self._last is None:  # type: ignore[attr-defined]
            return
        before, now = self._last, self._now(trainer)
        self._last, self._last_step = now, trainer.global_step
        numbers: dict[str, float] = {}
        for name, link in now.links.items():
            old = before.links.get(name)
            moved = link.bytes - (old.bytes if old else 0)
            busy_s = link.busy_s - (old.busy_s if old else 0.0)
            numbers[f"pages/{name}_MB_per_step"] = moved / steps / 1e6
            if busy_s > 0:
                numbers[f"pages/{name}_GB_per_s"] = moved / busy_s / 1e9
        for cause, seconds in now.stall_s.items():
            numbers[f"stall/{cause}_s_per_step"] = (seconds - before.stall_s[cause]) / steps
        numbers["update/arithmetic_s_per_step"] = (now.update_arithmetic_s - before.update_arithmetic_s) / steps
        if now.staleness is not None:
            reads = now.staleness.reads - before.staleness.reads
            numbers["staleness/mean"] = (now.staleness.total - before.staleness.total) / reads if reads else 0.0
            numbers["staleness/max"] = float(now.staleness.maximum)
            numbers["update/updates_per_step"] = now.updates_per_step
        pl_module.log_dict(numbers, batch_size=1)

    @staticmethod
    def _now(trainer: Trainer) -> Any:
        statistics = getattr(trainer.strategy, "statistics", None)
        return statistics() if statistics is not None else None
