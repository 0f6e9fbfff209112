"""Whole fits on the fake device: which choices there are, and the cases in which every two of them meet."""

from __future__ import annotations

import itertools
from typing import Any

from covering import Case, few

SMALL = {"device_memory": "1MiB", "host_memory": "64MiB"}
"""A unit or two at once: others have to go."""
HOMES: dict[str, dict[str, Any]] = {
    "device": {"offload_parameters": "device", "offload_optimizer": "device"},
    "host": {"offload_parameters": "host", "offload_optimizer": "host", **SMALL},
    "masters on disk": {"offload_parameters": "host", "offload_optimizer": "disk", **SMALL},
    "all on disk": {"offload_parameters": "disk", "offload_optimizer": "disk", **SMALL},
}
UPDATES: dict[str, dict[str, Any]] = {"synchronous": {}, "lock-free": {"lock_free": True, "max_staleness": 0}}
SAVES: dict[str, dict[str, Any]] = {
    "none": {},
    "full": {"state_dict_type": "full"},
    "sharded": {"state_dict_type": "sharded"},
    "behind": {"state_dict_type": "sharded", "async_save": True},
}
"""Of a checkpoint in the middle, from which another run goes on."""
MODELS = ("dense", "experts")
MODELS_OF_RANKS = (*MODELS, "divided")
"""`divided`: ranks have some of the experts each."""
RECOMPUTED = ("none", "all", "every 2nd")
ACTIVATIONS = ("keep", "host")
CLIPS = {"free": None, "clipped": 0.1}
ACCUMULATED = {"each": 1, "by two": 2}
PRECISIONS = ("32-true", "bf16-mixed", "16-mixed")


def _axes(models: tuple[str, ...]) -> tuple[tuple[str, ...], ...]:
    """What a case chooses from, in this order."""
    clips, accumulated = tuple(CLIPS), tuple(ACCUMULATED)
    return (tuple(HOMES), tuple(UPDATES), tuple(SAVES), models, RECOMPUTED, ACTIVATIONS, clips, accumulated, PRECISIONS)


def settings_of(case: Case) -> dict[str, Any]:
    """Of the strategy."""
    homes, updates, saves, _, recompute, activations, *_ = case
    return {
        **HOMES[homes],
        **UPDATES[updates],
        **SAVES[saves],
        "recompute": recompute,
        "activations": activations,
    }


def can_be(case: Case) -> bool:
    """Lock-free updates keep parameters off the disk and masters off the device."""
    return case[1] != "lock-free" or case[0] in ("host", "masters on disk")


CASES = few(list(filter(can_be, itertools.product(*_axes(MODELS)))))
"""Of one rank; the first have the most pairs of choices."""
CASES_OF_RANKS = few(list(filter(can_be, itertools.product(*_axes(MODELS_OF_RANKS)))))
"""Of two."""

CASES_OF_PARTS: list[Case] = [
    ("device", "synchronous", "full", "cut", "none", "keep", "clipped", "each", "32-true"),
    ("masters on disk", "synchronous", "sharded", "cut", "none", "keep", "free", "by two", "32-true"),
    ("all on disk", "synchronous", "none", "cut", "all", "host", "clipped", "each", "bf16-mixed"),
    ("host", "lock-free", "none", "cut", "every 2nd", "keep", "free", "each", "32-true"),
]
"""Of two that have parts of layers."""
