"""States that are smaller than fp32 in pages: the optimizer's own update of what they stand for, rounded without bias, the
same wherever they live and whoever has them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from paged_training import (
    GROUPS,
    SHAPES,
    Twin,
    make_allocator,
    make_flat,
    make_twin,
    plain_step,
    random_gradients,
    read,
)
from torch import Tensor

from lightning_ptm.memory.allocator import Allocator
from lightning_ptm.memory.block_codec import BLOCK_NUMEL
from lightning_ptm.terms import Tier, chunk_numel
from lightning_ptm.update.flat_states import FlatStates
from lightning_ptm.update.state_encoding import ENCODINGS, VALUES_DTYPE, Bf16, Encoder, Encoding, Int8
from lightning_ptm.update.trial.probe import probe

both = pytest.mark.parametrize("encoding", ENCODINGS.values(), ids=ENCODINGS)


def decoded(encoding: Encoding, stored: Tensor) -> Tensor:
    """All elements of a shard."""
    values = torch.empty(encoding.values_numel, dtype=VALUES_DTYPE)
    for start in range(0, encoding.values_numel, encoding.chunk_numel):
        numel = min(encoding.chunk_numel, encoding.values_numel - start)
        Encoder().decode(encoding, stored.narrow(0, *encoding.stretch(start, numel)), values.narrow(0, start, numel))
    return values


def slot_values(twin: Twin) -> dict[str, Tensor]:
    twin.updater.drain()
    states = twin.states
    return {name: decoded(states.encodings[name], read(twin.allocator, slot)) for name, slot in states.slots.items()}


def train(twin: Twin, steps: Sequence[int], unused: Sequence[int] = ()) -> None:
    for step in steps:
        twin.steps = step
        twin.updater.finish(twin.submit(random_gradients(step, torch.bfloat16, unused=unused)))
    twin.updater.drain()


def adam(groups: list[dict[str, object]]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(groups, lr=0.01)


def sgd(groups: list[dict[str, object]]) -> torch.optim.Optimizer:
    return torch.optim.SGD(groups, lr=0.01, momentum=0.9)


@pytest.mark.parametrize("make", [adam, sgd])
@both
def test_a_step_is_the_optimizer_s_own_with_the_states_that_pages_stand_for(
    encoding: type[Encoding], make: object, tmp_path: Path
) -> None:
    with make_allocator(tmp_path) as allocator:
        twin = make_twin(make, allocator, home=Tier.DISK, encoding=encoding)  # type: ignore[arg-type]
        for step in range(4):
            train(twin, [step])
            plain_step(twin, random_gradients(step, torch.bfloat16))
            assert twin.states.master is not None
            masters = twin.pieces(read(allocator, twin.states.master))
            for mine, theirs in zip(masters, twin.plain, strict=True):
                assert torch.equal(mine, theirs)
            gap = {Bf16: 2**-7, Int8: 2**-3}[encoding]
            for name, values in slot_values(twin).items():
                for value, parameter in zip(twin.pieces(values), twin.plain, strict=True):
                    state = twin.plain_optimizer.state[parameter]
                    off = (value - state[name]).abs() / state[name].abs().clamp(min=state[name].abs().max() * 1e-3)
                    assert off.max() <= gap, name
                    state[name].copy_(value)  # the next step begins with what pages stand for
        twin.close()


@both
def test_where_states_live_and_how_they_are_cut_changes_no_bit(encoding: type[Encoding], tmp_path: Path) -> None:
    found = []
    for home, block, threads in ((Tier.DISK, 4096, 1), (Tier.DEVICE, 64, 2)):
        torch.set_num_threads(threads)
        with make_allocator(tmp_path) as allocator:
            twin = make_twin(adam, allocator, home=home, encoding=encoding, block_numel=block)
            train(twin, range(3), unused=[0, 4])
            found.append({name: twin.pieces(values) for name, values in slot_values(twin).items()})
            twin.close()
    for name, values in found[0].items():
        for index in {*range(len(SHAPES))} - {0, 4}:
            assert torch.equal(values[index], found[1][name][index]), (name, index)


@both
def test_the_number_of_a_step_decides_how_it_rounds(encoding: type[Encoding]) -> None:
    found = []
    for number in (5, 5, 6):
        with make_allocator() as allocator:
            twin = make_twin(adam, allocator, encoding=encoding)
            twin.steps = number
            twin.updater.finish(twin.submit(random_gradients(0, torch.bfloat16)))
            found.append(slot_values(twin)["exp_avg"])
            twin.close()
    assert torch.equal(found[0], found[1])
    assert not torch.equal(found[0], found[2])


def states_of(allocator: Allocator, encoding: type[Encoding], world_size: int, rank: int) -> FlatStates:
    flat = make_flat(SHAPES, GROUPS, torch.float32, world_size)
    groups: list[dict[str, object]] = [{"params": [torch.nn.Parameter(torch.zeros(4))]} for _ in range(2)]
    traits = probe(adam(groups), dtype=torch.float32)
    traits = traits.encoded({slot.name: encoding for slot in traits.slots})
    return FlatStates.allocate(allocator, flat, rank, traits, Tier.DEVICE, master_dtype=None)


@both
def test_any_number_of_ranks_rounds_to_the_same_values(encoding: type[Encoding]) -> None:
    whole: list[Tensor] = []
    full = torch.randn(1 << 17, generator=torch.Generator().manual_seed(3))
    for world_size in (1, 2, 3):
        seen = torch.zeros(full.numel())
        for rank in range(world_size):
            with make_allocator() as allocator:
                states = states_of(allocator, encoding, world_size, rank)
                found = states.encodings["exp_avg"]
                values, stored = torch.zeros(found.values_numel), torch.zeros(found.numel, dtype=found.dtype)
                for segment in states.segments:
                    at = states.flat.slots[segment.parameter].start + segment.parameter_start
                    values[segment.start : segment.stop] = full[at : at + segment.numel]
                for start in range(0, values.numel(), found.chunk_numel):
                    numel = min(found.chunk_numel, values.numel() - start)
                    window = stored.narrow(0, *found.stretch(start, numel))
                    Encoder().encode_step(found, values.narrow(0, start, numel), window, states, "exp_avg", start, 4)
                values = decoded(found, stored)
                for segment in states.segments:
                    at = states.flat.slots[segment.parameter].start + segment.parameter_start
                    seen[at : at + segment.numel] = values[segment.start : segment.stop]
        whole.append(seen)
    assert not torch.equal(whole[0], full)
    assert torch.equal(whole[0], whole[1]) and torch.equal(whole[0], whole[2])


@both
def test_what_a_shard_takes_is_what_its_chunks_take(encoding: type[Encoding]) -> None:
    chunk = chunk_numel(64 * 1024)
    for numel in (BLOCK_NUMEL, chunk - BLOCK_NUMEL, chunk, 2 * chunk, 2 * chunk + BLOCK_NUMEL):
        found = encoding(numel, chunk)
        ends = [sum(found.stretch(start, min(chunk, numel - start))) for start in range(0, numel, chunk)]
        assert ends[-1] == found.numel
        assert found.numel <= numel * {Bf16: 1, Int8: 1.26}[encoding]


def test_rounding_of_bf16_states_has_no_bias() -> None:
    flat_numel, steps = 4096, 1024
    with make_allocator() as allocator:
        states = states_of(allocator, Bf16, 1, 0)
        encoding = Bf16(flat_numel, flat_numel)
        values, stored = torch.randn(flat_numel), torch.zeros(flat_numel, dtype=torch.bfloat16)
        encoder, total = Encoder(), torch.zeros(flat_numel, dtype=torch.float64)
        for step in range(steps):
            encoder.encode_step(encoding, values, stored, states, "exp_avg", 0, step)
            total += stored
    at = torch.cat([torch.arange(each.start, each.stop) for each in states.segments_within(0, flat_numel)])
    off = ((total / steps - values) / values.abs())[at]
    # A gap is 2**-7 of a value at most, the deviation of a draw half of that, of all of them together another 1/60 of it.
    assert off.abs().max() < 5 * 2**-8 / steps**0.5
    assert off.mean().abs() < 5 * 2**-8 / (steps * len(at)) ** 0.5


@both
def test_an_undefined_element_of_any_kind_stays_undefined_whatever_the_noise(encoding: type[Encoding]) -> None:
    with make_allocator() as allocator:
        states = states_of(allocator, encoding, 1, 0)
        numel = 4096
        how = encoding(numel, numel)
        values = torch.ones(numel)
        values[::2].view(torch.int32).fill_(0x7FFFFFFF)
        values[1::4].view(torch.int32).fill_(-1)
        undefined = values.isnan()
        stored = torch.zeros(how.numel, dtype=how.dtype)
        for step in range(3):
            Encoder().encode_step(how, values, stored, states, "exp_avg", 0, step)
            seen = torch.empty(numel)
            Encoder().decode(how, stored, seen)
            assert torch.equal(seen.isnan(), undefined)
