"""Full values of a run's flats, gathered from the shards of all ranks, and maps of where their elements are.

A `ShardMap` says which ranges of which parameters are where in one tensor of a flat, on every rank that shares the flat.
The tensor holds compute parameters, master weights, or optimizer states of one name. Saving, loading and re-layout move
elements by it. `GatheredFlats` returns the maps of a run, and gathers flats one at a time, so that no more than one unit
exists whole in addition to the pages. Owns nothing.

I1: a rank that does not hold a unit (an expert of another rank) gets its values from the first rank that holds it;
slices of tensor parallelism come from the first rank that holds the same slice. Every method that returns full values
is collective.
I2: the precise value of a parameter is its master weight where there is one, else its compute parameter.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from lightning_ptm.errors import InternalError
from lightning_ptm.planning.layout import FlatLayout, ParameterSpec
from lightning_ptm.planning.reshard_moves import ShardRange
from lightning_ptm.runtime.tensors.page_io import Elements, PageIO
from lightning_ptm.runtime.units.store import FlatStore, UnitStore
from lightning_ptm.update.flat_states import Segment, shard_segments

if TYPE_CHECKING:
    from lightning_ptm.comm import Communicator, Communicators
    from lightning_ptm.memory.allocator import Allocator
    from lightning_ptm.memory.paged_tensor import PagedTensor
    from lightning_ptm.planning.sharding import ModelSharding, ShardGroup
    from lightning_ptm.runtime.units.binding import FlatBinding
    from lightning_ptm.runtime.updates.optimizer_groups import FlatUpdate
    from lightning_ptm.update.flat_states import OwnShapes


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class ShardMap:
    """The place of each parameter in one tensor of a flat.

    Attributes:
        flat: the layout, as this rank has it.
        ranks: the ranks that share it, in the order of their pieces.
        keys: by slot, the id of the parameter.
        dtype: dtype of the elements.
        elements: this rank's shard; None if it has no elements.
        own: shapes of states whose shapes differ from the parameters'.
    """

    flat: FlatLayout
    ranks: tuple[int, ...]
    keys: tuple[int, ...]
    dtype: torch.dtype
    elements: Elements | None
    own: OwnShapes | None = None

    def segments(self, rank: int) -> Sequence[Segment]:
        """Returns the ranges of parameters in the shard of a rank; `rank` is its index among those that share the
        flat."""
        flat, own = self.flat.of(rank), self.own
        if own is None:
            return shard_segments(flat, rank)
        return [
            Segment(place, own.starts[place] - own.shares[rank], 0, math.prod(shape), ragged=False)
            for place, _ in flat.whole_slots()
            if (shape := own.shapes[place]) is not None
        ]

    def specs(self) -> list[ParameterSpec]:
        """Returns the flat's parameters, with the shapes of the elements in this tensor."""
        found, own = [slot.spec for slot in self.flat.slots], self.own
        if own is None:
            return found
        return [
            spec if shape is None else dataclasses.replace(spec, shape=shape)
            for spec, shape in zip(found, own.shapes, strict=True)
        ]

    def stretches(self) -> Iterator[ShardRange]:
        """Yields the ranges of all ranks, rank by rank, in the order of each shard."""
        for rank in range(len(self.ranks)):
            for each in self.segments(rank):
                yield ShardRange(self.keys[each.parameter], each.parameter_start, each.numel, rank, each.start)

    def of_parameters(self) -> dict[int, list[ShardRange]]:
        """Returns the ranges of each parameter, in its order, by key."""
        found: dict[int, list[ShardRange]] = {}
        for each in self.stretches():
            found.setdefault(each.parameter, []).append(each)
        for stretches in found.values():
            stretches.sort(key=lambda each: each.first)
        return found

    def shape(self, key: int) -> tuple[int, ...]:
        """Returns the shape of the states of a parameter (or of its slice), as the ranks that share the flat have
        it."""
        place = self.keys.index(key)
        own = None if self.own is None else self.own.shapes[place]
        return self.flat.slots[place].spec.shape if own is None else own

    def stride(self, key: int) -> tuple[int, ...] | None:
        """Returns the strides of a parameter whose elements are not stored row by row; None for one stored row by
        row."""
        return None if self.own is not None else self.flat.slots[self.keys.index(key)].spec.stride

    def here(self) -> Elements:
        """Returns this rank's elements, which other ranks or the new layout need."""
        if self.elements is None:
            raise InternalError(
                f"flat {self.flat.unit}/{self.flat.index} has no elements on this rank, and some are to be moved from "
                "it"
            )
        return self.elements


def geometry(flat: FlatLayout, keys: Sequence[int]) -> tuple[object, ...]:
    """Returns what two flats have in common if their shards hold the same elements at the same offsets on every
    rank."""
    slots = tuple([(slot.start, slot.numel, slot.spec.stride, slot.spec.box) for slot in flat.slots])
    pieces = (flat.world_size, flat.piece_numel, flat.stripes, flat.tail_piece_numel, flat.shares, flat.rank)
    return tuple(keys), slots, pieces, flat.dtype, flat.code


class GatheredFlats:
    """Reads flats of a run whole. The engine has drained all updates before each call.

    Args:
        stores: the stores of all units.
        flats: the updates of each unit's flats.
        holders: which ranks share each flat.
    """

    def __init__(
        self,
        allocator: Allocator,
        communicators: Communicators,
        stores: Sequence[UnitStore],
        flats: Sequence[Sequence[FlatUpdate]],
        holders: ModelSharding,
    ) -> None:
        self.pages = PageIO(allocator)
        self.communicator = communicators.world
        self.stores = stores
        self.holders = holders
        self._sharing = {flat.layout.index: holders.of_flat(flat.layout) for store in stores for flat in store.flats}
        self.updates = {(flat.store.layout.index, flat.optimizer): flat for unit in flats for flat in unit}
        """By index of the flat and number of the optimizer."""
        self._with_same_parts = communicators.along(holders.common.parts.axes)
        self._first = {flat: self.updates[flat, number] for flat, number in reversed(self.updates)}
        self.flats = tuple([(store, *each) for store in stores for each in flats_of(store)])
        """Flats of all units in order, on every rank; FlatStore is None for flats that this rank does not share."""
        self.bindings = tuple([binding for _, binding, _ in self.flats])

    # -- contents -----------------------------------------------------------------------------------------------------

    def names(self) -> list[tuple[str, nn.Parameter]]:
        """Returns (name, parameter) of every parameter, each once."""
        return [
            (slot.spec.name, parameter)
            for binding in self.bindings
            for slot, parameter in zip(binding.layout.slots, binding.parameters, strict=True)
        ]

    def shapes(self) -> dict[int, tuple[int, ...]]:
        """Returns the shape that each parameter has in checkpoints, by id of the parameter."""
        return {
            id(parameter): slot.spec.whole_shape
            for binding in self.bindings
            for slot, parameter in zip(binding.layout.slots, binding.parameters, strict=True)
        }

    def update_of(self, flat: FlatStore) -> FlatUpdate | None:
        """Returns the update of a flat's first optimizer (others have the same master weights and segments); None if
        the flat is frozen."""
        return self._first.get(flat.layout.index)

    def master(self, flat: FlatStore) -> PagedTensor | None:
        update = self.update_of(flat)
        return update.states.master if update is not None else None

    def precise_home(self, flat: FlatStore) -> Elements:
        """Returns this rank's elements of a flat's precise values (I2)."""
        return self.master(flat) or flat.values

    def bytes_of_homes(self, flat: FlatStore) -> int:
        """Returns the bytes that a flat's parameters and master weights take in this rank's pages."""
        master = self.master(flat)
        return flat.values.nbytes + (0 if master is None else master.nbytes)

    # -- maps ---------------------------------------------------------------------------------------------------------

    def precise_map(self, flat: FlatStore) -> ShardMap:
        """Returns the map of a flat's precise values (I2)."""
        home = self.precise_home(flat)
        return self._map(flat, home, home.dtype)

    def values_map(self, flat: FlatStore) -> ShardMap:
        """Returns the map of a flat's compute parameters."""
        return self._map(flat, flat.values, flat.values.dtype)

    def states_map(self, update: FlatUpdate, name: str) -> ShardMap:
        """Returns the map of the optimizer states of one name of a flat."""
        states = update.states
        elements = states.elements(name) if name in states.slots else None
        return self._map(update.store, elements, states.dtype_of(name), states.everywhere[name].own)

    def _map(
        self, flat: FlatStore, elements: Elements | None, dtype: torch.dtype, own: OwnShapes | None = None
    ) -> ShardMap:
        keys = tuple(map(id, flat.binding.parameters))
        return ShardMap(flat.layout, self.sharing(flat).ranks, keys, dtype, elements, own)

    def sharing(self, flat: FlatStore) -> ShardGroup:
        """Returns the ranks that share a flat."""
        return self._sharing[flat.layout.index]

    # -- broadcasts ---------------------------------------------------------------------------------------------------

    def broadcast_group(self, flat: FlatLayout) -> Communicator:
        """Returns the communicator in which the first rank's values of a flat are broadcast (I1): of all ranks, or of
        those that have the same slices."""
        return self._with_same_parts if flat.parts > 1 else self.communicator

    def source(self, store: UnitStore) -> int | None:
        """Returns the rank that broadcasts a unit's values to all others; None for a unit that all ranks hold."""
        sharing = self.holders.by_unit.get(store.unit.index)
        return None if sharing is None else sharing.whole.ranks[0]

    def broadcast(self, store: UnitStore, binding: FlatBinding, whole: Tensor | None) -> Tensor:
        """Broadcasts values of a flat, (padded_numel,), from ranks that hold it to the others (I1). Returns them."""
        source = self.source(store)
        if source is None:
            assert whole is not None
            return whole
        communicator = self.broadcast_group(binding.layout)
        if binding.layout.parts > 1:
            source = self.holders.common.parts.ranks.index(source)  # the same index in the group of each slice
        dtype = communicator.broadcast_object(None if whole is None else whole.dtype, source)
        ours = whole is not None and communicator.rank == source
        values = whole if ours and whole is not None else torch.empty(binding.layout.padded_numel, dtype=dtype)
        communicator.broadcast(values, source)
        return values

    # -- values -------------------------------------------------------------------------------------------------------

    def whole(self, flat: FlatStore, held: ShardMap) -> Tensor:
        """Returns all elements of a tensor of a flat from the shards of all ranks, on the CPU: (padded_numel,), or those of
        states whose shapes differ from the parameters'."""
        if not flat.layout.shared:
            return self.read(held.here())
        device = flat.binding.device  # where the collectives' backend works
        shard = None if held.elements is None else self.read(held.elements)
        if held.own is None and not flat.layout.shares:
            assert shard is not None
            return _gathered(flat, shard, device)
        shard = None if shard is None else shard.to(device)
        if held.own is not None:
            full = torch.empty(held.own.shares[-1], dtype=held.dtype, device=device)
            flat.communicator.gather_shares(shard, full, held.own.shares).wait()
        else:
            assert shard is not None
            full = torch.empty(flat.layout.padded_numel, dtype=shard.dtype, device=device)
            flat.communicator.all_gather(shard, full, flat.layout).wait()
        return full.cpu()

    def read(self, paged: Elements) -> Tensor:
        """Returns the values of paged elements, on the CPU."""
        return self.pages.read(paged)


def _gathered(flat: FlatStore, shard: Tensor, device: torch.device) -> Tensor:
    """Gathers a flat stripe by stripe: between steps and at the end of a run pages may leave the device little memory."""
    whole = torch.empty(flat.layout.padded_numel, dtype=shard.dtype)
    done = 0
    for stripe in flat.layout.each_stripe():
        ours = shard[done : done + stripe.shard_numel].to(device)
        place = whole[done * stripe.world_size :][: stripe.padded_numel]
        full = place if place.device == device else torch.empty_like(place, device=device)
        flat.communicator.all_gather(ours, full, stripe).wait()
        if full is not place:
            place.copy_(full)
        done += stripe.shard_numel
    return whole


def flats_of(store: UnitStore) -> Iterator[tuple[FlatBinding, FlatStore | None]]:
    """Yields the flats of a unit in order, on every rank; FlatStore is None for flats that this rank does not share."""
    for flat in store.flats:
        yield flat.binding, flat
    for binding in store.remote:
        yield binding, None
