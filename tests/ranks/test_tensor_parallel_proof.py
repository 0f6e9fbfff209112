"""A plan that cuts a block so that it computes something else is refused when the block is first called."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from kit.ranks.harness import run_ranks
from torch import Tensor, nn

from lightning_ptm.errors import ConfigError
from lightning_ptm.memory.backend import backend_of
from lightning_ptm.models.gpt import Block
from lightning_ptm.parallel import ColwiseParallel, Partial, RowwiseParallel, Rule
from lightning_ptm.parallel.cutting import CutModule
from lightning_ptm.parallel.exchange import RankGroup

ATTENTION: dict[str, Rule] = {
    "blocks.*.attention.query_key_value": ColwiseParallel(parts=3, heads="heads"),
    "blocks.*.attention.project": RowwiseParallel(),
}
FEED_FORWARD: dict[str, Rule] = {
    "blocks.*.feed_forward.expand": ColwiseParallel(),
    "blocks.*.feed_forward.project": RowwiseParallel(),
}
GOOD = {**ATTENTION, **FEED_FORWARD}


class Blocks(nn.Module):
    def __init__(self, heads: int = 4) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(32, heads, 8, 64, 0.1) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


class Feature(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.expand, self.scale, self.project = nn.Linear(8, 16), nn.LayerNorm(4), nn.Linear(16, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.project(self.scale(self.expand(x).unflatten(-1, (-1, 4))).flatten(-2))


class Features(nn.Module):
    """Norms of what ranks have parts of."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Feature()])

    def forward(self, x: Tensor) -> Tensor:
        return self.blocks[0](x)


class KeysWithABias(nn.Module):
    """The gradient of the bias is zero but for rounding: a softmax takes away what it adds."""

    def __init__(self) -> None:
        super().__init__()
        self.heads = 2
        self.query, self.key, self.value, self.project = (nn.Linear(8, 8) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        parts = [each(x).unflatten(-1, (self.heads, -1)).transpose(1, 2) for each in (self.query, self.key, self.value)]
        found = nn.functional.scaled_dot_product_attention(*parts)
        return x + self.project(found.transpose(1, 2).flatten(-2))


class Attending(Features):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([KeysWithABias()])


CASES: dict[str, tuple[type[nn.Module], dict[str, Rule], str]] = {
    "good": (Blocks, GOOD, ""),
    "one projection in place of three": (
        Blocks,
        {**GOOD, "blocks.*.attention.query_key_value": ColwiseParallel(heads="heads")},
        "attention.query_key_value",
    ),
    "heads as they were": (
        Blocks,
        {**GOOD, "blocks.*.attention.query_key_value": ColwiseParallel(parts=3)},
        "attention.query_key_value",
    ),
    "a layer left out": (
        Blocks,
        {**ATTENTION, "blocks.*.feed_forward.expand": ColwiseParallel()},
        "cannot be computed",
    ),
    "rows without columns": (
        Blocks,
        {**ATTENTION, "blocks.*.feed_forward.project": RowwiseParallel()},
        "cannot be computed",
    ),
    "norms of parts": (
        Features,
        {"blocks.*.expand": ColwiseParallel(), "blocks.*.scale": Partial(), "blocks.*.project": RowwiseParallel()},
        "",
    ),
    "keys with a bias": (
        Attending,
        {
            "blocks.*.query": ColwiseParallel(heads="heads"),
            "blocks.*.key": ColwiseParallel(),
            "blocks.*.value": ColwiseParallel(),
            "blocks.*.project": RowwiseParallel(),
        },
        "",
    ),
    "norms of parts, taken for whole": (
        Features,
        {"blocks.*.expand": ColwiseParallel(), "blocks.*.project": RowwiseParallel()},
        "blocks.0.scale",
    ),
}


def refusals() -> dict[str, tuple[str, bool, bool]]:
    """By case: the refusal, whether random numbers were left alone, and whether outputs are those of the whole module."""
    dist.init_process_group("gloo")
    group = RankGroup(dist.group.WORLD, backend_of(torch.device("cpu")))
    found = {}
    for name, (build, plan, _) in CASES.items():
        torch.manual_seed(0)
        module = build().eval()
        x = torch.randn(2, 5, 8 if issubclass(build, Features) else 32)
        with torch.no_grad():
            expected = module(x)
        undo = CutModule(module, plan, group, strict=True)
        state, refused, same = torch.get_rng_state(), "", False
        try:
            with torch.no_grad():
                same = torch.allclose(module(x), expected, atol=1e-5)
        except (ConfigError, RuntimeError) as error:
            refused = f"{type(error).__name__}: {error}"
        found[name] = refused, torch.equal(torch.get_rng_state(), state), same
        undo.undo(lambda part, box: torch.zeros(box.shape))
        assert all("forward" not in vars(each) for each in module.modules())
        assert not any(each._forward_pre_hooks for each in module.modules())
    dist.destroy_process_group()
    return found


@pytest.fixture(scope="module")
def found() -> list[dict[str, tuple[str, bool, bool]]]:
    return run_ranks(refusals, 2)


@pytest.mark.parametrize("case", CASES)
def test_it_is_proven(found: list[dict[str, tuple[str, bool, bool]]], case: str) -> None:
    expected = CASES[case][2]
    for of_rank in found:
        refused, untouched, same = of_rank[case]
        assert untouched
        assert same == (not expected)
        assert refused.startswith("ConfigError") == bool(expected)
        assert expected in refused and ("tensor_parallel's plan" in refused) == bool(expected)
