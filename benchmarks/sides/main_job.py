"""Whole trainings of one of the configs (configs/*.yaml): the validation loss at the end.

Options: `config`, its name; `seed` of the first training, each further one has the next seed; `train_steps`; `settings`
of the strategy; `disk_bytes_per_s` a speed that the disk is slowed down to. A step of a turn is a whole training, and a
turn has one. The turn's loss is the validation loss; its extra number is the mean staleness.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator, Mapping
from typing import Any

from benchmarks.race import Baton
from benchmarks.slow_disk import SlowDisks


def run(options: dict[str, Any], baton: Baton) -> None:
    """Takes part in the race until it is over."""
    seed = options["seed"]
    baton.ready()
    while baton.wait():
        loss, staleness = train(options, seed)
        seed += 1
        baton.report(loss, {"mean_staleness": staleness})


def train(options: dict[str, Any], seed: int) -> tuple[float, float]:
    """Returns the validation loss at the end of one training, and its mean staleness."""
    from lightning_ptm import AngelPTMStrategy
    from lightning_ptm.command_line import command_line

    with tempfile.TemporaryDirectory() as runs:
        args = [f"--config={options['config']}.yaml", f"--seed_everything={seed}", "--trainer.callbacks=null"]
        args += [f"--trainer.{name}=false" for name in ("logger", "enable_progress_bar", "enable_model_summary")]
        args += ["--trainer.enable_checkpointing=false", f"--trainer.default_root_dir={runs}"]
        args += [f"--trainer.{name}={options['train_steps']}" for name in ("max_steps", "val_check_interval")]
        args += [f"--trainer.strategy.init_args.{setting}" for setting in _as_arguments(options["settings"])]
        built = command_line(args, run=False)
        strategy = built.trainer.strategy
        assert isinstance(strategy, AngelPTMStrategy)
        if "disk_bytes_per_s" in options:
            strategy.file_ops = SlowDisks(options["disk_bytes_per_s"])
        last: list[Any] = []
        built.model.on_train_end = lambda: last.append(strategy.statistics().staleness)
        built.trainer.fit(built.model, datamodule=built.datamodule)
    staleness = last[0]
    return float(built.trainer.callback_metrics["val_loss"]), staleness.mean if staleness else 0.0


def _as_arguments(settings: Mapping[str, Any], outer: str = "") -> Iterator[str]:
    """Yields settings as the command line takes them: `lock_free.max_staleness=2`."""
    for name, value in settings.items():
        if isinstance(value, Mapping):
            yield from _as_arguments(value, f"{outer}{name}.")
        else:
            yield f"{outer}{name}={value if isinstance(value, str) else json.dumps(value)}"
