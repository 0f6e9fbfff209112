"""Plots of bytes over ticks and of busy resources over time, drawn with matplotlib (the extra `plots`).

Knows numbers and names, not their meaning. Imports matplotlib when something is drawn.

I1: what exceeds a panel's limit has the colour OVER, and nothing else has. I2: a tick or busy interval narrower than a pixel
is still visible: a column shows the largest of its ticks, and the busy share of its time.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lightning_ptm.config import format_bytes
from lightning_ptm.errors import ConfigError

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Distinguishable with colour blindness, and in print: after Okabe and Ito.
BLUE, SKY, GREEN, ORANGE, PURPLE, YELLOW = "#0072b2", "#56b4e9", "#009e73", "#e69f00", "#cc79a7", "#f0e442"
VERMILION = "#d55e00"
FREE = "#e4e7ea"
OVER = "#d00000"
_INK = "#1b1f24"
_PER_INCH = 100
_NARROW = 700
"""Pixels of a figure below which legends are above panels, and not beside them."""
_IN_REACH = 5
"""A limit above this multiple of the largest value would flatten the plot, so it is given in words instead."""


@dataclass(frozen=True, slots=True)
class Series:
    """A value for each tick, drawn as an area or as a line; a shorter series ends early."""

    name: str
    values: Sequence[float]
    colour: str


@dataclass(frozen=True, slots=True)
class BytesPanel:
    """Bytes over ticks.

    Attributes:
        layers: areas, stacked in this order.
        lines: lines in addition to the areas, from zero.
        limit, limit_name: what neither may exceed, and its name.
        bound, bound_name: a second limit, drawn dashed for information only, and its name.
        marks: (tick, name) of each phase's beginning, in order.
        axis: whether ticks are numbered and marks named below the panel; a panel right under it can do that for both.
        names: of ticks, shown in place of their numbers if there is room for all.
        weight: share of the figure's height.
    """

    title: str
    layers: Sequence[Series]
    limit_name: str
    limit: float
    lines: Sequence[Series] = ()
    bound_name: str = ""
    bound: float = 0.0
    marks: Sequence[tuple[int, str]] = ()
    axis: bool = True
    names: Sequence[str] = ()
    weight: float = 1.0


@dataclass(frozen=True, slots=True)
class BusyRow:
    """A resource that is busy or idle: busy intervals (start, seconds, activity), and a note at the end of the row."""

    name: str
    busy: Sequence[tuple[float, float, str]]
    note: str


@dataclass(frozen=True, slots=True)
class BusyPanel:
    """Busy intervals from 0 to `seconds`, by resource; `colours` by activity, in the order of the legend."""

    title: str
    rows: Sequence[BusyRow]
    seconds: float
    colours: dict[str, str]
    weight: float = 1.6


def need_matplotlib() -> None:
    """Raises ConfigError if matplotlib is missing."""
    try:
        import matplotlib  # noqa: F401
    except ImportError as error:
        raise ConfigError(
            "matplotlib is missing, so no picture can be drawn; pip install 'lightning_ptm[plots]'"
        ) from error


def draw(title: str, panels: Sequence[BytesPanel | BusyPanel], width: int, height: int) -> Figure:
    """A figure of `width` x `height` pixels, with one panel under the other.

    Raises:
        ConfigError: no matplotlib.
    """
    need_matplotlib()
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure((width / _PER_INCH, height / _PER_INCH), dpi=_PER_INCH, layout="constrained")
    FigureCanvasAgg(figure)
    figure.suptitle(title, x=0.01, ha="left", fontsize=13)
    if panels:
        grid = figure.subplots(len(panels), height_ratios=[panel.weight for panel in panels], squeeze=False)
        for panel, axes in zip(panels, grid[:, 0], strict=True):
            if isinstance(panel, BusyPanel) or width >= _NARROW:
                axes.set_title(panel.title, loc="left", fontsize=12, fontweight="bold", pad=4)
            axes.tick_params(labelsize=10)
            if isinstance(panel, BusyPanel):
                _draw_busy(axes, panel, width // 2)
            else:
                _draw_bytes(axes, panel, width)
    figure.draw_without_rendering()
    figure.set_layout_engine("none")  # each further drawing would move the panels by a pixel
    return figure


def check_target(path: Path, setting: str) -> None:
    """Refuses a path to which no PNG can be written, before anything is computed.

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
    need_matplotlib()


def save(figure: Figure, path: Path) -> None:
    """Writes a PNG file.

    Raises:
        ConfigError: the file cannot be written.
    """
    try:
        figure.savefig(path, format="png")
    except OSError as error:
        raise ConfigError(f"the picture cannot be written to {path} ({error}); name another file") from error


def _draw_bytes(axes: Axes, panel: BytesPanel, width: int) -> None:
    import numpy

    ticks = max([1, *(len(each.values) for each in (*panel.layers, *panel.lines))])
    count = min(ticks, width // 2)  # a column is wider than a pixel
    edges = numpy.arange(count + 1) * ticks / count

    def columns(series: Series) -> Any:
        values = numpy.full(ticks, numpy.nan)
        values[: len(series.values)] = series.values
        return values

    areas = numpy.array([columns(layer) for layer in panel.layers]).reshape(-1, ticks)
    stacks = numpy.cumsum(numpy.nan_to_num(areas), axis=0)
    first = numpy.arange(count) * ticks // count  # of each column
    if len(stacks):
        fullest = [
            start + int(part.argmax()) for start, part in zip(first, numpy.split(stacks[-1], first[1:]), strict=True)
        ]
        stacks = stacks[:, fullest]
    lines = [numpy.fmax.reduceat(columns(line), first) for line in panel.lines]
    most = max(1.0, *(float(numpy.nanmax(each, initial=0.0)) for each in (*stacks[-1:], *lines)))
    shown = [limit for limit in (panel.limit, panel.bound) if 0 < limit <= most * _IN_REACH]
    unit, unit_name = _unit(max(most, *shown, 0.0))
    limit = panel.limit or numpy.inf
    below = numpy.zeros(count)
    for layer, top in zip(panel.layers, stacks, strict=True):
        for low, high, colour, name in (
            (below, numpy.minimum(top, limit), layer.colour, layer.name),
            (limit, top, OVER, None),
        ):
            low = numpy.maximum(low, below)
            axes.stairs(
                numpy.fmax(low, high) / unit,
                edges,
                baseline=low / unit,
                fill=True,
                color=colour,
                label=name,
                lw=0,
                snap=True,
            )
        below = top
    for line, values in zip(panel.lines, lines, strict=True):
        axes.stairs(values / unit, edges, baseline=None, color=line.colour, lw=2, label=line.name)
        axes.stairs(numpy.where(values > limit, values, numpy.nan) / unit, edges, baseline=None, color=OVER, lw=2)
    over = most > limit
    for name, value, style in ((panel.limit_name, panel.limit, "solid"), (panel.bound_name, panel.bound, "dashed")):
        if value in shown:
            colour = OVER if over and value == panel.limit else _INK
            axes.axhline(value / unit, color=colour, linestyle=style, lw=1.5, label=f"{name} {format_bytes(value)}")
        elif value:
            axes.plot([], [], " ", label=f"{name} {format_bytes(value)} (above)")
    if over:
        axes.fill_between([], [], [], color=OVER, label="over the limit")
    axes.set(xlim=(0, ticks), ylim=(0, max(most, *shown, 0.0) * 1.06 / unit), ylabel=unit_name)
    axes.yaxis.label.set_fontsize(11)
    axes.locator_params(axis="y", nbins=4)
    axes.grid(axis="y", lw=0.5, alpha=0.5)
    if width < _NARROW:
        legend = axes.legend(
            loc="lower left",
            bbox_to_anchor=(0, 0.98),
            fontsize=10,
            frameon=False,
            ncols=2,
            borderpad=0,
            handlelength=1.3,
            columnspacing=1.0,
            borderaxespad=0.3,
        )
        legend.set_title(panel.title, {"size": 12, "weight": "bold"})
        legend.set_alignment("left")
    else:
        axes.legend(loc="upper left", bbox_to_anchor=(1.0, 1.05), fontsize=10, frameon=False)
    _draw_ticks(axes, panel, ticks, width)


def _draw_ticks(axes: Axes, panel: BytesPanel, ticks: int, width: int) -> None:
    from matplotlib.ticker import MaxNLocator

    names = [name.replace(".", "\n") for name in panel.names]
    letters = ticks * max((len(line) for name in names for line in name.split("\n")), default=0)
    narrow = width < _NARROW
    named = len(names) == ticks and letters * (7 if narrow else 8) < width * (0.85 if narrow else 0.6)
    axes.xaxis.set_major_locator(MaxNLocator(12, integer=True, steps=[1, 2, 5, 10]))
    if named:
        axes.set_xticks([tick + 0.5 for tick in range(ticks)], names, fontsize=8 if narrow else 9)
    axes.tick_params(axis="x", labelbottom=panel.axis, length=0 if named else 3)
    for tick, _ in panel.marks:
        axes.axvline(tick, color=_INK, lw=0.8)
    if not panel.axis:
        return
    axes.set_xlabel(
        "unit that computes" if named else "tick", fontsize=11, labelpad=(32 if named else 18) if panel.marks else 4
    )
    if panel.marks:
        ends = [*(tick for tick, _ in panel.marks[1:]), ticks]
        middles = [(tick + end) / 2 for (tick, _), end in zip(panel.marks, ends, strict=True)]
        below = axes.secondary_xaxis(location=0)
        below.set_xticks(middles, [name for _, name in panel.marks], fontsize=11)
        below.tick_params(length=0, pad=34 if named else 20)


def _draw_busy(axes: Axes, panel: BusyPanel, columns: int) -> None:
    import numpy

    seconds = panel.seconds or 1.0
    edges = numpy.linspace(0.0, seconds, columns + 1)
    for number, row in enumerate(reversed(panel.rows)):
        base = numpy.full(columns, float(number))
        for name, colour in panel.colours.items():
            share = numpy.zeros(columns)
            for start, length, done in row.busy:
                if done == name:  # of each column, the time inside of the stretch
                    share += numpy.diff(numpy.clip(edges, start, start + length)) * columns / seconds
            share = numpy.where(share > 0, numpy.clip(share, 0.06, 1.0), 0.0) * 0.8
            axes.stairs(base + share, edges, baseline=base, fill=True, color=colour, lw=0, snap=True)
            base = base + share
    rows = range(len(panel.rows))
    axes.set(xlim=(0, seconds), ylim=(-0.1, len(panel.rows)), yticks=[number + 0.4 for number in rows])
    axes.set_xlabel("seconds", loc="left", fontsize=11)
    axes.set_yticklabels([row.name for row in reversed(panel.rows)])
    notes = axes.secondary_yaxis("right")
    notes.set_yticks([number + 0.4 for number in rows], [row.note for row in reversed(panel.rows)], fontsize=10)
    notes.tick_params(length=0)
    axes.hlines(rows, 0, seconds, color=FREE, lw=0.8)
    for name, colour in panel.colours.items():
        axes.fill_between([], [], [], color=colour, label=name)
    if panel.colours:
        axes.legend(loc="upper right", bbox_to_anchor=(1.0, -0.1), ncols=len(panel.colours), fontsize=10, frameon=False)


def _unit(most: float) -> tuple[float, str]:
    units = [(1024.0**power, name) for power, name in enumerate(("B", "KiB", "MiB", "GiB", "TiB"))]
    return list(itertools.takewhile(lambda unit: unit[0] <= max(1.0, most), units))[-1]
