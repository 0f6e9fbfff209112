"""Copies of activations to RAM or disk after the forward and back before the backward, and the buffers in RAM.

Owns the device memory of storages that are being copied, and the host buffers. Knows storages, not which autograd node
saved which tensor (saved_tensors.py does), and no pages of model states: PyTorch allocated these storages.

A copy covers the whole storage, so that every view of it is restored with its own offset and strides, and one copy
serves all views.

I1: the source of a copy stays allocated until the compute stream waits for the copy; the target stays allocated until
    the compute stream has queued its last use. If another stream allocated the memory, the caching allocator would hand
    it out again in that stream's order, so the compute stream is recorded as a user of it.
I2: a store gets its buffer back only after the compute stream waits for the last copy from or to it. Every copy that
    starts later waits for the compute stream.
I3: a storage that was changed in place after it had been saved is never read back; autograd makes the same check.
"""

from __future__ import annotations

import bisect
import enum
from collections import deque
from collections.abc import Callable
from time import perf_counter
from typing import Any, Protocol

import torch
from torch import Tensor

from lightning_ptm.errors import CapacityError, InternalError, UsageError, format_bytes
from lightning_ptm.events import Events
from lightning_ptm.memory.backend import Backend
from lightning_ptm.memory.region import HostRegion
from lightning_ptm.memory.streams import CopyStream, CopyStreams, Pair
from lightning_ptm.memory.transfer import LinkStats, StreamLink
from lightning_ptm.terms import BLOCK_BYTES
from lightning_ptm.torch_internals import storage_id, storage_references, version_of

_SIZE_CLASSES = 8
"""Buffer sizes between one power of two and the next: a buffer is at most an eighth larger than requested."""
_RESERVE_BYTES = 1 << 30
"""RAM that buffers leave free."""


class HostBuffers:
    """A pool of host buffers, kept from step to step. `give` is safe in any thread, the other methods are not.

    Args:
        backend: the device that copies from and to the buffers.
        free_bytes: returns the RAM that this process may still take.
    """

    def __init__(self, backend: Backend, *, free_bytes: Callable[[], int]) -> None:
        # Configuration.
        self._backend = backend
        self._free_bytes = free_bytes
        # State.
        self._idle: list[tuple[int, int, HostRegion]] = []
        """(size, serial number, buffer), ascending. The serial number keeps buffers from being compared."""
        self._returned: deque[HostRegion] = deque()
        """Buffers given back, not yet sorted into `_idle`. Any thread that collects garbage appends to it."""
        self._made = 0
        self.total_bytes = 0
        """Bytes of all buffers, in use or idle."""

    def take(self, size_bytes: int) -> HostRegion:
        """Returns a buffer of at least `size_bytes` and less than twice as much.

        Raises:
            CapacityError: RAM has no room for it.
        """
        while self._returned:
            self._add_idle(self._returned.popleft())
        place = bisect.bisect_left(self._idle, (size_bytes, -1))
        if place < len(self._idle) and self._idle[place][0] < 2 * max(size_bytes, BLOCK_BYTES):
            return self._idle.pop(place)[2]
        wanted = _size_class(size_bytes)
        if self._free_bytes() - _RESERVE_BYTES < wanted:
            self._drop_idle()
            free = self._free_bytes()
            if free - _RESERVE_BYTES < wanted:
                raise CapacityError(
                    f"offload_activations='host' holds {format_bytes(self.total_bytes)} of activations in RAM and needs "
                    f"{format_bytes(size_bytes)} more, but only {format_bytes(free)} of RAM are free and "
                    f"{format_bytes(_RESERVE_BYTES)} are kept in reserve, so the forward cannot go on; lower host_memory "
                    "so that pages leave more of it, use recompute='all', or a smaller batch"
                )
        region = self._backend.host_region(wanted, pin=True)
        self.total_bytes += wanted
        return region

    def give(self, region: HostRegion) -> None:
        """Takes back a buffer that no copy uses any more (I2)."""
        self._returned.append(region)

    def room_bytes(self) -> int:
        """Returns the bytes that buffers may have in all, with those that there are."""
        return self.total_bytes + max(0, self._free_bytes() - _RESERVE_BYTES)

    def close(self) -> None:
        """Frees the idle buffers. A buffer in use is freed when its last view dies."""
        while self._returned:
            self._add_idle(self._returned.popleft())
        self._drop_idle()

    def _add_idle(self, region: HostRegion) -> None:
        self._made += 1
        bisect.insort(self._idle, (region.tensor.numel(), self._made, region))

    def _drop_idle(self) -> None:
        if self._idle:
            self._backend.synchronize()  # a stream may still copy from a buffer that was given back in stream order
        for size, _, region in self._idle:
            region.close()
            self.total_bytes -= size
        self._idle = []


def _size_class(size_bytes: int) -> int:
    step = max(BLOCK_BYTES, (1 << max(0, (size_bytes - 1).bit_length() - 1)) // _SIZE_CLASSES)
    return -(-max(size_bytes, 1) // step) * step


class StoreCopy(Protocol):
    """A copy to or from a store."""

    def done(self) -> bool: ...

    def synchronize(self) -> None:
        """Blocks this thread until the copy has ended."""

    def order(self) -> None:
        """Makes the compute stream, or this thread, wait for the copy. Raises no error of the copy: see `Store.check`."""


class Store(Protocol):
    """Place outside the device for the bytes of saved storages. What `take` returns belongs to the store."""

    def take(self, size_bytes: int) -> Any:
        """Returns a buffer of at least `size_bytes`.

        Raises:
            CapacityError, PageIOError: there is no room for it.
        """

    def give(self, buffer: Any) -> None:
        """Takes back a buffer that no copy uses any more (I2). May be called in any thread, and after `close`."""

    def room_bytes(self) -> int:
        """Returns the bytes that buffers may have in all."""

    def write(self, source: Tensor, buffer: Any, name: str) -> StoreCopy:
        """Starts to copy `source`, 1-D of uint8, into a buffer, after everything queued on the current stream."""

    def read(self, buffer: Any, target: Tensor, name: str) -> StoreCopy:
        """Starts to copy the buffer's bytes into `target`, as `write`."""

    def check(self, buffer: Any) -> None:
        """Raises the error of a copy from or to the buffer that has ended, if it failed."""

    def links(self) -> dict[str, LinkStats]:
        """Returns the totals of each direction over the copies that have ended. Does not block."""

    def core_s_per_byte(self) -> float:
        """Returns the seconds on this machine's cores that the threads of the copies took for a byte so far, in one
        direction."""

    def disk_written_bytes(self) -> tuple[int, ...]:
        """Returns the bytes written to each folder of the disk tier; empty for RAM."""

    def close(self) -> None:
        """Frees what the store holds. No copy is in flight that the mover has not waited for, but those of storages that are
        still referred to."""


class HostStore:
    """Store in RAM.

    Args:
        streams: copy streams that nothing else uses: copies of pages on the same streams would delay these.
        buffers: the host buffers.
        events: gets an event for every copy, on the tracks that `links` names.
    """

    def __init__(self, streams: CopyStreams, buffers: HostBuffers, events: Events | None = None) -> None:
        self._streams = streams
        self._buffers = buffers
        events = events or Events()
        self._to_host = StreamLink("activations_to_host", events)
        self._to_device = StreamLink("activations_to_device", events)
        # State.
        self._closed = False

    def take(self, size_bytes: int) -> HostRegion:
        return self._buffers.take(size_bytes)

    def give(self, buffer: HostRegion) -> None:
        if self._closed:
            buffer.close()
        else:
            self._buffers.give(buffer)

    def room_bytes(self) -> int:
        return self._buffers.room_bytes()

    def write(self, source: Tensor, buffer: HostRegion, name: str) -> StoreCopy:
        return self._launch(Pair(buffer.tensor[: source.numel()], source), self._streams.to_host, self._to_host, name)

    def read(self, buffer: HostRegion, target: Tensor, name: str) -> StoreCopy:
        pair = Pair(target, buffer.tensor[: target.numel()])
        return self._launch(pair, self._streams.to_device, self._to_device, name)

    def check(self, buffer: HostRegion) -> None:
        """Does nothing: a copy on a stream does not fail."""

    def links(self) -> dict[str, LinkStats]:
        return {"activations_to_host": self._to_host.stats(), "activations_to_device": self._to_device.stats()}

    def core_s_per_byte(self) -> float:
        return 0.0  # the device copies

    def disk_written_bytes(self) -> tuple[int, ...]:
        return ()

    def close(self) -> None:
        self._closed = True
        self._buffers.close()

    @staticmethod
    def _launch(pair: Pair, stream: CopyStream, link: StreamLink, name: str) -> StoreCopy:
        began_s = perf_counter()
        completion = stream.launch([pair])
        link.launched(name, pair.target.numel(), began_s, completion.timer())
        return completion


class StoragePlace(enum.Enum):
    """Places of the bytes of an offloaded storage."""

    LEAVING = "leaving"
    """The bytes are on the device; the copy to the store is in flight."""
    AWAY = "away"
    """The bytes are in the store only."""
    COMING = "coming"
    """The bytes are in the store; the copy to the device is in flight."""
    BACK = "back"
    """The bytes are on the device; the buffer is free."""


_NEXT = {
    (StoragePlace.LEAVING, StoragePlace.AWAY),
    (StoragePlace.AWAY, StoragePlace.COMING),
    (StoragePlace.COMING, StoragePlace.BACK),
}


class OffloadedStorage:
    """One saved storage. It lives as long as a saved tensor refers to it; its finalizer gives the memory back.

    Created and changed by an ActivationMover only.
    """

    __slots__ = (
        "__weakref__",
        "buffer",
        "changed",
        "completion",
        "device",
        "mover",
        "name",
        "size_bytes",
        "version",
        "where",
    )

    def __init__(self, mover: ActivationMover, name: str, source: Tensor, buffer: Any, completion: StoreCopy) -> None:
        self.mover = mover
        self.name = name
        """Name of its copies in events."""
        self.size_bytes = source.untyped_storage().nbytes()
        self.version = version_of(source)
        self.changed = False
        """Whether the source was written to after it had been saved."""
        self.where = StoragePlace.LEAVING
        self.device: Tensor | None = source
        """A tensor on the device with this storage, of any shape. None while AWAY."""
        self.buffer: Any = buffer
        """The store's; None once BACK."""
        self.completion: StoreCopy | None = completion

    def still_holds(self, tensor: Tensor) -> bool:
        """Whether a view of the source's storage still has the elements that are being copied."""
        source = self.device
        return (
            self.where is StoragePlace.LEAVING
            and source is not None
            and self.version == version_of(source) == version_of(tensor)
        )

    def to(self, where: StoragePlace) -> None:
        if (self.where, where) not in _NEXT:
            raise InternalError(
                f"the offloaded storage {self.name} cannot change from {self.where.value} to {where.value}"
            )
        self.where = where

    def __del__(self) -> None:
        self.mover.storage_died(self)


class ActivationMover:
    """Copies storages to a store and back. Callers must have the compute stream as current stream.

    Args:
        backend: the device of the storages.
        store: where they go.
    """

    def __init__(self, backend: Backend, store: Store) -> None:
        self._backend = backend
        self._store = store
        # State.
        self._orphans: deque[tuple[StoreCopy, Any, Tensor | None]] = deque()
        """Copies in flight whose storage has died. Any thread that collects garbage appends to it."""
        self._closed = False
        self.sent_bytes = 0
        """Bytes copied from the device to the store so far."""

    def room_bytes(self) -> int:
        """Returns the bytes that the store has for storages in all, those that are there included."""
        return self._store.room_bytes()

    def links(self) -> dict[str, LinkStats]:
        """Returns the totals of each direction over the copies that have ended. Does not block."""
        return self._store.links()

    def core_s_per_byte(self) -> float:
        """Returns `Store.core_s_per_byte`."""
        return self._store.core_s_per_byte()

    def disk_written_bytes(self) -> tuple[int, ...]:
        """Returns the bytes written to each folder of the disk tier; empty if the store is RAM."""
        return self._store.disk_written_bytes()

    def send(self, source: Tensor, name: str = "activations") -> OffloadedStorage:
        """Starts the copy of the source's whole storage. `settle` must follow before the device memory is freed.

        Args:
            source: any tensor with that storage.
            name: name of its copies in events.
        Raises:
            CapacityError, PageIOError: the store has no room.
        """
        self.order_orphans()
        source = source.detach()  # shares storage and version counter, without the autograd graph
        size_bytes = source.untyped_storage().nbytes()
        buffer = self._store.take(size_bytes)
        self.sent_bytes += size_bytes
        return OffloadedStorage(self, name, source, buffer, self._store.write(_bytes_of(source), buffer, name))

    def settle(self, away: OffloadedStorage) -> None:
        """Makes the compute stream wait for the copy to the store, then frees the source (I1). No effect unless LEAVING."""
        if away.where is not StoragePlace.LEAVING:
            return
        assert away.completion is not None and away.device is not None
        away.completion.order()
        # Another stream may own the block, and it does not wait for the copy (I1).
        self._backend.record_use(away.device)
        away.changed = version_of(away.device) != away.version
        away.to(StoragePlace.AWAY)
        away.completion = away.device = None

    def settle_unused(self, away: OffloadedStorage) -> bool:
        """Frees the source if its copy has ended and nothing else refers to its storage. Does not wait.

        Returns:
            Whether the source is gone.
        """
        if away.where is StoragePlace.LEAVING:
            assert away.completion is not None and away.device is not None
            # The source's and that of the Python object that is asked.
            if not away.completion.done() or storage_references(storage_id(away.device.untyped_storage())) > 2:
                return False
            self.settle(away)
        return True

    def bring(self, away: OffloadedStorage) -> None:
        """Starts the copy back to the device. No effect unless AWAY."""
        if away.where is not StoragePlace.AWAY:
            return
        self.order_orphans()
        target = torch.empty(away.size_bytes, dtype=torch.uint8, device=self._backend.device)
        away.to(StoragePlace.COMING)
        away.device = target
        away.completion = self._store.read(away.buffer, target, away.name)

    def storage(self, away: OffloadedStorage) -> torch.UntypedStorage:
        """Returns the storage on the device, for use on the compute stream.

        Raises:
            UsageError: it was changed in place after it had been saved (I3).
            PageIOError: a copy to or from the store has failed.
        """
        self.bring(away)
        if away.where is StoragePlace.COMING:
            assert away.completion is not None
            away.completion.order()
            self._store.check(away.buffer)
            away.to(StoragePlace.BACK)
            self._store.give(away.buffer)
            away.completion = away.buffer = None
        assert away.device is not None
        if away.changed or (away.where is StoragePlace.LEAVING and version_of(away.device) != away.version):
            raise UsageError(
                "a tensor that the backward pass needs was changed in place after the forward pass had saved it, so its "
                "gradients would be wrong; take the in-place operation out of the forward"
            )
        return away.device.untyped_storage()

    def storage_died(self, away: OffloadedStorage) -> None:
        """Takes the buffer of a storage that has died. May be called in any thread."""
        buffer, away.buffer = away.buffer, None
        if buffer is None:
            return
        if away.completion is None:
            self._store.give(buffer)
        elif self._closed:
            away.completion.synchronize()
            self._store.give(buffer)
        else:
            self._orphans.append((away.completion, buffer, away.device))  # keeps source and target alive (I1)

    def close(self) -> None:
        """Waits for copies in flight and closes the store."""
        while self._orphans:
            completion, buffer, _ = self._orphans.popleft()
            completion.synchronize()
            self._store.give(buffer)
        self._closed = True
        self._store.close()

    def order_orphans(self) -> None:
        """Makes the compute stream wait for the copies of dead storages (I2), then gives their buffers back."""
        while self._orphans:
            completion, buffer, source = self._orphans.popleft()
            completion.order()
            if source is not None:
                self._backend.record_use(source)
            self._store.give(buffer)


def _bytes_of(tensor: Tensor) -> Tensor:
    storage = tensor.untyped_storage()
    return torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(storage, 0, (storage.nbytes(),), (1,))
