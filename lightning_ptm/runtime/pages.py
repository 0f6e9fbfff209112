"""Takes the pages of a run's model states, as the blueprint's inventory has them: once, at the start.

Owns nothing afterwards: stores, gradients and states belong to the engine.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from lightning_ptm.comm import Communicator
from lightning_ptm.memory import Allocator, PagedTensor
from lightning_ptm.planning.inventory import Row, What
from lightning_ptm.planning.layout import FlatLayout
from lightning_ptm.runtime.binding import FlatBinding
from lightning_ptm.runtime.blueprint import Blueprint
from lightning_ptm.runtime.gradient_pages import GradientPages
from lightning_ptm.runtime.gradients import FlatGradient
from lightning_ptm.runtime.pieces import Buffers
from lightning_ptm.runtime.stock import taken_dtype
from lightning_ptm.runtime.store import FlatStore, UnitStore
from lightning_ptm.runtime.updates import FlatUpdate
from lightning_ptm.terms import Tier
from lightning_ptm.update import FlatStates, OptimizerTraits

_OF_FLATS = (What.PARAMETERS, What.MASTERS, What.STATES)


class Pages:
    """Makes the objects that hold a unit's model states on this rank.

    Args:
        communicator_of: the communicator of the ranks that hold a unit.

    Raises (each method): CapacityError, a tier has too few pages.
    """

    def __init__(
        self,
        blueprint: Blueprint,
        allocator: Allocator,
        communicator_of: Callable[[int], Communicator],
        device: torch.device,
    ) -> None:
        self._blueprint = blueprint
        self._allocator = allocator
        self._communicator_of = communicator_of
        self._device = device

        self._of_flats = {what: blueprint.inventory.of_flats(what) for what in _OF_FLATS}

        self.gradient_pages: GradientPages | None = None
        """Made by `take_gradient_pages`, before `flats`."""

    def store(self, unit: int) -> UnitStore:
        """Compute parameters: a home for this rank's shard of each flat; the bytes are not initialised."""
        drawn = self._blueprint
        by_name = {item.name: item.parameter for item in drawn.units[unit].parameters}
        late = drawn.updates_late(unit, apart=self._allocator.backend.apart)
        flats = []
        for layout in drawn.layout.flats_of(unit):
            dtype = drawn.dtypes[layout.index]
            binding = FlatBinding(
                layout,
                [by_name[slot.spec.name] for slot in layout.slots],
                dtype,
                self._device,
                is_copy=drawn.copies[layout.index]
                or layout.world_size > 1
                or drawn.placement.homes[unit].parameter is not Tier.DEVICE,
                closes=drawn.copies[layout.index] or (late and layout.trainable),
            )
            (home,) = self._of_flat(What.PARAMETERS, layout)
            flats.append(FlatStore(layout, binding, home, self._allocator, self._communicator_of(unit)))
        absent = (
            FlatBinding(
                layout,
                [by_name[slot.spec.name] for slot in layout.slots],
                getattr(torch, layout.dtype),
                self._device,
            )
            for layout in (drawn.whole_layout.flats_of(unit) if unit in drawn.absent else ())
        )
        return UnitStore(drawn.units[unit], tuple(flats), tuple(absent), late)

    def flats(self, store: UnitStore) -> tuple[FlatUpdate, ...]:
        """Master states and gradients of a unit's trainable flats."""
        drawn, unit = self._blueprint, store.unit.index
        communicator = self._communicator_of(unit)
        updates = []
        for flat in store.flats:
            traits = drawn.traits[flat.layout.index]
            if traits is None:
                continue
            states = self._states(flat.layout, traits, communicator.rank)
            gradient = FlatGradient(
                flat,
                drawn.route(flat.layout),
                self._allocator,
                communicator,
                supply=self.gradient_pages,
                divided_by=1 if drawn.experts is None else drawn.experts.divisor(unit),
            )
            updates.append(FlatUpdate(flat, gradient, states, flat.layout.slots[0].spec.optimizer))
        return tuple(updates)

    def spares(self) -> tuple[PagedTensor, ...]:
        """Pages for versions in the making, beside the homes of compute parameters."""
        return self._taken(What.VERSIONS)

    def take_gradient_pages(self) -> GradientPages | None:
        """Pages for gradients on their way to updates that run beside compute; None where `.grad` itself travels."""
        if self._blueprint.lock_free is not None and self._blueprint.lock_free.gradients:
            self.gradient_pages = GradientPages(self._taken(What.GRADIENTS))
        return self.gradient_pages

    def buffers_for_saves(self) -> Buffers:
        """Through which saves behind training bring what is on disk into memory."""
        return Buffers(self._allocator, self._taken(What.SAVES))

    def _states(self, flat: FlatLayout, traits: OptimizerTraits, rank: int) -> FlatStates:
        master = next(iter(self._of_flat(What.MASTERS, flat)), None)
        tensors = self._of_flat(What.STATES, flat)
        slots = {slot.name: tensor for slot, tensor in zip(traits.slots, tensors, strict=True)}
        return FlatStates(flat, rank, traits, master=master, slots=slots)

    def _of_flat(self, what: What, flat: FlatLayout) -> list[PagedTensor]:
        return [tensor for row in self._of_flats[what].get(flat.index, ()) for tensor in self._take(row)]

    def _taken(self, what: What) -> tuple[PagedTensor, ...]:
        return tuple(tensor for row in self._blueprint.inventory.of(what) for tensor in self._take(row))

    def _take(self, row: Row) -> list[PagedTensor]:
        """What pages of its own hold lies in a row."""
        taken = []
        for _ in range(row.count):
            tensor = self._allocator.allocate(
                row.name, row.numel, taken_dtype(row), row.tier, shared_tail=row.shares_pages
            )
            if not row.shares_pages:
                self._allocator.merge(tensor)
            taken.append(tensor)
        return taken
