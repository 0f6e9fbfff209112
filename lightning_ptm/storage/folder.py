"""A sharded checkpoint as a folder: how it comes to be all at once, how it is told from a half-written one, what its index
says.

    NAME.ckpt/
      index.json            format version, step, ranks, files, names; written last
      lightning.pt          Lightning's own dictionary, without the tensors that are in the other files
      0003.parameters.safetensors, 0003.exp_avg.safetensors ...    full tensors by name, one file per unit and kind of state
      ranges-00000.json     what rank 0 wrote: [file, start, stop, XXH3-64]; one for each rank

I1: a folder under its final name is complete: it was written under a name that begins with `PARTIAL`, synced, and renamed.
I2: a partial folder is locked while its writer lives, and removed by whoever finds it unlocked.
I3: a checkpoint of that name is replaced in one step; until then it is as it was. Where the file system cannot exchange two
    names, it is moved aside for a moment; after a crash in that moment, whoever saves next moves it back.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import json
import os
import shutil
import time
import uuid
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

from lightning_ptm.errors import CheckpointError
from lightning_ptm.storage.reading import is_file, is_folder, unread
from lightning_ptm.storage.tensors import sync_folder
from lightning_ptm.storage.writer import Range, SaveOps, checksum_of, failure

FORMAT = "lightning_ptm sharded checkpoint"
VERSION = 2
_DIGESTS: Mapping[int, Callable[[memoryview], int]] = {1: zlib.crc32, 2: checksum_of}
"""The checksums of a folder, by its format version."""
INDEX = "index.json"
LIGHTNING = "lightning.pt"
PARTIAL = ".partial-"
_ASIDE = ".replaced-"
PARAMETERS = "parameters"
"""The kind of state that is no slot of an optimizer."""
_LOCK = "writer.lock"
_RENAME_EXCHANGE = 2
_YOUNG_S = 60.0


@dataclass(frozen=True, slots=True)
class StateFile:
    """One safetensors file: which unit's, and which kind of state ("parameters", or a slot of the optimizer)."""

    name: str
    unit: str
    kind: str
    size_bytes: int


@dataclass(frozen=True, slots=True)
class OptimizerIndex:
    """One optimizer: its parameters' names in its own order, and its element-wise state by name."""

    name: str
    parameters: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Index:
    """What is in the folder.

    Args:
        step: optimizer steps done.
        world_size: ranks that wrote it.
        page_size: bytes of a page then.
        writer: package and version.
        files: all safetensors files.
        parameters: name in the state dict -> name of the tensor (several where weights are tied).
        state: all names of the state dict, in its order.
        optimizers: none where only weights were saved.
        version: of the folder's format.
    """

    step: int
    world_size: int
    page_size: int
    writer: str
    files: tuple[StateFile, ...]
    parameters: Mapping[str, str]
    state: tuple[str, ...]
    optimizers: tuple[OptimizerIndex, ...] = field(default=())
    version: int = VERSION

    def write(self, folder: Path, ops: SaveOps | None = None) -> None:
        """Write and sync it."""
        content = json.dumps({"format": FORMAT, "version": self.version, **asdict(self)}, indent=1).encode()
        write_synced(folder / INDEX, content, ops)


def is_sharded(path: Path) -> bool:
    """Whether there is a complete sharded checkpoint."""
    return is_folder(path) and is_file(path / INDEX) and not path.name.startswith(PARTIAL)


def read_index(path: Path) -> Index:
    """Read and check a folder's index.

    Raises:
        CheckpointError: it is no such folder, is incomplete, or of a newer version.
    """
    if path.name.startswith(PARTIAL):
        raise CheckpointError(f"{path} was never finished: its writer ended before its time; use an earlier checkpoint")
    if is_folder(path) and not is_file(path / INDEX):
        raise CheckpointError(
            f"{path} is a folder without {INDEX}, so it is no checkpoint of AngelPTMStrategy(state_dict_type='sharded'); "
            f"give the path of a checkpoint"
        )
    try:
        values = json.loads((path / INDEX).read_bytes())
        if values["format"] != FORMAT:
            raise ValueError(f"its format is {values['format']!r}")
        if values["version"] > VERSION:
            raise CheckpointError(
                f"{path} has format version {values['version']} and this lightning_ptm reads up to {VERSION}; update "
                f"lightning_ptm"
            )
        return Index(
            step=int(values["step"]),
            world_size=int(values["world_size"]),
            page_size=int(values["page_size"]),
            writer=str(values["writer"]),
            files=tuple(StateFile(**each) for each in values["files"]),
            parameters=dict(values["parameters"]),
            state=tuple(values["state"]),
            optimizers=tuple(OptimizerIndex(each["name"], tuple(each["parameters"])) for each in values["optimizers"]),
            version=int(values["version"]),
        )
    except OSError as error:
        raise unread(path / INDEX, error) from error
    except (ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"{path / INDEX} is damaged ({error}); use an earlier checkpoint") from error


def ranges_name(rank: int) -> str:
    """The file of what a rank wrote."""
    return f"ranges-{rank:05d}.json"


def write_ranges(folder: Path, rank: int, ranges: Sequence[Range], ops: SaveOps | None = None) -> None:
    """Write and sync what a rank wrote: its last act, which others may look for."""
    rows = [[each.file, each.start, each.stop, each.checksum] for each in ranges]
    path = folder / ranges_name(rank)
    beside = path.with_suffix(".new")
    write_synced(beside, json.dumps(rows, separators=(",", ":")).encode(), ops)
    try:
        os.replace(beside, path)
    except OSError as error:
        raise failure(path, error) from error


def all_have_written(folder: Path, world_size: int) -> bool:
    """Whether every rank has done its last act."""
    return all((folder / ranges_name(rank)).exists() for rank in range(world_size))


def all_ranges(folder: Path, index: Index) -> dict[str, list[Range]]:
    """All that was written, by file and in order.

    Raises:
        CheckpointError: a list is missing or damaged, or bytes of a file were written by nobody.
    """
    found: dict[str, list[Range]] = {file.name: [] for file in index.files}
    for rank in range(index.world_size):
        path = folder / ranges_name(rank)
        try:
            for name, start, stop, checksum in json.loads(path.read_bytes()):
                found[name].append(Range(name, int(start), int(stop), int(checksum), _DIGESTS[index.version]))
        except PermissionError as error:
            raise unread(path, error) from error
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise CheckpointError(f"{path} is missing or damaged ({error}); use an earlier checkpoint") from error
    for ranges in found.values():
        ranges.sort(key=lambda each: each.start)
    return found


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


def _locked_folder(parent: Path) -> tuple[Path, int | None]:
    """A new partial folder and the descriptor that locks it."""
    while True:
        folder = parent / f"{PARTIAL}{uuid.uuid4().hex[:12]}"
        folder.mkdir()
        lock = os.open(folder / _LOCK, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o666)
        fcntl.flock(lock, fcntl.LOCK_EX)
        if os.fstat(lock).st_nlink:
            return folder, lock
        os.close(lock)  # another run took it for a dead one's before it was locked


def remove_stale(parent: Path) -> None:
    """Remove partial folders and files whose writers are gone (I2), and put back what a crash has left aside (I3)."""
    for entry in parent.glob(f"{_ASIDE}*"):
        place = parent / entry.name.removeprefix(_ASIDE)
        with contextlib.suppress(OSError):
            if place.exists():
                _delete(entry)
            else:
                os.rename(entry, place)
    for entry in parent.glob(f"{PARTIAL}*"):
        if entry.is_symlink():
            _delete(entry)
            continue
        try:
            lock = os.open(entry / _LOCK if entry.is_dir() else entry, os.O_RDWR | os.O_CLOEXEC)
        except FileNotFoundError:
            # Its writer ended while it removed or committed it, or has only just made it.
            with contextlib.suppress(OSError):
                if time.time() - entry.stat().st_mtime > _YOUNG_S:
                    _delete(entry)
            continue
        except OSError:
            continue
        try:
            with contextlib.suppress(BlockingIOError):
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                _delete(entry)
        finally:
            os.close(lock)


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
        draft = parent / f"{PARTIAL}{uuid.uuid4().hex[:12]}"
        lock = os.open(draft, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o666)
        fcntl.flock(lock, fcntl.LOCK_EX)
        if os.fstat(lock).st_nlink:
            return draft, lock
        os.close(lock)


def remove(path: Path) -> None:
    """Remove a sharded checkpoint: out of the way first, so that half of it is never taken for a whole one."""
    gone = path.parent / f"{PARTIAL}{uuid.uuid4().hex[:12]}"
    os.rename(path, gone)
    shutil.rmtree(gone, ignore_errors=True)


def write_synced(path: Path, content: bytes, ops: SaveOps | None = None) -> None:
    """Write a small file and make it durable.

    Raises:
        CheckpointError: it failed.
    """
    ops = ops or SaveOps()
    try:
        descriptor = ops.open(os.fspath(path), os.O_CREAT | os.O_TRUNC | os.O_WRONLY | os.O_CLOEXEC, 0o666)
        try:
            done = 0
            while done < len(content):
                done += ops.pwritev(descriptor, [memoryview(content)[done:]], done)
            ops.fsync(descriptor)
        finally:
            ops.close(descriptor)
    except OSError as error:
        raise failure(path, error) from error


def link(target: Path, name: Path) -> None:
    """Make `name` a relative link to `target`, in one step where `name` is a link or a file already."""
    beside = name.parent / f"{PARTIAL}{uuid.uuid4().hex[:12]}"
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
