"""Callback that logs a run's hyper-parameters with its metrics, for TensorBoard's table of runs (its tab HPARAMS).

Owns whether this run's row has been written. I1: a row names the metrics that its run logs, and has no values of its own:
TensorBoard shows the last one of each scalar. I2: only rank 0 writes; nothing is collective.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.utilities import rank_zero_warn
from torch.utils.tensorboard.summary import hparams

from lightning_ptm.trainer.internals import shows_only_hp_metric

from .where import boards_of, pages_of, settings_of


class HyperParameters(Callback):
    """Gives the run a row in TensorBoard's HPARAMS: the hyper-parameters that the LightningModule and the
    LightningDataModule have saved with `save_hyperparameters()` (the latter's as `data/...` if both have one of that name
    and they differ), with AngelPTMStrategy its settings as `strategy/...` (a nested one as
    `strategy/lock_free.max_staleness`), the number of ranks and the precision; and the last values of the metrics. The row is
    written after the first validation, or at the end of a fit without one.

    The logger needs `default_hp_metric=False`: otherwise it has already written a row with one metric, and TensorBoard
    keeps the first one.

    Args:
        metrics: names of the scalars to show; None: those without a group (`val_loss`, not `links/...`) and
            `speed/tokens_per_s`, if they are logged before the row is written.
    """

    def __init__(self, metrics: list[str] | None = None) -> None:
        self.metrics = metrics
        self._written = False

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Begins a new row."""
        self._written = False
        for logger in boards_of(trainer):
            if shows_only_hp_metric(logger):
                rank_zero_warn(
                    "HyperParameters: the TensorBoardLogger was made with default_hp_metric=True and has written a row with "
                    "only hp_metric, so TensorBoard shows no other metric with the hyper-parameters; give it "
                    "default_hp_metric=False"
                )

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Writes the row, the first time."""
        if trainer.state.fn == "fit" and not trainer.sanity_checking:
            self._write(trainer, pl_module)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Writes the row if there was no validation, and marks the run as successful."""
        self._write(trainer, pl_module)
        for logger in boards_of(trainer) if trainer.is_global_zero else ():
            logger.experiment.file_writer.add_summary(hparams({}, {})[2])

    def _write(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._written or not trainer.is_global_zero:
            return
        self._written = True
        values = _flat(_values(trainer, pl_module))
        names = (
            self.metrics if self.metrics is not None else _shown({*trainer.logged_metrics, *trainer.callback_metrics})
        )
        for logger in boards_of(trainer):
            for summary in hparams(values, dict.fromkeys(names, 0.0))[:2]:
                logger.experiment.file_writer.add_summary(summary)


def _values(trainer: Trainer, pl_module: LightningModule) -> dict[str, Any]:
    data = getattr(trainer, "datamodule", None)
    values: dict[str, Any] = dict(pl_module.hparams_initial)
    for name, value in (data.hparams_initial if data is not None else {}).items():
        values[name if str(values.get(name, value)) == str(value) else f"data/{name}"] = value
    values = {
        name: value for name, value in values.items() if not name.startswith(("_", "data/_"))
    }  # LightningCLI's own
    values |= {"ranks": trainer.world_size, "precision": str(trainer.precision)}
    strategy = pages_of(trainer)
    if strategy is not None:
        values["strategy"] = settings_of(strategy)
    return values


def _flat(values: Mapping[str, Any], prefix: str = "") -> dict[str, str | float]:
    """Nested names joined by slashes; numbers unchanged, everything else as text."""
    found: dict[str, str | float] = {}
    for name, value in values.items():
        if isinstance(value, Mapping):
            found |= _flat(value, f"{prefix}{name}/")
        elif isinstance(value, (int, float)) and not isinstance(value, bool):
            found[f"{prefix}{name}"] = value
        else:
            found[f"{prefix}{name}"] = str(value)
    return found


def _shown(logged: Iterable[str]) -> list[str]:
    return sorted(name for name in logged if ("/" not in name and name != "epoch") or name == "speed/tokens_per_s")
