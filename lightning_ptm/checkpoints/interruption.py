"""What becomes of checkpoints when a run is cut short by an error or Ctrl-C: callbacks save before the strategy is told.

Owns whether it is known that this run was, and why nothing is saved of it. One object a run.
I1: it is settled once, before anything of the run is saved; afterwards no rank waits for another in vain.
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
"""How long a rank that was cut short waits for the others to be, before a checkpoint is given up."""

TORN = (
    "the run was cut short when some units had been updated in the step and others had not, so there is no state to go on "
    "from; go on from an earlier one (a hook on_before_optimizer_step in the module keeps steps whole: units wait for it)"
)
_APART = (
    "the ranks were not all cut short in the same step, or not all of them were, so there is no state that all of them have; "
    "go on from an earlier one (ModelCheckpoint(every_n_train_steps=...) writes some)"
)


class Interruption:
    """Settles whether a run that was cut short can still be saved.

    Args:
        engine: the run's; module: what it trains; saves: the checkpoints in progress.
    """

    def __init__(self, engine: Engine, module: LightningModule, saves: SaveQueue) -> None:
        self._engine = engine
        self._module = module
        self._saves = saves
        self._settled = False
        self.unsaved = ""
        """Why the run writes no checkpoint any more; empty while it does."""

    @property
    def here(self) -> bool:
        """Whether the run was cut short on this rank."""
        trainer = trainer_of(self._module)
        return trainer is not None and trainer.state.status is TrainerStatus.INTERRUPTED

    @property
    def torn(self) -> bool:
        """Whether what the run leaves behind is of two steps."""
        engine = self._engine
        return self.unsaved == TORN or engine.update_failed or (engine.barriers.failed and engine.stepping.torn)

    def settle(self) -> None:
        """Find out whether there is a state that all ranks have; where there is none, this rank hangs up, so that nobody
        waits for it (I1). Does nothing in a run that goes on."""
        if self._settled or not self.here:
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
        except CheckpointError as error:  # of an earlier one: no reason to save nothing now
            rank_zero_warn(str(error))

    @contextmanager
    def told(self) -> Iterator[None]:
        """An error in the block is no news where the run has ended with another one, and would hide that: it is the reason
        why nothing is saved."""
        try:
            yield
        except (AngelPTMError, OSError) as error:
            if not self.here:
                raise
            self._give_up(str(error))

    def _give_up(self, reason: str) -> None:
        self.unsaved = reason
        if not self._engine.communicator.alone:
            self._engine.fail(sys.exc_info()[1] or UsageError("the run was cut short"))
