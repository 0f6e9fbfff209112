"""Settings translated to the names that earlier versions of this project gave them, so that a case can run with both.

I1: only names that the installed version does not have are translated.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

EARLIER_NAMES: Mapping[tuple[str, ...], str] = {
    ("offload_parameters",): "parameter_home",
    ("offload_optimizer",): "master_home",
    ("optimizer_state_dtype",): "state_dtype",
    ("offload_activations",): "activations",
    ("lock_free", "max_staleness"): "max_staleness",
    ("lock_free", "warmup_steps"): "staleness_warmup",
    ("lock_free", "predict_weights"): "forecast",
    ("weights", "path"): "weights",
    ("weights", "key_mapping"): "weights_map",
    ("weights", "allow_missing"): "weights_new",
    ("weights", "strict"): "weights_strict",
    ("checkpoints", "state_dict_type"): "state_dict_type",
    ("checkpoints", "async_save"): "async_save",
    ("checkpoints", "on_failure"): "failed_save",
    ("checkpoints", "resume"): "resume",
    ("tensor_parallel", "plan"): "tensor_parallel_plan",
    ("tensor_parallel", "sequence_parallel"): "sequence_parallel",
    ("tuning", "matmul_precision"): "half_products",
    ("tuning", "staging_memory"): "staging_memory",
    ("tuning", "freed_memory"): "freed_memory",
    ("tuning", "reduce_gradients"): "reduce_gradients",
    ("tuning", "restore_weights"): "restore_weights",
    ("debug", "poison"): "poison",
}
"""By the path of a setting: its name until 26 November 2026, when all settings were flat."""

EARLIER_VALUES: Mapping[tuple[str, object], object] = {
    ("activations", "none"): "keep",
    ("failed_save", "warn"): "go_on",
}
"""By an earlier name and today's value: the value until then."""

NESTED = ("weights", "checkpoints", "tensor_parallel", "tuning", "debug")
"""Settings that are dataclasses today; `lock_free` was a switch, and `weights` a path."""


def for_version(settings: Mapping[str, Any], known: Collection[str]) -> dict[str, Any]:
    """Returns `settings` as a version understands them.

    Args:
        settings: as they are today; nested ones as mappings.
        known: names of the version's settings.

    Raises:
        ValueError: the version has no setting for one of them.
    """
    if "tuning" in known:
        return dict(settings)
    found: dict[str, Any] = {}
    for name, value in settings.items():
        if name == "lock_free":
            found["lock_free"] = value is not False
        if isinstance(value, Mapping) and (name in NESTED or name == "lock_free"):
            for inner, each in value.items():
                _put(found, (name, inner), each, known)
        elif name != "lock_free":
            _put(found, (name,), value, known)
    return found


def _put(found: dict[str, Any], path: tuple[str, ...], value: Any, known: Collection[str]) -> None:
    name = path[0] if len(path) == 1 and path[0] in known else EARLIER_NAMES.get(path, "")
    if name not in known:
        raise ValueError(f"the other version has no setting for {'.'.join(path)}={value!r}: leave this case out")
    found[name] = EARLIER_VALUES.get((name, value), value) if isinstance(value, str) else value
