"""Under tensor parallelism, ranks draw the same random numbers where they compute the same, and others where they divide."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
from kit.ranks.harness import run_ranks
from kit.ranks.tensor_blocks import Blocks, Noted, SaveAfterOneEpoch, loader, module_of, trainer_of, weights_of
from torch import Tensor

STEPS = 3


@dataclasses.dataclass(frozen=True)
class Drawn:
    """By module that draws, the masks of each forward, and of each that was recomputed."""

    masks: dict[str, list[Tensor]]
    again: dict[str, list[Tensor]]
    weights: dict[str, Tensor]


def masks_of(module: Blocks) -> Drawn:
    noted = {name: each for name, each in module.named_modules() if isinstance(each, Noted)}
    return Drawn(
        {name: each.masks for name, each in noted.items() if each.masks},
        {name: each.again for name, each in noted.items() if each.again},
        weights_of(module),
    )


def drawn(ranks: int, tensor: int, inside: float, outside: float, recompute: str = "none", settings: Any = ()) -> Drawn:
    module = module_of(inside=inside, outside=outside)
    trainer = trainer_of(ranks, tensor, {"recompute": recompute, **dict(settings)})
    trainer.fit(module, loader(2 * STEPS * (ranks // tensor)))
    return masks_of(module)


def all_masks(found: Drawn, name: str) -> list[Tensor]:
    return [mask for where, masks in found.masks.items() if name in where for mask in masks]


def assert_equal(one: dict[str, list[Tensor]], other: dict[str, list[Tensor]]) -> None:
    assert one.keys() == other.keys()
    for name, masks in one.items():
        assert len(masks) == len(other[name]), name
        assert all(map(torch.equal, masks, other[name])), name


@pytest.mark.parametrize("recompute", ["none", "all"])
def test_what_is_whole_draws_alike_and_what_is_divided_does_not(recompute: str) -> None:
    first, second = run_ranks(drawn, 2, 2, 2, 0.5, 0.5, recompute)
    assert len(all_masks(first, "outside")) == len(all_masks(first, "inside")) == 2 * STEPS
    for one, other in zip(all_masks(first, "outside"), all_masks(second, "outside"), strict=True):
        assert torch.equal(one, other)
    divided = [*all_masks(first, "inside"), *all_masks(second, "inside")]
    assert len({tuple(mask.flatten().tolist()) for mask in divided}) == len(divided) == 4 * STEPS
    for each in (first, second):
        assert_equal(each.again, each.masks if recompute == "all" else {})
        for mask in all_masks(each, "inside"):
            assert 0.3 < mask.double().mean() < 0.7
    for name, weight in first.weights.items():
        assert torch.equal(weight, second.weights[name]), name


def test_without_a_draw_inside_the_numbers_are_those_of_one_rank() -> None:
    (one,) = run_ranks(drawn, 1, 1, 1, 0.0, 0.5)
    cut = run_ranks(drawn, 2, 2, 2, 0.0, 0.5)
    for each in cut:
        assert_equal(each.masks, one.masks)
        for name, weight in one.weights.items():
            torch.testing.assert_close(each.weights[name], weight, rtol=0, atol=1e-12, msg=name)


def test_dropout_inside_of_recomputed_blocks_learns_what_it_learns_without() -> None:
    kept = run_ranks(drawn, 2, 2, 2, 0.5, 0.0, "none")
    recomputed = run_ranks(drawn, 2, 2, 2, 0.5, 0.0, "all")
    for one, other in zip(kept, recomputed, strict=True):
        assert_equal(one.masks, other.masks)
        assert_equal(other.again, other.masks)
        assert all(torch.equal(one.weights[name], other.weights[name]) for name in one.weights)


def test_ranks_with_other_batches_draw_what_their_seed_says_as_with_ddp() -> None:
    plain = run_ranks(drawn, 2, 2, 1, 0.0, 0.5)
    cut = run_ranks(drawn, 4, 4, 2, 0.0, 0.5, limit_s=240)
    for rank, each in enumerate(cut):
        assert_equal(each.masks, plain[rank // 2].masks)


# -- resumed ----------------------------------------------------------------------------------------------------------


def saved(ranks: int, tensor: int, kind: str, path: Path, inside: float) -> Drawn:
    """Three steps and a checkpoint, then three more."""
    module = module_of(inside=inside, outside=0.5)
    callbacks = [SaveAfterOneEpoch(path)]
    trainer = trainer_of(ranks, tensor, {"checkpoints": {"state_dict_type": kind}}, max_epochs=2, callbacks=callbacks)
    trainer.fit(module, loader(2 * STEPS * (ranks // tensor)))
    return masks_of(module)


def resumed(ranks: int, tensor: int, kind: str, path: Path, inside: float) -> Drawn:
    module = module_of(seed=1, inside=inside, outside=0.5)
    trainer = trainer_of(ranks, tensor, {"checkpoints": {"state_dict_type": kind}}, max_epochs=2)
    trainer.fit(module, loader(2 * STEPS * (ranks // tensor)), ckpt_path=path)
    return masks_of(module)


def later(masks: dict[str, list[Tensor]]) -> dict[str, list[Tensor]]:
    return {name: each[STEPS:] for name, each in masks.items()}


@pytest.mark.parametrize(("ranks", "kind"), [pytest.param(2, "full", marks=pytest.mark.slow), (4, "sharded")])
def test_a_run_that_goes_on_draws_what_it_would_have_drawn(ranks: int, kind: str, tmp_path: Path) -> None:
    path = tmp_path / "saved.ckpt"
    whole = run_ranks(saved, ranks, ranks, 2, kind, path, 0.5)
    again = run_ranks(resumed, ranks, ranks, 2, kind, path, 0.5)
    for one, other in zip(whole, again, strict=True):
        assert_equal(later(one.masks), other.masks)
        assert all(torch.equal(one.weights[name], other.weights[name]) for name in one.weights)


@pytest.mark.parametrize(("before", "after"), [(2, 1), pytest.param(1, 2, marks=pytest.mark.slow)])
def test_another_tensor_size_goes_on_with_the_numbers_of_the_same_batches(
    before: int, after: int, tmp_path: Path
) -> None:
    path = tmp_path / "saved.ckpt"
    one = run_ranks(saved, 2 * before, 2 * before, before, "full", path, 0.0)
    other = run_ranks(resumed, 2 * after, 2 * after, after, "full", path, 0.0)
    for data in range(2):
        assert_equal(later(one[data * before].masks), other[data * after].masks)
        assert_equal(other[data * after].masks, other[(data + 1) * after - 1].masks)
