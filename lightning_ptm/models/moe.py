"""Mixture of experts in place of a feed-forward: a learned router sends each token to one or two experts.

After Switch Transformers (Fedus et al. 2022) for one expert per token, and GShard (Lepikhin et al. 2021) for two.

I1: an expert computes at most `capacity` tokens of a rank's batch, chosen by their order (first choices before second ones),
    so the same batch gives bitwise the same result.
I2: a token without room at its expert gets zero from it: its block passes on the residual.
I3: memory for dispatch grows with tokens, not with tokens times experts times capacity: tokens are sorted by expert and
    gathered, there and back, without atomics.
I4: an expert without tokens is not called: it is not fetched if it is a unit of its own, and it has no gradient.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import FunctionCtx, once_differentiable


class ExpertGroup(Protocol):
    """Interface to the ranks that divide experts. A strategy sets a layer's `expert_group` for the time of a run."""

    def compute(self, rows: Tensor, counts: Sequence[int], call: Callable[[Tensor, list[int]], Tensor]) -> Tensor:
        """Returns the experts' results, (n, width), on whatever ranks the experts are. Collective in the group.

        Args:
            rows: (n, width), sorted by expert.
            counts: by expert, the number of its rows.
            call: computes rows of this rank's experts, given such counts for all experts.
        """


@dataclass(frozen=True, slots=True)
class Routing:
    """Statistics of a layer's router for a batch.

    Attributes:
        balance_loss: scalar with a gradient; 1 if tokens are spread evenly, the number of experts if one gets all (equation
            4 of Switch Transformers, without its factor); 0 without tokens.
        load: (experts,), float32: choices of each expert, including those without room.
        dropped: scalar, float32: choices without room at their expert.
    """

    balance_loss: Tensor
    load: Tensor
    dropped: Tensor

    @property
    def dropped_fraction(self) -> Tensor:
        """Scalar: the fraction of choices without room at their expert."""
        return self.dropped / self.load.sum()

    @property
    def load_entropy(self) -> Tensor:
        """Scalar: entropy of the load relative to that of an even load; 1: even, 0: all on one expert."""
        share = self.load / self.load.sum()
        return torch.special.entr(share).sum() / math.log(self.load.numel())


@dataclass(frozen=True, slots=True)
class Dispatch:
    """Assignment of tokens to experts, for n tokens that have each chosen k experts.

    Attributes:
        rows: (kept,): the token of each choice that is computed, sorted by expert.
        choices: (kept,): the same choices as indices into the flat (k, n) list of all choices.
        slots: (k, n): the index of each choice in `rows`; `kept` for a choice without room.
        counts: by expert, the number of its rows.
        load: (experts,): choices of each expert, including those without room.
    """

    rows: Tensor
    choices: Tensor
    slots: Tensor
    counts: list[int]
    load: Tensor


def dispatch(chosen: Tensor, experts: int, capacity: int) -> Dispatch:
    """Assigns to each expert the first `capacity` choices of it.

    Args:
        chosen: (k, n), int64: for first choices, second choices, ..., the expert of each token.
    """
    flat = chosen.flatten()  # all first choices before all second ones: that is their priority
    order = torch.argsort(flat, stable=True)
    load = torch.bincount(flat, minlength=experts)
    per_expert: list[int] = load.tolist()
    counts = [min(count, capacity) for count in per_expert]
    if counts != per_expert:
        parts = [part[:capacity] for part in order.split(per_expert)]
        order = torch.cat(parts)
    kept = order.numel()
    slots = torch.full_like(flat, kept)
    slots[order] = torch.arange(kept, device=flat.device)
    return Dispatch(order % chosen.shape[1], order, slots.view_as(chosen), counts, load)


def _gather_sum(values: Tensor, slots: Tensor) -> Tensor:
    """Returns for each token the sum of its choices' rows of `values`, (n, width)."""
    total = values.index_select(0, slots[0])
    for more in slots[1:]:
        total += values.index_select(0, more)
    return total


class _Scatter(torch.autograd.Function):
    """(n, width) tokens -> (kept, width) rows sorted by expert. The backward gathers, too: no atomics, deterministic."""

    @staticmethod
    def forward(ctx: FunctionCtx, x: Tensor, rows: Tensor, slots: Tensor) -> Tensor:
        ctx.save_for_backward(slots)
        return x.index_select(0, rows)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        (slots,) = ctx.saved_tensors
        none = gradient.new_zeros(1, gradient.shape[1])  # the row of choices without room
        return _gather_sum(torch.cat([gradient, none]), slots), None, None


class _Combine(torch.autograd.Function):
    """(kept + 1, width) rows, the last of them zero -> the sum of each token's rows, (n, width)."""

    @staticmethod
    def forward(ctx: FunctionCtx, y: Tensor, rows: Tensor, slots: Tensor) -> Tensor:
        ctx.save_for_backward(rows)
        return _gather_sum(y, slots)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        (rows,) = ctx.saved_tensors
        none = gradient.new_zeros(1, gradient.shape[1])
        return torch.cat([gradient.index_select(0, rows), none]), None, None


class Router(nn.Module):
    """Router: probabilities of the experts for each token, in fp32 in every precision ("selective precision").

    Args:
        width: elements of a token.
        experts: number of experts.
        jitter: in training, inputs are multiplied by uniform noise from 1 - jitter to 1 + jitter.
    """

    keep_in_fp32 = True
    """Tells the strategy to keep this module's parameters in fp32 under mixed precision, too."""

    def __init__(self, width: int, experts: int, jitter: float) -> None:
        super().__init__()
        self.jitter = jitter
        self.weight = nn.Parameter(torch.empty(experts, width))

    def forward(self, x: Tensor) -> Tensor:
        """Returns probabilities, (n, experts), for tokens, (n, width)."""
        with torch.autocast(x.device.type, enabled=False):
            return self.probabilities(x)

    def probabilities(self, x: Tensor) -> Tensor:
        """Returns what `forward` does, without turning autocast off; for the meta device, which has no autocast."""
        x = x.to(torch.promote_types(x.dtype, torch.float32))
        if self.training and self.jitter:
            x = x * torch.empty_like(x).uniform_(1.0 - self.jitter, 1.0 + self.jitter)
        return F.linear(x, self.weight.to(x.dtype)).softmax(dim=-1)


class Expert(nn.Module):
    """Expert: a feed-forward without biases, with ReLU or, if `gated`, the gated GELU of T5 1.1.

    A single module with its own two or three matrices, so that thousands are built in seconds on the meta device.
    """

    def __init__(self, width: int, inner: int, *, gated: bool, dropout: float) -> None:
        super().__init__()
        self.dropout = dropout
        self.expand = nn.Parameter(torch.empty(inner, width))
        self.gate = nn.Parameter(torch.empty(inner, width)) if gated else None
        self.project = nn.Parameter(torch.empty(width, inner))

    def forward(self, x: Tensor) -> Tensor:
        inner = F.linear(x, self.expand)
        if self.gate is None:
            inner = F.relu(inner)
        else:
            inner = F.gelu(F.linear(x, self.gate), approximate="tanh") * inner
        return F.linear(F.dropout(inner, self.dropout, self.training), self.project)


class Experts(nn.ModuleList):
    """The experts of a layer; a call computes rows with the experts that have any."""

    def forward(self, rows: Tensor, counts: Sequence[int], zeros: int = 0) -> Tensor:
        """Returns the experts' results, (n + zeros, width).

        Args:
            rows: (n, width), sorted by expert.
            counts: by expert, the number of its rows.
            zeros: number of rows of zeros at the end of the result.
        """
        parts = [
            expert(part)
            for expert, part in zip(self, rows.split(list(counts)), strict=True)
            if len(part)  # I4
        ] or [rows]  # no tokens at all
        return torch.cat([*parts, parts[0].new_zeros(zeros, rows.shape[1])])


class MixtureOfExperts(nn.Module):
    """Mixture of experts: the `choices` most probable experts compute each token, weighted by their probability.

    Experts are modules of their own in a ModuleList, not slices of one batched weight. A unit is a module, so an expert can
    be a unit (`units=["Block", "Expert"]`), and of thousands of experts only those with tokens are fetched. Ranks may divide
    the experts (`expert_group`); each then has some experts whole. The loop is over experts that have tokens, never over
    tokens.

    Each rank routes its own tokens, with its own capacity, whether ranks divide experts or not: a divided expert computes up
    to its capacity for each rank of the group. With divided experts, a loss must depend on experts only through this layer's
    output: under 16-mixed a term of their weights, e.g. an L2 penalty, would have too large a gradient (gradients under the
    loss scale are reduced inside of the exchange only). Use the optimizer's weight decay.

    Args:
        width, inner, gated, dropout: Arguments of each expert.
        experts: number of experts, at least 2.
        choices: experts per token, 1 (Switch) or 2 (GShard; their two probabilities are normalised to add up to 1).
        capacity_factor, eval_capacity_factor: room of an expert, in multiples of its even share of the choices.
        jitter: jitter of the router.
    """

    expert_group: ExpertGroup | None = None
    """The ranks that divide the experts; None if each rank has all experts."""

    sum_over_text: Callable[[Tensor], Tensor] | None = None
    """Sums counts over the ranks that have other tokens of the same texts; a strategy sets it for the time of a run that
    divides texts. None: each rank has whole texts."""

    def __init__(
        self,
        width: int,
        inner: int,
        *,
        experts: int,
        choices: int,
        capacity_factor: float,
        eval_capacity_factor: float,
        jitter: float,
        gated: bool,
        dropout: float,
    ) -> None:
        super().__init__()
        self.choices = choices
        self.capacity_factor = capacity_factor
        self.eval_capacity_factor = eval_capacity_factor
        self.router = Router(width, experts, jitter)
        self.experts = Experts(Expert(width, inner, gated=gated, dropout=dropout) for _ in range(experts))

    def capacity(self, tokens: int) -> int:
        """Returns the most choices that an expert computes of a batch of so many tokens."""
        factor = self.capacity_factor if self.training else self.eval_capacity_factor
        return math.ceil(tokens * self.choices * factor / len(self.experts))

    def forward(self, x: Tensor) -> tuple[Tensor, Routing]:
        """Returns the experts' output, of the shape (..., width) of `x`, and the router's statistics."""
        tokens = x.flatten(0, -2)
        probabilities = self.router(tokens)
        weights, chosen = probabilities.topk(self.choices, dim=-1)  # (n, k)
        if self.choices > 1:
            weights = weights / weights.sum(dim=-1, keepdim=True)
        plan = dispatch(chosen.t().contiguous(), len(self.experts), self.capacity(len(tokens)))

        rows = _Scatter.apply(tokens, plan.rows, plan.slots)
        group = self.expert_group
        if group is None:
            y = self.experts(rows, plan.counts, 1)
        else:
            y = F.pad(group.compute(rows, plan.counts, self.experts), (0, 0, 0, 1))
        scale = weights.t().flatten().index_select(0, plan.choices)
        y = y * F.pad(scale, (0, 1)).to(y.dtype).unsqueeze(1)
        out: Tensor = _Combine.apply(y, plan.rows, plan.slots)
        return out.view(x.shape), self._routing(probabilities, chosen, plan)

    def _routing(self, probabilities: Tensor, chosen: Tensor, plan: Dispatch) -> Routing:
        experts = len(self.experts)
        load = plan.load.to(probabilities.dtype)
        # First choices only, as in GShard; with one choice they are the load.
        first = load if self.choices == 1 else torch.bincount(chosen[:, 0], minlength=experts).to(load.dtype)
        # Of whole texts, so that the mean of the ranks' balance losses is that of one rank with these texts.
        counted = first if self.sum_over_text is None else self.sum_over_text(first)
        share = counted / counted.sum()
        balance = experts * (share * probabilities.mean(dim=0)).sum() if len(chosen) else probabilities.sum()
        dropped = load.sum() - len(plan.rows)
        return Routing(balance, load, dropped)
