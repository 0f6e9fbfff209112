"""When which flat is updated: behind the backward pass as units end, or at the optimizer step.

Owns which jobs are pending for which unit. The arithmetic and its I/O are the updater's (update/pipeline.py).

I1: a unit that has a pending job is not read before that job is done (`finish`).
I4: gradients that wait for the disk take at most `gradient_room_bytes`, or those of one unit: compute then waits.
I2: within one step a flat is updated once. I3: hyper-parameters are those of the step that the gradient belongs to.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import torch
from torch.optim import Optimizer

from lightning_ptm.errors import ConfigError
from lightning_ptm.runtime.gradients import FlatGradient
from lightning_ptm.runtime.store import FlatStore, UnitStore
from lightning_ptm.update import (
    FlatStates,
    HyperParameters,
    JobHandle,
    Shadow,
    Transform,
    UpdateJob,
    Updater,
    snapshot,
)


@dataclasses.dataclass(slots=True)
class FlatUpdate:
    """A trainable flat: where its parameters, gradients and master states are."""

    store: FlatStore
    gradient: FlatGradient
    states: FlatStates
    optimizer: int
    done_this_step: bool = False


@dataclasses.dataclass(frozen=True, slots=True)
class _Pending:
    handle: JobHandle
    flat: FlatUpdate


@dataclasses.dataclass(slots=True)
class _Armed:
    optimizer: int
    hyper: HyperParameters | None = None


class UpdateScheduler:
    """Submits update jobs.

    Args:
        units: stores by unit; flats: all trainable flats, by unit.
        optimizers: the user's.
        updater: runs the jobs.
        gradient_room_bytes: how many bytes of gradients may wait for their update behind the backward pass.
    """

    def __init__(
        self,
        units: Sequence[UnitStore],
        flats: Sequence[Sequence[FlatUpdate]],
        optimizers: Sequence[Optimizer],
        updater: Updater,
        gradient_room_bytes: int,
    ) -> None:
        self._units = units
        self._flats = flats
        self._optimizers = list(optimizers)
        self._updater = updater
        self._shadows: dict[tuple[int, torch.dtype], Shadow] = {}
        self._gradient_room_bytes = gradient_room_bytes
        self._pending: dict[int, list[_Pending]] = {}
        self._armed: _Armed | None = None

    def index_of(self, optimizer: Optimizer) -> int:
        """Which of the run's optimizers this is (a LightningOptimizer counts as the one it wraps)."""
        inner = getattr(optimizer, "_optimizer", optimizer)
        for index, known in enumerate(self._optimizers):
            if known is inner:
                return index
        raise ConfigError(
            f"{type(inner).__name__} was not returned by configure_optimizers, so it has no pages; return it from there"
        )

    # -- update in backward -------------------------------------------------------------------------------------------

    def arm(self, optimizer: Optimizer) -> None:
        """From now until the step, a unit is updated as soon as its backward has ended."""
        self._armed = _Armed(self.index_of(optimizer))

    @property
    def armed(self) -> bool:
        return self._armed is not None

    def unit_ready(self, unit: int) -> None:
        """A unit's gradients are complete: update it if the step is armed."""
        armed = self._armed
        if armed is None:
            return
        ready = [flat for flat in self._flats[unit] if flat.optimizer == armed.optimizer and flat.gradient.any]
        if not ready:
            return
        if armed.hyper is None:
            armed.hyper = snapshot(self._optimizers[armed.optimizer], ready[0].states.traits)
        for flat in ready:
            self._submit(unit, flat, armed.hyper, Transform())
            flat.gradient.hand_over()
        self._updater.pump()
        self._make_room()

    def _make_room(self) -> None:
        """Waits for the oldest jobs while the gradients of all pending ones take too much memory (I4)."""
        for unit in list(self._pending):
            self.pending(unit)
        while len(self._pending) > 1 and self._waiting_bytes() > self._gradient_room_bytes:
            self.finish(next(iter(self._pending)))

    def _waiting_bytes(self) -> int:
        return sum(job.flat.gradient.bytes for jobs in self._pending.values() for job in jobs)

    # -- step ---------------------------------------------------------------------------------------------------------

    def flats_of(self, optimizer: int) -> list[tuple[int, FlatUpdate]]:
        """(unit, flat) of an optimizer, last unit first: the order in which gradients come."""
        return [
            (unit, flat)
            for unit in reversed(range(len(self._flats)))
            for flat in self._flats[unit]
            if flat.optimizer == optimizer
        ]

    def step(self, optimizer: int, transform: Transform) -> None:
        """Updates every flat of the optimizer that has a gradient and was not updated in the backward pass."""
        armed, self._armed = self._armed, None
        hyper = armed.hyper if armed is not None else None
        # Learning rate schedulers warn unless they see that a step was taken; the user's own step() is never called.
        self._optimizers[optimizer]._opt_called = True  # type: ignore[attr-defined]
        # First unit first: the next forward wants it first.
        for unit, flat in reversed(self.flats_of(optimizer)):
            if flat.done_this_step:
                flat.done_this_step = False
            elif flat.gradient.any:
                if hyper is None:
                    hyper = snapshot(self._optimizers[optimizer], flat.states.traits)
                self._submit(unit, flat, hyper, transform)
                flat.done_this_step = False
        self._updater.pump()

    def _submit(self, unit: int, flat: FlatUpdate, hyper: HyperParameters, transform: Transform) -> None:
        store = flat.store
        source = flat.gradient.source()
        if not store.resident:
            self._units[unit].release()
            self._units[unit].evict()
        key = (flat.optimizer, flat.states.master.dtype if flat.states.master is not None else store.binding.dtype)
        shadow = self._shadows.get(key)
        if shadow is None:
            shadow = self._shadows[key] = Shadow(self._optimizers[flat.optimizer], flat.states.traits)
        job = UpdateJob(flat.states, shadow, source, store.home, hyper, transform, flat.gradient.leaving())
        self._pending.setdefault(unit, []).append(_Pending(self._updater.submit(job), flat))
        flat.done_this_step = True

    def skip(self, optimizer: int) -> None:
        """The step is not taken (inf or NaN under a loss scale)."""
        self._armed = None
        for _, flat in self.flats_of(optimizer):
            flat.done_this_step = False

    def abandon(self) -> None:
        """The iteration failed: no step is under way any more."""
        self._armed = None
        for flats in self._flats:
            for flat in flats:
                flat.done_this_step = False

    # -- waiting ------------------------------------------------------------------------------------------------------

    def pending(self, unit: int) -> bool:
        """Whether a unit's compute parameters are about to change, after some progress has been made."""
        jobs = self._pending.get(unit)
        if not jobs:
            return False
        self._updater.pump()
        if all(job.handle.done() for job in jobs):
            self.finish(unit)
            return False
        return True

    def finish(self, unit: int) -> None:
        """Blocks until a unit's pending updates are in its compute parameters (I1)."""
        for job in self._pending.pop(unit, ()):
            self._updater.finish(job.handle)
            job.flat.gradient.used()

    def finish_all(self) -> None:
        """Blocks until all updates have been made and written home."""
        for unit in list(self._pending):
            self.finish(unit)
        self._updater.drain()

    def progress(self) -> None:
        """Moves updates on that wait for nothing."""
        self._updater.pump()
