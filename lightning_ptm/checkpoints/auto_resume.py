"""Automatic resume (`resume="auto"`): a restarted fit continues from the newest checkpoint of its checkpoint callbacks.

Replaces one method of Lightning's checkpoint connector until the fit starts. The Trainer decides what to restore after its
`setup` hooks, when callbacks know their folders and ranks can communicate, and before anything is restored.
I1: rank 0 searches the folders, and all ranks try the checkpoints that it found, in the same order. I2: a path that was
passed to the Trainer, or that Lightning found itself (SLURM), takes precedence. I3: all ranks skip a checkpoint that some
rank cannot read or that is damaged, but a run never starts from scratch when checkpoints exist and none is readable.
I4: an unfinished checkpoint is ignored (folder.py, I1). Remains of dead writers are removed during the search, by the rules
of folder.py, and nothing else is. A link and its target count as one checkpoint.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import BatchSizeFinder, LearningRateFinder, ModelCheckpoint
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn

from lightning_ptm.checkpoints import formats
from lightning_ptm.checkpoints.file_io import FileCheckpointIO
from lightning_ptm.errors import CheckpointError, ConfigError, InternalError, PageIOError, RankError, UsageError
from lightning_ptm.storage import folder as folders
from lightning_ptm.storage.user_errors import is_file
from lightning_ptm.trainer.internals import (
    checkpoints_of,
    is_search,
    put_checkpoint_path,
    put_read_checkpoint,
    read_checkpoint,
)
from lightning_ptm.trainer.lightning_hooks import Replacement

SUFFIX = ".ckpt"
_RENAMED = re.compile(r"version_\d+")


class AutoResume:
    """Automatic resume of one Trainer's fit, from `setup_environment` on.

    Args:
        on_all_ranks: context manager that raises an exception of one rank on all ranks; collective.
        broadcast: broadcasts rank 0's value; collective.

    Raises:
        ConfigError: no callback saves checkpoints, or a callback makes the Trainer forget the restored step.
    """

    def __init__(
        self,
        trainer: Trainer,
        on_all_ranks: Callable[[], AbstractContextManager[None]],
        broadcast: Callable[[Any], Any],
    ) -> None:
        # Configuration.
        self._trainer = trainer
        self._on_all_ranks = on_all_ranks
        self._broadcast = broadcast
        if not trainer.checkpoint_callbacks:
            raise ConfigError(
                "Checkpoints(resume='auto') resumes from what checkpoint callbacks have written, and the Trainer has "
                "none; give it callbacks=[ModelCheckpoint(FOLDER)], or leave resume out"
            )
        for callback in trainer.callbacks:  # type: ignore[attr-defined]
            if isinstance(callback, (BatchSizeFinder, LearningRateFinder)):
                raise ConfigError(
                    f"{type(callback).__name__} cannot be used with Checkpoints(resume='auto'): the steps of its "
                    "search reset the step that was restored; run lightning.pytorch.tuner.Tuner before, and remove the "
                    "callback"
                )
        connector = checkpoints_of(trainer)
        # State.
        self._own: Callable[..., None] | None = type(connector).resume_start.__get__(connector)
        """Lightning's method, while it is replaced."""
        self._resumed = False
        self._resumed_from: Path | None = None
        """The checkpoint to resume from, until its weights are loaded."""
        connector.resume_start = Replacement(connector, "resume_start", self._start)

    @staticmethod
    def concerns(trainer: Trainer) -> bool:
        """Whether automatic resume applies: a fit that starts at step 0, and no evaluation, tuner trial or `fast_dev_run`."""
        trial = trainer.fast_dev_run or any(map(is_search, trainer.callbacks))  # type: ignore[attr-defined]
        return trainer.state.fn is TrainerFn.FITTING and not trial and not trainer.global_step

    def undo(self) -> None:
        """Restores Lightning's method."""
        if self._own is not None:
            self._own = None
            del checkpoints_of(self._trainer).resume_start

    def _start(self, checkpoint_path: Any = None, weights_only: bool | None = None) -> None:
        restore = self._own
        assert restore is not None
        self.undo()
        if checkpoint_path:
            restore(checkpoint_path, weights_only=weights_only)
            return
        places = self._places()
        # ModelCheckpoint's class attribute, which users may set.
        suffixes = {getattr(callback, "FILE_EXTENSION", SUFFIX) for callback in self._trainer.checkpoint_callbacks}
        with self._on_all_ranks():
            found = newest_first(places, suffixes) if self._trainer.is_global_zero else []
        unread: list[CheckpointError | OSError] = []
        for path in self._broadcast(found):
            try:
                with self._on_all_ranks():
                    files = self._trainer.strategy.checkpoint_io
                    if self._trainer.is_global_zero and isinstance(files, FileCheckpointIO):
                        files.check(path)  # sharded checkpoints are verified while they are read
                restore(str(path), weights_only=weights_only)
            except (
                CheckpointError,
                OSError,
            ) as error:  # OSError: the file was removed meanwhile, perhaps for one rank only
                if not _is_about(error, path):
                    raise
                unread.append(error)
                rank_zero_warn(f"Checkpoints(resume='auto') passes over {path}: {error}")
                continue
            if self._is_of_a_run():
                self._resumed = True
                self._resumed_from = path
                return
            rank_zero_info(f"Checkpoints(resume='auto') passes over {path}, which has weights only")
        restore(None)
        where = ", ".join(map(str, places)) or "the folders of the checkpoint callbacks"
        if unread:
            raise CheckpointError(
                f"Checkpoints(resume='auto') found {len(unread)} checkpoints in {where} and could read none of them, "
                f"so the fit was not started: its checkpoints would be mixed with those; the first error: {unread[0]}; "
                "give the callback another folder, or this one without them, to start from scratch"
            ) from unread[0]
        renamed = any(_RENAMED.fullmatch(part) for place in places for part in place.parts)
        hint = ", whose name is another one at each start: give ModelCheckpoint a dirpath" if renamed else ""
        rank_zero_info(f"Checkpoints(resume='auto') starts from scratch: there is no checkpoint in {where}{hint}")

    @contextmanager
    def loading_weights(self) -> Iterator[None]:
        """Reports which checkpoint was chosen if the module cannot load the weights of it.

        Raises:
            CheckpointError: the checkpoint is from another model.
        """
        path = self._resumed_from
        try:
            yield
        except RuntimeError as error:
            if path is None or isinstance(error, (InternalError, RankError, UsageError)):
                raise
            raise CheckpointError(
                f"Checkpoints(resume='auto') chose {path}, the newest checkpoint of its ModelCheckpoint, and the "
                f"model cannot load it: {' '.join(str(error).split())}; give the model the settings that it was saved "
                "with, or the callback another folder, to start from scratch"
            ) from error
        self._resumed_from = None

    def _is_of_a_run(self) -> bool:
        """Whether the checkpoint that was read has the training state too; if it has only weights, it is discarded."""
        connector = checkpoints_of(self._trainer)
        if {"loops", "optimizer_states"} <= read_checkpoint(connector).keys():
            return True
        put_read_checkpoint(connector, {})
        return False

    def _places(self) -> list[Path]:
        """The distinct folders of this run's checkpoint callbacks."""
        given = dict.fromkeys(getattr(callback, "dirpath", None) for callback in self._trainer.checkpoint_callbacks)
        named = [str(place) for place in given if place]
        for place in named:
            if "://" in place:
                raise ConfigError(
                    f"Checkpoints(resume='auto') looks for checkpoints in local folders, and {place} is not one; leave "
                    "resume out, and give fit(ckpt_path='last')"
                )
        return [Path(place).absolute() for place in named]

    def make_start_removable(self) -> None:
        """Makes the checkpoint of the start removable, as one of the run's own. Lightning never removes the checkpoint that
        `_ckpt_path` names, since it takes that for a file of the user."""
        if self._resumed:
            put_checkpoint_path(checkpoints_of(self._trainer), None)

    def keep_name_of_last(self) -> None:
        """Keeps `last.ckpt` as the name of the last checkpoint. If the checkpoint of the start predates the first
        `last.ckpt`, ModelCheckpoint would leave the old file and write `last-v1.ckpt`."""
        for callback in self._trainer.checkpoint_callbacks if self._resumed else ():
            if not isinstance(callback, ModelCheckpoint) or callback.last_model_path:
                continue
            if callback.save_last and "{" not in callback.CHECKPOINT_NAME_LAST:  # otherwise the name contains a step
                callback.last_model_path = callback.format_checkpoint_name({}, callback.CHECKPOINT_NAME_LAST)


def _is_about(error: CheckpointError | OSError, path: Path) -> bool:
    """Whether an error that was raised while `path` was read concerns its files, so that an earlier checkpoint may work.
    Errors of the disk tier do not, nor do errors of other files, which the user's hooks read."""
    if isinstance(error, PageIOError):
        return False
    named = getattr(error, "filename", None)
    return not isinstance(named, (str, os.PathLike)) or Path(named).absolute().is_relative_to(path)


def newest_first(places: Iterable[Path], suffixes: Collection[str] = (SUFFIX,)) -> list[Path]:
    """Full checkpoints (files) and sharded ones (folders) in these folders and their subfolders, newest first.

    Links are resolved and not listed themselves.

    Args:
        suffixes: file name suffixes of checkpoints.

    Raises:
        OSError, CheckpointError: a folder exists and cannot be read.
    """
    places = tuple(places)
    for place in places:
        if place.exists() and not place.is_dir():
            raise CheckpointError(
                f"Checkpoints(resume='auto') looks for checkpoints in {place}, which is a file; give "
                "ModelCheckpoint the dirpath of a folder"
            )
    found = {path: _completed_ns(path) for place in places for path in _in(place, suffixes)}
    times = {path: time for path, time in found.items() if time is not None}
    return sorted(times, key=lambda path: (times[path], path.name), reverse=True)


def _in(place: Path, suffixes: Collection[str]) -> Iterator[Path]:
    if not place.is_dir():
        return
    folders.remove_stale(place)
    for entry in sorted(place.iterdir()):
        if entry.name.startswith("."):
            continue
        if entry.suffix in suffixes:
            yield Path(os.path.realpath(entry))  # Path.resolve raises for circular links
        elif entry.is_dir() and not entry.is_symlink():
            yield from _in(entry, suffixes)


def _completed_ns(path: Path) -> int | None:
    """Returns the time at which the checkpoint was completed; None if the path is not one: a dangling link, a pipe, an
    unrelated folder."""
    file = formats.of_checkpoint(path).completed_file(path)
    with contextlib.suppress(FileNotFoundError):  # removed by another process meanwhile
        if is_file(file):
            return file.stat().st_mtime_ns
    return None
