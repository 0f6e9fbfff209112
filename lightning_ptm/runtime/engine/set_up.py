"""Set-up of a run, step by step: what the engine has done when its pages are taken.

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
from lightning_ptm.progress import Progress
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
from lightning_ptm.runtime.updates.updates import FlatUpdate, SynchronousUpdates, UpdateScheduler
from lightning_ptm.terms import Tier
from lightning_ptm.update.updater import Updater


def lay_first_values(
    module: nn.Module,
    given: Given,
    blueprint: Blueprint,
    stores: Sequence[UnitStore],
    values: ParameterValues,
    bars: Progress,
    *,
    trains: bool,
    precise_bytes: int,
    handed: PreviousState | None = None,
) -> None:
    """The parameters into pages, unit by unit, and buffers their values.

    Args:
        given: values that files provide.
        trains: the run is a fit, whose optimizers may have no weights.
        precise_bytes: that all weights take outside of pages.
        handed: values that pages of an engine before this one provide.
    """
    bindings = [binding for store in stores for binding in store.bindings]
    parts = [pair for each in bindings for pair in zip(each.parameters, each.arrangement.boxes, strict=True)]
    boxes = {id(parameter): box for parameter, box in parts if box is not None}
    first = FirstValues(module, given, boxes)
    # A run that trains nothing keeps no masters: what was not the user's own tensor is kept if it is cheap, that is, if
    # RAM, and what the user allows of it, has room for it beside the pages. A true precision converts it for good.
    ram = blueprint.ram
    allowed = blueprint.budget[ram] - blueprint.pool_bytes[ram]
    # Asked for only then: free RAM stands in a dozen of the system's files.
    room = not (trains and any(blueprint.traits)) and 2 * precise_bytes < free_host_bytes() and precise_bytes <= allowed
    built = [not any(item.parameter.is_meta for item in store.unit.parameters) for store in stores]
    first.buffers()
    with bars.bar("weights into pages", values.bytes_to_write()) as seen:
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
    """First values are made unit by unit, and each time this yields what is complete by them and was not before: a unit,
    but where its parameters are those of several units' modules."""
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
    """As the settings say: synchronous or lock-free."""
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
            # From the disk, what is read ahead comes in the order of gradients.
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
    """Of activations to the host."""
    buffers = HostBuffers(backend, free_bytes=free_host_bytes)
    mover = ActivationMover(backend, copy_streams(backend), buffers, events)
    least = offload.LEAST_BYTES
    modules, in_pages = module.modules(), allocator.holds
    return offload.Offload(mover, backend, stream, modules, in_pages, least_bytes=least)


def check_taken(blueprint: Blueprint, allocator: Allocator, beside: Mapping[Tier, int]) -> None:
    """What is taken without a row would be missing where the plan counts on it.

    Args:
        beside: pages that rows take more than they would fill, by tier.
    """
    for tier in blueprint.budget:
        taken = allocator.capacity_bytes(tier) - allocator.free_bytes(tier) - beside.get(tier, 0) * allocator.page_size
        rows = blueprint.inventory.held_bytes(tier, Lifetime.RUN)
        if taken != rows:
            raise InternalError(
                f"set-up has taken {taken} bytes of the {tier.name.lower()} tier, and the rows of its inventory come to "
                f"{rows}; nothing was trained; please report this with the settings of the strategy"
            )
