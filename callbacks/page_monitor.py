"""What the pages do, in the logs: traffic and bandwidth of each link, stalls of compute, updates and their staleness.

Owns the numbers of the last log, to log differences. I1: it reads counters; it waits for nothing and never communicates.
"""

from __future__ import annotations

from lightning.pytorch import Callback, LightningModule, Trainer

from lightning_ptm import Statistics

from .where import pages_of


class _Monitor(Callback):
    """Logs, whenever the Trainer logs (`log_every_n_steps`), what has changed in `AngelPTMStrategy.statistics()`."""

    def __init__(self) -> None:
        self._last: Statistics | None = None
        self._last_step = 0

    def numbers(self, now: Statistics, before: Statistics, steps: int) -> dict[str, float]:
        """What to log of the last `steps` optimizer steps. A class that combines monitors adds up theirs."""
        return {}

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Starts to count."""
        self._last = self._now(trainer)
        self._last_step = trainer.global_step

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *rest: object) -> None:
        """Logs what has happened since the last log."""
        steps = trainer.global_step - self._last_step
        if self._last is None or steps < trainer.log_every_n_steps:  # type: ignore[attr-defined]
            return
        before, now = self._last, self._now(trainer)
        self._last, self._last_step = now, trainer.global_step
        if now is not None:
            pl_module.log_dict(self.numbers(now, before, steps), batch_size=1)

    @staticmethod
    def _now(trainer: Trainer) -> Statistics | None:
        strategy = pages_of(trainer)
        return None if strategy is None else strategy.statistics()


class TransferMonitor(_Monitor):
    """Logs, whenever the Trainer logs, for rank 0:

    - `links/<from>_to_<to>_MB_per_step` and `links/<from>_to_<to>_GB_per_s`: bytes over each link since the last log, a
      step, and their bandwidth while the link was busy; activations that `activations="host"` takes to RAM are links of
      their own, `links/activations_to_host_...` and `links/activations_to_device_...`.
    - `stall/fetch_s_per_step`, `stall/update_s_per_step`, `stall/save_s_per_step`: seconds a step that compute waited for
      parameters, for an update of them (with lock-free updates: because `max_staleness` was reached), or for checkpoints.

    Does nothing with other strategies.
    """

    def numbers(self, now: Statistics, before: Statistics, steps: int) -> dict[str, float]:
        """Links and stalls."""
        numbers = super().numbers(now, before, steps)
        for name, link in now.links.items():
            old = before.links.get(name)
            moved = link.bytes - (old.bytes if old else 0)
            busy_s = link.busy_s - (old.busy_s if old else 0.0)
            numbers[f"links/{name}_MB_per_step"] = moved / steps / 1e6
            if busy_s > 0:
                numbers[f"links/{name}_GB_per_s"] = moved / busy_s / 1e9
        for cause, seconds in now.stall_s.items():
            numbers[f"stall/{cause}_s_per_step"] = (seconds - before.stall_s[cause]) / steps
        return numbers


class StalenessMonitor(_Monitor):
    """Logs, whenever the Trainer logs, for rank 0: `update/arithmetic_s_per_step`, seconds of optimizer arithmetic; and with
    lock-free updates `update/updates_per_step`, and in steps `update/staleness_mean` (since the last log) and
    `update/staleness_max` (since the run began).

    Does nothing with other strategies.
    """

    def numbers(self, now: Statistics, before: Statistics, steps: int) -> dict[str, float]:
        """Updates and their staleness."""
        numbers = super().numbers(now, before, steps)
        numbers["update/arithmetic_s_per_step"] = (now.update_arithmetic_s - before.update_arithmetic_s) / steps
        if now.staleness is not None and before.staleness is not None:
            reads = now.staleness.reads - before.staleness.reads
            numbers["update/staleness_mean"] = (now.staleness.total - before.staleness.total) / reads if reads else 0.0
            numbers["update/staleness_max"] = float(now.staleness.maximum)
            numbers["update/updates_per_step"] = now.updates_per_step
        return numbers


class PageMonitor(TransferMonitor, StalenessMonitor):
    """`TransferMonitor` and `StalenessMonitor` in one."""
