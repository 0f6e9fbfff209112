"""Checkpoints while nothing trains: a step writes one of the kind that the settings say, durably, over the one before.

Options: those of the trainer's side, and `folder`.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from torch.utils.data import DataLoader

from benchmarks.gpt import GPTShape
from benchmarks.race import Baton, current_rss_bytes
from benchmarks.sides.trainer import Batches, GPTModule, make_strategy


def forget_peak() -> None:
    """Counts the process's peak memory from now on."""
    Path("/proc/self/clear_refs").write_text("5")


def peak_now_bytes() -> int:
    """The peak since `forget_peak`."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(1024 * int(line.split()[1]) for line in lines if line.startswith("VmHWM"))


class Saver(Callback):
    """After a first training step, saves as often as the race orders, and ends the run."""

    def __init__(self, baton: Baton, folder: Path) -> None:
        self.baton = baton
        self.path = folder / "x.ckpt"

    def on_train_batch_end(self, trainer: Trainer, module: LightningModule, *_: Any) -> None:
        # The first one's memory counts: what it has freed may stay with the process for the next one.
        forget_peak()
        before = current_rss_bytes()
        trainer.save_checkpoint(self.path)
        strategy: Any = trainer.strategy
        strategy.wait_for_checkpoint()
        most = peak_now_bytes() - before
        files = os.scandir(self.path) if self.path.is_dir() else [self.path]
        size_bytes = sum(file.stat().st_size for file in files)
        self.baton.ready()
        while steps := self.baton.wait():
            forget_peak()
            before = current_rss_bytes()
            for _ in range(steps):
                trainer.save_checkpoint(self.path)
                strategy.wait_for_checkpoint()
            added = max(most, peak_now_bytes() - before)
            self.baton.report(0.0, {"saved_bytes": float(size_bytes), "added_bytes": float(added)})
        trainer.should_stop = True


def run(options: dict[str, Any], baton: Baton) -> None:
    """Takes part in the race until it is over."""
    shape = GPTShape(**options["shape"])
    trainer = Trainer(
        accelerator="cpu",
        devices=options.get("devices", 1),
        strategy=make_strategy(options["settings"]),
        precision=options["precision"],
        max_steps=1,
        callbacks=[Saver(baton, Path(options["folder"]))],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        use_distributed_sampler=False,
    )
    module = GPTModule(shape, seed=options["seed"], meta=True)
    group = options["settings"].get("tensor_parallel_size", 1)
    data = Batches(shape, batch=options["batch"], seed=options["seed"], group=group)
    trainer.fit(module, DataLoader(data, batch_size=None))
