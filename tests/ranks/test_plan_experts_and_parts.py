"""`lightning-ptm plan` against runs whose ranks divide experts and cut layers at once: what each sharing class takes of each
tier, what is taken in all, and what travels of tokens and of activations."""

from __future__ import annotations

import dataclasses
import os
import warnings
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import test_plan_and_ranks as of_experts
import test_tensor_parallel_plan as of_parts
import torch
from kit.planned_runs import LIMITS, NEAR, forecast_of, make_trainer
from kit.ranks.harness import run_ranks

from lightning_ptm.data import SpanCorruption
from lightning_ptm.models import T5MoE
from lightning_ptm.planning.inventory import Row
from lightning_ptm.planning.layout import round_up
from lightning_ptm.planning.mesh import Axis
from lightning_ptm.runtime.deciding.blueprint import Blueprint
from lightning_ptm.runtime.engine.engine import Engine
from lightning_ptm.terms import BLOCK_BYTES, Link

SIZES = {**of_experts.MODEL, "vocab_size": 300, "capacity_factor": 4.0}
"""Every token has room."""
BOTH = {"expert_parallel_size": 2, "tensor_parallel_size": 2, "units": ["Block", "Expert"], **LIMITS}
RUNS: dict[str, dict[str, Any]] = {
    "in RAM": BOTH,
    "three tiers, recomputed": {**BOTH, **of_experts.THREE, "device_memory": "8MiB", "recompute": "all"},
    "three tiers, narrow": {**BOTH, **of_experts.THREE},
}
STEPS = 2

Taken = dict[tuple[str, str, str], int]
"""By what it is for, the tier and the sharing class: bytes of one rank, in whole blocks."""


def by_class(blueprint: Blueprint, rows: Sequence[Row]) -> Taken:
    """Adds up bytes of flats by kind, tier, and class of sharing: the axes along which its ranks differ."""
    found: Counter[tuple[str, str, str]] = Counter()
    for row in rows:
        if row.flat is not None:
            axes = blueprint.holders.of_flat(blueprint.layout.flats[row.flat]).axes
            found[row.what.value, row.tier.name, " ".join(axis.name for axis in axes)] += row.bytes_each * row.count
    return dict(found)


def unnumbered(rows: Sequence[Row]) -> list[Row]:
    """Each member of a group has other experts."""
    return [dataclasses.replace(row, unit=None, name="") for row in rows]


@dataclass(frozen=True)
class Measured:
    """One rank's.

    Attributes:
        homes: parameters of stores, by the tier where they are and the sharing class.
        taken: what its inventory, by which set-up takes pages, has of each class.
        rows: all of that; pages: bytes at the peak, by tier.
        tokens, activations: that it sent in the last step.
        exchanges: of activations in it; rounds: of it.
    """

    homes: dict[tuple[str, str], int]
    taken: Taken
    rows: tuple[Row, ...]
    pages: dict[str, int]
    tokens: float
    activations: float
    exchanges: int
    rounds: int


def homes(engine: Engine) -> dict[tuple[str, str], int]:
    """Bytes of the pages in which parameters are, in whole blocks."""
    found: Counter[tuple[str, str]] = Counter()
    for store in engine.stores:
        for flat in store.flats:
            axes = engine.blueprint.holders.of_flat(flat.layout).axes
            size = round_up(flat.home.numel * flat.home.dtype.itemsize, BLOCK_BYTES)
            found[flat.home.tier.name, " ".join(axis.name for axis in axes)] += size
    return dict(found)


class Looks(L.Callback):
    def on_train_end(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        engine: Engine = trainer.strategy.engine  # type: ignore[attr-defined]
        blueprint = engine.blueprint
        self.found = homes(engine), by_class(blueprint, blueprint.inventory.rows), blueprint.inventory.rows


def train(disk: str, data: Mapping[str, Any], runs: Sequence[Mapping[str, Any]]) -> list[Measured]:
    """One rank's part of several trainings, one after the other."""
    found = []
    for settings in runs:
        tokens, activations, looks = of_experts.Watch(), of_parts.Watch(), Looks()
        trainer = make_trainer({**settings, "disk_path": disk}, STEPS, tokens, int(os.environ["WORLD_SIZE"]))
        trainer.callbacks += [activations, looks]  # type: ignore[attr-defined]
        torch.manual_seed(0)
        with warnings.catch_warnings(), tokens.counting(), activations.counting():
            warnings.simplefilter("ignore")
            trainer.fit(T5MoE(**SIZES), datamodule=SpanCorruption(**data))
        cut = activations.measured
        found.append(Measured(*looks.found, cut.pages, tokens.measured.sent, cut.sent, cut.exchanges, cut.rounds))
    return found


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_bytes_are_those_of_the_run(disk: Path, tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_bytes(bytes(range(256)) * 256)
    data = {"path": str(text), "sequence_length": of_experts.LENGTH, "batch_size": of_experts.BATCH}
    described = (
        {"class_path": "lightning_ptm.models.T5MoE", "init_args": SIZES},
        {"class_path": "lightning_ptm.data.SpanCorruption", "init_args": data},
    )
    measured = run_ranks(train, 4, str(disk), data, list(RUNS.values()), limit_s=240)
    for place, (name, settings) in enumerate(RUNS.items()):
        found, blueprint = forecast_of(tmp_path, {**settings, "disk_path": str(disk)}, STEPS, *described, ranks=4)
        assert found.fits and found.timing is not None
        rows = blueprint.inventory.rows
        pages = {tier: plan.page_bytes for tier, plan in found.tiers.items()}
        # What is everybody's, parts of that, experts, and their parts (experts have nothing whole here).
        assert {axes for _, _, axes in by_class(blueprint, rows)} == {"EXPERT TENSOR", "EXPERT", ""}
        links = {use.link: use.bytes for use in found.timing.links}
        collectives = {use.link: use.collectives for use in found.timing.links}
        for of_rank in (run[place] for run in measured):
            assert unnumbered(of_rank.rows) == unnumbered(rows), name
            assert of_rank.taken == by_class(blueprint, rows), name
            in_classes = {
                (tier, axes): size for (what, tier, axes), size in of_rank.taken.items() if what == "parameters"
            }
            assert of_rank.homes == in_classes, name
            assert pages == pytest.approx(of_rank.pages, rel=NEAR), name
            assert collectives[Link.TENSOR_EXCHANGE] == of_rank.exchanges, name
            assert found.timing.rounds == pytest.approx(of_rank.rounds, rel=0.05), name
        # How many tokens come to a rank depends on routers: in a group, as many in all as are sent.
        for ranks in blueprint.holders.mesh.groups([Axis.EXPERT]):
            of_group = [measured[rank][place] for rank in ranks]
            assert links[Link.EXCHANGE] == pytest.approx(sum(each.tokens for each in of_group) / 2, rel=NEAR), name
            activations = sum(each.activations for each in of_group) / 2
            assert links[Link.TENSOR_EXCHANGE] == pytest.approx(activations, rel=NEAR), name
