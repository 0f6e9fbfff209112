"""The pages of one flat's gradient: this rank's shard of it, what is on its way there, and whose gradients it holds.

Owns the pages, reductions and copies in flight with their device buffers, and, as their content, whose gradients the pages
hold and whose a step has used up. Of `.grad` nothing is known here (grad_attribute.py).

I1: the pages hold the sum over micro-batches since they were last forgotten, rounded to the gradient dtype after each, as
autograd does in place. Under mixed precision that dtype is fp32 where there may be several: in 16 bits, what is added to a
sum hundreds of times as large would be lost.
I2: the pages are read only after what was started on them has arrived (`settle`).
I3: what runs out of pages (CapacityError) has changed nothing and may be tried again.
I4: pages that are not filled hold nothing of use, and nothing that comes is added to what is there.
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
from lightning_ptm.runtime.tensors.contiguous_pages import contiguous_device_pages
from lightning_ptm.runtime.units.store import FlatStore
from lightning_ptm.terms import Tier

if TYPE_CHECKING:
    from lightning_ptm.comm import Work
    from lightning_ptm.memory.allocator import Allocator
    from lightning_ptm.memory.paged_tensor import PagedTensor
    from lightning_ptm.memory.transfer import Transfer
    from lightning_ptm.runtime.gradients.gradient_pages import PageSupply
    from lightning_ptm.runtime.gradients.host_accumulate import HostAccumulator


class GradientContent:
    """Whose gradients are in the pages of a flat of `count` parameters, and whose a step has used up."""

    def __init__(self, count: int) -> None:
        self.filled = False
        """Whether the pages hold a gradient. Others read it."""
        self.present = [False] * count
        """For each parameter, whether its gradient is in the pages, or on its way there. Others read it."""
        self.spent: Sequence[bool] = ()
        """For each parameter, whether a step has used its gradient up; empty: none has. Others read it."""

    def comes_to_have(self, present: Sequence[bool]) -> None:
        """What is on its way to the pages has gradients of these parameters, too."""
        self.present = [a or b for a, b in zip(self.present, present, strict=True)]

    def has_come(self) -> None:
        """It has been added."""
        self.filled = True

    def forget_slot(self, slot: int) -> None:
        """Of a parameter, nothing is there any more."""
        self.present[slot] = False
        if not any(self.present):
            self.filled = False

    def forget(self) -> None:
        """Nothing is there, and nothing was used up."""
        self.spent = ()
        self._empty()

    def spend(self) -> None:
        """All that was there is used up."""
        self.spent = tuple(self.present)
        self._empty()

    def spend_others(self, here: Sequence[bool]) -> None:
        """Gradients of these parameters, which were in no pages, are used up; without any, those before stay so."""
        self.spent = here if any(here) else self.spent

    def _empty(self) -> None:
        self.filled = False
        self.present = [False] * len(self.present)


@dataclasses.dataclass(slots=True)
class _Arriving:
    """A reduction in flight: `full` (None once it is given back) is read by it, `part` receives this rank's share."""

    work: Work
    full: PagedTensor | None
    part: PagedTensor


class GradientShard:
    """Of one flat, where its gradient waits in pages; else it has none, and nothing is ever on its way.

    Args:
        store: the flat's compute parameters.
        route: where the gradient waits.
        supply: where its pages come from; never asked where it waits in `.grad`.
        in_ram: adds what a device has to sums there; None: there is no device apart.
    """

    def __init__(
        self,
        store: FlatStore,
        route: GradientRoute,
        allocator: Allocator,
        supply: PageSupply,
        in_ram: HostAccumulator | None = None,
    ) -> None:
        self._layout = store.layout
        self._arrangement = store.binding.arrangement
        self._parameter_dtype = store.binding.dtype
        self._dtype = route.dtype
        self._allocator = allocator
        self._supply = supply
        self._in_ram = in_ram
        self.sums = route.dtype != store.binding.dtype
        """Whether what is added up has a wider dtype than what comes."""
        self.before_change: Callable[[], None] = _nothing
        """Called before gradients are written to otherwise than by a backward pass: an update may still read them."""
        self.give_units_up: Callable[[], None] = _nothing
        """Has units that nobody uses give their device pages up."""
        # state
        self._pages: PagedTensor | None = None
        self._arriving: _Arriving | None = None
        self._leaving: list[tuple[Transfer | Addition, PagedTensor]] = []
        self.content = GradientContent(len(self._layout.slots))

    @property
    def pages(self) -> PagedTensor | None:
        """The gradient pages, if this flat has any."""
        return self._pages

    def reserve(self) -> PagedTensor:
        """Takes the pages, where there are none."""
        if self._pages is None:
            self._pages = self._supply.take()
        return self._pages

    # -- what is there ------------------------------------------------------------------------------------------------

    def use_up(self) -> None:
        """An update has read the pages, which are given back: of the device, so nothing is on its way there any more."""
        if self._pages is not None:
            self._supply.give_back(self.give_away())

    def give_away(self) -> PagedTensor:
        """The pages are somebody else's now, who gives them back with `PageSupply.give_back`; what was in them is used up."""
        pages, self._pages = self._pages, None
        assert pages is not None
        self.content.spend()
        return pages

    def copy(self) -> tuple[PagedTensor, Transfer]:
        """What is there, in further pages; they are given back as those that are given away."""
        assert self._pages is not None
        copy = self._supply.take()
        return copy, self._allocator.copy(self._pages, copy)

    def supply_back(self, pages: PagedTensor) -> None:
        """Gives back what was given away, or copied."""
        self._supply.give_back(pages)

    # -- what is on its way -------------------------------------------------------------------------------------------

    def leaving(self) -> Sequence[Transfer | Addition]:
        """What is still on its way into the pages; whoever reads them waits for it."""
        return [transfer for transfer, _ in self._leaving]

    @property
    def is_added(self) -> bool:
        """Whether something is on its way to a sum in RAM, or was when somebody looked last."""
        return any(isinstance(transfer, Addition) for transfer, _ in self._leaving)

    def end_additions(self) -> None:
        """The run is over: nobody else knows of these."""
        for transfer, _ in self._leaving:
            if isinstance(transfer, Addition):
                transfer.wait()

    @property
    def on_its_way(self) -> bool:
        """Whether device pages are to be given back when a reduction or a copy ends."""
        return self._arriving is not None or bool(self._leaving)

    def arrives(self, work: Work, full: PagedTensor, part: PagedTensor) -> None:
        """A reduction has begun."""
        self._arriving = _Arriving(work, full, part)

    def settle(self) -> None:
        """Waits until the gradient pages may be read, or a reader of `on_device` has done so."""
        self.land()
        leaving, self._leaving = self._leaving, []
        for transfer, buffer in leaving:
            if not transfer.done():
                transfer.wait()
            self._allocator.release(buffer)

    def give_back(self, *, wait: bool) -> bool:
        """Gives back the device pages of gradients that have left for their home.

        Args:
            wait: for those that are on their way, or are being reduced, too.

        Returns:
            Whether any page came free.
        """
        gone = [pair for pair in self._leaving if wait or pair[0].done()]
        for pair in gone:
            pair[0].wait(host=True)
            self._allocator.release(pair[1])
            self._leaving.remove(pair)
        if wait and self._arriving is not None:
            self.settle()
            return True
        return bool(gone)

    def land(self) -> None:
        """Ends the reduction in flight."""
        arriving = self._arriving
        if arriving is None:
            return
        arriving.work.wait()
        if arriving.full is not None:
            self._allocator.release(arriving.full)
            arriving.full = None
        so_far = self.take_so_far()
        self._arriving = None
        self.add(arriving.part, so_far)

    # -- reading and writing ------------------------------------------------------------------------------------------

    def on_device(self) -> Tensor:
        """The shard's gradient, (shard_numel,), for a reader that holds it briefly; `settle` must follow."""
        self.settle()
        if self._pages is None:
            raise InternalError(f"flat {self._layout.index} has no gradient pages")
        if self._pages.tier.addressable:
            return self._pages.tensor()
        buffer = self._take_copy()
        transfer = self._allocator.copy(self._pages, buffer)
        transfer.wait(host=True)
        self._leaving.append((transfer, buffer))
        return buffer.tensor()

    def _take_copy(self) -> PagedTensor:
        what, numel = "gradient copy", self._layout.shard_numel
        try:
            return self.take(what, numel, self._dtype)
        except CapacityError:
            self.give_units_up()  # no plan counts what users do to `.grad`
            return self.take(what, numel, self._dtype)

    @contextmanager
    def changing(self) -> Iterator[Tensor]:
        """Inside, the shard's gradient, (shard_numel,), may be changed."""
        self.before_change()
        values = self.on_device()
        yield values
        if self._pages is not None and not self._pages.tier.addressable:
            buffer = self._leaving[-1][1]
            self._leaving.append((self._allocator.copy(buffer, self._pages), buffer))
            del self._leaving[-2]
        self.settle()

    def value(self, slot: int, parameter: Tensor) -> Tensor:
        """A parameter's gradient, with its device and dtype; of a flat that is whole here."""
        values = self._arrangement.view(self.on_device(), slot)
        copy = values.to(device=parameter.device, dtype=parameter.dtype, copy=True)
        self.settle()
        return copy

    def write(self, slot: int, value: Tensor | None) -> None:
        """Puts a gradient into the pages; None: nothing to which others may be added."""
        with self.changing() as values:
            view = self._arrangement.view(values, slot)
            if value is None:
                view.zero_()
            else:
                view.copy_(value)

    def add_to_slot(self, slot: int, gradient: Tensor) -> None:
        """Adds one parameter's to what is there, on a flat that is whole here."""
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
        content.has_come()
        content.present[slot] = True

    def add_where_they_are(self, take: Callable[[int], Tensor | None]) -> None:
        """The pages are where gradients are, and whole: what is taken of each parameter, by slot, is added to them."""
        pages = self.reserve().tensor()
        content = self.content
        filled = content.filled
        content.has_come()
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

    # -- buffers ------------------------------------------------------------------------------------------------------

    def take(self, what: str, numel: int, dtype: torch.dtype | None = None) -> PagedTensor:
        """Device pages in a row, for a buffer; by default of the parameters' dtype.

        Raises:
            CapacityError: there are none; nothing is taken.
        """
        name = f"flat {self._layout.index} {what}"
        return contiguous_device_pages(self._allocator, name, numel, dtype or self._parameter_dtype)

    def take_so_far(self) -> Sequence[PagedTensor]:
        """Buffers of a page each, wherever one is free, for all of a shard that is in pages without addresses, or shall be,
        and has to be added to or widened; else none.

        Raises:
            CapacityError: there are too few; nothing is taken.
        """
        taken: list[PagedTensor] = []
        if (self.content.filled or self.sums) and self._pages is not None and not self._pages.tier.addressable:
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
        """Adds `part` (shard_numel,) to the pages, which may be read (I2), and gives it back; by way of `so_far`, if any."""
        pages = self._pages
        assert pages is not None
        if pages.tier.addressable and (pages.tier.computes or self.content.filled or self.sums):
            if self._in_ram is not None and not pages.tier.computes:
                addition = self._in_ram.start(part.tensor(), pages.tensor(), adds=self.content.filled)
                self._leaving.append((addition, part))
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
            self._leaving.append((self._allocator.copy(part, pages), part))
        self.content.has_come()

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
            self._leaving.append((self._allocator.copy(each, pages, target_start=start), each))


def _nothing() -> None:
    """Nobody reads."""
