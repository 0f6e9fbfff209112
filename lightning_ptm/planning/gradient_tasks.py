"""Tasks of gradients (reduce, offload, update) for virtual runs.

In a run, the gradients' own events trigger them, so no plan contains them. Owns the triggers of these tasks. A unit's
gradients are reduced and offloaded after the last tick of a backward pass that may write them. They go to the update
after the unit's last tick of all; if the update needs all gradients (`keeps_gradients`), after the last tick of the
iteration. With lock-free updates that is when gradients are handed over: the arithmetic is asynchronous
(shared_cores.py).
"""

from __future__ import annotations

from collections.abc import Iterator

from lightning_ptm.planning.device_demand import gradient_spans
from lightning_ptm.planning.layout import ModelLayout
from lightning_ptm.planning.lifetime import uses_of
from lightning_ptm.planning.placement_data import Placement
from lightning_ptm.planning.plan import Task
from lightning_ptm.planning.trace import Trace
from lightning_ptm.terms import Kind, Operation


def gradient_tasks(layout: ModelLayout, placement: Placement, trace: Trace) -> Iterator[Task]:
    """Returns the REDUCE, OFFLOAD and UPDATE tasks of one iteration, of one micro-batch or several."""
    uses = uses_of(trace, len(layout.units))
    for unit, use in enumerate(uses.units):
        gradients = placement.gradients[unit]
        if not gradients.rows or not use.backward:
            continue
        for written in gradient_spans(use, passing=gradients.pass_through):
            if any(flat.shared and flat.trainable for flat in layout.flats_of(unit)):
                yield Task(Operation.REDUCE, unit, Kind.GRADIENT, written.end + 1)
            if not placement.homes[unit].gradient.computes:
                yield Task(Operation.OFFLOAD, unit, Kind.GRADIENT, written.end + 1)
        # A forward may follow the unit's last backward and must see the parameters of this step, so: after the last tick.
        trigger = uses.tick_count if placement.keeps_gradients else use.ticks[-1] + 1
        yield Task(Operation.UPDATE, unit, Kind.MASTER, trigger)
