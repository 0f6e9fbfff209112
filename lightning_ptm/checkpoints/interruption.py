"""Decides whether checkpoints can still be saved after an error or Ctrl-C has interrupted a run.

Lightning's callbacks save on an exception before the strategy hears of it. Owns whether the interruption has been
handled, and why nothing is saved any more. One object per run.
I1: it is handled once, before anything of the run is saved; afterwards no rank waits for another in vain.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager

from lightning.pytorch import LightningModule
from lightning.pytorch.trainer.states import TrainerStatus
from lightning.pytorch.utilities import rank_zero_warn

from lightning_ptm.checkpoints.save_queue import SaveQueue
from lightning_ptm.errors import AngelPTMError, CheckpointError, UsageError
from lightning_ptm.runtime.engine.engine import Engine
from lightning_ptm.trainer.internals import trainer_of

_MEET_S = 5.0
"""Seconds for which an interrupted rank waits for the others, before saving is given up."""

TORN = (
    "the run was interrupted within a step, when some units had been updated and others had not, so there is no state "
    "to resume from; resume from an earlier checkpoint (a hook on_before_optimizer_step in the module keeps steps "
    "whole: units wait for it)"
)
_APART = (
    "the ranks were not all interrupted, or not in the same step, so there is no state that all of them have; resume "
    "from an earlier checkpoint (ModelCheckpoint(every_n_train_steps=...) writes some)"
)


class Interruption:
    """Decides whether an interrupted run can still be saved.

    Args:
        engine: the run's engine.
        module: the module that it trains.
        saves: checkpoints that are being written.
    """

    def __init__(self, engine: Engine, module: LightningModule, saves: SaveQueue) -> None:
        self._engine = engine
        self._module = module
        self._saves = saves
        self._settled = False
        self.unsaved = ""
        """Why the run writes no more checkpoints; empty while it does."""

    @property
    def on_this_rank(self) -> bool:
        """Whether the run was interrupted on this rank."""
        trainer = trainer_of(self._module)
        return trainer is not None and trainer.state.status is TrainerStatus.INTERRUPTED

    @property
    def torn(self) -> bool:
        """Whether some of the run's states are of one step and some of the next."""
        engine = self._engine
        return self.unsaved == TORN or engine.update_failed or (engine.barriers.failed and engine.stepping.torn)

    def settle(self) -> None:
        """Finds out whether all ranks have a common state. If not, this rank leaves the communicator, so that no rank
        waits for it (I1). Does nothing in a run that was not interrupted."""
        if self._settled or not self.on_this_rank:
            return
        self._settled = True
        engine = self._engine
        torn = engine.stepping.in_mid_step or engine.update_failed
        engine.abandon()
        step = self._module.trainer.global_step
        where = f"step {step}, iteration {engine.iterations}, {engine.updates.steps_taken} steps taken"
        if not engine.communicator.meet(None if torn else where, _MEET_S):
            self._give_up(TORN if torn else _APART)
            return
        try:
            self._saves.finish()
        except CheckpointError as error:  # of an earlier checkpoint; this one can be saved all the same
            rank_zero_warn(str(error))

    @contextmanager
    def recorded(self) -> Iterator[None]:
        """Context for saving: in an interrupted run an error becomes the reason why nothing is saved, and is not
        raised, since it would hide the error that interrupted the run."""
        try:
            yield
        except (AngelPTMError, OSError) as error:
            if not self.on_this_rank:
                raise
            self._give_up(str(error))

    def _give_up(self, reason: str) -> None:
        self.unsaved = reason
        if not self._engine.communicator.alone:
            self._engine.fail(
                sys.exc_info()[1]
                or UsageError(
                    "the run was interrupted, so ranks cannot go on with collectives; resume from an earlier checkpoint"
                )
            )
