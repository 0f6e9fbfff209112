"""Settings that have an effect only together with another one are refused without it.

Each field of the settings is in one of three tables: `ALONE` (it has an effect whatever the other settings are), `OUTSIDE`
(its effect depends on the machine, the model or the Trainer, which one config file may be used with several of), or
`TOGETHER` (it needs another setting).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import pytest

from lightning_ptm.config import NESTED, Settings
from lightning_ptm.errors import ConfigError

ALONE = {
    "page_size",
    "host_memory",
    "disk_path",
    "offload_parameters",
    "offload_optimizer",
    "optimizer_state_dtype",
    "recompute",
    "slices",
    "units",
    "parallel",
    "lock_free",
    "lock_free.max_staleness",
    "weights",
    "weights.path",
    "weights.key_mapping",
    "weights.allow_missing",
    "weights.strict",
    "checkpoints",
    "checkpoints.state_dict_type",
    "checkpoints.on_failure",
    "checkpoints.resume",
    "tuning",
    "tuning.restore_weights",
    "debug",
    "debug.poison",
}
OUTSIDE = {
    "device_memory": "a CPU has a device tier only if it is given",
    "expert_parallel_size": "the Trainer's ranks, which it has to divide (refused), and experts",
    "context_parallel_size": "the Trainer's ranks, which it has to divide (refused)",
    "tensor_parallel_size": "the Trainer's ranks, which it has to divide (refused)",
    "pipeline_parallel_size": "the Trainer's ranks, which it has to divide (refused)",
    "frozen_dtype": "frozen matrices; without any there is a warning",
    "tuning.staging_memory": "a disk, or a GPU whose parameters are updated in RAM",
    "tuning.freed_memory": "a CPU",
    "tuning.matmul_precision": "a CPU, and 16-bit tensors",
    "tuning.reduce_gradients": "several ranks, and accumulation",
}

LAYERS = {"plan": {"blocks.0": "colwise"}}
DISK = {"disk_path": "/a"}
STAGES = {"pipeline_parallel_size": 2, "micro_batches": 4}
TOGETHER: list[tuple[str, Any, Mapping[str, Any], Mapping[str, Any]]] = [
    # a field, a value of it, settings without which it is refused, and settings beside which it is refused
    ("disk_memory", "1GiB", DISK, {}),
    ("disk_memory", "1GiB", {"lock_free": True}, {"offload_optimizer": "host"}),
    ("disk_memory", "1GiB", {"offload_parameters": "disk"}, {"lock_free": True, "offload_optimizer": "host"}),
    ("disk_tbw", "600TB", DISK, {}),
    ("disk_tbw", "600TB", {"lock_free": True}, {"offload_optimizer": "host"}),
    ("disk_tbw", "600TB", {"offload_optimizer": "disk"}, {"recompute": "all"}),
    ("offload_activations", "disk", DISK, {}),
    ("offload_activations", "disk", DISK, {"offload_optimizer": "disk"}),
    ("context_parallel", "ring", {"context_parallel_size": 2}, {}),
    ("context_parallel", "gather", {"context_parallel_size": 2}, {"tensor_parallel_size": 2}),
    ("tensor_parallel", LAYERS, {"tensor_parallel_size": 2}, {}),
    ("tensor_parallel.plan", LAYERS["plan"], {"tensor_parallel_size": 2}, {"context_parallel_size": 2}),
    ("tensor_parallel.sequence_parallel", True, {"tensor_parallel_size": 2}, {}),
    ("tensor_parallel.overlap", "two_batches", {"tensor_parallel_size": 2}, {}),
    ("micro_batches", 4, {"pipeline_parallel_size": 2}, {}),
    ("micro_batches", 4, {"pipeline_parallel_size": 2}, {"tensor_parallel_size": 2}),
    ("pipeline_schedule", "gpipe", STAGES, {}),
    ("pipeline_schedule", "breadth_first", STAGES, {"recompute": "all"}),
    ("pipeline_blocks", [3, 3], STAGES, {}),
    ("lock_free.warmup_steps", 10, {"lock_free": {"max_staleness": 2}}, {"lock_free": {"max_staleness": 0}}),
    (
        "checkpoints.async_save",
        True,
        {"checkpoints": {"state_dict_type": "sharded"}},
        {"checkpoints": {"on_failure": "warn"}},
    ),
]
DEFAULT = {"lock_free.predict_weights": "on by default: off, it changes numbers wherever steps may lag behind"}


def fields() -> set[str]:
    """The names of all settings, nested ones with the name of the setting that has them."""
    nested = {f"{outer}.{each.name}" for outer, cls in NESTED.items() for each in dataclasses.fields(cls)}
    return nested | {each.name for each in dataclasses.fields(Settings)}


def with_field(settings: Mapping[str, Any], name: str, value: Any) -> dict[str, Any]:
    outer, _, inner = name.partition(".")
    return {**settings, outer: {**settings.get(outer, {}), inner: value} if inner else value}


def test_each_setting_is_in_one_table() -> None:
    tables = [ALONE, set(OUTSIDE), {name for name, *_ in TOGETHER}, set(DEFAULT)]
    assert sum(map(len, tables)) == len(set().union(*tables))
    assert set().union(*tables) == fields()


@pytest.mark.parametrize(("name", "value", "needed", "beside"), TOGETHER)
def test_a_setting_without_effect_is_refused(
    name: str, value: Any, needed: Mapping[str, Any], beside: Mapping[str, Any]
) -> None:
    inner = name.rpartition(".")[2]
    with pytest.raises(ConfigError, match=rf"\b{inner}=.*; .*\b(give|use|leave)\b"):
        Settings.of(with_field(beside, name, value))
    Settings.of(with_field(needed, name, value))


@pytest.mark.parametrize("name", sorted(OUTSIDE))
def test_what_depends_on_the_machine_is_accepted(name: str) -> None:
    """One config file is used on several machines, and on other numbers of ranks."""
    values = {
        "device_memory": "1GiB",
        "frozen_dtype": "int8",
        "tuning.staging_memory": "1GiB",
        "tuning.freed_memory": "keep",
        "tuning.matmul_precision": "fp32",
        "tuning.reduce_gradients": "each_step",
    }
    needed = {"micro_batches": 4} if name == "pipeline_parallel_size" else {}
    Settings.of(with_field(needed, name, values.get(name, 2)))
