"""Allocations of a run when its set-up has ended are those of its inventory, to the byte, in every tier."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from kit.fits import quiet_trainer
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_ptm import AngelPTMStrategy
from lightning_ptm.errors import CapacityError
from lightning_ptm.planning.inventory import Lifetime, What
from lightning_ptm.terms import TIERS, Tier


class Net(L.LightningModule):
    """Blocks of odd sizes, one of them frozen, one in fp32 under mixed precision, and a root of its own."""

    def __init__(self, optimizer: Callable[..., Any]) -> None:
        super().__init__()
        self.first = nn.Linear(33, 70)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(70, 301), nn.ReLU(), nn.Linear(301, 70)) for _ in range(4))
        self.norm = nn.BatchNorm1d(70)
        self.blocks[1].requires_grad_(False)
        self._optimizer = optimizer

    def training_step(self, batch: Tensor, index: int) -> Tensor:
        x = self.first(batch)
        for block in self.blocks:
            x = x + block(x)
        return self.norm(x).square().mean()

    def configure_optimizers(self) -> Any:
        return self._optimizer([parameter for parameter in self.parameters() if parameter.requires_grad])


class Weighs(L.Callback):
    """Compares when set-up has ended, and when training has."""

    def __init__(self) -> None:
        self.compared = 0

    def compare(self, trainer: L.Trainer, *lifetimes: Lifetime) -> None:
        strategy = trainer.strategy
        assert isinstance(strategy, AngelPTMStrategy)
        allocator, inventory = strategy.engine.allocator, strategy.engine.blueprint.inventory
        for tier in TIERS:
            capacity = allocator.capacity_bytes(tier)
            assert capacity == inventory.pool_bytes(tier), tier
            assert capacity - allocator.free_bytes(tier) == inventory.held_bytes(tier, *lifetimes), tier
        self.compared += 1

    def on_fit_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self.compare(trainer, Lifetime.RUN)


def run(strategy: AngelPTMStrategy, precision: Any, optimizer: Callable[..., Any], **options: Any) -> L.Trainer:
    weighs = Weighs()
    rows = torch.randn(8, 33, generator=torch.Generator().manual_seed(0))
    trainer = quiet_trainer(strategy, precision=precision, max_steps=1, callbacks=[weighs], **options)
    trainer.fit(Net(optimizer), DataLoader(rows, batch_size=4))  # type: ignore[arg-type]
    assert weighs.compared == 1
    return trainer


def adam(parameters: Any) -> Any:
    return torch.optim.AdamW(parameters, lr=1e-3)


def sgd(parameters: Any) -> Any:
    return torch.optim.SGD(parameters, lr=1e-3)


SETTINGS: dict[str, dict[str, Any]] = {
    "nothing asked": {},
    "saves behind": {"checkpoints": {"state_dict_type": "sharded", "async_save": True}},
    "little staging": {"tuning": {"staging_memory": "1MiB"}},
    "states of 8 bits, saves behind": {
        "optimizer_state_dtype": "int8",
        "checkpoints": {"state_dict_type": "sharded", "async_save": True},
    },
}


CASES = [
    *((name, precision, adam) for name in SETTINGS for precision in ("32-true", "bf16-mixed")),
    ("nothing asked", "bf16-true", sgd),
    ("saves behind", "bf16-mixed", sgd),
]


@pytest.mark.diagonal
@pytest.mark.parametrize(("name", "precision", "optimizer"), CASES)
def test_one_rank(strategy_at: Any, tier: str, name: str, precision: str, optimizer: Callable[..., Any]) -> None:
    run(strategy_at(tier, **SETTINGS[name]), precision, optimizer)


@pytest.mark.slow_unless("ram", "all_on_disk", "three_tiers")
def test_frozen_weights_in_codes_with_buffers_of_saves(strategy_at: Any, tier: str) -> None:
    run(strategy_at(tier, frozen_dtype="nf4", **SETTINGS["saves behind"]), "bf16-mixed", sgd)


@pytest.mark.slow_unless(
    "all_on_disk-32-true-{'gradient_clip_val': 1.0}",
    "all_on_disk-bf16-mixed-{'accumulate_grad_batches': 2}",
    "lock_free_three_tiers-32-true-{'accumulate_grad_batches': 2}",
    "lock_free_three_tiers-bf16-mixed-{'gradient_clip_val': 1.0}",
)
@pytest.mark.parametrize("options", [{"accumulate_grad_batches": 2}, {"gradient_clip_val": 1.0}], ids=str)
@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
def test_gradients_that_are_kept(strategy_at: Any, tier: str, precision: str, options: dict[str, Any]) -> None:
    run(strategy_at(tier), precision, adam, **options)


@pytest.mark.slow_unless("all_on_disk", "lock_free_three_tiers", "tight")
def test_an_evaluation(strategy_at: Any, tier: str) -> None:
    weighs = Weighs()

    class Evaluates(Net):
        def validation_step(self, batch: Tensor, index: int) -> Tensor:
            return self.training_step(batch, index)

        def on_validation_start(self) -> None:
            weighs.compare(self.trainer, Lifetime.RUN)

    trainer = L.Trainer(
        accelerator="cpu", devices=1, strategy=strategy_at(tier), logger=False, enable_progress_bar=False
    )
    trainer.validate(Evaluates(adam), DataLoader(torch.randn(4, 33), batch_size=4), verbose=False)  # type: ignore[arg-type]
    assert weighs.compared == 1


def test_saves_behind_have_buffers_for_frozen_weights_on_disk(strategy_at: Any) -> None:
    """SGD keeps nothing, so nothing else in fp32 is on disk."""
    strategy = strategy_at("all_on_disk", checkpoints={"state_dict_type": "sharded", "async_save": True})
    found: list[Any] = []

    class Looks(L.Callback):
        def on_fit_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
            found.extend(strategy.engine.blueprint.inventory.of(What.SAVES))

    L.Trainer(
        accelerator="cpu",
        devices=1,
        strategy=strategy,
        max_steps=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        callbacks=[Looks()],
        precision="bf16-mixed",
    ).fit(Net(sgd), DataLoader(torch.randn(8, 33), batch_size=4))  # type: ignore[arg-type]
    assert {row.dtype for row in found} == {"float32", "bfloat16"}


# -- too few pages ----------------------------------------------------------------------------------------------------


def test_too_few_pages_in_a_run_are_told_with_what_they_are_for(strategy_at: Any) -> None:
    strategy = strategy_at("all_on_disk")
    words: list[str] = []

    class Takes(L.Callback):
        def on_train_batch_start(self, trainer: L.Trainer, pl_module: Any, batch: Any, batch_idx: int) -> None:
            words.append(strategy.engine.blueprint.inventory.in_words(Tier.DISK))
            strategy.engine.allocator.allocate("a tensor of mine", 1 << 30, torch.float32, Tier.DISK)

    with pytest.raises(CapacityError) as caught:
        L.Trainer(
            accelerator="cpu",
            devices=1,
            strategy=strategy,
            precision="bf16-mixed",
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            callbacks=[Takes()],
        ).fit(Net(adam), DataLoader(torch.randn(8, 33), batch_size=4))  # type: ignore[arg-type]
    (told,) = words
    assert re.fullmatch(
        r"the disk tier is for optimizer states [\d.]+ MiB, master parameters \d+ KiB, parameters \d+ KiB(, others .*)?",
        told,
    )
    text = str(caught.value)
    assert text.startswith("a tensor of mine needs 65536 pages (4 GiB)")
    assert text.endswith(f"raise disk_memory, or give a disk_path with more room ({told})")


class ThreeDtypes(L.LightningModule):
    """In mixed precision: frozen bf16, masters and moments in fp32, and a parameter in fp64."""

    def __init__(self) -> None:
        super().__init__()
        self.frozen = nn.Linear(64, 512).requires_grad_(False)
        self.inner = nn.Linear(512, 64)
        self.shift = nn.Parameter(torch.zeros(64, dtype=torch.float64))

    def training_step(self, batch: Tensor, index: int) -> Tensor:
        return (self.inner(self.frozen(batch)) + self.shift).square().mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD([*self.inner.parameters(), self.shift], lr=1e-3)


def test_a_save_finds_a_page_for_each_dtype_on_disk(strategy_at: Any, tmp_path: Path) -> None:
    strategy = strategy_at("all_on_disk", checkpoints={"state_dict_type": "sharded"})
    rows: list[Any] = []

    class Saves(L.Callback):
        def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
            rows.extend(strategy.engine.blueprint.inventory.of(What.TRANSIT))
            trainer.save_checkpoint(tmp_path / "saved.ckpt")

    quiet_trainer(strategy, precision="bf16-mixed", max_steps=1, callbacks=[Saves()]).fit(
        ThreeDtypes(), DataLoader(torch.randn(8, 64), batch_size=4)
    )  # type: ignore[arg-type]
    assert [row.count for row in rows] == [3]
    assert (tmp_path / "saved.ckpt").is_dir()
