"""Index of a trace by unit: when each unit is used, and next uses (section 4.2 of the paper, "Tensor Life-Time").

Answers the planner's questions about a trace. Knows no bytes and no tiers. Built once per trace; every question
afterwards costs at most a binary search.

I1: the spans of a unit are disjoint, in order, and none touches the next.
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass

from lightning_ptm.errors import ConfigError
from lightning_ptm.planning.trace import Trace
from lightning_ptm.terms import Phase


@dataclass(frozen=True, slots=True)
class Span:
    """An interval of ticks, `first` and `end` included."""

    first: int
    end: int


@dataclass(frozen=True, slots=True)
class UnitUse:
    """The ticks of one unit: all of them, and for each of its backward passes the span from first tick to last."""

    ticks: tuple[int, ...]
    backward: tuple[Span, ...]

    def spans(self) -> tuple[Span, ...]:
        """Returns the unit's ticks as maximal runs of consecutive ticks."""
        spans: list[Span] = []
        for tick in self.ticks:
            if spans and tick == spans[-1].end + 1:
                spans[-1] = Span(spans[-1].first, tick)
            else:
                spans.append(Span(tick, tick))
        return tuple(spans)


@dataclass(frozen=True, slots=True)
class Uses:
    """The uses of every unit in one trace."""

    tick_count: int
    units: tuple[UnitUse, ...]

    def next_use(self, unit: int, tick: int) -> int:
        """Returns the first tick after `tick` at which the unit is live; `tick_count` when there is none."""
        ticks = self.units[unit].ticks
        position = bisect_right(ticks, tick)
        return ticks[position] if position < len(ticks) else self.tick_count


def uses_of(trace: Trace, unit_count: int) -> Uses:
    """Indexes a trace by unit.

    Raises:
        ConfigError: a tick names a unit that the model does not have.
    """
    ticks: list[list[int]] = [[] for _ in range(unit_count)]
    backward: list[dict[int, Span]] = [{} for _ in range(unit_count)]
    for number, tick in enumerate(trace.ticks):
        if tick.live[-1] >= unit_count:
            raise ConfigError(
                f"tick {number} uses unit {tick.live[-1]}, but the model has {unit_count} units, so the trace is of another "
                "model; trace this one"
            )
        for unit in tick.live:
            ticks[unit].append(number)
            if tick.phase is Phase.BACKWARD:
                begun = backward[unit].get(tick.passes)
                backward[unit][tick.passes] = Span(begun.first if begun else number, number)
    return Uses(
        len(trace.ticks),
        tuple(UnitUse(tuple(all_ticks), tuple(late.values())) for all_ticks, late in zip(ticks, backward, strict=True)),
    )
