"""Pages of gradients: this rank's shard of one flat's gradient, transfers into it, and where the pages come from.

Owns the pages, reductions and copies in flight with their device buffers, the pool of page sets of a lock-free run, and
the stream of gradients that are added to sums in RAM. What the pages hold is in state.py. Knows nothing of `.grad`
(view.py).

I1: the pages hold the sum over micro-batches since they were last forgotten, rounded to the gradient dtype after each,
    as autograd does in place. Under mixed precision that dtype is fp32 if there may be several micro-batches: in 16
    bits, a gradient that is added to a sum hundreds of times as large would be lost.
I2: the pages are read only after all transfers into them have ended (`settle`).
I3: an operation that runs out of pages (CapacityError) has changed nothing and may be retried.
I4: where the state is none of SUMS, pages have undefined contents, and new gradients overwrite them.
I5: pages have one user: the flat whose gradient is collected, then the receiver of the gradient, who returns them.
I6: a gradient that has arrived in RAM is added once, by the first caller of `done` or `wait`, in whatever thread. The
    source memory of its copy stays unchanged until then.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from time import monotonic
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from lightning_ptm.errors import CapacityError, InternalError
from lightning_ptm.memory.streams import Copies, Pair
from lightning_ptm.planning.plan import GradientBuffer
from lightning_ptm.runtime.deciding.gradient_route import GradientRoute
from lightning_ptm.runtime.gradients.state import COLLECTED, SUMS, GradEvent, GradientRecord
from lightning_ptm.runtime.units.store import FlatStore

if TYPE_CHECKING:
    from lightning_ptm.comm import Work
    from lightning_ptm.memory.allocator import Allocator
    from lightning_ptm.memory.backend import Backend
    from lightning_ptm.memory.device_work import Completion, DeviceEvent
    from lightning_ptm.memory.paged_tensor import PagedTensor
    from lightning_ptm.memory.transfer import Transfer

_LOOK_S = 0.01
_TIMEOUT_S = 60.0
"""The pool has enough sets for all gradients in flight, so a set returns within one update of each flat in progress."""

UNITS_AHEAD = 2
"""Maximum number of units whose gradients are in flight to sums in RAM: one that is copied while the backward of the
next unit computes, and one for a host that runs ahead of both. Each takes page-locked memory of its own."""


@dataclasses.dataclass(frozen=True, slots=True)
class PageSupply:
    """Source of pages for one flat's gradient.

    Attributes:
        take: returns pages for this rank's shard of the gradient, with undefined contents. Raises CapacityError if
            there are none.
        give_back: returns pages whose gradient was used.
    """

    take: Callable[[], PagedTensor]
    give_back: Callable[[PagedTensor], None]


class GradientPages:
    """Pool of page sets by number of elements and dtype. Compute takes sets, any thread returns them.

    Sets are allocated once, each contiguous, and reused: allocating and releasing them all the time would fragment
    memory.

    Args:
        sets: all sets of the pool.
        while_waiting: called while compute waits for a set: advances updates, and raises their errors.
    """

    def __init__(self, sets: Iterable[PagedTensor], while_waiting: Callable[[], None] = lambda: None) -> None:
        self._while_waiting = while_waiting
        self._changed = threading.Condition()
        self._free: dict[tuple[int, torch.dtype], list[PagedTensor]] = {}
        for tensor in sets:
            self.give_back(tensor)

    def take(self, numel: int, dtype: torch.dtype) -> PagedTensor:
        """Returns a set with undefined contents; waits for one.

        Raises:
            CapacityError: no set was returned for a long time.
        """
        free = self._free.setdefault((numel, dtype), [])
        deadline = monotonic() + _TIMEOUT_S
        while True:
            with self._changed:
                if free:
                    return free.pop()
            self._while_waiting()
            with self._changed:
                if not free:
                    self._changed.wait(_LOOK_S)
            if monotonic() > deadline:
                raise CapacityError(
                    f"a gradient of {numel} elements has waited {_TIMEOUT_S:.0f} s for pages that updates free, and "
                    "none was freed, so training stops: updates are slower than backward passes, or the disk hangs; "
                    "use a faster disk_path, a smaller lock_free=LockFree(max_staleness=...), or lock_free=False"
                )

    def supply(self, numel: int, dtype: torch.dtype) -> PageSupply:
        """The supply for a flat whose gradient has this size and dtype."""
        return PageSupply(partial(self.take, numel, dtype), self.give_back)

    def give_back(self, tensor: PagedTensor) -> None:
        """Returns a set whose gradient was used."""
        with self._changed:
            self._free.setdefault((tensor.numel, tensor.dtype), []).append(tensor)
            self._changed.notify_all()


class Addition:
    """A gradient on its way to a sum, with the interface of a transfer.

    Args:
        value: the buffer in RAM that the gradient is copied to.
        sum_: the sum that `value` is added to, or written to.
    """

    def __init__(self, arriving: Completion, value: Tensor, sum_: Tensor, *, adds: bool) -> None:
        self._arriving = arriving
        self._value: Tensor | None = value
        self._sum = sum_
        self._adds = adds
        self._lock = threading.Lock()

    def done(self) -> bool:
        """Whether the sum includes the gradient. Never blocks for the device."""
        if self._value is not None and self._arriving.done():
            self.wait()
        return self._value is None

    def hand_over(self) -> DeviceEvent | None:
        """Returns the end of the copy, as `Transfer.hand_over`."""
        return None if self.done() else self._arriving.end()

    def wait(self, host: bool = True) -> None:
        """Blocks until the sum includes the gradient; the CPU adds it."""
        with self._lock:
            if self._value is None:
                return
            self._arriving.synchronize()
            with torch.no_grad():
                _put(self._sum, self._value, adds=self._adds)
            self._value = None


class HostAccumulator:
    """The stream for gradients of a device with memory of its own."""

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        # Not the stream of page copies: additions would wait for pages of the next units.
        self._to_host = Copies(backend, backend.stream())

    def start(self, part: Tensor, sum_: Tensor, *, adds: bool) -> Addition:
        """Starts to copy `part`, written by the work queued so far. `part` must stay unchanged until it is added."""
        value = self._backend.empty_in_host(part)
        return Addition(self._to_host.launch([Pair(value, part)]), value, sum_, adds=adds)


class InFlight:
    """The gradients of a run with reductions or copies in flight, in the order in which these were started.

    Their buffers are device pages that the run gets back when they have ended.
    """

    def __init__(self) -> None:
        self._shards: dict[GradientShard, None] = {}

    def add(self, shard: GradientShard) -> None:
        """Adds a gradient; no effect if it is in flight already."""
        self._shards[shard] = None

    def discard(self, shard: GradientShard) -> None:
        """Removes a gradient, if it is in flight."""
        self._shards.pop(shard, None)

    def release(self, wait: bool) -> bool:
        """Releases device pages of gradients that have left them. Returns whether any page was freed.

        Args:
            wait: also those of gradients that are still leaving; see `GradientShard.release`.
        """
        freed = False
        for shard in tuple(self._shards):
            freed |= shard.release(wait=wait)
        return freed

    def release_oldest(self) -> bool:
        """Releases the device pages of the gradient that has been in flight for longest, as `release(wait=True)`. Returns
        whether there was one with such pages."""
        return any(shard.release(wait=True) for shard in tuple(self._shards))

    def limit_additions(self) -> None:
        """Waits for additions in RAM if the host is too many units ahead of the device."""
        adding = [shard for shard in self._shards if shard.adds_in_ram]
        if adding:
            ahead = [*dict.fromkeys(shard.unit for shard in adding)][-UNITS_AHEAD:]
            for shard in adding:
                if shard.unit not in ahead:
                    shard.settle()

    def end_additions(self) -> None:
        """Waits for additions to sums in RAM, at the end of the run."""
        for shard in tuple(self._shards):
            shard.end_additions()


@dataclasses.dataclass(slots=True)
class _Arriving:
    """A reduction in flight: it reads `full` (None once that is released), and writes this rank's share to `part`.

    Without `part`, it writes to the gradient's pages.
    """

    work: Work
    full: PagedTensor | None
    part: PagedTensor | None


class GradientShard:
    """The gradient shard of one flat; without pages if the gradient waits in `.grad`.

    Args:
        store: the flat's compute parameters.
        route: where the gradient waits.
        record: what the pages hold.
        supply: source of the pages; not used if the gradient waits in `.grad`.
        in_flight: those of the run; it is one of them while its reduction or copies are.
        in_ram: adds gradients of a device to sums in RAM; None: the device has no memory of its own.
        before_change: called before gradients are written other than by a backward pass, since an update may still read
            them.
        evict_idle_unit: makes a unit that is not in use release its device pages; returns whether there was one.
    """

    def __init__(
        self,
        store: FlatStore,
        route: GradientRoute,
        record: GradientRecord,
        allocator: Allocator,
        supply: PageSupply,
        in_flight: InFlight,
        in_ram: HostAccumulator | None = None,
        *,
        before_change: Callable[[], None] = lambda: None,
        evict_idle_unit: Callable[[], bool] = lambda: False,
    ) -> None:
        self._store = store
        self._layout = store.layout
        self.has_gaps = store.layout.padded_numel != sum(slot.numel for slot in store.layout.slots)
        """Whether the flat has elements of no parameter. Read by others."""
        self._arrangement = store.binding.arrangement
        self._parameter_dtype = store.binding.dtype
        self._dtype = route.dtype
        self._record = record
        self._allocator = allocator
        self._supply = supply
        self._in_flight = in_flight
        self.unit = store.layout.unit
        self._in_ram = in_ram
        self.widens = route.dtype != store.binding.dtype
        """Whether the sum has a wider dtype than the gradients that are added."""
        self.before_change = before_change
        self.evict_idle_unit = evict_idle_unit
        # state
        self.pages: PagedTensor | None = None
        """The gradient pages, if this flat has any. Read by others."""
        self._arriving: _Arriving | None = None
        self._transfers: list[tuple[Transfer | Addition, PagedTensor | None]] = []
        """Copies in flight, with the device buffers that they read, until these are released."""

    def reserve(self) -> PagedTensor:
        """Takes the pages, if there are none yet."""
        if self.pages is None:
            self.pages = self._supply.take()
        return self.pages

    # -- pages ---------------------------------------------------------------------------------------------------------

    def use_up(self) -> None:
        """Returns the pages to their supply after an update has read them.

        The update has waited for the transfers into them.
        """
        if self.pages is not None and self._record.state not in COLLECTED:
            self.settle()
            self._supply.give_back(self.give_away())

    def give_away(self) -> PagedTensor:
        """Hands the pages to the caller, who returns them with `PageSupply.give_back`."""
        pages, self.pages = self.pages, None
        assert pages is not None
        return pages

    def copy(self) -> tuple[PagedTensor, Transfer]:
        """Copies the gradient to further pages, which the caller returns as those of `give_away`."""
        assert self.pages is not None
        copy = self._supply.take()
        return copy, self._allocator.copy(self.pages, copy)

    def return_pages(self, pages: PagedTensor) -> None:
        """Returns pages of `give_away` or `copy`."""
        self._supply.give_back(pages)

    # -- transfers in flight -------------------------------------------------------------------------------------------

    def transfers(self) -> Sequence[Transfer | Addition]:
        """Transfers into the pages that are in flight; readers of the pages wait for them."""
        return [transfer for transfer, _ in self._transfers]

    @property
    def adds_in_ram(self) -> bool:
        """Whether an addition to a sum in RAM is in flight, as far as is known."""
        return self._in_ram is not None and any(isinstance(transfer, Addition) for transfer, _ in self._transfers)

    def end_additions(self) -> None:
        """Waits for additions to sums in RAM, at the end of the run."""
        for transfer, _ in self._transfers:
            if isinstance(transfer, Addition):
                transfer.wait()

    @property
    def in_flight(self) -> bool:
        """Whether a reduction or copy is in flight, as far as is known."""
        return self._arriving is not None or bool(self._transfers)

    def reduction_started(
        self, work: Work, full: PagedTensor, part: PagedTensor | None, present: Sequence[bool]
    ) -> None:
        """Records a reduction in flight.

        Args:
            part: what it writes; None: the gradient's pages.
            present: which parameters have a gradient on any rank.
        """
        self._record.send(GradEvent.REDUCE, present)
        self._arriving = _Arriving(work, full, part)
        self._in_flight.add(self)

    def settle(self) -> None:
        """Waits until the gradient pages may be read, and frees the buffers of finished transfers and of `on_device`."""
        if not self.in_flight:
            return
        self.finish_reduction()
        transfers, self._transfers = self._transfers, []
        for transfer, buffer in transfers:
            if not transfer.done():
                transfer.wait()
            if buffer is not None:
                self._allocator.release(buffer)
        self._in_flight.discard(self)

    def release(self, *, wait: bool) -> bool:
        """Releases device pages of gradients that have left them.

        Args:
            wait: also those of gradients that are being reduced or copied. Their next user's stream waits for copies to
                RAM; this thread waits for other copies, and for reductions.

        Returns:
            Whether any page was freed.
        """
        arriving = self._arriving
        if arriving is not None and (wait or (arriving.work.done() and not self._adds_through_buffers)):
            self.finish_reduction()
        freed = wait and arriving is not None
        for transfer, buffer in tuple(self._transfers):
            if transfer.done() or (wait and buffer is not None):
                freed |= self._release_buffer(transfer, buffer)
        if not self.in_flight:
            self._in_flight.discard(self)
        return freed

    def _release_buffer(self, transfer: Transfer | Addition, buffer: PagedTensor | None) -> bool:
        """Releases the buffer that a copy reads; returns whether there is one."""
        after = transfer.hand_over()
        if after is None:
            transfer.wait()
        if buffer is not None:
            self._allocator.release(buffer, after)
        place = self._transfers.index((transfer, buffer))
        self._transfers[place : place + 1] = [] if after is None else [(transfer, None)]
        return buffer is not None

    def finish_reduction(self) -> None:
        """Finishes the reduction in flight."""
        arriving = self._arriving
        if arriving is None:
            return
        arriving.work.wait()
        if arriving.full is not None:
            self._allocator.release(arriving.full)
            arriving.full = None
        while True:
            try:
                so_far = self.take_sum_buffers()
                break
            except CapacityError:
                if not self.evict_idle_unit():
                    raise
        self._arriving = None
        if arriving.part is not None:
            self._add(arriving.part, so_far)
        self._record.send(GradEvent.REDUCED)

    # -- reading and writing -------------------------------------------------------------------------------------------

    def on_device(self) -> Tensor:
        """The shard's gradient, (shard_numel,), for a short read; `settle` must follow."""
        self.settle()
        if self.pages is None:
            raise InternalError(f"flat {self._layout.index} has no gradient pages")
        if self.pages.tier.addressable:
            return self.pages.tensor()
        buffer = self._take_copy()
        transfer = self._allocator.copy(self.pages, buffer)
        transfer.wait(host=True)
        self._transfers.append((transfer, buffer))
        return buffer.tensor()

    def _take_copy(self) -> PagedTensor:
        name = f"flat {self._layout.index} gradient copy"
        while True:
            try:
                return self._store.device_pages.take(name, self._layout.shard_numel, self._dtype, self._layout.unit)
            except CapacityError:
                if self._in_flight.release(wait=True):
                    continue  # gradients of other flats that are leaving
                if not self.evict_idle_unit():  # no plan counts users' access to `.grad`
                    raise

    @contextlib.contextmanager
    def changing(self) -> Iterator[Tensor]:
        """Gives the shard's gradient, (shard_numel,), for changes inside the block."""
        self.before_change()
        values = self.on_device()
        yield values
        if self.pages is not None and not self.pages.tier.addressable:
            buffer = self._transfers[-1][1]
            assert buffer is not None
            self._transfers.append((self._allocator.copy(buffer, self.pages), buffer))
            del self._transfers[-2]
        self.settle()

    def value(self, slot: int, parameter: Tensor) -> Tensor:
        """A copy of one parameter's gradient, with the parameter's device and dtype.

        The flat must be whole on this rank.
        """
        values = self._arrangement.view(self.on_device(), slot)
        copy = values.to(device=parameter.device, dtype=parameter.dtype, copy=True)
        self.settle()
        return copy

    def write(self, slot: int, value: Tensor | None) -> None:
        """Writes one parameter's gradient to the pages; None writes zeros, to which others may be added."""
        with self.changing() as values:
            view = self._arrangement.view(values, slot)
            if value is None:
                view.zero_()
            else:
                view.copy_(value)

    def add_to_slot(self, slot: int, gradient: Tensor, *, replaces: bool = False) -> None:
        """Adds one parameter's gradient to the pages. The flat must be whole on this rank.

        Args:
            replaces: it takes the place of the one that is there.
        """
        self.reserve()
        with self.changing() as values:
            if self._record.state not in SUMS:
                values.zero_()
            view = self._arrangement.view(values, slot)
            _put(view, gradient, adds=self._record.present[slot] and not replaces)
        self._record.send(GradEvent.ADD, [each == slot for each in range(len(self._record.present))])

    def add_on_device(self, take: Callable[[int], Tensor | None]) -> None:
        """Adds gradients, taken by slot, to pages on the same device. The flat must be whole on this rank."""
        pages = self.reserve().tensor()
        adds = self._record.state in SUMS
        gradients = [take(slot) for slot in range(len(self._record.present))]
        came = [each is not None for each in gradients]
        if not adds and (self.has_gaps or not all(came)):
            pages.zero_()
        for slot, gradient in enumerate(gradients):
            if gradient is not None:
                _put(self._arrangement.view(pages, slot), gradient, adds=adds)
                gradients[slot] = None  # frees it before the next one is added
        self._record.send(GradEvent.ADD, came)

    # -- buffers -------------------------------------------------------------------------------------------------------

    def take(self, what: GradientBuffer, numel: int) -> PagedTensor:
        """Adjacent device pages for a buffer of the parameters' dtype.

        Raises:
            CapacityError: there are none; nothing is taken.
        """
        name = f"flat {self._layout.index} {what.value}"
        pages = self._store.device_pages
        return pages.take_for_gradient(name, numel, self._parameter_dtype, self._layout, what)

    @property
    def _adds_through_buffers(self) -> bool:
        adds = self._record.state in SUMS or self.widens
        return adds and self.pages is not None and not self.pages.tier.addressable

    def take_sum_buffers(self) -> Sequence[PagedTensor]:
        """Takes device buffers of one page each for adding to a sum in pages without addresses, or for widening to its
        dtype.

        Returns an empty list if neither is needed. The buffers need not be contiguous. The plan has them where the full
        gradient was if ranks have reduced that.

        Raises:
            CapacityError: there are too few; nothing is taken.
        """
        taken: list[PagedTensor] = []
        if self._adds_through_buffers:
            most, left = self._allocator.page_size // self._dtype.itemsize, self._layout.shard_numel
            name = f"flat {self._layout.index} gradient so far"
            pages = self._store.device_pages
            frame = pages.frame_of_gradient(
                self._layout.index, GradientBuffer.FULL if self._layout.shared else GradientBuffer.SUM
            )
            try:
                while left:
                    place = None if frame is None else frame + len(taken)
                    taken.append(pages.take(name, min(left, most), self._dtype, self._layout.unit, place))
                    left -= taken[-1].numel
            except CapacityError:
                for each in taken:
                    self._allocator.release(each)
                raise
        return taken

    def add(self, part: PagedTensor, so_far: Sequence[PagedTensor], present: Sequence[bool]) -> None:
        """Adds gradients of one pass, which need no reduction; see `_add`.

        Args:
            present: which parameters have one.
        """
        self._add(part, so_far)
        self._record.send(GradEvent.ADD, present)

    def _add(self, part: PagedTensor, so_far: Sequence[PagedTensor]) -> None:
        """Adds `part` to the pages and releases it.

        Args:
            part: (shard_numel,), on the device.
            so_far: buffers of `take_sum_buffers`, if any; the pages must be ready to be read (I2).
        """
        pages = self.pages
        assert pages is not None
        adds = self._record.state in SUMS
        if pages.tier.addressable and (pages.tier.computes or adds or self.widens):
            if self._in_ram is not None and not pages.tier.computes:
                addition = self._in_ram.start(part.tensor(), pages.tensor(), adds=adds)
                self._transfers.append((addition, part))
            else:
                _put(pages.tensor(), part.tensor(), adds=adds)
                self._allocator.release(part)
        elif so_far:
            self._add_through(so_far, part.tensor(), pages)
            self._allocator.release(part)
        else:
            self._transfers.append((self._allocator.copy(part, pages), part))
        if self._transfers:
            self._in_flight.add(self)

    def _add_through(self, so_far: Sequence[PagedTensor], values: Tensor, pages: PagedTensor) -> None:
        """Adds values (shard_numel,) to pages without addresses."""
        starts = [0, *itertools.accumulate(each.numel for each in so_far)]
        places = list(zip(so_far, starts, values.split([each.numel for each in so_far]), strict=False))
        adds = self._record.state in SUMS
        coming = [self._allocator.copy(pages, each, source_start=start) for each, start, _ in places if adds]
        for transfer in coming:
            transfer.wait()
        for each, start, more in places:
            _put(each.tensor(), more, adds=adds)
            self._transfers.append((self._allocator.copy(each, pages, target_start=start), each))


def _put(target: Tensor, gradient: Tensor, *, adds: bool) -> None:
    """Adds a gradient to a sum, or writes it there."""
    if adds:
        target.add_(gradient)
    else:
        target.copy_(gradient)
