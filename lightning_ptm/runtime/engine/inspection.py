"""What a run has decided, for people to read: its plan, what lives where, the traced iteration, bytes at each tick.

Owns nothing and changes nothing. Not for every step: some of it replays the plan.
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
    """Model states of one kind that are at home in one tier, on this rank.

    Attributes:
        states: "parameters" (what computes), "gradients", "master parameters" or "optimizer states".
        tier: "device", "host" or "disk". On a CPU without a device budget the device tier is RAM.
        bytes: of the tensors, without what is unused at the ends of their pages.
        units: how many units have some of them.
    """

    states: str
    tier: str
    bytes: int
    units: int


@dataclasses.dataclass(frozen=True, slots=True)
class OptimizerBytes:
    """What an optimizer keeps in pages of this rank, master parameters not counted.

    Attributes:
        optimizer: its class.
        kind: "element-wise", or "whole parameters": what it updates at once.
    """

    optimizer: str
    kind: str
    bytes: int


@dataclasses.dataclass(frozen=True, slots=True)
class TierRoom:
    """One tier of this rank: bytes of all its pages, and of those in use now."""

    tier: str
    bytes: int
    used_bytes: int


@dataclasses.dataclass(frozen=True, slots=True)
class PageUse:
    """Bytes of the pages that a tier of this rank has for one purpose (`optimizer states`, `staging buffers`)."""

    tier: str
    purpose: str
    bytes: int


@dataclasses.dataclass(frozen=True, slots=True)
class PlannedBytes:
    """What the plan holds in one tier, in bytes of this rank.

    Attributes:
        per_tick: at the worst moment of each tick of an iteration; the last entry is after the last tick.
        room: bytes of all pages of the tier.
        budget: bytes that the plan may hold. More than the room where one rank's gradients stay in `.grad`, which the plan
            counts and pages need not hold.
    """

    tier: str
    per_tick: tuple[int, ...]
    room: int
    budget: int


def states_at_home(engine: Engine) -> tuple[StateBytes, ...]:
    """What lives where between steps. Gradients that stay in `.grad`, or pass through pages of the gathered units, have no
    home and no row."""
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
    """Those whose states are in pages, in the order of `configure_optimizers`."""
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
    """`states_at_home` in a phrase, and what pages take of memory beside them: `148 KiB of model states: 50 KiB in RAM
    (parameters), 99 KiB on disk in /x (/, 80 GiB free) (master parameters); pages take 2 MiB in RAM (beside states: ...)`.
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
    """All that a tier's pages take, and for what beside states; empty where it has none."""
    beside = {
        what.value: size for what, size in engine.blueprint.inventory.by_what(tier).items() if what not in _STATES
    }
    whole = engine.blueprint.inventory.pool_bytes(tier)
    words = ", ".join(f"{what} {format_bytes(size)}" for what, size in beside.items())
    return (
        f"{format_bytes(whole)} {_memory(engine, tier)}" + (f" (beside states: {words})" if words else "")
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
    """`/data, 79 GiB free`: where the file system of a folder is mounted, and what it has left for this user."""
    mount = path.resolve()
    while not os.path.ismount(mount) and mount != mount.parent:
        mount = mount.parent
    return f"{mount}, {format_bytes(shutil.disk_usage(mount).free)} free"


def rooms(engine: Engine) -> tuple[TierRoom, ...]:
    """The tiers that this run has, fastest first. Cheap."""
    allocator = engine.allocator
    return tuple(
        TierRoom(tier.name.lower(), room, room - allocator.free_bytes(tier))
        for tier in engine.blueprint.budget
        if (room := allocator.capacity_bytes(tier))
    )


def inventory(engine: Engine) -> tuple[PageUse, ...]:
    """What the pages of this run are for."""
    return tuple(
        PageUse(tier.name.lower(), what.value, size)
        for tier in engine.blueprint.budget
        for what, size in engine.blueprint.inventory.by_what(tier).items()
    )


def flat_names(engine: Engine) -> dict[int, str]:
    """For each flat's number, by which pages are named, the name of its unit; `blocks.0 (2)` is a unit's second flat."""
    return {
        flat.layout.index: (store.unit.name or "root") + (f" ({number})" if number > 1 else "")
        for store in engine.stores
        for number, flat in enumerate(store.flats, start=1)
    }


def planned_bytes(engine: Engine, mode: Mode) -> tuple[PlannedBytes, ...]:
    """Bytes of pages at each tick of the plan that is followed; empty where there is no plan."""
    made = engine.executor.plans.planned(mode)
    if made is None:
        return ()
    found = predicted_memory(engine.blueprint, *made)
    return tuple(
        PlannedBytes(tier.name.lower(), found.per_tick(tier), room, engine.blueprint.budget[tier])
        for tier in engine.blueprint.budget
        if (room := engine.allocator.capacity_bytes(tier))
    )
