"""A mixture of experts in place of a feed-forward: tokens are divided over experts by a learned router.

After Switch Transformers (Fedus et al. 2022) for one expert a token, and GShard (Lepikhin et al. 2021) for two.

I1: an expert computes at most `capacity` tokens of a rank's batch; which ones is decided by their order (first choices before
second ones), so the same batch gives the same bits. I2: a token that finds no room adds nothing here: what its block
gives is its residual. I3: memory for dispatch grows with tokens, not with tokens times experts times capacity: tokens
are sorted by expert and gathered, there and back, without atomics. I4: an expert that gets no token is not called: it is
not fetched if it is a unit of its own, and has no gradient, as if this step did not know of it.
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
    """Ranks that divide experts among them. A strategy puts one into a layer's `expert_group` for the time of a run."""

    def compute(self, rows: Tensor, counts: Sequence[int], call: Callable[[Tensor, list[int]], Tensor]) -> Tensor:
        """(n, width) results of (n, width) rows that are sorted by expert, wherever the experts are. All ranks of the group
        call it.

        Args:
            counts: per expert how many of `rows` are its.
            call: computes rows of experts that are here, given such counts for all experts.
        """


@dataclass(frozen=True, slots=True)
class Routing:
    """What a layer's router did with a batch.

    Attributes:
        balance_loss: scalar with a gradient; 1 when tokens are spread evenly, the number of experts when one gets all
            (equation 4 of Switch Transformers, without its factor); 0 of no tokens.
        load: (experts,), float32: choices that fell on each expert, whether it had room or not.
        dropped: scalar, float32: choices that found no room.
    """

    balance_loss: Tensor
    load: Tensor
    dropped: Tensor

    @property
    def dropped_fraction(self) -> Tensor:
        """Scalar: the part of all choices that found no room."""
        return self.dropped / self.load.sum()

    @property
    def load_entropy(self) -> Tensor:
        """Scalar: entropy of the load over that of an even one; 1 is even, 0 is all on one expert."""
        share = self.load / self.load.sum()
        return torch.special.entr(share).sum() / math.log(self.load.numel())


@dataclass(frozen=True, slots=True)
class Dispatch:
    """Who computes what, for n tokens of which each has chosen k experts.

    Attributes:
        rows: (kept,): the token of each choice that is computed, sorted by expert.
        choices: (kept,): the same choices as indices into the flat (k, n) list of all choices.
        slots: (k, n): the place of each choice in `rows`; `kept` for one that found no room.
        counts: per expert how many of `rows` are its.
        load: (experts,): choices that fell on each expert.
    """

    rows: Tensor
    choices: Tensor
    slots: Tensor
    counts: list[int]
    load: Tensor


def dispatch(chosen: Tensor, experts: int, capacity: int) -> Dispatch:
    """Gives each expert the first `capacity` choices that fell on it.

    Args:
        chosen: (k, n), int64: for each rank of choice the expert of each token.
    """
    flat = chosen.flatten()  # all first choices, then all second ones: that is their priority
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
    """(n, width): for each token the sum of its choices' rows of `values`."""
    total = values.index_select(0, slots[0])
    for more in slots[1:]:
        total += values.index_select(0, more)
    return total


class _Scatter(torch.autograd.Function):
    """(n, width) tokens to (kept, width) rows sorted by expert. Its backward gathers, too: no atomics, the same bits."""

    @staticmethod
    def forward(ctx: FunctionCtx, x: Tensor, rows: Tensor, slots: Tensor) -> Tensor:
        ctx.save_for_backward(slots)
        return x.index_select(0, rows)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        (slots,) = ctx.saved_tensors
        none = gradient.new_zeros(1, gradient.shape[1])  # what a choice without room adds
        return _gather_sum(torch.cat([gradient, none]), slots), None, None


class _Combine(torch.autograd.Function):
    """(kept + 1, width) rows, the last of them zero, to the sum of each token's rows, (n, width)."""

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
    """Probabilities of the experts for each token, in fp32 whatever the model computes in ("selective precision").

    Args:
        width: elements of a token.
        experts: their number.
        jitter: in training, inputs are multiplied by uniform noise from 1 - jitter to 1 + jitter.
    """

    keep_in_fp32 = True
    """Under mixed precision the strategy keeps this module's parameters, too, in fp32."""

    def __init__(self, width: int, experts: int, jitter: float) -> None:
        super().__init__()
        self.jitter = jitter
        self.weight = nn.Parameter(torch.empty(experts, width))

    def forward(self, x: Tensor) -> Tensor:
        """(n, experts) for (n, width)."""
        with torch.autocast(x.device.type, enabled=False):
            return self.probabilities(x)

    def probabilities(self, x: Tensor) -> Tensor:
        """What `forward` gives where no autocast is on; on the meta device, which has none, too."""
        x = x.to(torch.promote_types(x.dtype, torch.float32))
        if self.training and self.jitter:
            x = x * torch.empty_like(x).uniform_(1.0 - self.jitter, 1.0 + self.jitter)
        return F.linear(x, self.weight.to(x.dtype)).softmax(dim=-1)


class Expert(nn.Module):
    """A feed-forward without biases; `gated` makes it the gated GELU of T5 1.1 instead of ReLU.

    One flat module with its own two or three matrices: thousands of them are built in seconds on the meta device.
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
    """The experts of a layer; called with rows, those that have any compute them."""

    def forward(self, rows: Tensor, counts: Sequence[int], zeros: int = 0) -> Tensor:
        """(n + zeros, width) results of (n, width) rows that are sorted by expert.

        Args:
            counts: per expert how many of `rows` are its.
            zeros: so many rows of zeros come last.
        """
        parts = [
            expert(part)
            for expert, part in zip(self, rows.split(list(counts)), strict=True)
            if len(part)  # I4
        ] or [rows]  # no tokens at all
        return torch.cat([*parts, parts[0].new_zeros(zeros, rows.shape[1])])


class MixtureOfExperts(nn.Module):
    """Each token is computed by the `choices` experts that its router finds most probable, weighted by probability.

    Experts are modules of their own in a ModuleList, not slices of one batched weight: what is fetched, reduced and
    updated together is a unit, a unit is a module, and so an expert can be one (`units=["Block", "Expert"]`): of
    thousands only those with tokens are fetched. Ranks may divide them among them (`expert_group`) and hold whole ones. The
    loop is over experts that have tokens, never over tokens.

    Routing, capacity included, is each rank's own, of its own tokens, and the same whether ranks divide experts or not: an
    expert then computes up to its capacity for each rank of the group. Where they do, a loss must depend on experts by
    this layer's output alone: under 16-mixed a term of their weights themselves, e.g. an L2 penalty, counts more than it says
    (the loss scale's gradients are kept smaller inside of the exchange only). Use the optimizer's weight decay.

    Args:
        width, inner, gated, dropout: of each expert.
        experts: their number, at least 2.
        choices: experts a token, 1 (Switch) or 2 (GShard; their two probabilities are made to add up to 1).
        capacity_factor, eval_capacity_factor: an expert has room for so many times its even share of the choices.
        jitter: of the router.
    """

    expert_group: ExpertGroup | None = None
    """The ranks that divide the experts among them; None where each calls all of them itself."""

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
        """The most choices that an expert computes of a batch of so many tokens."""
        factor = self.capacity_factor if self.training else self.eval_capacity_factor
        return math.ceil(tokens * self.choices * factor / len(self.experts))

    def forward(self, x: Tensor) -> tuple[Tensor, Routing]:
        """The experts' output, of the shape (..., width) of `x`, and what the router did."""
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
        # Of first choices only, as in GShard; with one choice they are the load.
        first = load if self.choices == 1 else torch.bincount(chosen[:, 0], minlength=experts).to(load.dtype)
        balance = (
            experts * (first / len(chosen) * probabilities.mean(dim=0)).sum() if len(chosen) else probabilities.sum()
        )
        dropped = load.sum() - len(plan.rows)
        return Routing(balance, load, dropped)
