"""Attention of which each rank of a context group has a part of the tokens: queries, keys and values of shape
(batch, heads, tokens of this rank, features).

Three ways, as autograd Functions, with the same result up to the order of sums:
- `gather`: each rank gets the keys and values of all ranks, and again in the backward pass, so that none are kept.
- `ulysses`: an all-to-all gives each rank all tokens of some heads, and another one returns the result (DeepSpeed-Ulysses).
- `ring`: keys and values go round from rank to rank, and no rank ever has all of them (Ring Attention).
All are sums over blocks of keys, weighted by their log-sum-exp, as in FlashAttention. Knows tensors and a group, no module.

I1: the ranks of a group make the same exchanges with the same shapes in the same order.
I2: recomputing a forward exchanges nothing again (`TensorGroup.kept`).
I3: what is saved for the backward pass has this rank's tokens only (ulysses: all tokens of this rank's heads, as many).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from lightning_ptm.memory.backend import in_ram
from lightning_ptm.parallel.exchange import TensorGroup
from lightning_ptm.planning.token_chunks import TokenChunks
from lightning_ptm.torch_internals import scaled_attention, scaled_attention_backward

LAYER = "attention"
"""The name of these exchanges in messages."""

_ROWS = 256
"""Queries that are computed at once where torch's own kernel cannot be used: so many rows of scores exist at a time."""


@dataclass(frozen=True, slots=True, eq=False)
class Mask:
    """Attention mask: the keys that a query sees, by positions in the sequence, and the scale of the scores.

    Attributes:
        causal: only keys at its own position and before.
        window: only the last so many of these, its own included; 0: all. Needs `causal`.
        seen: whether a token may be seen, (batch, tokens of the sequence); false for padding. None: all may. A query that
            sees no key gets zeros.
    """

    scale: float
    causal: bool
    window: int = 0
    seen: Tensor | None = None

    def keys_of(self, first: int, last: int) -> tuple[int, int]:
        """Returns the range of positions that queries first..last-1 see any of; its end may be beyond the sequence's."""
        if not self.causal:
            return 0, 1 << 62
        return (max(0, first - self.window + 1) if self.window else 0), last


@dataclass(frozen=True, slots=True)
class _Span:
    """Neighbouring tokens: the position of the first, and their features, (batch, heads, tokens, features)."""

    start: int
    values: tuple[Tensor, ...]

    @property
    def end(self) -> int:
        return self.start + self.values[0].shape[-2]

    def within(self, start: int, end: int) -> _Span | None:
        """Returns the part of it at these positions; None if there is none."""
        first, last = max(start, self.start), min(end, self.end)
        if first >= last:
            return None
        return _Span(first, tuple(each[..., first - self.start : last - self.start, :] for each in self.values))


def attention(q: Tensor, k: Tensor, v: Tensor, group: TensorGroup, way: str, mask: Mask) -> Tensor:
    """Returns the attention of this rank's queries over the keys of all ranks, shaped (*q.shape[:-1], features of v).

    Args:
        k, v: may have fewer heads, each for as many neighbouring heads of q.
        way: "gather", "ulysses" or "ring"; ulysses needs numbers of heads that the group divides.
    """
    out: Tensor = {"gather": _Gathered, "ulysses": _ByHeads, "ring": _Ring}[way].apply(q, k, v, group, mask)
    return out


def has_heads_for(size: int, q: Tensor, k: Tensor, v: Tensor) -> bool:
    """Whether `ulysses` can divide these heads over `size` ranks."""
    return q.shape[1] % size == 0 and k.shape[1] % size == 0 and q.shape[-1] == k.shape[-1] == v.shape[-1]


def chosen_way(size: int, q: Tensor, k: Tensor, v: Tensor) -> str:
    """Returns the way that sends fewer elements, forward and backward, of `gather` and `ulysses`."""
    if not has_heads_for(size, q, k, v):
        return "gather"
    # In elements of a token's vector, times (size - 1): keys and values three times; or all heads, to one rank each, twice.
    gathered = 3 * 2 * k.shape[1]
    return "ulysses" if 2 * (2 * q.shape[1] + 2 * k.shape[1]) < gathered * size else "gather"


class _Gathered(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, group: TensorGroup, mask: Mask) -> Tensor:
        chunks = TokenChunks(group.size, q.shape[-2])

        def compute() -> tuple[Tensor, Tensor]:
            return _over(_spans(chunks, group.index, q), [_all_keys(k, v, group, chunks)], mask)

        return _forward(ctx, group, mask, (q, k, v), compute)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, out, lse = ctx.saved_tensors
        group, mask = ctx.group, ctx.mask
        chunks = TokenChunks(group.size, q.shape[-2])
        with group.of_layer(LAYER):
            keys = _all_keys(k, v, group, chunks)
            of_keys = torch.zeros_like(torch.cat(keys.values, -1), dtype=_wide(k.dtype))
            span = _Span(0, tuple(of_keys.split([k.shape[-1], v.shape[-1]], -1)))
            of_q = torch.zeros_like(q, dtype=_wide(q.dtype), memory_format=torch.contiguous_format)
            _over_backward(_spans(chunks, group.index, gradient, q, out, lse[..., None], of_q), keys, span, mask)
            del keys
            summed = group.sum_of_piece(_by_rank(of_keys.to(k.dtype), chunks))
        of_k, of_v = summed.split([k.shape[-1], v.shape[-1]], -1)
        return of_q.to(q.dtype), of_k.contiguous(), of_v.contiguous(), None, None


class _ByHeads(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, group: TensorGroup, mask: Mask) -> Tensor:
        chunks = TokenChunks(group.size, q.shape[-2])
        heads = [each.shape[1] for each in (q, k, v)]
        with group.of_layer(LAYER):
            swapped = group.kept(lambda: _to_heads((q, k, v), group, chunks))
            ours = swapped.split([count // group.size for count in heads], 1)
            out, lse = _over([_Span(0, (ours[0],))], [_Span(0, ours[1:])], mask)
            result = group.kept(lambda: _to_tokens(out, group, chunks))
        ctx.group, ctx.mask, ctx.heads = group, mask, heads
        ctx.save_for_backward(swapped, out, lse)
        return result

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        swapped, out, lse = ctx.saved_tensors
        group, size = ctx.group, ctx.group.size
        chunks = TokenChunks(size, gradient.shape[-2])
        counts = [count // size for count in ctx.heads]
        q, k, v = swapped.split(counts, 1)
        with group.of_layer(LAYER):
            of_out = _to_heads((gradient,), group, chunks)
            found = torch.zeros_like(swapped, dtype=_wide(swapped.dtype))
            of_q, *of_keys = found.split(counts, 1)
            queries = [_Span(0, (of_out, q, out, lse[..., None], of_q))]
            _over_backward(queries, _Span(0, (k, v)), _Span(0, tuple(of_keys)), ctx.mask)
            parts = group.swap(_by_rank(found.to(swapped.dtype), chunks)).split(counts, 2)
        return *(torch.cat(each.unbind(0), 1) for each in parts), None, None


class _Ring(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, group: TensorGroup, mask: Mask) -> Tensor:
        chunks = TokenChunks(group.size, q.shape[-2])

        def compute() -> tuple[Tensor, Tensor]:
            keys = (span for spans in _around(k, v, group, chunks) for span in spans)
            return _over(_spans(chunks, group.index, q), keys, mask)

        return _forward(ctx, group, mask, (q, k, v), compute)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, out, lse = ctx.saved_tensors
        group, mask = ctx.group, ctx.mask
        chunks = TokenChunks(group.size, q.shape[-2])
        widths = [k.shape[-1], v.shape[-1]]
        of_q = torch.zeros_like(q, dtype=_wide(q.dtype), memory_format=torch.contiguous_format)
        of_keys = torch.zeros_like(torch.cat([k, v], -1), dtype=_wide(k.dtype))
        queries = _spans(chunks, group.index, gradient, q, out, lse[..., None], of_q)
        with group.of_layer(LAYER):
            for turn, spans in enumerate(_around(k, v, group, chunks)):
                owner = (group.index - turn) % group.size
                pairs = zip(spans, _spans(chunks, owner, *of_keys.split(widths, -1)), strict=True)
                for keys, into in pairs:
                    _over_backward(queries, keys, into, mask)
                of_keys = group.shift(of_keys)  # goes round with its keys, and home at last
        of_k, of_v = of_keys.to(k.dtype).split(widths, -1)
        return of_q.to(q.dtype), of_k.contiguous(), of_v.contiguous(), None, None


def _forward(ctx: Any, group: TensorGroup, mask: Mask, given: tuple[Tensor, ...], compute: Any) -> Tensor:
    """Computes the result and its log-sum-exp, which a recomputation takes from the first forward, and saves both."""
    found: list[Tensor] = []

    def first() -> Tensor:
        with group.of_layer(LAYER):
            found.extend(compute())
        return found[0]

    out, lse = group.kept(first), group.kept(lambda: found[1])
    ctx.group, ctx.mask = group, mask
    ctx.save_for_backward(*given, out, lse)
    return out


# -- exchanges --------------------------------------------------------------------------------------------------------


def _spans(chunks: TokenChunks, rank: int, *values: Tensor) -> list[_Span]:
    """Returns a rank's chunks of values that have the tokens of that rank."""
    parts = [each.split(chunks.of_chunk, -2) for each in values]
    return [_Span(start, each) for start, each in zip(chunks.starts(rank), zip(*parts, strict=True), strict=True)]


def _in_order(of_ranks: Tensor, chunks: TokenChunks) -> Tensor:
    """Returns the sequence from (ranks, ..., tokens of each, features)."""
    parts = [each.split(chunks.of_chunk, -2) for each in of_ranks.unbind(0)]
    return torch.cat([parts[rank][index] for rank, index in chunks.in_order()], -2)


def _by_rank(whole: Tensor, chunks: TokenChunks) -> Tensor:
    """Returns (ranks, ..., tokens of each, features) from the sequence."""
    parts = whole.split(chunks.of_chunk, -2)
    at = {each: index for index, each in enumerate(chunks.in_order())}
    of_each = range(len(parts) // chunks.size)
    return torch.stack([torch.cat([parts[at[rank, index]] for index in of_each], -2) for rank in range(chunks.size)])


def _all_keys(k: Tensor, v: Tensor, group: TensorGroup, chunks: TokenChunks) -> _Span:
    whole = _in_order(group.gather(torch.cat([k, v], -1)), chunks)
    return _Span(0, tuple(whole.split([k.shape[-1], v.shape[-1]], -1)))


def _around(k: Tensor, v: Tensor, group: TensorGroup, chunks: TokenChunks) -> Iterator[list[_Span]]:
    """Yields the keys and values of this rank, then those of the rank before, and so on round the ring."""
    pair = torch.cat([k, v], -1)
    for turn in range(group.size):
        if turn:
            pair = group.shift(pair)
        yield _spans(chunks, (group.index - turn) % group.size, *pair.split([k.shape[-1], v.shape[-1]], -1))


def _to_heads(values: Sequence[Tensor], group: TensorGroup, chunks: TokenChunks) -> Tensor:
    """Returns all tokens of this rank's heads of each value, (batch, heads of all values, sequence, features)."""
    parts = [each.chunk(group.size, 1) for each in values]
    return _in_order(group.swap(torch.stack([torch.cat(each, 1) for each in zip(*parts, strict=True)])), chunks)


def _to_tokens(of_heads: Tensor, group: TensorGroup, chunks: TokenChunks) -> Tensor:
    """Returns this rank's tokens of all heads from all tokens of its heads."""
    return torch.cat(group.swap(_by_rank(of_heads, chunks)).unbind(0), 1)


# -- blocks -----------------------------------------------------------------------------------------------------------


def _over(queries: Sequence[_Span], keys: Any, mask: Mask) -> tuple[Tensor, Tensor]:
    """Returns attention, in the dtype of the queries, and its log-sum-exp, over spans of keys.

    Args:
        queries: spans of (q,).
        keys: iterable of spans of (k, v), computed one by one. A query's own position is in the first that it sees any of.
    """
    dtype = queries[0].values[0].dtype
    found: list[tuple[Tensor, Tensor] | None] = [None] * len(queries)
    for span in keys:
        for at, query in enumerate(queries):
            for block in _blocks(query.start, query.values[0], span, mask):
                out, lse = _attend(block, mask)
                found[at] = (out.to(_wide(dtype)), lse) if (known := found[at]) is None else _joined(known, (out, lse))
    whole = [each for each in found if each is not None]
    lse = torch.cat([lse for _, lse in whole], -1)
    if mask.seen is not None:  # hidden scores less a finite number are weights of 0 in the backward pass, not of NaN
        lse = lse.masked_fill(lse == -math.inf, 0.0)
    return torch.cat([out for out, _ in whole], -2).to(dtype), lse


def _joined(first: tuple[Tensor, Tensor], second: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    lse = torch.logaddexp(first[1], second[1])
    weights = [(each[1] - lse).exp().nan_to_num(0.0)[..., None] for each in (first, second)]
    return first[0] * weights[0] + second[0] * weights[1], lse


def _over_backward(queries: Sequence[_Span], keys: _Span, of_keys: _Span, mask: Mask) -> None:
    """Adds the gradients of queries and keys.

    Args:
        queries: spans of (gradient, q, out, lse, gradient of q).
        of_keys: gradients of k and v.
    """
    for query in queries:
        gradient, q, out, lse, of_q = query.values
        for block in _blocks(query.start, q, keys, mask):
            found = _attend_backward(block, gradient, out, lse[..., 0], mask)
            into = of_keys.within(block.first_key, block.first_key + block.k.shape[-2])
            assert into is not None
            for target, each in zip((of_q, *into.values), found, strict=True):
                target.add_(each)


@dataclass(frozen=True, slots=True)
class _Block:
    """Queries and the keys that they may see.

    Attributes:
        first_query, first_key: positions of the first of each.
        masked: whether positions hide keys from queries.
        seen: whether each key may be seen at all, (batch, keys); None: all.
    """

    first_query: int
    first_key: int
    q: Tensor
    k: Tensor
    v: Tensor
    masked: bool
    seen: Tensor | None

    def seen_by_heads(self, seen: Tensor) -> Tensor:
        """Returns (batch, ...) as (batch x key heads, 1, ...), as `_grouped` has them."""
        return seen.repeat_interleave(self.k.shape[1], 0)[:, None]


def _blocks(first_query: int, q: Tensor, keys: _Span, mask: Mask) -> Iterator[_Block]:
    """Yields the blocks of keys that neighbouring queries see."""
    end = first_query + q.shape[-2]

    def block(part: _Span, masked: bool) -> _Block:
        seen = None if mask.seen is None else mask.seen[:, part.start : part.end]
        return _Block(first_query, part.start, q, part.values[0], part.values[1], masked, seen)

    within = keys.within(*mask.keys_of(first_query, end))
    if within is None:
        return
    if not mask.causal or mask.window:
        yield block(within, mask.causal)
        return
    for start, stop in ((0, first_query), (first_query, end)):
        part = within.within(start, stop)
        if part is not None:
            yield block(part, start == first_query)


def _attend(block: _Block, mask: Mask) -> tuple[Tensor, Tensor]:
    """Returns the attention over a block of keys alone, and its log-sum-exp."""
    q, v = block.q, block.v
    gq, gk, gv = _grouped(q, block.k, v)
    if _has_kernel(block, mask):
        added = _added_to_scores(block)
        out, lse = scaled_attention(gq, gk, gv, 0.0, block.masked, attn_mask=added, scale=mask.scale)
        if block.seen is not None:  # the kernel returns 0 for queries that see none of the keys
            some = block.seen.cumsum(-1) > 0 if block.masked else block.seen.any(-1, keepdim=True)
            lse = lse.masked_fill(~block.seen_by_heads(some), -math.inf)
        return out.reshape(*q.shape[:-1], v.shape[-1]), lse.reshape(q.shape[:-1])
    found = []
    for _, keys, scores in _scores(block, gq, gk, mask):
        lse = scores.logsumexp(-1)
        weights = (scores - lse[..., None]).exp().nan_to_num(0.0)
        found.append((weights.to(v.dtype) @ gv[..., keys, :], lse))
    out, lse = torch.cat([each for each, _ in found], -2), torch.cat([each for _, each in found], -1)
    return out.reshape(*q.shape[:-1], v.shape[-1]), lse.reshape(q.shape[:-1])


def _attend_backward(
    block: _Block, gradient: Tensor, out: Tensor, lse: Tensor, mask: Mask
) -> tuple[Tensor, Tensor, Tensor]:
    """Returns what a block of keys adds to the gradients of q, k and v.

    Args:
        out, lse: attention over all keys.
    """
    q, k, v = block.q, block.k, block.v
    gq, gk, gv = _grouped(q, k, v)
    g_out, g_gradient, g_lse = (each.reshape(*gq.shape[:3], -1) for each in (out, gradient, lse[..., None]))
    g_lse = g_lse[..., 0]
    if _has_kernel(block, mask):
        made, added = _as_kernel_made(g_lse), _added_to_scores(block)
        of_q, of_k, of_v = scaled_attention_backward(
            g_gradient, gq, gk, gv, g_out, made, 0.0, block.masked, attn_mask=added, scale=mask.scale
        )
    else:
        wide = _wide(q.dtype)
        delta = (g_gradient.to(wide) * g_out).sum(-1, keepdim=True)
        of_q = torch.zeros_like(gq, dtype=wide)
        of_k, of_v = (torch.zeros(*gq.shape[:2], *each.shape[2:], dtype=wide, device=q.device) for each in (gk, gv))
        for rows, keys, scores in _scores(block, gq, gk, mask):
            weights = (scores - g_lse[..., rows, None]).exp()
            above = g_gradient[..., rows, :]
            of_scores = (
                weights * ((above @ gv[..., keys, :].transpose(-1, -2)).to(wide) - delta[..., rows, :]) * mask.scale
            )
            narrow = of_scores.to(q.dtype)
            of_q[..., rows, :] += narrow @ gk[..., keys, :]
            of_k[..., keys, :] += narrow.transpose(-1, -2) @ gq[..., rows, :]
            of_v[..., keys, :] += weights.to(v.dtype).transpose(-1, -2) @ above
    of_k, of_v = (each.sum(1, dtype=_wide(k.dtype)).reshape(given.shape) for each, given in ((of_k, k), (of_v, v)))
    return of_q.reshape(q.shape), of_k, of_v


def _scores(block: _Block, q: Tensor, k: Tensor, mask: Mask) -> Iterator[tuple[slice, slice, Tensor]]:
    """Yields rows of queries, the keys that they see any of, and their masked scores, in fp32 or wider.

    Args:
        q, k: those of the block, grouped.
    """
    for first in range(0, q.shape[-2], _ROWS):
        rows = slice(first, min(first + _ROWS, q.shape[-2]))
        low, high = 0, k.shape[-2]
        if block.masked:
            seen = mask.keys_of(block.first_query + rows.start, block.first_query + rows.stop)
            low, high = (min(max(each - block.first_key, 0), high) for each in seen)
            if low >= high:
                low, high = 0, min(1, k.shape[-2])  # one key, which is hidden below
        keys = slice(low, high)
        scores = (q[..., rows, :] @ k[..., keys, :].transpose(-1, -2)).to(_wide(q.dtype)) * mask.scale
        if block.masked:
            own = torch.arange(block.first_query + rows.start, block.first_query + rows.stop, device=q.device)[:, None]
            theirs = torch.arange(block.first_key + low, block.first_key + high, device=q.device)[None, :]
            hidden = theirs > own
            if mask.window:
                hidden |= theirs <= own - mask.window
            scores = scores.masked_fill(hidden, -math.inf)
        if block.seen is not None:
            scores = scores.masked_fill(~block.seen_by_heads(block.seen[:, None, keys]), -math.inf)
        yield rows, keys, scores


def _has_kernel(block: _Block, mask: Mask) -> bool:
    """Whether torch's CPU kernel, which returns the log-sum-exp, computes this block."""
    q, k, v = block.q, block.k, block.v
    square = block.first_query == block.first_key and q.shape[-2] == k.shape[-2] and not mask.window
    plain = square or not block.masked
    return plain and in_ram(q) and q.shape[-1] == v.shape[-1] and q.dtype is k.dtype is v.dtype


def _grouped(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Returns (batch x key heads, query heads of each, tokens, features); keys are views with a stride of zero."""
    batch, heads = k.shape[:2]
    many = q.shape[1] // heads
    gq = q.reshape(batch * heads, many, *q.shape[2:])
    gk, gv = (each.reshape(batch * heads, 1, *each.shape[2:]).expand(-1, many, -1, -1) for each in (k, v))
    return gq, gk, gv


def _added_to_scores(block: _Block) -> Tensor | None:
    """Returns what torch's kernel adds to scores, (batch x key heads, 1, 1, keys): minus infinity for hidden keys."""
    if block.seen is None:
        return None
    added = torch.zeros(block.seen.shape, dtype=block.q.dtype, device=block.q.device).masked_fill(
        ~block.seen, -math.inf
    )
    return block.seen_by_heads(added[:, None])


def _as_kernel_made(lse: Tensor) -> Tensor:
    """Returns the log-sum-exp in the memory order in which torch's kernel makes it: tokens before heads."""
    return lse.transpose(1, 2).contiguous().transpose(1, 2)


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)
