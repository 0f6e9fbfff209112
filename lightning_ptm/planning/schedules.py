"""Pipeline schedules as data: the order in which a stage runs forwards and backwards of micro-batches.

Pure: numbers of stages and micro-batches only. The driver of a pipeline runs these lists, and `stages.replay` predicts
their seconds, so that a plan and a run have one order.

A stage has one or several *chunks* (runs of consecutive blocks; Megatron's model chunks). Chunk c of stage s comes at
position `c * stages + s` of the model, so that a micro-batch goes through all stages once for each chunk. The lists are
those of `torch.distributed.pipelining` (a test compares them):

- gpipe: all forwards, then all backwards (https://arxiv.org/abs/1811.06965).
- 1f1b: after a warm-up, one forward and one backward in turn, so that stage s keeps at most `stages - s` graphs
  (https://arxiv.org/abs/2006.09503).
- interleaved: 1f1b over several chunks, which shortens the bubble and sends more (https://arxiv.org/abs/2104.04473).
- breadth_first: all micro-batches go through a chunk before the next one begins, so that each parameter is fetched once
  in a forward and once in a backward (https://arxiv.org/abs/2211.05953).

I1: every micro-batch has one forward and one backward in each chunk, the forward first.
I2: where sends do not wait, no stages wait for each other.
I3: a stage needs what another one sends to it in the order in which it is sent, so that messages need no tags.
"""

from __future__ import annotations

import enum
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from lightning_ptm.errors import ConfigError, InternalError
from lightning_ptm.terms import SEVERAL_CHUNKS


class ActionKind(enum.Enum):
    """Kinds of actions on a micro-batch."""

    FORWARD = "F"
    BACKWARD = "B"


@dataclass(frozen=True, slots=True)
class StageAction:
    """The forward or backward of a micro-batch in one chunk of a stage."""

    kind: ActionKind
    chunk: int
    micro: int

    def __str__(self) -> str:
        return f"{self.kind.value}{self.micro}" + (f" of chunk {self.chunk}" if self.chunk else "")


def chunks_of(kind: str, stages: int, blocks: int) -> int:
    """Returns the default number of chunks of each stage, for a model of so many blocks.

    Raises:
        ConfigError: there are not enough blocks.
    """
    if kind == "breadth_first":
        return max(1, blocks // stages)  # of one block each, as far as that is possible
    if kind == "interleaved" and blocks < 2 * stages:
        raise ConfigError(
            f'pipeline_schedule="interleaved" gives each of {stages} stages two runs of blocks, and the model has {blocks} '
            f'blocks; use pipeline_schedule="1f1b", or smaller units'
        )
    return 2 if kind == "interleaved" else 1


def actions(kind: str, stages: int, stage: int, micro_batches: int, chunks: int = 1) -> list[StageAction]:
    """Returns the actions of a stage, in order.

    Args:
        kind: a value of the setting `pipeline_schedule`.
        stage: which of the `stages`; 0 has the model's first blocks.
        chunks: chunks of each stage; gpipe and 1f1b have one.

    Raises:
        ConfigError: the schedule does not exist with these numbers.
    """
    if kind not in SEVERAL_CHUNKS and chunks > 1:
        raise ConfigError(
            f'pipeline_schedule="{kind}" has one run of blocks on each stage, not {chunks}; use "interleaved" or '
            '"breadth_first" for several'
        )
    together = in_a_round(stages, micro_batches) if kind == "interleaved" else micro_batches
    forwards = _passes(range(chunks), micro_batches, together)
    backwards = _passes(range(chunks - 1, -1, -1), micro_batches, together)
    if kind == "gpipe":
        warm_up = len(forwards)
    elif kind == "1f1b":
        warm_up = stages - 1 - stage
    elif kind == "interleaved":
        warm_up = (chunks - 1) * together + 2 * (stages - 1 - stage)
    elif kind == "breadth_first":
        warm_up = len(forwards)
        backwards = forwards[::-1]  # the graph that was made last is used first
    else:
        raise InternalError(f'there is no pipeline schedule "{kind}"')
    return list(_alternating(forwards, backwards, min(warm_up, len(forwards))))


def taken_by_message(order: Sequence[StageAction], stages: int, stage: int, chunks: int, sent: ActionKind) -> list[int]:
    """Returns, for each message that a stage sends, how many messages of the same neighbour's it has taken before.

    So the neighbour knows which of its messages have arrived when it gets one.

    Args:
        order: the actions of the stage.
        sent: FORWARD: it sends hidden states to the next stage, and takes gradients; BACKWARD: the other way round.
    """
    at_the_edge = (0, 0) if sent is ActionKind.BACKWARD else (chunks - 1, stages - 1)
    found: list[int] = []
    taken = 0
    for action in order:
        if (action.chunk, stage) == at_the_edge:
            continue  # the model's first run of blocks, or its last one
        if action.kind is sent:
            found.append(taken)
        else:
            taken += 1
    return found


def in_a_round(stages: int, micro_batches: int) -> int:
    """Returns the number of micro-batches that go through a chunk before the next chunk, in the interleaved schedule.

    Raises:
        ConfigError: micro-batches cannot be divided into rounds.
    """
    rounds = _rounds(stages, micro_batches)
    if not has_equal_rounds(stages, micro_batches):
        raise ConfigError(
            f'pipeline_schedule="interleaved" takes micro_batches={micro_batches} through {stages} stages in {rounds} '
            f"rounds, which are not equally long; use a multiple of {stages} micro-batches, or another schedule"
        )
    return micro_batches // rounds


def has_equal_rounds(stages: int, micro_batches: int) -> bool:
    """Returns whether the interleaved schedule exists with these numbers."""
    return micro_batches % _rounds(stages, micro_batches) == 0


def _rounds(stages: int, micro_batches: int) -> int:
    return max(1, micro_batches // stages)


def _passes(chunks: range, micro_batches: int, together: int) -> list[tuple[int, int]]:
    """Returns the (chunk, micro-batch) of all passes of one direction: `together` micro-batches in each chunk in turn."""
    return [
        (chunk, micro)
        for first in range(0, micro_batches, together)
        for chunk in chunks
        for micro in range(first, first + together)
    ]


def _alternating(
    forwards: list[tuple[int, int]], backwards: list[tuple[int, int]], warm_up: int
) -> Iterator[StageAction]:
    """Yields `warm_up` forwards, then a forward and a backward in turn, then the remaining backwards."""
    for at in range(len(forwards) + warm_up):
        if at < len(forwards):
            yield StageAction(ActionKind.FORWARD, *forwards[at])
        if at >= warm_up:
            yield StageAction(ActionKind.BACKWARD, *backwards[at - warm_up])
