"""The bytes of the disk tier: one preallocated file per path, opened with O_DIRECT, pages striped over the paths.

Page f is in file f mod n at page f div n, so adjacent pages are on different disks and a run of pages uses all of them.

I1: every byte is reserved before training starts (posix_fallocate): a full disk is an error at the start, not at step
    900 of a run.
I2: the files have no name, so a killed process leaves nothing on disk and two jobs may share a path. If the file system
    cannot create a file without a name (O_TMPFILE), the name is removed as soon as the file is open.
I3: a region may have a successor on the same files (`set_successor`), which reuses some of the pages with their bytes
    and adds new ones. The region that closes last gives the files' space back; when the older one closes, it gives back
    the pages that the successor does not use.
I4: every transfer is whole blocks, and its length is checked. A partial transfer is continued only from a block border,
    since O_DIRECT refuses other offsets.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import os
import threading
import uuid
import warnings
from collections.abc import Sequence
from pathlib import Path

from lightning_ptm.errors import ConfigError, PageIOError, format_bytes
from lightning_ptm.memory.paged_tensor import Extent, round_up
from lightning_ptm.progress import Progress, Seen
from lightning_ptm.terms import BLOCK_BYTES

RESERVED_AT_ONCE_BYTES = 1 << 30
"""Bytes reserved by one call. A file system without reservation writes them, at the speed of the disk."""

MEMORY_FILE_SYSTEMS = frozenset({"tmpfs", "ramfs"})


class FileOps:
    """The operating system's file calls. Tests pass one that fails, transfers less, or blocks until released."""

    def open(self, path: str, flags: int, mode: int) -> int:
        return os.open(path, flags, mode)

    def close(self, fd: int) -> None:
        os.close(fd)

    def free_bytes(self, path: str) -> int:
        """Returns the bytes that this user may still write to the file system of `path`."""
        status = os.statvfs(path)
        return status.f_bavail * status.f_frsize

    def fallocate(self, fd: int, size_bytes: int, start: int = 0) -> None:
        try:
            os.posix_fallocate(fd, start, size_bytes)
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
            # If the file system has no reservation, glibc writes a byte to each block, which O_DIRECT refuses.
            flags = fcntl.fcntl(fd, fcntl.F_GETFL)
            fcntl.fcntl(fd, fcntl.F_SETFL, flags & ~os.O_DIRECT)
            try:
                os.posix_fallocate(fd, start, size_bytes)
                os.fdatasync(fd)
                os.posix_fadvise(fd, start, size_bytes, os.POSIX_FADV_DONTNEED)  # else the page cache would keep it
            finally:
                fcntl.fcntl(fd, fcntl.F_SETFL, flags)

    def give_back(self, fd: int, size_bytes: int, start: int) -> None:
        """Frees the disk space of a part of a file (punches a hole), if the file system can."""
        keeping_size, punching = 1, 2
        ctypes.CDLL(None).fallocate(
            ctypes.c_int(fd), ctypes.c_int(keeping_size | punching), ctypes.c_int64(start), ctypes.c_int64(size_bytes)
        )

    def duplicate(self, fd: int) -> int:
        return os.dup(fd)

    def empty(self, fd: int) -> None:
        """Frees a file's space now, even if a forked child (a data loader's worker) keeps it open."""
        os.ftruncate(fd, 0)

    preadv = staticmethod(os.preadv)
    pwritev = staticmethod(os.pwritev)


def nameless(folder: Path, direct: int = 0, ops: FileOps | None = None) -> int:
    """Returns a new, empty file without a name, open for reading and writing by its user (I2). The caller closes it.

    Args:
        folder: folder whose file system gets the file.
        direct: os.O_DIRECT or 0.
        ops: the file calls.

    Raises:
        OSError: the folder may not be written to, or the file system has no O_DIRECT (EINVAL).
    """
    ops = ops or FileOps()
    flags = os.O_RDWR | os.O_CLOEXEC | direct
    # Systems without O_TMPFILE refuse with EOPNOTSUPP, EISDIR, ENOENT, EINVAL or ENOSYS. Errors with another cause come
    # again from the open by name below, which reports them.
    with contextlib.suppress(OSError):
        return ops.open(os.fspath(folder), flags | os.O_TMPFILE, 0o600)
    name = os.fspath(folder / f".lightning_ptm-{os.getpid()}-{uuid.uuid4().hex}")
    try:
        file = ops.open(name, flags | os.O_CREAT | os.O_EXCL, 0o600)
    except OSError:
        with contextlib.suppress(OSError):  # open may create the name before it refuses O_DIRECT
            os.unlink(name)
        raise
    try:
        os.unlink(name)
    except OSError:
        ops.close(file)
        raise
    return file


def make_folders(paths: Sequence[Path]) -> None:
    """Creates the folders that do not exist, each in a parent that does, accessible to this user only.

    Raises:
        ConfigError: the parent does not exist either, as with a disk that is not mounted or a misspelt name: a folder
            created there would be on another file system than intended. So would be one directly under the root. Or the
            system refuses to create it.
    """
    for path in paths:
        missing = next((each for each in reversed(path.absolute().parents) if not os.path.exists(each)), None)
        if missing is not None:
            raise ConfigError(
                f"disk_path {path} is in a folder that does not exist: {missing} is the first that is missing, so this may "
                f"be a misspelt name or a disk that is not mounted, and pages would fill another disk; create "
                f"{path.parent}, or give another disk_path"
            )
        if path.absolute().parent == Path(path.absolute().anchor) and not path.exists():
            raise ConfigError(
                f"disk_path {path} does not exist, and a folder directly under {path.absolute().anchor} is most often where "
                f"a disk is mounted, without which pages would fill the system's own; create {path} if it should be there, "
                "mount the disk, or give another disk_path"
            )
        try:
            path.mkdir(mode=0o700, exist_ok=True)
        except FileExistsError:
            continue  # a file: `check_folders` reports it
        except OSError as error:
            raise ConfigError(
                f"disk_path {path} does not exist and cannot be made ({error.strerror}), so there is no disk tier; "
                "create the folder, or give another disk_path"
            ) from error


def check_folders(paths: Sequence[Path]) -> None:
    """Checks that all paths are folders where files can be, even if nothing will be on disk: a path that is wrong is noticed
    before the first run that needs it.

    Raises:
        ConfigError: a path is missing, is no folder, takes no files, or is given twice.
    """
    for path in paths:
        if not path.exists():
            raise ConfigError(f"disk_path {path} does not exist; create the folder, or give another disk_path")
        if not path.is_dir():
            raise ConfigError(f"disk_path {path} is not a folder; give a folder on the disk to use")
        status = os.statvfs(path)
        if status.f_flag & os.ST_RDONLY or not status.f_blocks:  # /proc and /sys have no blocks
            raise ConfigError(f"disk_path {path} is on a file system that takes no files; give another folder")
    for path in paths:
        if sum(path.samefile(other) for other in paths) > 1:
            raise ConfigError(f"disk_path names the folder {path} twice; name each once, on a disk of its own")


class DiskRegion:
    """The bytes of the disk tier. Safe for threads: every transfer passes its own file position.

    Args:
        paths: existing, writable directories, at least one.
        page_size: bytes of a page, a multiple of BLOCK_BYTES.
        total_frames: pages over all paths.
        file_ops: the file calls.
        progress: progress bar of the reservation, which takes long on some file systems.
        predecessor: the predecessor whose files are used (I3), with the same paths and page size; None: new files.
        frames: the pages of this region, as ascending intervals; None: all.
    Raises:
        ConfigError: a path is missing, no directory, or cannot be written.
        PageIOError: a path has no room for its share (errno ENOSPC, or the system's error).
    """

    def __init__(
        self,
        paths: Sequence[Path],
        *,
        page_size: int,
        total_frames: int,
        file_ops: FileOps | None = None,
        progress: Progress | None = None,
        predecessor: DiskRegion | None = None,
        frames: Sequence[range] | None = None,
    ) -> None:
        self.paths = tuple(Path(path) for path in paths)
        self.page_size = page_size
        self.total_frames = total_frames
        self.is_one_file = len(self.paths) == 1
        """Whether consecutive pages are adjacent on disk, so that one transfer may cross page borders."""
        self._ops = file_ops or FileOps()

        self.frames = (range(total_frames),) if frames is None else tuple(frames)
        self._predecessor = predecessor

        # State: an open file of each path, -1 once closed.
        self._files: list[int] = []
        self._written_bytes = [0] * len(self.paths)
        """By path, bytes written by transfers, under `_counting`."""
        self._counting = threading.Lock()
        self._successor: DiskRegion | None = None
        progress = progress or Progress(shown=False)
        new = _without(self.frames, () if predecessor is None else predecessor.frames)
        try:
            with progress.bar("reserving disk", sum(map(len, new)) * page_size) as seen:
                for index, path in enumerate(self.paths):
                    self._files.append(self._open(path) if predecessor is None else predecessor.duplicate_file(index))
                    self._reserve(path, self._files[-1], self._places(index, new), seen)
        except BaseException:
            self.close()
            raise
        if predecessor is not None:
            predecessor.set_successor(self)

    def duplicate_file(self, index: int) -> int:
        """Returns a duplicate of the file descriptor of a path; the caller closes it."""
        return self._ops.duplicate(self._files[index])

    def set_successor(self, successor: DiskRegion) -> None:
        """Registers the successor, which uses pages of these files from now on (I3)."""
        self._successor = successor

    def grow(self, total_frames: int) -> None:
        """Reserves pages behind the last one, so that there are `total_frames`. No effect on transfers that are running.

        Raises:
            PageIOError: a path has no room for its share. The pages are as before.
        """
        more = range(self.total_frames, total_frames)
        for index, path in enumerate(self.paths):
            self._reserve(path, self._files[index], self._places(index, (more,)), _unseen)
        self.frames = (*self.frames, more)
        self.total_frames = total_frames

    @property
    def is_open(self) -> bool:
        return any(file >= 0 for file in self._files)

    def _places(self, index: int, frames: Sequence[range]) -> list[range]:
        """Returns the byte ranges of pages in the file of a path."""
        paths, size = len(self.paths), self.page_size
        found = (range(-((index - each.start) // paths), -((index - each.stop) // paths)) for each in frames)
        return [range(each.start * size, each.stop * size) for each in found if each]

    def written_bytes(self) -> tuple[int, ...]:
        """Returns the bytes that transfers have written to each path so far, in whole blocks."""
        with self._counting:
            return tuple(self._written_bytes)

    def lane(self, frame: int) -> int:
        """Returns the index of the path that stores page `frame`."""
        return frame % len(self.paths)

    def read(self, start_bytes: int, views: Sequence[memoryview]) -> None:
        """Reads into `views`, in order, from byte `start_bytes` of the tier on; all in whole blocks.

        The range may extend into the following pages only if `is_one_file`.

        Raises:
            PageIOError: with the path, the page, and errno (None for a short read).
        """
        self.transfer(True, start_bytes, views)

    def write(self, start_bytes: int, views: Sequence[memoryview]) -> None:
        """Writes `views`, in order, from byte `start_bytes` of the tier on; otherwise as `read`."""
        self.transfer(False, start_bytes, views)

    def close(self) -> None:
        """Frees the files' space (I3) and closes them. Idempotent; no transfer may be running."""
        successor, predecessor = self._successor, self._predecessor
        is_reused = successor is not None and successor.is_open
        ended = _without(self.frames, successor.frames) if successor is not None and is_reused else ()
        for index, file in enumerate(self._files):
            self._files[index] = -1
            if file >= 0:
                with contextlib.suppress(OSError):  # on a broken disk, the last close frees the space
                    for place in self._places(index, ended):
                        self._ops.give_back(file, len(place), place.start)
                    if not is_reused and not (predecessor is not None and predecessor.is_open):
                        self._ops.empty(file)
                self._ops.close(file)
        self._successor = self._predecessor = None

    def transfer(self, reading: bool, start_bytes: int, views: Sequence[memoryview]) -> None:
        """Implements `read` (with `reading`) and `write`."""
        call = self._ops.preadv if reading else self._ops.pwritev
        frame, offset_bytes = divmod(start_bytes, self.page_size)
        file = self._files[frame % len(self.paths)]
        position = frame // len(self.paths) * self.page_size + offset_bytes
        wanted_bytes = 0
        for view in views:
            wanted_bytes += len(view)
        done_bytes = 0
        while done_bytes < wanted_bytes:
            try:
                moved_bytes = call(file, _skip(views, done_bytes) if done_bytes else views, position + done_bytes)
            except InterruptedError:
                continue
            except OSError as error:
                raise self._failure(reading, frame, f"failed: {error.strerror or error}", error.errno) from error
            if moved_bytes <= 0 or moved_bytes % BLOCK_BYTES:
                total_bytes = done_bytes + max(moved_bytes, 0)
                raise self._failure(reading, frame, f"ended after {total_bytes} of {wanted_bytes} bytes", None)
            done_bytes += moved_bytes
        if not reading:
            with self._counting:
                self._written_bytes[frame % len(self.paths)] += done_bytes

    def _failure(self, reading: bool, frame: int, what: str, number: int | None) -> PageIOError:
        path = self.paths[self.lane(frame)]
        return PageIOError(
            f"{'reading' if reading else 'writing'} page {frame} in {path} {what} (errno {number}); "
            "its contents are lost and training cannot go on: check the disk, then resume from a checkpoint",
            path=path,
            page=frame,
            errno=number,
        )

    def _open(self, path: Path) -> int:
        check_folders([path])
        file_system = file_system_type(path)
        if file_system in MEMORY_FILE_SYSTEMS:
            _warn(path, f"is on {file_system}, which is memory: its pages take RAM and offload saves nothing")
        try:
            try:
                return nameless(path, os.O_DIRECT, self._ops)
            except OSError as error:
                if error.errno != errno.EINVAL:
                    raise
                file = nameless(path, 0, self._ops)
                if file_system not in MEMORY_FILE_SYSTEMS:
                    _warn(path, "has no O_DIRECT: pages go through the system's cache, which takes RAM and time")
                return file
        except OSError as error:
            raise ConfigError(
                f"disk_path {path} cannot be written ({error.strerror}), so there is no disk tier; give a folder that "
                "this user may write to"
            ) from error

    def _reserve(self, path: Path, file: int, places: Sequence[range], seen: Seen) -> None:
        needed_bytes = sum(map(len, places))
        if needed_bytes == 0:
            return
        free_bytes = self._ops.free_bytes(os.fspath(path))
        number = errno.ENOSPC
        if needed_bytes <= free_bytes:
            try:
                for place in places:
                    for part in _at_once(place, RESERVED_AT_ONCE_BYTES):
                        self._ops.fallocate(file, len(part), part.start)
                        seen(len(part))
                return
            except OSError as error:
                number = error.errno or errno.EIO
        remedy = "free some space, lower disk_memory, or give more or other paths"
        if number == errno.EFBIG:
            remedy = "lower disk_memory, raise the limit of a file's size (ulimit -f), or give more paths"
        raise PageIOError(
            f"disk_path {path} needs {format_bytes(needed_bytes)} for pages and has {format_bytes(free_bytes)} "
            f"free ({os.strerror(number)}); {remedy}",
            path=path,
            page=None,
            errno=number,
        )


def _unseen(size_bytes: int) -> None:
    """Shows no progress."""


def bytes_by_path(extents: Sequence[Extent], page_size: int, paths: int) -> list[int]:
    """Returns the bytes that a write of `extents` of the tier writes to each path. The last block is written whole."""
    found = [0] * paths
    for place, extent in enumerate(extents):
        stop_bytes = round_up(extent.stop_bytes) if place == len(extents) - 1 else extent.stop_bytes
        for path in range(paths):
            below = [_bytes_below(each, path, page_size, paths) for each in (extent.start_bytes, stop_bytes)]
            found[path] += below[1] - below[0]
    return found


def _bytes_below(offset_bytes: int, path: int, page_size: int, paths: int) -> int:
    """Returns the number of the tier's first `offset_bytes` bytes that are on a path."""
    frame, rest_bytes = divmod(offset_bytes, page_size)
    return (frame + paths - 1 - path) // paths * page_size + (rest_bytes if frame % paths == path else 0)


def _at_once(place: range, most: int) -> list[range]:
    """Cuts a range into parts of at most `most`."""
    return [place[start : start + most] for start in range(0, len(place), most)]


def _without(frames: Sequence[range], others: Sequence[range]) -> list[range]:
    """Returns the intervals of `frames` that are in none of the `others`; both ascend."""
    found = []
    for each in frames:
        start = each.start
        for other in others:
            if other.start < each.stop and start < other.stop:
                found.append(range(start, other.start))
                start = other.stop
        found.append(range(start, each.stop))
    return [each for each in found if each]


def _skip(views: Sequence[memoryview], skip_bytes: int) -> Sequence[memoryview]:
    """Returns `views` without their first `skip_bytes` bytes."""
    rest = []
    for view in views:
        if skip_bytes < len(view):
            rest.append(view[skip_bytes:])
        skip_bytes = max(skip_bytes - len(view), 0)
    return rest


def file_system_type(path: Path) -> str:
    """Returns the type of the file system that holds `path`; "" if the system does not say."""
    device = os.stat(path).st_dev
    wanted = f"{os.major(device)}:{os.minor(device)}"
    try:
        lines = Path("/proc/self/mountinfo").read_text().splitlines()
    except OSError:
        return ""
    for line in lines:
        mount, _, source = line.partition(" - ")
        if mount.split()[2] == wanted:
            return source.split()[0]
    return ""


def _warn(path: Path, what: str) -> None:
    warnings.warn(f"disk_path {path} {what}; give a folder on an SSD", UserWarning, stacklevel=2)
