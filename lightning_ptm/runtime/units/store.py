"""Store of a flat's compute parameters: the home of this rank's shard, and the gathered full flat while it is needed.

Owns the fetch state of each flat and the pages of its full copy. The policy (when to fetch, what to release) is elsewhere.

States of a full flat: RELEASED -> FETCHING (pages allocated, transfer or all-gather started) -> LIVE (bound) -> RELEASED.
The host runs ahead of the device: LIVE means that the compute stream waits for the bytes, not that they have arrived.

I1: parameters are bound exactly while the flat is LIVE.
I2: a resident flat (world size 1, home on the device) is its own full flat: always LIVE, zero-copy.
I3: the full flat's pages are freed only after the compute stream has finished with them (`Allocator.release` ensures it).
I4: code that writes to a home first waits for copies that still read it (`reads`).
I5: for a quantized flat, homes, shards and collectives contain codes. A fetch puts the codes at the end of the full flat's
    pages, where they are decoded in place when compute needs the values. Such a flat is never resident.
"""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Callable, Collection, Sequence
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from lightning_ptm.errors import CapacityError, InternalError
from lightning_ptm.memory.quantization import QuantizedTensor, decode, room_before_codes, rounded
from lightning_ptm.planning.fetch_policy import Among
from lightning_ptm.terms import Tier

if TYPE_CHECKING:
    from lightning_ptm.comm import Communicator
    from lightning_ptm.memory.allocator import Allocator
    from lightning_ptm.memory.paged_tensor import PagedTensor
    from lightning_ptm.memory.transfer import Transfer
    from lightning_ptm.planning.layout import FlatLayout
    from lightning_ptm.planning.plan import GradientBuffer
    from lightning_ptm.runtime.units.binding import FlatBinding
    from lightning_ptm.runtime.units.discovery import Unit
    from lightning_ptm.runtime.units.parameter_guard import ParameterGuard


class FullState(enum.Enum):
    """State of a full flat: without pages, with pages that are being filled, or bound."""

    RELEASED = "released"
    FETCHING = "fetching"
    LIVE = "live"


_NEXT = {
    (FullState.RELEASED, FullState.FETCHING),
    (FullState.FETCHING, FullState.LIVE),
    (FullState.LIVE, FullState.RELEASED),
    (FullState.FETCHING, FullState.RELEASED),
}


class DevicePages:
    """The device pages for gathered flats, fetched shards and passing gradients: the last ones of the tier.

    Args:
        first: the first of them.
        planned: number of them that plans use, by default all; the others are for the units of `by_need`.
        by_need: units that no plan contains.
        frame_of_gradient: returns the frame that the plan in progress has for pages of a flat's gradient.
        evict_ended: frees shards that may be in this frame: first those that are evicted, then those that are next.
        root_pages: the first of them, which the root has.
        gradient_pages: the most that gradients of one unit take at once; a block leaves so many adjacent ones.
    """

    def __init__(
        self,
        allocator: Allocator,
        first: int = 0,
        planned: int | None = None,
        by_need: Collection[int] = (),
        frame_of_gradient: Callable[[int, GradientBuffer], int | None] = lambda flat, pages: None,
        evict_ended: Callable[[], None] = lambda: None,
        *,
        root_pages: int = 0,
        gradient_pages: int = 0,
    ) -> None:
        self._allocator = allocator
        self._evict_ended = evict_ended
        self._first = first
        self._by_need = by_need
        stop = allocator.capacity_bytes(Tier.DEVICE) // allocator.page_size
        own = range(first, stop if planned is None else first + planned)
        others, homes = range(own.stop, stop), range(first)
        gathered = range(first, stop)  # free pages may be adjacent across the end of `own`
        low, high = own[root_pages : max(0, len(own) - gradient_pages)], own[root_pages + gradient_pages :]
        self._at_ends = (gathered,) if by_need else (low, high)  # plans do not say beside which gradients those compute
        self._of_root = own, others, gathered, homes
        self._of_block = own[::-1], others[::-1], gathered[::-1], homes[::-1]
        self._of_block_at_ends = (own[::-1],) if by_need else (high[::-1], low, homes[::-1])
        self._of_root_at_end = own if by_need or not root_pages else own[:root_pages]
        self._of_by_need = others[::-1], own[::-1], gathered[::-1], homes[::-1]
        self.frame_of_gradient = frame_of_gradient

    def take(
        self,
        name: str,
        numel: int,
        dtype: torch.dtype,
        unit: int,
        frame: int | None = None,
        *,
        among: Among = Among.ANY,
        filled: bool = False,
    ) -> PagedTensor:
        """Returns a tensor of `numel` elements in adjacent pages, with undefined contents.

        Args:
            unit: whose flat it is for.
            frame: its place in the plan; None: it has none.
            among: the pages to take instead of that; without a plan the root, which stays while blocks come and go, is put
                at one end and blocks at the other, so that what a block frees is adjacent.
            filled: its first use is `Allocator.fill`.

        Raises:
            CapacityError: these pages are not free; nothing is taken.
        """
        place = None if frame is None else self._first + frame
        others: tuple[range, ...] = ()
        if among is not Among.PLANNED:
            others = self._of_by_need if unit in self._by_need else self._of_block if unit else self._of_root
        if among is Among.OWN and unit not in self._by_need:
            others = self._of_block_at_ends if unit else (self._of_root_at_end,)
        return self._allocator.allocate_adjacent(
            name, numel, dtype, Tier.DEVICE, place, elsewhere=others, filled=filled
        )

    def divides(self, pages: PagedTensor) -> bool:
        """Whether pages of a block leave too few adjacent ones for gradients of another unit."""
        first, last = pages.pages.frames[0], pages.pages.frames[-1]
        return last >= self._first and not any(first >= each.start and last < each.stop for each in self._at_ends)

    def take_for_gradient(
        self, name: str, numel: int, dtype: torch.dtype, flat: FlatLayout, pages: GradientBuffer
    ) -> PagedTensor:
        """Returns pages for a flat's gradient, where the plan has them if these are free. Raises as `take`."""
        frame = self.frame_of_gradient(flat.index, pages)
        if frame is not None:
            for _ in range(2):
                if self._allocator.has_run_at(Tier.DEVICE, self._first + frame, numel * dtype.itemsize):
                    break
                self._evict_ended()
        return self.take(name, numel, dtype, flat.unit, frame)


class FlatStore:
    """Compute parameters of one flat.

    Args:
        layout: layout of the parameters in the flat.
        binding: link to the parameters.
        home: this rank's shard (shard_numel,), or its codes, in its home tier.
        communicator: ranks over which the flat is sharded.
        device_pages: source of pages for the full flat and for the shard's copy; None: any pages of the tier.
    """

    def __init__(
        self,
        layout: FlatLayout,
        binding: FlatBinding,
        home: PagedTensor,
        allocator: Allocator,
        communicator: Communicator,
        device_pages: DevicePages | None = None,
    ) -> None:
        self.layout = layout
        self.binding = binding
        self.home = home
        self.shared = layout.shared
        """Whether other ranks have shards of the flat."""
        in_place = not self.shared and home.tier.computes
        self.resident = in_place and layout.code is None
        self._decodes_home = in_place and not self.resident
        self.copies_shard = self.shared and not home.tier.computes
        """Whether a gather reads a copy of the shard."""
        self._stored = layout.stored
        self._start = 0 if layout.code is None else room_before_codes(layout.padded_bytes, self._stored.padded_bytes)
        self._allocator = allocator
        self.device_pages = device_pages or DevicePages(allocator)
        self.communicator = communicator
        self.state = FullState.RELEASED
        self._full: PagedTensor | None = None
        self._shard: PagedTensor | None = None
        self._pending: Callable[[], None] | None = None
        """Makes the current stream wait for the bytes of the full flat."""
        self._shard_pending: Transfer | None = None
        self._reads: list[Transfer] = []
        self._evict_when_live = False

    @property
    def full_bytes(self) -> int:
        """Bytes of the full flat's own pages; 0 for a resident flat."""
        return 0 if self.resident else self.layout.padded_numel * self.layout.itemsize

    @property
    def values(self) -> PagedTensor | QuantizedTensor:
        """Values of the shard (shard_numel,) in the home."""
        code = self.layout.code
        return (
            self.home if code is None else QuantizedTensor(self.home, code, self.binding.dtype, self.layout.shard_numel)
        )

    def reads(self) -> Sequence[Transfer]:
        """Returns the running copies from the home (I4)."""
        if self._reads:
            self._reads = [transfer for transfer in self._reads if not transfer.done()]
        return tuple(self._reads)

    def await_reads(self) -> None:
        """Blocks until all copies from the home have finished."""
        if self._reads:
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
        """Makes pages with newer values the home, and returns the old pages. A flat that is not resident must be RELEASED."""
        if not self.resident and self.state is not FullState.RELEASED:
            raise InternalError(f"flat {self.layout.index} is {self.state.value} while its home is replaced")
        self.await_reads()  # the caller may write to the old pages
        old, self.home = self.home, home
        self.binding.values_change()
        if self.resident:
            self.bind_resident()
        return old

    def rebind(self, changed: Tensor | None) -> None:
        """Ends the summoning of the parameters for the user (`gathered`).

        Args:
            changed: new values of the home (padded_numel,); None if they are unchanged.
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
                self.release()  # the running fetch brings the old values

    def full(self) -> Tensor:
        """Returns the bound flat (padded_numel,)."""
        if self.state is not FullState.LIVE:
            raise InternalError(f"flat {self.layout.index} is {self.state.value}, not live")
        return self.home.tensor() if self.resident else self._values_here()

    def _values_here(self) -> Tensor:
        # In inference mode a view in another dtype would be an inference tensor, which autograd refuses afterwards.
        with torch.inference_mode(False):
            assert self._full is not None
            return self._full.tensor().view(self.binding.dtype)

    def _coming(self) -> Tensor:
        """Returns the target of the fetch: all of the full flat's pages, or their end for codes (I5)."""
        assert self._full is not None
        return self._full.tensor()[self._start :][: self._stored.padded_numel]

    def fetch_shard(self, frame: int | None = None, *, among: Among = Among.ANY) -> None:
        """Starts copying the shard to the device ahead of its all-gather (Algorithm 1's move_to_gpu).

        Args as `DevicePages.take`.

        Raises:
            CapacityError: there are no pages for it; nothing has changed.
        """
        if not self.copies_shard or self._shard is not None:
            return
        self._shard = self.device_pages.take(
            f"flat {self.layout.index} shard",
            self.home.numel,
            self.home.dtype,
            self.layout.unit,
            frame,
            among=among,
            filled=True,
        )
        self._shard_pending = self._copy_home(self._shard)

    def take(self, frame: int | None = None, *, among: Among = Among.ANY) -> None:
        """Allocates the full flat's pages; args as `DevicePages.take`.

        Raises:
            CapacityError: the device tier has no room; nothing has changed.
        """
        self._expect(FullState.FETCHING)
        numel = self.layout.padded_bytes // self.home.dtype.itemsize
        name = f"flat {self.layout.index} full"
        unit = self.layout.unit
        filled = not (self.shared or self._decodes_home)
        full = self.device_pages.take(name, numel, self.home.dtype, unit, frame, among=among, filled=filled)
        if self.copies_shard:
            try:
                self.fetch_shard()
            except CapacityError:
                self._allocator.release(full)
                raise
        self._full = full
        self.state = FullState.FETCHING

    def fill(self) -> None:
        """Starts filling the allocated pages. With several ranks, all must have agreed on the all-gather before."""
        if self.shared:
            self._pending = self.communicator.all_gather(self._shard_tensor(), self._coming(), self._stored).wait
        elif not self._decodes_home:
            assert self._full is not None
            self._pending = partial(self._copy_home(self._full, self._start).wait, host=False)

    def finish_fetch(self) -> None:
        """Makes the current stream wait for the bytes (and this thread, if they come from disk), and binds the parameters."""
        self._expect(FullState.LIVE)
        if self._pending is not None:
            self._order()
        full = self._values_here()
        if self.layout.code is not None:
            codes = self.home.tensor() if self._decodes_home else self._coming()
            decode(codes, self.layout.code, full, has_own_memory=self._allocator.backend.has_own_memory)
        self.binding.bind(full)
        self.state = FullState.LIVE
        if self._evict_when_live:
            self._evict_when_live = False
            self.evict_shard()

    def release(self) -> None:
        """Frees the full flat; its parameters can then not be read. Does nothing for a resident flat."""
        if self.resident:
            return
        if self.state is FullState.FETCHING:
            self._order()
        self._expect(FullState.RELEASED)
        if not self.binding.summoned:  # summoned parameters have storage outside pages
            self.binding.check_views()
            self.binding.unbind()
        assert self._full is not None
        self._allocator.release(self._full)
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
        """Frees the device copy of the shard; if an all-gather reads it, after that has finished."""
        if self.state is FullState.FETCHING:
            self._evict_when_live = True
            return
        self._drop_shard()

    def finish_eviction(self) -> None:
        """Frees an evicted shard's copy that an all-gather reads, after making the current stream wait for that."""
        if self._evict_when_live:
            self._evict_when_live = False
            self._order()
            self._drop_shard()

    def _drop_shard(self) -> None:
        if self._shard is not None:
            if self._shard_pending is not None:
                self._shard_pending.wait(host=False)
            self._allocator.release(self._shard)
        self._shard = None
        self._shard_pending = None

    @property
    def divides_free_pages(self) -> bool:
        """See `UnitPages`."""
        return self._full is not None and self.device_pages.divides(self._full)

    def contribute(self, read: Callable[[PagedTensor], Tensor]) -> None:
        """Takes part in an all-gather that only other ranks need, into temporary memory. Does nothing for a flat that only
        this rank holds (slices of a unit whose other parameters are sharded).

        Args:
            read: reads a home into memory outside pages, for use if no page is free.
        """
        if not self.shared:
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

    def _expect(self, following: FullState) -> None:
        if (self.state, following) not in _NEXT:
            raise InternalError(f"flat {self.layout.index} cannot go from {self.state.value} to {following.value}")


@dataclasses.dataclass(slots=True)
class UnitStore:
    """All flats of one unit, which are fetched and released together.

    Attributes:
        remote: bindings of flats that only other ranks hold; their parameters are never bound here.
        late: whether an update may still run after the optimizer's step has returned.
        bindings: bindings of all flats, including those that only other ranks hold.
        moving: flats that are not resident.
        sharded: flats that are sharded over ranks, so that the unit needs an all-gather.
        resident: whether all flats are always live, in their homes (I2).
        closing: guards of the flats whose parameters may be read only while the unit computes.
        opened: whether these parameters are marked as used; True if there are none.
        readable: whether its parameters may be read at any time and then have their precise values.
        read_in_place: whether the backward in progress reads its pages themselves, not names (changed by the executor).
    """

    unit: Unit
    flats: tuple[FlatStore, ...]
    remote: tuple[FlatBinding, ...] = ()
    late: bool = False
    bindings: tuple[FlatBinding, ...] = dataclasses.field(init=False)
    moving: tuple[FlatStore, ...] = dataclasses.field(init=False)
    sharded: tuple[FlatStore, ...] = dataclasses.field(init=False)
    resident: bool = dataclasses.field(init=False)
    closing: tuple[ParameterGuard, ...] = dataclasses.field(init=False)
    opened: bool = dataclasses.field(init=False)
    readable: bool = dataclasses.field(init=False)
    read_in_place: bool = dataclasses.field(init=False)

    def __post_init__(self) -> None:
        self.bindings = (*(flat.binding for flat in self.flats), *self.remote)
        self.moving = tuple([flat for flat in self.flats if not flat.resident])
        self.sharded = tuple([flat for flat in self.flats if flat.shared])
        self.resident = not self.moving
        guards = [flat.binding.parameter_guard for flat in self.flats]
        self.closing = tuple([guard for guard in guards if guard.closes])
        self.opened = not self.closing
        self.readable = self.resident and not self.remote and not self.closing
        self.read_in_place = False

    def begin_reads_in_place(self) -> None:
        """Sets `read_in_place`."""
        self.read_in_place = True

    def end_reads_in_place(self) -> None:
        """Clears `read_in_place`."""
        self.read_in_place = False

    @property
    def summoned(self) -> bool:
        """Whether the unit's parameters are summoned for the user (`gathered`)."""
        for binding in self.bindings:  # noqa: SIM110 (`any` would resume a generator per flat, several times a tick)
            if binding.summoned:
                return True
        return False

    def open(self) -> None:
        """Marks its parameters as used, so that they can be read; see `ParameterGuard.open`."""
        self.opened = True
        for guard in self.closing:
            guard.open()

    def close(self) -> None:
        """Marks its parameters as not used; see `ParameterGuard.close`."""
        self.opened = not self.closing
        for guard in self.closing:
            guard.close()

    @property
    def fetched(self) -> bool:
        """Whether all flats are live or being fetched."""
        for flat in self.moving:  # noqa: SIM110
            if flat.state is FullState.RELEASED:
                return False
        return True

    @property
    def live(self) -> bool:
        """Whether all flats are gathered and bound."""
        for flat in self.moving:  # noqa: SIM110
            if flat.state is not FullState.LIVE:
                return False
        return True

    @property
    def has_spare_shards(self) -> bool:
        """Whether the unit has device copies of shards that no all-gather reads."""
        return any(flat.has_spare_shard for flat in self.sharded)

    @property
    def divides_free_pages(self) -> bool:
        """Whether pages of a flat leave too few adjacent ones for gradients of another unit."""
        return any(flat.divides_free_pages for flat in self.moving)

    @property
    def movable(self) -> bool:
        """Whether the unit has pages that can be released while its refcount is zero."""
        return any(flat.state is not FullState.RELEASED for flat in self.moving)

    @property
    def full_bytes(self) -> int:
        return sum(flat.full_bytes for flat in self.flats)

    def start_fetch(
        self, agree: Callable[[], None] | None, frames: Sequence[int] = (), *, among: Among = Among.ANY
    ) -> None:
        """Allocates pages for all flats, and starts to fill them once the ranks agree. CapacityError changes nothing.

        Args:
            frames: see `Task.frames`.
            among: the pages to take instead of that.
        """
        taken: list[FlatStore] = []
        spare = [flat for flat in self.sharded if flat.has_spare_shard]
        try:
            for flat, frame in zip(self.moving, frames or (None,) * len(self.moving), strict=True):
                if flat.state is FullState.RELEASED:
                    flat.take(frame, among=among)
                    taken.append(flat)
        except CapacityError:
            for flat in taken:
                flat.release()
                if flat not in spare:
                    flat.evict_shard()
            raise
        if agree is not None and taken:
            agree()
        for flat in taken:
            flat.fill()

    def fetch_shards(self, frames: Sequence[int] = (), *, among: Among = Among.ANY) -> None:
        """Starts copying the shards to the device, ahead of the all-gather. Args as `start_fetch`."""
        for flat, frame in zip(self.sharded, frames or (None,) * len(self.sharded), strict=True):
            flat.fetch_shard(frame, among=among)

    def finish_fetch(self) -> None:
        """Makes the current stream wait for the running fetches, and binds the parameters."""
        for flat in self.moving:
            if flat.state is FullState.FETCHING:
                flat.finish_fetch()

    def release(self) -> None:
        """Frees the full flats, except resident ones."""
        for flat in self.moving:
            if flat.state is not FullState.RELEASED:
                flat.release()

    def evict(self) -> None:
        """Frees the device copies of shards."""
        for flat in self.sharded:
            flat.evict_shard()

    def finish_evictions(self) -> None:
        """Frees evicted shards that all-gathers read, after making the current stream wait for these."""
        for flat in self.sharded:
            flat.finish_eviction()
