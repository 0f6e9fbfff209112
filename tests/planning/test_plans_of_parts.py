"""Plans where ranks have parts of parameters: what no other rank has is used where it is at home, and not copied there."""

from __future__ import annotations

from dataclasses import replace

import pytest

from lightning_ptm.planning.expert_split import divided
from lightning_ptm.planning.layout import ModelLayout, UnitSpec, build_layout
from lightning_ptm.planning.mesh import Axis, Mesh
from lightning_ptm.planning.placement import place
from lightning_ptm.planning.placement_data import Budget, Placement
from lightning_ptm.planning.schedule import schedule
from lightning_ptm.planning.simulate import simulate
from lightning_ptm.planning.trace import sequential_trace
from lightning_ptm.terms import Kind, Operation, Tier

from .models import PAGE, in_parts, spec

WEIGHT, NORM = 8, 1
"""Pages of a unit's parts, and of what is whole on each of two ranks: half of it is at home on each."""
UNITS = [UnitSpec("root", ()), *(UnitSpec(f"layers.{at}", (spec(f"{at}.w", WEIGHT * PAGE // 2),)) for at in range(3))]


def layout_of(world_size: int) -> ModelLayout:
    units = [in_parts(unit, 2, every=True) for unit in UNITS]
    whole = [replace(unit, parameters=(*unit.parameters, spec(f"{unit.name}.n", NORM * PAGE // 2))) for unit in units]
    return build_layout(whole, page_size=PAGE, world_size=world_size)


def at_home(layout: ModelLayout, pages: int, *, keep_gradients: bool) -> Placement:
    return place(
        layout,
        [0] * len(layout.flats),
        sequential_trace(layout),
        Budget({Tier.DEVICE: pages * PAGE}),
        unified=True,
        keep_gradients=keep_gradients,
        staging_bytes=0,
        update_on_device=True,
    )


def test_parts_that_are_a_ranks_alone_are_not_copied_to_where_they_are() -> None:
    layout = layout_of(2)
    placement = at_home(layout, 1000, keep_gradients=True)
    trace, budget = sequential_trace(layout), Budget({Tier.DEVICE: 1000 * PAGE})
    plan = schedule(layout, placement, trace, budget)
    assert {task.operation for task in plan.tasks} >= {Operation.GATHER, Operation.RELEASE}
    assert {task.kind for task in plan.tasks} == {Kind.FULL}
    taken = simulate(layout, placement, plan, trace, budget).tier(Tier.DEVICE).bytes_per_tick
    homes = placement.at_home_bytes[Tier.DEVICE]
    # Of four units the whole parameters alone, and of one or two of them gradients and what these are reduced to.
    assert max(taken) - homes <= (4 * NORM + 2 * (NORM + 1)) * PAGE < WEIGHT * PAGE + 4 * NORM * PAGE


def test_four_ranks_share_each_part_with_another_and_copy_it() -> None:
    layout = layout_of(4)
    placement = at_home(layout, 1000, keep_gradients=True)
    trace, budget = sequential_trace(layout), Budget({Tier.DEVICE: 1000 * PAGE})
    taken = simulate(layout, placement, schedule(layout, placement, trace, budget), trace, budget)
    more = taken.tier(Tier.DEVICE).peak_bytes - placement.at_home_bytes[Tier.DEVICE]
    assert more >= 3 * (WEIGHT + NORM) * PAGE


@pytest.mark.parametrize(
    "split", [(1, 1, 1), (2, 1, 2), (4, 1, 2), (4, 2, 2), (4, 1, 4), (4, 2, 1), (4, 4, 1), (8, 2, 2)]
)
def test_a_gradient_is_a_ranks_alone_where_its_sharing_class_says_so(split: tuple[int, int, int]) -> None:
    """The layout counts by it what the run does by its sharing class."""
    world_size, size, parts = split
    holders = divided(Mesh.of(world_size, {Axis.EXPERT: size, Axis.TENSOR: parts}), {2: 0} if size > 1 else {}, 1)
    units = [in_parts(unit, parts, every=False) if parts > 1 else unit for unit in UNITS]
    whole = [replace(unit, parameters=(*unit.parameters, spec(f"{unit.name}.n", 64))) for unit in units]
    layout = build_layout(whole, page_size=PAGE, world_size=world_size, shared_by=holders.shared_by())
    for flat in layout.flats:
        assert flat.world_size == len(holders.of_flat(flat).ranks)
        assert layout.needs_no_reduction(flat) is holders.of_flat(flat).needs_no_reduction, flat
