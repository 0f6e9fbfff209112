"""Budgets of pages per tier, less what unsharded gradients, staging and lock-free updates need.

Decides only: reads the settings and the machine's free memory, and allocates nothing.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

import torch

from lightning_ptm.comm import Communicator
from lightning_ptm.config import Home, LockFree, Settings, format_bytes, home_tier
from lightning_ptm.errors import CapacityError, ConfigError
from lightning_ptm.planning.inventory import pages_of
from lightning_ptm.planning.layout import FlatLayout, ModelLayout
from lightning_ptm.planning.placement_data import Budget, PlacementWishes
from lightning_ptm.runtime.deciding.blueprint import LockFreeNeeds, Request, ram_tier
from lightning_ptm.runtime.deciding.build_inventory import queued_gradients_row, spare_versions_row
from lightning_ptm.runtime.machine.machine import SHORT_RAM_BYTES, Machine
from lightning_ptm.terms import Tier

_HOST_SHARE = 0.8
_HOST_RESERVE_BYTES = 1 << 30
"""RAM that `auto` leaves to activations, libraries and data on machines with enough RAM."""
_MOST_SHARE = 7 / 8
"""Largest share of free RAM that `auto` gives to pages where RAM is short, used only if no smaller share suffices."""
_SHORT_BUDGET_BYTES = SHORT_RAM_BYTES - _HOST_RESERVE_BYTES
_SHARES = 28
"""Number of equal parts into which the largest budget is divided where RAM is short."""
_FIRST_SHARE = 8
"""Number of these parts in the first budget that is tried: a quarter of the free RAM."""
_DEVICE_SHARE = 0.5
"""Share of the free device memory that `auto` gives to pages of a run that does not train."""
_DEVICE_SHARES = 16
"""Number of equal parts into which the free device memory is divided to find the least budget of a fit."""
_DEVICE_RESERVE = 1 / 64
"""Share of the free device memory that neither pages nor the traced peak take."""
_SHARE_MORE = 1 / 32
"""Share of a traced step's bytes by which another step may exceed them."""
_SHARE_THAT_VARIES = 1 / 4
"""The same where the data decide what is computed (experts)."""
_DISK_SHARE = 0.95
STAGING_CHUNKS = 12
"""Chunks in flight between disk and update if RAM allows: enough to keep a disk busy while compute is between ticks."""
_SPARES = 2
"""Minimum of spare versions for flats of one size: one that is written, and one for a flat that compute waits for."""
_SPARE_PAGES = 8
"""Pages up to which flats of one size get more spare versions than the minimum."""
LOCK_FREE_CHUNKS = 8
"""Chunks in flight in lock-free mode, whose updates run in their own thread; the rest of 64 pages is for spare versions."""
_STAGING_SHARE = 1 / 8
"""Largest share of the RAM budget that staging takes unless `staging_memory` is set."""


def pages_budget(
    settings: Settings, machine: Machine, unified: bool, *, trains: bool = False, beside_bytes: int | None = None
) -> Budget:
    """Returns the bytes of each tier that pages of one rank may take: as set, or a share of the free memory.

    Args:
        trains: whether the run is a fit: its first step has the least budget of `budgets_to_try`, and the others what the
            traced step leaves.
        beside_bytes: see Request.

    Raises:
        CapacityError: device_memory is larger than the device's free memory.
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
    if not machine.device_has_own_memory:
        assert settings.device_bytes is not None
        return Budget({Tier.DEVICE: settings.device_bytes, Tier.HOST: host, Tier.DISK: disk})
    free_device = machine.free_device_bytes
    device = settings.device_bytes
    if device is None:
        device = _auto_device_bytes(machine, trains, beside_bytes)
    if device > free_device:
        raise CapacityError(
            f"device_memory is {format_bytes(device)} and the device has {format_bytes(free_device)} "
            f"free; lower device_memory or leave it at 'auto'"
        )
    return Budget({Tier.DEVICE: device, Tier.HOST: host, Tier.DISK: disk})


def _auto_device_bytes(machine: Machine, trains: bool, beside_bytes: int | None) -> int:
    """Returns what `device_memory="auto"` gives to pages at most."""
    free = machine.free_device_bytes
    if not trains:
        return int(free * _DEVICE_SHARE)
    if beside_bytes is None:
        return free * (_DEVICE_SHARES - 1) // _DEVICE_SHARES
    return max(0, free - device_reserve(free) - max(0, beside_bytes - machine.taken_device_bytes))


def device_reserve(free_bytes: int) -> int:
    """Returns the bytes of the free device memory that neither pages nor the traced peak take."""
    return free_bytes - int(free_bytes * (1 - _DEVICE_RESERVE))


def with_headroom(of_step_bytes: int, *, varies: bool) -> int:
    """Returns the bytes that pages leave to steps like one that has taken `of_step_bytes` beside them.

    Args:
        varies: whether the data decide what is computed, and so how many activations there are.
    """
    return of_step_bytes + int(of_step_bytes * (_SHARE_THAT_VARIES if varies else _SHARE_MORE))


def budgets_to_try(
    settings: Settings, budget: Budget, ram: Tier, *, least_device: bool = False, known_bytes: int = 0
) -> tuple[tuple[Budget, ...], ...]:
    """Returns the budgets to try in turn: the whole one; smaller ones first where RAM is short and host_memory is not set.
    Those of a group differ in RAM alone, and the last of them is the largest.

    How much RAM a step needs in addition to pages is unknown before the first step. A budget that is too small costs
    seconds of disk traffic; one that is too large ends the run out of memory. For the same reason a fit begins with the
    least device memory with which its plan is possible.

    Args:
        least_device: smaller budgets of the device are tried first.
        known_bytes: bytes of the device that are tried before all others then, and otherwise behind them; 0: there are none.
    """
    sizes = [budget[Tier.DEVICE]]
    if least_device:
        whole, parts = budget[Tier.DEVICE], range(1, _DEVICE_SHARES)
        sizes = [whole * part // parts[-1] for part in parts]
        if 0 < known_bytes <= whole:
            sizes.insert(0, known_bytes)
    elif known_bytes:
        sizes.append(known_bytes)
    found = [Budget({**budget, Tier.DEVICE: size}) for size in sizes]
    whole = budget[ram]
    if settings.host_bytes is not None or whole > _SHORT_BUDGET_BYTES:
        return tuple((each,) for each in found)
    shares = range(_FIRST_SHARE, _SHARES + 1)
    return tuple(tuple(each.without(ram, whole - whole * part // _SHARES) for part in shares) for each in found)


def without_whole_gradients(budget: Budget, flats: Iterable[FlatLayout], reason: str, remedy: str) -> Budget:
    """Returns the budget less the unsharded gradients that every rank holds in `.grad` until the step.

    Args:
        flats: whose gradients these are.
        reason, remedy: why they are whole, and what to do if they take too much, in words.

    Raises:
        CapacityError: these gradients take the whole device tier.
    """
    whole = sum(flat.padded_numel * flat.gradient_itemsize for flat in flats if flat.trainable)
    if whole >= budget[Tier.DEVICE]:
        raise CapacityError(
            f"{reason} keeps {format_bytes(whole)} of gradients whole on each rank, and pages may take "
            f"{format_bytes(budget[Tier.DEVICE])}; raise device_memory (host_memory without a GPU), or {remedy}"
        )
    return budget.without(Tier.DEVICE, whole)


def agreed(budget: Budget, communicator: Communicator) -> Budget:
    """Returns the smallest budget of all ranks, so that plans are equal on all of them. Collective."""
    if communicator.alone:
        return budget
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
    """Returns the pages and cores that lock-free updates need in addition to the homes.

    Args:
        dtypes, gradient_dtypes: compute dtype and gradient dtype of each flat.
        in_place: gradients that are not accumulated stay in `.grad`, outside pages.
    """
    kinds = Counter(
        (flat.shard_numel, dtypes[flat.index], gradient_dtypes[flat.index]) for flat in layout.flats if flat.trainable
    )
    spares, gradients = [], []
    for (numel, dtype, gradient_dtype), count in kinds.items():
        pages = pages_of((spare_versions_row(ram, numel, dtype, 1),), layout.page_size)
        making = min(count, max(_SPARES, _SPARE_PAGES // pages))
        spares.append(spare_versions_row(ram, numel, dtype, making))
        if in_place and gradient_dtype is dtype:
            continue  # `.grad` itself is queued for the update
        # One that waits per flat, one per running update, one that arrives; and one more per flat kept for the step.
        gradients.append(
            queued_gradients_row(ram, numel, gradient_dtype, count * (2 if request.keep_gradients else 1) + making + 1)
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


def lock_free_bytes(plan: LockFreeNeeds, layout: ModelLayout, *, in_place: bool, twice: bool) -> int:
    """Returns the RAM that lock-free updates need in addition to staging and homes (which include one gradient per flat).

    Args:
        in_place: gradients that are not accumulated stay in `.grad`, outside pages.
        twice: a flat's gradient may wait for its update while the next one is kept for the step.
    """

    page = layout.page_size
    in_pages, in_grad = 0, 0
    for flat in layout.flats:
        if flat.trainable and in_place and not flat.sums_gradients:
            in_grad += -(-flat.shard_bytes // page) * page
        elif flat.trainable:
            in_pages += flat.gradient_bytes
    # Homes of gradients are counted as packed end to end, which may be a page less for each.
    return pages_of((*plan.spares, *plan.gradients), page) * page - in_pages + (in_grad if twice else 0)


def without_lock_free(budget: Budget, size: int, ram: Tier) -> Budget:
    """Returns the budget less the `size` bytes of RAM of lock-free updates.

    Raises:
        CapacityError: they take all of it.
    """
    if size and size >= budget[ram]:
        raise CapacityError(
            f"lock_free=True takes {format_bytes(size)} of RAM for new versions of parameters and queued gradients, in "
            f"addition to parameters and gradients, and pages may take {format_bytes(budget[ram])}; raise host_memory, or "
            f"use lock_free=False"
        )
    return budget.without(ram, size)


def without_scratch(budget: Budget, size: int, ram: Tier, *, whole: bool) -> Budget:
    """Returns the budget less the scratch buffers of updates (a whole gradient, or decoded states) in each tier where
    updates may run.

    Args:
        size: bytes of the scratch buffers.
        whole: whether they are for an optimizer that updates whole parameters.

    Raises:
        CapacityError: they take a whole tier.
    """
    taken, less = "optimizer_state_dtype takes {} for the states of a chunk in fp32", " or lower page_size"
    if whole:
        taken, less = "an optimizer that updates whole parameters takes {} for the gradient of the largest one", ""
    for tier in [tier for tier, have in budget.items() if tier.updates and have]:
        if size >= budget[tier]:
            named = Tier.HOST if tier is ram else tier
            raise CapacityError(
                f"{taken.format(format_bytes(size))}, and pages may take {format_bytes(budget[tier])} {named.place}; "
                f"raise {named.setting}{less}"
            )
        budget = budget.without(tier, size)
    return budget


def staging_chunks(settings: Settings, of_one: int, budget: Budget, most: int, *, least: int) -> int:
    """Returns the number of chunks in flight.

    Args:
        of_one: staging bytes of one chunk.
        most, least: bounds of the number unless `staging_memory` is set.

    Raises:
        ConfigError: `staging_memory` is smaller than one chunk.
    """
    if settings.tuning.staging_bytes is not None:
        chunks = settings.tuning.staging_bytes // of_one
        if chunks < 1:
            raise ConfigError(
                f"tuning=Tuning(staging_memory=...) is {format_bytes(settings.tuning.staging_bytes)} and one chunk of this "
                f"optimizer's states takes {format_bytes(of_one)}, so no update could run; raise staging_memory or lower "
                f"page_size"
            )
        return chunks
    ram = budget[Tier.HOST] or budget[Tier.DEVICE]
    return min(most, max(least, int(ram * _STAGING_SHARE) // of_one))


def wishes_of(settings: Settings, unified: bool, *, lock_free: bool) -> PlacementWishes:
    """Returns the homes that the settings require.

    Raises:
        ConfigError: they are incompatible with lock-free updates.
    """

    def tier(home: Home) -> Tier | None:
        wanted = home_tier(home)
        return Tier.DEVICE if unified and wanted is Tier.HOST else wanted

    if not lock_free:
        return PlacementWishes(parameter=tier(settings.offload_parameters), master=tier(settings.offload_optimizer))
    if settings.offload_parameters == "device" and not unified:
        raise ConfigError(
            "lock_free=True keeps compute parameters in RAM, and offload_parameters is 'device', so no plan has both; "
            "leave offload_parameters at 'auto', or use lock_free=False"
        )
    if settings.wanted_offload_optimizer == "device" and not unified:
        raise ConfigError(
            "lock_free=True updates on the CPU, and offload_optimizer is 'device', so no plan has both; use "
            "offload_optimizer='disk' or 'host', or lock_free=False"
        )
    return PlacementWishes(parameter=ram_tier(unified=unified), master=tier(settings.wanted_offload_optimizer))
