"""Moves whole parameters and optimizer states between the user's hands and pages: first values, `gathered`, state dicts,
and the weights that stay in the module when a run ends.

Owns nothing but references to tensors that the user built, for runs that keep no master copy of them. One flat at a time,
so that no more than a unit exists whole beside the pages (but for `gathered` and `restore`, whose purpose that is).

I1: with several ranks the values of rank 0 count. Every method is then collective.
I2: the precise value of a parameter is its master where there is one, else its compute parameter.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from lightning_ptm.errors import ConfigError
from lightning_ptm.runtime.store import FlatStore, UnitStore
from lightning_ptm.terms import Tier

if TYPE_CHECKING:
    from lightning_ptm.comm import Communicator
    from lightning_ptm.memory import Allocator, PagedTensor
    from lightning_ptm.runtime.updates import FlatUpdate


class Values:
    """Reads and writes whole values. The engine has drained all updates before any of these is called."""

    def __init__(
        self,
        allocator: Allocator,
        communicator: Communicator,
        stores: Sequence[UnitStore],
        flats: Sequence[Sequence[FlatUpdate]],
    ) -> None:
        self._allocator = allocator
        self._communicator = communicator
        self._stores = stores
        self._updates = {flat.store.layout.index: flat for unit in flats for flat in unit}
        self._mixed = any(
            update.states.master is not None and update.states.master.dtype is not update.store.binding.dtype
            for update in self._updates.values()
        )
        self._originals: dict[int, Tensor] = {}

    # -- first values -------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def take_over(self, store: UnitStore, *, keep_originals: bool = False, keep_frozen: bool = False) -> None:
        """Lays a unit's parameters into pages; from then on they are views of pages, or released.

        Args:
            keep_originals: keep the user's tensors too, to put them back at the end (a run that trains nothing).
            keep_frozen: keep those of frozen parameters whose pages are less precise under mixed precision: nothing
                else remembers what the user had, and training must not round what it does not train.
        """
        for flat in store.flats:
            binding = flat.binding
            source_dtype = torch.float64 if flat.binding.dtype is torch.float64 else torch.float32
            whole = torch.zeros(flat.layout.padded_numel, dtype=source_dtype)
            keep = keep_originals or (keep_frozen and self._mixed and not flat.layout.trainable)
            for slot, parameter in enumerate(binding.parameters):
                binding.view(whole, slot).copy_(parameter.detach())
                if keep and parameter.dtype is not binding.dtype:
                    self._originals[id(parameter)] = parameter.data
            self._communicator.broadcast(whole)
            if not keep_originals and self._communicator.world_size > 1:
                for slot, parameter in enumerate(binding.parameters):  # I1
                    if id(parameter) in self._originals:
                        self._originals[id(parameter)].copy_(binding.view(whole, slot))
            self._write_flat(flat, whole)
            if flat.resident:
                flat.bind_resident()
            else:
                binding.unbind()

    # -- reading ------------------------------------------------------------------------------------------------------

    def precise(self, flat: FlatStore) -> Tensor:
        """The precise values of a flat, whole, on the CPU: (padded_numel,)."""
        whole = self._whole(flat, self._precise_home(flat))
        originals = [self._originals.get(id(parameter)) for parameter in flat.binding.parameters]
        wide = torch.float32 if self._mixed and whole.dtype.itemsize < 4 else whole.dtype
        for original in originals:
            wide = wide if original is None else torch.promote_types(wide, original.dtype)
        whole = whole.to(wide)
        for slot, original in enumerate(originals):
            if original is not None:
                flat.binding.view(whole, slot).copy_(original)
        return whole

    def parameters(self) -> Iterator[tuple[str, nn.Parameter, Tensor]]:
        """(name, parameter, precise value) of every parameter, flat by flat."""
        for store in self._stores:
            for flat in store.flats:
                whole = self.precise(flat)
                for slot, parameter in enumerate(flat.binding.parameters):
                    original = self._originals.get(id(parameter))
                    value = flat.binding.view(whole, slot) if original is None else original
                    yield flat.layout.slots[slot].spec.name, parameter, value

    def optimizer_states(self, optimizer: int) -> Iterator[tuple[nn.Parameter, dict[str, Any]]]:
        """(parameter, state as the optimizer itself would keep it) of all parameters that were ever updated."""
        for flat in self._updates.values():
            if flat.optimizer != optimizer:
                continue
            binding = flat.store.binding
            scalars = [flat.states.scalars(slot) for slot in range(len(binding.parameters))]
            if all(known is None for known in scalars):
                continue
            slots = {name: self._whole(flat.store, paged) for name, paged in flat.states.slots.items()}
            for slot, parameter in enumerate(binding.parameters):
                known = scalars[slot]
                if known is None:
                    continue
                state: dict[str, Any] = {
                    name: value.clone() if isinstance(value, Tensor) else value for name, value in known.values.items()
                }
                group = flat.states.groups[slot]
                names = {trait.name for trait in flat.states.traits.groups[group].slots} if group is not None else set()
                for name in names:
                    state[name] = binding.view(slots[name], slot).clone()
                yield parameter, state

    # -- writing ------------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def load_parameters(self, values: Mapping[int, Tensor]) -> None:
        """Writes new values by id of parameter; the others keep theirs. Raises ConfigError for a wrong shape."""
        for store in self._stores:
            for flat in store.flats:
                binding = flat.binding
                given = [values.get(id(parameter)) for parameter in binding.parameters]
                if all(value is None for value in given):
                    continue
                whole = self.precise(flat).clone()
                for slot, value in enumerate(given):
                    if value is None:
                        continue
                    place = binding.view(whole, slot)
                    if place.shape != value.shape:
                        name = flat.layout.slots[slot].spec.name
                        raise ConfigError(
                            f"{name} has shape {tuple(place.shape)} here and {tuple(value.shape)} in what is loaded; build "
                            f"the model with the sizes that it was saved with"
                        )
                    place.copy_(value)
                self._write_flat(flat, whole)
                self._renew_originals(flat, whole)

    @torch.no_grad()
    def load_optimizer_states(self, optimizer: int, states: Mapping[int, Mapping[str, Any]]) -> None:
        """Writes optimizer states by id of parameter; parameters without one start afresh."""
        for flat in self._updates.values():
            if flat.optimizer != optimizer:
                continue
            binding = flat.store.binding
            per_slot = [states.get(id(parameter)) for parameter in binding.parameters]
            for trait in flat.states.traits.slots:
                paged = flat.states.slots[trait.name]
                whole = torch.zeros(flat.store.layout.padded_numel, dtype=paged.dtype)
                for slot, state in enumerate(per_slot):
                    value = None if state is None else state.get(trait.name)
                    if isinstance(value, Tensor):
                        binding.view(whole, slot).copy_(value)
                self._write(paged, self._shard(flat.store, whole))
            slot_names = {trait.name for trait in flat.states.traits.slots}
            for slot, state in enumerate(per_slot):
                scalars = None if not state else {name: v for name, v in state.items() if name not in slot_names}
                flat.states.set_scalars(slot, scalars)

    # -- by hand ------------------------------------------------------------------------------------------------------

    @contextmanager
    def gathered(self, wanted: Collection[int], *, write: bool) -> Iterator[None]:
        """The parameters of the units in `wanted` whole inside the block, in their precise dtype.

        Args:
            write: edits are kept: those of rank 0, on all ranks.
        """
        chosen = [store for store in self._stores if store.unit.index in wanted]
        wholes: list[tuple[FlatStore, Tensor]] = []
        for store in chosen:
            for flat in store.flats:
                whole = self.precise(flat).clone()
                wholes.append((flat, whole))
                for slot in range(len(flat.binding.parameters)):
                    flat.binding.restore(slot, flat.binding.view(whole, slot))
        try:
            yield
        finally:
            for flat, whole in wholes:
                if write:
                    self._collect_edits(flat, whole)
                    self._communicator.broadcast(whole)
                    self._write_flat(flat, whole)
                    self._renew_originals(flat, whole)
                flat.rebind(whole)

    def restore(self) -> None:
        """Gives every parameter storage of its own with its precise value: the module as the user knows it."""
        for _, parameter, value in self.parameters():
            parameter.data = value.clone() if id(parameter) not in self._originals else value

    def let_go(self) -> None:
        """Parameters name no page any more; they read as NaN."""
        for store in self._stores:
            for flat in store.flats:
                flat.binding.unbind()

    # -- pages --------------------------------------------------------------------------------------------------------

    @staticmethod
    def _collect_edits(flat: FlatStore, whole: Tensor) -> None:
        # `param.data = x` inside the block replaces the view; bring such values home too.
        with torch.no_grad():
            for slot, parameter in enumerate(flat.binding.parameters):
                view = flat.binding.view(whole, slot)
                if parameter.data_ptr() != view.data_ptr():
                    view.copy_(parameter)

    def _renew_originals(self, flat: FlatStore, whole: Tensor) -> None:
        for slot, parameter in enumerate(flat.binding.parameters):
            original = self._originals.get(id(parameter))
            if original is not None:
                self._originals[id(parameter)] = flat.binding.view(whole, slot).to(original.dtype, copy=True)

    def _precise_home(self, flat: FlatStore) -> PagedTensor:
        update = self._updates.get(flat.layout.index)
        master = update.states.master if update is not None else None
        return flat.home if master is None else master

    def _write_flat(self, flat: FlatStore, whole: Tensor) -> None:
        shard = self._shard(flat, whole)
        home = self._precise_home(flat)
        if home is not flat.home:
            self._write(home, shard)
        self._write(flat.home, shard)

    def _shard(self, flat: FlatStore, whole: Tensor) -> Tensor:
        if flat.layout.world_size == 1:
            return whole
        pieces = flat.layout.pieces(self._communicator.rank)
        return torch.cat([whole[piece.full_start : piece.full_start + piece.numel] for piece in pieces])

    def _whole(self, flat: FlatStore, paged: PagedTensor) -> Tensor:
        shard = self.read(paged)
        if flat.layout.world_size == 1:
            return shard
        device = flat.binding.device  # where the collectives' backend works
        full = torch.empty(flat.layout.padded_numel, dtype=shard.dtype, device=device)
        self._communicator.all_gather(shard.to(device), full, flat.layout).wait()
        return full.cpu()

    def read(self, paged: PagedTensor) -> Tensor:
        """A paged tensor's values in memory of their own, on the CPU; on disk, a page at a time."""
        if paged.tier is not Tier.DISK:
            return paged.tensor().cpu()
        values = torch.empty(paged.numel, dtype=paged.dtype)

        def one(buffer: PagedTensor, start: int, count: int) -> None:
            self._allocator.copy(paged, buffer, source_start=start, numel=count).wait()
            values[start : start + count].copy_(buffer.tensor()[:count])

        self._by_pages(paged, one)
        return values

    def _write(self, paged: PagedTensor, values: Tensor) -> None:
        if paged.tier is not Tier.DISK:
            paged.tensor().copy_(values)
            return

        def one(buffer: PagedTensor, start: int, count: int) -> None:
            buffer.tensor()[:count].copy_(values[start : start + count])
            self._allocator.copy(buffer, paged, target_start=start, numel=count).wait()

        self._by_pages(paged, one)

    def _by_pages(self, paged: PagedTensor, act: Callable[[PagedTensor, int, int], None]) -> None:
        """Calls `act(buffer, start, count)` for each page-sized stretch of a tensor on disk."""
        tier = Tier.HOST if self._allocator.capacity_bytes(Tier.HOST) else Tier.DEVICE
        step = self._allocator.page_size // paged.dtype.itemsize
        buffer = self._allocator.allocate("values in transit", min(step, paged.numel), paged.dtype, tier)
        try:
            for start in range(0, paged.numel, step):
                act(buffer, start, min(step, paged.numel - start))
        finally:
            self._allocator.release(buffer)
