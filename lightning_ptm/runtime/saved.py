"""Parameters that autograd saves are named instead of kept, so that their pages may be released (design section 4).

Owns the hooks on saved tensors that are in force during forward calls. Decides nothing about when pages move.

I1: between `begin` and `end` a saved tensor that is a view of a flat of the unit, or of a unit whose call is around it,
is packed as (unit, flat, offset, shape, stride) and read from whatever pages the flat has when backward wants it.
I2: others' hooks on saved tensors keep their effect: what is no parameter of ours is handed on to the hooks around ours.
I3: with `activations="host"`, what else a call of a unit saves is handed to runtime/offload.py, unless hooks of others are
in force. The root's own calls keep theirs: the loss and its logits are read first in the backward.
I4: nothing is named inside a non-reentrant checkpoint: it keeps nothing of its forward, and counts what is saved, so the
recomputed forward must save the same.
I5: what is saved is used as it was: torch, which looks for changes in place where there are no hooks, asks nothing of what
hooks have packed.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from lightning_ptm.errors import InternalError, UsageError
from lightning_ptm.memory.streams import ComputeStream
from lightning_ptm.runtime.binding import Packed
from lightning_ptm.runtime.executor import Executor
from lightning_ptm.runtime.offload import Offload, SavedView
from lightning_ptm.runtime.store import FlatStore, UnitStore

_CHECKPOINT = checkpoint.__module__


def _hooks_in_force() -> tuple[Any, Any] | None:
    """The pair (pack, unpack) that autograd calls now."""
    return torch._C._autograd._top_saved_tensors_default_hooks(True)


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


@dataclasses.dataclass(frozen=True, slots=True)
class _Scope:
    """Our hooks of one call: `flats` are those of its unit and of the calls around it, `outer` is the next pair of others."""

    unit: int
    context: torch.autograd.graph.saved_tensors_hooks
    pack: Callable[[Tensor], Any]
    offloads: bool
    flats: tuple[FlatStore, ...]
    outer: tuple[Any, Any] | None


class SavedTensors:
    """The hooks of one engine on saved tensors.

    Args:
        stores: by unit.
        executor: makes a unit live when backward reads it.
        stream: of the run.
        offload: takes activations to RAM; None: they stay.
    """

    def __init__(
        self, stores: Sequence[UnitStore], executor: Executor, stream: ComputeStream, offload: Offload | None = None
    ) -> None:
        self._stores = stores
        self._stream = stream
        self._executor = executor
        self._offload = offload
        self._any_to_name = any(not flat.resident for store in stores for flat in store.flats)
        self._scopes: list[_Scope] = []

    @property
    def any_to_name(self) -> bool:
        """Whether any parameter is ever released."""
        return self._any_to_name

    def hooks_in(self, unit: int) -> bool:
        """Whether there is anything to do for calls of a unit."""
        return self._offload is not None or not self._stores[unit].resident

    def begin(self, unit: int) -> None:
        """A call that uses a unit's parameters starts; `end` must follow in the reverse order."""
        flats = tuple(flat for flat in self._stores[unit].flats if not flat.resident)
        outer = _hooks_in_force()
        around = self._scopes[-1] if self._scopes else None
        if around is not None and outer is not None and outer[0] is around.pack:
            flats, outer = flats + around.flats, around.outer
        offload = self._offload if unit != 0 else None
        pack = partial(self._pack, flats, outer, offload)
        context = torch.autograd.graph.saved_tensors_hooks(pack, self._unpack)
        scope = _Scope(unit, context, pack, offload is not None, flats, outer)
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

    def _pack(
        self, flats: Sequence[FlatStore], outer: tuple[Any, Any] | None, offload: Offload | None, tensor: Tensor
    ) -> Packed | SavedView | _HandedOn | _Kept:
        for flat in flats:
            packed = flat.binding.pack(tensor)
            if packed is not None:
                return packed
        if outer is not None:
            return _HandedOn(outer[0](tensor), outer[1])
        # Not `tensor` itself: an output that its own node keeps, with the node behind it, would never be freed where no
        # backward comes (a step that fails, or that is left out).
        kept = tensor if offload is None else offload.pack(tensor)
        return kept if isinstance(kept, SavedView) else _Kept(tensor.detach(), tensor._version)

    def _unpack(self, saved: Packed | SavedView | _HandedOn | _Kept) -> Tensor:
        if isinstance(saved, _Kept):
            if saved.tensor._version != saved.version:
                _refuse_changed(saved)
            return saved.tensor
        if isinstance(saved, SavedView):
            assert self._offload is not None  # it has packed this
            return self._offload.unpack(saved)
        if isinstance(saved, _HandedOn):
            return saved.unpack(saved.packed)
        store = self._stores[saved.unit]
        self._executor.saved_is_read(saved.unit)
        if not store.live:
            with self._stream.entered():
                self._executor.require(saved.unit)
        for flat in store.flats:
            if flat.layout.index == saved.flat:
                return flat.binding.unpack(saved)
        raise InternalError(f"unit {saved.unit} has no flat {saved.flat}, of which a tensor was saved")


def _refuse_changed(saved: _Kept) -> NoReturn:
    raise UsageError(
        f"a tensor of shape {tuple(saved.tensor.shape)} that the backward pass needs was changed in place after the "
        f"forward (version {saved.tensor._version}, not {saved.version}), so gradients would be wrong; change a clone of it, "
        f"or, if it goes into a unit whose forward is recomputed, set recompute='none'"
    )
