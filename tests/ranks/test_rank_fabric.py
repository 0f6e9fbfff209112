"""Loops with Fabric on two ranks compute what they compute on one rank with the mean of both gradients."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning.fabric
import pytest
import torch
from kit.models import GAN, Block
from kit.ranks.harness import run_ranks
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_ptm import AngelPTMFabricStrategy

STEPS = 3


def loop(world_size: int, disk: Path | None, file: Path) -> dict[str, Any]:
    """One rank's part of a loop that accumulates two batches a step; with plain Fabric's DDP where there is no disk."""
    homes = {"offload_optimizer": "disk", "offload_parameters": "disk", "page_size": "64KiB", "disk_path": disk}
    strategy: Any = "ddp" if disk is None else AngelPTMFabricStrategy(**homes, debug={"poison": True})
    fabric = lightning.fabric.Fabric(strategy=strategy, accelerator="cpu", devices=world_size, precision="64-true")
    fabric.launch()
    torch.manual_seed(0)
    net = nn.Sequential(Block(64), nn.BatchNorm1d(64), Block(64), nn.Linear(64, 1))
    rows = torch.randn(STEPS * 2 * 2 * 4, 64, generator=torch.Generator().manual_seed(1))
    data: Any = fabric.setup_dataloaders(DataLoader(TensorDataset(rows), batch_size=4))
    model, optimizer = fabric.setup(net, torch.optim.AdamW(net.parameters(), lr=1e-2, eps=1e-3))
    losses = []
    for index, (batch,) in enumerate(data):
        with fabric.no_backward_sync(model, enabled=index % 2 == 0):
            loss = model(batch).square().mean()
            fabric.backward(loss)
        losses.append(float(fabric.all_reduce(loss.detach())))
        if index % 2:
            losses.append(float(fabric.clip_gradients(model, optimizer, max_norm=0.05)))
            optimizer.step()
            optimizer.zero_grad()
    fabric.save(file, {"model": model, "optimizer": optimizer})
    loaded = torch.load(file, weights_only=True)
    if disk is not None:
        fabric.load(file, {"model": model, "optimizer": optimizer})
    fabric.barrier()
    strategy = fabric.strategy
    if disk is not None:
        strategy.teardown()
    weights = {name: each.detach().clone() for name, each in net.state_dict().items()}
    assert all(torch.equal(loaded["model"][name], each) for name, each in weights.items() if "running" not in name)
    return {"losses": torch.tensor(losses, dtype=torch.float64), **loaded["model"], "told": fabric.broadcast("told")}


def test_two_ranks_are_data_parallel(disk: Path, tmp_path: Path) -> None:
    first, second = run_ranks(loop, 2, 2, disk, tmp_path / "ours")
    plain, _ = run_ranks(loop, 2, 2, None, tmp_path / "ddp")
    for found in (first, second):
        assert found.pop("told") == "told"
    del plain["told"]
    torch.testing.assert_close(first, plain, rtol=1e-12, atol=1e-14)
    assert torch.equal(first["losses"], second["losses"])


def alternate(world_size: int, strategy: Any) -> dict[str, Tensor]:
    """One rank's part of a loop that keeps the generator's graph over the discriminator's step."""
    fabric = lightning.fabric.Fabric(strategy=strategy, accelerator="cpu", devices=world_size, precision="64-true")
    fabric.launch()
    net = GAN()
    generator, discriminator = (
        torch.optim.AdamW(part.parameters(), lr=1e-2, eps=1e-3) for part in (net.generator, net.discriminator)
    )
    model, generator, discriminator = fabric.setup(net, generator, discriminator)
    rows = torch.randn(STEPS, 2, 4, 64, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    for noise, real in rows:
        ours = slice(fabric.global_rank, None, world_size)
        fake = model("generator", noise[ours])
        fabric.backward(
            model("discriminator", fake.detach()).square().mean() - model("discriminator", real[ours]).mean()
        )
        discriminator.step()
        discriminator.zero_grad()
        fabric.backward(model("discriminator", fake).square().mean())
        generator.step()
        generator.zero_grad()
        discriminator.zero_grad()
    if isinstance(strategy, AngelPTMFabricStrategy):
        fabric.strategy.teardown()  # type: ignore[no-untyped-call]
    return {name: each.detach().clone() for name, each in net.state_dict().items()}


def alternate_in_pages(world_size: int, disk: Path) -> dict[str, Tensor]:
    homes = {"offload_optimizer": "disk", "offload_parameters": "disk", "page_size": "64KiB", "disk_path": disk}
    return alternate(world_size, AngelPTMFabricStrategy(**homes, debug={"poison": True}))


@pytest.mark.slow
def test_ranks_keep_a_graph_over_the_step_of_another_optimizer(disk: Path) -> None:
    (plain,) = run_ranks(alternate, 1, 1, "auto")
    for found in run_ranks(alternate_in_pages, 2, 2, disk):
        torch.testing.assert_close(found, plain, rtol=1e-10, atol=1e-12)
