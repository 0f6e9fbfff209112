"""Route of a flat's gradient from backward to update, decided once per flat, before allocation.

Owns the decisions where the gradient waits, until when, and when ranks reduce it. flat_gradient.py carries them out.
"""

from __future__ import annotations

import dataclasses
import enum

import torch

from lightning_ptm.terms import Tier


class Waits(enum.Enum):
    """Storage of a gradient between its backward and its update."""

    IN_GRAD = "in .grad, where autograd has put it"
    KEPT = "in pages of its own, allocated for the whole run"
    FROM_FIRST = "in pages of its own, allocated at the first gradient and kept"
    PASSING = "in pages that are allocated for each gradient and freed after its update"
    QUEUED = "in pages of no particular flat, which are passed with it to a lock-free update"


@dataclasses.dataclass(frozen=True, slots=True)
class GradientRoute:
    """Route of one flat's gradient.

    Attributes:
        waits: storage in which the gradient waits for the update.
        tier: tier of its pages; the device for IN_GRAD.
        dtype: dtype of the waiting gradient.
        clips_in_place: whether clipping changes the stored gradient, as torch's does; else the update clips while it reads.
        reduced_at_step: whether ranks reduce it at the step; until then each rank keeps its own full sum in `.grad`.
        outlives_backward: whether its update runs at the optimizer's step or later; else at the end of its unit's backward.
        outlives_step: whether the user clears it, and not the step (manual optimization).
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
        """Whether it is accumulated in `.grad`, outside pages."""
        return self.reduced_at_step or self.waits is Waits.IN_GRAD

    @property
    def own_pages(self) -> Tier | None:
        """Tier of the gradient's own pages; None if it has none."""
        return None if self.waits in (Waits.IN_GRAD, Waits.QUEUED) else self.tier


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
    """Decides the route of a flat's gradient.

    Args:
        home: tier that the placement has chosen for the gradient.
        dtype: dtype of the waiting gradient.
        one_rank: whether this rank holds all of the flat.
        sums: whether the gradient is the sum of several backward passes, in a wider dtype than each has.
        widens: whether the flat's master weights have a wider dtype.
        lock_free: whether updates run concurrently with compute.
        reduced_at_step, outlives_backward, outlives_step: see GradientRoute.
    """
    if one_rank and home.computes and not sums:
        waits = Waits.IN_GRAD
    elif lock_free:
        waits = Waits.QUEUED
    elif outlives_backward:
        waits = Waits.KEPT
    else:
        waits = Waits.PASSING if home.computes else Waits.FROM_FIRST
    # Where the update reads `.grad` unchanged, clipping in place costs no more than in plain training.
    clips_in_place = outlives_step or (waits is Waits.IN_GRAD and not widens)
    return GradientRoute(waits, home, dtype, clips_in_place, reduced_at_step, outlives_backward, outlives_step)
