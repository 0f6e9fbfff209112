"""Layout: every element once, alignment, ownership, padding, refusals."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_ptm.errors import ConfigError
from lightning_ptm.planning.layout import ParameterSpec, UnitSpec, build_layout
from lightning_ptm.planning.plan_diff import layout_lines
from lightning_ptm.planning.tensor_slices import TensorSlice
from lightning_ptm.terms import ALIGN_NUMEL

from .models import PAGE, TABLE_4, Transformer, spec, transformer_units, unit_lists

SQUARES = (
    None,
    TensorSlice((128, 64), 0, 2, 0),
    TensorSlice((128, 64), 0, 2, 0, sections=2),
    TensorSlice((64, 128), 1, 2, 0),
)
"""Slices of which a parameter of (64, 64) may be the part; None: not sliced."""
RANKS = st.one_of(st.integers(1, 9), st.sampled_from((64, 768)))


@settings(max_examples=80, deadline=None)
@given(unit_lists(), RANKS)
def test_every_element_belongs_to_one_rank(units: list[UnitSpec], world_size: int) -> None:
    layout = build_layout(units, page_size=PAGE, world_size=world_size)
    for flat in layout.flats:
        position = 0
        by_stripe = [flat.pieces(rank) for rank in range(world_size)]
        for stripe in range(flat.shard_pages):
            for rank in range(world_size):
                piece = by_stripe[rank][stripe]
                assert piece.full_start == position and piece.stripe == stripe
                assert flat.owner(position) == flat.owner(position + piece.numel - 1) == rank
                position += piece.numel
        assert position == flat.padded_numel >= flat.numel
        for pieces in by_stripe:
            assert len(pieces) == flat.shard_pages
            ends = [piece.shard_start + piece.numel for piece in pieces]
            assert [piece.shard_start for piece in pieces] == [0, *ends][: len(pieces)]
            assert flat.shard_numel == (ends[-1] if ends else 0)


@settings(max_examples=80, deadline=None)
@given(unit_lists(), RANKS)
def test_every_parameter_lies_in_one_slot_and_starts_aligned(units: list[UnitSpec], world_size: int) -> None:
    layout = build_layout(units, page_size=PAGE, world_size=world_size)
    placed = [slot.spec for flat in layout.flats for slot in flat.slots]
    assert sorted(placed, key=lambda parameter: parameter.name) == sorted(
        (parameter for unit in units for parameter in unit.parameters), key=lambda parameter: parameter.name
    )
    for flat in layout.flats:
        end = 0
        for slot in flat.slots:
            assert slot.start % ALIGN_NUMEL == 0 and end <= slot.start < end + ALIGN_NUMEL
            assert (slot.spec.dtype, slot.spec.trainable) == (flat.dtype, flat.trainable)
            end = slot.start + slot.numel
        assert end == flat.numel
        groups = [slot.spec.group for slot in flat.slots]
        assert groups == sorted(groups)
        for piece in flat.pieces(0):
            assert piece.full_start % ALIGN_NUMEL == piece.shard_start % ALIGN_NUMEL == piece.numel % ALIGN_NUMEL == 0
            assert piece.numel * flat.itemsize <= PAGE and piece.numel * flat.itemsize % 512 == 0


@settings(max_examples=40, deadline=None)
@given(unit_lists())
def test_a_units_trainable_flats_come_first(units: list[UnitSpec]) -> None:
    layout = build_layout(units, page_size=PAGE, world_size=2)
    assert [flat.index for flat in layout.flats] == list(range(len(layout.flats)))
    for unit in range(len(units)):
        trainable = [flat.trainable for flat in layout.flats_of(unit)]
        assert trainable == sorted(trainable, reverse=True)
        assert all(flat.unit == unit for flat in layout.flats_of(unit))
        keys = {(flat.trainable, flat.dtype) for flat in layout.flats_of(unit)}
        assert len(keys) == len(layout.flats_of(unit))


@pytest.mark.parametrize("model", TABLE_4, ids=lambda model: model.name)
def test_padding_of_the_papers_models_stays_below_two_percent(model: Transformer) -> None:
    units = transformer_units(model)
    if model.experts:  # All blocks are alike, and 2304 experts make long lists: the root and one block show it.
        units = units[:2]
    rank_counts = (1, 3, 8, 64) if model.experts else range(1, 65)
    for world_size in rank_counts:
        layout = build_layout(units, page_size=4 * 1024 * 1024, world_size=world_size)
        assert layout.padding_share() < 0.02


def test_table_4_has_the_sizes_it_names() -> None:
    sizes = {
        model.name: sum(parameter.numel for unit in transformer_units(model) for parameter in unit.parameters)
        for model in TABLE_4
    }
    assert sizes["GPT3-1.7B"] == pytest.approx(1.7e9, rel=0.05)
    assert sizes["GPT3-55B"] == pytest.approx(55e9, rel=0.05)
    assert sizes["GPT3-175B"] == pytest.approx(175e9, rel=0.05)
    assert sizes["T5-1.4B"] == pytest.approx(1.4e9, rel=0.1)
    assert sizes["T5-MoE-1.2T"] == pytest.approx(1.2e12, rel=0.1)


def test_each_optimizer_has_a_flat_of_its_own_and_frozen_parameters_share_one() -> None:
    parameters = [
        replace(spec("generator", 10), optimizer=0),
        replace(spec("critic", 10), optimizer=1),
        replace(spec("generator.bias", 10, group=1), optimizer=0),
        replace(spec("frozen", 10, trainable=False), optimizer=1),
        replace(spec("frozen.too", 10, trainable=False), optimizer=0),
    ]
    flats = build_layout([UnitSpec("root", tuple(parameters))], page_size=PAGE, world_size=1).flats
    assert [[slot.spec.name for slot in flat.slots] for flat in flats] == [
        ["generator", "generator.bias"],
        ["critic"],
        ["frozen", "frozen.too"],
    ]


def test_parts_of_larger_parameters_lie_in_flats_that_fewer_ranks_share() -> None:
    """Parts have one flat next to that of whole parameters, in whatever order both come."""

    def unit_of(index: int) -> UnitSpec:
        cut = replace(spec("cut", 4096), box=TensorSlice((8192,), 0, 2, index))
        other = spec("other", 64, dtype="float32")
        return UnitSpec("", (spec("whole", 4096), other, cut, spec("frozen", 64, trainable=False)))

    of_rank = [build_layout([unit_of(index)], page_size=PAGE, world_size=4) for index in range(2)]
    for layout in of_rank:
        found = [([slot.spec.name for slot in flat.slots], flat.parts, flat.world_size) for flat in layout.flats]
        assert found == [(["whole"], 1, 4), (["cut"], 2, 2), (["other"], 1, 4), (["frozen"], 1, 4)]
        families = [flat.family for flat in layout.flats]
        assert families[0] == families[1] and len(set(families)) == 3
        assert layout.gathers(0)
    assert list(layout_lines(of_rank[0])) == list(layout_lines(of_rank[1]))
    (cut,) = of_rank[1].flats[1].slots
    assert cut.spec.whole_shape == (8192,) and [each.whole_start for each in cut.spec.stretches(5, 3)] == [4101]


def test_ranks_that_cut_in_another_way_differ() -> None:
    units = [UnitSpec("", (replace(spec("cut", 4096), shape=(64, 64), box=box),)) for box in SQUARES]
    assert len({tuple(layout_lines(build_layout([unit], page_size=PAGE, world_size=2))) for unit in units}) == len(
        units
    )


def test_a_tail_is_one_stripe_of_small_equal_pieces() -> None:
    (flat,) = build_layout(
        [UnitSpec("root", (spec("weight", 3 * PAGE // 2 + 1000),))], page_size=PAGE, world_size=3
    ).flats
    assert (flat.stripes, flat.tail_piece_numel, flat.shard_pages) == (1, 512, 2)  # 1000 / 3, in steps of 256.
    assert flat.pieces(1)[1].full_start == 3 * PAGE // 2 + 512
    assert flat.owner(3 * PAGE // 2 + 1535) == 2
    with pytest.raises(IndexError, match=r"element \d+ is outside"):
        flat.owner(flat.padded_numel)


def test_a_tail_that_fills_its_pages_is_a_full_stripe() -> None:
    (flat,) = build_layout([UnitSpec("root", (spec("weight", PAGE - 1),))], page_size=PAGE, world_size=2).flats
    assert (flat.stripes, flat.tail_piece_numel) == (1, 0)


def test_parameters_without_elements_take_no_pages() -> None:
    layout = build_layout([UnitSpec("root", (spec("none", 0),))], page_size=PAGE, world_size=2)
    assert layout.shard_pages(0) == layout.full_pages(0) == 0
    assert layout.padding_share() == 0.0


@pytest.mark.parametrize("page_size", [0, 4096, 65535, 65536 + 512])
def test_page_sizes_that_disks_cannot_move_are_refused(page_size: int) -> None:
    with pytest.raises(ConfigError, match="multiple of 4096 of at least 65536"):
        build_layout([UnitSpec("root", ())], page_size=page_size, world_size=1)


@pytest.mark.parametrize(
    ("units", "message"),
    [
        ([], "no units"),
        ([UnitSpec("a", (spec("w", 1),)), UnitSpec("b", (spec("w", 1),))], "parameter name 'w' occurs twice"),
        ([UnitSpec("a", ()), UnitSpec("a", ())], "unit name 'a' occurs twice"),
        ([UnitSpec("a", (spec("w", -1),))], "shape"),
        ([UnitSpec("a", (ParameterSpec("w", (1,), "int4", 0, True, 0),))], "0 bytes per element"),
        (
            [UnitSpec("a", (spec("w", 1), ParameterSpec("v", (1,), "bfloat16", 4, True, 0)))],
            "others of that dtype have 2",
        ),
    ],
)
def test_models_that_cannot_be_laid_out_are_refused(units: list[UnitSpec], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        build_layout(units, page_size=PAGE, world_size=1)


def test_a_world_without_ranks_is_refused() -> None:
    with pytest.raises(ConfigError, match="world_size is 0"):
        build_layout([UnitSpec("root", ())], page_size=PAGE, world_size=0)


@settings(max_examples=80, deadline=None)
@given(unit_lists(), st.integers(1, 9), st.data())
def test_flats_of_units_that_others_hold_are_beside_those_that_a_rank_has(
    units: list[UnitSpec], world_size: int, data: st.DataObject
) -> None:
    elsewhere = data.draw(st.sets(st.integers(0, len(units) - 1)))
    whole = build_layout(units, page_size=PAGE, world_size=world_size)
    ours = build_layout(units, page_size=PAGE, world_size=world_size, remote_units=elsewhere)
    assert set(ours.remote_flats) == elsewhere and not whole.remote_flats
    assert [flat.index for flat in ours.flats] == list(range(len(ours.flats)))
    for unit in range(len(units)):
        theirs = ours.remote_flats.get(unit, ())
        assert not (theirs and ours.flats_of(unit))
        assert [replace(flat, index=0) for flat in theirs or ours.flats_of(unit)] == [
            replace(flat, index=0) for flat in whole.flats_of(unit)
        ]
    assert [flat.slots for flat in ours.all_flats()] == [flat.slots for flat in whole.flats]
    assert list(layout_lines(ours)) == list(layout_lines(whole))
