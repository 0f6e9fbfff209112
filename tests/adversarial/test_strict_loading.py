"""Modules with `strict_loading=False` whose `state_dict` leaves things out, written as Lightning's documentation does."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from kit.judged import Judged, MakeStrategy, assert_alike, batches, trainer
from torch import Tensor, nn

from lightning_ptm import AngelPTMStrategy
from lightning_ptm.errors import UsageError


class LeavesOut(Judged):
    """A frozen part comes from elsewhere, and is in no checkpoint."""

    def __init__(self) -> None:
        super().__init__()
        self.strict_loading = False
        self.frozen = nn.Linear(8, 8)
        self.frozen.requires_grad_(False)

    def loss(self, batch: list[Tensor]) -> Tensor:
        return super().loss([self.frozen(batch[0])])

    def state_dict(self) -> dict[str, Any]:  # type: ignore[override]
        return {name: value for name, value in super().state_dict().items() if not name.startswith("frozen.")}

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW([p for p in self.parameters() if p.requires_grad], lr=1e-2, fused=True)


def saved_and_resumed(path: Path, make: Any) -> LeavesOut:
    module = LeavesOut()

    def save(*_: Any) -> None:
        if module.trainer.global_step == 2:
            module.trainer.save_checkpoint(path)

    module.on_train_batch_end = save  # type: ignore[method-assign]
    torch.manual_seed(0)
    trainer(make()).fit(module, batches())
    assert not any(name.startswith("frozen") for name in torch.load(path, weights_only=False)["state_dict"])
    torch.manual_seed(5)
    resumed = LeavesOut()  # with another frozen part
    trainer(make()).fit(resumed, batches(), ckpt_path=path, weights_only=False)
    return resumed


def test_what_is_left_out_of_a_checkpoint_is_the_modules_own(
    tier: str, strategy_at: MakeStrategy, tmp_path: Path
) -> None:
    torch.manual_seed(1)
    theirs = saved_and_resumed(tmp_path / "theirs.ckpt", lambda: None)
    torch.manual_seed(1)
    ours = saved_and_resumed(tmp_path / "ours.ckpt", lambda: strategy_at(tier))
    assert_alike(ours, theirs)


def test_a_sharded_checkpoint_needs_its_keywords(strategy_at: MakeStrategy, tmp_path: Path) -> None:
    def make() -> AngelPTMStrategy:
        return strategy_at("three_tiers", checkpoints={"state_dict_type": "sharded"})

    with pytest.raises(UsageError, match=r"LeavesOut\.state_dict takes no keywords, .*def state_dict\(self, \*args"):
        saved_and_resumed(tmp_path / "x.ckpt", make)
