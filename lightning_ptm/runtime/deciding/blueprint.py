"""What a run asks for, and what is decided of it before a byte is allocated: units, layout, homes, sizes of the tiers.

`deciding` makes of a `Request` one frozen `Blueprint`: equal on all ranks, up to what their machines have free (the smallest
counts), and up to the experts that each holds, and the parts of parameters, where ranks divide them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterator, Mapping, Sequence

import torch
from torch import nn
from torch.optim import Optimizer

from lightning_ptm.config import Settings
from lightning_ptm.errors import InternalError
from lightning_ptm.memory.backend import Backend
from lightning_ptm.planning.device_demand import extra_gradient_pages
from lightning_ptm.planning.inventory import EMPTY, Inventory, Row
from lightning_ptm.planning.layout import FlatLayout, ModelLayout
from lightning_ptm.planning.placement_data import Budget, Homes, Placement
from lightning_ptm.planning.sharding import ModelSharding
from lightning_ptm.planning.trace import Trace
from lightning_ptm.runtime.deciding.gradient_route import GradientRoute
from lightning_ptm.runtime.machine.heap import Freed
from lightning_ptm.runtime.tensors.parts import Boxes
from lightning_ptm.runtime.units.discovery import Unit
from lightning_ptm.runtime.units.divided_experts import DividedExperts
from lightning_ptm.terms import Tier
from lightning_ptm.update.trial.traits import OptimizerTraits


@dataclasses.dataclass(frozen=True, slots=True)
class Request:
    """What a run asks for.

    Attributes:
        compute: dtype of parameters while they compute; see `specs.compute_dtype`.
        mixed: keep fp32 master parameters.
        changes_default_dtype: a forward has another default dtype than torch has when the optimizer's step is taken.
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
    changes_default_dtype: bool = False
    further: Mapping[Tier, int] = dataclasses.field(default_factory=dict)
    boxes: Boxes = dataclasses.field(default_factory=dict)
    partial: Collection[int] = ()


@dataclasses.dataclass(frozen=True, slots=True)
class LockFreeNeeds:
    """What lock-free updates need.

    Attributes:
        max_staleness: in steps.
        warmup: optimizer steps of the training with a staleness of 0, before.
        spares: pages for versions in the making (update/lock_free_buffers.py), beside the homes.
        gradients: pages for gradients on their way; empty where `.grad` itself travels.
        cores: CPU cores that updates may use; cores_in_all: that this rank has.
        forecast: parameters in use forecast the updates that they lack.
    """

    max_staleness: int
    warmup: int
    spares: tuple[Row, ...]
    gradients: tuple[Row, ...]
    cores: int
    cores_in_all: int
    forecast: bool


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
        changes_default_dtype: see Request.
        inventory: all that a run takes of each tier.
        freed_memory: on a CPU.
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
    lock_free: LockFreeNeeds | None
    saves_behind: bool
    activations_to_host: bool
    experts: DividedExperts | None
    holders: ModelSharding
    unpaged_optimizers: frozenset[int]
    outside: bool
    may_be_outside: bool
    changes_default_dtype: bool = False
    inventory: Inventory = EMPTY
    freed_memory: Freed = Freed.STAYS
    gradient_room_bytes: int = 0

    @property
    def ram(self) -> Tier:
        """The tier that is memory of the CPU."""
        return ram_tier(unified=self.unified)

    @property
    def mixed(self) -> bool:
        """Whether some compute parameters are less precise than what they are copies of."""
        flats = zip(self.copies, self.master_dtypes, self.dtypes, strict=True)
        return any(copied and master is not dtype for copied, master, dtype in flats)

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
            layout.full_gradient_pages(unit) + extra_gradient_pages(layout, unit, self.placement.gradients(unit))
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
        return without_units(trace, self.by_need)

    def gradient_home(self, unit: int) -> Tier:
        """Tier where a unit's gradients wait for the update."""
        return gradient_home(self.placement.homes[unit], unified=self.unified)

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


def gradient_home(homes: Homes, *, unified: bool) -> Tier:
    """A device with memory of its own hands gradients to the host at once when the update runs there."""
    if not unified and homes.gradient.computes and not homes.master.computes:
        return Tier.HOST
    return homes.gradient


def without_units(trace: Trace, units: Collection[int]) -> Trace:
    """A trace without the ticks of some units."""
    return Trace(tuple(tick for tick in trace.ticks if tick.unit not in units), trace.tensors) if units else trace


def ram_tier(*, unified: bool) -> Tier:
    """The tier that is memory of the CPU."""
    return Tier.DEVICE if unified else Tier.HOST
