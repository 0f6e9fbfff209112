"""A run that goes on with a checkpoint takes over its groups, as with a plain Trainer, or says what to configure."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from kit.judged import Judged, MakeStrategy, assert_alike, batches, run, trainer

from lightning_ptm.errors import ConfigError


class Plain(Judged):
    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1, fused=True)


class Heavy(Judged):
    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9, fused=True)


class Ams(Judged):
    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-2, amsgrad=True, fused=True)


def saved(build: type[Judged], folder: Path) -> str:
    module = run(build, None)
    path = str(folder / "saved.ckpt")
    module.trainer.save_checkpoint(path)
    return path


def resumed(build: type[Judged], path: str, strategy: Any) -> Judged:
    torch.manual_seed(1)
    module = build()
    trainer(strategy, max_epochs=2).fit(module, batches(), ckpt_path=path)
    return module


@pytest.mark.parametrize("where", ["ram", "all_on_disk"])
def test_momentum_that_a_checkpoint_has_not_is_not_applied(
    where: str, strategy_at: MakeStrategy, tmp_path: Path
) -> None:
    path = saved(Plain, tmp_path)
    assert_alike(resumed(Heavy, path, strategy_at(where)), resumed(Heavy, path, None))


@pytest.mark.parametrize(
    ("before", "after", "reason"),
    [
        (Heavy, Plain, r"the checkpoint's SGD has states momentum_buffer.*saved with momentum=0\.9"),
        (Ams, Judged, r"the checkpoint's AdamW has states max_exp_avg_sq.*saved with amsgrad=True"),
    ],
)
def test_states_without_pages_are_refused_before_the_first_step(
    before: type[Judged], after: type[Judged], reason: str, strategy_at: MakeStrategy, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=reason):
        resumed(after, saved(before, tmp_path), strategy_at("ram"))
