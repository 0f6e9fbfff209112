"""Pipeline stages together with other parallelism: each model, schedule and division learns what one rank learns."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
import torch.nn.functional as F
from kit.fits import quiet_trainer
from kit.memory import strategy_with
from kit.ranks.context_models import Causal, ContextGPT
from kit.ranks.harness import End, run_ranks, watch_ranks
from kit.ranks.training import PLACES
from kit.settings import merged
from torch import Tensor
from torch.utils.data import DataLoader, DistributedSampler

from lightning_ptm.forecasting.pipeline import most_graphs
from lightning_ptm.planning.schedules import chunks_of

STEPS, BATCH, LENGTH, LAYERS = 4, 8, 32, 8
SCHEDULES = ("1f1b", "gpipe", "interleaved", "breadth_first")
TIERS = ("ram", "three_tiers", "tight", "masters_on_disk")


class OwnPositions(ContextGPT):
    """Its positions begin at 0 on each rank."""

    def hidden(self, tokens: Tensor) -> Tensor:
        x = self.token_embedding(tokens) + self.position_embedding(torch.arange(tokens.shape[1]))
        for block in self.blocks:
            x = block(x)
        hidden: Tensor = self.norm(x)
        return hidden


class Precise(Causal):
    """Its loss is not computed in fp32."""

    def loss(self, batch: Mapping[str, Tensor]) -> Tensor:
        logits = self.model(input_ids=batch["input_ids"]).logits[:, :-1]
        return F.cross_entropy(logits.flatten(0, 1), batch["labels"][:, 1:].flatten())


MODELS = {"gpt": ContextGPT, "own positions": OwnPositions}


@dataclasses.dataclass(frozen=True)
class Case:
    """A division of the ranks, and how they train; 1 stage: one rank has the whole model."""

    model: str
    stages: int = 1
    data: int = 1
    tensor: int = 1
    context: int = 1
    schedule: str = "1f1b"
    tier: str = "ram"
    layers: int = LAYERS
    steps: int = STEPS
    recompute: str = "none"
    labelled: bool = False
    """Whether a model of Transformers computes the loss, as divided sequences need."""

    @property
    def ranks(self) -> int:
        return self.stages * self.data * self.tensor * self.context


@dataclasses.dataclass(frozen=True)
class Found:
    losses: list[float]
    weights: dict[str, Tensor]
    graphs: int


class Watch(L.Callback):
    def __init__(self) -> None:
        self.losses: list[float] = []
        self.graphs = 0

    def on_train_batch_end(self, trainer: L.Trainer, module: Any, outputs: Any, *_: Any) -> None:
        self.losses.append(float(outputs["loss"]))
        strategy: Any = trainer.strategy
        self.graphs = getattr(strategy._run.steps, "most_graphs", 0)


def train(case: Case, disk: Path) -> Found:
    rank = int(os.environ.setdefault("RANK", "0"))
    torch.manual_seed(0)
    gpt = case.model in MODELS
    kind = Causal if case.labelled else Precise
    module = MODELS[case.model](layers=case.layers) if gpt else kind(case.model, num_hidden_layers=case.layers)
    base = {"page_size": "64KiB", "debug": {"poison": True}, "disk_path": str(disk), "timeout": timedelta(seconds=60)}
    sizes: dict[str, Any] = {"tensor_parallel_size": case.tensor, "context_parallel_size": case.context}
    sizes["recompute"] = case.recompute
    if case.stages > 1:
        sizes |= {"pipeline_parallel_size": case.stages, "micro_batches": 4, "pipeline_schedule": case.schedule}
    strategy = strategy_with(**merged(base, sizes, PLACES[case.tier]))
    texts = torch.randint(3, 64, (STEPS * BATCH, LENGTH + 1), generator=torch.Generator().manual_seed(5))
    data: list[Any] = [
        (each[:-1], each[1:]) if gpt else {"input_ids": each[:-1], "labels": each[:-1]} for each in texts
    ]
    replica = rank // (case.tensor * case.context) % case.data
    sampler = DistributedSampler(data, case.data, replica, shuffle=False)  # type: ignore[arg-type, var-annotated]
    watch = Watch()
    trainer = quiet_trainer(
        strategy,
        devices=case.ranks,
        precision="64-true",
        use_distributed_sampler=False,
        max_steps=case.steps,
        callbacks=[watch],
    )
    trainer.fit(module, DataLoader(data, BATCH // case.data, sampler=sampler))  # type: ignore[arg-type]
    weights = {name: each.detach().clone() for name, each in module.named_parameters()}
    return Found(watch.losses, weights, watch.graphs)


def train_all(cases: Sequence[Case], disk: Path) -> list[Found]:
    """One rank's part of one run after the other."""
    return [train(each, disk) for each in cases]


def check(cases: Sequence[Case], disk: Path) -> None:
    """Compares runs of as many ranks, in one start of these, with that of one rank."""
    ((whole,),) = run_ranks(
        train_all,
        1,
        [Case(cases[0].model, layers=cases[0].layers, steps=cases[0].steps, labelled=cases[0].labelled)],
        disk,
    )
    by_rank = run_ranks(train_all, cases[0].ranks, cases, disk, limit_s=900)
    for case, *found in zip(cases, *by_rank, strict=True):
        mean = torch.tensor([each.losses for each in found], dtype=torch.float64).mean(0)
        # Transformers computes losses in fp32, and Mixtral's router rounds to it: without stages ranks differ as much.
        rounds = case.labelled or (case.model == "mixtral" and case.tensor > 1)
        losses, weights = (1e-6, 1e-7) if rounds else (1e-12, 1e-9)
        torch.testing.assert_close(
            mean, torch.tensor(whole.losses, dtype=torch.float64), rtol=0, atol=losses, msg=str(case)
        )
        for each in found:
            for name, value in whole.weights.items():
                torch.testing.assert_close(each.weights[name], value, rtol=0, atol=weights, msg=f"{case} {name}")
        stages = [case.stages - 1 - rank * case.stages // case.ranks for rank in range(case.ranks)]
        most = most_graphs(case.schedule, case.stages, 4, chunks_of(case.schedule, case.stages, case.layers))
        assert [each.graphs for each in found] == [most[stage] for stage in stages], case
        if case.schedule == "1f1b":
            assert all(most[stage] <= case.stages - stage for stage in stages)


DIVISIONS = {
    "2 stages": {"stages": 2},
    "4 stages": {"stages": 4},
    "2 stages x data 2": {"stages": 2, "data": 2},
    "2 stages x tensor 2": {"stages": 2, "tensor": 2},
    "2 stages x context 2": {"stages": 2, "context": 2},
}


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("model", ["gpt", "llama", "mixtral"])
@pytest.mark.parametrize("division", DIVISIONS)
def test_every_schedule_learns_what_one_rank_learns(division: str, model: str, disk: Path) -> None:
    if model != "gpt":
        pytest.importorskip("transformers", reason="trains a model of it")
    sizes = DIVISIONS[division]
    cases = [
        Case(model, **sizes, schedule=schedule, tier=tier, labelled="context" in sizes and model != "gpt")
        for schedule, tier in zip(SCHEDULES, TIERS, strict=True)
    ]
    check(cases, disk)


def test_stages_may_divide_sequences(disk: Path) -> None:
    check([Case("gpt", stages=2, context=2, tier="tight", layers=2, steps=2, recompute="all")], disk)


@pytest.mark.slow
def test_positions_of_parts_of_sequences_are_refused_in_stages(disk: Path) -> None:
    outcomes = watch_ranks(train, 4, Case("own positions", stages=2, context=2, layers=4), disk)
    assert all(each.end is End.RAISED for each in outcomes), outcomes
    assert any("ConfigError: context_parallel_size=2 would train something else" in each.error for each in outcomes)
