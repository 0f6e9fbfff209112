"""Under tensor parallelism, callbacks do what they do with as many ranks as there are different batches, or are refused by
name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from kit.ranks.harness import End, run_ranks, watch_ranks
from kit.ranks.tensor_blocks import Blocks, is_whole, loader, module_of, trainer_of, weights_of
from lightning.pytorch.callbacks import (
    Callback,
    DeviceStatsMonitor,
    EMAWeightAveraging,
    GradientAccumulationScheduler,
    LearningRateFinder,
    LearningRateMonitor,
    ModelCheckpoint,
    ModelSummary,
    StochasticWeightAveraging,
)
from lightning.pytorch.loggers import CSVLogger

from lightning_ptm.callbacks import GradNormMonitor, PageMonitor, PageTracer, PlanPrinter, Throughput


class Logged(Callback):
    """Records what was logged last, and the tokens that a step counts."""

    def __init__(self) -> None:
        self.found: dict[str, float] = {}

    def on_train_batch_end(self, trainer: L.Trainer, *_: Any) -> None:
        self.found.update({name: float(value) for name, value in trainer.callback_metrics.items()})


class Told(ModelSummary):
    """Keeps what it prints: names, numbers of parameters, and their totals."""

    told: tuple[Any, ...] = ()

    def summarize(self, data: Any, total: int, trainable: int, size: float, *_: Any, **__: Any) -> None:  # type: ignore[override]
        named = dict(data)
        self.told = named["Name"], named["Params"], total, trainable, size


class Rated(Throughput):
    """Keeps how many samples it has counted."""

    counted = 0

    def _numbers(self, *given: Any, **named: Any) -> dict[str, float]:
        numbers = super()._numbers(*given, **named)
        self.counted += self._ends[-1].samples
        return numbers


def watched(ranks: int, tensor: int, root: Path) -> dict[str, Any]:
    module, logged, rated, summary = module_of(), Logged(), Rated(), Told(max_depth=2)
    module.blocks[0].project.bias.requires_grad_(False)
    others = [
        GradientAccumulationScheduler({1: 2}),
        LearningRateMonitor("step"),
        DeviceStatsMonitor(cpu_stats=False),
        summary,
        GradNormMonitor(),
        PageMonitor(),
        PageTracer(),
        PlanPrinter(),
    ]
    trainer = trainer_of(
        ranks,
        tensor,
        max_epochs=2,
        callbacks=[*others, rated, logged],
        logger=CSVLogger(root),
        log_every_n_steps=1,
        default_root_dir=root,
        enable_model_summary=True,
    )
    trainer.fit(module, loader(8 * (ranks // tensor), shuffle=False))
    assert is_whole(module)
    return {
        "norm": logged.found["gradients/norm"],
        "samples": rated.counted,
        "summary": summary.told,
        "parameters": rated._parameters,
        "steps": trainer.global_step,
        "weights": weights_of(module),
    }


def test_callbacks_see_what_they_see_on_one_rank(tmp_path: Path) -> None:
    (whole,) = run_ranks(watched, 1, 1, 1, tmp_path / "whole")
    first, second = run_ranks(watched, 2, 2, 2, tmp_path / "cut")
    for found in (first, second):
        assert found["norm"] == pytest.approx(whole["norm"], rel=1e-9)
        assert (found["samples"], found["steps"]) == (whole["samples"], whole["steps"]) == (16, 6)
        for name, value in whole["weights"].items():
            torch.testing.assert_close(found["weights"][name], value, rtol=0, atol=1e-11, msg=name)
        assert found["parameters"] == whole["parameters"]
    assert first["summary"] == whole["summary"] and whole["summary"][2] == 2 * (2 * 16 * 64 + 64 + 16)


def averaging(kind: str) -> None:
    callbacks: dict[str, Callback] = {
        "EMAWeightAveraging": EMAWeightAveraging(),
        "StochasticWeightAveraging": StochasticWeightAveraging(1e-2),
    }
    trainer_of(2, 2, callbacks=[callbacks[kind]]).fit(module_of(), loader(4))


@pytest.mark.parametrize("kind", ["EMAWeightAveraging", "StochasticWeightAveraging"])
def test_averages_of_weights_are_refused_by_name(kind: str) -> None:
    for each in watch_ranks(averaging, 2, kind):
        assert each.end is End.RAISED, each
        assert f"ConfigError: {kind} averages the weights of one rank" in each.error
        assert "tensor_parallel_size=1" in each.error


class Finding(Blocks):
    def __init__(self) -> None:
        super().__init__()
        self.lr = 1e-2

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), lr=self.lr)


def rate_found(ranks: int, tensor: int) -> tuple[float, dict[str, torch.Tensor]]:
    torch.manual_seed(0)
    module = Finding()
    finds = LearningRateFinder(num_training_steps=20, early_stop_threshold=None)
    trainer = trainer_of(ranks, tensor, callbacks=[finds], enable_checkpointing=False)
    trainer.fit(module, loader(48))
    return module.lr, weights_of(module)


def test_a_learning_rate_is_found_as_on_one_rank() -> None:
    ((lr, weights),) = run_ranks(rate_found, 1, 1, 1)
    for ours, found in run_ranks(rate_found, 2, 2, 2):
        assert ours == pytest.approx(lr, rel=1e-6)
        for name, value in weights.items():
            torch.testing.assert_close(found[name], value, rtol=0, atol=1e-8, msg=name)


def resumed_by_itself(folder: Path, epochs: int) -> tuple[int, dict[str, torch.Tensor]]:
    """`resume="auto"`: the steps of this fit, and what it has learnt in all."""
    module = module_of()
    saves = ModelCheckpoint(folder, save_last=True)
    options = {"max_epochs": epochs, "callbacks": [saves], "enable_checkpointing": True}
    trainer_of(2, 2, {"checkpoints": {"resume": "auto"}}, **options).fit(module, loader(8))
    return len(module.losses), weights_of(module)


def test_a_fit_that_is_started_again_goes_on_from_the_newest_checkpoint(tmp_path: Path) -> None:
    ((_, whole), _) = run_ranks(resumed_by_itself, 2, tmp_path / "whole", 2)
    run_ranks(resumed_by_itself, 2, tmp_path / "again", 1)
    for steps, found in run_ranks(resumed_by_itself, 2, tmp_path / "again", 2):
        assert steps == 4
        assert all(torch.equal(found[name], value) for name, value in whole.items())
