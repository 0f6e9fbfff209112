"""Pictures of bytes over ticks and of what was busy over time, drawn with Pillow: the one way of drawing.

Owns scales, colours and labels; knows numbers and names, not what they are of. The standard library alone until something
is drawn: whoever installed without dependencies and has no Pillow gets an error that says so.

I1: what exceeds a panel's limit is in OVER and nothing else is. I2: a tick or a busy stretch narrower than a pixel still
shows: a column of pixels shows the fullest of its ticks, and the busy share of its time.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from lightning_ptm.config import format_bytes
from lightning_ptm.errors import ConfigError

if TYPE_CHECKING:
    from PIL.Image import Image
    from PIL.ImageDraw import ImageDraw
    from PIL.ImageFont import FreeTypeFont

# Told apart by eyes of any kind, in print too: after Okabe and Ito.
BLUE, SKY, GREEN, ORANGE, PURPLE, YELLOW = "#0072b2", "#56b4e9", "#009e73", "#e69f00", "#cc79a7", "#f0e442"
VERMILION = "#d55e00"
FREE = "#e4e7ea"
OVER = "#d00000"
_INK, _DIM, _GRID = "#1b1f24", "#5c6670", "#d5d9dd"
_LEFT, _RIGHT, _EDGE = 150, 24, 14
_TEXT, _SMALL = 14, 12
_HEAD, _LEGEND, _AXIS, _GAP = 24, 20, 44, 12
"""Pixels above a panel for its title, for each line of a legend, below it for its axis, or without one."""
_TITLE = 30
_ROW, _BAR = 26, 18
_IN_REACH = 5
"""A limit more than so many times what there is would flatten everything under it: it is told in words."""
_PILLOW = (10, 1)
"""Its default font comes in sizes since then."""


@dataclass(frozen=True, slots=True)
class Area:
    """An area, on top of the ones before it; a value for each tick."""

    name: str
    values: Sequence[float]
    colour: str


@dataclass(frozen=True, slots=True)
class Line:
    """A line, measured from zero; a value for each tick."""

    name: str
    values: Sequence[float]
    colour: str


@dataclass(frozen=True, slots=True)
class BytesPanel:
    """Bytes over ticks.

    Attributes:
        layers: stacked areas; a shorter one ends early.
        lines: beside them.
        limit: what neither may exceed; named in `limit_name`. bound: another one, dashed, for the reader alone.
        marks: ticks at which something begins, by name, in order.
        axis: ticks are numbered and marks named below it; a panel right under it can do that for both.
        names: of ticks, in place of their numbers where there is room for all.
        weight: share of the picture's height.
    """

    title: str
    layers: Sequence[Area]
    limit_name: str
    limit: float
    lines: Sequence[Line] = ()
    bound_name: str = ""
    bound: float = 0.0
    marks: Sequence[tuple[int, str]] = ()
    axis: bool = True
    names: Sequence[str] = ()
    weight: float = 1.0


@dataclass(frozen=True, slots=True)
class BusyRow:
    """One thing that is busy or not: stretches (start, seconds, name of what it does), and what to say at its end."""

    name: str
    busy: Sequence[tuple[float, float, str]]
    note: str


@dataclass(frozen=True, slots=True)
class BusyPanel:
    """What was busy from 0 to `seconds`; `colours` by the names of what rows do, in the order of the legend."""

    title: str
    rows: Sequence[BusyRow]
    seconds: float
    colours: dict[str, str]


def need_pillow() -> None:
    """Raises ConfigError where Pillow is missing or too old to draw."""
    wanted = ".".join(map(str, _PILLOW))
    try:
        import PIL
    except ImportError as error:
        raise ConfigError(f"Pillow is missing, so no picture can be drawn; pip install 'pillow>={wanted}'") from error
    if tuple(int(part) for part in PIL.__version__.split(".")[:2]) < _PILLOW:
        raise ConfigError(
            f"Pillow {PIL.__version__} has no font in sizes, so no picture can be drawn; pip install 'pillow>={wanted}'"
        )


def draw(title: str, panels: Sequence[BytesPanel | BusyPanel], width: int, height: int) -> Image:
    """A picture of `width` x `height` pixels, one panel under the other.

    Raises:
        ConfigError: no Pillow.
    """
    need_pillow()
    from PIL import Image, ImageDraw, ImageFont

    image = Image.new("RGB", (width, height), "white")
    text, small = ImageFont.load_default(_TEXT), ImageFont.load_default(_SMALL)
    canvas = _Canvas(ImageDraw.Draw(image), text, small, width)  # type: ignore[arg-type]
    top = _EDGE
    if title:
        canvas.write(_EDGE, top, title, _INK, large=True)
        top += _TITLE
    fixed = sum(canvas.fixed_height(panel) for panel in panels)
    weights = sum(panel.weight for panel in panels if isinstance(panel, BytesPanel)) or 1.0
    free = height - top - _EDGE - fixed
    for panel in panels:
        if isinstance(panel, BusyPanel):
            canvas.busy(panel, top)
            top += canvas.fixed_height(panel)
        else:
            tall = canvas.fixed_height(panel) + int(free * panel.weight / weights)
            canvas.bytes(panel, top, tall)
            top += tall
    return image


def check_target(path: Path, setting: str) -> None:
    """Refuses, before anything is computed, a path to which no picture can be written.

    Raises:
        ConfigError: names `setting`.
    """
    if path.suffix.lower() != ".png":
        raise ConfigError(f"{setting} is {str(path)!r}, and pictures are PNG files; name one that ends in .png")
    if not path.parent.is_dir():
        raise ConfigError(
            f"{setting} is {str(path)!r}, and there is no folder {str(path.parent)!r}; make it, or name another file"
        )
    if path.is_dir():
        raise ConfigError(f"{setting} is {str(path)!r}, which is a folder; name a file in it")
    need_pillow()


def save(image: Image, path: Path) -> None:
    """Writes a PNG file.

    Raises:
        ConfigError: the file cannot be written.
    """
    try:
        image.save(path, format="PNG")
    except OSError as error:
        raise ConfigError(f"the picture cannot be written to {path} ({error}); name another file") from error


class _Canvas:
    """One call of `draw`."""

    def __init__(self, pen: ImageDraw, font: FreeTypeFont, small: FreeTypeFont, width: int) -> None:
        self._pen = pen
        self._font = font
        self._small = small
        self._x0, self._x1 = _LEFT, width - _RIGHT

    def write(self, x: float, y: float, words: str, colour: str, *, large: bool = False, anchor: str = "la") -> None:
        self._pen.text((x, y), words, fill=colour, font=self._font if large else self._small, anchor=anchor)

    def bytes(self, panel: BytesPanel, top: int, tall: int) -> None:
        """Draws a panel of bytes into (top, top + tall)."""
        y0, y1 = top + _HEAD + _LEGEND, top + tall - (_AXIS if panel.axis else _GAP)
        series = [layer.values for layer in panel.layers] + [line.values for line in panel.lines]
        ticks = max([1, *map(len, series)])
        stack = [sum(layer.values[tick] for layer in panel.layers if tick < len(layer.values)) for tick in range(ticks)]
        most = max([*stack, *(value for line in panel.lines for value in line.values), 1.0])
        shown = [limit for limit in (panel.limit, panel.bound) if 0 < limit <= most * _IN_REACH]
        scale = _Scale(max(most, *shown) if shown else most, y0, y1)
        self._write_title(panel, top, tuple(shown))
        self._legend(
            [(layer.name, layer.colour) for layer in panel.layers]
            + [(line.name, line.colour) for line in panel.lines]
            + ([("over the limit", OVER)] if 0 < panel.limit < most else []),
            top + _HEAD,
        )
        for value, label in scale.marks():
            self._pen.line((self._x0, scale.y(value), self._x1, scale.y(value)), fill=_GRID)
            self.write(self._x0 - 8, scale.y(value), label, _DIM, anchor="rm")
        self._areas(panel, stack, scale)
        for line in panel.lines:
            self._line(line, ticks, panel.limit, scale)
        if panel.bound in shown:
            self._dashes(scale.y(panel.bound))
        if panel.limit in shown:
            y = scale.y(panel.limit)
            self._pen.line((self._x0, y, self._x1, y), fill=OVER if most > panel.limit else _INK, width=2)
        self._pen.rectangle((self._x0, y0, self._x1, y1), outline=_DIM)
        self._tick_axis(panel, ticks, y0, y1)

    def busy(self, panel: BusyPanel, top: int) -> None:
        """Draws a panel of rows, its upper edge at `top`."""
        self.write(_EDGE, top, panel.title, _INK, large=True)
        self._legend(list(panel.colours.items()), top + _HEAD)
        y0 = top + _HEAD + _LEGEND
        y1 = y0 + _ROW * len(panel.rows)
        right = self._x1 - 160  # for the notes
        for value in _nice_steps(panel.seconds, 10):
            x = self._x0 + (right - self._x0) * value / (panel.seconds or 1.0)
            self._pen.line((x, y0, x, y1 + 4), fill=_GRID)
            self.write(x, y1 + 6, f"{value:g}", _DIM, anchor="ma")
        self.write(right + 10, y1 + 6, "seconds", _DIM)
        for number, row in enumerate(panel.rows):
            low = y0 + _ROW * (number + 1) - (_ROW - _BAR) // 2
            self.write(self._x0 - 8, low - _BAR / 2, row.name, _INK, anchor="rm")
            self.write(right + 10, low - _BAR / 2, row.note, _DIM, anchor="lm")
            self._pen.line((self._x0, low, right, low), fill=_GRID)
            for column, shares in enumerate(_busy_columns(row.busy, panel.seconds, right - self._x0, panel.colours)):
                base = float(low)
                for name, share in shares.items():
                    height = max(1.0, share * _BAR)
                    x = self._x0 + column
                    self._pen.line((x, base, x, base - height), fill=panel.colours[name])
                    base -= height
        self._pen.rectangle((self._x0, y0, right, y1), outline=_DIM)

    def fixed_height(self, panel: BytesPanel | BusyPanel) -> int:
        """Pixels that a panel takes whatever its share of the rest: words, axes and rows."""
        below = _AXIS if isinstance(panel, BusyPanel) or panel.axis else _GAP
        return _HEAD + _LEGEND + (_ROW * len(panel.rows) if isinstance(panel, BusyPanel) else 0) + below

    def _write_title(self, panel: BytesPanel, top: int, shown: tuple[float, ...]) -> None:
        """The title to the left; to the right the limits, those off the scale said to be so."""
        self.write(_EDGE, top, panel.title, _INK, large=True)
        words = []
        for name, limit, line in ((panel.limit_name, panel.limit, "solid"), (panel.bound_name, panel.bound, "dashed")):
            if limit:
                words.append(
                    f"{name} {format_bytes(limit)} ({f'{line} line' if limit in shown else 'above this scale'})"
                )
        self.write(self._x1, top + 2, "; ".join(words), _DIM, anchor="ra")

    def _legend(self, entries: Sequence[tuple[str, str]], y: int) -> None:
        x = float(self._x0)
        for name, colour in entries:
            self._pen.rectangle((x, y + 2, x + 12, y + 12), fill=colour, outline=_DIM)
            self.write(x + 17, y, name, _INK)
            x += 17 + self._small.getlength(name) + 22

    def _areas(self, panel: BytesPanel, stack: Sequence[float], scale: _Scale) -> None:
        count = len(stack)
        ticks_of = self._columns(count)
        for column in range(self._x1 - self._x0):
            first, last = ticks_of(column)
            tick = max(range(first, last), key=stack.__getitem__)
            x, base = self._x0 + column, 0.0
            for layer in panel.layers:
                size = layer.values[tick] if tick < len(layer.values) else 0.0
                if size <= 0:
                    continue
                inside = min(base + size, max(base, panel.limit)) if panel.limit else base + size
                if inside > base:
                    self._pen.line((x, scale.y(base), x, scale.y(inside)), fill=layer.colour)
                if base + size > inside:
                    self._pen.line((x, scale.y(inside), x, scale.y(base + size)), fill=OVER)
                base += size

    def _line(self, line: Line, ticks: int, limit: float, scale: _Scale) -> None:
        ticks_of = self._columns(ticks)
        before: float | None = None
        for column in range(self._x1 - self._x0):
            first, last = ticks_of(column)
            values = line.values[first:last]
            if not values:
                break
            y, x = scale.y(max(values)), self._x0 + column
            colour = OVER if 0 < limit < max(values) else line.colour
            self._pen.line((x, y if before is None else before, x, y), fill=colour)
            self._pen.line((x, y - 1, x, y + 1), fill=colour)
            before = y

    def _columns(self, ticks: int) -> Callable[[int], tuple[int, int]]:
        """The ticks, first and one behind the last, of a column of pixels: at least one."""
        width = self._x1 - self._x0

        def ticks_of(column: int) -> tuple[int, int]:
            first = min(column * ticks // width, ticks - 1)
            return first, max(first + 1, min((column + 1) * ticks // width, ticks))

        return ticks_of

    def _dashes(self, y: float) -> None:
        for x in range(self._x0, self._x1, 10):
            self._pen.line((x, y, min(x + 5, self._x1), y), fill=_INK)

    def _tick_axis(self, panel: BytesPanel, ticks: int, y0: int, y1: int) -> None:
        width = self._x1 - self._x0
        widest = max(map(self._small.getlength, panel.names), default=0.0)
        named = panel.axis and len(panel.names) == ticks and (widest + 6) * ticks <= width
        for tick, name in enumerate(panel.names if named else ()):
            self.write(self._x0 + width * (tick + 0.5) / ticks, y1 + 6, name, _DIM, anchor="ma")
        for value in _nice_steps(ticks, 12) if panel.axis and not named else ():
            if value == int(value):
                x = self._x0 + width * value / ticks
                self._pen.line((x, y1, x, y1 + 4), fill=_DIM)
                self.write(x, y1 + 6, f"{value:g}", _DIM, anchor="ma")
        for number, (tick, name) in enumerate(panel.marks):
            end = panel.marks[number + 1][0] if number + 1 < len(panel.marks) else ticks
            x = self._x0 + width * tick / ticks
            if tick:
                self._pen.line((x, y0, x, y1 + (34 if panel.axis else 0)), fill=_DIM)
            if panel.axis:
                self.write((x + self._x0 + width * end / ticks) / 2, y1 + 21, name, _INK, anchor="ma")
        if panel.axis:
            self.write(self._x0 - 12, y1 + 6, "unit" if named else "tick", _DIM, anchor="ra")


class _Scale:
    """Bytes to pixels, in the unit that suits the largest."""

    def __init__(self, most: float, top: int, bottom: int) -> None:
        self._most = most * 1.06
        self._top, self._bottom = top, bottom

    def y(self, value: float) -> float:
        return self._bottom - (self._bottom - self._top) * min(value, self._most) / self._most

    def marks(self) -> list[tuple[float, str]]:
        unit, name = _unit(self._most)
        lines = max(2, (self._bottom - self._top) // 32)
        return [(value * unit, f"{value:g} {name}") for value in _nice_steps(self._most / unit, lines)]


def _unit(most: float) -> tuple[float, str]:
    names = ("B", "KiB", "MiB", "GiB", "TiB")
    power = max(0, min(len(names) - 1, int(math.log2(most) // 10))) if most >= 1 else 0
    return 1024.0**power, names[power]


def _nice_steps(most: float, count: int) -> list[float]:
    """0 and multiples of 1, 2 or 5 times a power of ten up to `most`, about `count` of them."""
    if most <= 0:
        return [0.0]
    rough = most / max(1, count)
    power = 10.0 ** math.floor(math.log10(rough))
    steps = [times * power for times in (1, 2, 5, 10)]
    # A scale with nothing but its 0 tells nothing.
    step = next((step for step in steps if rough * 0.999 <= step <= most), max(step for step in steps if step <= most))
    return [float(f"{number * step:.12g}") for number in range(int(most / step * 1.0001) + 1)]


def _busy_columns(
    busy: Sequence[tuple[float, float, str]], seconds: float, columns: int, names: dict[str, str]
) -> list[dict[str, float]]:
    """For each column of pixels, the share of its time that each thing took."""
    found: list[dict[str, float]] = [{} for _ in range(columns)]
    if seconds <= 0:
        return found
    wide = seconds / columns
    for start, length, name in busy:
        begin, end = max(start, 0.0), min(start + length, seconds)
        column = int(begin / wide)
        while column < columns and column * wide < end:
            inside = min(end, (column + 1) * wide) - max(begin, column * wide)
            if inside > 0:
                found[column][name] = min(1.0, found[column].get(name, 0.0) + inside / wide)
            column += 1
    return [{name: shares[name] for name in names if name in shares} for shares in found]
