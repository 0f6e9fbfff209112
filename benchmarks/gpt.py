"""The GPT, its batches, its initial weights and its optimizer, the same for all sides of every case.

Plain torch, without Lightning and without this project, so that it also runs in environments that have only torch.
Pre-norm blocks, `scaled_dot_product_attention`, learned positions, the head tied to the token embedding. Loss and logits
are taken in fp32 on every side.

I1: the same shape and seed give the same weights and the same batches in every process.
"""

from __future__ import annotations

import sysconfig
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

INIT_STD = 0.02
LEARNING_RATE = 3e-4
DISTINCT_BATCHES = 8
CPU = torch.device("cpu")


@dataclass(frozen=True, slots=True)
class GPTShape:
    """Sizes of one GPT. `sequence` is both the length of a sample and the number of learned positions."""

    layers: int
    width: int
    heads: int
    vocabulary: int
    sequence: int = 256

    @property
    def block_numel(self) -> int:
        """Parameters of one block: two norms, four matrices and their biases."""
        return 12 * self.width**2 + 13 * self.width

    @property
    def numel(self) -> int:
        """Parameters of the model, the tied head counted once."""
        return self.layers * self.block_numel + (self.vocabulary + self.sequence + 2) * self.width

    def with_sequence(self, sequence: int) -> GPTShape:
        """The same model for samples of another length."""
        return replace(self, sequence=sequence)


SHAPES = {
    "tiny": GPTShape(layers=2, width=64, heads=2, vocabulary=256, sequence=64),
    "main job": GPTShape(layers=4, width=192, heads=6, vocabulary=256),
    "25M": GPTShape(layers=8, width=512, heads=8, vocabulary=256),
    "124M": GPTShape(layers=12, width=768, heads=12, vocabulary=50304),
    "355M": GPTShape(layers=24, width=1024, heads=16, vocabulary=50304),
}


def shape_of_numel(numel: float, *, width: int = 1024, sequence: int = 256) -> GPTShape:
    """The shape of the given width with the fewest layers that has at least `numel` parameters."""
    base = GPTShape(layers=0, width=width, heads=width // 64, vocabulary=50304, sequence=sequence)
    layers = max(1, -int(-(numel - base.numel) // base.block_numel))
    return replace(base, layers=layers)


class Attention(nn.Module):
    """Causal self-attention, (batch, sequence, width) to the same shape."""

    def __init__(self, shape: GPTShape) -> None:
        super().__init__()
        self.heads = shape.heads
        self.qkv = nn.Linear(shape.width, 3 * shape.width)
        self.out = nn.Linear(shape.width, shape.width)

    def forward(self, x: Tensor) -> Tensor:
        batch, sequence, _ = x.shape
        qkv = self.qkv(x).view(batch, sequence, 3, self.heads, -1)  # a cut layer has a part of the heads
        query, key, value = qkv.permute(2, 0, 3, 1, 4).unbind(0)
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        out: Tensor = self.out(mixed.transpose(1, 2).reshape(batch, sequence, -1))
        return out


class Block(nn.Module):
    """One pre-norm transformer block, (batch, sequence, width) to the same shape."""

    def __init__(self, shape: GPTShape) -> None:
        super().__init__()
        self.norm_1 = nn.LayerNorm(shape.width)
        self.attention = Attention(shape)
        self.norm_2 = nn.LayerNorm(shape.width)
        self.up = nn.Linear(shape.width, 4 * shape.width)
        self.down = nn.Linear(4 * shape.width, shape.width)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm_1(x))
        out: Tensor = x + self.down(F.gelu(self.up(self.norm_2(x)), approximate="tanh"))
        return out


class GPT(nn.Module):
    """Tokens (batch, sequence) of int64 to the mean next-token loss, a scalar in fp32."""

    def __init__(self, shape: GPTShape, *, recompute: bool = False) -> None:
        super().__init__()
        self.recompute = recompute
        self.tokens = nn.Embedding(shape.vocabulary, shape.width)
        self.positions = nn.Embedding(shape.sequence, shape.width)
        self.blocks = nn.ModuleList(Block(shape) for _ in range(shape.layers))
        self.norm = nn.LayerNorm(shape.width)
        self.head = nn.Linear(shape.width, shape.vocabulary, bias=False)
        self.tie()

    def tie(self) -> None:
        """Makes the head use the token embedding's weight (again, after a call that made new parameters)."""
        self.head.weight = self.tokens.weight

    def forward(self, tokens: Tensor, targets: Tensor, positions: Tensor | None = None) -> Tensor:
        if positions is None:
            positions = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.tokens(tokens) + self.positions(positions)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.recompute else block(x)
        logits = self.head(self.norm(x))
        return F.cross_entropy(logits.float().flatten(0, 1), targets.flatten())


@torch.no_grad()
def init_weights(module: nn.Module) -> None:
    """Initialises the parameters that `module` itself holds (not its children's), as GPT-2 does."""
    if isinstance(module, nn.Linear | nn.Embedding):
        module.weight.normal_(std=INIT_STD)
    if isinstance(module, nn.Linear) and module.bias is not None:
        module.bias.zero_()
    if isinstance(module, nn.LayerNorm):
        module.weight.fill_(1.0)
        module.bias.zero_()


def build(
    shape: GPTShape, *, dtype: torch.dtype, seed: int, recompute: bool = False, device: torch.device = CPU
) -> GPT:
    """Returns a GPT with initial weights in `dtype`, made in RAM in that dtype and moved to `device`."""
    torch.manual_seed(seed)
    with torch.device("meta"):
        model = GPT(shape, recompute=recompute)
    model.to(dtype).to_empty(device="cpu")
    model.tie()  # to_empty made one parameter for each of the two names
    model.apply(init_weights)
    model.to(device)
    model.tie()
    return model


def batches(shape: GPTShape, *, batch: int, seed: int, device: torch.device = CPU) -> Iterator[tuple[Tensor, Tensor]]:
    """Endless (tokens, targets) pairs of random tokens, each (batch, sequence) of int64: a few distinct ones in turn, so that
    no side spends time on data."""
    generator = torch.Generator().manual_seed(seed)
    size = (DISTINCT_BATCHES, batch, shape.sequence + 1)
    tokens = torch.randint(shape.vocabulary, size, generator=generator).to(device)
    while True:
        for rows in tokens:
            yield rows[:, :-1], rows[:, 1:]


def text_batches(shape: GPTShape, *, batch: int, seed: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Endless (tokens, targets) pairs as `batches`, of real text: random windows of the standard library's sources."""
    sources = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    text = torch.frombuffer(bytearray(b"".join(source.read_bytes() for source in sources)), dtype=torch.uint8)
    generator = torch.Generator().manual_seed(seed)
    while True:
        starts = torch.randint(len(text) - shape.sequence, (batch, 1), generator=generator)
        rows = text[starts + torch.arange(shape.sequence + 1)].long()
        yield rows[:, :-1], rows[:, 1:]


def adamw(parameters: Iterable[Tensor]) -> torch.optim.Optimizer:
    """Fused AdamW."""
    return torch.optim.AdamW(list(parameters), lr=LEARNING_RATE, fused=True)
