"""The disk tier: one preallocated file per path, O_DIRECT, pages laid round robin over the paths.

Page f lives in file f mod n at page f div n, so neighbours lie on different disks and a run of pages uses all of them.

I1: every byte is there before training starts (posix_fallocate): a full disk is an error at the start, not at step 900.
I2: no name points at a file, so a kill leaves nothing behind and two jobs may share a path. Where the file system makes none
    without a name (O_TMPFILE), it is taken away as soon as the file is open.
I3: a region may have an heir, of the same files: it has some of the pages, with their bytes, and others that are new; the
    files' space is given back by whoever closes last, and that of pages that the heir has not when the elder closes.
I4: every transfer is of whole blocks, and checked for its length; the kernel's partial progress is continued only from
    a block border (O_DIRECT refuses others).
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import os
import uuid
import warnings
from collections.abc import Sequence
from pathlib import Path

from lightning_ptm.errors import ConfigError, PageIOError
from lightning_ptm.progress import Progress, Seen
from lightning_ptm.terms import BLOCK_BYTES

RESERVED_AT_ONCE_BYTES = 1 << 30
"""A file system that knows no reservation is written to instead, at the speed of the disk."""

MEMORY_FILE_SYSTEMS = frozenset({"tmpfs", "ramfs"})


class FileOps:
    """The operating system's file calls; tests pass one that fails, is short, or waits for a hand."""

    def open(self, path: str, flags: int, mode: int) -> int:
        return os.open(path, flags, mode)

    def close(self, fd: int) -> None:
        os.close(fd)

    def free_bytes(self, path: str) -> int:
        """Bytes that this user may still write to the file system of `path`."""
        status = os.statvfs(path)
        return status.f_bavail * status.f_frsize

    def fallocate(self, fd: int, size_bytes: int, start: int = 0) -> None:
        try:
            os.posix_fallocate(fd, start, size_bytes)
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
            # Where the file system knows no reservation, glibc writes a byte to each block, which O_DIRECT refuses.
            flags = fcntl.fcntl(fd, fcntl.F_GETFL)
            fcntl.fcntl(fd, fcntl.F_SETFL, flags & ~os.O_DIRECT)
            try:
                os.posix_fallocate(fd, start, size_bytes)
                os.fdatasync(fd)
                os.posix_fadvise(fd, start, size_bytes, os.POSIX_FADV_DONTNEED)  # else it would be in RAM, too
            finally:
                fcntl.fcntl(fd, fcntl.F_SETFL, flags)

    def give_back(self, fd: int, size_bytes: int, start: int) -> None:
        """A part of a file takes no space any more, where the file system can do so."""
        keeping_size, punching = 1, 2
        ctypes.CDLL(None).fallocate(
            ctypes.c_int(fd), ctypes.c_int(keeping_size | punching), ctypes.c_int64(start), ctypes.c_int64(size_bytes)
        )

    def duplicate(self, fd: int) -> int:
        return os.dup(fd)

    def empty(self, fd: int) -> None:
        """Give a file's space back now, though a forked child (a data loader's worker) may have it open for long."""
        os.ftruncate(fd, 0)

    def preadv(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        return os.preadv(fd, buffers, offset)

    def pwritev(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        return os.pwritev(fd, buffers, offset)


def nameless(folder: Path, direct: int = 0, ops: FileOps | None = None) -> int:
    """A new, empty file without a name, open for reading and writing by its user (I2); the caller closes it.

    Args:
        direct: os.O_DIRECT or 0.

    Raises:
        OSError: the folder may not be written to, or the file system has no O_DIRECT (EINVAL).
    """
    ops = ops or FileOps()
    flags = os.O_RDWR | os.O_CLOEXEC | direct
    # Systems that make none without a name refuse with EOPNOTSUPP, EISDIR, ENOENT, EINVAL, ENOSYS: what a file with a name
    # is refused for, too, is told by that.
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
    """Make the folders that do not exist yet, each in one that does; nobody else may look into them.

    Raises:
        ConfigError: more than a folder is missing, as of a disk that is not mounted or a name that is misspelt: what would be
            made is on another file system than is meant. Or the system refuses to.
    """
    for path in paths:
        missing = next((each for each in reversed(path.absolute().parents) if not os.path.exists(each)), None)
        if missing is not None:
            raise ConfigError(
                f"disk_path {path} is in a folder that does not exist: {missing} is the first that is missing, so this may "
                f"be a misspelt name or a disk that is not mounted, and pages would fill another one; create {path.parent}, "
                f"or give another disk_path"
            )
        try:
            path.mkdir(mode=0o700, exist_ok=True)
        except FileExistsError:
            continue  # no folder: `check_folders` tells
        except OSError as error:
            raise ConfigError(
                f"disk_path {path} does not exist and cannot be made ({error.strerror}); create the folder, or give another "
                f"disk_path"
            ) from error


def check_folders(paths: Sequence[Path]) -> None:
    """Refuse paths that are no folders, also where nothing will live on disk: a misspelt one would go unnoticed.

    Raises:
        ConfigError: one is missing, or no folder.
    """
    for path in paths:
        if not path.exists():
            raise ConfigError(f"disk_path {path} does not exist; create the folder, or give another disk_path")
        if not path.is_dir():
            raise ConfigError(f"disk_path {path} is not a folder; give a folder on the disk to use")


class DiskRegion:
    """The bytes of the disk tier. Safe for threads: transfers carry their own position.

    Args:
        paths: existing, writable directories, at least one.
        page_size: bytes of a page, a multiple of BLOCK_BYTES.
        total_frames: pages in all, over all paths.
        file_ops: the file calls.
        progress: of the reservation, which some file systems take long for.
        elder: whose files these are, if it has other pages; of the same paths and page size.
        frames: the pages that there are, as intervals; None: all.
    Raises:
        ConfigError: a path is missing, no directory, or cannot be written.
        PageIOError: a path has no room for its share (errno ENOSPC, or what the system says).
    """

    def __init__(
        self,
        paths: Sequence[Path],
        *,
        page_size: int,
        total_frames: int,
        file_ops: FileOps | None = None,
        progress: Progress | None = None,
        elder: DiskRegion | None = None,
        frames: Sequence[range] | None = None,
    ) -> None:
        self.paths = tuple(Path(path) for path in paths)
        self.page_size = page_size
        self.total_frames = total_frames
        self._ops = file_ops or FileOps()

        self.frames = (range(total_frames),) if frames is None else tuple(frames)
        self._elder = elder

        # State: an open file of each path, -1 once closed.
        self._files: list[int] = []
        self._heir: DiskRegion | None = None
        progress = progress or Progress(shown=False)
        new = _without(self.frames, () if elder is None else elder.frames)
        try:
            with progress.bar("reserving disk", sum(map(len, new)) * page_size) as seen:
                for index, path in enumerate(self.paths):
                    self._files.append(self._open(path) if elder is None else elder.copy_of_file(index))
                    self._reserve(path, self._files[-1], self._places(index, new), seen)
        except BaseException:
            self.close()
            raise
        if elder is not None:
            elder.has_heir(self)

    def copy_of_file(self, index: int) -> int:
        """The file of a path, opened once more; the caller closes it."""
        return self._ops.duplicate(self._files[index])

    def has_heir(self, heir: DiskRegion) -> None:
        """From now on another region has pages of these files (I3)."""
        self._heir = heir

    @property
    def is_open(self) -> bool:
        return any(file >= 0 for file in self._files)

    def _places(self, index: int, frames: Sequence[range]) -> list[range]:
        """Where pages lie in the file of a path, in bytes."""
        paths, size = len(self.paths), self.page_size
        found = (range(-((index - each.start) // paths), -((index - each.stop) // paths)) for each in frames)
        return [range(each.start * size, each.stop * size) for each in found if each]

    @property
    def is_one_file(self) -> bool:
        """Whether neighbouring pages lie side by side, so that one transfer may go on from page to page."""
        return len(self.paths) == 1

    def lane(self, frame: int) -> int:
        """Index of the path that page `frame` lives on."""
        return frame % len(self.paths)

    def read(self, frame: int, offset_bytes: int, views: Sequence[memoryview]) -> None:
        """Fill `views`, one after the other, from page `frame` on; lengths, addresses and offset are whole blocks.

        They may go on into the next pages only where `is_one_file`.

        Raises:
            PageIOError: with the path, the page, and errno (None for a short read).
        """
        self._transfer(True, frame, offset_bytes, views)

    def write(self, frame: int, offset_bytes: int, views: Sequence[memoryview]) -> None:
        """Write `views`, one after the other, to page `frame`; as `read` otherwise."""
        self._transfer(False, frame, offset_bytes, views)

    def close(self) -> None:
        """Give the files' space back (I3) and close them. Idempotent; no transfer may be running."""
        heir, elder = self._heir, self._elder
        inherited = heir is not None and heir.is_open
        ended = _without(self.frames, heir.frames) if heir is not None and inherited else ()
        for index, file in enumerate(self._files):
            self._files[index] = -1
            if file >= 0:
                with contextlib.suppress(OSError):  # a broken disk's comes back with the last close
                    for place in self._places(index, ended):
                        self._ops.give_back(file, len(place), place.start)
                    if not inherited and not (elder is not None and elder.is_open):
                        self._ops.empty(file)
                self._ops.close(file)
        self._heir = self._elder = None

    def _transfer(self, reading: bool, frame: int, offset_bytes: int, views: Sequence[memoryview]) -> None:
        call = self._ops.preadv if reading else self._ops.pwritev
        lane = frame % len(self.paths)
        position = frame // len(self.paths) * self.page_size + offset_bytes
        wanted_bytes = sum(map(len, views))
        done_bytes = 0
        while done_bytes < wanted_bytes:
            try:
                moved_bytes = call(self._files[lane], _skip(views, done_bytes), position + done_bytes)
            except InterruptedError:
                continue
            except OSError as error:
                raise self._failure(reading, frame, f"failed: {error.strerror or error}", error.errno) from error
            if moved_bytes <= 0 or moved_bytes % BLOCK_BYTES:
                total_bytes = done_bytes + max(moved_bytes, 0)
                raise self._failure(reading, frame, f"ended after {total_bytes} of {wanted_bytes} bytes", None)
            done_bytes += moved_bytes

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
        file_system = _file_system(path)
        if file_system in MEMORY_FILE_SYSTEMS:
            _warn(path, f"is on {file_system}, which is memory: its pages take RAM and nothing is gained")
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
                f"disk_path {path} cannot be written ({error.strerror}); give a folder that this user may write to"
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
            f"disk_path {path} needs {needed_bytes} bytes for pages and has {free_bytes} bytes free "
            f"({os.strerror(number)}); {remedy}",
            path=path,
            page=None,
            errno=number,
        )


def _at_once(place: range, most: int) -> list[range]:
    """A range in parts of no more than `most`."""
    return [place[start : start + most] for start in range(0, len(place), most)]


def _without(frames: Sequence[range], others: Sequence[range]) -> list[range]:
    """Intervals of those frames that are in none of the others; both ascend."""
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
    """`views` without their first bytes."""
    if skip_bytes == 0:
        return views
    rest = []
    for view in views:
        if skip_bytes < len(view):
            rest.append(view[skip_bytes:])
        skip_bytes = max(skip_bytes - len(view), 0)
    return rest


def _file_system(path: Path) -> str:
    """Type of the file system under `path`, "" when the system does not say."""
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
