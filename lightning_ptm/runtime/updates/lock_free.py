"""Lock-free updates, compute side: compute hands gradients off, adopts newer parameters and does not wait for the disk.

Implements section 4.3 of the paper, with changes (see docs/design/lock_free_updates.md). Owns the number of steps, the
end of the warm-up, and whether the parameters in use equal the master parameters. Adoption of versions is in
versions.py, counters of gradients and versions in flat_counters.py, and the buffers belong to the buffering thread
(update/buffering_thread.py).

I1: during the warm-up, parameters that are read lack no gradient: results equal those of a synchronous run.
I2: at a drain, produced == applied + skipped for every flat.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

import torch
from torch.optim import Optimizer

from lightning_ptm.errors import InternalError, UsageError
from lightning_ptm.memory.paged_tensor import PagedTensor
from lightning_ptm.planning.chunks import chunk_bounds_of
from lightning_ptm.runtime.deciding.gradient_route import Until
from lightning_ptm.runtime.units.store import UnitStore
from lightning_ptm.runtime.updates.audits import UpdateAudit
from lightning_ptm.runtime.updates.flat_counters import FlatCounters
from lightning_ptm.runtime.updates.optimizer_groups import FlatUpdate
from lightning_ptm.runtime.updates.updates import UpdateScheduler
from lightning_ptm.runtime.updates.versions import Versions
from lightning_ptm.update.buffering_thread import BufferingThread, LockFreeFlat
from lightning_ptm.update.gradient_source import Transform
from lightning_ptm.update.lock_free_buffers import Contribution, FlatBuffer, Origin
from lightning_ptm.update.shadow import GroupValues
from lightning_ptm.update.updater import Updater
from lightning_ptm.update.weight_prediction import can_predict_weights

log = logging.getLogger(__name__)


class LockFreeUpdates(UpdateScheduler):
    """Hands gradients to the buffering thread, and waits for updates only to bound staleness.

    Args:
        units: stores by unit.
        flats: all trainable flats, by unit.
        optimizers: the user's.
        updater: not running yet; the buffering thread uses it until `close`.
        spares: pages for versions being built, as counted by `VersionPolicy`.
        max_staleness: number of steps whose gradients a parameter in use may lack.
        warmup: number of training steps in which it may lack none; the warm-up ends with an iteration.
        room: number of chunks of master states in flight.
        cores: number of CPU cores that updates may use.
        predicts: whether parameters in use predict the updates that they lack (update/weight_prediction.py).
        default_dtype, number_of_step: see UpdateScheduler.
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
        predicts: bool,
        default_dtype: torch.dtype | None = None,
        number_of_step: Callable[[], int] | None = None,
    ) -> None:
        super().__init__(flats, optimizers, default_dtype, number_of_step)
        self._max_staleness = max_staleness
        self._warmup = warmup
        self._batch_began = 0
        """Number of steps before the training batch in progress."""
        self._most_steps = 0
        """Largest number of steps that a batch has taken; 0: no batch has ended with a step."""
        self._counters = [FlatCounters(flat=flat) for of_unit in flats for flat in of_unit]
        place = iter(range(len(self._counters)))
        places = [[next(place) for _ in of_unit] for of_unit in flats]
        self._place_of = {id(counter.flat): place for place, counter in enumerate(self._counters)}
        self._handed_off: set[int] = set()
        """Flats, by place, whose gradients of the step in progress were handed off: no graph of this step needs them
        any more."""
        self._steps = 0
        self._drained = True
        """Whether the parameters in use are the rounded master parameters."""
        self._graph_open = False
        """Whether a training forward may still be followed by its backward."""
        self.last_audit: tuple[UpdateAudit, ...] = ()
        """The audit of the last drain."""
        self._buffering = BufferingThread(
            updater,
            [
                LockFreeFlat(_buffer(counter.flat, updater, predicts), counter.flat.states, self.shadow(counter.flat))
                for counter in self._counters
            ],
            spares,
            room=room,
            cores=cores,
            learns=not warmup,
        )
        bound = 0 if warmup else max_staleness
        self.versions = Versions(units, self._counters, places, self._buffering, bound=bound)

    # -- handing off gradients -----------------------------------------------------------------------------------------

    def _update(self, unit: int, flat: FlatUpdate, hyper: GroupValues, transform: Transform) -> None:
        # A step's gradients stay until zero_grad where the user may use them again.
        gradient = flat.gradient
        source, after, discard = gradient.duplicate() if gradient.route.until is Until.CLEARED else gradient.detach()
        place = self._place_of[id(flat)]
        if self.versions.staleness(place) > self.versions.bound:
            # There was no forward since the last step: with a bound of 0 each step must be an update of its own.
            self.versions.catch_up([place])
        contribution = Contribution(source, (Origin(self._steps, hyper),), transform, after, discard)
        self.versions.predict_weights(unit, place, contribution)
        self._counters[place].hand_over(contribution)
        self._drained = False
        self._handed_off.add(place)
        self._buffering.offer(place, contribution)

    def _handed_over(self) -> None:
        return None

    def _stepped(self, optimizer: int) -> None:
        self._steps += 1
        self._graph_open = False
        self.versions.stepped(optimizer)
        self._handed_off.clear()
        self.versions.adopt_all()  # frees pages of old versions that no graph needs for further updates

    def skip(self, optimizer: int) -> None:
        for _, flat in self.groups.flats_of(optimizer):
            if flat.gradient.any:
                self._counters[self._place_of[id(flat)]].skip()
        self._graph_open = False
        self._handed_off.clear()
        super().skip(optimizer)

    def abandon(self) -> None:
        super().abandon()
        self._graph_open = False  # the backward of the failed iteration will never come
        self.versions.release_all_reads()
        self._handed_off.clear()

    # -- adopting parameters -------------------------------------------------------------------------------------------

    def begin_iteration(self, *, training: bool) -> None:
        self.versions.begin_iteration(training=training)
        self._graph_open = training
        if self._warmup and training:
            self._warm_up(self._number_of_step())
        if not training and not self._drained:
            self.finish_all()  # evaluation must use the trained weights
        else:
            self.versions.adopt_all()

    def _warm_up(self, step: int) -> None:
        self._most_steps = max(self._most_steps, self._steps - self._batch_began)
        self._batch_began = self._steps
        if step >= self._warmup:
            self.versions.catch_up(range(len(self._counters)))
            self._buffering.learn(self._steps)
            self._warmup = 0
            self.versions.set_bound(self._max_staleness)
        elif self._most_steps and step + self._most_steps >= self._warmup:
            # The version with its last step's gradients is read after the warm-up, and may predict weights.
            self._buffering.learn(self._steps + self._most_steps - 1)

    def pending(self, unit: int) -> bool:
        return self.versions.pending(unit)

    def finish(self, unit: int) -> None:
        self.versions.finish(unit)

    def finish_between_steps(self, unit: int) -> None:
        # Between a forward and its backward, all readers get the version that the forward has read.
        if not self._drained and not self._graph_open:
            self.finish_all()
        self.finish(unit)

    def finish_all(self) -> None:
        newer = self.versions.newer_than_read()
        if self._graph_open and newer:
            raise UsageError(
                "weights were read (gathered, a state dict, or a parameter that changed groups) between a forward "
                f"and its backward: {newer[0].flat.store.layout.slots[0].spec.name} has updates that are not applied "
                "yet, and the backward needs the values that the forward has used; with lock_free=True, read weights "
                "before the forward or after the backward"
            )
        self.versions.release_all_reads()
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
        self.versions.release_reads(self._handed_off)
        self.versions.make_room()

    def start(self) -> None:
        self._buffering.start()

    def close(self) -> None:
        self._buffering.stop()

    @property
    def updates_per_step(self) -> float:
        """Number of updates of a flat per step that had a gradient for it, so far."""
        possible = sum(counter.received for counter in self._counters)
        return self._buffering.updates / possible if possible else 0.0

    def audit(self) -> tuple[UpdateAudit, ...]:
        """The audit of each flat's gradients (this rank's shards) up to now. Waits for the buffering thread."""
        return tuple(
            UpdateAudit(count.name, counter.produced, count.applied, count.pending, counter.skipped)
            for counter, count in zip(self._counters, self._buffering.counts(), strict=True)
        )

    def _check_audit(self) -> None:
        self.last_audit = audits = self.audit()
        for audit in audits:
            if not audit.balanced or audit.pending:
                raise InternalError(
                    f"gradients were lost or applied twice: {audit}; weights are not those of the training"
                )
        log.debug(
            "lock-free updates: %d gradients produced, %d applied, %d skipped",
            *(sum(getattr(audit, name) for audit in audits) for name in ("produced", "applied", "skipped")),
        )


def _buffer(flat: FlatUpdate, updater: Updater, predicts: bool) -> FlatBuffer:
    layout = flat.store.layout
    return FlatBuffer(
        f"{layout.slots[0].spec.name}...",
        layout.shard_numel,
        flat.store.binding.dtype,
        len(layout.slots),
        size=len(chunk_bounds_of(layout, updater.chunk_numel).starts),
        can_predict=predicts and can_predict_weights(flat.states.traits),
    )
