"""`resume="auto"`: a fit that is started again goes on from the newest checkpoint that its callbacks have written.

Owns, for a moment, one method of Lightning's: what the Trainer restores is decided behind its `setup` hooks, where callbacks
know their folders and ranks know each other, and before anything is restored. I1: rank 0 looks, and all ranks take what it
has found, in the same order. I2: a path that the Trainer was given, or has found itself (SLURM), is taken instead.
I3: what some rank cannot read, or is not what was written, is passed over by all, but a run never begins anew beside
checkpoints of which none can be read. I4: what was never finished is no checkpoint (folder.py, I1), and what dead writers
have left is removed on the way, by the rule of folder.py that nothing else is; a link and what it names are one.
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

from lightning_ptm.checkpoints.file_io import FileCheckpointIO
from lightning_ptm.errors import CheckpointError, ConfigError, InternalError, PageIOError, RankError, UsageError
from lightning_ptm.storage import folder as folders
from lightning_ptm.storage.index import INDEX
from lightning_ptm.storage.user_errors import is_file, is_folder
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
    """Of one Trainer's fit, from `setup_environment` on.

    Args:
        together: what a block raises on one rank raises on all. tell: rank 0's value, on all ranks. Both are collective.

    Raises:
        ConfigError: no callback saves checkpoints, or one of the Trainer's makes it forget what it has restored.
    """

    def __init__(
        self, trainer: Trainer, together: Callable[[], AbstractContextManager[None]], tell: Callable[[Any], Any]
    ) -> None:
        # Configuration.
        self._trainer = trainer
        self._together = together
        self._tell = tell
        if not trainer.checkpoint_callbacks:
            raise ConfigError(
                "resume='auto' goes on from what checkpoint callbacks have written, and the Trainer has none; give it "
                "callbacks=[ModelCheckpoint(FOLDER)], or leave resume out"
            )
        for callback in trainer.callbacks:  # type: ignore[attr-defined]
            if isinstance(callback, (BatchSizeFinder, LearningRateFinder)):
                raise ConfigError(
                    f"resume='auto' with {type(callback).__name__}: its trials make the Trainer forget at which step the "
                    f"checkpoint was; find the value beforehand, with lightning.pytorch.tuner.Tuner, and leave it out"
                )
        connector = checkpoints_of(trainer)
        # State.
        self._own: Callable[..., None] | None = type(connector).resume_start.__get__(connector)
        """Lightning's method, while ours is in its place."""
        self._resumed = False
        self._unloaded: Path | None = None
        """The checkpoint that this run goes on from, until its weights are loaded."""
        connector.resume_start = Replacement(connector, "resume_start", self._start)

    @staticmethod
    def concerns(trainer: Trainer) -> bool:
        """Whether this is a fit that begins: no evaluation, no trial of a tuner's, and none that goes on in its process."""
        trial = trainer.fast_dev_run or any(map(is_search, trainer.callbacks))  # type: ignore[attr-defined]
        return trainer.state.fn is TrainerFn.FITTING and not trial and not trainer.global_step

    def undo(self) -> None:
        """Lightning's method is in its place again."""
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
        # ModelCheckpoint's attribute of the class, which users may set.
        suffixes = {getattr(callback, "FILE_EXTENSION", SUFFIX) for callback in self._trainer.checkpoint_callbacks}
        with self._together():
            found = newest_first(places, suffixes) if self._trainer.is_global_zero else []
        unread: list[CheckpointError | OSError] = []
        for path in self._tell(found):
            try:
                with self._together():
                    files = self._trainer.strategy.checkpoint_io
                    if self._trainer.is_global_zero and isinstance(files, FileCheckpointIO):
                        files.check(path)  # a sharded one is checked as it is read
                restore(str(path), weights_only=weights_only)
            except (CheckpointError, OSError) as error:  # OSError: it has gone meanwhile, perhaps for this rank alone
                if not _is_about(error, path):
                    raise
                unread.append(error)
                rank_zero_warn(f"resume='auto' passes over {path}: {error}")
                continue
            if self._is_of_a_run():
                self._resumed = True
                self._unloaded = path
                return
            rank_zero_info(f"resume='auto' passes over {path}, which has weights only")
        restore(None)
        where = ", ".join(map(str, places)) or "the folders of the checkpoint callbacks"
        if unread:
            raise CheckpointError(
                f"resume='auto' finds {len(unread)} checkpoints in {where} and can go on from none: {unread[0]}; give the "
                f"callback another folder, or this one without them, to begin anew"
            ) from unread[0]
        renamed = any(_RENAMED.fullmatch(part) for place in places for part in place.parts)
        hint = ", whose name is another one at each start: give ModelCheckpoint a dirpath" if renamed else ""
        rank_zero_info(f"resume='auto' begins anew: there is no checkpoint in {where}{hint}")

    @contextmanager
    def loading_weights(self) -> Iterator[None]:
        """The module takes the weights of the checkpoint. Whoever named none is told which one it is that does not suit.

        Raises:
            CheckpointError: the checkpoint is of another model.
        """
        path = self._unloaded
        try:
            yield
        except RuntimeError as error:
            if path is None or isinstance(error, (InternalError, RankError, UsageError)):
                raise
            raise CheckpointError(
                f"resume='auto' goes on from {path}, the newest checkpoint of its ModelCheckpoint, and the model cannot "
                f"load it: {' '.join(str(error).split())}; give the model the settings that it was saved with, or the "
                f"callback another folder, to begin anew"
            ) from error
        self._unloaded = None

    def _is_of_a_run(self) -> bool:
        """Whether what was read has more than weights; else it is dropped."""
        connector = checkpoints_of(self._trainer)
        if {"loops", "optimizer_states"} <= read_checkpoint(connector).keys():
            return True
        put_read_checkpoint(connector, {})
        return False

    def _places(self) -> list[Path]:
        """The folders of this run's checkpoint callbacks, of each one once."""
        given = dict.fromkeys(getattr(callback, "dirpath", None) for callback in self._trainer.checkpoint_callbacks)
        named = [str(place) for place in given if place]
        for place in named:
            if "://" in place:
                raise ConfigError(
                    f"resume='auto' looks for checkpoints in folders of this machine, and {place} is none; leave resume out, "
                    f"and give fit(ckpt_path='last')"
                )
        return [Path(place).absolute() for place in named]

    def let_go(self) -> None:
        """The checkpoint that the run goes on from is one of its own, removed in its turn; one that somebody has given, which
        is what Lightning calls its path, would never be."""
        if self._resumed:
            put_checkpoint_path(checkpoints_of(self._trainer), None)

    def keep_name_of_last(self) -> None:
        """`last.ckpt` stays the name of the last one. The checkpoint that the run goes on from may have been written before
        there was one, and ModelCheckpoint would leave the old one and write `last-v1.ckpt` beside it."""
        for callback in self._trainer.checkpoint_callbacks if self._resumed else ():
            if not isinstance(callback, ModelCheckpoint) or callback.last_model_path:
                continue
            if callback.save_last and "{" not in callback.CHECKPOINT_NAME_LAST:  # else the name is of a step
                callback.last_model_path = callback.format_checkpoint_name({}, callback.CHECKPOINT_NAME_LAST)


def _is_about(error: CheckpointError | OSError, path: Path) -> bool:
    """Whether an error that came while `path` was read is about its files, so that an earlier one may do. The disk tier's is
    not, and neither is that of another file, which the user's own hooks read."""
    if isinstance(error, PageIOError):
        return False
    named = getattr(error, "filename", None)
    return not isinstance(named, (str, os.PathLike)) or Path(named).absolute().is_relative_to(path)


def newest_first(places: Iterable[Path], suffixes: Collection[str] = (SUFFIX,)) -> list[Path]:
    """Full checkpoints (files) and sharded ones (folders) in these folders and those below, without links.

    Args:
        suffixes: of their names.

    Raises:
        OSError, CheckpointError: a folder is there and cannot be read.
    """
    places = tuple(places)
    for place in places:
        if place.exists() and not place.is_dir():
            raise CheckpointError(
                f"resume='auto' looks for checkpoints in {place}, which is a file; give ModelCheckpoint the dirpath of a "
                f"folder"
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
            yield Path(os.path.realpath(entry))  # links in a circle name nothing, and Path.resolve raises for them
        elif entry.is_dir() and not entry.is_symlink():
            yield from _in(entry, suffixes)


def _completed_ns(path: Path) -> int | None:
    """When it was completed; None: it is no checkpoint, but a link to nothing, a pipe, or a folder of somebody else's."""
    file = path / INDEX if is_folder(path) else path
    with contextlib.suppress(FileNotFoundError):  # somebody has removed it since
        if is_file(file):
            return file.stat().st_mtime_ns
    return None
