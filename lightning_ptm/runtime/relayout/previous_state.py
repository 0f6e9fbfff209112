"""Model states of an engine that has ended, in its pages, until the next engine has copied them through a few buffers.

Owns the old pages from `Engine.hand_on` to `close`; they are only read, and their RAM is freed after the last read.

I1: elements keep their bits. Each is read once, in the order in which it is needed, ahead of the writes.
I2: no second copy: old pages in RAM are freed as they are read, and tensors on disk that the new layout has in the same
    form stay where they are (reused_tensors.py).
I3: parameters are referred to by id, without a reference.
I4: ranks exchange elements in rounds of at most a page to and from each rank (planning/reshard_moves.py); all ranks that
    share a flat take part in each round.
"""

from __future__ import annotations

import contextlib
import dataclasses
import heapq
import itertools
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from functools import reduce
from operator import itemgetter
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.optim import Optimizer

from lightning_ptm.errors import InternalError
from lightning_ptm.memory.paged_tensor import PagedTensor
from lightning_ptm.planning.reshard_moves import Move, ShardRange, moves, rounds
from lightning_ptm.progress import Seen, unseen
from lightning_ptm.runtime.relayout.gathered_flats import GatheredFlats, ShardMap, geometry
from lightning_ptm.runtime.tensors import page_io
from lightning_ptm.runtime.tensors.parts import put_together
from lightning_ptm.terms import Tier

if TYPE_CHECKING:
    from lightning_ptm.comm import Communicator, Communicators
    from lightning_ptm.planning.mesh import Axis
    from lightning_ptm.planning.tensor_slices import TensorSlice
    from lightning_ptm.runtime.tensors.page_io import PageIO
    from lightning_ptm.runtime.units.binding import FlatBinding
    from lightning_ptm.runtime.units.store import FlatStore, UnitStore
    from lightning_ptm.runtime.updates.optimizer_groups import FlatUpdate
    from lightning_ptm.update.flat_states import StateLayout


class Resharder:
    """Reads elements of old pages in the order of a new layout, and exchanges them between ranks.

    Args:
        pages: reads the old pages.
    """

    def __init__(self, pages: PageIO) -> None:
        self._pages = pages
        self.irreversible = False
        """Whether some old pages were freed, so that the previous layout cannot be restored."""
        self.moved_bytes = 0
        """Bytes that this rank has read from old pages."""
        self.sent_bytes = 0
        """Bytes that this rank has sent to other ranks."""

    def reshard(
        self,
        wanted: Iterable[ShardRange],
        sources: Mapping[int, ShardMap],
        communicator: Communicator,
        *,
        last_read: bool = False,
    ) -> Iterator[tuple[int, Tensor]]:
        """Yields (offset in this rank's new shard, elements), ascending. Each tensor is valid until the next is
        requested. Collective if any of the elements come from another rank.

        Args:
            wanted: ranges of all ranks that share the flat, in the order of each new shard; ranges without a source are
                left out.
            sources: by id of parameter.
            communicator: of the ranks that share the flat.
            last_read: this is the last read: free RAM after it.
        """
        kinds = {id(held): held for held in sources.values()}
        there = {kind: held.of_parameters() for kind, held in kinds.items()}
        planned = list(moves(wanted, {key: there[id(held)].get(key, []) for key, held in sources.items()}))
        if all(move.local for move in planned):
            own = [move for move in planned if move.target == communicator.rank]
            for move, done, part in self._read(own, sources, last_read=last_read):
                yield move.to + done, part
            return
        for held in kinds.values():
            if len(held.ranks) != communicator.world_size:
                raise InternalError(
                    f"flat {held.flat.unit}/{held.flat.index} was shared by {len(held.ranks)} ranks, and the new flat is "
                    f"shared by {communicator.world_size}"
                )
        yield from self._exchanged(planned, sources, communicator, last_read=last_read)

    def whole(self, source: ShardMap, key: int, communicator: Communicator) -> Tensor:
        """Returns all elements of one tensor of a parameter, in its shape and strides, in new memory; of a slice, the
        slice. Collective if other ranks have some of them."""
        numel = sum(each.numel for each in source.of_parameters().get(key, ()))  # an empty parameter has no ranges
        found = torch.empty(numel, dtype=source.dtype)
        wanted = [ShardRange(key, 0, numel, rank, 0) for rank in range(communicator.world_size)]
        for start, part in self.reshard(wanted, {key: source}, communicator):
            found[start : start + part.numel()].copy_(part)
        shape, stride = source.shape(key), source.stride(key)
        return found.view(shape) if stride is None else found.as_strided(shape, stride)

    def _read(
        self, own: Sequence[Move], sources: Mapping[int, ShardMap], *, last_read: bool
    ) -> Iterator[tuple[Move, int, Tensor]]:
        """Yields (move, elements of it that were yielded before, elements) for moves from this rank, in their order."""
        tensors = {id(held): page_io.in_pages(held.here()) for move in own for held in (sources[move.parameter],)}
        with self._pages.buffers(list(tensors.values())) as buffers:
            for _, group in itertools.groupby(own, key=lambda move: id(sources[move.parameter])):
                found = list(group)
                yield from self._read_one(found, sources[found[0].parameter], buffers, last_read=last_read)

    def _read_one(
        self, own: Sequence[Move], held: ShardMap, buffers: page_io.PageIOBuffers, *, last_read: bool
    ) -> Iterator[tuple[Move, int, Tensor]]:
        tensor = held.here()
        step = self._pages.step_of(tensor)
        cells = [
            start
            for start, _ in itertools.groupby(
                cell for move in own for cell in range(move.place // step * step, move.place + move.numel, step)
            )
        ]
        stretches = [(start, min(step, tensor.numel - start)) for start in cells]
        with contextlib.closing(self._pages.stream(tensor, stretches, buffers)) as reading:
            start, cell = next(reading, (-1, torch.empty(0)))
            for move in own:
                done = 0
                while done < move.numel:
                    place = move.place + done
                    if not start <= place < start + step:
                        start, cell = next(reading)
                    part = cell[place - start : move.place + move.numel - start]
                    self.moved_bytes += part.nbytes
                    yield move, done, part
                    done += part.numel()
                    if last_read:
                        self._free(tensor, place, part.numel())

    def make_irreversible(self) -> None:
        """Records that the previous layout cannot be restored."""
        self.irreversible = True

    def _free(self, tensor: page_io.Elements, start: int, numel: int) -> None:
        """Frees RAM of elements that were read for the last time. A quantized chunk that is read in parts keeps its
        RAM."""
        if not tensor.tier.addressable:
            return
        if isinstance(tensor, PagedTensor):
            self.irreversible = True
            self._pages.allocator.discard(tensor, start, numel)
        elif numel == self._pages.step_of(tensor):
            self.irreversible = True
            self._pages.allocator.discard(page_io.in_pages(tensor), *tensor.stretch(start, numel))

    def _exchanged(
        self, planned: Sequence[Move], sources: Mapping[int, ShardMap], communicator: Communicator, *, last_read: bool
    ) -> Iterator[tuple[int, Tensor]]:
        """Yields what `reshard` yields, where some elements move between ranks. Collective."""
        here = communicator.rank
        dtype = reduce(torch.promote_types, {held.dtype for held in sources.values()})
        found = list(rounds(planned, self._pages.allocator.page_size // dtype.itemsize))
        own = [move for each in found for move in each if move.source == here]
        reading = self._read(own, sources, last_read=last_read)
        with contextlib.closing(reading):  # type: ignore[type-var]
            for each in found:
                sent, received = [0] * communicator.world_size, [0] * communicator.world_size
                for move in each:
                    sent[move.target] += move.numel * dtype.itemsize if move.source == here else 0
                    received[move.source] += move.numel * dtype.itemsize if move.target == here else 0
                rows = torch.empty(sum(sent) // dtype.itemsize, dtype=dtype)
                filled = 0
                while filled < rows.numel():
                    _, _, part = next(reading)
                    rows[filled : filled + part.numel()].copy_(part)
                    filled += part.numel()
                self.sent_bytes += sum(sent) - sent[here]
                # As bytes: not every backend can send every dtype.
                out = communicator.all_to_all(rows.view(torch.uint8), sent, received).view(dtype)
                arrived = sorted(
                    (move for move in each if move.target == here), key=lambda move: (move.source, move.to)
                )
                ends = itertools.accumulate(move.numel for move in arrived)
                places = [(move.to, out[end - move.numel : end]) for move, end in zip(arrived, ends, strict=True)]
                yield from sorted(places, key=lambda place: place[0])


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
        gathered_flats: reads the engine's flats; this object owns their pages from now on.
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
        self.pages = gathered_flats.pages
        self.allocator = self.pages.allocator
        self.disk_paths = disk_paths
        self.optimizers = tuple(optimizers)
        self.flats: dict[tuple[object, ...], PreviousFlat] = {}
        """By `geometry`."""
        self.resharder = Resharder(self.pages)
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
        for store, binding, flat in gathered_flats.flats:
            self._remember_apart(gathered_flats, store, binding, flat)
            if flat is None:
                continue
            keys = tuple(map(id, binding.parameters))
            self._axes |= dict.fromkeys(keys, gathered_flats.sharing(flat).axes)
            self._precise |= dict.fromkeys(keys, gathered_flats.precise_map(flat))
            self._values |= dict.fromkeys(keys, gathered_flats.values_map(flat))
            updates = [gathered_flats.updates[flat.layout.index, number] for number in flat.layout.optimizers]
            for update in updates:
                known = scalars[flat.layout.index, update.optimizer]
                for name in update.states.everywhere:
                    held, names = gathered_flats.states_map(update, name), update.states.state_names
                    kept = [key for slot, key in enumerate(keys) if known[slot] is not None and name in names(slot)]
                    self._states.setdefault((update.optimizer, name), {}).update(dict.fromkeys(kept, held))
            states = {
                (update.optimizer, name): (tensor, update.states.layouts[name])
                for update in updates
                for name, tensor in update.states.slots.items()
            }
            self.flats[geometry(flat.layout, keys)] = PreviousFlat(flat.home, gathered_flats.master(flat), states)

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
        return sum(tensor.nbytes for tensor in self.tensors() if self.allocator.discards(tensor.tier))

    def bytes_on_disk(self) -> int:
        """Bytes on disk that new pages reuse or replace."""
        return self.allocator.capacity_bytes(Tier.DISK)

    def free_all_but_states(self) -> None:
        """Frees all pages but those of the states. Called when the old engine has ended."""
        self.allocator.retire(self.tensors())
        self.pages.keep_buffers()

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

    def write_precise(self, target: ShardMap, flat: FlatStore, pages: PageIO, seen: Seen) -> None:
        """Writes master weights of a flat. Parameters that are not in the old pages keep what new pages have."""
        here = set(target.keys)
        originals = {key: original for key, original in self._originals.items() if key in here}
        sources = {key: self._precise[key] for key in here - originals.keys() if key in self._precise}
        keep = len(sources) + len(originals) < len(here)
        self._write(target, sources, originals, flat, pages, keep=keep, seen=seen)

    def write_values(self, target: ShardMap, flat: FlatStore, pages: PageIO, seen: Seen) -> None:
        """Writes compute parameters of a flat. Called after `write_precise`, as it frees the old pages that it reads."""
        known = {id(each) for each in flat.binding.parameters if each in self}
        # Rounding the precise value again could give other bits.
        sources = {key: held for key in known if (held := self._values[key]).dtype is target.dtype}
        originals = {
            key: original for key in known - sources.keys() if (original := self._originals.get(key)) is not None
        }
        sources |= {key: self._precise[key] for key in known - sources.keys() - originals.keys()}
        keep = len(known) < len(target.keys)
        self._write(target, sources, originals, flat, pages, keep=keep, last_read=True, seen=seen)

    def write_states(
        self, target: ShardMap, update: FlatUpdate, name: str, before: int, pages: PageIO, seen: Seen
    ) -> None:
        """Writes one kind of states of a flat. If the old pages have none for any parameter, the new pages keep their
        initial states, as at the start of a run; else parameters without old states get 0.

        Args:
            before: the optimizer's number in the previous engine.
        """
        known, names = self._states.get((before, name), {}), update.states.state_names
        sources = {key: known[key] for slot, key in enumerate(target.keys) if key in known and name in names(slot)}
        if sources:
            self._write(target, sources, {}, update.store, pages, last_read=True, seen=seen)

    def _write(
        self,
        target: ShardMap,
        sources: Mapping[int, ShardMap],
        tensors: Mapping[int, Tensor],
        flat: FlatStore,
        pages: PageIO,
        *,
        keep: bool = False,
        last_read: bool = False,
        seen: Seen = unseen,
    ) -> None:
        """Writes one tensor of a flat from old pages and from tensors.

        Args:
            target: the new elements, and where those of other ranks are.
            sources: by id of parameter, the old pages that have its elements.
            tensors: by id of parameter, values that are in no pages.
            pages: writes the new elements.
            keep: elements in neither keep what new pages have; else they get 0.
        """
        communicator, tensors = flat.communicator, dict(tensors)
        for key, held in sources.items():  # stored in another order or shape than in the new pages
            if held.stride(key) != target.stride(key) or held.shape(key) != target.shape(key):
                tensors[key] = self.resharder.whole(held, key, communicator)
        sources = {key: held for key, held in sources.items() if key not in tensors}
        moved = self.resharder.reshard(list(target.stretches()), sources, communicator, last_read=last_read)
        if target.elements is None:
            for _ in moved:
                raise InternalError("elements were sent to a rank that owns none of them")
            return
        arrangement = flat.binding.arrangement
        given = [
            value
            if value is None
            else value.reshape(-1)
            if target.own is not None
            else arrangement.in_order(slot, value)
            for slot, value in enumerate(map(tensors.get, target.keys))
        ]
        step = pages.step_of(target.elements)
        others = page_io.of_tensors(target.segments(communicator.rank), given, step=step)
        pages.write(target.elements, heapq.merge(moved, others, key=itemgetter(0)), keep=keep, seen=seen)

    def close(self) -> None:
        """Frees the old pages, in all tiers."""
        self.allocator.close()
