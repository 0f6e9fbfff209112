"""Blocks of sequence parallelism in whatever users compute around them: outputs and gradients are those of whole blocks."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from kit.ranks.harness import run_ranks
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from lightning_ptm.memory.backend import CpuBackend, backend_of
from lightning_ptm.models.gpt import Block
from lightning_ptm.parallel import ColwiseParallel, RowwiseParallel, Rule
from lightning_ptm.parallel.cutting import CutModule
from lightning_ptm.parallel.exchange import RankGroup
from lightning_ptm.runtime.tensors.parts import cut

WIDTH = 32
PLAN: dict[str, Rule] = {
    "*.attention.query_key_value": ColwiseParallel(parts=3, heads="heads"),
    "*.attention.project": RowwiseParallel(),
    "*.feed_forward.expand": ColwiseParallel(),
    "*.feed_forward.project": RowwiseParallel(),
}


def evaluated_to_a_leaf(block: nn.Module, x: Tensor) -> Tensor:
    with torch.no_grad():
        leaf = block(x)
    out = block(leaf.requires_grad_())
    (gradient,) = torch.autograd.grad(out.square().sum(), leaf, retain_graph=True)
    return x * gradient + out


def evaluated_first(block: nn.Module, x: Tensor) -> Tensor:
    with torch.no_grad():
        seen = block(x)
    with torch.inference_mode():
        block(block(x))
    return block(x) + 0.1 * block(seen)


def with_a_changed_gradient(block: nn.Module, x: Tensor) -> Tensor:
    out = block(x)
    if out.requires_grad:
        out.register_hook(lambda gradient: gradient * 0.5)
    return out


WAYS: dict[str, Callable[[nn.Module, Tensor], Tensor]] = {
    "one after the other": lambda block, x: block(x),
    "in a checkpoint": lambda block, x: checkpoint(block, x, use_reentrant=False),
    "in a reentrant checkpoint": lambda block, x: checkpoint(block, x, use_reentrant=True),
    "in a reentrant checkpoint, and behind it": lambda block, x: block(checkpoint(block, x, use_reentrant=True)),
    "its gradient is changed": with_a_changed_gradient,
    "twice": lambda block, x: block(block(x)),
    "its output is written to": lambda block, x: block(x).mul_(1.5),
    "its output is kept beside another's": lambda block, x: x + 0.5 * block(x),
    "without a gradient first": lambda block, x: block(x.detach()) + block(x),
    "evaluated first": evaluated_first,
    "evaluated to a leaf": evaluated_to_a_leaf,
    "by halves of the batch": lambda block, x: torch.cat([block(half) for half in x.chunk(2)]),
}


def computed(blocks: nn.ModuleList, way: Callable[[nn.Module, Tensor], Tensor], shape: tuple[int, ...]) -> list[Tensor]:
    """The output, and the gradients of the input and of what lies between blocks, which is asked for behind the first."""
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(shape, generator=generator, dtype=torch.float64).requires_grad_()
    out = x
    for block in blocks:
        out = way(block, out)
        if block is blocks[0]:
            between = out
            between.retain_grad()
    out.backward(torch.randn(shape, generator=generator, dtype=torch.float64))
    assert x.grad is not None and between.grad is not None
    return [out.detach(), x.grad, between.grad]


def largest_differences(shape: tuple[int, ...]) -> dict[str, float]:
    """From whole blocks, of outputs and gradients, by what is computed."""
    dist.init_process_group("gloo")
    group = RankGroup(dist.group.WORLD, backend_of(torch.device("cpu")))
    found = {}
    for name, way in WAYS.items():
        kinds = []
        for _ in range(2):
            torch.manual_seed(0)
            kinds.append(nn.ModuleList(Block(WIDTH, 4, 8, 64, 0.0) for _ in range(3)).double().train())
        whole, divided = kinds
        known = CutModule(divided, PLAN, group, strict=True, sequence_parallel=True, proven=False)
        expected, ours = computed(whole, way, shape), computed(divided, way, shape)
        boxes, of_whole = known.boxes(), dict(whole.named_parameters())
        for each, parameter in divided.named_parameters():
            gradient, theirs = parameter.grad, of_whole[each].grad
            assert gradient is not None and theirs is not None
            ours.append(group.sum(gradient) if id(parameter) in known.partial else gradient)
            expected.append(cut(theirs, boxes.get(each)))
        pairs = zip(ours, expected, strict=True)
        found[name] = max(float((mine - theirs).abs().max() / theirs.abs().max()) for mine, theirs in pairs)
    dist.destroy_process_group()
    return found


SHAPES = {
    "parts of equal length": (2, 6, WIDTH),
    "the last token fills up": (2, 5, WIDTH),
    "one token": (2, 1, WIDTH),
}


@pytest.fixture(scope="module", params=SHAPES)
def differences(request: pytest.FixtureRequest) -> list[dict[str, float]]:
    return run_ranks(largest_differences, 2, SHAPES[request.param])


@pytest.mark.slow_unless(
    "parts of equal length-one after the other",
    "parts of equal length-in a checkpoint",
    "parts of equal length-in a reentrant checkpoint, and behind it",
    "the last token fills up-in a reentrant checkpoint",
    "one token-its output is written to",
    "one token-its output is kept beside another's",
)
@pytest.mark.parametrize("way", WAYS)
def test_it_is_what_whole_blocks_give(differences: list[dict[str, float]], way: str) -> None:
    for of_rank in differences:
        assert of_rank[way] < 1e-12


class Scattering(CpuBackend):
    """Backend whose collectives are treated as those of another library than gloo, which has no reduce-scatter to be
    used."""

    collectives = "another"


def sums_of_pieces(shape: tuple[int, ...]) -> tuple[Tensor, Tensor, Tensor]:
    """This rank's sum of pieces, by both ways and by a sum of all."""
    dist.init_process_group("gloo")
    groups = [RankGroup(dist.group.WORLD, backend) for backend in (CpuBackend(), Scattering())]
    pieces = torch.randn(shape, generator=torch.Generator().manual_seed(groups[0].index), dtype=torch.float64)
    first, second = (group.sum_of_piece(pieces) for group in groups)
    expected = groups[0].sum(pieces)[groups[0].index]
    assert [group.exchanges for group in groups] == [2, 1]
    dist.destroy_process_group()
    return first, second, expected


@pytest.mark.parametrize("shape", [(2, 3, WIDTH), (2, 2, 3, WIDTH)])
def test_sums_of_pieces_do_not_depend_on_what_carries_them(shape: tuple[int, ...]) -> None:
    for first, second, expected in run_ranks(sums_of_pieces, 2, shape):
        assert torch.equal(first, expected) and torch.equal(second, expected)
