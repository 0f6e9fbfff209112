"""Decisions about a run, for machines that need not exist."""

from __future__ import annotations

import dataclasses
import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
from decided_by_hand import CLUSTER, GIB, PAGE, WORKSTATION, adam, asked, decided

from lightning_ptm.comm import SoloCommunicator
from lightning_ptm.errors import CapacityError, ConfigError
from lightning_ptm.planning.inventory import What
from lightning_ptm.planning.placement_data import Budget, Homes
from lightning_ptm.runtime.deciding.blueprint import Blueprint
from lightning_ptm.runtime.deciding.decide import check_parameters, decide, decide_here
from lightning_ptm.runtime.machine.heap import Freed
from lightning_ptm.runtime.machine.machine import Machine
from lightning_ptm.terms import Tier

D, H, K = Tier.DEVICE, Tier.HOST, Tier.DISK
BF16, FP16, FP32, FP64 = torch.bfloat16, torch.float16, torch.float32, torch.float64


def sized(device: int, host: int = 0, disk: int = 0) -> Budget:
    return Budget({Tier.DEVICE: device, Tier.HOST: host, Tier.DISK: disk})


@pytest.mark.parametrize(
    ("machine", "settings", "homes", "unified"),
    [
        (WORKSTATION, {}, Homes(D, D, D), True),
        (WORKSTATION, {"offload_optimizer": "host", "offload_parameters": "host"}, Homes(D, D, D), True),
        (WORKSTATION, {"offload_optimizer": "disk", "disk_path": "/d"}, Homes(D, D, K), True),
        (WORKSTATION, {"device_memory": "8MiB", "offload_parameters": "host"}, Homes(H, H, H), False),
        (CLUSTER, {}, Homes(D, D, D), False),
        (CLUSTER, {"offload_optimizer": "host"}, Homes(D, H, H), False),  # the update runs on the host
    ],
)
def test_where_states_live(machine: Machine, settings: dict[str, Any], homes: Homes, unified: bool) -> None:
    found = decided(machine=machine, **settings)
    assert found.unified is unified and found.ram is (D if unified else H)
    assert set(found.placement.homes) == {homes}


@pytest.mark.parametrize("home", ["offload_parameters", "offload_optimizer"])
def test_a_home_on_no_disk_is_refused(home: str) -> None:
    with pytest.raises(ConfigError, match="is 'disk' and there is no disk_path"):
        decided(**{home: "disk"})


def test_what_does_not_fit_is_refused() -> None:
    with pytest.raises(CapacityError):
        decided(host_memory="1MiB")


def test_in_ram_updates_wait_for_the_step() -> None:
    """Where nothing is in RAM alone, they follow each unit's backward."""
    assert decided().outlive_backward
    assert not decided(disk_path="/d", offload_optimizer="disk").outlive_backward
    assert decided(disk_path="/d", offload_optimizer="disk", keep_gradients=True).outlive_backward


@pytest.mark.parametrize("keep", [False, True])
def test_lock_free_updates_get_gradients_behind_each_backward_where_nobody_keeps_them(keep: bool) -> None:
    assert decided(lock_free=True, disk_path="/d", keep_gradients=keep).outlive_backward is keep


def test_ranks_share_the_pages_and_nothing_else_differs() -> None:
    of_ranks = [decided(machine=CLUSTER, ranks=2, rank=rank) for rank in range(2)]
    assert of_ranks[0].layout == of_ranks[1].layout and of_ranks[0].inventory == of_ranks[1].inventory
    alone = decided(machine=CLUSTER)
    for ours, whole in zip(of_ranks[0].layout.flats, alone.layout.flats, strict=True):
        assert 2 * ours.shard_numel == whole.shard_numel


@pytest.mark.parametrize(
    ("settings", "error", "says"),
    [
        ({"offload_activations": "host"}, ConfigError, "this run computes on a CPU"),
        (
            {"lock_free": True, "disk_path": "/d", "device_memory": "8MiB", "offload_parameters": "device"},
            ConfigError,
            "lock_free=True keeps compute parameters in RAM",
        ),
        (
            {"lock_free": True, "disk_path": "/d", "device_memory": "8MiB", "offload_optimizer": "device"},
            ConfigError,
            "lock_free=True updates on the CPU",
        ),
        (
            {"lock_free": True, "disk_path": "/d", "host_memory": 7 * PAGE},
            CapacityError,
            "lock_free=True takes 448 KiB of RAM for .* in addition to parameters and gradients, and pages may take 448 KiB",
        ),
        (
            {"disk_path": "/d", "offload_optimizer": "disk", "tuning": {"staging_memory": 2 * PAGE}},
            ConfigError,
            r"staging_memory=\.\.\.\) is 128 KiB and one chunk of this optimizer's states takes 256 KiB",
        ),
    ],
)
def test_settings_that_cannot_work(settings: dict[str, Any], error: type[Exception], says: str) -> None:
    with pytest.raises(error, match=says):
        decided(**settings)


@pytest.mark.parametrize(("machine", "trains", "goes"), [(CLUSTER, True, True), (CLUSTER, False, False)])
def test_activations_go_to_the_host_where_something_trains(machine: Machine, trains: bool, goes: bool) -> None:
    found = decided(None, adam if trains else [], machine=machine, offload_activations="host")
    assert found.activations_to is (Tier.HOST if goes else None)


def test_equal_questions_have_equal_answers() -> None:
    def plain(found: Blueprint) -> dict[str, Any]:
        left_out = ("units", "traits")  # these name the model and the optimizer
        return {each.name: getattr(found, each.name) for each in dataclasses.fields(found) if each.name not in left_out}

    for machine, ranks in itertools.product((WORKSTATION, CLUSTER), (1, 2)):
        assert plain(decided(machine=machine, ranks=ranks)) == plain(decided(machine=machine, ranks=ranks))


@pytest.mark.parametrize("mixed", [False, True])
def test_a_checked_layout_is_not_made_again(mixed: bool) -> None:
    request = asked(mixed=mixed)
    checked = check_parameters(request, SoloCommunicator())
    found = decide(request, WORKSTATION, 1, checked=checked)
    assert found.layout is checked.model.layout and found.traits == checked.model.traits
    expected = decide(request, WORKSTATION, 1)
    assert found == dataclasses.replace(expected, traits=found.traits)


def test_here_it_is_this_machine(tmp_path: Path) -> None:
    found = decide_here(
        asked(device_memory="8MiB", host_memory="8MiB", disk_path=tmp_path, disk_memory="1MiB"), SoloCommunicator(), 1
    )
    assert found.budget == sized(8 << 20, 8 << 20, 1 << 20)
    with pytest.raises(ConfigError):
        decide_here(asked(disk_path=tmp_path / "missing" / "x"), SoloCommunicator(), 1)


def test_an_evaluation_has_no_states() -> None:
    found = decided(None, [], disk_path="/d", lock_free=True)
    assert found.lock_free is None and set(found.traits) == {()} and found.staging_chunks == 1
    assert found.trace.ticks and all(tick.phase.value == "forward" for tick in found.trace.ticks)


@pytest.mark.parametrize(
    ("settings", "chunks"),
    [
        ({"machine": CLUSTER}, 3),
        ({"machine": CLUSTER, "host_memory": 24 * PAGE}, 3),
        ({"machine": CLUSTER, "host_memory": 23 * PAGE}, 2),
        ({"machine": CLUSTER, "host_memory": 22 * PAGE}, 1),
        ({"machine": CLUSTER, "tuning": {"staging_memory": 2 * PAGE}}, 2),
        ({"device_memory": 64 * PAGE}, 1),  # copies of a CPU do not go on beside it
    ],
)
def test_between_a_device_and_ram_as_many_chunks_as_there_is_room_for(settings: dict[str, Any], chunks: int) -> None:
    """A page each, of parameters; the homes take 14 pages of moments and 7 of gradients."""
    found = decided(offload_parameters="device", offload_optimizer="host", **settings)
    assert found.staging_chunks == chunks
    assert found.inventory.by_what(Tier.HOST)[What.STAGING] == chunks * PAGE
    assert found.pool_bytes[Tier.HOST] <= found.budget[Tier.HOST]


@pytest.mark.parametrize("home", ["host", "device"])
def test_beside_a_device_gradients_of_two_units_wait_there(home: str) -> None:
    """Others have pages of their own in RAM, and wait as long as they like."""
    found = decided(machine=CLUSTER, offload_parameters="device", offload_optimizer=home)
    assert found.gradient_room_bytes == 2 * 3 * PAGE


MIXED = {"compute": torch.bfloat16, "mixed": True}


@pytest.mark.parametrize(
    ("freed", "free", "settings", "becomes"),
    [
        ("auto", GIB, {}, Freed.SMALL_STAYS),
        ("auto", 8 * GIB, MIXED, Freed.STAYS),
        ("auto", GIB, MIXED, Freed.SMALL_STAYS),  # holes are what a step may lack there
        ("auto", 2 * GIB, {"disk_path": "/d", "offload_optimizer": "disk"}, Freed.LEAVES),
        ("auto", 4 << 20, MIXED | {"host_memory": "4MiB"}, Freed.SMALL_STAYS),
        ("auto", GIB, MIXED | {"compute": torch.float32}, Freed.SMALL_STAYS),
        ("auto", GIB, MIXED | {"mixed": False}, Freed.SMALL_STAYS),
        ("auto", 24 * GIB, {"disk_path": "/d", "offload_optimizer": "disk"}, Freed.STAYS),
        ("auto", 8 << 20, {"disk_path": "/d", "offload_optimizer": "disk", "host_memory": "8MiB"}, Freed.LEAVES),
        ("keep", 8 << 20, {"disk_path": "/d", "offload_optimizer": "disk", "host_memory": "8MiB"}, Freed.STAYS),
        ("keep", GIB, {}, Freed.STAYS),
        ("return", 24 * GIB, {}, Freed.LEAVES),
    ],
)
def test_freed_memory(freed: str, free: int, settings: dict[str, Any], becomes: Freed) -> None:
    machine = dataclasses.replace(WORKSTATION, free_host_bytes=free)
    assert decided(machine=machine, tuning={"freed_memory": freed}, **settings).freed_memory is becomes
