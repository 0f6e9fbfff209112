"""A small model whose layers and losses mix tokens in ways that parts of a sequence can, or cannot, compute."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import lightning as L
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader

from kit.fits import quiet_trainer
from lightning_ptm import AngelPTMStrategy

VOCABULARY, LENGTH, WIDTH, HEADS = 64, 32, 16, 2


def _plain(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)


def _by_hand(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    later = torch.ones(q.shape[-2], q.shape[-2], dtype=torch.bool).triu(1)
    return (q @ k.transpose(-1, -2)).masked_fill(later, -1e9).softmax(-1) @ v


def _masked(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, torch.ones(q.shape[-2], q.shape[-2], dtype=torch.bool).tril())


def _dropped(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, dropout_p=0.1, is_causal=True)


def _across(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k[..., :4, :], v[..., :4, :])


def _summed(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return v.cumsum(-2)


ATTENTIONS: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    "plain": _plain,
    "by hand": _by_hand,
    "with a mask": _masked,
    "with dropout": _dropped,
    "of few keys": _across,
    "a running sum": _summed,
}


class Layer(nn.Module):
    def __init__(self, attention: str) -> None:
        super().__init__()
        self.into, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.attention = attention
        if attention == "of torch":
            self.inner = nn.MultiheadAttention(WIDTH, HEADS, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        if self.attention == "of torch":
            later = nn.Transformer.generate_square_subsequent_mask(x.shape[1], dtype=x.dtype)
            return x + self.inner(x, x, x, need_weights=False, is_causal=True, attn_mask=later)[0]
        q, k, v = self.into(x).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        return x + self.out(ATTENTIONS[self.attention](q, k, v).transpose(1, 2).flatten(2))


def _smoothed(logits: Tensor, targets: Tensor, weights: Tensor) -> Tensor:
    entropy = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), label_smoothing=0.1)
    return entropy + 1e-3 * logits.logsumexp(-1).square().mean()


def _of_tokens(logits: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(logits.transpose(1, 2), targets, reduction="none")


LOSSES: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    "mean": lambda logits, targets, weights: _of_tokens(logits, targets).mean(),
    "smoothed": _smoothed,
    "focal": lambda logits, targets, weights: (lambda loss: ((1 - (-loss).exp()) ** 2 * loss).mean())(
        _of_tokens(logits, targets)
    ),
    "sum": lambda logits, targets, weights: _of_tokens(logits, targets).sum(),
    "weighted": lambda logits, targets, weights: (_of_tokens(logits, targets) * weights).sum() / weights.sum(),
    "padded": lambda logits, targets, weights: F.cross_entropy(logits.transpose(1, 2), targets, ignore_index=1),
    "of the next in the part": lambda logits, targets, weights: _of_tokens(logits[:, :-1], targets[:, 1:]).mean(),
    "of the last token": lambda logits, targets, weights: _of_tokens(logits, targets)[:, -1].mean(),
    "of pooled features": lambda logits, targets, weights: logits.mean(1).square().mean(),
    "of texts": lambda logits, targets, weights: _of_tokens(logits, targets).mean(1).square().mean(),
    "balanced": lambda logits, targets, weights: (
        _of_tokens(logits, targets).mean() + 1e-2 * VOCABULARY * logits.softmax(-1).mean((0, 1)).square().sum()
    ),
    "random": lambda logits, targets, weights: (_of_tokens(logits, targets) * torch.rand(targets.shape)).mean(),
}


class Layered(L.LightningModule):
    """Takes positions from the strategy, or counts from 0."""

    def __init__(
        self, attention: str = "plain", loss: str = "mean", *, counts: bool = False, by_hand: bool = False
    ) -> None:
        super().__init__()
        self.attention, self.loss, self.counts = attention, loss, counts
        self.automatic_optimization = not by_hand
        self.losses: list[float] = []
        self.steps = 0

    def configure_model(self) -> None:
        self.tokens, self.places = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.layers = nn.ModuleList(Layer(self.attention) for _ in range(2))
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def training_step(self, batch: tuple[Tensor, Tensor, Tensor], batch_idx: int) -> Tensor:
        self.steps += 1
        tokens, targets, weights = batch
        length = tokens.shape[1]
        places = torch.arange(length) if self.counts else self.trainer.strategy.positions(length)  # type: ignore[attr-defined]
        x = self.tokens(tokens) + self.places(places)
        for layer in self.layers:
            x = layer(x)
        loss = LOSSES[self.loss](self.head(x), targets, weights)
        self.losses.append(float(loss))
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), lr=1e-3)


class ZeroPlaces(Layered):
    """Adds the first rows of a parameter, which are alike at the start."""

    def configure_model(self) -> None:
        super().configure_model()
        self.zeros = nn.Parameter(torch.zeros(1, LENGTH, WIDTH))
        self.tokens.register_forward_hook(lambda module, given, x: x + self.zeros[:, : x.shape[1]])


class Functional(Layered):
    """Computes everything itself, with parameters of its own."""

    def configure_model(self) -> None:
        shapes = {"tokens": (VOCABULARY, WIDTH), "places": (LENGTH, WIDTH), "into": (3 * WIDTH, WIDTH)}
        self.weights = nn.ParameterDict({name: torch.randn(shape) * 0.02 for name, shape in shapes.items()})

    def training_step(self, batch: tuple[Tensor, Tensor, Tensor], batch_idx: int) -> Tensor:
        self.steps += 1
        tokens, targets, _ = batch
        length, weights = tokens.shape[1], self.weights
        places = torch.arange(length) if self.counts else self.trainer.strategy.positions(length)  # type: ignore[attr-defined]
        x = weights["tokens"][tokens] + weights["places"][places]
        q, k, v = F.linear(x, weights["into"]).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        x = x + _plain(q, k, v).transpose(1, 2).flatten(2)
        loss = _of_tokens(F.linear(x, weights["tokens"]), targets).mean()
        self.losses.append(float(loss))
        return loss


def data(length: int = LENGTH) -> DataLoader[Any]:
    """Three batches; from the second one on, some tokens are padding, of one half of the text."""
    texts = torch.randint(2, VOCABULARY, (6, length + 1), generator=torch.Generator().manual_seed(3))
    rows = []
    for number, text in enumerate(texts):
        targets, weights = text[1:].clone(), torch.ones(length)
        if number >= 2:
            targets[-3:], weights[:5] = 1, 0
        rows.append((text[:-1], targets, weights))
    return DataLoader(rows, batch_size=2)  # type: ignore[arg-type]


def fit(module: L.LightningModule, folder: str, ranks: int, loader: DataLoader[Any], **settings: Any) -> None:
    strategy = AngelPTMStrategy(page_size="64KiB", disk_path=folder, context_parallel_size=ranks, **settings)
    trainer = quiet_trainer(strategy, devices=ranks, precision="64-true", max_steps=3, use_distributed_sampler=False)
    trainer.fit(module, loader)
