"""Programs of users around a training do the same with tensor parallelism: on each rank what one rank does."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from kit.ranks.compositions import PROGRAMS, Place, run
from kit.ranks.harness import run_ranks

QUICK = (
    "parameters in several optimizers",
    "weights gathered and written",
    "texts written",
    "finetuned",
)
TIERS = ("ram", "all_on_disk", "lock_free", "three_tiers")


def assert_close(name: str, ours: Any, theirs: Any) -> None:
    """Losses to 1e-12, weights to 1e-9; texts, counts and booleans are equal."""
    ours, theirs = torch.as_tensor(ours), torch.as_tensor(theirs)
    if not theirs.is_floating_point():
        assert torch.equal(ours, theirs), f"{name}: {ours} and {theirs}"
        return
    bound = 1e-9 if name.startswith(("weight", "norms", "predicted")) else 1e-12
    torch.testing.assert_close(ours.double(), theirs.double(), rtol=0, atol=bound, msg=lambda text: f"{name}: {text}")


def named(program: str) -> object:
    return pytest.param(program, id=program, marks=() if program in QUICK else pytest.mark.slow)


@pytest.mark.slow_unless("weights gathered and written-lock_free", "finetuned-ram")
@pytest.mark.parametrize("tier", TIERS)
@pytest.mark.parametrize("program", [named(each) for each in PROGRAMS])
def test_ranks_that_cut_layers_see_what_one_rank_sees(program: str, tier: str, disk: Path, tmp_path: Path) -> None:
    if program == "texts written by Transformers":
        pytest.importorskip("transformers", reason="trains a model of theirs")
    (whole,) = run_ranks(run, 1, program, Place(1, tier, disk, tmp_path / "whole"))
    for seen in run_ranks(run, 2, program, Place(2, tier, disk, tmp_path / "cut")):
        assert seen.keys() == whole.keys()
        for name, value in whole.items():
            assert_close(name, seen[name], value)
