"""Forecast seconds of a step: replayed links and ticks, exchanges between ranks, offloaded activations, shared cores."""

from __future__ import annotations

import dataclasses
import enum
import functools
import itertools
import math
import operator
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from lightning_ptm.forecasting.counting import UnitWork
from lightning_ptm.forecasting.estimate import forwards
from lightning_ptm.forecasting.lock_free import beside_compute
from lightning_ptm.forecasting.node import Node
from lightning_ptm.forecasting.rates import Activity, Hardware, Timing
from lightning_ptm.forecasting.send_order import NOTHING_SENT, Exchanged, SendOrder
from lightning_ptm.forecasting.timing import steady
from lightning_ptm.forecasting.update_extras import update_extras
from lightning_ptm.planning.mesh import Axis
from lightning_ptm.planning.plan import Plan
from lightning_ptm.planning.trace import Trace
from lightning_ptm.runtime.deciding.blueprint import Blueprint, LockFreeNeeds
from lightning_ptm.terms import Link, Operation, Phase, Tier


class Halves(enum.Enum):
    """Whether a batch is computed in two halves in turns (`TensorParallel.overlap`)."""

    NONE = "no"
    HIDING = "sums of one half pass while the other computes"
    AT_ONCE = "sums take the time of the cores that compute: tensor ranks on the CPUs of one machine"

    @property
    def calls(self) -> int:
        """Number of calls of a unit for a batch."""
        return 1 if self is Halves.NONE else 2


@dataclass(frozen=True, slots=True)
class StepTime:
    """Forecast seconds of an optimizer step.

    Attributes:
        timing: timing of compute and links; None if nothing runs.
        seconds: seconds of the step: those of `timing`, or more (see `Prediction`).
        binds: the bottleneck of the step, in words.
        lock_free_s: seconds in which compute waits for lock-free updates.
        copies_s: seconds in which compute waits for copies of activations to RAM or disk and back.
    """

    timing: Timing | None
    seconds: float | None
    binds: str
    lock_free_s: float = 0.0
    copies_s: float = 0.0


def step_time(
    blueprint: Blueprint,
    plan: Plan,
    trace: Trace,
    node: Node,
    rates: Hardware,
    accumulate: int,
    copies: ActivationCopies,
    exchanged: Exchanged,
    record: list[Activity] | None,
) -> StepTime:
    """Returns the time of a step among many.

    Args:
        blueprint: blueprint of the run.
        plan: plan of one micro-batch.
        trace: ticks of the micro-batch, with their seconds.
        node: the node.
        rates: rates of one rank of `node`.
        accumulate: micro-batches in a step.
        copies: copies of activations in a micro-batch.
        exchanged: a rank's exchanges with others (`exchanges`).
        record: as in `steady`.
    """
    lock_free = blueprint.lock_free
    timing = steady(
        blueprint.layout,
        blueprint.placement,
        plan,
        trace,
        blueprint.budget,
        # Lock-free updates have their own thread: see `beside_compute`.
        rates if lock_free is None else dataclasses.replace(rates, shared_cores=False),
        staging_chunks=blueprint.staging_chunks if blueprint.placement.staging_bytes else math.inf,
        gradient_room_bytes=blueprint.gradient_room_bytes,
        micro_batches=accumulate,
        wait_for_updates=lock_free is None,
        root_once=blueprint.holders.in_stages,
        record=record,
        exchanged=exchanged,
        holders=blueprint.holders,
        extras=update_extras(blueprint, rates),
    )
    seconds, lock_free_s = timing.seconds + (node.step_s or 0.0), 0.0
    if lock_free is not None and not node.has_own_memory:
        # The simulation of shared cores has its own waits; only those for other ranks are taken from the plan's replay.
        among_ranks = tuple(stall for stall in timing.stalls if stall.cause in _AMONG_RANKS)
        timing = dataclasses.replace(timing, stalls=among_ranks)
        among_ranks_s = timing.rounds_s + sum(stall.seconds for stall in among_ranks)
        beside = beside_compute(blueprint, lock_free, trace, node, rates, accumulate, among_ranks_s)
        seconds, lock_free_s = beside.seconds, beside.stall_s
    elif lock_free is not None:
        late = _beside_updates(seconds, timing, lock_free)
        seconds, lock_free_s = late, late - seconds
    binds = _binding(timing)
    copied = _with_copies(seconds, timing, copies, accumulate, rates)
    if copied > seconds * (1 + _LITTLE):
        where = " and ".join("RAM" if tier.addressable else "disk" for tier in copies.offloaded)
        binds = f"copies of activations to {where} and back"
    return StepTime(timing, copied, binds, lock_free_s, copied - seconds)


_AMONG_RANKS = (Operation.EXCHANGE, Operation.GATHER)
"""Causes of waits for other ranks."""


_LITTLE = 1e-6
"""Share of a step below which copies of activations do not bind it."""

WAYS = {
    Tier.HOST: (Link.DEVICE_TO_HOST, Link.HOST_TO_DEVICE),
    Tier.DISK: (Link.DISK_WRITE, Link.DISK_READ),
}
"""By the tier of offloaded activations, the slowest links on the way there and back."""


@dataclass(frozen=True, slots=True)
class ActivationCopies:
    """Copies of activations in one micro-batch.

    Attributes:
        waits_s: seconds in which compute waits for them.
        offloaded: bytes that go to each tier, and come back.
    """

    waits_s: float
    offloaded: Mapping[Tier, int]

    def repeated(self, times: int) -> ActivationCopies:
        """Returns the copies of so many micro-batches."""
        return ActivationCopies(times * self.waits_s, {tier: times * size for tier, size in self.offloaded.items()})


def _with_copies(seconds: float, timing: Timing, copies: ActivationCopies, accumulate: int, rates: Hardware) -> float:
    """Seconds of a step with its copies of activations, whose links carry pages, too."""
    found = seconds + copies.waits_s * accumulate
    for tier, size in copies.offloaded.items():
        for use in timing.links:
            if use.link in WAYS[tier]:
                found = max(found, use.busy_s + size * accumulate / rates.bytes_per_s(use.link))
    return found


def exchanges(
    blueprint: Blueprint,
    works: Sequence[UnitWork],
    trace: Trace,
    again: Collection[int],
    halves: Halves = Halves.NONE,
) -> Exchanged:
    """Returns by tick the exchanges of one rank: tokens sent to other ranks' experts and back, and a tensor group's sums.

    Tokens are exchanged before a tick, activations of a tensor group within it. A layer with experts exchanges before its
    first expert and after its last one, in the forward and in the backward, and once more if it is recomputed (its experts
    are in `again`). The results of a tensor group's exchanges are stored for a recomputation.
    """
    tokens = _tokens(blueprint, works, trace, again) if blueprint.experts is not None else {}
    found: dict[int, dict[Link, SendOrder]] = {}
    for at, tick in enumerate(trace.ticks):
        work = works[tick.unit]
        added_up = work.sent if tick.phase is Phase.FORWARD else work.sent_back
        if halves is not Halves.NONE:
            added_up = added_up.of_two_halves(hidden=halves is Halves.HIDING)
        sent = {Link.EXCHANGE: tokens.get(at, NOTHING_SENT), Link.TENSOR_EXCHANGE: added_up}
        found[at] = {link: each for link, each in sent.items() if each.collectives}
    return {at: sent for at, sent in found.items() if sent}


def _tokens(
    blueprint: Blueprint, works: Sequence[UnitWork], trace: Trace, again: Collection[int]
) -> dict[int, SendOrder]:
    assert blueprint.experts is not None
    layer_of, size = blueprint.experts.layer_of, blueprint.experts.mesh.sizes[Axis.EXPERT]
    found: defaultdict[int, SendOrder] = defaultdict(SendOrder)
    runs = itertools.groupby(enumerate(trace.ticks), key=lambda pair: (layer_of.get(pair[1].unit), pair[1].phase))
    for (layer, phase), run in runs:
        if layer is None:
            continue
        places, units = zip(*((at, tick.unit) for at, tick in run), strict=True)
        # A rank sends as much as it receives; the busiest rank counts.
        rows = sum(works[unit].row_bytes for unit in units) * (size - 1) // size
        times = 3 if phase is Phase.BACKWARD and units[0] in again else 1
        found[places[0]] += SendOrder(times * rows, times, times)
        found[places[-1] + 1] += SendOrder(rows, 1, 1)
    return dict(found)


def timed(trace: Trace, forward_s: Sequence[float], recomputed: frozenset[int], unit_s: float) -> Trace:
    """Returns a trace with seconds, from the seconds of each unit's forward and `unit_s` for each tick."""
    return Trace(
        tuple(
            dataclasses.replace(
                tick,
                seconds=unit_s + forward_s[tick.unit] * forwards(tick.phase, recomputed=tick.unit in recomputed),
            )
            for tick in trace.ticks
        )
    )


def repeated(trace: Trace, exchanged: Exchanged, times: int) -> tuple[Trace, Exchanged]:
    """Returns a trace and its exchanges in which each tick does the work of so many micro-batches."""
    ticks = tuple(dataclasses.replace(tick, seconds=tick.seconds * times) for tick in trace.ticks)
    sent = {
        at: {link: functools.reduce(operator.add, [order] * times) for link, order in of_tick.items()}
        for at, of_tick in exchanged.items()
    }
    return Trace(ticks), sent


def _beside_updates(seconds: float, timing: Timing, lock_free: LockFreeNeeds) -> float:
    """Seconds of a step whose updates run concurrently on other cores.

    The gradients of up to `max_staleness` steps are applied in one pass over the master states, so a step takes at least that
    share of a pass.
    """
    a_pass = max(use.busy_s for use in timing.links)
    return max(seconds, a_pass / max(1, lock_free.max_staleness))


def _binding(timing: Timing) -> str:
    busy = {"compute": timing.compute_s} | {use.link.value: use.busy_s for use in timing.links}
    name = max(busy, key=busy.__getitem__)
    return f"{name.replace('_', ' ')}, busy {min(1.0, busy[name] / max(timing.seconds, 1e-12)):.0%} of the step"
