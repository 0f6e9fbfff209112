"""Forecast of a pipeline: the seconds of its stages, replayed by its schedule."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from lightning_ptm.forecasting.rates import Timing
from lightning_ptm.planning.schedules import actions
from lightning_ptm.planning.stages import StageCost, StageReplay, divide, replay
from lightning_ptm.terms import Operation

_LITTLE = 0.01
"""Gains of less than this share of the slowest stage's seconds are not reported."""


@dataclass(frozen=True, slots=True)
class StageForecast:
    """Forecast of one stage of a pipeline; bytes are those of one of its ranks, seconds those of an optimizer step.

    Attributes:
        blocks: names of its first and its last unit, and the number of units.
        page_bytes, activation_bytes, taken_bytes: on the device; see `TierPlan`.
        graphs: most graphs that it keeps, each of a micro-batch and one of its runs of blocks.
        forward_s, backward_s: of a micro-batch, including waits for pages and other ranks of the stage.
        busy_s: of all its micro-batches.
        update_s: waits for updates, of which those beside compute fill the bubble first.
        idle_s: waits for other stages.
        sent_bytes: hidden states and their gradients.
        send_s: of these.
        exposed_s: of other stages' sends, the part during which it had nothing to compute.
    """

    blocks: tuple[str, str, int]
    page_bytes: int
    activation_bytes: int
    taken_bytes: int
    graphs: int
    forward_s: float = 0.0
    backward_s: float = 0.0
    busy_s: float = 0.0
    update_s: float = 0.0
    idle_s: float = 0.0
    sent_bytes: int = 0
    send_s: float = 0.0
    exposed_s: float = 0.0


@dataclass(frozen=True, slots=True)
class PipelineForecast:
    """Forecast of a pipeline.

    Attributes:
        schedule: the setting `pipeline_schedule`.
        micro_batches: the setting.
        bubble: the part of all stages' seconds in which they wait for each other, sends included; like the next, 0 if
            something does not fit.
        hidden_s, exposed_s: seconds of sends of all stages beside compute and other waits, and those in which their
            receiver had nothing else to do.
        faster_blocks: the setting `pipeline_blocks` with which the slowest stage would compute less; empty: there is none.
    """

    schedule: str
    micro_batches: int
    stages: tuple[StageForecast, ...]
    bubble: float = 0.0
    hidden_s: float = 0.0
    exposed_s: float = 0.0
    faster_blocks: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class StageSeconds:
    """Seconds of a stage that never waits for another one.

    Attributes:
        cost: seconds of a micro-batch in all runs of blocks of the stage, but sends of one run.
        update_s: seconds of a step in which it waits for updates.
    """

    cost: StageCost
    update_s: float


def most_graphs(schedule: str, stages: int, micro_batches: int, chunks: int) -> tuple[int, ...]:
    """Returns the most graphs that each stage keeps, each of a micro-batch and one of `chunks` runs of blocks."""
    return _replayed(schedule, [StageCost(1.0, 1.0)] * stages, micro_batches, chunks).most_graphs


def stage_seconds(timing: Timing, forward_share: float, micro_batches: int, send_s: float) -> StageSeconds:
    """Returns the seconds of a stage, from the timing of a step in which it waits for no other stage.

    Waits for pages and for ranks of the stage are spread evenly over micro-batches. The rounds of agreement of a batch, which
    the timing has for each micro-batch, stand for those before receives.

    Args:
        forward_share: the share of forwards in the seconds of compute.
        micro_batches: of a step.
        send_s: to send a micro-batch's hidden states to the next stage.
    """
    update_s = sum(stall.seconds for stall in timing.stalls if stall.cause is Operation.UPDATE)
    each_s = (timing.seconds - update_s) / micro_batches
    forward_s = each_s * forward_share
    return StageSeconds(StageCost(forward_s, each_s - forward_s, send_s), update_s)


def replayed(
    schedule: str,
    stages: Sequence[StageSeconds],
    micro_batches: int,
    accumulate: int,
    chunks: int,
    *,
    shared_cores: bool,
) -> tuple[StageReplay, float]:
    """Returns the replay of a batch, and the seconds of a step of `accumulate` batches.

    Assumes that the runs of blocks of a stage are equally long.

    Updates of a device or of a disk go on while a stage waits for others; those on the cores that compute do not.
    """
    found = _replayed(schedule, [stage.cost for stage in stages], micro_batches, chunks)
    idle = [(found.step_s - busy) * accumulate for busy in found.busy_s]
    late = [
        stage.update_s if shared_cores else max(0.0, stage.update_s - idle_s)
        for stage, idle_s in zip(stages, idle, strict=True)
    ]
    return found, found.step_s * accumulate + max(late)


def faster_blocks(seconds_by_block: Sequence[float], runs: Sequence[range], stages: int) -> tuple[int, ...]:
    """Returns numbers of blocks with which the slowest stage computes less than with the given runs; empty if there are none.

    Args:
        seconds_by_block: seconds of each block; those of the last one include what follows it (a head, the loss).
        runs: blocks of each run, from 0, in order; run i is on stage i modulo `stages`.
    """

    def slowest_s(runs: Sequence[range]) -> float:
        return max(
            sum(seconds_by_block[block] for run in runs[stage::stages] for block in run) for stage in range(stages)
        )

    found = divide(seconds_by_block, len(runs))
    return tuple(map(len, found)) if slowest_s(found) < slowest_s(runs) * (1 - _LITTLE) else ()


def _replayed(schedule: str, costs: Sequence[StageCost], micro_batches: int, chunks: int) -> StageReplay:
    orders = [actions(schedule, len(costs), stage, micro_batches, chunks) for stage in range(len(costs))]
    costs = [StageCost(each.forward_s / chunks, each.backward_s / chunks, each.send_s) for each in costs] * chunks
    # A stage posts its receive when it needs what is sent, and no transfer begins before.
    return replay(orders, costs, early=False)
