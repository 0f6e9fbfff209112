"""Lock-free updates as compute sees them: gradients go, newer parameters come, and neither waits for the disk
(section 4.3 of the paper, mended: see ARCHITECTURE.md).

Owns how many steps there were, when the warm-up ends, and whether parameters in use are the masters'. Versions that come are
versions.py's; flat_counters.py counts gradients and versions, and the buffers are the buffering thread's
(update/buffering_thread.py).

I1: in the warm-up, what is read lacks no gradient: the numbers are those of a synchronous run.
I2: at a drain, produced == applied + skipped for every flat.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

import torch
from torch.optim import Optimizer

from lightning_ptm.errors import InternalError, UsageError
from lightning_ptm.memory.paged_tensor import PagedTensor
from lightning_ptm.planning.chunk_bounds import chunk_bounds_of
from lightning_ptm.runtime.units.store import UnitStore
from lightning_ptm.runtime.updates.audits import UpdateAudit
from lightning_ptm.runtime.updates.flat_counters import FlatCounters
from lightning_ptm.runtime.updates.updates import FlatUpdate, UpdateScheduler
from lightning_ptm.runtime.updates.versions import Versions
from lightning_ptm.update.buffering_thread import BufferingThread, LockFreeFlat
from lightning_ptm.update.gradient_source import Transform
from lightning_ptm.update.lock_free_buffers import Contribution, FlatBuffer, Origin
from lightning_ptm.update.shadow import GroupValues
from lightning_ptm.update.updater import Updater
from lightning_ptm.update.weight_prediction import can_predict_weights

log = logging.getLogger(__name__)


class LockFreeUpdates(UpdateScheduler):
    """Hands gradients over and never waits for what becomes of them, but to keep staleness bounded.

    Args:
        units: stores by unit; flats: all trainable flats, by unit; optimizers: the user's.
        updater: not running yet; the buffering thread has the use of it until `close`.
        spares: pages for versions in the making, as `VersionPolicy` counts them.
        max_staleness: steps whose gradients a parameter in use may lack.
        warmup: steps of the training in which it may lack none; they end with an iteration.
        room: chunks of master states in flight.
        cores: CPU cores that updates may use.
        forecast: parameters in use forecast the updates that they lack (update/weight_prediction.py).
        default_dtype: see UpdateScheduler.
    """

    def __init__(
        self,
        units: Sequence[UnitStore],
        flats: Sequence[Sequence[FlatUpdate]],
        optimizers: Sequence[Optimizer],
        updater: Updater,
        spares: Sequence[PagedTensor],
        *,
        max_staleness: int,
        warmup: int,
        room: int,
        cores: int,
        forecast: bool,
        default_dtype: torch.dtype | None = None,
        number_of_step: Callable[[], int] | None = None,
    ) -> None:
        super().__init__(flats, optimizers, default_dtype, number_of_step)
        self._max_staleness = max_staleness
        self._warmup = warmup
        self._batch_began = 0
        """After how many steps the training batch in progress began."""
        self._most_steps = 0
        """That a batch has taken; 0: none has ended with a step."""
        self._clocks = [FlatCounters(flat=flat) for of_unit in flats for flat in of_unit]
        place = iter(range(len(self._clocks)))
        places = [[next(place) for _ in of_unit] for of_unit in flats]
        self._place_of = {id(clock.flat): place for place, clock in enumerate(self._clocks)}
        self._given: set[int] = set()
        """Flats, by place, whose gradients of the step in progress have gone: no graph of its own needs them any more."""
        self._steps = 0
        self._drained = True
        """Whether parameters in use are the master parameters, rounded."""
        self._graph_open = False
        """Whether a forward of training may still have its backward before it."""
        self.last_audit: tuple[UpdateAudit, ...] = ()
        """As it was at the last drain."""
        self._buffering = BufferingThread(
            updater,
            [
                LockFreeFlat(_buffer(clock.flat, updater, forecast), clock.flat.states, self.shadow(clock.flat))
                for clock in self._clocks
            ],
            spares,
            room=room,
            cores=cores,
            learns=not warmup,
        )
        bound = 0 if warmup else max_staleness
        self.versions = Versions(units, self._clocks, places, self._buffering, bound=bound)

    # -- gradients go -------------------------------------------------------------------------------------------------

    def _update(self, unit: int, flat: FlatUpdate, hyper: GroupValues, transform: Transform) -> None:
        # A step's gradients stay until zero_grad where the user may use them again.
        gradient = flat.gradient
        source, after, discard = gradient.duplicate() if gradient.route.outlives_step else gradient.detach()
        place = self._place_of[id(flat)]
        if self.versions.staleness(place) > self.versions.bound:
            # Steps without a forward in between: with a bound of 0 each must be an update of its own.
            self.versions.catch_up([place])
        contribution = Contribution(source, (Origin(self._steps, hyper),), transform, after, discard)
        self.versions.predict_weights(unit, place, contribution)
        self._clocks[place].hand_over(contribution)
        self._drained = False
        self._given.add(place)
        self._buffering.offer(place, contribution)

    def _handed_over(self) -> None:
        return None

    def _stepped(self, optimizer: int) -> None:
        self._steps += 1
        self._graph_open = False
        self.versions.stepped(optimizer)
        self._given.clear()
        self.versions.adopt_all()  # so that updates of what no graph needs any more have pages again

    def skip(self, optimizer: int) -> None:
        for _, flat in self.groups.flats_of(optimizer):
            if flat.gradient.any:
                self._clocks[self._place_of[id(flat)]].skip()
        self._graph_open = False
        self._given.clear()
        super().skip(optimizer)

    def abandon(self) -> None:
        super().abandon()
        self._graph_open = False  # its backward will never come
        self.versions.all_over()
        self._given.clear()

    # -- parameters come ----------------------------------------------------------------------------------------------

    def begin_iteration(self, *, training: bool) -> None:
        self.versions.begin_iteration(training=training)
        self._graph_open = training
        if self._warmup and training:
            self._warm_up(self._number_of_step())
        if not training and not self._drained:
            self.finish_all()  # what is evaluated is what was trained
        else:
            self.versions.adopt_all()

    def _warm_up(self, step: int) -> None:
        self._most_steps = max(self._most_steps, self._steps - self._batch_began)
        self._batch_began = self._steps
        if step >= self._warmup:
            self.versions.catch_up(range(len(self._clocks)))
            self._buffering.learn(self._steps)
            self._warmup = 0
            self.versions.bound_is(self._max_staleness)
        elif self._most_steps and step + self._most_steps >= self._warmup:
            # What comes of its last step's gradients is read behind the warm-up, and may forecast the next.
            self._buffering.learn(self._steps + self._most_steps - 1)

    def pending(self, unit: int) -> bool:
        return self.versions.pending(unit)

    def finish(self, unit: int) -> None:
        self.versions.finish(unit)

    def finish_between_steps(self, unit: int) -> None:
        # Behind a forward whose backward is to come, all read what that has read.
        if not self._drained and not self._graph_open:
            self.finish_all()
        self.finish(unit)

    def finish_all(self) -> None:
        newer = self.versions.newer_than_read()
        if self._graph_open and newer:
            raise UsageError(
                f"weights are gathered, a state dict is made, or a parameter has changed groups, between a forward and its "
                f"backward, and the forward has read {newer[0].flat.store.layout.slots[0].spec.name} as it was before, or is "
                f"expected to be after, the updates of the last steps; with lock_free=True do this before the forward or "
                f"after the backward"
            )
        self.versions.all_over()
        self._buffering.drain(self.versions.adopt_all)
        self._drained = True
        self._check_audit()

    def graph_ended(self) -> None:
        self._graph_open = False

    def progress(self) -> None:
        self._buffering.check()
        self.versions.adopt_all()

    def make_room(self) -> None:
        self._buffering.check()
        self.versions.no_graph_needs(self._given)
        self.versions.make_room()

    def start(self) -> None:
        self._buffering.start()

    def close(self) -> None:
        self._buffering.stop()

    @property
    def updates_per_step(self) -> float:
        """How often a flat was updated for each step that had a gradient for it, so far."""
        possible = sum(clock.received for clock in self._clocks)
        return self._buffering.updates / possible if possible else 0.0

    def audit(self) -> tuple[UpdateAudit, ...]:
        """What became of each flat's gradients, this rank's shards of them, up to now. Waits for the buffering thread."""
        return tuple(
            UpdateAudit(count.name, clock.produced, count.applied, count.pending, clock.skipped)
            for clock, count in zip(self._clocks, self._buffering.counts(), strict=True)
        )

    def _check_audit(self) -> None:
        self.last_audit = audits = self.audit()
        for audit in audits:
            if not audit.balanced or audit.pending:
                raise InternalError(f"gradients were lost or applied twice: {audit}")
        log.debug(
            "lock-free updates: %d gradients produced, %d applied, %d skipped",
            *(sum(getattr(audit, name) for audit in audits) for name in ("produced", "applied", "skipped")),
        )


def _buffer(flat: FlatUpdate, updater: Updater, forecast: bool) -> FlatBuffer:
    layout = flat.store.layout
    return FlatBuffer(
        f"{layout.slots[0].spec.name}...",
        layout.shard_numel,
        flat.store.binding.dtype,
        len(layout.slots),
        size=len(chunk_bounds_of(layout, updater.chunk_numel).starts),
        can_forecast=forecast and can_predict_weights(flat.states.traits),
    )
