"""Budgets of pages in each tier, beside memory that is taken anyway."""

from __future__ import annotations

import dataclasses
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from decided_by_hand import CLUSTER, GIB, PAGE, WORKSTATION, Block, asked, decided
from torch import nn

from lightning_ptm.errors import CapacityError
from lightning_ptm.planning.placement_data import Budget
from lightning_ptm.runtime.deciding.budgets import with_headroom
from lightning_ptm.runtime.deciding.decide import decide
from lightning_ptm.runtime.deciding.gradient_route import Waits
from lightning_ptm.runtime.machine.machine import Machine
from lightning_ptm.terms import Tier

D, H, K = Tier.DEVICE, Tier.HOST, Tier.DISK
BF16, FP16, FP32, FP64 = torch.bfloat16, torch.float16, torch.float32, torch.float64


def sized(device: int, host: int = 0, disk: int = 0) -> Budget:
    return Budget({Tier.DEVICE: device, Tier.HOST: host, Tier.DISK: disk})


def budget(machine: Machine, **settings: Any) -> Budget:
    return decided(machine=machine, **settings).budget


@pytest.mark.parametrize(
    ("free", "ranks", "expected"),
    [
        (24 * GIB, 1, int(24 * GIB * 0.8)),
        (24 * GIB, 4, int(6 * GIB * 0.8)),
        (5 * GIB - 1, 1, 4 * GIB - 1),  # a reserve of 1 GiB is left
    ],
)
def test_ram_that_pages_may_take(free: int, ranks: int, expected: int) -> None:
    machine = dataclasses.replace(WORKSTATION, free_host_bytes=free, ranks=ranks)
    assert budget(machine) == sized(expected)
    assert budget(machine, host_memory="100MiB") == sized(100 << 20)
    # A device tier of its own is beside RAM.
    assert budget(machine, device_memory="8MiB") == sized(8 << 20, expected)


def test_device_and_disk_that_pages_may_take() -> None:
    ram = int(6 * GIB * 0.8)
    assert budget(CLUSTER) == sized(4 * GIB // 16, ram), (
        "the least with which a plan is possible, before a step was traced"
    )
    assert budget(CLUSTER, device_memory="3GiB", host_memory="1GiB") == sized(3 * GIB, GIB)
    assert budget(CLUSTER, disk_path="/d") == sized(4 * GIB // 16, ram, int((1 << 40) * 0.95 / 4))
    assert budget(CLUSTER, disk_path="/d", disk_memory="1GiB") == sized(4 * GIB // 16, ram, GIB)
    with pytest.raises(CapacityError, match="device_memory is 5 GiB and the device has 4 GiB free"):
        budget(CLUSTER, device_memory="5GiB")


def test_pages_take_what_a_traced_step_leaves_of_the_device() -> None:
    usable = int(4 * GIB * (1 - 1 / 64))
    request = dataclasses.replace(asked(), beside_bytes=3 * GIB)
    assert decide(request, CLUSTER, 1).budget[Tier.DEVICE] == usable - 3 * GIB
    # What this process's tensors take now is part of the traced step, and not free.
    taken = dataclasses.replace(CLUSTER, taken_device_bytes=GIB)
    assert decide(request, taken, 1).budget[Tier.DEVICE] == usable - 2 * GIB
    assert decide(request, CLUSTER.with_more(0, 0, GIB), 1).budget[Tier.DEVICE] == int(5 * GIB * (1 - 1 / 64)) - 4 * GIB
    assert with_headroom(3200, varies=False) == 3300 and with_headroom(3200, varies=True) == 4000


def test_the_least_device_memory_in_which_a_step_has_worked_is_tried_first() -> None:
    """Another size may be refused, or accepted and too little for a run that departs from its plan. It is there, too, where
    the traced step seems to leave less than a plan needs."""

    def least(known_bytes: int) -> int:
        return decide(dataclasses.replace(asked(), least_bytes=known_bytes), CLUSTER, 1).device_limit_bytes

    assert least(2 * GIB + 1) == 2 * GIB + 1
    assert least(GIB // 8) == GIB // 8
    for does_not_work in (0, PAGE, 4 * GIB):
        assert least(does_not_work) == GIB // 4
    followed = dataclasses.replace(asked(), beside_bytes=4 * GIB)
    with pytest.raises(CapacityError):
        decide(followed, CLUSTER, 1)
    assert decide(dataclasses.replace(followed, least_bytes=GIB), CLUSTER, 1).device_limit_bytes == GIB


def test_a_run_that_trains_nothing_has_half_of_the_device() -> None:
    request = dataclasses.replace(asked(), optimizers=[])
    assert decide(request, CLUSTER, 1).budget[Tier.DEVICE] == 2 * GIB


def test_budgets_are_what_all_ranks_agree_on() -> None:
    least = sized(6 << 30)
    found = decide(asked(), WORKSTATION, 1, lambda ours: least if ours[Tier.DEVICE] > least[Tier.DEVICE] else ours)
    assert found.budget == least


def stages_refused(pages: int) -> list[str]:
    """Returns, by rank, why stages of one and of two blocks do not fit into so many pages; empty where they do."""
    offered, together = [sized(0), sized(0)], threading.Barrier(2, timeout=60)

    def of_rank(rank: int) -> str:
        def agree(ours: Budget) -> Budget:
            offered[rank] = ours
            together.wait()
            least = Budget({tier: min(each[tier] for each in offered) for tier in ours})
            together.wait()
            return least

        settings = {"pipeline_parallel_size": 2, "micro_batches": 2, "pipeline_blocks": [1, 2]}
        try:
            decide(asked(device_memory=pages * PAGE, **settings), WORKSTATION, 2, agree, rank=rank)
        except CapacityError as error:
            return str(error)
        return ""

    with ThreadPoolExecutor(2) as ranks:
        return list(ranks.map(of_rank, range(2)))


def test_stages_of_different_sizes_are_refused_together() -> None:
    found = [stages_refused(pages) for pages in (2, 4, 6, 8, 64)]
    assert all(bool(one) == bool(other) for one, other in found)
    assert found[0][0] and not found[-1][0]
    # Rank 1 has the first stage, whose one block would fit.
    assert any("another pipeline stage" in small and "another pipeline stage" not in large for large, small in found)


@pytest.mark.parametrize("disk", [{}, {"disk_path": "/d"}])
@pytest.mark.parametrize(("free", "whole"), [(4 * GIB, 3 * GIB), (2 * GIB, 2 * GIB * 7 // 8), (256 << 20, 224 << 20)])
def test_where_ram_is_short_pages_take_a_quarter_of_it(free: int, whole: int, disk: dict[str, Any]) -> None:
    """The memory of a step in addition to pages is not known yet."""
    machine = dataclasses.replace(WORKSTATION, free_host_bytes=free)
    found = budget(machine, **disk)[Tier.DEVICE]
    assert (
        found == whole - (whole - whole * 8 // 28) and budget(machine, host_memory=whole, **disk)[Tier.DEVICE] == whole
    )


def test_where_ram_is_very_short_it_is_the_first_part_that_does() -> None:
    machine = dataclasses.replace(WORKSTATION, free_host_bytes=2 << 20)
    whole = (2 << 20) * 7 // 8
    found = budget(machine, disk_path="/d", offload_optimizer="disk", offload_parameters="disk")[Tier.DEVICE]
    parts = [whole * part // 28 for part in range(8, 29)]
    assert found in parts[1:]
    for size in parts[: parts.index(found)]:
        with pytest.raises(CapacityError):
            budget(machine, host_memory=size, disk_path="/d", offload_optimizer="disk", offload_parameters="disk")


def test_whole_gradients_are_taken_off_the_budget() -> None:
    shards = budget(CLUSTER, ranks=2)
    assert budget(CLUSTER, ranks=2, tuning={"reduce_gradients": "each_step"}) == shards.without(Tier.DEVICE, 7 * PAGE)
    assert budget(CLUSTER, tuning={"reduce_gradients": "each_step"}) == budget(CLUSTER)  # one rank reduces nothing
    assert decided(machine=CLUSTER, ranks=2, tuning={"reduce_gradients": "each_step"}).reduced_at_step
    assert not decided(machine=CLUSTER, ranks=2).reduced_at_step
    assert not decided(machine=CLUSTER, tuning={"reduce_gradients": "each_step"}).reduced_at_step
    with pytest.raises(CapacityError, match=r"keeps 448 KiB of gradients whole .* pages may take 448 KiB"):
        decided(machine=CLUSTER, ranks=2, tuning={"reduce_gradients": "each_step"}, device_memory=7 * PAGE)


@pytest.mark.parametrize(
    ("staging", "host", "chunks"),
    [
        ("auto", 24 * GIB, 7),  # as many as the model has
        (4 * PAGE, 24 * GIB, 1),
        (11 * PAGE, 24 * GIB, 2),
        ("auto", 8 * 4 * PAGE * 5, 5),  # an eighth of RAM
        ("auto", 48 * PAGE, 2),  # but two there are
    ],
)
def test_chunks_in_flight(staging: object, host: int, chunks: int) -> None:
    """Chunks have four pages each: parameter, gradient and two moments."""
    found = decided(disk_path="/d", offload_optimizer="disk", tuning={"staging_memory": staging}, host_memory=host)
    assert found.staging_chunks == chunks


@pytest.mark.parametrize(
    ("staleness", "forecast", "forecasts"), [(1, True, True), (0, True, False), (1, False, False), (8, True, True)]
)
def test_forecasts_are_for_what_may_be_lacking(staleness: int, forecast: bool, forecasts: bool) -> None:
    warmup = 5 if staleness else 0
    settings = {
        "lock_free": {"max_staleness": staleness, "predict_weights": forecast, "warmup_steps": warmup},
    }
    found = decided(disk_path="/d", **settings).lock_free
    assert found is not None
    assert (found.warmup, found.predicts, found.max_staleness) == (warmup, forecasts, staleness)


@pytest.mark.parametrize(("cores", "ranks", "ours", "updates"), [(8, 1, 8, 4), (8, 4, 2, 1), (2, 4, 1, 1)])
def test_cores_of_updates(cores: int, ranks: int, ours: int, updates: int) -> None:
    machine = dataclasses.replace(WORKSTATION, cores=cores, ranks=ranks)
    found = decided(machine=machine, lock_free=True, disk_path="/d").lock_free
    assert found is not None and (found.cores_in_all, found.cores) == (ours, updates)


@pytest.mark.parametrize(
    ("options", "count", "waits"),
    [
        ({}, 0, Waits.IN_GRAD),
        ({"device_memory": "8MiB"}, 2, Waits.QUEUED),
        ({"compute": BF16, "mixed": True, "sums_gradients": True}, 2, Waits.QUEUED),
    ],
)
@pytest.mark.parametrize("keep", [False, True])
def test_gradients_that_travel_have_pages(options: dict[str, Any], count: int, waits: Waits, keep: bool) -> None:
    """Pages of each size are for flats that wait (twice where they outlive the pass), for versions in the making, and
    one more."""
    module = nn.Module()
    module.blocks = nn.ModuleList(Block(1) for _ in range(2))
    found = decided(module, lock_free=True, disk_path="/d", keep_gradients=keep, **options)
    assert found.lock_free is not None
    assert [row.count for row in found.lock_free.spares] == [2]
    assert [row.count for row in found.lock_free.gradients] == ([(count * 2 if keep else count) + 3] if count else [])
    assert {route.waits for route in found.routes if route is not None} == {waits}


@pytest.mark.parametrize("parameters", ["host", "disk"])
@pytest.mark.parametrize("optimizer", ["auto", "host", "disk"])
@pytest.mark.parametrize("options", [{}, {"keep_gradients": True}, {"recompute": "all"}], ids=str)
def test_what_fits_a_device_fits_a_larger_one(parameters: str, optimizer: str, options: dict[str, Any]) -> None:
    """Also where a page more lets the homes change, so that buffers of states on disk take more than this page."""

    def fits(pages: int) -> bool:
        homes = {"offload_parameters": parameters, "offload_optimizer": optimizer, "disk_path": "/d"}
        try:
            decided(machine=CLUSTER, device_memory=pages * PAGE, host_memory="64MiB", **homes, **options)
        except CapacityError:
            return False
        return True

    accepted = [pages for pages in range(3, 40) if fits(pages)]
    assert accepted == [*range(accepted[0], 40)]
