"""Writes ranges of bytes to files: with direct I/O where the file system allows it, in threads, and with checksums.

Owns a few aligned buffers and the threads that write them. Knows files and bytes; neither what tensors mean nor ranks.
I1: bytes are copied into a buffer at their file offset modulo a block, so that whole blocks are written with direct I/O
    and only the unaligned ends of a range through the page cache. Long ranges that stay unchanged until `finish`, and
    are aligned in memory as in the file, are written without a copy. Up to a few MiB of unaligned ends are kept until
    `finish`: a write to the page cache waits for all direct writes of its file, and later direct writes wait for it.
I2: the length of every write is checked; a short write is continued, a failed one raises in `finish` or in an earlier
call.
I3: what `finish` returns is durable: files are synced first.
"""

from __future__ import annotations

import errno
import os
import queue
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch

from lightning_ptm.errors import CheckpointError
from lightning_ptm.memory.disk import FileOps
from lightning_ptm.memory.region import HostRegion
from lightning_ptm.storage.ranges import Range, checksum_of
from lightning_ptm.terms import BLOCK_BYTES

BUFFER_BYTES = 4 << 20
BUFFERS = 10
_THREADS = 4
"""Number of writing threads. With four, checksums are computed while other threads write; two reached half of the
disk's speed."""
_IN_PLACE = 4 * _THREADS
"""Limit for pieces that wait to be written without a copy, so that `put` is not far ahead of the disk."""
_LONG_BYTES = 512 << 10
"""Shorter ranges are copied, so that many of them become one write."""
_SECTOR_BYTES = 512
"""Alignment in memory that most disks need for direct I/O; some need whole blocks."""
_KEPT_BYTES = BUFFER_BYTES
"""Bytes of unaligned ends that are kept until `finish`; further ones are written at once."""
_SYNCS = 8
"""Number of files that are synced at once: one write of the file system's journal serves all of them."""


class SaveOps(FileOps):
    """The file calls of saving; tests replace them by failing ones."""

    def fsync(self, fd: int) -> None:
        os.fsync(fd)


class FileBytes(Protocol):
    """Bytes of a file that are stored in another order in memory; they are put in order when they are copied to a
    buffer."""

    @property
    def nbytes(self) -> int:
        """Number of bytes."""

    def fill(self, into: torch.Tensor, first: int) -> None:
        """Copies bytes [first, first + into.numel()) into a uint8 tensor."""


@dataclass(slots=True)
class _File:
    name: str
    path: Path
    cached: int
    direct: int | None


@dataclass(slots=True)
class _Write:
    """Bytes to be written to [start, start + filled) of a file.

    In a buffer, they begin at `start % BLOCK_BYTES`.
    """

    file: _File
    start: int
    buffer: int | None
    filled: int = 0
    view: memoryview | None = None
    """The bytes, if they are written without a copy."""


class RangeWriter:
    """Writes ranges of the files of a folder. For one thread at a time; `abort` or `finish` ends it.

    Args:
        folder: the files' folder.
        ops: file calls, for tests.
        buffers: number of pieces of `BUFFER_BYTES` that may wait for the disk; with more, `put` waits.
    """

    def __init__(self, folder: Path, ops: SaveOps | None = None, *, buffers: int = BUFFERS) -> None:
        self._folder = folder
        self._ops = ops or SaveOps()
        self._room = BUFFER_BYTES + BLOCK_BYTES
        self._region = HostRegion(buffers * self._room)
        # Last in, first out: buffers that were never needed are never touched, so they take no memory.
        self._free: queue.LifoQueue[int] = queue.LifoQueue()
        for index in reversed(range(buffers)):
            self._free.put(index)
        self._memory_bytes = _SECTOR_BYTES
        """Alignment of memory for direct I/O; a thread raises it when a write is refused."""
        self._in_place = threading.Semaphore(_IN_PLACE)
        self._jobs: queue.SimpleQueue[_Write | None] = queue.SimpleQueue()
        self._files: dict[str, _File] = {}
        self._created: list[str] = []
        self._current: _Write | None = None
        self._lock = threading.Lock()
        self._ranges: list[Range] = []
        self._ends: list[tuple[_File, int, bytes]] = []
        self._ends_bytes = 0
        self._error: BaseException | None = None
        self._threads = [threading.Thread(target=self._work, name=f"save {i}", daemon=True) for i in range(_THREADS)]
        try:
            for thread in self._threads:
                thread.start()
        except BaseException:  # no room for another thread, or Ctrl-C
            self._threads = [each for each in self._threads if each.ident is not None]
            self._end()
            self._close()
            raise

    def create(self, name: str, head: bytes, size_bytes: int) -> None:
        """Creates a file of its full size, so that a disk that is too small is found now, and writes its first bytes.

        Raises:
            CheckpointError: there is no room, or no right to write.
        """
        path = self._folder / name
        try:
            descriptor = self._ops.open(os.fspath(path), os.O_CREAT | os.O_WRONLY | os.O_CLOEXEC, 0o666)
            try:
                if size_bytes:
                    self._ops.fallocate(descriptor, size_bytes)
                done = 0
                while done < len(head):
                    done += self._ops.pwritev(descriptor, [memoryview(head)[done:]], done)
            finally:
                self._ops.close(descriptor)
        except OSError as error:
            raise failure(path, error) from error
        self._created.append(name)  # `finish` syncs it

    def put(self, name: str, start: int, values: torch.Tensor | FileBytes, *, stays: bool = False) -> None:
        """Writes `values` (if a tensor: 1-D, contiguous, on the CPU) to a file from byte `start` on.

        Args:
            stays: the values are neither changed nor freed before `finish` or `abort` returns. Otherwise they are
                copied now.
        """
        file = self._open(name)
        if not isinstance(values, torch.Tensor):
            self._copy(file, start, values.nbytes, values.fill)
            return
        source = values.view(torch.uint8)
        done, total = 0, source.numel()
        if stays and total >= _LONG_BYTES and file.direct is not None:
            # Whole blocks of the file, without a copy, if the memory is aligned for direct I/O.
            first = -start % BLOCK_BYTES
            if (source.data_ptr() + first) % self._memory_bytes == 0:
                last = total - (start + total) % BLOCK_BYTES
                self._copy_tensor(file, start, source[:first])
                self._send()
                view = source.numpy().data
                for begin in range(first, last, BUFFER_BYTES):
                    while not self._in_place.acquire(timeout=0.5):
                        self._check()
                    stop = min(last, begin + BUFFER_BYTES)
                    self._jobs.put(_Write(file, start + begin, None, stop - begin, view[begin:stop]))
                done = last
        self._copy_tensor(file, start + done, source[done:])

    def _copy_tensor(self, file: _File, start: int, source: torch.Tensor) -> None:
        def fill(into: torch.Tensor, first: int) -> None:
            into.copy_(source[first : first + into.numel()])

        self._copy(file, start, source.numel(), fill)

    def _copy(self, file: _File, start: int, total: int, fill: Callable[[torch.Tensor, int], None]) -> None:
        done = 0
        while done < total:
            self._check()
            piece = self._current
            position = start + done
            if piece is None or piece.file is not file or piece.start + piece.filled != position:
                self._send()
                piece = self._current = _Write(file, position, self._take())
            # Cut where whole buffers of the file end, so that all but the ends of a long range are whole blocks.
            room = BUFFER_BYTES - (piece.start + piece.filled) % BUFFER_BYTES
            count = min(room, total - done)
            assert piece.buffer is not None
            begin = piece.buffer * self._room + piece.start % BLOCK_BYTES + piece.filled
            fill(self._region.tensor[begin : begin + count], done)
            piece.filled += count
            done += count
            if count == room:
                self._send()

    def finish(self) -> list[Range]:
        """Waits until everything is on the disk. Returns the ranges that were written, by file and offset.

        Raises:
            CheckpointError: a write failed.
        """
        self._send()
        self._end()
        try:
            self._check()
            self._write_ends()
            for name in self._created:
                self._open(name)
            with ThreadPoolExecutor(_SYNCS, thread_name_prefix="save sync") as pool:
                list(pool.map(self._sync, self._files.values()))
        finally:
            self._close()
        return sorted(self._ranges, key=lambda each: (each.file, each.start))

    def abort(self) -> None:
        """Ends the writer; bytes that wait are not written. Idempotent."""
        self._current = None
        self._error = self._error or CheckpointError(
            f"writing to {self._folder} was stopped before its end, since the run has failed or another rank "
            "could not write; earlier checkpoints are untouched; look for the first error"
        )
        self._end()
        self._close()

    def _sync(self, file: _File) -> None:
        try:
            self._ops.fsync(file.cached)
        except OSError as error:
            raise failure(file.path, error) from error

    # -- buffers ------------------------------------------------------------------------------------------------------

    def _take(self) -> int:
        while True:
            try:
                return self._free.get(timeout=0.5)
            except queue.Empty:
                self._check()

    def _send(self) -> None:
        piece, self._current = self._current, None
        if piece is not None:
            self._jobs.put(piece)

    def _end(self) -> None:
        for _ in self._threads:
            self._jobs.put(None)
        for thread in self._threads:
            thread.join()
        self._threads = []

    def _check(self) -> None:
        if self._error is not None:
            raise self._error

    # -- files --------------------------------------------------------------------------------------------------------

    def _open(self, name: str) -> _File:
        known = self._files.get(name)
        if known is not None:
            return known
        path = self._folder / name
        try:
            cached = self._ops.open(os.fspath(path), os.O_WRONLY | os.O_CLOEXEC, 0o666)
        except OSError as error:
            raise failure(path, error) from error
        try:
            direct = self._ops.open(os.fspath(path), os.O_WRONLY | os.O_CLOEXEC | os.O_DIRECT, 0o666)
        except OSError:  # the file system has no direct I/O
            direct = None
        self._files[name] = _File(name, path, cached, direct)
        return self._files[name]

    def _close(self) -> None:
        for file in self._files.values():
            self._ops.close(file.cached)
            if file.direct is not None:
                self._ops.close(file.direct)
        self._files.clear()
        self._region.close()

    # -- in the threads -----------------------------------------------------------------------------------------------

    def _work(self) -> None:
        while (piece := self._jobs.get()) is not None:
            try:
                if self._error is None:
                    self._write(piece)
            except BaseException as error:
                self._error = error
            if piece.buffer is not None:
                self._free.put(piece.buffer)
            else:
                self._in_place.release()

    def _write(self, piece: _Write) -> None:
        view = piece.view
        if view is None:
            assert piece.buffer is not None
            begin = piece.buffer * self._room + piece.start % BLOCK_BYTES
            view = self._region.memory[begin : begin + piece.filled]
        checksum = checksum_of(view)
        stop = piece.start + piece.filled
        first = min(stop, -(-piece.start // BLOCK_BYTES) * BLOCK_BYTES)
        last = max(first, stop // BLOCK_BYTES * BLOCK_BYTES)
        file = piece.file
        for left, right in ((piece.start, first), (last, stop)):
            end = view[left - piece.start : right - piece.start]
            if left < right and not self._keep_end(file, left, end):
                self._write_all(file, file.cached, end, left)
        if first < last:
            fd = file.cached if file.direct is None else file.direct
            self._write_all(file, fd, view[first - piece.start : last - piece.start], first)
        with self._lock:
            self._ranges.append(Range(file.name, piece.start, stop, checksum))

    def _keep_end(self, file: _File, start: int, end: memoryview) -> bool:
        """Keeps an unaligned end for `finish` if there is room; returns whether it was kept."""
        with self._lock:
            if self._ends_bytes + len(end) > _KEPT_BYTES:
                return False
            self._ends_bytes += len(end)
            self._ends.append((file, start, bytes(end)))
            return True

    def _write_ends(self) -> None:
        """Writes all ends that were kept; adjacent ones together."""
        ends, self._ends = sorted(self._ends, key=lambda end: (end[0].name, end[1])), []
        at = 0
        while at < len(ends):
            file, start, content = ends[at]
            joined = bytearray(content)
            at += 1
            while at < len(ends) and ends[at][0] is file and ends[at][1] == start + len(joined):
                joined += ends[at][2]
                at += 1
            self._write_all(file, file.cached, memoryview(joined), start)

    def _write_all(self, file: _File, fd: int, view: memoryview, offset: int) -> None:
        done = 0
        while done < len(view):
            try:
                moved = self._ops.pwritev(fd, [view[done:]], offset + done)
            except InterruptedError:
                continue
            except OSError as error:
                if error.errno == errno.EINVAL and fd == file.direct:
                    fd = file.cached  # O_DIRECT opens, but does not write, or not from this address
                    self._memory_bytes = BLOCK_BYTES
                    continue
                raise failure(file.path, error) from error
            if moved <= 0:
                raise CheckpointError(
                    f"writing {file.path} ended after {offset + done} bytes; free space on that disk, or save elsewhere"
                )
            if moved % BLOCK_BYTES and fd == file.direct:
                fd = file.cached
            done += moved


def failure(path: Path, error: OSError) -> CheckpointError:
    """Returns the error for a file that could not be written, with what to do."""
    hint = {
        errno.ENOSPC: "free space on that disk, or save elsewhere",
        errno.EDQUOT: "your quota is used up; free space, or save elsewhere",
        errno.EFBIG: "that file system, or your limits, allow no files of this size; save elsewhere",
        errno.EEXIST: "a file is where a folder has to be; save elsewhere",
        errno.ENOENT: "save where folders can be made",
        errno.ENOTDIR: "save where folders can be made",
        errno.EACCES: "save where you may write",
        errno.EROFS: "save where you may write",
    }.get(error.errno or 0, "see the system's log for the disk")
    return CheckpointError(
        f"writing {path} failed: {error.strerror or error}; {hint}; earlier checkpoints are untouched"
    )
