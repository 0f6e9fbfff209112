"""This project's GPT or T5 on its text, with this project's strategy: what a config file of `fit` describes.

Options: `model`, `data` and `settings` are the arguments of `lightning_ptm.models.GPT`, `lightning_ptm.data.TextBytes` and
AngelPTMStrategy; `family` "gpt" or "t5", which is T5 and SpanCorruption; `precision`; `devices`; `device` "cpu" or "cuda";
`may_not_fit` true makes a CapacityError no failure. Weights and batches are those of a fixed seed.
"""

from __future__ import annotations

from typing import Any

import torch
from lightning.pytorch import Trainer

from benchmarks.case import SEED
from benchmarks.race import Baton, current_rss_bytes
from benchmarks.sides.trainer import Pacer


def run(options: dict[str, Any], baton: Baton) -> None:
    """Takes part in the race until it is over."""
    from lightning_ptm import AngelPTMStrategy
    from lightning_ptm.data import SpanCorruption, TextBytes
    from lightning_ptm.errors import CapacityError
    from lightning_ptm.models import GPT, T5

    model, data = {"gpt": (GPT, TextBytes), "t5": (T5, SpanCorruption)}[options.get("family", "gpt")]
    torch.manual_seed(SEED)
    strategy = AngelPTMStrategy(**options["settings"])
    empty = current_rss_bytes()
    trainer = Trainer(
        accelerator=options.get("device", "cpu"),
        devices=options.get("devices", 1),
        strategy=strategy,
        precision=options["precision"],
        max_epochs=-1,
        max_steps=100_000,
        callbacks=[Pacer(baton, count_disk=True, empty_rss_bytes=empty)],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        limit_val_batches=0,
    )
    try:
        trainer.fit(model(**options["model"]), datamodule=data(**options["data"]))
    except CapacityError as error:
        if not options.get("may_not_fit"):
            raise
        baton.refuse(str(error))
