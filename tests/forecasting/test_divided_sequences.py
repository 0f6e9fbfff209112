"""Estimates for ranks that have parts of each sequence: operations, activations, exchanges."""

from __future__ import annotations

import pytest
import torch
from kit.ranks.context_models import ContextMoE

from lightning_ptm.errors import ConfigError
from lightning_ptm.forecasting.counting import Divided, UnitWork
from lightning_ptm.forecasting.estimate import estimate
from lightning_ptm.models import GPT
from lightning_ptm.planning.mesh import Axis, Mesh
from lightning_ptm.runtime.units.discovery import discover
from lightning_ptm.runtime.units.divided_experts import divide

WIDTH, HEADS, LAYERS = 64, 4, 4


def works(length: int, divided: Divided) -> tuple[UnitWork, ...]:
    model = GPT(width=WIDTH, heads=HEADS, layers=LAYERS, sequence_length=length, meta=True)
    model.configure_model()
    batch = (torch.empty(1, length, dtype=torch.long, device="meta"),) * 2
    return estimate(model, discover(model, "auto"), batch, torch.float32, divided=divided)


def saved(length: int, size: int) -> int:
    return sum(each.saved_bytes for each in works(length, Divided(size)))


def test_a_rank_has_its_share_of_the_operations_and_activations() -> None:
    (whole, half) = (works(4096, Divided(size)) for size in (1, 2))
    for one, other in zip(whole, half, strict=True):
        assert one.attention_flops == 2 * other.attention_flops
        assert one.flops == 2 * other.flops
    assert saved(4096, 2) <= 0.55 * saved(4096, 1)


def test_two_ranks_train_on_texts_nearly_twice_as_long_in_the_same_memory() -> None:
    assert saved(2 * 2048, 2) <= saved(2048, 1) * 2 / 1.8


N = 4
SENT = {
    "gather": (6 * (N - 1) / N, 1, 2),
    "ulysses": (8 * (N - 1) / N**2, 2, 2),
    "auto": (8 * (N - 1) / N**2, 2, 2),
    "ring": (2 * (3 * N - 2) / N, N - 1, 2 * N - 1),
}
"""By way, what the docs say that a rank sends: elements, as multiples of a text's of all heads, and exchanges each way."""


@pytest.mark.parametrize("way", SENT)
def test_attention_exchanges_what_the_page_says(way: str) -> None:
    elements, forwards, backwards = SENT[way]
    for each in works(64, Divided(N, way))[1:]:
        assert each.sent.bytes + each.sent_back.bytes == elements * WIDTH * 64 * 4
        assert (each.sent.collectives, each.sent_back.collectives) == (forwards, backwards)


def test_a_length_that_ranks_do_not_divide_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"context_parallel_size=4 cuts sequences into 8 chunks.*multiple of 8"):
        works(60, Divided(4))


def test_experts_of_a_rank_get_the_tokens_of_its_groups_parts() -> None:
    """Half as many as of whole texts, in as many exchanges."""
    found = []
    for size in (1, 2):
        model = ContextMoE()
        with torch.device("meta"):
            model.build()
        mesh = Mesh({Axis.EXPERT: 2, Axis.CONTEXT: size})
        units = discover(model, ["MixtureBlock", "Expert"])
        batch = (torch.empty(2, 32, dtype=torch.long, device="meta"),) * 2
        experts = divide(model, units, mesh)
        found.append(estimate(model, units, batch, torch.float32, experts, divided=Divided(size)))
    whole, half = (sum(each.row_bytes for each in works) for works in found)
    assert whole == 2 * half > 0
    assert sum(each.flops for each in found[0]) == 2 * sum(each.flops for each in found[1])
