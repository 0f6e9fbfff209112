"""Random numbers of sequence parallelism: each rank draws those of its part of the sequence, also after a resume."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from kit.ranks.harness import run_ranks
from kit.ranks.tensor_blocks import WIDTH, loader, module_of, trainer_of
from test_tensor_randomness import Drawn, SaveAfterOneEpoch, all_masks, assert_equal, later, masks_of

STEPS, ROWS = 3, 6
"""Rows of a batch, its sequence."""


def drawn(recompute: str) -> Drawn:
    module = module_of(inside=0.5, outside=0.5)
    settings = {"recompute": recompute, "tensor_parallel": {"sequence_parallel": True}}
    trainer_of(2, 2, settings).fit(module, loader(STEPS * ROWS, ROWS))
    return masks_of(module)


@pytest.mark.parametrize("recompute", ["none", "all"])
def test_each_rank_draws_for_its_part(recompute: str) -> None:
    first, second = run_ranks(drawn, 2, recompute)
    parts = [mask for each in (first, second) for mask in all_masks(each, "outside")]
    divided = [mask for each in (first, second) for mask in all_masks(each, "inside")]
    assert len(parts) == len(divided) == 2 * 2 * STEPS
    assert {mask.shape for mask in parts} == {(ROWS // 2, WIDTH)}
    assert {mask.shape for mask in divided} == {(ROWS, 2 * WIDTH)}
    for masks in (parts, divided):  # none is another's
        assert len({tuple(mask.flatten().tolist()) for mask in masks}) == len(masks)
        assert all(0.3 < mask.double().mean() < 0.7 for mask in masks)
    for each in (first, second):
        assert_equal(each.again, each.masks if recompute == "all" else {})
    for name, weight in first.weights.items():
        assert torch.equal(weight, second.weights[name]), name


def saved_and_resumed(kind: str, path: Path) -> tuple[Drawn, Drawn]:
    """Two epochs with a checkpoint after the first, and a run that goes on from there."""
    found = []
    runs: list[tuple[int, list[L.Callback], Any]] = [(0, [SaveAfterOneEpoch(path)], None), (1, [], path)]
    for seed, callbacks, source in runs:
        module = module_of(seed=seed, inside=0.5, outside=0.5)
        settings = {"tensor_parallel": {"sequence_parallel": True}, "checkpoints": {"state_dict_type": kind}}
        trainer = trainer_of(2, 2, settings, max_epochs=2, callbacks=callbacks)
        trainer.fit(module, loader(STEPS * ROWS, ROWS), ckpt_path=source)
        found.append(masks_of(module))
    return found[0], found[1]


@pytest.mark.parametrize("kind", ["full", "sharded"])
def test_a_run_that_goes_on_draws_what_it_would_have_drawn(kind: str, tmp_path: Path) -> None:
    for whole, resumed in run_ranks(saved_and_resumed, 2, kind, tmp_path / "saved.ckpt"):
        assert_equal(later(whole.masks), resumed.masks)
        assert all(torch.equal(whole.weights[name], resumed.weights[name]) for name in whole.weights)


def test_dropout_of_recomputed_blocks_learns_what_it_learns_without() -> None:
    for one, other in zip(run_ranks(drawn, 2, "none"), run_ranks(drawn, 2, "all"), strict=True):
        assert_equal(one.masks, other.masks)
        assert all(torch.equal(one.weights[name], other.weights[name]) for name in one.weights)
