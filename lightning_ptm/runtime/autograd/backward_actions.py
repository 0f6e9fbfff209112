"""Engine-side reactions to backward events: reduces a unit's gradients when its backward ends, then starts its update.

Owns which unit's update has not been started yet. Knows no hooks: it implements `BackwardListener` (hooks.py), and the
hooks call it.

I1: the update of a unit starts one unit after the unit's backward, so that the reduction overlaps the next unit's
    backward. At the end of the pass every queued update has been started.
I2: a backward pass that the user runs (for example `torch.autograd.grad` inside a step) starts no update.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Protocol

from torch import Tensor

from lightning_ptm.errors import UsageError
from lightning_ptm.runtime.fetching.executor import Executor
from lightning_ptm.runtime.ranks.barriers import Barriers
from lightning_ptm.runtime.units.discovery import Unit
from lightning_ptm.runtime.units.store import UnitStore
from lightning_ptm.runtime.updates.optimizer_groups import FlatUpdate
from lightning_ptm.runtime.updates.reduction import Reduction
from lightning_ptm.runtime.updates.updates import UpdateScheduler


class LossWatch(Protocol):
    """What hears of backward passes of the loss."""

    def pass_begins(self) -> None: ...

    def gradients_came(self, unit: int) -> None: ...


class BackwardActions:
    """The engine's `BackwardListener`: reduces gradients and starts updates.

    Args:
        units: all units, the root first.
        stores: the page store of each unit.
        flats: the trainable flats of each unit.
        alone: whether there is a single rank.
        watch: hears of passes of the loss.
    """

    def __init__(
        self,
        units: Sequence[Unit],
        stores: Sequence[UnitStore],
        flats: Sequence[Sequence[FlatUpdate]],
        executor: Executor,
        reduction: Reduction,
        updates: UpdateScheduler,
        barriers: Barriers,
        *,
        alone: bool,
        watch: LossWatch | None = None,
    ) -> None:
        self._units = units
        self._stores = stores
        self._flats = flats
        self._views = list(dict.fromkeys(flat.gradient.view for of_unit in flats for flat in of_unit))
        self._executor = executor
        self._reduction = reduction
        self._updates = updates
        self._barriers = barriers
        self._alone = alone
        self._watch = watch

        self._passes = 0
        """Number of backward passes in this iteration so far."""
        self._not_updated: int | None = None
        """The unit whose gradients were collected last, and whose update has not been started."""
        self._of_the_loss = False
        self.in_step = False
        """Whether the user's training step is running; it may use the root's parameters after the backward pass. Read
        by others."""

    def iteration_begins(self) -> None:
        self._passes = 0

    @contextmanager
    def step(self) -> Iterator[None]:
        self.in_step = True
        try:
            yield
        finally:
            self.in_step = False

    @property
    def starts_updates(self) -> bool:
        """Whether updates of units begin in the pass in progress (I2)."""
        return self._updates.armed and self._of_the_loss

    @contextmanager
    def of_the_loss(self) -> Iterator[None]:
        """Marks the passes inside the block as backward passes of the loss, which the strategy runs."""
        self.backward_begins()
        if self._watch is not None:
            self._watch.pass_begins()
        self._of_the_loss = True
        try:
            yield
        except BaseException:
            self._not_updated = None
            raise
        finally:
            self._of_the_loss = False

    def abandon(self) -> None:
        """Forgets the pass in progress; see `Engine.abandon`."""
        self._not_updated = None
        self._of_the_loss = False

    # -- called by the hooks -------------------------------------------------------------------------------------------

    def adds_up(self, unit: int) -> bool:
        """Whether several gradients of a pass are summed in pages."""
        return self._reduction.adds_up[unit]

    def another_gradient(self, unit: int, parameter: Tensor) -> None:
        """Moves a parameter's `.grad` into its pages before a further gradient of the same pass is added to it.

        A parameter gets several gradients in one pass if a reentrant checkpoint runs a backward of its own for each.
        """
        self._reduction.add_up(unit, parameter)

    def call_begins(self, unit: int) -> None:
        """Checks that a unit that is called in the pass has the weights from before it."""
        self._updates.check_before_updates(f"call {self._units[unit].name or 'the root module'}", self._flats[unit])

    def unit_backward_ended(self, unit: int) -> None:
        """Reduces or offloads a unit's complete gradients, and starts the update of the unit before it.

        That update is left out if no step is armed, if the pass is not of the loss, or if further gradients may come.
        """
        if not self._flats[unit]:
            return
        if not self._stores[unit].resident and not self._executor.has_graphs(unit):
            uncalled = self._units[unit]
            raise UsageError(
                f"weights of {uncalled.name} ({type(uncalled.module).__name__}) were used without a call of that module, so "
                f"they were not fetched; call the module, move that code into its forward, or choose other units=[...]"
            )
        self._executor.fetching.release_ended()  # the plan has the gradients' pages where its parameters were
        self._reduction.collect(unit)
        if self._of_the_loss and self._watch is not None:
            self._watch.gradients_came(unit)
        if self._alone:
            self._update_ready(unit)
            if not self._updates.armed:  # hooks of the units before it find what a plain Trainer has
                for flat in self._flats[unit]:
                    flat.gradient.view.show()
        else:  # one unit late: the reduction overlaps the backward of the next unit (I1)
            self._update_last()
            self._not_updated = unit

    def backward_begins(self) -> None:
        """Prepares every `.grad` for accumulation.

        Placeholders are removed, and gradients that the user has removed are forgotten.
        """
        for view in self._views:
            view.resolve()
        for view in self._views:
            view.pass_begins()

    def backward_ended(self) -> None:
        self._executor.compute_timing.end_tick()
        self._passes += 1
        self._executor.pass_ended()
        self._updates.graph_ended()
        if not self._alone:
            self._barriers.reach(self._passes)
        self._update_last()
        if not self._updates.armed:
            for view in self._views:
                view.show()
        self._executor.keep_held(0, held=self.in_step)

    def progress(self) -> None:
        self._updates.progress()

    def _update_last(self) -> None:
        unit, self._not_updated = self._not_updated, None
        if unit is not None:
            self._update_ready(unit)

    def _update_ready(self, unit: int) -> None:
        # I2: a pass that the user runs, such as autograd.grad in the step, is not the one that was armed for an update.
        if self.starts_updates and self._reduction.complete(unit):
            self._updates.unit_ready(unit)
