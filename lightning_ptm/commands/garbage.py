"""Context in which garbage collection is off, for code that creates many objects and drops few."""

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
