"""Decisions of a run, made before allocation: turns a `Request` and a `Machine` into a `Blueprint`.

Decides only, from the model's shapes, the optimizers' groups, the settings and the machine's free memory. `decide_here` is
for the ranks of a run; `decide` makes the same decisions for a machine and a world size that need not exist. The stages, each
a function of those before it: units and wishes (`_ask`), layout in flats (`_lay_out`), budgets (`_make_room`), homes
(`_place`), and the blueprint with its inventory.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import cached_property, partial

import torch
from torch import nn

from lightning_ptm.comm import Communicator
from lightning_ptm.config import home_tier
from lightning_ptm.errors import CapacityError, ConfigError, InternalError
from lightning_ptm.memory.disk import check_folders
from lightning_ptm.planning.activation_choice import Handling, handling_of
from lightning_ptm.planning.capacity_words import format_bytes, place_in_words, setting_for
from lightning_ptm.planning.layout import FlatLayout, ModelLayout, build_layout, round_up
from lightning_ptm.planning.mesh import Axis, Mesh
from lightning_ptm.planning.placement import place
from lightning_ptm.planning.placement_data import Budget, Placement, PlacementWishes
from lightning_ptm.planning.schedules import chunks_of, in_a_round
from lightning_ptm.planning.sharding import ModelSharding, shared_by_all, staged
from lightning_ptm.planning.stages import divide as divide_blocks
from lightning_ptm.planning.tier_paths import check_added_tiers
from lightning_ptm.planning.trace import Trace, forward_trace, sequential_trace, two_batches_trace, without_units
from lightning_ptm.runtime.deciding.blueprint import (
    Blueprint,
    LockFreeNeeds,
    Request,
    ram_tier,
)
from lightning_ptm.runtime.deciding.budgets import (
    LOCK_FREE_CHUNKS,
    STAGING_CHUNKS,
    agreed,
    budgets_to_try,
    lock_free_bytes,
    lock_free_needs,
    pages_budget,
    staging_chunks,
    wishes_of,
    without_lock_free,
    without_scratch,
    without_whole_gradients,
)
from lightning_ptm.runtime.deciding.build_inventory import activation_rows, with_inventory
from lightning_ptm.runtime.deciding.encoded_states import encoded_traits
from lightning_ptm.runtime.deciding.gradient_route import GradientRoute, GradientUse, Passes, Until, route
from lightning_ptm.runtime.deciding.remedies import with_remedies
from lightning_ptm.runtime.deciding.specs import (
    OptimizerRefusedError,
    compute_dtype,
    first_traits,
    master_dtype,
    traits_of,
    unit_specs,
    with_whole_updates,
)
from lightning_ptm.runtime.deciding.state_tensors import (
    StateTensor,
    chunk_bytes,
    chunk_count,
    own_state_bytes,
    scratch_bytes,
    state_tensors,
)
from lightning_ptm.runtime.deciding.unpaged_optimizers import Traits, check_shared, reasons
from lightning_ptm.runtime.deciding.unpaged_runs import all_in_ram, is_all_in_ram, may_be_outside, may_be_unpaged
from lightning_ptm.runtime.machine.machine import Machine, this_machine
from lightning_ptm.runtime.tensors.parts import mesh_with
from lightning_ptm.runtime.units.discovery import Unit, discover, overlap, whole_numel, with_vectors_at_root
from lightning_ptm.runtime.units.divided_experts import DividedExperts, divide, expert_layers, experts_of
from lightning_ptm.terms import Tier
from lightning_ptm.update.trial.traits import GroupTraits, OptimizerTraits

_DOES_NOT_FIT = -(1 << 62)
"""Value in a budget by which a rank reports to the others that nothing fits: less than any number of bytes."""
_MOST_CHOICES = 8
"""Most choices of homes that are tried for one budget: with all of it, with less if pages then exceed the budget, and between
a size that exceeds it and one in which nothing fits."""


def decide_here(
    request: Request,
    communicator: Communicator,
    ranks_on_host: int,
    *,
    checked: CheckedParameters | None = None,
    in_memory: int = 0,
    on_disk: int = 0,
    on_device: int = 0,
) -> Blueprint:
    """Decides the blueprint of a run on this machine. Collective.

    Args:
        ranks_on_host: number of ranks that share this machine's RAM and disks.
        checked: result of `check_parameters` for the same request.
        in_memory, on_disk, on_device: bytes of this rank's present pages, which are freed before the new ones are allocated.

    Raises:
        ConfigError: a dtype, an optimizer or a setting cannot work.
        CapacityError: no placement fits the budgets; says with which settings one would.
    """
    check_folders(request.settings.disk_paths)
    machine = this_machine(request.backend, request.settings.disk_paths, ranks_on_host)
    agree = partial(agreed, communicator=communicator)
    machine = machine.with_more(in_memory, on_disk, on_device)
    world_size, rank = communicator.world_size, communicator.rank
    try:
        return decide(request, machine, world_size, agree, rank=rank, checked=checked)
    except CapacityError as error:
        alone = partial(decide, world_size=world_size, rank=rank)
        raise with_remedies(error, request, machine, alone) from error


def check_parameters(request: Request, communicator: Communicator) -> CheckedParameters:
    """Checks, before the re-layout of a run in progress, that pages can hold its parameters as they are now and that its
    optimizers can update them there. Does not check memory, which the present pages still use. Not collective.

    Returns:
        What `decide_here` need not find again: units, optimizers that were tried, and the layout.

    Raises:
        ConfigError: as `decide_here`.
    """
    world_size, rank = communicator.world_size, communicator.rank
    asked = _ask(request, world_size, rank, request.backend.has_own_memory, outside=False)
    return CheckedParameters(asked, _lay_out(request, asked, world_size, rank))


def decide(
    request: Request,
    machine: Machine,
    world_size: int,
    agree: Callable[[Budget], Budget] = lambda budget: budget,
    *,
    rank: int = 0,
    checked: CheckedParameters | None = None,
) -> Blueprint:
    """Decides the blueprint for `world_size` ranks on machines like `machine`. Reads nothing but its arguments.

    Args:
        agree: makes the budgets of all ranks equal.
        rank: rank of the blueprint; blueprints differ only where ranks hold different experts or slices.
        checked: as for `decide_here`.

    Raises:
        ConfigError: a dtype, an optimizer or a setting cannot work.
        CapacityError: no placement fits the budgets.
    """
    blueprint = _decide(request, machine, world_size, agree, rank, checked=checked)
    may_be = may_be_outside(request, blueprint)
    optimized = [
        each for optimizer in request.optimizers for group in optimizer.param_groups for each in group["params"]
    ]
    shared = overlap(request.module, optimized)
    if shared is not None and not may_be:
        raise ConfigError(
            f"parameters {shared[0]} and {shared[1]} share memory, so that an update of one would change the other, and "
            f"pages give each its own memory; make them one parameter (`decoder.weight = encoder.weight`), give each its "
            f"own memory (nn.Parameter(tensor.clone())), or keep everything in RAM, on one rank, with precision='32-true'"
        )
    strange = {id(parameter) for parameter in optimized} - {id(each) for each in request.module.parameters()}
    if (request.rearranges or shared is not None or strange) and may_be:
        blueprint = _decide(request, machine, world_size, agree, rank, outside=True)
    return dataclasses.replace(blueprint, may_be_outside=may_be)


@dataclasses.dataclass(frozen=True, slots=True)
class _Asked:
    """First stage: the units and the homes that the request and the settings require.

    Attributes:
        unpaged: numbers of the optimizers whose states are not in pages, each with the error that was the reason (None where
            the whole run is without pages).
        known: traits of the optimizers that have been tried so far.
    """

    units: tuple[Unit, ...]
    experts: DividedExperts | None
    holders: ModelSharding
    unified: bool
    lock_free: bool
    wishes: PlacementWishes
    unpaged: Mapping[int, ConfigError | None]
    known: Traits


@dataclasses.dataclass(frozen=True)  # without slots, for the cached properties
class _Model:
    """Second stage: the layout of this rank's part of the model in flats; see Blueprint.

    Attributes:
        per_element: bytes of master weights and optimizer states per element, by flat.
    """

    layout: ModelLayout
    dtypes: tuple[torch.dtype, ...]
    master_dtypes: tuple[torch.dtype | None, ...]
    gradient_dtypes: tuple[torch.dtype, ...]
    traits: tuple[tuple[OptimizerTraits, ...], ...]
    per_element: tuple[int, ...]
    trace: Trace

    @cached_property
    def state_tensors(self) -> tuple[tuple[StateTensor, ...], ...]:
        return tuple(state_tensors(self, flat) for flat in self.layout.flats)


@dataclasses.dataclass(frozen=True, slots=True)
class CheckedParameters:
    """The first two stages for parameters that pages can hold."""

    asked: _Asked
    model: _Model


@dataclasses.dataclass(frozen=True, slots=True)
class _Room:
    """Third stage: budgets of the homes, after other needs are subtracted.

    Attributes:
        budget: bytes of pages per tier.
        reduced_at_step: units whose gradients ranks reduce at the step; see GradientRoute.
        chunks: number of chunks in flight through staging.
    """

    budget: Budget
    lock_free: LockFreeNeeds | None
    reduced_at_step: frozenset[int]
    chunks: int
    staging_bytes: int


def _decide(
    request: Request,
    machine: Machine,
    world_size: int,
    agree: Callable[[Budget], Budget],
    rank: int,
    *,
    outside: bool = False,
    checked: CheckedParameters | None = None,
) -> Blueprint:
    own_memory = machine.device_has_own_memory
    asked = _ask(request, world_size, rank, own_memory, outside=outside) if checked is None else checked.asked

    def decided(asked: _Asked) -> Blueprint:
        known = None if checked is None or asked is not checked.asked else checked.model
        model = _lay_out(request, asked, world_size, rank) if known is None else known
        budget = _whole_budget(request, machine, asked, agree)
        ram, least = ram_tier(unified=asked.unified), own_memory and request.begins_with_least
        groups = budgets_to_try(request.settings, budget, ram, least_device=least, known_bytes=request.least_bytes)
        fitting = partial(_fitting, request, machine, asked, model, agree=agree, rank=rank, outside=outside)

        def smallest(group: Sequence[Budget]) -> Blueprint:
            *smaller, largest = group
            # Of many sizes of device memory, one that does not suffice with all RAM is passed over at once.
            found = fitting(largest) if smaller and len(groups) > 1 else None
            for each in smaller:
                with suppress(CapacityError):  # raised on all ranks alike
                    return fitting(each)
            return found or fitting(largest)

        for number, group in enumerate(groups, start=1):
            try:
                return smallest(group)
            except CapacityError:
                if number == len(groups):
                    raise
        raise InternalError("there is no budget to try")

    try:
        return decided(asked)
    except OptimizerRefusedError as refused:
        other = _updated_elsewhere(request, asked, refused.device)
        if other is None:
            raise
        try:
            return decided(other)
        except (CapacityError, ConfigError):
            raise refused from None


def _fitting(
    request: Request,
    machine: Machine,
    asked: _Asked,
    model: _Model,
    budget: Budget,
    agree: Callable[[Budget], Budget],
    rank: int,
    *,
    outside: bool,
) -> Blueprint:
    """Returns a blueprint whose pages take at most `budget`, including those that follow from the choice of homes: buffers
    through which states on disk are read and saved.

    Raises:
        CapacityError: there is none. It is raised on all ranks, though their parts of the model may differ (pipeline stages).
    """
    page = model.layout.page_size
    left, excess = budget, ""
    below: Budget | None = None
    above: Budget | None = None
    for _ in range(_MOST_CHOICES):
        refused: CapacityError | None = None
        too_many: dict[Tier, int] = {}
        try:
            room = _make_room(request, machine, asked, model, left, rank)
            placement = _place(request, machine, asked, model, room)
        except CapacityError as error:
            refused = error.with_traceback(None)  # whose frames would refer to it
        else:
            traits = _tried_where_updated(request, asked, model, placement)
            blueprint = _blueprint(request, machine, asked, model, traits, room, placement, outside=outside)
            blueprint = with_inventory(blueprint, request.settings, machine)
            pools = blueprint.pool_bytes
            # Where a limit is no multiple of the page size, a smaller change may change nothing.
            too_many = {tier: round_up(max(0, pools[tier] - size), page) for tier, size in budget.bytes_of.items()}
        wanted = {tier: _DOES_NOT_FIT if refused else left[tier] - too_many[tier] for tier in budget}
        lower = agree(Budget(wanted))
        if _DOES_NOT_FIT in lower.values():
            below = left
        else:
            if lower == left:
                return dataclasses.replace(blueprint, device_limit_bytes=budget[Tier.DEVICE])
            over = next((tier for tier, more in too_many.items() if more), None)
            if over is not None:  # else pages of other ranks are too many
                uses, place = blueprint.inventory.in_words(over, asked.unified), place_in_words(over, asked.unified)
                setting = setting_for(over, asked.unified)
                excess = (
                    f"pages of the plan take {format_bytes(pools[over])} {place}, and the limit is "
                    f"{format_bytes(budget[over])}; raise {setting} ({uses})"
                )
            above = left
        # A little more room may move states to another tier, whose buffers take more than was added: bisect.
        left = lower if below is None else _between(below, above, page)
        if left == below:
            break
    if excess:
        raise CapacityError(excess)
    raise refused or CapacityError(
        "model states of another rank (another pipeline stage) do not fit into its memory, so no rank can begin; raise the "
        "memory that the error of that rank names"
    )


def _between(below: Budget, above: Budget | None, page_bytes: int) -> Budget:
    """Returns a budget in the middle of two, in whole pages from the lower one; the lower one if there is none in between, or
    no upper one."""
    if above is None:
        return below
    return Budget({tier: low + (above[tier] - low) // 2 // page_bytes * page_bytes for tier, low in below.items()})


def _updated_elsewhere(request: Request, asked: _Asked, refusing: torch.device) -> _Asked | None:
    """Returns the same with master weights in the other tier, for an optimizer that does not work on the device `refusing`;
    None where the user has set their home or there is no other tier."""
    if not request.backend.has_own_memory or asked.wishes.master is not None:
        return None
    home = Tier.HOST if refusing == request.backend.device else Tier.DEVICE
    return dataclasses.replace(asked, wishes=dataclasses.replace(asked.wishes, master=home))


def _ask(request: Request, world_size: int, rank: int, device_has_own_memory: bool, *, outside: bool) -> _Asked:
    settings = request.settings
    if settings.offload_activations == "host":
        _check_device_of_its_own(device_has_own_memory)
    mesh = mesh_with(request.boxes, settings, world_size, rank)
    units, experts = _units(request, mesh)
    if Axis.STAGE in mesh.axes:
        holders = staged(mesh, _stage_runs(request, units[1:]))
    else:
        holders = shared_by_all(mesh) if experts is None else experts.holders
    unified = not device_has_own_memory and settings.device_bytes is None
    lock_free = settings.lock_free_updates is not None and bool(request.optimizers)
    wishes = wishes_of(settings, unified, lock_free=lock_free)
    unpaged: dict[int, ConfigError | None] = {}
    if outside:
        units = tuple(dataclasses.replace(unit, parameters=(), own=()) for unit in units)
        unpaged = dict.fromkeys(range(len(request.optimizers)))
    elif unified and holders.common.whole.needs_no_reduction and not request.mixed and may_be_unpaged(settings, wishes):
        dtype_of = partial(compute_dtype, compute=request.compute, mixed=False, keeps_fp32=False)
        unpaged |= reasons(request.optimizers, dtype_of, request.backend.device, request.tried)
    return _Asked(units, experts, holders, unified, lock_free, wishes, unpaged, request.tried)


def _stage_runs(request: Request, blocks: Sequence[Unit]) -> list[range]:
    """Returns the units of each run of blocks in a pipeline; equal on all ranks.

    Raises:
        ConfigError: there are fewer blocks than stages, or not as many as the setting `pipeline_blocks` says; or the schedule
            does not exist with these numbers.
    """
    settings = request.settings
    if settings.pipeline_schedule == "interleaved":
        in_a_round(settings.pipeline_parallel_size, settings.micro_batches)
    if settings.pipeline_blocks == "auto":
        # By weights, as most operations are those of linear layers: two for each weight and token.
        parts = {parameter: box.parts for parameter, box in request.boxes.items()}
        weights = [whole_numel(block.module, parts) for block in blocks]
        stages = settings.pipeline_parallel_size
        runs = divide_blocks(weights, stages * chunks_of(settings.pipeline_schedule, stages, len(blocks)))
    else:
        ends = [0, *itertools.accumulate(settings.pipeline_blocks)]
        if ends[-1] != len(blocks):
            raise ConfigError(
                f"pipeline_blocks={list(settings.pipeline_blocks)} has {ends[-1]} blocks, and the model has {len(blocks)} "
                f"({blocks[0].name} to {blocks[-1].name}); give numbers with this sum, or pipeline_blocks='auto'"
            )
        runs = [range(first, end) for first, end in itertools.pairwise(ends)]
    return [range(run.start + 1, run.stop + 1) for run in runs]


def _updates_on(request: Request, asked: _Asked) -> torch.device:
    """Returns the device on which updates probably run, before homes are decided."""
    on_device = asked.wishes.master in (None, Tier.DEVICE) and not asked.lock_free
    return request.backend.device if asked.unified or on_device else torch.device("cpu")


def _tried_where_updated(
    request: Request, asked: _Asked, model: _Model, placement: Placement
) -> tuple[tuple[OptimizerTraits, ...], ...]:
    """Returns the traits of each flat's optimizers on the device where its homes make it update.

    Raises:
        OptimizerRefusedError: an optimizer does not work there, or keeps other states there.
    """

    def there(flat: FlatLayout, number: int, known: OptimizerTraits) -> OptimizerTraits:
        homes = placement.homes[flat.unit]
        stateless = model.master_dtypes[flat.index] is None and not known.slots
        home = homes.parameter if stateless else homes.master
        computes = home.updated_in(placement.staging_tier).computes
        device = request.backend.device if computes else torch.device("cpu")
        if known.device == device:
            return known
        dtype = model.master_dtypes[flat.index] or model.dtypes[flat.index]
        found = traits_of(request, asked.known, number, dtype, device)
        if found.whole != known.whole or not all(map(_keep_the_same, found.groups, known.groups)):
            raise OptimizerRefusedError(
                f"{known.name} keeps other states on {device} than on {known.device}, and homes were chosen for the latter; "
                f"set offload_optimizer='device' or 'host'",
                device,
            )
        groups = zip(found.groups, known.groups, strict=True)
        return dataclasses.replace(
            found, groups=tuple(dataclasses.replace(one, slots=other.slots) for one, other in groups)
        )

    return tuple(
        tuple(there(flat, number, known) for number, known in zip(flat.optimizers, every, strict=True))
        for flat, every in zip(model.layout.flats, model.traits, strict=True)
    )


def _keep_the_same(one: GroupTraits, other: GroupTraits) -> bool:
    """Whether two groups keep the same states, whatever their encodings in pages."""
    pairs = itertools.zip_longest(one.slots, other.slots)
    return one.state_shapes == other.state_shapes and all(
        a is not None and b is not None and (a.name, a.dtype) == (b.name, b.dtype) for a, b in pairs
    )


def _lay_out(request: Request, asked: _Asked, world_size: int, rank: int) -> _Model:
    device = _updates_on(request, asked)
    remote = asked.holders.remote_units(rank)
    with torch.DisableTorchFunctionSubclass():  # a question to a closed parameter would go through Python
        specs = unit_specs(asked.units, request, asked.unpaged)
    scaled = request.mixed and request.compute is torch.float16
    check_shared(specs, lock_free=asked.lock_free, scaled=scaled)
    specs = with_whole_updates(request, specs, asked.known, asked.holders, lock_free=asked.lock_free, device=device)
    layout = build_layout(
        specs,
        page_size=request.settings.page_bytes,
        world_size=world_size,
        shared_by=asked.holders.shared_by(),
        remote_units=remote,
        rank=rank,
        stages=asked.holders.mesh.sizes[Axis.STAGE],
    )
    dtypes: tuple[torch.dtype, ...] = tuple([getattr(torch, flat.dtype) for flat in layout.flats])
    flats = list(zip(layout.flats, dtypes, strict=True))
    master_dtypes = tuple(
        [
            master_dtype(dtype, mixed=request.mixed, always=asked.lock_free) if flat.trainable else None
            for flat, dtype in flats
        ]
    )
    gradient_dtypes = tuple([torch.float32 if flat.sums_gradients else dtype for flat, dtype in flats])
    traits = tuple(
        [
            tuple([first_traits(request, asked.known, number, master or dtype, device) for number in flat.optimizers])
            for (flat, dtype), master in zip(flats, master_dtypes, strict=True)
        ]
    )
    updating = {number for flat in layout.flats for number in flat.optimizers}
    every = bool(updating) and len(updating) == len(request.optimizers)
    traits = encoded_traits(request.settings, traits, every_optimizer=every)
    per_element = tuple(
        [
            sum([each.bytes_per_element() for each in known]) + (master.itemsize if master is not None else 0)
            for known, master in zip(traits, master_dtypes, strict=True)
        ]
    )
    trace = without_units(_first_trace(request, layout), remote)
    return _Model(layout, dtypes, master_dtypes, gradient_dtypes, traits, per_element, trace)


def _first_trace(request: Request, layout: ModelLayout) -> Trace:
    """Returns the order assumed before the first iteration."""
    if not request.optimizers:
        return forward_trace(layout)
    return two_batches_trace(layout) if request.settings.tensor_parallel.in_halves else sequential_trace(layout)


def _whole_budget(request: Request, machine: Machine, asked: _Asked, agree: Callable[[Budget], Budget]) -> Budget:
    """Returns the largest budget of pages, equal on all ranks."""
    settings = request.settings
    if Tier.DISK in (asked.wishes.parameter, asked.wishes.master) and not settings.disk_paths:
        raise ConfigError(
            "offload_parameters or offload_optimizer is 'disk' and there is no disk_path; set disk_path='/a/folder'"
        )
    check_added_tiers(request.further)
    of_pages = pages_budget(
        settings, machine, asked.unified, trains=bool(request.optimizers), beside_bytes=request.beside_bytes
    )
    return agree(Budget({**of_pages, **request.further}))


def _make_room(request: Request, machine: Machine, asked: _Asked, model: _Model, budget: Budget, rank: int) -> _Room:
    settings, layout = request.settings, model.layout
    disk = bool(settings.disk_paths)
    reduced_at_step: frozenset[int] = frozenset()
    if layout.shared and settings.tuning.reduce_gradients == "each_step":
        reduced_at_step = frozenset(flat.unit for flat in layout.flats)
        reason, remedy = (
            "tuning=Tuning(reduce_gradients='each_step')",
            "use tuning=Tuning(reduce_gradients='each_backward')",
        )
        budget = without_whole_gradients(budget, layout.flats, reason, remedy)
    elif asked.holders.in_stages:
        # Within a schedule, ranks of different stages reduce nothing together.
        reduced_at_step = frozenset((0,))
        reason = (
            f"the root unit of a pipeline (embeddings, head; pipeline_parallel_size={settings.pipeline_parallel_size})"
        )
        budget = without_whole_gradients(budget, layout.flats_of(0), reason, "use pipeline_parallel_size=1")
    plan = None
    if asked.lock_free:
        in_place = asked.unified and not layout.shared
        ram = ram_tier(unified=asked.unified)
        beside = 0
        for place in (
            *range(layout.world_size if layout.owned else 0),
            rank,
        ):  # all ranks have the same budget; the last of these is this rank
            ours = layout.of(place)
            plan = lock_free_needs(
                request, machine, ours, model.dtypes, model.gradient_dtypes, ram=ram, in_place=in_place
            )
            beside = max(beside, lock_free_bytes(plan, ours, in_place=in_place, twice=request.keep_gradients))
        budget = without_lock_free(budget, beside, ram)
    if scratch := scratch_bytes(model):
        whole = any(flat.updated_whole for flat in layout.flats)
        budget = without_scratch(budget, scratch, ram_tier(unified=asked.unified), whole=whole)
    streams = disk or any(size for tier, size in budget.items() if not tier.updates)
    of_one, chunks = chunk_bytes(model) if streams else 0, 1
    if of_one:
        most = LOCK_FREE_CHUNKS if asked.lock_free else min(STAGING_CHUNKS, max(2, chunk_count(layout)))
        whole = any(flat.updated_whole for flat in layout.flats)
        chunks = staging_chunks(settings, of_one, budget, most, least=1 if whole else 2)
    return _Room(budget, plan, reduced_at_step, chunks, chunks * of_one)


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
        update_on_device=machine.device_has_own_memory or asked.unified,
        own_state_bytes=own_state_bytes(model),
        by_need=() if asked.experts is None else asked.experts.at_once,
        around=() if asked.experts is None else asked.experts.around,
        any_order=True,
    )
    keep = request.keep_gradients or asked.lock_free
    placement = None
    if (
        asked.unified
        and not keep
        and any(flat.trainable and model.layout.needs_no_reduction(flat) for flat in model.layout.flats)
    ):
        placement = all_in_ram(place_with)
    if placement is None:
        placement = place_with(keep_gradients=keep)
    if not is_all_in_ram(placement):
        for reason in asked.unpaged.values():
            if reason is not None:
                raise reason
    return placement


def _blueprint(
    request: Request,
    machine: Machine,
    asked: _Asked,
    model: _Model,
    traits: tuple[tuple[OptimizerTraits, ...], ...],
    room: _Room,
    placement: Placement,
    *,
    outside: bool,
) -> Blueprint:
    """Returns the blueprint without the inventory and what depends on it."""
    training = bool(request.optimizers)
    to = home_tier(request.settings.offload_activations) if training else None
    handlings = _activation_handlings(request, asked, machine) if training else ()
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
        traits=traits,
        state_tensors=model.state_tensors,
        master_bytes_per_element=model.per_element,
        unified=asked.unified,
        budget=room.budget,
        placement=placement,
        trace=model.trace,
        # Where nothing streams, the budget has room for one only.
        staging_chunks=room.chunks if placement.streams else 1,
        lock_free=room.lock_free,
        saves_in_background=request.settings.checkpoints.async_save and training,
        activations_to=to,
        activation_handlings=handlings,
        activation_rows=activation_rows(
            ram_tier(unified=asked.unified),
            {to},
            len(request.settings.disk_paths),
        ),
        experts=asked.experts,
        holders=asked.holders,
        unpaged_optimizers=frozenset(asked.unpaged),
        outside=outside,
        may_be_outside=outside,
        changes_default_dtype=request.changes_default_dtype,
    )


def _routes(
    request: Request, asked: _Asked, model: _Model, room: _Room, placement: Placement
) -> tuple[GradientRoute | None, ...]:
    # Gradients of tensor-parallel slices stay in `.grad` until the step, as on one rank; no plan makes room for them there.
    in_ram = asked.unified and placement.keeps_gradients and not asked.lock_free and is_all_in_ram(placement)
    if request.gradients_outlive_step:
        until = Until.CLEARED
    else:
        keeps = request.keep_gradients if asked.lock_free else placement.keeps_gradients
        until = Until.STEP if keeps else Until.BACKWARD
    found: list[GradientRoute | None] = []
    for flat, dtype, master, gradient, traits in zip(
        model.layout.flats, model.dtypes, model.master_dtypes, model.gradient_dtypes, model.traits, strict=True
    ):
        of_flat = None
        if traits:
            one_rank = model.layout.needs_no_reduction(flat) and (in_ram or not model.layout.shared)
            use = GradientUse(
                until=until,
                passes=Passes.AS_LEFT if one_rank and not flat.sums_gradients else Passes.COPIED,
                widens=master not in (None, dtype),
                lock_free=asked.lock_free,
                transformed=request.transforms_gradients,
                reduced_at_step=flat.unit in room.reduced_at_step,
            )
            home = placement.homes[flat.unit].gradient
            of_flat = route(home, gradient, use, passes=bool(placement.passing_bytes))
        found.append(of_flat)
    return tuple(found)


def _check_device_of_its_own(device_has_own_memory: bool) -> None:
    if not device_has_own_memory:
        raise ConfigError(
            "offload_activations='host' moves activations from the device's memory to RAM, and this run computes on a CPU, "
            "whose activations are in RAM already (the device tier that device_memory makes holds pages only), so no memory "
            "would be freed; use offload_activations='disk' with a disk_path, recompute='all', or "
            "offload_activations='none'"
        )


def _activation_handlings(request: Request, asked: _Asked, machine: Machine) -> tuple[Handling, ...]:
    """Returns `Blueprint.activation_handlings`: RAM before the disk, and both before recomputing, which needs a forward that
    repeats itself. Ranks choose for themselves, so none is recomputed where the second forward could exchange something with
    others: divided experts, layers or sequences, and SyncBatchNorm. Where units are computed in slices, these alone are
    recomputed, and where all activations are offloaded, none is."""
    settings = request.settings
    exchange = asked.experts is not None or any(axis.exchanges for axis in asked.holders.mesh.axes)
    exchange |= any(isinstance(each, nn.SyncBatchNorm) for each in request.module.modules())
    tiers: list[Tier | None] = [None]
    if settings.offload_activations == "auto":
        tiers += [Tier.HOST] if machine.device_has_own_memory else []
        tiers += [Tier.DISK] if settings.disk_paths else []
    stay = settings.offload_activations in ("auto", "none")
    again = settings.recompute == "auto" and stay and not exchange and not settings.slices_batches
    repeats = [False, True] if again else [False]
    found = [handling_of(recomputes, tier) for recomputes in repeats for tier in tiers]
    return tuple(
        sorted(
            (handling for handling in found if handling is not Handling.KEEP),
            key=lambda handling: handling.tier is None,
        )
    )


def _units(request: Request, mesh: Mesh) -> tuple[tuple[Unit, ...], DividedExperts | None]:
    wanted = request.settings.units
    wanted = wanted if wanted == "auto" else tuple(wanted)
    parts = {parameter: box.parts for parameter, box in request.boxes.items()}
    if Axis.EXPERT not in mesh.axes:
        return with_vectors_at_root(discover(request.module, wanted, parts=parts), parts), None
    experts = [expert for _, layer in expert_layers(request.module) for expert in experts_of(layer)]
    units = discover(request.module, wanted, experts, parts)
    scaled_to_overflow = request.mixed and request.compute is torch.float16
    recomputed = request.settings.recompute_every > 0
    experts_of_ranks = divide(request.module, units, mesh, scaled_to_overflow=scaled_to_overflow, recomputed=recomputed)
    return with_vectors_at_root(units, parts, experts_of_ranks.holders.by_unit), experts_of_ranks
