"""Allocation of the pages of a run's model states, at set-up, row by row of the blueprint's inventory.

Owns nothing afterwards: stores, gradients and states belong to the engine.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial

import torch

from lightning_ptm.comm import Communicators
from lightning_ptm.errors import InternalError
from lightning_ptm.memory.allocator import Allocator
from lightning_ptm.memory.paged_tensor import PagedTensor
from lightning_ptm.memory.streams import ComputeStream
from lightning_ptm.planning.inventory import Row, What
from lightning_ptm.planning.layout import FlatLayout
from lightning_ptm.runtime.deciding.blueprint import Blueprint
from lightning_ptm.runtime.deciding.build_inventory import gradient_row, taken_dtype
from lightning_ptm.runtime.deciding.gradient_route import Waits
from lightning_ptm.runtime.gradients.flat_gradient import FlatGradient
from lightning_ptm.runtime.gradients.gradient_pages import GradientPages, PageSupply
from lightning_ptm.runtime.gradients.host_accumulate import HostAccumulator
from lightning_ptm.runtime.relayout.reused_tensors import ReusedTensors
from lightning_ptm.runtime.tensors.page_io import PageIOBuffers
from lightning_ptm.runtime.units.binding import FlatBinding
from lightning_ptm.runtime.units.page_views import PageViews
from lightning_ptm.runtime.units.store import FlatStore, UnitStore
from lightning_ptm.runtime.units.uncounted_writes import Fingerprint
from lightning_ptm.runtime.updates.optimizer_groups import FlatUpdate
from lightning_ptm.update.flat_states import FlatStates, lay_out_states, layout_groups
from lightning_ptm.update.trial.traits import OptimizerTraits

_OF_FLATS = (What.PARAMETERS, What.MASTERS, What.STATES)


class RunPages:
    """Factory of the objects that hold a unit's model states on this rank. Each method raises CapacityError if a tier has too
    few pages.

    Args:
        reused_tensors: tensors of the engine that this one replaces, reused in place.
        checks_all: whether writes are detected by comparing all values of a flat when it is released, and not a sample
            (uncounted_writes.py).
    """

    def __init__(
        self,
        blueprint: Blueprint,
        allocator: Allocator,
        communicators: Communicators,
        device: torch.device,
        reused_tensors: ReusedTensors | None = None,
        stream: ComputeStream | None = None,
        *,
        checks_all: bool = False,
    ) -> None:
        self._blueprint = blueprint
        self._allocator = allocator
        self._communicators = communicators
        self._device = device
        self._sums = HostAccumulator(allocator.backend) if allocator.backend.apart else None

        self._stream = stream
        self._checks_all = checks_all
        self._reused_tensors = reused_tensors or ReusedTensors()
        self.views: PageViews[FlatBinding] = PageViews(allocator.holds)
        """Views of pages that are the parameters' storages."""
        self._of_flats = {what: blueprint.inventory.of_flats(what) for what in _OF_FLATS}

        self.gradient_pages: GradientPages | None = None
        """Pages of gradients that are queued for lock-free updates; `take_gradient_pages` sets it, before `flats`."""

    def store(self, unit: int) -> UnitStore:
        """Returns the store of a unit, with a home for this rank's shard of each flat's compute parameters; the bytes are not
        initialised."""
        blueprint = self._blueprint
        by_name = {item.name: item.parameter for item in blueprint.units[unit].parameters}
        late = blueprint.updates_late(unit, apart=self._allocator.backend.apart)
        flats = []
        for layout in blueprint.layout.flats_of(unit):
            dtype = blueprint.dtypes[layout.index]
            binding = FlatBinding(
                layout,
                [by_name[slot.spec.name] for slot in layout.slots],
                dtype,
                self._device,
                is_copy=blueprint.copies[layout.index]
                or layout.shared
                or layout.code is not None
                or not blueprint.placement.homes[unit].parameter.computes,
                closes=blueprint.copies[layout.index] or (late and layout.trainable),
                views=self.views,
                fingerprint=self._fingerprint(layout),
            )
            (home,) = self._of_flat(What.PARAMETERS, layout)
            communicator = self._communicators.along(blueprint.holders.of_flat(layout).axes)
            flats.append(FlatStore(layout, binding, home, self._allocator, communicator))
        elsewhere = tuple(
            FlatBinding(
                layout,
                [by_name[slot.spec.name] for slot in layout.slots],
                getattr(torch, layout.dtype),
                self._device,
                held=False,
            )
            for layout in blueprint.layout.remote_flats.get(unit, ())
        )
        return UnitStore(blueprint.units[unit], tuple(flats), elsewhere, late)

    def _fingerprint(self, layout: FlatLayout) -> Fingerprint | None:
        # On a separate device, the comparison would make the host wait.
        if self._allocator.backend.apart and not self._checks_all:
            return None
        return Fingerprint(layout, self._device, every_element=self._checks_all)

    def flats(self, store: UnitStore) -> tuple[FlatUpdate, ...]:
        """Returns the master weights, optimizer states and gradients of a unit's trainable flats; one entry per flat and
        optimizer."""
        blueprint = self._blueprint
        updates = []
        for flat in store.flats:
            traits = blueprint.traits[flat.layout.index]
            if not traits:
                continue
            route, sharing = blueprint.route(flat.layout), blueprint.holders.of_flat(flat.layout)
            supply = self._supply(flat.layout)
            gradient = FlatGradient(flat, route, self._allocator, sharing, supply, self._sums, self._stream)
            for number, states in self._states(flat.layout, traits, flat.communicator.rank):
                updates.append(FlatUpdate(flat, gradient, states, number))
        return tuple(updates)

    def spares(self) -> tuple[PagedTensor, ...]:
        """Allocates spare versions for lock-free updates, in addition to the homes of compute parameters."""
        return self._taken(What.VERSIONS)

    def take_gradient_pages(self) -> GradientPages | None:
        """Allocates the pages of gradients that are queued for lock-free updates; None where `.grad` itself is queued."""
        if self._blueprint.lock_free is not None and self._blueprint.lock_free.gradients:
            self.gradient_pages = GradientPages(self._taken(What.GRADIENTS))
        return self.gradient_pages

    def buffers_for_saves(self) -> PageIOBuffers:
        """Allocates the buffers through which background saves read states from disk."""
        return PageIOBuffers(self._allocator, self._taken(What.SAVES))

    def _states(
        self, flat: FlatLayout, traits: Sequence[OptimizerTraits], rank: int
    ) -> Iterator[tuple[int, FlatStates]]:
        """Yields each optimizer's number with its states of a flat; all share one tensor of master weights."""
        master = next(iter(self._of_flat(What.MASTERS, flat)), None)
        tensors = iter(self._of_flat(What.STATES, flat))
        for number, known in zip(flat.optimizers, traits, strict=True):
            groups = layout_groups(flat, number)
            slots = {layout.name: next(tensors) for layout in lay_out_states(flat, known, groups)}
            yield number, FlatStates(flat, rank, known, master=master, slots=slots, groups=groups)

    def _supply(self, flat: FlatLayout) -> PageSupply:
        route = self._blueprint.route(flat)
        if route.waits is not Waits.QUEUED:
            return PageSupply(partial(self._own_gradient, flat), self._allocator.release)
        if self.gradient_pages is None:
            raise InternalError(f"flat {flat.index} is made before the pages of gradients that are queued for updates")
        return self.gradient_pages.supply(flat.shard_numel, route.dtype)

    def _own_gradient(self, flat: FlatLayout) -> PagedTensor:
        (taken,) = self._take(gradient_row(self._blueprint, flat))
        return taken

    def _of_flat(self, what: What, flat: FlatLayout) -> list[PagedTensor]:
        rows = self._of_flats[what].get(flat.index, ())
        before = self._reused_tensors.of(what, flat.index, len(rows))
        return [
            tensor
            for row, old in zip(rows, before, strict=True)
            for tensor in (self._take(row) if old is None else [self._allocator.reused_tensor(old)])
        ]

    def _taken(self, what: What) -> tuple[PagedTensor, ...]:
        return tuple(tensor for row in self._blueprint.inventory.of(what) for tensor in self._take(row))

    def _take(self, row: Row) -> list[PagedTensor]:
        """Allocates the tensors of a row; those that share no pages with others are made contiguous."""
        taken = []
        for _ in range(row.count):
            tensor = self._allocator.allocate(
                row.name, row.numel, taken_dtype(row), row.tier, shared_tail=row.shares_pages
            )
            if not row.shares_pages:
                self._allocator.merge(tensor)
            taken.append(tensor)
        return taken
