"""Where gradients wait between backward and update: in the parameters' `.grad`, or reduced, in pages of their own.

Owns the gradient pages of every trainable flat. One of two ways per flat, fixed at set-up:

* **in place** (one rank in all, gradient home on the device): autograd accumulates into `.grad`; nothing is copied.
* **in pages** (several ranks, or another home): when a unit's backward has ended, its gradients are laid into a full
  flat, reduced to this rank's shard, added to what earlier micro-batches left there, and `.grad` is dropped.

I1: a flat in pages holds the sum over micro-batches since the last `clear`, rounded to the gradient dtype after each, as
autograd does in place. I2: the pages are read only after what was started on them has arrived (`settle`).
I3: a gradient is in exactly one place: what runs out of pages (CapacityError) has changed nothing and may be tried again.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING

from torch import Tensor

from lightning_ptm.errors import CapacityError, InternalError
from lightning_ptm.runtime.store import FlatStore
from lightning_ptm.terms import Tier
from lightning_ptm.update import GradientSource, ParameterGradients, ShardGradient

if TYPE_CHECKING:
    from lightning_ptm.comm import Communicator, Work
    from lightning_ptm.memory import Allocator, PagedTensor, Transfer
    from lightning_ptm.runtime.gradient_pages import GradientPages


@dataclasses.dataclass(slots=True)
class _Arriving:
    """A reduction in flight: `full` (None once it is given back) is read by it, `part` receives this rank's share."""

    work: Work
    full: PagedTensor | None
    part: PagedTensor


class FlatGradient:
    """Gradients of one trainable flat.

    Args:
        store: the flat's compute parameters.
        home: tier of the gradient pages.
        passing: the pages are taken when gradients come and given back when the update has used them.
        supply: where pages come from that are given away with the gradient (`detach`, `duplicate`).
        divided_by: what autograd's gradients are over; the reduced ones are not.
    """

    def __init__(
        self,
        store: FlatStore,
        home: Tier,
        allocator: Allocator,
        communicator: Communicator,
        *,
        passing: bool,
        supply: GradientPages | None = None,
        divided_by: int = 1,
    ) -> None:
        self._divided_by = divided_by
        self._passing = passing
        self._supply = supply
        self.store = store
        self._allocator = allocator
        self._communicator = communicator
        self._home = home
        layout = store.layout
        self.in_place = communicator.mean_over == 1 and home is Tier.DEVICE
        self._present = [False] * len(layout.slots)
        self._filled = False
        self._arriving: _Arriving | None = None
        self._leaving: list[tuple[Transfer, PagedTensor]] = []
        self._pages: PagedTensor | None = None

    def reserve(self) -> None:
        """Takes the gradient pages, if this flat's gradients wait in pages between steps."""
        if self.in_place or self._pages is not None:
            return
        if self._supply is not None:
            self._pages = self._supply.take(self.store.layout.shard_numel, self.store.binding.dtype)
        else:
            layout = self.store.layout
            name = f"flat {layout.index} gradient"
            self._pages = self._allocator.allocate(
                name, layout.shard_numel, self.store.binding.dtype, self._home, shared_tail=True
            )

    @property
    def any(self) -> bool:
        """Whether any parameter of the flat has a gradient."""
        return any(self.present())

    def present(self) -> Sequence[bool]:
        """For each parameter of the flat, whether it has a gradient."""
        if self.in_place or not self._filled:
            here = [parameter.grad is not None for parameter in self.store.binding.parameters]
            return here if self.in_place else [a or b for a, b in zip(here, self._present, strict=True)]
        return tuple(self._present)

    def collect(self, present: Sequence[bool] | None = None) -> None:
        """The unit's backward has ended: take the gradients out of the parameters. With several ranks, collective.

        Args:
            present: which parameters have a gradient on any rank; by default those that have one here.
        """
        if self.in_place:
            return
        parameters = self.store.binding.parameters
        here = [parameter.grad is not None for parameter in parameters]
        present = here if present is None else present
        if not any(present):
            return
        self.settle()
        self.reserve()
        layout = self.store.layout
        full = self._take("full gradient", layout.padded_numel)
        other: PagedTensor | None = None
        try:
            if layout.world_size > 1:
                other = self._take("reduced gradient", layout.shard_numel)
            elif self._adds_on_device:
                other = self._take("gradient so far", layout.shard_numel)
        except CapacityError:
            self._allocator.release(full)
            raise
        self._lay_out(full.tensor(), here)
        for parameter in parameters:
            parameter.grad = None
        self._present = [a or b for a, b in zip(self._present, present, strict=True)]
        if layout.world_size == 1:
            if self._communicator.mean_over > 1:  # this rank's expert; other ranks' tokens are in its gradient already
                full.tensor().div_(self._communicator.mean_over / self._divided_by)
            self._add(full, other)
            return
        assert other is not None
        work = self._communicator.reduce_scatter(full.tensor(), other.tensor(), layout, self._divided_by)
        self._arriving = _Arriving(work, full, other)

    def _take(self, what: str, numel: int) -> PagedTensor:
        """Device pages in a row, for a buffer.

        Raises:
            CapacityError: there are none; nothing is taken.
        """
        name = f"flat {self.store.layout.index} {what}"
        tensor = self._allocator.allocate(name, numel, self.store.binding.dtype, Tier.DEVICE)
        if not tensor.is_contiguous:
            pages = len(tensor.pages)
            self._allocator.release(tensor)
            raise CapacityError(
                f"{name} needs {pages} device pages in a row and the free ones are scattered; other units are given up "
                f"first; raise device_memory (host_memory on a CPU-only machine) if this repeats"
            )
        return tensor

    @property
    def pages(self) -> PagedTensor | None:
        """The gradient pages, if this flat has any."""
        return self._pages

    def leaving(self) -> Sequence[Transfer]:
        """What is still on its way into the pages; whoever reads them waits for it."""
        return [transfer for transfer, _ in self._leaving]

    @property
    def on_its_way(self) -> bool:
        """Whether device pages are to be given back when a reduction or a copy ends."""
        return self._arriving is not None or bool(self._leaving)

    def settle(self) -> None:
        """Waits until the gradient pages may be read."""
        self._land()
        leaving, self._leaving = self._leaving, []
        for transfer, buffer in leaving:
            transfer.wait(host=True)
            self._allocator.release(buffer)

    def give_back(self, *, wait: bool) -> bool:
        """Gives back the device pages of gradients that have left for their home.

        Args:
            wait: for those that are on their way, too.

        Returns:
            Whether any page came free.
        """
        gone = [pair for pair in self._leaving if wait or pair[0].done()]
        for pair in gone:
            pair[0].wait(host=True)
            self._allocator.release(pair[1])
            self._leaving.remove(pair)
        return bool(gone)

    def _land(self) -> None:
        """Ends the reduction in flight."""
        arriving = self._arriving
        if arriving is None:
            return
        arriving.work.wait()
        if arriving.full is not None:
            self._allocator.release(arriving.full)
            arriving.full = None
        before = self._take("gradient so far", self.store.layout.shard_numel) if self._adds_on_device else None
        self._arriving = None
        self._add(arriving.part, before)

    def source(self) -> GradientSource:
        """What the update reads, once `leaving` has left."""
        if self.in_place:
            parameters = self.store.binding.parameters
            return ParameterGradients([parameter.grad for parameter in parameters])
        self._land()
        if self._pages is None or not self._filled:
            raise InternalError(f"flat {self.store.layout.index} has no gradient to update with")
        return ShardGradient(self._pages, tuple(self._present))

    def detach(self) -> tuple[GradientSource, Sequence[Transfer], Callable[[], None]]:
        """Gives the gradient away: nothing of it is left here.

        Returns:
            The gradient, what it still waits for, and what gives its pages back.
        """
        source = self.source()
        if self.in_place:
            self.hand_over()
            return source, (), _nothing
        pages, self._pages = self._pages, None
        assert pages is not None and self._supply is not None
        self._filled = False
        self._present = [False] * len(self._present)
        return source, self.leaving(), partial(self._supply.give_back, pages)

    def duplicate(self) -> tuple[GradientSource, Sequence[Transfer], Callable[[], None]]:
        """As `detach`, with a copy: the gradient stays here until it is cleared."""
        self.settle()
        source = self.source()
        if self.in_place:
            parameters = self.store.binding.parameters
            copies = [None if parameter.grad is None else parameter.grad.clone() for parameter in parameters]
            return ParameterGradients(copies), (), _nothing
        assert isinstance(source, ShardGradient) and self._supply is not None
        copy = self._supply.take(source.paged.numel, source.paged.dtype)
        transfer = self._allocator.copy(source.paged, copy)
        return ShardGradient(copy, tuple(self._present)), (transfer,), partial(self._supply.give_back, copy)

    @property
    def bytes(self) -> int:
        """What this flat's gradient takes on this rank."""
        return self.store.layout.shard_bytes

    def used(self) -> None:
        """The update has read the gradients."""
        if self._passing and self._pages is not None:
            self.settle()
            self._allocator.release(self._pages)
            self._pages = None
            self._filled = False
            self._present = [False] * len(self._present)

    def hand_over(self) -> None:
        """A job has the gradients now and nobody else needs them: drop `.grad`, so that memory is free when it is done."""
        if self.in_place:
            for parameter in self.store.binding.parameters:
                parameter.grad = None

    def on_device(self) -> Tensor:
        """The shard's gradient, (shard_numel,), for a reader that holds it briefly; `done_reading` must follow."""
        self.settle()
        if self._pages is None:
            raise InternalError(f"flat {self.store.layout.index} has no gradient pages")
        if self._pages.tier is not Tier.DISK:
            return self._pages.tensor()
        buffer = self._take("gradient copy", self.store.layout.shard_numel)
        transfer = self._allocator.copy(self._pages, buffer)
        transfer.wait(host=True)
        self._leaving.append((transfer, buffer))
        return buffer.tensor()

    def done_reading(self) -> None:
        self.settle()

    def clear(self) -> None:
        """Forgets all gradients (zero_grad, or the update has used them)."""
        self.settle()
        for parameter in self.store.binding.parameters:
            parameter.grad = None
        self._filled = False
        self._present = [False] * len(self._present)

    def _lay_out(self, full: Tensor, here: Sequence[bool]) -> None:
        if not all(here) or full.numel() != sum(slot.numel for slot in self.store.layout.slots):
            full.zero_()  # gaps, padding, and parameters without a gradient here
        binding = self.store.binding
        for slot, parameter in enumerate(binding.parameters):
            if parameter.grad is not None:
                binding.view(full, slot).copy_(parameter.grad)

    @property
    def _adds_on_device(self) -> bool:
        """Whether what is in the pages has to be read into a buffer to be added to."""
        return self._filled and self._pages is not None and self._pages.tier is Tier.DISK

    def _add(self, part: PagedTensor, before: PagedTensor | None) -> None:
        """Adds `part` (shard_numel,) to the pages and gives it back; `before` is the buffer that a sum on disk needs."""
        pages = self._pages
        assert pages is not None
        if pages.tier is Tier.DEVICE or (pages.tier is Tier.HOST and self._filled):
            value = part.tensor()
            if self._filled:
                pages.tensor().add_(value.to(pages.tensor().device))
            else:
                pages.tensor().copy_(value)
            self._allocator.release(part)
        else:
            if before is not None:
                self._allocator.copy(pages, before).wait()
                before.tensor().add_(part.tensor())
                self._allocator.release(part)
                part = before
            self._leaving.append((self._allocator.copy(part, pages), part))
        self._filled = True


def _nothing() -> None:
    """Gives nothing back."""
