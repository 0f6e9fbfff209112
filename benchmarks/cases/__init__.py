"""All cases, by id. Each module has those of one subject."""

from __future__ import annotations

from collections.abc import Mapping

from benchmarks.case import Case
from benchmarks.cases import (
    activations,
    checkpoints,
    disk,
    in_memory,
    lock_free,
    long_text,
    parts,
    planner,
    ranking,
    ranks,
    slices,
    stages,
)

CASES: Mapping[str, Case] = {
    case.id: case
    for module in (
        in_memory,
        ranks,
        disk,
        activations,
        slices,
        stages,
        long_text,
        lock_free,
        checkpoints,
        planner,
        ranking,
        parts,
    )
    for case in module.CASES
}

OF_README = ("in_memory-124M", "two_ranks-124M", "deepspeed-124M", "lock_free-64", "lock_free-256", "scale-3.0B")
"""Cases whose figures are in README.md."""

OF_VERSIONS = ("in_memory-25M", "in_memory-124M", "two_ranks-124M", "disk_masters-124M", "lock_free-64", "memory-124M")
"""Those in which a version of this project is compared with another, unless others are named."""
