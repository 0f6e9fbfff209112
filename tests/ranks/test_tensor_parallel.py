"""Tensor parallelism: a module whose parameters are cut over ranks learns what it learns whole."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
import torch.nn.functional as F
from rank_harness import run_ranks
from rank_training import TIERS
from torch import Tensor
from torch.utils.data import DataLoader, DistributedSampler

from lightning_ptm import AngelPTMStrategy
from lightning_ptm.models import GPT

STEPS, BATCH, LENGTH = 12, 4, 17


class Precise(GPT):
    """Its loss in the dtype of its weights; losses are kept."""

    def __init__(self, **sizes: Any) -> None:
        super().__init__(
            **{"vocab_size": 64, "width": 64, "layers": 2, "heads": 4, "sequence_length": LENGTH - 1, **sizes}
        )
        self.losses: list[float] = []

    def loss(self, batch: Any) -> Tensor:
        return F.cross_entropy(self(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())

    def token_count(self, batch: Any) -> int:
        return int(batch[:, 1:].numel())

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = self.loss(batch)
        self.losses.append(float(loss))
        return loss


@dataclasses.dataclass(frozen=True)
class Run:
    """How ranks train."""

    ranks: int = 1
    tensor: int = 1
    tier: str = "ram"
    precision: str = "64-true"
    settings: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    sizes: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    trainer: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    norms: bool = False


@dataclasses.dataclass(frozen=True)
class Outcome:
    losses: list[float]
    weights: dict[str, Tensor]
    norms: list[float]
    exchanges: int
    state_bytes: dict[str, int]


def run(how: Run, disk: Path) -> Outcome:
    """One rank's part."""
    os.environ.setdefault("RANK", "0")
    torch.manual_seed(0)
    module = Precise(**how.sizes)
    strategy = AngelPTMStrategy(
        page_size="64KiB",
        poison=True,
        disk_path=str(disk),
        tensor_parallel_size=how.tensor,
        timeout=timedelta(seconds=60),
        **{**TIERS[how.tier], **how.settings},
    )
    norms: list[float] = []

    states: dict[str, int] = {}

    class Watch(L.Callback):
        def on_train_start(self, trainer: L.Trainer, module: Any) -> None:
            for each in strategy.states_at_home():
                states[each.states] = states.get(each.states, 0) + each.bytes

        def on_before_optimizer_step(self, trainer: L.Trainer, module: Any, optimizer: Any) -> None:
            if how.norms:
                norms.append(float(strategy.gradient_norm(optimizer)))

    trainer = L.Trainer(
        accelerator="cpu",
        devices=how.ranks,
        strategy=strategy,
        precision=how.precision,  # type: ignore[arg-type]
        max_steps=STEPS,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        use_distributed_sampler=False,  # it would shuffle
        callbacks=[Watch()],
        **how.trainer,
    )
    generator = torch.Generator().manual_seed(5)
    rows = torch.randint(0, 64, (STEPS * BATCH, LENGTH), generator=generator)
    data = how.ranks // how.tensor
    sampler = DistributedSampler(rows, data, int(os.environ["RANK"]) // how.tensor, shuffle=False)  # type: ignore[arg-type]
    trainer.fit(module, DataLoader(rows, BATCH // data, sampler=sampler))  # type: ignore[arg-type]
    group = strategy._tensor_group
    return Outcome(
        module.losses,
        {name: each.detach().clone() for name, each in module.named_parameters()},
        norms,
        0 if group is None else group.exchanges,
        states,
    )


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Outcome:
    """What one rank with whole parameters learns."""
    return run_ranks(run, 1, Run(norms=True), tmp_path_factory.mktemp("disk"))[0]


def assert_close(outcomes: list[Outcome], whole: Outcome) -> None:
    assert len(outcomes[0].losses) == len(whole.losses) == STEPS
    losses = torch.tensor([each.losses for each in outcomes], dtype=torch.float64).mean(0)
    torch.testing.assert_close(losses, torch.tensor(whole.losses, dtype=torch.float64), rtol=0, atol=1e-12)
    for each in outcomes:
        assert each.weights.keys() == whole.weights.keys()
        for name, value in whole.weights.items():
            torch.testing.assert_close(each.weights[name], value, rtol=0, atol=1e-9, msg=name)


@pytest.mark.parametrize(
    ("ranks", "tensor", "tier"),
    [
        (2, 2, "ram"),
        (4, 2, "masters_on_disk"),
        pytest.param(4, 4, "ram", marks=pytest.mark.slow),
        (2, 2, "all_on_disk"),
        (2, 2, "lock_free"),
    ],
)
def test_it_learns_what_one_rank_learns(ranks: int, tensor: int, tier: str, whole: Outcome, disk: Path) -> None:
    assert_close(run_ranks(run, ranks, Run(ranks, tensor, tier), disk, limit_s=240), whole)


def test_it_is_clipped_by_one_ranks_norm(disk: Path) -> None:
    clipped = {"gradient_clip_val": 0.5}
    (whole,) = run_ranks(run, 1, Run(norms=True, trainer=clipped), disk)
    outcomes = run_ranks(run, 4, Run(4, 2, norms=True, trainer=clipped), disk, limit_s=240)
    assert_close(outcomes, whole)
    for each in outcomes:
        assert each.norms == pytest.approx(whole.norms, rel=1e-12) and max(whole.norms) > 0.5


def test_recomputing_exchanges_nothing_again(whole: Outcome, disk: Path) -> None:
    plain = run_ranks(run, 2, Run(2, 2), disk)
    recomputed = run_ranks(run, 2, Run(2, 2, settings={"recompute": "all"}), disk)
    assert_close(recomputed, whole)
    assert [each.exchanges for each in recomputed] == [each.exchanges for each in plain]
    # Two sums of a block each way, the embedding's, and the head's outputs and input gradient; and the proof of a block.
    assert plain[0].exchanges == STEPS * (2 * 4 + 1 + 2) + 4 + 1


def test_each_element_has_one_owner(disk: Path) -> None:
    """Also of what every rank has whole: its pages are shared by all."""
    sizes = {"width": 256, "layers": 2}
    (whole,) = run_ranks(run, 1, Run(sizes=sizes), disk)
    for ranks, tensor in ((2, 2), (4, 2)):
        for each in run_ranks(run, ranks, Run(ranks, tensor, sizes=sizes), disk, limit_s=240):
            for states, count in whole.state_bytes.items():
                assert each.state_bytes[states] <= 1.04 * count / ranks, states
