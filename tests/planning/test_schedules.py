"""Schedules of pipelines: against torch's lists, and that no schedule makes stages wait for each other."""

from __future__ import annotations

import itertools
from collections import Counter, defaultdict
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.pipelining import schedules as torch_schedules

from lightning_ptm.errors import ConfigError, InternalError
from lightning_ptm.planning.schedules import ActionKind, StageAction, actions
from lightning_ptm.planning.stages import StageCost, replay

KINDS = ("gpipe", "1f1b", "interleaved", "breadth_first")
OF_TORCH = {
    "gpipe": torch_schedules.ScheduleGPipe,
    "1f1b": torch_schedules.Schedule1F1B,
    "interleaved": torch_schedules.ScheduleInterleaved1F1B,
    "breadth_first": torch_schedules.ScheduleLoopedBFS,
}


def of_torch(kind: str, stages: int, micro_batches: int, chunks: int) -> list[list[str]]:
    """Returns, by stage, torch's actions as `0F1`: position, kind, micro-batch. No process group is made."""
    of_kind: Any = OF_TORCH[kind]
    made = object.__new__(of_kind)
    made.pp_group_size, made._n_microbatches, made.n_local_stages = stages, micro_batches, chunks
    made._num_stages, made._stages, made.stages = stages * chunks, [None] * chunks, [None] * chunks
    made.number_of_rounds = max(1, micro_batches // stages)
    made.microbatches_per_round = micro_batches // made.number_of_rounds
    made.rank, made._stage = 0, SimpleNamespace(group_size=stages, stage_index=0, num_stages=stages)
    if hasattr(made, "_calculate_single_rank_operations"):
        lists = [made._calculate_single_rank_operations(rank) for rank in range(stages)]
    else:
        by_rank = made._get_pipeline_order()
        lists = [by_rank[rank] for rank in range(stages)]
    if kind == "1f1b":  # torch's list of the last stage, which its own runtime does not use, counts forwards from 1
        lists[-1] = [
            each._replace(microbatch_index=each.microbatch_index - 1) if each and str(each).startswith(last) else each
            for last in [f"{stages - 1}F"]
            for each in lists[-1]
        ]
    computes = (torch_schedules._ComputationType.FORWARD, torch_schedules._ComputationType.FULL_BACKWARD)
    return [[str(each) for each in of if each is not None and each.computation_type in computes] for of in lists]


@pytest.mark.parametrize("kind", KINDS)
def test_schedules_are_those_of_torch(kind: str) -> None:
    compared = 0
    for stages, micro_batches, chunks in itertools.product((1, 2, 3, 4, 8), (1, 2, 3, 4, 6, 8, 16), (1, 2, 3)):
        if kind in ("gpipe", "1f1b") and chunks > 1:
            continue
        if kind == "1f1b" and micro_batches < stages:
            continue  # torch's list runs forwards that do not exist
        if kind == "interleaved" and micro_batches % max(1, micro_batches // stages):
            continue
        ours = [
            [
                f"{each.chunk * stages + stage}{each.kind.value}{each.micro}"
                for each in actions(kind, stages, stage, micro_batches, chunks)
            ]
            for stage in range(stages)
        ]
        assert ours == of_torch(kind, stages, micro_batches, chunks), (stages, micro_batches, chunks)
        compared += 1
    assert compared >= 24


@st.composite
def schedules(draw: st.DrawFn) -> tuple[list[list[StageAction]], int]:
    """The lists of all stages, and the number of chunks."""
    kind = draw(st.sampled_from(KINDS))
    stages, micro_batches = draw(st.integers(1, 6)), draw(st.integers(1, 13))
    chunks = 1 if kind in ("gpipe", "1f1b") else draw(st.integers(1, 4))
    rounds = max(1, micro_batches // stages)
    if kind == "interleaved":
        micro_batches -= micro_batches % rounds
    return [actions(kind, stages, stage, micro_batches, chunks) for stage in range(stages)], chunks


@given(schedules())
def test_every_micro_batch_has_one_forward_and_then_one_backward_in_each_chunk(
    found: tuple[list[list[StageAction]], int],
) -> None:
    orders, chunks = found
    micro_batches = len(orders[0]) // 2 // chunks
    every = {
        StageAction(kind, chunk, micro)
        for kind in ActionKind
        for chunk in range(chunks)
        for micro in range(micro_batches)
    }
    for order in orders:
        assert Counter(order) == Counter(every)
        for action in every:
            if action.kind is ActionKind.FORWARD:
                assert order.index(action) < order.index(StageAction(ActionKind.BACKWARD, action.chunk, action.micro))


@given(schedules(), st.data())
def test_no_schedule_makes_stages_wait_for_each_other(
    found: tuple[list[list[StageAction]], int], data: st.DataObject
) -> None:
    orders, chunks = found
    seconds = st.floats(0.001, 10)
    costs = [StageCost(data.draw(seconds), data.draw(seconds), data.draw(seconds)) for _ in range(len(orders) * chunks)]
    assert replay(orders, costs).step_s > 0


@given(schedules())
def test_messages_are_needed_in_the_order_in_which_they_are_sent(found: tuple[list[list[StageAction]], int]) -> None:
    orders, chunks = found
    stages = len(orders)
    sent, needed = defaultdict(list), defaultdict(list)
    for stage, order in enumerate(orders):
        for action in order:
            position = action.chunk * stages + stage
            forward = action.kind is ActionKind.FORWARD
            before, behind = (position - 1, position + 1) if forward else (position + 1, position - 1)
            if 0 <= behind < stages * chunks:
                sent[stage, behind % stages].append((action.kind, behind, action.micro))
            if 0 <= before < stages * chunks:
                needed[before % stages, stage].append((action.kind, position, action.micro))
    # Within a rank (one stage) nothing is sent.
    assert stages == 1 or sent == needed


def test_stages_that_wait_for_each_other_are_named() -> None:
    forward, backward = StageAction(ActionKind.FORWARD, 0, 0), StageAction(ActionKind.BACKWARD, 0, 0)
    with pytest.raises(InternalError, match="stage 0 for B0, stage 1 for B0"):
        replay([[forward, backward], [backward, forward]], [StageCost(1, 1)] * 2)


@given(st.integers(1, 8), st.integers(1, 20))
def test_1f1b_keeps_no_more_graphs_than_stages_follow(stages: int, micro_batches: int) -> None:
    orders = [actions("1f1b", stages, stage, micro_batches) for stage in range(stages)]
    graphs = replay(orders, [StageCost(1, 2)] * stages).most_graphs
    assert graphs == tuple(min(stages - stage, micro_batches) for stage in range(stages))


@pytest.mark.parametrize("kind", ["gpipe", "1f1b"])
def test_schedules_of_one_chunk_refuse_several(kind: str) -> None:
    with pytest.raises(ConfigError, match='has one run of blocks on each stage, not 2; use "interleaved"'):
        actions(kind, 2, 0, 4, chunks=2)


def test_interleaved_refuses_rounds_of_different_lengths() -> None:
    with pytest.raises(
        ConfigError, match=r"micro_batches=5 through 2 stages in 2 rounds, .* use a multiple of 2 micro"
    ):
        actions("interleaved", 2, 0, 5, chunks=2)
