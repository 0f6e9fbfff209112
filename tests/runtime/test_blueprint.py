"""What is decided of a run, for machines that need not be there."""

from __future__ import annotations

import dataclasses
import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
from drawn_by_hand import CLUSTER, GIB, PAGE, WORKSTATION, Block, Net, adam, asked, drawn, sgd
from torch import nn

from lightning_ptm.comm import SoloCommunicator
from lightning_ptm.errors import CapacityError, ConfigError, InternalError
from lightning_ptm.planning.homes import Budget, Homes
from lightning_ptm.planning.inventory import What
from lightning_ptm.runtime.blueprint import Blueprint, compute_dtype, decide, draw, keeps_fp32
from lightning_ptm.runtime.machine import Machine
from lightning_ptm.runtime.route import Waits
from lightning_ptm.terms import Tier

D, H, K = Tier.DEVICE, Tier.HOST, Tier.DISK
BF16, FP16, FP32, FP64 = torch.bfloat16, torch.float16, torch.float32, torch.float64


def sized(device: int, host: int = 0, disk: int = 0) -> Budget:
    return Budget({Tier.DEVICE: device, Tier.HOST: host, Tier.DISK: disk})


def budget(machine: Machine, **settings: Any) -> Budget:
    return drawn(machine=machine, **settings).budget


# -- dtypes -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("parameter", "compute", "mixed", "fp32", "expected"),
    [
        (FP32, FP32, False, False, FP32),
        (BF16, FP32, False, False, BF16),  # `32-true` converts nothing
        (FP64, FP32, False, True, FP64),
        (FP32, BF16, False, True, BF16),
        (FP64, BF16, False, False, BF16),
        (FP32, FP64, False, False, FP64),
        (FP32, BF16, True, False, BF16),
        (FP32, BF16, True, True, FP32),
        (BF16, FP16, True, True, FP32),
        (FP64, BF16, True, True, FP64),
    ],
)
def test_what_a_parameter_is_while_it_computes(
    parameter: torch.dtype, compute: torch.dtype, mixed: bool, fp32: bool, expected: torch.dtype
) -> None:
    assert compute_dtype(torch.zeros(1, dtype=parameter), compute, mixed=mixed, keeps_fp32=fp32) is expected


def test_modules_that_stay_in_fp32() -> None:
    class Router(nn.Linear):
        keep_in_fp32 = True

    class Odd(nn.Linear):
        keep_in_fp32 = "no"

    of_object = nn.Linear(1, 1)
    of_object.keep_in_fp32 = True  # type: ignore[assignment]
    modules = [nn.BatchNorm1d(1), nn.SyncBatchNorm(1), Router(1, 1), Odd(1, 1), of_object, nn.LayerNorm(1)]
    assert [keeps_fp32(each) for each in modules] == [True, True, True, False, False, False]


def test_masters_are_kept_beside_what_is_less_precise() -> None:
    module = Net(1)
    module.norm = nn.BatchNorm1d(4)
    module.frozen = nn.Linear(3, 3).requires_grad_(False)
    module.wide = nn.Parameter(torch.zeros(5, dtype=FP64))
    found = drawn(module, compute=BF16, mixed=True)
    names = {flat.slots[0].spec.name: flat.index for flat in found.layout.flats}
    by_name = {
        name: (found.dtypes[at], found.master_dtypes[at], found.copies[at], found.gradient_dtypes[at])
        for name, at in names.items()
    }
    assert by_name == {
        "head": (BF16, FP32, True, BF16),
        "norm.weight": (FP32, None, False, FP32),
        "frozen.weight": (BF16, None, True, BF16),
        "wide": (FP64, None, False, FP64),
        "blocks.0.weight": (BF16, FP32, True, BF16),
    }
    with pytest.raises(InternalError, match="is not trained, so it has no gradient"):
        found.route(found.layout.flats[names["frozen.weight"]])
    assert {flat.index for flat in found.trained_flats()} == set(names.values()) - {names["frozen.weight"]}


@pytest.mark.parametrize(("sums", "expected"), [(False, BF16), (True, FP32)])
def test_sums_of_gradients_are_fp32(sums: bool, expected: torch.dtype) -> None:
    found = drawn(compute=BF16, mixed=True, sums_gradients=sums)
    assert set(found.gradient_dtypes) == {expected}


def test_lock_free_updates_need_masters_in_any_precision() -> None:
    assert set(drawn(lock_free=True, disk_path="/d").master_dtypes) == {FP32}
    assert set(drawn().master_dtypes) == {None}


# -- budgets ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("free", "ranks", "expected"),
    [
        (24 * GIB, 1, int(24 * GIB * 0.8)),
        (24 * GIB, 4, int(6 * GIB * 0.8)),
        (4 * GIB, 1, 3 * GIB),  # a reserve of 1 GiB is left,
        (GIB, 1, GIB // 2),  # unless that were more than half
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
    assert budget(CLUSTER) == sized(2 * GIB, ram)
    assert budget(CLUSTER, device_memory="3GiB", host_memory="1GiB") == sized(3 * GIB, GIB)
    assert budget(CLUSTER, disk_path="/d") == sized(2 * GIB, ram, int((1 << 40) * 0.95 / 4))
    assert budget(CLUSTER, disk_path="/d", disk_memory="1GiB") == sized(2 * GIB, ram, GIB)
    assert budget(CLUSTER, disk_memory="1GiB") == sized(2 * GIB, ram)
    with pytest.raises(CapacityError, match="device_memory is 5 GiB and the device has 4 GiB free"):
        budget(CLUSTER, device_memory="5GiB")


def test_budgets_are_what_all_ranks_agree_on() -> None:
    least = sized(64 << 20)
    found = decide(asked(), WORKSTATION, 1, lambda ours: least if ours[Tier.DEVICE] > least[Tier.DEVICE] else ours)
    assert found.budget == least


# -- homes ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("machine", "settings", "homes", "unified"),
    [
        (WORKSTATION, {}, Homes(D, D, D), True),
        (WORKSTATION, {"master_home": "host", "parameter_home": "host"}, Homes(D, D, D), True),
        (WORKSTATION, {"master_home": "disk", "disk_path": "/d"}, Homes(D, D, K), True),
        (WORKSTATION, {"device_memory": "8MiB", "parameter_home": "host"}, Homes(H, H, H), False),
        (CLUSTER, {}, Homes(D, D, D), False),
        (CLUSTER, {"master_home": "host"}, Homes(D, D, H), False),
    ],
)
def test_where_states_live(machine: Machine, settings: dict[str, Any], homes: Homes, unified: bool) -> None:
    found = drawn(machine=machine, **settings)
    assert found.unified is unified and found.ram is (D if unified else H)
    assert {(each.parameter, each.master) for each in found.placement.homes} == {(homes.parameter, homes.master)}
    # A device apart hands gradients to the host at once where the update runs there.
    assert found.gradient_home(1) is (homes.gradient if unified or homes.master is D else H)


@pytest.mark.parametrize("home", ["parameter_home", "master_home"])
def test_a_home_on_no_disk_is_refused(home: str) -> None:
    with pytest.raises(ConfigError, match="is 'disk' and there is no disk_path"):
        drawn(**{home: "disk"})


def test_what_does_not_fit_is_refused() -> None:
    with pytest.raises(CapacityError):
        drawn(host_memory="1MiB")


def test_in_ram_updates_wait_for_the_step() -> None:
    """Where nothing is in RAM alone, they follow each unit's backward."""
    assert drawn().outlive_backward
    assert not drawn(disk_path="/d", master_home="disk").outlive_backward
    assert drawn(disk_path="/d", master_home="disk", keep_gradients=True).outlive_backward
    assert drawn(disk_path="/d", master_home="disk", update_in_backward=False).outlive_backward


@pytest.mark.parametrize("keep", [False, True])
def test_lock_free_updates_get_gradients_behind_each_backward_where_nobody_keeps_them(keep: bool) -> None:
    assert drawn(lock_free=True, disk_path="/d", keep_gradients=keep).outlive_backward is keep
    assert drawn(lock_free=True, disk_path="/d", update_in_backward=False).outlive_backward


def test_which_updates_are_late() -> None:
    module = Net(2)
    module.blocks[1].requires_grad_(False)
    in_ram, on_disk = drawn(module), drawn(module, disk_path="/d", master_home="disk")
    lock_free = drawn(module, disk_path="/d", lock_free=True)
    for unit, trained in enumerate((True, True, False)):
        assert not in_ram.updates_late(unit, apart=False)
        assert {each.updates_late(unit, apart=False) for each in (on_disk, lock_free)} == {trained}
        assert in_ram.updates_late(unit, apart=True) is trained


# -- several ranks ----------------------------------------------------------------------------------------------------


def test_ranks_share_the_pages_and_nothing_else_differs() -> None:
    of_ranks = [drawn(machine=CLUSTER, ranks=2, rank=rank) for rank in range(2)]
    assert of_ranks[0].layout == of_ranks[1].layout and of_ranks[0].inventory == of_ranks[1].inventory
    alone = drawn(machine=CLUSTER)
    for ours, whole in zip(of_ranks[0].layout.flats, alone.layout.flats, strict=True):
        assert 2 * ours.shard_numel == whole.shard_numel


def test_whole_gradients_are_taken_off_the_budget() -> None:
    shards = budget(CLUSTER, ranks=2)
    assert budget(CLUSTER, ranks=2, reduce_gradients="each_step") == shards.without(Tier.DEVICE, 7 * PAGE)
    assert budget(CLUSTER, reduce_gradients="each_step") == budget(CLUSTER)  # one rank reduces nothing
    assert drawn(machine=CLUSTER, ranks=2, reduce_gradients="each_step").reduced_at_step
    assert not drawn(machine=CLUSTER, ranks=2).reduced_at_step
    assert not drawn(machine=CLUSTER, reduce_gradients="each_step").reduced_at_step
    with pytest.raises(CapacityError, match=r"keeps 448 KiB of gradients whole .* have 448 KiB in all"):
        drawn(machine=CLUSTER, ranks=2, reduce_gradients="each_step", device_memory=7 * PAGE)


# -- without pages ----------------------------------------------------------------------------------------------------

DOES_HARM: dict[str, dict[str, Any]] = {
    "mixed": {"mixed": True, "compute": BF16},
    "converted": {"compute": BF16},
    "several ranks": {"ranks": 2},
    "on disk": {"disk_path": "/d", "master_home": "disk"},
    "a device tier": {"device_memory": "64MiB"},
    "lock-free": {"disk_path": "/d", "lock_free": True},
    "sharded": {"state_dict_type": "sharded"},
    "weights": {"weights": "/w"},
    "not restored": {"restore_weights": False},
    "apart": {"machine": CLUSTER},
}


def test_a_run_that_rearranges_parameters_has_no_pages() -> None:
    plain, found = drawn(), drawn(rearranges=True)
    assert plain.may_be_outside and not plain.outside and not plain.selfstepping
    assert found.outside and found.may_be_outside and found.selfstepping == {0}
    assert all(not unit.parameters for unit in found.units) and not found.layout.flats


@pytest.mark.parametrize("name", list(DOES_HARM))
def test_but_where_that_does_harm(name: str) -> None:
    found = drawn(rearranges=True, **DOES_HARM[name])
    assert not found.outside and not found.may_be_outside and found.layout.flats


def test_parameters_without_memory_need_pages() -> None:
    with torch.device("meta"):
        module = Net()
    assert not drawn(module).may_be_outside


# -- optimizers -------------------------------------------------------------------------------------------------------


def lbfgs(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.LBFGS(parameters)


def test_an_optimizer_that_pages_cannot_have_steps_itself() -> None:
    found = drawn(optimizers=lbfgs)
    assert found.selfstepping == {0} and not any(flat.trainable for flat in found.layout.flats)


@pytest.mark.parametrize("name", [name for name in DOES_HARM if name not in ("weights", "not restored", "converted")])
def test_and_is_refused_elsewhere(name: str) -> None:
    with pytest.raises(ConfigError, match="LBFGS"):
        drawn(optimizers=lbfgs, **DOES_HARM[name])


def test_and_where_ram_does_not_hold_all() -> None:
    options: dict[str, Any] = {"disk_path": "/d", "host_memory": 20 * PAGE}
    assert {each.parameter for each in drawn(Net(6), sgd, **options).placement.homes} > {D}
    with pytest.raises(ConfigError, match="LBFGS"):
        drawn(Net(6), lbfgs, **options)


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_parameter_of_two_optimizers(ranks: int) -> None:
    module = Net(2)
    first, second = sgd(list(module.parameters())), adam(list(module.blocks[1].parameters()))
    found = drawn(module, [first, second], ranks=ranks)
    assert not found.selfstepping
    trained = {flat.slots[0].spec.name: flat for flat in found.trained_flats()}
    assert [trained[name].optimizers for name in sorted(trained)] == [(0,), (0, 1), (0,)]
    assert [len(found.traits[trained[name].index]) for name in sorted(trained)] == [1, 2, 1]
    assert [found.master_bytes_per_element[trained[name].index] for name in sorted(trained)] == [0, 8, 0]
    states = found.inventory.of_flats(What.STATES)
    assert {index: [row.numel for row in rows] for index, rows in states.items()} == {
        (flat := trained["blocks.1.weight"]).index: [flat.shard_numel] * 2
    }


def test_a_parameter_that_one_optimizer_has_twice() -> None:
    module = Net(2)
    twice = sgd(list(module.parameters()))
    twice.param_groups[0]["params"].append(module.head)
    with pytest.raises(
        ConfigError, match=r"is in SGD twice, and each step updates it once; leave it in one group, once"
    ):
        drawn(module, [twice])


def test_flats_have_one_optimizer_and_what_is_in_none_is_frozen() -> None:
    module = Net(2)
    found = drawn(module, [sgd([module.head]), adam([module.blocks[0].weight])])
    slots = {slot.spec.name: slot.spec for flat in found.layout.flats for slot in flat.slots}
    assert [(slots[name].optimizer, slots[name].trainable) for name in sorted(slots)] == [
        (1, True),  # blocks.0
        (0, False),
        (0, True),  # head
    ]
    assert found.master_bytes_per_element == (0, 8, 0)


# -- parameters -------------------------------------------------------------------------------------------------------


def test_dtypes_that_pages_do_not_hold() -> None:
    module = Net(1)
    module.codes = nn.Parameter(torch.zeros(3, dtype=torch.complex64))
    with pytest.raises(ConfigError, match=r"parameter codes is torch\.complex64"):
        drawn(module, sgd)


LYING: dict[str, tuple[torch.Tensor, tuple[int, ...] | None]] = {
    "contiguous": (torch.zeros(4, 6), None),
    "transposed": (torch.zeros(4, 6).t(), (1, 6)),
    "channels_last": (torch.zeros(2, 3, 4, 5).to(memory_format=torch.channels_last), (60, 1, 15, 3)),
    "one long": (torch.zeros(6, 1).as_strided((6, 1), (1, 9)), (1, 9)),
    "expanded": (torch.zeros(()).expand(4, 6), None),
}


@pytest.mark.parametrize("name", list(LYING))
def test_the_order_of_memory_is_kept(name: str) -> None:
    value, stride = LYING[name]
    module = nn.Module()
    module.weight = nn.Parameter(value)
    found = drawn(module, sgd)
    assert found.layout.flats[0].slots[0].spec.stride == stride
    if stride is not None:
        with pytest.raises(ConfigError, match=r"parameter weight has strides .* state_dict_type='sharded'"):
            drawn(module, sgd, state_dict_type="sharded")


def test_gaps_between_elements_are_refused() -> None:
    module = nn.Module()
    module.weight = nn.Parameter(torch.zeros(4, 6)[:, :3])
    with pytest.raises(ConfigError, match=r"parameter weight of shape \(4, 3\) has strides \(6, 1\)"):
        drawn(module, sgd)


# -- settings that cannot work ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "error", "says"),
    [
        ({"activations": "host"}, ConfigError, "this run computes on a CPU"),
        (
            {"lock_free": True, "disk_path": "/d", "device_memory": "8MiB", "parameter_home": "device"},
            ConfigError,
            "lock_free=True keeps compute parameters in RAM",
        ),
        (
            {"lock_free": True, "disk_path": "/d", "device_memory": "8MiB", "master_home": "device"},
            ConfigError,
            "lock_free=True updates on the CPU",
        ),
        (
            {"lock_free": True, "disk_path": "/d", "host_memory": 7 * PAGE},
            CapacityError,
            "lock_free=True takes 448 KiB of RAM beside parameters and gradients, and pages have 448 KiB",
        ),
        (
            {"disk_path": "/d", "master_home": "disk", "staging_memory": 2 * PAGE},
            ConfigError,
            "staging_memory is 128 KiB and one chunk of this optimizer's states takes 256 KiB",
        ),
    ],
)
def test_settings_that_cannot_work(settings: dict[str, Any], error: type[Exception], says: str) -> None:
    with pytest.raises(error, match=says):
        drawn(**settings)


@pytest.mark.parametrize(("machine", "trains", "goes"), [(CLUSTER, True, True), (CLUSTER, False, False)])
def test_activations_go_to_the_host_where_something_trains(machine: Machine, trains: bool, goes: bool) -> None:
    found = drawn(None, adam if trains else [], machine=machine, activations="host")
    assert found.activations_to_host is goes


@pytest.mark.parametrize(
    ("staging", "host", "chunks"),
    [
        ("auto", 24 * GIB, 12),
        (4 * PAGE, 24 * GIB, 1),
        (11 * PAGE, 24 * GIB, 2),
        ("auto", 8 * 4 * PAGE * 5, 5),  # an eighth of RAM
        ("auto", 48 * PAGE, 2),  # but two there are
    ],
)
def test_chunks_in_flight(staging: object, host: int, chunks: int) -> None:
    """Of four pages each: parameter, gradient and two moments."""
    found = drawn(disk_path="/d", master_home="disk", staging_memory=staging, host_memory=host)
    assert found.staging_chunks == chunks


@pytest.mark.parametrize(
    ("settings", "chunks"),
    [
        ({"machine": CLUSTER}, 3),
        ({"machine": CLUSTER, "host_memory": 24 * PAGE}, 3),
        ({"machine": CLUSTER, "host_memory": 23 * PAGE}, 2),
        ({"machine": CLUSTER, "host_memory": 22 * PAGE}, 1),
        ({"machine": CLUSTER, "staging_memory": 2 * PAGE}, 2),
        ({"device_memory": 64 * PAGE}, 1),  # copies of a CPU do not go on beside it
    ],
)
def test_between_a_device_and_ram_as_many_chunks_as_there_is_room_for(settings: dict[str, Any], chunks: int) -> None:
    """A page each, of parameters; the homes take 14 pages of moments and 7 of gradients."""
    found = drawn(parameter_home="device", master_home="host", **settings)
    assert found.staging_chunks == chunks
    assert found.inventory.by_what(Tier.HOST)[What.STAGING] == chunks * PAGE
    assert found.pool_bytes[Tier.HOST] <= found.budget[Tier.HOST]


@pytest.mark.parametrize("keep", [False, True])
def test_gradients_in_pages_of_their_own_beside_a_device_wait_as_long_as_they_like(keep: bool) -> None:
    options: dict[str, Any] = {"parameter_home": "device", "master_home": "host", "keep_gradients": keep}
    found = drawn(machine=CLUSTER, **options)
    assert found.gradient_room_bytes == sum(flat.gradient_bytes for flat in found.trained_flats()) == 7 * PAGE
    in_grad = drawn(machine=CLUSTER, parameter_home="device", master_home="device")
    assert in_grad.gradient_room_bytes == 2 * 3 * PAGE


@pytest.mark.parametrize(
    ("freed", "free", "settings", "keeps"),
    [
        ("auto", GIB, {}, True),
        ("auto", 24 * GIB, {"disk_path": "/d", "master_home": "disk"}, True),
        ("auto", 8 << 20, {"disk_path": "/d", "master_home": "disk", "host_memory": "8MiB"}, False),
        ("keep", 8 << 20, {"disk_path": "/d", "master_home": "disk", "host_memory": "8MiB"}, True),
        ("return", 24 * GIB, {}, False),
    ],
)
def test_freed_memory(freed: str, free: int, settings: dict[str, Any], keeps: bool) -> None:
    machine = dataclasses.replace(WORKSTATION, free_host_bytes=free)
    assert drawn(machine=machine, freed_memory=freed, **settings).keep_freed_memory is keeps


# -- lock-free --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("staleness", "hold", "forecast", "reach", "forecasts", "held"),
    [
        (1, False, True, 2, True, False),
        (0, False, True, 2, False, False),
        (1, False, False, 2, False, False),
        (8, True, True, 2, False, True),
        (8, True, True, 7, False, True),
        (8, True, True, 8, True, True),
        (8, True, False, 8, False, True),
    ],
)
def test_forecasts_are_for_updates_that_are_not_held_or_reach_all_that_may_be_lacking(
    staleness: int, hold: bool, forecast: bool, reach: int, forecasts: bool, held: bool
) -> None:
    settings = {"max_staleness": staleness, "hold_updates": hold, "forecast": forecast, "forecast_reach": reach}
    found = drawn(lock_free=True, disk_path="/d", staleness_warmup=5, **settings)
    assert found.lock_free is not None and (found.lock_free.warmup, found.lock_free.reach) == (5, reach)
    assert (found.lock_free.forecast, found.lock_free.paced_steps > 1) == (forecasts, held)
    assert found.lock_free.max_staleness == staleness


@pytest.mark.parametrize(("cores", "ranks", "ours", "updates"), [(8, 1, 8, 4), (8, 4, 2, 1), (2, 4, 1, 1)])
def test_cores_of_updates(cores: int, ranks: int, ours: int, updates: int) -> None:
    machine = dataclasses.replace(WORKSTATION, cores=cores, ranks=ranks)
    found = drawn(machine=machine, lock_free=True, disk_path="/d").lock_free
    assert found is not None and (found.cores_in_all, found.cores) == (ours, updates)


@pytest.mark.parametrize(
    ("options", "count", "waits"),
    [
        ({}, 0, Waits.IN_GRAD),
        ({"device_memory": "8MiB"}, 2, Waits.TRAVELLING),
        ({"compute": BF16, "mixed": True, "sums_gradients": True}, 2, Waits.TRAVELLING),
    ],
)
@pytest.mark.parametrize("keep", [False, True])
def test_gradients_that_travel_have_pages(options: dict[str, Any], count: int, waits: Waits, keep: bool) -> None:
    """Of each size: those of flats that wait (twice where they outlive the pass), of versions in the making, one more."""
    module = nn.Module()
    module.blocks = nn.ModuleList(Block(1) for _ in range(2))
    found = drawn(module, lock_free=True, disk_path="/d", keep_gradients=keep, **options)
    assert found.lock_free is not None
    assert [row.count for row in found.lock_free.spares] == [2]
    assert [row.count for row in found.lock_free.gradients] == ([(count * 2 if keep else count) + 3] if count else [])
    assert {route.waits for route in found.routes if route is not None} == {waits}


# -- purity -----------------------------------------------------------------------------------------------------------


def test_equal_questions_have_equal_answers() -> None:
    def plain(found: Blueprint) -> dict[str, Any]:
        left_out = ("units", "traits")  # these name the model and the optimizer
        return {each.name: getattr(found, each.name) for each in dataclasses.fields(found) if each.name not in left_out}

    for machine, ranks in itertools.product((WORKSTATION, CLUSTER), (1, 2)):
        assert plain(drawn(machine=machine, ranks=ranks)) == plain(drawn(machine=machine, ranks=ranks))


def test_here_it_is_this_machine(tmp_path: Path) -> None:
    found = draw(
        asked(device_memory="8MiB", host_memory="8MiB", disk_path=tmp_path, disk_memory="1MiB"), SoloCommunicator(), 1
    )
    assert found.budget == sized(8 << 20, 8 << 20, 1 << 20)
    with pytest.raises(ConfigError):
        draw(asked(disk_path=tmp_path / "missing" / "x"), SoloCommunicator(), 1)


def test_an_evaluation_has_no_states() -> None:
    found = drawn(None, [], disk_path="/d", lock_free=True)
    assert found.lock_free is None and set(found.traits) == {()} and found.staging_chunks == 1
    assert found.trace.ticks and all(tick.phase.value == "forward" for tick in found.trace.ticks)
