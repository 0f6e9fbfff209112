"""Modules that tensor parallelism cannot cut are refused by name, with what to do instead, before anything was
changed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import lightning as L
import pytest
import torch
from kit.ranks.harness import run_ranks
from lightning.pytorch.demos.boring_classes import BoringModel
from torch import Tensor, nn

from lightning_ptm import AngelPTMStrategy
from lightning_ptm.errors import ConfigError
from lightning_ptm.parallel import ColwiseParallel, Part, RowwiseParallel, Rule, Summed, VocabParallel
from lightning_ptm.parallel.counted_group import CountedTensorGroup
from lightning_ptm.parallel.cutting import CutModule
from lightning_ptm.parallel.rules import plan_of


class Attention(nn.Module):
    def __init__(self, heads: int = 4, of_keys: int = 4) -> None:
        super().__init__()
        self.heads, self.head_dim = heads, 8
        self.query, self.key = nn.Linear(16, heads * 8), nn.Linear(16, of_keys * 8)
        self.project = nn.Linear(heads * 8, 16)


class Small(nn.Module):
    """A model with one block and a head."""

    def __init__(self, block: nn.Module | None = None, **embedding: Any) -> None:
        super().__init__()
        self.embedding = nn.Embedding(32, 16, **embedding)
        self.blocks = nn.ModuleList([Attention() if block is None else block])
        self.head = nn.Linear(16, 32, bias=False)


class Doubled(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return 2 * super().forward(x)


class Adapted(nn.Module):
    """Module around a layer, of another kind of adapter."""

    def __init__(self) -> None:
        super().__init__()
        self.base_layer = nn.Linear(16, 16)


def tied() -> nn.Module:
    model = Small()
    model.head.weight = model.embedding.weight  # type: ignore[assignment]
    return model


def quantized() -> nn.Module:
    model = Small()
    model.head.weight = nn.Parameter(torch.zeros(32, 16, dtype=torch.int8), requires_grad=False)
    return model


def with_a_layer_of_two_blocks() -> nn.Module:
    model = Small()
    model.blocks.append(Attention())
    model.blocks[1].query = model.blocks[0].query
    return model


QUERY: dict[str, Rule] = {"blocks.*.query": ColwiseParallel(heads="heads"), "blocks.*.project": RowwiseParallel()}
CASES: dict[str, tuple[Callable[[], nn.Module], Any, list[str]]] = {
    "counted heads": (
        lambda: Small(nn.ModuleDict({"query": nn.Linear(16, 16)})),
        {"blocks.*.query": ColwiseParallel(heads="heads")},
        ["heads of a ModuleDict", "None"],
    ),
    "heads": (lambda: Small(Attention(3)), QUERY, ["blocks.0.query has 3 heads", "head_dim=8", "divides 3"]),
    "heads of keys": (
        lambda: Small(Attention(4, 1)),
        {**QUERY, "blocks.*.key": ColwiseParallel()},
        ["blocks.0.key has 1 heads", "fewer heads than queries", "leaves this attention whole"],
    ),
    "an entry for nothing": (
        Small,
        {**QUERY, "blocks.*.gate": RowwiseParallel()},
        ["'blocks.*.gate'", "named_modules()"],
    ),
    "a word that is not known": (
        Small,
        {"head": "sequence_parallel"},
        ["'sequence_parallel' for head", "ColwiseParallel()"],
    ),
    "a layer of its own kind": (
        lambda: Small(nn.ModuleDict({"query": Doubled(16, 16)})),
        {"blocks.*.query": ColwiseParallel()},
        ["blocks.0.query, a Doubled", "leave it out of the plan"],
    ),
    "a convolution": (
        lambda: Small(nn.Conv1d(16, 16, 3)),
        {"blocks.*": ColwiseParallel()},
        ["blocks.0, a Conv1d", "leave it out of the plan"],
    ),
    "a quantized layer": (quantized, {"head": ColwiseParallel(gather=True)}, ["head, a Linear", "not quantized ones"]),
    "tied, cut in two ways": (
        tied,
        {"embedding": VocabParallel(), "head": ColwiseParallel(parts=2)},
        ["head shares weight with another module", "cut both in the same way"],
    ),
    "tied, one of them left out": (
        tied,
        {"embedding": VocabParallel()},
        ["head.weight is tied to a parameter", "leave both out"],
    ),
    "a layer of two blocks": (
        with_a_layer_of_two_blocks,
        QUERY,
        ["blocks.1.query is the same module as blocks.0.query", "share all of blocks.0", "b.weight = a.weight"],
    ),
    "an embedding that keeps norms": (
        lambda: Small(max_norm=1.0),
        {"embedding": VocabParallel()},
        ["embedding is an Embedding with max_norm", "leave it out"],
    ),
    "sizes that do not divide": (
        lambda: Small(nn.ModuleDict({"up": nn.Linear(16, 17)})),
        {"blocks.*.up": ColwiseParallel()},
        ["blocks.0.up.weight cannot be cut for tensor_parallel_size=2", "leaves it whole"],
    ),
    "another kind of adapter": (
        lambda: Small(Adapted()),
        {"blocks.*": ColwiseParallel()},
        ["blocks.0, a Adapted around a Linear", "plain LoRA"],
    ),
    "no plan": (Small, "auto", ["no module of the Small has a plan", "give tensor_parallel=TensorParallel(plan="]),
    "nothing to cut": (
        Small,
        {"embedding": "replicate"},
        ["no parameter of the Small can be cut", "tensor_parallel_size=1"],
    ),
    "a part of a layer": (Small, {"head": Part(0)}, ["head, a Linear", "leave it out"]),
    "rows of a vector": (Small, {"head.weight": VocabParallel()}, ["for head.weight, a parameter of shape (32, 16)"]),
    "all of a model": (Small, {"blocks.*.query.weight": Summed()}, ["blocks.0.query.weight", "Partial()"]),
}


@pytest.mark.parametrize("case", CASES)
def test_it_is_refused_by_name(case: str) -> None:
    build, plan, words = CASES[case]
    model = build()
    before = {name: each.detach().clone() for name, each in model.named_parameters()}
    with pytest.raises(ConfigError) as refused:
        CutModule(model, plan_of(model, plan), CountedTensorGroup(2), strict=plan != "auto")
    assert [word for word in words if word not in str(refused.value)] == [], refused.value
    assert [name for name, each in model.named_parameters() if not torch.equal(each, before[name])] == []
    assert not any("forward" in vars(each) for each in model.modules())
    assert getattr(model.blocks[0], "heads", 4) in (3, 4)


def test_what_two_blocks_have_in_common_is_cut_for_both() -> None:
    """An attention as a whole; layers of their own with one weight."""
    model = with_a_layer_of_two_blocks()
    model.blocks[1] = model.blocks[0]
    cut = CutModule(model, QUERY, CountedTensorGroup(2), strict=True)
    assert model.blocks[1].heads == 2 and set(cut.boxes()) >= {"blocks.0.query.weight", "blocks.1.query.weight"}
    cut.undo()
    model.blocks[1] = Attention()
    model.blocks[1].query.weight = model.blocks[0].query.weight
    CutModule(model, QUERY, CountedTensorGroup(2), strict=True)
    assert [(each.heads, each.query.weight.shape) for each in model.blocks] == 2 * [(2, (16, 16))]


class CutByItself(BoringModel):
    """Cuts its layers itself, as with Lightning's ModelParallelStrategy."""

    def configure_model(self) -> None:
        from torch.distributed.fsdp import fully_shard
        from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

        assert self.device_mesh is not None
        parallelize_module(self.layer, self.device_mesh["tensor_parallel"], ColwiseParallel())
        fully_shard(self.layer, mesh=self.device_mesh["data_parallel"])


def of_distributed_parameters() -> str:
    strategy = AngelPTMStrategy(
        tensor_parallel_size=2, tensor_parallel={"plan": {"layer": ColwiseParallel(gather=True)}}
    )
    with pytest.raises(ConfigError) as refused:
        L.Trainer(accelerator="cpu", devices=2, strategy=strategy, logger=False, enable_checkpointing=False).fit(
            CutByItself()
        )
    return str(refused.value)


def test_what_a_module_has_distributed_on_the_strategys_mesh_is_refused() -> None:
    for refused in run_ranks(of_distributed_parameters, 2):
        assert (
            "layer.weight is a DTensor" in refused
            and "RowwiseParallel of lightning_ptm.parallel mean the same" in refused
        )


def test_one_rank_makes_no_group_of_two() -> None:
    with pytest.raises(
        ConfigError, match=r"tensor_parallel_size=2 does not divide the number of ranks, 1 .*use a multiple of 2 ranks"
    ):
        strategy = AngelPTMStrategy(tensor_parallel_size=2)
        L.Trainer(accelerator="cpu", devices=1, strategy=strategy, logger=False).fit(BoringModel())


@pytest.mark.parametrize("token", [-1, 32, 1000])
def test_a_token_without_a_row_is_an_error_as_where_the_embedding_is_whole(token: int) -> None:
    model = Small()
    cut = CutModule(model, {"embedding": VocabParallel()}, CountedTensorGroup(2), strict=True, proven=False)
    found = model.embedding(torch.tensor([0, 15, 16, 31]))
    assert torch.equal(found[:2], model.embedding.weight[[0, 15]]) and not found[2:].any()  # the others' rows
    with pytest.raises(IndexError):
        model.embedding(torch.tensor([0, token]))
    cut.undo()
    with pytest.raises(IndexError):
        model.embedding(torch.tensor([0, token]))
