"""Everything that is decided before a byte is allocated: units, layout, homes, sizes of the tiers.

Decides only, from the model's shapes, the optimizers' groups, the settings and what the machine has; returns one frozen
`Blueprint`. Equal on all ranks, up to what their machines have free (the smallest counts), and up to the experts that each
holds, and the parts of parameters, where ranks divide them. `draw` is for the ranks that
run; `decide` makes the same decisions for a machine and a number of ranks that need not be there.
"""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import partial

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_ptm.comm import Communicator
from lightning_ptm.config import Home, Settings, format_bytes, home_tier
from lightning_ptm.errors import CapacityError, ConfigError, InternalError
from lightning_ptm.memory import check_folders
from lightning_ptm.memory.backend import Backend
from lightning_ptm.planning.demand import pages_beside_full_gradients
from lightning_ptm.planning.experts import ExpertSplit
from lightning_ptm.planning.holders import Holders, everybodys
from lightning_ptm.planning.homes import Budget, Homes, Placement, Wishes
from lightning_ptm.planning.inventory import NOTHING, Inventory, Row, What, pages_of
from lightning_ptm.planning.layout import FlatLayout, ModelLayout, ParameterSpec, UnitSpec, build_layout
from lightning_ptm.planning.pace import paced_steps
from lightning_ptm.planning.placement import place
from lightning_ptm.planning.tiers import check_further
from lightning_ptm.planning.trace import Trace, forward_trace, sequential_trace
from lightning_ptm.runtime.closed import ClosedParameter
from lightning_ptm.runtime.columns import chunk_bytes, own_state_bytes, scratch_bytes
from lightning_ptm.runtime.encoded_states import encoded_traits
from lightning_ptm.runtime.experts import DividedExperts, divide, expert_layers, experts_of
from lightning_ptm.runtime.machine import Machine, this_machine
from lightning_ptm.runtime.overlap import overlap
from lightning_ptm.runtime.parts import Boxes, split_of
from lightning_ptm.runtime.route import GradientRoute, route
from lightning_ptm.runtime.selfstepping import Traits, check_shared, in_two, reasons
from lightning_ptm.runtime.stock import in_the_making, take_stock, travelling
from lightning_ptm.runtime.units import Unit, UnitParameter, discover
from lightning_ptm.terms import CODES, Code, Tier
from lightning_ptm.update import OptimizerTraits, probe

_FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
_HOST_SHARE = 0.8
_HOST_RESERVE_BYTES = 1 << 30
"""RAM that `auto` leaves to activations, libraries and data, unless that were more than half of it."""
_DEVICE_SHARE = 0.5
"""Share of the free device memory that `auto` takes for pages; activations and the libraries get the rest."""
_DISK_SHARE = 0.95
_ROOMY_SHARE = 1 / 4
"""With a disk tier: where pages take less of the free RAM than this, freed memory may stay for the next step."""
_STAGING_CHUNKS = 12
"""Chunks in flight between disk and update if RAM allows: enough to keep a disk busy while compute is between ticks."""
_DEVICE_CHUNKS = 3
"""Without a disk: one that comes from the device, one that is updated, one that goes back."""
_SPARES = 2
"""Least versions in the making for flats of one size: one, and one for a flat that compute waits for."""
_SPARE_PAGES = 8
"""More of them, as far as they take no more than so many pages."""
_LOCK_FREE_CHUNKS = 8
"""In lock-free mode, whose updates have a thread of their own: the rest of 64 pages is for versions in the making."""
_STAGING_SHARE = 1 / 8
"""Share of the RAM budget that staging takes at most by itself."""

_FP32_MODULES = (nn.modules.batchnorm._BatchNorm,)
"""Their kernels want fp32 parameters beside fp32 running statistics."""


def keeps_fp32(module: nn.Module) -> bool:
    """Whether the parameters of `module` itself stay in fp32 under mixed precision: kernels want it, or its class says so
    (`keep_in_fp32 = True`, as a router's does)."""
    return isinstance(module, _FP32_MODULES) or getattr(type(module), "keep_in_fp32", False) is True


def compute_dtype(parameter: Tensor, compute: torch.dtype, *, mixed: bool, keeps_fp32: bool) -> torch.dtype:
    """What a parameter is while it computes.

    Args:
        compute, mixed: see Request; without `mixed`, float32 means that nothing is converted (`32-true`).
        keeps_fp32: of its module.
    """
    if not mixed:
        return parameter.dtype if compute is torch.float32 else compute
    if parameter.dtype is torch.float64:
        return torch.float64
    return torch.float32 if keeps_fp32 else compute


@dataclasses.dataclass(frozen=True, slots=True)
class LockFree:
    """What lock-free updates need.

    Attributes:
        max_staleness: in steps.
        warmup: optimizer steps of the training with a staleness of 0, before.
        spares: pages for versions in the making (update/buffers.py), beside the homes.
        gradients: pages for gradients on their way; empty where `.grad` itself travels.
        cores: CPU cores that updates may use; cores_in_all: that this rank has.
        forecast: parameters in use forecast the updates that they lack, `reach` at most.
        paced_steps: steps between two updates of a flat, where the disk allows them; 1: updates are not held.
    """

    max_staleness: int
    warmup: int
    spares: tuple[Row, ...]
    gradients: tuple[Row, ...]
    cores: int
    cores_in_all: int
    forecast: bool
    reach: int
    paced_steps: int


@dataclasses.dataclass(frozen=True, slots=True)
class Blueprint:
    """What the engine builds.

    Attributes:
        dtypes: compute dtype of each flat; master_dtypes: fp32 where a master parameter is kept beside it, else None.
        copies: whether the compute parameters of each flat are copies of more precise ones: of masters, or of the user's.
        routes: how each flat's gradient gets to its update; None for frozen flats.
        traits: of the optimizers of each flat, in their order and in the dtype that is updated; none for frozen flats.
        unified: RAM is the device tier (CPU without a device budget).
        lock_free: None for synchronous updates.
        saves_behind: checkpoints are written while training goes on.
        activations_to_host: what units save for their backward waits for it in RAM.
        experts: which units are experts that ranks divide; None where all ranks hold all units.
        holders: which ranks hold what; the same on all ranks.
        selfstepping: numbers of optimizers that take their steps themselves; nothing in `layout` is trained for them.
        outside: no parameter is in pages: each is what its module holds, and all optimizers step themselves.
        may_be_outside: the run could do so.
        inventory: all that a run takes of each tier.
        keep_freed_memory: on a CPU, freed memory stays for the next step.
        gradient_room_bytes: gradients that may wait for updates behind the backward pass; on a CPU, in `.grad`.
    """

    units: tuple[Unit, ...]
    layout: ModelLayout
    dtypes: tuple[torch.dtype, ...]
    master_dtypes: tuple[torch.dtype | None, ...]
    copies: tuple[bool, ...]
    gradient_dtypes: tuple[torch.dtype, ...]
    routes: tuple[GradientRoute | None, ...]
    traits: tuple[tuple[OptimizerTraits, ...], ...]
    master_bytes_per_element: tuple[int, ...]
    unified: bool
    budget: Budget
    placement: Placement
    trace: Trace
    staging_chunks: int
    lock_free: LockFree | None
    saves_behind: bool
    activations_to_host: bool
    experts: DividedExperts | None
    holders: Holders
    selfstepping: frozenset[int]
    outside: bool
    may_be_outside: bool
    inventory: Inventory = NOTHING
    keep_freed_memory: bool = True
    gradient_room_bytes: int = 0

    @property
    def ram(self) -> Tier:
        """The tier that is memory of the CPU."""
        return _ram(unified=self.unified)

    @property
    def pool_bytes(self) -> Mapping[Tier, int]:
        """Bytes to take per tier at the start."""
        return {tier: self.inventory.pool_bytes(tier) for tier in self.budget}

    @property
    def by_need(self) -> Collection[int]:
        """Units that are in no plan: which experts have tokens shows when they are there."""
        return self.experts.members if self.experts is not None else ()

    @property
    def by_need_bytes(self) -> int:
        """Device bytes that plans leave to such units: one that computes and one that is fetched, and gradients of one."""
        layout = self.layout
        at_home = {unit: self.placement.homes[unit].parameter.computes for unit in self.by_need}
        pages = (
            2 * layout.full_pages(unit, in_place=in_place) + (0 if in_place else layout.gathered_pages(unit))
            for unit, in_place in at_home.items()
        )
        gradients = (
            layout.full_gradient_pages(unit) + pages_beside_full_gradients(layout, unit, self.placement.gradients(unit))
            for unit in self.by_need
        )
        return (max(pages, default=0) + max(gradients, default=0)) * layout.page_size

    def updates_late(self, unit: int, *, apart: bool) -> bool:
        """Whether a unit's update may still be under way when the optimizer's step has returned, on a device of that kind."""
        if not any(flat.trainable for flat in self.layout.flats_of(unit)):
            return False
        if apart or self.lock_free is not None:
            return True
        return not self.placement.homes[unit].master.computes

    def planned(self, trace: Trace) -> Trace:
        """A trace without the ticks of units that are in no plan."""
        return _without_units(trace, self.by_need)

    def gradient_home(self, unit: int) -> Tier:
        """Tier where a unit's gradients wait for the update."""
        return _gradient_home(self.placement.homes[unit], unified=self.unified)

    def route(self, flat: FlatLayout) -> GradientRoute:
        """Of a trained flat's gradient."""
        found = self.routes[flat.index]
        if found is None:
            raise InternalError(f"flat {flat.index} is not trained, so it has no gradient")
        return found

    @property
    def reduced_at_step(self) -> bool:
        """Whether some gradient is reduced by the step; see GradientRoute."""
        return any(each is not None and each.reduced_at_step for each in self.routes)

    @property
    def outlive_backward(self) -> bool:
        """Whether gradients are updated with by the step, or later; see GradientRoute."""
        return any(each is not None and each.outlives_backward for each in self.routes)

    def trained_flats(self) -> Iterator[FlatLayout]:
        return (flat for flat in self.layout.flats if self.traits[flat.index])


@dataclasses.dataclass(frozen=True, slots=True)
class Request:
    """What a run asks for.

    Attributes:
        compute: dtype of parameters while they compute; see `compute_dtype`.
        mixed: keep fp32 master parameters.
        keep_gradients: gradients outlive the backward pass (accumulation, clipping by norm, manual optimization).
        gradients_stay: they outlive the step, too: it is the user who forgets them (manual optimization).
        sums_gradients: a step may have the gradients of several backward passes (accumulation, manual optimization).
        backend: of the device that ranks compute on, where optimizers are tried.
        rearranges: parameters will be unfrozen, put into other groups, or given other data during the run.
        further: tiers beside those that settings bound, with bytes of pages of one rank.
        boxes: of parameters that are parts of larger ones; see `parts.declared`.
        partial: ids of whole ones of which the gradients of the ranks of a tensor group are parts of a sum.
    """

    module: nn.Module
    optimizers: Sequence[Optimizer]
    settings: Settings
    compute: torch.dtype
    mixed: bool
    backend: Backend
    keep_gradients: bool
    gradients_stay: bool
    sums_gradients: bool
    rearranges: bool = False
    further: Mapping[Tier, int] = dataclasses.field(default_factory=dict)
    boxes: Boxes = dataclasses.field(default_factory=dict)
    partial: Collection[int] = ()


def draw(request: Request, communicator: Communicator, ranks_on_host: int) -> Blueprint:
    """Decides everything for a run here; a collective.

    Args:
        ranks_on_host: ranks that share this machine's RAM and disks.

    Raises:
        ConfigError: a dtype, an optimizer or a setting that cannot work.
        CapacityError: no placement fits the budgets.
    """
    check_folders(request.settings.disk_paths)
    machine = this_machine(request.backend, request.settings.disk_paths, ranks_on_host)
    agree = partial(_agreed, communicator=communicator)
    return decide(request, machine, communicator.world_size, agree, rank=communicator.rank)


def decide(
    request: Request,
    machine: Machine,
    world_size: int,
    agree: Callable[[Budget], Budget] = lambda budget: budget,
    *,
    rank: int = 0,
) -> Blueprint:
    """Decides everything, for `world_size` ranks on machines like `machine`. Reads nothing but its arguments.

    Args:
        agree: makes the budgets of all ranks equal.
        rank: whose decisions; they differ only where ranks hold different experts.

    Raises:
        ConfigError: a dtype, an optimizer or a setting that cannot work.
        CapacityError: no placement fits the budgets.
    """
    blueprint = _decide(request, machine, world_size, agree, rank)
    may_be = _may_be_outside(request, blueprint)
    optimized = [
        each for optimizer in request.optimizers for group in optimizer.param_groups for each in group["params"]
    ]
    shared = overlap(request.module, optimized)
    if shared is not None and not may_be:
        raise ConfigError(
            f"{shared[0]} and {shared[1]} lie in the same memory, so that what changes one of them changes the other, and "
            f"pages are each one's own; make them one parameter (`decoder.weight = encoder.weight`), give each memory of its "
            f"own (nn.Parameter(tensor.clone())), or keep everything in RAM, on one rank, with precision='32-true'"
        )
    strange = {id(parameter) for parameter in optimized} - {id(each) for each in request.module.parameters()}
    if (request.rearranges or shared is not None or strange) and may_be:
        blueprint = _decide(request, machine, world_size, agree, rank, outside=True)
    return dataclasses.replace(blueprint, may_be_outside=may_be)


@dataclasses.dataclass(frozen=True, slots=True)
class _Asked:
    """What is asked for, of a machine like this.

    Attributes:
        unpaged: numbers of optimizers that have no pages, with the reason.
        known: traits of optimizers that were tried on the way.
    """

    units: tuple[Unit, ...]
    experts: DividedExperts | None
    holders: Holders
    unified: bool
    lock_free: bool
    wishes: Wishes
    unpaged: Mapping[int, ConfigError | None]
    known: Traits


@dataclasses.dataclass(frozen=True, slots=True)
class _Model:
    """How this rank's part of the model lies in flats; see Blueprint."""

    layout: ModelLayout
    dtypes: tuple[torch.dtype, ...]
    master_dtypes: tuple[torch.dtype | None, ...]
    gradient_dtypes: tuple[torch.dtype, ...]
    traits: tuple[tuple[OptimizerTraits, ...], ...]
    per_element: tuple[int, ...]
    trace: Trace


@dataclasses.dataclass(frozen=True, slots=True)
class _Room:
    """What homes may take, beside what is taken anyway.

    Attributes:
        budget: of pages.
        reduced_at_step: see GradientRoute.
        at_step: gradients are used when the optimizer steps, not behind each unit's backward.
    """

    budget: Budget
    lock_free: LockFree | None
    reduced_at_step: bool
    chunks: int
    staging_bytes: int
    at_step: bool


def _decide(
    request: Request,
    machine: Machine,
    world_size: int,
    agree: Callable[[Budget], Budget],
    rank: int,
    *,
    outside: bool = False,
) -> Blueprint:
    asked = _ask(request, machine, world_size, rank, outside=outside)
    model = _lay_out(request, asked, world_size, rank)
    room = _make_room(request, machine, asked, model, agree, rank)
    placement = _place(request, machine, asked, model, room)
    blueprint = _blueprint(request, asked, model, room, placement, outside=outside)
    return _stocked(blueprint, request.settings, machine)


def _ask(request: Request, machine: Machine, world_size: int, rank: int, *, outside: bool) -> _Asked:
    settings = request.settings
    if settings.activations == "host":
        _check_device_of_its_own(machine)
    split = split_of(request.boxes, world_size, settings.expert_parallel_size, rank)
    units, experts = _units(request, split)
    holders = everybodys(split.mesh) if experts is None else experts.holders
    unified = not machine.device_apart and settings.device_bytes is None
    lock_free = settings.lock_free and bool(request.optimizers)
    wishes = _wishes(settings, unified, lock_free=lock_free)
    known: Traits = {}
    unpaged: dict[int, ConfigError | None] = {}
    if outside:
        units = tuple(dataclasses.replace(unit, parameters=()) for unit in units)
        unpaged = dict.fromkeys(range(len(request.optimizers)))
    elif unified and holders.everybody.whole.alone and not request.mixed and _may_be_unpaged(settings, wishes):
        dtype_of = partial(compute_dtype, compute=request.compute, mixed=False, keeps_fp32=False)
        unpaged |= reasons(request.optimizers, dtype_of, request.backend.device, known)
    return _Asked(units, experts, holders, unified, lock_free, wishes, unpaged, known)


def _lay_out(request: Request, asked: _Asked, world_size: int, rank: int) -> _Model:
    elsewhere = asked.holders.elsewhere(rank)
    specs = _specs(asked.units, request, asked.unpaged)
    scaled = request.mixed and request.compute is torch.float16
    check_shared(specs, lock_free=asked.lock_free, scaled=scaled)
    specs = _with_whole_updates(request, asked, specs)
    layout = build_layout(
        specs,
        page_size=request.settings.page_bytes,
        world_size=world_size,
        shared_by=asked.holders.shared_by(),
        elsewhere=elsewhere,
        rank=rank,
    )
    dtypes: tuple[torch.dtype, ...] = tuple(getattr(torch, flat.dtype) for flat in layout.flats)
    master_dtypes = tuple(
        _master_dtype(dtype, mixed=request.mixed, always=asked.lock_free) if flat.trainable else None
        for flat, dtype in zip(layout.flats, dtypes, strict=True)
    )
    gradient_dtypes = tuple(
        torch.float32 if flat.sums_gradients else dtype for flat, dtype in zip(layout.flats, dtypes, strict=True)
    )
    traits = tuple(
        tuple(_traits_of(request, asked.known, number, master or dtype) for number in flat.optimizers)
        for flat, dtype, master in zip(layout.flats, dtypes, master_dtypes, strict=True)
    )
    updating = {number for flat in layout.flats for number in flat.optimizers}
    every = bool(updating) and len(updating) == len(request.optimizers)
    traits = encoded_traits(request.settings, traits, every_optimizer=every)
    per_element = tuple(
        sum(each.bytes_per_element() for each in known) + (master.itemsize if master is not None else 0)
        for known, master in zip(traits, master_dtypes, strict=True)
    )
    trace = _without_units(sequential_trace(layout) if request.optimizers else forward_trace(layout), elsewhere)
    return _Model(layout, dtypes, master_dtypes, gradient_dtypes, traits, per_element, trace)


def _make_room(
    request: Request, machine: Machine, asked: _Asked, model: _Model, agree: Callable[[Budget], Budget], rank: int
) -> _Room:
    settings, layout = request.settings, model.layout
    disk = bool(settings.disk_paths)
    if Tier.DISK in (asked.wishes.parameter, asked.wishes.master) and not disk:
        raise ConfigError(
            "parameter_home or master_home is 'disk' and there is no disk_path; set disk_path='/a/folder'"
        )
    check_further(request.further)
    budget = agree(Budget({**_budget(settings, machine, asked.unified), **request.further}))
    reduced_at_step = layout.shared and settings.reduce_gradients == "each_step"
    if reduced_at_step:
        budget = _beside_whole_gradients(budget, layout)
    plan = None
    if asked.lock_free:
        in_place = asked.unified and not layout.shared
        ram = _ram(unified=asked.unified)
        beside = 0
        for place in (
            *range(layout.world_size if layout.owned else 0),
            rank,
        ):  # all have the same budget; the last is ours
            ours = layout.of(place)
            plan = _lock_free(request, machine, ours, model.dtypes, model.gradient_dtypes, ram=ram, in_place=in_place)
            beside = max(beside, _beside_bytes(plan, ours, in_place=in_place, twice=request.keep_gradients))
        budget = _without(budget, beside, ram)
    if scratch := scratch_bytes(model):
        whole = any(flat.updated_whole for flat in layout.flats)
        budget = _beside_scratch(budget, scratch, _ram(unified=asked.unified), whole=whole)
    streams = disk or any(size for tier, size in budget.items() if not tier.updates)
    of_one, chunks = chunk_bytes(model) if streams else 0, 1
    if of_one:
        most = _LOCK_FREE_CHUNKS if asked.lock_free else _STAGING_CHUNKS
        whole = any(flat.updated_whole for flat in layout.flats)
        chunks = _staging_chunks(settings, of_one, budget, most, least=1 if whole else 2)
    at_step = request.keep_gradients or not settings.update_in_backward
    return _Room(budget, plan, reduced_at_step, chunks, chunks * of_one, at_step)


def _place(request: Request, machine: Machine, asked: _Asked, model: _Model, room: _Room) -> Placement:
    place_with = partial(
        place,
        model.layout,
        model.per_element,
        model.trace,
        room.budget,
        wishes=asked.wishes,
        unified=asked.unified,
        staging_bytes=room.staging_bytes,
        sums_gradients=request.sums_gradients,
        update_on_device=machine.device_apart or asked.unified,
        own_state_bytes=own_state_bytes(model),
    )
    keep = room.at_step or asked.lock_free
    placement = None
    if asked.unified and not keep and not model.layout.shared:
        placement = _all_in_ram(place_with)
    if placement is None:
        placement = place_with(keep_gradients=keep)
    if not _is_all_in_ram(placement):
        for reason in asked.unpaged.values():
            if reason is not None:
                raise reason
    return placement


def _blueprint(
    request: Request, asked: _Asked, model: _Model, room: _Room, placement: Placement, *, outside: bool
) -> Blueprint:
    """All but what follows from the rest."""
    training = bool(request.optimizers)
    return Blueprint(
        units=asked.units,
        layout=model.layout,
        dtypes=model.dtypes,
        master_dtypes=model.master_dtypes,
        copies=tuple(
            master is not None or (request.mixed and dtype.is_floating_point and dtype.itemsize < 4)
            for dtype, master in zip(model.dtypes, model.master_dtypes, strict=True)
        ),
        gradient_dtypes=model.gradient_dtypes,
        routes=_routes(request, asked, model, room, placement),
        traits=model.traits,
        master_bytes_per_element=model.per_element,
        unified=asked.unified,
        budget=room.budget,
        placement=placement,
        trace=model.trace,
        # Where nothing streams there is no room for more.
        staging_chunks=room.chunks if placement.streams else 1,
        lock_free=room.lock_free,
        saves_behind=request.settings.async_save and training,
        activations_to_host=request.settings.activations == "host" and training,
        experts=asked.experts,
        holders=asked.holders,
        selfstepping=frozenset(asked.unpaged),
        outside=outside,
        may_be_outside=outside,
    )


def _routes(
    request: Request, asked: _Asked, model: _Model, room: _Room, placement: Placement
) -> tuple[GradientRoute | None, ...]:
    found: list[GradientRoute | None] = []
    for flat, dtype, master, gradient, traits in zip(
        model.layout.flats, model.dtypes, model.master_dtypes, model.gradient_dtypes, model.traits, strict=True
    ):
        of_flat = None
        if traits:
            of_flat = route(
                _gradient_home(placement.homes[flat.unit], unified=asked.unified),
                gradient,
                one_rank=asked.holders.of(flat.unit).whole.alone,
                sums=flat.sums_gradients,
                widens=master not in (None, dtype),
                lock_free=asked.lock_free,
                reduced_at_step=room.reduced_at_step,
                outlives_backward=room.at_step if asked.lock_free else placement.keeps_gradients,
                outlives_step=request.gradients_stay,
            )
        found.append(of_flat)
    return tuple(found)


def _gradient_home(homes: Homes, *, unified: bool) -> Tier:
    """A device with memory of its own hands gradients to the host at once when the update runs there."""
    if not unified and homes.gradient.computes and not homes.master.computes:
        return Tier.HOST
    return homes.gradient


def _stocked(blueprint: Blueprint, settings: Settings, machine: Machine) -> Blueprint:
    """With the inventory, and what depends on how much of RAM it takes."""
    if machine.device_apart and not blueprint.placement.streams:
        blueprint = _with_spare_staging(blueprint, settings)
    inventory = take_stock(blueprint)
    per_unit = [
        sum(flat.shard_bytes for flat in blueprint.layout.flats_of(unit) if flat.trainable)
        for unit in range(len(blueprint.units))
    ]
    left = blueprint.budget[Tier.DEVICE] - inventory.pool_bytes(Tier.DEVICE) if blueprint.unified else 0
    if machine.device_apart:  # beside those that have left it for pages of their own
        left = sum(
            flat.gradient_bytes
            for flat in blueprint.trained_flats()
            if (tier := blueprint.route(flat).own_pages) is not None and not tier.computes
        )
    return dataclasses.replace(
        blueprint,
        inventory=inventory,
        keep_freed_memory=_keep_freed_memory(settings, machine, inventory),
        # What the pool leaves of the budget, but no less than one unit in use and one on its way out.
        gradient_room_bytes=max(2 * max(per_unit), left),
    )


def _with_spare_staging(blueprint: Blueprint, settings: Settings) -> Blueprint:
    """Several chunks of what passes between a device and updates in RAM, as far as the budgets leave them and the device
    needs no more for them: while one is updated, others come and go."""
    least = take_stock(blueprint)
    for chunks in range(_DEVICE_CHUNKS, 1, -1):
        wider = dataclasses.replace(blueprint, staging_chunks=chunks)
        inventory = take_stock(wider)
        staging = sum(inventory.by_what(tier).get(What.STAGING, 0) for tier in blueprint.budget)
        if (settings.staging_bytes is None or staging <= settings.staging_bytes) and all(
            inventory.pool_bytes(tier) <= max(least.pool_bytes(tier), 0 if tier.computes else blueprint.budget[tier])
            for tier in blueprint.budget
        ):
            return wider
    return blueprint


def _may_be_outside(request: Request, blueprint: Blueprint) -> bool:
    """Whether a run can do without pages, of which nothing is asked but that all of them are in RAM."""
    wishes = _wishes(request.settings, blueprint.unified, lock_free=blueprint.lock_free is not None)
    parameters = [item.parameter for unit in blueprint.units for item in unit.parameters]
    return (
        blueprint.unified
        and not blueprint.layout.shared
        and not request.mixed
        and request.compute is torch.float32  # nothing is converted
        and request.settings.weights is None
        and not any(flat.code for flat in blueprint.layout.flats)
        and request.settings.restore_weights
        and _may_be_unpaged(request.settings, wishes)
        and _is_all_in_ram(blueprint.placement)
        and not any(each.is_meta or isinstance(each, ClosedParameter) for each in parameters)
    )


def _check_device_of_its_own(machine: Machine) -> None:
    if not machine.device_apart:
        raise ConfigError(
            "activations='host' takes activations from the device's memory to RAM, and this run computes on a CPU, whose "
            "activations are in RAM already (a device tier made by device_memory holds pages alone), so nothing would come "
            "free; use recompute='all', or activations='keep'"
        )


def _units(request: Request, split: ExpertSplit) -> tuple[tuple[Unit, ...], DividedExperts | None]:
    wanted = request.settings.units
    wanted = wanted if wanted == "auto" else tuple(wanted)
    parts = {parameter: box.parts for parameter, box in request.boxes.items()}
    if split.size == 1:
        return discover(request.module, wanted, parts=parts), None
    experts = [expert for _, layer in expert_layers(request.module) for expert in experts_of(layer)]
    units = discover(request.module, wanted, experts, parts)
    scaled_to_overflow = request.mixed and request.compute is torch.float16
    return units, divide(request.module, units, split, scaled_to_overflow=scaled_to_overflow)


def _without_units(trace: Trace, units: Collection[int]) -> Trace:
    return Trace(tuple(tick for tick in trace.ticks if tick.unit not in units), trace.tensors) if units else trace


def _all_in_ram(place_with: Callable[..., Placement]) -> Placement | None:
    """The placement that keeps everything in RAM, gradients included, if there is one.

    Updates then wait for the step: behind the backward pass they would throw its weights and activations out of the
    CPU's cache (measured on two cores: a step of 124M parameters took 7 % longer).
    """
    try:
        placement = place_with(keep_gradients=True)
    except CapacityError:
        return None
    return placement if _is_all_in_ram(placement) else None


def _is_all_in_ram(placement: Placement) -> bool:
    """Of a placement whose device tier is RAM."""
    homes = {tier for home in placement.homes for tier in (home.parameter, home.gradient, home.master)}
    return homes == {Tier.DEVICE}


def _may_be_unpaged(settings: Settings, wishes: Wishes) -> bool:
    """Whether updates may be outside of pages: nothing but their homes in RAM is asked of model states."""
    in_ram = {wishes.parameter, wishes.master} <= {None, Tier.DEVICE}
    return in_ram and not (settings.lock_free or settings.encodes_states) and settings.state_dict_type == "full"


def _specs(units: Sequence[Unit], request: Request, unpaged: Collection[int]) -> list[UnitSpec]:
    groups_of: dict[int, list[tuple[int, int]]] = {}
    for index, known in enumerate(request.optimizers):
        if index in unpaged:
            continue
        for number, settings in enumerate(known.param_groups):
            for parameter in settings["params"]:
                its = groups_of.setdefault(id(parameter), [])
                if its and its[-1][0] == index:
                    raise ConfigError(
                        f"a parameter of shape {tuple(parameter.shape)} is in {type(known).__name__} twice, and each step "
                        f"updates it once; leave it in one group, once"
                    )
                its.append((index, number))
    keep_fp32 = {
        id(parameter)
        for module in request.module.modules()
        if keeps_fp32(module)
        for parameter in module._parameters.values()
        if parameter is not None
    }
    specs = []
    for unit in units:
        parameters = []
        for item in unit.parameters:
            parameter = item.parameter
            if parameter.dtype not in _FLOATS:
                raise ConfigError(
                    f"parameter {item.name} is {parameter.dtype}; pages hold float32, bfloat16, float16 and float64; "
                    f"keep other data in a buffer"
                )
            dtype = compute_dtype(
                parameter, request.compute, mixed=request.mixed, keeps_fp32=id(parameter) in keep_fp32
            )
            (optimizer, group), *further = groups_of.get(id(parameter), [(0, -1)])
            parameters.append(
                ParameterSpec(
                    name=item.name,
                    shape=tuple(parameter.shape),
                    dtype=str(dtype).removeprefix("torch."),
                    itemsize=dtype.itemsize,
                    trainable=parameter.requires_grad and group >= 0,
                    group=group,
                    optimizer=optimizer,
                    further=tuple(further),
                    # As without pages, where parameters are fp32 and so are sums of their gradients.
                    gradient_itemsize=4 if request.sums_gradients and request.mixed and dtype.itemsize < 4 else 0,
                    stride=_stride(item),
                    box=request.boxes.get(id(parameter)),
                    partial=id(parameter) in request.partial and parameter.requires_grad and group >= 0,
                    code=None if unit is units[0] or id(parameter) in keep_fp32 else _code(item, request.settings),
                )
            )
        specs.append(UnitSpec(unit.name, tuple(parameters)))
    _check_strides(specs, request)
    return specs


def _code(item: UnitParameter, settings: Settings) -> Code | None:
    """In which a parameter has its home, of a unit beside the root: what is the root's is at hand all the time, so codes
    would be there beside it. Vectors are few bytes, and rows of an embedding are looked up, not multiplied."""
    parameter, looked_up = item.parameter, (nn.Embedding, nn.EmbeddingBag)
    if parameter.requires_grad or parameter.dim() < 2 or any(isinstance(each, looked_up) for each, _ in item.places):
        return None
    return CODES.get(settings.frozen_dtype)


def _check_strides(specs: Sequence[UnitSpec], request: Request) -> None:
    strided = [parameter for spec in specs for parameter in spec.parameters if parameter.stride is not None]
    in_parts = next(
        (parameter for parameter in strided if parameter.box is not None and not _row_by_row(parameter)), None
    )
    if in_parts is not None:
        raise ConfigError(
            f"parameter {in_parts.name} has strides {in_parts.stride} (channels_last, or transposed) and is a part of a "
            f"larger one, in which its place is told row by row; make it contiguous before the fit"
        )
    if strided and request.settings.state_dict_type == "sharded" and request.optimizers:
        raise ConfigError(
            f"parameter {strided[0].name} has strides {strided[0].stride} (channels_last, or transposed; {len(strided)} "
            f"such), and state_dict_type='sharded' writes parameters as they lie in pages, where files hold them row by row; "
            f"use state_dict_type='full', or make them contiguous before the fit"
        )


def _row_by_row(parameter: ParameterSpec) -> bool:
    """Whether its elements follow each other in the order of its shape; where there is one, its stride counts for nothing."""
    steps = [step for step, size in zip(parameter.stride or (), parameter.shape, strict=False) if size > 1]
    return steps == sorted(steps, reverse=True)


def _stride(item: UnitParameter) -> tuple[int, ...] | None:
    """Of a parameter whose elements lie end to end in another order than that of its shape.

    Raises:
        ConfigError: they do not lie end to end.
    """
    parameter = item.parameter
    stride = parameter.stride()
    sizes = [max(1, size) for size in parameter.shape]
    contiguous = tuple(math.prod(sizes[dimension + 1 :]) for dimension in range(len(sizes)))
    expanded = any(step == 0 and size > 1 for step, size in zip(stride, parameter.shape, strict=True))
    if stride == contiguous or expanded:  # a parameter that was let go is one expanded NaN
        return None
    expected = 1
    for step, size in sorted((step, size) for step, size in zip(stride, sizes, strict=True) if size > 1):
        if step != expected:
            raise ConfigError(
                f"parameter {item.name} of shape {tuple(parameter.shape)} has strides {stride}: it is a part of a larger "
                f"tensor, with gaps between its elements, which pages would not keep and kernels may round by; give it "
                f"memory of its own, nn.Parameter(tensor.clone())"
            )
        expected *= size
    return stride


def _traits_of(request: Request, known: Traits, optimizer: int, dtype: torch.dtype) -> OptimizerTraits:
    """Of an optimizer, in the dtype that it updates; tried once."""
    key = (optimizer, dtype)
    if key not in known:
        known[key] = probe(request.optimizers[optimizer], dtype=dtype, device=request.backend.device)
    return known[key]


def _with_whole_updates(request: Request, asked: _Asked, specs: Sequence[UnitSpec]) -> list[UnitSpec]:
    """With what optimizers update whole parameters.

    Raises:
        ConfigError: they do, and ranks divide these.
    """

    def followed(parameter: ParameterSpec) -> ParameterSpec:
        if not parameter.trainable:
            return parameter
        dtype: torch.dtype = getattr(torch, parameter.dtype)
        master = _master_dtype(dtype, mixed=request.mixed, always=asked.lock_free)
        every = [_traits_of(request, asked.known, number, master or dtype) for number in parameter.optimizers]
        traits = next((each for each in every if each.whole), None)
        if traits is None:
            return parameter
        if len(every) > 1:
            raise in_two(parameter.shape, traits)
        if asked.holders.apart or asked.holders.in_parts:
            how = "cut parameters" if asked.holders.in_parts else "divide experts"
            setting = "tensor_parallel_size" if asked.holders.in_parts else "expert_parallel_size"
            raise ConfigError(
                f"{traits.name} updates each parameter as a whole ({traits.whole}), and ranks {how} among them, so that "
                f"nobody has all of it; train without {setting}, or use an optimizer that treats each element on its own, "
                f"such as torch.optim.AdamW"
            )
        sizes = (
            parameter.itemsize,
            parameter.gradient_itemsize or parameter.itemsize,
            master.itemsize if master else 0,
        )
        own = traits.own_bytes(parameter.group, parameter.shape)
        return dataclasses.replace(parameter, updated_whole=True, states_bytes=parameter.numel * sum(sizes) + own)

    return [dataclasses.replace(spec, parameters=tuple(map(followed, spec.parameters))) for spec in specs]


def _master_dtype(dtype: torch.dtype, *, mixed: bool, always: bool) -> torch.dtype | None:
    """Of the master parameter beside a compute parameter. Lock-free updates need one in any precision: they never write
    what compute reads."""
    if mixed and dtype.itemsize < 4:
        return torch.float32
    return dtype if always else None


def _wishes(settings: Settings, unified: bool, *, lock_free: bool) -> Wishes:
    def tier(home: Home) -> Tier | None:
        wanted = home_tier(home)
        return Tier.DEVICE if unified and wanted is Tier.HOST else wanted

    if not lock_free:
        return Wishes(parameter=tier(settings.parameter_home), master=tier(settings.master_home))
    if settings.parameter_home == "device" and not unified:
        raise ConfigError(
            "lock_free=True keeps compute parameters in RAM, and parameter_home is 'device'; leave it at 'auto'"
        )
    if settings.wanted_master_home == "device" and not unified:
        raise ConfigError("lock_free=True updates on the CPU, and master_home is 'device'; use 'disk' or 'host'")
    return Wishes(parameter=_ram(unified=unified), master=tier(settings.wanted_master_home))


def _ram(*, unified: bool) -> Tier:
    return Tier.DEVICE if unified else Tier.HOST


def _lock_free(
    request: Request,
    machine: Machine,
    layout: ModelLayout,
    dtypes: Sequence[torch.dtype],
    gradient_dtypes: Sequence[torch.dtype],
    *,
    ram: Tier,
    in_place: bool,
) -> LockFree:
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
    bound = request.settings.max_staleness
    paced = paced_steps(bound) if request.settings.hold_updates else 1
    return LockFree(
        bound,
        request.settings.staleness_warmup,
        tuple(spares),
        tuple(gradients),
        max(1, cores // 2),
        cores,
        # Where more are lacking most of the time than it reaches, it would come and go.
        request.settings.forecast and bound > 0 and (paced == 1 or request.settings.forecast_reach >= bound),
        request.settings.forecast_reach,
        paced,
    )


def _beside_bytes(plan: LockFree, layout: ModelLayout, *, in_place: bool, twice: bool) -> int:
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


def _without(budget: Budget, size: int, ram: Tier) -> Budget:
    """A budget of which `size` bytes of RAM are spoken for."""
    if size and size >= budget[ram]:
        raise CapacityError(
            f"lock_free=True takes {format_bytes(size)} of RAM beside parameters and gradients, and pages have "
            f"{format_bytes(budget[ram])} in all; raise host_memory, or use lock_free=False"
        )
    return budget.without(ram, size)


def _beside_scratch(budget: Budget, size: int, ram: Tier, *, whole: bool) -> Budget:
    """What is left beside the room for a whole gradient, or for decoded states, wherever updates may run."""
    taken, less = "state_dtype takes {} for the states of a chunk in fp32", " or lower page_size"
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


def _staging_chunks(settings: Settings, of_one: int, budget: Budget, most: int, *, least: int) -> int:
    """Chunks in flight, each of so many bytes."""
    if settings.staging_bytes is not None:
        chunks = settings.staging_bytes // of_one
        if chunks < 1:
            raise ConfigError(
                f"staging_memory is {format_bytes(settings.staging_bytes)} and one chunk of this optimizer's states takes "
                f"{format_bytes(of_one)}; raise staging_memory or lower page_size"
            )
        return chunks
    ram = budget[Tier.HOST] or budget[Tier.DEVICE]
    return min(most, max(least, int(ram * _STAGING_SHARE) // of_one))


def _budget(settings: Settings, machine: Machine, unified: bool) -> Budget:
    host_free = machine.free_host_bytes / machine.ranks
    host_auto = int(max(min(host_free * _HOST_SHARE, host_free - _HOST_RESERVE_BYTES), host_free / 2))
    host = host_auto if settings.host_bytes is None else settings.host_bytes
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


def _beside_whole_gradients(budget: Budget, layout: ModelLayout) -> Budget:
    """What is left for pages when every rank holds all gradients in `.grad`."""
    whole = sum(flat.padded_numel * flat.gradient_itemsize for flat in layout.flats if flat.trainable)
    if whole >= budget[Tier.DEVICE]:
        raise CapacityError(
            f"reduce_gradients='each_step' keeps {format_bytes(whole)} of gradients whole on each rank, and pages have "
            f"{format_bytes(budget[Tier.DEVICE])} in all; raise device_memory (host_memory on a CPU-only machine), or use "
            f"reduce_gradients='each_backward'"
        )
    return budget.without(Tier.DEVICE, whole)


def _agreed(budget: Budget, communicator: Communicator) -> Budget:
    """The smallest budget of all ranks: plans are equal on all of them."""
    values = torch.tensor([-size for size in budget.values()], dtype=torch.int64)
    least = communicator.all_reduce(values, maximum=True).tolist()
    return Budget({tier: -value for tier, value in zip(budget, least, strict=True)})


def _keep_freed_memory(settings: Settings, machine: Machine, inventory: Inventory) -> bool:
    """On a CPU. Not where RAM is what is short: something is on disk, and pages take a good part of the RAM there is."""
    if settings.freed_memory != "auto":
        return settings.freed_memory == "keep"
    pools = {tier: inventory.pool_bytes(tier) for tier in {row.tier for row in inventory.rows}}
    if not any(size for tier, size in pools.items() if not tier.addressable):
        return True
    in_ram = sum(size for tier, size in pools.items() if tier.addressable)
    return in_ram < machine.free_host_bytes / machine.ranks * _ROOMY_SHARE
