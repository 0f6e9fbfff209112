"""Reports on a run: model states by tier, the inventory of pages, planned bytes at each tick, and statistics for logs.

Owns nothing and changes nothing. `statistics` is cheap; `planned_bytes` is too slow to call at every step, since it replays
the plan.
"""

from __future__ import annotations

import dataclasses
import itertools
import os
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lightning_ptm.config import format_bytes
from lightning_ptm.memory.paged_tensor import PagedTensor
from lightning_ptm.memory.transfer import LinkStats
from lightning_ptm.planning.fetch_policy import Lookups
from lightning_ptm.planning.inventory import What
from lightning_ptm.runtime.engine.predicted_memory import predicted_memory
from lightning_ptm.runtime.ranks.experts import TokenStats
from lightning_ptm.runtime.updates.audits import StalenessStats, UpdateAudit
from lightning_ptm.runtime.updates.lock_free import LockFreeUpdates
from lightning_ptm.terms import Mode, Tier

if TYPE_CHECKING:
    from lightning_ptm.runtime.deciding.blueprint import Blueprint
    from lightning_ptm.runtime.engine.engine import Engine


_STATES = (What.PARAMETERS, What.MASTERS, What.STATES)


@dataclasses.dataclass(frozen=True, slots=True)
class StateBytes:
    """Size of this rank's model states of one kind whose home is one tier.

    Attributes:
        states: "parameters" (compute parameters), "gradients", "master parameters" or "optimizer states".
        tier: "device", "host" or "disk". On a CPU without a device budget RAM is the tier "host".
        bytes: bytes of the tensors, without unused ends of pages.
        units: number of units that have such states there.
    """

    states: str
    tier: str
    bytes: int
    units: int


@dataclasses.dataclass(frozen=True, slots=True)
class OptimizerBytes:
    """Size of an optimizer's states in pages of this rank, without master parameters.

    Attributes:
        optimizer: class of the optimizer.
        kind: "element-wise" or "whole parameters": what the optimizer updates at once.
        bytes: bytes of its states.
    """

    optimizer: str
    kind: str
    bytes: int


@dataclasses.dataclass(frozen=True, slots=True)
class TierRoom:
    """Size of one tier of this rank: bytes of all its pages, and of the pages in use now."""

    tier: str
    bytes: int
    used_bytes: int


@dataclasses.dataclass(frozen=True, slots=True)
class PageUse:
    """Size of the pages that one tier of this rank has for one purpose (`optimizer states`, `staging buffers`)."""

    tier: str
    purpose: str
    bytes: int


@dataclasses.dataclass(frozen=True, slots=True)
class PlannedBytes:
    """Bytes that the plan uses in one tier of this rank.

    Attributes:
        per_tick: peak bytes in each tick of an iteration; the last entry is after the last tick.
        room: bytes of all pages of the tier.
        budget: bytes that the plan may use. More than `room` where one rank's gradients stay in `.grad`: the plan counts
            them, and pages do not hold them.
    """

    tier: str
    per_tick: tuple[int, ...]
    room: int
    budget: int


def states_at_home(engine: Engine) -> tuple[StateBytes, ...]:
    """Returns the model states by kind and home. Gradients that stay in `.grad`, or pass through pages of gathered units,
    have no home and are left out."""
    bytes_of: dict[tuple[str, Tier], int] = {}
    units_of: dict[tuple[str, Tier], set[int]] = {}
    counted: set[int] = set()

    def add(states: str, tensor: PagedTensor | None, unit: int) -> None:
        if tensor is not None and tensor.id not in counted:  # updates of several optimizers have one master
            counted.add(tensor.id)
            key = (states, tensor.tier)
            bytes_of[key] = bytes_of.get(key, 0) + tensor.nbytes
            units_of.setdefault(key, set()).add(unit)

    for store, flats in zip(engine.stores, engine.flats, strict=True):
        unit = store.unit.index
        for flat in store.flats:
            add("parameters", flat.home, unit)
        for update in flats:
            add("gradients", update.gradient.shard.pages, unit)
            add("master parameters", update.states.master, unit)
            for slot in update.states.slots.values():
                add("optimizer states", slot, unit)
    order = ("parameters", "gradients", "master parameters", "optimizer states")
    keys = sorted(bytes_of, key=lambda key: (order.index(key[0]), key[1].distance))
    return tuple(
        StateBytes(states, engine.blueprint.name_of(tier), bytes_of[states, tier], len(units_of[states, tier]))
        for states, tier in keys
    )


def optimizers_in_pages(blueprint: Blueprint) -> tuple[OptimizerBytes, ...]:
    """Returns the optimizers whose states are in pages, in the order of `configure_optimizers`."""
    found: dict[int, OptimizerBytes] = {}
    for flat in blueprint.trained_flats():
        for number, traits in zip(flat.optimizers, blueprint.traits[flat.index], strict=True):
            kind = "whole parameters" if traits.whole else "element-wise"
            states = (column for column in blueprint.state_tensors[flat.index] if column.optimizer == number)
            size = sum(column.layout.numel * column.layout.dtype.itemsize for column in states)
            before = found[number].bytes if number in found else 0
            found[number] = OptimizerBytes(traits.name, kind, before + size)
    return tuple(found[number] for number in sorted(found))


def states_in_words(engine: Engine) -> str:
    """Returns `states_at_home` as a phrase, with the memory of pages: `148 KiB of model states: 50 KiB in RAM (parameters),
    99 KiB on disk in /x (/, 80 GiB free) (master parameters); pages take 2 MiB in RAM (other than states: ...)`.
    """
    rows = states_at_home(engine)
    ranks = engine.communicator.world_size
    parts = []
    for tier in engine.blueprint.reported_tiers:
        here = [row for row in rows if row.tier == engine.blueprint.name_of(tier)]
        if here:
            size = format_bytes(sum(row.bytes for row in here))
            states = ", ".join(row.states for row in here)
            parts.append(f"{size} {_place(engine, tier)} ({states})")
    whose = f" (rank {engine.communicator.rank} of {ranks})" if ranks > 1 else ""
    kept = f"{format_bytes(sum(row.bytes for row in rows))} of model states{whose}: {', '.join(parts)}"
    pages = [taken for tier in engine.blueprint.budget if tier.addressable and (taken := _pages_in_words(engine, tier))]
    return f"{kept}; pages take {' and '.join(pages)}" if pages else kept


def _pages_in_words(engine: Engine, tier: Tier) -> str:
    """Returns the bytes of a tier's pages as a phrase, with purposes other than states; empty if it has no pages."""
    purposes = {
        what.value: size for what, size in engine.blueprint.inventory.by_what(tier).items() if what not in _STATES
    }
    whole = engine.blueprint.inventory.pool_bytes(tier)
    words = ", ".join(f"{what} {format_bytes(size)}" for what, size in purposes.items())
    return (
        f"{format_bytes(whole)} {_memory(engine, tier)}" + (f" (other than states: {words})" if words else "")
        if whole
        else ""
    )


def _memory(engine: Engine, tier: Tier) -> str:
    where = Tier.HOST.place if engine.blueprint.unified and tier.computes else tier.place
    return f"{where} ({engine.device})" if tier.computes and not engine.blueprint.unified else where


def _place(engine: Engine, tier: Tier) -> str:
    if tier.addressable:
        return _memory(engine, tier)
    folders = ", ".join(f"{path} ({file_system(path)})" for path in engine.disk_paths)
    return f"{tier.place} in {folders}"


def file_system(path: Path) -> str:
    """Returns a folder's mount point and the free space of its file system, as in `/data, 79 GiB free`."""
    mount = path.resolve()
    while not os.path.ismount(mount) and mount != mount.parent:
        mount = mount.parent
    return f"{mount}, {format_bytes(shutil.disk_usage(mount).free)} free"


def rooms(engine: Engine) -> tuple[TierRoom, ...]:
    """Returns the sizes of the tiers of this run, fastest first. Cheap."""
    allocator = engine.allocator
    return tuple(
        TierRoom(engine.blueprint.name_of(tier), room, room - allocator.free_bytes(tier))
        for tier in engine.blueprint.budget
        if (room := allocator.capacity_bytes(tier))
    )


def inventory(engine: Engine) -> tuple[PageUse, ...]:
    """Returns the bytes of this run's pages by tier and purpose."""
    return tuple(
        PageUse(engine.blueprint.name_of(tier), what.value, size)
        for tier in engine.blueprint.budget
        for what, size in engine.blueprint.inventory.by_what(tier).items()
    )


def flat_names(engine: Engine) -> dict[int, str]:
    """Returns, by number of the flat (which names its pages), the name of its unit; `blocks.0 (2)` for its second flat."""
    return {
        flat.layout.index: (store.unit.name or "root") + (f" ({number})" if number > 1 else "")
        for store in engine.stores
        for number, flat in enumerate(store.flats, start=1)
    }


def planned_bytes(engine: Engine, mode: Mode) -> tuple[PlannedBytes, ...]:
    """Returns the bytes of pages at each tick of the present plan; empty if there is no plan."""
    made = engine.executor.plans.planned(mode)
    if made is None:
        return ()
    found = predicted_memory(engine.blueprint, *made)
    return tuple(
        PlannedBytes(engine.blueprint.name_of(tier), found.per_tick(tier), room, engine.blueprint.budget[tier])
        for tier in engine.blueprint.budget
        if (room := engine.allocator.capacity_bytes(tier))
    )


@dataclasses.dataclass(frozen=True, slots=True)
class Statistics:
    """Totals of one rank since the run began.

    Attributes:
        links: bytes, transfers, and seconds with at least one transfer in flight, by link ("disk_to_device" and so on;
            "disk_to_host" where the device is a CPU without a budget of its own); with
            `offload_activations="host"` also "activations_to_host" and "activations_to_device", on streams of their own; with
            "disk" also "activations_to_disk" and "activations_from_disk".
        stall_s: seconds that compute waited, by cause: "fetch" for parameters, "update" for an update of them, "save" for
            checkpoints.
        busy_s: seconds with a copy in flight on any link (on CUDA, copies between RAM and the device are added up).
        uses: numbers of uses of units' parameters, by where compute found them.
        update_arithmetic_s: seconds of optimizer arithmetic.
        staleness: staleness of the parameters that training read; None for synchronous updates.
        tokens: tokens sent to experts and back; None where experts are not divided over ranks.
        updates_per_step: updates of a parameter per optimizer step; 1 in synchronous runs.
        disk_written_bytes: bytes written to pages in each folder of `disk_path`, in whole disk blocks: by updates,
            gradients and activations, and at the start by first values. Checkpoints are not counted.
    """

    links: Mapping[str, LinkStats]
    stall_s: Mapping[str, float]
    busy_s: float
    uses: Lookups
    update_arithmetic_s: float
    staleness: StalenessStats | None
    updates_per_step: float
    tokens: TokenStats | None = None
    disk_written_bytes: tuple[int, ...] = ()


def collect(engine: Engine) -> Statistics:
    """Returns the statistics of an engine up to now. Cheap: waits for nothing."""
    updates = engine.updates if isinstance(engine.updates, LockFreeUpdates) else None
    # An update thread that waits for a checkpoint does not stall compute.
    name_of = engine.blueprint.name_of
    save_s = engine.save_stall_s + (0.0 if engine.updater.in_thread else engine.updater.stats.save_stall_s)
    links = {
        f"{name_of(source)}_to_{name_of(target)}": stats for (source, target), stats in engine.allocator.stats().items()
    }
    written = engine.allocator.disk_written_bytes()
    if engine.offload is not None:
        links |= {name: stats for name, stats in engine.offload.links().items() if stats.transfers}
        written = _sums(written, engine.offload.disk_written_bytes())
    return Statistics(
        links=links,
        stall_s={**engine.executor.compute_timing.stall_s, "save": save_s},
        busy_s=engine.allocator.busy_s(),
        uses=dataclasses.replace(engine.executor.fetching.lookups),
        update_arithmetic_s=engine.updater.stats.arithmetic_s,
        staleness=dataclasses.replace(updates.versions.stats) if updates is not None else None,
        updates_per_step=updates.updates_per_step if updates is not None else 1.0,
        tokens=dataclasses.replace(engine.expert_groups.stats) if engine.expert_groups is not None else None,
        disk_written_bytes=written,
    )


def together(earlier: Statistics | None, now: Statistics) -> Statistics:
    """Returns the sum of a run's statistics before and after a re-layout; `updates_per_step` is that of the later part."""
    if earlier is None:
        return now
    links = {name: _sum(earlier.links.get(name), now.links.get(name)) for name in {**earlier.links, **now.links}}
    staleness = _sum(earlier.staleness, now.staleness)
    if earlier.staleness is not None and now.staleness is not None:
        staleness = dataclasses.replace(staleness, maximum=max(earlier.staleness.maximum, now.staleness.maximum))
    causes = {**earlier.stall_s, **now.stall_s}
    return Statistics(
        links=links,
        stall_s={cause: earlier.stall_s.get(cause, 0.0) + now.stall_s.get(cause, 0.0) for cause in causes},
        busy_s=earlier.busy_s + now.busy_s,
        uses=_sum(earlier.uses, now.uses),
        update_arithmetic_s=earlier.update_arithmetic_s + now.update_arithmetic_s,
        staleness=staleness,
        updates_per_step=now.updates_per_step,
        tokens=_sum(earlier.tokens, now.tokens),
        disk_written_bytes=_sums(earlier.disk_written_bytes, now.disk_written_bytes),
    )


def _sums(first: Sequence[int], second: Sequence[int]) -> tuple[int, ...]:
    return tuple(map(sum, itertools.zip_longest(first, second, fillvalue=0)))


def _sum(first: Any, second: Any) -> Any:
    """Returns the field-wise sum of two dataclasses of numbers; either may be None."""
    if first is None or second is None:
        return second if first is None else first
    added = {
        field.name: getattr(first, field.name) + getattr(second, field.name) for field in dataclasses.fields(first)
    }
    return dataclasses.replace(second, **added)


def audit(engine: Engine) -> tuple[UpdateAudit, ...]:
    """Returns the record of each flat's gradients and updates; empty for synchronous updates, where none is pending between
    steps."""
    return engine.updates.audit() if isinstance(engine.updates, LockFreeUpdates) else ()


def last_audit(engine: Engine) -> tuple[UpdateAudit, ...]:
    """Returns the audit of the last drain; see `audit`. Waits for nothing, and works after an update has failed."""
    return engine.updates.last_audit if isinstance(engine.updates, LockFreeUpdates) else ()
