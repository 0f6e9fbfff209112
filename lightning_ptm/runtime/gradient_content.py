"""Whose gradients are in the pages of a flat, and whose a step has used up.

Owns these answers and nothing else; the pages are gradient_shard.py's, which tells what comes and goes.

I1: pages that are not filled hold nothing of use, and nothing that comes is added to what is there.
"""

from __future__ import annotations

from collections.abc import Sequence


class GradientContent:
    """Of one flat.

    Args:
        count: of its parameters.
    """

    def __init__(self, count: int) -> None:
        self.filled = False
        """Whether the pages hold a gradient. Others read it."""
        self.present = [False] * count
        """For each parameter, whether its gradient is in the pages, or on its way there. Others read it."""
        self.spent: Sequence[bool] = ()
        """For each parameter, whether a step has used its gradient up; empty: none has. Others read it."""

    def comes_to_have(self, present: Sequence[bool]) -> None:
        """What is on its way to the pages has gradients of these parameters, too."""
        self.present = [a or b for a, b in zip(self.present, present, strict=True)]

    def has_come(self) -> None:
        """It has been added."""
        self.filled = True

    def forget_slot(self, slot: int) -> None:
        """Of a parameter, nothing is there any more."""
        self.present[slot] = False
        if not any(self.present):
            self.filled = False

    def forget(self) -> None:
        """Nothing is there, and nothing was used up."""
        self.spent = ()
        self._empty()

    def spend(self) -> None:
        """All that was there is used up."""
        self.spent = tuple(self.present)
        self._empty()

    def spend_others(self, here: Sequence[bool]) -> None:
        """Gradients of these parameters, which were in no pages, are used up; without any, those before stay so."""
        self.spent = here if any(here) else self.spent

    def _empty(self) -> None:
        self.filled = False
        self.present = [False] * len(self.present)
