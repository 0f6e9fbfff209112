"""Garbage collection while a plan is made, which creates many objects and drops few: off, except after virtual runs."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def without_collections() -> Iterator[None]:
    """Disables garbage collection: modules, tasks and what imports make live to the end, and scanning them takes a third of
    the time."""
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collects:
            gc.enable()


_MANY_UNITS = 5000
"""Units from which on a virtual run leaves enough for a collection, which takes seconds."""


def collect_after_virtual_run(units: int) -> None:
    """Frees what virtual runs of a model with so many units have left, of which one with 36,000 units leaves a gigabyte."""
    if units > _MANY_UNITS and not gc.isenabled():
        gc.collect()
