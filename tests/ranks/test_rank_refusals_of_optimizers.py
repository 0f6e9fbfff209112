"""Optimizers that ranks, each with a part of some parameters, cannot step."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from kit.ranks.harness import RanksFailed, run_ranks
from kit.ranks.tensor_blocks import loader, module_of, trainer_of


def with_adafactor(ranks: int, tensor: int) -> None:
    module: Any = module_of()
    module.configure_optimizers = lambda: torch.optim.Adafactor(module.parameters())
    trainer_of(ranks, tensor).fit(module, loader(4))


def test_one_that_updates_whole_parameters_is_refused_where_ranks_cut_them_with_the_reason_and_the_remedy() -> None:
    told = (
        r"Adafactor updates each parameter as a whole .* ranks slice parameters among .* without tensor_parallel_size"
    )
    with pytest.raises(RanksFailed, match=told):
        run_ranks(with_adafactor, 2, 2, 2)
    run_ranks(with_adafactor, 2, 2, 1)
