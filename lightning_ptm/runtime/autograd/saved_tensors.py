"""What autograd saves of page memory is named instead of kept, so that pages may be released (design section 4).

Owns the hooks on saved tensors that are in force during steps and calls of units. Decides nothing about when pages move.

I1: a saved tensor whose storage lies in pages is packed by name (parameter, offset, shape, strides, dtype) and read from
    wherever the parameter is when the backward wants it, whichever unit computes and whoever saves it; one that lies in pages
    and is no parameter's is refused. Where the parameter stays in one place, torch's own check of versions is left to it.
I2: others' hooks on saved tensors keep their effect on all else, whether they were entered around ours or inside.
I3: with `activations="host"`, what else a call of a unit saves is handed to runtime/autograd/offload.py, unless hooks
of others are
    in force. The root's own calls keep theirs: the loss and its logits are read first in the backward.
I4: nothing is named inside a non-reentrant checkpoint: it keeps nothing of its forward, and counts what is saved, so the
    recomputed forward must save the same. What the recomputed forward saves of pages stays where it is until its pass ends.
I5: what is saved is used as it was, or refused: a named parameter, too, has the values that it had (`Packed.change`).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

from lightning_ptm.errors import UsageError
from lightning_ptm.memory.streams import ComputeStream
from lightning_ptm.runtime.autograd.offload import Offload, SavedView
from lightning_ptm.runtime.fetching.executor import Executor
from lightning_ptm.runtime.tensors.autograd_graphs import double_backward, in_backward
from lightning_ptm.runtime.units.binding import Packed
from lightning_ptm.runtime.units.page_views import PageViews
from lightning_ptm.runtime.units.store import UnitStore
from lightning_ptm.torch_internals import (
    RecomputationHook,
    has_storage,
    is_wrapper,
    saving_hooks,
    sparse_indices,
    sparse_values,
    version_of,
)

_CHECKPOINT = checkpoint.__module__


def _hooks_in_force() -> tuple[Any, Any] | None:
    """The pair (pack, unpack) that autograd calls now."""
    return saving_hooks(True)


@torch.compiler.disable
def inside_checkpoint() -> bool:
    """Whether a non-reentrant checkpoint is recording or recomputing this forward."""
    outer = _hooks_in_force()
    return outer is not None and getattr(outer[0], "__module__", "") == _CHECKPOINT


@dataclasses.dataclass(frozen=True, slots=True)
class _HandedOn:
    """What somebody else's hook has packed, with the hook that unpacks it."""

    packed: Any
    unpack: Callable[[Any], Tensor]


@dataclasses.dataclass(frozen=True, slots=True)
class _Kept:
    """What stays where it is, and how often it had been written to when it was saved."""

    tensor: Tensor
    version: int


class _OwnHooks(saved_tensors_hooks):
    """Hooks of one call. A class of their own, so that they are known from others'."""


@dataclasses.dataclass(frozen=True, slots=True)
class _Scope:
    """Our hooks of one call; `outer` is the next pair of others."""

    unit: int
    context: _OwnHooks
    pack: Callable[[Tensor], Any]
    offloads: bool
    outer: tuple[Any, Any] | None


class SavedTensors:
    """The hooks of one engine on saved tensors.

    Args:
        stores: by unit.
        executor: makes a unit live when backward reads it.
        stream: of the run.
        views: knows whose storage lies where in pages.
        offload: takes activations to RAM; None: they stay.
    """

    def __init__(
        self,
        stores: Sequence[UnitStore],
        executor: Executor,
        stream: ComputeStream,
        views: PageViews,
        offload: Offload | None = None,
    ) -> None:
        self._stores = stores
        self._stream = stream
        self._executor = executor
        self._views = views
        self._offload = offload
        self._any_to_name = any(not flat.resident for store in stores for flat in store.flats)
        self._staying = {id(flat.binding) for store in stores for flat in store.flats if flat.resident}
        # state
        self._scopes: list[_Scope] = []
        self._lightning_hooks = 0

    @property
    def any_to_name(self) -> bool:
        """Whether any parameter is ever released."""
        return self._any_to_name

    def hooks_in(self, unit: int) -> bool:
        """Whether there is anything to do for calls of a unit."""
        return self._offload is not None or self._any_to_name

    def begin(self, unit: int) -> None:
        """A call that uses a unit's parameters starts; `end` must follow in the reverse order."""
        outer = _hooks_in_force()
        around = self._scopes[-1] if self._scopes else None
        if around is not None and outer is not None and outer[0] is around.pack:
            outer = around.outer
        offload = self._offload if unit != 0 else None
        pack = partial(self._pack, unit, outer, offload)
        scope = _Scope(unit, _OwnHooks(pack, self._unpack), pack, offload is not None, outer)
        if offload is not None:
            offload.begin(self._stores[unit].unit.name)
        scope.context.__enter__()
        self._scopes.append(scope)

    def end(self, unit: int) -> None:
        """The call is over; nothing happens if it was not begun."""
        if self._scopes and self._scopes[-1].unit == unit:
            scope = self._scopes.pop()
            scope.context.__exit__(None, None, None)
            if scope.offloads and self._offload is not None:
                self._offload.end()

    def abandon(self) -> None:
        """Ends all calls; an iteration is over, or cut short."""
        while self._scopes:
            self._scopes.pop().context.__exit__(None, None, None)
        if self._offload is not None:
            self._offload.begin_iteration()

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Inside, hooks that others enter get no page memory to keep (I1, I2): autograd calls the innermost hooks alone."""
        if not self._any_to_name or self._lightning_hooks:
            yield
            return
        enter = saved_tensors_hooks.__enter__

        def entered(hooks: saved_tensors_hooks) -> None:
            if isinstance(hooks, RecomputationHook):
                hooks.pack_hook = self._recomputed(hooks.pack_hook)
            elif not isinstance(hooks, _OwnHooks) and type(hooks).__module__ != _CHECKPOINT:
                outer = hooks.pack_hook, hooks.unpack_hook
                # The object may be entered again, and is its owner's.
                hooks = saved_tensors_hooks(partial(self._pack, None, outer, None), self._unpack)
            enter(hooks)

        self._lightning_hooks += 1
        saved_tensors_hooks.__enter__ = entered  # type: ignore[method-assign]
        try:
            yield
        finally:
            saved_tensors_hooks.__enter__ = enter  # type: ignore[method-assign]
            self._lightning_hooks -= 1

    def _recomputed(self, keep: Callable[[Tensor], Any]) -> Callable[[Tensor], Any]:
        """Makes the hook for what a checkpoint keeps of a recomputed forward; units stay until the iteration ends (I4)."""

        def pack(tensor: Tensor) -> Any:
            found = self._name(None, tensor)
            if found is None:
                return keep(tensor)
            unit = found.binding.layout.unit
            if not self._executor.leased(unit):
                self._executor.hold(unit)
            # Of what no gradient asks for, the checkpoint keeps this for as long as the graph.
            return keep(found.binding.unpack(found, copied=False, counted=False))

        pack.__module__ = _CHECKPOINT  # as `inside_checkpoint` asks
        return pack

    def _name(self, unit: int | None, tensor: Tensor) -> Packed | None:
        """The name of what may be released; None: nothing of it may.

        Args:
            unit: whose call saves it, if that is known.

        Raises:
            UsageError: it lies in pages, and cannot be named.
        """
        for part in _with_storage(tensor):
            if not self._views.holds(part):
                continue
            found = self._views.find(part)
            if found is None or not found[0].lies_at(found[1], part.untyped_storage()):
                self._refuse(unit, tensor, found)
            if id(found[0]) in self._staying:
                continue
            if part is not tensor:
                self._refuse(unit, tensor, found)
            return found[0].name(found[1], tensor)
        return None

    def _refuse(self, unit: int | None, tensor: Tensor, found: tuple[Any, int] | None) -> NoReturn:
        if found is None and in_backward() and not inside_checkpoint():
            raise double_backward()  # whose graph saves what this one has unpacked
        where = "" if unit is None else f" in a call of {self._stores[unit].unit.name or 'the root module'}"
        what = "bytes in pages" if found is None else found[0].layout.slots[found[1]].spec.name
        raise UsageError(
            f"autograd saves a tensor of shape {tuple(tensor.shape)} ({type(tensor).__name__}, {tensor.layout}){where} "
            f"that is a view of {what} and would hold other bytes when the backward reads it: a view of a weight that was "
            f"taken in an earlier call, or that is a part of another tensor; take the view where it is used, or compute with "
            f"a copy (`weight.clone()`)"
        )

    def _pack(
        self, unit: int | None, outer: tuple[Any, Any] | None, offload: Offload | None, tensor: Tensor
    ) -> Packed | SavedView | _HandedOn | _Kept:
        packed = self._name(unit, tensor) if self._any_to_name else None
        if packed is not None:
            return packed
        if outer is not None:
            return _HandedOn(outer[0](tensor), outer[1])
        # Not `tensor` itself: an output that its own node keeps, with the node behind it, would never be freed where no
        # backward comes (a step that fails, or that is left out).
        kept = tensor if offload is None else offload.pack(tensor)
        return kept if isinstance(kept, SavedView) else _Kept(tensor.detach(), version_of(tensor))

    def _unpack(self, saved: Packed | SavedView | _HandedOn | _Kept) -> Tensor:
        if isinstance(saved, _Kept):
            if version_of(saved.tensor) != saved.version:
                refuse_changed(saved.tensor, saved.version)
            return saved.tensor
        if isinstance(saved, SavedView):
            assert self._offload is not None  # it has packed this
            return self._offload.unpack(saved)
        if isinstance(saved, _HandedOn):
            return saved.unpack(saved.packed)
        unit = saved.binding.layout.unit
        self._executor.saved_is_read(unit)
        # Without a lease the unit may be given up by the next fetch, before autograd has computed with what it gets here.
        passing = not self._executor.leased(unit)
        if not self._stores[unit].live:
            with self._stream.entered():
                self._executor.require(unit)
        return saved.binding.unpack(saved, copied=passing)


def _with_storage(tensor: Tensor) -> Iterator[Tensor]:
    """The tensor, or what it is made of: those of its parts that have memory of their own."""
    whole: Any = tensor
    if is_wrapper(whole):
        names, _ = whole.__tensor_flatten__()
        for name in names:
            yield from _with_storage(getattr(whole, name))
    elif tensor.layout is torch.sparse_coo:
        yield from _with_storage(sparse_indices(tensor))
        yield from _with_storage(sparse_values(tensor))
    elif tensor.layout in (torch.sparse_csr, torch.sparse_bsr):
        parts = tensor.crow_indices(), tensor.col_indices(), tensor.values()
        yield from (each for part in parts for each in _with_storage(part))
    elif tensor.layout in (torch.sparse_csc, torch.sparse_bsc):
        parts = tensor.ccol_indices(), tensor.row_indices(), tensor.values()
        yield from (each for part in parts for each in _with_storage(part))
    elif has_storage(tensor):
        yield tensor


def refuse_changed(tensor: Tensor, version: int | None = None) -> NoReturn:
    """Raises UsageError: a tensor was written to after a forward had used it.

    Args:
        version: that it had then, if that is to be told.
    """
    told = "" if version is None else f" (version {version_of(tensor)}, not {version})"
    raise UsageError(
        f"a tensor of shape {tuple(tensor.shape)} that the backward pass needs was changed in place after the "
        f"forward{told}, so gradients would be wrong; change a clone of it, "
        f"or, if it goes into a unit whose forward is recomputed, set recompute='none'"
    )
