"""A parameter in several optimizers on two ranks: the weights of plain data parallelism wherever states live, and checkpoints
that go on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from kit.outcomes import Outcome
from kit.ranks.harness import run_ranks
from kit.ranks.models import Tower
from kit.ranks.training import BATCH, Training, fit_in_all_tiers, loader, make_strategy, make_trainer, tokens
from kit.ranks.training import outcome_of as outcome
from lightning.pytorch.callbacks import ModelCheckpoint
from test_rank_experts import MoETower
from torch import Tensor

from lightning_ptm.sharded import load

RANKS = 2
TIERS = ["ram", "masters_on_disk", "three_tiers"]


class Turns(Tower):
    """All parameters in one optimizer, blocks in a second one, too, and one of these in a third."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def configure_optimizers(self) -> Any:
        return [
            torch.optim.AdamW(self.parameters(), lr=1e-2, fused=True),
            torch.optim.SGD(self.blocks.parameters(), lr=1e-1, momentum=0.9, fused=True),
            torch.optim.AdamW(self.blocks[1].parameters(), lr=1e-3, fused=True),
        ]

    def training_step(self, batch: Tensor, index: int) -> None:  # type: ignore[override]
        for optimizer in self.optimizers():  # type: ignore[union-attr]
            optimizer.zero_grad()
            self.manual_backward(super().training_step(batch, index))
            self.clip_gradients(optimizer, 0.02, "value")
            optimizer.step()


def plainly(training: Training) -> dict[str, Tensor]:
    torch.manual_seed(0)
    module, rows = Turns(), tokens(training, RANKS)
    optimizers = module.configure_optimizers()
    for step in range(training.batches):
        for optimizer in optimizers:
            gradients: list[list[Tensor]] = []
            for rank in range(RANKS):
                module.zero_grad()
                loss = module.loss(rows[rank::RANKS][step * BATCH : (step + 1) * BATCH], rank, step)
                assert loss is not None
                loss.backward()
                gradients.append([each.grad for each in module.parameters() if each.grad is not None])
            for parameter, first, second in zip(module.parameters(), *gradients, strict=True):
                parameter.grad = ((first + second) / RANKS).clamp(-0.02, 0.02)
            optimizer.step()
    return {name: value.detach() for name, value in module.named_parameters()}


@pytest.mark.parametrize("precision", ["32-true", pytest.param("bf16-mixed", marks=pytest.mark.slow)])
def test_they_train_as_plain_data_parallelism(precision: str, disk: Path) -> None:
    training = Training(Turns, precision, batches=3)
    per_rank = run_ranks(fit_in_all_tiers, RANKS, training, RANKS, disk, {}, TIERS)
    for of_rank in per_rank:
        for tier in TIERS:
            of_rank[tier].assert_equal(of_rank["ram"])
            of_rank[tier].assert_same_weights(per_rank[0]["ram"])
    if precision == "32-true":
        per_rank[0]["ram"].assert_same_weights(Outcome([], plainly(training)))


class TurnsOfExperts(Turns, MoETower):
    """Model with experts, which ranks divide; gradients are not clipped, of which other ranks have parts."""

    def training_step(self, batch: Tensor, index: int) -> None:  # type: ignore[override]
        for optimizer in self.optimizers():  # type: ignore[union-attr]
            optimizer.zero_grad()
            self.manual_backward(Tower.training_step(self, batch, index))
            optimizer.step()


@pytest.mark.parametrize(
    "tier", [*(pytest.param(tier, marks=pytest.mark.slow) for tier in ("ram", "masters_on_disk")), "three_tiers"]
)
def test_divided_experts_are_in_several_too(tier: str, disk: Path) -> None:
    """The weights are those of ranks that all have all experts."""
    training = Training(TurnsOfExperts, "64-true", batches=3)
    settings = {"units": ["MixtureOfExperts", "Expert"]}
    whole = run_ranks(fit_in_all_tiers, RANKS, training, RANKS, disk, settings, ["ram"])
    divided = run_ranks(
        fit_in_all_tiers, RANKS, training, RANKS, disk, {**settings, "expert_parallel_size": RANKS}, [tier]
    )
    for ours, theirs in zip(divided, whole, strict=True):
        torch.testing.assert_close(ours[tier].losses, theirs["ram"].losses, rtol=0, atol=1e-9)
        torch.testing.assert_close(ours[tier].weights, theirs["ram"].weights, rtol=0, atol=1e-9)


def epochs(folder: Path, root: Path, tier: str, kind: str, resumed: bool) -> dict[str, Tensor]:
    """Two epochs, saved after each; or the second one alone, from the save after the first."""
    torch.manual_seed(5 if resumed else 0)
    training, module = Training(Turns), Turns()
    strategy = make_strategy(folder, tier, checkpoints={"state_dict_type": kind})
    keep = ModelCheckpoint(root, filename="again" if resumed else "{epoch}", save_top_k=-1)
    trainer = make_trainer(training, strategy, RANKS, max_epochs=2, enable_checkpointing=True, callbacks=[keep])
    path = str(root / "epoch=0.ckpt") if resumed else None
    trainer.fit(module, loader(tokens(training, RANKS), RANKS), ckpt_path=path)
    return outcome(module).weights


@pytest.mark.parametrize("kind", [pytest.param("full", marks=pytest.mark.slow), "sharded"])
@pytest.mark.parametrize("tier", [pytest.param("ram", marks=pytest.mark.slow), "masters_on_disk"])
def test_they_are_saved_and_go_on(tier: str, kind: str, disk: Path, tmp_path: Path) -> None:
    root = tmp_path / "saved"
    whole = run_ranks(epochs, RANKS, disk, root, tier, kind, False)[0]
    resumed = run_ranks(epochs, RANKS, disk, root, tier, kind, True)[0]
    assert whole.keys() == resumed.keys() and all(torch.equal(whole[name], resumed[name]) for name in whole)
    paths = [root / "epoch=1.ckpt", root / "again.ckpt"]
    first, second = (load(path) if path.is_dir() else torch.load(path, weights_only=False) for path in paths)
    for ours, theirs, slots in zip(
        first["optimizer_states"],
        second["optimizer_states"],
        (("exp_avg", "exp_avg_sq", "step"), ("momentum_buffer",), ("exp_avg", "exp_avg_sq", "step")),
        strict=True,
    ):
        assert ours["state"].keys() == theirs["state"].keys() and ours["state"]
        for place, state in ours["state"].items():
            assert set(state) == set(slots)
            assert all(
                torch.equal(torch.as_tensor(state[n]), torch.as_tensor(theirs["state"][place][n])) for n in slots
            )
