"""What every process of tests does once, so that its tests, or the ranks that are forked from it, need not each time."""

from __future__ import annotations

import functools
import gc

from lightning.fabric.utilities import registry

CALLBACKS_OF_PACKAGES = "lightning.pytorch.callbacks_factory"
"""The entry point in which a Trainer looks for callbacks."""


def look_for_callbacks_once() -> None:
    """Every Trainer looks through all installed packages for callbacks, which takes longer than many a small fit."""
    registry.entry_points = functools.cache(registry.entry_points)  # type: ignore[attr-defined]
    registry.entry_points(group=CALLBACKS_OF_PACKAGES)  # type: ignore[attr-defined]


def leave_out_of_collections() -> None:
    """What there is now is left out of garbage collections: torch's, Lightning's and the tests' modules, for the most part.

    Each full collection would visit all of it, and in a forked process copy its memory.
    """
    gc.collect()
    gc.freeze()
