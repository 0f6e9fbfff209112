"""Experts that ranks divide among them: which units they are, and how tokens travel to them and back.

Owns what is put into the model's layers with experts, and the counts of tokens. A layer is any module whose class has an
attribute `expert_group` (None where nobody divides) and whose `experts` is a ModuleList; it calls `expert_group.compute`
where it would have called its experts itself (models/moe.py is one).

I1: every exchange of a group is agreed on first, like a collective of pages: no rank waits for one that does something else.
I2: forward and backward exchange whether there are tokens or not, so all ranks of a group go through the same exchanges.
I3: a row's result does not depend on where it was computed but for the rounding of matrix products: rows come to an expert
    by rank, in each rank's own order, and return to their places.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from lightning_ptm.comm import Agreement, Communicator, Meeting, Teams
from lightning_ptm.errors import ConfigError, UsageError
from lightning_ptm.planning.experts import ExpertSplit, divided
from lightning_ptm.planning.holders import Holders
from lightning_ptm.runtime.recompute import in_backward
from lightning_ptm.runtime.units import Unit

ATTRIBUTE = "expert_group"
"""Of a layer that lets ranks divide its experts."""

_EXCHANGES = 4
"""Of a layer: rows to experts, results back, and the gradients of both."""

Call = Callable[[Tensor, list[int]], Tensor]
"""Rows sorted by expert, and how many are each expert's -> their results, in the same order."""


@dataclasses.dataclass(frozen=True, slots=True)
class DividedExperts:
    """Which units are experts, and whose. Equal on all ranks.

    Attributes:
        layers: modules with experts, with their names.
        units: by layer and expert, the units that an expert consists of, its own first.
        members: by unit the member of a group that holds it; other units are everybody's.
        gradient_divisor: of gradients while experts compute them, where tokens of several ranks add up in 16 bits (the
            loss scale's case). Experts' gradients are multiplied by it before they are reduced, whatever they come from:
            see `ExpertGroup.compute`.
    """

    split: ExpertSplit
    layers: tuple[tuple[str, nn.Module], ...]
    units: tuple[tuple[tuple[int, ...], ...], ...]
    members: Mapping[int, int]
    gradient_divisor: int = 1

    @property
    def layer_of(self) -> dict[int, int]:
        """By unit the place of its layer among `layers`."""
        return {unit: place for place, layer in enumerate(self.units) for expert in layer for unit in expert}

    @property
    def holders(self) -> Holders:
        """Who holds what."""
        return divided(self.split, self.members, self.gradient_divisor)

    @property
    def teams(self) -> Teams:
        """Who has a part in what."""
        return Teams(self.split.groups, {unit: sharing.whole.ranks for unit, sharing in self.holders.apart.items()})


@dataclasses.dataclass(slots=True)
class TokenStats:
    """Rows (a token counts once for each expert that it was given to) of this rank's forward passes, recomputed ones not
    counted.

    Attributes:
        exchanges: calls of layers.
        sent: rows of this rank's tokens that experts computed.
        sent_away: of these, on other ranks.
        received: rows that this rank's experts computed. The sums of `sent` and `received` over a group are equal.
        experts_called: experts of this rank that had rows, summed over the calls.
    """

    exchanges: int = 0
    sent: int = 0
    sent_away: int = 0
    received: int = 0
    experts_called: int = 0


# -- which units are experts ----------------------------------------------------------------------------------------------


def expert_layers(root: nn.Module) -> tuple[tuple[str, nn.Module], ...]:
    """Modules that let ranks divide their experts, with their names."""
    return tuple((name, module) for name, module in root.named_modules() if hasattr(type(module), ATTRIBUTE))


def experts_of(layer: nn.Module) -> nn.ModuleList:
    """A layer's experts."""
    experts = getattr(layer, "experts", None)
    if not isinstance(experts, nn.ModuleList):
        raise ConfigError(
            f"a {type(layer).__name__} has {ATTRIBUTE}, and its `experts` is a {type(experts).__name__}; ranks can divide "
            f"the elements of a ModuleList; make it one, or use expert_parallel_size=1"
        )
    return experts


def divide(
    root: nn.Module, units: Sequence[Unit], split: ExpertSplit, *, scaled_to_overflow: bool = False
) -> DividedExperts:
    """Finds the experts among the units.

    Args:
        scaled_to_overflow: gradients are 16-bit numbers that a dynamic loss scale keeps just below their largest value.

    Raises:
        ConfigError: there are none, or some cannot be divided.
    """
    layers = expert_layers(root)
    if not layers:
        raise ConfigError(
            f"expert_parallel_size={split.size} and the {type(root).__name__} has no layer whose experts could be divided "
            f"(a module with experts in a ModuleList and the attribute {ATTRIBUTE}, as "
            f"lightning_ptm.models.moe.MixtureOfExperts); use expert_parallel_size=1"
        )
    owner: dict[int, tuple[str, int]] = {}
    """By id of a parameter: its expert, and the member that holds it."""
    inside: dict[str, set[int]] = {}
    """By expert, its modules."""
    for name, layer in layers:
        experts = experts_of(layer)
        if len(experts) < split.size:
            raise ConfigError(
                f"{name} ({type(layer).__name__}) has {len(experts)} experts and expert_parallel_size={split.size}, so some "
                f"rank would hold none; use at most {len(experts)}"
            )
        for index, expert in enumerate(experts):
            title = _title(name, index)
            inside[title] = {id(module) for module in expert.modules()}
            buffers = [each for each, _ in expert.named_buffers()]
            if buffers:
                raise ConfigError(
                    f"{title} ({type(expert).__name__}) has buffers ({', '.join(buffers[:3])}); a rank that does not hold "
                    f"an expert would not know of their changes; use parameters, or expert_parallel_size=1"
                )
            for parameter in expert.parameters():
                if id(parameter) in owner:
                    raise _shared(title, expert, owner[id(parameter)][0], split)
                owner[id(parameter)] = (title, split.owner(index, len(experts)))
    members: dict[int, int] = {}
    consists_of: dict[str, list[int]] = {title: [] for title in inside}
    for unit in units:
        for item in unit.parameters:
            if id(item.parameter) not in owner:
                continue
            title, member = owner[id(item.parameter)]
            outside = [module for module, _ in item.places if id(module) not in inside[title]]
            if outside:
                raise _shared(title, root.get_submodule(title), f"a {type(outside[0]).__name__} outside of it", split)
            if id(unit.module) not in inside[title]:
                kind = type(root.get_submodule(title)).__name__
                raise ConfigError(
                    f"{title} ({kind}) is a part of the unit {unit.name or 'of the whole model'}, which all ranks hold, and "
                    f"expert_parallel_size={split.size} needs experts that are units of their own; add {kind!r} to "
                    f"units=[...], or leave units at 'auto'"
                )
            if unit.index not in members:
                members[unit.index] = member
                consists_of[title].append(unit.index)
    by_layer = tuple(
        tuple(tuple(consists_of[_title(name, index)]) for index in range(len(experts_of(layer))))
        for name, layer in layers
    )
    # An expert's gradient is a sum over its group's tokens and would overflow before the gradients of others, which are of
    # one rank's tokens. Without a loss scale, small gradients are nearer to being lost than large ones to overflow. A power
    # of two costs no bits.
    divisor = 1 << (split.size - 1).bit_length() if scaled_to_overflow else 1
    return DividedExperts(split, layers, by_layer, members, divisor)


def _title(layer: str, expert: int) -> str:
    return f"{layer}.experts.{expert}".lstrip(".")


def _shared(title: str, module: nn.Module, other: str, split: ExpertSplit) -> ConfigError:
    return ConfigError(
        f"{title} ({type(module).__name__}) shares parameters with {other}, and expert_parallel_size={split.size} would give "
        f"them to different ranks; give each expert parameters of its own, or use expert_parallel_size=1"
    )


# -- how tokens travel ----------------------------------------------------------------------------------------------------


class _Exchange(torch.autograd.Function):
    """Rows to other ranks. `anchor` requires a gradient, so that the backward pass comes here whatever was computed (I2)."""

    @staticmethod
    def forward(
        ctx: Any,
        rows: Tensor,
        anchor: Tensor,
        group: ExpertGroup,
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
    """Rows in another order. Its backward puts gradients back, without atomics."""

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
    """The same rows. Their gradients are multiplied by `factor`."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, factor: float) -> Tensor:
        ctx.factor = factor
        return rows.view_as(rows)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient * ctx.factor, None


class ExpertGroup:
    """What a layer finds in `expert_group`: its experts, wherever in the group they are.

    Args:
        place: of the layer among all such layers.
        group: of the ranks that divide its experts, by member.
        counts: by member, how many of the layer's experts it holds.
        agreement: ranks agree on each exchange through it.
        units: by expert of the layer.
        expect: is told which units will be called next, in order.
        gradient_divisor: experts compute gradients over this number.
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

    @torch.compiler.disable
    def compute(self, rows: Tensor, counts: Sequence[int], call: Call) -> Tensor:
        """The results of rows whose experts may be on other ranks of the group. Collective for it.

        A loss must depend on experts by these results alone. With a gradient divisor other than 1 (16-mixed), a term
        that reads an expert's weights or what it has computed inside, e.g. an L2 penalty that its forward leaves in an
        attribute, has a gradient that is too large by that number, and nothing here sees it: weight decay is the
        optimizer's, or train in bf16-mixed.

        Args:
            rows: (n, width), sorted by expert.
            counts: of each of the layer's experts, how many of `rows` are its.
            call: computes rows of experts that are here; told counts for all experts, 0 for those that are not.

        Returns:
            (n, width), in the order of `rows`.

        Raises:
            RankError: other ranks of the group do not come to this exchange.
        """
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
        # Not before the rows are here: fetching may be collective, and the others of the group have gone on to exchange.
        called = [unit for index, count in enumerate(per_expert) if count for unit in self._units[first + index]]
        self._expect(called)
        order, places = _by_expert(table, rows.device)
        here = self._gradient_times(self._gradient_divisor, _Reorder.apply(came, order, places))
        others = (len(counts) - first - own) * [0]
        results = self._gradient_times(1 / self._gradient_divisor, call(here, [0] * first + per_expert + others))
        if results.shape != here.shape:
            raise UsageError(
                f"experts gave results of shape {tuple(results.shape)} for rows of shape {tuple(here.shape)}, and results "
                f"return to where the rows came from; let experts keep the width, or use expert_parallel_size=1"
            )
        # Ranks whose experts had no rows, and so no dtype to go by, send the same.
        results = _Reorder.apply(results.to(_result_dtype(rows)), places, order)
        out: Tensor = _Exchange.apply(results, anchor, self, 1, received, sent)
        return out

    def _gradient_times(self, factor: float, rows: Tensor) -> Tensor:
        if factor == 1:
            return rows
        out: Tensor = _GradientTimes.apply(rows, factor)
        return out

    def move(self, step: int, rows: Tensor, sent: Sequence[int], received: Sequence[int]) -> Tensor:
        """One exchange of the four of a layer; the first has been agreed on with its counts."""
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
    """Rows that lie by sender and then by expert: the order in which they lie by expert and then by sender, and the place
    of each in it.

    Args:
        table: (senders, experts): how many rows.
    """
    experts = torch.arange(table.shape[1]).repeat(table.shape[0])
    order = torch.argsort(torch.repeat_interleave(experts, table.flatten()), stable=True)
    places = torch.empty_like(order)
    places[order] = torch.arange(len(order))
    return order.to(device), places.to(device)


class ExpertGroups:
    """The groups of all layers of one run: put into the layers now, taken out by `close`."""

    def __init__(
        self,
        experts: DividedExperts,
        communicator: Communicator,
        agreement: Agreement,
        expect: Callable[[Sequence[int]], None],
    ) -> None:
        self.stats = TokenStats()
        self._layers = [layer for _, layer in experts.layers]
        clock = itertools.count()
        for place, layer in enumerate(self._layers):
            units, divisor = experts.units[place], experts.gradient_divisor
            counts = experts.split.counts(len(units))
            group = ExpertGroup(place, communicator, counts, agreement, units, expect, self.stats, clock, divisor)
            setattr(layer, ATTRIBUTE, group)

    def close(self) -> None:
        """The layers are as they were."""
        for layer in self._layers:
            layer.__dict__.pop(ATTRIBUTE, None)
