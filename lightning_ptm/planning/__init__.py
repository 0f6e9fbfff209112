"""Planning: where model states live, what moves when, and whether that works, decided before anything runs.

Pure: standard library only; no torch, no clock, no rank. In order of use: `build_layout`, a trace
(`sequential_trace` or the tracer's), `place`, `schedule`, `simulate`, `render`.
"""

from __future__ import annotations

from lightning_ptm.planning.homes import Budget, Homes, Placement, Wishes
from lightning_ptm.planning.layout import (
    FlatLayout,
    ModelLayout,
    ParameterSlot,
    ParameterSpec,
    Piece,
    UnitSpec,
    build_layout,
)
from lightning_ptm.planning.lifetime import Span, UnitUse, Uses, uses_of
from lightning_ptm.planning.placement import place
from lightning_ptm.planning.plan import Plan, Task
from lightning_ptm.planning.render import render
from lightning_ptm.planning.report import format_bytes
from lightning_ptm.planning.schedule import schedule
from lightning_ptm.planning.simulate import Simulation, TierUse, simulate
from lightning_ptm.planning.trace import TensorUse, Tick, Trace, forward_trace, sequential_trace
from lightning_ptm.terms import Link

__all__ = [
    "Budget",
    "FlatLayout",
    "Homes",
    "Link",
    "ModelLayout",
    "ParameterSlot",
    "ParameterSpec",
    "Piece",
    "Placement",
    "Plan",
    "Simulation",
    "Span",
    "Task",
    "TensorUse",
    "Tick",
    "TierUse",
    "Trace",
    "UnitSpec",
    "UnitUse",
    "Uses",
    "Wishes",
    "build_layout",
    "format_bytes",
    "forward_trace",
    "place",
    "render",
    "schedule",
    "sequential_trace",
    "simulate",
    "uses_of",
]
