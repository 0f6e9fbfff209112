"""Barrier during set-up, before a run has process groups of its own that would detect a failed rank.

A rank that fails in `setup`, `configure_model` or `configure_optimizers` may live on (the user fits again, or a thread
keeps the process). Without the barrier the other ranks would wait for it until `timeout`, in a collective in which it
may even take part with a different call.

Owns the number of points that this rank has reached.

I1: a rank that fails posts its reason in the store, and waits for no other rank.
I2: no user code runs between a point and the collective that follows it.
I3: a rank waits here for a bounded time only: if another process is gone, the collective reports it, not the store.
"""

from __future__ import annotations

import contextlib
import time
from typing import Any

from lightning_ptm.errors import RankError
from lightning_ptm.torch_internals import default_store

_FIRST_LOOK_S = 0.001
_LOOK_S = 0.05


class SetupBarrier:
    """The barrier of the ranks of one set-up.

    Args:
        word: identifies this set-up; the same on all ranks.
        rank: this rank.
        size: number of ranks.
        store: a store of torch, which all ranks read and write; None: that of the default process group.
        long_s: seconds after which the barrier stops waiting and leaves it to the collective.
    """

    def __init__(self, word: str, rank: int, size: int, store: Any | None = None, long_s: float = 10.0) -> None:
        self._store = store or default_store()
        self._long_s = long_s
        self._key = f"lightning_ptm/set_up/{word}"
        self._rank = rank
        self._size = size
        # state
        self._points = 0

    def wait(self) -> None:
        """Waits until all ranks reach this point, before a collective.

        Raises:
            RankError: another rank has failed before it.
        """
        self._points += 1
        here, failed = f"{self._key}/{self._points}", f"{self._key}/failed"
        until_s, look_s = time.monotonic() + self._long_s, _FIRST_LOOK_S
        reason = ""
        # If the rank that hosts the store is gone, the collective that follows reports it.
        with contextlib.suppress(RuntimeError):
            self._store.add(here, 1)
            while not reason and self._store.add(here, 0) < self._size and time.monotonic() < until_s:
                if self._store.check([failed]):
                    reason = self._store.get(failed).decode()
                else:
                    time.sleep(look_s)
                    look_s = min(_LOOK_S, 2 * look_s)
        if reason:
            raise RankError(
                f"{reason} while the run was set up, which needs all ranks, so rank {self._rank} stops too; look for the "
                f"traceback in that rank's output"
            )

    def fail(self, reason: str) -> None:
        """Reports that this rank has failed. Only the first reason is kept: it caused the others."""
        with contextlib.suppress(RuntimeError):
            self._store.compare_set(f"{self._key}/failed", "", f"rank {self._rank} failed with {reason}")
