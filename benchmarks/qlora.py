"""Fine-tuning a model shaped like Llama with LoRA while its frozen weights are in 4 bits: the RAM that a step takes.

    python benchmarks/qlora.py --size 1B --host-memory 1.25GiB
    python benchmarks/qlora.py --size 7B --host-memory 5.25GiB

One rank, bf16-true, all in RAM; `--host-memory` leaves room for two decoded blocks (0.4 GiB each at 7B) beside what is at
home. Weights are random and drawn unit by unit, the model never is whole; adapters are beside all
seven matrices of a block. Printed are bytes at home, losses, seconds, and the peak of the process's resident memory.
"""

from __future__ import annotations

import argparse
import dataclasses
import time
from collections.abc import Sequence
from typing import Any

import lightning as L
import torch
from race import peak_rss_bytes
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader

from lightning_ptm import AngelPTMStrategy


@dataclasses.dataclass(frozen=True)
class Shape:
    """Sizes of a model."""

    layers: int
    width: int
    hidden: int
    heads: int
    key_heads: int
    vocabulary: int = 32000


SHAPES = {
    "tiny": Shape(2, 64, 192, 4, 4, 256),
    "1B": Shape(22, 2048, 5632, 32, 4),
    "7B": Shape(32, 4096, 11008, 32, 32),
}
"""1B is TinyLlama's."""


class Adapted(nn.Module):
    """A frozen matrix with LoRA beside it."""

    def __init__(self, inputs: int, outputs: int, rank: int) -> None:
        super().__init__()
        self.base = nn.Linear(inputs, outputs, bias=False).requires_grad_(False)
        self.a = nn.Linear(inputs, rank, bias=False)
        self.b = nn.Linear(rank, outputs, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """(..., inputs) to (..., outputs)."""
        added: Tensor = self.b(self.a(x))
        return self.base(x) + added


class Block(nn.Module):
    """Attention and a gated MLP, with norms before them; positions are left out, which cost no weights."""

    def __init__(self, shape: Shape, rank: int) -> None:
        super().__init__()
        self.heads, self.key_heads = shape.heads, shape.key_heads
        keys = shape.width // shape.heads * shape.key_heads
        self.norms = nn.ModuleList(nn.RMSNorm(shape.width).requires_grad_(False) for _ in range(2))
        self.query, self.out = Adapted(shape.width, shape.width, rank), Adapted(shape.width, shape.width, rank)
        self.key, self.value = Adapted(shape.width, keys, rank), Adapted(shape.width, keys, rank)
        self.gate, self.up = Adapted(shape.width, shape.hidden, rank), Adapted(shape.width, shape.hidden, rank)
        self.down = Adapted(shape.hidden, shape.width, rank)

    def forward(self, x: Tensor) -> Tensor:
        """(batch, length, width) to the same."""
        inner = self.norms[0](x)
        query, key, value = (
            layer(inner).unflatten(-1, (heads, -1)).transpose(1, 2)
            for layer, heads in ((self.query, self.heads), (self.key, self.key_heads), (self.value, self.key_heads))
        )
        mixed = functional.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        inner = self.norms[1](x)
        return x + self.down(functional.silu(self.gate(inner)) * self.up(inner))


class Model(L.LightningModule):
    """Embedding, blocks, norm, head; the adapters alone are trained."""

    def __init__(self, shape: Shape, rank: int) -> None:
        super().__init__()
        self.shape, self.rank = shape, rank
        self.blocks: nn.ModuleList | None = None
        self.losses: list[float] = []

    def configure_model(self) -> None:
        """On the meta device."""
        if self.blocks is None:
            with torch.device("meta"):
                self.embedding = nn.Embedding(self.shape.vocabulary, self.shape.width).requires_grad_(False)
                self.blocks = nn.ModuleList(Block(self.shape, self.rank) for _ in range(self.shape.layers))
                self.norm = nn.RMSNorm(self.shape.width).requires_grad_(False)
                self.head = nn.Linear(self.shape.width, self.shape.vocabulary, bias=False).requires_grad_(False)
            self.to(torch.bfloat16)

    def init_weights(self, module: nn.Module) -> None:
        """Normal numbers; ones in norms."""
        for weight in module.parameters(recurse=False):
            nn.init.ones_(weight) if weight.dim() < 2 else nn.init.normal_(weight, std=0.02)

    def training_step(self, batch: Tensor, index: int) -> Tensor:
        """Cross-entropy of the next token."""
        assert self.blocks is not None
        x = self.embedding(batch[:, :-1])
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.norm(x)).flatten(0, 1).float()
        loss = functional.cross_entropy(logits, batch[:, 1:].flatten())
        self.losses.append(float(loss.detach()))
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Over the adapters."""
        return torch.optim.AdamW([each for each in self.parameters() if each.requires_grad], lr=1e-3)


class Watch(L.Callback):
    """Times steps, and takes down what is at home."""

    def __init__(self) -> None:
        self.at_home: Sequence[Any] = ()
        self.began = time.perf_counter()
        self.marks: list[float] = []

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """The run is set up."""
        assert isinstance(trainer.strategy, AngelPTMStrategy)
        self.at_home = trainer.strategy.states_at_home()
        self.marks.append(time.perf_counter())

    def on_train_batch_end(self, trainer: L.Trainer, pl_module: L.LightningModule, *_: Any) -> None:
        """A step has ended."""
        self.marks.append(time.perf_counter())


def main(arguments: Sequence[str] | None = None) -> float:
    """Trains; returns the peak in GiB."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--size", choices=SHAPES, default="1B")
    parser.add_argument("--frozen-dtype", default="nf4")
    parser.add_argument("--rank", type=int, default=16, help="of the adapters")
    parser.add_argument("--steps", type=int, default=1)
    parser.add_argument("--length", type=int, default=128, help="tokens of a batch")
    parser.add_argument("--host-memory", default="auto", help="for pages")
    args = parser.parse_args(arguments)
    shape = SHAPES[args.size]
    L.seed_everything(0)
    module, watch = Model(shape, args.rank), Watch()
    rows = torch.randint(shape.vocabulary, (args.steps, args.length + 1))
    strategy = AngelPTMStrategy(
        frozen_dtype=args.frozen_dtype,
        host_memory=args.host_memory,
        recompute="all",
        units=["Block"],
        tuning={"freed_memory": "return", "restore_weights": False},
    )
    trainer = L.Trainer(
        accelerator="cpu",
        devices=1,
        strategy=strategy,
        precision="bf16-true",
        max_steps=args.steps,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[watch],
    )
    trainer.fit(module, DataLoader(rows, batch_size=1))  # type: ignore[arg-type]
    weights = sum(each.numel() for each in module.parameters())
    print(f"{weights:,} parameters, {shape.layers} blocks; losses {module.losses}")
    for row in watch.at_home:
        print(f"{row.states}: {row.bytes / 2**30:.3f} GiB in RAM")
    seconds = [after - before for before, after in zip([watch.began, *watch.marks], watch.marks, strict=False)]
    print(f"set-up {seconds[0]:.0f} s, steps {', '.join(f'{each:.1f} s' for each in seconds[1:])}")
    peak = peak_rss_bytes() / 2**30
    print(f"peak of resident memory {peak:.2f} GiB")
    return peak


if __name__ == "__main__":
    main()
