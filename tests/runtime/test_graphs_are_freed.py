"""Tensors of a step are freed when the next one begins, also where units share an input."""

from __future__ import annotations

import gc
from collections.abc import Callable

import lightning as L
import pytest
import torch
from kit.plain_loop import TrainModule, make_trainer, tokens
from kit.stacks import VOCABULARY, WIDTH, Block
from torch import Tensor, nn
from torch.nn import functional


class SharedInput(TrainModule):
    """Each block reads the same second input, which is trained, as T5's blocks read a bias."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.bias = nn.Linear(1, WIDTH)
        self.blocks = nn.ModuleList(Biased() for _ in range(3))
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def loss(self, batch: Tensor, index: int) -> Tensor:
        x, bias = self.embedding(batch[:, :-1]), self.bias(torch.ones(1))
        for block in self.blocks:
            x = block(x, bias)
        return functional.cross_entropy(self.head(x).flatten(0, 1).float(), batch[:, 1:].flatten())


class Biased(Block):
    def forward(self, x: Tensor, bias: Tensor) -> Tensor:  # type: ignore[override]
        return super().forward(x + bias)


class NodeCount(L.Callback):
    """Nodes of autograd's graphs that Python objects still know of, at the end of each step."""

    def __init__(self) -> None:
        self.counts: list[int] = []

    def on_train_batch_end(self, *args: object) -> None:
        gc.collect()
        self.counts.append(sum(type(thing).__name__.endswith("Backward0") for thing in gc.get_objects()))


@pytest.mark.parametrize(
    ("where", "recompute"),
    [pytest.param("ram", "none", marks=pytest.mark.slow), ("all_on_disk", "all"), ("lock_free", "none")],
)
def test_no_graph_outlives_its_step(strategy_at: Callable, where: str, recompute: str) -> None:
    count = NodeCount()
    trainer = make_trainer(strategy_at(where, recompute=recompute), callbacks=[count])
    trainer.fit(SharedInput(), tokens(4).loader())
    assert count.counts[1:] == [count.counts[1]] * 3, count.counts
