"""Models that sequence parallelism would compute wrongly are refused in a sentence that says what to do."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from kit.ranks.harness import run_ranks
from kit.ranks.tensor_blocks import PLAN, WIDTH, Block, module_of, trainer_of
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_ptm import AngelPTMStrategy
from lightning_ptm.errors import ConfigError, UsageError
from lightning_ptm.parallel import ColwiseParallel, RowwiseParallel, Rule, VocabParallel
from lightning_ptm.parallel.counted_group import CountedTensorGroup
from lightning_ptm.parallel.cutting import CutModule


class FeedForward(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.expand, self.project = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.project(torch.relu(self.expand(x)))


class Normed(nn.Module):
    """A block with a region in it."""

    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.norm, self.feed_forward = norm, FeedForward()

    def forward(self, x: Tensor) -> Tensor:
        return x + self.feed_forward(self.norm(x.transpose(1, 2)).transpose(1, 2))


class Sharpened(FeedForward):
    """Gathers for itself, between layers that are cut."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * self.gate(x)


class Pooled(Normed):
    """Gives one token for all."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).mean(1)


class Model(nn.Module):
    def __init__(self, *blocks: nn.Module) -> None:
        super().__init__()
        self.embedding = nn.Embedding(32, WIDTH)
        self.blocks = nn.ModuleList(blocks)
        self.head = nn.Linear(WIDTH, 32)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


REGIONS: dict[str, Rule] = {
    "blocks.*.feed_forward.expand": ColwiseParallel(),
    "blocks.*.feed_forward.project": RowwiseParallel(),
}
SPLIT: dict[str, Rule] = {"blocks.*.feed_forward.expand": ColwiseParallel(gather=True)}


def sharing(name: str) -> Callable[[], Model]:
    """A model whose last norm has something in common with one that is inside of a block."""

    def build() -> Model:
        model = Model(Normed(Tokens()), Normed(Tokens()))
        inside = model.blocks[0].norm
        if name == "module":
            model.norm = inside
        else:
            model.norm = Tokens()
            model.norm.weight = inside.weight
        return model

    return build


class Tokens(nn.LayerNorm):
    def __init__(self) -> None:
        super().__init__(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.transpose(1, 2)).transpose(1, 2)


def cut(model: nn.Module, plan: dict[str, Rule]) -> CutModule:
    return CutModule(model, plan, CountedTensorGroup(2), strict=True, sequence_parallel=True, proven=False)


CASES: dict[str, tuple[Callable[[], nn.Module], dict[str, Rule], list[str]]] = {
    "statistics of a batch": (
        lambda: Model(Normed(nn.BatchNorm1d(WIDTH))),
        REGIONS,
        ["blocks.0.norm is a BatchNorm1d", "part of the sequence", "sequence_parallel=False"],
    ),
    "no pair of columns and rows": (
        lambda: Model(Normed(nn.Identity())),
        SPLIT,
        ["no block", "ColwiseParallel()", "sequence_parallel=False"],
    ),
    "a pair beside columns that are gathered": (
        lambda: Model(Sharpened()),
        {
            "blocks.*.expand": ColwiseParallel(),
            "blocks.*.project": RowwiseParallel(),
            "blocks.*.gate": ColwiseParallel(gather=True),
        },
        [
            "blocks.0.gate compute whole values in the same module as pairs of ColwiseParallel() and RowwiseParallel()",
            "whole",
            "sequence_parallel=False",
        ],
    ),
    "a norm inside of a block is also outside": (
        sharing("module"),
        REGIONS,
        ["norm.weight is a parameter of blocks.0.norm, too", "of its own", "sequence_parallel=False"],
    ),
    "a norm's weight inside of a block is also outside": (
        sharing("weight"),
        REGIONS,
        ["norm.weight is a parameter of blocks.0.norm, too", "of its own", "sequence_parallel=False"],
    ),
    "an embedding and a head alone": (
        lambda: Model(),
        {"embedding": VocabParallel(), "head": ColwiseParallel(gather=True)},
        ["no block", "ColwiseParallel()", "sequence_parallel=False"],
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_a_model_is_refused_before_it_is_cut(case: str) -> None:
    build, plan, words = CASES[case]
    model = build()
    with pytest.raises(ConfigError) as refused:
        cut(model, plan)
    assert [word for word in words if word not in str(refused.value)] == [], refused.value
    assert not any("forward" in vars(each) for each in model.modules())
    assert [tuple(each.shape) for each in model.parameters()] == [tuple(each.shape) for each in build().parameters()]


CALLS: dict[str, tuple[Callable[[], Model], Callable[[Model, Tensor], Tensor], list[str]]] = {
    "a region without its block": (
        lambda: Model(Normed(nn.Identity())),
        lambda model, x: model.blocks[0].feed_forward(x),
        ["blocks.0.feed_forward is called while the block around it is not", "sequence_parallel=False"],
    ),
    "a layer without its block": (
        lambda: Model(Normed(nn.Identity())),
        lambda model, x: model.blocks[0].feed_forward.project(torch.cat([x, x], -1)[..., :WIDTH]),
        ["blocks.0.feed_forward.project is called", "sequence_parallel=False"],
    ),
    "a norm without its block": (
        lambda: Model(Normed(Tokens())),
        lambda model, x: model.blocks[0].norm(x.transpose(1, 2)),
        ["blocks.0.norm is called while the block around it is not", "sequence_parallel=False"],
    ),
    "one vector": (
        lambda: Model(Normed(nn.Identity())),
        lambda model, x: model(x[0, 0]),
        ["blocks.0 takes no sequence", "sequence_parallel=False"],
    ),
    "an output for all tokens": (
        lambda: Model(Pooled(nn.Identity())),
        lambda model, x: model(x),
        ["blocks.0 does not return a sequence", "sequence_parallel=False"],
    ),
}


@pytest.mark.parametrize("case", CALLS)
def test_a_call_is_refused(case: str) -> None:
    build, call, words = CALLS[case]
    model = build()
    cut(model, REGIONS)
    with pytest.raises(ConfigError) as refused:
        call(model, torch.randn(2, 6, WIDTH))
    assert [word for word in words if word not in str(refused.value)] == [], refused.value


def test_a_norm_may_be_called_without_its_block_where_it_is_not_trained() -> None:
    model = Model(Normed(Tokens()))
    cut(model, REGIONS)
    x, norm = torch.randn(2, WIDTH, 6, requires_grad=True), model.blocks[0].norm
    with torch.no_grad():
        expected = nn.functional.layer_norm(x.transpose(1, 2), (WIDTH,)).transpose(1, 2)
        torch.testing.assert_close(norm(x), expected)
    norm.requires_grad_(False)
    torch.testing.assert_close(norm(x), expected)


@pytest.mark.parametrize("ask", [Tensor.retain_grad, lambda out: out.register_hook(torch.neg)])
def test_a_gradient_that_is_asked_for_too_late_is_refused(ask: Callable[[Tensor], Any]) -> None:
    model = Model(Normed(nn.Identity()), Normed(nn.Identity()))
    cut(model, REGIONS)
    first, second = model.blocks
    between = first(torch.randn(2, 6, WIDTH, requires_grad=True))
    loss = second(between).sum() + between.sum()
    ask(between)
    with pytest.raises(
        UsageError, match=r"retain_grad was called .* after the next block had taken it.*call it before"
    ):
        loss.backward()


def test_blocks_without_such_pairs_stay_whole_beside_others_and_are_proven() -> None:
    for refused in run_ranks(beside_others, 2):
        assert refused == ""


class Plain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.expand = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(self.expand(x))


class Split(nn.Module):
    """Each rank takes its part of what is whole: nothing is divided around its layer."""

    def __init__(self) -> None:
        super().__init__()
        self.expand, self.project = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.again = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.again(self.project(torch.relu(self.expand(x))))


def beside_others() -> str:
    import torch.distributed as dist

    from lightning_ptm.memory.backend import backend_of
    from lightning_ptm.parallel.exchange import RankGroup

    dist.init_process_group("gloo")
    group = RankGroup(dist.group.WORLD, backend_of(torch.device("cpu")))
    torch.manual_seed(0)
    model = Model(Normed(nn.Identity()), Split())
    x = torch.randn(2, 6, WIDTH)
    whole = model(x)
    plan = {
        **REGIONS,
        "blocks.1.expand": ColwiseParallel(),
        "blocks.1.project": RowwiseParallel(),
        "blocks.1.again": RowwiseParallel(split=True),
    }
    CutModule(model, plan, group, strict=True, sequence_parallel=True)
    try:
        torch.testing.assert_close(model(x), whole)
    except (ConfigError, AssertionError) as error:
        return str(error)
    finally:
        dist.destroy_process_group()
    return ""


def test_one_rank_a_group_has_no_parts() -> None:
    with pytest.raises(ConfigError, match=r"tensor_parallel_size=1: .* give a tensor_parallel_size of 2 or more"):
        AngelPTMStrategy(tensor_parallel={"sequence_parallel": True})


@pytest.mark.parametrize("given", [1, "on", None])
def test_it_is_on_or_off(given: object) -> None:
    with pytest.raises(ConfigError, match="sequence_parallel="):
        AngelPTMStrategy(tensor_parallel_size=2, tensor_parallel={"sequence_parallel": given})  # type: ignore[arg-type]


class Mixing(Block):
    """Tokens are not taken one by one where ranks have parts of them."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + x.mean(-2, keepdim=True)


class MixingInTraining(Mixing):
    """Mixes tokens only in training, next to dropout, which alone makes it random."""

    def forward(self, x: Tensor) -> Tensor:
        if not self.training:
            return Block.forward(self, x)
        return nn.functional.dropout(super().forward(x), 0.5, self.training)


class RandomInTraining(Block):
    """Takes tokens one by one, and draws numbers that no rank draws alike."""

    def forward(self, x: Tensor) -> Tensor:
        out = super().forward(x)
        return out + torch.randn_like(out) if self.training else out


def mixed(first_rows: int, kind: type[Block] = Mixing, validates: bool = False) -> str:
    module = module_of()
    module.blocks[0] = kind(0.0, 0.0)
    rows = [torch.randn(count, WIDTH, dtype=torch.float64) for count in (first_rows, 4)]
    batches: DataLoader[Tensor] = DataLoader(rows, batch_size=None)  # type: ignore[arg-type]
    checks = {"num_sanity_val_steps": 1} if validates else {}
    try:
        trainer = trainer_of(2, 2, {"tensor_parallel": {"plan": PLAN, "sequence_parallel": True}}, **checks)
        trainer.fit(module, batches, *([batches] if validates else []))
    except ConfigError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("first_rows", [4, 1])
def test_what_mixes_tokens_between_layers_that_are_cut_is_refused_by_its_proof(first_rows: int) -> None:
    """One token alone tells nothing of it."""
    for refused in run_ranks(mixed, 2, first_rows):
        assert "blocks.0 (Mixing) computes something else" in refused and "sequence_parallel=False" in refused


@pytest.mark.parametrize("validates", [False, True])
def test_what_mixes_tokens_in_training_alone_is_refused_whatever_is_computed_first(validates: bool) -> None:
    for refused in run_ranks(mixed, 2, 4, MixingInTraining, validates):
        assert "blocks.0 (MixingInTraining) computes something else" in refused


def test_a_block_that_draws_random_numbers_in_training_is_not_refused_for_them() -> None:
    assert run_ranks(mixed, 2, 4, RandomInTraining) == ["", ""]
