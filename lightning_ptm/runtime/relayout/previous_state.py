"""Model states of an engine that has ended, in its pages, until the next engine has copied them.

Owns the old pages from `Engine.hand_on` to `close`; they are only read.

I1: elements keep their bits. I2: no second copy: old pages in RAM are freed as they are read, and tensors on disk that
the new layout has in the same form stay where they are (reused_tensors.py). I3: parameters are referred to by id,
without a reference.
"""

from __future__ import annotations

import dataclasses
import heapq
from collections.abc import Collection, Iterator, Mapping, Sequence
from operator import itemgetter
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.optim import Optimizer

from lightning_ptm.errors import InternalError
from lightning_ptm.memory.paged_tensor import PagedTensor
from lightning_ptm.progress import Seen, unseen
from lightning_ptm.runtime.relayout.reshard import Resharder
from lightning_ptm.runtime.relayout.shard_map import ShardMap, geometry
from lightning_ptm.runtime.tensors import page_io
from lightning_ptm.runtime.tensors.parts import put_together
from lightning_ptm.terms import Tier

if TYPE_CHECKING:
    from lightning_ptm.comm import Communicator, Communicators
    from lightning_ptm.memory.allocator import Allocator
    from lightning_ptm.planning.sharding import Axis
    from lightning_ptm.planning.tensor_slices import TensorSlice
    from lightning_ptm.runtime.relayout.gathered_flats import GatheredFlats
    from lightning_ptm.runtime.units.binding import FlatBinding
    from lightning_ptm.runtime.units.store import FlatStore, UnitStore
    from lightning_ptm.runtime.updates.optimizer_groups import FlatUpdate
    from lightning_ptm.update.state_layout import StateLayout


@dataclasses.dataclass(frozen=True, slots=True)
class PreviousFlat:
    """Pages of a flat of the previous engine.

    Attributes:
        home: compute parameters.
        master: master weights.
        states: optimizer states and their layouts, by (number of the optimizer, name).
    """

    home: PagedTensor
    master: PagedTensor | None
    states: Mapping[tuple[int, str], tuple[PagedTensor, StateLayout]]


class PreviousState:
    """The pages of an engine that has drained all updates and is about to close. Collective where ranks own whole
    parameters.

    Args:
        gathered_flats: reads the engine's flats; this object owns its allocator from now on.
        optimizers: the engine's, in the order of their numbers.
        scalars: states that are not element-wise, by (flat, optimizer).
        originals: values before they were rounded to compute precision, by id of parameter.
        of_files: ids of frozen parameters whose values equal those of the files that provided them.
        disk_paths: folders of the engine's disk tier.
    """

    def __init__(
        self,
        gathered_flats: GatheredFlats,
        *,
        optimizers: Sequence[Optimizer],
        scalars: Mapping[tuple[int, int], Sequence[object | None]],
        originals: dict[int, Tensor],
        of_files: Collection[int],
        disk_paths: tuple[Path, ...],
    ) -> None:
        self.allocator = gathered_flats.allocator
        self.disk_paths = disk_paths
        self.optimizers = tuple(optimizers)
        self.flats: dict[tuple[object, ...], PreviousFlat] = {}
        """By geometry (`shard_map.geometry`)."""
        self.resharder = Resharder(self.allocator)
        self._values: dict[int, ShardMap] = {}
        self._precise: dict[int, ShardMap] = {}
        self._states: dict[tuple[int, str], dict[int, ShardMap]] = {}
        self._originals = originals
        self.of_files = frozenset(of_files)
        self._axes: dict[int, tuple[Axis, ...]] = {}
        """By id of a parameter, the axes along which the ranks that share it are counted."""
        self._boxes: dict[int, TensorSlice] = {}
        self._apart: dict[int, tuple[int, torch.dtype, tuple[int, ...]]] = {}
        """By id of a parameter that not all ranks hold: the rank that broadcasts it, its dtype and its shape."""
        for store, binding, flat in gathered_flats.flats():
            self._remember_apart(gathered_flats, store, binding, flat)
            if flat is None:
                continue
            keys = tuple(map(id, binding.parameters))
            sharing = gathered_flats.holders.of_flat(flat.layout)
            ranks = sharing.ranks
            self._axes |= dict.fromkeys(keys, sharing.axes)
            home, master = gathered_flats.precise_home(flat), gathered_flats.master(flat)
            precise = ShardMap(flat.layout, ranks, keys, home.dtype, home)
            rounded = ShardMap(flat.layout, ranks, keys, flat.values.dtype, flat.values)
            self._precise |= dict.fromkeys(keys, precise)
            self._values |= dict.fromkeys(keys, rounded)
            updates = [gathered_flats.updates[flat.layout.index, number] for number in flat.layout.optimizers]
            for update in updates:
                known = scalars[flat.layout.index, update.optimizer]
                self._remember(update, keys, ranks, [each is not None for each in known])
            states = {
                (update.optimizer, name): (tensor, update.states.layouts[name])
                for update in updates
                for name, tensor in update.states.slots.items()
            }
            self.flats[geometry(flat.layout, keys)] = PreviousFlat(flat.home, master, states)

    def _remember_apart(
        self, gathered_flats: GatheredFlats, store: UnitStore, binding: FlatBinding, flat: FlatStore | None
    ) -> None:
        """Records which rank broadcasts a flat's parameters. Collective where not all ranks hold a unit."""
        boxes = zip(binding.parameters, binding.arrangement.boxes, strict=True)
        self._boxes |= {id(parameter): box for parameter, box in boxes if box is not None}
        source = gathered_flats.source(store)
        if source is not None:
            ours = None if flat is None else gathered_flats.precise_home(flat).dtype
            dtype = gathered_flats.communicator.broadcast_object(ours, source)
            shapes = {
                id(each): slot.spec.shape for each, slot in zip(binding.parameters, binding.layout.slots, strict=True)
            }
            self._apart |= {key: (source, dtype, shape) for key, shape in shapes.items()}

    def _remember(
        self, update: FlatUpdate, keys: tuple[int, ...], ranks: tuple[int, ...], updated: Sequence[bool]
    ) -> None:
        states, layout = update.states, update.store.layout
        for name, where in states.everywhere.items():
            elements = states.elements(name) if name in states.slots else None
            held = ShardMap(layout, ranks, keys, states.dtype_of(name), elements, where.own)
            kept = [key for slot, key in enumerate(keys) if updated[slot] and name in states.state_names(slot)]
            self._states.setdefault((update.optimizer, name), {}).update(dict.fromkeys(kept, held))

    # -- contents -----------------------------------------------------------------------------------------------------

    def __contains__(self, parameter: object) -> bool:
        """Returns whether pages have the parameter's values, on this or other ranks; the same on all ranks."""
        return id(parameter) in self._precise or id(parameter) in self._apart

    def dtype(self, key: int) -> torch.dtype:
        """Returns the dtype of a parameter's precise values."""
        original = self._originals.get(key)
        if original is not None:
            return original.dtype
        return self._precise[key].dtype if key in self._precise else self._apart[key][1]

    def tensors(self) -> list[PagedTensor]:
        """Returns all paged tensors of the previous engine's states."""
        found = [flat.home for flat in self.flats.values()]
        for flat in self.flats.values():
            found += [] if flat.master is None else [flat.master]
            found += [tensor for tensor, _ in flat.states.values()]
        return found

    def bytes_in_memory(self) -> int:
        """Bytes in RAM that are freed while new pages are written."""
        return sum(tensor.nbytes for tensor in self.tensors() if tensor.tier.addressable)

    def bytes_on_disk(self) -> int:
        """Bytes on disk that new pages reuse or replace."""
        return self.allocator.capacity_bytes(Tier.DISK)

    def free_all_but_states(self) -> None:
        """Frees all pages but those of the states. Called when the old engine has ended."""
        self.allocator.discard_all_but(self.tensors())

    # -- writing new pages --------------------------------------------------------------------------------------------

    def original(self, key: int) -> Tensor | None:
        """Returns the user's own tensor, if pages did not have the precise value."""
        return self._originals.get(key)

    def forget_originals(self, keys: Collection[int]) -> None:
        """Forgets original tensors whose values are in new pages."""
        for key in keys:
            if self._originals.pop(key, None) is not None:
                self.resharder.make_irreversible()

    def precise(self, key: int, communicator: Communicator) -> Tensor:
        """Returns a parameter's precise value (of a slice, the slice) in new memory. Collective for the ranks that
        share it."""
        original = self._originals.get(key)
        return self.resharder.whole(self._precise[key], key, communicator) if original is None else original.clone()

    def precise_everywhere(self, key: int, communicators: Communicators) -> Tensor:
        """Returns a parameter's precise, whole value on all ranks. Collective for all of them."""
        here, world = key in self._precise, communicators.world
        value = self.precise(key, communicators.along(self._axes[key])) if here else None
        if key in self._apart:
            source, dtype, shape = self._apart[key]
            value = torch.empty(shape, dtype=dtype) if value is None else value.contiguous()
            world.broadcast(value, source)
        assert value is not None
        return put_together(value, self._boxes.get(key), world)

    def write_precise(self, target: PagedTensor, flat: FlatStore, allocator: Allocator, seen: Seen) -> None:
        """Writes master weights of a flat. Parameters that are not in the old pages keep what new pages have."""
        here = {id(each) for each in flat.binding.parameters}
        originals = {key: original for key, original in self._originals.items() if key in here}
        sources = {key: self._precise[key] for key in here - originals.keys() if key in self._precise}
        keep = len(sources) + len(originals) < len(here)
        self._write(target, self._new(flat, target), sources, originals, flat, allocator, keep=keep, seen=seen)

    def write_values(self, flat: FlatStore, allocator: Allocator, seen: Seen) -> None:
        """Writes compute parameters of a flat. Called after `write_precise`, as it frees the old pages that it reads."""
        target = flat.values
        known = {id(each) for each in flat.binding.parameters if each in self}
        # Rounding the precise value again could give other bits.
        sources = {key: held for key in known if (held := self._values[key]).dtype is target.dtype}
        originals = {
            key: original for key in known - sources.keys() if (original := self._originals.get(key)) is not None
        }
        sources |= {key: self._precise[key] for key in known - sources.keys() - originals.keys()}
        keep, new = len(known) < len(flat.binding.parameters), self._new(flat, target)
        self._write(target, new, sources, originals, flat, allocator, keep=keep, last_read=True, seen=seen)

    def write_states(self, update: FlatUpdate, name: str, before: int, allocator: Allocator, seen: Seen) -> None:
        """Writes one kind of states of a flat. If the old pages have none for any parameter, the new pages keep their
        initial states, as at the start of a run; else parameters without old states get 0.

        Args:
            before: the optimizer's number in the previous engine.
        """
        flat, states = update.store, update.states
        keys = tuple(map(id, flat.binding.parameters))
        known = self._states.get((before, name), {})
        kept = {key for slot, key in enumerate(keys) if name in states.state_names(slot)}
        sources = {key: known[key] for key in keys if key in known and key in kept}
        if not sources:
            return
        target = states.elements(name) if name in states.slots else None
        ranks = next(iter(sources.values())).ranks
        new = ShardMap(flat.layout, ranks, keys, states.dtype_of(name), target, states.everywhere[name].own)
        self._write(target, new, sources, {}, flat, allocator, last_read=True, seen=seen)

    def _new(self, flat: FlatStore, target: page_io.Elements) -> ShardMap:
        ranks = (0,) * flat.communicator.world_size  # only their number is used
        return ShardMap(flat.layout, ranks, tuple(map(id, flat.binding.parameters)), target.dtype, target)

    def _write(
        self,
        target: page_io.Elements | None,
        new: ShardMap,
        sources: Mapping[int, ShardMap],
        tensors: Mapping[int, Tensor],
        flat: FlatStore,
        allocator: Allocator,
        *,
        keep: bool = False,
        last_read: bool = False,
        seen: Seen = unseen,
    ) -> None:
        """Writes one tensor of a flat from old pages and from tensors.

        Args:
            target: the new elements; None if this rank owns none.
            sources: by id of parameter, the old pages that have its elements.
            tensors: by id of parameter, values that are in no pages.
            keep: elements in neither keep what new pages have; else they get 0.
        """
        if target is not None and allocator.is_reused(page_io.in_pages(target)):
            return
        communicator, tensors = flat.communicator, dict(tensors)
        for key, held in sources.items():  # stored in another order or shape than in the new pages
            if held.stride(key) != new.stride(key) or held.shape(key) != new.shape(key):
                tensors[key] = self.resharder.whole(held, key, communicator)
        sources = {key: held for key, held in sources.items() if key not in tensors}
        wanted = list(new.stretches())
        moved = self.resharder.reshard(wanted, sources, communicator, last_read=last_read)
        if target is None:
            for _ in moved:
                raise InternalError("elements were sent to a rank that owns none of them")
            return
        step = page_io.step_of(allocator, target)
        merged = heapq.merge(moved, _of_tensors(new, tensors, communicator.rank, step, flat), key=itemgetter(0))
        page_io.lay(allocator, target, merged, keep=keep, seen=seen)

    def close(self) -> None:
        """Frees the old pages, in all tiers."""
        self.allocator.close()


def _of_tensors(
    new: ShardMap, tensors: Mapping[int, Tensor], rank: int, step: int, flat: FlatStore
) -> Iterator[tuple[int, Tensor]]:
    """Yields (offset in this rank's shard, elements) of tensors, at most `step` elements at a time."""
    slots = {key: slot for slot, key in enumerate(new.keys) if key in tensors}
    laid = {
        slot: flat.binding.arrangement.in_order(slot, tensors[key]) for key, slot in slots.items() if new.own is None
    }
    laid |= {slot: tensors[key].reshape(-1) for key, slot in slots.items() if new.own is not None}
    for segment in new.segments(rank) if laid else ():
        if segment.parameter in laid:
            elements = laid[segment.parameter].narrow(0, segment.parameter_start, segment.numel)
            for start in range(0, segment.numel, step):
                yield segment.start + start, elements[start : start + step]
