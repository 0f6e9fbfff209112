"""Dtypes, groups, strides and optimizers of the parameters that a layout is made of."""

from __future__ import annotations

import pytest
import torch
from decided_by_hand import Net, adam, decided, sgd
from torch import nn

from lightning_ptm.errors import ConfigError, InternalError
from lightning_ptm.planning.inventory import What
from lightning_ptm.runtime.deciding.specs import compute_dtype, keeps_fp32
from lightning_ptm.terms import Tier

D, H, K = Tier.DEVICE, Tier.HOST, Tier.DISK
BF16, FP16, FP32, FP64 = torch.bfloat16, torch.float16, torch.float32, torch.float64


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
    found = decided(module, compute=BF16, mixed=True)
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
    found = decided(compute=BF16, mixed=True, sums_gradients=sums)
    assert set(found.gradient_dtypes) == {expected}


def test_lock_free_updates_need_masters_in_any_precision() -> None:
    assert set(decided(lock_free=True, disk_path="/d").master_dtypes) == {FP32}
    assert set(decided().master_dtypes) == {None}


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_parameter_of_two_optimizers(ranks: int) -> None:
    module = Net(2)
    first, second = sgd(list(module.parameters())), adam(list(module.blocks[1].parameters()))
    found = decided(module, [first, second], ranks=ranks)
    assert not found.unpaged_optimizers
    trained = {flat.slots[0].spec.name: flat for flat in found.trained_flats()}
    assert [trained[name].optimizers for name in sorted(trained)] == [(0,), (0, 1), (0,)]
    assert [len(found.traits[trained[name].index]) for name in sorted(trained)] == [1, 2, 1]
    assert [found.master_bytes_per_element[trained[name].index] for name in sorted(trained)] == [0, 8, 0]
    flat = trained["blocks.1.weight"]
    assert [row.numel for row in found.inventory.of_flat(What.STATES, flat.index)] == [flat.shard_numel] * 2
    assert len(found.inventory.of(What.STATES)) == 2


def test_a_parameter_that_one_optimizer_has_twice() -> None:
    module = Net(2)
    twice = sgd(list(module.parameters()))
    twice.param_groups[0]["params"].append(module.head)
    with pytest.raises(
        ConfigError, match=r"is in SGD twice, and each step updates it once; leave it in one group, once"
    ):
        decided(module, [twice])


def test_flats_have_one_optimizer_and_what_is_in_none_is_frozen() -> None:
    module = Net(2)
    found = decided(module, [sgd([module.head]), adam([module.blocks[0].weight])])
    slots = {slot.spec.name: slot.spec for flat in found.layout.flats for slot in flat.slots}
    assert [(slots[name].optimizer, slots[name].trainable) for name in sorted(slots)] == [
        (1, True),  # blocks.0
        (0, False),
        (0, True),  # head
    ]
    assert found.master_bytes_per_element == (0, 8, 0)


def test_dtypes_that_pages_do_not_hold() -> None:
    module = Net(1)
    module.codes = nn.Parameter(torch.zeros(3, dtype=torch.complex64))
    with pytest.raises(ConfigError, match=r"parameter codes is torch\.complex64"):
        decided(module, sgd)


LYING: dict[str, tuple[torch.Tensor, tuple[int, ...] | None]] = {
    "contiguous": (torch.zeros(4, 6), None),
    "transposed": (torch.zeros(4, 6).t(), (1, 6)),
    "channels_last": (torch.zeros(2, 3, 4, 5).to(memory_format=torch.channels_last), (60, 1, 15, 3)),
    "one long": (torch.zeros(6, 1).as_strided((6, 1), (1, 9)), (1, 9)),
    "expanded": (torch.zeros(()).expand(4, 6), None),
    "expanded to one element": (torch.zeros(()).expand(1), None),
    "expanded to one row of one": (torch.zeros(()).expand(1, 1), None),
}


@pytest.mark.parametrize("name", list(LYING))
def test_the_order_of_memory_is_kept(name: str) -> None:
    value, stride = LYING[name]
    module = nn.Module()
    module.weight = nn.Parameter(value)
    found = decided(module, sgd)
    assert found.layout.flats[0].slots[0].spec.stride == stride
    if stride is not None:
        with pytest.raises(ConfigError, match=r"parameter weight has strides .*state_dict_type='sharded'"):
            decided(module, sgd, checkpoints={"state_dict_type": "sharded"})


def test_gaps_between_elements_are_refused() -> None:
    module = nn.Module()
    module.weight = nn.Parameter(torch.zeros(4, 6)[:, :3])
    with pytest.raises(ConfigError, match=r"parameter weight of shape \(4, 3\) has strides \(6, 1\)"):
        decided(module, sgd)
