"""A sharded checkpoint as a folder: how it comes to be all at once, how it is told from a half-written one.

    NAME.ckpt/
      index.json            format version, step, ranks, files, names, seals; written last
      lightning.pt          Lightning's own dictionary, without the tensors that are in the other files
      0003.parameters.safetensors, 0003.exp_avg.safetensors ...    full tensors by name, one file per unit and kind of state
      ranges-00000.json     what rank 0 wrote: [file, start, stop, XXH3-64]; one for each rank

I1: a folder under its final name is complete: it was written under a name that begins with `PARTIAL`, synced, and renamed.
I2: a partial folder is locked while its writer lives, and removed by whoever finds it unlocked.
I3: a checkpoint of that name is replaced in one step; until then it is as it was. Where the file system cannot exchange two
    names, it is moved aside for a moment; after a crash in that moment, whoever saves next moves it back.
I4: nothing is removed, moved or replaced but what this file has made: by its name, and under a final name by its index.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import os
import re
import shutil
import stat
import time
import uuid
from collections.abc import Iterator
from pathlib import Path

from lightning_ptm.errors import CheckpointError
from lightning_ptm.storage.index import FORMAT, INDEX, LIGHTNING, PARTIAL, ranges_name
from lightning_ptm.storage.tensors import sync_folder
from lightning_ptm.storage.user_errors import contents
from lightning_ptm.storage.writer import failure

_ASIDE = ".lightning_ptm-replaced-"
_PARTIAL_NAME = re.compile(re.escape(PARTIAL) + "[0-9a-f]{12}")
_LOCK = "writer.lock"
_RENAME_EXCHANGE = 2
_YOUNG_S = 60.0


class Draft:
    """A checkpoint in the making, on rank 0: a locked, partial folder beside its target.

    Args:
        target: its final name.
        replace: a folder that is there is replaced (a checkpoint by the next one of its name); otherwise it has to be empty.

    Raises:
        CheckpointError: the place cannot be written to, or holds what may not be replaced.
    """

    def __init__(self, target: Path, *, replace: bool = True) -> None:
        self.target = target
        self._replace = replace
        try:
            target.parent.mkdir(parents=True, exist_ok=True)
            remove_stale(target.parent)
            if target.exists() and not target.is_dir():
                raise CheckpointError(
                    f"{target} is a file, and a sharded checkpoint is a folder; give another name, or remove the file"
                )
            if replace:
                _refuse_others(target)
            if not replace and target.exists() and any(target.iterdir()):
                raise CheckpointError(
                    f"{target} is not empty, and nothing in it is overwritten; give the name of a new folder"
                )
            self.folder, self._lock = _locked_folder(target.parent)
        except OSError as error:
            raise failure(target, error) from error

    def commit(self) -> None:
        """Everything is written: the last act (I1, I3)."""
        old: Path | None = None
        try:
            (self.folder / _LOCK).unlink()
            sync_folder(self.folder)
            if self._replace and self.target.is_symlink():
                self.target.unlink()  # it names another checkpoint, which stays
            if self._replace and self.target.exists():
                old = _exchange(self.folder, self.target)
            else:
                os.rename(self.folder, self.target)  # also onto an empty folder, and no other
            sync_folder(self.target.parent)
        except OSError as error:
            raise CheckpointError(f"{self.target} could not be put in place: {error.strerror or error}") from error
        finally:
            self._unlock()
        if old is not None:
            shutil.rmtree(old, ignore_errors=True)

    def discard(self) -> None:
        """Remove what was written. Never raises."""
        shutil.rmtree(self.folder, ignore_errors=True)
        self._unlock()

    def _unlock(self) -> None:
        lock, self._lock = self._lock, None
        if lock is not None:
            os.close(lock)


def _beside(parent: Path) -> Path:
    """A name that nobody has, of something that is not what it will be."""
    return parent / f"{PARTIAL}{uuid.uuid4().hex[:12]}"


def _locked_folder(parent: Path) -> tuple[Path, int | None]:
    """A new partial folder and the descriptor that locks it."""
    while True:
        folder = _beside(parent)
        folder.mkdir()
        lock = os.open(folder / _LOCK, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o666)
        fcntl.flock(lock, fcntl.LOCK_EX)
        if os.fstat(lock).st_nlink:
            return folder, lock
        os.close(lock)  # another run took it for a dead one's before it was locked


def _refuse_others(target: Path) -> None:
    """Raises CheckpointError where something lies in the way that is no checkpoint of ours (I4)."""
    if target.is_symlink() or not target.is_dir() or _is_ours(target) or not any(target.iterdir()):
        return
    raise CheckpointError(
        f"{target} is a folder with other things than a checkpoint, and nothing in it is removed; give another name"
    )


def _is_ours(folder: Path) -> bool:
    """Whether it is, or was before it was damaged, a sharded checkpoint."""
    try:
        return FORMAT.encode() in contents(folder / INDEX) or {entry.name for entry in folder.iterdir()} >= {
            INDEX,
            LIGHTNING,
            ranges_name(0),
        }
    except CheckpointError:
        return False


def remove_stale(parent: Path) -> None:
    """Remove partial folders and files whose writers are gone (I2), and put back what a crash has left aside (I3)."""
    for entry in parent.glob(f"{_ASIDE}*"):
        place = parent / entry.name.removeprefix(_ASIDE)
        with contextlib.suppress(OSError):
            if entry.is_symlink() or not _is_ours(entry):
                continue
            if place.is_dir():
                _delete(entry)
            elif not os.path.lexists(place):
                os.rename(entry, place)
    for entry in parent.glob(f"{PARTIAL}*"):
        if _PARTIAL_NAME.fullmatch(entry.name) is None:
            continue
        with contextlib.suppress(OSError):
            _remove_if_stale(entry)


def _remove_if_stale(entry: Path) -> None:
    mode = entry.lstat().st_mode
    locked = entry / _LOCK if stat.S_ISDIR(mode) else entry
    if stat.S_ISDIR(mode) or stat.S_ISREG(mode):
        with contextlib.suppress(FileNotFoundError):
            lock = os.open(locked, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                _delete(entry)
            finally:
                os.close(lock)
            return
    elif not stat.S_ISLNK(mode):
        return
    # A link that is about to get its name, or a folder whose writer ended while it removed or committed it, or has only
    # just made it.
    if time.time() - entry.lstat().st_mtime > _YOUNG_S:
        _delete(entry)


def _delete(entry: Path) -> None:
    if entry.is_dir() and not entry.is_symlink():
        shutil.rmtree(entry, ignore_errors=True)
    else:
        entry.unlink(missing_ok=True)


@contextlib.contextmanager
def file_draft(target: Path) -> Iterator[Path]:
    """A path to write a single file to, which takes its final name when the block ends well, synced (I1 to I3 for files).

    Raises:
        CheckpointError: the place cannot be written to, or has no room.
    """
    try:
        if target.is_dir() and not target.is_symlink():
            raise CheckpointError(
                f"{target} is a folder, and a full checkpoint is a file; give another name, or remove the folder"
            )
        target.parent.mkdir(parents=True, exist_ok=True)
        remove_stale(target.parent)
        draft, lock = _locked_file(target.parent)
        try:
            yield draft
            os.fsync(lock)
            os.replace(draft, target)
            sync_folder(target.parent)
        finally:
            draft.unlink(missing_ok=True)
            os.close(lock)
    except OSError as error:
        raise failure(target, error) from error


def _locked_file(parent: Path) -> tuple[Path, int]:
    while True:
        draft = _beside(parent)
        lock = os.open(draft, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o666)
        fcntl.flock(lock, fcntl.LOCK_EX)
        if os.fstat(lock).st_nlink:
            return draft, lock
        os.close(lock)


def remove(path: Path) -> None:
    """Remove a sharded checkpoint: out of the way first, so that half of it is never taken for a whole one."""
    gone = _beside(path.parent)
    os.rename(path, gone)
    shutil.rmtree(gone, ignore_errors=True)


def link(target: Path, name: Path) -> None:
    """Make `name` a relative link to `target`, in one step where `name` is a link or a file already.

    Raises:
        CheckpointError: `name` is a folder of something else.
    """
    _refuse_others(name)
    beside = _beside(name.parent)
    os.symlink(os.path.relpath(target, name.parent), beside)
    if name.is_dir() and not name.is_symlink():
        shutil.rmtree(name)
    os.replace(beside, name)


def _exchange(first: Path, second: Path) -> Path:
    """Give `first` the name `second`, which is taken. Returns where the folder that had it is now."""
    library = ctypes.CDLL(None, use_errno=True)
    if hasattr(library, "renameat2"):
        names = (os.fsencode(first), os.fsencode(second))
        if library.renameat2(-100, names[0], -100, names[1], _RENAME_EXCHANGE) == 0:
            return first
        number = ctypes.get_errno()
        if number not in (errno.EINVAL, errno.ENOSYS, errno.ENOTSUP):
            raise OSError(number, os.strerror(number), os.fspath(second))
    aside = second.parent / f"{_ASIDE}{second.name}"
    os.rename(second, aside)
    os.rename(first, second)
    return aside
