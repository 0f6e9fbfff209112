"""Your own LightningModule, unchanged, with its model states in pages: only the Trainer's arguments differ.

    python examples/own_module.py

The strategy needs nothing from a model. It can use `configure_model`, which lets it allocate one unit at a time instead of
the whole model at once.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import lightning_ptm  # noqa: F401  (registers the strategy's name)


class Digits(LightningModule):
    """An ordinary module: nothing in it refers to pages, tiers or devices."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(64, 512), nn.GELU(), nn.Linear(512, 512), nn.GELU(), nn.Linear(512, 10))

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        """Cross-entropy of a batch."""
        pixels, labels = batch
        loss = F.cross_entropy(self.layers(pixels), labels)
        self.log("train_loss", loss, prog_bar=True)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Any element-wise optimizer works."""
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


def main() -> None:
    """Trains on random images with labels by a simple rule."""
    generator = torch.Generator().manual_seed(0)
    pixels = torch.randn(2048, 64, generator=generator)
    labels = (pixels @ torch.randn(64, 10, generator=generator)).argmax(dim=1)
    trainer = Trainer(
        # With settings: strategy=lightning_ptm.AngelPTMStrategy(disk_path="/my/disk").
        strategy="angel_ptm",
        # 16-bit compute parameters and gradients, fp32 master states.
        precision="bf16-mixed",
        max_epochs=5,
        logger=False,
        enable_checkpointing=False,
    )
    trainer.fit(Digits(), DataLoader(TensorDataset(pixels, labels), batch_size=64, shuffle=True))
    print(f"training loss of the last batch: {float(trainer.callback_metrics['train_loss']):.4f}")


if __name__ == "__main__":
    main()
