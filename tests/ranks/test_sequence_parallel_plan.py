"""Bytes that ranks exchange, as `lightning-ptm plan` counts them on the meta device, are those of a step."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from kit.ranks.harness import run_ranks
from torch import Tensor, nn
from typing_extensions import override

from lightning_ptm.forecasting.estimate import estimate
from lightning_ptm.memory.backend import backend_of
from lightning_ptm.models import GPT, T5, T5MoE
from lightning_ptm.models.base import LanguageModel
from lightning_ptm.parallel.counted_group import CountedTensorGroup
from lightning_ptm.parallel.cutting import CutModule
from lightning_ptm.parallel.exchange import RankGroup
from lightning_ptm.parallel.rules import plan_of
from lightning_ptm.runtime.units.discovery import discover

BATCH, LENGTH = 4, 16
_SIZES: dict[str, Any] = {"vocab_size": 64, "width": 32, "layers": 2, "heads": 4}
_ROOMY: dict[str, Any] = {"experts": 4, "jitter": 0.0, "capacity_factor": 4.0}
"""No choice is dropped, as none is counted on."""
MODELS: dict[str, Callable[..., LanguageModel]] = {
    "gpt": lambda **given: GPT(**_SIZES, sequence_length=LENGTH, **given),
    "t5": lambda **given: T5(**_SIZES, **given),
    "experts": lambda **given: T5MoE(**_SIZES, **_ROOMY, **given),
    "two experts a token": lambda **given: T5MoE(**_SIZES, **_ROOMY, choices=2, **given),
}


class Measured(RankGroup):
    """Group of ranks that measures the bytes that one rank sends in a ring."""

    sent_bytes = 0

    @override
    def sum(self, value: Tensor) -> Tensor:
        self.sent_bytes += 2 * value.nbytes * (self.size - 1) // self.size
        return super().sum(value)

    @override
    def gather(self, value: Tensor) -> Tensor:
        self.sent_bytes += value.nbytes * (self.size - 1)
        return super().gather(value)

    @override
    def sum_of_piece(self, pieces: Tensor) -> Tensor:
        self.sent_bytes += pieces.nbytes * (self.size - 1) // self.size
        return super().sum_of_piece(pieces)


def cut(model: LanguageModel, group: Any, *, sequence: bool) -> LanguageModel:
    CutModule(
        model,
        plan_of(model, "auto"),
        group,
        strict=False,
        sequence_parallel=sequence,
        proven=False,
    )
    return model


def built(name: str, *, meta: bool = False) -> LanguageModel:
    model = MODELS[name](meta=meta)
    model.configure_model()
    return model.train()


def measured() -> dict[tuple[str, bool], tuple[int, int]]:
    """By model, and whether parts of sequences are divided: bytes of a forward, and of its backward."""
    dist.init_process_group("gloo")
    found = {}
    tokens = torch.randint(0, 64, (BATCH, LENGTH), generator=torch.Generator().manual_seed(2))
    for name in MODELS:
        for sequence in (False, True):
            torch.manual_seed(0)
            group = Measured(dist.group.WORLD, backend_of(torch.device("cpu")))
            loss = cut(built(name), group, sequence=sequence).loss((tokens, tokens))
            forward = group.sent_bytes
            loss.backward()
            found[name, sequence] = forward, group.sent_bytes - forward
    dist.destroy_process_group()
    return found


@pytest.fixture(scope="module")
def of_ranks() -> list[dict[tuple[str, bool], tuple[int, int]]]:
    return run_ranks(measured, 2)


@pytest.mark.diagonal
@pytest.mark.parametrize("sequence", [False, True], ids=["whole", "parts of the sequence"])
@pytest.mark.parametrize("name", MODELS)
def test_as_much_is_sent_as_was_planned(
    of_ranks: list[dict[tuple[str, bool], tuple[int, int]]], name: str, sequence: bool
) -> None:
    group = CountedTensorGroup(2)
    model = cut(built(name, meta=True), group, sequence=sequence)
    tokens = torch.empty(BATCH, LENGTH, dtype=torch.long, device="meta")
    works = estimate(model, discover(model, "auto"), (tokens, tokens), torch.float32, group=group)
    planned = sum(work.sent.bytes for work in works), sum(work.sent_back.bytes for work in works)
    for each in of_ranks:
        assert planned == each[name, sequence]


def test_half_is_kept_of_a_recomputed_block_where_two_ranks_divide_the_sequence() -> None:
    tokens = torch.empty(BATCH, LENGTH, dtype=torch.long, device="meta")
    kept = {}
    for sequence in (False, True):
        group = CountedTensorGroup(2)
        model = cut(built("gpt", meta=True), group, sequence=sequence)
        units = discover(model, "auto")
        works = estimate(model, units, (tokens, tokens), torch.float32, group=group)
        kept[sequence] = [work.input_bytes for work in works[1:]]
    hidden_bytes = BATCH * LENGTH * _SIZES["width"] * 4
    assert kept[False] == [3 * hidden_bytes] * _SIZES["layers"]  # its input, and two sums
    assert kept[True] == [each // 2 for each in kept[False]]


@pytest.mark.parametrize("sequence", [False, True], ids=["whole", "parts of the sequence"])
def test_a_model_that_was_counted_is_cut_as_it_was_before(sequence: bool) -> None:
    group = CountedTensorGroup(2)
    model = cut(built("experts", meta=True), group, sequence=sequence)
    before = forwards(model)
    tokens = torch.empty(BATCH, LENGTH, dtype=torch.long, device="meta")
    counts = [
        sum(work.sent.bytes for work in estimate(model, units, (tokens, tokens), torch.float32, group=group))
        for units in [discover(model, "auto")] * 2
    ]
    assert before and forwards(model) == before
    assert counts[0] == counts[1]


def forwards(model: nn.Module) -> dict[str, int]:
    return {name: id(vars(each)["forward"]) for name, each in model.named_modules() if "forward" in vars(each)}
