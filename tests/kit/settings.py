"""Settings of the strategy as dictionaries, put together."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

NESTED = ("lock_free", "weights", "checkpoints", "tensor_parallel", "tuning", "debug")


def merged(*parts: Mapping[str, Any], **more: Any) -> dict[str, Any]:
    """The settings of all parts. Of two that give the same setting the later one counts; nested ones are merged by field."""
    found: dict[str, Any] = {}
    for part in (*parts, more):
        for name, value in part.items():
            before = found.get(name)
            if name in NESTED and isinstance(before, Mapping) and value is True:
                continue
            both = name in NESTED and isinstance(before, Mapping) and isinstance(value, Mapping)
            found[name] = {**before, **value} if both else value  # type: ignore[dict-item]
    return found
