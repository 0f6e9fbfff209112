"""Each of several ranks has allocated what its own inventory says when its set-up has ended, to the byte, in every
tier.

Ranks that hold different experts have different rows; the bytes of each are its own.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from kit.ranks.harness import run_ranks
from kit.ranks.models import Tower, Uneven
from kit.ranks.training import Training, loader, make_strategy, make_trainer, tokens
from test_rank_experts import MoETower

from lightning_ptm import AngelPTMStrategy
from lightning_ptm.planning.inventory import Lifetime, Row, pages_of
from lightning_ptm.runtime.engine.engine import Engine
from lightning_ptm.terms import TIERS

DIVIDED = {"units": ["MixtureOfExperts", "Expert"], "expert_parallel_size": 2}
BEHIND = {"checkpoints": {"state_dict_type": "sharded", "async_save": True}}
LOCK_FREE = {"lock_free": {"max_staleness": 4}}
THREE_TIERS = {"device_memory": "2MiB", "host_memory": "64MiB"}


class OneFrozen(Uneven):
    """A flat without master states in the middle."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks[1].requires_grad_(False)


@dataclasses.dataclass(frozen=True)
class Case:
    """One run.

    Attributes:
        tier: of kit.ranks.training.TIERS.
    """

    training: Training
    tier: str
    settings: dict[str, Any] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class Weighed:
    """Bytes of one tier, at one moment."""

    when: str
    tier: str
    pool: int
    rows: int
    taken: int
    rows_held: int


class Weighs(L.Callback):
    """Weighs when set-up has ended, and, with what came with the first gradients, when training has."""

    def __init__(self) -> None:
        self.found: list[Weighed] = []

    def _weigh(self, when: str, engine: Engine, rows: Sequence[Row]) -> None:
        inventory = engine.blueprint.inventory
        for tier in TIERS:
            pool = engine.allocator.capacity_bytes(tier)
            held = pages_of((row for row in rows if row.tier is tier), inventory.page_size) * inventory.page_size
            taken = pool - engine.allocator.free_bytes(tier)
            self.found.append(Weighed(when, tier.name, pool, inventory.pool_bytes(tier), taken, held))

    def on_fit_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        engine = _engine(trainer)
        rows = [row for row in engine.blueprint.inventory.rows if row.lifetime is Lifetime.RUN]
        self._weigh("after set-up", engine, rows)

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        engine = _engine(trainer)
        engine.drain("weigh")
        engine.executor.release_all()
        engine._in_flight.release(True)
        # An expert that no token has come to has had no gradient.
        later = (Lifetime.RUN, Lifetime.FIRST_GRADIENT)
        had = {flat.store.layout.index for of in engine.flats for flat in of if flat.gradient.shard.pages is not None}
        kept = [row for row in engine.blueprint.inventory.rows if row.lifetime in later]
        kept = [row for row in kept if row.lifetime is Lifetime.RUN or row.flat in had]
        self._weigh("after training", engine, kept)


def _engine(trainer: L.Trainer) -> Engine:
    strategy = trainer.strategy
    assert isinstance(strategy, AngelPTMStrategy)
    return strategy.engine


def weigh(case: Case, world_size: int, folder: Path) -> list[Weighed]:
    """One rank's part."""
    torch.manual_seed(0)
    module = case.training.build()
    weighs = Weighs()
    strategy = make_strategy(folder, case.tier, **case.settings)
    trainer = make_trainer(case.training, strategy, world_size, callbacks=[weighs])
    trainer.fit(module, loader(tokens(case.training, world_size), world_size))
    return weighs.found


def weigh_all(cases: list[Case], world_size: int, folder: Path) -> list[list[Weighed]]:
    """One after the other: starting ranks takes as long as a training."""
    return [weigh(case, world_size, folder) for case in cases]


MIXED, TRUE = "bf16-mixed", "32-true"


def cases(build: Callable[[], Tower], more: dict[str, Any]) -> dict[str, Case]:
    """Settings and combinations of them, by name."""

    def case(precision: str, tier: str, clip: float | None = None, accumulate: int = 1, **settings: Any) -> Case:
        training = Training(build, precision, batches=accumulate, clip=clip, accumulate=accumulate)
        return Case(training, tier, {**more, **settings})

    return {
        "ram": case(MIXED, "ram"),
        "updates behind the backward": case(MIXED, "all_on_disk"),
        "updates at the step, saves behind": case(MIXED, "all_on_disk", 0.5, **BEHIND),
        "gradients later": case(TRUE, "three_tiers"),
        "gradients kept": case(MIXED, "three_tiers", 0.5),
        "sums of gradients": case(MIXED, "masters_on_disk", None, 2, **BEHIND),
        "reduced once": case(TRUE, "all_on_disk", None, 2, tuning={"reduce_gradients": "each_step"}),
        "lock-free": case(MIXED, "ram", **LOCK_FREE),
        "lock-free, saves behind": case(TRUE, "ram", 0.5, **LOCK_FREE, **BEHIND),
        "lock-free, three tiers, saves behind": case(MIXED, "ram", 0.5, **LOCK_FREE, **THREE_TIERS, **BEHIND),
        "lock-free sums": case(MIXED, "ram", None, 2, **LOCK_FREE, **THREE_TIERS),
    }


def every_third(named: dict[str, Case], first: int) -> dict[str, Case]:
    """From the first (0), the second (1) or the third (2) on."""
    return dict(list(named.items())[first::3])


@pytest.mark.slow_unless("whole")
@pytest.mark.parametrize(
    ("build", "more", "third"),
    [
        pytest.param(OneFrozen, {}, 0, id="whole"),
        *(pytest.param(OneFrozen, {}, third, id=f"whole, {third}", marks=pytest.mark.slow) for third in (1, 2)),
        pytest.param(MoETower, DIVIDED, 1, id="divided"),
        *(pytest.param(MoETower, DIVIDED, third, id=f"divided, {third}", marks=pytest.mark.slow) for third in (0, 2)),
    ],
)
def test_two_ranks(build: Callable[[], Tower], more: dict[str, Any], third: int, disk: Path) -> None:
    named = every_third(cases(build, more), third)
    wrong = []
    for rank, found in enumerate(run_ranks(weigh_all, 2, list(named.values()), 2, disk, limit_s=300)):
        for name, weighed in zip(named, found, strict=True):
            assert len(weighed) == 2 * len(TIERS)
            wrong += [(rank, name, each) for each in weighed if (each.pool, each.taken) != (each.rows, each.rows_held)]
    assert not wrong, "\n".join(map(str, wrong))
