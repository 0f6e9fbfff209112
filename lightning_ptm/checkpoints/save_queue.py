"""The checkpoints of a run, saved one after the other, with the actions that must wait for them: removing earlier
checkpoints and making links.

I1: an earlier checkpoint is removed only when the one that is being written is in place.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Literal

from lightning.pytorch.utilities import rank_zero_warn

from lightning_ptm.checkpoints.saving import Saving
from lightning_ptm.errors import CheckpointError
from lightning_ptm.interrupts import interrupted_later


class SaveQueue:
    """The checkpoints of one run.

    Args:
        on_failure: see `Settings.on_failure`.
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
            CheckpointError: this save or the previous one failed, and failed_save is "stop".
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
        saving, self._current = self._current, None
        if saving is not None:
            saving.end_after_failure()

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
