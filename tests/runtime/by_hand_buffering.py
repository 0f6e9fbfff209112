"""A buffering thread that does as it is told: what it has come to is set by hand, and what it hears is written down."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch

from lightning_ptm.runtime.updates.flat_counters import FlatCounters
from lightning_ptm.update.gradient_source import NO_TRANSFORM, ParameterGradients
from lightning_ptm.update.lock_free_buffers import Contribution, Origin, Version
from lightning_ptm.update.shadow import GroupValues


class Buffered:
    """In place of update/buffering_thread.py's."""

    def __init__(self, count: int = 2) -> None:
        self.heard: list[str] = []
        self.done = [0] * count
        """Contributions in the newest version, by flat."""
        self.come_to = [0] * count
        """Contributions that the thread has come to, by flat."""
        self.piles = [0] * count
        """Contributions that wait and cannot be added to one another."""
        self.newer: dict[int, Version] = {}
        self.while_waiting: Callable[[], None] = lambda: None

    def prioritize(self, flat: int, needed: int) -> None:
        self.heard.append(f"prioritize {flat} {needed}")

    def offers(self, flat: int) -> int:
        return self.come_to[flat]

    def applied(self, flat: int) -> int:
        return self.done[flat]

    def waiting(self, flat: int) -> int:
        return self.piles[flat]

    def published(self, flat: int) -> bool:
        return flat in self.newer

    def peek(self, flat: int, received: int) -> Version | None:
        return self.newer.get(flat)

    def collect(self, flat: int, received: int) -> Version | None:
        return self.newer.pop(flat, None)

    def give_back(self, pages: Any) -> None:
        self.heard.append(f"back {pages}")

    def wait(self, until: Callable[[], bool]) -> None:
        while not until():
            self.while_waiting()

    def told(self) -> list[str]:
        heard, self.heard = self.heard, []
        return heard

    def publish(self, flat: int, applied: int) -> None:
        """A version with so many contributions."""
        self.done[flat] = applied
        pages: Any = f"{flat} with {applied}"
        self.newer[flat] = Version(pages, applied, applied)


class Flat:
    """A flat and its store, of a unit that may be given up."""

    def __init__(self, optimizer: int = 0) -> None:
        self.optimizer = optimizer
        self.store = SimpleNamespace(resident=False, adopt=self.adopt, layout=None)
        self.pages: Any = "first"

    def adopt(self, pages: Any) -> Any:
        before, self.pages = self.pages, pages
        return before


class Unit:
    """Writes down that it is given up."""

    def __init__(self) -> None:
        self.given_up = 0

    def release(self) -> None:
        self.given_up += 1

    def evict(self) -> None: ...


def counters(*flats: Any) -> list[FlatCounters]:
    return [FlatCounters(flat=flat) for flat in flats]


def contribution(step: int, which: tuple[bool, ...] = (True, True)) -> Contribution:
    """Returns the contribution of a step: its number, in two elements of each parameter that has a gradient."""
    gradients = [torch.full((2,), float(step)) if has else None for has in which]
    return Contribution(ParameterGradients(gradients), (Origin(step, GroupValues(())),), NO_TRANSFORM)
