"""Tables of sharing classes, on any number of ranks."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_ptm.planning.expert_split import divided
from lightning_ptm.planning.layout import ParameterSpec, UnitSpec, build_layout
from lightning_ptm.planning.mesh import Axis, Mesh
from lightning_ptm.planning.sharding import ModelSharding, ShardGroup, shared_by_all, sharing_along, staged
from lightning_ptm.planning.tensor_slices import TensorSlice

STAGE, DATA, EXPERT, CONTEXT, TENSOR = Axis
SIX = Mesh({DATA: 3, EXPERT: 2})


@st.composite
def tables(draw: st.DrawFn) -> ModelSharding:
    size, parts = draw(st.integers(1, 4)), draw(st.integers(1, 3))
    mesh = Mesh({DATA: draw(st.integers(1, 4)), EXPERT: size, CONTEXT: draw(st.integers(1, 2)), TENSOR: parts})
    members = st.dictionaries(st.integers(1, 9), st.integers(0, size - 1))
    return divided(mesh, draw(members), draw(st.sampled_from([1, 2, 4])))


@pytest.mark.parametrize("others", [{}, {EXPERT: 2}, {TENSOR: 2}, {EXPERT: 2, TENSOR: 3}])
def test_ranks_with_other_tokens_share_as_ranks_with_other_batches_do(others: dict[Axis, int]) -> None:
    def shared(outer: int, inner: int) -> list[tuple[int, float, float, float]]:
        classes = sharing_along(Mesh({DATA: outer, CONTEXT: inner, **others}), (DATA, CONTEXT, TENSOR))
        return [
            (len(each.whole.ranks), each.whole.divisor, each.parts.divisor, each.partial.divisor) for each in classes
        ]

    assert shared(6, 1) == shared(2, 3) == shared(1, 6)


def test_ranks_of_a_group_have_other_parts() -> None:
    found = shared_by_all(Mesh({DATA: 2, TENSOR: 2}))
    assert found.in_parts and found.of(3).whole == ShardGroup((DATA, TENSOR), (0, 1, 2, 3), losses=4)
    assert found.of(3).parts == ShardGroup((DATA,), (0, 2), losses=2)
    assert found.of(3).partial == ShardGroup((DATA, TENSOR), (0, 1, 2, 3), losses=2)
    cut = ParameterSpec("cut", (4, 64), "float32", 4, True, 0, box=TensorSlice((4, 128), 1, 2, 0))
    whole = ParameterSpec("whole", (64,), "float32", 4, True, 0)
    layout = build_layout([UnitSpec("", (whole, cut))], page_size=1 << 16, world_size=4)
    assert [found.of_flat(flat) for flat in layout.flats] == [found.common.whole, found.common.parts]
    assert [flat.world_size for flat in layout.flats] == [4, 2]
    assert found.sharding_axes == (DATA, TENSOR)  # of units


def test_where_each_rank_has_other_parts_nobody_shares_them() -> None:
    found = shared_by_all(Mesh({DATA: 1, TENSOR: 3}))
    assert (
        found.common.parts.needs_no_reduction
        and found.common.parts.ranks == (0,)
        and not found.common.whole.needs_no_reduction
    )
    assert not shared_by_all(Mesh({DATA: 3})).in_parts and not shared_by_all(SIX).in_parts


def test_all_ranks_share_all_units() -> None:
    found = shared_by_all(Mesh({DATA: 3}))
    assert found.of(0) == found.of(7)
    assert found.of(0).whole == ShardGroup((DATA,), (0, 1, 2), losses=3)
    assert found.of(0).whole.divisor == 3
    assert not found.of(0).whole.needs_no_reduction
    assert found.remote_units(1) == frozenset()
    assert found.sharding_axes == (DATA,)


def test_one_rank_is_alone_with_all_it_has() -> None:
    sharing = shared_by_all(Mesh({DATA: 1})).common.whole
    assert sharing.needs_no_reduction
    assert sharing.divisor == 1


@pytest.mark.parametrize(
    ("mesh", "ranks", "divisor"),
    [(SIX, (1, 3, 5), 6), (Mesh({EXPERT: 2}), (1,), 2), (Mesh({EXPERT: 4}), (1,), 4)],
)
def test_divided_experts_have_their_members_ranks_and_the_losses_of_all(
    mesh: Mesh, ranks: tuple[int, ...], divisor: int
) -> None:
    found = divided(mesh, {4: 0, 5: 1}, 1)
    assert found.of(5).whole.ranks == ranks and found.shared_by() == dict.fromkeys((4, 5), len(ranks))
    assert found.of(5).whole.divisor == found.of(0).whole.divisor == divisor
    assert not found.of(
        5
    ).whole.needs_no_reduction  # also where one rank holds it: other ranks' tokens are in its gradient
    assert found.of(0) == shared_by_all(mesh).common
    assert found.remote_units(0) == {5}
    assert found.remote_units(1) == {4}
    assert found.sharding_axes == tuple(axis for axis in mesh.axes if axis is DATA)


def test_experts_and_parts_are_divided_at_once() -> None:
    """Twelve ranks: two experts' members in each of two groups, of tensor groups of three."""
    mesh = Mesh.of(12, {EXPERT: 2, TENSOR: 3})
    assert mesh.groups((EXPERT,)) == ((0, 3), (1, 4), (2, 5), (6, 9), (7, 10), (8, 11))  # of equal parts
    assert [mesh.coordinate(rank, EXPERT) for rank in range(12)] == [0, 0, 0, 1, 1, 1] * 2
    found = divided(mesh, {1: 0, 2: 1}, 1)
    of_expert, of_all = found.of(2), found.of(0)
    assert of_expert.whole == ShardGroup((DATA, TENSOR), (3, 4, 5, 9, 10, 11), losses=12)
    assert of_expert.parts == ShardGroup((DATA,), (3, 9), losses=4)  # of four batches, of which each group has two
    assert of_expert.partial == ShardGroup((DATA, TENSOR), (3, 4, 5, 9, 10, 11), losses=4)
    assert of_all.whole.ranks == tuple(range(12)) and of_all.parts == ShardGroup((DATA, EXPERT), (0, 3, 6, 9), losses=4)
    assert found.remote_units(1) == found.remote_units(8) == {2} and found.remote_units(4) == {1}


@given(sizes=st.lists(st.integers(1, 3), min_size=4, max_size=4))
def test_parts_have_the_holders_of_the_whole_by_the_group(sizes: list[int]) -> None:
    """Every rank that holds a unit is of one group of those with its parts, and places in these groups are the same."""
    mesh = Mesh(dict(zip((DATA, EXPERT, CONTEXT, TENSOR), sizes, strict=True)))
    parts = mesh.sizes[TENSOR]
    for each in sharing_along(mesh, (DATA, TENSOR)):
        assert len(each.parts.ranks) * parts == len(each.whole.ranks)
        alike = [group for group in mesh.groups(each.parts.axes) if group[0] in each.whole.ranks]
        assert sorted(rank for group in alike for rank in group) == list(each.whole.ranks)
        assert each.parts.ranks == alike[0]


def test_what_gradients_are_over_already_is_not_divided_by_again() -> None:
    found = divided(Mesh({EXPERT: 3}), {1: 2}, 4)
    assert (found.of(1).whole.divisor, found.of(0).whole.divisor) == (0.75, 3)


@given(holders=tables(), numel=st.integers(0, 300_000))
def test_every_element_has_exactly_one_owner_in_the_world(holders: ModelSharding, numel: int) -> None:
    spec = ParameterSpec("p", (numel,), "float32", 4, trainable=True, group=0)
    for unit in range(10):
        sharing = holders.of(unit).whole
        everywhere = range(holders.mesh.world_size)
        assert [rank for rank in everywhere if unit not in holders.remote_units(rank)] == list(sharing.ranks)
        assert sharing.ranks in holders.mesh.groups(sharing.axes)
        (flat,) = build_layout([UnitSpec("", (spec,))], page_size=65536, world_size=len(sharing.ranks)).flats
        pieces = [(piece, rank) for place, rank in enumerate(sharing.ranks) for piece in flat.pieces(place)]
        owned = sorted((piece.full_start, piece.full_start + piece.numel, rank) for piece, rank in pieces)
        assert [start for start, _, _ in owned] == [0, *(end for _, end, _ in owned)][: len(owned)]
        assert (owned[-1][1] if owned else 0) == flat.padded_numel >= numel
        assert all(sharing.ranks[flat.owner(start)] == rank for start, end, rank in owned if end > start)


@given(holders=tables())
def test_ranks_that_are_alike_hold_the_same_units(holders: ModelSharding) -> None:
    for group in holders.mesh.groups(holders.sharding_axes):
        assert len({holders.remote_units(rank) for rank in group}) == 1


@given(
    holders=st.one_of(
        tables(),
        st.lists(st.integers(1, 3), min_size=4, max_size=4).map(
            lambda sizes: staged(
                Mesh(dict(zip((STAGE, DATA, CONTEXT, TENSOR), sizes, strict=True))),
                [range(1 + 2 * stage, 3 + 2 * stage) for stage in range(sizes[0])],
            )
        ),
    )
)
def test_layouts_and_tables_agree_on_gradients_that_are_not_reduced(holders: ModelSharding) -> None:
    """So a stage with one rank's batches leaves the gradients of its blocks in `.grad`, as one rank does."""
    mesh, parts = holders.mesh, holders.mesh.sizes[TENSOR]
    whole = ParameterSpec("whole", (64,), "float32", 4, True, 0)
    cut = ParameterSpec("cut", (4, 64), "float32", 4, True, 0, box=TensorSlice((4, 64 * parts), 1, parts, 0))
    specs = [whole, cut] if parts > 1 else [whole]
    units = [
        UnitSpec(f"u{unit}", tuple(replace(each, name=f"{unit}.{each.name}") for each in specs)) for unit in range(10)
    ]
    for rank in range(mesh.world_size):
        layout = build_layout(
            units,
            page_size=1 << 16,
            world_size=mesh.world_size,
            shared_by=holders.shared_by(),
            remote_units=holders.remote_units(rank),
            stages=mesh.sizes[STAGE],
        )
        for flat in layout.flats:
            assert layout.needs_no_reduction(flat) == holders.of_flat(flat).needs_no_reduction
