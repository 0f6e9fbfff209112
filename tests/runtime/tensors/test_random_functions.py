"""Random functions that return constants."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from lightning_ptm.runtime.tensors.random_functions import NoDropout, NoRandomNumbers


def drawn(x: Tensor) -> list[Tensor]:
    """One result of each function, of one size."""
    heads = x.expand(1, 1, 2, 8)
    return [
        torch.rand(8),
        torch.rand_like(x),
        torch.randn(8, generator=torch.default_generator),
        torch.randn_like(x),
        torch.bernoulli(torch.full((8,), 0.5)),
        torch.empty(8).bernoulli_(0.5),
        torch.empty(8).uniform_(1, 3),
        torch.empty(8).normal_(2.0),
        F.dropout(x, 0.5),
        F.scaled_dot_product_attention(heads, heads, heads, dropout_p=0.5)[0, 0, 0],
    ]


def test_nothing_is_drawn() -> None:
    x, before = torch.arange(8.0), torch.get_rng_state()
    with NoRandomNumbers():
        found = drawn(x)
    assert torch.equal(torch.get_rng_state(), before)
    assert [float(each[1]) for each in found] == [0.75, 0.75, 0, 0, 1, 1, 2.5, 2, 1, 1]


def test_dropout_drops_nothing_where_other_numbers_are_drawn() -> None:
    x, before = torch.arange(8.0), torch.get_rng_state()
    with NoDropout():
        found = drawn(x)
    assert not torch.equal(torch.get_rng_state(), before)
    assert torch.equal(found[-2], x) and torch.allclose(found[-1], x)


def test_integers_are_the_lowest() -> None:
    like = torch.zeros(3, dtype=torch.long)
    with NoRandomNumbers():
        found = [
            torch.randint(9, (3,)),
            torch.randint(2, 9, (3,), generator=torch.Generator()),
            torch.randint(low=4, high=9, size=(3,)),
            torch.randint_like(like, 5, 9),
            torch.ones(3).random_(6, 9),
            torch.ones(3).random_(9),
        ]
    assert [each.tolist() for each in found] == [[low] * 3 for low in (0, 2, 4, 5, 6, 0)]
