"""Steps of the engine's set-up: initial values, the update scheduler, the activation offload, a check of allocated pages.

Owns nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

import torch
from torch import nn
from torch.optim import Optimizer

from lightning_ptm.errors import InternalError
from lightning_ptm.events import Events
from lightning_ptm.memory.activation_buffers import ActivationMover, HostBuffers
from lightning_ptm.memory.allocator import Allocator
from lightning_ptm.memory.backend import Backend
from lightning_ptm.memory.streams import ComputeStream, copy_streams
from lightning_ptm.planning.inventory import Lifetime
from lightning_ptm.runtime.autograd import offload
from lightning_ptm.runtime.deciding.blueprint import Blueprint
from lightning_ptm.runtime.engine.pages import RunPages
from lightning_ptm.runtime.full_params.first_values import FirstValues, Given
from lightning_ptm.runtime.full_params.parameter_values import ParameterValues
from lightning_ptm.runtime.machine.machine import free_host_bytes
from lightning_ptm.runtime.relayout.previous_state import PreviousState
from lightning_ptm.runtime.units.binding import FlatBinding
from lightning_ptm.runtime.units.store import UnitStore
from lightning_ptm.runtime.updates.lock_free import LockFreeUpdates
from lightning_ptm.runtime.updates.optimizer_groups import FlatUpdate
from lightning_ptm.runtime.updates.updates import SynchronousUpdates, UpdateScheduler
from lightning_ptm.terms import Tier
from lightning_ptm.update.updater import Updater


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
    built = [not any(item.parameter.is_meta for item in store.unit.parameters) for store in stores]
    first.buffers()
    with values.taking_over() as seen:
        for store, complete in _made(first, stores):
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
        in_thread = backend.apart and any(flats)
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
        forecast=blueprint.lock_free.forecast,
        default_dtype=default_dtype,
        number_of_step=number_of_step,
    )


def activations_offload(
    module: nn.Module, backend: Backend, stream: ComputeStream, allocator: Allocator, events: Events
) -> offload.Offload:
    """Creates the offload of activations to the host."""
    buffers = HostBuffers(backend, free_bytes=free_host_bytes)
    mover = ActivationMover(backend, copy_streams(backend), buffers, events)
    least = offload.LEAST_BYTES
    modules, in_pages = module.modules(), allocator.holds
    return offload.Offload(mover, backend, stream, modules, in_pages, least_bytes=least)


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
                f"set-up has allocated {taken} bytes of the {tier.name.lower()} tier, and the rows of its inventory sum to "
                f"{rows}; nothing was trained; please report this with the settings of the strategy"
            )
