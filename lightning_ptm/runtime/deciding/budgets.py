"""What pages may take of each tier, beside what is taken anyway: gradients that stay whole, staging, lock-free updates."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import torch

from lightning_ptm.comm import Communicator
from lightning_ptm.config import Home, LockFree, Settings, format_bytes, home_tier
from lightning_ptm.errors import CapacityError, ConfigError
from lightning_ptm.planning.inventory import pages_of
from lightning_ptm.planning.layout import ModelLayout
from lightning_ptm.planning.placement_data import Budget, PlacementWishes
from lightning_ptm.runtime.deciding.blueprint import LockFreeNeeds, Request, ram_tier
from lightning_ptm.runtime.deciding.build_inventory import in_the_making, travelling
from lightning_ptm.runtime.machine.machine import SHORT_RAM_BYTES, Machine
from lightning_ptm.terms import Tier

_HOST_SHARE = 0.8
_HOST_RESERVE_BYTES = 1 << 30
"""RAM that `auto` leaves to activations, libraries and data where it is not short."""
_MOST_SHARE = 7 / 8
"""Where it is short, `auto` gives pages no more than this, and as much only where they do with nothing less."""
_SHORT_BUDGET_BYTES = SHORT_RAM_BYTES - _HOST_RESERVE_BYTES
_SHARES = 28
"""Steps that lead up to that, in equal parts of it."""
_FIRST_SHARE = 8
"""The step that is tried first: a quarter of what is free."""
_DEVICE_SHARE = 0.5
"""Share of the free device memory that `auto` takes for pages; activations and the libraries get the rest."""
_DISK_SHARE = 0.95
STAGING_CHUNKS = 12
"""Chunks in flight between disk and update if RAM allows: enough to keep a disk busy while compute is between ticks."""
_SPARES = 2
"""Least versions in the making for flats of one size: one, and one for a flat that compute waits for."""
_SPARE_PAGES = 8
"""More of them, as far as they take no more than so many pages."""
LOCK_FREE_CHUNKS = 8
"""In lock-free mode, whose updates have a thread of their own: the rest of 64 pages is for versions in the making."""
_STAGING_SHARE = 1 / 8
"""Share of the RAM budget that staging takes at most by itself."""


def pages_budget(settings: Settings, machine: Machine, unified: bool) -> Budget:
    """Bytes of each tier that pages of one rank may take: as set, or a share of what is free.

    Raises:
        CapacityError: the device has less free than is set.
    """
    host_free = machine.free_host_bytes / machine.ranks
    if settings.host_bytes is not None:
        host = settings.host_bytes
    elif host_free < SHORT_RAM_BYTES:
        host = int(min(host_free * _MOST_SHARE, _SHORT_BUDGET_BYTES))
    else:
        host = int(min(host_free * _HOST_SHARE, host_free - _HOST_RESERVE_BYTES))
    disk = 0
    if settings.disk_paths:
        free = int(machine.free_disk_bytes * _DISK_SHARE / machine.ranks)
        disk = free if settings.disk_bytes is None else settings.disk_bytes
    if unified:
        return Budget({Tier.DEVICE: host, Tier.HOST: 0, Tier.DISK: disk})
    if not machine.device_apart:
        assert settings.device_bytes is not None
        return Budget({Tier.DEVICE: settings.device_bytes, Tier.HOST: host, Tier.DISK: disk})
    free_device = machine.free_device_bytes
    device = int(free_device * _DEVICE_SHARE) if settings.device_bytes is None else settings.device_bytes
    if device > free_device:
        raise CapacityError(
            f"device_memory is {format_bytes(device)} and the device has {format_bytes(free_device)} "
            f"free; lower device_memory or leave it at 'auto'"
        )
    return Budget({Tier.DEVICE: device, Tier.HOST: host, Tier.DISK: disk})


def smaller_first(settings: Settings, budget: Budget, ram: Tier) -> tuple[Budget, ...]:
    """The budgets that are tried one after the other: the whole one, and where RAM is short and not set, parts of it first.

    What a step takes beside pages is not known before there was one. What pages leave in RAM costs seconds; what they take
    of it and a step lacks ends the run.
    """
    whole = budget[ram]
    if settings.host_bytes is not None or whole > _SHORT_BUDGET_BYTES:
        return (budget,)
    return tuple(budget.without(ram, whole - whole * part // _SHARES) for part in range(_FIRST_SHARE, _SHARES + 1))


def beside_whole_gradients(budget: Budget, layout: ModelLayout) -> Budget:
    """What is left for pages when every rank holds all gradients in `.grad`."""
    whole = sum(flat.padded_numel * flat.gradient_itemsize for flat in layout.flats if flat.trainable)
    if whole >= budget[Tier.DEVICE]:
        raise CapacityError(
            f"reduce_gradients='each_step' keeps {format_bytes(whole)} of gradients whole on each rank, and pages have "
            f"{format_bytes(budget[Tier.DEVICE])} in all; raise device_memory (host_memory on a CPU-only machine), or use "
            f"reduce_gradients='each_backward'"
        )
    return budget.without(Tier.DEVICE, whole)


def agreed(budget: Budget, communicator: Communicator) -> Budget:
    """The smallest budget of all ranks: plans are equal on all of them."""
    values = torch.tensor([-size for size in budget.values()], dtype=torch.int64)
    least = communicator.all_reduce(values, maximum=True).tolist()
    return Budget({tier: -value for tier, value in zip(budget, least, strict=True)})


def lock_free_needs(
    request: Request,
    machine: Machine,
    layout: ModelLayout,
    dtypes: Sequence[torch.dtype],
    gradient_dtypes: Sequence[torch.dtype],
    *,
    ram: Tier,
    in_place: bool,
) -> LockFreeNeeds:
    """What lock-free updates of a layout need beside homes, with each flat's dtypes.

    Args:
        in_place: gradients that are no sums stay where autograd has put them, outside of pages.
    """
    kinds = Counter(
        (flat.shard_numel, dtypes[flat.index], gradient_dtypes[flat.index]) for flat in layout.flats if flat.trainable
    )
    spares, gradients = [], []
    for (numel, dtype, gradient_dtype), count in kinds.items():
        pages = pages_of((in_the_making(ram, numel, dtype, 1),), layout.page_size)
        making = min(count, max(_SPARES, _SPARE_PAGES // pages))
        spares.append(in_the_making(ram, numel, dtype, making))
        if in_place and gradient_dtype is dtype:
            continue  # `.grad` itself travels
        # Each flat's that waits, those of jobs in hand, one that arrives; and each flat's own where it outlives the pass.
        gradients.append(
            travelling(ram, numel, gradient_dtype, count * (2 if request.keep_gradients else 1) + making + 1)
        )
    cores = max(1, machine.cores // machine.ranks)
    asked = request.settings.lock_free_updates or LockFree()
    bound = asked.max_staleness
    return LockFreeNeeds(
        bound,
        asked.warmup_steps,
        tuple(spares),
        tuple(gradients),
        max(1, cores // 2),
        cores,
        asked.predict_weights and bound > 0,
    )


def beside_bytes(plan: LockFreeNeeds, layout: ModelLayout, *, in_place: bool, twice: bool) -> int:
    """Bytes of RAM for lock-free updates beside homes (which count one gradient of each flat) and staging.

    Args:
        in_place: gradients that are no sums stay where autograd has put them, outside of pages.
        twice: a flat's gradient may wait while the next one is kept for the step.
    """

    page = layout.page_size
    in_pages, in_grad = 0, 0
    for flat in layout.flats:
        if flat.trainable and in_place and not flat.sums_gradients:
            in_grad += -(-flat.shard_bytes // page) * page
        elif flat.trainable:
            in_pages += flat.gradient_bytes
    # The homes of gradients are counted as they are laid end to end, which may be a page less for each.
    return pages_of((*plan.spares, *plan.gradients), page) * page - in_pages + (in_grad if twice else 0)


def without(budget: Budget, size: int, ram: Tier) -> Budget:
    """A budget of which `size` bytes of RAM are spoken for."""
    if size and size >= budget[ram]:
        raise CapacityError(
            f"lock_free=True takes {format_bytes(size)} of RAM beside parameters and gradients, and pages have "
            f"{format_bytes(budget[ram])} in all; raise host_memory, or use lock_free=False"
        )
    return budget.without(ram, size)


def beside_scratch(budget: Budget, size: int, ram: Tier, *, whole: bool) -> Budget:
    """What is left beside the room for a whole gradient, or for decoded states, wherever updates may run."""
    taken, less = "optimizer_state_dtype takes {} for the states of a chunk in fp32", " or lower page_size"
    if whole:
        taken, less = "an optimizer that updates whole parameters takes {} for the gradient of the largest one", ""
    for tier in [tier for tier, have in budget.items() if tier.updates and have]:
        if size >= budget[tier]:
            named = Tier.HOST if tier is ram else tier
            raise CapacityError(
                f"{taken.format(format_bytes(size))}, and pages have {format_bytes(budget[tier])} {named.place}; "
                f"raise {named.setting}{less}"
            )
        budget = budget.without(tier, size)
    return budget


def staging_chunks(settings: Settings, of_one: int, budget: Budget, most: int, *, least: int) -> int:
    """Chunks in flight, each of so many bytes."""
    if settings.tuning.staging_bytes is not None:
        chunks = settings.tuning.staging_bytes // of_one
        if chunks < 1:
            raise ConfigError(
                f"staging_memory is {format_bytes(settings.tuning.staging_bytes)} and one chunk of this "
                f"optimizer's states takes "
                f"{format_bytes(of_one)}; raise staging_memory or lower page_size"
            )
        return chunks
    ram = budget[Tier.HOST] or budget[Tier.DEVICE]
    return min(most, max(least, int(ram * _STAGING_SHARE) // of_one))


def wishes_of(settings: Settings, unified: bool, *, lock_free: bool) -> PlacementWishes:
    """Homes that the settings ask for.

    Raises:
        ConfigError: they cannot be had with lock-free updates.
    """

    def tier(home: Home) -> Tier | None:
        wanted = home_tier(home)
        return Tier.DEVICE if unified and wanted is Tier.HOST else wanted

    if not lock_free:
        return PlacementWishes(parameter=tier(settings.offload_parameters), master=tier(settings.offload_optimizer))
    if settings.offload_parameters == "device" and not unified:
        raise ConfigError(
            "lock_free=True keeps compute parameters in RAM, and offload_parameters is 'device'; leave it at 'auto'"
        )
    if settings.wanted_offload_optimizer == "device" and not unified:
        raise ConfigError("lock_free=True updates on the CPU, and offload_optimizer is 'device'; use 'disk' or 'host'")
    return PlacementWishes(parameter=ram_tier(unified=unified), master=tier(settings.wanted_offload_optimizer))
