"""Seconds of a step beyond what links and ticks take: activations that travel, cores that updates and compute share."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from lightning_ptm.commands import hardware as machines
from lightning_ptm.commands.estimate import forwards
from lightning_ptm.planning.timing import Hardware, Link, Timing
from lightning_ptm.planning.trace import Trace
from lightning_ptm.runtime.blueprint import LockFree
from lightning_ptm.terms import Phase


def with_copies(
    seconds: float, timing: Timing, trace: Trace, offloaded: int, accumulate: int, rates: Hardware
) -> float:
    """Seconds of a step whose activations go to RAM behind its forward and come back behind its backward.

    Where a pass is shorter than its copies it waits for them; and a link carries pages, too.
    """
    found = seconds
    for link, phase in ((Link.DEVICE_TO_HOST, Phase.FORWARD), (Link.HOST_TO_DEVICE, Phase.BACKWARD)):
        copies_s = offloaded * accumulate / rates.bytes_per_s(link)
        behind_s = accumulate * sum(tick.seconds for tick in trace.ticks if tick.phase is phase)
        found += max(0.0, copies_s - behind_s)
    for use in timing.links:
        if use.link in (Link.DEVICE_TO_HOST, Link.HOST_TO_DEVICE):
            found = max(found, use.busy_s + offloaded * accumulate / rates.bytes_per_s(use.link))
    return found


def timed(trace: Trace, forward_s: Sequence[float], recomputed: frozenset[int], unit_s: float) -> Trace:
    """A trace with seconds: what a forward of each unit takes, by unit, and `unit_s` for each tick."""
    return Trace(
        tuple(
            dataclasses.replace(
                tick,
                seconds=unit_s + forward_s[tick.unit] * forwards(tick.phase, recomputed=tick.unit in recomputed),
            )
            for tick in trace.ticks
        )
    )


def _update_core_s(timing: Timing, node: machines.Node) -> float:
    """Time of CPU cores that one pass of updates over the master states takes, its disk transfers included."""
    busy = {use.link: use for use in timing.links}
    arithmetic = busy[Link.UPDATE_HOST].busy_s + busy[Link.UPDATE_DEVICE].busy_s
    disk_core_s = 0.0
    if node.disk_bytes_per_core_s is not None:
        disk_core_s = (busy[Link.DISK_READ].bytes + busy[Link.DISK_WRITE].bytes) / node.disk_bytes_per_core_s
    return node.threads * arithmetic + disk_core_s


def cores_s(timing: Timing, node: machines.Node, part: float) -> float:
    """What a step takes at least, on a CPU, when its cores are never idle and `part` of a pass of updates goes with it."""
    work_s = node.threads * timing.compute_s + part * _update_core_s(timing, node)
    return work_s / node.cores_per_rank + (node.step_s or 0.0)


def beside_updates(seconds: float, timing: Timing, lock_free: LockFree, node: machines.Node) -> float:
    """Seconds of a step whose updates go on beside it.

    Gradients of as many steps as may be lacking are applied in one pass over the master states, so a step takes a share of
    a pass at least. On a CPU the passes take their part of the cores.
    """
    a_pass = max(use.busy_s for use in timing.links)
    alone = seconds
    if node.device == "cpu":
        a_pass = max(a_pass, _update_core_s(timing, node) / lock_free.cores)
        for _ in range(20):  # slower steps leave more time to each pass: it settles at once
            seconds = max(alone, cores_s(timing, node, min(1.0, seconds / a_pass)))
    return max(seconds, a_pass / max(1, lock_free.max_staleness))


def binding(timing: Timing) -> str:
    """What was busy longest, in words."""
    busy = {"compute": timing.compute_s} | {use.link.value: use.busy_s for use in timing.links}
    name = max(busy, key=busy.__getitem__)
    return f"{name.replace('_', ' ')}, busy {min(1.0, busy[name] / max(timing.seconds, 1e-12)):.0%} of the step"
