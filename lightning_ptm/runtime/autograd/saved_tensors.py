"""Saved-tensor hooks that put names in place of page memory into the autograd graph, so that pages may be released.

Owns the saved-tensor hooks in force during steps and calls of units (docs/design/saved_tensors.md). Does not decide
when pages move.

I1: a saved tensor whose storage is in pages is packed by name (parameter, offset, shape, strides, dtype). When the
    backward reads it, it is taken from wherever the parameter is then, whichever unit computes and whichever saves it.
    A saved tensor that is in pages and is not part of a parameter is refused. For parameters that never move, torch's
    own version check applies.
I2: saved-tensor hooks of others keep their effect on all other tensors, whether they were entered around ours or
    inside.
I3: where a call's activations are offloaded, the other tensors that it saves go to runtime/autograd/offload.py, unless
    hooks of others are in force. Tensors saved by the root's own calls stay: the backward reads the loss and its
    logits first.
I4: nothing is packed by name inside a non-reentrant checkpoint: it stores nothing of its forward, and counts the saved
    tensors, so the recomputed forward must save the same. Pages that the recomputed forward saves stay in place until
    its pass ends.
I5: a saved tensor is used unchanged, or refused; a parameter packed by name, too, must have the values that it had
    (`Packed.change`).
"""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.nn import Parameter
from torch.utils.checkpoint import checkpoint

from lightning_ptm.errors import UsageError
from lightning_ptm.memory.streams import ComputeStream
from lightning_ptm.runtime.autograd.offload import Offload, SavedView
from lightning_ptm.runtime.fetching.executor import Executor
from lightning_ptm.runtime.tensors.autograd_graphs import double_backward, in_backward
from lightning_ptm.runtime.units.binding import Packed, PageViews
from lightning_ptm.runtime.units.store import UnitStore
from lightning_ptm.terms import Tier
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

_PLAIN = (Tensor, Parameter)
"""Classes of tensors that consist of one storage, if they are strided."""


@torch.compiler.disable
def inside_checkpoint() -> bool:
    """Whether a non-reentrant checkpoint is recording or recomputing this forward."""
    outer = saving_hooks(True)  # the pair (pack, unpack) that autograd calls now
    return outer is not None and getattr(outer[0], "__module__", "") == _CHECKPOINT


@dataclasses.dataclass(frozen=True, slots=True)
class _PackedByOthers:
    """A tensor packed by another party's hook, and that party's hook that unpacks it."""

    packed: Any
    unpack: Callable[[Any], Tensor]


@dataclasses.dataclass(frozen=True, slots=True)
class _LeftInPlace:
    """A saved tensor that stays in place, and its version when it was saved."""

    tensor: Tensor
    version: int


class _OwnHooks(saved_tensors_hooks):
    """The hooks of one call; a subclass, to distinguish them from other parties' hooks."""


def kept_in_place() -> _OwnHooks:
    """Returns a context in which autograd keeps saved tensors in place.

    A result that its own node saves (of sigmoid, softmax, attention) is kept without its graph: the node would be in a cycle
    that Python's collector does not see, so a graph without a backward would keep its tensors, and views of weights.
    """
    return _OwnHooks(Tensor.detach, lambda tensor: tensor)


@dataclasses.dataclass(frozen=True, slots=True)
class _Scope:
    """Our hooks of one call; `outer` is the next pair of hooks that is not ours."""

    unit: int
    context: _OwnHooks
    pack: Callable[[Tensor], Any]
    offloads: bool
    outer: tuple[Any, Any] | None


class _OfThread(threading.local):
    """State of the calls that compute in this thread: two halves of a batch compute in two threads."""

    def __init__(self) -> None:
        self.scopes: list[_Scope] = []


class SavedTensors:
    """The saved-tensor hooks of one engine.

    Args:
        stores: by unit.
        executor: gathers a unit when the backward reads it.
        stream: the run's compute stream.
        views: finds which storages are views of pages.
        offload: moves activations to RAM or disk; None: activations stay on the device.
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
        self.releases_parameters = any(store.moving for store in stores)
        """Whether the run ever releases parameters; read from outside this class, too."""
        self._staying = {id(flat.binding) for store in stores for flat in store.flats if flat.resident}
        # state
        self._of_thread = _OfThread()
        self._watching_depth = 0
        self._closed = False
        """Whether the engine has ended, and with it the pages that its graphs refer to."""

    def begin(self, unit: int, tier: Tier | None = None, *, counts: bool = False) -> None:
        """Begins a call that uses a unit's parameters; `end` must follow in the reverse order. Without need for hooks it does
        nothing.

        Args:
            tier: the tier that other tensors which the call saves are offloaded to; None: they stay.
            counts: whether `end` returns the bytes of those that stay.
        """
        scopes = self._of_thread.scopes
        around = scopes[-1] if scopes else None
        again = around is not None and around.unit == unit  # a unit that calls itself; `end` ends this call
        if tier is None and not counts and not self.releases_parameters and not again:
            return
        outer = saving_hooks(True)
        if around is not None and outer is not None and outer[0] is around.pack:
            outer = around.outer
        offload = self._offload if tier is not None or counts else None
        pack = partial(self._pack, unit, outer, offload)
        scope = _Scope(unit, _OwnHooks(pack, self._unpack), pack, offload is not None, outer)
        if offload is not None:
            offload.begin(self._stores[unit].unit.name, tier)
        scope.context.__enter__()
        scopes.append(scope)

    def end(self, unit: int) -> int:
        """Ends the call; does nothing if it was not begun.

        Returns:
            The bytes that were offloaded or counted.
        """
        scopes = self._of_thread.scopes
        if scopes and scopes[-1].unit == unit:
            scope = scopes.pop()
            scope.context.__exit__(None, None, None)
            if scope.offloads and self._offload is not None:
                return self._offload.end()
        return 0

    def abandon(self) -> None:
        """Ends all calls, at the end of an iteration or when it is cut short."""
        scopes = self._of_thread.scopes
        while scopes:
            scopes.pop().context.__exit__(None, None, None)
        if self._offload is not None:
            self._offload.begin_iteration()

    def close(self) -> None:
        """Refuses what backward passes through graphs of this engine still read of pages. Idempotent."""
        self._closed = True

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Keeps page memory away from hooks that others enter inside the block (I1, I2).

        Such hooks would get it, since autograd calls only the innermost hooks.
        """
        if not self.releases_parameters or self._watching_depth:
            yield
            return
        enter = saved_tensors_hooks.__enter__

        def entered(hooks: saved_tensors_hooks) -> None:
            if isinstance(hooks, RecomputationHook):
                hooks.pack_hook = self._recomputed(hooks.pack_hook)
            elif not isinstance(hooks, _OwnHooks) and type(hooks).__module__ != _CHECKPOINT:
                outer = hooks.pack_hook, hooks.unpack_hook
                # A new object, since the owner may enter the old one again.
                hooks = saved_tensors_hooks(partial(self._pack, None, outer, None), self._unpack)
            enter(hooks)

        self._watching_depth += 1
        saved_tensors_hooks.__enter__ = entered  # type: ignore[method-assign]
        try:
            yield
        finally:
            saved_tensors_hooks.__enter__ = enter  # type: ignore[method-assign]
            self._watching_depth -= 1

    def _recomputed(self, keep: Callable[[Tensor], Any]) -> Callable[[Tensor], Any]:
        """Makes the hook for tensors that a checkpoint stores of a recomputed forward; their units stay gathered (I4)."""

        @torch.compiler.disable  # autograd calls it between operators of a compiled layer
        def pack(tensor: Tensor) -> Any:
            found = self._pack_by_name(None, tensor)
            if found is None:
                return keep(tensor)
            self._executor.read_in_place(found.binding.layout.unit)
            # If no gradient needs the tensor, the checkpoint stores it for as long as the graph, so it is neither
            # copied nor counted as a use.
            return keep(found.binding.unpack(found, copied=False, counted=False))

        pack.__module__ = _CHECKPOINT  # how `inside_checkpoint` recognizes it
        return pack

    def _pack_by_name(self, unit: int | None, tensor: Tensor) -> Packed | None:
        """The name under which a tensor is packed; None if none of its memory can be released.

        Args:
            unit: the unit whose call saves the tensor, if known.

        Raises:
            UsageError: the tensor is in pages and cannot be packed by name.
        """
        is_plain = type(tensor) in _PLAIN and tensor.layout is torch.strided
        for part in (tensor,) if is_plain else _with_storage(tensor):
            if not self._views.holds(part):
                continue
            found = self._views.find(part)
            if found is None or not found[0].is_at(found[1], part.untyped_storage()):
                self._refuse(unit, tensor, found)
            if id(found[0]) in self._staying:
                continue
            if part is not tensor:
                self._refuse(unit, tensor, found)
            return found[0].name(found[1], tensor)
        return None

    def _refuse(self, unit: int | None, tensor: Tensor, found: tuple[Any, int] | None) -> NoReturn:
        if found is None and in_backward() and not inside_checkpoint():
            raise double_backward()  # the graph of the second backward saves what this one has unpacked
        where = "" if unit is None else f" in a call of {self._stores[unit].unit.name or 'the root module'}"
        what = "bytes in pages" if found is None else found[0].layout.slots[found[1]].spec.name
        raise UsageError(
            f"autograd saves a tensor of shape {tuple(tensor.shape)} ({type(tensor).__name__}, "
            f"{tensor.layout}){where} that is a view of {what}, made in an earlier call or of a part of another "
            "tensor, and the weight's pages are released before the backward reads it; make the view in the "
            "forward that uses it, or compute with a copy (`weight.clone()`)"
        )

    @torch.compiler.disable
    def _pack(
        self, unit: int | None, outer: tuple[Any, Any] | None, offload: Offload | None, tensor: Tensor
    ) -> Packed | SavedView | _PackedByOthers | _LeftInPlace:
        if self.releases_parameters:
            packed = self._pack_by_name(unit, tensor)
            if packed is not None:
                return packed
        if outer is not None:
            return _PackedByOthers(outer[0](tensor), outer[1])
        # Detached: a saved output would keep its own node, and the graph up to it, alive in a cycle where no backward
        # comes (a step that fails or is skipped).
        kept = tensor if offload is None else offload.pack(tensor)
        return kept if isinstance(kept, SavedView) else _LeftInPlace(tensor.detach(), version_of(tensor))

    @torch.compiler.disable
    def _unpack(self, saved: Packed | SavedView | _PackedByOthers | _LeftInPlace) -> Tensor:
        if isinstance(saved, _LeftInPlace):
            if version_of(saved.tensor) != saved.version:
                refuse_changed(saved.tensor, saved.version)
            return saved.tensor
        if isinstance(saved, SavedView):
            assert self._offload is not None  # only `offload` makes a SavedView
            return self._offload.unpack(saved)
        if isinstance(saved, _PackedByOthers):
            return saved.unpack(saved.packed)
        if self._closed:
            raise UsageError(
                f"a backward pass needs {saved.name} for a forward before pages were laid out again (parameters were "
                f"unfrozen, added or moved to other groups of an optimizer), or before the run ended; compute that forward "
                f"again, and then its backward"
            )
        unit = saved.binding.layout.unit
        if self._executor.refcounts.suspended(unit):
            with self._stream.entered():
                self._executor.resume_backward(unit)
        # Without a reference the next fetch may release the unit before autograd has computed with this tensor.
        passing = not self._executor.note_saved_read(unit)
        if not self._stores[unit].live:
            with self._stream.entered():
                self._executor.require(unit)
        return saved.binding.unpack(saved, copied=passing)


def _with_storage(tensor: Tensor) -> Iterator[Tensor]:
    """The tensor, or those of its components that have memory of their own."""
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
        version: the tensor's version in the forward, to be named in the message.
    """
    versions = "" if version is None else f" (version {version_of(tensor)}, not {version})"
    raise UsageError(
        f"a tensor of shape {tuple(tensor.shape)} that the backward pass needs was changed in place after the "
        f"forward{versions}, so gradients would be wrong; change a clone of it, "
        f"or, if it goes into a unit whose forward is recomputed, set recompute='none'"
    )
