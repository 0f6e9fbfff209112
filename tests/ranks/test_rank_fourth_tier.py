"""On several ranks too, a tier that the package does not know has its part of the shards, and the numbers are the same."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import lightning as L
import torch
from kit.outcomes import Outcome
from kit.ranks.harness import run_ranks
from kit.ranks.models import Tower
from kit.ranks.training import Training, fit, loader, make_trainer, outcome_of, tokens

from lightning_ptm import AngelPTMStrategy
from lightning_ptm.terms import Link, Tier

PAGE = 64 * 1024
SLOW = Tier("SLOW", "in the second memory", 1.5, "its pages", toward=Tier.HOST, link_toward=Link.HOST_TO_DEVICE)
"""Updates stream what lies there through RAM."""
TRAINING = Training(Tower, "bf16-mixed", accumulate=2)


class WithSlow(AngelPTMStrategy):
    def further_tiers(self) -> Mapping[Tier, int]:
        return {SLOW: 40 * PAGE}


class AtHome(L.Callback):
    """Records which states are in that tier, and whether anything is on disk."""

    def on_train_end(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        assert isinstance(trainer.strategy, WithSlow)
        rows = trainer.strategy.states_at_home()
        self.slow = {row.states for row in rows if row.tier == "slow"}
        self.tiers = {row.tier for row in rows}


def both(folder: Path, pages: int) -> tuple[Outcome, Outcome, set[str], set[str]]:
    in_ram = fit(TRAINING, 2, folder)
    torch.manual_seed(0)
    module, at_home = TRAINING.build(), AtHome()
    strategy = WithSlow(page_size="64KiB", debug={"poison": True}, host_memory=pages * PAGE)
    trainer = make_trainer(TRAINING, strategy, 2, callbacks=[at_home])
    trainer.fit(module, loader(tokens(TRAINING, 2), 2))
    return in_ram, outcome_of(module), at_home.slow, at_home.tiers


def test_shards_in_a_further_tier(disk: Path) -> None:
    for in_ram, ours, slow, tiers in run_ranks(both, 2, disk, 24):
        ours.assert_equal(in_ram)
        assert slow == {"parameters", "gradients", "master parameters", "optimizer states"}
        assert tiers == {"host", "slow"}
