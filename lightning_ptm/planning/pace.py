"""When waiting gradients are applied, where updates are held (lock-free mode with `hold_updates`).

A pass over a flat's master states costs about the same whether it applies the gradients of one step or of ten, and while it
runs, compute that shares cores and memory with it is slower. So a flat waits until it lacks a good part of the bound: each
gradient that comes earns a part of a pass, and a pass begins when it has been earned. The load is even from step to step
then, and some flats lack the gradients of one step, some of two, and so on: never all of many.

Counts in steps and elements: a slow disk shows by how many gradients come while a pass is made. No clock,
threads or tensors. A step is over when a flat's next gradient comes; so the steps are known in which a flat has none.
I1: a flat is never held back when a pass that began a step later might end beyond the bound: what waits is of the last
    steps, also where a flat has a gradient in few of them.
"""

from __future__ import annotations

import dataclasses
from collections import deque
from collections.abc import Sequence

_SHARE = 3 / 4
"""Of the bound, between two passes over a flat. The rest is for passes that take longer than those before."""

_MARGIN = 2
"""Steps: the one that comes before a flat is looked at again, and one more."""


def paced_steps(max_staleness: int) -> int:
    """Steps between two passes over a flat under this bound, where the disk allows it."""
    return int(max_staleness * _SHARE)


@dataclasses.dataclass(slots=True)
class _Flat:
    size: int
    received: int = 0
    begun: int = 0
    """Gradients that are in the last pass, or were in those before."""
    passing: bool = False
    """Whether that pass has not been seen to end."""
    late: int = 0
    """Gradients that came while it, or the one before, was made."""
    came_in: deque[int] = dataclasses.field(default_factory=deque)
    """The steps of gradients that wait, oldest first."""

    @property
    def waiting(self) -> int:
        return len(self.came_in)

    def begin(self, count: int) -> None:
        """A pass takes the first `count` of all its gradients."""
        self.begun = max(self.begun, count)
        while len(self.came_in) > self.received - self.begun:
            self.came_in.popleft()


class Pace:
    """Which flats' passes begin now.

    Args:
        bound: steps whose gradients a flat may lack.
        sizes: of the flats, in elements.
    """

    def __init__(self, bound: int, sizes: Sequence[int]) -> None:
        self._bound = bound
        self._longest = paced_steps(bound)
        self._total = sum(sizes)

        self._flats = [_Flat(size) for size in sizes]
        self._step = 0
        self._in_step: set[int] = set()
        """Flats whose gradients of the step have come."""
        self._earned = 0
        """Elements of flats that wait, for each step, less what passes since have cost; at most those of one step."""

    def came(self, place: int, applied: int) -> list[int]:
        """A gradient of a flat has come, and its newest version includes so many.

        Returns:
            Flats whose passes begin with it.
        """
        begin = self._next_step() if place in self._in_step else []
        self._in_step.add(place)
        flat = self._flats[place]
        flat.received += 1
        flat.came_in.append(self._step)
        flat.begin(applied)  # a pass takes all that has come by the time that the disk is free for it
        if flat.passing:
            flat.late = flat.waiting
            flat.passing = applied < flat.begun
        self._earned = min(self._total, self._earned + flat.size)
        if self._age(place) + 1 + flat.late + _MARGIN > self._bound:
            begin.append(place)
            self.begin(place)
        while self._earned > 0:
            oldest = max(range(len(self._flats)), key=self._age)
            if not self.waiting(oldest):
                break
            begin.append(oldest)
            self.begin(oldest)
        return begin

    def _next_step(self) -> list[int]:
        """A step is over. Returns flats that had no gradient in it, and whose older ones can wait no longer."""
        begin = []
        for place, flat in enumerate(self._flats):
            if flat.waiting and place not in self._in_step:
                self._earned = min(self._total, self._earned + flat.size)
                if self._age(place) + 1 + flat.late + _MARGIN > self._bound:
                    begin.append(place)
                    self.begin(place)
        self._in_step.clear()
        self._step += 1
        return begin

    def _age(self, place: int) -> int:
        """Steps since the first gradient of a flat that waits; -1: none does."""
        flat = self._flats[place]
        return self._step - flat.came_in[0] if flat.came_in else -1

    def waiting(self, place: int) -> int:
        """Gradients of a flat that have come since its last pass began."""
        return self._flats[place].waiting

    def begin(self, place: int) -> None:
        """A pass over a flat begins, whatever has been earned."""
        flat = self._flats[place]
        flat.begin(flat.received)
        flat.passing = True
        slowest = max(flat.late for flat in self._flats)
        steps = max(1, min(self._longest, self._bound - slowest - _MARGIN))
        self._earned = max(-self._total * self._longest, self._earned - flat.size * steps)

    def drained(self) -> None:
        """Every gradient has been applied. What that took is forgotten."""
        for flat in self._flats:
            flat.begin(flat.received)
            flat.passing = False
        self._in_step.clear()
        self._earned = 0
