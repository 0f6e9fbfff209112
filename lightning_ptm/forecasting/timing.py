"""Steady-state time of one optimizer step on a given machine, from a replay of its plan.

Knows tasks and bytes. Does not check the plan: simulate.py does.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

from lightning_ptm.forecasting.clock import Clock
from lightning_ptm.forecasting.rates import Activity, Hardware, LinkUse, Stall, Timing
from lightning_ptm.forecasting.send_order import Exchanged
from lightning_ptm.forecasting.update_extras import NO_EXTRAS, UpdateExtra
from lightning_ptm.planning.layout import ModelLayout
from lightning_ptm.planning.placement_data import Budget, Placement
from lightning_ptm.planning.plan import Plan
from lightning_ptm.planning.sharding import ModelSharding
from lightning_ptm.planning.trace import Trace

_STEPS_BEFORE = 3
"""Least number of steps that are replayed before the one that counts: the first waits for no updates, the second for no
earlier writes, the third finds no staging left by the second. With updates on the cores that compute, more steps follow until
one takes as long as the one before: the backlog in staging grows from step to step until staging is full."""
_MOST_STEPS = 16
"""Most steps that are replayed; if they still differ, the mean of all but the first ones counts."""
_ALIKE = 1e-3
"""Relative difference up to which two steps take equally long."""


def steady(
    layout: ModelLayout,
    placement: Placement,
    plan: Plan,
    trace: Trace,
    budget: Budget,
    hardware: Hardware,
    *,
    staging_chunks: float = math.inf,
    gradient_room_bytes: float = math.inf,
    micro_batches: int = 1,
    wait_for_updates: bool = True,
    root_once: bool = False,
    record: list[Activity] | None = None,
    exchanged: Exchanged | None = None,
    holders: ModelSharding | None = None,
    extras: Mapping[int, UpdateExtra] = NO_EXTRAS,
) -> Timing:
    """Returns the time of one optimizer step among many; a step begins while updates of the one before still run.

    Args:
        layout, placement, budget: layout, homes and budget of the plan.
        plan: plan of one micro-batch, which `simulate` accepts.
        trace: ticks of the micro-batch, with their seconds.
        hardware: rates of one rank.
        staging_chunks: most chunks of updates in staging between disk and CPU at once.
        gradient_room_bytes: most bytes of gradients that wait for updates after their backward.
        micro_batches: micro-batches in one optimizer step; updates belong to the last.
        wait_for_updates: whether a unit's next use waits for its update; False in lock-free mode.
        root_once: whether the root stays gathered through all micro-batches, and its gradients are reduced once.
        record: receives the activities of the step that counts, whose start is 0.
        exchanged: by tick, the exchanges of one rank before it computes.
        holders: which ranks share which flats; None: all ranks share all flats.
        extras: by flat, work of updates in addition to a pass over bytes.
    """
    activities: list[Activity] | None = None if record is None else []
    clock = Clock(
        layout,
        placement,
        budget,
        hardware,
        staging_chunks=staging_chunks,
        gradient_room_bytes=gradient_room_bytes,
        record=activities,
        holders=holders,
        extras=extras,
    )
    marks = [clock.so_far()]
    for _ in range(_MOST_STEPS):
        clock.step(
            plan,
            trace,
            exchanged or {},
            micro_batches=micro_batches,
            wait_for_updates=wait_for_updates,
            root_once=root_once,
        )
        marks.append(clock.so_far())
        alike = not hardware.shared_cores or _alike(marks[-3:])
        if len(marks) > _STEPS_BEFORE + 1 and alike:
            break
    before, after = marks[-2 if alike else _STEPS_BEFORE], marks[-1]
    steps = 1 if alike else len(marks) - 1 - _STEPS_BEFORE
    if record is not None and activities is not None:
        begin, end = marks[-2].seconds, after.seconds
        record += [
            replace(done, start_s=done.start_s - begin)
            for done in activities
            if done.start_s < end and done.start_s + done.seconds > begin
        ]
    return _a_step(before, after, steps)


def _a_step(before: Timing, after: Timing, steps: int) -> Timing:
    """Returns the mean of the steps between two marks."""
    stalled = {stall.cause: stall.seconds for stall in before.stalls}
    return Timing(
        (after.seconds - before.seconds) / steps,
        (after.compute_s - before.compute_s) / steps,
        tuple(
            LinkUse(
                new.link,
                (new.bytes - old.bytes) // steps,
                (new.busy_s - old.busy_s) / steps,
                (new.collectives - old.collectives) // steps,
            )
            for new, old in zip(after.links, before.links, strict=True)
        ),
        tuple(Stall(stall.cause, (stall.seconds - stalled.get(stall.cause, 0.0)) / steps) for stall in after.stalls),
        (after.rounds - before.rounds) // steps,
        (after.rounds_s - before.rounds_s) / steps,
    )


def _alike(marks: Sequence[Timing]) -> bool:
    """Whether the last step took as long as the one before."""
    steps = [after.seconds - before.seconds for before, after in itertools.pairwise(marks)]
    return len(steps) == 2 and abs(steps[1] - steps[0]) <= _ALIKE * steps[1]
