"""Comparison of a training with Lightning's own DDP and with the strategy, on the same ranks. DDP is right."""

from __future__ import annotations

import dataclasses
import traceback
import warnings
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import lightning as L
import torch
import torch.distributed as dist
from lightning.pytorch.strategies import DDPStrategy
from torch import Tensor

from kit.ranks.models import Tower
from kit.ranks.training import TIMEOUT_S, Training, loader, make_strategy, make_trainer, tokens


class Judge(DDPStrategy):
    """Reduces gradients in a group of its own: where ranks use different units, a collective of the user's in the backward
    pass would come before a bucket on one rank and behind it on another, and DDP itself would hang."""

    def __init__(self) -> None:
        super().__init__(find_unused_parameters=True, timeout=timedelta(seconds=TIMEOUT_S))

    def _setup_model(self, model: Any) -> Any:
        self._ddp_kwargs["process_group"] = dist.new_group()
        return super()._setup_model(model)


Run = Callable[[L.Trainer, Tower, Any], None]


def fits(trainer: L.Trainer, module: Tower, data: Any) -> None:
    trainer.fit(module, data, data)


@dataclasses.dataclass(frozen=True)
class Case:
    """A run to compare, and its model; the module's `seen` is compared, too.

    Attributes:
        tiers: where model states live, one run each.
        settings: of the strategy; options: of the Trainer.
        tolerance: how far values may be apart: more than two ranks add gradients up in another order.
    """

    build: Callable[[], Tower]
    tiers: Sequence[str] = ("ram",)
    settings: dict[str, Any] = dataclasses.field(default_factory=dict)
    options: dict[str, Any] = dataclasses.field(default_factory=dict)
    run: Run = fits
    batches: int = 3
    tolerance: float = 0.0


class Sees(Tower):
    """A tower that notes what it saw."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[Tensor] = []

    def note(self, value: Tensor) -> None:
        self.seen.append(value.detach().clone())


def differences(case: Case, world_size: int, folder: str) -> dict[str, str]:
    """By tier, what differs from DDP on this rank; empty where nothing does."""
    theirs = _run(case, world_size, Judge())
    told = {}
    for tier in case.tiers:
        try:
            ours = _run(case, world_size, make_strategy(folder, tier, **case.settings))
            told[tier] = _difference(ours, theirs, case.tolerance)
        except Exception:
            told[tier] = traceback.format_exc()
            break  # the other ranks may be anywhere
    return {tier: text for tier, text in told.items() if text}


def all_differences(cases: Sequence[Case], world_size: int, folder: str) -> list[dict[str, str]]:
    found = []
    for case in cases:
        found.append(differences(case, world_size, folder))
        if found[-1]:
            break
    return found


def _run(case: Case, world_size: int, strategy: Any) -> dict[str, list[Tensor]]:
    training = Training(case.build, batches=case.batches)
    torch.manual_seed(0)
    module = case.build()
    options = dict(case.options)
    training = dataclasses.replace(training, precision=options.pop("precision", training.precision))
    trainer = make_trainer(training, strategy, world_size, **options)
    data = loader(tokens(training, world_size), world_size)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        case.run(trainer, module, data)
    weights = {name: [parameter.detach().clone()] for name, parameter in module.named_parameters()}
    return {
        "losses": module.losses,
        "validation": module.validation_losses,
        "seen": getattr(module, "seen", []),
        **weights,
    }


def _difference(ours: dict[str, list[Tensor]], theirs: dict[str, list[Tensor]], tolerance: float) -> str:
    assert ours.keys() == theirs.keys()
    for name in theirs:
        if len(ours[name]) != len(theirs[name]):
            return f"{name}: {len(ours[name])} and {len(theirs[name])}"
        for place, pair in enumerate(zip(ours[name], theirs[name], strict=True)):
            if not torch.equal(*pair) and not _near(*pair, tolerance):
                return f"{name} {place}: {pair[0].flatten()[:4]} and {pair[1].flatten()[:4]}"
    return ""


def _near(one: Tensor, other: Tensor, tolerance: float) -> bool:
    return tolerance > 0 and one.dtype == other.dtype and torch.allclose(one, other, rtol=0, atol=tolerance)


def ending(case: Case, world_size: int, folder: str) -> str:
    """Type and text of the error that a run with the strategy ends with on this rank."""
    try:
        _run(case, world_size, make_strategy(folder, case.tiers[0], **case.settings))
    except (Exception, SystemExit) as error:
        return f"{type(error).__name__}: {error}"
    return "passed"


def endings(cases: Sequence[Case], world_size: int, folder: str) -> list[str]:
    return [ending(case, world_size, folder) for case in cases]


def run_cases(cases: Sequence[Case], world_size: int, folder: Path) -> None:
    """In one start of ranks."""
    from kit.ranks.harness import run_ranks

    for rank, found in enumerate(run_ranks(all_differences, world_size, cases, world_size, str(folder), limit_s=240.0)):
        for case, difference in zip(cases, found, strict=False):
            assert not difference, f"rank {rank}, {case.build}: " + "\n".join(map(": ".join, difference.items()))
        assert len(found) == len(cases)
