"""Signals that end a run or requeue it (SIGTERM, SLURM): recorded on arrival, handled between batches, on all ranks at once.

Lightning's handlers communicate and save wherever the signal interrupts a rank: in the middle of a step, or of a collective,
in which the others then hang. Owns the requests that were received and not yet handled.

I1: handlers only record the signal, and pass the first SIGTERM on. I2: all ranks act at the same point if any
rank has received one. I3: a signal that arrives while ranks agree is handled the next time.
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
    """Signal handling of one run; one object for all of it, since Lightning registers its handlers once.

    Args:
        trainer: its own handler saves a checkpoint and asks SLURM to requeue the job.
        agree: combines the flags of all ranks. Collective.
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
        """Records SIGTERM for `settle`; the first one is also passed on to the launcher's processes."""
        launcher = self._trainer.strategy.launcher
        if launcher is not None and not self._passed_on:
            self._passed_on = True
            launcher.kill(number)
        self._asked |= _END

    def put_back(self, number: Any, frame: Any) -> None:
        """Records SLURM's signal for `settle`."""
        self._asked |= _REQUEUE
        self._number = number

    def settle(self) -> None:
        """Handles the recorded signals; called between batches.

        Raises:
            SIGTERMException: on all ranks, as Lightning raises it.
        """
        asked, self._asked = self._asked, 0
        asked = self._agree(asked)
        if asked & _REQUEUE:
            self._requeue(self._number, None)
        if asked & _END:
            rank_zero_info("a rank has received SIGTERM: all ranks stop here")
            self._connector.received_sigterm = True
            raise SIGTERMException

    def leave(self) -> None:
        """Ends the run; signals that arrived after its last batch are not handled any more."""
        if self._asked & _END:
            self._connector.received_sigterm = True
        if self._asked & _REQUEUE:
            rank_zero_warn(
                "SLURM's signal arrived after training had ended: nothing was saved for it, and the job was not requeued"
            )
        self._asked = 0
