"""Setup that every process of tests does once, so that its tests, or the ranks that are forked from it, need not each
time."""

from __future__ import annotations

import contextlib
import functools
import gc
import inspect
from collections.abc import Iterator
from typing import Any

from _pytest.logging import caplog_handler_key
from lightning.fabric.utilities import registry

CALLBACKS_OF_PACKAGES = "lightning.pytorch.callbacks_factory"
"""The entry point in which a Trainer looks for callbacks."""


def look_for_callbacks_once() -> None:
    """Every Trainer looks through all installed packages for callbacks, which takes longer than many a small fit."""
    registry.entry_points = functools.cache(registry.entry_points)  # type: ignore[attr-defined]
    registry.entry_points(group=CALLBACKS_OF_PACKAGES)  # type: ignore[attr-defined]


def leave_out_of_collections() -> None:
    """Excludes the existing objects from garbage collections: mostly modules of torch, Lightning and the tests.

    Each full collection would visit all of them, and in a forked process copy their memory.
    """
    gc.collect()
    gc.freeze()


def catch_logs_where_asked(config: Any) -> None:
    """Around each of the three phases of each test pytest hangs two handlers on some dozens of torch's loggers, which takes
    longer than many a test. The tests that ask for `caplog` keep them. Versions that do otherwise are left as they are.
    """
    plugin = config.pluginmanager.getplugin("logging-plugin")
    catch = getattr(plugin, "_runtest_for", None)
    if catch is None or inspect.isgeneratorfunction(catch):
        return

    @contextlib.contextmanager
    def where_asked(item: Any, when: str) -> Iterator[None]:
        if "caplog" in getattr(item, "fixturenames", ()):
            with catch(item, when):
                yield
        else:
            item.stash[caplog_handler_key] = plugin.caplog_handler  # it is taken away in the end
            yield

    plugin._runtest_for = where_asked
