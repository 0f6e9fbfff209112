"""Which saved activations go to RAM, and when they come back (`activations="host"`).

Decides; memory/activation_buffers.py moves. Told of calls of units in the order of the forward, asked for tensors in
the order of
the backward. What one call saves leaves behind the call and is gone from the device when the next call has ended; what the
last call saves is therefore still there when the backward begins. The first tensor that backward reads of a call starts the
way back of all that this call saved, last saved first, and of all that the call before it did.

I1: a tensor comes back with the offset, shape and strides that it had, so kernels do what they would have done.
I2: parameters, what lies in pages, buffers of modules, and what is too small to be worth a copy, stay.
"""

from __future__ import annotations

import dataclasses
import weakref
from collections.abc import Callable, Iterable

import torch
from torch import Tensor, nn

from lightning_ptm.memory.activation_buffers import ActivationMover, OffloadedStorage
from lightning_ptm.memory.backend import Backend
from lightning_ptm.memory.link_meters import LinkStats
from lightning_ptm.memory.streams import ComputeStream
from lightning_ptm.torch_internals import buffers_in

LEAST_BYTES = 256 << 10
"""Smaller storages stay: together they are little, and each copy costs ten microseconds to start."""


@dataclasses.dataclass(frozen=True, slots=True)
class SavedView:
    """A saved tensor: what it is of a storage that is away."""

    away: OffloadedStorage
    call: _Call
    dtype: torch.dtype
    offset: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]


@dataclasses.dataclass(slots=True, eq=False)
class _Call:
    """What one call of a unit saved, in order; held by those who may read it."""

    before: _Call | None
    name: str
    saved: list[weakref.ref[OffloadedStorage]] = dataclasses.field(default_factory=list)
    asked_back: bool = False


class Offload:
    """The activations of one engine.

    Args:
        mover: carries storages.
        stream: of the run, which all moves keep the order of.
        modules: whose buffers stay.
        in_pages: whether a tensor lies in pages.
        least_bytes: smaller storages stay.
    """

    def __init__(
        self,
        mover: ActivationMover,
        backend: Backend,
        stream: ComputeStream,
        modules: Iterable[nn.Module],
        in_pages: Callable[[Tensor], bool],
        *,
        least_bytes: int,
    ) -> None:
        # Configuration.
        self._mover = mover
        self._backend = backend
        self._stream = stream
        self._modules = tuple(modules)
        self._in_pages = in_pages
        self._least_bytes = least_bytes
        # State.
        self._calls: list[_Call] = []
        """Those in progress, the innermost last."""
        self._last: _Call | None = None
        """The newest call of this iteration."""
        self._leaving: dict[int, tuple[_Call, weakref.ref[OffloadedStorage]]] = {}
        """By address of the storage, which nobody else can have while it is on its way; who saved it first."""
        self._buffers: frozenset[int] = frozenset()

    @property
    def sent_bytes(self) -> int:
        """Bytes that have left the device so far."""
        return self._mover.sent_bytes

    def links(self) -> dict[str, LinkStats]:
        """What has gone to RAM and come back: "activations_to_host", "activations_to_device"."""
        return self._mover.links()

    def begin_iteration(self) -> None:
        """Calls before this one are history: what they saved comes back when it is asked for."""
        self._settle(but=())
        self._calls = []
        self._last = None
        self._buffers = frozenset(
            buffer.untyped_storage().data_ptr()
            for module in self._modules
            for buffer in buffers_in(module).values()
            if buffer is not None
        )

    def begin(self, name: str) -> None:
        """A call of the unit `name` starts; `end` must follow in the reverse order."""
        self._last = _Call(self._last, f"{name}/activations")
        self._calls.append(self._last)

    def end(self) -> None:
        """It is over. What ended calls before it saved leaves the device now."""
        ended = self._calls.pop()
        self._settle(but=(ended, *self._calls))

    def pack(self, tensor: Tensor) -> Tensor | SavedView:
        """What autograd keeps for `tensor`, which the innermost call saves."""
        if not self._calls or not self._leaves(tensor):
            return tensor
        with self._stream.entered():
            return self._send(tensor)

    def _send(self, tensor: Tensor) -> SavedView:
        call = self._calls[-1]
        address = tensor.untyped_storage().data_ptr()
        known = self._leaving.get(address)
        away = None if known is None else known[1]()
        # One that was changed since it was saved is refused to whoever reads it, so nobody waits for its copy.
        if away is None or not away.still_holds(tensor):
            away = self._mover.send(tensor, call.name)
            self._leaving[address] = call, weakref.ref(away)
            call.saved.append(weakref.ref(away))
        return SavedView(
            away, call, tensor.dtype, int(tensor.storage_offset()), tuple(tensor.shape), tuple(tensor.stride())
        )

    def unpack(self, sent: SavedView) -> Tensor:
        """The tensor that was saved.

        Raises:
            UsageError: it was changed in place since.
        """
        with self._stream.entered():
            for call in (sent.call, sent.call.before):
                if call is not None and not call.asked_back:
                    call.asked_back = True
                    self._ask_back(call)
            storage = self._mover.storage(sent.away)
        whole = torch.empty(0, dtype=sent.dtype, device=storage.device)
        found = whole.set_(storage, sent.offset, sent.shape, sent.stride)
        self._backend.record_use(found)  # the caller's stream may be another than the run's, which owns the block
        return found

    def close(self) -> None:
        """Waits for copies and gives memory up."""
        self._settle(but=())
        self._calls, self._last = [], None
        self._mover.close()

    def _ask_back(self, call: _Call) -> None:
        for known in reversed(call.saved):
            away = known()
            if away is not None:
                self._mover.bring(away)

    def _settle(self, but: tuple[_Call, ...]) -> None:
        for address, (call, known) in list(self._leaving.items()):
            if all(call is not other for other in but):
                away = known()
                if away is not None:
                    self._mover.settle(away)
                del self._leaving[address]

    def _leaves(self, tensor: Tensor) -> bool:
        if type(tensor) is not Tensor or not self._backend.holds(tensor) or tensor.layout is not torch.strided:
            return False  # a parameter, a tensor subclass, what torch.compile traces with
        if tensor.is_conj() or tensor.is_neg() or tensor.is_quantized or (tensor.is_leaf and tensor.requires_grad):
            return False
        storage = tensor.untyped_storage()
        small = storage.nbytes() < self._least_bytes
        return not small and storage.data_ptr() not in self._buffers and not self._in_pages(tensor)
