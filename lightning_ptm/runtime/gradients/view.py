"""Contents of `.grad` of a flat's parameters: gradients of autograd and the user, placeholders of pages, used
gradients.

The only file that assigns `.grad` of parameters in pages (but for moves of a parameter to another device, which take
its `.grad` along). Owns the placeholders, the sums of passes that are not in `.grad` because they need a wider dtype
(`GradView.postpone`), and whether the update will clip. The pages belong to store.py, what they hold to state.py.

I1: from the end of a backward pass to the next, `.grad` of a parameter whose gradient is in pages shows it; on one rank
    from the end of its unit's part of the pass, unless units are updated within it. Changes by
    the user (edits, assignments, None) are applied to the pages before these are used (`apply_edits`).
I2: nothing is added to a gradient that a step has used: its placeholder must be gone before the next backward pass of
    the loss, or step, or these are refused. The user or Lightning may remove it in any way.
I3: a gradient that a pass run by the user has added to a used one cannot be read: in a plain loop it would be the sum
    of both.
I4: where ranks have different parameters (pipeline stages), `.grad` cannot be read between a step's last pass and the next
    pass (`withhold`): a norm of what one rank has is not the model's, and nothing would tell.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from operator import attrgetter
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch import Tensor

from lightning_ptm.errors import UsageError
from lightning_ptm.runtime.deciding.gradient_route import GradientRoute, Waits
from lightning_ptm.runtime.gradients.state import IN_FLIGHT, SUMS, GradEvent, GradientRecord, GradientState
from lightning_ptm.runtime.gradients.store import GradientShard
from lightning_ptm.runtime.units.store import FlatStore
from lightning_ptm.torch_internals import (
    accumulation_hooks_of,
    make_wrapper_subclass,
    no_torch_function,
    tree_map_only,
    version_of,
)

if TYPE_CHECKING:
    from lightning_ptm.memory.backend import Backend
    from lightning_ptm.memory.device_work import DeviceEvent
    from lightning_ptm.memory.streams import ComputeStream
    from lightning_ptm.planning.sharding import ShardGroup

_grad_of = attrgetter("grad")
_EARLIER = "when it was of an earlier step"
_CLIPPED = "when it was clipped already, and the update does the clipping"
_BEFORE_CLIPPING = ", before clip_gradients is called (in configure_gradient_clipping: before super())"
_USED = "after the step that has used it"
_APPLIED = "in the backward pass in which it was applied"
_APPLY_LATER = " (of the module or a callback; with that hook all updates come after the pass)"
_CONVERTED = "; if you convert the module (module.double()), which reads its gradients, call module.zero_grad() first"


class GradPlaceholder(Tensor):
    """A gradient in pages. Operations run on its values, which are fetched once and stored here.

    Args:
        parameter: the parameter whose gradient it is.
        read: fetches the values as a new tensor with the parameter's shape and dtype; raises if they are not available.
        backend: the device whose current stream fetches the values; None: no values are available.
    """

    @staticmethod
    def __new__(
        cls: Any, parameter: Tensor, read: Callable[[], Tensor], backend: Backend | None = None
    ) -> GradPlaceholder:
        # otherwise Python would call __torch_function__ of a parameter guard each time
        with torch.DisableTorchFunctionSubclass():
            made: GradPlaceholder = make_wrapper_subclass(
                cls, parameter.shape, dtype=parameter.dtype, device=parameter.device
            )
        return made

    def __init__(self, parameter: Tensor, read: Callable[[], Tensor], backend: Backend | None = None) -> None:
        self._read = read
        self._backend = backend
        self._fetched_values: Tensor | None = None
        self._fetch: DeviceEvent | None = None

    __torch_function__ = no_torch_function

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return repr(self._fetched())

    def __deepcopy__(self, memo: Any) -> Tensor:
        return self._fetched().clone()

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self._fetched().__reduce_ex__(protocol)

    def numpy(self, *, force: bool = False) -> Any:
        return self._fetched().numpy(force=force)

    def tolist(self) -> Any:
        return self._fetched().tolist()

    def data_ptr(self) -> int:
        return self._fetched().data_ptr()

    def retire(self, read: Callable[[], Tensor]) -> None:
        """Replaces the fetch function: values that were fetched stay, others come from `read`."""
        self._read = read

    @property
    def fetched_values(self) -> Tensor | None:
        """The fetched values, which the user may have changed; None: not fetched."""
        return self._fetched_values

    def _fetched(self) -> Tensor:
        if self._fetched_values is None:
            with torch.no_grad():
                self._fetched_values = self._read()
            self._fetch = self._backend.mark() if self._backend is not None else None
        elif self._fetch is not None and self._backend is not None:
            # For the user the gradient existed before the fetch, so the user's stream may not have waited for it.
            self._fetch.order()
            self._backend.record_use(self._fetched_values)  # this stream may still read it when it is freed
        return self._fetched_values

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        fetched = tree_map_only(GradPlaceholder, GradPlaceholder._fetched, (tuple(args), dict(kwargs or {})))
        result = func(*fetched[0], **fetched[1])
        if args and isinstance(args[0], GradPlaceholder) and result is fetched[0][0]:
            return args[0]  # in-place operations return the placeholder
        return result


class GradView:
    """`.grad` of the parameters of one flat.

    Args:
        store: the flat's compute parameters.
        record: what is recorded of the gradient.
        shard: the gradient pages, if the gradient waits in pages.
        sharing: the ranks that share the gradient.
        stream: the run's compute stream; None: the current one.
        divided: whether other ranks have other parameters.
    """

    def __init__(
        self,
        store: FlatStore,
        route: GradientRoute,
        record: GradientRecord,
        shard: GradientShard,
        sharing: ShardGroup,
        backend: Backend,
        stream: ComputeStream | None = None,
        *,
        divided: bool = False,
    ) -> None:
        self._alone = sharing.needs_no_reduction and not divided
        """Whether the user may read and change `.grad` of this rank."""
        self._shared = store.layout.shared
        self._binding = store.binding
        self._parameters = store.binding.parameters
        self._route = route
        self._in_place = route.waits is Waits.IN_GRAD
        self._record = record
        self._shard = shard
        self._backend = backend
        self._stream = stream
        self._names = [slot.spec.name for slot in store.layout.slots]
        # state
        self._sums: dict[int, Tensor] = {}
        """By slot, sums of passes that the ranks have not reduced, in a wider dtype than `.grad` (`postpone`)."""
        self._shown: dict[int, GradPlaceholder] = {}
        """By slot, the placeholder in `.grad` of a gradient in pages, while the user leaves it alone."""
        self._left: dict[int, GradPlaceholder] = {}
        """By slot, the placeholder that the latest step has left in `.grad`."""
        self._handed: dict[int, GradPlaceholder] = {}
        """By slot, the unreadable placeholder in `.grad` of a gradient whose update has begun within a backward pass."""
        self._mixed: list[int] = []
        """Slots of used gradients to which a backward pass has added since (I3)."""
        self._mixed_shown: dict[int, GradPlaceholder] = {}
        """By slot, the unreadable placeholder in `.grad` after such a pass."""
        self._withheld: dict[int, tuple[GradPlaceholder | None, Tensor | None]] = {}
        """By slot, the unreadable placeholder in `.grad`, if there is a gradient, and what autograd has left there (I4)."""
        self.clipped_later = False
        """Whether the update will clip this gradient. Read by others."""
        self._to_clip: list[tuple[int, int] | None] = []
        """By slot, object and version of `.grad` when clipping was decided, where `.grad` stays in place."""

    # -- `.grad` -------------------------------------------------------------------------------------------------------

    def _put(self, slot: int, gradient: Tensor | None) -> None:
        with torch.DisableTorchFunctionSubclass():  # closed parameters must not intercept this
            self._parameters[slot].grad = gradient

    def _grads(self) -> list[Tensor | None]:
        """Returns `.grad` of each parameter, including closed ones, as before `withhold`."""
        with torch.DisableTorchFunctionSubclass():
            grads: list[Tensor | None] = list(map(_grad_of, self._parameters))
        for slot, (shown, withheld) in self._withheld.items():
            if grads[slot] is shown:
                grads[slot] = withheld
        return grads

    def withhold(self) -> None:
        """Replaces gradients in `.grad`, and those in separate sums, by placeholders that refuse to be read (I4)."""
        self._put_back()
        for slot, grad in enumerate(self._grads()):
            if isinstance(grad, GradPlaceholder):
                continue
            shown = None
            if grad is not None or slot in self._sums:
                shown = GradPlaceholder(self._parameters[slot], partial(self._read, slot))
                self._put(slot, shown)
            self._withheld[slot] = shown, grad

    def check_withheld(self) -> None:
        """Checks that no gradient was assigned since `withhold`.

        Raises:
            UsageError: one was.
        """
        with torch.DisableTorchFunctionSubclass():
            for slot, (shown, _) in self._withheld.items():
                grad = self._parameters[slot].grad
                if grad is not None and grad is not shown:
                    self._check_alone(slot, "was assigned")

    def _put_back(self, *, checks: bool = True) -> None:
        """Ends `withhold`. A gradient that the user has set to None is forgotten.

        Raises:
            UsageError: the user has assigned one.
        """
        if not self._withheld:
            return
        if checks:
            self.check_withheld()
        withheld, self._withheld = self._withheld, {}
        with torch.DisableTorchFunctionSubclass():
            for slot, (shown, grad) in withheld.items():
                if self._parameters[slot].grad is shown:
                    self._parameters[slot].grad = grad
                else:
                    self._sums.pop(slot, None)

    def take(self, slot: int) -> Tensor | None:
        """Removes `.grad`, and returns it unless it is a placeholder.

        The current stream reads it last; autograd may have made it on another one.
        """
        self._put_back()
        with torch.DisableTorchFunctionSubclass():
            parameter = self._parameters[slot]
            gradient = parameter.grad
            if gradient is None:
                return None
            parameter.grad = None
        if isinstance(gradient, GradPlaceholder):
            return None
        self._backend.record_use(gradient)
        return gradient

    def uncollected(self) -> list[bool]:
        """Returns, for each parameter of the flat, whether it has a gradient that is not collected yet."""
        sums = self._sums
        return [
            (grad is not None and not isinstance(grad, GradPlaceholder)) or slot in sums
            for slot, grad in enumerate(self._grads())
        ]

    def gradients(self) -> list[Tensor | None]:
        """Returns, for each parameter, `.grad` unless it is a placeholder."""
        return [None if isinstance(grad, GradPlaceholder) else grad for grad in self._grads()]

    def read_bytes(self) -> int:
        """Returns the bytes of the copies in `.grad` of gradients in pages that the user has read."""
        read = [grad.fetched_values for grad in self._grads() if isinstance(grad, GradPlaceholder)]
        return sum(values.nbytes for values in read if values is not None)

    def present(self) -> Sequence[bool]:
        """Returns, for each parameter of the flat, whether it has a gradient, collected or not."""
        if self._in_place or self._record.state is GradientState.EMPTY:
            return self.uncollected()
        return self._record.present

    @property
    def is_forgotten(self) -> bool:
        """Whether the user has set every shown `.grad` to None (`module.zero_grad()`) while the pages hold gradients."""
        gradients = self._grads()
        return (
            bool(self._shown) and not any(self.uncollected()) and all(gradients[slot] is None for slot in self._shown)
        )

    # -- a backward pass -----------------------------------------------------------------------------------------------

    def resolve(self) -> None:
        """Replaces a placeholder that the user assigned to another parameter's `.grad` by a tensor of its own.

        Must be called for all flats before any of them changes.
        """
        for slot, grad in enumerate(self._grads()):
            if (
                isinstance(grad, GradPlaceholder)
                and grad is not self._shown.get(slot)
                and grad is not self._left.get(slot)
            ):
                self._put(slot, grad.clone())

    def show_handed(self) -> None:
        """Puts unreadable placeholders in `.grad` of gradients that an update got within a backward pass, since a plain
        Trainer would show them to hooks of that pass."""
        gradients = self._grads()
        for slot, handed in enumerate(self._record.present):
            if handed and gradients[slot] is None:
                left = self._left.get(slot)
                refuse = partial(refuse_gradient, self._names[slot], _APPLIED, then=_APPLY_LATER)
                if left is None or left.fetched_values is not None:
                    left = self._left[slot] = GradPlaceholder(self._parameters[slot], refuse)
                left.retire(refuse)
                self._put(slot, left)
                self._handed[slot] = left

    def withdraw_handed(self) -> None:
        """Removes the placeholders of `show_handed`."""
        self._withdraw(self._handed)
        self._handed = {}

    def withdraw_shown(self) -> None:
        """Removes placeholders before autograd adds to `.grad` in the pass that has put them there."""
        self.withdraw_handed()
        if self._shown:
            self.apply_edits(stay=False)

    def check_handed(self) -> None:
        """Checks that no `.grad` was set to None after the update of its parameter had begun in the backward pass.

        Raises:
            UsageError: a hook set one to None; a plain Trainer would then not update the parameter.
        """
        gradients = self._grads()
        for slot in self._handed:
            if gradients[slot] is None:
                refuse_gradient(self._names[slot], _APPLIED, "set to None", _APPLY_LATER)

    def pass_begins(self) -> None:
        """Removes placeholders from `.grad` at the beginning of a pass, and forgets those that the user has removed."""
        self._drop_removed()
        self.hide()

    def hide(self) -> None:
        """Removes placeholders from `.grad` before gradients are added there, or collected."""
        record = self._record
        self._put_back()
        self.withdraw_handed()
        if record.state is GradientState.EMPTY and not (self._shown or self._mixed or self._sums or self.clipped_later):
            return  # nothing of this object is in `.grad`
        if record.state is GradientState.USED:
            # A pass run by the user, in a step after which Lightning has still to forget gradients.
            self._mixed = self._still_left()
            self._withdraw({slot: self._left[slot] for slot in self._mixed})
        record.send(GradEvent.PASS_BEGINS)
        self._withdraw({slot: each for slot, each in self._mixed_shown.items() if slot not in self._shown})
        self._mixed_shown = {}
        self._refuse_hooks_on_sums()
        if self._shown:
            self.apply_edits(stay=False)
        if self.clipped_later and not any(self.present()):  # the user has set all of them to None one by one
            self.clipped_later = False

    def _withdraw(self, gradients: Mapping[int, GradPlaceholder]) -> None:
        """Removes these placeholders from `.grad`, since autograd cannot add to them."""
        for slot, gradient in gradients.items():
            if self._parameters[slot].grad is gradient:
                self._put(slot, None)

    def _refuse_hooks_on_sums(self) -> None:
        """Refuses post-accumulate hooks where `.grad` would hold only this pass's part of a sum that is in pages."""
        for slot in {*self._sums, *self._mixed, *self._shown}:
            parameter = self._parameters[slot]
            is_partial = slot in self._sums or slot in self._mixed or parameter.grad is self._shown.get(slot, self)
            # the engine itself has registered one
            if is_partial and len(accumulation_hooks_of(parameter) or ()) > 1:
                raise UsageError(
                    f"{self._names[slot]} has a hook of register_post_accumulate_grad_hook, which would find only "
                    "this backward pass's gradient in .grad, since the sum of earlier passes is in pages; use "
                    "register_hook, which gets each pass's gradient, or read .grad in on_after_backward"
                )

    def postpone(self) -> None:
        """Leaves the gradients of a unit whose backward has ended to a later reduction.

        They stay in `.grad`, where autograd adds to them, or, if sums have a wider dtype, are added to a separate sum.
        """
        if not self._shard.widens:
            return
        self.check_dense()
        for slot in range(len(self._names)):
            grad = self.take(slot)  # one by one, so that each `.grad` is freed once it is added
            if grad is not None:
                before = self._sums.get(slot)
                self._sums[slot] = grad.to(self._route.dtype) if before is None else before.add_(grad)

    def check_dense(self) -> None:
        """Raises UsageError if a gradient is sparse."""
        for slot, grad in enumerate(self._grads()):
            if grad is not None and grad.layout is not torch.strided:
                self._binding.arrangement.check_dense(slot, grad)

    def lay_out(self, full: Tensor) -> None:
        """Copies into `full` the gradients that are not collected yet, with the separate sums (`postpone`) added; zeros
        elsewhere."""
        view = self._binding.arrangement.view
        for start, stop in self._binding.arrangement.gaps:
            full[start:stop].zero_()
        for slot, grad in enumerate(self.gradients()):
            sum_ = self._sums.get(slot)
            if sum_ is not None:
                view(full, slot).copy_(sum_ if grad is None else sum_.add_(grad))
            elif grad is not None:
                view(full, slot).copy_(grad)
            else:
                view(full, slot).zero_()

    def drop(self, held: Collection[int] = ()) -> None:
        """Removes gradients that are not collected, and the placeholders.

        Args:
            held: addresses of storages that an update holds: it records its own use, behind all that is queued here.
        """
        self._put_back(checks=False)
        with torch.DisableTorchFunctionSubclass():
            for parameter in self._parameters:
                gradient = parameter.grad
                if gradient is not None:
                    parameter.grad = None
                    if not self._backend.has_own_memory or isinstance(gradient, GradPlaceholder):
                        continue
                    if not (held and gradient.untyped_storage().data_ptr() in held):
                        self._backend.record_use(gradient)
        for slot, shown in self._shown.items():
            shown.retire(partial(refuse_gradient, self._names[slot], _EARLIER))
        self._shown = {}
        self._handed = {}
        self._sums = {}

    def zero_sums(self) -> None:
        """Sets the separate sums (`postpone`) to zero."""
        for sum_ in self._sums.values():
            sum_.zero_()

    def show(self) -> None:
        """Shows the gradients in the pages in `.grad` after a backward pass (I1), or after a unit's part of it."""
        if not self._in_place:
            if self._record.state in IN_FLIGHT:
                self._shard.finish_reduction()  # what it brings is not in the pages yet
            if self._record.state in SUMS:
                with torch.DisableTorchFunctionSubclass():  # closed parameters must not intercept this
                    for slot, parameter in enumerate(self._parameters):
                        if slot in self._shown:
                            continue  # also one that a hook of this pass has set to None
                        if parameter.grad is None and self._record.present[slot]:
                            shown = GradPlaceholder(parameter, partial(self._read, slot), self._backend)
                            parameter.grad = self._shown[slot] = shown
        if self._mixed:
            self._show_mixed()

    def _show_mixed(self) -> None:
        """Puts unreadable placeholders for sums into `.grad` after a backward pass (I3)."""
        for slot in self._mixed:
            refuse, shown, grad = (
                partial(self._refuse_mixed, slot),
                self._shown.get(slot),
                self._grads()[slot],
            )
            if shown is not None:
                shown.retire(refuse)
            elif grad is None:  # this pass computed no gradient for it
                shown = self._left[slot]
                self._put(slot, shown)
            elif isinstance(grad, GradPlaceholder):
                shown = grad
            else:
                shown = GradPlaceholder(self._parameters[slot], refuse)
                self._put(slot, shown)
            self._mixed_shown[slot] = shown

    def refresh(self) -> None:
        """Replaces the placeholders after the values in the pages have changed."""
        if self._shown:
            self.drop()
            self.show()

    # -- clipping ------------------------------------------------------------------------------------------------------

    def clip_later(self) -> None:
        """Marks the gradient as clipped by the update; until then `.grad` shows no values."""
        self.clipped_later = True
        self._to_clip = [_version(grad) for grad in self._grads()] if self._in_place else []
        self.refresh()

    def check_not_edited(self) -> None:
        """Checks that `.grad` has not changed since clipping was left to the update, which would clip the new values
        too.

        Raises:
            UsageError: something was.
        """
        if not self.clipped_later or not self._in_place:
            return
        for slot, (grad, then) in enumerate(zip(self._grads(), self._to_clip, strict=True)):
            if grad is not None and _version(grad) != then:
                refuse_gradient(self._names[slot], _CLIPPED, "changed", _BEFORE_CLIPPING)

    # -- changes by the user -------------------------------------------------------------------------------------------

    def assigned(self) -> list[tuple[int, Tensor]]:
        """Gradients, by slot, that the user has assigned to `.grad`, or has added.

        Raises:
            UsageError: several ranks share the gradient.
        """
        gradients = enumerate(self._grads())
        own = self._shown | self._handed
        given = [(slot, grad) for slot, grad in gradients if grad is not None and grad is not own.get(slot)]
        if given:
            self._check_alone(given[0][0], "was assigned")
        return given

    def apply_assigned(self, given: Sequence[tuple[int, Tensor]]) -> None:
        """Overwrites gradients in the pages with those that the user has assigned to `.grad`."""
        self.check_dense()
        for slot, grad in given:
            self._shard.add_to_slot(slot, grad, replaces=True)
            self.take(slot)
        self.show()

    def apply_edits(self, *, stay: bool) -> None:
        """Applies the user's changes of the placeholders to the pages.

        Args:
            stay: the placeholders stay; otherwise they are removed, and fetch no values any more.

        Raises:
            UsageError: several ranks share the gradient, or the update will clip it.
        """
        grads = self._grads() if self._shown else ()
        for slot, shown in tuple(self._shown.items()):
            parameter, grad = self._parameters[slot], grads[slot]
            if grad is shown:
                values = shown._fetched_values
                # Values are compared, since a write through a view leaves no other trace.
                if values is not None and not torch.equal(values, self._shard.value(slot, parameter)):
                    if self.clipped_later:
                        refuse_gradient(self._names[slot], _CLIPPED, "changed", _BEFORE_CLIPPING)
                    self._shard.write(slot, values)
                if not stay:
                    self._put(slot, None)
            else:
                if grad is not None:
                    self._check_alone(slot, "was assigned")
                self._forget_one(slot)
            if not stay or grad is not shown:
                del self._shown[slot]
                shown.retire(partial(refuse_gradient, self._names[slot], _EARLIER))

    def _forget_one(self, slot: int) -> None:
        """Forgets the gradient of a parameter whose `.grad` the user set to None or replaced."""
        others = [each for each in self._shown if each != slot and self._record.present[each]]
        if self._shared and any(self._parameters[each].grad is not None for each in others):
            raise UsageError(
                f"the gradient of {self._names[slot]} was set to None on several ranks, where the gradients of a unit "
                "are stored together, so one of them cannot be dropped alone; use zero_grad of the optimizer, or "
                "make the module that holds it a unit of its own with units=[...]"
            )
        self._shard.settle()
        self._record.forget_one(slot)
        if any(self._record.present) and not self._shared:
            self._shard.write(slot, None)

    def _read(self, slot: int) -> Tensor:
        self._check_alone(slot, "was read")
        if self.clipped_later:
            refuse_gradient(self._names[slot], _CLIPPED, then=_BEFORE_CLIPPING)
        with nullcontext() if self._stream is None else self._stream.entered():
            value = self._shard.value(slot, self._parameters[slot])
        self._backend.record_use(value)
        return value

    # -- after a step --------------------------------------------------------------------------------------------------

    def retire(self, *, clipped: bool, scratch: bool) -> None:
        """Leaves unreadable placeholders in `.grad` after a step has used the gradients.

        In a plain loop, gradients would still be there. Here they are gone or were clipped on their way to the update.
        Lightning forgets gradients next.

        Args:
            clipped: the update has changed its copy of the gradient.
            scratch: the optimizer's class has changed a copy of the gradient.
        """
        untouched = not scratch and (self._route.clips_in_place or not clipped)
        if self._in_place and untouched and any(self.uncollected()):
            self._record.send(GradEvent.KEEP)
            return
        self._put_back()
        for slot, used in enumerate(self._record.present):
            refuse = partial(refuse_gradient, self._names[slot], _USED, then=_CONVERTED)
            shown, left = self._shown.get(slot), self._left.get(slot)
            if shown is not None:
                shown.retire(refuse)
                self._left[slot] = shown
            elif used:
                if left is None or left.fetched_values is not None:  # its fetched values are of an earlier step
                    left = self._left[slot] = GradPlaceholder(self._parameters[slot], refuse)
                left.retire(refuse)
                self._put(slot, left)
        self._shown = {}
        self._handed = {}
        self._record.send(GradEvent.USE)

    @property
    def used(self) -> bool:
        """Whether used gradients were left in `.grad` and have not all been seen to be removed."""
        return self._record.state is GradientState.USED or bool(self._mixed)

    def check_forgotten(self) -> None:
        """Checks that all used gradients were forgotten, in whatever way (I2).

        Raises:
            UsageError: some were not, before a backward pass of the loss or a step.
        """
        if not self.used:
            return
        self._drop_removed()
        slots = self._still_left() if self._record.state is GradientState.USED else self._mixed
        if slots:
            raise UsageError(
                f"the gradient of {self._names[slots[0]]} was used by a step and not zeroed before the next "
                "backward pass or step, which would add to it, but it is no longer stored; call zero_grad of the "
                "optimizer, set accumulate_grad_batches at the start of an epoch, or override optimizer_zero_grad, "
                "with which gradients are kept until then"
            )
        self._forget_used()

    def _drop_removed(self) -> None:
        """Forgets used gradients, with what was added to them, whose placeholders the user has removed."""
        if self._mixed_shown:
            gradients = self._grads()
            self._mixed = [slot for slot, each in self._mixed_shown.items() if gradients[slot] is each]
            if not self._mixed:
                self._forget_used()

    def _forget_used(self) -> None:
        self._shard.settle()
        self._record.send(GradEvent.FORGET)
        self._mixed, self._mixed_shown = [], {}
        self._free_fetched()

    def _free_fetched(self) -> None:
        """Drops the placeholders of the latest step that have values: until the next step these would keep the device's
        memory of whole gradients. Others are used again."""
        self._left = {slot: left for slot, left in self._left.items() if left.fetched_values is None}

    def _still_left(self) -> list[int]:
        gradients = enumerate(self._grads())
        return [slot for slot, grad in gradients if grad is not None and grad is self._left.get(slot)]

    def forget(self) -> None:
        """Forgets all gradients, wherever they are."""
        self._shard.settle()
        self.drop()
        self._record.send(GradEvent.FORGET)
        self._mixed, self._mixed_shown = [], {}
        self._free_fetched()
        self.clipped_later = False

    def carry(self, values: Tensor, present: Sequence[bool]) -> None:
        """Puts a gradient of the layout before, of the flat's elements, into `.grad`."""
        for slot, there in enumerate(present):
            if there:
                like = self._parameters[slot]
                with torch.DisableTorchFunctionSubclass():
                    device, dtype = like.device, like.dtype
                self._put(slot, self._binding.arrangement.view(values, slot).to(device, dtype, copy=True))

    def make_plain(self) -> None:
        """Makes `.grad` ordinary at the end of a run: a tensor on its parameter's device and of its dtype, or None.

        A gradient in pages becomes a tensor if it was read, else None. A gradient in `.grad` moves to where its
        parameter has moved, as with `module.cpu()`, but not before a re-layout, whose pages the parameter will move to.
        """
        self._put_back(checks=False)
        for slot, (parameter, left) in enumerate(zip(self._parameters, self._grads(), strict=True)):
            if isinstance(left, GradPlaceholder):
                values = left.fetched_values
                self._put(slot, None if values is None else values.to(parameter.device, parameter.dtype))
            elif left is not None and left.device != parameter.device and not self._binding.absent:
                self._put(slot, left.to(parameter.device, parameter.dtype))
        self._shown, self._left = {}, {}

    # -- refusals ------------------------------------------------------------------------------------------------------

    def _check_alone(self, slot: int, what: str) -> None:
        if not self._alone:
            raise UsageError(
                f".grad of {self._names[slot]} {what}, and on several ranks each rank has only its shard of the "
                "gradient; clip with gradient_clip_val or self.clip_gradients, and take the norm from "
                "trainer.strategy.gradient_norm(optimizer)"
            )

    def _refuse_mixed(self, slot: int) -> NoReturn:
        raise UsageError(
            f"the gradient of {self._names[slot]} was read after a second backward pass without zero_grad(): a "
            "plain Trainer would have the sum of both, but the first gradient is no longer stored, since a step "
            "has used it; call optimizer.zero_grad() before the second backward pass, or override "
            "optimizer_zero_grad, with which gradients are kept"
        )


def refuse_gradient(name: str, when: str, what: str = "read", then: str = "") -> NoReturn:
    """Raises UsageError: a gradient was read or changed when it cannot be.

    Args:
        then: a further remedy, appended to the message.
    """
    raise UsageError(
        f"the gradient of {name} was {what} {when}, and its values are no longer available; read and change "
        f"gradients between backward and step, in on_after_backward or on_before_optimizer_step{then}"
    )


def _version(grad: Tensor | None) -> tuple[int, int] | None:
    """Returns the identity and the in-place version of a gradient tensor, to detect changes; None without a
    gradient."""
    return None if grad is None else (id(grad), version_of(grad))
