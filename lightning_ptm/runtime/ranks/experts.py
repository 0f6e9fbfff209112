"""Expert parallelism: exchange of tokens with the ranks that hold the experts.

Owns the groups set on the model's layers with experts, and the counts of tokens. divided_experts.py decides which
experts are divided. A layer is any module whose class has an attribute `expert_group` (None if experts are not divided)
and whose `experts` is a ModuleList; it calls `expert_group.compute` in place of its experts (models/moe.py is one).

I1: a group agrees on every exchange first, as on a collective of pages, so no rank waits for one that does something
    else.
I2: forward and backward exchange whether there are tokens or not, so all ranks of a group run the same exchanges.
I3: a row's result does not depend on where it was computed, except for the rounding of matrix products: an expert gets
    rows ordered by rank and then in each rank's own order, and they return to their places.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from lightning_ptm.comm import Agreement, Communicator, Meeting
from lightning_ptm.errors import UsageError
from lightning_ptm.planning.expert_split import counts
from lightning_ptm.runtime.tensors.autograd_graphs import in_backward
from lightning_ptm.runtime.units.divided_experts import ATTRIBUTE, DividedExperts

_EXCHANGES = 4
"""Exchanges of a layer: rows to experts, results back, and the gradients of both."""

Call = Callable[[Tensor, list[int]], Tensor]
"""Computes rows sorted by expert, given the number of each expert's rows; returns results in the same order."""


@dataclasses.dataclass(slots=True)
class TokenStats:
    """Counts of rows in this rank's forward passes, without recomputed ones.

    A token counts once for each expert that it is routed to.

    Attributes:
        exchanges: calls of layers.
        sent: rows of this rank's tokens that experts computed.
        sent_away: those of `sent` that were computed on other ranks.
        received: rows that this rank's experts computed. The sums of `sent` and `received` over a group are equal.
        experts_called: experts of this rank that had rows, summed over the calls.
    """

    exchanges: int = 0
    sent: int = 0
    sent_away: int = 0
    received: int = 0
    experts_called: int = 0


class _Exchange(torch.autograd.Function):
    """All-to-all of rows. `anchor` requires a gradient, so that the backward always reaches this node (I2)."""

    @staticmethod
    def forward(
        ctx: Any,
        rows: Tensor,
        anchor: Tensor,
        group: DividedExpertGroup,
        step: int,
        sent: Sequence[int],
        received: Sequence[int],
    ) -> Tensor:
        ctx.group, ctx.step, ctx.sent, ctx.received = group, step, sent, received
        return group.move(step, rows, sent, received)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        back = ctx.group.move(_EXCHANGES - 1 - ctx.step, gradient, ctx.received, ctx.sent)
        return back, None, None, None, None, None


class _Reorder(torch.autograd.Function):
    """Permutation of rows. Its backward permutes gradients back, without atomics."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, order: Tensor, places: Tensor) -> Tensor:
        ctx.save_for_backward(places)
        return rows.index_select(0, order)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        (places,) = ctx.saved_tensors
        return gradient.index_select(0, places), None, None


class _GradientTimes(torch.autograd.Function):
    """Identity on rows. Its backward multiplies gradients by `factor`."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, factor: float) -> Tensor:
        ctx.factor = factor
        return rows.view_as(rows)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient * ctx.factor, None


class DividedExpertGroup:
    """The `expert_group` of a layer: its experts, on whichever ranks of the group they are.

    Args:
        place: index of the layer among all such layers.
        group: communicator of the ranks that divide its experts, by member.
        counts: by member, how many of the layer's experts it holds.
        agreement: ranks agree on each exchange through it.
        units: units of each expert of the layer.
        expect: called with the units that will be called next, in order.
        gradient_divisor: experts compute gradients divided by this number.
    """

    def __init__(
        self,
        place: int,
        group: Communicator,
        counts: Sequence[int],
        agreement: Agreement,
        units: Sequence[Sequence[int]],
        expect: Callable[[Sequence[int]], None],
        stats: TokenStats,
        clock: Iterator[int],
        gradient_divisor: int,
    ) -> None:
        self._place = place
        self._communicator = group
        self._agreement = agreement
        self._units = units
        self._expect = expect
        self._counts = counts
        self._first = sum(counts[: group.rank])
        self._stats = stats
        self._clock = clock
        self._gradient_divisor = gradient_divisor
        # State.
        self.alone = False
        """Whether this rank computes rows by its own experts, without the group."""

    @torch.compiler.disable
    def compute(self, rows: Tensor, counts: Sequence[int], call: Call) -> Tensor:
        """Computes rows with experts that may be on other ranks. Collective for the group.

        A loss must depend on experts by these results alone. With a gradient divisor other than 1 (16-mixed), a term
        that reads an expert's weights or intermediate values, e.g. an L2 penalty that its forward stores in an
        attribute, gets a gradient that is too large by that factor, and this cannot be detected here: use the
        optimizer's weight decay, or train in bf16-mixed.

        Args:
            rows: (n, width), sorted by expert.
            counts: number of rows of each of the layer's experts.
            call: computes rows of the experts on this rank; it gets counts for all experts, 0 for those on other ranks.

        Returns:
            (n, width), in the order of `rows`.

        Raises:
            RankError: other ranks of the group do not come to this exchange.
        """
        if self.alone:
            return self._computed_alone(rows, counts, call)
        group, first = self._communicator, self._first
        own = self._counts[group.rank]
        self._meet(0)
        asked = torch.tensor(counts, dtype=torch.int64)
        table = group.all_to_all(asked, self._counts, [own] * group.world_size).view(group.world_size, own)
        sent = [int(part.sum()) for part in asked.split(list(self._counts))]
        received: list[int] = table.sum(dim=1).tolist()
        per_expert: list[int] = table.sum(dim=0).tolist()
        if not in_backward():
            self._count(sent, received, per_expert)

        anchor = torch.zeros((), requires_grad=torch.is_grad_enabled())
        came = _Exchange.apply(rows, anchor, self, 0, sent, received)
        # Only after the rows have arrived: fetching may be collective, and other ranks of the group are in the
        # exchange.
        called = [unit for index, count in enumerate(per_expert) if count for unit in self._units[first + index]]
        self._expect(called)
        order, places = _by_expert(table, rows.device)
        here = self._gradient_times(self._gradient_divisor, _Reorder.apply(came, order, places))
        others = (len(counts) - first - own) * [0]
        results = self._gradient_times(1 / self._gradient_divisor, call(here, [0] * first + per_expert + others))
        if results.shape != here.shape:
            raise UsageError(
                f"experts gave results of shape {tuple(results.shape)} for rows of shape {tuple(here.shape)}, so the "
                "results cannot return to the places of the rows; let experts keep the width, or use "
                "expert_parallel_size=1"
            )
        # All ranks send one dtype: ranks whose experts had no rows have no result to take it from.
        results = _Reorder.apply(results.to(_result_dtype(rows)), places, order)
        out: Tensor = _Exchange.apply(results, anchor, self, 1, received, sent)
        return out

    def _computed_alone(self, rows: Tensor, counts: Sequence[int], call: Call) -> Tensor:
        """Computes rows as if each expert of another rank were one of this rank's."""
        first, own = self._first, self._counts[self._communicator.rank]
        results = []
        for at, part in zip(
            range(0, len(counts), own),
            rows.split([sum(counts[at : at + own]) for at in range(0, len(counts), own)]),
            strict=True,
        ):
            here = list(counts[at : at + own])
            here += [0] * (own - len(here))
            self._expect([unit for index, count in enumerate(here) if count for unit in self._units[first + index]])
            results.append(call(part, [0] * first + here + [0] * (len(counts) - first - own)))
        return torch.cat(results)

    def _gradient_times(self, factor: float, rows: Tensor) -> Tensor:
        if factor == 1:
            return rows
        out: Tensor = _GradientTimes.apply(rows, factor)
        return out

    def move(self, step: int, rows: Tensor, sent: Sequence[int], received: Sequence[int]) -> Tensor:
        """Runs one of the four exchanges of a layer; the first was agreed on together with its counts."""
        if step:
            self._meet(step)
        return self._communicator.all_to_all(rows, sent, received)

    def _meet(self, step: int) -> None:
        self._agreement.meet(Meeting(self._place * _EXCHANGES + step, next(self._clock)))

    def _count(self, sent: Sequence[int], received: Sequence[int], per_expert: Sequence[int]) -> None:
        stats = self._stats
        stats.exchanges += 1
        stats.sent += sum(sent)
        stats.sent_away += sum(sent) - sent[self._communicator.rank]
        stats.received += sum(received)
        stats.experts_called += sum(count > 0 for count in per_expert)


def _result_dtype(rows: Tensor) -> torch.dtype:
    kind = rows.device.type
    if torch.is_autocast_enabled(kind) and rows.dtype is not torch.float64:
        return torch.get_autocast_dtype(kind)
    return rows.dtype


def _by_expert(table: Tensor, device: torch.device) -> tuple[Tensor, Tensor]:
    """Order of rows by expert and then sender, from rows by sender and then expert, and its inverse permutation.

    Args:
        table: (senders, experts): numbers of rows.
    """
    experts = torch.arange(table.shape[1]).repeat(table.shape[0])
    order = torch.argsort(torch.repeat_interleave(experts, table.flatten()), stable=True)
    places = torch.empty_like(order)
    places[order] = torch.arange(len(order))
    return order.to(device), places.to(device)


class ExpertGroups:
    """The groups of all layers of one run: set on the layers by the constructor, removed by `close`."""

    def __init__(
        self,
        experts: DividedExperts,
        communicator: Communicator,
        agreement: Agreement,
        expect: Callable[[Sequence[int]], None],
    ) -> None:
        self.stats = TokenStats()
        self._layers = [layer for _, layer in experts.layers]
        self._groups: list[DividedExpertGroup] = []
        clock = itertools.count()
        for place, layer in enumerate(self._layers):
            units, divisor = experts.units[place], experts.gradient_divisor
            held = counts(len(units), communicator.world_size)
            group = DividedExpertGroup(place, communicator, held, agreement, units, expect, self.stats, clock, divisor)
            self._groups.append(group)
            setattr(layer, ATTRIBUTE, group)

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Context in which this rank computes by its own experts, in place of those of others: without exchanges, for
        computations that the other ranks do not make, and whose results are compared on this rank only."""
        for group in self._groups:
            group.alone = True
        try:
            yield
        finally:
            for group in self._groups:
                group.alone = False

    def close(self) -> None:
        """Removes the groups; the layers are as they were."""
        for layer in self._layers:
            layer.__dict__.pop(ATTRIBUTE, None)
