"""Segments, runs, scalars, loss scale and norms: pure parts of the update."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from paged_training import make_allocator, make_flat
from torch import optim

from lightning_ptm.errors import ConfigError, InternalError
from lightning_ptm.memory.transfer import Awaited
from lightning_ptm.terms import ALIGN_NUMEL, Tier
from lightning_ptm.update.flat_states import FlatStates, shard_segments
from lightning_ptm.update.gradient_source import TensorGradient
from lightning_ptm.update.loss_scale import LossScale
from lightning_ptm.update.norms import greatest, norm_of_power, shard_power
from lightning_ptm.update.trial.probe import probe

shapes = st.lists(st.tuples(st.integers(0, 40_000)), min_size=1, max_size=12)


def states_of(flat: object) -> FlatStates:
    optimizer = optim.SGD([{"params": [torch.nn.Parameter(torch.zeros(2))]} for _ in range(3)], lr=0.1)
    return FlatStates(flat, 0, probe(optimizer), master=None, slots={})  # type: ignore[arg-type]


@given(shapes, st.integers(1, 5))
@settings(max_examples=60, deadline=None)
def test_every_element_is_in_one_segment_of_one_rank(shapes: list[tuple[int, ...]], world_size: int) -> None:
    flat = make_flat(shapes, [0] * len(shapes), torch.float32, world_size)
    seen = [0] * len(shapes)
    for rank in range(world_size):
        end = 0
        for segment in shard_segments(flat, rank):
            assert segment.start >= end
            assert segment.start % ALIGN_NUMEL == 0
            assert segment.stop <= flat.shard_numel
            end = segment.stop
            seen[segment.parameter] += segment.numel
    assert seen == [slot.numel for slot in flat.slots]


@given(
    shapes,
    st.lists(st.integers(0, 2), min_size=12, max_size=12),
    st.lists(st.booleans(), min_size=12, max_size=12),
    st.integers(1, 40),
)
@settings(max_examples=60, deadline=None)
def test_runs_cover_what_has_a_gradient(
    shapes: list[tuple[int, ...]], groups: list[int], present: list[bool], vectors: int
) -> None:
    flat = make_flat(shapes, groups[: len(shapes)], torch.float32)
    states = states_of(flat)
    present = present[: len(shapes)]
    step = vectors * ALIGN_NUMEL * 16
    covered = [0] * len(shapes)
    for start in range(0, flat.shard_numel, step):
        stop = min(start + step, flat.shard_numel)
        end = start
        for run in states.runs(start, stop - start, present):
            assert end <= run.start < run.stop <= stop
            assert run.start % ALIGN_NUMEL == 0
            end = run.stop
            for segment in run.segments:
                assert present[segment.parameter]
                assert flat.slots[segment.parameter].spec.group == run.group
                covered[segment.parameter] += segment.numel
            # I3: no gap within, so the kernel's last partial vector is the parameter's own.
            assert sum(segment.numel for segment in run.segments) == run.numel
    assert covered == [slot.numel * here for slot, here in zip(flat.slots, present, strict=True)]


def test_runs_are_as_long_as_they_may_be() -> None:
    flat = make_flat([(64,), (100,), (128,), (64,)], [0, 0, 0, 1], torch.float32)
    everything = (True,) * 4
    assert [run.numel for run in states_of(flat).runs(0, flat.shard_numel, everything)] == [164, 128, 64]


def test_a_chunk_is_cut_into_segments_once() -> None:
    states = states_of(make_flat([(300,), (5000,), (70,)], [0, 0, 0], torch.float32))
    start, stop = 10 * ALIGN_NUMEL, 60 * ALIGN_NUMEL
    cut = states.segments_within(start, stop)
    expected = [each.cut(start, stop) for each in states.segments if each.start < stop and each.stop > start]
    assert list(cut) == expected
    assert states.segments_within(start, stop) is cut
    assert states.segments_within(start, stop + ALIGN_NUMEL) != cut


def test_restored_scalars_are_shared_by_value() -> None:
    flat = make_flat([(64,), (64,), (64,)], [0, 0, 0], torch.float32)
    states = states_of(flat)
    states.set_scalars(0, {"step": torch.tensor(3.0)})
    states.set_scalars(1, {"step": torch.tensor(3.0)})
    states.set_scalars(2, {"step": torch.tensor(4.0)})
    assert states.scalars(0) is states.scalars(1)
    assert [run.numel for run in states.runs(0, flat.shard_numel, (True,) * 3)] == [128, 64]
    states.set_scalars(0, None)
    assert states.scalars(0) is None
    assert states.started(64, 64)
    assert not states.started(0, 64)


def test_slots_must_be_the_optimizers(tmp_path: Path) -> None:
    flat = make_flat([(64,)], [0], torch.float32)
    traits = probe(optim.AdamW([torch.nn.Parameter(torch.zeros(2))]))
    with make_allocator() as allocator:
        wrong = allocator.allocate("x", 7, torch.float32, Tier.DEVICE)
        with pytest.raises(InternalError, match="exp_avg"):
            FlatStates(flat, 0, traits, master=None, slots={"exp_avg": wrong})
        with pytest.raises(InternalError, match="7 elements"):
            FlatStates(flat, 0, traits, master=None, slots={"exp_avg": wrong, "exp_avg_sq": wrong})


def test_allocated_states_are_released() -> None:
    flat = make_flat([(5000,)], [0], torch.bfloat16)
    traits = probe(optim.AdamW([torch.nn.Parameter(torch.zeros(2))]))
    with make_allocator() as allocator:
        free = allocator.free_bytes(Tier.DEVICE)
        states = FlatStates.allocate(allocator, flat, 0, traits, Tier.DEVICE, master_dtype=torch.float32)
        assert len(states.tensors()) == 3
        assert states.home() is Tier.DEVICE
        states.release(allocator)
        assert allocator.free_bytes(Tier.DEVICE) == free


@pytest.mark.parametrize("norm_type", [1.0, 2.0, 3.0, math.inf])
def test_norm_of_shards_is_the_norm_of_all(norm_type: float) -> None:
    shapes = [(70_000,), (33,), (9000,)]
    torch.manual_seed(0)
    values = [torch.randn(shape) for shape in shapes]
    expected = torch.linalg.vector_norm(torch.cat(values).double(), norm_type)
    optimizer = optim.SGD([torch.nn.Parameter(torch.zeros(2))], lr=0.1)
    traits = probe(optimizer)
    powers = []
    for rank in range(3):
        flat = make_flat(shapes, [0, 0, 0], torch.float32, 3)
        states = FlatStates(flat, rank, traits, master=None, slots={})
        # Padding and gaps hold NaN: they must not count.
        shard = torch.full((flat.shard_numel,), float("nan"))
        for segment in states.segments:
            begin = segment.parameter_start
            shard[segment.start : segment.stop] = values[segment.parameter][begin : begin + segment.numel]
        powers.append(shard_power(states, TensorGradient(shard), (True, True, True), norm_type=norm_type))
    power = torch.stack(powers).max() if math.isinf(norm_type) else torch.stack(powers).sum()
    torch.testing.assert_close(norm_of_power(power, norm_type), expected.float(), rtol=1e-6, atol=0)


@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_one_bad_element_is_found(bad: float, dtype: torch.dtype) -> None:
    tensors = [torch.ones(5, 7, dtype=dtype), torch.empty(0), torch.full((100,), torch.finfo(dtype).max, dtype=dtype)]
    assert torch.isfinite(greatest(tensors))
    tensors[2][63] = bad
    assert not torch.isfinite(greatest(tensors))


def test_loss_scale_follows_grad_scaler() -> None:
    ours = LossScale(init_scale=2.0**120, growth_interval=3)
    theirs = torch.amp.GradScaler("cpu", init_scale=2.0**120, growth_interval=3)
    parameter = torch.nn.Parameter(torch.ones(1))
    optimizer = optim.SGD([parameter], lr=0.0)
    for found_inf in [False] * 30 + [True, False, True, True] + [False] * 7:
        scaled = theirs.scale(torch.ones(()))
        assert torch.equal(ours.scale(torch.ones(())), scaled)
        parameter.grad = torch.full((1,), math.inf if found_inf else 1.0)
        theirs.unscale_(optimizer)
        ours.update(found_inf)
        theirs.update()
        assert ours.value == theirs.get_scale()
        assert ours.state_dict() == theirs.state_dict()


def test_loss_scale_state_goes_both_ways() -> None:
    ours, theirs = LossScale(growth_interval=7), torch.amp.GradScaler("cpu", init_scale=8.0)
    ours.load_state_dict(theirs.state_dict())
    assert ours.state_dict() == theirs.state_dict()
    assert ours.value == 8.0
    theirs.load_state_dict(LossScale(init_scale=16.0).state_dict())
    assert theirs.get_scale() == 16.0


def test_scales_that_cannot_work() -> None:
    for settings_ in ({"growth_factor": 1.0}, {"backoff_factor": 1.0}, {"growth_interval": 0}, {"init_scale": 0.0}):
        with pytest.raises(ConfigError, match="loss scale"):
            LossScale(**settings_)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="without loss scaling"):
        LossScale().load_state_dict({})


class Ends:
    """Ends after being asked so many times."""

    def __init__(self, after: int, error: Exception | None = None) -> None:
        self.left, self.asked, self.error = after, 0, error

    def done(self) -> bool:
        self.asked += 1
        return self.asked > self.left

    def wait(self) -> None:
        if self.error is not None:
            raise self.error


def test_what_is_awaited_is_asked_until_it_has_ended_and_no_more() -> None:
    all_of_it = [Ends(0), Ends(2), Ends(1, InternalError("lost"))]
    awaited = Awaited(all_of_it[:1])
    for each in all_of_it[1:]:
        awaited.add([each])
    assert [awaited.done() for _ in range(5)] == [False, False, False, True, True]
    assert [each.asked for each in all_of_it] == [1, 3, 2]
    assert awaited.next() in all_of_it
    with pytest.raises(InternalError, match="lost"):
        awaited.wait()
    assert Awaited().done()
