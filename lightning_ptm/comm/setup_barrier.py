"""Whether the other ranks come, too, while a run is set up: before it has lines of its own, which would tell.

A rank that fails there, in `setup`, `configure_model` or `configure_optimizers`, and whose process lives on (it fits again,
or a thread keeps it), would be waited for until `timeout`, in a collective that it takes part in with something else.

Owns how many points this rank has come to.

I1: who fails tells so on the board, and waits for nobody.
I2: between a point and the collective that follows it there is no code of users.
I3: nobody waits here for long: that a process is gone shows in the collective, and not on the board.
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
    """Of the ranks of one set-up.

    Args:
        word: names this set-up, the same on all ranks.
        board: a store of torch's, which all ranks read and write; None: that of the default process group.
        long_s: after so long it is taken for granted that they come.
    """

    def __init__(self, word: str, rank: int, size: int, board: Any | None = None, long_s: float = 10.0) -> None:
        self._board = board or default_store()
        self._long_s = long_s
        self._key = f"lightning_ptm/set_up/{word}"
        self._rank = rank
        self._size = size
        # state
        self._points = 0

    def wait(self) -> None:
        """This rank has come to the next point, which all ranks come to before a collective.

        Raises:
            RankError: another one has failed on its way.
        """
        self._points += 1
        here, failed = f"{self._key}/{self._points}", f"{self._key}/failed"
        until_s, look_s = time.monotonic() + self._long_s, _FIRST_LOOK_S
        reason = ""
        # The board is gone with the rank that kept it: the collective will tell.
        with contextlib.suppress(RuntimeError):
            self._board.add(here, 1)
            while not reason and self._board.add(here, 0) < self._size and time.monotonic() < until_s:
                if self._board.check([failed]):
                    reason = self._board.get(failed).decode()
                else:
                    time.sleep(look_s)
                    look_s = min(_LOOK_S, 2 * look_s)
        if reason:
            raise RankError(
                f"{reason} while the run was set up, which needs all ranks, so rank {self._rank} stops too; look for the "
                f"traceback in that rank's output"
            )

    def fail(self, reason: str) -> None:
        """This rank does not come any more. The first reason stays: it is the cause of the others."""
        with contextlib.suppress(RuntimeError):
            self._board.compare_set(f"{self._key}/failed", "", f"rank {self._rank} failed with {reason}")
