"""One LightningModule trained twice, by a plain single-device Trainer and by the strategy; what is left is compared.

I1: weights, buffers and losses are equal to the last bit, and so are dtypes and strides: a weight that has become contiguous
has lost what its owner chose.
"""

from __future__ import annotations

import logging
import os
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import lightning as L
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from kit.fits import quiet_trainer
from kit.models import Linears

WIDTH = 66
"""Width of the blocks: more than 4096 elements each, so that each is a unit, and no multiple of a vector's length."""


class Twin(Linears):
    """Three linear blocks, each a unit, between two layers of the root; subclasses change what they are about."""

    losses: list[Tensor]

    def __init__(self) -> None:
        super().__init__(WIDTH, stem=6, head=3)
        self.losses = []

    def training_step(self, batch: list[Tensor], index: int) -> Tensor:
        loss = self(batch[0]).square().mean()
        self.losses.append(loss.detach().clone())
        return loss  # type: ignore[no-any-return]

    def validation_step(self, batch: list[Tensor], index: int) -> None:
        self.losses.append(self(batch[0]).sum())


def vectors(*shape: int, count: int = 3, **options: Any) -> DataLoader[Any]:
    """`count` batches of two samples of a shape, (6,) if none is given."""
    data = torch.randn(2 * count, *(shape or (6,)), generator=torch.Generator().manual_seed(1))
    return DataLoader(TensorDataset(data), batch_size=2, **options)


@contextmanager
def quietly() -> Iterator[None]:
    """One thread, no banners, no warnings."""
    logger = logging.getLogger("lightning.pytorch")
    threads, level, variable = torch.get_num_threads(), logger.level, os.environ.get("OMP_NUM_THREADS")
    os.environ["OMP_NUM_THREADS"] = "1"  # else Lightning sets the number of threads
    torch.set_num_threads(1)
    logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        torch.set_num_threads(threads)
        logger.setLevel(level)
        if variable is None:
            del os.environ["OMP_NUM_THREADS"]
        else:
            os.environ["OMP_NUM_THREADS"] = variable


def trainer(strategy: Any = None, **options: Any) -> L.Trainer:
    """A quiet Trainer on one CPU; no strategy: the plain one."""
    return quiet_trainer(strategy or "auto", **{"max_epochs": 1, "precision": "32-true", **options})


Build = Callable[[], Any]


def trained(build: Build, strategy: Any = None, batches: DataLoader[Any] | None = None, **options: Any) -> Any:
    """A freshly built module after its fit."""
    with quietly():
        torch.manual_seed(0)
        module = build()
        trainer(strategy, **options).fit(module, batches or vectors())
    return module


def assert_alike(ours: nn.Module, plain: nn.Module) -> None:
    """I1."""
    mine, theirs = ours.state_dict(), plain.state_dict()
    assert mine.keys() == theirs.keys()
    for name, value in theirs.items():
        got = mine[name]
        assert got.dtype == value.dtype, f"{name} is {got.dtype}, and {value.dtype} of a plain Trainer"
        assert got.stride() == value.stride(), (
            f"{name} has strides {got.stride()}, and {value.stride()} of a plain Trainer"
        )
        assert torch.equal(got, value), f"{name} differs by {(got.double() - value.double()).abs().max()}"
    losses, expected = getattr(ours, "losses", []), getattr(plain, "losses", [])
    assert len(losses) == len(expected)
    for at, (loss, other) in enumerate(zip(losses, expected, strict=True)):
        assert torch.equal(loss, other), f"loss {at}: {loss}, and {other} of a plain Trainer"


def compare(build: Build, strategy: Any, batches: DataLoader[Any] | None = None, **options: Any) -> Any:
    """Trains with both, compares, and returns the strategy's module."""
    ours = trained(build, strategy, batches, **options)
    assert_alike(ours, trained(build, None, batches, **options))
    return ours
