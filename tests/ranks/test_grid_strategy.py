"""GridStrategy: squares and cubes of ranks learn what one rank learns."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
from kit.fits import quiet_trainer
from kit.ranks.grid_models import FILE, STEPS, GridOutcome, GridRun, example, train, wholes
from kit.ranks.harness import run_ranks, watch_ranks
from torch import nn

from lightning_ptm.config import Settings
from lightning_ptm.data import TextBytes
from lightning_ptm.errors import ConfigError
from lightning_ptm.models import GPT
from lightning_ptm.planning.mesh import GridShape
from lightning_ptm.trainer.grid import GridStrategy, refuse_module, warns_of_draws


@pytest.fixture(scope="module")
def one(tmp_path_factory: pytest.TempPathFactory) -> GridOutcome:
    """Returns the outcome of one rank."""
    return run_ranks(train, 1, GridRun(), tmp_path_factory.mktemp("disk"))[0]


RECOMPUTED = {"recompute": "all"}
ADDED_UP = {"accumulate_grad_batches": 2, "max_steps": STEPS // 2}
QUICK = {
    "2d in the least memory, recomputed": GridRun("2d", 4, tier="tight", settings=RECOMPUTED),
    "3d in ram": GridRun("3d", 8),
    "2.5d in ram": GridRun("2d", 8),
}
SLOW = {
    "2d in ram": GridRun("2d", 4),
    "2d on disk, gradients added up": GridRun("2d", 4, tier="all_on_disk", trainer=ADDED_UP),
    "2d, masters on disk, from the meta device": GridRun("2d", 4, tier="masters_on_disk", meta=True),
    "2d, lock-free": GridRun("2d", 4, tier="lock_free"),
    "2.5d in the least memory": GridRun("2d", 8, tier="tight"),
    "2.5d on disk, recomputed": GridRun("2d", 8, tier="all_on_disk", settings=RECOMPUTED),
    "3d in the least memory": GridRun("3d", 8, tier="tight"),
    "3d on disk, recomputed": GridRun("3d", 8, tier="all_on_disk", settings=RECOMPUTED),
}
CASES = {**QUICK, **SLOW}


@pytest.mark.parametrize("case", [*QUICK, *(pytest.param(case, marks=pytest.mark.slow) for case in SLOW)])
def test_it_learns_what_one_rank_learns(case: str, one: GridOutcome, disk: Path) -> None:
    how = CASES[case]
    if how.meta or how.trainer:  # a model from the meta device is initialised in another order
        (one,) = run_ranks(train, 1, GridRun(meta=how.meta, trainer=how.trainer), disk)
    outcomes = run_ranks(train, how.ranks, how, disk, limit_s=240)
    assert_same(outcomes, how, one)
    if case in ("2d in ram", "3d in ram"):
        for each in outcomes:
            assert each.state_bytes <= (0.30 if how.ranks == 4 else 0.16) * one.state_bytes


def assert_same(outcomes: list[GridOutcome], how: GridRun, one: GridOutcome) -> None:
    """Compares weights of each grid, and losses, with those of one rank."""
    shape = GridShape(2, cube=how.mode == "3d")
    for first in range(0, how.ranks, shape.size):
        found = wholes(shape, [each.weights for each in outcomes[first : first + shape.size]])
        assert found.keys() == one.weights.keys()
        for name, value in one.weights.items():
            torch.testing.assert_close(found[name], value, rtol=0, atol=1e-12, msg=name)
    mean = torch.tensor([each.losses for each in outcomes], dtype=torch.float64).mean(0)
    torch.testing.assert_close(mean, torch.tensor(one.losses, dtype=torch.float64), rtol=0, atol=1e-13)


@pytest.mark.parametrize("kind", ["full", pytest.param("sharded", marks=pytest.mark.slow)])
def test_a_checkpoint_goes_on_with_the_same_grid_only(kind: str, one: GridOutcome, tmp_path: Path) -> None:
    settings = {"checkpoints": {"state_dict_type": kind}}
    half = GridRun("2d", 4, settings=settings, saved_at=STEPS // 2)
    run_ranks(train, 4, half, tmp_path)
    whole = GridRun("2d", 4, settings=settings, resumes=True)
    outcomes = run_ranks(train, 4, whole, tmp_path)
    assert_same(outcomes, whole, dataclasses.replace(one, losses=one.losses[STEPS // 2 :]))
    if kind == "full":
        path = tmp_path / "half.ckpt"
        saved = torch.load(path, weights_only=False)
        torch.save({**saved, "angel_ptm_grid": "GridStrategy(mode='2d', side=4)"}, path)
        for each in watch_ranks(train, 4, whole, tmp_path):
            assert "half.ckpt was saved with GridStrategy(mode='2d', side=4) and this run has Gri" in each.error


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"mode": "1d"}, r"^mode='1d' is no grid mode; use '2d' for squares"),
        ({"side": 1}, r"^side=1 makes no grid; use 2 or more"),
        (
            {"tensor_parallel_size": 2},
            r"^GridStrategy got tensor_parallel_size, and a grid of ranks cannot be combined",
        ),
        ({"context_parallel_size": 2}, r"^GridStrategy got context_parallel_size, "),
        ({"pipeline_parallel_size": 2}, r"^GridStrategy got pipeline_parallel_size, "),
        ({"slices": 2}, r"^GridStrategy got slices, "),
        ({"weights": "folder"}, r"^GridStrategy got weights, "),
        ({"expert_parallel_size": 2}, r"^GridStrategy got expert_parallel_size, "),
    ],
)
def test_other_settings_are_refused(settings: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        GridStrategy(**settings)


def test_settings_as_they_are_by_default_are_no_others() -> None:
    given = {field.name: getattr(Settings(), field.name) for field in dataclasses.fields(Settings)}
    assert GridStrategy("3d", **given).settings == dataclasses.replace(Settings(), tensor_parallel_size=8)


def test_what_blocks_would_compute_otherwise_is_refused() -> None:
    refuse_module("drop", nn.Dropout(0.0))
    with pytest.raises(
        ConfigError, match=r"^drop drops activations with probability 0\.5, and all ranks of a grid draw"
    ):
        refuse_module("drop", nn.Dropout(0.5))
    layer = nn.Linear(2, 2)
    layer.compile(backend="eager")
    with pytest.raises(
        ConfigError, match=r"^block is compiled by torch\.compile, which does not trace exchanges of a grid"
    ):
        refuse_module("block", layer)


def test_a_step_that_draws_random_numbers_gives_a_warning() -> None:
    before = [torch.get_rng_state()]
    assert not warns_of_draws(before, [torch.get_rng_state()])
    nn.functional.dropout(torch.ones(4), 0.5)
    with pytest.warns(
        UserWarning, match=r"^the training step draws random numbers, and all ranks of a grid draw the same"
    ):
        assert warns_of_draws(before, [torch.get_rng_state()])


def test_ranks_that_are_no_grid_are_refused() -> None:
    trainer = quiet_trainer(GridStrategy(), max_steps=1)
    with pytest.raises(
        ConfigError, match=r"^a grid of side 2 has 4 ranks, which does not divide the number of ranks, 1 "
    ):
        trainer.fit(GPT(), [])


def fit_and_validate() -> tuple[float, float]:
    """One rank's part: the example, and then a validation with another Trainer and strategy."""
    torch.set_num_threads(1)
    trainer = example().main(["--steps", "2", "--text", str(FILE)])
    module = trainer.lightning_module
    data = TextBytes(str(FILE), sequence_length=64, batch_size=8)
    (found,) = quiet_trainer(GridStrategy(), devices=4, limit_val_batches=1).validate(module, data)
    return float(trainer.callback_metrics["train_loss"]), found["val_loss"]


def test_the_example_trains_and_its_model_is_validated() -> None:
    outcomes = run_ranks(fit_and_validate, 4)
    assert all(each == outcomes[0] for each in outcomes)
    assert all(4 < loss < 6 for loss in outcomes[0])
