"""Runs that can do without pages."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from decided_by_hand import CLUSTER, PAGE, Net, decided, sgd

from lightning_ptm.errors import ConfigError
from lightning_ptm.terms import Tier

D, H, K = Tier.DEVICE, Tier.HOST, Tier.DISK
BF16, FP16, FP32, FP64 = torch.bfloat16, torch.float16, torch.float32, torch.float64


DOES_HARM: dict[str, dict[str, Any]] = {
    "mixed": {"mixed": True, "compute": BF16},
    "converted": {"compute": BF16},
    "several ranks": {"ranks": 2},
    "on disk": {"disk_path": "/d", "offload_optimizer": "disk"},
    "a device tier": {"device_memory": "64MiB"},
    "lock-free": {"disk_path": "/d", "lock_free": True},
    "sharded": {"checkpoints": {"state_dict_type": "sharded"}},
    "weights": {"weights": "/w"},
    "not restored": {"tuning": {"restore_weights": False}},
    "apart": {"machine": CLUSTER},
}


def test_a_run_that_rearranges_parameters_has_no_pages() -> None:
    plain, found = decided(), decided(rearranges=True)
    assert plain.may_be_outside and not plain.outside and not plain.unpaged_optimizers
    assert found.outside and found.may_be_outside and found.unpaged_optimizers == {0}
    assert all(not unit.parameters for unit in found.units) and not found.layout.flats


@pytest.mark.parametrize("name", list(DOES_HARM))
def test_but_where_that_does_harm(name: str) -> None:
    found = decided(rearranges=True, **DOES_HARM[name])
    assert not found.outside and not found.may_be_outside and found.layout.flats


def test_parameters_without_memory_need_pages() -> None:
    with torch.device("meta"):
        module = Net()
    assert not decided(module).may_be_outside


def lbfgs(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.LBFGS(parameters)


def test_an_optimizer_that_pages_cannot_have_steps_itself() -> None:
    found = decided(optimizers=lbfgs)
    assert found.unpaged_optimizers == {0} and not any(flat.trainable for flat in found.layout.flats)


@pytest.mark.parametrize("name", [name for name in DOES_HARM if name not in ("weights", "not restored", "converted")])
def test_and_is_refused_elsewhere(name: str) -> None:
    with pytest.raises(ConfigError, match="LBFGS"):
        decided(optimizers=lbfgs, **DOES_HARM[name])


def test_and_where_ram_does_not_hold_all() -> None:
    options: dict[str, Any] = {"disk_path": "/d", "host_memory": 20 * PAGE}
    assert {each.parameter for each in decided(Net(6), sgd, **options).placement.homes} > {D}
    with pytest.raises(ConfigError, match="LBFGS"):
        decided(Net(6), lbfgs, **options)
