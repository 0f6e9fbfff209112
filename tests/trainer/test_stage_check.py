"""The check of pipeline stages: results of one stage beside those of the last one."""

from __future__ import annotations

import math
import warnings
import weakref
from collections.abc import Callable, Mapping
from typing import Any

import lightning as L
import pytest
import torch
from torch import Tensor

from lightning_ptm.errors import ConfigError, UsageError
from lightning_ptm.runtime.autograd.stage_cut import AbsentOutput, StageEnds
from lightning_ptm.trainer.batch_steps import CheckSchedule
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
            StageCheck(module, 2, tell, CheckSchedule()).check(
                lambda results, _end, compute=compute, module=module: compute(results, module), 0
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
    made = StageCheck(Module(), 2, lambda results: results, CheckSchedule())
    checked = []
    for steps in range(3000):
        if made.wanted(steps):
            checked.append(steps)
            made.check(lambda results, blocks_end: None, steps)
    assert checked == [0, *(1 << power for power in range(11))]


@pytest.mark.parametrize(("halves", "warns"), [((0.5, 1.5), False), ((0.5, 1.6), True), ((2.0, 2.0), True)])
def test_a_loss_that_is_no_mean_of_its_halves_is_reported(halves: tuple[float, float], warns: bool) -> None:
    made = StageCheck(Module(), 2, lambda results: results, CheckSchedule())
    computes = [lambda results, _end, loss=loss: torch.tensor([loss]) for loss in (1.0, *halves)]  # type: ignore[misc]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        made.compare_halves(computes, narrow=False)
    assert [f"the mean of its halves' losses {sum(halves) / 2:.6g}" in str(each.message) for each in caught] == [
        True
    ] * warns


class Counter:
    def __init__(self) -> None:
        self.steps = 0


class Leaves(Module):
    """A step that leaves something before the last block and behind it."""

    def __init__(self, leave: Callable[[Leaves], Any]) -> None:
        super().__init__()
        self.leave = leave
        self.counter = Counter()
        self.lengths: list[int] = []
        self.noise = torch.Generator().manual_seed(0)
        self.register_buffer("average", torch.zeros(2))
        self.blocks = torch.nn.ModuleList([torch.nn.Linear(2, 2)])
        self.loss = 0.0

    def step(self, results: StageResults, blocks_end: Callable[[], None]) -> Tensor:
        given = self.leave(self)
        results.see("blocks.0", (torch.zeros(2), given), {})
        blocks_end()
        self.loss += 1.0
        return torch.tensor(1.0)


def count_block(module: Leaves) -> None:
    module.blocks[0].calls = getattr(module.blocks[0], "calls", 0) + 1  # type: ignore[assignment]


CALLS = iter((1, 2))

LEAVES: dict[str, tuple[Callable[[Leaves], Any], str]] = {
    "a number": (lambda module: setattr(module, "steps", module.steps + 1), "leaves another value in steps each time"),
    "an object": (lambda module: setattr(module.counter, "steps", 5 + module.counter.steps), "value in counter.steps"),
    "a list": (lambda module: module.lengths.append(7), "another value in lengths each time"),
    "a buffer": (lambda module: module.average.add_(1e-3), "another value in average each time"),
    "a generator": (lambda module: torch.rand((), generator=module.noise), "another value in noise each time"),
    "arguments": (
        lambda module: next(CALLS),
        r"other arguments each time \(argument 1 of blocks.0 is 1, then 2\)",
    ),
}


@pytest.mark.parametrize("name", LEAVES)
def test_what_counts_runs_of_blocks_is_refused(name: str) -> None:
    leave, words = LEAVES[name]
    module = Leaves(leave)
    made = StageCheck(module, 2, lambda results: results, CheckSchedule(), module.blocks, "interleaved")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=f"pipeline_schedule='interleaved' would train something else .*{words}"):
        made.check(lambda results, blocks_end: unless_ended(module, results, blocks_end), 0)
    assert (module.steps, module.counter.steps, module.lengths, module.loss) == (0, 0, [], 0.0)


@pytest.mark.parametrize("leave", [lambda module: setattr(module, "steps", 3), count_block])
def test_what_does_not_is_not(leave: Callable[[Leaves], Any]) -> None:
    module = Leaves(leave)
    made = StageCheck(module, 2, lambda results: results, CheckSchedule(), module.blocks, "interleaved")  # type: ignore[arg-type]
    made.check(lambda results, blocks_end: unless_ended(module, results, blocks_end), 0)


def unless_ended(module: Leaves, results: StageResults, blocks_end: Callable[[], None]) -> Tensor | None:
    """Returns the loss of a step; None if it ends with the blocks."""
    try:
        return module.step(results, blocks_end)
    except StageEnds:
        return None


def test_a_check_keeps_nothing_that_autograd_saves() -> None:
    """So it takes less memory than a forward that trains."""
    saved: list[weakref.ref[Tensor]] = []
    weight = torch.ones(4, requires_grad=True)

    def compute(results: StageResults, blocks_end: Callable[[], None]) -> Tensor:
        middle = weight.exp()  # autograd saves its result
        saved.append(weakref.ref(middle))
        loss = middle.sin().sum()
        del middle
        assert saved[0]() is None and loss.requires_grad
        with pytest.raises(UsageError, match="pipeline stages compute one micro-batch without any"):
            loss.backward()
        return loss

    StageCheck(Module(), 2, lambda results: results, CheckSchedule()).check(compute, 0)
