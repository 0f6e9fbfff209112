"""Train a GPT over a square or a cube of ranks (grid modes of tensor parallelism, experimental).

    python examples/grid_gpt.py --devices 4              # 2D: 2 x 2 ranks
    python examples/grid_gpt.py --devices 8              # 2.5D: two squares of 2 x 2 ranks, each with its own batches
    python examples/grid_gpt.py --devices 8 --mode 3d    # 3D: 2 x 2 x 2 ranks

The losses are those of lightning_ptm.models.GPT on one rank. docs/grid.md says what the modes send, and when to use them.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from lightning.pytorch import Trainer, seed_everything
from torch import Tensor, nn

from lightning_ptm.data import TextBytes
from lightning_ptm.errors import ConfigError, UsageError
from lightning_ptm.models import GPT
from lightning_ptm.parallel.grid import Grid, GridEmbedding, GridLinear, GridNorm
from lightning_ptm.trainer.grid import GridStrategy


class GridGPT(GPT):
    """GPT whose parameters and activations are divided over a grid of ranks; names and whole weights are those of GPT.

    Takes the arguments of GPT, without `dropout` and `tie_head`.
    """

    def __init__(self, **sizes: Any) -> None:
        super().__init__(**sizes)
        if self.dropout or self.tie_head:
            raise ConfigError(
                f"GridGPT got dropout={self.dropout}, tie_head={self.tie_head}, which grid layers do not have; use GPT with "
                f"tensor_parallel_size, or leave them out"
            )

    @property
    def grid(self) -> Grid:
        """This rank's place, from the strategy."""
        strategy: Any = self.trainer.strategy
        grid: Grid = strategy.grid
        return grid

    def build(self) -> None:
        """Creates the modules of GPT, with grid layers in place of those that have parameters."""
        with torch.device("meta"):
            super().build()
        grid, width = self.grid, self.width
        if self.heads % grid.side:
            raise ConfigError(
                f"GridGPT has {self.heads} heads for a grid of side {grid.side}; use a multiple of {grid.side} heads"
            )
        attention = self.heads * self.head_width
        model: Any = self  # whose attributes have other types from here on
        model.token_embedding = GridEmbedding(self.vocab_size, width, grid)
        model.position_embedding = GridEmbedding(self.sequence_length, width, grid)
        for block in model.blocks:
            block.attention_norm, block.feed_forward_norm = GridNorm(width, grid), GridNorm(width, grid)
            block.attention.heads = self.heads // grid.side
            block.attention.query_key_value = GridLinear(width, 3 * attention, grid, sections=3)
            block.attention.project = GridLinear(attention, width, grid, back=True)
            block.feed_forward.expand = GridLinear(width, self.feed_forward_width, grid)
            block.feed_forward.project = GridLinear(self.feed_forward_width, width, grid, back=True)
        model.norm = GridNorm(width, grid)
        model.head = GridLinear(width, self.vocab_size, grid, bias=False)

    @torch.no_grad()
    def init_weights(self, module: nn.Module) -> None:
        """Initialises as GPT does: all ranks draw whole weights, one after the other, and keep their blocks."""
        if isinstance(module, GridNorm):
            module.reset_parameters()
        if not isinstance(module, (GridLinear, GridEmbedding)):
            return
        scale = (2 * self.layers) ** -0.5 if isinstance(module, GridLinear) and module.back else 1.0
        module.draw("weight", partial(nn.init.normal_, std=0.02 * scale))
        if "bias" in module.divided and module.bias is not None:
            nn.init.zeros_(module.bias)

    def loss(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        """Returns the mean cross-entropy of the whole batch, in nats per token, on all ranks of the grid."""
        tokens, targets = batch
        return self.grid.cross_entropy(self(tokens), targets)

    def predict_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        """Raises UsageError: ranks have parts of each sequence's logits."""
        raise UsageError(
            "GridGPT does not predict; convert its weights with lightning_ptm.parallel.grid.whole, and use GPT"
        )


def main(arguments: Sequence[str] | None = None) -> Trainer:
    """Trains with the options of the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--mode", default="2d", choices=["2d", "3d"])
    parser.add_argument("--side", type=int, default=2, help="ranks along each axis of the grid")
    parser.add_argument("--devices", type=int, default=4)
    parser.add_argument("--text", help="folder or file of text; by default the standard library's sources")
    parser.add_argument("--steps", type=int, default=20)
    options = parser.parse_args(arguments)
    seed_everything(0)
    trainer = Trainer(
        accelerator="cpu",
        strategy=GridStrategy(options.mode, side=options.side),
        devices=options.devices,
        max_steps=options.steps,
        limit_val_batches=0,
        logger=False,
        enable_checkpointing=False,
    )
    data = TextBytes(options.text, sequence_length=64, batch_size=8)
    trainer.fit(GridGPT(width=64, layers=2, sequence_length=64), data)
    if trainer.is_global_zero:
        print(f"training loss of the last batch: {float(trainer.callback_metrics['train_loss']):.4f}")
    return trainer


if __name__ == "__main__":
    main()
