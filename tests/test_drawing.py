"""Pictures: where data must be drawn there is its colour, what exceeds a limit is red, and nothing else is."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest
from matplotlib.figure import Figure

from lightning_ptm import drawing
from lightning_ptm.drawing import (
    BLUE,
    GREEN,
    ORANGE,
    OVER,
    BusyPanel,
    BusyRow,
    BytesPanel,
    Series,
    check_target,
    draw,
)
from lightning_ptm.errors import ConfigError

WIDTH, HEIGHT = 800, 200
MIB = 1 << 20


def count(figure: Figure, colour: str) -> int:
    """Pixels of a colour."""
    figure.canvas.draw()
    seen = np.asarray(figure.canvas.buffer_rgba())[:, :, :3]  # type: ignore[attr-defined]
    return int((seen == list(bytes.fromhex(colour[1:]))).all(-1).sum())


def panel(*values: float, limit: float = 0, line: tuple[float, ...] = (), **more: object) -> BytesPanel:
    lines = [Series("line", line, GREEN)] if line else []
    layers = [Series("homes", [value / 2 for value in values], BLUE), Series("rest", [v / 2 for v in values], ORANGE)]
    return BytesPanel("DEVICE", layers, "limit", limit, lines, **more)  # type: ignore[arg-type]


def swatch(colour: str) -> int:
    """Pixels of a colour that a legend alone has."""
    return count(draw("", [panel(0, 0)], WIDTH, HEIGHT), colour)


def test_areas_are_as_large_as_their_values() -> None:
    one, two = (draw("", [panel(4 * MIB, part * MIB)], WIDTH, HEIGHT) for part in (0, 4))
    for colour in (BLUE, ORANGE):
        assert swatch(colour) > 0
        assert count(two, colour) - swatch(colour) == pytest.approx(2 * (count(one, colour) - swatch(colour)), rel=0.04)
    assert one.canvas.get_width_height() == (WIDTH, HEIGHT)


def test_what_exceeds_the_limit_is_red_and_nothing_else() -> None:
    inside = draw("", [panel(MIB, 2 * MIB, limit=2 * MIB, line=(MIB, 2 * MIB))], WIDTH, HEIGHT)
    assert count(inside, OVER) == 0 < count(inside, GREEN)
    over = draw("", [panel(MIB, 4 * MIB, limit=2 * MIB)], WIDTH, HEIGHT)
    # Of the second tick, half: as much as there is of its lower layer; of the first, none.
    assert count(over, OVER) - swatch(BLUE) == pytest.approx((count(over, BLUE) - swatch(BLUE)) * 4 / 5, rel=0.15)
    line = draw("", [panel(MIB, MIB, limit=2 * MIB, line=(MIB, 3 * MIB))], WIDTH, HEIGHT)
    assert count(line, OVER) > 0


def test_one_full_tick_among_many_still_shows() -> None:
    values = [0.0] * 20_000
    values[7_777] = 5 * MIB
    assert count(draw("", [panel(*values)], WIDTH, HEIGHT), BLUE) > swatch(BLUE) + 20


def test_a_limit_far_above_does_not_flatten_what_is_below() -> None:
    near, far = (draw("", [panel(MIB, MIB, limit=limit * MIB)], WIDTH, HEIGHT).axes[0] for limit in (2, 1000))
    assert far.get_ylim()[1] < 1.2 < 2 < near.get_ylim()[1]
    assert "limit 1000 MiB (above)" in [each.get_text() for each in far.get_legend().get_texts()]


def test_rows_are_busy_for_their_share_of_the_time() -> None:
    def row(*stretches: tuple[float, float, str]) -> Figure:
        panel = BusyPanel("BUSY", [BusyRow("compute", stretches, "note")], 10.0, {"compute": BLUE, "gather": GREEN})
        return draw("", [panel], WIDTH, HEIGHT)

    none = row()
    half, whole = row((0.0, 5.0, "compute")), row((-3.0, 99.0, "compute"))
    drawn = count(whole, BLUE) - count(none, BLUE)
    assert count(half, BLUE) - count(none, BLUE) == pytest.approx(drawn / 2, rel=0.03)
    short = row(*((start / 10, 0.001, "gather") for start in range(100)))
    assert count(short, GREEN) > count(none, GREEN) + 50


def test_targets_that_cannot_be_written_are_refused_before_anything_is_computed(tmp_path: Path) -> None:
    check_target(tmp_path / "a.png", "plot")
    (tmp_path / "folder.png").mkdir()
    for path, words in (
        (tmp_path / "a.jpg", r"plot is .*a\.jpg.*name one that ends in \.png"),
        (tmp_path / "none" / "a.png", "there is no folder .*none"),
        (tmp_path / "folder.png", "which is a folder"),
    ):
        with pytest.raises(ConfigError, match=words):
            check_target(path, "plot")
    with pytest.raises(ConfigError, match=r"cannot be written to .*name another file"):
        drawing.save(draw("", [], 100, 100), tmp_path / "folder.png")


@pytest.mark.parametrize(("width", "height"), [(1000, HEIGHT), (600, 300)], ids=["wide", "narrow"])
def test_labels_of_an_axis_lie_beside_each_other(width: int, height: int) -> None:
    names = ["root", *(f"blocks.{number}" for number in range(5)), "end"]
    marked = panel(*[MIB] * len(names), limit=2 * MIB, names=names, marks=[(0, "forward"), (4, "backward")])
    figure = draw("", [marked], width, height)
    figure.canvas.draw()
    (axes,) = figure.axes
    texts = [each for each in axes.get_xticklabels() if each.get_text()]
    assert [each.get_text().replace("\n", ".") for each in texts] == names
    boxes = [each.get_window_extent() for each in texts]
    boxes += [each.get_window_extent() for child in axes.child_axes for each in child.get_xticklabels()]
    boxes += [axes.xaxis.label.get_window_extent(), axes.get_legend().get_window_extent()]
    assert not any(one.overlaps(other) for at, one in enumerate(boxes) for other in boxes[at + 1 :])
    assert all(box.x0 >= 0 and box.x1 <= width and box.y0 >= 0 and box.y1 <= height for box in boxes)
    many = draw("", [panel(*[MIB] * 40, names=["a long name"] * 40)], WIDTH, HEIGHT)
    assert "a long name" not in [each.get_text() for each in many.axes[0].get_xticklabels()]


def test_matplotlib_that_is_missing_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ConfigError, match=r"matplotlib is missing.*pip install 'lightning_ptm\[plots\]'"):
        draw("", [], 10, 10)
