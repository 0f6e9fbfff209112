"""Quiet Trainers on CPUs, and fits with them."""

from __future__ import annotations

from typing import Any

import lightning as L


def quiet_trainer(strategy: Any = "auto", **options: Any) -> L.Trainer:
    """A Trainer on one CPU without logger, checkpoints, progress bar and summary, unless `options` say so."""
    chosen: dict[str, Any] = {
        "accelerator": "cpu",
        "devices": 1,
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
    }
    return L.Trainer(strategy=strategy, **{**chosen, **options})


def fit(module: L.LightningModule, data: Any = None, strategy: Any = "auto", **options: Any) -> L.Trainer:
    """The quiet Trainer that has trained `module`."""
    trainer = quiet_trainer(strategy, **options)
    trainer.fit(module, data)
    return trainer
