"""`GradNormMonitor`: the norms of a training whose gradients live in pages are those of a plain loop, to the last bit."""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from kit.outcomes import Outcome
from kit.plain_loop import Batches, PlainLoop, make_trainer, outcome_of, tokens
from kit.products import products_of
from kit.stacks import Stack
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import Callback
from torch import Tensor, nn

from lightning_ptm import AngelPTMPrecision
from lightning_ptm.callbacks import GradNormMonitor
from lightning_ptm.update.loss_scale import LossScale


@dataclasses.dataclass(frozen=True)
class NormLoop(PlainLoop):
    """A plain loop that notes what torch's clipping says the norm was before."""

    norms: list[Tensor] = dataclasses.field(default_factory=list)

    def run(self, batches: Batches) -> Outcome:
        """Trains each time: a loop that was trained before has noted nothing."""
        with products_of(self.precision):
            return self.fresh(batches)

    def _clipping(self) -> Callable[[list[Tensor]], object]:
        bound = float("inf") if self.clip is None else self.clip
        return lambda masters: self.norms.append(nn.utils.clip_grad_norm_(masters, bound))


class Collect(Callback):
    """Records what has been logged, and under which name, after each batch."""

    def __init__(self) -> None:
        self.norms: list[Tensor] = []

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *rest: Any) -> None:
        if "gradients/norm" in trainer.callback_metrics:
            self.norms.append(trainer.callback_metrics["gradients/norm"].clone())


def norms_of(strategy: Any, batches: Batches, monitor: GradNormMonitor | None = None, **options: Any) -> Any:
    torch.manual_seed(0)
    collect, module = Collect(), Stack(depth=2)
    monitor = monitor or GradNormMonitor()
    make_trainer(strategy, callbacks=[monitor, collect], **options).fit(module, batches.loader())
    return collect.norms, outcome_of(module)


@pytest.mark.slow_unless(
    "ram-{}",
    "masters_on_disk-{}",
    "all_on_disk-{'gradient_clip_val': 0.5}",
    "three_tiers-{'accumulate_grad_batches': 2}",
    "lock_free-{'gradient_clip_val': 0.5}",
    "lock_free_three_tiers-{}",
    "tight-{'gradient_clip_val': 0.5}",
    "tight_recomputed-{'accumulate_grad_batches': 2}",
)
@pytest.mark.parametrize("options", [{}, {"gradient_clip_val": 0.5}, {"accumulate_grad_batches": 2}], ids=str)
def test_norms_are_those_of_a_plain_loop(strategy_at, tier, options) -> None:
    batches = tokens(4)
    accumulate = options.get("accumulate_grad_batches", 1)
    plain = NormLoop(lambda: Stack(depth=2), accumulate=accumulate, clip=options.get("gradient_clip_val"))
    theirs = plain.run(batches)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        norms, ours = norms_of(strategy_at(tier), batches, **options)
    assert not any("reads .grad" in str(each.message) for each in caught)
    ours.assert_equal(theirs)
    assert len(plain.norms) == 4 // accumulate and all(norm > 0 for norm in plain.norms)
    if accumulate == 1:
        assert torch.equal(torch.stack(norms), torch.stack(plain.norms))
    else:  # a batch without a step still shows the norm of the step before
        assert torch.equal(torch.stack(norms), torch.stack([plain.norms[0], plain.norms[0], plain.norms[1]]))


def test_a_run_that_is_watched_trains_alike(strategy_at) -> None:
    batches = tokens(3)
    _, ours = norms_of(strategy_at("masters_on_disk"), batches)
    torch.manual_seed(0)
    module = Stack(depth=2)
    make_trainer(strategy_at("masters_on_disk")).fit(module, batches.loader())
    ours.assert_equal(outcome_of(module))


def test_the_loss_scale_is_taken_out(strategy_at) -> None:
    """A power of two does not round, so that two scales give the same norm; without scaling back it would be 16 times."""
    found = []
    for init_scale in (2.0**8, 2.0**12):
        plugin = AngelPTMPrecision("16-mixed", LossScale(init_scale=init_scale))
        norms, _ = norms_of(strategy_at("ram"), tokens(1), precision=None, plugins=[plugin])
        found.append(norms[0])
    torch.testing.assert_close(found[0], found[1], rtol=1e-3, atol=0)


def test_every_second_step_and_another_norm(strategy_at) -> None:
    batches = tokens(3)
    every, _ = norms_of(strategy_at("ram"), batches, GradNormMonitor(norm_type=float("inf")))
    second, _ = norms_of(strategy_at("ram"), batches, GradNormMonitor(every_n_steps=2, norm_type=float("inf")))
    assert [second[0], second[1], second[2]] == [every[0], every[0], every[2]] != every
    with pytest.raises(ValueError, match="every_n_steps=0"):
        GradNormMonitor(every_n_steps=0)
