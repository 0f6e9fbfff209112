"""What follows from the events of a backward pass: a unit's gradients are reduced, and its update begins when its turn comes.

Owns which units wait for that. Hooks tell the events.

I1: a unit is updated one unit behind its backward, so that its reduction overlaps the next one's, and all of them by the end
of the pass. I2: a pass of the user's own updates nothing.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from torch import Tensor

from lightning_ptm.errors import UsageError
from lightning_ptm.runtime.fetching.executor import Executor
from lightning_ptm.runtime.ranks.barriers import Barriers
from lightning_ptm.runtime.units.discovery import Unit
from lightning_ptm.runtime.units.store import UnitStore
from lightning_ptm.runtime.updates.reduction import Reduction
from lightning_ptm.runtime.updates.updates import FlatUpdate, UpdateScheduler


class BackwardActions:
    """The listener of the hooks (backward_pass.py: BackwardListener).

    Args:
        flats: of each unit.
        alone: there is one rank.
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
    ) -> None:
        self._units = units
        self._stores = stores
        self._flats = flats
        self._executor = executor
        self._reduction = reduction
        self._updates = updates
        self._barriers = barriers
        self._alone = alone

        self._number = 0
        """Of passes of this iteration."""
        self._behind: list[int] = []
        self._of_the_loss = False
        self.in_step = False
        """The user's step is in progress, and may use the root after the pass. Others read it."""

    def iteration_begins(self) -> None:
        self._number = 0

    @contextmanager
    def step(self) -> Iterator[None]:
        self.in_step = True
        try:
            yield
        finally:
            self.in_step = False

    @contextmanager
    def of_the_loss(self) -> Iterator[None]:
        """A pass that the strategy runs."""
        self.backward_begins()
        self._of_the_loss = True
        yield
        self._of_the_loss = False

    def abandon(self) -> None:
        """See `Engine.abandon`."""
        self._behind = []
        self._of_the_loss = False

    # -- what hooks tell ----------------------------------------------------------------------------------------------

    def another_gradient(self, unit: int, parameter: Tensor) -> None:
        """Several gradients of a parameter come in one pass, each in a backward of its own (a reentrant checkpoint's)."""
        self._reduction.add_up(unit, parameter)

    def unit_backward_ended(self, unit: int) -> None:
        """Gradients of a unit are complete: reduce or offload them, and update the unit before if its turn has come."""
        if not self._flats[unit]:
            return
        if not self._stores[unit].resident and not self._executor.called(unit):
            uncalled = self._units[unit]
            raise UsageError(
                f"weights of {uncalled.name} ({type(uncalled.module).__name__}) were used without a call of that module, so "
                f"they were not fetched; call the module, move that code into its forward, or choose other units=[...]"
            )
        self._reduction.collect(unit)
        # One unit behind: its reduction overlaps this unit's backward.
        self._behind.append(unit)
        if self._alone or len(self._behind) > 1:
            self._update_ready(self._behind.pop(0))

    def backward_begins(self) -> None:
        """Gradients are about to be added up in `.grad`."""
        for flat in self._all_flats():
            flat.gradient.grad_attribute.resolve()
        for flat in self._all_flats():
            flat.gradient.grad_attribute.used.follow_forgetting()
            flat.gradient.grad_attribute.hide()

    def backward_ended(self) -> None:
        self._executor.compute_timing.end_tick()
        self._number += 1
        self._updates.graph_ended()
        self._barriers.reach(self._number)
        while self._behind:
            self._update_ready(self._behind.pop(0))
        if not self._updates.armed:
            for flat in self._all_flats():
                flat.gradient.grad_attribute.show()
        self._executor.keep_held(0, held=self.in_step)

    def progress(self) -> None:
        self._updates.progress()

    def _update_ready(self, unit: int) -> None:
        # A pass of the user's own, such as autograd.grad in the step, is none that the optimizer's step was armed for.
        if self._updates.armed and self._reduction.complete(unit) and self._of_the_loss:
            self._updates.unit_ready(unit)

    def _all_flats(self) -> Iterator[FlatUpdate]:
        return (flat for flats in self._flats for flat in flats)
