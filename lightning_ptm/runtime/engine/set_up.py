"""Set-up of an engine: pages of model states, row by row of the blueprint's inventory, and the parts that use them.

Owns nothing afterwards: stores, gradients, states and parts belong to the engine.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path

import torch
from torch import nn
from torch.optim import Optimizer

from lightning_ptm.comm import Communicators
from lightning_ptm.errors import InternalError
from lightning_ptm.events import Events
from lightning_ptm.memory.activation_buffers import HostBuffers, HostStore, Store
from lightning_ptm.memory.activation_disk import DiskStore
from lightning_ptm.memory.allocator import Allocator
from lightning_ptm.memory.backend import Backend
from lightning_ptm.memory.disk import FileOps
from lightning_ptm.memory.paged_tensor import PagedTensor
from lightning_ptm.memory.streams import ComputeStream, copy_streams
from lightning_ptm.planning.inventory import Lifetime, Row, What
from lightning_ptm.planning.layout import FlatLayout
from lightning_ptm.planning.plan import GradientBuffer
from lightning_ptm.runtime.deciding.blueprint import Blueprint
from lightning_ptm.runtime.deciding.build_inventory import gradient_row, taken_dtype
from lightning_ptm.runtime.full_params.first_values import FirstValues, Given
from lightning_ptm.runtime.full_params.parameter_values import ParameterValues
from lightning_ptm.runtime.gradients.flat_gradient import FlatGradient
from lightning_ptm.runtime.gradients.store import GradientPages, HostAccumulator, InFlight, PageSupply
from lightning_ptm.runtime.machine.machine import free_host_bytes
from lightning_ptm.runtime.relayout.previous_state import PreviousState
from lightning_ptm.runtime.relayout.reused_tensors import ReusedTensors
from lightning_ptm.runtime.tensors.page_io import PageIOBuffers
from lightning_ptm.runtime.units.binding import Fingerprint, FlatBinding, PageViews
from lightning_ptm.runtime.units.store import DevicePages, FlatStore, UnitStore
from lightning_ptm.runtime.updates.lock_free import LockFreeUpdates
from lightning_ptm.runtime.updates.optimizer_groups import FlatUpdate
from lightning_ptm.runtime.updates.updates import SynchronousUpdates, UpdateScheduler
from lightning_ptm.terms import Tier
from lightning_ptm.update.flat_states import FlatStates, layout_groups
from lightning_ptm.update.trial.traits import OptimizerTraits
from lightning_ptm.update.updater import Updater


class RunPages:
    """Factory of the objects that hold a unit's model states on this rank. Each method raises CapacityError if a tier has too
    few pages.

    Args:
        reused_tensors: tensors of the engine that this one replaces, reused in place.
        checks_all: whether writes are detected by comparing all values of a flat when it is released, and not a sample
            (`Fingerprint`).
        finish_update: waits for the update of a unit, which may read its gradients.
        advance_updates: makes updates progress while compute waits for pages of gradients, and raises their errors.
        evict_idle_unit: frees the device pages of a gathered unit that is not in use; returns whether there was one.
        frame_of_gradient, evict_ended: see `DevicePages`.
        binding: class of the links between flats and parameters.
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
        finish_update: Callable[[int], None] = lambda unit: None,
        advance_updates: Callable[[], None] = lambda: None,
        evict_idle_unit: Callable[[], bool] = lambda: False,
        frame_of_gradient: Callable[[int, GradientBuffer], int | None] = lambda flat, pages: None,
        evict_ended: Callable[[], None] = lambda: None,
        binding: type[FlatBinding] = FlatBinding,
    ) -> None:
        self._binding = binding
        self._finish_update = finish_update
        self._advance_updates = advance_updates
        self._evict_idle_unit = evict_idle_unit
        self._blueprint = blueprint
        self._allocator = allocator
        self._communicators = communicators
        self._device = device
        pool, page = blueprint.passing_pool, blueprint.layout.page_size
        self._device_pages = DevicePages(
            allocator,
            blueprint.pool_bytes[Tier.DEVICE] // page - pool.frames,
            max(0, pool.frames - blueprint.by_need_bytes // page),
            blueprint.by_need,
            frame_of_gradient,
            evict_ended,
            root_pages=blueprint.layout.full_pages(0, in_place=blueprint.placement.homes[0].parameter.computes),
            gradient_pages=blueprint.most_gradient_pages,
        )
        self._sums = HostAccumulator(allocator.backend) if allocator.backend.has_own_memory else None
        self.in_flight = InFlight()
        """Gradients whose reductions or copies are in flight."""

        self._stream = stream
        self._checks_all = checks_all
        self._reused_tensors = reused_tensors or ReusedTensors()
        self.views: PageViews = PageViews(allocator.holds)
        """Views of pages that are the parameters' storages."""
        self._gradient_pages: GradientPages | None = None
        """Pages of gradients that belong to no particular flat; `take_gradient_pages` sets it, before `flats`."""

    def store(self, unit: int) -> UnitStore:
        """Returns the store of a unit, with a home for this rank's shard of each flat's compute parameters; the bytes are not
        initialised."""
        blueprint = self._blueprint
        by_name = {item.name: item.parameter for item in blueprint.units[unit].parameters}
        late = blueprint.updates_late(unit, has_own_memory=self._allocator.backend.has_own_memory)
        flats = []
        for layout in blueprint.layout.flats_of(unit):
            dtype = blueprint.dtypes[layout.index]
            binding = self._binding(
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
            flats.append(FlatStore(layout, binding, home, self._allocator, communicator, self._device_pages))
        remote = tuple(
            FlatBinding(
                layout,
                [by_name[slot.spec.name] for slot in layout.slots],
                getattr(torch, layout.dtype),
                self._device,
                held=False,
            )
            for layout in blueprint.layout.remote_flats.get(unit, ())
        )
        return UnitStore(blueprint.units[unit], tuple(flats), remote, late)

    def _fingerprint(self, layout: FlatLayout) -> Fingerprint | None:
        backend = self._allocator.backend
        # On a separate device, the comparison would make the host wait.
        if not backend.has_bytes or (backend.has_own_memory and not self._checks_all):
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
            # A lock-free update reads pages of its own.
            lock_free = blueprint.lock_free is not None
            gradient = FlatGradient(
                flat,
                route,
                self._allocator,
                sharing,
                supply,
                self.in_flight,
                self._sums,
                self._stream,
                before_change=_nothing if lock_free else partial(self._finish_update, store.unit.index),
                evict_idle_unit=self._evict_idle_unit,
                divided=blueprint.holders.in_stages,
            )
            for number, states in self._states(flat.layout, traits, flat.communicator.rank):
                updates.append(FlatUpdate(flat, gradient, states, number))
        return tuple(updates)

    def spares(self) -> tuple[PagedTensor, ...]:
        """Allocates spare versions for lock-free updates, in addition to the homes of compute parameters."""
        return self._taken(What.VERSIONS)

    def take_gradient_pages(self) -> GradientPages | None:
        """Allocates the pages of gradients that belong to no particular flat; None if there are none."""
        if any(self._blueprint.route(flat).from_pool for flat in self._blueprint.trained_flats()):
            self._gradient_pages = GradientPages(self._taken(What.GRADIENTS), self._advance_updates)
        return self._gradient_pages

    def staging(self) -> tuple[PagedTensor, ...]:
        """Allocates the staging buffers of updates, which the updater of a run allocates for itself."""
        return self._taken(What.STAGING)

    def buffers_for_saves(self) -> PageIOBuffers:
        """Allocates the buffers through which background saves read states from disk."""
        return PageIOBuffers(self._allocator, self._taken(What.SAVES))

    def activation_staging(self) -> tuple[PagedTensor, ...]:
        """Allocates the staging buffers of activations that are offloaded to disk; empty where they are not."""
        return self._taken(What.ACTIVATIONS)

    def _states(
        self, flat: FlatLayout, traits: Sequence[OptimizerTraits], rank: int
    ) -> Iterator[tuple[int, FlatStates]]:
        """Yields each optimizer's number with its states of a flat; all share one tensor of master weights."""
        master = next(iter(self._of_flat(What.MASTERS, flat)), None)
        tensors = iter(self._of_flat(What.STATES, flat))
        for number, known in zip(flat.optimizers, traits, strict=True):
            kept = (each for each in self._blueprint.state_tensors[flat.index] if each.optimizer == number)
            slots = {each.layout.name: next(tensors) for each in kept}
            groups = layout_groups(flat, number)
            yield number, FlatStates(flat, rank, known, master=master, slots=slots, groups=groups)

    def _supply(self, flat: FlatLayout) -> PageSupply:
        route = self._blueprint.route(flat)
        if not route.from_pool:
            return PageSupply(partial(self._own_gradient, flat), self._allocator.release)
        if self._gradient_pages is None:
            raise InternalError(f"flat {flat.index} is made before the pages of gradients that are passed to updates")
        return self._gradient_pages.supply(flat.shard_numel, route.dtype)

    def _own_gradient(self, flat: FlatLayout) -> PagedTensor:
        row = gradient_row(self._blueprint, flat)
        if row.lifetime is Lifetime.PASSING:
            kind = GradientBuffer.PASSING
            return self._device_pages.take_for_gradient(row.name, row.numel, taken_dtype(row), flat, kind)
        (taken,) = self._take(row)
        return taken

    def _of_flat(self, what: What, flat: FlatLayout) -> list[PagedTensor]:
        rows = self._blueprint.inventory.of_flat(what, flat.index)
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


def _nothing() -> None:
    """Does nothing."""


def write_initial_values(
    module: nn.Module,
    given: Given,
    blueprint: Blueprint,
    stores: Sequence[UnitStore],
    values: ParameterValues,
    *,
    trains: bool,
    precise_bytes: int,
    handed: PreviousState | None = None,
) -> None:
    """Writes the parameters' initial values into pages, unit by unit, and initialises module buffers.

    Args:
        given: values that files provide.
        trains: whether the run is a fit (its optimizers may have no parameters).
        precise_bytes: bytes of all weights outside pages, in their most precise dtype.
        handed: values in the pages of the engine that this one replaces.
    """
    bindings = [binding for store in stores for binding in store.bindings]
    parts = [pair for each in bindings for pair in zip(each.parameters, each.arrangement.boxes, strict=True)]
    boxes = {id(parameter): box for parameter, box in parts if box is not None}
    first = FirstValues(module, given, boxes)
    # A run that trains nothing has no master weights: the precise originals of rounded parameters are kept if RAM, and the
    # user's limit of it, have room for them in addition to pages. A true precision converts them for good.
    ram = blueprint.ram
    allowed = blueprint.budget[ram] - blueprint.pool_bytes[ram]
    # Evaluated last: `free_host_bytes` reads a dozen system files.
    room = not (trains and any(blueprint.traits)) and 2 * precise_bytes < free_host_bytes() and precise_bytes <= allowed
    with torch.DisableTorchFunctionSubclass():  # a question to a closed parameter would go through Python
        built = [not any(item.parameter.is_meta for item in store.unit.parameters) for store in stores]
    first.buffers()
    with values.taking_over() as seen:
        made = ((store, list(store.bindings)) for store in stores) if all(built) else _made(first, stores)
        for store, complete in made:
            was_built = built[store.unit.index]
            values.take_over(
                store,
                given.parameters,
                only=complete,
                keep_originals=not trains and any(blueprint.copies) and (was_built or room),
                keep_frozen=was_built or room,
                handed=handed,
                seen=seen,
            )
    first.check()
    first.fill_buffers()


def _made(first: FirstValues, stores: Sequence[UnitStore]) -> Iterator[tuple[UnitStore, list[FlatBinding]]]:
    """Materialises the parameters unit by unit, and yields each store with the bindings that have become complete: those of
    the unit, and those of earlier units that share parameters with its modules."""
    left: dict[int, list[FlatBinding]] = {}
    for store in stores:
        first.parameters(store.unit)
        left[store.unit.index] = list(store.bindings)
        for index, bindings in left.items():
            complete = [each for each in bindings if not any(parameter.is_meta for parameter in each.parameters)]
            left[index] = [each for each in bindings if each not in complete]
            if complete:
                yield stores[index], complete


def update_scheduler(
    blueprint: Blueprint,
    backend: Backend,
    pages: RunPages,
    stores: Sequence[UnitStore],
    flats: Sequence[Sequence[FlatUpdate]],
    optimizers: Sequence[Optimizer],
    updater: Updater,
    number_of_step: Callable[[], int] | None = None,
) -> UpdateScheduler:
    """Creates the scheduler of updates: synchronous or lock-free, according to the blueprint."""
    default_dtype = torch.get_default_dtype() if blueprint.changes_default_dtype else None
    if blueprint.lock_free is None:
        in_thread = backend.has_own_memory and any(flats)
        return SynchronousUpdates(
            stores,
            flats,
            optimizers,
            updater,
            blueprint.gradient_room_bytes,
            in_thread=in_thread,
            # With states on disk, updates follow the order of read-ahead, which is that of gradients.
            in_turn=in_thread and all(home.master.updates for home in blueprint.placement.homes),
            default_dtype=default_dtype,
            number_of_step=number_of_step,
        )
    return LockFreeUpdates(
        stores,
        flats,
        optimizers,
        updater,
        pages.spares(),
        max_staleness=blueprint.lock_free.max_staleness,
        warmup=blueprint.lock_free.warmup,
        room=blueprint.staging_chunks,
        cores=blueprint.lock_free.cores,
        predicts=blueprint.lock_free.predicts,
        default_dtype=default_dtype,
        number_of_step=number_of_step,
    )


def activation_store(
    tier: Tier,
    blueprint: Blueprint,
    backend: Backend,
    staging: Sequence[PagedTensor],
    paths: Sequence[Path],
    file_ops: FileOps | None,
    events: Events,
) -> Store:
    """Creates the place in a tier that saved activations are, or may be, offloaded to.

    Args:
        staging: buffers between device and disk; empty where the run chooses what goes to disk, and the store makes its own.
    """
    if tier.addressable:
        return HostStore(copy_streams(backend), HostBuffers(backend, free_bytes=free_host_bytes), events)
    buffers = staging[0].tensor() if staging else None
    limit = blueprint.activation_limit_bytes
    return DiskStore(paths, backend, buffers, limit_bytes=limit, file_ops=file_ops, events=events)


def check_taken(blueprint: Blueprint, allocator: Allocator, beside: Mapping[Tier, int]) -> None:
    """Checks that set-up has allocated exactly the rows of the inventory: further pages would be missing where the plan needs
    them.

    Args:
        beside: pages by tier that rows use in addition to their size.

    Raises:
        InternalError: the allocated bytes differ.
    """
    for tier in blueprint.budget:
        taken = allocator.capacity_bytes(tier) - allocator.free_bytes(tier) - beside.get(tier, 0) * allocator.page_size
        rows = blueprint.inventory.held_bytes(tier, Lifetime.RUN)
        if taken != rows:
            raise InternalError(
                f"set-up has allocated {taken} bytes of the {tier.name.lower()} tier, and the rows of its inventory "
                f"sum to {rows}; nothing was trained"
            )
