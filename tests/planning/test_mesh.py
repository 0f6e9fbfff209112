"""Meshes: coordinates and groups of any number of ranks, and sizes that do not divide them."""

from __future__ import annotations

from itertools import combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_ptm.config import Settings
from lightning_ptm.errors import ConfigError
from lightning_ptm.planning.mesh import Axis, GridShape, Mesh, mesh_of

STAGE, DATA, EXPERT, CONTEXT, TENSOR = Axis


@st.composite
def meshes(draw: st.DrawFn) -> Mesh:
    axes = draw(st.permutations(list(Axis)))
    return Mesh({axis: draw(st.integers(1, 3 if place < 3 else 2)) for place, axis in enumerate(axes)})


def test_neighbours_differ_along_the_last_axis() -> None:
    six = Mesh({EXPERT: 2, DATA: 3})  # in the order of the table
    assert six.world_size == 6
    assert [six.coordinate(rank, DATA) for rank in range(6)] == [0, 0, 1, 1, 2, 2]
    assert [six.coordinate(rank, EXPERT) for rank in range(6)] == [0, 1] * 3
    assert six.groups((EXPERT,)) == ((0, 1), (2, 3), (4, 5))
    assert six.groups((DATA,)) == ((0, 2, 4), (1, 3, 5))
    assert six.groups((DATA, EXPERT)) == six.groups((EXPERT, DATA)) == (tuple(range(6)),)
    assert six.groups(()) == tuple((rank,) for rank in range(6))


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


@given(mesh=meshes())
def test_a_replica_is_the_ranks_that_differ_along_stage_context_and_tensor_alone(mesh: Mesh) -> None:
    assert len(mesh.replicas) == mesh.sizes[DATA] * mesh.sizes[EXPERT]
    for index, ranks in enumerate(mesh.replicas):
        assert all(mesh.replica(rank) == index for rank in ranks)
        places = {tuple(mesh.coordinate(rank, axis) for axis in (STAGE, CONTEXT, TENSOR)) for rank in ranks}
        assert len(places) == len(ranks) == mesh.sizes[STAGE] * mesh.sizes[CONTEXT] * mesh.sizes[TENSOR]


def test_stages_are_outermost_and_rank_0_is_in_the_last() -> None:
    eight = mesh_of(Settings(pipeline_parallel_size=2, micro_batches=4, tensor_parallel_size=2), 8)
    assert [eight.stage(rank) for rank in range(8)] == [1, 1, 1, 1, 0, 0, 0, 0]
    assert eight.groups((STAGE,)) == ((0, 4), (1, 5), (2, 6), (3, 7))
    assert eight.replicas == ((0, 1, 4, 5), (2, 3, 6, 7))


def test_data_gets_what_settings_leave() -> None:
    settings = Settings(expert_parallel_size=2, tensor_parallel_size=3)
    assert mesh_of(settings, 12) == Mesh({DATA: 2, EXPERT: 2, TENSOR: 3})
    assert mesh_of(settings, 12, parts=1) == Mesh({DATA: 6, EXPERT: 2})
    assert mesh_of(Settings(), 1) == Mesh({}) and not Mesh({}).axes and Mesh({}).replicas == ((0,),)


@pytest.mark.parametrize(
    ("sizes", "world_size", "words"),
    [
        (
            {EXPERT: 1, TENSOR: 4},
            6,
            r"^tensor_parallel_size=4 does not divide the number of ranks, 6 ",
        ),
        (
            {EXPERT: 2, TENSOR: 2},
            6,
            r"^expert_parallel_size=2 x tensor_parallel_size=2 \(4 ranks\) .* multiple of 4",
        ),
    ],
)
def test_sizes_that_do_not_divide_the_ranks_are_refused(sizes: dict[Axis, int], world_size: int, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        Mesh.of(world_size, sizes)


def test_a_grid_has_every_rank_once_along_each_axis() -> None:
    mesh, cube = Mesh({DATA: 2, TENSOR: 8}), GridShape(2, cube=True)
    assert [cube.groups(mesh, axis)[-1] for axis in cube.axes] == [(11, 15), (13, 15), (14, 15)]
    for axis in cube.axes:
        assert sorted(rank for ranks in cube.groups(mesh, axis) for rank in ranks) == list(range(16))
        for ranks in cube.groups(mesh, axis):
            assert [cube.coordinate(rank % 8, axis) for rank in ranks] == [0, 1]
    square = GridShape(3)
    assert square.size == 9 and square.groups(Mesh({TENSOR: 9}), square.axes[0])[1] == (1, 4, 7)
