"""Flats whole: what of them lies in this rank's pages and in others', put together, and told to those who hold none of it.

Owns nothing. One flat at a time, so that no more than a unit exists whole beside the pages.

I1: what some ranks do not hold (experts that others do) they are told by the first rank that holds it; of parts, each by the
first one that holds the same part. Every method that gives whole values is collective.
I2: the precise value of a parameter is its master where there is one, else its compute parameter.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from lightning_ptm.runtime.tensors import page_io
from lightning_ptm.runtime.tensors.page_io import Elements
from lightning_ptm.runtime.units.store import FlatStore, UnitStore
from lightning_ptm.update.flat_states import Segment, shard_segments

if TYPE_CHECKING:
    from lightning_ptm.comm import Communicator, Communicators
    from lightning_ptm.memory.allocator import Allocator
    from lightning_ptm.memory.paged_tensor import PagedTensor
    from lightning_ptm.planning.layout import FlatLayout
    from lightning_ptm.planning.sharding import ModelSharding
    from lightning_ptm.runtime.units.binding import FlatBinding
    from lightning_ptm.runtime.updates.updates import FlatUpdate


class GatheredFlats:
    """Reads flats whole. The engine has drained all updates before.

    Args:
        stores: of all units.
        flats: what updates them, by unit.
        holders: who has what.
    """

    def __init__(
        self,
        allocator: Allocator,
        communicators: Communicators,
        stores: Sequence[UnitStore],
        flats: Sequence[Sequence[FlatUpdate]],
        holders: ModelSharding,
    ) -> None:
        self.allocator = allocator
        self.communicator = communicators.world
        self.stores = stores
        self.holders = holders
        self.updates = {(flat.store.layout.index, flat.optimizer): flat for unit in flats for flat in unit}
        """By flat and optimizer."""
        self._with_same_parts = communicators.along(holders.common.parts.axes)
        self._first = {flat: self.updates[flat, number] for flat, number in reversed(self.updates)}

    # -- what there is ------------------------------------------------------------------------------------------------

    def flats(self) -> Iterator[tuple[UnitStore, FlatBinding, FlatStore | None]]:
        """All flats, whoever holds them, unit by unit, in order; None in place of what this rank has no part in."""
        for store in self.stores:
            for binding, flat in flats_of(store):
                yield store, binding, flat

    def bindings(self) -> Iterator[FlatBinding]:
        return (binding for _, binding, _ in self.flats())

    def names(self) -> Iterator[tuple[str, nn.Parameter]]:
        """(name, parameter) of every parameter, each once."""
        for binding in self.bindings():
            for slot, parameter in zip(binding.layout.slots, binding.parameters, strict=True):
                yield slot.spec.name, parameter

    def shapes(self) -> dict[int, tuple[int, ...]]:
        """Of every parameter, by its id, the shape that checkpoints have."""
        return {
            id(parameter): slot.spec.whole_shape
            for binding in self.bindings()
            for slot, parameter in zip(binding.layout.slots, binding.parameters, strict=True)
        }

    def update_of(self, flat: FlatStore) -> FlatUpdate | None:
        """Of several optimizers', the first's: the others have the same master and segments. None for frozen ones."""
        return self._first.get(flat.layout.index)

    def master(self, flat: FlatStore) -> PagedTensor | None:
        update = self.update_of(flat)
        return update.states.master if update is not None else None

    def precise_home(self, flat: FlatStore) -> Elements:
        """Where this rank's precise values are (I2)."""
        return self.master(flat) or flat.values

    def bytes_of_homes(self, flat: FlatStore) -> int:
        """That the parameters take in this rank's pages."""
        master = self.master(flat)
        return flat.values.nbytes + (0 if master is None else master.nbytes)

    def segments(self, flat: FlatStore) -> Sequence[Segment]:
        """Where this rank's stretches of a flat's parameters lie in its shard."""
        update = self.update_of(flat)
        return update.states.segments if update is not None else shard_segments(flat.layout, flat.communicator.rank)

    # -- who tells whom -----------------------------------------------------------------------------------------------

    def tells(self, flat: FlatLayout) -> Communicator:
        """Of the ranks of which the first one's values count, and that tell each other (I1): all, or those that have the same
        parts."""
        return self._with_same_parts if flat.parts > 1 else self.communicator

    def source(self, store: UnitStore) -> int | None:
        """The rank that tells all others of a unit; None for one that all ranks hold."""
        sharing = self.holders.by_unit.get(store.unit.index)
        return None if sharing is None else sharing.whole.ranks[0]

    def told(self, store: UnitStore, binding: FlatBinding, whole: Tensor | None) -> Tensor:
        """Values of a flat, (padded_numel,), that those who hold it have read (I1)."""
        source = self.source(store)
        if source is None:
            assert whole is not None
            return whole
        communicator = self.tells(binding.layout)
        if binding.layout.parts > 1:
            source = self.holders.common.parts.ranks.index(source)  # of the first parts, and so of any
        dtype = communicator.broadcast_object(None if whole is None else whole.dtype, source)
        ours = whole is not None and communicator.rank == source
        told = whole if ours and whole is not None else torch.empty(binding.layout.padded_numel, dtype=dtype)
        communicator.broadcast(told, source)
        return told

    # -- values -------------------------------------------------------------------------------------------------------

    def whole(self, flat: FlatStore, paged: Elements) -> Tensor:
        """All ranks' values of a flat, of those `paged` that are here, on the CPU: (padded_numel,)."""
        shard = self.read(paged)
        if not flat.layout.shared:
            return shard
        device = flat.binding.device  # where the collectives' backend works
        full = torch.empty(flat.layout.padded_numel, dtype=shard.dtype, device=device)
        flat.communicator.all_gather(shard.to(device), full, flat.layout).wait()
        return full.cpu()

    def whole_states(self, update: FlatUpdate, name: str) -> Tensor:
        """All ranks' states of one name of a flat, on the CPU."""
        flat, layout, paged = update.store, update.states.everywhere[name], update.states.slots.get(name)
        if layout.own is None or not flat.layout.shared:
            return self.whole(flat, update.states.elements(name))
        device = flat.binding.device
        full = torch.empty(layout.own.shares[-1], dtype=layout.dtype, device=device)
        share = None if paged is None else self.read(paged).to(device)
        flat.communicator.gather_shares(share, full, layout.own.shares).wait()
        return full.cpu()

    def read(self, paged: Elements) -> Tensor:
        """A paged tensor's values, on the CPU."""
        return page_io.read(self.allocator, paged)


def flats_of(store: UnitStore) -> Iterator[tuple[FlatBinding, FlatStore | None]]:
    """The flats of a unit, in order, whoever holds them; None in place of what this rank has no part in."""
    for flat in store.flats:
        yield flat.binding, flat
    for binding in store.elsewhere:
        yield binding, None
