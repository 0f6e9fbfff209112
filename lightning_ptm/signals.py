"""Signals that end a run or put it back into a queue: heard when they come, acted upon between batches, by all ranks at once.

Lightning's handlers talk to the other ranks, and save, wherever the signal finds this one: in the middle of a step, or of a
collective, which the others then wait for. Owns what was asked for and has not been done.

I1: handlers do nothing but remember. I2: ranks act at the same point if any of them was asked.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from lightning.pytorch import Trainer
from lightning.pytorch.utilities import rank_zero_info
from lightning.pytorch.utilities.exceptions import SIGTERMException

_END, _REQUEUE = 1, 2


class Signals:
    """What a run does about signals.

    Args:
        requeue: Lightning's own handler, which saves and asks SLURM to run the job again.
        agree: what any rank was asked for (flags), from what this one was. Collective.
    """

    def __init__(self, trainer: Trainer, requeue: Callable[..., None], agree: Callable[[int], int]) -> None:
        self._connector = trainer._signal_connector
        self._trainer = trainer
        self._requeue = requeue
        self._agree = agree
        self._asked = 0
        self._number = 0

    def end(self, number: int, frame: Any) -> None:
        """Handles SIGTERM."""
        launcher = self._trainer.strategy.launcher
        if launcher is not None and not self._asked & _END:
            launcher.kill(number)
        self._asked |= _END

    def put_back(self, number: int, frame: Any) -> None:
        """Handles SLURM's signal."""
        self._asked |= _REQUEUE
        self._number = number

    def settle(self) -> None:
        """Between batches: do what was asked for.

        Raises:
            SIGTERMException: on all ranks, as Lightning raises it.
        """
        asked, self._asked = self._agree(self._asked), 0
        if asked & _REQUEUE:
            self._requeue(self._number, None)
        if asked & _END:
            rank_zero_info("a rank has received SIGTERM: all end before their next batch")
            self._connector.received_sigterm = True
            raise SIGTERMException


__all__ = ["Signals"]
