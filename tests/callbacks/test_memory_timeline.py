"""Bytes of pages at each tick, planned against measured: numbers, file, curves and picture."""

from __future__ import annotations

import csv
import io
import sys
import warnings

import numpy as np
import pytest
from PIL import Image

from lightning_ptm.callbacks import MemoryTimeline
from lightning_ptm.callbacks.memory_timeline import HEIGHT, PASSING, PLANNED, TITLE, WIDTH, Curve, picture
from lightning_ptm.drawing import OVER

TICKS = 8  # the root and three blocks forward, the root and three blocks backward


def test_bytes_of_each_tick_and_tier(strategy_at, board_trainer, model, data, board, tmp_path) -> None:
    watch = MemoryTimeline()
    board_trainer(strategy_at("three_tiers"), [watch]).fit(model, data)
    curves = {curve.tier: curve for curve in watch.curves}
    assert list(curves) == ["device", "host", "disk"]
    for curve in curves.values():
        assert len(curve.planned) == TICKS + 1 and len(curve.measured) == TICKS + 1
        assert max(curve.measured) <= curve.room <= curve.budget and max(curve.planned) <= curve.budget
    device = curves["device"]
    assert all(0 < there <= said for there, said in zip(device.measured[:TICKS], device.planned[:TICKS], strict=True))
    assert len(set(device.measured)) > 1  # units come and go
    for curve in curves.values():
        uses = curve.stacked()
        assert tuple(map(sum, zip(*uses.values(), strict=True))) == curve.measured
        # What is held according to the inventory is there at every tick, so the rest is what comes and goes.
        assert {name: set(uses[name]) for name, _ in curve.held} == {name: {size} for name, size in curve.held}
    with (tmp_path / "logs" / "memory_timeline.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [int(row["device_measured_bytes"]) for row in rows] == list(device.measured)
    assert [row["name"] for row in rows] == [
        "root forward",
        *(f"blocks.{index} forward" for index in (0, 1, 2)),
        "root backward",
        *(f"blocks.{index} backward" for index in (2, 1, 0)),
        "end",
    ]
    shown = board()
    # Ticks are no steps: of the run's scalars, all are over its own.
    assert not [tag for tag in shown.Tags()["scalars"] if tag.startswith("memory_timeline")]
    assert len(shown.Scalars("memory/disk_MB")) == 4
    picture = Image.open(io.BytesIO(shown.Images("memory/timeline")[0].encoded_image_string))
    assert picture.size == (WIDTH, 3 * HEIGHT + TITLE)
    assert Image.open(tmp_path / "logs" / "memory_timeline.png").convert("RGB").tobytes() == picture.tobytes()


def colours(curve: Curve) -> set[str]:
    figure = picture((curve,), "batch 2 of fit", ["root forward", "root backward"])
    assert figure is not None and figure.canvas.get_width_height() == (WIDTH, HEIGHT + TITLE)
    figure.canvas.draw()
    pixels = np.asarray(figure.canvas.buffer_rgba()).reshape(-1, 4)  # type: ignore[attr-defined]
    return {"#{:02x}{:02x}{:02x}".format(*pixel[:3]) for pixel in np.unique(pixels, axis=0)}


def test_the_picture_shows_both_curves_and_what_is_over_the_budget() -> None:
    inside = colours(Curve("device", planned=(50, 100, 0), measured=(0, 80), room=60, budget=100))
    assert {PASSING, PLANNED} <= inside and OVER not in inside
    assert OVER in colours(Curve("device", planned=(50, 101, 0), measured=(0, 80), room=60, budget=100))
    assert OVER in colours(Curve("device", planned=(50, 100, 0), measured=(0, 110), room=60, budget=100))


def test_without_matplotlib_there_is_a_warning_and_no_picture(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)  # as if it were not installed
    with pytest.warns(UserWarning, match=r"matplotlib is missing.*memory_timeline\.csv has its numbers"):
        assert picture((Curve("device", (1,), (1,), 2, 2),), "batch 2 of fit", ["root forward"]) is None


@pytest.mark.parametrize("loop", ["validate", "test", "predict"])
def test_other_loops(strategy_at, board_trainer, model, data, loop) -> None:
    watch = MemoryTimeline()
    trainer = board_trainer(strategy_at("three_tiers"), [watch])
    getattr(trainer, loop)(model, data)
    assert [len(curve.measured) for curve in watch.curves] == [5, 5]  # no masters: no disk


def test_a_run_that_is_too_short_and_other_strategies_record_nothing(strategy_at, board_trainer, model, data) -> None:
    watch = MemoryTimeline()
    with pytest.warns(
        UserWarning, match=r"MemoryTimeline records from batch 2 on .*, and fit ended after 2, so there is nothing"
    ):
        board_trainer(strategy_at("ram"), [watch], limit_train_batches=2).fit(model, data)
    with warnings.catch_warnings(record=True) as caught:
        board_trainer("auto", [watch]).fit(model, data)
    assert not any("nothing to show" in str(each.message) for each in caught)
    assert watch.curves == ()
    with pytest.raises(ValueError, match="start=-1"):
        MemoryTimeline(batch=-1)
