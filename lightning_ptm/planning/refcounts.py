"""Who needs which unit where it is: calls in progress, backward passes, and who holds one until the iteration ends.

Owned by the policy of fetching (fetch_policy.py), and written by who drives it.

I1: a unit that is leased is not given up. I2: each call and each backward that takes a lease gives it back once.
"""

from __future__ import annotations


class UnitRefcounts:
    """The leases of all units."""

    def __init__(self, count: int) -> None:
        self._calls = [0] * count
        self._backward: set[int] = set()
        self._held: set[int] = set()

    def used(self, unit: int) -> bool:
        """Whether a call of `unit`, or its backward, is in progress."""
        return self._calls[unit] > 0 or unit in self._backward

    def held(self, unit: int) -> bool:
        """Whether `unit` stays until the iteration ends, or its backward does."""
        return unit in self._held

    def leased(self, unit: int) -> bool:
        """Either."""
        return self.used(unit) or unit in self._held

    def in_backward(self, unit: int) -> bool:
        """Whether the backward of `unit` has a lease."""
        return unit in self._backward

    def take(self, unit: int) -> None:
        """A call of `unit` begins; `give_back` must follow."""
        self._calls[unit] += 1

    def give_back(self, unit: int) -> None:
        """The call is over."""
        self._calls[unit] -= 1

    def take_backward(self, unit: int) -> None:
        """The backward of `unit` begins to compute."""
        self._backward.add(unit)

    def give_back_backward(self, unit: int) -> None:
        """It has ended, or is held up; nothing happens where it had no lease."""
        self._backward.discard(unit)

    def hold(self, unit: int) -> None:
        """`unit` stays."""
        self._held.add(unit)

    def let_go(self, unit: int) -> None:
        """It need not stay for who has held it."""
        self._held.discard(unit)

    def let_go_all(self) -> None:
        """The iteration is over: nothing is held."""
        self._held.clear()

    def forget(self) -> None:
        """The iteration failed: what was in progress is not."""
        self._calls = [0] * len(self._calls)
        self._backward.clear()
        self._held.clear()
