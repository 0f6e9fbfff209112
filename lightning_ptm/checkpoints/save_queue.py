"""The checkpoints of a run, one after the other, and what waits for them: the removal of earlier ones, and links.

I1: a checkpoint that is to be removed stays until the one that is being written is in place.
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
        """After the next save that succeeds."""

    def save(self, path: str | Path, begin: Callable[[], Saving | None], *, behind: bool = False) -> None:
        """Start a save when the one before is in place. Collective.

        Args:
            begin: starts it; returns it while it is in progress, None if it is done.
            behind: it will be in progress; Ctrl-C waits until it is known here, since its thread reads pages, which must
                not end before it.

        Raises:
            CheckpointError: it, or the one before, failed, and that is to stop the run.
        """
        self.finish()
        try:
            with interrupted_later() if behind else nullcontext():
                saving = self._current = begin()
        except CheckpointError as error:
            self._failed(path, error)
            return
        self._last_failed = False
        self._to_remove.pop(Path(path), None)  # it has been replaced instead
        waiting, self._to_remove = self._to_remove, {}
        for earlier, act in waiting.items():
            if saving is not None:
                saving.afterwards(earlier, act)
            else:
                act()

    def finish(self) -> None:
        """Wait for the save in progress, if there is one. Collective. Raises as `save` does."""
        saving = self._current
        if saving is None:
            return
        try:
            saving.finish()
        except CheckpointError as error:
            self._current = None
            self._to_remove |= saving.left_undone
            self._failed(saving.path, error)
        self._current = None

    def remove(self, path: Path, remove: Callable[[Path], None]) -> None:
        """Remove an earlier checkpoint once there is a later one. Rank 0 only."""
        act = partial(_remove, path, remove)
        if self._last_failed:
            self._to_remove[path] = act
        elif self._current is not None:
            self._current.afterwards(path, act)
        else:
            remove(path)

    def link(self, path: Path, name: Path, link: Callable[[Path, Path], None]) -> None:
        """Make `name` name a checkpoint, once that is in place; never if it failed. Rank 0 only."""
        if self._current is not None:
            self._current.afterwards(None, partial(_link, path, name, link))
        elif not self._last_failed:
            link(path, name)

    def farewell(self) -> None:
        """The run has failed: finish what this rank can. Never raises."""
        saving, self._current = self._current, None
        if saving is not None:
            saving.farewell()

    def forget(self) -> None:
        """The run is over: the next one's saves remove nothing of this one's."""
        self._to_remove.clear()
        self._last_failed = False

    def _failed(self, path: str | Path, error: CheckpointError) -> None:
        self._last_failed = True
        if self._on_failure == "stop":
            raise error
        rank_zero_warn(f"there is no checkpoint {path}, and the run goes on (on_failure='warn'): {error}")


def _link(path: Path, name: Path, link: Callable[[Path, Path], None]) -> None:
    """`link(path, name)` at a time when nobody would see an error."""
    try:
        link(path, name)
    except (OSError, CheckpointError) as error:
        reason = getattr(error, "strerror", None) or error
        rank_zero_warn(f"{name} could not be made a link to {path}: {reason}; use save_last=True")


def _remove(path: Path, remove: Callable[[Path], None]) -> None:
    """`remove(path)` at a time when nobody would see an error."""
    try:
        remove(path)
    except FileNotFoundError:
        return
    except OSError as error:
        rank_zero_warn(f"{path}, an earlier checkpoint, could not be removed: {error.strerror or error}")
