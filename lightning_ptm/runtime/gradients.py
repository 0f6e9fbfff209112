"""Where gradients wait between backward and update: in the parameters' `.grad`, or reduced, in pages of their own.

Owns the gradient pages of every trainable flat. Where a gradient waits, and until when, its route says (route.py):

* **in place** (`Waits.IN_GRAD`): autograd accumulates into `.grad`; nothing is copied.
* **in pages** (all others): when a unit's backward has ended, its gradients are laid into a full flat, reduced to this rank's
  shard, added to what earlier micro-batches left there, and `.grad` is dropped.

I1: a flat in pages holds the sum over micro-batches since the last `clear`, rounded to the gradient dtype after each, as
autograd does in place. Under mixed precision that dtype is fp32 where there may be several: in 16 bits, what is added to a
sum hundreds of times as large would be lost.
I2: the pages are read only after what was started on them has arrived (`settle`).
I3: a gradient is in exactly one place: what runs out of pages (CapacityError) has changed nothing and may be tried again.
I4: from the end of a backward pass to the next, `.grad` of a parameter whose gradient is in pages shows it (shown.py). What
the user does to it (edits, assigns, sets to None) is carried out in the pages before they are used (`follow`).
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, NoReturn

import torch
from torch import Tensor

from lightning_ptm.errors import CapacityError, InternalError, UsageError
from lightning_ptm.runtime.route import GradientRoute, Waits
from lightning_ptm.runtime.shown import ShownGradient
from lightning_ptm.runtime.store import FlatStore
from lightning_ptm.runtime.sums import Addition
from lightning_ptm.terms import Tier
from lightning_ptm.update import GradientSource, ParameterGradients, ShardGradient, Transform

if TYPE_CHECKING:
    from lightning_ptm.comm import Work
    from lightning_ptm.memory import Allocator, PagedTensor, Transfer
    from lightning_ptm.planning.holders import Sharing
    from lightning_ptm.runtime.gradient_pages import PageSupply
    from lightning_ptm.runtime.sums import SumsInRam


_EARLIER = "when it was of an earlier step"
_CLIPPED = "when it was to be clipped already, which the update does"
_USED = "after the step that has used it"


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
        route: where the gradient waits.
        sharing: with which ranks.
        supply: where its pages come from; never asked where it waits in `.grad`.
        in_ram: adds what a device has to sums there; None: there is no device apart.
    """

    def __init__(
        self,
        store: FlatStore,
        route: GradientRoute,
        allocator: Allocator,
        sharing: Sharing,
        supply: PageSupply,
        in_ram: SumsInRam | None = None,
    ) -> None:
        self.route = route
        self._supply = supply
        self.store = store
        self._allocator = allocator
        self._sharing = sharing
        self._in_ram = in_ram
        layout = store.layout
        self._sums = route.dtype != store.binding.dtype
        self.in_place = route.waits is Waits.IN_GRAD
        self._whole: list[Tensor | None] = [None] * len(layout.slots)
        """Sums of passes that the ranks have not reduced, shaped as the parameters (`postpone`)."""
        self._present = [False] * len(layout.slots)
        self._shown: dict[int, ShownGradient] = {}
        """By slot, what `.grad` is as long as the user leaves it alone."""
        self._used: dict[int, ShownGradient] = {}
        """By slot, what `.grad` is behind a step that has used it up."""
        self._retired = False
        """Whether a step has left there what is used up."""
        self._added_to_used: int | None = None
        """A slot of that, to which a backward pass has added since."""
        self._spent: Sequence[bool] = ()
        """For each parameter, whether a step has used its gradient up; empty: none has."""
        self.clipped_later = False
        """Whether the update will clip what is here."""
        self._filled = False
        self._arriving: _Arriving | None = None
        self._leaving: list[tuple[Transfer | Addition, PagedTensor]] = []
        self.before_change: Callable[[], None] = _nothing
        """Called before the pages are written to otherwise than by a backward pass: an update may still read them."""
        self._pages: PagedTensor | None = None

    def reserve(self) -> None:
        """Takes the gradient pages, if this flat's gradients wait in pages between steps."""
        if not self.in_place and self._pages is None:
            self._pages = self._supply.take()

    # -- what the user sees in `.grad` ----------------------------------------------------------------------------------

    def show(self) -> None:
        """A backward pass has ended: `.grad` shows what is in the pages (I4)."""
        if self.in_place:
            return
        self._land()  # what is being reduced is in no pages yet
        for slot, parameter in enumerate(self.store.binding.parameters):
            if self._filled and self._present[slot] and parameter.grad is None:
                parameter.grad = self._shown[slot] = ShownGradient(parameter, partial(self._read, slot))

    def resolve(self) -> None:
        """The user may have assigned what another parameter's `.grad` shows: it is a tensor of its own from now on. To be
        called of all flats before any of them changes."""
        binding = self.store.binding
        for slot, grad in enumerate(binding.gradients()):
            if (
                isinstance(grad, ShownGradient)
                and grad is not self._shown.get(slot)
                and grad is not self._used.get(slot)
            ):
                binding.parameters[slot].grad = grad.clone()

    def hide(self) -> None:
        """A backward pass begins, which adds to `.grad`."""
        if self._retired and self._added_to_used is None:
            slot = self._still_used()
            if slot is None:
                self._let_go_of_used()
            else:  # a pass of the user's own, in whose step Lightning has still to forget gradients
                self._added_to_used = slot
                for at, parameter in enumerate(self.store.binding.parameters):
                    if parameter.grad is self._used.get(at):
                        parameter.grad = None  # autograd cannot add to it, and nobody may read the sum
        self._refuse_hooks_on_sums()
        if self._shown:
            self._follow_user(stay=False)
        if self.clipped_later and not self.any:  # forgotten one by one
            self.clipped_later = False

    def _refuse_hooks_on_sums(self) -> None:
        """A hook behind the accumulation of a gradient finds in `.grad` what is added to a sum that is elsewhere."""
        if not self._shown and all(each is None for each in self._whole):
            return
        for slot, parameter in enumerate(self.store.binding.parameters):
            elsewhere = self._whole[slot] is not None or parameter.grad is self._shown.get(slot, self)
            if elsewhere and len(parameter._post_accumulate_grad_hooks or ()) > 1:  # one is the run's own
                raise UsageError(
                    f"{self.store.layout.slots[slot].spec.name} has a hook of register_post_accumulate_grad_hook, which "
                    f"would find the gradient of this backward pass alone in .grad: what earlier ones have added up is in "
                    f"pages; use register_hook, which gets each pass's gradient, or read .grad in on_after_backward"
                )

    def check_forgotten(self) -> None:
        """What a step has left in `.grad` may be let go of by any means, and by none of them used again.

        Raises:
            UsageError: it was not, before a backward pass of the loss, or a step.
        """
        if not self._retired:
            return
        slot = self._still_used() if self._added_to_used is None else self._added_to_used
        if slot is not None:
            raise UsageError(
                f"the gradient of {self.store.layout.slots[slot].spec.name} was used by a step and not forgotten before the "
                f"next backward pass or step, which would go on from it, and it is kept no longer; call zero_grad of the "
                f"optimizer, set accumulate_grad_batches at the start of an epoch, or override optimizer_zero_grad, with "
                f"which gradients are kept until then"
            )
        self._let_go_of_used()

    def _still_used(self) -> int | None:
        gradients = enumerate(self.store.binding.gradients())
        return next((at for at, grad in gradients if grad is not None and grad is self._used.get(at)), None)

    def _let_go_of_used(self) -> None:
        self.settle()
        self._retired = False
        self._filled = False
        self._spent = ()
        self._present = [False] * len(self._present)

    def follow(self) -> None:
        """The pages are about to be used: they get what the user has done to `.grad`, or has put there by hand.

        Raises:
            UsageError: several ranks hold the gradient; or a step has used it up.
        """
        self.check_forgotten()
        if self.in_place:
            return
        if self._shown:
            self._follow_user(stay=True)
        parameters = self.store.binding.parameters
        gradients = enumerate(self.store.binding.gradients())
        given = [slot for slot, grad in gradients if grad is not None and grad is not self._shown.get(slot)]
        if given:
            self._check_alone(given[0], "was assigned")
            shown, self._shown = self._shown, {}
            for slot in shown:
                parameters[slot].grad = None
            for slot in given:  # a sum is not what was meant
                if self._present[slot]:
                    self._write(slot, None)
            self.collect()
            self.settle()
            for slot, each in shown.items():
                parameters[slot].grad = self._shown[slot] = each
            self.show()

    def _follow_user(self, *, stay: bool) -> None:
        for slot, shown in tuple(self._shown.items()):
            parameter = self.store.binding.parameters[slot]
            grad = parameter.grad
            if grad is shown:
                values = shown.held
                # What is written in place by way of a view leaves no other trace.
                if values is not None and not torch.equal(values, self._value(slot)):
                    if self.clipped_later:
                        self._refuse(slot, _CLIPPED, "changed")
                    self._write(slot, values)
                if not stay:
                    parameter.grad = None
            else:
                if grad is not None:
                    self._check_alone(slot, "was assigned")
                self._forget(slot)
            if not stay or grad is not shown:
                del self._shown[slot]
                shown.retire(partial(self._refuse, slot, _EARLIER))

    def _forget(self, slot: int) -> None:
        """The user has let go of a parameter's gradient."""
        self._present[slot] = False
        if not any(self._present):
            self._filled = False
            return
        if self.store.layout.shared:
            name = self.store.layout.slots[slot].spec.name
            others = [self.store.binding.parameters[each] for each in self._shown if each != slot]
            if any(parameter.grad is not None for parameter in others):
                raise UsageError(
                    f"the gradient of {name} was set to None, in a flat that several ranks share and that holds others, too; "
                    f"use zero_grad of the optimizer, or make the module that holds it a unit of its own with units=[...]"
                )
            return  # all of them were
        self._write(slot, None)

    def _read(self, slot: int) -> Tensor:
        self._check_alone(slot, "was read")
        if self.clipped_later:
            self._refuse(slot, _CLIPPED)
        return self._value(slot)

    def _value(self, slot: int) -> Tensor:
        values = self.store.binding.view(self.on_device(), slot)
        parameter = self.store.binding.parameters[slot]
        copy = values.to(device=parameter.device, dtype=parameter.dtype, copy=True)
        self.done_reading()
        return copy

    def _write(self, slot: int, value: Tensor | None) -> None:
        """Puts a gradient into the pages; None: nothing to which others may be added."""
        with self._changing() as values:
            view = self.store.binding.view(values, slot)
            if value is None:
                view.zero_()
            else:
                view.copy_(value)

    def _check_alone(self, slot: int, what: str) -> None:
        if not self._sharing.alone:
            raise UsageError(
                f".grad of {self.store.layout.slots[slot].spec.name} {what}, and each of several ranks has a part of that "
                f"gradient alone; clip with gradient_clip_val or self.clip_gradients, and take the norm from "
                f"trainer.strategy.gradient_norm(optimizer)"
            )

    def _refuse(self, slot: int, when: str, what: str = "read") -> NoReturn:
        raise UsageError(
            f"the gradient of {self.store.layout.slots[slot].spec.name} was {what} {when}; do that between backward and "
            f"step, in on_after_backward or on_before_optimizer_step"
        )

    def clip_later(self) -> None:
        """The update will clip what is here on its way, so `.grad` shows no values until then."""
        self.clipped_later = True
        if self._shown:
            self._drop()
            self.show()

    def retire(self, *, clipped: bool, scratch: bool = False) -> None:
        """A step has used the gradient, which Lightning forgets next. What is left of it is no plain loop's: it is gone, or
        was clipped on its way to the update.

        Args:
            clipped: the update has done something to it.
            scratch: so has the optimizer's class, to a copy.
        """
        untouched = self.in_place and not scratch and (self.route.clips_in_place or not clipped)
        used = self._spent or (() if untouched else self.present())
        for slot, parameter in enumerate(self.store.binding.parameters):
            if slot in self._shown:
                self._used[slot] = self._shown.pop(slot)
                self._used[slot].retire(partial(self._refuse, slot, _USED))
            elif used and used[slot]:
                if slot not in self._used or self._used[slot].held is not None:  # those were an earlier step's
                    self._used[slot] = ShownGradient(parameter, partial(self._refuse, slot, _USED))
                with torch._C.DisableTorchFunctionSubclass():  # closed ones, too
                    parameter.grad = self._used[slot]
            else:
                continue
            self._retired = True

    def let_go(self) -> None:
        """The run is over: `.grad` is an ordinary tensor where somebody has looked at it, with its parameter's device and
        dtype, and None where it was in pages. What was in `.grad` itself goes where its parameter has gone, as with
        `module.cpu()`."""
        for transfer, _ in self._leaving:
            if isinstance(transfer, Addition):  # nobody else knows of these
                transfer.wait()
        for parameter in self.store.binding.parameters:
            left = parameter.grad
            if isinstance(left, ShownGradient):
                left = parameter.grad = None if left.held is None else left.held.to(parameter.device, parameter.dtype)
            if left is not None and left.device != parameter.device:
                parameter.grad = left.to(parameter.device, parameter.dtype)

    # -- what the run does ----------------------------------------------------------------------------------------------

    @property
    def any(self) -> bool:
        """Whether any parameter of the flat has a gradient."""
        return any(self.present())

    @property
    def waits_for_step(self) -> bool:
        """Whether there is one outside of `.grad`, or of the way there, that no step has used."""
        return not self.in_place and not self._retired and self.any

    def present(self) -> Sequence[bool]:
        """For each parameter of the flat, whether it has a gradient."""
        if self.in_place or not self._filled:
            here = self.here()
            return here if self.in_place else [a or b for a, b in zip(here, self._present, strict=True)]
        return tuple(self._present)

    def here(self) -> list[bool]:
        """For each parameter of the flat, whether it has a gradient that was not collected."""
        return [
            (grad is not None and not isinstance(grad, ShownGradient)) or whole is not None
            for grad, whole in zip(self.store.binding.gradients(), self._whole, strict=True)
        ]

    def postpone(self) -> None:
        """The unit's backward has ended, and its gradients are to be reduced with those of a later one: they stay in `.grad`,
        where autograd adds to them, or where sums have a wider dtype, beside it."""
        if not self._sums:
            return
        self._check_dense()
        for slot, sum_ in enumerate(self._whole):
            grad = self._take_grad(slot)  # one by one: what has been added up is freed
            if grad is not None:
                self._whole[slot] = grad.to(self.route.dtype) if sum_ is None else sum_.add_(grad)

    def _check_dense(self) -> None:
        for slot, grad in enumerate(self.store.binding.gradients()):
            if grad is not None and not isinstance(grad, ShownGradient):
                self.store.binding.check_dense(slot, grad)

    def collect(self, present: Sequence[bool] | None = None) -> None:
        """The unit's backward has ended: take the gradients out of the parameters. With several ranks, collective.

        Args:
            present: which parameters have a gradient on any rank; by default those that have one here.
        """
        self.hide()
        if self.in_place:
            return
        self._check_dense()
        here = self.here()
        present = here if present is None else present
        if not any(present):
            return
        self.settle()
        self.reserve()
        layout = self.store.layout
        if self._sharing.alone and self._pages is not None and self._pages.tier.computes:
            self._add_here(self._pages.tensor())
            return
        full = self._take("full gradient", layout.padded_numel)
        other: PagedTensor | None = None
        so_far: Sequence[PagedTensor] = ()
        try:
            if layout.shared:
                other = self._take("reduced gradient", layout.shard_numel)
            else:
                so_far = self._take_so_far()
        except CapacityError:
            self._allocator.release(full)
            raise
        self._lay_out(full.tensor(), here)
        self._drop()
        self._present = [a or b for a, b in zip(self._present, present, strict=True)]
        communicator, divisor = self.store.communicator, self._sharing.divisor
        if not layout.shared:  # all ranks' tokens are in the gradient of an expert that is this one's
            communicator.reduce_scatter(full.tensor(), full.tensor(), layout, divisor).wait()
            self._add(full, so_far)
            return
        assert other is not None
        work = communicator.reduce_scatter(full.tensor(), other.tensor(), layout, divisor)
        self._arriving = _Arriving(work, full, other)

    @property
    def adds_in_pages(self) -> bool:
        """Whether sums over passes are made in pages, as a single device makes them in `.grad`."""
        return not self.in_place and self._sharing.alone

    def add_up(self, slot: int) -> None:
        """Before a further gradient of the same pass comes to a parameter: the one in `.grad` is added to the pages, where
        there is something to add it to, or sums have a wider dtype."""
        parameter = self.store.binding.parameters[slot]
        gradient = parameter.grad
        if gradient is None or isinstance(gradient, ShownGradient) or not (self._filled or self._sums):
            return
        self.reserve()
        with self._changing() as values:
            if not self._filled:
                values.zero_()
            view = self.store.binding.view(values, slot)
            if self._present[slot]:
                view.add_(gradient)
            else:
                view.copy_(gradient)
        self._take_grad(slot)
        self._filled = self._present[slot] = True

    def _add_here(self, pages: Tensor) -> None:
        """The pages are where the gradients are, and whole: these are added to them one by one."""
        binding = self.store.binding
        filled, self._filled = self._filled, True
        if not filled:
            pages.zero_()
        for slot in range(len(self._present)):
            grad = self._take_grad(slot)
            if grad is not None:
                view = binding.view(pages, slot)
                if filled:
                    view.add_(grad)
                else:
                    view.copy_(grad)
                self._present[slot] = True

    def _drop(self) -> None:
        """Gradients that were not collected are forgotten, or are elsewhere now."""
        for slot in range(len(self._whole)):
            self._take_grad(slot)
            if slot in self._shown:
                self._shown.pop(slot).retire(partial(self._refuse, slot, _EARLIER))
        self._whole = [None] * len(self._whole)

    def _take_grad(self, slot: int) -> Tensor | None:
        """What was in `.grad` is the current stream's, which reads it last; autograd may have made it on another one."""
        grad = self.store.binding.take_gradient(slot)
        if grad is not None and not isinstance(grad, ShownGradient):
            self._allocator.backend.used_here(grad)
        return grad

    def _take(self, what: str, numel: int, dtype: torch.dtype | None = None) -> PagedTensor:
        """Device pages in a row, for a buffer; by default of the parameters' dtype.

        Raises:
            CapacityError: there are none; nothing is taken.
        """
        name = f"flat {self.store.layout.index} {what}"
        tensor = self._allocator.allocate(name, numel, dtype or self.store.binding.dtype, Tier.DEVICE)
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

    def leaving(self) -> Sequence[Transfer | Addition]:
        """What is still on its way into the pages; whoever reads them waits for it."""
        return [transfer for transfer, _ in self._leaving]

    @property
    def on_its_way(self) -> bool:
        """Whether device pages are to be given back when a reduction or a copy ends."""
        return self._arriving is not None or bool(self._leaving)

    @property
    def is_added(self) -> bool:
        """Whether something is on its way to a sum in RAM, or was when somebody looked last."""
        return any(isinstance(transfer, Addition) for transfer, _ in self._leaving)

    def settle(self) -> None:
        """Waits until the gradient pages may be read."""
        self._land()
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

    def _land(self) -> None:
        """Ends the reduction in flight."""
        arriving = self._arriving
        if arriving is None:
            return
        arriving.work.wait()
        if arriving.full is not None:
            self._allocator.release(arriving.full)
            arriving.full = None
        so_far = self._take_so_far()
        self._arriving = None
        self._add(arriving.part, so_far)

    def source(self) -> GradientSource:
        """What the update reads, once `leaving` has left."""
        if self.in_place:
            return ParameterGradients(self.store.binding.in_orders(self._in_grad()))
        self._land()
        if self._pages is None or not self._filled:
            raise InternalError(f"flat {self.store.layout.index} has no gradient to update with")
        return ShardGradient(self._pages, tuple(self._present))

    def _in_grad(self) -> list[Tensor | None]:
        gradients = self.store.binding.gradients()
        return [grad if here else None for grad, here in zip(gradients, self.here(), strict=True)]

    def detach(self) -> tuple[GradientSource, Sequence[Transfer | Addition], Callable[[], None]]:
        """Gives the gradient away: nothing of it is left here.

        Returns:
            The gradient, what it still waits for, and what gives its pages back.
        """
        source = self.source()
        if isinstance(source, ParameterGradients):
            self.hand_over()
            return source, (), _nothing
        self._pages = None
        self._spent = tuple(self._present)
        self._filled = False
        self._present = [False] * len(self._present)
        return source, self.leaving(), partial(self._supply.give_back, source.paged)

    def duplicate(self) -> tuple[GradientSource, Sequence[Transfer | Addition], Callable[[], None]]:
        """As `detach`, with a copy: the gradient stays here until it is cleared."""
        self.settle()
        source = self.source()
        if isinstance(source, ParameterGradients):
            copies = [None if gradient is None else gradient.clone() for gradient in self._in_grad()]
            return ParameterGradients(self.store.binding.in_orders(copies)), (), _nothing
        copy = self._supply.take()
        transfer = self._allocator.copy(source.paged, copy)
        return ShardGradient(copy, tuple(self._present)), (transfer,), partial(self._supply.give_back, copy)

    @property
    def bytes(self) -> int:
        """What this flat's gradient takes on this rank."""
        return self.store.layout.gradient_bytes

    def used(self) -> None:
        """The update has read the gradients."""
        if self.route.waits is Waits.PASSING and self._pages is not None:
            self.settle()
            self._supply.give_back(self._pages)
            self._pages = None
            self._spent = tuple(self._present)
            self._filled = False
            self._present = [False] * len(self._present)

    def hand_over(self) -> None:
        """A job has the gradients now and nobody else needs them: drop `.grad`, so that memory is free when it is done."""
        if self.in_place:
            here = self.here()
            self._spent = here if any(here) else self._spent
            self._drop()

    def on_device(self) -> Tensor:
        """The shard's gradient, (shard_numel,), for a reader that holds it briefly; `done_reading` must follow."""
        self.settle()
        if self._pages is None:
            raise InternalError(f"flat {self.store.layout.index} has no gradient pages")
        if self._pages.tier.addressable:
            return self._pages.tensor()
        buffer = self._take("gradient copy", self.store.layout.shard_numel, self.route.dtype)
        transfer = self._allocator.copy(self._pages, buffer)
        transfer.wait(host=True)
        self._leaving.append((transfer, buffer))
        return buffer.tensor()

    def transform_(self, how: Transform) -> None:
        """Changes the gradients where they are."""
        if self.in_place:
            self.before_change()
            for gradient in self._in_grad():
                if gradient is not None:
                    how.apply_(gradient)
            return
        with self._changing() as values:
            how.apply_(values)
        if self._shown:  # they show the new values from now on
            self._drop()
            self.show()

    def zero(self) -> None:
        """All gradients that there are become zero; those in `.grad` are the caller's to overwrite."""
        if self.in_place:
            self.before_change()
            return
        self.settle()
        for sum_ in self._whole:
            if sum_ is not None:
                sum_.zero_()
        if self._filled:
            self._follow_user(stay=False)
            with self._changing() as values:
                values.zero_()

    @contextmanager
    def _changing(self) -> Iterator[Tensor]:
        """Inside, the shard's gradient, (shard_numel,), may be changed."""
        self.before_change()
        values = self.on_device()
        yield values
        if self._pages is not None and not self._pages.tier.addressable:
            buffer = self._leaving[-1][1]
            self._leaving.append((self._allocator.copy(buffer, self._pages), buffer))
            del self._leaving[-2]
        self.settle()

    def done_reading(self) -> None:
        self.settle()

    def clear(self) -> None:
        """Forgets all gradients (zero_grad, or the update has used them)."""
        self.settle()
        self._drop()
        self._retired = False
        self._added_to_used = None
        self._spent = ()
        self.clipped_later = False
        self._filled = False
        self._present = [False] * len(self._present)

    def _lay_out(self, full: Tensor, here: Sequence[bool]) -> None:
        if not all(here) or full.numel() != sum(slot.numel for slot in self.store.layout.slots):
            full.zero_()  # gaps, padding, and parameters without a gradient here
        binding = self.store.binding
        for slot, grad in enumerate(binding.gradients()):
            sum_ = self._whole[slot]
            grad = None if isinstance(grad, ShownGradient) else grad  # of a step before
            if sum_ is not None:
                binding.view(full, slot).copy_(sum_ if grad is None else sum_.add_(grad))
            elif grad is not None:
                binding.view(full, slot).copy_(grad)

    def _take_so_far(self) -> Sequence[PagedTensor]:
        """Buffers of a page each, wherever one is free, for all of a shard that is in pages without addresses, or shall be,
        and has to be added to or widened; else none.

        Raises:
            CapacityError: there are too few; nothing is taken.
        """
        taken: list[PagedTensor] = []
        if (self._filled or self._sums) and self._pages is not None and not self._pages.tier.addressable:
            most, left = self._allocator.page_size // self.route.dtype.itemsize, self.store.layout.shard_numel
            name = f"flat {self.store.layout.index} gradient so far"
            try:
                while left:
                    taken.append(self._allocator.allocate(name, min(left, most), self.route.dtype, Tier.DEVICE))
                    left -= taken[-1].numel
            except CapacityError:
                for each in taken:
                    self._allocator.release(each)
                raise
        return taken

    def _add(self, part: PagedTensor, so_far: Sequence[PagedTensor]) -> None:
        """Adds `part` (shard_numel,) to the pages and gives it back; in `so_far`, where there are any."""
        pages = self._pages
        assert pages is not None
        if pages.tier.addressable and (pages.tier.computes or self._filled or self._sums):
            if self._in_ram is not None and not pages.tier.computes:
                addition = self._in_ram.start(part.tensor(), pages.tensor(), adds=self._filled)
                self._leaving.append((addition, part))
            else:
                if self._filled:
                    pages.tensor().add_(part.tensor())
                else:
                    pages.tensor().copy_(part.tensor())
                self._allocator.release(part)
        elif so_far:
            self._add_through(so_far, part.tensor(), pages)
            self._allocator.release(part)
        else:
            self._leaving.append((self._allocator.copy(part, pages), part))
        self._filled = True

    def _add_through(self, so_far: Sequence[PagedTensor], values: Tensor, pages: PagedTensor) -> None:
        """Adds values (shard_numel,) to pages without addresses."""
        starts = [0, *itertools.accumulate(each.numel for each in so_far)]
        places = list(zip(so_far, starts, values.split([each.numel for each in so_far]), strict=False))
        coming = [self._allocator.copy(pages, each, source_start=start) for each, start, _ in places if self._filled]
        for transfer in coming:
            transfer.wait()
        for each, start, more in places:
            if self._filled:
                each.tensor().add_(more)
            else:
                each.tensor().copy_(more)
            self._leaving.append((self._allocator.copy(each, pages, target_start=start), each))


def _nothing() -> None:
    """Gives nothing back."""
