"""Context parallelism of a run: which tokens this rank has, when attention is divided, and what is refused.

Ranks of a context group train on the same batch, each on its tokens of it (planning/token_chunks.py). Only attention
exchanges anything (context_attention.py). Everything else of a model, and its loss, computes a token alone, or is refused
when the first batch is checked (loss_check.py). An evaluation computes whole batches on each rank.

I1: attention is divided within a training step and within its backward pass, which may recompute it, and nowhere else.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal

import torch
from torch import Tensor

from lightning_ptm.errors import UsageError
from lightning_ptm.parallel.context_attention import Mask, attention, chosen_way, has_heads_for
from lightning_ptm.parallel.exchange import TensorGroup
from lightning_ptm.planning.token_chunks import TokenChunks, divides
from lightning_ptm.runtime.tensors.autograd_graphs import in_backward

Way = Literal["auto", "gather", "ulysses", "ring"]

_WHOLE = "; or train with context_parallel_size=1"


class ContextParallel:
    """One rank of a context group.

    Args:
        group: the ranks that have the tokens of a sequence.
        way: the way of attention.
    """

    def __init__(self, group: TensorGroup, way: Way) -> None:
        self.group = group
        self.way = way
        # State.
        self._in_step = False
        self._whole = False
        """Whether everything is computed whole, although a step is in progress."""

    @property
    def divided(self) -> bool:
        """Whether what is computed now has this rank's tokens only (I1)."""
        return not self._whole and (self._in_step or in_backward())

    @contextmanager
    def of_step(self) -> Iterator[None]:
        """Context of a training step's forward; each rank draws random numbers of its own there."""
        self._in_step = True
        self.group.begin_divided()
        try:
            yield
        finally:
            self._in_step = False
            self.group.forget()

    @contextmanager
    def whole(self) -> Iterator[None]:
        """Context in which this rank computes whole sequences."""
        before, self._whole = self._whole, True
        try:
            yield
        finally:
            self._whole = before

    # -- tokens -------------------------------------------------------------------------------------------------------

    def positions(self, tokens: int, device: torch.device | None = None) -> Tensor:
        """Returns the positions, in their sequence, of a rank's `tokens` tokens; 0, 1, ... where sequences are whole."""
        if not self.divided:
            return torch.arange(tokens, device=device)
        return self.own_positions(tokens, device)

    def own_positions(self, tokens: int, device: torch.device | None = None) -> Tensor:
        """Returns the positions of a rank's `tokens` tokens in a divided sequence."""
        chunks = TokenChunks(self.group.size, tokens)
        return torch.cat(
            [torch.arange(at, at + chunks.of_chunk, device=device) for at in chunks.starts(self.group.index)]
        )

    def part(self, whole: Tensor, dim: int = 1) -> Tensor:
        """Returns this rank's tokens of a tensor with those of the sequence along a dimension."""
        chunks = TokenChunks(self.group.size, whole.shape[dim] // self.group.size)
        return torch.cat([whole.narrow(dim, at, chunks.of_chunk) for at in chunks.starts(self.group.index)], dim)

    def joined(self, part: Tensor) -> Tensor:
        """Returns whole sequences from the ranks' tokens, (batch, tokens, ...), without a gradient. Collective."""
        chunks = TokenChunks(self.group.size, part.shape[1])
        parts = [each.split(chunks.of_chunk, 1) for each in self.group.kept(lambda: self.group.gather(part)).unbind(0)]
        return torch.cat([parts[rank][index] for rank, index in chunks.in_order()], 1)

    def sum(self, counts: Tensor) -> Tensor:
        """Returns the sum over all tokens of sequences of what was counted in this rank's, without a gradient. Collective."""
        return self.group.kept(lambda: self.group.sum(counts.detach())) if self.divided else counts

    def check_length(self, length: int) -> None:
        """Raises:
        UsageError: sequences of this length cannot be divided.
        """
        if not divides(length, self.group.size):
            size = self.group.size
            raise UsageError(
                f"context_parallel_size={size} cuts sequences into {2 * size} chunks, and a batch has sequences of "
                f"{length} tokens; give a multiple of {2 * size}: {length // (2 * size) * 2 * size} or "
                f"{-(-length // (2 * size)) * 2 * size} tokens (targets are as many as tokens: cut a text of one token more "
                f"into tokens and targets in the data set)"
            )

    # -- attention ----------------------------------------------------------------------------------------------------

    def scaled_dot_product_attention(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        *,
        scale: float | None = None,
        enable_gqa: bool = False,
        window: int = 0,
        seen: Tensor | None = None,
    ) -> Tensor:
        """Takes the arguments of torch's function, of this rank's tokens.

        Args:
            window: length of a sliding window; 0: none.
            seen: (batch, tokens of the whole sequence), whether queries may see each token; None: all.

        Raises:
            UsageError: parts of the sequence do not suffice for it.
        """
        if attn_mask is not None:
            raise self._refusal(
                f"a mask of shape {tuple(attn_mask.shape)}, of which this rank has its tokens only",
                "set is_causal in place of the mask, and cut texts to one length in place of padding (models of Transformers "
                "may have an attention_mask of padding)",
            )
        if dropout_p:
            raise self._refusal(
                f"a dropout of {dropout_p}, of which no rank has the whole mask",
                "set the model's attention dropout to 0; dropout elsewhere works",
            )
        if key.shape[-2] != query.shape[-2] or key.shape[-2] != value.shape[-2]:
            raise self._refusal(
                f"{query.shape[-2]} queries and {key.shape[-2]} keys, so it is no self-attention",
                "train models with cross-attention, or with keys from elsewhere, on whole sequences",
            )
        if not 3 <= query.dim() <= 4 or query.shape[:-3] != key.shape[:-3]:
            raise self._refusal(
                f"tensors of shapes {tuple(query.shape)} and {tuple(key.shape)}",
                "give (batch, heads, tokens, features)",
            )
        heads = query.shape[-3], key.shape[-3]
        if heads[0] % heads[1] or (heads[0] != heads[1] and not enable_gqa):
            raise self._refusal(
                f"{heads[0]} heads of queries and {heads[1]} of keys", "set enable_gqa with fewer heads of keys"
            )
        mask = Mask(query.shape[-1] ** -0.5 if scale is None else scale, is_causal, window, seen)
        if query.dim() == 3:
            q, k, v = (each.unsqueeze(1) for each in (query, key, value))
            return self._attention(q, k, v, mask).squeeze(1)
        return self._attention(query, key, value, mask)

    def _attention(self, q: Tensor, k: Tensor, v: Tensor, mask: Mask) -> Tensor:
        size = self.group.size
        way = chosen_way(size, q, k, v) if self.way == "auto" else self.way
        if way == "ulysses" and not has_heads_for(size, q, k, v):
            raise UsageError(
                f"context_parallel='ulysses' divides heads over {size} ranks, and attention has {q.shape[1]} heads of "
                f"queries and {k.shape[1]} of keys, of {q.shape[-1]} and {v.shape[-1]} features; use "
                f"context_parallel='auto', 'gather' or 'ring'"
            )
        return attention(q, k, v, self.group, way, mask)

    def _refusal(self, what: str, remedy: str) -> UsageError:
        return UsageError(
            f"attention was called with {what}, and context_parallel_size={self.group.size} divides sequences over ranks; "
            f"{remedy}{_WHOLE}"
        )
