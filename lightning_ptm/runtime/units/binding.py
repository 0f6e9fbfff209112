"""Parameters in a flat: which elements of it each has, and its storage. The only code that sets `param.data`.

Owns the link between a flat and the parameters that are views of it (`FlatBinding`): where each is in the flat
(`Arrangement`), the storages that they have while the flat is bound (`PageViews`), and the detection of writes to them
(`Fingerprint`). Knows tensors, never tiers or plans.

I1: a bound parameter is a view of the flat that it was last bound to. A released one is a NaN expanded to its shape, and
    closed (parameter_guard.py): reading or writing it raises at once.
I2: a bound parameter is also closed while nothing computes with it, if its flat is a rounded copy or an update may be
    changing it.
I3: shape, strides and identity of a parameter never change; its dtype changes once, to the compute dtype.
I4: a `Fingerprint` of a flat's values detects writes that torch's version counters miss: through `parameter.data`, a numpy
    view, a fused kernel or another library. There are no false positives: a parameter that is reported to differ does
    differ. A fingerprint contains a sample of each parameter's elements, so that a change of the whole parameter is found
    and a change of a few elements may not be. With `every_element` (the setting `poison`) it is a position-dependent
    checksum of all elements.
I5: a flat stores a parameter's elements in the order of its memory, not of its shape: a transposed or channels_last parameter
    stays so, since the choice of kernels and the rounding of fused updates depend on it.
I6: a bound parameter's storage covers exactly its bytes: its size, its offsets and what `torch.save` writes are those of a
    plain parameter, and neighbours in the page are out of reach. It keeps the memory of the pages alive, as any view does.
    Each storage belongs to one slot of one flat, at one address. A tensor over pages whose storage is unknown here, or whose
    flat has moved, may see bytes of something else; `held_beside` finds such tensors when a flat is released.
"""

from __future__ import annotations

import dataclasses
import gc
import sys
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from traceback import walk_tb
from types import FrameType
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.utils import dlpack
from xxhash import xxh3_64_intdigest

from lightning_ptm.errors import InternalError, UsageError
from lightning_ptm.memory.backend import backend_of
from lightning_ptm.planning.layout import FlatLayout
from lightning_ptm.planning.tensor_slices import TensorSlice
from lightning_ptm.runtime.tensors.autograd_graphs import tensors_in
from lightning_ptm.runtime.units.parameter_guard import ParameterGuard
from lightning_ptm.torch_internals import (
    WithoutDispatch,
    accumulation_hooks_of,
    base_of,
    can_share_data,
    has_storage,
    hooks_of,
    negated_view,
    put_accumulation_hooks,
    put_hooks,
    storage_id,
    storage_references,
    swap_tensors,
    version_of,
)


def set_data(parameter: nn.Parameter, value: Tensor) -> Tensor | None:
    """Sets `parameter.data = value`, also for devices of other libraries, where torch refuses to change a parameter's device
    (and `Module.to` makes new parameters). The parameter stays the same object, and keeps its hooks and gradient.

    Returns:
        The gradient if it is a view of pages (grad_placeholder.py), which cannot be moved; else None.
    """
    try:
        parameter.data = value
        return None
    except RuntimeError:
        if can_share_data(parameter, value):
            raise
    hooks, later_hooks, gradient = hooks_of(parameter), accumulation_hooks_of(parameter), parameter.grad
    # `.data` has a version counter of its own, which a detached tensor would share.
    swap_tensors(parameter, nn.Parameter(value.data, requires_grad=parameter.requires_grad))
    # The swap moves the code that calls the hooks to the other tensor: register the dictionaries again.
    put_hooks(parameter, hooks)
    put_accumulation_hooks(parameter, later_hooks)
    if gradient is None or type(gradient) is not Tensor:
        return gradient
    parameter.grad = gradient.to(value.device)
    return None


@dataclasses.dataclass(frozen=True, slots=True)
class Arrangement:
    """Arrangement of one flat's parameters; sequences are indexed by slot.

    Attributes:
        shapes: shapes of the parameters.
        orders: dimensions from the slowest to the fastest in memory; None for row-major parameters.
        boxes: slices of larger parameters; None for whole parameters.
    """

    layout: FlatLayout
    shapes: tuple[tuple[int, ...], ...]
    orders: tuple[tuple[int, ...] | None, ...]
    boxes: tuple[TensorSlice | None, ...]

    @classmethod
    def of(cls, layout: FlatLayout, parameters: Sequence[Tensor]) -> Arrangement:
        """Returns the arrangement of parameters, one for each slot."""
        with torch.DisableTorchFunctionSubclass():  # a question to a closed parameter would go through Python
            shapes = tuple([tuple(parameter.shape) for parameter in parameters])
        specs = [slot.spec for slot in layout.slots]
        return cls(layout, shapes, tuple([spec.order for spec in specs]), tuple([spec.box for spec in specs]))

    def fits(self, slot: int, value: Tensor) -> bool:
        """Whether `value` has the shape of a slot's parameter, or of the larger one that it is a slice of."""
        return tuple(value.shape) in (self.shapes[slot], self.layout.slots[slot].spec.whole_shape)

    def view(self, full: Tensor, slot: int) -> Tensor:
        """Returns the parameter of `slot` as a view of `full` (padded_numel,)."""
        place = self.layout.slots[slot]
        if place.spec.stride is not None:
            return full.as_strided(self.shapes[slot], place.spec.stride, full.storage_offset() + place.start)
        return full[place.start : place.start + place.numel].view(self.shapes[slot])

    def in_order(self, slot: int, value: Tensor) -> Tensor:
        """Returns the elements of `value` (shaped as the parameter of `slot`) in the flat's order: a view if possible, else a
        copy."""
        order = self.orders[slot]
        return value.reshape(-1) if order is None else value.permute(order).reshape(-1)

    def as_laid(self, values: Sequence[Tensor | None]) -> list[Tensor | None]:
        """Arranges values of all parameters, as `in_order`; values of slices keep their shape and are made
        contiguous."""
        return [
            each if each is None else self.in_order(slot, each) if box is None else each.contiguous()
            for slot, (each, box) in enumerate(zip(values, self.boxes, strict=True))
        ]

    def in_orders(self, gradients: Sequence[Tensor | None]) -> list[Tensor | None]:
        """Arranges gradients of all parameters, as `in_order`. Raises UsageError as `check_dense`."""
        return [None if each is None else self._gradient(slot, each) for slot, each in enumerate(gradients)]

    def _gradient(self, slot: int, gradient: Tensor) -> Tensor:
        self.check_dense(slot, gradient)
        # The reader refuses gradients of another shape.
        return self.in_order(slot, gradient) if tuple(gradient.shape) == self.shapes[slot] else gradient

    def check_dense(self, slot: int, gradient: Tensor) -> None:
        """Raises UsageError if the gradient of the parameter of `slot` is sparse: pages hold dense gradients only."""
        if gradient.layout is not torch.strided:
            kind = str(gradient.layout).removeprefix("torch.")
            raise UsageError(
                f"the gradient of {self.layout.slots[slot].spec.name} is sparse ({kind}), and pages hold dense gradients; "
                f"use sparse=False in its embedding"
            )


_RUNS = 4

"""Number of places in a parameter, evenly spread, from which a sample takes elements. Its cost are cache misses: less than
1 % of a step of 64 tokens in which each unit is fetched twice."""

_RUN_NUMEL = 8

"""Number of consecutive elements at each place."""

_BLOCK = 1 << 16

"""Number of elements that are multiplied at once, so that the products stay in the cache."""

_PRIME = 6364136223846793005

_POSITIVE = (1 << 63) - 1

_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def _sampled(numel: int) -> Tensor:
    """Returns the indices of the sampled elements of a parameter."""
    if numel <= _RUNS * _RUN_NUMEL:
        return torch.arange(numel)
    starts = torch.arange(_RUNS) * (numel - _RUN_NUMEL) // (_RUNS - 1)
    return (starts[:, None] + torch.arange(_RUN_NUMEL)).flatten()


class Fingerprint:
    """Computes and compares fingerprints of flats of one layout.

    Args:
        device: device of the flats.
        every_element: whether fingerprints are checksums of all elements (I4): in RAM xxHash's, which takes a sixth of the
            time of sums that torch computes, or less.
    """

    def __init__(self, layout: FlatLayout, device: torch.device, *, every_element: bool) -> None:
        self._slots = [(place, slot.start, slot.numel) for place, slot in enumerate(layout.slots) if slot.numel]
        self._every_element = every_element
        sampled = [start + _sampled(numel) for _, start, numel in self._slots]
        self._per_slot = [len(each) for each in sampled]
        self._index = torch.cat([torch.empty(0, dtype=torch.int64), *sampled]).to(device)
        self._factors: Tensor | None = None

    @torch.no_grad()
    def of(self, full: Tensor) -> Tensor:
        """Returns the fingerprint of a flat's present values, (padded_numel,) or longer."""
        if self._every_element and not backend_of(full.device).has_own_memory:
            size, data = full.itemsize, full.view(torch.uint8).numpy().data
            digests = [
                xxh3_64_intdigest(data[start * size : (start + numel) * size]) & _POSITIVE
                for _, start, numel in self._slots
            ]
            return torch.tensor(digests, dtype=torch.int64, device="cpu")
        words = max(1, full.itemsize // 8)
        bits = full.view(_INTEGERS[min(8, full.itemsize)])
        if self._every_element:
            sums = [self._checksum(bits[start * words : (start + numel) * words]) for _, start, numel in self._slots]
            return torch.stack(sums) if sums else bits.new_empty(0, dtype=torch.int64)
        # Of elements wider than an integer, the first half.
        return (bits if words == 1 else bits.view(-1, words)[:, 0]).index_select(0, self._index)

    def differs(self, full: Tensor, before: Tensor) -> int | None:
        """Returns the first slot whose values in `full` differ from the fingerprint `before`; None if none does."""
        now = self.of(full)
        if torch.equal(now, before):
            return None
        counts = [1] * len(self._slots) if self._every_element else self._per_slot
        changed = int((now != before).nonzero()[0])
        for (place, _, _), count in zip(self._slots, counts, strict=True):
            if changed < count:
                return place
            changed -= count
        return None

    def _checksum(self, bits: Tensor) -> Tensor:
        if self._factors is None:
            self._factors = torch.arange(1, 2 * _BLOCK, 2, dtype=torch.int64, device=bits.device)
        total = torch.zeros((), dtype=torch.int64, device=bits.device)
        for block in bits.split(_BLOCK):
            wide = block.long()
            # Exponents are in the highest bits, where a sum of many equal changes (all numbers halved) could overflow to 0.
            total = total * _PRIME + ((wide ^ (wide >> 29)) * self._factors[: block.numel()]).sum()
        return total


_PLACES_KEPT = 8
"""Number of addresses per flat whose storages are cached: plans fetch a flat to the same few addresses repeatedly."""


class PageViews:
    """Storages of parameters in pages, for all flats of a run.

    Args:
        holds: returns whether a tensor's storage is in the memory of pages.
    """

    def __init__(self, holds: Callable[[Tensor], bool] = lambda tensor: False) -> None:
        self.holds = holds
        self._flats: list[FlatBinding] = []
        self._known: dict[int, tuple[FlatBinding, int]] = {}
        """Binding and slot by address of the storage object, which is unique while the object is alive."""

    def of_flat(self, binding: FlatBinding) -> FlatViews:
        """Returns the storages of one flat's parameters, and registers them for `find`."""
        self._flats.append(binding)
        return FlatViews(binding, self._known)

    def find(self, tensor: Tensor) -> tuple[FlatBinding, int] | None:
        """Returns the flat and the slot whose storage `tensor` has, even if the flat has moved. For an unregistered storage
        (made by `over_own_storage`), returns those that are bound at its address. None if there are none (I1)."""
        storage = tensor.untyped_storage()
        known = self._known.get(storage_id(storage))
        if known is not None:
            return known
        found = ((binding, binding.slot_at(storage)) for binding in self._flats)
        return next(((binding, slot) for binding, slot in found if slot is not None), None)


class FlatViews:
    """Storages of one flat's parameters at each of its recent addresses. Created by `PageViews.of_flat`.

    Args:
        known: registry to which each storage is added.
    """

    def __init__(self, binding: FlatBinding, known: dict[int, tuple[FlatBinding, int]]) -> None:
        self._binding = binding
        self._known = known
        self._at: OrderedDict[int, Sequence[Tensor]] = OrderedDict()

    def held_beside(self, full: Tensor) -> Sequence[int]:
        """Returns the slots whose storage at `full` has references other than the bound parameter's."""
        held = []
        for slot, view in enumerate(self._at.get(full.data_ptr(), ())):
            storage = view.untyped_storage()  # all callers share one Python object, which counts once
            beside = storage_references(storage_id(storage)) + sys.getrefcount(storage) - _OWN_HOLDERS
            if beside > 0 and view.numel() and beside > len(_in_ended_frames(view)):
                held.append(slot)
        return held

    def at(self, full: Tensor) -> Sequence[Tensor]:
        """Returns, by slot, the parameter as a view of `full` (padded_numel,) with a storage of its own."""
        address = full.data_ptr()
        found = self._at.get(address)
        if found is None:
            # In inference mode these would be inference tensors, which autograd refuses afterwards.
            with torch.inference_mode(False):
                found = self._at[address] = self._made(full)
            while len(self._at) > _PLACES_KEPT:
                self._forget(self._at.popitem(last=False)[1])
        self._at.move_to_end(address)
        return found

    def close(self) -> None:
        """Drops all storages."""
        while self._at:
            self._forget(self._at.popitem()[1])

    def _made(self, full: Tensor) -> Sequence[Tensor]:
        arrangement, made = self._binding.arrangement, []
        for slot, place in enumerate(self._binding.layout.slots):
            own = over_own_storage(full[place.start : place.start + place.numel])
            strides = place.spec.stride
            shape = arrangement.shapes[slot]
            made.append(own.view(shape) if strides is None else own.as_strided(shape, strides))
            self._known[storage_id(own.untyped_storage())] = self._binding, slot
        return made

    def _forget(self, views: Sequence[Tensor]) -> None:
        for view in views:
            del self._known[storage_id(view.untyped_storage())]


def _own_holders() -> int:
    """Returns the number of references to a bound parameter's storage: the cached view and its base, the caller's, and the
    parameter."""
    view = torch.empty(1).view(1)
    storage = view.untyped_storage()
    return int(storage_references(storage_id(storage))) + sys.getrefcount(storage) + 1


_OWN_HOLDERS = _own_holders()


def _is_over(tensor: Tensor, storage: int) -> bool:
    is_other = isinstance(tensor, nn.Parameter) or not has_storage(tensor)
    return not is_other and storage_id(tensor.untyped_storage()) == storage


def _in_ended_frames(view: Tensor) -> set[int]:
    """Returns the ids of tensors with the storage of `view` that are only alive as variables of functions that the exception
    which is handled now has ended; parameters are left out."""
    handled = sys.exc_info()[1]
    if handled is None:
        return set()
    running: set[int] = set()
    frame: FrameType | None = sys._getframe()
    while frame is not None:
        running.add(id(frame))
        frame = frame.f_back
    storage, errors, found = storage_id(view.untyped_storage()), [handled], set()
    for error in errors:
        errors += [each for each in (error.__cause__, error.__context__) if each is not None and each not in errors]
        for frame, _ in walk_tb(error.__traceback__):
            if id(frame) not in running:
                with torch.DisableTorchFunctionSubclass():  # some may be closed parameters
                    inside = list(tensors_in(list(frame.f_locals.values())))
                    inside += [base for base in map(base_of, inside) if base is not None]
                    found |= {id(each) for each in inside if _is_over(each, storage)}
    return found


def over_own_storage(part: Tensor) -> Tensor:
    """Returns a tensor over the same memory whose storage covers exactly the elements of `part`."""
    if not part.numel():
        return torch.empty_like(part)
    # As bytes, since DLPack does not support every dtype.
    return dlpack.from_dlpack(dlpack.to_dlpack(part.view(torch.uint8))).view(part.dtype)  # type: ignore[attr-defined]


ENDED = "ended with its run, which could not put them back into the module; load them from a checkpoint"

"""Reason why values are lost after a run; see `FlatBinding.absent`."""


@dataclasses.dataclass(frozen=True, slots=True)
class Packed:
    """Reference to a saved tensor that is a view of a parameter's pages; autograd saves it in place of the tensor
    (docs/design/saved_tensors.md).

    Attributes:
        binding, slot: flat and slot of the parameter.
        offset: elements of `dtype` between the parameter's first byte and the view.
        dtype, shape, stride, conj, neg: properties of the view, which may differ from those of the parameter.
        change: value of the parameter's change counter when the tensor was saved.
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
        """Name of the parameter."""
        return self.binding.layout.slots[self.slot].spec.name


class FlatBinding:
    """Link between one flat of a unit and its parameters, which are in the order of the layout's slots.

    Args:
        is_copy: whether the parameters are copies (of more precise ones, or of pages in another tier), so that the user's
            writes to them would be lost.
        closes: whether the parameters may be read only while something computes with them (I2); see `ParameterGuard`.
        views: views of pages, for all flats of a run.
        held: whether this rank holds the flat.
        fingerprint: detector of writes that torch's version counters miss; None for none.
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
        self._sizes = tuple(map(torch.Size, self._shapes))
        self._numels = tuple([slot.numel for slot in layout.slots])
        self._offsets = tuple([slot.start * dtype.itemsize for slot in layout.slots])
        """Bytes from the flat's first to each parameter's."""
        nan = torch.full((), float("nan"), dtype=dtype, device=device)
        self._nothing = tuple([nan.expand(shape) for shape in self._shapes])
        self._nowhere = (nan.data_ptr(),) * len(parameters)
        self._is_copy = is_copy
        self._views = (views or PageViews()).of_flat(self)
        self._held = held
        self._fingerprint = fingerprint if is_copy else None
        self.parameter_guard = ParameterGuard(
            parameters, self._refusal, closes=closes, absent=lambda: bool(self.absent)
        )
        # state
        self._base: Tensor | None = None
        self._addresses = self._nowhere
        """Addresses of the parameters' data, unless the user has replaced it."""
        self._versions: list[int] = []
        self._bound_as: Tensor | None = None
        """Fingerprint of the values that the parameters are bound to; None while an update changes them."""
        self.changes = [0] * len(parameters)
        """Number of changes of the values (updates, and edits in `gathered`), by slot; read by other classes."""
        self._written: str | None = None
        self._summoned_dtypes: list[torch.dtype] = []
        self._users_data: dict[int, Tensor] = {}
        """Result of `replaced` before the parameters were summoned."""
        self._left_gradients: dict[int, Tensor] = {}
        """Gradients, by slot, that are set again when the parameter is back on their device."""
        self.absent = ""
        """Reason why the parameters have no values now, and what to do; empty if they have values."""
        self.summoned = False
        """Whether the parameters are summoned for the user (inside `gathered`), with storage outside pages."""

    @property
    def bound(self) -> bool:
        """Whether the parameters are views of the flat."""
        return self._base is not None

    def bind(self, full: Tensor) -> None:
        """Makes the parameters views of `full`, a 1-D tensor of at least padded_numel elements."""
        if self._base is not None:
            self._note_writes()
        views = self._views.at(full)
        if self._users_data:
            views = [self._users_data.get(slot, view) for slot, view in enumerate(views)]
            self._users_data = {}
        self._place(views)
        self.note_bound(full)
        self._addresses = tuple(map(full.data_ptr().__add__, self._offsets))
        with torch.DisableTorchFunctionSubclass():
            self._versions = list(map(version_of, self.parameters))
        self.summoned = False
        if self._fingerprint is not None:
            self._bound_as = self._fingerprint.of(full)
        self.parameter_guard.values_are(bound=True, summoned=False)

    def note_bound(self, full: Tensor | None) -> None:
        """Records the flat that the parameters are views of; None: of no flat."""
        self._base = full

    def values_will_change(self) -> None:
        """Announces that an update or a load is about to change the flat's values; checks for the user's writes before."""
        self._note_writes()
        self._bound_as = None

    def values_have_changed(self) -> None:
        """Records the flat's values after an update or a load, so that they do not count as the user's writes."""
        if self._fingerprint is not None and self._base is not None and not self.summoned:
            self._bound_as = self._fingerprint.of(self._base)

    def lose(self, why: str) -> None:
        """Marks the values as lost, for the reason `why`; an empty string marks them as present again."""
        self.absent = why

    def unbind(self, *, absent: str = "") -> None:
        """Detaches the parameters from the flat; they cannot be read until they are bound again.

        Args:
            absent: reason if they will not be bound again in this run, and what to do.
        """
        if self._base is not None:
            self._note_writes()
        self._place(self._nothing)
        self._bound_as = None
        self._addresses = self._nowhere
        self.summoned = False
        self.absent = absent
        self.note_bound(None)
        if absent:
            self._views.close()
        self.parameter_guard.values_are(bound=False, summoned=False)

    def values_change(self, slots: Iterable[int] | None = None) -> None:
        """Counts a change of the values of some slots (by default all): a backward pass then refuses tensors that autograd
        has saved of them before, as it does after a plain optimizer's in-place update."""
        with torch.DisableTorchFunctionSubclass():
            for slot in range(len(self.parameters)) if slots is None else slots:
                self.changes[slot] += 1
                parameter = self.parameters[slot]
                if self._base is not None and not self.summoned and not parameter.is_inference():
                    torch.autograd.graph.increment_version(parameter)
                    self._versions[slot] += 1

    def leave(self, dtypes: Sequence[torch.dtype]) -> None:
        """Unbinds the parameters for good, before a re-layout, which reads the parameters' strides and these dtypes."""
        self.unbind(absent=ENDED)
        self._fingerprint = None  # has device memory, and parameters refer to this binding until they have another one
        with torch.DisableTorchFunctionSubclass():
            for slot, dtype in enumerate(dtypes):
                shape, strides = self._shapes[slot], self.layout.slots[slot].spec.stride
                # Untouched memory: takes addresses only.
                nothing = (
                    torch.empty(shape, dtype=dtype)
                    if strides is None
                    else torch.empty_strided(shape, strides, dtype=dtype)
                )
                self._set(slot, nothing)

    def _place(self, values: Sequence[Tensor]) -> None:
        """Makes tensors of the parameters' shapes their data, by slot."""
        with torch.DisableTorchFunctionSubclass():  # also for closed parameters
            for slot, parameter in enumerate(self.parameters):
                if parameter.shape != self._sizes[slot]:
                    self._check_shape(slot)
                if self._left_gradients:
                    self._set(slot, values[slot])
                    continue
                try:
                    parameter.data = values[slot]
                except RuntimeError:  # on a device of another library, which `set_data` knows
                    self._set(slot, values[slot])

    def _set(self, slot: int, value: Tensor) -> None:
        parameter = self.parameters[slot]
        left = set_data(parameter, value)
        if left is not None:
            self._left_gradients[slot] = left
        elif slot in self._left_gradients and self._left_gradients[slot].device == value.device:
            parameter.grad = self._left_gradients.pop(slot)

    def _refusal(self, given: tuple[Any, ...]) -> UsageError:
        known = {id(parameter): slot for slot, parameter in enumerate(self.parameters)}
        inside = (each for item in given for each in (item if isinstance(item, (list, tuple)) else (item,)))
        slots = [known[id(each)] for each in inside if id(each) in known]
        name = self.layout.slots[slots[0]].spec.name if slots else "a parameter"
        if self.absent:
            return UsageError(f"{name} was read or written, and its values {self.absent}")
        kept = (
            "the module has only a copy that may be rounded or out of date"
            if self.bound
            else "its values are in pages and not gathered"
        )
        return UsageError(
            f"{name} was read or written outside of its module's forward, and {kept}; read and edit weights "
            "inside `with trainer.strategy.gathered(module):` (write=False if you only read), or use "
            "module.state_dict(); to compute with it, call the module that it belongs to, or make a larger "
            "module a unit (units=[...])"
        )

    def check(self, *, computes_only: bool = False) -> None:
        """Checks that the user has not replaced the parameters' storage (I1) or written to copies: values would be lost.

        Args:
            computes_only: whether no update follows, so that other storage of the same shape does no harm.

        Raises:
            UsageError: `parameter.data` was replaced, or a copy was written to in place.
        """
        if not self.summoned and self._is_in_place():
            self.check_written()
            return
        if self.summoned:
            raise UsageError(
                f"a step begins inside `with strategy.gathered(module):`, where {self.layout.slots[0].spec.name} is whole "
                f"and not in pages; end the block before the step"
            )
        with torch.DisableTorchFunctionSubclass():
            for slot in range(len(self.parameters)):
                if computes_only:
                    self._check_shape(slot)
                else:
                    self._check_parameter(slot)
        self.check_written()

    def check_written(self) -> None:
        """Raises UsageError if the user has written to a copy (of more precise values, or of pages in another tier)."""
        if self._base is not None:
            self._note_writes()
        written = self._written
        if written is not None:
            raise UsageError(
                f"the data of parameter {written} was written to, and it is a copy of values in pages, so that the new "
                f"values would be lost; edit parameters inside `with strategy.gathered(module):`, and update them with an "
                f"optimizer that configure_optimizers returns; if the module's own forward writes to it (Embedding and "
                f"EmbeddingBag with max_norm), leave that out and clip the weight inside `gathered`, after the step"
            )

    @property
    def written(self) -> str | None:
        """Name of the first parameter to which the user has written where the values are lost; None if there is none."""
        self._note_writes()
        return self._written

    @property
    def keeps_writes(self) -> bool:
        """Whether in-place writes of the user to the parameters take effect."""
        return self.summoned or (self._held and not self._is_copy and not self.parameter_guard.closes)

    def _note_writes(self) -> None:
        if self._is_copy and self._base is not None and not self.summoned:
            with torch.DisableTorchFunctionSubclass():
                for slot, parameter in enumerate(self.parameters):
                    is_replaced = self._numels[slot] and parameter.data_ptr() != self._addresses[slot]
                    if is_replaced or version_of(parameter) != self._versions[slot]:
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
                    "torch.utils.swap_tensors) while its values were in pages and not gathered, so the new values would "
                    "be lost, and the run ends; start it again, with values copied into the parameter (copy_) inside "
                    "`with strategy.gathered(module):`"
                )
            raise UsageError(
                f"the data of parameter {self.layout.slots[slot].spec.name} was replaced, and its values are in pages, so "
                f"that the new values would be lost; edit parameters inside `with strategy.gathered(module):`"
            )

    def _is_replaced(self, slot: int) -> bool:
        return self._numels[slot] > 0 and self.parameters[slot].data_ptr() != self._addresses[slot]

    def _is_in_place(self) -> bool:
        """Whether each parameter has its shape, and the data that it was given."""
        with torch.DisableTorchFunctionSubclass():
            for slot, parameter in enumerate(self.parameters):
                if parameter.shape != self._sizes[slot] or (
                    self._numels[slot] and parameter.data_ptr() != self._addresses[slot]
                ):
                    return False
        return True

    def replaced(self) -> dict[int, Tensor]:
        """Returns, by slot, the tensors that the user has assigned as data (`parameter.data = ...`) of bound parameters.

        Raises:
            UsageError: a shape differs, or the parameters are copies, so that the assigned values would be lost.
        """
        if self.summoned:
            return self._users_data
        with torch.DisableTorchFunctionSubclass():
            found = {slot: each.data for slot, each in enumerate(self.parameters) if self._is_replaced(slot)}
            for slot in found:
                if self._is_copy:
                    self._check_parameter(slot)
                self._check_shape(slot)
        return found

    @property
    def resized(self) -> bool:
        """Whether the user has given a parameter another shape."""
        with torch.DisableTorchFunctionSubclass():
            for slot, parameter in enumerate(self.parameters):
                if parameter.shape != self._sizes[slot]:
                    return True
        return False

    def give_up_resized(self, whole: Tensor | None = None) -> dict[str, nn.Parameter]:
        """Gives up the parameters that the user has resized, and returns them by name; new parameters take their slots.

        Args:
            whole: (padded_numel,) tensor of which the new parameters are views; by default the bound flat, unless it is a
                copy.
        """
        whole, found = whole if whole is not None or self._is_copy else self._base, {}
        with torch.DisableTorchFunctionSubclass():
            for at, parameter in enumerate(self.parameters):
                if whole is not None and parameter.shape != self._shapes[at] and self.arrangement.boxes[at] is None:
                    self.parameters[at] = nn.Parameter(self.arrangement.view(whole, at), parameter.requires_grad)
                    found[self.layout.slots[at].spec.name] = parameter
        return found

    def put_values(self, values: Mapping[int, Tensor]) -> None:
        """Copies values, by slot, into the flat."""
        assert self._base is not None
        for slot, value in values.items():
            self.arrangement.view(self._base, slot).copy_(value)

    def values_of(self, slots: Iterable[int]) -> dict[int, Tensor]:
        """Returns copies of the flat's values, by slot."""
        assert self._base is not None
        return {slot: self.arrangement.view(self._base, slot).clone() for slot in slots}

    def edited(self, whole: Tensor) -> None:
        """Copies values of `whole` (padded_numel,) into the data that the user has assigned (`replaced`)."""
        for slot, data in self.replaced().items():
            data.copy_(self.arrangement.view(whole, slot))

    def summon(self, values: Iterable[Tensor]) -> None:
        """Summons the parameters for the user, with `values` as their storage, until they are bound or unbound."""
        self._note_writes()
        self._users_data = self.replaced()
        self._summoned_dtypes = []
        with torch.DisableTorchFunctionSubclass():
            for slot, value in enumerate(values):
                self._set(slot, value)
                self._summoned_dtypes.append(value.dtype)
        self.summoned = True
        self.parameter_guard.values_are(bound=self.bound, summoned=True)

    def check_dtypes(self) -> None:
        """Raises UsageError if the user has changed the dtype of a summoned parameter."""
        for slot, (parameter, summoned) in enumerate(zip(self.parameters, self._summoned_dtypes, strict=True)):
            if self.summoned and parameter.dtype is not summoned:
                raise UsageError(
                    f"{self.layout.slots[slot].spec.name} was given the dtype {parameter.dtype} inside of "
                    f"`with strategy.gathered(module):`, and its pages are laid out for {summoned}, so that it would be "
                    f"converted back; convert modules before the run (in __init__, setup or configure_model), or end this "
                    f"fit and start another one"
                )

    def nothing(self) -> Sequence[Tensor]:
        """Returns placeholders of the parameters' shapes: a NaN expanded to each."""
        return self._nothing

    def restore(self, slot: int, value: Tensor) -> None:
        """Gives a parameter `value` as its storage, outside pages (end of a run)."""
        self.parameter_guard.open_for_good(slot)
        self._set(slot, value)

    def forget(self) -> None:
        """Drops the flat; the parameters, whose storage is outside pages, stay as they are (end of a run)."""
        self._base = self._bound_as = None
        self._views.close()
        self.parameter_guard.forget()

    def check_views(self) -> None:
        """Checks, before the flat is released, that no view of a parameter is alive: its bytes would change.

        Raises:
            UsageError: a view is alive.
        """
        if self._base is None or self.summoned or not self._views.held_beside(self._base):
            return
        gc.collect()
        held = self._views.held_beside(self._base)
        if held:
            raise UsageError(
                f"a view of {self.layout.slots[held[0]].spec.name} (detached, transposed, reshaped, .data) still "
                "exists after the call that made it, and its bytes will change when the weight's pages are released; "
                "keep a copy (`weight.detach().clone()`), save it with `ctx.save_for_backward` in an autograd "
                "function, or create the view where it is used; if no code of yours keeps it, a stored exception "
                "may, whose traceback keeps local variables alive (`error.with_traceback(None)`)"
            )

    def is_at(self, slot: int, storage: torch.UntypedStorage) -> bool:
        """Whether a storage that the parameter of `slot` once had is at the flat's present address."""
        base = self._base
        start = self.layout.slots[slot].start
        return base is not None and storage.data_ptr() == base.data_ptr() + start * base.itemsize

    def slot_at(self, storage: torch.UntypedStorage) -> int | None:
        """Returns the slot of the bound parameter that begins at a storage's first byte; None if there is none."""
        base = self._base
        if (
            base is None
            or self.summoned
            or not 0 <= storage.data_ptr() - base.data_ptr() < base.numel() * base.itemsize
        ):
            return None
        places = enumerate(self.layout.slots)
        return next((slot for slot, place in places if place.numel and self.is_at(slot, storage)), None)

    def name(self, slot: int, tensor: Tensor) -> Packed:
        """Returns a reference to a tensor that shares the storage of the parameter of `slot`."""
        offset, shape, stride = int(tensor.storage_offset()), tuple(tensor.shape), tuple(tensor.stride())
        view = tensor.dtype, shape, stride, tensor.is_conj(), tensor.is_neg()
        return Packed(self, slot, offset, *view, self.changes[slot])

    def unpack(self, packed: Packed, *, copied: bool, counted: bool = True) -> Tensor:
        """Returns the tensor of a reference, as a view of the parameter's present bytes or of a copy of them.

        Args:
            copied: whether to copy the bytes.
            counted: whether `check_views` finds the tensor if it is alive when the flat is released.

        Raises:
            UsageError: the values have changed since, or the parameters are summoned for the user.
        """
        if self._base is None and self.summoned:
            raise UsageError(
                f"a backward pass runs inside `with strategy.gathered(module):`, where {packed.name} is whole and not in the "
                f"pages that the forward has used; end the block before the backward, or run the forward inside it, too"
            )
        if self._base is None:
            raise InternalError(f"{packed.name} is not gathered while a saved tensor of it is read")
        if self.changes[packed.slot] != packed.change:
            refuse_older(packed.name, self.changes[packed.slot] - packed.change)
        with WithoutDispatch():  # not for the user's dispatch modes, such as selective checkpointing
            return self._view_of(packed, copied=copied, counted=counted)

    def _view_of(self, packed: Packed, *, copied: bool, counted: bool) -> Tensor:
        assert self._base is not None  # checked by `unpack`
        place = self.layout.slots[packed.slot]
        part, offset = self._base[place.start : place.start + place.numel], packed.offset
        if copied:  # only the bytes of the view: code that reads a weight row by row saves each row
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
        # For a checkpoint, a slice is summoned as the whole parameter.
        if tuple(found.shape) != self._shapes[slot] and not (self.summoned and self.arrangement.fits(slot, found)):
            raise UsageError(
                f"parameter {self.layout.slots[slot].spec.name} had shape {self._shapes[slot]} at set-up and has "
                f"{tuple(found.shape)} now; its pages no longer fit; change shapes between two batches, inside "
                f"`with strategy.gathered(module):`"
            )


def refuse_older(name: str, times: int) -> NoReturn:
    """Raises UsageError, beginning as torch's own error: a parameter has changed `times` times since a forward used it."""
    raise UsageError(
        "one of the variables needed for gradient computation has been modified by an inplace "
        f"operation: {name} has changed {times} time{'' if times == 1 else 's'} since the forward "
        "that used it (an optimizer's step, or an edit of weights), so that gradients would not "
        "match the loss; run the backward before the step, or compute the forward again after it"
    )
