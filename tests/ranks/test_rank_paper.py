"""Fetches and evictions of each of two ranks are those of the virtual run: as tests/runtime/test_run_and_paper.py."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from kit.decisions import Listens, in_virtual_run
from kit.ranks.harness import run_ranks
from kit.ranks.models import Tower
from kit.ranks.training import Training, loader, make_strategy, make_trainer, tokens
from test_expert_parallel_edges import LargeExperts
from test_rank_experts import MoETower
from torch import Tensor

from lightning_ptm.planning.plan import Task
from lightning_ptm.terms import Operation


class Apart(Tower):
    """Something comes between two blocks: see `Changing` in test_run_and_paper.py."""

    def loss(self, batch: Tensor, rank: int, step: int) -> Tensor:
        x = self.embedding(batch)
        for block in self.blocks:
            x = block(x).sin()
        loss: Tensor = self.head(self.norm(x)).square().mean()
        return loss


class Crowd(LargeExperts):
    """Each of its experts gets tokens."""

    def loss(self, batch: Tensor, rank: int, step: int) -> Tensor:
        x = self.embedding(batch)
        for block in self.blocks:
            x = x + block(x)[0]
        loss: Tensor = self.head(self.norm(x)).square().mean()
        return loss


DIVIDED: dict[str, Any] = {"units": ["MixtureOfExperts", "Expert"], "expert_parallel_size": 2}
HOST: dict[str, Any] = {"offload_parameters": "host", "offload_optimizer": "host"}
CASES: dict[str, tuple[Training, dict[str, Any]]] = {
    "in RAM": (Training(Tower), {}),
    "shards on the host": (Training(Tower), {"device_memory": "4MiB", **HOST}),
    "narrow": (Training(Apart), {"device_memory": "1600KiB", **HOST}),
    "accumulated": (Training(Tower, accumulate=2), {"device_memory": "2MiB", **HOST}),
    "clipped": (Training(Tower, clip=1.0), {"device_memory": "2MiB", **HOST}),
    "recomputed": (Training(Tower), {"device_memory": "2MiB", **HOST, "recompute": "all"}),
    "reduced once a step": (Training(Tower, accumulate=2), {"tuning": {"reduce_gradients": "each_step"}}),
    "lock-free": (Training(Tower), {"device_memory": "2MiB", "offload_parameters": "host", "lock_free": True}),
    "divided experts": (Training(MoETower), {"device_memory": "8MiB", **HOST, **DIVIDED}),
    "divided experts, recomputed": (
        Training(MoETower),
        {"device_memory": "8MiB", **HOST, **DIVIDED, "recompute": "all"},
    ),
    "many experts, recomputed": (Training(Crowd), {"device_memory": "1920KiB", **HOST, **DIVIDED, "recompute": "all"}),
}


def decide(names: list[str], folder: Path) -> list[tuple[list[Task], list[Task], list[list[int]], list[list[int]]]]:
    """One rank's part of all of them: its own decisions and pages, and those of a virtual run."""
    found = []
    for name in names:
        training, settings = CASES[name]
        torch.manual_seed(0)
        module, seen = training.build(), Listens()
        trainer = make_trainer(training, make_strategy(folder, **settings), 2, callbacks=[seen])
        trainer.fit(module, loader(tokens(training, 2), 2))
        theirs, pages = in_virtual_run(seen, training.accumulate, recomputed="recompute" in settings)
        found.append((seen.issued, theirs, seen.pages, pages))
    return found


@pytest.mark.parametrize("first", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_decision_by_decision(first: int, disk: Path) -> None:
    """Compares every second case."""
    names = list(CASES)[first::2]
    for found in run_ranks(decide, 2, names, disk, limit_s=300):
        for name, (ours, theirs, pages, virtual) in zip(names, found, strict=True):
            assert ours == theirs, name
            if CASES[name][0].build is Apart:
                assert pages == virtual
            assert {Operation.COMPUTE, Operation.GATHER} <= {each.operation for each in ours}
