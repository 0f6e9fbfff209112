"""Refcounts of units: calls in progress, backward passes, and holds until the iteration ends.

Owned by the fetch policy (fetch_policy.py), and written by its drivers.

I1: a unit with a reference is not evicted.
I2: each call and each backward that takes a reference gives it back once.
"""

from __future__ import annotations


class UnitRefcounts:
    """The refcounts of all units."""

    def __init__(self, count: int) -> None:
        self._calls = [0] * count
        self._backward: set[int] = set()
        self._held: set[int] = set()

    def used(self, unit: int) -> bool:
        """Returns whether a call of `unit`, or its backward, is in progress."""
        return self._calls[unit] > 0 or unit in self._backward

    def held(self, unit: int) -> bool:
        """Returns whether `unit` is held until the iteration, or its backward, ends."""
        return unit in self._held

    def referenced(self, unit: int) -> bool:
        """Returns whether `unit` is used or held."""
        return self.used(unit) or unit in self._held

    def in_backward(self, unit: int) -> bool:
        """Returns whether the backward of `unit` has a reference."""
        return unit in self._backward

    def take(self, unit: int) -> None:
        """Takes a reference for a call of `unit`; `give_back` must follow."""
        self._calls[unit] += 1

    def give_back(self, unit: int) -> None:
        """Gives the reference of a call back."""
        self._calls[unit] -= 1

    def take_backward(self, unit: int) -> None:
        """Takes the reference of `unit`'s backward, which begins to compute."""
        self._backward.add(unit)

    def give_back_backward(self, unit: int) -> None:
        """Gives the backward's reference back, when it has ended or is suspended; does nothing where it has none."""
        self._backward.discard(unit)

    def hold(self, unit: int) -> None:
        """Holds `unit` until `unhold` or the end of the iteration."""
        self._held.add(unit)

    def unhold(self, unit: int) -> None:
        """Ends the hold of `unit`."""
        self._held.discard(unit)

    def unhold_all(self) -> None:
        """Ends all holds, at the end of the iteration."""
        self._held.clear()

    def forget(self) -> None:
        """Drops all references, after a failed iteration."""
        self._calls = [0] * len(self._calls)
        self._backward.clear()
        self._held.clear()
