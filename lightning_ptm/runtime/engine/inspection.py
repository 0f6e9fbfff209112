"""Reports on a run for users: model states by tier, the inventory of pages, and planned bytes at each tick.

Owns nothing and changes nothing. Too slow to call at every step: `planned_bytes` replays the plan.
"""

from __future__ import annotations

import dataclasses
import os
import shutil
from pathlib import Path
from typing import TYPE_CHECKING

from lightning_ptm.config import format_bytes
from lightning_ptm.memory.paged_tensor import PagedTensor
from lightning_ptm.planning.inventory import What
from lightning_ptm.runtime.deciding.predicted_memory import predicted_memory
from lightning_ptm.runtime.deciding.state_tensors import columns
from lightning_ptm.terms import Mode, Tier

_STATES = (What.PARAMETERS, What.MASTERS, What.STATES)

if TYPE_CHECKING:
    from lightning_ptm.runtime.deciding.blueprint import Blueprint
    from lightning_ptm.runtime.engine.engine import Engine


@dataclasses.dataclass(frozen=True, slots=True)
class StateBytes:
    """Size of this rank's model states of one kind whose home is one tier.

    Attributes:
        states: "parameters" (compute parameters), "gradients", "master parameters" or "optimizer states".
        tier: "device", "host" or "disk". On a CPU without a device budget the device tier is RAM.
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
        StateBytes(states, tier.name.lower(), bytes_of[states, tier], len(units_of[states, tier]))
        for states, tier in keys
    )


def optimizers_in_pages(blueprint: Blueprint) -> tuple[OptimizerBytes, ...]:
    """Returns the optimizers whose states are in pages, in the order of `configure_optimizers`."""
    found: dict[int, OptimizerBytes] = {}
    for flat in blueprint.trained_flats():
        for number, traits in zip(flat.optimizers, blueprint.traits[flat.index], strict=True):
            kind = "whole parameters" if traits.whole else "element-wise"
            states = (column for column in columns(blueprint, flat.index) if column.optimizer == number)
            size = sum(column.numel * column.dtype.itemsize for column in states)
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
    for tier in engine.blueprint.budget:
        here = [row for row in rows if row.tier == tier.name.lower()]
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
        TierRoom(tier.name.lower(), room, room - allocator.free_bytes(tier))
        for tier in engine.blueprint.budget
        if (room := allocator.capacity_bytes(tier))
    )


def inventory(engine: Engine) -> tuple[PageUse, ...]:
    """Returns the bytes of this run's pages by tier and purpose."""
    return tuple(
        PageUse(tier.name.lower(), what.value, size)
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
        PlannedBytes(tier.name.lower(), found.per_tick(tier), room, engine.blueprint.budget[tier])
        for tier in engine.blueprint.budget
        if (room := engine.allocator.capacity_bytes(tier))
    )
