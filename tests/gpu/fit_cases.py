"""Whole fits on the fake device: which choices there are, and the cases in which every two of them meet."""

from __future__ import annotations

from typing import Any

Case = tuple[str, ...]

SMALL = {"device_memory": "1MiB", "host_memory": "64MiB"}
"""A unit or two at once: others have to go."""
HOMES: dict[str, dict[str, Any]] = {
    "device": {"offload_parameters": "device", "offload_optimizer": "device"},
    "host": {"offload_parameters": "host", "offload_optimizer": "host", **SMALL},
    "masters on disk": {"offload_parameters": "host", "offload_optimizer": "disk", **SMALL},
    "all on disk": {"offload_parameters": "disk", "offload_optimizer": "disk", **SMALL},
}
UPDATES: dict[str, dict[str, Any]] = {"synchronous": {}, "lock-free": {"lock_free": {"max_staleness": 0}}}
SAVES: dict[str, dict[str, Any]] = {
    "none": {},
    "full": {"checkpoints": {"state_dict_type": "full"}},
    "sharded": {"checkpoints": {"state_dict_type": "sharded"}},
    "behind": {"checkpoints": {"state_dict_type": "sharded", "async_save": True}},
}
"""Settings of a checkpoint in the middle, from which another run resumes."""
CLIPS = {"free": None, "clipped": 0.1}
ACCUMULATED = {"each": 1, "by two": 2}


def settings_of(case: Case) -> dict[str, Any]:
    """Returns the settings of the strategy."""
    homes, updates, saves, _, recompute, activations, *_ = case
    return {
        **HOMES[homes],
        **UPDATES[updates],
        **SAVES[saves],
        "recompute": recompute,
        "offload_activations": "host" if activations == "host" else "none",
    }


CASES: list[Case] = [
    ("all on disk", "synchronous", "full", "experts", "none", "keep", "clipped", "each", "16-mixed"),
    ("all on disk", "synchronous", "behind", "dense", "all", "host", "free", "by two", "32-true"),
    ("all on disk", "synchronous", "none", "dense", "every 2nd", "keep", "clipped", "by two", "32-true"),
    ("all on disk", "synchronous", "sharded", "experts", "every 2nd", "host", "free", "by two", "bf16-mixed"),
    ("device", "synchronous", "sharded", "dense", "all", "keep", "free", "each", "bf16-mixed"),
    ("device", "synchronous", "behind", "experts", "all", "host", "clipped", "each", "16-mixed"),
    ("device", "synchronous", "full", "dense", "none", "host", "free", "each", "32-true"),
    ("device", "synchronous", "none", "experts", "none", "host", "free", "each", "16-mixed"),
    ("device", "synchronous", "sharded", "experts", "every 2nd", "host", "clipped", "by two", "16-mixed"),
    ("host", "lock-free", "behind", "experts", "none", "keep", "clipped", "each", "bf16-mixed"),
    ("host", "synchronous", "full", "dense", "all", "host", "free", "by two", "16-mixed"),
    ("host", "lock-free", "none", "dense", "every 2nd", "host", "free", "by two", "16-mixed"),
    ("host", "lock-free", "sharded", "experts", "every 2nd", "host", "free", "each", "32-true"),
    ("masters on disk", "lock-free", "full", "experts", "every 2nd", "keep", "clipped", "by two", "bf16-mixed"),
    ("masters on disk", "synchronous", "none", "dense", "none", "host", "free", "each", "16-mixed"),
    ("masters on disk", "lock-free", "behind", "dense", "all", "host", "clipped", "each", "32-true"),
    ("masters on disk", "synchronous", "sharded", "experts", "none", "keep", "free", "by two", "32-true"),
    ("device", "synchronous", "behind", "experts", "every 2nd", "host", "clipped", "each", "16-mixed"),
    ("all on disk", "synchronous", "none", "dense", "all", "keep", "clipped", "each", "bf16-mixed"),
]
"""Cases on one rank: home, updates, saves, model, recompute, activations, clip, accumulation, precision. Each pair of choices
is in some case."""
CASES_OF_RANKS: list[Case] = [
    ("all on disk", "synchronous", "sharded", "dense", "all", "keep", "free", "by two", "32-true"),
    ("all on disk", "synchronous", "behind", "experts", "every 2nd", "host", "clipped", "each", "bf16-mixed"),
    ("all on disk", "synchronous", "full", "divided", "none", "host", "free", "each", "32-true"),
    ("all on disk", "synchronous", "none", "dense", "all", "keep", "clipped", "each", "16-mixed"),
    ("device", "synchronous", "full", "divided", "every 2nd", "keep", "clipped", "by two", "16-mixed"),
    ("device", "synchronous", "behind", "dense", "every 2nd", "host", "free", "by two", "32-true"),
    ("device", "synchronous", "none", "experts", "none", "keep", "free", "each", "bf16-mixed"),
    ("device", "synchronous", "sharded", "experts", "none", "host", "free", "each", "16-mixed"),
    ("device", "synchronous", "full", "dense", "all", "host", "free", "by two", "bf16-mixed"),
    ("host", "lock-free", "behind", "divided", "none", "keep", "clipped", "by two", "bf16-mixed"),
    ("host", "synchronous", "none", "experts", "every 2nd", "host", "free", "by two", "32-true"),
    ("host", "lock-free", "full", "experts", "all", "host", "clipped", "each", "32-true"),
    ("host", "lock-free", "sharded", "dense", "every 2nd", "host", "clipped", "by two", "bf16-mixed"),
    ("host", "lock-free", "behind", "divided", "all", "keep", "clipped", "each", "16-mixed"),
    ("masters on disk", "lock-free", "none", "divided", "all", "keep", "free", "each", "bf16-mixed"),
    ("masters on disk", "synchronous", "sharded", "divided", "every 2nd", "host", "clipped", "by two", "16-mixed"),
    ("masters on disk", "synchronous", "behind", "experts", "none", "keep", "clipped", "each", "32-true"),
    ("masters on disk", "synchronous", "full", "dense", "none", "host", "clipped", "each", "16-mixed"),
]
"""Cases with two ranks, with `divided` in addition to the models."""

CASES_OF_PARTS: list[Case] = [
    ("device", "synchronous", "full", "cut", "none", "keep", "clipped", "each", "32-true"),
    ("masters on disk", "synchronous", "sharded", "cut", "none", "keep", "free", "by two", "32-true"),
    ("all on disk", "synchronous", "none", "cut", "all", "host", "clipped", "each", "bf16-mixed"),
    ("host", "lock-free", "none", "cut", "every 2nd", "keep", "free", "each", "32-true"),
    ("masters on disk", "synchronous", "full", "halves", "none", "host", "clipped", "each", "32-true"),
    ("all on disk", "synchronous", "none", "halves", "all", "keep", "free", "by two", "bf16-mixed"),
]
"""Cases with two ranks that have parts of layers."""
