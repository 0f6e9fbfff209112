"""One flat's compute parameters: the home of this rank's shard, and the gathered full flat while it is needed.

Owns the fetch state of each flat and the pages of its full copy. Policy (when to fetch, what to give up) is not here.

States of a full flat: RELEASED -> FETCHING (pages taken, transfer or all-gather started) -> LIVE (bound) -> RELEASED.
The host runs ahead: that a flat is LIVE tells that the compute stream is behind its bytes, not that they are there.
I1: parameters are bound exactly while the flat is LIVE. I2: a resident flat (world size 1, home on the device) is its own
full flat: LIVE for good, zero-copy. I3: the full flat's pages are given back only after the compute stream is done
with them (`Allocator.release` orders that). I4: who writes to a home waits for what still reads it (`reads`).
I5: of a flat that has a code, homes, shards and what ranks exchange are codes; these come to the end of the full flat's own
    pages, and become values in place when compute needs them. It is never resident.
"""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from lightning_ptm.errors import CapacityError, InternalError
from lightning_ptm.memory.quantization import QuantizedTensor, decode, room_before_codes, rounded
from lightning_ptm.runtime.tensors.contiguous_pages import contiguous_device_pages

if TYPE_CHECKING:
    from lightning_ptm.comm import Communicator
    from lightning_ptm.memory.allocator import Allocator
    from lightning_ptm.memory.paged_tensor import PagedTensor
    from lightning_ptm.memory.transfer import Transfer
    from lightning_ptm.planning.layout import FlatLayout
    from lightning_ptm.runtime.units.binding import FlatBinding
    from lightning_ptm.runtime.units.discovery import Unit


class FullState(enum.Enum):
    """Whether a full flat has pages, and whether they hold its bytes."""

    RELEASED = "released"
    FETCHING = "fetching"
    LIVE = "live"


_NEXT = {
    (FullState.RELEASED, FullState.FETCHING),
    (FullState.FETCHING, FullState.LIVE),
    (FullState.LIVE, FullState.RELEASED),
    (FullState.FETCHING, FullState.RELEASED),
}


class FlatStore:
    """The compute parameters of one flat.

    Args:
        layout: where the parameters lie.
        binding: the link to the parameters.
        home: this rank's shard (shard_numel,), or its codes, on its home tier.
        communicator: of the ranks that share the flat.
    """

    def __init__(
        self,
        layout: FlatLayout,
        binding: FlatBinding,
        home: PagedTensor,
        allocator: Allocator,
        communicator: Communicator,
    ) -> None:
        self.layout = layout
        self.binding = binding
        self.home = home
        in_place = not layout.shared and home.tier.computes
        self.resident = in_place and layout.code is None
        self._decodes_home = in_place and not self.resident
        self._stored = layout.stored
        self._start = 0 if layout.code is None else room_before_codes(layout.padded_bytes, self._stored.padded_bytes)
        self._allocator = allocator
        self.communicator = communicator
        self.state = FullState.RELEASED
        self._full: PagedTensor | None = None
        self._shard: PagedTensor | None = None
        self._pending: Callable[[], None] | None = None
        """Has the current stream wait for the bytes of the full flat."""
        self._shard_pending: Transfer | None = None
        self._reads: list[Transfer] = []
        self._evict_when_live = False

    @property
    def full_bytes(self) -> int:
        return 0 if self.resident else self.layout.padded_numel * self.layout.itemsize

    @property
    def values(self) -> PagedTensor | QuantizedTensor:
        """The shard's values (shard_numel,) at home."""
        code = self.layout.code
        return (
            self.home if code is None else QuantizedTensor(self.home, code, self.binding.dtype, self.layout.shard_numel)
        )

    def reads(self) -> Sequence[Transfer]:
        """Copies of the home that are still under way (I4)."""
        self._reads = [transfer for transfer in self._reads if not transfer.done()]
        return tuple(self._reads)

    def await_reads(self) -> None:
        """Blocks until no copy of the home is under way."""
        for transfer in self.reads():
            transfer.wait()

    def _copy_home(self, target: PagedTensor, start: int = 0) -> Transfer:
        self._reads = [*self.reads(), self._allocator.fill(self.home, target, start)]
        return self._reads[-1]

    def bind_resident(self) -> None:
        """Binds a resident flat for good (I2)."""
        self.binding.bind(self.home.tensor())
        self.state = FullState.LIVE

    def adopt(self, home: PagedTensor) -> PagedTensor:
        """Other pages with newer values become the home; returns the old ones. A flat that is not resident is released."""
        if not self.resident and self.state is not FullState.RELEASED:
            raise InternalError(f"flat {self.layout.index} is {self.state.value} while its home is replaced")
        self.await_reads()  # whoever gets the old pages writes to them
        old, self.home = self.home, home
        self.binding.values_change()
        if self.resident:
            self.bind_resident()
        return old

    def rebind(self, changed: Tensor | None) -> None:
        """Ends a stretch in which the parameters were somebody else's.

        Args:
            changed: the new values of home, (padded_numel,); None: they are as they were.
        """
        if changed is not None:
            self.binding.edited(changed)
        if self.resident:
            self.bind_resident()
        elif self.state is FullState.LIVE:
            full = self.full()
            if changed is not None:
                code = self.layout.code
                full.copy_(changed if code is None else rounded(changed.to(full.dtype), code))
            self.binding.bind(full)
        else:
            self.binding.unbind()
            if changed is not None and self.state is FullState.FETCHING:
                self.release()  # what is on its way are the values of before

    def full(self) -> Tensor:
        """The bound flat (padded_numel,)."""
        if self.state is not FullState.LIVE:
            raise InternalError(f"flat {self.layout.index} is {self.state.value}, not live")
        return self.home.tensor() if self.resident else self._values_here()

    def _values_here(self) -> Tensor:
        # In inference mode a view in another dtype would be an inference tensor, which autograd refuses ever after.
        with torch.inference_mode(False):
            return self._taken().tensor().view(self.binding.dtype)

    def _coming(self) -> Tensor:
        """Where the full flat comes to: all of its pages, or their end (I5)."""
        return self._taken().tensor()[self._start :][: self._stored.padded_numel]

    def fetch_shard(self) -> None:
        """Starts copying the shard to the device ahead of its all-gather (Algorithm 1's move_to_gpu)."""
        if not self.layout.shared or self.home.tier.computes or self._shard is not None:
            return
        self._shard = contiguous_device_pages(
            self._allocator, f"flat {self.layout.index} shard", self.home.numel, self.home.dtype
        )
        self._shard_pending = self._copy_home(self._shard)

    def take(self) -> None:
        """Takes the full flat's pages; raises CapacityError and changes nothing when the device tier has no room."""
        self._expect(FullState.FETCHING)
        numel = self.layout.padded_bytes // self.home.dtype.itemsize
        full = contiguous_device_pages(self._allocator, f"flat {self.layout.index} full", numel, self.home.dtype)
        try:
            self.fetch_shard()
        except CapacityError:
            self._allocator.release(full)
            raise
        self._full = full
        self.state = FullState.FETCHING

    def fill(self) -> None:
        """Starts filling the pages taken. With several ranks, the caller has agreed on the all-gather."""
        if self.layout.shared:
            self._pending = self.communicator.all_gather(self._shard_tensor(), self._coming(), self._stored).wait
        elif not self._decodes_home:
            self._pending = partial(self._copy_home(self._taken(), self._start).wait, host=False)

    def finish_fetch(self) -> None:
        """Has the current stream wait for the bytes (and this thread, where they come by I/O), and binds the parameters."""
        self._expect(FullState.LIVE)
        self._order()
        full = self._values_here()
        if self.layout.code is not None:
            codes = self.home.tensor() if self._decodes_home else self._coming()
            decode(codes, self.layout.code, full, apart=self._allocator.backend.apart)
        self.binding.bind(full)
        self.state = FullState.LIVE
        if self._evict_when_live:
            self._evict_when_live = False
            self.evict_shard()

    def release(self) -> None:
        """Lets go of the full flat; its parameters cannot be read from now on. A resident flat stays."""
        if self.resident:
            return
        if self.state is FullState.FETCHING:
            self._order()
        self._expect(FullState.RELEASED)
        if not self.binding.lent:  # else what the parameters are is the user's
            self.binding.check_views()
            self.binding.unbind()
        self._allocator.release(self._taken())
        self._full = None
        self.state = FullState.RELEASED
        if self._evict_when_live:
            self._evict_when_live = False
            self.evict_shard()

    @property
    def has_spare_shard(self) -> bool:
        """Whether `evict_shard` would free pages now."""
        return self._shard is not None and self.state is not FullState.FETCHING

    def evict_shard(self) -> None:
        """Gives the device copy of the shard up; while an all-gather reads it, as soon as that is done."""
        if self.state is FullState.FETCHING:
            self._evict_when_live = True
            return
        if self._shard is not None:
            if self._shard_pending is not None:
                self._shard_pending.wait(host=False)
            self._allocator.release(self._shard)
        self._shard = None
        self._shard_pending = None

    def contribute(self, read: Callable[[PagedTensor], Tensor]) -> None:
        """Takes part in an all-gather that this rank does not need, into memory of its own; nothing where the flat is this
        rank's alone (its part of a layer, beside what all ranks share of the unit).

        Args:
            read: brings a home to memory of its own, for when no page is free either.
        """
        if not self.layout.shared:
            return
        held = self._shard is not None
        try:
            self.fetch_shard()
            shard = self._shard_tensor()
        except CapacityError:
            shard = read(self.home).to(self.binding.device)
        scratch = torch.empty(self._stored.padded_numel, dtype=self.home.dtype, device=shard.device)
        self.communicator.all_gather(shard, scratch, self._stored).wait()
        if not held:
            self.evict_shard()

    def _shard_tensor(self) -> Tensor:
        if self.home.tier.computes:
            return self.home.tensor()
        if self._shard is None:
            raise InternalError(f"flat {self.layout.index}: the shard is not on the device")
        if self._shard_pending is not None:
            self._shard_pending.wait(host=False)
            self._shard_pending = None
        return self._shard.tensor()

    def _order(self) -> None:
        pending, self._pending = self._pending, None
        if pending is not None:
            pending()

    def _taken(self) -> PagedTensor:
        if self._full is None:
            raise InternalError(f"flat {self.layout.index} is {self.state.value} and has no full pages")
        return self._full

    def _expect(self, following: FullState) -> None:
        if (self.state, following) not in _NEXT:
            raise InternalError(f"flat {self.layout.index} cannot go from {self.state.value} to {following.value}")


@dataclasses.dataclass(slots=True)
class UnitStore:
    """All flats of one unit, fetched and released together.

    `elsewhere` are flats that this rank has no part in, since others hold the unit; their parameters are never bound.
    `late` says that an update may be under way when the optimizer's step has returned.
    """

    unit: Unit
    flats: tuple[FlatStore, ...]
    elsewhere: tuple[FlatBinding, ...] = ()
    late: bool = False

    @property
    def bindings(self) -> tuple[FlatBinding, ...]:
        """Of all its flats, whoever holds them."""
        return (*(flat.binding for flat in self.flats), *self.elsewhere)

    @property
    def resident(self) -> bool:
        return all(flat.resident for flat in self.flats)

    @property
    def closes(self) -> bool:
        """Whether any of its parameters may be read while it computes only."""
        return any(flat.binding.parameter_guard.closes for flat in self.flats)

    @property
    def readable(self) -> bool:
        """Whether its parameters may be read at any time, and are the precise ones then."""
        return self.resident and not self.elsewhere and not self.closes

    @property
    def lent(self) -> bool:
        """Whether its parameters are in the user's hands (`gathered`)."""
        return any(binding.lent for binding in self.bindings)

    def open(self) -> None:
        """Its parameters are used from here on, by whoever reads them."""
        for flat in self.flats:
            flat.binding.parameter_guard.open()

    def close(self) -> None:
        """Nobody uses them any more: see `FlatBinding.close`."""
        for flat in self.flats:
            flat.binding.parameter_guard.close()

    @property
    def live(self) -> bool:
        return all(flat.state is FullState.LIVE for flat in self.flats)

    @property
    def gathers(self) -> bool:
        """Whether other ranks share it."""
        return any(flat.layout.shared for flat in self.flats)

    @property
    def fetched(self) -> bool:
        """Live or on its way."""
        return all(flat.state is not FullState.RELEASED for flat in self.flats)

    @property
    def has_spare_shards(self) -> bool:
        """Holds device copies of shards that no all-gather reads."""
        return any(flat.has_spare_shard for flat in self.flats)

    @property
    def movable(self) -> bool:
        """Holds pages that may be given up while nobody leases it."""
        return any(not flat.resident and flat.state is not FullState.RELEASED for flat in self.flats)

    @property
    def full_bytes(self) -> int:
        return sum(flat.full_bytes for flat in self.flats)

    def start_fetch(self, agree: Callable[[], None] | None) -> None:
        """Takes pages for all flats, then (once the ranks agree) starts to fill them. CapacityError changes nothing."""
        taken: list[FlatStore] = []
        try:
            for flat in self.flats:
                if flat.state is FullState.RELEASED:
                    flat.take()
                    taken.append(flat)
        except CapacityError:
            for flat in taken:
                flat.release()
            raise
        if agree is not None and taken:
            agree()
        for flat in taken:
            flat.fill()

    def fetch_shards(self) -> None:
        for flat in self.flats:
            flat.fetch_shard()

    def finish_fetch(self) -> None:
        for flat in self.flats:
            if flat.state is FullState.FETCHING:
                flat.finish_fetch()

    def release(self) -> None:
        for flat in self.flats:
            if not flat.resident and flat.state is not FullState.RELEASED:
                flat.release()

    def evict(self) -> None:
        for flat in self.flats:
            flat.evict_shard()
