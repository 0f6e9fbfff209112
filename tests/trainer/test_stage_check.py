"""The check of pipeline stages: results of one stage beside those of the last one."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Mapping
from typing import Any

import lightning as L
import pytest
import torch
from torch import Tensor

from lightning_ptm.errors import ConfigError
from lightning_ptm.runtime.autograd.stage_cut import AbsentOutput
from lightning_ptm.trainer.stage_check import StageCheck, StageResults


class Module(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.steps = 0


def check(ours: Callable[[StageResults, Module], Any], theirs: Callable[[StageResults, Module], Any]) -> Module:
    """Returns the module after a check of a stage that computes `ours`; the last one computes `theirs`."""
    told: list[StageResults] = []

    def tell(results: StageResults) -> StageResults:
        told.append(results)
        return told[0]

    for compute in (theirs, ours):
        module = Module()
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            StageCheck(module, 2, tell).check(
                lambda results, compute=compute, module=module: compute(results, module), 0
            )  # type: ignore[misc]
    return module


def step(loss: float = 1.0, logged: float = 2.0, **given: Any) -> Callable[[StageResults, Module], Any]:
    def compute(results: StageResults, module: Module) -> Tensor:
        results.see("blocks.0", (AbsentOutput(torch.zeros(2), "embedding"),), given)
        module.steps += 1
        module.log_dict({"log": logged}, prog_bar=True)
        return torch.tensor(loss, requires_grad=True)

    return compute


NO_NUMBERS = {"fill": -math.inf, "scale": math.nan}
X = torch.randn(300, 400, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("given", [{}, {"mask": X}, {"cos_sin": (X, 3), "masks": {"full": X.bfloat16()}}, NO_NUMBERS])
def test_equal_results_pass_and_leave_nothing(given: Mapping[str, Any]) -> None:
    assert check(step(**given), step(**given)).steps == 0
    assert check(step(**given), step(1 + 3e-7, **given)).steps == 0


@pytest.mark.parametrize(
    ("ours", "theirs", "words"),
    [
        (step(1.5), step(), "the loss of a micro-batch is 1.5 here and 1 on the last stage"),
        (step(1 + 1e-5), step(), "the loss of a micro-batch is 1.00001 here"),
        (step(fill=-math.inf), step(fill=0.0), "argument fill of blocks.0 is -inf here and 0 on the last stage"),
        (step(mask=X), step(mask=X.flip(0)), "argument mask of blocks.0 is 300, 400, .* here"),
        (step(mask=X), step(mask=None), "argument mask of blocks.0 is 300, 400, .* here and absent on the last stage"),
        (step(mask=[X, 1]), step(mask=[X, 2]), r"argument mask\[1\] of blocks.0 is 1 here and 2 on the last stage"),
        (step(shared={}), step(shared={"v": X}), r"argument shared\['v'\] of blocks.0 is absent here"),
    ],
)
def test_different_results_are_refused(ours: Any, theirs: Any, words: str) -> None:
    with pytest.raises(
        ConfigError, match=f"pipeline_parallel_size=2 would train something else than Module: .*{words}"
    ):
        check(ours, theirs)


def test_logs_that_differ_are_reported() -> None:
    with pytest.raises(UserWarning, match=r"self.log\('log', ...\) has other values on other stages"):
        check(step(logged=1.0), step(logged=2.0))


def test_it_is_repeated_after_twice_as_many_steps() -> None:
    made = StageCheck(Module(), 2, lambda results: results)
    checked = []
    for steps in range(3000):
        if made.wanted(steps):
            checked.append(steps)
            made.check(lambda results: None, steps)
    assert checked == [0, *(1 << power for power in range(11))]


@pytest.mark.parametrize(("halves", "warns"), [((0.5, 1.5), False), ((0.5, 1.6), True), ((2.0, 2.0), True)])
def test_a_loss_that_is_no_mean_of_its_halves_is_reported(halves: tuple[float, float], warns: bool) -> None:
    made = StageCheck(Module(), 2, lambda results: results)
    computes = [lambda results, loss=loss: torch.tensor([loss]) for loss in (1.0, *halves)]  # type: ignore[misc]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        made.compare_halves(computes, narrow=False)
    assert [f"the mean of its halves' losses {sum(halves) / 2:.6g}" in str(each.message) for each in caught] == [
        True
    ] * warns
