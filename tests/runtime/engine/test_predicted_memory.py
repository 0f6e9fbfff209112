"""Bytes in use at ticks: what is taken once, and what comes and goes beside it."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from decided_by_hand import CLUSTER, PAGE, Net, decided

from lightning_ptm.planning.inventory import Lifetime
from lightning_ptm.planning.trace import Trace
from lightning_ptm.runtime.deciding.blueprint import Blueprint
from lightning_ptm.runtime.deciding.planner import make_plan
from lightning_ptm.runtime.engine import predicted_memory as module
from lightning_ptm.runtime.engine.predicted_memory import (
    PredictedMemory,
    decided_beside,
    gradients_at_peak,
    gradients_beside,
    predicted_memory,
)
from lightning_ptm.runtime.engine.virtual_run import VirtualRun
from lightning_ptm.terms import TIERS, Mode, Tier
from lightning_ptm.update.trial.traits import OptimizerTraits

ON_HOST: dict[str, Any] = {"offload_parameters": "host", "offload_optimizer": "host"}
ON_DISK: dict[str, Any] = {"offload_optimizer": "disk", "disk_path": "/d"}
RUNS: dict[str, dict[str, Any]] = {
    "in RAM": {},
    "on disk": ON_DISK,
    "three tiers": {"device_memory": 16 * PAGE, **ON_HOST},
    "two ranks": {"ranks": 2, "machine": CLUSTER},
    "two ranks, on the host": {"ranks": 2, "machine": CLUSTER, **ON_HOST},
}


def found_for(drawn_: Blueprint) -> PredictedMemory:
    return predicted_memory(drawn_, make_plan(drawn_, Mode.TRAIN, drawn_.trace), drawn_.trace)


@pytest.mark.parametrize("name", list(RUNS))
def test_what_is_fixed_and_what_comes_beside_it(name: str) -> None:
    made = decided(**RUNS[name])
    found, plan = found_for(made), make_plan(made, Mode.TRAIN, made.trace)
    for tier in TIERS:
        rows = [row for row in made.inventory.rows if row.tier is tier and row.lifetime is not Lifetime.PASSING]
        whole = sum(row.count * row.bytes_each for row in rows)
        assert whole <= found.fixed[tier] <= whole + PAGE * len(rows)
        assert found.fixed[tier] % PAGE == 0
    fixed = found.fixed[Tier.DEVICE]
    pages = VirtualRun(made).run(plan, made.trace)
    order = [0, 1, 2, 3, 7, 4, 5, 6, 8]  # the first iteration leaves its plan
    happens = Trace(tuple(made.trace.ticks[at] for at in order[:-1]))
    first = VirtualRun(made).run(plan, happens, made.trace)
    pages = [max(pages[at], first[order.index(at)]) for at in range(9)]
    assert found.device_per_tick == tuple(fixed + PAGE * each for each in pages)
    assert len(found.device_per_tick) == len(made.trace.ticks) + 1


def test_the_worst_of_the_first_iteration_and_the_others_counts() -> None:
    made = decided(machine=CLUSTER, ranks=2, **ON_HOST)
    assert [size // PAGE for size in found_for(made).device_per_tick] == [12, 12, 10, 9, 12, 10, 6, 7, 1]


def test_tiers_without_a_plan_are_as_full_all_the_time() -> None:
    made = decided(device_memory=16 * PAGE, **ON_HOST)
    found = found_for(made)
    assert found.per_tick(Tier.HOST) == (found.fixed[Tier.HOST],) * 9
    assert found.peak(Tier.HOST) == found.fixed[Tier.HOST] == 28 * PAGE
    assert found.per_tick(Tier.DEVICE) == found.device_per_tick
    assert found.peak(Tier.DEVICE) == max(found.device_per_tick) == 10 * PAGE
    assert found.peak(Tier.DISK) == 0


def test_a_run_in_ram_takes_what_is_added_up_here() -> None:
    """Seven pages of parameters, twice as many of moments."""
    found = found_for(decided())
    assert found.device_per_tick == (21 * PAGE,) * 9
    assert found.fixed == {Tier.DEVICE: 21 * PAGE, Tier.HOST: 0, Tier.DISK: 0}


@pytest.mark.parametrize(
    ("options", "pages"),
    [
        ({}, 7),  # all of them wait for the step
        ({"ranks": 2, "machine": CLUSTER}, 0),  # they are in pages
        ({"ranks": 2, "machine": CLUSTER, "tuning": {"reduce_gradients": "each_step"}}, 7),
        ({"device_memory": 16 * PAGE, **ON_HOST}, 0),
        (ON_DISK, 7),  # the room is larger
    ],
)
def test_gradients_beside_the_pages(options: dict[str, Any], pages: int) -> None:
    assert found_for(decided(**options)).gradients_beside == pages * PAGE


@pytest.mark.parametrize(("room", "pages"), [(0, 1 + 2 * 5), (10, 1 + 2 * 5), (12, 1 + 12), (40, 16)])
def test_behind_the_backward_as_many_wait_as_there_is_room_for(room: int, pages: int) -> None:
    """The root's, and those of two units at least."""
    made = dataclasses.replace(decided(Net(5), **ON_DISK), gradient_room_bytes=room * PAGE)
    assert not made.outlive_backward
    assert found_for(made).gradients_beside == pages * PAGE


def test_frozen_units_have_none() -> None:
    module = Net(3)
    module.blocks[2].requires_grad_(False)
    assert found_for(decided(module)).gradients_beside == 4 * PAGE


@dataclasses.dataclass(frozen=True)
class Decisions:
    """What matters of a blueprint that was decided for some bytes beside pages, of 1,000 in all."""

    beside_bytes: int
    pages: int
    states: int = 0
    keeps_gradients: bool = False

    @property
    def placement(self) -> Any:
        return SimpleNamespace(keeps_gradients=self.keeps_gradients, at_home_bytes={Tier.DEVICE: self.states})

    @property
    def device_limit_bytes(self) -> int:
        return 1000 - self.beside_bytes

    @property
    def pool_bytes(self) -> dict[Tier, int]:
        return {Tier.DEVICE: self.pages}


@pytest.mark.parametrize(
    ("pages", "gradients", "asked"),
    [
        (lambda beside: 860, lambda beside: 40, [100]),  # homes count gradients: both fit
        (lambda beside: 900 - beside + 100, lambda beside: 40, [100, 140]),
        (lambda beside: 1000 - beside, lambda beside: 40 if beside < 130 else 60, [100, 140, 160]),
        (lambda beside: 880 if beside <= 120 else 800, lambda beside: 23, [100, 103, 123]),  # units leave as a whole
        (lambda beside: 1000 - beside, lambda beside: beside, None),  # the more is left, the more of them wait
    ],
)
def test_pages_leave_memory_to_the_gradients_of_the_layout_that_follows(
    monkeypatch: pytest.MonkeyPatch, pages: Any, gradients: Any, asked: list[int] | None
) -> None:
    """100 bytes were traced beside pages and gradients."""
    monkeypatch.setattr(module, "gradients_beside", lambda made, **_: gradients(made.beside_bytes))
    monkeypatch.setattr(module, "gradients_at_peak", lambda made, below, **_: gradients(made.beside_bytes))
    seen: list[int] = []

    def decided_for(beside: int) -> Any:
        seen.append(beside)
        return Decisions(beside, pages(beside))

    found: Any = decided_beside(decided_for, 100)
    assert (None if found is None else found[0].beside_bytes) == (None if asked is None else asked[-1])
    assert found is None or found[1] == found[0].beside_bytes
    assert asked is None or seen == asked


@pytest.mark.parametrize(
    ("pages", "at_peak", "asked", "best"),
    [
        (
            lambda beside: 960 - beside,
            10,
            [100, 70],
            70,
        ),  # homes count 40 bytes of gradients, and the peak has 10 of them
        (lambda beside: 860, 10, [100, 70], 100),  # units move as a whole: no more of them fits
        (
            lambda beside: 895 if beside < 80 else 875 if beside < 99 else 860,
            10,
            [100, 70, 85, 70, 77, 81],
            85,
        ),  # by halves
        (lambda beside: 857, 38, [100], 100),  # as good as nothing is left
    ],
)
def test_pages_get_what_gradients_do_not_take_at_the_peak(
    monkeypatch: pytest.MonkeyPatch, pages: Any, at_peak: int, asked: list[int], best: int
) -> None:
    """100 bytes were traced beside pages and gradients; homes count 40 bytes of gradients."""
    monkeypatch.setattr(module, "gradients_beside", lambda made, **_: 40)
    monkeypatch.setattr(module, "gradients_at_peak", lambda made, below, **_: at_peak)
    seen: list[int] = []

    def decided_for(beside: int) -> Any:
        seen.append(beside)
        return Decisions(beside, pages(beside))

    found: Any = decided_beside(decided_for, 100, bool, {frozenset(): 0})
    assert (found[0].beside_bytes, found[1], seen) == (best, best, asked)


@pytest.mark.parametrize(("further", "at_peak", "best"), [(90, 10, 85), (90, 60, 100), (80, 10, 100)])
def test_a_further_unit_has_its_home_where_only_its_gradients_in_grad_lack_room(
    monkeypatch: pytest.MonkeyPatch, further: int, at_peak: int, best: int
) -> None:
    """Homes count 15 bytes of gradients of each unit, which are in no page. With so many bytes more, states of a further unit
    (`further` of 80 bytes in all) fit, and pages do not take more than before."""
    monkeypatch.setattr(module, "gradients_beside", lambda made, **_: 10)
    monkeypatch.setattr(
        module, "gradients_at_peak", lambda made, below, **_: 10 if made.beside_bytes == 100 else at_peak
    )
    monkeypatch.setattr(module, "_in_grad_by_unit", lambda made, **_: [5, 15, 15])
    seen: list[int] = []

    def decided_for(beside: int) -> Any:
        seen.append(beside)
        return Decisions(beside, 880, 80 if beside == 100 else further, keeps_gradients=True)

    found: Any = decided_beside(decided_for, 100, bool, {frozenset(): 0})
    assert (found[0].beside_bytes, found[1], seen) == (best, best, [100, 85])


def test_gradients_raise_the_peak_where_activations_leave_them_no_room() -> None:
    """Each of three units has one page of gradients, the root as well; one page more is for an update."""
    made = decided()
    in_grad = gradients_beside(made) // PAGE
    assert in_grad == 7 and gradients_at_peak(made, None) == in_grad * PAGE
    units = frozenset(range(len(made.units)))
    most = max(gradients_at_peak(made, {frozenset({unit}): 0}) for unit in units) // PAGE
    nothing = gradients_at_peak(made, {frozenset(): 0, units: 7 * PAGE})
    assert 0 < nothing < most * PAGE <= 2 * nothing
    assert gradients_at_peak(made, {frozenset(): 0, units: 5 * PAGE}) == nothing + 2 * PAGE
    assert gradients_at_peak(made, {units: 0}) == in_grad * PAGE


@pytest.mark.parametrize("blocks", [1, 3])
@pytest.mark.parametrize("fused", [True, False])
def test_updates_on_the_device_have_room_beside_all_gradients(blocks: int, fused: bool) -> None:
    """A cast gradient that is kept and, unless Adam is fused, two tensors in which it computes; the first step may have
    neither."""
    in_ram = decided(Net(blocks))
    on_device = [tuple(_on_device(each, fused=fused) for each in of) for of in in_ram.traits]
    made, units = dataclasses.replace(in_ram, traits=tuple(on_device)), frozenset(range(len(in_ram.units)))
    at_once = 4 * min(made.device_block_numel, max(flat.shard_numel for flat in made.trained_flats()))
    update = at_once if fused else 3 * at_once
    for below in (None, {units: 0}):
        assert gradients_at_peak(made, below) == gradients_at_peak(in_ram, below) + update
    least = gradients_at_peak(in_ram, {frozenset(): 0, units: 7 * PAGE})
    assert gradients_at_peak(made, {frozenset(): 0, units: 7 * PAGE}) == max(least, update)


def test_an_update_on_the_device_takes_a_small_share_of_its_memory_at_once() -> None:
    made = decided(Net(3))
    for limit, numel in ((1 << 20, PAGE // 4), (256 << 20, 1 << 18), (80 << 30, 1 << 24)):
        assert dataclasses.replace(made, device_limit_bytes=limit).device_block_numel == numel


def _on_device(traits: OptimizerTraits, *, fused: bool) -> OptimizerTraits:
    groups = tuple(dataclasses.replace(each, fused=fused) for each in traits.groups)
    return dataclasses.replace(traits, groups=groups, device=torch.device("cuda"))
