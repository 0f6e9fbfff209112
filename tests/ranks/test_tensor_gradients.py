"""Gradients of a tensor group's parts, which no other rank has a part of: with everything in RAM they stay in `.grad` until
the step, as on one rank, and what is learned is, bit by bit, what it is where they are laid into pages."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from kit.ranks.harness import run_ranks
from kit.ranks.tensor_blocks import Blocks, loader, trainer_of
from kit.ranks.tensor_models import Outcome, Run, train

import lightning_ptm
from lightning_ptm.runtime.deciding.gradient_route import Waits


class Routes(L.Callback):
    """By name of a trained parameter, whether it is a part, where its gradient waits, and whether `.grad` is it behind a
    backward pass."""

    def __init__(self) -> None:
        self.found: dict[str, tuple[bool, Waits, bool]] = {}

    def on_after_backward(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        engine = trainer.strategy.engine  # type: ignore[attr-defined]
        for flats in engine.flats:
            for flat in flats:
                for slot, parameter in zip(flat.store.layout.slots, flat.store.binding.parameters, strict=True):
                    plain = type(parameter.grad) is torch.Tensor
                    self.found[slot.spec.name] = (slot.spec.box is not None, flat.gradient.route.waits, plain)


def routes_of(how: Run, disk: Path) -> tuple[Outcome, dict[str, tuple[bool, Waits, bool]]]:
    watch = Routes()
    return train(how, disk, watch), watch.found


def test_parts_stay_where_autograd_leaves_them(disk: Path) -> None:
    for _, found in run_ranks(routes_of, 2, Run("gpt", 2, 2, steps=2), disk):
        assert {part for part, *_ in found.values()} == {True, False}
        for name, (part, waits, plain) in found.items():
            assert (waits, plain) == ((Waits.IN_GRAD, True) if part else (Waits.KEPT, False)), name


@pytest.mark.parametrize(
    ("precision", "trainer"),
    [
        ("bf16-mixed", {}),
        ("64-true", {"gradient_clip_val": 0.5}),
        pytest.param("bf16-mixed", {"gradient_clip_val": 0.5}, marks=pytest.mark.slow),
        pytest.param(
            "bf16-mixed", {"gradient_clip_val": 0.01, "gradient_clip_algorithm": "value"}, marks=pytest.mark.slow
        ),
        pytest.param("64-true", {"accumulate_grad_batches": 2}, marks=pytest.mark.slow),
        pytest.param("bf16-mixed", {"accumulate_grad_batches": 2, "gradient_clip_val": 0.1}, marks=pytest.mark.slow),
        pytest.param("16-mixed", {}, marks=pytest.mark.slow),
    ],
)
def test_no_bit_depends_on_where_they_wait(precision: str, trainer: Mapping[str, Any], disk: Path) -> None:
    how = Run("gpt", 2, 2, precision=precision, steps=4, trainer=dict(trainer), norms=True)
    in_ram = run_ranks(train, 2, how, disk)
    paged = run_ranks(train, 2, Run(**{**vars(how), "tier": "masters_on_disk"}), disk)
    for mine, theirs in zip(in_ram, paged, strict=True):
        assert mine.losses == theirs.losses and mine.norms == theirs.norms
        assert [name for name, value in mine.weights.items() if not torch.equal(value, theirs.weights[name])] == []


class OfPartsAlone(Blocks):
    """Looks at gradients of what ranks have parts of; nothing else is trained."""

    def __init__(self) -> None:
        super().__init__()
        for block in self.blocks:
            block.project.bias.requires_grad_(False)

    def on_after_backward(self) -> None:
        assert all(type(each.grad) is torch.Tensor for each in self.parameters() if each.requires_grad)


def told_of_parts(folder: Path) -> list[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer_of(2, 2).fit(OfPartsAlone(), loader(8))
    return [str(each.message) for each in caught if "reads .grad" in str(each.message)]


def test_who_finds_a_part_alone_is_told(disk: Path) -> None:
    told, _ = run_ranks(told_of_parts, 2, disk)
    assert [each.partition(":")[0] for each in told] == ["OfPartsAlone"]
    assert "finds this rank's part alone" in told[0]


class OwnCalls(L.Callback):
    """Calls of this package's Python functions in each step."""

    def __init__(self) -> None:
        self.counts: list[int] = []
        self._folder = str(Path(lightning_ptm.__file__).parent)

    def on_train_batch_start(self, *args: Any) -> None:
        self.counts.append(0)
        sys.setprofile(self._heard)

    def on_train_batch_end(self, *args: Any) -> None:
        sys.setprofile(None)

    def _heard(self, frame: Any, event: str, value: Any) -> None:
        self.counts[-1] += event == "call" and frame.f_code.co_filename.startswith(self._folder)


def own_calls(how: Run, disk: Path) -> int:
    watch = OwnCalls()
    train(how, disk, watch)
    return watch.counts[-1]


@pytest.mark.parametrize(("ranks", "most"), [(1, 3300), (2, 6600)])
def test_a_step_calls_few_functions_of_ours(ranks: int, most: int, disk: Path) -> None:
    """A model of few elements takes as long as these calls. Bounds are a tenth above what was counted."""
    for count in run_ranks(own_calls, ranks, Run("gpt", ranks, ranks, steps=6), disk):
        assert count <= most
