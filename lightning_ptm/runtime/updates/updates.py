"""Scheduling of updates: during the backward pass as units end, or at the optimizer step.

`UpdateScheduler` manages steps and their gradients. Its subclasses decide what happens to a gradient:
`SynchronousUpdates` here, where the next forward waits for the update, and `LockFreeUpdates` (lock_free.py). The
arithmetic and its I/O are in the updater (update/pipeline.py).

I1: within one step a flat is updated once.
I2: hyper-parameters are those of the step that the gradient belongs to.
I3: each parameter is updated with the hyper-parameters of the group that it is in at the step (optimizer_groups.py).
I4: errors of a step that can be detected beforehand are raised before the first flat is updated, so all weights are
    those of the step before. Errors that an optimizer raises because of numeric values are detected only during the
    update.
"""

from __future__ import annotations

import abc
import dataclasses
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch.optim import Optimizer

from lightning_ptm.errors import CapacityError, UsageError
from lightning_ptm.planning.update_order import first_to_wait_for
from lightning_ptm.runtime.deciding.gradient_route import Until
from lightning_ptm.runtime.tensors.autograd_graphs import in_backward
from lightning_ptm.runtime.units.store import UnitStore
from lightning_ptm.runtime.updates.optimizer_groups import FlatUpdate, OptimizerGroups
from lightning_ptm.terms import Tier
from lightning_ptm.update.flat_states import FlatStates
from lightning_ptm.update.gradient_source import GradientSource, ParameterGradients, Transform
from lightning_ptm.update.shadow import GroupValues, ScalarState, ShadowOptimizer, snapshot
from lightning_ptm.update.trial.traits import same_value
from lightning_ptm.update.update_job import JobHandle, UpdateJob, arithmetic_tier, check_every_gradient
from lightning_ptm.update.updater import Updater


@dataclasses.dataclass(frozen=True, slots=True)
class _Pending:
    handle: JobHandle
    flat: FlatUpdate


@dataclasses.dataclass(slots=True)
class _Armed:
    optimizer: int
    hyper: GroupValues | None = None


class UpdateScheduler(abc.ABC):
    """Decides when a flat's gradient goes to the update.

    Args:
        flats: all trainable flats, by unit.
        optimizers: the user's own.
        default_dtype: torch's default dtype outside forwards, if forwards have another; else None.
        number_of_step: returns the number of the current or next step, counted over resumed runs; None: counts this
            run's.
    """

    def __init__(
        self,
        flats: Sequence[Sequence[FlatUpdate]],
        optimizers: Sequence[Optimizer],
        default_dtype: torch.dtype | None = None,
        number_of_step: Callable[[], int] | None = None,
    ) -> None:
        self._flats = flats
        self._default_dtype = default_dtype
        self._updated: set[int] = set()
        """Ids of flats whose first update was started."""
        self._first_under_way = False
        self.groups = OptimizerGroups(flats, optimizers)
        self._shadows: dict[tuple[int, torch.dtype], ShadowOptimizer] = {}
        self._trials: dict[tuple[int, torch.dtype], ShadowOptimizer] = {}
        """Shadow optimizers as in `_shadows`, for the stepping thread: updates may use the others concurrently."""
        self._tried: dict[int, GroupValues] = {}
        """By optimizer, the hyper-parameters that it was last tried with."""
        self._torn = False
        self._armed: _Armed | None = None
        self._in_step = False
        self.steps_taken = 0
        """Number of optimizer steps whose updates were all started."""
        self._number_of_step = number_of_step or (lambda: self.steps_taken)

    # -- update in backward --------------------------------------------------------------------------------------------

    def arm(self, optimizer: Optimizer) -> None:
        """Updates units as their backward ends, until the step, unless routes leave the update to the step."""
        index = self.groups.index_of(optimizer)
        if all(flat.gradient.route.until is Until.BACKWARD for _, flat in self.groups.flats_of(index)):
            self._armed = _Armed(index)

    @property
    def armed(self) -> bool:
        return self._armed is not None

    def unit_ready(self, unit: int) -> None:
        """Updates a unit whose gradients are complete, if a step is armed."""
        armed = self._armed
        chosen = () if armed is None else (flat for flat in self._flats[unit] if flat.optimizer == armed.optimizer)
        ready = [flat for flat in chosen if flat.gradient.any]
        if armed is None or not ready:
            return
        if armed.hyper is None:
            self.groups.follow(armed.optimizer, self.finish_all)
            armed.hyper = self._checked(armed.optimizer, ready[0])
        for flat in ready:
            flat.gradient.drop_handed(self._begin(unit, flat, armed.hyper, Transform()))
        self._handed_over()

    # -- step ----------------------------------------------------------------------------------------------------------

    def step(self, optimizer: int, transform: Transform) -> None:
        """Updates every flat of the optimizer that has a gradient and was not updated in the backward pass.

        Raises:
            UsageError: groups have changed since units were updated in the backward pass; or a parameter was moved to a
                group where it cannot be updated.
        """
        hyper = None if self._armed is None else self._armed.hyper
        if hyper is not None:
            self.groups.check_unchanged(optimizer, hyper)
        else:
            self.groups.follow(optimizer, self.finish_all)
        flats = self.groups.flats_of(optimizer)
        waiting = [(unit, flat) for unit, flat in flats if not flat.gradient.handed]
        ready = [(unit, flat) for unit, flat in reversed(waiting) if flat.gradient.any]
        self._check_missing(optimizer, waiting, any_updated=bool(ready) or len(waiting) < len(flats))
        shares_masters = False
        for _, flat in flats:
            flat.gradient.view.check_not_edited()
            shares_masters |= len(flat.store.layout.optimizers) > 1
        if hyper is None and ready:
            hyper = self._checked(optimizer, ready[0][1])
        if shares_masters:
            self.finish_all()  # another optimizer's update may still be writing them
        self._armed = None
        self._in_step = True
        for unit, flat in ready:  # first unit first: the next forward reads it first
            assert hyper is not None
            # A gradient clipped in place needs no more clipping, but its loss scale may still have to be removed.
            clips = flat.gradient.view.clipped_later
            self._begin(unit, flat, hyper, transform if clips else Transform(unscale=transform.unscale))
        self._stepped(optimizer)
        clipped = not transform.is_identity
        for _, flat in flats:
            flat.gradient.step_ends(clipped=clipped, scratch=flat.states.traits.writes_gradient)
        self.steps_taken += 1
        self._in_step = self._torn = False

    def _checked(self, optimizer: int, flat: FlatUpdate) -> GroupValues:
        """The hyper-parameters of a beginning step, after a trial of the optimizer's class with them (I4).

        Args:
            flat: one of the flats that the step updates.
        """
        hyper = snapshot(self.groups.optimizers[optimizer], flat.states.traits, self._number_of_step())
        known = self._tried.get(optimizer)
        if known is None or _differ(known, hyper):
            for shadow, states, group, scalars, slots in self._kinds_of(optimizer):
                dtype = states.master.dtype if states.master is not None else getattr(torch, states.flat.dtype)
                like = torch.empty(0, dtype=dtype, device=states.traits.device)
                shadow.check(hyper, group, scalars, slots, like)
            self._tried[optimizer] = hyper
        return hyper

    def _kinds_of(
        self, optimizer: int
    ) -> Iterator[tuple[ShadowOptimizer, FlatStates, int, ScalarState | None, tuple[str, ...]]]:
        """Yields each kind of parameter of an optimizer.

        A kind is a shadow optimizer, the states of one such flat, a group, the scalar states, and the names of the slots.
        """
        found = set[tuple[int, int, int, tuple[str, ...]]]()
        for _, flat in self.groups.flats_of(optimizer):
            shadow = self._shadow_in(self._trials, flat)
            for index, group in enumerate(flat.states.groups):
                if group is None or not flat.states.owns(index):
                    continue
                scalars, slots = flat.states.scalars(index), flat.states.state_names(index)
                if (id(shadow), group, id(scalars), slots) not in found:
                    found.add((id(shadow), group, id(scalars), slots))
                    yield shadow, flat.states, group, scalars, slots

    def _begin(self, unit: int, flat: FlatUpdate, hyper: GroupValues, transform: Transform) -> GradientSource | None:
        self._first_under_way |= id(flat) not in self._updated
        self._updated.add(id(flat))
        present = flat.gradient.view.present()
        flat.store.binding.values_change([slot for slot, here in enumerate(present) if here])
        return self._update(unit, flat, hyper, transform)

    def settle_first(self) -> None:
        """Waits for first updates before a forward that has another default dtype.

        Optimizers create states in the default dtype during their first update.
        """
        if self._default_dtype is not None and self._first_under_way:
            self.finish_all()
        self._first_under_way = False

    def _check_missing(self, optimizer: int, waiting: Sequence[tuple[int, FlatUpdate]], *, any_updated: bool) -> None:
        """Checks flats without any gradient: they are not updated, which some optimizers do not support.

        Args:
            waiting: flats of the optimizer that were not updated in the backward pass.
            any_updated: whether the step updates any flat.
        """
        if any_updated:
            for _, flat in waiting:
                if flat.states.traits.every_gradient:
                    check_every_gradient(flat.states, flat.gradient.view.present())
        elif waiting and waiting[0][1].states.traits.group_slots:
            # The optimizer's class also counts steps that update nothing.
            snapshot(self.groups.optimizers[optimizer], waiting[0][1].states.traits)

    @property
    def in_mid_step(self) -> bool:
        """Whether only some flats have had an update of the current step."""
        return self._in_step or any(flat.gradient.handed for flats in self._flats for flat in flats)

    @property
    def torn(self) -> bool:
        """Whether only some flats have the update of a step that is in progress or was abandoned, so that the
        parameters belong to no step."""
        return self._torn or self.in_mid_step

    def check_before_updates(self, action: str, flats: Iterable[FlatUpdate] | None = None) -> None:
        """Checks that a hook in the backward pass comes before the updates that run in this pass.

        Args:
            action: what the hook does with them.
            flats: default: all.

        Raises:
            UsageError: one of them has its update, which a plain Trainer makes after the pass.
        """
        if self._armed is None or not in_backward():
            return
        chosen = flats if flats is not None else (flat for of_unit in self._flats for flat in of_unit)
        handed = next((flat for flat in chosen if flat.gradient.handed), None)
        if handed is not None:
            raise UsageError(
                f"a hook in the backward pass does this: {action}; {handed.store.layout.slots[0].spec.name} has been "
                "updated in this pass already, and a plain Trainer updates nothing before its end; do it before or after "
                "the backward pass, or define on_before_optimizer_step in the module or a callback: then all updates "
                "come after the pass"
            )

    def check_stepped(self) -> None:
        """Raises UsageError if units were updated during a backward pass for a step that was never taken.

        Called between two steps.
        """
        for flats in self._flats:
            for flat in flats:
                if flat.gradient.handed:
                    name = type(self.groups.optimizers[flat.optimizer]).__name__
                    raise UsageError(
                        f"{flat.store.layout.slots[0].spec.name} was updated during the backward pass, in place of "
                        f"{name}.step, but {name}.step was never called: it was replaced (optimizer.step = ...) by a "
                        "function that does not call it; make a subclass of torch.optim.Optimizer with that step"
                    )

    def skip(self, optimizer: int) -> None:
        """Skips the step (inf or NaN under a loss scale)."""
        self._armed = None
        for _, flat in self.groups.flats_of(optimizer):
            flat.gradient.give_up_step()

    def abandon(self) -> None:
        """Ends the step in progress after the iteration has failed."""
        self._torn |= self.in_mid_step
        self._armed = None
        self._in_step = False
        for flats in self._flats:
            for flat in flats:
                flat.gradient.give_up_step()

    def shadow(self, flat: FlatUpdate) -> ShadowOptimizer:
        """The shadow optimizer that updates a flat."""
        return self._shadow_in(self._shadows, flat)

    def _shadow_in(self, shadows: dict[tuple[int, torch.dtype], ShadowOptimizer], flat: FlatUpdate) -> ShadowOptimizer:
        key = (flat.optimizer, flat.states.master.dtype if flat.states.master is not None else flat.store.binding.dtype)
        if key not in shadows:
            optimizer = self.groups.optimizers[flat.optimizer]
            shadows[key] = ShadowOptimizer(optimizer, flat.states.traits, default_dtype=self._default_dtype)
        return shadows[key]

    # -- for subclasses ------------------------------------------------------------------------------------------------

    @abc.abstractmethod
    def _update(self, unit: int, flat: FlatUpdate, hyper: GroupValues, transform: Transform) -> GradientSource | None:
        """Starts the update of a flat whose gradient of this step is complete.

        Returns:
            The gradient, if the update drops it on a stream that is ordered behind the current one.
        """

    @abc.abstractmethod
    def _handed_over(self) -> None:
        """Hook for subclasses: called during the backward pass, after `_update` of all flats of a unit."""

    @abc.abstractmethod
    def _stepped(self, optimizer: int) -> None:
        """Hook for subclasses: called at the end of an optimizer's step, after `_update` of all its flats that have a
        gradient."""

    @abc.abstractmethod
    def begin_iteration(self, *, training: bool) -> None:
        """Begins a forward pass; nothing of the iteration before is used any more."""

    @abc.abstractmethod
    def graph_ended(self) -> None:
        """Hook for subclasses: called when a backward pass has ended."""

    @abc.abstractmethod
    def pending(self, unit: int) -> bool:
        """Whether a unit may not be read yet."""

    @abc.abstractmethod
    def finish(self, unit: int) -> None:
        """Blocks until a unit may be read."""

    def finish_between_steps(self, unit: int) -> None:
        """Waits for all updates of a unit, as `finish`, for a reader between two steps."""
        self.finish(unit)

    @abc.abstractmethod
    def finish_all(self) -> None:
        """Blocks until all updates have been made, are in the compute parameters, and are written to their home."""

    @abc.abstractmethod
    def progress(self) -> None:
        """Advances updates without blocking, and raises their errors."""

    def make_room(self) -> None:
        """Advances updates while compute waits for gradient memory; those that hold gradient memory come first."""
        self.progress()

    @abc.abstractmethod
    def start(self) -> None:
        """Starts threads, after all other parts are built."""

    @abc.abstractmethod
    def close(self) -> None:
        """Ends threads, if there are any; never raises. The owner of the updater closes it."""


def _differ(known: GroupValues, now: GroupValues) -> bool:
    """Whether an optimizer's class may behave differently with these hyper-parameters.

    That is so if any has changed other than the learning rate and tensors, or if the learning rate has become or ceased
    to be 0.
    """
    if len(known.groups) != len(now.groups):
        return True
    for old, new in zip(known.groups, now.groups, strict=True):
        if old.keys() != new.keys():
            return True
        for key, value in new.items():
            if old[key] is not value and _value_differs(key, old[key], value):
                return True
    return False


def _value_differs(key: str, old: Any, new: Any) -> bool:
    if isinstance(old, torch.Tensor) and isinstance(new, torch.Tensor):
        return False  # comparing device tensors would wait for the device
    if key in ("lr", "initial_lr") and isinstance(old, float | int) and isinstance(new, float | int):
        return bool(old) != bool(new)
    return not same_value(old, new)


class SynchronousUpdates(UpdateScheduler):
    """Updates after which a unit is read again only once the update is done.

    Owns the pending jobs of each unit.

    I5: a unit with a pending job is not read before that job is done (`finish`).
    I6: gradients that wait for updates take at most `gradient_room_bytes`, or those of one unit; beyond that, compute
        waits. Gradients that have pages of their own outside a device with memory of its own do not count.
    I7: the copy of a unit from before an update is released when the update begins; at the end of the pass if its backward
        is in progress and reads the pages (`UnitStore.read_in_place`).

    Args:
        units: stores by unit.
        flats, optimizers, default_dtype, number_of_step: see UpdateScheduler.
        updater: runs the jobs.
        gradient_room_bytes: how many bytes of gradients may wait for their update during the backward pass.
        in_thread: the updater works in a thread of its own.
        in_turn: jobs run in the order in which the next forward reads units, not in the order of gradients.

    Beside a device with memory of its own, updates on the device come first: the thread only launches them, and their
    gradients take memory of the device until then.
    """

    def __init__(
        self,
        units: Sequence[UnitStore],
        flats: Sequence[Sequence[FlatUpdate]],
        optimizers: Sequence[Optimizer],
        updater: Updater,
        gradient_room_bytes: int,
        *,
        in_thread: bool,
        in_turn: bool = False,
        default_dtype: torch.dtype | None = None,
        number_of_step: Callable[[], int] | None = None,
    ) -> None:
        super().__init__(flats, optimizers, default_dtype, number_of_step)
        self._units = units
        self._turns = range(len(units)) if in_turn else [0] * len(units)
        self._updater = updater
        self._gradient_room_bytes = gradient_room_bytes
        self._in_thread = in_thread
        self._pending: dict[int, list[_Pending]] = {}
        self._outdated: set[int] = set()
        """Units with copies of values from before an update, which the backward pass in progress reads."""

    def _update(self, unit: int, flat: FlatUpdate, hyper: GroupValues, transform: Transform) -> GradientSource:
        store, source = flat.store, flat.gradient.source()
        if isinstance(source, ParameterGradients):
            source.watch()
        if not store.resident:
            # An optimizer steps in a gradient hook; a pass that has failed reads nothing any more.
            if self._units[unit].read_in_place and in_backward():
                self._outdated.add(unit)
            else:
                self._units[unit].release()
                self._units[unit].evict()
        store.binding.values_will_change()
        after, turn = (*flat.gradient.shard.transfers(), *store.reads()), self._turns[unit]
        if self._in_thread and arithmetic_tier(flat.states, store.home, Tier.HOST).computes:
            turn -= len(self._units)
        job = UpdateJob(flat.states, self.shadow(flat), source, store.home, hyper, transform, after=after, turn=turn)
        # In the backward pass the thread gets the job after its gradients have left `.grad`.
        self._pending.setdefault(unit, []).append(_Pending(self._updater.submit(job, at_once=self._in_step), flat))
        flat.gradient.hand_over()
        return source

    def _handed_over(self) -> None:
        if not self._in_thread:
            self._updater.pump()
        for unit in list(self._pending):
            self.pending(unit)
        while (first := first_to_wait_for(self._waiting_bytes(), self._gradient_room_bytes)) is not None:
            self.finish(first)  # I6
        self._updater.pump()  # wakes the thread

    def _stepped(self, optimizer: int) -> None:
        self.progress()

    def make_room(self) -> None:
        if self._pending:
            self.finish(next(iter(self._pending)))
            return
        waiting = 0
        for flat in (flat for of_unit in self._flats for flat in of_unit):
            flat.gradient.used()  # of a step that was given up
            waiting += flat.gradient.route.from_pool and flat.gradient.shard.pages is not None
        raise CapacityError(
            f"{waiting} gradients in RAM wait for the optimizer's step, since code of yours clips gradients or computes "
            f"their norm between the backward pass and the step, of which the plan did not know: the pages in RAM suffice "
            f"for gradients of four units at once; clip with gradient_clip_val, define on_before_optimizer_step in the "
            f"module (it may be empty), or raise host_memory, so that each gradient has pages of its own"
        )

    def _waiting_bytes(self) -> dict[int, int]:
        found: dict[int, int] = {}
        for unit, jobs in self._pending.items():
            gradients = (job.flat.gradient for job in jobs)
            waiting = [each.bytes for each in gradients if not (self._in_thread and each.route.has_own_pages_away)]
            if waiting:
                found[unit] = sum(waiting)
        return found

    def begin_iteration(self, *, training: bool) -> None:
        self.progress()  # the fetches of the first tick ask which units may be read

    def graph_ended(self) -> None:
        for unit in tuple(self._outdated):
            self._release_outdated(unit)

    def _release_outdated(self, unit: int) -> None:
        self._outdated.discard(unit)
        self._units[unit].release()
        self._units[unit].evict()

    def pending(self, unit: int) -> bool:
        jobs = self._pending.get(unit)
        if not jobs:
            return False
        for job in jobs:
            if not job.handle.done():
                return True
        self.finish(unit)
        return False

    def finish(self, unit: int) -> None:
        jobs = self._pending.get(unit, [])
        while jobs:  # a job stays pending until it is done, also if the wait is interrupted
            self._updater.finish(jobs[0].handle)
            jobs[0].flat.store.binding.values_have_changed()
            jobs[0].flat.gradient.used()
            del jobs[0]
        self._pending.pop(unit, None)
        if unit in self._outdated and not in_backward():  # the pass has failed, and the step goes on
            self._release_outdated(unit)

    def finish_all(self) -> None:
        for unit in list(self._pending):
            self.finish(unit)
        self._updater.drain()

    def progress(self) -> None:
        self._updater.pump()

    def start(self) -> None:
        if self._in_thread:
            self._updater.run_in_thread()

    def close(self) -> None:
        return None
