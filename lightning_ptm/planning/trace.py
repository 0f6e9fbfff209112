"""Trace: what one iteration used, tick by tick; the planner's view of time (sections 4.2 and 5 of the paper).

Owns the record of an iteration, as the tracer observed it or as it is assumed before the first one. Reads no clock: the
tracer measures the seconds. Equal traces give equal plans.

I1: tick i of a trace is its i-th forward or backward of a unit; the tick's number is the paper's trigger id.
I2: a tick's own unit is among its live units; live units are sorted and distinct.
I3: unit 0 is the root.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace

from lightning_ptm.errors import ConfigError
from lightning_ptm.planning.layout import ModelLayout
from lightning_ptm.terms import Phase


@dataclass(frozen=True, slots=True)
class Tick:
    """One forward or backward of one unit.

    Args:
        unit: the unit that computes.
        phase: forward or backward. A recomputed forward belongs to the backward tick that needs it.
        live: all units whose parameters must be gathered during the tick, `unit` included; in a backward tick also
            those that may receive gradients.
        non_model_bytes: the most device bytes of everything but model states (activations...) during the tick, where
            they were measured. Reported, not planned: budgets are for pages.
        seconds: compute time of the tick; 0.0 when not measured.
        passes: number of backward passes of the iteration that were over when the tick began; with several
            micro-batches there are several.
    """

    unit: int
    phase: Phase
    live: tuple[int, ...]
    non_model_bytes: int = 0
    seconds: float = 0.0
    passes: int = 0

    def __post_init__(self) -> None:
        if self.unit not in self.live:
            raise ConfigError(
                f"unit {self.unit} computes in a tick in which only units {self.live} are live; add it to them"
            )
        if list(self.live) != sorted(set(self.live)) or self.live[0] < 0:
            raise ConfigError(
                f"live units {self.live} of a tick are not distinct, sorted and at least 0, so they cannot be looked up; "
                "sort them"
            )
        if self.non_model_bytes < 0 or self.seconds < 0:
            raise ConfigError(f"a tick of unit {self.unit} has negative bytes or seconds; measure again")


@dataclass(frozen=True, slots=True)
class TensorUse:
    """A row of the paper's Tracer table: a tensor, its first and last use, and its compute time.

    Args:
        tensor_id: identity of the tensor within the trace.
        name: name of the parameter.
        first_id: first tick of its use.
        end_id: last tick of its use.
        cpu_time: seconds that its use took on the CPU.
        gpu_time: seconds that its use took on the GPU; 0.0 without one.
    """

    tensor_id: int
    name: str
    first_id: int
    end_id: int
    cpu_time: float
    gpu_time: float


@dataclass(frozen=True, slots=True)
class Trace:
    """One iteration: its ticks in order, and the table of tensors if it was measured."""

    ticks: tuple[Tick, ...]
    tensors: tuple[TensorUse, ...] = ()

    @property
    def non_model_peak_bytes(self) -> int:
        """The most device bytes of everything but model states at any tick."""
        return max((tick.non_model_bytes for tick in self.ticks), default=0)


def one_pass(trace: Trace) -> Trace:
    """Returns the first of several equal forward passes after the root's tick (token-by-token generation).

    Any other trace is returned unchanged. The table of tensors remains that of the whole iteration, with ids limited to
    the last tick.
    """
    rest = [(tick.unit, tick.phase, tick.live) for tick in trace.ticks[1:]]
    for period in range(1, len(rest) // 2 + 1):
        # The cheap tests come first: nearly all periods fail them.
        if len(rest) % period == 0 and rest[period] == rest[0] and rest[period:] == rest[:-period]:
            last = period
            uses = (
                replace(use, first_id=min(use.first_id, last), end_id=min(use.end_id, last)) for use in trace.tensors
            )
            return Trace(trace.ticks[: 1 + period], tuple(uses))
    return trace


def forward_trace(layout: ModelLayout) -> Trace:
    """Returns the order assumed for evaluation: the root, live throughout, then the other units in order."""
    return Trace(tuple(_tick(unit, Phase.FORWARD) for unit in range(len(layout.units))))


def sequential_trace(layout: ModelLayout) -> Trace:
    """Returns the order assumed before the first iteration: forward in the order of units, then backward in reverse.

    The root is live throughout: embeddings and head are used at both ends of forward and backward.
    """
    backward = tuple(_tick(unit, Phase.BACKWARD) for unit in reversed(range(len(layout.units))))
    return Trace(forward_trace(layout).ticks + backward)


def two_batches_trace(layout: ModelLayout) -> Trace:
    """Returns the order assumed before the first iteration that computes two halves of a batch in turns.

    A tick stands for both halves: while one of them is in a unit, the other one is in the unit before (in the forward) or
    after (in the backward), or in the same.
    """
    last = len(layout.units) - 1
    forward = [_tick(unit, Phase.FORWARD, max(0, unit - 1)) for unit in range(last + 1)]
    backward = [_tick(unit, Phase.BACKWARD, min(unit + 1, last) if unit else 0) for unit in range(last, -1, -1)]
    return Trace((*forward, *backward))


def _tick(unit: int, phase: Phase, other: int = 0) -> Tick:
    """Returns a tick of a unit during which the root and another unit are live, too."""
    return Tick(unit, phase, tuple(sorted({0, unit, other})))


def without_units(trace: Trace, units: Collection[int]) -> Trace:
    """Returns the trace without the ticks of some units."""
    return Trace(tuple(tick for tick in trace.ticks if tick.unit not in units), trace.tensors) if units else trace
