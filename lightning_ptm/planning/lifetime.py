"""When each unit's states are used: spans, next uses (section 4.2 of the paper, "Tensor Life-Time").

Owns the translation of a trace into questions that the planner asks. Knows no bytes and no tiers. Built once per trace;
every question afterwards costs at most a binary search.

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
    """Ticks first..end (both included) without a break."""

    first: int
    end: int


@dataclass(frozen=True, slots=True)
class UnitUse:
    """When one unit is live: all ticks, and for each backward pass that it takes part in, from its first tick to its last."""

    ticks: tuple[int, ...]
    backward: tuple[Span, ...]

    def spans(self) -> tuple[Span, ...]:
        """The unit's ticks as maximal runs of consecutive ones."""
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
        """The first tick after `tick` at which the unit is live; `tick_count` when it is not needed any more."""
        ticks = self.units[unit].ticks
        position = bisect_right(ticks, tick)
        return ticks[position] if position < len(ticks) else self.tick_count


def uses_of(trace: Trace, unit_count: int) -> Uses:
    """Index a trace by unit.

    Raises:
        ConfigError: a tick names a unit that the model does not have.
    """
    ticks: list[list[int]] = [[] for _ in range(unit_count)]
    backward: list[dict[int, Span]] = [{} for _ in range(unit_count)]
    for number, tick in enumerate(trace.ticks):
        if tick.live[-1] >= unit_count:
            raise ConfigError(
                f"tick {number} uses unit {tick.live[-1]}, the model has {unit_count}; the trace is another model's"
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
