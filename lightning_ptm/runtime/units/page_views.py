"""Parameters as tensors over their own bytes in pages, and which parameter a tensor over pages belongs to.

Owns the storages that parameters get while their flat is bound. A storage covers one parameter's bytes and no more: what
code can ask of it (its size, what lies at an offset, what `torch.save` writes) is what a plain parameter answers, and its
neighbours in the page are out of reach. It keeps the region of the pages alive, as any view of it does.

What holds a storage beside its parameter holds bytes that will be another's when the flat is released: who does is found then
(`held_beside`).

I1: each storage belongs to one slot of one flat, at one address. A tensor over pages whose storage is not known here, or
whose flat is elsewhere now, is of bytes that may hold something else by now.
"""

from __future__ import annotations

import sys
from collections import OrderedDict
from collections.abc import Callable, Sequence
from traceback import walk_tb
from types import FrameType
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.utils import dlpack

from lightning_ptm.runtime.tensors.autograd_graphs import tensors_in
from lightning_ptm.torch_internals import base_of, has_storage, storage_id, storage_references

if TYPE_CHECKING:
    from lightning_ptm.runtime.units.binding import FlatBinding

_PLACES_KEPT = 8
"""Addresses of one flat whose storages are kept: plans fetch a flat to the same few places again and again."""


class PageViews:
    """The storages of parameters in pages, of all flats of a run.

    Args:
        holds: whether a tensor's storage lies in the memory of pages.
    """

    def __init__(self, holds: Callable[[Tensor], bool] = lambda tensor: False) -> None:
        self.holds = holds
        self._flats: list[FlatBinding] = []
        self._known: dict[int, tuple[FlatBinding, int]] = {}
        """By the address of a storage's own object, which is unique as long as it is alive."""

    def of_flat(self, binding: FlatBinding) -> FlatViews:
        """The storages of one flat's parameters, which `find` then knows."""
        self._flats.append(binding)
        return FlatViews(binding, self._known)

    def find(self, tensor: Tensor) -> tuple[FlatBinding, int] | None:
        """The flat and the slot whose storage `tensor` has, wherever the flat is now. Of a storage that is none of these
        (`over_own_storage` makes such), those whose bytes lie there. None: no bound flat's (I1)."""
        storage = tensor.untyped_storage()
        known = self._known.get(storage_id(storage))
        if known is not None:
            return known
        found = ((binding, binding.slot_at(storage)) for binding in self._flats)
        return next(((binding, slot) for binding, slot in found if slot is not None), None)


class FlatViews:
    """The storages of one flat's parameters at each address that it had lately. Made by `PageViews.of_flat`.

    Args:
        known: where each storage is written down under its identity.
    """

    def __init__(self, binding: FlatBinding, known: dict[int, tuple[FlatBinding, int]]) -> None:
        self._binding = binding
        self._known = known
        self._at: OrderedDict[int, Sequence[Tensor]] = OrderedDict()

    def held_beside(self, full: Tensor) -> Sequence[int]:
        """Slots whose storage at `full` has other references than the bound parameter's."""
        views = self._at.get(full.data_ptr(), ())
        return [slot for slot, view in enumerate(views) if view.numel() and self._held(view)]

    def _held(self, view: Tensor) -> bool:
        beside = _holders(view) - _OWN_HOLDERS
        return beside > 0 and beside > len(_in_frames_that_have_ended(view))

    def at(self, full: Tensor) -> Sequence[Tensor]:
        """By slot, the parameter as a view of `full`, (padded_numel,), over a storage of its own."""
        address = full.data_ptr()
        found = self._at.get(address)
        if found is None:
            # In inference mode these would be inference tensors, which autograd refuses ever after.
            with torch.inference_mode(False):
                found = self._at[address] = self._made(full)
            while len(self._at) > _PLACES_KEPT:
                self._forget(self._at.popitem(last=False)[1])
        self._at.move_to_end(address)
        return found

    def close(self) -> None:
        """Forgets all of them."""
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


def _holders(view: Tensor) -> int:
    """How many tensors, and objects of Python's, hold the storage of a tensor."""
    storage = view.untyped_storage()  # one object of Python's for all who ask, which counts once
    return int(storage_references(storage_id(storage))) + sys.getrefcount(storage)


_OWN_HOLDERS = _holders(torch.empty(1).view(1)) + 1
"""Of a storage that a bound parameter has: the view that is kept here, with its base, who asks, and the parameter."""


def _is_over(tensor: Tensor, storage: int) -> bool:
    is_other = isinstance(tensor, nn.Parameter) or not has_storage(tensor)
    return not is_other and storage_id(tensor.untyped_storage()) == storage


def _in_frames_that_have_ended(view: Tensor) -> set[int]:
    """By identity, tensors that have the storage of `view`, are no parameters, and are read by nobody any more: variables of
    functions that were ended by the error which is handled now."""
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
                with torch.DisableTorchFunctionSubclass():  # there are closed parameters among them
                    inside = list(tensors_in(list(frame.f_locals.values())))
                    inside += [base for base in map(base_of, inside) if base is not None]
                    found |= {id(each) for each in inside if _is_over(each, storage)}
    return found


def over_own_storage(part: Tensor) -> Tensor:
    """The same elements in the same memory, as a tensor whose storage begins and ends with them."""
    if not part.numel():
        return torch.empty_like(part)
    # By way of bytes: DLPack does not know every dtype.
    return dlpack.from_dlpack(dlpack.to_dlpack(part.view(torch.uint8))).view(part.dtype)  # type: ignore[attr-defined]
