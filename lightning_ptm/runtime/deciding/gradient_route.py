"""The way of a flat's gradient from its backward to its update, decided once for each flat, before a byte is allocated.

Owns the decision where it waits and until when, and when ranks reduce it. What is done with it there is flat_gradient.py's.
"""

from __future__ import annotations

import dataclasses
import enum

import torch

from lightning_ptm.terms import Tier


class Waits(enum.Enum):
    """Where a gradient is between its backward and its update."""

    IN_GRAD = "in .grad, where autograd has put it"
    KEPT = "in pages of its own, which are there for the whole run"
    FROM_FIRST = "in pages of its own, from the first gradient on"
    PASSING = "in pages that are taken when it comes, and given back when the update has used it"
    TRAVELLING = "in pages of no flat, which are given away with it to an update beside compute"


@dataclasses.dataclass(frozen=True, slots=True)
class GradientRoute:
    """One flat's.

    Attributes:
        waits: where it waits.
        tier: of the pages; of IN_GRAD, the device.
        dtype: of what waits.
        clips_in_place: clipping changes it where it is, as torch's does; else the update does it on its way.
        reduced_at_step: until then, each rank's own sum of all passes stays whole in `.grad`.
        outlives_backward: its update comes with the optimizer's step, or later; else when its unit's backward has ended.
        outlives_step: the user forgets it, not the step (manual optimization).
    """

    waits: Waits
    tier: Tier
    dtype: torch.dtype
    clips_in_place: bool
    reduced_at_step: bool
    outlives_backward: bool
    outlives_step: bool

    @property
    def adds_up_in_grad(self) -> bool:
        """Whether it stays outside of pages from pass to pass."""
        return self.reduced_at_step or self.waits is Waits.IN_GRAD

    @property
    def own_pages(self) -> Tier | None:
        """Tier of pages of its own; None: it has none."""
        return None if self.waits in (Waits.IN_GRAD, Waits.TRAVELLING) else self.tier


def route(
    home: Tier,
    dtype: torch.dtype,
    *,
    one_rank: bool,
    sums: bool,
    widens: bool,
    lock_free: bool,
    reduced_at_step: bool,
    outlives_backward: bool,
    outlives_step: bool,
) -> GradientRoute:
    """Decide.

    Args:
        home: tier where the placement has it wait.
        dtype: of what waits there.
        one_rank: nobody else has a part of it.
        sums: it is the sum of several passes, in a wider dtype than each has.
        widens: its masters have a wider dtype.
        lock_free: updates run beside compute.
        reduced_at_step, outlives_backward, outlives_step: see GradientRoute.
    """
    if one_rank and home.computes and not sums:
        waits = Waits.IN_GRAD
    elif lock_free:
        waits = Waits.TRAVELLING
    elif outlives_backward:
        waits = Waits.KEPT
    else:
        waits = Waits.PASSING if home.computes else Waits.FROM_FIRST
    # Where the update takes `.grad` as it is, clipping it first costs what plain training pays for it.
    clips_in_place = outlives_step or (waits is Waits.IN_GRAD and not widens)
    return GradientRoute(waits, home, dtype, clips_in_place, reduced_at_step, outlives_backward, outlives_step)
