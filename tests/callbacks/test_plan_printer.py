"""The plan and the homes of model states, printed and in TensorBoard."""

from __future__ import annotations

import pytest

from lightning_ptm.callbacks import PlanPrinter

PARAMETERS = 3 * (2 * 64 * 256 + 256 + 64)


def test_fit_shows_homes_plan_and_settings(strategy_at, board_trainer, model, data, page, capsys) -> None:
    board_trainer(strategy_at("three_tiers"), [PlanPrinter()]).fit(model, data)
    printed = capsys.readouterr().out
    states = page("pages/states")[0]
    for line in (states, page("pages/plan")[0]):
        assert all(each.strip() in printed for each in line.splitlines())
    rows = {(row.split()[-4], row.split()[-3]): row.split() for row in states.splitlines() if len(row.split()) >= 4}
    assert float(rows["parameters", "host"][-2]) == pytest.approx(2 * PARAMETERS / 1e6, abs=0.1)
    assert float(rows["states", "disk"][-2]) == pytest.approx(8 * PARAMETERS / 1e6, abs=0.1)
    (kept,) = [row.split() for row in states.splitlines() if "AdamW" in row]
    assert kept[1] == "element-wise" and float(kept[2]) == float(rows["states", "disk"][-2])
    assert "release blocks.2" in page("pages/plan")[0] and "blocks.0" in page("pages/plan")[0]
    assert "| offload_optimizer | `disk` |" in page("pages/settings")[0]
    assert "| checkpoints.async_save | `False` |" in page("pages/settings")[0]


def test_a_plan_that_is_made_anew_is_shown_again(strategy_at, board_trainer, model, data, page) -> None:
    board_trainer(strategy_at("three_tiers"), [PlanPrinter(show=False)]).fit(model, data)
    assert len(page("pages/plan")) == 2 and len(page("pages/states")) == 1


@pytest.mark.parametrize("loop", ["validate", "test", "predict"])
def test_other_loops_show_their_own_plan(strategy_at, board_trainer, model, data, loop, capsys) -> None:
    trainer = board_trainer(strategy_at("three_tiers"), [PlanPrinter()], logger=False)
    getattr(trainer, loop)(model, data)
    printed = capsys.readouterr().out
    assert "release blocks.2" in printed and "update" not in printed and "optimizer states" not in printed
    assert printed.count("model states") == 1


def test_other_strategies_are_left_alone(board_trainer, model, data, capsys) -> None:
    board_trainer("auto", [PlanPrinter()]).fit(model, data)
    assert capsys.readouterr().out == ""
