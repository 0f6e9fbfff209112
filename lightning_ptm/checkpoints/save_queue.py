"""The checkpoints of a run, saved one after the other (`SaveQueue`), and whether any can still be saved after an error
or Ctrl-C has interrupted the run (`Interruption`).

The queue has the actions that must wait for a save: removing earlier checkpoints and making links. Lightning's
callbacks save on an exception before the strategy hears of it. An `Interruption`, one per run, owns whether the
interruption has been handled, and why nothing is saved any more.
I1: an earlier checkpoint is removed only when the one that is being written is in place.
I2: an interruption is handled once, before anything of the run is saved; afterwards no rank waits for another in
    vain.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Literal

from lightning.pytorch import LightningModule
from lightning.pytorch.trainer.states import TrainerStatus
from lightning.pytorch.utilities import rank_zero_warn

from lightning_ptm.checkpoints.saving import Saving
from lightning_ptm.errors import AngelPTMError, CheckpointError, UsageError, one_line
from lightning_ptm.interrupts import interrupted_later
from lightning_ptm.runtime.engine.engine import Engine
from lightning_ptm.trainer.internals import trainer_of


class SaveQueue:
    """The checkpoints of one run.

    Args:
        on_failure: see `Checkpoints.on_failure`.
    """

    def __init__(self, on_failure: Literal["stop", "warn"]) -> None:
        self._on_failure = on_failure

        self._current: Saving | None = None
        self._last_failed = False
        self._to_remove: dict[Path, Callable[[], None]] = {}
        """Removals that wait for the next successful save, by path."""

    def save(self, path: str | Path, begin: Callable[[], Saving | None], *, in_background: bool = False) -> None:
        """Starts a save when the previous one is in place. Collective.

        Args:
            begin: starts the save; returns it while it is in progress, None if it is done.
            in_background: the save will be in progress in the background. Ctrl-C is then delayed until it is recorded here,
                since its thread reads pages, which must outlive it.

        Raises:
            CheckpointError: this save or the previous one failed, and `on_failure` is "stop".
        """
        self.finish()
        try:
            with interrupted_later() if in_background else nullcontext():
                saving = self._current = begin()
        except CheckpointError as error:
            self._failed(path, error)
            return
        self._last_failed = False
        self._to_remove.pop(Path(path), None)  # the path has been written again
        waiting, self._to_remove = self._to_remove, {}
        for earlier, act in waiting.items():
            if saving is not None:
                saving.afterwards(earlier, act)
            else:
                act()

    def finish(self) -> None:
        """Waits for the save in progress, if any. Collective. Raises as `save` does."""
        saving = self._current
        if saving is None:
            return
        try:
            saving.finish()
        except CheckpointError as error:
            self._current = None
            self._to_remove |= saving.pending_removals
            self._failed(saving.path, error)
        self._current = None

    def remove(self, path: Path, remove: Callable[[Path], None]) -> None:
        """Removes an earlier checkpoint when there is a later one. Rank 0 only."""
        act = partial(_remove, path, remove)
        if self._last_failed:
            self._to_remove[path] = act
        elif self._current is not None:
            self._current.afterwards(path, act)
        else:
            remove(path)

    def link(self, path: Path, name: Path, link: Callable[[Path, Path], None]) -> None:
        """Makes `name` a link to a checkpoint when that is in place; never if its save fails. Rank 0 only."""
        if self._current is not None:
            self._current.afterwards(None, partial(_link, path, name, link))
        elif not self._last_failed:
            link(path, name)

    def end_after_failure(self) -> None:
        """Ends the save in progress after the run has failed, without collectives. Never raises."""
        if self._current is not None:
            self._current.end_after_failure()
            self._current = None

    def abandon(self) -> None:
        """Ends the save in progress at once: its checkpoint is discarded, unless all of it is written. Never raises."""
        saving, self._current = self._current, None
        if saving is not None:
            saving.abandon()

    def forget(self) -> None:
        """Forgets pending removals at the end of the run: the next run must not remove this one's checkpoints."""
        self._to_remove.clear()
        self._last_failed = False

    def _failed(self, path: str | Path, error: CheckpointError) -> None:
        self._last_failed = True
        if self._on_failure == "stop":
            raise error
        rank_zero_warn(f"there is no checkpoint {path}, and the run goes on (Checkpoints(on_failure='warn')): {error}")


def _link(path: Path, name: Path, link: Callable[[Path, Path], None]) -> None:
    """Calls `link(path, name)`, with a warning in place of an error: no caller could handle it."""
    try:
        link(path, name)
    except (OSError, CheckpointError) as error:
        reason = getattr(error, "strerror", None) or error
        rank_zero_warn(f"{name} could not be made a link to {path}: {reason}; use save_last=True")


def _remove(path: Path, remove: Callable[[Path], None]) -> None:
    """Calls `remove(path)`, with a warning in place of an error: no caller could handle it."""
    try:
        remove(path)
    except FileNotFoundError:
        return
    except OSError as error:
        rank_zero_warn(f"{path}, an earlier checkpoint, could not be removed: {error.strerror or error}")


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
        """The reason why the run writes no more checkpoints; empty while it does."""

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
        waits for it (I2). Does nothing in a run that was not interrupted."""
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
        except Exception as error:  # also of the user's hooks: Lightning would not end the run after an error here
            if not self.on_this_rank:
                raise
            self._give_up(str(error) if isinstance(error, (AngelPTMError, OSError)) else one_line(error))

    def _give_up(self, reason: str) -> None:
        self.unsaved = reason
        if not self._engine.communicator.alone:
            self._engine.fail(
                sys.exc_info()[1]
                or UsageError(
                    "the run was interrupted, so ranks cannot go on with collectives; resume from an earlier checkpoint"
                )
            )
