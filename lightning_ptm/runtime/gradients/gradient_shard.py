"""The gradient pages of one flat: this rank's shard, transfers into it, and which parameters' gradients it holds.

Owns the pages, reductions and copies in flight with their device buffers, and the content: which parameters' gradients
the pages hold, and which a step has used. Knows nothing of `.grad` (grad_attribute.py).

I1: the pages hold the sum over micro-batches since they were last forgotten, rounded to the gradient dtype after each,
    as autograd does in place. Under mixed precision that dtype is fp32 if there may be several micro-batches: in 16
    bits, a gradient that is added to a sum hundreds of times as large would be lost.
I2: the pages are read only after all transfers into them have ended (`settle`).
I3: an operation that runs out of pages (CapacityError) has changed nothing and may be retried.
I4: pages that are not filled have undefined contents; new gradients overwrite them.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from lightning_ptm.errors import CapacityError, InternalError
from lightning_ptm.runtime.deciding.gradient_route import GradientRoute
from lightning_ptm.runtime.gradients.host_accumulate import Addition
from lightning_ptm.runtime.units.store import FlatStore, contiguous_device_pages
from lightning_ptm.terms import Tier

if TYPE_CHECKING:
    from lightning_ptm.comm import Work
    from lightning_ptm.memory.allocator import Allocator
    from lightning_ptm.memory.paged_tensor import PagedTensor
    from lightning_ptm.memory.transfer import Transfer
    from lightning_ptm.runtime.gradients.gradient_pages import PageSupply
    from lightning_ptm.runtime.gradients.host_accumulate import HostAccumulator


class GradientContent:
    """Which parameters' gradients the pages of a flat hold, and which a step has used.

    Args:
        count: number of parameters.
    """

    def __init__(self, count: int) -> None:
        self.filled = False
        """Whether the pages hold a gradient. Read by others."""
        self.present = [False] * count
        """For each parameter, whether its gradient is in the pages, or on its way there. Read by others."""
        self.spent: Sequence[bool] = ()
        """For each parameter, whether a step has used its gradient; empty: for none. Read by others."""

    def add_present(self, present: Sequence[bool]) -> None:
        """Adds parameters whose gradients are on their way to the pages."""
        self.present = [a or b for a, b in zip(self.present, present, strict=True)]

    def mark_filled(self) -> None:
        """Records that the gradients on their way were added."""
        self.filled = True

    def forget_slot(self, slot: int) -> None:
        """Forgets the gradient of one parameter."""
        self.present[slot] = False
        if not any(self.present):
            self.filled = False

    def forget(self) -> None:
        """Forgets all gradients, and that any were used."""
        self.spent = ()
        self._empty()

    def spend(self) -> None:
        """Marks all gradients as used."""
        self.spent = tuple(self.present)
        self._empty()

    def spend_uncollected(self, here: Sequence[bool]) -> None:
        """Marks gradients that were not in pages as used; without any, the earlier mark stays."""
        self.spent = here if any(here) else self.spent

    def _empty(self) -> None:
        self.filled = False
        self.present = [False] * len(self.present)


@dataclasses.dataclass(slots=True)
class _Arriving:
    """A reduction in flight: it reads `full` (None once that is released) and writes this rank's share to `part`."""

    work: Work
    full: PagedTensor | None
    part: PagedTensor


class GradientShard:
    """The gradient shard of one flat; without pages if the gradient waits in `.grad`.

    Args:
        store: the flat's compute parameters.
        route: where the gradient waits.
        supply: source of the pages; not used if the gradient waits in `.grad`.
        in_ram: adds gradients of a device to sums in RAM; None: the device has no memory of its own.
        before_change: called before gradients are written other than by a backward pass, since an update may still read
            them.
        release_idle_units: makes units that are not in use release their device pages.
    """

    def __init__(
        self,
        store: FlatStore,
        route: GradientRoute,
        allocator: Allocator,
        supply: PageSupply,
        in_ram: HostAccumulator | None = None,
        *,
        before_change: Callable[[], None] = lambda: None,
        release_idle_units: Callable[[], None] = lambda: None,
    ) -> None:
        self._layout = store.layout
        self._arrangement = store.binding.arrangement
        self._parameter_dtype = store.binding.dtype
        self._dtype = route.dtype
        self._allocator = allocator
        self._supply = supply
        self._in_ram = in_ram
        self.widens = route.dtype != store.binding.dtype
        """Whether the sum has a wider dtype than the gradients that are added."""
        self.before_change = before_change
        self.release_idle_units = release_idle_units
        # state
        self._pages: PagedTensor | None = None
        self._arriving: _Arriving | None = None
        self._transfers: list[tuple[Transfer | Addition, PagedTensor]] = []
        self.content = GradientContent(len(self._layout.slots))

    @property
    def pages(self) -> PagedTensor | None:
        """The gradient pages, if this flat has any."""
        return self._pages

    def reserve(self) -> PagedTensor:
        """Takes the pages, if there are none yet."""
        if self._pages is None:
            self._pages = self._supply.take()
        return self._pages

    # -- pages ---------------------------------------------------------------------------------------------------------

    def use_up(self) -> None:
        """Returns the pages to their supply after an update has read them.

        They are device pages, so no transfer into them is in flight.
        """
        if self._pages is not None:
            self._supply.give_back(self.give_away())

    def give_away(self) -> PagedTensor:
        """Hands the pages to the caller, who returns them with `PageSupply.give_back`; their contents count as used."""
        pages, self._pages = self._pages, None
        assert pages is not None
        self.content.spend()
        return pages

    def copy(self) -> tuple[PagedTensor, Transfer]:
        """Copies the gradient to further pages, which the caller returns as those of `give_away`."""
        assert self._pages is not None
        copy = self._supply.take()
        return copy, self._allocator.copy(self._pages, copy)

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
        return any(isinstance(transfer, Addition) for transfer, _ in self._transfers)

    def end_additions(self) -> None:
        """Waits for additions to sums in RAM, at the end of the run."""
        for transfer, _ in self._transfers:
            if isinstance(transfer, Addition):
                transfer.wait()

    @property
    def in_flight(self) -> bool:
        """Whether the end of a reduction or copy will free device pages."""
        return self._arriving is not None or bool(self._transfers)

    def reduction_started(self, work: Work, full: PagedTensor, part: PagedTensor) -> None:
        """Records a reduction in flight."""
        self._arriving = _Arriving(work, full, part)

    def settle(self) -> None:
        """Waits until the gradient pages may be read, and frees the buffers of finished transfers and of `on_device`."""
        self.finish_reduction()
        transfers, self._transfers = self._transfers, []
        for transfer, buffer in transfers:
            if not transfer.done():
                transfer.wait()
            self._allocator.release(buffer)

    def give_back(self, *, wait: bool) -> bool:
        """Releases device pages of gradients that have reached their home.

        Args:
            wait: also waits for gradients in flight or being reduced.

        Returns:
            Whether any page was freed.
        """
        gone = [pair for pair in self._transfers if wait or pair[0].done()]
        for pair in gone:
            pair[0].wait(host=True)
            self._allocator.release(pair[1])
            self._transfers.remove(pair)
        if wait and self._arriving is not None:
            self.settle()
            return True
        return bool(gone)

    def finish_reduction(self) -> None:
        """Finishes the reduction in flight."""
        arriving = self._arriving
        if arriving is None:
            return
        arriving.work.wait()
        if arriving.full is not None:
            self._allocator.release(arriving.full)
            arriving.full = None
        so_far = self.take_sum_buffers()
        self._arriving = None
        self.add(arriving.part, so_far)

    # -- reading and writing -------------------------------------------------------------------------------------------

    def on_device(self) -> Tensor:
        """The shard's gradient, (shard_numel,), for a short read; `settle` must follow."""
        self.settle()
        if self._pages is None:
            raise InternalError(f"flat {self._layout.index} has no gradient pages")
        if self._pages.tier.addressable:
            return self._pages.tensor()
        buffer = self._take_copy()
        transfer = self._allocator.copy(self._pages, buffer)
        transfer.wait(host=True)
        self._transfers.append((transfer, buffer))
        return buffer.tensor()

    def _take_copy(self) -> PagedTensor:
        what, numel = "gradient copy", self._layout.shard_numel
        try:
            return self.take(what, numel, self._dtype)
        except CapacityError:
            self.release_idle_units()  # no plan counts users' access to `.grad`
            return self.take(what, numel, self._dtype)

    @contextmanager
    def changing(self) -> Iterator[Tensor]:
        """Gives the shard's gradient, (shard_numel,), for changes inside the block."""
        self.before_change()
        values = self.on_device()
        yield values
        if self._pages is not None and not self._pages.tier.addressable:
            buffer = self._transfers[-1][1]
            self._transfers.append((self._allocator.copy(buffer, self._pages), buffer))
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

    def add_to_slot(self, slot: int, gradient: Tensor) -> None:
        """Adds one parameter's gradient to the pages. The flat must be whole on this rank."""
        content = self.content
        self.reserve()
        with self.changing() as values:
            if not content.filled:
                values.zero_()
            view = self._arrangement.view(values, slot)
            if content.present[slot]:
                view.add_(gradient)
            else:
                view.copy_(gradient)
        content.mark_filled()
        content.present[slot] = True

    def add_on_device(self, take: Callable[[int], Tensor | None]) -> None:
        """Adds gradients, taken by slot, to pages on the same device. The flat must be whole on this rank."""
        pages = self.reserve().tensor()
        content = self.content
        filled = content.filled
        content.mark_filled()
        if not filled:
            pages.zero_()
        for slot in range(len(content.present)):
            gradient = take(slot)
            if gradient is not None:
                view = self._arrangement.view(pages, slot)
                if filled:
                    view.add_(gradient)
                else:
                    view.copy_(gradient)
                content.present[slot] = True

    # -- buffers -------------------------------------------------------------------------------------------------------

    def take(self, what: str, numel: int, dtype: torch.dtype | None = None) -> PagedTensor:
        """Contiguous device pages for a buffer; by default of the parameters' dtype.

        Raises:
            CapacityError: there are none; nothing is taken.
        """
        name = f"flat {self._layout.index} {what}"
        return contiguous_device_pages(self._allocator, name, numel, dtype or self._parameter_dtype)

    def take_sum_buffers(self) -> Sequence[PagedTensor]:
        """Takes device buffers of one page each for adding to a sum in pages without addresses, or for widening to its
        dtype.

        Returns an empty list if neither is needed. The buffers need not be contiguous.

        Raises:
            CapacityError: there are too few; nothing is taken.
        """
        taken: list[PagedTensor] = []
        if (self.content.filled or self.widens) and self._pages is not None and not self._pages.tier.addressable:
            most, left = self._allocator.page_size // self._dtype.itemsize, self._layout.shard_numel
            name = f"flat {self._layout.index} gradient so far"
            try:
                while left:
                    taken.append(self._allocator.allocate(name, min(left, most), self._dtype, Tier.DEVICE))
                    left -= taken[-1].numel
            except CapacityError:
                for each in taken:
                    self._allocator.release(each)
                raise
        return taken

    def add(self, part: PagedTensor, so_far: Sequence[PagedTensor]) -> None:
        """Adds `part` to the pages and releases it.

        Args:
            part: (shard_numel,), on the device.
            so_far: buffers of `take_sum_buffers`, if any; the pages must be ready to be read (I2).
        """
        pages = self._pages
        assert pages is not None
        if pages.tier.addressable and (pages.tier.computes or self.content.filled or self.widens):
            if self._in_ram is not None and not pages.tier.computes:
                addition = self._in_ram.start(part.tensor(), pages.tensor(), adds=self.content.filled)
                self._transfers.append((addition, part))
            else:
                if self.content.filled:
                    pages.tensor().add_(part.tensor())
                else:
                    pages.tensor().copy_(part.tensor())
                self._allocator.release(part)
        elif so_far:
            self._add_through(so_far, part.tensor(), pages)
            self._allocator.release(part)
        else:
            self._transfers.append((self._allocator.copy(part, pages), part))
        self.content.mark_filled()

    def _add_through(self, so_far: Sequence[PagedTensor], values: Tensor, pages: PagedTensor) -> None:
        """Adds values (shard_numel,) to pages without addresses."""
        starts = [0, *itertools.accumulate(each.numel for each in so_far)]
        places = list(zip(so_far, starts, values.split([each.numel for each in so_far]), strict=False))
        coming = [
            self._allocator.copy(pages, each, source_start=start) for each, start, _ in places if self.content.filled
        ]
        for transfer in coming:
            transfer.wait()
        for each, start, more in places:
            if self.content.filled:
                each.tensor().add_(more)
            else:
                each.tensor().copy_(more)
            self._transfers.append((self._allocator.copy(each, pages, target_start=start), each))
