"""Pipeline stages: causal models of Transformers need no change."""

from __future__ import annotations

import os
from functools import partial
from pathlib import Path

import pytest
import torch
from kit.fits import quiet_trainer
from kit.memory import strategy_with
from kit.ranks.harness import run_ranks
from kit.ranks.tensor_models import BATCH, LENGTH, VOCABULARY, Held
from torch import Tensor
from torch.utils.data import DataLoader


def fit(model: str, ranks: int, disk: Path, *, lora: bool = False, schedule: str = "1f1b") -> dict[str, Tensor]:
    os.environ.setdefault("RANK", "0")
    torch.manual_seed(0)
    module = Held(model, lora=lora, **({"num_hidden_layers": 4} if lora else {}))
    stages = {"pipeline_parallel_size": ranks, "micro_batches": 4, "pipeline_schedule": schedule} if ranks > 1 else {}
    strategy = strategy_with(page_size="64KiB", disk_path=str(disk), offload_optimizer="disk", **stages)
    trainer = quiet_trainer(strategy, devices=ranks, precision="64-true", max_steps=6)
    rows = torch.randint(3, VOCABULARY, (6 * BATCH, LENGTH), generator=torch.Generator().manual_seed(5))
    trainer.fit(module, DataLoader(rows, BATCH))  # type: ignore[arg-type]
    return {name: each.detach().clone() for name, each in module.named_parameters()}


@pytest.mark.parametrize(
    "model", ["llama", *(pytest.param(each, marks=pytest.mark.slow) for each in ("qwen3", "gemma", "gpt2", "mixtral"))]
)
def test_models_of_transformers_need_no_change(model: str, disk: Path) -> None:
    (whole,) = run_ranks(fit, 1, model, 1, disk)
    for weights in run_ranks(fit, 2, model, 2, disk):
        for name, value in whole.items():
            torch.testing.assert_close(weights[name], value, rtol=0, atol=1e-9, msg=name)


@pytest.mark.parametrize("schedule", ["1f1b", "interleaved"])
def test_adapters_of_peft_train_in_stages(schedule: str, disk: Path) -> None:
    pytest.importorskip("peft", reason="trains adapters of theirs")
    (whole,) = run_ranks(partial(fit, lora=True), 1, "llama", 1, disk)
    for weights in run_ranks(partial(fit, lora=True, schedule=schedule), 2, "llama", 2, disk):
        for name, value in whole.items():
            torch.testing.assert_close(weights[name], value, rtol=0, atol=1e-9, msg=name)
