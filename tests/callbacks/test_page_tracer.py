"""The paper's Tracer table, in a file and in TensorBoard."""

from __future__ import annotations

import csv

import pytest

from lightning_ptm.callbacks import PageTracer


def read(path) -> list[dict[str, str]]:
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def test_fit_writes_the_table(strategy_at, board_trainer, model, data, page, tmp_path) -> None:
    board_trainer(strategy_at("three_tiers"), [PageTracer()]).fit(model, data)
    rows = read(tmp_path / "logs" / "page_trace.csv")
    assert list(rows[0]) == ["tensor_id", "first_id", "end_id", "cpu_time", "gpu_time", "name"]
    assert [row["name"] for row in rows] == [name for name, _ in model.named_parameters()]
    assert [int(row["tensor_id"]) for row in rows] == list(range(12))
    # Ticks: the root and three blocks forward, the root and three blocks backward.
    spans = {row["name"].split(".")[1]: (int(row["first_id"]), int(row["end_id"])) for row in rows}
    assert spans == {"0": (1, 7), "1": (2, 6), "2": (3, 5)}
    assert all(float(row["cpu_time"]) > 0 and float(row["gpu_time"]) == 0 for row in rows)
    text = page("pages/trace")[-1]
    assert "| 0 | 1 | 7 |" in text and "`blocks.2.2.bias`" in text


@pytest.mark.parametrize("loop", ["validate", "test", "predict"])
def test_other_loops(strategy_at, board_trainer, model, data, loop, tmp_path) -> None:
    trainer = board_trainer(strategy_at("three_tiers"), [PageTracer()])
    getattr(trainer, loop)(model, data)
    rows = read(tmp_path / "logs" / f"page_trace_{loop}.csv")
    assert {(row["first_id"], row["end_id"]) for row in rows} == {("1", "1"), ("2", "2"), ("3", "3")}


def test_other_strategies_are_left_alone(board_trainer, model, data, tmp_path) -> None:
    board_trainer("auto", [PageTracer()]).fit(model, data)
    assert not list(tmp_path.rglob("page_trace.csv"))
