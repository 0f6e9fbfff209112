"""Offload of saved activations to RAM or disk (`offload_activations`).

Decides which saved tensors are offloaded, and when each is prefetched; memory/activation_buffers.py moves the bytes. Calls
of units come in forward order, reads of saved tensors in backward order. The tensors that one call saves start to leave
during the call and are gone from the device when the next call has ended, so those of the last call are still on the device
when the backward begins. The first read of a tensor of a call starts the prefetch of all tensors that this call saved, last
saved first, and of all that the call before it saved. Where RAM is short, what nothing else refers to is gone as soon as its
copy has ended, and if all tensors of a call find no room, each read starts the prefetch of the next one only.

I1: a tensor returns with its offset, shape and strides, so kernels do what they would have done.
I2: parameters, tensors in pages, buffers of modules, and storages below `least_bytes` stay on the device.
I3: one thread at a time uses this, so nothing here has a lock: halves of a batch take turns, and hooks.py refuses calls of
    units in two threads at once (`OneThread`). What a collector's thread does is in memory/activation_buffers.py.
"""

from __future__ import annotations

import contextlib
import dataclasses
import threading
import weakref
from collections.abc import Callable, Iterable, Mapping

import torch
from torch import Tensor, nn

from lightning_ptm.errors import CapacityError, ConfigError, PageIOError
from lightning_ptm.memory.activation_buffers import ActivationMover, OffloadedStorage
from lightning_ptm.memory.backend import Backend
from lightning_ptm.memory.streams import ComputeStream
from lightning_ptm.memory.transfer import LinkStats
from lightning_ptm.terms import Tier
from lightning_ptm.torch_internals import buffers_in, has_storage, is_zeros_without_memory

LEAST_BYTES = 256 << 10
"""Smaller storages stay on the device: their sum is small, and each copy takes ten microseconds to start."""


@dataclasses.dataclass(frozen=True, slots=True)
class SavedView:
    """A saved tensor as a view of a storage that was offloaded."""

    away: OffloadedStorage
    call: _Call
    dtype: torch.dtype
    offset: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]


@dataclasses.dataclass(slots=True, eq=False)
class _Call:
    """The storages that one call of a unit saved, in order. Kept alive by the saved tensors that may read them."""

    before: _Call | None
    name: str
    mover: ActivationMover | None
    """Where its tensors go; None: they stay, and are counted."""
    saved: list[weakref.ref[OffloadedStorage]] = dataclasses.field(default_factory=list)
    asked_back: bool = False
    saved_bytes: int = 0
    """Bytes of the storages that it has saved."""
    stay: set[int] = dataclasses.field(default_factory=set)
    """Addresses of the storages that stay."""


class _OfThread(threading.local):
    """State of the calls that compute in this thread: two halves of a batch compute in two threads."""

    def __init__(self) -> None:
        self.calls: list[_Call] = []
        """Calls in progress, the innermost last."""


class Offload:
    """Copies activations that autograd saves to RAM or disk, and back before the backward pass reads them.

    Args:
        movers: copy storages, by the tier that they are offloaded to; the first is that of calls that name none.
        stream: the run's compute stream, which orders all copies.
        modules: modules whose buffers stay on the device.
        in_pages: returns whether a tensor is stored in pages.
        least_bytes: smaller storages stay on the device.
        spills: whether what a tier has no room for goes to the next one, and stays on the device if there is none
            (`auto`); otherwise that is an error.
        left_bytes: returns how many bytes may still be allocated; None if that is unlimited or unknown.
        frees_early: whether sources of copies to which nothing else refers are freed as soon as their copy has ended, while
            `left_bytes` is known.
    """

    def __init__(
        self,
        movers: Mapping[Tier, ActivationMover],
        backend: Backend,
        stream: ComputeStream,
        modules: Iterable[nn.Module],
        in_pages: Callable[[Tensor], bool],
        *,
        least_bytes: int,
        spills: bool = False,
        left_bytes: Callable[[], int | None] = lambda: None,
        frees_early: bool = True,
    ) -> None:
        # Configuration.
        self._movers = dict(movers)
        self._backend = backend
        self._stream = stream
        self._modules = tuple(modules)
        self._in_pages = in_pages
        self._least_bytes = least_bytes
        self._spills = spills
        self._left_bytes = left_bytes
        self._frees_early = frees_early
        # State.
        self._of_thread = _OfThread()
        self._last: _Call | None = None
        """The newest call of this iteration."""
        self.refused: set[Tier] = set()
        """Tiers that had no room for a tensor of this iteration."""
        self._leaving: dict[int, tuple[_Call, weakref.ref[OffloadedStorage]]] = {}
        """By address of the storage, the call that saved it first. No other storage can have the address while the copy
        runs."""
        self._buffers: frozenset[int] | None = None
        """Addresses of the storages of buffers; None before the first tensor of an iteration asks."""

    @property
    def sent_bytes(self) -> int:
        """Bytes that have left the device so far."""
        return sum(mover.sent_bytes for mover in self._movers.values())

    def disk_written_bytes(self) -> tuple[int, ...]:
        """Returns the bytes written to each folder of the disk tier; empty if activations go to RAM."""
        return next(filter(None, (mover.disk_written_bytes() for mover in self._movers.values())), ())

    def links(self) -> dict[str, LinkStats]:
        """Statistics of the copies away and back, by direction."""
        return {name: stats for mover in self._movers.values() for name, stats in mover.links().items()}

    def room_bytes(self, tier: Tier) -> int:
        """Returns the bytes that a tier has for activations in all."""
        return self._movers[tier].room_bytes()

    def core_s_per_byte(self, tier: Tier) -> float:
        """Returns the seconds of compute's own cores for a byte that goes to a tier, or comes back; 0 where a device
        computes."""
        return 0.0 if self._backend.has_own_memory else self._movers[tier].core_s_per_byte()

    def begin_iteration(self) -> None:
        """Forgets the calls so far: tensors that they saved return only when they are read."""
        self.refused.clear()
        with self._stream.entered():
            for mover in self._movers.values():
                mover.order_orphans()
        self._settle(but=())
        self._calls.clear()
        self._last = None
        self._buffers = None

    @property
    def _calls(self) -> list[_Call]:
        return self._of_thread.calls

    @property
    def tier(self) -> Tier:
        """The tier of calls that name none."""
        return next(iter(self._movers))

    def begin(self, name: str, tier: Tier | None) -> None:
        """Begins a call of the unit `name`, whose tensors are offloaded to `tier` (None: they stay, and are counted); `end`
        must follow in the reverse order."""
        self._last = _Call(self._last, f"{name}/activations", None if tier is None else self._movers[tier])
        self._calls.append(self._last)

    def end(self) -> int:
        """Ends the innermost call, and frees the device memory of tensors that earlier, ended calls saved.

        Returns:
            The bytes of the storages that the call has saved.
        """
        ended = self._calls.pop()
        self._settle(but=(ended, *self._calls))
        ended.stay.clear()
        return ended.saved_bytes

    def pack(self, tensor: Tensor) -> Tensor | SavedView:
        """Returns what autograd stores for `tensor`, which the innermost call saves."""
        if not self._calls or not self._leaves(tensor):
            return tensor
        call = self._calls[-1]
        if call.mover is not None:
            with self._stream.entered():
                sent = self._send(tensor, call, call.mover)
            if sent is not None:
                return sent
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in call.stay:
            call.stay.add(storage.data_ptr())
            call.saved_bytes += storage.nbytes()
        return tensor

    def _send(self, tensor: Tensor, call: _Call, mover: ActivationMover) -> SavedView | None:
        """Returns None if no tier has room for the tensor, which stays."""
        address = tensor.untyped_storage().data_ptr()
        known = self._leaving.get(address)
        away = None if known is None else known[1]()
        # A storage that was changed since it was saved is refused when it is read, so its copy need not be waited for.
        if away is None or not away.still_holds(tensor):
            away = self._send_where_room_is(tensor, call, mover)
            if away is None:
                return None
            call.saved_bytes += away.size_bytes
            if self._frees_early and self._left_bytes() is not None:
                self._free_unused()
            self._leaving[address] = call, weakref.ref(away)
            call.saved.append(weakref.ref(away))
        return SavedView(
            away, call, tensor.dtype, int(tensor.storage_offset()), tuple(tensor.shape), tuple(tensor.stride())
        )

    def _send_where_room_is(self, tensor: Tensor, call: _Call, mover: ActivationMover) -> OffloadedStorage | None:
        if not self._spills:
            return mover.send(tensor, call.name)
        movers = list(self._movers.values())
        for each in movers[movers.index(mover) :]:
            # A full disk is no room, either, nor is a folder that is gone.
            with contextlib.suppress(CapacityError, PageIOError, ConfigError):
                return each.send(tensor, call.name)
            self.refused.add(next(tier for tier, of_tier in self._movers.items() if of_tier is each))
        return None

    def unpack(self, sent: SavedView) -> Tensor:
        """Returns the tensor that was saved.

        Raises:
            UsageError: the tensor was changed in place after it was saved.
            PageIOError: a copy to or from the disk has failed.
        """
        with self._stream.entered():
            for call in (sent.call, sent.call.before):
                if call is not None and not call.asked_back and self._has_room(call):
                    call.asked_back = True
                    self._ask_back(call)
            if not sent.call.asked_back:
                self._ask_next(sent)
            storage = sent.away.mover.storage(sent.away)
        whole = torch.empty(0, dtype=sent.dtype, device=storage.device)
        found = whole.set_(storage, sent.offset, sent.shape, sent.stride)
        self._backend.record_use(found)  # the caller's stream may be another than the run's, which owns the block
        return found

    def close(self) -> None:
        """Waits for copies and frees the memory."""
        self._settle(but=())
        self._calls.clear()
        self._last = None
        for mover in self._movers.values():
            mover.close()

    def _ask_back(self, call: _Call) -> None:
        for known in reversed(call.saved):
            away = known()
            if away is not None:
                away.mover.bring(away)

    def _has_room(self, call: _Call) -> bool:
        """Whether all tensors of a call may come back at once, and its backward allocate as much beside them."""
        left = self._left_bytes()
        return left is None or left >= 2 * call.saved_bytes

    def _ask_next(self, sent: SavedView) -> None:
        """Brings a storage and the one that the backward probably reads after it."""
        sent.away.mover.bring(sent.away)
        saved = [away for known in sent.call.saved if (away := known()) is not None]
        place = next((at for at, away in enumerate(saved) if away is sent.away), 0)
        if place:
            saved[place - 1].mover.bring(saved[place - 1])

    def _settle(self, but: tuple[_Call, ...]) -> None:
        for address, (call, known) in list(self._leaving.items()):
            if all(call is not other for other in but):
                away = known()
                if away is not None:
                    away.mover.settle(away)
                del self._leaving[address]

    def _free_unused(self) -> None:
        """Frees the sources of ended copies to which nothing else refers, and which hence no call saves again.

        Elsewhere they stay until `end`, since what is allocated at a tick should not depend on the time of copies.
        """
        for address, (_, known) in list(self._leaving.items()):
            away = known()
            if away is None or away.mover.settle_unused(away):
                del self._leaving[address]

    def _leaves(self, tensor: Tensor) -> bool:
        if type(tensor) is not Tensor or not self._backend.holds(tensor) or tensor.layout is not torch.strided:
            return False  # a parameter, a tensor subclass, what torch.compile traces with
        if is_zeros_without_memory(tensor):  # of forward-mode derivatives
            return False
        if tensor.is_conj() or tensor.is_neg() or tensor.is_quantized or (tensor.is_leaf and tensor.requires_grad):
            return False
        storage = tensor.untyped_storage()
        if storage.nbytes() < self._least_bytes:
            return False
        if self._buffers is None:
            self._buffers = frozenset(
                buffer.untyped_storage().data_ptr()
                for module in self._modules
                for buffer in buffers_in(module).values()
                if buffer is not None and has_storage(buffer)
            )
        return storage.data_ptr() not in self._buffers and not self._in_pages(tensor)
