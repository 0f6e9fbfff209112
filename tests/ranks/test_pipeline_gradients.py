"""Hooks between backward and step in pipeline stages: a rank's `.grad` is never taken for the model's gradients."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from kit.ranks.harness import run_ranks
from kit.ranks.pipeline_models import StagedGPT, StagedRun, assert_same, train
from torch import nn

from lightning_ptm.errors import UsageError


class Hooked(StagedGPT):
    """Does something between backward and step."""

    act: Callable[[Hooked, Any], None]

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.act(optimizer)


def reads_the_norm(module: StagedGPT, optimizer: Any) -> None:
    nn.utils.get_total_norm([each.grad for each in module.parameters() if each.grad is not None])


def clips_by_norm(module: StagedGPT, optimizer: Any) -> None:
    nn.utils.clip_grad_norm_(module.parameters(), 0.3)


def clips_by_value(module: StagedGPT, optimizer: Any) -> None:
    nn.utils.clip_grad_value_(module.parameters(), 1e-3)


def clips_the_norm_before_the_head(module: StagedGPT, optimizer: Any) -> None:
    """All ranks have these parameters, and the last stage alone has gradients of them."""
    nn.utils.clip_grad_norm_(module.norm.parameters(), 0.3)


def clips_behind_the_norm(module: StagedGPT, optimizer: Any) -> None:
    """The norm leaves the gradients of parameters of all ranks reduced."""
    module.trainer.strategy.gradient_norm(optimizer)  # type: ignore[attr-defined]
    nn.utils.clip_grad_norm_(module.norm.parameters(), 0.3)


def assigns(module: StagedGPT, optimizer: Any) -> None:
    for each in module.norm.parameters():
        each.grad = torch.ones_like(each, dtype=each.dtype)


READS = (reads_the_norm, clips_by_norm, clips_by_value, clips_the_norm_before_the_head, clips_behind_the_norm)


def answers(how: StagedRun, act: Callable[[Hooked, Any], None], disk: Path) -> str:
    try:
        train(how, disk, model=type("Hooked", (Hooked,), {"act": act}))
    except UsageError as error:
        return str(error)
    except Exception as error:  # the other rank's
        return f"{type(error).__name__}: {error}"
    return "nothing was refused"


def all_answers(how: StagedRun, acts: Sequence[Callable[[Hooked, Any], None]], disk: Path) -> list[str]:
    return [answers(how, act, disk) for act in acts]


@pytest.mark.parametrize(
    ("how", "acts"),
    [
        (StagedRun(2, 2, steps=1), (clips_by_norm,)),
        (StagedRun(2, 2, steps=1, precision="bf16-mixed"), (clips_the_norm_before_the_head,)),
        *(
            pytest.param(StagedRun(2, 2, steps=1, tier=tier, precision=precision), (act,), marks=pytest.mark.slow)
            for tier, precision in (("ram", "64-true"), ("ram", "bf16-mixed"), ("tight", "64-true"))
            for act in READS
        ),
        *(pytest.param(StagedRun(4, 2, steps=1), (act,), marks=pytest.mark.slow) for act in READS),
    ],
)
def test_reads_are_refused(how: StagedRun, acts: Sequence[Callable[[Hooked, Any], None]], disk: Path) -> None:
    found = run_ranks(all_answers, how.ranks, how, acts, disk)
    for of_rank in found:
        assert "nothing was refused" not in of_rank, of_rank
    for act in range(len(acts)):
        told = [of_rank[act] for of_rank in found if "was read, and on several ranks" in of_rank[act]]
        assert told and all("clip with gradient_clip_val or self.clip_gradients" in each for each in told), found


@pytest.mark.parametrize("tier", ["ram", pytest.param("tight", marks=pytest.mark.slow)])
def test_assigned_gradients_are_refused(tier: str, disk: Path) -> None:
    found = run_ranks(answers, 2, StagedRun(2, 2, steps=1, tier=tier), assigns, disk)
    assert any(".grad of norm.weight was assigned, and on several ranks" in each for each in found), found


def in_other_ways(module: StagedGPT, optimizer: Any) -> None:
    """Takes the norm, clips by it, and leaves parameters of a block and of all ranks as they are."""
    vars(module).setdefault("norms", []).append(float(module.trainer.strategy.gradient_norm(optimizer)))  # type: ignore[attr-defined]
    module.clip_gradients(optimizer, gradient_clip_val=0.3, gradient_clip_algorithm="norm")
    module.log("norm", module.norms[-1])


def forgets(module: StagedGPT, optimizer: Any) -> None:
    module.blocks[2].zero_grad()


@pytest.mark.parametrize(
    ("how", "act"),
    [
        (StagedRun(2, 2), in_other_ways),
        *(
            pytest.param(how, act, marks=pytest.mark.slow)
            for how in (StagedRun(2, 2), StagedRun(2, 2, tier="tight"), StagedRun(4, 2))
            for act in (in_other_ways, forgets)
        ),
    ],
)
def test_what_is_not_refused_is_one_ranks(how: StagedRun, act: Callable[[Any, Any], None], disk: Path) -> None:

    (whole,) = run_ranks(partial(_trained, act), 1, dataclasses.replace(how, ranks=1, stages=1, tier="ram"), disk)
    outcomes = run_ranks(partial(_trained, act), how.ranks, how, disk)
    assert_same(outcomes, whole)
    for each in outcomes:
        assert each.metrics.get("norm") == pytest.approx(whole.metrics.get("norm"), abs=1e-9)


def _trained(act: Callable[[Any, Any], None], how: StagedRun, disk: Path) -> Any:
    return train(how, disk, model=type("Hooked", (Hooked,), {"act": act}))
