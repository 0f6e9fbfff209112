"""Activations in RAM between forward and backward: buffers, and the copies of whole storages there and back.

Owns the buffers and the device memory of what is on its way. Knows storages, never who saved what of them
(saved_tensors.py), and
no pages: what moves here was allocated by PyTorch and is counted in no tier.

What is copied is the storage, so that every view of it comes back with its own offset and strides, and one copy serves all.

I1: a source stays allocated until the compute stream is behind the copy of it; a target until it is behind its last use.
    What another stream has allocated goes back to that one's blocks, so the compute stream counts as a user of it.
I2: a buffer is handed out again only when the compute stream is behind the last copy from or to it; every copy that
    starts later starts behind the compute stream.
I3: nothing is read back that was changed after it had been saved, as autograd has it without copies.
"""

from __future__ import annotations

import bisect
import enum
from collections import deque
from collections.abc import Callable
from time import perf_counter

import torch
from torch import Tensor

from lightning_ptm.errors import CapacityError, InternalError, UsageError
from lightning_ptm.events import Events
from lightning_ptm.memory.backend import Backend
from lightning_ptm.memory.link_meters import LinkStats, StreamLink
from lightning_ptm.memory.region import HostRegion
from lightning_ptm.memory.streams import CopyStreams, Pair
from lightning_ptm.memory.transfer import Completion
from lightning_ptm.terms import BLOCK_BYTES
from lightning_ptm.torch_internals import version_of

_SIZE_CLASSES = 8
"""Sizes of buffers between a power of two and the next: a buffer is at most an eighth larger than it was asked for."""
_RESERVE_BYTES = 1 << 30
"""RAM that buffers leave free."""


class HostBuffers:
    """RAM by the piece, kept for the next step. Only `give` may be called in any thread.

    Args:
        backend: the device that copies from and to it.
        free_bytes: RAM that this process may still take.
    """

    def __init__(self, backend: Backend, *, free_bytes: Callable[[], int]) -> None:
        # Configuration.
        self._backend = backend
        self._free_bytes = free_bytes
        # State.
        self._idle: list[tuple[int, int, HostRegion]] = []  # by size; the number keeps regions from being compared
        self._returned: deque[HostRegion] = deque()  # filled by whatever thread collects garbage
        self._made = 0
        self.total_bytes = 0
        """Of all buffers, in use or not."""

    def take(self, size_bytes: int) -> HostRegion:
        """A buffer of at least `size_bytes`, and less than twice of it.

        Raises:
            CapacityError: RAM has no room for it.
        """
        while self._returned:
            self._keep(self._returned.popleft())
        place = bisect.bisect_left(self._idle, (size_bytes, -1))
        if place < len(self._idle) and self._idle[place][0] < 2 * max(size_bytes, BLOCK_BYTES):
            return self._idle.pop(place)[2]
        wanted = _size_class(size_bytes)
        if self._free_bytes() - _RESERVE_BYTES < wanted:
            self._drop_idle()
            free = self._free_bytes()
            if free - _RESERVE_BYTES < wanted:
                raise CapacityError(
                    f"activations='host' has {self.total_bytes} bytes of activations in RAM, the next are {size_bytes}, and "
                    f"RAM has {free} bytes free, of which {_RESERVE_BYTES} are left alone; lower host_memory so that "
                    f"pages leave more of it, use recompute='all' or a smaller batch"
                )
        region = self._backend.host_region(wanted, pin=True)
        self.total_bytes += wanted
        return region

    def give(self, region: HostRegion) -> None:
        """A buffer that no copy uses any more (I2)."""
        self._returned.append(region)

    def close(self) -> None:
        """Gives idle buffers up; one that is in use lives as long as its views."""
        while self._returned:
            self._keep(self._returned.popleft())
        self._drop_idle()

    def _keep(self, region: HostRegion) -> None:
        self._made += 1
        bisect.insort(self._idle, (region.tensor.numel(), self._made, region))

    def _drop_idle(self) -> None:
        if self._idle:
            self._backend.synchronize()  # a stream may still copy from what was given back in its order
        for size, _, region in self._idle:
            region.close()
            self.total_bytes -= size
        self._idle = []


def _size_class(size_bytes: int) -> int:
    step = max(BLOCK_BYTES, (1 << max(0, (size_bytes - 1).bit_length() - 1)) // _SIZE_CLASSES)
    return -(-max(size_bytes, 1) // step) * step


class Where(enum.Enum):
    """Where the bytes of a storage are."""

    LEAVING = "leaving"
    """On the device, and on their way to RAM."""
    AWAY = "away"
    """In RAM alone."""
    COMING = "coming"
    """In RAM, and on their way to the device."""
    BACK = "back"
    """On the device; the buffer has been given back."""


_NEXT = {
    (Where.LEAVING, Where.AWAY),
    (Where.AWAY, Where.COMING),
    (Where.COMING, Where.BACK),
}


class OffloadedStorage:
    """One storage that was saved. It lives as long as somebody may read it; its end gives its memory back.

    Made, and changed, by a Mover alone.
    """

    __slots__ = (
        "__weakref__",
        "_mover",
        "changed",
        "completion",
        "device",
        "name",
        "region",
        "size_bytes",
        "version",
        "where",
    )

    def __init__(
        self, mover: ActivationMover, name: str, source: Tensor, region: HostRegion, completion: Completion
    ) -> None:
        self._mover = mover
        self.name = name
        """In events."""
        self.size_bytes = source.untyped_storage().nbytes()
        self.version = version_of(source)
        self.changed = False
        """The source was written to after it had been saved."""
        self.where = Where.LEAVING
        self.device: Tensor | None = source
        """Of any shape: its storage counts. None while it is AWAY."""
        self.region: HostRegion | None = region
        self.completion: Completion | None = completion

    def still_holds(self, tensor: Tensor) -> bool:
        """Whether a view of the source's storage has the elements that are on their way."""
        source = self.device
        return (
            self.where is Where.LEAVING
            and source is not None
            and self.version == version_of(source) == version_of(tensor)
        )

    def to(self, where: Where) -> None:
        if (self.where, where) not in _NEXT:
            raise InternalError(f"a saved storage is {self.where.value} and cannot become {where.value}")
        self.where = where

    def __del__(self) -> None:
        self._mover.forgotten(self)


class ActivationMover:
    """Copies storages to RAM and back on streams of their own. All calls are made with the compute stream as the current one.

    Args:
        backend: the device whose storages they are.
        streams: of that device, nobody else's: copies of pages would hold these up.
        buffers: RAM.
        events: told of every copy, on the tracks of `links`.
    """

    def __init__(
        self, backend: Backend, streams: CopyStreams, buffers: HostBuffers, events: Events | None = None
    ) -> None:
        self._backend = backend
        self._streams = streams
        self._buffers = buffers
        events = events or Events()
        self._to_host = StreamLink("activations_to_host", events)
        self._to_device = StreamLink("activations_to_device", events)
        # State.
        self._orphans: deque[tuple[Completion, HostRegion, Tensor | None]] = (
            deque()
        )  # filled by whatever thread collects garbage
        self._closed = False
        self.sent_bytes = 0
        """That have left the device so far."""

    def links(self) -> dict[str, LinkStats]:
        """What has gone each way, of copies that have ended; waits for nothing."""
        return {"activations_to_host": self._to_host.stats(), "activations_to_device": self._to_device.stats()}

    def send(self, source: Tensor, name: str = "activations") -> OffloadedStorage:
        """Starts the copy of the source's whole storage to RAM. `settle` must follow before its memory comes free.

        Args:
            name: of the copies there and back, in events.
        Raises:
            CapacityError: RAM has no room.
        """
        self._adopt()
        source = source.detach()  # its storage and its version, without its graph
        size_bytes = source.untyped_storage().nbytes()
        region = self._buffers.take(size_bytes)
        pair = Pair(region.tensor[:size_bytes], _bytes_of(source))
        self.sent_bytes += size_bytes
        began_s = perf_counter()
        completion = self._streams.to_host.launch([pair])
        self._to_host.launched(name, size_bytes, began_s, completion.timer())
        return OffloadedStorage(self, name, source, region, completion)

    def settle(self, away: OffloadedStorage) -> None:
        """The compute stream waits for the copy, and the source is let go (I1). Nothing happens if it was before."""
        if away.where is not Where.LEAVING:
            return
        assert away.completion is not None and away.device is not None
        away.completion.order()
        self._backend.used_here(away.device)  # the block may be one of another stream, which is not behind the copy
        away.changed = version_of(away.device) != away.version
        away.to(Where.AWAY)
        away.completion = away.device = None

    def bring(self, away: OffloadedStorage) -> None:
        """Starts the copy back, if the bytes are AWAY."""
        if away.where is not Where.AWAY:
            return
        self._adopt()
        assert away.region is not None
        target = torch.empty(away.size_bytes, dtype=torch.uint8, device=self._backend.device)
        away.to(Where.COMING)
        away.device = target
        began_s = perf_counter()
        away.completion = self._streams.to_device.launch([Pair(target, away.region.tensor[: away.size_bytes])])
        self._to_device.launched(away.name, away.size_bytes, began_s, away.completion.timer())

    def storage(self, away: OffloadedStorage) -> torch.UntypedStorage:
        """The storage on the device, for what the compute stream does next.

        Raises:
            UsageError: it was written to after it had been saved (I3).
        """
        self.bring(away)
        if away.where is Where.COMING:
            assert away.completion is not None and away.region is not None
            away.completion.order()
            away.to(Where.BACK)
            self._buffers.give(away.region)
            away.completion = away.region = None
        assert away.device is not None
        if away.changed or (away.where is Where.LEAVING and version_of(away.device) != away.version):
            raise UsageError(
                "a tensor that the backward pass needs was changed in place after the forward pass had saved it, so its "
                "gradients would be wrong; take the in-place operation out of the forward"
            )
        return away.device.untyped_storage()

    def forgotten(self, away: OffloadedStorage) -> None:
        """Nobody can read it any more; called in any thread."""
        region, away.region = away.region, None
        if region is None:
            return
        if self._closed:
            if away.completion is not None:
                away.completion.synchronize()
            region.close()
        elif away.completion is None:
            self._buffers.give(region)
        else:
            self._orphans.append((away.completion, region, away.device))  # which holds source and target, too (I1)

    def close(self) -> None:
        """Waits for what is in flight and gives idle memory up."""
        while self._orphans:
            completion, region, _ = self._orphans.popleft()
            completion.synchronize()
            self._buffers.give(region)
        self._closed = True
        self._buffers.close()

    def _adopt(self) -> None:
        """Of those that were forgotten on their way, the compute stream waits for the copies (I2), and memory comes free."""
        while self._orphans:
            completion, region, source = self._orphans.popleft()
            completion.order()
            if source is not None:
                self._backend.used_here(source)
            self._buffers.give(region)


def _bytes_of(tensor: Tensor) -> Tensor:
    storage = tensor.untyped_storage()
    return torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(storage, 0, (storage.nbytes(),), (1,))
