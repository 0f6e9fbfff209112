"""What is told of a run's decisions: of pages that are laid out, without the engine around them."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from decided_by_hand import PAGE, Net, decided, laid_out
from torch import nn

from lightning_ptm.comm import SoloCommunicator
from lightning_ptm.config import format_bytes
from lightning_ptm.planning.inventory import Lifetime
from lightning_ptm.runtime.deciding.planner import make_plan
from lightning_ptm.runtime.deciding.predicted_memory import predicted_memory
from lightning_ptm.runtime.engine.inspection import (
    PageUse,
    StateBytes,
    TierRoom,
    flat_names,
    inventory,
    optimizers_in_pages,
    planned_bytes,
    rooms,
    states_at_home,
    states_in_words,
)
from lightning_ptm.terms import TIERS, Mode, Tier

MIXED: dict[str, Any] = {"compute": torch.bfloat16, "mixed": True}
ON_HOST: dict[str, Any] = {"device_memory": "2MiB", "offload_parameters": "host", "offload_optimizer": "host"}
MASTERS_ON_DISK: dict[str, Any] = {"offload_optimizer": "disk", "disk_path": "/d"}


class Tail(Net):
    """Three pages and a bit, of which a page of parameters is frozen and one of fp64."""

    def __init__(self) -> None:
        super().__init__(1)
        self.blocks[0].requires_grad_(False)
        self.bias = nn.Parameter(torch.zeros(10, dtype=torch.float64))


@contextmanager
def engine_of(module: nn.Module, disk: Path, **options: Any) -> Iterator[Any]:
    """What is asked of an engine. `plans` are those that the executor follows, by mode."""
    with laid_out(decided(module, **options), [disk]) as made:
        plans: dict[Mode, Any] = {}
        yield SimpleNamespace(
            blueprint=made.blueprint,
            allocator=made.allocator,
            stores=made.stores,
            flats=made.flats,
            communicator=SoloCommunicator(),
            device=torch.device("cpu"),
            disk_paths=(Path("/fast"), Path("/slow")),
            executor=SimpleNamespace(plans=SimpleNamespace(planned=plans.get)),
            plans=plans,
        )


def test_states_at_home(disk: Path) -> None:
    """Of 65536-byte pages: fp32 masters and moments are twice a bf16 parameter."""
    with engine_of(Net(2), disk, **MIXED, **MASTERS_ON_DISK) as engine:
        assert states_at_home(engine) == (
            StateBytes("parameters", "device", 2 * PAGE, 3),
            StateBytes("master parameters", "disk", 4 * PAGE, 3),
            StateBytes("optimizer states", "disk", 8 * PAGE, 3),
        )
        words = states_in_words(engine)
        assert re.fullmatch(
            r"896 KiB of model states: 128 KiB in RAM \(parameters\), 768 KiB on disk in /fast \(/, .* free\), /slow "
            r"\(/, .* free\) \(master parameters, optimizer states\); pages take .* in RAM \(other than states: .*\)",
            words,
        )


def test_what_optimizers_update_and_keep(disk: Path) -> None:
    with engine_of(Net(2), disk, **MIXED, **MASTERS_ON_DISK) as engine:
        (found,) = optimizers_in_pages(engine.blueprint)
        assert (found.optimizer.split(".")[-1], found.kind, found.bytes) == ("Adam", "element-wise", 8 * PAGE)
    with engine_of(Net(2), disk, optimizers=torch.optim.Adafactor) as engine:
        (found,) = optimizers_in_pages(engine.blueprint)
        sizes = [slot.nbytes for of in engine.flats for flat in of for slot in flat.states.slots.values()]
        assert (found.kind, found.bytes) == ("whole parameters", sum(sizes))


def test_of_a_device_tier_and_kept_gradients(disk: Path) -> None:
    with engine_of(Net(2), disk, keep_gradients=True, **ON_HOST) as engine:
        assert [(row.states, row.tier, row.bytes // PAGE) for row in states_at_home(engine)] == [
            ("parameters", "host", 4),
            ("gradients", "host", 4),
            ("optimizer states", "host", 8),
        ]
        engine.communicator = SimpleNamespace(world_size=4, rank=2)
        whole = format_bytes(engine.blueprint.pool_bytes[Tier.DEVICE])
        assert states_in_words(engine).startswith(
            "1 MiB of model states (rank 2 of 4): 1 MiB in RAM (parameters, gradients, optimizer states); pages take "
        )
        assert whole in states_in_words(engine)


def test_what_is_frozen_has_no_states_and_units_are_counted_once(disk: Path) -> None:
    with engine_of(Tail(), disk) as engine:
        rows = {row.states: row for row in states_at_home(engine)}
        assert set(rows) == {"parameters", "optimizer states"}
        assert rows["parameters"].units == 2 and rows["optimizer states"].units == 1
        # The fp64 parameter takes a sector; its page's rest is nobody's.
        assert rows["parameters"].bytes == 2 * PAGE + 512
        assert rows["optimizer states"].bytes == 2 * PAGE + 2 * 512


def test_rooms_are_of_tiers_that_there_are(disk: Path) -> None:
    with engine_of(Net(2), disk, **ON_HOST) as engine:
        allocator = engine.allocator
        before = rooms(engine)
        assert [(room.tier, room.bytes) for room in before] == [
            ("device", allocator.capacity_bytes(Tier.DEVICE)),
            ("host", allocator.capacity_bytes(Tier.HOST)),
        ]
        assert [room.used_bytes for room in before] == [0, 12 * PAGE]
        taken = allocator.allocate("mine", 5, torch.float32, Tier.DEVICE)
        assert rooms(engine)[0] == TierRoom("device", before[0].bytes, PAGE)
        allocator.release(taken)


def test_what_pages_are_for(disk: Path) -> None:
    with engine_of(Net(2), disk, **MASTERS_ON_DISK) as engine:
        found = inventory(engine)
        assert PageUse("device", "parameters", 4 * PAGE) in found
        assert [use for use in found if use.tier == "disk"] == [PageUse("disk", "optimizer states", 8 * PAGE)]
        for tier in TIERS:
            whole = sum(use.bytes for use in found if use.tier == tier.name.lower())
            assert whole == engine.blueprint.inventory.held_bytes(tier, *Lifetime)


def test_names_of_flats(disk: Path) -> None:
    with engine_of(Tail(), disk) as engine:
        assert sorted(flat_names(engine).items()) == [(0, "root"), (1, "root (2)"), (2, "blocks.0")]


@pytest.mark.parametrize("mode", [Mode.TRAIN, Mode.FORWARD])
def test_planned_bytes_are_of_the_plan_that_is_followed(disk: Path, mode: Mode) -> None:
    with engine_of(Net(2), disk, **ON_HOST) as engine:
        assert planned_bytes(engine, mode) == ()
        made = engine.blueprint
        engine.plans[mode] = (make_plan(made, mode, made.trace), made.trace)
        expected = predicted_memory(made, *engine.plans[mode])
        device, host = planned_bytes(engine, mode)
        assert (device.tier, device.per_tick) == ("device", expected.device_per_tick)
        assert (device.room, device.budget) == (engine.allocator.capacity_bytes(Tier.DEVICE), 2 << 20)
        assert (host.tier, host.per_tick) == ("host", (expected.fixed[Tier.HOST],) * len(device.per_tick))
