"""Settings by which ranks would wait for each other: all are told which, before anything waits, in whatever run."""

from __future__ import annotations

import os
from datetime import timedelta
from typing import Any

import pytest
import torch
from kit.fits import quiet_trainer
from kit.ranks.harness import run_ranks
from kit.ranks.tensor_blocks import PLAN, Blocks, loader

from lightning_ptm import AngelPTMStrategy
from lightning_ptm.errors import RankError

DIFFERENT: list[tuple[dict[str, Any], str, str]] = [
    ({"precision": "bf16-mixed"}, "precision='bf16-mixed'", "precision='32-true'"),
    ({"page_size": "auto"}, "page_size='auto'", "a page_size"),
    ({"tuning": {"matmul_precision": "native"}}, "matmul_precision='native'", "matmul_precision='auto'"),
    (
        {"tensor_parallel_size": 2, "tensor_parallel": {"plan": PLAN}},
        "tensor_parallel_size=2",
        "tensor_parallel_size=1",
    ),
    ({"parallel": "auto"}, "parallel='auto'", "parallel='none'"),
    ({"checkpoints": {"async_save": True, "state_dict_type": "sharded"}}, "async_save=True", "async_save=False"),
]


def fit(theirs: dict[str, Any]) -> str:
    """Fits with settings of its own on the second rank."""
    settings = dict(theirs) if os.environ["RANK"] == "1" else {}
    precision = settings.pop("precision", "32-true")
    torch.manual_seed(0)
    trainer = quiet_trainer(
        AngelPTMStrategy(timeout=timedelta(seconds=60), **settings), devices=2, max_steps=1, precision=precision
    )
    with pytest.raises(RankError) as caught:
        trainer.fit(Blocks(), loader(2))
    return str(caught.value)


@pytest.mark.parametrize(("theirs", "has", "instead"), DIFFERENT, ids=[has for _, has, _ in DIFFERENT])
def test_all_ranks_are_told_of_settings_that_differ(theirs: dict[str, Any], has: str, instead: str) -> None:
    for told in run_ranks(fit, 2, theirs, limit_s=30):
        assert told.startswith(
            f"rank 1 has {has}, where rank 0 has {instead}; they would wait for each other forever"
        ), told
