"""Update jobs: the request for one flat's update, its handle, its columns and its chunks.

Data and bookkeeping only; planning/chunks.py decides the order of reads, updates and writes, pipeline.py does them.
I1: a column is one paged tensor that a job reads or writes element by element. It is staged if the arithmetic cannot
    address it in its tier.
I2: a chunk is the same stretch of all columns. planning/chunks.py cuts at multiples of the updater's `chunk_numel` or,
    where parameters are updated whole, at the starts of parameters. A state with its own shape is then as long as its shape
    says.
"""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

import torch

from lightning_ptm.errors import InternalError, UsageError
from lightning_ptm.memory.transfer import Awaited, Pending
from lightning_ptm.planning import chunks
from lightning_ptm.planning.chunks import chunk_bounds_of
from lightning_ptm.terms import Tier
from lightning_ptm.update.flat_states import FlatStates, StateLayout
from lightning_ptm.update.gradient_source import (
    NO_TRANSFORM,
    GradientSource,
    ParameterGradients,
    ShardGradient,
    Transform,
)
from lightning_ptm.update.merged_steps import MergedSteps, merge
from lightning_ptm.update.shadow import GroupValues, ScalarState, ShadowOptimizer
from lightning_ptm.update.weight_prediction import WeightPrediction

if TYPE_CHECKING:
    from lightning_ptm.memory.backend import Backend
    from lightning_ptm.memory.device_work import DeviceEvent
    from lightning_ptm.memory.paged_tensor import PagedTensor

PARAMETER = "<parameter>"
"""Role of the column that the optimizer updates: the master parameter or, without one, the compute parameter."""
SCRATCH = "<scratch>"
"""Key of a buffer, not a column, for the gradient of a parameter that is updated whole and needs a cast or a factor."""
TARGET = "<target>"
"""Role of the column that gets the compute copy of an updated master parameter."""
GRADIENT = "<gradient>"
"""Role of the column that has the shard's gradient."""


@dataclasses.dataclass(frozen=True, slots=True)
class UpdateJob:
    """A request to the updater: one flat's share of one optimizer step.

    Attributes:
        states: the flat's master states.
        shadow: the shadow of the optimizer that updates them.
        gradient: source of the gradient; must not change until the handle is done.
        target: the compute parameter's shard. No other code may read or write its pages between submission and the end of
            the job.
        hyper: the step's hyper-parameters.
        transform: unscaling and clipping of the gradient.
        earlier: hyper-parameters of steps that are taken before, with the same gradient.
        merge: whether to take all steps in one call where that is possible (merged_steps.py).
        after: reductions of the gradient and reads of the target that must end first; master states are read ahead meanwhile.
        fresh_target: whether the target's pages have no contents yet: every element is written, also those without a
            gradient.
        prediction: weight prediction that learns from the update; the target then gets what momentum alone would make of the
            parameters next. Needs a master parameter, a fresh target, and no `merge`.
        turn: jobs of earlier turns are served first. All jobs of a flat have the same turn.
        on_done: called by the updater, in its thread, right after the handle is done. Must not raise or block.
    """

    states: FlatStates
    shadow: ShadowOptimizer
    gradient: GradientSource
    target: PagedTensor
    hyper: GroupValues
    transform: Transform = NO_TRANSFORM
    earlier: Sequence[GroupValues] = ()
    merge: bool = False
    after: Sequence[Pending] = ()
    fresh_target: bool = False
    prediction: WeightPrediction | None = None
    turn: int = 0
    on_done: Callable[[], None] | None = None

    @property
    def steps(self) -> Sequence[GroupValues]:
        """Hyper-parameters of all steps, the oldest first."""
        return (*self.earlier, self.hyper)


class JobHandle:
    """Handle of a job: done when its compute parameters are updated and readable. Written by the updater alone."""

    __slots__ = ("_event", "_on_done", "end", "name")

    def __init__(self, name: str, on_done: Callable[[], None] | None = None) -> None:
        self.name = name
        self._on_done = on_done
        self._event = threading.Event()
        # Mark on the arithmetic's stream at the end of the job, for other streams to wait for.
        self.end: DeviceEvent | None = None

    def computed(self, end: DeviceEvent) -> None:
        """Records the mark before which the job's arithmetic is queued."""
        self.end = end

    def done(self) -> bool:
        """Whether the compute parameters are updated and readable. Never blocks, never raises."""
        return self._event.is_set()

    def mark_done(self) -> None:
        self._event.set()
        on_done, self._on_done = self._on_done, None
        if on_done is not None:
            on_done()

    def block(self, timeout_s: float | None = None) -> bool:
        """Waits, in a thread other than the updater's; returns whether the job is done."""
        return self._event.wait(timeout_s)


@dataclasses.dataclass(frozen=True, slots=True)
class JobColumn:
    """A paged tensor of a job, with its role and whether the job reads and writes it.

    Attributes:
        layout: layout of its elements, where they are not those of the shard.
    """

    role: str
    home: PagedTensor
    reads: bool
    writes: bool
    layout: StateLayout | None = None

    def first(self, start: int) -> int:
        """Index of its first element, counted decoded, for elements of the shard from `start` on."""
        own = None if self.layout is None else self.layout.own
        return start if own is None else own.stretch(start, 0)[0]


@dataclasses.dataclass(frozen=True, slots=True)
class ColumnPart:
    """The stored elements of a column that belong to a chunk: `numel` of them from `start` on."""

    column: JobColumn
    start: int
    numel: int


@dataclasses.dataclass(slots=True, eq=False)
class JobChunk(chunks.Chunk[FlatStates]):
    """A chunk in the pipeline: its staging buffers, by column role, and its transfers."""

    buffers: dict[str, PagedTensor] = dataclasses.field(default_factory=dict)
    reads: Awaited = dataclasses.field(default_factory=Awaited)
    writes: Awaited = dataclasses.field(default_factory=Awaited)


def arithmetic_tier(states: FlatStates, target: PagedTensor | None, staging_tier: Tier) -> Tier:
    """Returns the tier in which a flat is updated: the home of its master states, or the staging tier if that is disk."""
    home = states.home()
    if home is None:
        if target is None:
            raise InternalError(
                "the arithmetic tier of a flat without master states is its target's tier, and no target is given"
            )
        home = target.tier
    return home.updated_in(staging_tier)


def state_columns(states: FlatStates) -> list[JobColumn]:
    """Returns the columns that do not depend on the job: the master parameter and the slots."""
    columns = [JobColumn(PARAMETER, states.master, reads=True, writes=True)] if states.master is not None else []
    layouts = states.layouts
    for name, slot in states.slots.items():
        layout = layouts[name]
        plain = layout.own is None and layout.encoding is None
        columns.append(JobColumn(name, slot, reads=True, writes=True, layout=None if plain else layout))
    return columns


def job_columns(job: UpdateJob, present: Sequence[bool]) -> list[JobColumn]:
    """Returns all columns of a job. A job without any gradient copies the master parameter to its target and changes no
    state."""
    if job.states.master is not None and not any(present):
        master = JobColumn(PARAMETER, job.states.master, reads=True, writes=False)
        return [master, JobColumn(TARGET, job.target, reads=False, writes=True)]
    columns = state_columns(job.states)
    if job.states.master is None:
        columns.append(JobColumn(PARAMETER, job.target, reads=True, writes=True))
    else:
        columns.append(JobColumn(TARGET, job.target, reads=False, writes=True))
    if isinstance(job.gradient, ShardGradient):
        columns.append(JobColumn(GRADIENT, job.gradient.paged, reads=True, writes=False))
    return columns


def check_every_gradient(states: FlatStates, present: Sequence[bool]) -> None:
    """Checks that all parameters have a gradient, if the optimizer needs one of every parameter.

    Some optimizers update the other parameters differently if one of them has no gradient.

    Raises:
        UsageError: a parameter has no gradient.
    """
    reason = states.traits.every_gradient
    for slot, group, here in zip(states.flat.slots, states.groups, present, strict=True):
        if reason and group is not None and not here:
            raise UsageError(
                f"parameter {slot.spec.name} has no gradient in this step, and {states.traits.name} needs a gradient "
                f"for every parameter in every step: {reason}, which cannot be run page by page. Freeze the parameter "
                "(requires_grad=False), use it in every step, or use torch.optim.AdamW"
            )


class JobUnderWay(chunks.Job[FlatStates, JobChunk]):
    """A submitted job with its progress through the pipeline."""

    before: Awaited

    def __init__(
        self, job: UpdateJob, handle: JobHandle, *, chunk_numel: int, staging_tier: Tier, own_memory: bool = False
    ) -> None:
        """`own_memory`: the device tier is not RAM."""
        flat = job.states.flat
        if job.target.numel != flat.shard_numel:
            raise InternalError(f"{job.target.name} has {job.target.numel} elements, its shard {flat.shard_numel}")
        self.job = job
        self.handle = handle
        self.tier = arithmetic_tier(job.states, job.target, staging_tier)
        self.present: Sequence[bool] = job.gradient.present(flat)
        if any(self.present):
            check_every_gradient(job.states, self.present)
        self.columns = job_columns(job, self.present)
        self.staged = [column for column in self.columns if column.home.tier is not self.tier]

        on_device = own_memory and self.tier is Tier.DEVICE
        cuts = chunk_bounds_of(flat, flat.shard_numel if on_device and self._at_once() else chunk_numel)
        # A chunk without any gradient keeps its bytes: it is neither read nor written.
        updated = [
            start
            for place, start in enumerate(cuts.starts)
            if job.fresh_target or job.states.updates(start, cuts.length(place), self.present)
        ]
        super().__init__(
            job.states,
            cuts,
            updated,
            Awaited(job.after),
            streams=bool(self.staged),
            reads_ahead=any(column.reads and column.role != GRADIENT for column in self.staged),
            turn=job.turn,
        )
        self.landing = Awaited()
        """Writes of compute parameters."""
        self.submitted: DeviceEvent | None = None
        """Mark on the submitting stream; the gradient and the compute parameter were produced before it."""
        self._scalars: list[dict[tuple[int, int], ScalarState | None]] = []
        self.whole_scalars: dict[int, ScalarState | None] = {}
        """Scalars after the job of parameters that it has updated whole, by index."""
        self.merged: Mapping[int, MergedSteps] = self._merge() if job.merge else {}
        """By parameter group, the one call that takes all steps; empty: the steps are taken one by one."""

    def _at_once(self) -> bool:
        """Whether one chunk is the whole shard. On a device the host needs longer for a chunk than its kernels, and what is
        updated in its pages, without another form of them, needs no room by the chunk."""
        states = self.job.states
        return not (self.staged or states.encodings or states.traits.whole or self.job.prediction)

    def submit(self, queued: DeviceEvent) -> None:
        """Records the submitting stream's mark, which the job's device work waits for."""
        self.submitted = queued

    def scalars_after(self, like: torch.Tensor) -> list[dict[tuple[int, int], ScalarState | None]]:
        """Returns for each step of the job the scalars after it, by the clocks of parameters with a gradient before the job.

        Args:
            like: a tensor with the dtype and device of the parameters that are updated.
        """
        if not self._scalars:
            shadow, before = self.job.shadow, self.job.states.clocks(self.present)
            for hyper in self.job.steps:
                after = {clock: shadow.advance(hyper, clock[0], known, like) for clock, known in before.items()}
                self._scalars.append(after)
                before = dict(after)
        return self._scalars

    def _merge(self) -> dict[int, MergedSteps]:
        states, steps, clocks = self.job.states, self.job.steps, self.job.states.clocks(self.present)
        if len({group for group, _ in clocks}) < len(clocks) or states.traits.whole:
            return {}  # parameters of one group have had different numbers of steps
        found: dict[int, MergedSteps] = {}
        for (group, _), scalars in clocks.items():
            step = 0.0 if scalars is None else float(scalars.values.get("step", 0.0))
            merged = merge(states.traits, [hyper.groups[group] for hyper in steps], step)
            if merged is None:
                return {}
            found[group] = merged
        return found

    def advance_scalars(self, like: torch.Tensor) -> None:
        """Advances the flat's scalars; called after all chunks are computed. Args: as in `scalars_after`."""
        states = self.job.states
        if states.traits.whole:
            states.advance_whole(self.whole_scalars, self.present)
        else:
            states.advance(self.scalars_after(like)[-1], self.present)

    def forget_gradient(self, backend: Backend) -> None:
        if isinstance(self.job.gradient, ParameterGradients):
            self.job.gradient.forget(backend)
