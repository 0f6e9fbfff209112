"""Collection and reduction of gradients: at the end of a unit's backward or, if ranks accumulate separately, later.

Owns the set of units with gradients that the ranks have not reduced yet. The pages and the arithmetic are in
flat_gradient.py.

I1: all ranks agree on every reduction, and run them in the same order. A rank without gradients contributes zeros; a
    rank that does not hold the unit takes no part.
I2: gradients left unreduced are reduced with the unit's next gradients, or at the latest when the step needs them.
I3: a unit whose holders have all requested its reduction gets no more gradients in this pass. If some holders only took
    part, gradients may still come.
I4: the sum that ranks have accumulated over several passes is reduced once, as DDP does it: if not all holders of such
    a unit finish its backward in the last pass, its gradients stay unreduced until the step reduces them.
I5: gradients take pages of a pool in RAM only if their update begins at once. If further gradients may come, or the update
    waits for the step, they stay in `.grad` until the step collects them, one unit after the other.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial

import torch

from lightning_ptm.comm import Agreement, Communicator, NeededCollective
from lightning_ptm.comm.agreement import Decision
from lightning_ptm.errors import CapacityError, UsageError
from lightning_ptm.runtime.gradients.store import InFlight
from lightning_ptm.runtime.updates.optimizer_groups import FlatUpdate
from lightning_ptm.terms import Operation

_MISSING = 1
"""Flag of a reduction: some parameter of the unit has no gradient on this rank."""

_LAST = 2
"""Flag of a reduction: the step needs it, and no further gradients follow."""

_LATER = 4
"""Flag of a reduction: the unit's update does not begin in the pass in progress."""


class Reduction:
    """Collects and reduces the gradients of one rank's units.

    Args:
        flats: trainable flats, by unit; one that several optimizers update may occur once for each.
        agreement: ranks agree on reductions through it.
        in_flight: the run's gradients that are in flight.
        evict_idle_unit: frees the device pages of a gathered unit that is not in use; returns whether there was one.
        updates_begin: whether updates of units begin in the pass in progress.
        called: whether a unit has been called in this iteration.
        begin_update: begins the update of a unit whose gradients are complete, if a step is armed.
    """

    def __init__(
        self,
        flats: Sequence[Sequence[FlatUpdate]],
        agreement: Agreement,
        in_flight: InFlight,
        evict_idle_unit: Callable[[], bool],
        *,
        updates_begin: Callable[[], bool] = lambda: True,
        called: Callable[[int], bool] = lambda unit: True,
        begin_update: Callable[[int], None] = lambda unit: None,
    ) -> None:
        self._flats = [list({id(flat.gradient): flat for flat in of_unit}.values()) for of_unit in flats]
        self._in_grad = [all(flat.gradient.in_place for flat in of_unit) for of_unit in self._flats]
        """Whether all gradients of a unit stay in `.grad`, by unit."""
        self.adds_up = [any(flat.gradient.adds_in_pages for flat in of_unit) for of_unit in self._flats]
        """Whether gradients of a unit are summed in pages as they come (`add_up`), by unit. Read by others."""
        self._shared = [any(flat.store.layout.shared for flat in of_unit) for of_unit in self._flats]
        """Whether ranks share a flat of a unit, by unit."""
        self._agreement = agreement
        self._in_flight = in_flight
        self._evict_idle_unit = evict_idle_unit
        self._passing = [any(flat.gradient.route.passes_through_ram for flat in of_unit) for of_unit in self._flats]
        """Whether gradients of a unit pass through a pool in RAM, by unit (I5)."""
        self._updates_begin = updates_begin
        self._called = called
        self._begin_update = begin_update

        self._scattered: set[int] = set()
        """Units with a reduction in this step that not all holders requested, whether it was run or postponed."""
        self._at_step = [any(flat.gradient.route.reduced_at_step for flat in of_unit) for of_unit in flats]
        """Whether the step reduces gradients that are postponed, by unit."""
        self._postponing = False
        self._postponed: list[int] = []
        """Units whose gradients may be waiting in `.grad`, in the order in which a step reduces them.

        Agreed on by all ranks, except for experts, and so not what the gradients of this rank would show.
        """
        self._in_step = False
        """Whether the step is reducing what is left: inside `collect_postponed`."""
        self._ended: set[int] = set()
        """Units of the pool whose backward has ended here in the pass of the loss, so that no more gradients come."""

    @contextmanager
    def postponed(self) -> Iterator[None]:
        """Inside, gradients that the step reduces stay in `.grad`, where autograd adds those of the next micro-batch."""
        before, self._postponing = self._postponing, any(self._at_step)
        try:
            yield
        finally:
            if self._postponing:
                units = reversed(range(len(self._flats)))
                self._postponed = [unit for unit in units if self._at_step[unit] and not self._in_grad[unit]]
            self._postponing = before

    def collect(self, unit: int) -> None:
        """Collects the gradients of a unit whose backward has ended. Collective if there are several ranks."""
        flats = self._flats[unit]
        if self._postponing and self._at_step[unit]:
            for flat in flats:
                flat.gradient.view.postpone()
            return
        if self._in_grad[unit]:
            return
        self._in_flight.limit_additions()
        waits = self._passing[unit] and not self._in_step and not self._updates_begin()
        if not self._shared[unit]:
            if waits:
                self._postpone(unit)
                return
            self._no_longer_postponed(unit)
            for flat in flats:
                self._with_room(flat.gradient.collect)
            return
        missing = not all(all(flat.gradient.view.uncollected()) for flat in flats)
        flag = _MISSING * missing | _LAST * self._in_step | _LATER * waits
        if self._passing[unit] and not waits:
            self._ended.add(unit)
        decision = self._agreement.request(NeededCollective(Operation.REDUCE, unit, flag))
        if not self._postponed_to_step(decision):
            self._reduce(decision)
            return
        for flat in flats:
            flat.gradient.view.postpone()

    def add_up(self, unit: int, parameter: torch.Tensor) -> None:
        """Adds a parameter's `.grad` to its pages, before autograd computes another gradient of it in the same pass."""
        for flat in self._flats[unit]:
            slot = next((at for at, each in enumerate(flat.store.binding.parameters) if each is parameter), None)
            if slot is not None and flat.gradient.adds_in_pages:
                self._with_room(partial(flat.gradient.add_up, slot))

    def collect_postponed(self) -> None:
        """Reduces the gradients that are still in `.grad`. Collective: all ranks have postponed in the same passes.

        Raises:
            UsageError: called inside `postponed`.
        """
        if self._postponing:
            raise UsageError(
                "optimizer.step(), clipping or gradient_norm() was called inside no_sync() (`block_backward_sync`), "
                "where gradients are not reduced over ranks yet; end the block before it"
            )
        self._in_step = True
        try:
            while self._postponed:
                unit = self._postponed[0]
                self.collect(unit)
                if self._passing[unit]:
                    self._begin_update(unit)  # its pages are needed for the next unit's gradients
        finally:
            self._in_step = False

    def take_part(self, decision: Decision) -> None:
        """Takes part in another rank's reduction of a unit whose backward has not ended here, or never will."""
        self._in_flight.limit_additions()
        unit = decision.request.unit
        if not self._postponed_to_step(decision):
            self._reduce(decision)
            if self._passing[unit]:
                self._begin_update(unit)

    def _postponed_to_step(self, decision: Decision) -> bool:
        """Whether the reduction is left to the step (I4, I5). The same on all holders of the unit."""
        unit = decision.request.unit
        if decision.flags & _LAST:
            return False
        if self._passing[unit]:
            waits = decision.flags & _LATER or (not decision.unanimous and self._further_may_come(unit))
            if waits:
                self._postpone(unit)
            return bool(waits)
        if decision.unanimous or unit not in self._postponed:
            return False
        self._scattered.add(unit)
        return True

    def _further_may_come(self, unit: int) -> bool:
        """Whether any holder of the unit may have further gradients of it in this pass. Collective."""
        here = not self._updates_begin() or (self._called(unit) and unit not in self._ended)
        return bool(self._communicator_of(unit).all_reduce(torch.tensor([here], dtype=torch.int64), maximum=True))

    def _communicator_of(self, unit: int) -> Communicator:
        """Returns the communicator of the flat that most ranks share, so that all holders of the unit take part."""
        return max(self._flats[unit], key=lambda flat: flat.store.layout.world_size).store.communicator

    def _postpone(self, unit: int) -> None:
        self._scattered.add(unit)
        if unit not in self._postponed:
            self._postponed.append(unit)

    def begin_step(self) -> None:
        """Begins the gradients of the next step."""
        self._scattered.clear()
        self._ended.clear()

    def complete(self, unit: int) -> bool:
        """Whether a unit whose gradients were reduced gets no more of them in this pass (I3).

        The answer is the same on all its holders.
        """
        return unit not in self._scattered

    def forget(self) -> None:
        """Forgets postponed gradients after a failed iteration."""
        self._postponed = []
        self._scattered.clear()
        self._ended.clear()

    def _reduce(self, decision: Decision) -> None:
        """Reduces this rank's gradients of the unit (zeros if it has none). Collective."""
        unit = decision.request.unit
        self._no_longer_postponed(unit)
        flats = self._flats[unit]
        if not flats:
            return  # an expert of other ranks
        present: list[list[bool]] | None = None
        if not (decision.unanimous or self._passing[unit]):
            self._scattered.add(unit)
        if decision.flags & _MISSING or not decision.unanimous:
            here = [each for flat in flats for each in flat.gradient.view.uncollected()]
            used = self._communicator_of(unit).all_reduce(torch.tensor(here, dtype=torch.int64), maximum=True).tolist()
            present, start = [], 0
            for flat in flats:
                count = len(flat.store.binding.parameters)
                present.append([bool(value) for value in used[start : start + count]])
                start += count
        for index, flat in enumerate(flats):
            self._with_room(partial(flat.gradient.collect, None if present is None else present[index]))

    def _no_longer_postponed(self, unit: int) -> None:
        if unit in self._postponed:
            self._postponed.remove(unit)
        if self._passing[unit]:
            self._scattered.discard(unit)  # these are its last ones, or they would be postponed

    def _with_room(self, act: Callable[[], None]) -> None:
        # Gradients of earlier units may still be in flight, for which a plan need not have room. The oldest arrives first, so
        # a device with work queued waits for no later one. Units that the plan keeps or has fetched ahead are released only
        # if that is not enough, farthest next use first: they would be fetched again.
        while True:
            try:
                return act()
            except CapacityError:
                if not (self._in_flight.release_oldest() or self._evict_idle_unit()):
                    raise
