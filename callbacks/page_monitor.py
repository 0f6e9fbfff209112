"""Callbacks that log traffic and bandwidth of each link, stalls of compute, updates and their staleness.

Owns the counters at the last log, to log differences. I1: it reads counters; it waits for nothing and never communicates.
I2: a validation inside fit is subtracted from the differences, except for its first batch, after which the updates of the
last training step are complete.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from lightning.pytorch import LightningModule, Trainer

from lightning_ptm import Statistics
from lightning_ptm.trainer.internals import steps_of_loop

from .outside_fit import OutsideFit
from .where import pages_of


class _Monitor(OutsideFit):
    """Logs, whenever the Trainer logs (`log_every_n_steps`), the changes in `AngelPTMStrategy.statistics()`; in
    validate, test and predict a batch counts as a step."""

    def __init__(self) -> None:
        super().__init__()
        self._last: Statistics | None = None
        self._last_step = 0
        self._paused: Statistics | None = None
        self._trains = False

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        self._last = self._paused = None

    def numbers(self, now: Statistics, before: Statistics, steps: int) -> dict[str, float]:
        """The values to log for the last `steps` optimizer steps. A class that combines monitors merges theirs."""
        return {}

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._last = self._now(trainer)
        self._last_step = trainer.global_step
        self._trains = True

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *rest: object) -> None:
        """Logs the changes since the last log."""
        steps = trainer.global_step - self._last_step
        if self._last is None or steps < trainer.log_every_n_steps:  # type: ignore[attr-defined]
            return
        before, now = self._last, self._now(trainer)
        self._last, self._last_step = now, trainer.global_step
        if now is not None:
            pl_module.log_dict(self.numbers(now, before, steps), batch_size=1)

    def on_validation_batch_end(self, trainer: Trainer, pl_module: LightningModule, *rest: Any) -> None:
        """Saves the counters when training pauses, after its updates are complete."""
        super().on_validation_batch_end(trainer, pl_module, *rest)
        if trainer.state.fn == "fit" and self._last is not None and self._paused is None:
            self._paused = self._now(trainer)

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Subtracts what has happened since training paused."""
        super().on_validation_end(trainer, pl_module)
        before, self._paused = self._paused, None
        now = self._now(trainer) if before is not None else None
        if before is not None and now is not None and self._last is not None:
            self._last = _moved_on(self._last, before, now)

    def loop_begins(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._last, self._last_step = self._now(trainer), 0
        self._trains = False

    def loop_batch(self, trainer: Trainer, batch: Any) -> None:
        """Logs as often as in training."""
        if self.batches - self._last_step >= trainer.log_every_n_steps:  # type: ignore[attr-defined]
            self.loop_ends(trainer)

    def loop_ends(self, trainer: Trainer) -> None:
        """Logs the remaining batches."""
        batches = self.batches - self._last_step
        if self._last is not None and batches:
            before, self._last, self._last_step = self._last, self._now(trainer), self.batches
            if self._last is not None:
                self.log_loop(trainer, self.numbers(self._last, before, batches))

    @staticmethod
    def _now(trainer: Trainer) -> Statistics | None:
        strategy = pages_of(trainer)
        return None if strategy is None else strategy.statistics()


def _moved_on(last: Statistics, before: Statistics, now: Statistics) -> Statistics:
    """`last` with the changes between `before` and `now` added, so that they do not count in the next difference."""
    links = dict(last.links)
    for name, link in now.links.items():
        old, mine = before.links.get(name), last.links.get(name)
        links[name] = dataclasses.replace(
            link,
            bytes=link.bytes - (old.bytes if old else 0) + (mine.bytes if mine else 0),
            transfers=link.transfers - (old.transfers if old else 0) + (mine.transfers if mine else 0),
            busy_s=link.busy_s - (old.busy_s if old else 0.0) + (mine.busy_s if mine else 0.0),
        )
    return dataclasses.replace(
        last,
        links=links,
        stall_s={
            cause: now.stall_s[cause] - before.stall_s[cause] + seconds for cause, seconds in last.stall_s.items()
        },
        busy_s=last.busy_s + now.busy_s - before.busy_s,
        uses=dataclasses.replace(
            last.uses,
            kept=last.uses.kept + now.uses.kept - before.uses.kept,
            ahead=last.uses.ahead + now.uses.ahead - before.uses.ahead,
            late=last.uses.late + now.uses.late - before.uses.late,
        ),
        update_arithmetic_s=last.update_arithmetic_s + now.update_arithmetic_s - before.update_arithmetic_s,
    )


class TransferMonitor(_Monitor):
    """Logs, whenever the Trainer logs, for rank 0:

    - `links/<from>_to_<to>_MB_per_step` and `links/<from>_to_<to>_GB_per_s`: bytes over each link since the last log, per
      step, and their bandwidth while the link was busy. Offloaded activations have links of their own:
      `links/activations_to_host_...` and `links/activations_to_device_...` with `offload_activations="host"`,
      `links/activations_to_disk_...` and `links/activations_from_disk_...` with "disk".
    - `links/overlap`: the share of the links' busy time in which compute did not wait. It is too low if compute waited for
      other ranks or for the arithmetic of updates, which counts against it, too; on CUDA it may be too high, since
      concurrent copies between RAM and the device, on streams of their own, each count as busy time.
    - `links/cache_hits`: the share of the uses of units whose parameters were still on the device (from their last use, or
      permanently); `links/fetched_ahead`: the share that was prefetched before compute needed it.
    - `stall/fetch_s_per_step`, `stall/update_s_per_step`, `stall/save_s_per_step`: seconds per step that compute waited for
      parameters, for an update of them (with lock-free updates: because `max_staleness` was reached), or for checkpoints.

    In validate, test and predict a step is a batch, and names end in the loop's: `links/overlap/test`.

    Does nothing with other strategies.
    """

    def numbers(self, now: Statistics, before: Statistics, steps: int) -> dict[str, float]:
        numbers = super().numbers(now, before, steps)
        for name, link in now.links.items():
            old = before.links.get(name)
            moved = link.bytes - (old.bytes if old else 0)
            busy_s = link.busy_s - (old.busy_s if old else 0.0)
            numbers[f"links/{name}_MB_per_step"] = moved / steps / 1e6
            if busy_s > 0:
                numbers[f"links/{name}_GB_per_s"] = moved / busy_s / 1e9
        busy_s = now.busy_s - before.busy_s
        if busy_s > 0:
            waited_s = sum(now.stall_s[cause] - before.stall_s[cause] for cause in ("fetch", "update"))
            numbers["links/overlap"] = max(0.0, 1.0 - waited_s / busy_s)
        kept, ahead = now.uses.kept - before.uses.kept, now.uses.ahead - before.uses.ahead
        uses = kept + ahead + now.uses.late - before.uses.late
        if uses:
            numbers |= {"links/cache_hits": kept / uses, "links/fetched_ahead": ahead / uses}
        for cause, seconds in now.stall_s.items():
            numbers[f"stall/{cause}_s_per_step"] = (seconds - before.stall_s[cause]) / steps
        return numbers


class StalenessMonitor(_Monitor):
    """Logs, whenever the Trainer logs in fit, for rank 0: `update/arithmetic_s_per_step`, seconds of optimizer arithmetic;
    and with lock-free updates `update/updates_per_step`, and in steps `update/staleness_mean` (since the last log) and
    `update/staleness_max` (since the run began). In other loops nothing is updated.

    With lock-free updates it also logs the audit, after each validation and at the end of fit, when it has just been
    checked: the numbers of gradients `update/gradients_produced`, `..._applied`, `..._pending` and `..._skipped`, summed
    over all flats of rank 0.

    Does nothing with other strategies.
    """

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        super().on_validation_end(trainer, pl_module)
        if trainer.state.fn == "fit" and not trainer.sanity_checking:
            self._log_audit(trainer)

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        super().teardown(trainer, pl_module, stage)
        if stage == "fit":
            self._log_audit(trainer)

    @staticmethod
    def _log_audit(trainer: Trainer) -> None:
        strategy = pages_of(trainer)
        audits = strategy.update_audit() if strategy is not None else ()  # updates are drained, so this does not wait
        if audits:
            numbers = {
                f"update/gradients_{name}": float(sum(getattr(audit, name) for audit in audits))
                for name in ("produced", "applied", "pending", "skipped")
            }
            for logger in trainer.loggers:
                logger.log_metrics(numbers, steps_of_loop(trainer.fit_loop.epoch_loop))

    def numbers(self, now: Statistics, before: Statistics, steps: int) -> dict[str, float]:
        numbers = super().numbers(now, before, steps)
        if not self._trains:
            return numbers
        numbers["update/arithmetic_s_per_step"] = (now.update_arithmetic_s - before.update_arithmetic_s) / steps
        if now.staleness is not None and before.staleness is not None:
            reads = now.staleness.reads - before.staleness.reads
            numbers["update/staleness_mean"] = (now.staleness.total - before.staleness.total) / reads if reads else 0.0
            numbers["update/staleness_max"] = float(now.staleness.maximum)
            numbers["update/updates_per_step"] = now.updates_per_step
        return numbers


class PageMonitor(TransferMonitor, StalenessMonitor):
    """`TransferMonitor` and `StalenessMonitor` combined."""
