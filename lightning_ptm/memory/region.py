"""The bytes of a RAM or device tier: one uint8 tensor, allocated once at the start (the paper's Allocator, section 5).

I1: a region has exactly the bytes requested, never rounded up to a power of two, and starts on a block.
I2: the system commits host bytes when they are first touched, not when they are mapped.
I3: a forked child (a data loader's worker) does not get host regions (MADV_DONTFORK). If it did, copy-on-write would
    double the memory page by page, and open(2) forbids O_DIRECT transfers into private memory while a process forks:
    the bytes could end up in the child. A child that reads a view of a region dies of SIGSEGV.
I4: the memory lives until the last view of it dies, also after close().
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import mmap
from typing import Protocol

import torch

from lightning_ptm.errors import CapacityError, ConfigError, format_bytes
from lightning_ptm.terms import BLOCK_BYTES


class Region(Protocol):
    """The bytes of a tier. `tensor` is 1-D, uint8."""

    tensor: torch.Tensor

    def discard(self, start: int, size_bytes: int) -> None:
        """Discards the contents of these bytes. Their RAM goes back to the system; they read as zeros afterwards."""

    def close(self) -> None: ...


class PageLocks(Protocol):
    """Page-locks memory, so that a device can copy from and to it by DMA."""

    def lock_pages(self, address: int, size_bytes: int) -> None:
        """Page-locks memory. Raises ConfigError if the system refuses."""

    def unlock_pages(self, address: int) -> None: ...


class HostRegion:
    """Anonymous, private memory, also accessible as a memoryview for disk transfers.

    Args:
        size_bytes: exact size; 0 is allowed.
        lock: page-locks the memory (which commits all of it at once); None: not page-locked.
        has_bytes: whether there is memory; without it, `tensor` is on the meta device.
    Raises:
        ConfigError: the system cannot map or page-lock so much.
    """

    def __init__(self, size_bytes: int, *, lock: PageLocks | None = None, has_bytes: bool = True) -> None:
        self._lock: PageLocks | None = None
        self._mapping: mmap.mmap | None = None
        if size_bytes == 0 or not has_bytes:
            self.tensor = torch.empty(size_bytes, dtype=torch.uint8, device="cpu" if has_bytes else "meta")
            self.memory = memoryview(bytearray())
            return
        try:
            mapping = mmap.mmap(-1, size_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        except (OSError, ValueError, OverflowError) as error:
            raise ConfigError(
                f"the system cannot map {format_bytes(size_bytes)} of memory ({error}), so pages cannot be made; "
                "lower host_memory (device_memory on a CPU)"
            ) from error
        _advise(mapping)
        self._mapping = mapping
        self.memory = memoryview(mapping)
        self.tensor = torch.frombuffer(mapping, dtype=torch.uint8)
        if lock is not None:
            self.lock(lock)

    @property
    def pinned(self) -> bool:
        """Whether the memory is page-locked."""
        return self._lock is not None

    def lock(self, by: PageLocks) -> None:
        """Page-locks the memory, which commits all of it; no effect if it is locked, or empty."""
        if self._mapping is not None and self._lock is None:
            by.lock_pages(self.tensor.data_ptr(), self.tensor.numel())
            self._lock = by

    def unlock(self) -> None:
        """Ends the page lock, so that `discard` returns RAM to the system again."""
        lock, self._lock = self._lock, None
        if lock is not None:
            lock.unlock_pages(self.tensor.data_ptr())

    def uncommitted_bytes(self) -> int:
        """Returns the bytes that the system has not committed yet (I2): they will take RAM that is free now."""
        if self._mapping is None or self._lock is not None:
            return 0
        size = self.tensor.numel()
        pages = -(-size // mmap.PAGESIZE)
        resident = (ctypes.c_ubyte * pages)()
        address = ctypes.c_void_p(self.tensor.data_ptr())
        if ctypes.CDLL(None).mincore(address, ctypes.c_size_t(size), resident):
            return 0
        return bytes(resident).count(0) * mmap.PAGESIZE

    def discard(self, start: int, size_bytes: int) -> None:
        """Discards contents as `Region.discard`, of the system's whole pages in the range; none if page-locked."""
        first = -(-start // mmap.PAGESIZE) * mmap.PAGESIZE
        stop = (start + size_bytes) // mmap.PAGESIZE * mmap.PAGESIZE
        if self._mapping is not None and self._lock is None and first < stop:
            self._mapping.madvise(mmap.MADV_DONTNEED, first, stop - first)

    def close(self) -> None:
        """Gives the memory up; it is unmapped when the last view dies (I4)."""
        self.unlock()
        self._mapping = None
        self.tensor = torch.empty(0, dtype=torch.uint8)
        self.memory = memoryview(bytearray())


class TorchLockedRegion(HostRegion):
    """A host region page-locked by PyTorch's allocator, for devices whose drivers cannot lock memory of others.

    Args:
        size_bytes: exact size of `tensor`; the allocator takes the next power of two, an exception to I1.
    Raises:
        ConfigError: the device's library has no page-locked memory, or not so much.
    """

    def __init__(self, size_bytes: int) -> None:
        super().__init__(0)
        self._is_locked = False
        if size_bytes == 0:
            return
        try:
            whole = torch.empty(size_bytes, dtype=torch.uint8, pin_memory=True)
            if whole.data_ptr() % BLOCK_BYTES:
                whole = torch.empty(size_bytes + BLOCK_BYTES, dtype=torch.uint8, pin_memory=True)
        except RuntimeError as error:
            raise ConfigError(
                f"PyTorch could not page-lock (pin) {format_bytes(size_bytes)} of RAM ({error}), so pages cannot be "
                f"made; lower host_memory, at best to a power of two, to which PyTorch rounds up, or raise the limit "
                f"of locked memory (ulimit -l)"
            ) from error
        start = -whole.data_ptr() % BLOCK_BYTES
        self.tensor = whole[start : start + size_bytes]
        self.memory = self.tensor.numpy().data
        self._is_locked = True
        self._advise(mmap.MADV_DONTFORK)  # I3

    @property
    def pinned(self) -> bool:
        return self._is_locked

    def close(self) -> None:
        if self._is_locked:
            self._advise(mmap.MADV_DOFORK)  # PyTorch's allocator may reuse it for tensors that forked children read
        self._is_locked = False
        super().close()

    def _advise(self, advice: int) -> None:
        """Advises the kernel on the region's whole system pages. A refusal is ignored: no child gets drivers' memory."""
        page = mmap.PAGESIZE
        start = -(-self.tensor.data_ptr() // page) * page
        whole_pages = (self.tensor.data_ptr() + self.tensor.numel() - start) // page
        if whole_pages > 0:
            ctypes.CDLL(None).madvise(ctypes.c_void_p(start), ctypes.c_size_t(whole_pages * page), advice)


class BorrowedRegion(HostRegion):
    """Host memory of another region, which owns it.

    Args:
        tensor: 1-D, uint8, contiguous, in RAM, starting on a block.
    """

    def __init__(self, tensor: torch.Tensor) -> None:
        super().__init__(0)
        self.tensor = tensor
        self.memory = tensor.numpy().data


class DeviceRegion:
    """One allocation on a device with memory of its own.

    Args:
        size_bytes: exact size; 0 is allowed.
        device: the device.
    Raises:
        CapacityError: the device has no room.
    """

    def __init__(self, size_bytes: int, device: torch.device) -> None:
        try:
            try:
                whole = torch.empty(size_bytes + BLOCK_BYTES, dtype=torch.uint8, device=device)
            except torch.OutOfMemoryError:
                gc.collect()  # trials of optimizers are in reference cycles, with tensors on the device
                whole = torch.empty(size_bytes + BLOCK_BYTES, dtype=torch.uint8, device=device)
        except torch.OutOfMemoryError as error:
            raise CapacityError(
                f"the device tier needs {format_bytes(size_bytes)} at once and {device} has no room for it ({error}); "
                "lower device_memory, or free what else is on the device"
            ) from error
        start = -whole.data_ptr() % BLOCK_BYTES
        self.tensor = whole[start : start + size_bytes]

    def discard(self, start: int, size_bytes: int) -> None:
        """Does nothing: device memory does not go back to the system."""

    def close(self) -> None:
        self.tensor = self.tensor.new_empty(0)


def _advise(mapping: mmap.mmap) -> None:
    mapping.madvise(mmap.MADV_DONTFORK)  # I3
    # Huge pages: first touch costs a third (35 against 115 ms for 256 MB), fused AdamW over pages takes 83 % of the
    # CPU time, copies 95 %; bf16 matrix products do not change (two x86 cores, best of nine, interleaved).
    with contextlib.suppress(OSError):  # a kernel without them
        mapping.madvise(mmap.MADV_HUGEPAGE)
