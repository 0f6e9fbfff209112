"""Tokens that travel to experts on other ranks and back: bit for bit what one process computes, and every token counted.

All numbers are small integers or halves of them, so that sums are exact in whatever order they are taken.
"""

from __future__ import annotations

import dataclasses
import datetime
from collections.abc import Sequence

import pytest
import torch
import torch.distributed as dist
from kit.ranks.harness import End, run_ranks, watch_ranks
from torch import Tensor, nn

from lightning_ptm.comm import Agreement, ProcessGroupCommunicator
from lightning_ptm.memory.backend import CpuBackend
from lightning_ptm.models.moe import MixtureOfExperts
from lightning_ptm.planning.expert_split import owners
from lightning_ptm.planning.mesh import Axis, Mesh
from lightning_ptm.runtime.ranks.experts import ExpertGroups, TokenStats
from lightning_ptm.runtime.units.discovery import discover
from lightning_ptm.runtime.units.divided_experts import divide

KINDS, WIDTH = 6, 10
"""Number of kinds of tokens, and their width; a token begins with its kind."""


@dataclasses.dataclass(frozen=True)
class Case:
    """Attributes:
    wanted: by kind of token, the experts that the router gives equal and all probability.
    tokens: by rank how many there are.
    """

    experts: int
    wanted: tuple[tuple[int, ...], ...]
    tokens: tuple[int, ...]
    capacity_factor: float = 4.0

    def layer(self) -> MixtureOfExperts:
        made = MixtureOfExperts(
            WIDTH,
            8,
            experts=self.experts,
            choices=len(self.wanted[0]),
            capacity_factor=self.capacity_factor,
            eval_capacity_factor=4.0,
            jitter=0.0,
            gated=False,
            dropout=0.0,
        )
        generator = torch.Generator().manual_seed(1)
        with torch.no_grad():
            for expert in made.experts:
                for parameter in expert.parameters():
                    parameter.copy_(torch.randint(-3, 4, parameter.shape, generator=generator))
            made.router.weight.zero_()
            for kind, experts in enumerate(self.wanted):
                made.router.weight[list(experts), kind] = 200.0
        return made

    def x(self, rank: int) -> Tensor:
        generator = torch.Generator().manual_seed(rank)
        tokens = torch.randint(-2, 3, (self.tokens[rank], WIDTH), generator=generator).float()
        tokens[:, :KINDS] = torch.eye(KINDS)[torch.randint(0, KINDS, (self.tokens[rank],), generator=generator)]
        return tokens.requires_grad_()


CASES = {
    "one_choice": Case(5, ((0,), (1,), (2,), (3,), (4,), (0,)), (9, 14, 11)),
    "two_choices": Case(7, ((0, 6), (1, 2), (2, 1), (3, 4), (5, 0), (6, 3)), (9, 14, 11)),
    "without_room": Case(5, ((0,), (0,), (2,), (3,), (0,), (0,)), (16, 23, 17), capacity_factor=1.0),
    "all_to_one": Case(4, ((3,),) * KINDS, (7, 5, 6)),
    "last_rank_has_one_token": Case(6, ((0, 1), (1, 2), (2, 3), (3, 4), (4, 5), (5, 0)), (12, 1, 1)),
}


@dataclasses.dataclass(frozen=True)
class Result:
    out: Tensor
    x_gradient: Tensor
    router_gradient: Tensor | None
    expert_gradients: list[Tensor | None]
    load: list[float]
    dropped: float
    stats: TokenStats | None = None


def result_of(layer: MixtureOfExperts, x: Tensor, stats: TokenStats | None = None) -> Result:
    out, routing = layer(x)
    (out * torch.arange(out.numel()).view_as(out).remainder(5)).sum().backward()
    assert x.grad is not None
    gradients = [expert.expand.grad for expert in layer.experts]
    return Result(
        out.detach(),
        x.grad,
        layer.router.weight.grad,
        gradients,
        routing.load.tolist(),
        routing.dropped.item(),
        stats,
    )


def exchanging(world_size: int) -> tuple[ProcessGroupCommunicator, Agreement]:
    if not dist.is_initialized():
        dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=60))
    whole = ProcessGroupCommunicator(CpuBackend(), datetime.timedelta(seconds=60))
    mesh = Mesh({Axis.EXPERT: world_size})
    group = whole.subgroup(mesh.groups((Axis.EXPERT,)))
    undivided = divide(nn.ModuleList([CASES["one_choice"].layer()]), [], mesh)
    return group, Agreement(whole.exchange, lambda _: None, whole.rank, undivided.teams)


def all_cases(world_size: int) -> dict[str, Result]:
    group, agreement = exchanging(world_size)
    found = {}
    for name, case in CASES.items():
        layer = case.layer()
        owned = [owner == group.rank for owner in owners(case.experts, world_size)]
        with torch.no_grad():
            for expert, ours in zip(layer.experts, owned, strict=True):
                for parameter in expert.parameters() if not ours else ():
                    parameter.fill_(torch.nan)  # as those of an expert that others hold
        divided = divide(layer, discover(layer, ["Expert"]), Mesh({Axis.EXPERT: world_size}))
        told: list[Sequence[int]] = []
        groups = ExpertGroups(divided, group, agreement, told.append)
        found[name] = result_of(layer, case.x(group.rank), groups.stats)
        called = [index for index, expert in enumerate(layer.experts) if expert.expand.grad is not None]
        assert told == [[divided.units[0][index][0] for index in called]]
        if name == "one_choice":
            layer.eval()
            with torch.no_grad():
                layer(case.x(group.rank))
        groups.close()
        assert layer.expert_group is None
    return found


@pytest.mark.parametrize("world_size", [2, 3])
def test_as_in_one_process(world_size: int) -> None:
    per_rank = run_ranks(all_cases, world_size, world_size)
    for name, case in CASES.items():
        plain = [result_of(case.layer(), case.x(rank)) for rank in range(world_size)]
        for rank, theirs in enumerate(plain):
            ours = per_rank[rank][name]
            assert torch.equal(ours.out, theirs.out), name
            assert torch.equal(ours.x_gradient, theirs.x_gradient), name
            assert ours.router_gradient is not None and theirs.router_gradient is not None
            assert torch.equal(ours.router_gradient, theirs.router_gradient), name
            assert (ours.load, ours.dropped) == (theirs.load, theirs.dropped)
        assert (case.capacity_factor > 1) == all(theirs.dropped == 0 for theirs in plain)
        for expert in range(case.experts):
            given = [each for theirs in plain if (each := theirs.expert_gradients[expert]) is not None]
            for rank in range(world_size):
                gradient = per_rank[rank][name].expert_gradients[expert]
                if not given or rank != owners(case.experts, world_size)[expert]:
                    assert gradient is None, name
                else:
                    assert gradient is not None and torch.equal(gradient, sum(given)), name
        assert_conserved(case, plain, [per_rank[rank][name].stats for rank in range(world_size)])


def assert_conserved(case: Case, plain: list[Result], stats: list[TokenStats]) -> None:
    """Counted from the routing of the plain layer."""
    calls = 2 if case is CASES["one_choice"] else 1  # one more in evaluation, with the same room
    factor = case.capacity_factor
    computed = torch.tensor(
        [[min(load, -(-sum(theirs.load) * factor // case.experts)) for load in theirs.load] for theirs in plain]
    )  # (ranks, experts)
    owner = torch.tensor(owners(case.experts, len(plain)))
    for rank, ours in enumerate(stats):
        here = owner == rank
        assert ours.exchanges == calls
        assert ours.sent == calls * computed[rank].sum()
        assert ours.sent_away == calls * computed[rank][~here].sum()
        assert ours.received == calls * computed[:, here].sum()
        assert ours.experts_called == calls * (computed[:, here].sum(dim=0) > 0).sum()
    assert sum(ours.sent for ours in stats) == sum(ours.received for ours in stats)


def skip_one(world_size: int) -> None:
    group, agreement = exchanging(world_size)
    layers = nn.ModuleList(CASES["one_choice"].layer() for _ in range(2))
    ExpertGroups(
        divide(layers, discover(layers, ["Expert"]), Mesh({Axis.EXPERT: world_size})),
        group,
        agreement,
        lambda units: None,
    )
    x = CASES["one_choice"].x(group.rank)
    for layer in layers if group.rank else layers[1:]:
        x = layer(x)[0]


def test_a_rank_that_skips_a_layer_is_an_error_of_all() -> None:
    for outcome in watch_ranks(skip_one, 2, 2):
        assert outcome.end is End.RAISED
        assert "RankError: rank 0 waits in exchange 0 of tokens for its expert group of ranks 0, 1," in outcome.error
