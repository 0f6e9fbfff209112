"""Fetches, evictions and pages of a run are those of its virtual run, from the first iteration to the last."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from kit.decisions import Listens, in_virtual_run, up_to_last_compute
from kit.models import Block
from kit.plain_loop import TrainModule, fit, vectors
from test_micro_batches import IN_FLIGHT, Staged
from torch import Tensor, nn

from lightning_ptm import AngelPTMStrategy
from lightning_ptm.terms import Operation

STEPS = 5


class Tower(TrainModule):
    """A root of one page and four blocks of five pages."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(32, 128)
        self.blocks = nn.ModuleList(Block(128) for _ in range(4))
        self.last = nn.Linear(128, 1)

    def order(self, index: int) -> tuple[int, ...]:
        return (0, 1, 2, 3)

    def between(self, value: Tensor) -> Tensor:
        return value

    def loss(self, batch: Tensor, index: int) -> Tensor:
        value = self.first(batch)
        for block in self.order(index):
            value = self.between(self.blocks[block](value))
        return self.last(value).float().pow(2).mean()


class Apart(Tower):
    """Between two blocks comes something else, so a block's backward has ended when the next one begins, as in a virtual
    run. Else both come of the same gradient, and who is first counts where room is short, and for the pages of a tick."""

    def between(self, value: Tensor) -> Tensor:
        return value.sin()


class Changing(Apart):
    """Another order from the fourth step on."""

    def order(self, index: int) -> tuple[int, ...]:
        return (0, 1, 2, 3) if index < 3 else (2, 0, 3, 1)


class Frozen(Tower):
    """Two blocks that codes may have, and two that may be views of their homes where these are in RAM."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks[1:3].requires_grad_(False)

    def make_optimizer(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW([each for each in self.parameters() if each.requires_grad], lr=1e-2, fused=True)


class InFlight(Staged):
    width = 128

    def __init__(self) -> None:
        super().__init__(IN_FLIGHT)


HOST: dict[str, Any] = {"offload_parameters": "host", "offload_optimizer": "host"}
NARROW: dict[str, Any] = {"device_memory": "1536KiB", **HOST}
RUNS: dict[str, tuple[type[TrainModule], dict[str, Any]]] = {
    "in RAM": (Tower, {}),
    "all at once": (Tower, {"device_memory": "4MiB", **HOST}),
    "narrow": (Tower, NARROW),
    "narrower": (Tower, {"device_memory": "1088KiB", **HOST}),
    "recomputed": (Tower, {**NARROW, "recompute": "all"}),
    "accumulated": (Tower, {**NARROW, "accumulate_grad_batches": 2}),
    "clipped": (Tower, {**NARROW, "gradient_clip_val": 1.0}),
    "apart, all at once": (Apart, {"device_memory": "4MiB", **HOST}),
    "apart, accumulated": (Apart, {**NARROW, "accumulate_grad_batches": 2}),
    "apart, masters on disk": (Apart, {**NARROW, "offload_optimizer": "disk"}),
    "another order": (Changing, NARROW),
    "another order, narrower": (Changing, {"device_memory": "1088KiB", **HOST}),
    "another order, clipped": (Changing, {"device_memory": "1088KiB", **HOST, "gradient_clip_val": 1.0}),
    "frozen in codes": (Frozen, {"frozen_dtype": "nf4"}),
    "frozen in codes, narrower": (Frozen, {"frozen_dtype": "nf4", "host_memory": "3MiB"}),
    "frozen in codes, narrow": (Frozen, {**NARROW, "frozen_dtype": "int8"}),
    "frozen in codes on disk": (Frozen, {"frozen_dtype": "nf4", "offload_parameters": "disk"}),
    "in flight": (InFlight, {"device_memory": "2MiB", **HOST}),
    "masters on disk": (Tower, {**NARROW, "offload_optimizer": "disk"}),
    "all on disk": (Tower, {**NARROW, "offload_parameters": "disk", "offload_optimizer": "disk"}),
    "lock-free": (Tower, {"device_memory": "1536KiB", "offload_parameters": "host", "lock_free": True}),
    "lock-free in RAM": (Tower, {"lock_free": True}),
}
OF_TRAINER = ("gradient_clip_val", "accumulate_grad_batches")


@pytest.mark.slow_unless(
    "recomputed",
    "clipped",
    "apart, all at once",
    "apart, accumulated",
    "apart, masters on disk",
    "another order",
    "another order, narrower",
    "frozen in codes",
    "frozen in codes, narrower",
    "frozen in codes on disk",
    "masters on disk",
    "all on disk",
    "lock-free in RAM",
)
@pytest.mark.parametrize("name", RUNS)
def test_decision_by_decision(disk: Path, name: str) -> None:
    kind, given = RUNS[name]
    options = {key: value for key, value in given.items() if key in OF_TRAINER}
    settings = {key: value for key, value in given.items() if key not in options}
    if "disk" in settings.values() or "lock_free" in settings:
        settings["disk_path"] = disk
    batches = vectors(STEPS, 4, 3, 32) if kind is InFlight else vectors(STEPS, 8, 32)
    seen = Listens()
    strategy = AngelPTMStrategy(page_size="64KiB", units=["Block"], **settings)
    fit(kind, batches, strategy, "32-true", callbacks=[seen], **options)
    ours = up_to_last_compute(seen.issued)
    theirs, pages = in_virtual_run(seen, options.get("accumulate_grad_batches", 1))
    if kind is InFlight:  # manual optimization reads the root behind the step
        ours, theirs = ([each for each in issued if each.unit] for issued in (ours, theirs))
    assert ours == theirs
    if issubclass(kind, Apart) or "RAM" in name:
        assert seen.pages == pages
    moved = {each.operation for each in seen.issued}
    assert moved == ({Operation.COMPUTE} if "RAM" in name else {Operation.COMPUTE, Operation.FETCH, Operation.RELEASE})
