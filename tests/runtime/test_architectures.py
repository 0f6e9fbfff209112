"""Models that are no stack of equal blocks: encoder-decoder, convolutions with BatchNorm, LSTM, EmbeddingBag."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from kit.plain_loop import Batches, PlainLoop, TrainModule, fit, tokens, vectors
from kit.stacks import VOCABULARY
from torch import Tensor, nn
from torch.nn import functional


class EncoderDecoder(TrainModule):
    """nn.Transformer with dropout: the decoder's blocks read the encoder's output."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, 32)
        self.body = nn.Transformer(32, 4, 2, 2, 64, dropout=0.1, batch_first=True)
        self.head = nn.Linear(32, VOCABULARY)

    def loss(self, batch: Tensor, index: int) -> Tensor | None:
        source, target = batch[:, :8], batch[:, 8:]
        mask = nn.Transformer.generate_square_subsequent_mask(target.shape[1] - 1, dtype=torch.float32)
        embedded = self.embedding(source), self.embedding(target[:, :-1])
        out = self.body(*embedded, tgt_mask=mask.to(embedded[0].dtype), tgt_is_causal=True)
        return functional.cross_entropy(self.head(out).flatten(0, 1).float(), target[:, 1:].flatten())


class ConvBlock(nn.Module):
    def __init__(self, before: int, after: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(before, after, 3, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(after)

    def forward(self, x: Tensor) -> Tensor:
        return functional.relu(self.norm(self.conv(x)))


class ConvNet(TrainModule):
    """BatchNorm's running statistics are buffers, in no page; its weights stay in fp32 under mixed precision."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.Sequential(ConvBlock(3, 24), ConvBlock(24, 24), ConvBlock(24, 32), ConvBlock(32, 16))
        self.head = nn.Linear(16, 5)

    def loss(self, batch: Tensor, index: int) -> Tensor | None:
        x = self.blocks(batch).mean((2, 3))
        return functional.cross_entropy(self.head(x).float(), torch.arange(len(batch)) % 5)


class Recurrent(TrainModule):
    """Two LSTMs in a ModuleList; their kernel takes all weights at once."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, 32)
        self.layers = nn.ModuleList([nn.LSTM(32, 32, batch_first=True), nn.LSTM(32, 32, 2, batch_first=True)])
        self.head = nn.Linear(32, VOCABULARY)

    def loss(self, batch: Tensor, index: int) -> Tensor | None:
        x = self.embedding(batch[:, :-1])
        for layer in self.layers:
            x, _ = layer(x)
        return functional.cross_entropy(self.head(x).flatten(0, 1), batch[:, 1:].flatten())


class Bags(TrainModule):
    """Two tables looked up by bags of indices, and a small network over them; no unit but the root and its tables."""

    def __init__(self) -> None:
        super().__init__()
        self.tables = nn.ModuleList([nn.EmbeddingBag(500, 16, mode="mean"), nn.EmbeddingBag(700, 16, mode="sum")])
        self.top = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 1))

    def loss(self, batch: Tensor, index: int) -> Tensor | None:
        found = torch.cat([table(batch * place) for place, table in enumerate(self.tables, 1)], 1)
        return self.top(found).float().pow(2).mean() + found.float().sum(1).sin().mean()


IMAGES = vectors(5, 6, 3, 8, 8)


ALL = [
    (EncoderDecoder, tokens(5), "bf16-mixed"),
    (EncoderDecoder, tokens(5), "32-true"),
    (ConvNet, IMAGES, "bf16-mixed"),
    (ConvNet, IMAGES, "32-true"),
    (Recurrent, tokens(5), "32-true"),
    (Bags, tokens(5), "32-true"),
    (Bags, tokens(5), "bf16-mixed"),
]


@pytest.mark.diagonal
@pytest.mark.parametrize(("build", "batches", "precision"), ALL)
def test_architecture(strategy_at, tier, build, batches: Batches, precision) -> None:
    settings: dict[str, Any] = {"device_memory": "2MiB"} if tier == "three_tiers" else {}
    fit(build, batches, strategy_at(tier, **settings), precision).assert_equal(PlainLoop(build, precision).run(batches))


# Not ConvNet: recomputing a BatchNorm updates its running statistics twice, with torch's own checkpoint too.
@pytest.mark.parametrize(("build", "batches", "precision"), [case for case in ALL if case[0] is not ConvNet])
def test_architecture_recomputed(strategy_at, build, batches: Batches, precision) -> None:
    ours = fit(build, batches, strategy_at("all_on_disk", recompute="all"), precision)
    ours.assert_equal(PlainLoop(build, precision).run(batches))
