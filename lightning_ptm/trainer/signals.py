"""Signals that end a run or put it back into a queue: heard when they come, acted upon between batches, by all ranks at once.

Lightning's handlers talk to the other ranks, and save, wherever the signal finds this one: in the middle of a step, or of a
collective, which the others then wait for. Owns what was asked for and has not been done.

I1: handlers do nothing but remember. I2: ranks act at the same point if any of them was asked. I3: what comes while ranks
agree is for the next time.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from lightning.pytorch import Trainer
from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn
from lightning.pytorch.utilities.exceptions import SIGTERMException

from lightning_ptm.trainer.internals import requeue_of, signals_of

_END, _REQUEUE = 1, 2


class Signals:
    """What a run does about signals. One for the whole of it: Lightning registers its handlers once.

    Args:
        trainer: whose own handler saves and asks SLURM to run the job again.
        agree: what any rank was asked for (flags), from what this one was. Collective.
    """

    def __init__(self, trainer: Trainer, agree: Callable[[int], int]) -> None:
        self._connector = signals_of(trainer)
        self._trainer = trainer
        self._agree = agree
        self._requeue = requeue_of(self._connector)
        self._asked = 0
        self._passed_on = False
        self._number: Any = None

    def end(self, number: Any, frame: Any) -> None:
        """Handles SIGTERM."""
        launcher = self._trainer.strategy.launcher
        if launcher is not None and not self._passed_on:
            self._passed_on = True
            launcher.kill(number)
        self._asked |= _END

    def put_back(self, number: Any, frame: Any) -> None:
        """Handles SLURM's signal."""
        self._asked |= _REQUEUE
        self._number = number

    def settle(self) -> None:
        """Between batches: do what was asked for.

        Raises:
            SIGTERMException: on all ranks, as Lightning raises it.
        """
        asked, self._asked = self._asked, 0
        asked = self._agree(asked)
        if asked & _REQUEUE:
            self._requeue(self._number, None)
        if asked & _END:
            rank_zero_info("a rank has received SIGTERM: all end here")
            self._connector.received_sigterm = True
            raise SIGTERMException

    def leave(self) -> None:
        """The run has ended: what came behind its last batch is not done any more."""
        if self._asked & _END:
            self._connector.received_sigterm = True
        if self._asked & _REQUEUE:
            rank_zero_warn(
                "SLURM's signal came when training had ended: nothing was saved for it, nor put into the queue"
            )
        self._asked = 0
