"""The folder of a sharded checkpoint: it appears atomically, and unfinished folders are recognised and removed.

    NAME.ckpt/
      index.json            format version, step, ranks, files, names, seals; written last
      lightning.pt          Lightning's own dictionary, without the tensors that are in the other files
      0003.parameters.safetensors, 0003.exp_avg.safetensors ...    full tensors by name, one file per unit and kind of
      state ranges-00000.json     what rank 0 wrote: [file, start, stop, XXH3-64]; one for each rank

I1: a folder under its final name is complete: it was written under a name that begins with `PARTIAL`, synced, and
renamed.
I2: a partial folder is locked while its writer lives; the next writer in its parent folder removes it if it is not
locked.
I3: a checkpoint of the same name is replaced atomically; until then it is unchanged. If the file system cannot exchange
    two names, it is moved aside for a moment; after a crash in that moment, the next writer moves it back.
I4: this file removes, moves or replaces only what it has made, recognised by its name, and under a final name by its
index.
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
    """A checkpoint that is being written, on rank 0: a locked, partial folder in the same parent folder as its target.

    Args:
        target: its final name.
        replace: an existing checkpoint of that name is replaced; if False, a folder of that name has to be empty.

    Raises:
        CheckpointError: the parent folder cannot be written to, or the target is something that must not be replaced.
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
                    f"{target} is not empty, and no file in it may be overwritten; give the name of a new folder"
                )
            self.folder, self._lock = _locked_folder(target.parent)
        except OSError as error:
            raise failure(target, error) from error

    def commit(self) -> None:
        """Gives the folder its final name. Called last, when everything is written (I1, I3)."""
        old: Path | None = None
        try:
            (self.folder / _LOCK).unlink()
            sync_folder(self.folder)
            if self._replace and self.target.is_symlink():
                self.target.unlink()  # a link to another checkpoint, which stays
            if self._replace and self.target.exists():
                old = _exchange(self.folder, self.target)
            else:
                os.rename(self.folder, self.target)  # replaces an empty folder, and fails for any other
            sync_folder(self.target.parent)
        except OSError as error:
            raise CheckpointError(
                f"{self.target} is written, but could not get its name: {error.strerror or error}; earlier checkpoints "
                f"are untouched; see that its folder exists and is writable, and save again"
            ) from error
        finally:
            self._unlock()
        if old is not None:
            shutil.rmtree(old, ignore_errors=True)

    def discard(self) -> None:
        """Removes what was written. Never raises."""
        shutil.rmtree(self.folder, ignore_errors=True)
        self._unlock()

    def _unlock(self) -> None:
        lock, self._lock = self._lock, None
        if lock is not None:
            os.close(lock)


def _temporary_name(parent: Path) -> Path:
    """Returns an unused name for a partial folder or file in `parent`."""
    return parent / f"{PARTIAL}{uuid.uuid4().hex[:12]}"


def _locked_folder(parent: Path) -> tuple[Path, int | None]:
    """Creates a partial folder and returns it with the descriptor that locks it."""
    while True:
        folder = _temporary_name(parent)
        folder.mkdir()
        lock = os.open(folder / _LOCK, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o666)
        fcntl.flock(lock, fcntl.LOCK_EX)
        if os.fstat(lock).st_nlink:
            return folder, lock
        os.close(lock)  # another run has removed it before it was locked


def _refuse_others(target: Path) -> None:
    """Raises CheckpointError if `target` is a folder that is not a sharded checkpoint (I4)."""
    if target.is_symlink() or not target.is_dir() or _is_ours(target) or not any(target.iterdir()):
        return
    raise CheckpointError(
        f"{target} is a folder with other files than a checkpoint's, which must not be removed; give another name"
    )


def _is_ours(folder: Path) -> bool:
    """Returns whether a folder is a sharded checkpoint, or was one before it was damaged."""
    try:
        return FORMAT.encode() in contents(folder / INDEX) or {entry.name for entry in folder.iterdir()} >= {
            INDEX,
            LIGHTNING,
            ranges_name(0),
        }
    except CheckpointError:
        return False


def remove_stale(parent: Path) -> None:
    """Removes partial folders and files of writers that have ended (I2), and moves back what a crash left aside
    (I3)."""
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
    # A link that is about to be renamed, or a folder without a lock file: just made, or its writer ended while it
    # removed or committed it.
    if time.time() - entry.lstat().st_mtime > _YOUNG_S:
        _delete(entry)


def _delete(entry: Path) -> None:
    if entry.is_dir() and not entry.is_symlink():
        shutil.rmtree(entry, ignore_errors=True)
    else:
        entry.unlink(missing_ok=True)


@contextlib.contextmanager
def file_draft(target: Path) -> Iterator[Path]:
    """Context with the path of a temporary file, which is synced and renamed to `target` when the block ends without
    error (I1 to I3 for files).

    Raises:
        CheckpointError: the folder cannot be written to, or has no room.
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
        draft = _temporary_name(parent)
        lock = os.open(draft, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o666)
        fcntl.flock(lock, fcntl.LOCK_EX)
        if os.fstat(lock).st_nlink:
            return draft, lock
        os.close(lock)


def remove(path: Path) -> None:
    """Removes a sharded checkpoint. It is renamed first, so that a partly removed one is never taken for a whole
    one."""
    gone = _temporary_name(path.parent)
    os.rename(path, gone)
    shutil.rmtree(gone, ignore_errors=True)


def link(target: Path, name: Path) -> None:
    """Makes `name` a relative link to `target`; atomically if `name` is a link or a file.

    Raises:
        CheckpointError: `name` is a folder that is not a checkpoint.
    """
    _refuse_others(name)
    temporary = _temporary_name(name.parent)
    os.symlink(os.path.relpath(target, name.parent), temporary)
    try:
        if name.is_dir() and not name.is_symlink():
            shutil.rmtree(name)
        os.replace(temporary, name)
    except BaseException:
        temporary.unlink()
        raise


def _exchange(first: Path, second: Path) -> Path:
    """Gives `first` the name `second`, which is in use. Returns where the folder that had this name is now."""
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
