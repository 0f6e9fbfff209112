"""Meshes and tables of sharing classes, on any number of ranks."""

from __future__ import annotations

from itertools import combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_ptm.planning.boxes import Box
from lightning_ptm.planning.experts import ExpertSplit, divided
from lightning_ptm.planning.holders import Axis, Holders, Mesh, Sharing, everybodys
from lightning_ptm.planning.layout import ParameterSpec, UnitSpec, build_layout

DATA, EXPERT = Axis.DATA, Axis.EXPERT
SIX = Mesh({DATA: 3, EXPERT: 2})


@st.composite
def meshes(draw: st.DrawFn) -> Mesh:
    axes = draw(st.permutations(list(Axis)))
    return Mesh({axis: draw(st.integers(1, 5)) for axis in axes})


@st.composite
def tables(draw: st.DrawFn) -> Holders:
    size = draw(st.integers(1, 4))
    split = ExpertSplit(size * draw(st.integers(1, 4)), size)
    members = st.dictionaries(st.integers(1, 9), st.integers(0, size - 1))
    return divided(split, draw(members), draw(st.sampled_from([1, 2, 4])))


def test_neighbours_differ_along_the_last_axis() -> None:
    assert SIX.world_size == 6
    assert [SIX.coordinate(rank, DATA) for rank in range(6)] == [0, 0, 1, 1, 2, 2]
    assert [SIX.coordinate(rank, EXPERT) for rank in range(6)] == [0, 1] * 3
    assert SIX.groups((EXPERT,)) == ((0, 1), (2, 3), (4, 5))
    assert SIX.groups((DATA,)) == ((0, 2, 4), (1, 3, 5))
    assert SIX.groups((DATA, EXPERT)) == SIX.groups((EXPERT, DATA)) == (tuple(range(6)),)
    assert SIX.groups(()) == tuple((rank,) for rank in range(6))


@given(mesh=meshes())
def test_groups_have_every_rank_once_and_differ_along_their_axes_alone(mesh: Mesh) -> None:
    for count in range(len(Axis) + 1):
        for axes in combinations(Axis, count):
            groups = mesh.groups(axes)
            assert sorted(rank for group in groups for rank in group) == list(range(mesh.world_size))
            assert list(groups) == sorted(groups)
            for group in groups:
                assert list(group) == sorted(group)
                for axis in mesh.sizes:
                    seen = {mesh.coordinate(rank, axis) for rank in group}
                    assert len(seen) == (mesh.sizes[axis] if axis in axes else 1)


def test_ranks_of_a_group_have_other_parts() -> None:
    found = everybodys(Mesh({DATA: 2, Axis.TENSOR: 2}))
    assert found.in_parts and found.of(3) == Sharing((DATA, Axis.TENSOR), (0, 1, 2, 3), losses=4)
    assert found.parts == Sharing((DATA,), (0, 2), losses=2)
    cut = ParameterSpec("cut", (4, 64), "float32", 4, True, 0, box=Box((4, 128), 1, 2, 0))
    whole = ParameterSpec("whole", (64,), "float32", 4, True, 0)
    layout = build_layout([UnitSpec("", (whole, cut))], page_size=1 << 16, world_size=4)
    assert [found.of_flat(flat) for flat in layout.flats] == [found.everybody, found.parts]
    assert [flat.world_size for flat in layout.flats] == [4, 2]
    assert found.alike == (DATA, Axis.TENSOR)  # of units


def test_where_each_rank_has_other_parts_nobody_shares_them() -> None:
    found = everybodys(Mesh({DATA: 1, Axis.TENSOR: 3}))
    assert found.parts.alone and found.parts.ranks == (0,) and not found.everybody.alone
    assert not everybodys(Mesh({DATA: 3})).in_parts and not everybodys(SIX).in_parts


def test_all_ranks_share_all_units() -> None:
    found = everybodys(Mesh({DATA: 3}))
    assert found.of(0) == found.of(7) == Sharing((DATA,), (0, 1, 2), losses=3)
    assert found.of(0).divisor == 3
    assert not found.of(0).alone
    assert found.elsewhere(1) == frozenset()
    assert found.alike == (DATA,)


def test_one_rank_is_alone_with_all_it_has() -> None:
    sharing = everybodys(Mesh({DATA: 1})).everybody
    assert sharing.alone
    assert sharing.divisor == 1


@pytest.mark.parametrize(
    ("split", "ranks", "divisor"),
    [(ExpertSplit(6, 2), (1, 3, 5), 6), (ExpertSplit(2, 2), (1,), 2), (ExpertSplit(4, 4), (1,), 4)],
)
def test_divided_experts_have_their_members_ranks_and_the_losses_of_all(
    split: ExpertSplit, ranks: tuple[int, ...], divisor: int
) -> None:
    found = divided(split, {4: 0, 5: 1}, 1)
    assert found.of(5).ranks == ranks
    assert found.of(5).divisor == found.of(0).divisor == divisor
    assert not found.of(5).alone  # also where one rank holds it: other ranks' tokens are in its gradient
    assert found.of(0) == everybodys(split.mesh).everybody
    assert found.elsewhere(0) == {5}
    assert found.elsewhere(1) == {4}
    assert found.alike == (DATA,)


def test_what_gradients_are_over_already_is_not_divided_by_again() -> None:
    found = divided(ExpertSplit(3, 3), {1: 2}, 4)
    assert (found.of(1).divisor, found.of(0).divisor) == (0.75, 3)


@given(holders=tables(), numel=st.integers(0, 300_000))
def test_every_element_has_exactly_one_owner_in_the_world(holders: Holders, numel: int) -> None:
    spec = ParameterSpec("p", (numel,), "float32", 4, trainable=True, group=0)
    for unit in range(10):
        sharing = holders.of(unit)
        everywhere = range(holders.mesh.world_size)
        assert [rank for rank in everywhere if unit not in holders.elsewhere(rank)] == list(sharing.ranks)
        assert sharing.ranks in holders.mesh.groups(sharing.axes)
        (flat,) = build_layout([UnitSpec("", (spec,))], page_size=65536, world_size=len(sharing.ranks)).flats
        pieces = [(piece, rank) for place, rank in enumerate(sharing.ranks) for piece in flat.pieces(place)]
        owned = sorted((piece.full_start, piece.full_start + piece.numel, rank) for piece, rank in pieces)
        assert [start for start, _, _ in owned] == [0, *(end for _, end, _ in owned)][: len(owned)]
        assert (owned[-1][1] if owned else 0) == flat.padded_numel >= numel
        assert all(sharing.ranks[flat.owner(start)] == rank for start, end, rank in owned if end > start)


@given(holders=tables())
def test_ranks_that_are_alike_hold_the_same_units(holders: Holders) -> None:
    for group in holders.mesh.groups(holders.alike):
        assert len({holders.elsewhere(rank) for rank in group}) == 1
