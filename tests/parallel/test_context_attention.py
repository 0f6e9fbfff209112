"""Attention over tokens that ranks have parts of is attention over all of them."""

from __future__ import annotations

import math
from collections.abc import Callable
from threading import get_ident
from typing import Any

import pytest
import torch
from kit.ranks.threads import ThreadGroup, on_threads
from torch import Tensor

from lightning_ptm.parallel import context_attention
from lightning_ptm.parallel.context_attention import Mask, attention, chosen_way
from lightning_ptm.planning.token_chunks import TokenChunks

WAYS = ("gather", "ulysses", "ring")
BATCH, LENGTH, WIDTH = 2, 24, 8


def made(*shape: int, dtype: torch.dtype = torch.float64, seed: int = 0) -> Tensor:
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed)).to(dtype)


def plain(q: Tensor, k: Tensor, v: Tensor, mask: Mask) -> Tensor:
    many = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(many, 1), v.repeat_interleave(many, 1)
    scores = q @ k.transpose(-1, -2) * mask.scale
    at = torch.arange(q.shape[-2])
    back = at[:, None] - at[None, :]
    if mask.causal:
        scores = scores.masked_fill((back < 0) | ((back >= mask.window) if mask.window else (back < 0)), -math.inf)
    if mask.seen is not None:
        scores = scores.masked_fill(~mask.seen[:, None, None], -math.inf)
    nothing = (scores == -math.inf).all(-1, keepdim=True)
    return scores.masked_fill(nothing, 0.0).softmax(-1).masked_fill(nothing, 0.0) @ v


def padded() -> Tensor:
    """Returns a mask of padding: before one text, more than the first chunks of four ranks, and after the other."""
    seen = torch.ones(BATCH, LENGTH, dtype=torch.bool)
    seen[0, :7] = seen[1, -5:] = False
    return seen


def results(
    q: Tensor, k: Tensor, v: Tensor, gradient: Tensor, compute: Callable[[Tensor, Tensor, Tensor], Tensor]
) -> list[Tensor]:
    leaves = [each.detach().clone().requires_grad_() for each in (q, k, v)]
    out = compute(*leaves)
    return [out.detach(), *torch.autograd.grad(out, leaves, gradient)]


def part(whole: Tensor, size: int, rank: int) -> Tensor:
    chunks = TokenChunks(size, whole.shape[-2] // size)
    return torch.cat([whole[..., at : at + chunks.of_chunk, :] for at in chunks.starts(rank)], -2)


def divided(way: str, size: int, given: tuple[Tensor, ...], mask: Mask) -> tuple[list[list[Tensor]], list[ThreadGroup]]:
    groups: list[ThreadGroup] = []

    def work(group: ThreadGroup) -> list[Tensor]:
        groups.append(group)
        ours = [part(each, size, group.index) for each in given]
        q, k, v, gradient = ours
        return results(q, k, v, gradient, lambda q, k, v: attention(q, k, v, group, way, mask))

    return on_threads(size, work), groups


CASES = {
    "causal": (4, 4, Mask(WIDTH**-0.5, True)),
    "not causal": (4, 4, Mask(WIDTH**-0.5, False)),
    "grouped keys": (8, 4, Mask(WIDTH**-0.5, True)),
    "another scale": (4, 4, Mask(0.7, True)),
    "window of a few": (4, 4, Mask(WIDTH**-0.5, True, window=3)),
    "window over chunks": (8, 4, Mask(WIDTH**-0.5, True, window=11)),
    "window beyond the text": (4, 4, Mask(WIDTH**-0.5, True, window=100)),
    "padding": (8, 4, Mask(WIDTH**-0.5, True, seen=padded())),
    "padding, not causal": (8, 4, Mask(WIDTH**-0.5, False, seen=padded())),
    "padding and a window": (8, 4, Mask(WIDTH**-0.5, True, window=3, seen=padded())),
}


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("case", CASES)
def test_outputs_and_gradients_are_those_of_whole_sequences(
    case: str, way: str, size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(context_attention, "_ROWS", 5)
    heads, of_keys, mask = CASES[case]
    shapes = [heads, of_keys, of_keys, heads]
    given = tuple(made(BATCH, count, LENGTH, WIDTH, seed=at) for at, count in enumerate(shapes))
    q, k, v, gradient = given
    whole = results(q, k, v, gradient, lambda q, k, v: plain(q, k, v, mask))
    found, _ = divided(way, size, given, mask)
    for rank, ours in enumerate(found):
        for each, expected in zip(ours, whole, strict=True):
            torch.testing.assert_close(each, part(expected, size, rank), rtol=0, atol=1e-13)


@pytest.mark.parametrize("way", ["gather", "ring"])
def test_values_may_have_another_width_than_keys(way: str) -> None:
    given = tuple(made(1, 2, LENGTH, width, seed=width) for width in (8, 8, 5, 5))
    q, k, v, gradient = given
    mask = Mask(0.3, True)
    whole = results(q, k, v, gradient, lambda q, k, v: plain(q, k, v, mask))
    for rank, ours in enumerate(divided(way, 2, given, mask)[0]):
        for each, expected in zip(ours, whole, strict=True):
            torch.testing.assert_close(each, part(expected, 2, rank), rtol=0, atol=1e-13)


@pytest.mark.parametrize("way", WAYS)
def test_bf16_is_rounded_once(way: str) -> None:
    given = tuple(made(BATCH, 4, LENGTH, WIDTH, dtype=torch.bfloat16, seed=at) for at in range(4))
    q, k, v, gradient = (each.double() for each in given)
    mask = Mask(WIDTH**-0.5, True)
    whole = results(q, k, v, gradient, lambda q, k, v: plain(q, k, v, mask))
    for rank, ours in enumerate(divided(way, 2, given, mask)[0]):
        for each, expected in zip(ours, whole, strict=True):
            assert each.dtype is torch.bfloat16
            torch.testing.assert_close(each.double(), part(expected, 2, rank), rtol=2**-6, atol=2**-6)


def test_each_way_sends_what_the_planner_counts() -> None:
    size, heads, of_keys = 4, 8, 4
    token = BATCH * WIDTH * LENGTH // size
    given = tuple(made(BATCH, count, LENGTH, WIDTH) for count in (heads, of_keys, of_keys, heads))
    sent = {}
    for way in WAYS:
        _, groups = divided(way, size, given, Mask(1.0, True))
        assert len({tuple(each.sent) for each in groups}) == 1
        sent[way] = sum(count for _, count in groups[0].sent)
    assert sent["gather"] == 3 * 2 * of_keys * token * (size - 1)
    assert sent["ulysses"] == 2 * (2 * heads + 2 * of_keys) * token * (size - 1) // size
    assert sent["ring"] == 2 * of_keys * token * (3 * size - 2)


def test_the_way_is_chosen_by_what_is_sent() -> None:
    def way(size: int, heads: int, of_keys: int) -> str:
        q, k = torch.empty(1, heads, 8, 4), torch.empty(1, of_keys, 8, 4)
        return chosen_way(size, q, k, k)

    assert way(2, 8, 8) == "ulysses"
    assert way(2, 32, 8) == "gather"
    assert way(8, 32, 8) == "ulysses"
    assert way(4, 8, 2) == "gather"  # two heads of keys for four ranks


@pytest.mark.parametrize("size", [2, 3, 8])
def test_ranks_have_equal_shares_of_causal_work(size: int) -> None:
    chunks = TokenChunks(size, 16)
    work = [sum(start + at for start in chunks.starts(rank) for at in range(chunks.of_chunk)) for rank in range(size)]
    assert max(work) == min(work)
    every = sorted(start for rank in range(size) for start in chunks.starts(rank))
    assert every == list(range(0, 16 * size, chunks.of_chunk))


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("way", WAYS)
def test_ranks_compute_equal_shares_of_causal_pairs(way: str, size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Counts pairs of a query and a visible key in all blocks of a forward and a backward; none is computed twice."""
    pairs: dict[int, int] = {}

    def counting(attend: Callable[..., Any]) -> Callable[..., Any]:
        def counted(block: Any, *args: Any) -> Any:
            queries, keys = (each.shape[-2] for each in (block.q, block.k))
            seen = queries * (queries + 1) // 2 if block.masked else queries * keys
            assert not block.masked or (block.first_query, queries) == (block.first_key, keys)
            pairs[get_ident()] = pairs.get(get_ident(), 0) + seen * block.q.shape[0] * block.q.shape[1]
            return attend(block, *args)

        return counted

    for name in ("_attend", "_attend_backward"):
        monkeypatch.setattr(context_attention, name, counting(getattr(context_attention, name)))
    given = tuple(made(BATCH, 4, LENGTH, WIDTH, seed=at) for at in range(4))
    divided(way, size, given, Mask(WIDTH**-0.5, True))
    assert len(pairs) == size and max(pairs.values()) <= 1.05 * min(pairs.values())
    assert sum(pairs.values()) == 2 * BATCH * 4 * LENGTH * (LENGTH + 1) // 2


@pytest.mark.parametrize("way", WAYS)
def test_a_rank_saves_its_share_for_the_backward_pass(way: str) -> None:
    size, heads = 2, 4

    def saved(q: Tensor, compute: Callable[[Tensor], Tensor]) -> int:
        storages: dict[int, int] = {}

        def pack(tensor: Tensor) -> Tensor:
            storages[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            compute(q.requires_grad_())
        return sum(storages.values())

    def whole(q: Tensor) -> Tensor:
        return torch.nn.functional.scaled_dot_product_attention(q, q * 2, q * 3, is_causal=True)

    def work(group: ThreadGroup) -> int:
        q = part(made(1, heads, 64, WIDTH), size, group.index)
        return saved(q, lambda q: attention(q, q * 2, q * 3, group, way, Mask(WIDTH**-0.5, True)))

    of_one = saved(made(1, heads, 64, WIDTH), whole)
    assert max(on_threads(size, work)) <= 0.5 * of_one
