"""The request of a run, and the blueprint decided from it before allocation: units, layout, homes, sizes of the tiers.

The package `deciding` turns a `Request` into one frozen `Blueprint`. The blueprint is the same on all ranks (memory budgets
are those of the rank that has the least), except for the experts that each rank holds under expert parallelism and the
slices of parameters that it holds under tensor parallelism.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping, Sequence

import torch
from torch import nn
from torch.optim import Optimizer

from lightning_ptm.config import Settings
from lightning_ptm.errors import InternalError
from lightning_ptm.memory.backend import Backend
from lightning_ptm.planning.activation_choice import Handling
from lightning_ptm.planning.inventory import EMPTY, Inventory, Row, What
from lightning_ptm.planning.layout import FlatLayout, ModelLayout
from lightning_ptm.planning.placement import by_need_pages
from lightning_ptm.planning.placement_data import Budget, PassingPool, Placement
from lightning_ptm.planning.sharding import ModelSharding
from lightning_ptm.planning.trace import Trace, without_units
from lightning_ptm.runtime.deciding.gradient_route import GradientRoute, Until
from lightning_ptm.runtime.deciding.state_tensors import StateTensor
from lightning_ptm.runtime.deciding.unpaged_optimizers import Traits
from lightning_ptm.runtime.machine.heap import Freed
from lightning_ptm.runtime.tensors.parts import Boxes
from lightning_ptm.runtime.units.discovery import Unit
from lightning_ptm.runtime.units.divided_experts import DividedExperts
from lightning_ptm.terms import BLOCK_BYTES, Tier, chunk_numel
from lightning_ptm.update.trial.traits import OptimizerTraits

_UPDATE_SHARE = 256
"""One optimizer call on the device may cast gradients into 1/256 of the device memory of pages."""
_MOST_AT_ONCE = 1 << 24
"""Elements of the largest optimizer call on a device."""


@dataclasses.dataclass(frozen=True, slots=True)
class Request:
    """Input of the decisions: the model, its optimizers, the settings, and how the run will use gradients.

    Attributes:
        compute: dtype of parameters in forward and backward; see `specs.compute_dtype`.
        mixed: whether fp32 master weights are kept.
        changes_default_dtype: whether torch's default dtype differs between the forward and the optimizer's step.
        keep_gradients: whether gradients outlive the backward pass (accumulation, clipping by norm, manual optimization).
        gradients_outlive_step: whether gradients also outlive the step, until the user clears them (manual optimization).
        transforms_gradients: whether each step clips or unscales gradients.
        sums_gradients: whether a step may use the sum of several backward passes (accumulation, manual optimization).
        backend: backend of the device that ranks compute on; optimizers are tried on this device.
        rearranges: whether parameters will be unfrozen, moved to other groups, or given other data during the run.
        further: tiers in addition to those that settings bound, with the page bytes of one rank in each.
        boxes: slices of larger parameters, by id of the parameter; see `parts.declared`.
        partial: ids of unsliced parameters whose gradients must be summed over the ranks of a tensor-parallel group.
        beside_bytes: bytes of a device with its own memory that a training step takes beside pages at its peak, without
            gradients in `.grad`; None: not known, as nothing was traced.
        least_bytes: bytes of device pages with which a step of the run has worked: tried first where pages take the least,
            and last elsewhere; 0: unknown.
        tried: traits of the optimizers that have been tried so far, which later decisions with other settings use as well.
    """

    module: nn.Module
    optimizers: Sequence[Optimizer]
    settings: Settings
    compute: torch.dtype
    mixed: bool
    backend: Backend
    keep_gradients: bool
    gradients_outlive_step: bool
    sums_gradients: bool
    rearranges: bool = False
    transforms_gradients: bool = False
    changes_default_dtype: bool = False
    further: Mapping[Tier, int] = dataclasses.field(default_factory=dict)
    boxes: Boxes = dataclasses.field(default_factory=dict)
    partial: Collection[int] = ()
    beside_bytes: int | None = None
    least_bytes: int = 0
    tried: Traits = dataclasses.field(default_factory=dict, repr=False, compare=False)

    @property
    def begins_with_least(self) -> bool:
        """Whether pages on a device with its own memory take the least that a plan needs, until a step was traced."""
        return bool(self.optimizers) and self.settings.device_bytes is None and self.beside_bytes is None


@dataclasses.dataclass(frozen=True, slots=True)
class LockFreeNeeds:
    """Resources and limits of lock-free updates.

    Attributes:
        max_staleness: largest staleness, in optimizer steps.
        warmup: number of optimizer steps with staleness 0 at the start of training.
        spares: pages for versions that updates are writing (update/lock_free_buffers.py), in addition to the homes.
        gradients: pages for gradients queued for updates; empty where `.grad` itself is queued.
        cores: number of CPU cores that updates may use.
        cores_in_all: number of CPU cores of this rank.
        predicts: whether stale parameters are extrapolated by the updates that they lack (weight prediction).
    """

    max_staleness: int
    warmup: int
    spares: tuple[Row, ...]
    gradients: tuple[Row, ...]
    cores: int
    cores_in_all: int
    predicts: bool


@dataclasses.dataclass(frozen=True, slots=True)
class Blueprint:
    """Frozen description of what the engine builds. Tuples with one entry per flat are indexed by `FlatLayout.index`.

    Attributes:
        dtypes: compute dtype of each flat.
        master_dtypes: dtype of each flat's master weights; None where it has none.
        copies: whether each flat's compute parameters are copies of more precise ones (the master weights or the user's).
        routes: route of each flat's gradient from backward to update; None for frozen flats.
        traits: traits of the optimizers of each flat, in their order and in the updated dtype; empty for frozen flats.
        state_tensors: state tensors of each flat's shard.
        unified: whether RAM is the device tier (CPU without a device budget).
        lock_free: resources of lock-free updates; None for synchronous updates.
        saves_in_background: whether checkpoints are written in the background while training continues.
        activations_to: tier outside the device that saved tensors are offloaded to between forward and backward; None: they
            stay.
        activation_handlings: handlings that a run may choose for units whose activations have no room (`auto`), the
            first of which is taken while nothing is measured; empty: all units are alike.
        activation_rows: staging buffers of activations that are offloaded to disk.
        experts: units that are experts divided over ranks; None where all ranks hold all units.
        holders: ranks that hold each unit; the same on all ranks.
        unpaged_optimizers: numbers of optimizers whose own `step` runs on ordinary tensors; `layout` trains nothing for them.
        outside: whether no parameter is in pages: modules keep their own tensors, and all optimizers run their own `step`.
        may_be_outside: whether the run could work without pages.
        changes_default_dtype: see Request.
        inventory: everything that the run allocates in each tier.
        save_rows: buffers through which a save reads states from disk: rows of the inventory where saves are written in the
            background, else allocated for each save.
        freed_memory: what the C allocator does with freed memory; CPU only.
        device_limit_bytes: device memory that the decisions gave to pages and to gradients in `.grad`.
        gradient_room_bytes: bound of gradients that wait for updates during the backward pass (on a CPU, in `.grad`).
    """

    units: tuple[Unit, ...]
    layout: ModelLayout
    dtypes: tuple[torch.dtype, ...]
    master_dtypes: tuple[torch.dtype | None, ...]
    copies: tuple[bool, ...]
    gradient_dtypes: tuple[torch.dtype, ...]
    routes: tuple[GradientRoute | None, ...]
    traits: tuple[tuple[OptimizerTraits, ...], ...]
    state_tensors: tuple[tuple[StateTensor, ...], ...]
    master_bytes_per_element: tuple[int, ...]
    unified: bool
    budget: Budget
    placement: Placement
    trace: Trace
    staging_chunks: int
    lock_free: LockFreeNeeds | None
    saves_in_background: bool
    activations_to: Tier | None
    experts: DividedExperts | None
    holders: ModelSharding
    unpaged_optimizers: frozenset[int]
    outside: bool
    may_be_outside: bool
    changes_default_dtype: bool = False
    inventory: Inventory = EMPTY
    save_rows: tuple[Row, ...] = ()
    activation_handlings: tuple[Handling, ...] = ()
    activation_rows: tuple[Row, ...] = ()
    freed_memory: Freed = Freed.STAYS
    device_limit_bytes: int = 0
    gradient_room_bytes: int = 0

    @property
    def device_block_numel(self) -> int:
        """Most elements that one optimizer call updates on a device that is not the CPU: of device memory a small share goes
        to gradients that are cast for it, and a large device gets few calls, since each costs the host 0.2 ms."""
        share = self.device_limit_bytes // _UPDATE_SHARE // torch.float32.itemsize
        return max(chunk_numel(self.layout.page_size), min(_MOST_AT_ONCE, share // BLOCK_BYTES * BLOCK_BYTES))

    @property
    def ram(self) -> Tier:
        """The tier that is the CPU's memory."""
        return ram_tier(unified=self.unified)

    def name_of(self, tier: Tier) -> str:
        """Returns the tier's name in reports: "host" for a device tier that is RAM."""
        return (Tier.HOST if self.unified and tier.computes else tier).name.lower()

    @property
    def reported_tiers(self) -> tuple[Tier, ...]:
        """The tiers of the budget, nearest first, with RAM once."""
        return tuple(tier for tier in self.budget if not (self.unified and tier is Tier.HOST))

    @property
    def mixed(self) -> bool:
        """Whether some compute parameters are less precise than the parameters that they are copies of."""
        flats = zip(self.copies, self.master_dtypes, self.dtypes, strict=True)
        return any(copied and master is not dtype for copied, master, dtype in flats)

    @property
    def pool_bytes(self) -> Mapping[Tier, int]:
        """Bytes to allocate per tier at set-up."""
        return {tier: self.inventory.pools.get(tier, 0) for tier in self.budget.bytes_of}

    @property
    def activation_tiers(self) -> tuple[Tier, ...]:
        """The tiers that activations are, or may be, offloaded to."""
        chosen = (self.activations_to, *(handling.tier for handling in self.activation_handlings))
        return tuple(dict.fromkeys(tier for tier in chosen if tier is not None))

    @property
    def activation_limit_bytes(self) -> int:
        """Bytes of the disk tier that pages of model states leave to activations."""
        return max(0, self.budget[Tier.DISK] - self.inventory.pool_bytes(Tier.DISK))

    @property
    def by_need(self) -> Collection[int]:
        """Units that no plan contains: divided experts, since the router decides at run time which of them get tokens."""
        return self.experts.members if self.experts is not None else ()

    @property
    def by_need_bytes(self) -> int:
        """Device bytes that plans leave free for the units of `by_need`."""
        homes, gradients = self.placement.homes, self.placement.gradients
        at_once = () if self.experts is None else self.experts.at_once
        pages = by_need_pages(self.layout, at_once, lambda unit: homes[unit].parameter.computes, gradients.__getitem__)
        return pages * self.layout.page_size

    @property
    def passing_pool(self) -> PassingPool:
        """The device pages for gathered units, fetched shards and passing gradients: the last ones of the tier."""
        rows = self.inventory.of(What.GATHERED)
        pages = sum(row.count for row in rows if row.tier is Tier.DEVICE)
        around = frozenset[int]() if self.experts is None else self.experts.around
        by_need = self.by_need_bytes // self.layout.page_size
        return PassingPool(pages, self._in_grad, around, by_need)

    @property
    def _in_grad(self) -> frozenset[int]:
        """Flats whose gradients take no pages in a backward pass."""
        in_pages = {flat.index for flat in self.trained_flats() if not self.route(flat).adds_up_in_grad}
        return frozenset(range(len(self.layout.flats))) - in_pages

    @property
    def gradient_pages(self) -> Sequence[int]:
        """By unit, the device pages that its gradients take while they leave."""
        in_grad = self._in_grad
        return [
            sum(
                row.full + max(row.shard if row.reduces else 0, row.sum) for row in each.rows if row.flat not in in_grad
            )
            for each in self.placement.gradients
        ]

    @property
    def most_gradient_pages(self) -> int:
        """The most device pages that gradients of one unit other than the root take while they leave."""
        return max(self.gradient_pages[1:], default=0)

    def updates_late(self, unit: int, *, has_own_memory: bool) -> bool:
        """Whether a unit's update may still run after the optimizer's step has returned.

        Args:
            has_own_memory: whether the device has memory of its own.
        """
        if not any(flat.trainable for flat in self.layout.flats_of(unit)):
            return False
        if has_own_memory or self.lock_free is not None:
            return True
        return not self.placement.homes[unit].master.computes

    def planned(self, trace: Trace) -> Trace:
        """Returns the trace without the ticks of units that no plan contains."""
        return without_units(trace, self.by_need)

    def route(self, flat: FlatLayout) -> GradientRoute:
        """Returns the gradient route of a trained flat."""
        found = self.routes[flat.index]
        if found is None:
            raise InternalError(f"flat {flat.index} is not trained, so it has no gradient")
        return found

    @property
    def reduced_at_step(self) -> bool:
        """Whether ranks reduce some gradient once a step; see GradientRoute."""
        return any(each is not None and each.reduced_at_step for each in self.routes)

    @property
    def outlive_backward(self) -> bool:
        """Whether some gradient is used by the step, or later, and not during the backward pass; see GradientRoute."""
        return any(each is not None and each.until is not Until.BACKWARD for each in self.routes)

    def trained_flats(self) -> Sequence[FlatLayout]:
        """Returns the flats that some optimizer updates in pages."""
        return [flat for flat in self.layout.flats if self.traits[flat.index]]


def ram_tier(*, unified: bool) -> Tier:
    """The tier that is the CPU's memory."""
    return Tier.DEVICE if unified else Tier.HOST
