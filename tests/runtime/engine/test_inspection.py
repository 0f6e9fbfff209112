"""Descriptions of a run's decisions: of pages that are laid out, without the engine around them."""

from __future__ import annotations

import dataclasses
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
from lightning_ptm.memory.transfer import LinkStats
from lightning_ptm.planning.fetch_policy import Lookups
from lightning_ptm.planning.inventory import Lifetime
from lightning_ptm.runtime.deciding.planner import make_plan
from lightning_ptm.runtime.engine.inspection import (
    PageUse,
    StateBytes,
    TierRoom,
    audit,
    collect,
    flat_names,
    inventory,
    last_audit,
    optimizers_in_pages,
    planned_bytes,
    rooms,
    states_at_home,
    states_in_words,
    together,
)
from lightning_ptm.runtime.engine.predicted_memory import predicted_memory
from lightning_ptm.runtime.ranks.experts import TokenStats
from lightning_ptm.runtime.updates.audits import StalenessStats, UpdateAudit
from lightning_ptm.runtime.updates.lock_free import LockFreeUpdates
from lightning_ptm.terms import Mode, Tier

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
    """Yields the parts of an engine that the inspection reads. `plans` are those that the executor follows, by mode."""
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
    """Pages have 65536 bytes: fp32 masters and moments are twice a bf16 parameter."""
    with engine_of(Net(2), disk, **MIXED, **MASTERS_ON_DISK) as engine:
        assert states_at_home(engine) == (
            StateBytes("parameters", "host", 2 * PAGE, 3),
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
        assert PageUse("host", "parameters", 4 * PAGE) in found
        assert [use for use in found if use.tier == "disk"] == [PageUse("disk", "optimizer states", 8 * PAGE)]
        for tier in engine.blueprint.reported_tiers:
            whole = sum(use.bytes for use in found if use.tier == engine.blueprint.name_of(tier))
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


NOW = (UpdateAudit("layers.0", 3, 1, 2, 0),)

BEFORE = (UpdateAudit("layers.0", 1, 1, 0, 0),)


class Counted(LockFreeUpdates):
    """Updates of which nothing is there but what is told of them."""

    updates_per_step = 0.5  # type: ignore[assignment]

    def __init__(self) -> None:
        self.versions: Any = SimpleNamespace(stats=StalenessStats(reads=4, total=6, maximum=3, steps=2))
        self.last_audit = BEFORE

    def audit(self) -> tuple[UpdateAudit, ...]:
        return NOW


def engine(**parts: Any) -> Any:
    """Returns the parts of an engine that the inspection reads; synchronous updates, one rank's experts, no transfers
    of activations."""
    plain: dict[str, Any] = {
        "blueprint": SimpleNamespace(name_of=lambda tier: tier.name.lower()),
        "allocator": SimpleNamespace(
            stats=lambda: {
                (Tier.DISK, Tier.DEVICE): LinkStats(7, 1, 0.5),
                (Tier.HOST, Tier.DISK): LinkStats(0, 0, 0.0),
            },
            busy_s=lambda: 0.75,
            disk_written_bytes=lambda: (9,),
        ),
        "executor": SimpleNamespace(
            compute_timing=SimpleNamespace(stall_s={"fetch": 1.0, "update": 2.0}),
            fetching=SimpleNamespace(lookups=Lookups()),
        ),
        "updater": SimpleNamespace(in_thread=True, stats=SimpleNamespace(save_stall_s=8.0, arithmetic_s=16.0)),
        "updates": object(),
        "offload": None,
        "expert_groups": None,
        "save_stall_s": 4.0,
    }
    return SimpleNamespace(**plain | parts)


def test_of_a_plain_run() -> None:
    found = collect(engine())
    assert found.links == {"disk_to_device": LinkStats(7, 1, 0.5), "host_to_disk": LinkStats(0, 0, 0.0)}
    assert (found.busy_s, found.update_arithmetic_s, found.updates_per_step) == (0.75, 16.0, 1.0)
    assert (found.staleness, found.tokens) == (None, None)
    assert found.stall_s["fetch"] == 1.0 and found.stall_s["update"] == 2.0


@pytest.mark.parametrize(("in_thread", "save_s"), [(True, 4.0), (False, 12.0)])
def test_an_updating_threads_waits_for_saves_are_nobody_elses(in_thread: bool, save_s: float) -> None:
    updater = SimpleNamespace(in_thread=in_thread, stats=SimpleNamespace(save_stall_s=8.0, arithmetic_s=0.0))
    assert collect(engine(updater=updater)).stall_s["save"] == save_s


def test_links_of_activations_are_told_where_they_were_used() -> None:
    links = {"activations_to_host": LinkStats(5, 2, 0.1), "activations_to_device": LinkStats(0, 0, 0.0)}
    away = SimpleNamespace(links=lambda: links, disk_written_bytes=lambda: (4, 1))
    found = collect(engine(offload=away))
    assert set(found.links) == {"disk_to_device", "host_to_disk", "activations_to_host"}
    assert found.disk_written_bytes == (13, 1)


def test_numbers_of_one_moment() -> None:
    updates, tokens = Counted(), TokenStats(exchanges=1)
    made = engine(updates=updates, expert_groups=SimpleNamespace(stats=tokens))
    uses = made.executor.fetching.lookups
    found = collect(made)
    names = list(Lookups.__dataclass_fields__)
    for name in names:
        setattr(uses, name, getattr(uses, name) + 1)
    made.executor.compute_timing.stall_s["fetch"] = 9.0
    updates.versions.stats.reads = tokens.exchanges = 99
    assert found.uses == Lookups() and found.uses != uses
    assert found.stall_s["fetch"] == 1.0
    assert found.staleness == StalenessStats(reads=4, total=6, maximum=3, steps=2)
    assert found.tokens == TokenStats(exchanges=1)
    assert found.updates_per_step == 0.5


def test_audits_are_of_lock_free_updates() -> None:
    assert audit(engine()) == last_audit(engine()) == ()
    assert audit(engine(updates=Counted())) == NOW
    assert last_audit(engine(updates=Counted())) == BEFORE


@pytest.mark.parametrize(
    ("produced", "applied", "pending", "skipped", "balanced"),
    [(0, 0, 0, 0, True), (6, 1, 2, 3, True), (3, 3, 1, 0, False), (3, 1, 1, 0, False)],
)
def test_none_lost_and_none_twice(produced: int, applied: int, pending: int, skipped: int, balanced: bool) -> None:
    assert UpdateAudit("", produced, applied, pending, skipped).balanced is balanced


def test_a_run_that_was_laid_out_anew_is_told_of_as_one() -> None:
    before = collect(engine(updates=Counted()))
    assert together(None, before) is before
    after = dataclasses.replace(
        before,
        links={"host_to_disk": LinkStats(5, 2, 0.25), **before.links},
        staleness=StalenessStats(reads=1, total=9, maximum=9, steps=1),
        updates_per_step=0.25,
        tokens=None,
        disk_written_bytes=(3, 4),
    )
    before = dataclasses.replace(before, disk_written_bytes=(5,))  # on fewer disks
    both = together(before, after)
    assert both.links == {
        "host_to_disk": LinkStats(5, 2, 0.25),
        **{name: LinkStats(2 * link.bytes, 2 * link.transfers, 2 * link.busy_s) for name, link in before.links.items()},
    }
    assert both.stall_s == {cause: 2 * seconds for cause, seconds in before.stall_s.items()}
    assert (both.busy_s, both.update_arithmetic_s) == (2 * before.busy_s, 2 * before.update_arithmetic_s)
    assert both.uses == Lookups(2 * before.uses.kept, 2 * before.uses.ahead, 2 * before.uses.late)
    assert both.staleness == StalenessStats(reads=5, total=15, maximum=9, steps=3)
    assert both.updates_per_step == 0.25 and both.tokens == before.tokens
    assert both.disk_written_bytes == (8, 4)
