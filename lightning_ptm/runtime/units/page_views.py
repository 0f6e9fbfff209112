"""Views of pages with one storage per parameter, and a lookup from a tensor to the parameter whose storage it has.

Owns the storages that parameters have while their flat is bound. A storage covers exactly one parameter's bytes: its size,
its offsets and what `torch.save` writes are those of a plain parameter, and neighbours in the page are out of reach. It keeps
the memory of the pages alive, as any view does.

Another tensor with the same storage would see other bytes after the flat is released. `held_beside` finds such tensors at
that time.

I1: each storage belongs to one slot of one flat, at one address. A tensor over pages whose storage is unknown here, or whose
    flat has moved, may see bytes of something else.
"""

from __future__ import annotations

import sys
from collections import OrderedDict
from collections.abc import Callable, Sequence
from traceback import walk_tb
from types import FrameType
from typing import TYPE_CHECKING, Generic, Protocol, TypeVar

import torch
from torch import Tensor, nn
from torch.utils import dlpack

from lightning_ptm.runtime.tensors.autograd_graphs import tensors_in
from lightning_ptm.torch_internals import base_of, has_storage, storage_id, storage_references

if TYPE_CHECKING:
    from torch import UntypedStorage

    from lightning_ptm.planning.layout import FlatLayout
    from lightning_ptm.runtime.units.arrangement import Arrangement


class ViewedFlat(Protocol):
    """Properties of a flat's binding (binding.FlatBinding) that views need."""

    @property
    def arrangement(self) -> Arrangement: ...
    @property
    def layout(self) -> FlatLayout: ...

    def slot_at(self, storage: UntypedStorage) -> int | None:
        """Returns the slot of the parameter whose bytes a storage has; None if it has no parameter's."""


B = TypeVar("B", bound=ViewedFlat)


_PLACES_KEPT = 8
"""Number of addresses per flat whose storages are cached: plans fetch a flat to the same few addresses repeatedly."""


class PageViews(Generic[B]):
    """Storages of parameters in pages, for all flats of a run.

    Args:
        holds: returns whether a tensor's storage is in the memory of pages.
    """

    def __init__(self, holds: Callable[[Tensor], bool] = lambda tensor: False) -> None:
        self.holds = holds
        self._flats: list[B] = []
        self._known: dict[int, tuple[B, int]] = {}
        """Binding and slot by address of the storage object, which is unique while the object is alive."""

    def of_flat(self, binding: B) -> FlatViews[B]:
        """Returns the storages of one flat's parameters, and registers them for `find`."""
        self._flats.append(binding)
        return FlatViews(binding, self._known)

    def find(self, tensor: Tensor) -> tuple[B, int] | None:
        """Returns the flat and the slot whose storage `tensor` has, even if the flat has moved. For an unregistered storage
        (made by `over_own_storage`), returns those that are bound at its address. None if there are none (I1)."""
        storage = tensor.untyped_storage()
        known = self._known.get(storage_id(storage))
        if known is not None:
            return known
        found = ((binding, binding.slot_at(storage)) for binding in self._flats)
        return next(((binding, slot) for binding, slot in found if slot is not None), None)


class FlatViews(Generic[B]):
    """Storages of one flat's parameters at each of its recent addresses. Created by `PageViews.of_flat`.

    Args:
        known: registry to which each storage is added.
    """

    def __init__(self, binding: B, known: dict[int, tuple[B, int]]) -> None:
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
