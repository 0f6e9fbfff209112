"""Share of the fake device that fits with `device_memory="auto"` leave unused at their peak: `python
unused_memory_program.py` prints it by number of sequences, without and with clipping
(docs/design/memory_budget_limits.md)."""

from __future__ import annotations

import gc
import json
from typing import Any

import fake_device  # before torch
import lightning as L
import torch
from test_cuda import Model
from torch.utils.data import DataLoader

from lightning_ptm import AngelPTMStrategy

STEPS = 4


class Peaks(L.Callback):
    """Bytes of the device at the peak of each step."""

    def __init__(self) -> None:
        self.peaks: list[int] = []

    def on_train_batch_start(self, *_: Any) -> None:
        fake_device.lib.fc_reset_peak()

    def on_train_batch_end(self, *_: Any) -> None:
        self.peaks.append(fake_device.lib.fc_peak())


def fit(callback: L.Callback, sequences: int, clip: float | None, **settings: Any) -> None:
    """Trains the GPT of 24 blocks for STEPS steps on the fake device."""
    gc.collect()
    torch.manual_seed(0)
    trainer = L.Trainer(
        accelerator="gpu",
        devices=1,
        strategy=AngelPTMStrategy(
            page_size="64KiB", host_memory="256MiB", recompute="none", offload_activations="none", **settings
        ),
        precision="bf16-mixed",
        max_steps=STEPS,
        gradient_clip_val=clip,
        callbacks=[callback],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    data = torch.randint(0, 256, (sequences * STEPS, 65), generator=torch.Generator().manual_seed(1))
    trainer.fit(Model(width=128, layers=24), DataLoader(data, batch_size=sequences))  # type: ignore[arg-type]


def unused(sequences: int, clip: float | None) -> float:
    """The share that steps leave unused after the run was laid out for what the first one has left."""
    peaks = Peaks()
    fit(peaks, sequences, clip)
    return 1 - max(peaks.peaks[2:]) / fake_device.lib.fc_capacity()


if __name__ == "__main__":
    found = {
        f"{sequences}, clip {clip}": unused(sequences, clip) for clip in (None, 0.5) for sequences in (1, 2, 4, 6, 8)
    }
    print(json.dumps(found))
