"""Exchanges of one layer's tokens in a group of one rank: when they are agreed on, and what they leave of results and
gradients. Several ranks: ranks/test_token_exchange.py; which experts can be divided: test_divided_experts.py."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from lightning_ptm.comm import Agreement, SoloCommunicator
from lightning_ptm.errors import UsageError
from lightning_ptm.planning.mesh import Axis, Mesh
from lightning_ptm.runtime.ranks.experts import ExpertGroups, TokenStats, _by_expert
from lightning_ptm.runtime.units.discovery import discover
from lightning_ptm.runtime.units.divided_experts import ATTRIBUTE, DividedExperts, divide, expert_layers, experts_of

EXPERTS = 3
COUNTS = [2, 0, 3]


class Expert(nn.Module):
    def __init__(self, factor: float) -> None:
        super().__init__()
        self.factor = nn.Parameter(torch.tensor([factor]))


class Layer(nn.Module):
    """An expert multiplies its rows by its number, from 2 on."""

    expert_group = None

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList(Expert(index + 2.0) for index in range(EXPERTS))

    def call(self, rows: Tensor, counts: Sequence[int]) -> Tensor:
        parts = zip(rows.split(list(counts)), self.experts, strict=True)
        return torch.cat([part * expert.factor for part, expert in parts])

    def forward(self, rows: Tensor, counts: Sequence[int]) -> Tensor:
        if self.expert_group is None:
            return self.call(rows, counts)
        return self.expert_group.compute(rows, counts, self.call)


class Alone:
    """The groups of all layers of a model, on one rank that notes each round of agreement and what it expects."""

    def __init__(self, layers: int = 1, divisor: int = 1) -> None:
        self.model = nn.ModuleList(Layer() for _ in range(layers))
        self.rounds: list[tuple[int, ...]] = []
        self.expected: list[Sequence[int]] = []
        mesh = Mesh({})
        self.divided = divide(self.model, discover(self.model, ["Expert"]), mesh)
        self.divided = DividedExperts(mesh, self.divided.layers, self.divided.units, self.divided.members, divisor)
        agreement = Agreement(self.exchange, lambda _: None, 0, self.divided.teams)
        self.groups = ExpertGroups(self.divided, SoloCommunicator(), agreement, self.expected.append)

    def exchange(self, row: tuple[int, int, int]) -> list[tuple[int, int, int]]:
        self.rounds.append(row[1:])
        return [row]


def rows(count: int = sum(COUNTS), **options: object) -> Tensor:
    return torch.arange(2.0 * count).view(count, 2).requires_grad_()


def plain(x: Tensor, counts: Sequence[int]) -> tuple[Tensor, list[Tensor | None]]:
    layer = Layer()
    out = layer(x, counts)
    out.sum().backward()
    return out, [expert.factor.grad for expert in layer.experts]


@pytest.mark.parametrize("divisor", [1, 4])
@pytest.mark.parametrize("counts", [COUNTS, [0, 0, 1], [1, 1, 1]])
def test_results_and_gradients_are_those_without_a_group(counts: list[int], divisor: int) -> None:
    """Results and gradients are equal, except that experts' gradients are divided by the divisor."""
    alone, ours, theirs = Alone(divisor=divisor), rows(sum(counts)), rows(sum(counts))
    out = alone.model[0](ours, counts)
    out.sum().backward()
    expected, gradients = plain(theirs, counts)
    assert torch.equal(out, expected) and torch.equal(ours.grad, theirs.grad)
    for expert, gradient in zip(alone.model[0].experts, gradients, strict=True):
        assert expert.factor.grad * divisor == gradient


def test_each_exchange_is_agreed_on_by_layer_and_in_order() -> None:
    alone = Alone(layers=2)
    x = alone.model[1](alone.model[0](rows(), COUNTS), COUNTS)
    assert alone.rounds == [(0, 0), (1, 1), (4, 2), (5, 3)]
    x.sum().backward()
    assert alone.rounds[4:] == [(6, 4), (7, 5), (2, 6), (3, 7)]


def test_it_is_agreed_on_without_tokens_too() -> None:
    alone = Alone()
    out = alone.model[0](torch.zeros(0, 2), [0, 0, 0])
    assert out.shape == (0, 2)
    out.sum().backward()
    assert alone.rounds == [(0, 0), (1, 1), (2, 2), (3, 3)]
    assert alone.expected == [[]]


def test_rows_that_need_no_gradient_come_back_in_the_backward_pass() -> None:
    """Others of the group may need theirs."""
    alone = Alone()
    alone.model[0](rows().detach(), COUNTS).sum().backward()
    assert [place for place, _ in alone.rounds] == [0, 1, 2, 3]


def test_without_gradients_there_is_one_way_only() -> None:
    alone = Alone()
    with torch.no_grad():
        assert not alone.model[0](rows(), COUNTS).requires_grad
    assert [place for place, _ in alone.rounds] == [0, 1]


def test_units_of_experts_with_tokens_are_expected() -> None:
    alone = Alone()
    alone.model[0](rows(), COUNTS)
    units = alone.divided.units[0]
    assert alone.expected == [[*units[0], *units[2]]]
    names = {unit.index: unit.name for unit in discover(alone.model, ["Expert"])}
    assert [names[unit] for unit in alone.expected[0]] == ["0.experts.0", "0.experts.2"]


def test_tokens_are_counted_once_where_a_layer_is_computed_again() -> None:
    alone = Alone()
    checkpoint(alone.model[0], rows(), COUNTS, use_reentrant=False).sum().backward()
    assert alone.groups.stats == TokenStats(exchanges=1, sent=5, sent_away=0, received=5, experts_called=2)


@pytest.mark.parametrize(
    ("dtype", "autocast", "expected"),
    [
        (torch.float32, False, torch.float32),
        (torch.float32, True, torch.bfloat16),
        (torch.bfloat16, True, torch.bfloat16),
        (torch.float64, True, torch.float64),
    ],
)
@pytest.mark.parametrize("counts", [COUNTS, [0, 0, 0]])
def test_results_have_one_dtype_on_all_ranks(
    dtype: torch.dtype, autocast: bool, expected: torch.dtype, counts: list[int]
) -> None:
    alone = Alone()
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
        assert alone.model[0](rows(sum(counts)).to(dtype), counts).dtype is expected


def test_experts_that_change_the_width_are_refused() -> None:
    alone = Alone()
    alone.model[0].call = lambda rows, counts: rows[:, :1]  # type: ignore[method-assign]
    with pytest.raises(UsageError, match=r"results of shape \(5, 1\) for rows of shape \(5, 2\)"):
        alone.model[0](rows(), COUNTS)


def test_rows_come_by_expert_and_then_by_sender() -> None:
    table = torch.tensor([[2, 0, 1], [0, 0, 3], [1, 2, 0]])
    came = [
        (expert, sender, number)
        for sender in range(3)
        for expert in range(3)
        for number in range(table[sender, expert])
    ]
    order, places = _by_expert(table, torch.device("cpu"))
    assert [came[at] for at in order] == sorted(came)
    assert [sorted(came)[at] for at in places] == came


def test_layers_are_as_they_were_in_the_end() -> None:
    alone = Alone(layers=2)
    groups = [vars(layer)[ATTRIBUTE] for layer in alone.model]
    assert len(set(map(id, groups))) == 2
    alone.groups.close()
    assert all(ATTRIBUTE not in vars(layer) and layer.expert_group is None for layer in alone.model)
    assert torch.equal(alone.model[0](rows(), COUNTS), plain(rows(), COUNTS)[0])
    assert len(alone.rounds) == 0


@pytest.mark.parametrize(("size", "divisor"), [(1, 1), (2, 2), (3, 4)])
def test_what_gradients_are_over(size: int, divisor: int) -> None:
    model = nn.ModuleList([Layer(), nn.Linear(2, 2)])
    units = discover(model, ["Expert"])
    mesh = Mesh({Axis.DATA: 2, Axis.EXPERT: size})
    plain = divide(model, units, mesh)
    scaled = divide(model, units, mesh, scaled_to_overflow=True)
    expert = plain.units[0][0][0]
    plain_one, plain_rest = plain.holders.of(expert).whole, plain.holders.of(0).whole
    assert plain_one.scaled_by == plain_rest.scaled_by == scaled.holders.of(0).whole.scaled_by == 1
    of_expert = scaled.holders.of(expert)
    assert {each.scaled_by for each in (of_expert.whole, of_expert.parts, of_expert.partial)} == {divisor}


def test_who_tells_of_a_unit() -> None:
    model = nn.ModuleList([Layer()])
    found = divide(model, discover(model, ["Expert"]), Mesh({Axis.DATA: 2, Axis.EXPERT: 2}))
    assert 0 not in found.holders.by_unit
    assert [found.holders.of(unit).whole.ranks[0] for expert in found.units[0] for unit in expert] == [0, 0, 1]
    assert found.teams.groups == ((0, 1), (2, 3))
    assert 0 not in found.teams.holders


def test_layers_are_those_whose_class_says_so() -> None:
    model = nn.ModuleDict({"a": Layer(), "b": nn.Linear(1, 1)})
    setattr(model["b"], ATTRIBUTE, SimpleNamespace())  # of an object only
    assert [name for name, _ in expert_layers(model)] == ["a"]
    assert experts_of(model["a"]) is model["a"].experts
