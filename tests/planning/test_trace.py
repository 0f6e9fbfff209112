"""Traces and uses: the orders assumed before the first iteration, exchange, spans, next uses."""

from __future__ import annotations

import pytest
from hypothesis import given, settings

from lightning_ptm.errors import ConfigError
from lightning_ptm.planning.lifetime import Span, uses_of
from lightning_ptm.planning.trace import (
    TensorUse,
    Tick,
    Trace,
    forward_trace,
    one_pass,
    sequential_trace,
    two_batches_trace,
    without_units,
)
from lightning_ptm.terms import Phase

from .models import even_layout, traces


def test_the_assumed_order_is_forward_then_backward_under_a_live_root() -> None:
    trace = sequential_trace(even_layout([1, 1, 1]))
    assert [(tick.unit, tick.phase, tick.live) for tick in trace.ticks] == [
        (0, Phase.FORWARD, (0,)),
        (1, Phase.FORWARD, (0, 1)),
        (2, Phase.FORWARD, (0, 2)),
        (2, Phase.BACKWARD, (0, 2)),
        (1, Phase.BACKWARD, (0, 1)),
        (0, Phase.BACKWARD, (0,)),
    ]
    assert forward_trace(even_layout([1, 1, 1])).ticks == trace.ticks[:3]


def test_a_trace_without_some_units() -> None:
    order = [(0, "f"), (1, "f"), (2, "f"), (3, "f"), (4, "f"), (4, "b"), (3, "b"), (2, "b"), (1, "b"), (0, "b")]
    phases = {"f": Phase.FORWARD, "b": Phase.BACKWARD}
    trace = Trace(tuple(Tick(unit, phases[phase], (0, unit) if unit else (0,)) for unit, phase in order))
    assert [tick.unit for tick in without_units(trace, {2, 3}).ticks] == [0, 1, 4, 4, 1, 0]


def test_two_halves_of_a_batch_are_in_two_units_at_once() -> None:
    trace = two_batches_trace(even_layout([1, 1, 1]))
    assert [(tick.unit, tick.phase, tick.live) for tick in trace.ticks] == [
        (0, Phase.FORWARD, (0,)),
        (1, Phase.FORWARD, (0, 1)),
        (2, Phase.FORWARD, (0, 1, 2)),
        (2, Phase.BACKWARD, (0, 2)),
        (1, Phase.BACKWARD, (0, 1, 2)),
        (0, Phase.BACKWARD, (0,)),
    ]
    assert two_batches_trace(even_layout([1])).ticks == sequential_trace(even_layout([1])).ticks


@pytest.mark.parametrize(
    ("unit", "live", "non_model_bytes"), [(1, (0,), 0), (0, (1, 0), 0), (0, (0, 0), 0), (0, (0,), -1), (-1, (-1,), 0)]
)
def test_ticks_that_cannot_be_are_refused(unit: int, live: tuple[int, ...], non_model_bytes: int) -> None:
    with pytest.raises(ConfigError):
        Tick(unit, Phase.FORWARD, live, non_model_bytes)


def test_a_unit_that_the_model_does_not_have_is_refused() -> None:
    with pytest.raises(ConfigError, match="uses unit 1, but the model has 1 units"):
        uses_of(Trace((Tick(1, Phase.FORWARD, (1,)),)), 1)


def test_spans_of_the_assumed_order() -> None:
    uses = uses_of(sequential_trace(even_layout([1, 1, 1])), 3)
    assert [use.spans() for use in uses.units] == [(Span(0, 5),), (Span(1, 1), Span(4, 4)), (Span(2, 3),)]


@settings(max_examples=60, deadline=None)
@given(traces(3))
def test_the_next_use_is_the_first_live_tick_after(trace: Trace) -> None:
    uses = uses_of(trace, 3)
    for unit in range(3):
        for tick in range(-1, len(trace.ticks)):
            later = [number for number in range(tick + 1, len(trace.ticks)) if unit in trace.ticks[number].live]
            assert uses.next_use(unit, tick) == min(later, default=len(trace.ticks))
        live = [number for number, tick in enumerate(trace.ticks) if unit in tick.live]
        covered = [number for span in uses.units[unit].spans() for number in range(span.first, span.end + 1)]
        assert covered == live


def forward(*units: int) -> Trace:
    return Trace(tuple(Tick(unit, Phase.FORWARD, (0, unit) if unit else (0,)) for unit in units))


@pytest.mark.parametrize(
    ("units", "first"),
    [
        ((0, 1, 2, 3, 1, 2, 3, 1, 2, 3), (0, 1, 2, 3)),
        ((0, 1, 1, 2, 1, 1, 2), (0, 1, 1, 2)),
        ((0, 1, 2, 3), (0, 1, 2, 3)),
        ((0, 1, 2, 3, 1, 3), (0, 1, 2, 3, 1, 3)),
        ((0, 1, 2, 1), (0, 1, 2, 1)),
        ((0,), (0,)),
        ((0, 1, 1), (0, 1)),
    ],
)
def test_passes_that_repeat_each_other_are_one(units: tuple[int, ...], first: tuple[int, ...]) -> None:
    uses = (TensorUse(0, "w", 0, len(units) - 1, 0.5, 0.0),)
    found = one_pass(Trace(forward(*units).ticks, uses))
    assert found.ticks == forward(*first).ticks
    assert found.tensors[0].end_id == len(first) - 1
