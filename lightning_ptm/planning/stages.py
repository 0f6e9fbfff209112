"""Pipeline stages: the division of blocks among them, and the replay of a schedule by seconds.

Pure: seconds and numbers only; it knows neither units nor ranks. A position is a chunk of a stage in the model's order,
see `schedules`.
"""

from __future__ import annotations

import bisect
import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction

from lightning_ptm.errors import ConfigError, InternalError
from lightning_ptm.planning.schedules import ActionKind, StageAction


def divide(seconds_by_block: Sequence[float], stages: int) -> list[range]:
    """Divides consecutive blocks among stages, at least one for each.

    The slowest stage is as fast as it can be; of all divisions with this property, the one with the least sum of squares
    is taken, so that the other stages are alike, too. The result is exact: equal on all ranks, without rounding.

    Args:
        seconds_by_block: seconds (or any cost) of each block, in the order in which they are called.

    Raises:
        ConfigError: there are fewer blocks than stages.
    """
    count = len(seconds_by_block)
    if count < stages:
        raise ConfigError(
            f"the model has {count} blocks for {stages} pipeline stages, so a stage would have none; use at most "
            f"pipeline_parallel_size={count}, or smaller units"
        )
    exact = [Fraction(seconds) for seconds in seconds_by_block]
    scale = math.lcm(*(each.denominator for each in exact))
    sums = [0, *itertools.accumulate(int(each * scale) for each in exact)]
    # least[i]: the slowest of the stages so far, if they have the first i blocks.
    least: list[float] = [math.inf, *sums[1:]]
    for stage in range(1, stages):
        # In the first block of this stage, least rises and the seconds of the stage fall: the best is where they cross.
        before, least = least, [math.inf] * (count + 1)
        for end in range(stage + 1, count + 1):
            firsts = range(stage, end)
            at = bisect.bisect_left(firsts, True, key=lambda first: before[first] >= sums[end] - sums[first])
            least[end] = min(max(before[first], sums[end] - sums[first]) for first in firsts[max(at - 1, 0) : at + 1])
    most = least[count]
    squares: list[float] = [0, *[math.inf] * count]
    begins: list[list[int]] = []
    for _ in range(stages):
        of_end = [
            min(
                (
                    (squares[at] + (sums[end] - sums[at]) ** 2, at)
                    for at in range(bisect.bisect_left(sums, sums[end] - most), end)
                    if squares[at] < math.inf
                ),
                default=(math.inf, 0),
            )
            for end in range(count + 1)
        ]
        squares = [square for square, _ in of_end]
        begins.append([at for _, at in of_end])
    found: list[range] = []
    end = count
    for of_end_begin in reversed(begins):
        found.append(range(of_end_begin[end], end))
        end = found[-1].start
    return found[::-1]


@dataclass(frozen=True, slots=True)
class StageCost:
    """Seconds of one micro-batch at one position.

    Args:
        send_s: to send the output to the next position, and to send its gradient back.
    """

    forward_s: float
    backward_s: float
    send_s: float = 0.0


@dataclass(frozen=True, slots=True)
class StageReplay:
    """Result of the replay of a schedule.

    Args:
        step_s: from the first forward to the last backward of all stages.
        busy_s: by stage, the seconds in which it computes.
        most_graphs: by stage, the most forwards whose backward had not begun.
        send_s: by stage, the seconds of its sends.
        exposed_s: by stage, the part of other stages' sends during which it had nothing to compute.
    """

    step_s: float
    busy_s: tuple[float, ...]
    most_graphs: tuple[int, ...]
    send_s: tuple[float, ...]
    exposed_s: tuple[float, ...]

    @property
    def bubble(self) -> float:
        """The part of all stages' seconds in which they do not compute."""
        return 1 - sum(self.busy_s) / (len(self.busy_s) * self.step_s) if self.step_s else 0.0

    @property
    def hidden_s(self) -> float:
        """Seconds of all stages' sends during which their receivers computed or waited for others."""
        return max(0.0, sum(self.send_s) - sum(self.exposed_s))


def replay(orders: Sequence[Sequence[StageAction]], costs: Sequence[StageCost], *, early: bool = True) -> StageReplay:
    """Returns what a step takes whose stages run these actions.

    A stage does one action at a time, and begins it when what it needs has arrived. Its sends go one after another and
    do not stop its compute.

    Args:
        orders: by stage, its actions (`schedules.actions`).
        costs: by position.
        early: whether receives are posted before they are needed; otherwise a transfer begins when its receiver has
            nothing else to do.

    Raises:
        InternalError: the stages wait for each other.
    """
    stages, positions = len(orders), len(costs)
    done = [0] * stages
    free, link, busy, sent, exposed = ([0.0] * stages for _ in range(5))
    graphs, most_graphs = [0] * stages, [0] * stages
    came: dict[tuple[int, StageAction], tuple[float, float]] = {}
    """When what an action of a stage needs leaves its sender, and the seconds on its way."""

    def begin(stage: int, action: StageAction) -> None:
        """Does an action whose input came."""
        position = action.chunk * stages + stage
        forward = action.kind is ActionKind.FORWARD
        left, send_s = came[stage, action]
        at = (left if early else max(left, free[stage])) + send_s
        exposed[stage] += min(send_s, max(0.0, at - free[stage]))
        seconds = costs[position].forward_s if forward else costs[position].backward_s
        busy[stage] += seconds
        free[stage] = max(free[stage], at) + seconds
        graphs[stage] += 1 if forward else -1
        most_graphs[stage] = max(most_graphs[stage], graphs[stage])
        if forward and position == positions - 1:
            came[stage, StageAction(ActionKind.BACKWARD, action.chunk, action.micro)] = (free[stage], 0.0)
            return
        to = position + 1 if forward else position - 1
        if to < 0:
            return
        chunk, receiver = divmod(to, stages)
        send_s = costs[min(position, to)].send_s if receiver != stage else 0.0
        left = max(link[stage], free[stage])
        if send_s:
            link[stage] = left + send_s
            sent[stage] += send_s
        came[receiver, StageAction(action.kind, chunk, action.micro)] = (left, send_s)

    for action in orders[0]:
        if action.kind is ActionKind.FORWARD and action.chunk == 0:
            came[0, action] = (0.0, 0.0)
    while any(done[stage] < len(order) for stage, order in enumerate(orders)):
        before = list(done)
        for stage, order in enumerate(orders):
            while done[stage] < len(order) and (stage, order[done[stage]]) in came:
                begin(stage, order[done[stage]])
                done[stage] += 1
        if done == before:
            waits = [
                f"stage {stage} for {order[done[stage]]}"
                for stage, order in enumerate(orders)
                if done[stage] < len(order)
            ]
            raise InternalError(f"pipeline stages wait for each other: {', '.join(waits)}")
    return StageReplay(max(free), tuple(busy), tuple(most_graphs), tuple(sent), tuple(exposed))
