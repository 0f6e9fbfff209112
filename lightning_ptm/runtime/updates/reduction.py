"""Gradients leave their parameters: when a unit's backward has ended, or, where ranks accumulate by themselves, later.

Owns which units hold gradients that the ranks have not reduced yet. The pages and the arithmetic are flat_gradient.py's.

I1: every reduction is agreed on by all ranks, in the same order; a rank without gradients gives zeros, and one that does
    not hold the unit nothing.
I2: what was left unreduced is reduced with the unit's next gradients, or at the latest when the step needs it.
I3: a unit whose holders have all asked for its reduction gets no more gradients in this pass; for one that some only took
    part in, those may still come.
I4: what ranks have added up over several passes is reduced as one sum for each, as DDP does it: while not all holders of such
    a unit have come to its end in the last pass, its gradients stay where they are, and the step reduces them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial

import torch

from lightning_ptm.comm import Agreement, NeededCollective
from lightning_ptm.comm.agreement import Decision
from lightning_ptm.errors import CapacityError, UsageError
from lightning_ptm.runtime.gradients.host_accumulate import UNITS_AHEAD
from lightning_ptm.runtime.updates.updates import FlatUpdate
from lightning_ptm.terms import Operation

_MISSING = 1
"""Flag of a reduction: some parameter of the unit got no gradient here."""

_LAST = 2
"""Flag of a reduction: the step needs it, and no gradients come any more."""


class Reduction:
    """Collects the gradients of one rank's units.

    Args:
        flats: trainable flats, by unit; one that several optimizers update may be there for each.
        agreement: ranks agree on reductions through it.
        give_units_up: frees device pages that hold gathered units.
    """

    def __init__(
        self,
        flats: Sequence[Sequence[FlatUpdate]],
        agreement: Agreement,
        give_units_up: Callable[[], None],
    ) -> None:
        self._flats = [list({id(flat.gradient): flat for flat in of_unit}.values()) for of_unit in flats]
        self._agreement = agreement
        self._give_units_up = give_units_up

        self._scattered: set[int] = set()
        """Units of which some reduction of this step was not asked for by all their holders, whether it was made or left."""
        self._may_postpone = any(flat.gradient.route.reduced_at_step for of_unit in flats for flat in of_unit)
        self._postponing = False
        self._postponed: list[int] = []
        """Units whose gradients may wait in `.grad`, in the order in which a step reduces them. Equal on all ranks, but
        for experts."""
        self._settling = False
        """The step needs what is left: inside `collect_postponed`."""
        self._left: list[FlatUpdate] = []
        """Flats whose gradients were collected, and may hold device pages that they no longer need."""

    @contextmanager
    def postponed(self) -> Iterator[None]:
        """Inside, gradients that the step reduces stay in `.grad`, where autograd adds the next micro-batch's to them."""
        self._postponing = self._may_postpone
        try:
            yield
        finally:
            if self._postponing:
                self._postponed = [unit for unit in reversed(range(len(self._flats))) if self._flats[unit]]
            self._postponing = False

    def collect(self, unit: int) -> None:
        """A unit's backward has ended. With several ranks, collective."""
        flats = self._flats[unit]
        if self._postponing:
            for flat in flats:
                flat.gradient.grad_attribute.postpone()
            return
        if all(flat.gradient.in_place for flat in flats):
            return
        self._let_sums_come()
        if not any(flat.store.layout.shared for flat in flats):
            self._no_longer_postponed(unit)
            for flat in flats:
                self._with_room(flat.gradient.collect)
            self._left += flats
            return
        missing = not all(all(flat.gradient.grad_attribute.here()) for flat in flats)
        flag = _MISSING * missing | _LAST * self._settling
        decision = self._agreement.request(NeededCollective(Operation.REDUCE, unit, flag))
        if not self._left_to_the_step(decision):
            self._reduce(decision)
            return
        for flat in flats:
            flat.gradient.grad_attribute.postpone()

    def add_up(self, unit: int, parameter: torch.Tensor) -> None:
        """What is in a parameter's `.grad` is added to its pages now: what comes next is then added to both."""
        for flat in self._flats[unit]:
            slot = next((at for at, each in enumerate(flat.store.binding.parameters) if each is parameter), None)
            if slot is not None and flat.gradient.adds_in_pages:
                self._with_room(partial(flat.gradient.add_up, slot))

    def collect_postponed(self) -> None:
        """Reduces what is still in `.grad`. Collective: all ranks have postponed in the same passes.

        Raises:
            UsageError: inside `postponed`.
        """
        if self._postponing:
            raise UsageError(
                "a step, clipping or gradient_norm inside `block_backward_sync`, where gradients wait to be reduced; end the "
                "block before it"
            )
        self._settling = True
        try:
            while self._postponed:
                self.collect(self._postponed[0])
        finally:
            self._settling = False

    def take_part(self, decision: Decision) -> None:
        """Another rank reduces a unit whose backward has not ended here, or will not."""
        self._let_sums_come()
        if not self._left_to_the_step(decision):
            self._reduce(decision)

    def _left_to_the_step(self, decision: Decision) -> bool:
        """Whether nobody reduces the unit now (I4). The same on all its holders."""
        unit = decision.request.unit
        if decision.unanimous or decision.flags & _LAST or unit not in self._postponed:
            return False
        self._scattered.add(unit)
        return True

    def reclaim(self, wait: bool) -> bool:
        """Gives back device pages of gradients that have left (with `wait`: once they have); whether any came free."""
        if wait:
            freed = [flat.gradient.shard.give_back(wait=True) for flats in self._flats for flat in flats]
            return any(freed)
        if not self._left:  # as at most ticks
            return False
        freed = [flat.gradient.shard.give_back(wait=False) for flat in self._left]
        self._left = [flat for flat in self._left if flat.gradient.shard.on_its_way]
        return any(freed)

    def begin_step(self) -> None:
        """From here on, gradients are of the step to come."""
        self._scattered.clear()

    def complete(self, unit: int) -> bool:
        """Whether a unit whose gradients were reduced gets no more of them in this pass (I3). The same on all its holders."""
        return unit not in self._scattered

    def forget(self) -> None:
        """The iteration failed."""
        self._postponed = []
        self._scattered.clear()

    def _reduce(self, decision: Decision) -> None:
        """Collective: lays this rank's gradients of the unit (zeros where it has none) into a reduction."""
        unit = decision.request.unit
        self._no_longer_postponed(unit)
        flats = self._flats[unit]
        if not flats:
            return  # other ranks' expert
        present: list[list[bool]] | None = None
        if not decision.unanimous:
            self._scattered.add(unit)
        if decision.flags & _MISSING or not decision.unanimous:
            here = [each for flat in flats for each in flat.gradient.grad_attribute.here()]
            most = max(flats, key=lambda flat: flat.store.layout.world_size)  # of parts, fewer ranks have each
            used = most.store.communicator.all_reduce(torch.tensor(here, dtype=torch.int64), maximum=True).tolist()
            present, start = [], 0
            for flat in flats:
                count = len(flat.store.binding.parameters)
                present.append([bool(value) for value in used[start : start + count]])
                start += count
        for index, flat in enumerate(flats):
            self._with_room(partial(flat.gradient.collect, None if present is None else present[index]))
        self._left += flats

    def _let_sums_come(self) -> None:
        """The host may be ahead of the device by a few units whose gradients are to be added to sums in RAM."""
        adding = [flat for flat in self._left if flat.gradient.shard.is_added]
        ahead = [*dict.fromkeys(flat.store.layout.unit for flat in adding)][-UNITS_AHEAD:]
        for flat in adding:
            if flat.store.layout.unit not in ahead:
                flat.gradient.shard.settle()

    def _no_longer_postponed(self, unit: int) -> None:
        if unit in self._postponed:
            self._postponed.remove(unit)

    def _with_room(self, act: Callable[[], None]) -> None:
        try:
            act()
        except CapacityError:
            # Gradients of earlier units may still be on their way out, and units kept for later may give way.
            for flats in self._flats:
                for flat in flats:
                    flat.gradient.shard.settle()
            self._give_units_up()
            act()
