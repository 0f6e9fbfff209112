"""The only code that decides a parameter's storage (`param.data`).

Owns the link between a flat and the parameters that are views of it; how they lie there, the arrangement says
(arrangement.py). Knows tensors, never tiers or plans.

I1: a bound parameter is a view of the flat it was last bound to; a released one is one NaN expanded to its shape, and
closed (guarded_parameter.py): reading or writing it raises at once. I2: one whose flat holds no precise values, or
values that an update
may be changing, is closed, too, while nothing computes with it. I3: shape, strides and identity of a parameter never change;
its dtype changes once, to the compute dtype.
"""

from __future__ import annotations

import dataclasses
import gc
from collections.abc import Iterable, Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from lightning_ptm.errors import InternalError, UsageError
from lightning_ptm.planning.layout import FlatLayout
from lightning_ptm.runtime.tensors.parameter_data import set_data
from lightning_ptm.runtime.units.arrangement import Arrangement
from lightning_ptm.runtime.units.page_views import PageViews, over_own_storage
from lightning_ptm.runtime.units.parameter_guard import ParameterGuard
from lightning_ptm.runtime.units.uncounted_writes import Fingerprint
from lightning_ptm.torch_internals import WithoutDispatch, negated_view, version_of

ENDED = "ended with its run, which could not put them back into the module; load them from a checkpoint"
"""What has become of values that nobody has: see `FlatBinding.absent`."""


@dataclasses.dataclass(frozen=True, slots=True)
class Packed:
    """A saved tensor over a parameter's bytes in pages, named instead of kept (section 4 of the design).

    Attributes:
        slot: of the parameter, in the flat of `binding`.
        offset: elements of `dtype` before its first, counted from the parameter's first byte.
        dtype, shape, stride, conj, neg: how the bytes are looked at, which need not be how the parameter does.
        change: how often the parameter's values had changed when it was saved.
    """

    binding: FlatBinding
    slot: int
    offset: int
    dtype: torch.dtype
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    conj: bool
    neg: bool
    change: int

    @property
    def name(self) -> str:
        """Of the parameter."""
        return self.binding.layout.slots[self.slot].spec.name


class FlatBinding:
    """One flat of a unit and its parameters, in the order of the layout's slots.

    Args:
        is_copy: the parameters are copies, of more precise ones or of pages elsewhere, so what is written into them by hand
            would be lost.
        closes: they may be read while they are used only (I2): see `ParameterGuard`.
        views: makes the storages of parameters in pages, for all flats of a run.
        held: by this rank.
        fingerprint: finds writes to copies that torch does not count; None: nobody looks for these.
    """

    def __init__(
        self,
        layout: FlatLayout,
        parameters: list[nn.Parameter],
        dtype: torch.dtype,
        device: torch.device,
        *,
        is_copy: bool = False,
        closes: bool = False,
        views: PageViews | None = None,
        held: bool = True,
        fingerprint: Fingerprint | None = None,
    ) -> None:
        if len(parameters) != len(layout.slots):
            raise InternalError(f"flat {layout.index} has {len(layout.slots)} slots and {len(parameters)} parameters")
        self.layout = layout
        self.parameters = parameters
        self.dtype = dtype
        self.device = device
        self.arrangement = Arrangement.of(layout, parameters)
        self._shapes = self.arrangement.shapes
        self._nan = torch.full((), float("nan"), dtype=dtype, device=device)
        self._is_copy = is_copy
        self._views = (views or PageViews()).of_flat(self)
        self._held = held
        self._fingerprint = fingerprint if is_copy else None
        self.parameter_guard = ParameterGuard(
            parameters, self._refusal, closes=closes, absent=lambda: bool(self.absent)
        )
        # state
        self._base: Tensor | None = None
        self._versions: list[int] = []
        self._bound_as: Tensor | None = None
        """The fingerprint of the values that the parameters are bound to; None while an update changes them."""
        self.changes = [0] * len(parameters)
        """By slot, how often the values have changed: by updates, and by edits in `gathered`. Read by others."""
        self._written: str | None = None
        self._lent_dtypes: list[torch.dtype] = []
        self._theirs: dict[int, Tensor] = {}
        """What `replaced` has told, while the parameters are lent."""
        self._left: dict[int, Tensor] = {}
        """Gradients that wait for the parameter of their slot to come back to their device."""
        self.absent = ""
        """Why nobody has values of the parameters now, and what to do; empty: somebody has."""
        self.lent = False
        """Whether the parameters are in the user's hands, with storage that is not ours."""

    @property
    def bound(self) -> bool:
        return self._base is not None

    def gradients(self) -> list[Tensor | None]:
        """What is in `.grad` of each parameter, of closed ones, too."""
        with torch.DisableTorchFunctionSubclass():
            return [parameter.grad for parameter in self.parameters]

    def take_gradient(self, slot: int) -> Tensor | None:
        """What was in `.grad` of the parameter of `slot`, where nothing is from now on."""
        with torch.DisableTorchFunctionSubclass():
            parameter = self.parameters[slot]
            gradient, parameter.grad = parameter.grad, None
        return gradient

    def bind(self, full: Tensor) -> None:
        """Makes the parameters views of `full`, a 1-D tensor of at least padded_numel elements."""
        self._note_writes()
        with torch.DisableTorchFunctionSubclass():  # closed ones, too
            for slot, view in enumerate(self._views.at(full)):
                self._check_shape(slot)
                self._set(slot, self._theirs.get(slot, view))
            self._versions = [version_of(parameter) for parameter in self.parameters]
        self._base = full
        self._theirs = {}
        self.lent = False
        self.values_have_changed()
        self.parameter_guard.values_are(bound=True, lent=False)

    def values_will_change(self) -> None:
        """An update, or what is loaded, is about to change the values that the parameters may be bound to."""
        self._note_writes()
        self._bound_as = None

    def values_have_changed(self) -> None:
        """The values that the parameters may be bound to are others now, and rightly so."""
        if self._fingerprint is not None and self._base is not None and not self.lent:
            self._bound_as = self._fingerprint.of(self._base)

    def lose(self, why: str) -> None:
        """Nobody has its values from now on; empty: they are there again."""
        self.absent = why

    def unbind(self, *, absent: str = "") -> None:
        """Lets go of the flat; the parameters cannot be read until they are bound again.

        Args:
            absent: which they will not be in this run: what has become of their values, and what to do.
        """
        self._note_writes()
        with torch.DisableTorchFunctionSubclass():
            for slot, nothing in enumerate(self.nothing()):
                self._check_shape(slot)
                self._set(slot, nothing)
        self._base = self._bound_as = None
        self.lent = False
        self.absent = absent
        if absent:
            self._views.close()
        self.parameter_guard.values_are(bound=False, lent=False)

    def values_change(self, slots: Iterable[int] | None = None) -> None:
        """Parameters of these slots (all of them by default) get other values from here on: what autograd has saved of them
        before is refused in a backward pass, as it is where a plain optimizer counts its writes."""
        with torch.DisableTorchFunctionSubclass():
            for slot in range(len(self.parameters)) if slots is None else slots:
                self.changes[slot] += 1
                parameter = self.parameters[slot]
                if self._base is not None and not self.lent and not parameter.is_inference():
                    torch.autograd.graph.increment_version(parameter)
                    self._versions[slot] += 1

    def leave(self, dtypes: Sequence[torch.dtype]) -> None:
        """As `unbind`, for good: other pages will have the parameters, and look at their strides and these dtypes."""
        self.unbind(absent=ENDED)
        with torch.DisableTorchFunctionSubclass():
            for slot, dtype in enumerate(dtypes):
                shape, strides = self._shapes[slot], self.layout.slots[slot].spec.stride
                # Takes addresses, and no memory as long as nobody writes to it.
                nothing = (
                    torch.empty(shape, dtype=dtype)
                    if strides is None
                    else torch.empty_strided(shape, strides, dtype=dtype)
                )
                self._set(slot, nothing)

    def _set(self, slot: int, value: Tensor) -> None:
        parameter = self.parameters[slot]
        left = set_data(parameter, value)
        if left is not None:
            self._left[slot] = left
        elif self._left and slot in self._left and self._left[slot].device == value.device:
            parameter.grad = self._left.pop(slot)

    def _refusal(self, given: tuple[Any, ...]) -> UsageError:
        known = {id(parameter): slot for slot, parameter in enumerate(self.parameters)}
        inside = (each for item in given for each in (item if isinstance(item, (list, tuple)) else (item,)))
        slots = [known[id(each)] for each in inside if id(each) in known]
        name = self.layout.slots[slots[0]].spec.name if slots else "a parameter"
        if self.absent:
            return UsageError(f"{name} was read or written, and its values {self.absent}")
        kept = (
            "of which the module has a copy, rounded or not up to date"
            if self.bound
            else "which are in pages elsewhere"
        )
        return UsageError(
            f"{name} was read or written while nothing computes with its values, {kept}; read and edit weights inside "
            f"`with trainer.strategy.gathered(module):` (write=False where you only read), or take module.state_dict(); "
            f"compute with them by calling the module that they belong to, or choose other units=[...]"
        )

    def check(self, *, computes_only: bool = False) -> None:
        """Refuses parameters that somebody else has given other storage (I1) or written to: the values would be lost.

        Args:
            computes_only: no update follows, so that other storage of the same shape does no harm.

        Raises:
            UsageError: `parameter.data` was replaced, by a tensor of another shape or of the same; or a copy of a master
                was written to in place.
        """
        if self.lent:
            raise UsageError(
                f"a step begins inside `with strategy.gathered(module):`, where {self.layout.slots[0].spec.name} is whole "
                f"and not in pages; end the block before"
            )
        with torch.DisableTorchFunctionSubclass():
            for slot in range(len(self.parameters)):
                if computes_only:
                    self._check_shape(slot)
                else:
                    self._check_parameter(slot)
        self.check_written()

    def check_written(self) -> None:
        """Raises UsageError: a copy of more precise values, or of pages elsewhere, was written to in place."""
        written = self.written
        if written is not None:
            raise UsageError(
                f"the data of parameter {written} was written to, and the precise values know nothing of it, so the "
                f"new values would be lost; edit parameters inside `with strategy.gathered(module):`, and have an optimizer "
                f"update them that configure_optimizers returns; where the module's own forward writes to it (Embedding and "
                f"EmbeddingBag with max_norm), leave that out and clip the weight there, behind the step"
            )

    @property
    def written(self) -> str | None:
        """The name of a parameter that was written to in place where that is lost; None as long as there was none."""
        self._note_writes()
        return self._written

    @property
    def keeps_writes(self) -> bool:
        """Whether what is written to the parameters in place is their value from then on."""
        return self.lent or (self._held and not self._is_copy and not self.parameter_guard.closes)

    def _note_writes(self) -> None:
        if self._is_copy and self._base is not None and not self.lent:
            with torch.DisableTorchFunctionSubclass():
                for slot, (parameter, version) in enumerate(zip(self.parameters, self._versions, strict=True)):
                    if version_of(parameter) != version or self._is_replaced(slot):
                        self._written = self._written or self.layout.slots[slot].spec.name
            if self._written is None and self._fingerprint is not None and self._bound_as is not None:
                changed = self._fingerprint.differs(self._base, self._bound_as)
                self._written = None if changed is None else self.layout.slots[changed].spec.name

    def _check_parameter(self, slot: int) -> None:
        self._check_shape(slot)
        if self._is_replaced(slot):
            if self._base is None:
                raise UsageError(
                    f"parameter {self.layout.slots[slot].spec.name} was given other memory (Tensor.set_, "
                    f"torch.utils.swap_tensors) while its values were in pages elsewhere, which know nothing of it, so the "
                    f"new values would be lost; in a run started anew, copy values into it (copy_) inside "
                    f"`with strategy.gathered(module):`, and leave its memory alone"
                )
            raise UsageError(
                f"the data of parameter {self.layout.slots[slot].spec.name} was replaced, and its pages know nothing of it, "
                f"so the new values would be lost; edit parameters inside `with strategy.gathered(module):`"
            )

    def _is_replaced(self, slot: int) -> bool:
        place, base = self.layout.slots[slot], self._base
        ours = self._nan.data_ptr() if base is None else base.data_ptr() + place.start * base.itemsize
        return place.numel > 0 and self.parameters[slot].data_ptr() != ours

    def replaced(self) -> dict[int, Tensor]:
        """By slot, what the user has put in the place of our data (`parameter.data = ...`): the values of these parameters.

        Raises:
            UsageError: a shape differs, or the parameters are copies, so that the precise values are others.
        """
        if self.lent:
            return self._theirs
        with torch.DisableTorchFunctionSubclass():
            found = {slot: each.data for slot, each in enumerate(self.parameters) if self._is_replaced(slot)}
            for slot in found:
                if self._is_copy:
                    self._check_parameter(slot)
                self._check_shape(slot)
        return found

    def give_up_resized(self, whole: Tensor | None = None) -> dict[str, nn.Parameter]:
        """By name, parameters to which users have given another shape: they are theirs now, and others stand in for them.

        Args:
            whole: (padded_numel,), of which the others are views; by default what they are bound to, if that is precise.
        """
        whole, found = whole if whole is not None or self._is_copy else self._base, {}
        with torch.DisableTorchFunctionSubclass():
            for at, parameter in enumerate(self.parameters):
                if whole is not None and parameter.shape != self._shapes[at] and self.arrangement.boxes[at] is None:
                    self.parameters[at] = nn.Parameter(self.arrangement.view(whole, at), parameter.requires_grad)
                    found[self.layout.slots[at].spec.name] = parameter
        return found

    def take_replaced(self) -> None:
        """Our data gets the values of what the user has put in its place."""
        assert self._base is not None
        for slot, theirs in self.replaced().items():
            self.arrangement.view(self._base, slot).copy_(theirs)

    def give_replaced(self) -> None:
        """What the user has put in the place of our data gets the values of ours."""
        assert self._base is not None
        self.edited(self._base)

    def edited(self, whole: Tensor) -> None:
        """What the user has put in the place of our data gets other values, of `whole` (padded_numel,)."""
        for slot, theirs in self.replaced().items():
            theirs.copy_(self.arrangement.view(whole, slot))

    def lend(self, values: Iterable[Tensor]) -> None:
        """Puts the parameters into the user's hands, with storage of their own, until they are bound or unbound."""
        self._note_writes()
        self._theirs = self.replaced()
        self._lent_dtypes = []
        with torch.DisableTorchFunctionSubclass():
            for slot, value in enumerate(values):
                self._set(slot, value)
                self._lent_dtypes.append(value.dtype)
        self.lent = True
        self.parameter_guard.values_are(bound=self.bound, lent=True)

    def check_dtypes(self) -> None:
        """Raises UsageError: a parameter that is lent has another dtype now."""
        for slot, (parameter, lent) in enumerate(zip(self.parameters, self._lent_dtypes, strict=True)):
            if self.lent and parameter.dtype is not lent:
                raise UsageError(
                    f"{self.layout.slots[slot].spec.name} was given the dtype {parameter.dtype} inside of "
                    f"`with strategy.gathered(module):`, and its pages are laid out for {lent}, so it would be rounded or "
                    f"widened again; convert modules before the run (in __init__, setup or configure_model), or end this fit "
                    f"and start another one"
                )

    def nothing(self) -> list[Tensor]:
        """Values of the right shapes that say nothing."""
        return [self._nan.expand(shape) for shape in self._shapes]

    def restore(self, slot: int, value: Tensor) -> None:
        """Gives a parameter storage of its own again (end of a run)."""
        self.parameter_guard.open_for_good(slot)
        self._set(slot, value)

    def forget(self) -> None:
        """Lets go of the flat; the parameters, which have storage of their own, stay as they are (end of a run)."""
        self._base = self._bound_as = None
        self._views.close()
        self.parameter_guard.forget()

    def check_views(self) -> None:
        """Checks, before the flat is given up, that no view of a parameter is alive, whose bytes would become others.

        Raises:
            UsageError: there is such a view.
        """
        if self._base is None or self.lent or not self._views.held_beside(self._base):
            return
        gc.collect()
        held = self._views.held_beside(self._base)
        if held:
            raise UsageError(
                f"a view of {self.layout.slots[held[0]].spec.name} (of its data, detached, transposed or reshaped) is kept "
                f"beyond the call that has computed with it, and its bytes will be others when the weight's pages are "
                f"given up; keep a copy (`weight.detach().clone()`), save it with `ctx.save_for_backward` in an autograd "
                f"function, or take the view where it is used; an exception that is kept holds the variables of all frames "
                f"that it came through, until it is dropped or given `with_traceback(None)`"
            )

    def lies_at(self, slot: int, storage: torch.UntypedStorage) -> bool:
        """Whether a storage that a parameter of the flat once had is where the flat is now."""
        base = self._base
        start = self.layout.slots[slot].start
        return base is not None and storage.data_ptr() == base.data_ptr() + start * base.itemsize

    def slot_at(self, storage: torch.UntypedStorage) -> int | None:
        """The slot of the bound parameter whose first byte is a storage's first; None: there is none."""
        base = self._base
        if base is None or self.lent or not 0 <= storage.data_ptr() - base.data_ptr() < base.numel() * base.itemsize:
            return None
        places = enumerate(self.layout.slots)
        return next((slot for slot, place in places if place.numel and self.lies_at(slot, storage)), None)

    def name(self, slot: int, tensor: Tensor) -> Packed:
        """Names a tensor over the bytes of the parameter of `slot`, whose storage it shares."""
        offset, shape, stride = int(tensor.storage_offset()), tuple(tensor.shape), tuple(tensor.stride())
        looked_at = tensor.dtype, shape, stride, tensor.is_conj(), tensor.is_neg()
        return Packed(self, slot, offset, *looked_at, self.changes[slot])

    def unpack(self, packed: Packed, *, copied: bool, counted: bool = True) -> Tensor:
        """What was named, over the bytes of the parameter where they are now, or over a copy of these.

        Args:
            counted: it must be gone when the flat is given up, as any view of the parameter (`check_views`).

        Raises:
            UsageError: the values have changed since.
        """
        if self._base is None and self.lent:
            raise UsageError(
                f"a backward pass runs inside `with strategy.gathered(module):`, where {packed.name} is whole and not in the "
                f"pages that the forward before the block has computed with; end the block before, or compute the forward "
                f"inside of it, too"
            )
        if self._base is None:
            raise InternalError(f"{packed.name} is not gathered while a saved tensor of it is read")
        if self.changes[packed.slot] != packed.change:
            refuse_older(packed.name, self.changes[packed.slot] - packed.change)
        with WithoutDispatch():  # modes of the user's, such as a selective checkpoint, need not hear of it
            return self._seen(packed, copied=copied, counted=counted)

    def _seen(self, packed: Packed, *, copied: bool, counted: bool) -> Tensor:
        assert self._base is not None  # as `unpack` knows
        place = self.layout.slots[packed.slot]
        part, offset = self._base[place.start : place.start + place.numel], packed.offset
        if copied:  # no more than is looked at: code that reads a weight row by row saves each row
            size = packed.dtype.itemsize
            steps = zip(packed.shape, packed.stride, strict=True)
            reach = 1 + sum((many - 1) * stride for many, stride in steps) if 0 not in packed.shape else 0
            part, offset = part.view(torch.uint8)[offset * size : (offset + reach) * size].clone(), 0
        elif counted:
            part = self._views.at(self._base)[packed.slot]
        else:
            part = over_own_storage(part)
        found = torch.empty(0, dtype=packed.dtype, device=part.device)
        found.set_(part.untyped_storage(), offset, packed.shape, packed.stride)
        found = found.conj() if packed.conj else found
        return negated_view(found) if packed.neg else found

    def _check_shape(self, slot: int) -> None:
        found = self.parameters[slot]
        # For a checkpoint, a part is lent as the larger one.
        if tuple(found.shape) != self._shapes[slot] and not (self.lent and self.arrangement.fits(slot, found)):
            raise UsageError(
                f"parameter {self.layout.slots[slot].spec.name} had shape {self._shapes[slot]} at set-up and has "
                f"{tuple(found.shape)} now; its pages do not fit it any more; change shapes between two batches, inside of "
                f"`with strategy.gathered(module):`"
            )


def refuse_older(name: str, times: int) -> NoReturn:
    """Raises UsageError, which begins as torch's own error: a parameter has changed so often since a forward used it."""
    raise UsageError(
        f"one of the variables needed for gradient computation has been modified by an inplace operation: {name} has "
        f"changed {times} times since the forward that used it (an optimizer's step, or an edit of weights), so gradients "
        f"would be of other weights than the loss; run the backward before the step, or compute the forward again behind it"
    )
