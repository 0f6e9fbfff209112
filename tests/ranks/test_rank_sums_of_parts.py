"""A module that cuts its products over ranks and adds them up itself (tensor parallelism): one rank's losses, norms and
weights, but for the order in which products are added."""

from __future__ import annotations

import os
from datetime import timedelta
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
import torch.distributed as dist
from kit.fits import quiet_trainer
from kit.ranks.harness import run_ranks
from kit.ranks.training import TIERS
from test_expert_parallel_checkpoints import SaveTo, read
from torch import Tensor, nn
from torch.utils.data import DataLoader, DistributedSampler

from lightning_ptm import AngelPTMStrategy
from lightning_ptm.planning.tensor_slices import TensorSlice
from lightning_ptm.runtime.tensors.parts import cut

WIDTH, BATCHES, BATCH = 64, 6, 4


class Summed(torch.autograd.Function):
    """The sum over a group; of the result all ranks have the same gradient."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, group: dist.ProcessGroup) -> Tensor:
        values = values.clone()
        dist.all_reduce(values, group=group)
        return values

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient, None


class Given(torch.autograd.Function):
    """Gives the same values to all ranks of a group, whose gradients are added up."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return values.view_as(values)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        gradient = gradient.clone()
        dist.all_reduce(gradient, group=ctx.group)
        return gradient, None


class Block(nn.Module):
    def __init__(self, parts: int, index: int, seed: int) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        self.boxes = {
            "up": TensorSlice((4 * WIDTH, WIDTH), 0, parts, index),
            "down": TensorSlice((WIDTH, 4 * WIDTH), 1, parts, index),
        }
        for name, box in self.boxes.items():
            whole = torch.randn(box.shape, generator=generator) / 16
            self.register_parameter(name, nn.Parameter(cut(whole, box).clone()))
        self.norm = nn.LayerNorm(WIDTH)
        self.group: dist.ProcessGroup | None = None

    def forward(self, x: Tensor) -> Tensor:
        rows = self.norm(x)
        rows = rows if self.group is None else Given.apply(rows, self.group)
        rows = torch.tanh(rows @ self.up.T) @ self.down.T
        return x + (rows if self.group is None else Summed.apply(rows, self.group))


class Model(L.LightningModule):
    def __init__(self, parts: int, rank: int) -> None:
        super().__init__()
        self.parts = parts
        self.blocks = nn.ModuleList(Block(parts, rank % parts, seed) for seed in range(3))
        self.losses: list[float] = []
        self.norms: list[float] = []

    def configure_model(self) -> None:
        if self.parts == 1 or self.blocks[0].group is not None:
            return
        for first in range(0, dist.get_world_size(), self.parts):
            group = dist.new_group(range(first, first + self.parts))
            if first <= dist.get_rank() < first + self.parts:
                for block in self.blocks:
                    block.group = group

    def training_step(self, x: Tensor, index: int) -> Tensor:
        for block in self.blocks:
            x = block(x)
        loss = (x - 1).pow(2).mean()
        self.losses.append(float(loss))
        return loss

    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        self.norms.append(float(self.trainer.strategy.gradient_norm(optimizer)))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), lr=1e-3)


class InParts(AngelPTMStrategy):
    def boxes(self) -> dict[str, TensorSlice]:
        module = self.lightning_module
        assert isinstance(module, Model)
        found = {
            f"blocks.{at}.{name}": box for at, block in enumerate(module.blocks) for name, box in block.boxes.items()
        }
        return found if module.parts > 1 else {}


def run(ranks: int, parts: int, saved: Path, settings: dict[str, Any]) -> tuple[list[float], list[float]]:
    """One rank's part.

    Returns:
        Its losses, and the norms of gradients.
    """
    rank, data_ranks = int(os.environ["RANK"]), ranks // parts
    torch.manual_seed(0)
    module = Model(parts, rank)
    strategy = InParts(page_size="64KiB", debug={"poison": True}, timeout=timedelta(seconds=60), **settings)
    trainer = quiet_trainer(
        strategy,
        devices=ranks,
        precision="64-true",
        max_epochs=1,
        use_distributed_sampler=False,
        gradient_clip_val=0.5,
        callbacks=[SaveTo(saved, BATCHES)],
    )
    rows = torch.randn(BATCHES * BATCH, WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    sampler = DistributedSampler(rows, data_ranks, rank // parts, shuffle=False)  # type: ignore[arg-type]
    trainer.fit(module, DataLoader(rows, BATCH // data_ranks, sampler=sampler))  # type: ignore[arg-type]
    return module.losses, module.norms


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[float], list[float], dict[str, Tensor]]:
    saved = tmp_path_factory.mktemp("whole") / "whole.ckpt"
    ((losses, norms),) = run_ranks(run, 1, 1, 1, saved, {})
    return losses, norms, read(saved)["state_dict"]


@pytest.mark.parametrize(
    ("ranks", "parts", "settings"),
    [
        pytest.param(2, 2, {"recompute": "all"}, marks=pytest.mark.slow),
        pytest.param(2, 2, TIERS["all_on_disk"], marks=pytest.mark.slow),
        pytest.param(4, 2, {}, marks=pytest.mark.slow),
        (4, 4, TIERS["lock_free"]),
    ],
    ids=["recomputed", "on disk", "four ranks", "lock-free in four parts"],
)
def test_losses_norms_and_weights_are_one_ranks(
    whole: tuple[list[float], list[float], dict[str, Tensor]],
    ranks: int,
    parts: int,
    settings: dict[str, Any],
    disk: Path,
    tmp_path: Path,
) -> None:
    losses, norms, weights = whole
    saved = tmp_path / "parts.ckpt"
    found = run_ranks(run, ranks, ranks, parts, saved, {**settings, "disk_path": str(disk)})
    means = [sum(step) / ranks for step in zip(*(ours for ours, _ in found), strict=True)]
    assert len(losses) == BATCHES and means == pytest.approx(losses, abs=1e-12)
    assert min(norms) > 0.5  # all are clipped
    for _, ours in found:
        assert ours == pytest.approx(norms, rel=1e-12)
    told = read(saved)["state_dict"]
    assert told.keys() == weights.keys()
    for name, value in weights.items():
        torch.testing.assert_close(told[name], value, rtol=0, atol=1e-9)
