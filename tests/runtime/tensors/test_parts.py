"""Declarations of slices, and how values are cut. On several ranks, in runs: ranks/test_rank_parts.py."""

from __future__ import annotations

import dataclasses
import math
from collections import Counter

import pytest
import torch
from decided_by_hand import PAGE, WORKSTATION, Block, asked, decided
from hypothesis import given
from hypothesis import strategies as st
from lightning.pytorch.callbacks import EMAWeightAveraging
from torch import nn

from lightning_ptm.config import Settings
from lightning_ptm.errors import ConfigError
from lightning_ptm.planning.inventory import What
from lightning_ptm.planning.mesh import Axis, Mesh
from lightning_ptm.planning.plan_diff import layout_lines
from lightning_ptm.planning.tensor_slices import TensorSlice
from lightning_ptm.runtime.deciding.blueprint import Blueprint
from lightning_ptm.runtime.deciding.decide import decide
from lightning_ptm.runtime.tensors.parts import cut, declared, elements, mesh_with
from lightning_ptm.runtime.units.discovery import discover
from lightning_ptm.trainer.weight_averaging import refuse_parts


@st.composite
def boxes(draw: st.DrawFn) -> TensorSlice:
    parts, sections = draw(st.integers(2, 3)), draw(st.integers(1, 3))
    shape = draw(st.lists(st.integers(0, 4), min_size=1, max_size=3))
    dimension = draw(st.integers(0, len(shape) - 1))
    shape[dimension] *= parts * sections
    return TensorSlice(tuple(shape), dimension, parts, draw(st.integers(0, parts - 1)), sections)


@given(boxes(), st.data())
def test_values_are_cut_where_stretches_say(box: TensorSlice, data: st.DataObject) -> None:
    whole = torch.arange(math.prod(box.shape)).view(box.shape)
    places = [each.whole_start + at for each in box.stretches(0, box.numel) for at in range(each.numel)]
    part = cut(whole, box)
    assert tuple(part.shape) == box.part_shape and part.reshape(-1).tolist() == places
    start = data.draw(st.integers(0, box.numel))
    numel = data.draw(st.integers(0, box.numel - start))
    for value in (whole, part):
        assert elements(value, box, start, numel).tolist() == places[start : start + numel]


def test_what_follows_in_the_whole_is_not_copied() -> None:
    whole = torch.arange(64.0).view(8, 8)
    rows = TensorSlice((8, 8), 0, 2, 1)
    assert elements(whole, rows, 4, 20).data_ptr() == whole[4, 4:].data_ptr()
    assert cut(whole, rows).data_ptr() == whole[4].data_ptr()
    assert cut(whole, TensorSlice((8, 8), 1, 2, 1)).data_ptr() == whole[0, 4:].data_ptr()


def test_a_value_that_is_the_part_is_taken_as_it_is() -> None:
    part = torch.arange(32.0).view(4, 8)
    box = TensorSlice((8, 8), 0, 2, 1)
    assert cut(part, box) is part and cut(part, None) is part
    assert torch.equal(elements(part, box, 3, 5), part.view(-1)[3:8])


def tower() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 4), nn.Linear(4, 8))


def test_what_is_declared_is_found_by_parameter() -> None:
    module = tower()
    rows, columns = TensorSlice.around((4, 8), 0, 2, 1), TensorSlice.around((8, 4), 1, 2, 1)
    found = declared(module, {"0.weight": rows, "1.weight": columns})
    assert found == {id(module[0].weight): rows, id(module[1].weight): columns}
    assert mesh_with(found, Settings(), 4, rank=3) == Mesh({Axis.DATA: 2, Axis.TENSOR: 2})
    assert mesh_with(found, Settings(expert_parallel_size=2), 4, rank=3) == Mesh(
        {Axis.DATA: 1, Axis.EXPERT: 2, Axis.TENSOR: 2}
    )


def test_one_part_is_the_whole() -> None:
    found = declared(tower(), {"0.weight": TensorSlice((4, 8), 0, 1, 0)})
    assert found == {} and mesh_with(found, Settings(), 3, rank=1) == Mesh({Axis.DATA: 3})


def test_tied_parameters_may_be_declared_by_each_name_alike() -> None:
    module = tower()
    module.tied = module[0].weight
    box = TensorSlice((8, 8), 0, 2, 0)
    assert declared(module, {"0.weight": box, "tied": box}) == {id(module.tied): box}
    with pytest.raises(ConfigError, match="declare tied parameters alike"):
        declared(module, {"0.weight": box, "tied": TensorSlice((4, 16), 1, 2, 0)})


@pytest.mark.parametrize(
    ("boxes", "words"),
    [
        ({"2.weight": TensorSlice((8, 8), 0, 2, 0)}, "2.weight .* the Sequential has no parameter of that name"),
        (
            {"0.weight": TensorSlice((4, 8), 0, 2, 0)},
            r"0.weight has shape \(4, 8\) and is declared to be 1/2 of \(4, 8\) in dimension 0, whose slices are \(2, 8\)",
        ),
        (
            {"0.weight": TensorSlice((8, 8), 0, 2, 0), "1.weight": TensorSlice((32, 4), 0, 4, 0)},
            "1.weight is one of 4 slices and 0.weight one of 2",
        ),
    ],
)
def test_what_does_not_fit_the_module_is_refused(boxes: dict[str, TensorSlice], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        declared(tower(), boxes)


@pytest.mark.parametrize(
    ("rank", "world_size", "experts", "words"),
    [
        (0, 3, 1, "tensor_parallel_size=2 does not divide the number of ranks, 3 .*; use a multiple of 2 ranks"),
        (
            0,
            6,
            2,
            r"expert_parallel_size=2 x tensor_parallel_size=2 \(4 ranks\) does not divide the number of ranks, 6 ",
        ),
        (1, 2, 1, "of rank 1 is 1/2 of .*, slice 0, and that rank has slice 1 of every parameter"),
    ],
)
def test_what_does_not_fit_the_ranks_is_refused(rank: int, world_size: int, experts: int, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        settings = Settings(expert_parallel_size=experts)
        mesh_with(declared(tower(), {"0.weight": TensorSlice((8, 8), 0, 2, 0)}), settings, world_size, rank)


def test_units_are_those_of_the_whole_model() -> None:
    """In files, too, states are divided by them."""
    whole = nn.ModuleList(nn.Linear(64, 64, bias=False) for _ in range(3))
    halves = nn.ModuleList(nn.Linear(32, 64, bias=False) for _ in range(3))
    boxes = declared(halves, {f"{block}.weight": TensorSlice.around((64, 32), 1, 2, 0) for block in range(3)})
    parts = {parameter: box.parts for parameter, box in boxes.items()}
    names = [unit.name for unit in discover(whole, "auto")]
    assert names == ["", "0", "1", "2"] == [unit.name for unit in discover(halves, "auto", parts=parts)]
    assert len(discover(halves, "auto")) == 1


class Halves(nn.Module):
    """`Net` on one of two ranks: blocks are cut by columns, the root is whole."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Parameter(torch.randn(PAGE // 4))
        self.blocks = nn.ModuleList(Block(index + 1) for index in range(3))
        for block in self.blocks:
            block.weight = nn.Parameter(block.weight.detach().chunk(2, 1)[0].clone())


def of_halves(module: Halves, ranks: int, rank: int = 0) -> Blueprint:
    boxes = {
        f"blocks.{at}.weight": TensorSlice.around(tuple(block.weight.shape), 1, 2, rank % 2)
        for at, block in enumerate(module.blocks)
    }
    request = dataclasses.replace(asked(module), boxes=declared(module, boxes))
    return decide(request, WORKSTATION, ranks, rank=rank)


def test_a_rank_keeps_as_much_of_parts_as_of_what_all_ranks_share() -> None:
    for ranks in (2, 4):
        both = shared, cut_up = decided(ranks=ranks), of_halves(Halves(), ranks, rank=1)
        units = range(len(shared.units))
        assert [cut_up.layout.shard_pages(unit) for unit in units] == [
            shared.layout.shard_pages(unit) for unit in units
        ]
        homes = [
            Counter(
                {(row.what, row.flat): row.numel * row.count for row in found.inventory.rows if row.flat is not None}
            )
            for found in both
        ]
        # Where no other rank has the same parts, gradients wait for the step: of parts in `.grad`, of the whole in pages.
        kept = {(What.GRADIENTS, 0): cut_up.layout.flats[0].shard_numel} if ranks == 2 else {}
        assert homes[1] == homes[0] + Counter(kept) and homes[0].total() > 0
        assert [flat.world_size for flat in cut_up.layout.flats] == [ranks] + [ranks // 2] * 3
        assert list(layout_lines(cut_up.layout)) == list(layout_lines(of_halves(Halves(), ranks, rank=0).layout))
        assert cut_up.holders.in_parts and not shared.holders.in_parts


def test_a_plan_for_ranks_that_make_no_groups_is_refused() -> None:
    with pytest.raises(ConfigError, match="tensor_parallel_size=2 does not divide the number of ranks, 3"):
        of_halves(Halves(), ranks=3)


def test_a_part_whose_elements_lie_in_another_order_is_refused() -> None:
    module = Halves()
    module.blocks[1].weight = nn.Parameter(module.blocks[1].weight.detach().t().contiguous().t())
    with pytest.raises(
        ConfigError, match=r"blocks.1.weight has strides .* is a slice of a larger one.*make it contiguous"
    ):
        of_halves(module, ranks=2)


def test_averages_of_parts_are_refused() -> None:
    with pytest.raises(ConfigError, match="EMAWeightAveraging averages the weights of one rank"):
        refuse_parts([EMAWeightAveraging()])
