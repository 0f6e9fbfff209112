"""Pictures: where data must be drawn there is its colour, what exceeds a limit is red, and nothing else is."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from PIL import Image

from lightning_ptm import drawing
from lightning_ptm.drawing import (
    BLUE,
    GREEN,
    ORANGE,
    OVER,
    Area,
    BusyPanel,
    BusyRow,
    BytesPanel,
    Line,
    check_target,
    draw,
)
from lightning_ptm.errors import ConfigError

WIDTH, HEIGHT = 600, 200
MIB = 1 << 20


def rgb(colour: str) -> tuple[int, int, int]:
    return tuple(bytes.fromhex(colour[1:]))  # type: ignore[return-value]


def count(image: Image.Image, colour: str) -> int:
    return sum(number for number, seen in image.getcolors(1 << 20) or [] if seen == rgb(colour))


def panel(*values: float, limit: float = 0, line: tuple[float, ...] = (), **more: object) -> BytesPanel:
    lines = [Line("line", line, GREEN)] if line else []
    layers = [Area("homes", [value / 2 for value in values], BLUE), Area("rest", [v / 2 for v in values], ORANGE)]
    return BytesPanel("DEVICE", layers, "limit", limit, lines, **more)  # type: ignore[arg-type]


def swatch(colour: str) -> int:
    """Pixels of a colour that a legend alone has."""
    return count(draw("", [panel(0, 0)], WIDTH, HEIGHT), colour)


def test_areas_are_as_large_as_their_values() -> None:
    one, two = (draw("", [panel(4 * MIB, part * MIB)], WIDTH, HEIGHT) for part in (0, 4))
    for colour in (BLUE, ORANGE):
        assert swatch(colour) > 0
        assert count(two, colour) - swatch(colour) == pytest.approx(2 * (count(one, colour) - swatch(colour)), rel=0.02)
    assert one.size == (WIDTH, HEIGHT)


def test_what_exceeds_the_limit_is_red_and_nothing_else() -> None:
    inside = draw("", [panel(MIB, 2 * MIB, limit=2 * MIB, line=(MIB, 2 * MIB))], WIDTH, HEIGHT)
    assert count(inside, OVER) == 0 < count(inside, GREEN)
    over = draw("", [panel(MIB, 4 * MIB, limit=2 * MIB)], WIDTH, HEIGHT)
    # Of the second tick, half: as much as there is of its lower layer.
    left, right = over.crop((150, 0, 363, HEIGHT)), over.crop((363, 46, WIDTH, HEIGHT))
    assert count(right, OVER) == pytest.approx(count(right, BLUE), rel=0.15)  # and the line of the limit
    assert count(left.crop((0, 46, 213, HEIGHT)), OVER) <= 3 * 213  # the line of the limit
    line = draw("", [panel(MIB, MIB, limit=2 * MIB, line=(MIB, 3 * MIB))], WIDTH, HEIGHT)
    assert count(line, OVER) > 0


@pytest.mark.parametrize("most", [0.3, 1.0, 4.4, 4.9, 9.99, 1024.0])
@pytest.mark.parametrize("count", [1, 2, 3, 10])
def test_an_axis_has_more_than_its_zero(most: float, count: int) -> None:
    steps = drawing._nice_steps(most, count)
    assert steps[0] == 0.0 and len(steps) >= 2 and steps[-1] <= most


def test_one_full_tick_among_many_still_shows() -> None:
    values = [0.0] * 20_000
    values[7_777] = 5 * MIB
    assert count(draw("", [panel(*values)], WIDTH, HEIGHT), BLUE) > swatch(BLUE) + 20


def test_a_limit_far_above_does_not_flatten_what_is_below() -> None:
    near, far = (draw("", [panel(MIB, MIB, limit=limit * MIB)], WIDTH, HEIGHT) for limit in (2, 1000))
    assert count(far, BLUE) > 1.5 * count(near, BLUE)


def test_rows_are_busy_for_their_share_of_the_time() -> None:
    def row(*stretches: tuple[float, float, str]) -> Image.Image:
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
        drawing.save(draw("", [], 10, 10), tmp_path / "folder.png")


def test_pillow_that_is_missing_or_old_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("PIL.__version__", "9.5.0")
    with pytest.raises(ConfigError, match=r"Pillow 9\.5\.0 has no font.*pip install 'pillow>=10\.1'"):
        drawing.need_pillow()
    monkeypatch.setitem(sys.modules, "PIL", None)
    with pytest.raises(ConfigError, match=r"Pillow is missing.*pip install 'pillow>=10\.1'"):
        draw("", [], 10, 10)
