"""Callback that plots the bytes of pages in each tier, tick by tick: planned and measured.

Owns the tables of one recorded batch, and the content of its figure; lightning_ptm/drawing.py draws it. I1: the figure needs
matplotlib; without it there is a warning and no figure.
"""

from __future__ import annotations

import csv
import dataclasses
from typing import TYPE_CHECKING, Any

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.utilities import rank_zero_warn

from lightning_ptm import AngelPTMStrategy, Event, EventKind
from lightning_ptm.config import format_bytes
from lightning_ptm.drawing import BLUE, GREEN, ORANGE, PURPLE, SKY, YELLOW, BytesPanel, Series, draw, save
from lightning_ptm.errors import ConfigError

from .outside_fit import OutsideFit
from .recorder import Batch, Recorder
from .where import boards_of, file_of, loop_tag, own_name, pages_of

if TYPE_CHECKING:
    from matplotlib.figure import Figure

WIDTH, HEIGHT = 600, 240
"""Size of one tier's panel, in pixels. TensorBoard shows pictures about 350 pixels wide, in which letters must be legible."""
TITLE = 130
_MOST_MARKS = 12
"""Largest number of changes between forward and backward that are named."""
PLANNED = "#1b1f24"
_PASSING = ("gathered units", "values in transit")
"""Uses of pages that come and go during a run; pages of all others are held from set-up, or from the first gradient, on."""
_COLOURS = {"parameters": SKY, "master parameters": GREEN, "optimizer states": ORANGE, "gradients": PURPLE}
_OTHERS, PASSING = YELLOW, BLUE
"""Colours of other uses that are held, and of bytes that come and go."""


@dataclasses.dataclass(frozen=True, slots=True)
class Curve:
    """Bytes of one tier.

    Attributes:
        planned, measured: bytes at each tick; shorter if no plan was followed at the last ticks.
        held: bytes of the pages that are held throughout, by use, in the order of the inventory.
        room: the bytes of all its pages.
        budget: the bytes that the plan may use (see PlannedBytes).
    """

    tier: str
    planned: tuple[int, ...]
    measured: tuple[int, ...]
    room: int
    budget: int
    held: tuple[tuple[str, int], ...] = ()

    def stacked(self) -> dict[str, tuple[int, ...]]:
        """`measured` by use: what is held, and above it what comes and goes."""
        uses, left = {}, self.measured
        for name, size in self.held:
            uses[name] = tuple(min(size, there) for there in left)
            left = tuple(there - own for there, own in zip(left, uses[name], strict=True))
        if any(left) or not uses:
            uses["gathered, in transit"] = left
        return uses


class MemoryTimeline(Recorder, OutsideFit):
    """Shows the bytes of pages in each tier at each tick of one batch, planned and measured:

    - TensorBoard's image `memory/timeline`;
    - the same figure, `memory_timeline.png`, and its numbers, `memory_timeline.csv`, in the logger's folder, or without a
      logger in `lightning_ptm_logs` in the Trainer's root folder;
    - `memory_inventory.csv` there: the use of each tier's pages;
    - `memory/<tier>_MB`, the bytes in use after a step, whenever the Trainer logs; in validate, test and predict after a
      batch, as `memory/<tier>_MB/<loop>`.

    Measured is the larger of the values at a tick's begin and end, by the uses of `AngelPTMStrategy.inventory()`. Planned is
    the maximum within a tick, and they differ: what is fetched for later units during a tick may not have its pages yet when
    the tick ends, and gradients keep their pages until they are on disk, if there is room. A point after the last tick has
    the bytes at the end of the batch. Activations and other memory outside of pages are in
    neither. If a batch runs the plan several times, a tick shows the largest value. Numbers are of rank 0.

    Does nothing with other strategies. A Trainer's second MemoryTimeline adds `_2` to its names. In validate, test and
    predict, file names end in `_<loop>` (`memory_timeline_test.csv`) and TensorBoard names in `/<loop>`. `fast_dev_run`
    writes nothing.

    Args:
        batch: number of the recorded batch, from 0; the first two are traced and planned again.
    """

    def __init__(self, batch: int = 2) -> None:
        OutsideFit.__init__(self)
        Recorder.__init__(self, batch, 1)
        self.curves: tuple[Curve, ...] = ()
        """The curves of the last run."""

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Logs the bytes in use."""
        super().on_train_batch_end(trainer, pl_module, outputs, batch, batch_idx)
        strategy = pages_of(trainer)
        if strategy is not None and trainer.global_step % trainer.log_every_n_steps == 0:  # type: ignore[attr-defined]
            rooms = strategy.tier_rooms()
            pl_module.log_dict({f"memory/{room.tier}_MB": room.used_bytes / 1e6 for room in rooms}, batch_size=1)

    def loop_batch(self, trainer: Trainer, batch: Any) -> None:
        """Logs as often as in training."""
        strategy = pages_of(trainer)
        if strategy is not None and self.batches % trainer.log_every_n_steps == 0:  # type: ignore[attr-defined]
            self.log_loop(trainer, {f"memory/{room.tier}_MB": room.used_bytes / 1e6 for room in strategy.tier_rooms()})

    def recorded(self, trainer: Trainer, events: list[Event], batches: list[Batch]) -> None:
        """Writes the tables and draws the picture."""
        strategy = pages_of(trainer)
        ticks = [event for event in events if event.kind is EventKind.TICK]
        if strategy is None or not ticks:
            return
        self.curves = _curves(strategy, ticks)
        if not self.curves:
            return  # the run has no pages
        self._write(trainer, ticks)
        boards = boards_of(trainer)
        self._write_inventory(trainer, strategy)
        path = file_of(trainer, self, "memory_timeline.png")
        if path is None and not boards:
            return
        loop = trainer.state.fn.value if trainer.state.fn is not None else "a run"
        figure = picture(self.curves, f"batch {batches[0].number} of {loop}", _names(ticks))
        if figure is None:
            return
        if path is not None:
            save(figure, path)
        for logger in boards:
            tag = loop_tag(trainer, own_name(trainer, self, "memory/timeline"))
            logger.experiment.add_figure(tag, figure, trainer.global_step)

    def _write(self, trainer: Trainer, ticks: list[Event]) -> None:
        path = file_of(trainer, self, "memory_timeline.csv")
        if path is None:
            return
        names = _names(ticks)
        count = max(len(values) for curve in self.curves for values in (curve.planned, curve.measured))
        with path.open("w", newline="") as file:
            writer = csv.writer(file)
            columns = [f"{curve.tier}_{what}_bytes" for curve in self.curves for what in ("planned", "measured")]
            writer.writerow(["tick", "name", *columns])
            for tick in range(count):
                both = [values for curve in self.curves for values in (curve.planned, curve.measured)]
                numbers = [values[tick] if tick < len(values) else "" for values in both]
                writer.writerow([tick, names[tick] if tick < len(names) else "end", *numbers])

    def _write_inventory(self, trainer: Trainer, strategy: AngelPTMStrategy) -> None:
        path = file_of(trainer, self, "memory_inventory.csv")
        if path is None:
            return
        with path.open("w", newline="") as file:
            writer = csv.writer(file)
            writer.writerow(["tier", "pages for", "bytes"])
            writer.writerows((use.tier, use.purpose, use.bytes) for use in strategy.inventory())


def _names(ticks: list[Event]) -> list[str]:
    """Names of the ticks in order: unit and phase."""
    names: dict[int, str] = {}
    for event in ticks:
        names.setdefault(event.index, event.name)
    return [names[index] for index in sorted(names)]


def _curves(strategy: AngelPTMStrategy, ticks: list[Event]) -> tuple[Curve, ...]:
    planned = {each.tier: each for each in strategy.planned_bytes()}
    most: dict[int, tuple[int, ...]] = {}
    for event in ticks:
        before = most.get(event.index, event.tier_bytes)
        most[event.index] = tuple(max(pair) for pair in zip(before, event.tier_bytes, strict=True))
    measured = [most[index] for index in sorted(most)]
    names = strategy.tier_names()
    uses = strategy.inventory()
    return tuple(
        Curve(
            room.tier,
            planned[room.tier].per_tick if room.tier in planned else (),
            (*(sizes[names.index(room.tier)] for sizes in measured), room.used_bytes),
            room.bytes,
            planned[room.tier].budget if room.tier in planned else room.bytes,
            tuple((use.purpose, use.bytes) for use in uses if use.tier == room.tier and use.purpose not in _PASSING),
        )
        for room in strategy.tier_rooms()
    )


def picture(curves: tuple[Curve, ...], of: str, names: list[str]) -> Figure | None:
    """A figure: for each tier, measured bytes as stacked areas by use and planned ones as a line, over ticks, with the limit
    of its pages; what exceeds the limit is red. Without matplotlib None, with a warning.

    Args:
        of: what was recorded, for the title.
        names: of ticks, each a unit and a phase.
    """
    units, phases = zip(*(name.rpartition(" ")[::2] for name in names), strict=True) if names else ((), ())
    marks = [(tick, phase) for tick, phase in enumerate(phases) if not tick or phase != phases[tick - 1]]
    panels = [
        BytesPanel(
            title=curve.tier.upper(),
            layers=[
                Series(f"{use} {format_bytes(max(values, default=0))}", values, _COLOURS.get(use, _OTHERS))
                if use in dict(curve.held)
                else Series(f"{use} {format_bytes(max(values, default=0))}", values, PASSING)
                for use, values in curve.stacked().items()
            ],
            lines=[Series(f"planned {format_bytes(max(curve.planned, default=0))}", curve.planned, PLANNED)],
            limit_name="limit",
            limit=max(curve.budget, curve.room),
            bound_name="allocated",
            bound=curve.room,
            axis=curve is curves[-1],
            marks=marks if len(marks) <= _MOST_MARKS else (),
            names=[*(".".join(unit.split(".")[-2:]) for unit in units), "end"],
        )
        for curve in curves
    ]
    try:
        title = (
            f"Bytes of pages in each tier, {of}\n"
            "measured (areas): at a tick's begin or end\n"
            "planned (line): within a tick, with fetches for later ones"
        )
        return draw(title, panels, WIDTH, HEIGHT * len(curves) + TITLE)
    except ConfigError as error:
        rank_zero_warn(f"MemoryTimeline: {error}; memory_timeline.csv has its numbers")
        return None
