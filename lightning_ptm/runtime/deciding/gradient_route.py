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
    PASSING = "in pages that are taken for each gradient and returned after its update"
    QUEUED = "in pages of no particular flat, which are passed with it to a lock-free update"


class Until(enum.Enum):
    """Points in time until which a gradient is needed."""

    BACKWARD = "until its unit's backward ends and its update begins"
    STEP = "until the optimizer's step, or a lock-free update after it"
    CLEARED = "until the user clears it, after any number of steps (manual optimization)"


class Passes(enum.Enum):
    """Ways in which the gradients of a step's backward passes become the one that the update reads."""

    AS_LEFT = "as autograd leaves them in .grad: one rank has the whole flat, and its dtype is that of the sum"
    COPIED = "copied from .grad: ranks share the flat, or the sum has a wider dtype"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class GradientUse:
    """Use of one flat's gradient in a run, which determines the gradient's route.

    Attributes:
        widens: whether the flat's master weights have a wider dtype than its parameters.
        lock_free: whether updates run concurrently with compute.
        transformed: see `Request.transforms_gradients`.
        reduced_at_step: see GradientRoute.
    """

    until: Until
    passes: Passes
    widens: bool = False
    lock_free: bool = False
    transformed: bool = False
    reduced_at_step: bool = False


@dataclasses.dataclass(frozen=True, slots=True)
class GradientRoute:
    """Route of one flat's gradient.

    Attributes:
        waits: storage in which the gradient waits for the update.
        tier: tier of its pages; the device for IN_GRAD.
        dtype: dtype of the waiting gradient.
        until: how long it is needed.
        clips_in_place: whether clipping changes the stored gradient, as torch's does; else the update clips while it reads.
        reduced_at_step: whether ranks reduce it once a step: in the last backward pass before it, or in the step where all
            passes are inside `no_sync()`, as those of pipeline stages are. Until then each rank keeps its own full sum in
            `.grad`.
        outlives_step: whether the gradient, if it waits in `.grad`, is still there after the step, as in a plain loop, until
            it is zeroed. Otherwise it is forgotten once it is used.
    """

    waits: Waits
    tier: Tier
    dtype: torch.dtype
    until: Until
    clips_in_place: bool
    reduced_at_step: bool
    outlives_step: bool

    @property
    def adds_up_in_grad(self) -> bool:
        """Whether the gradient is accumulated in `.grad`, outside pages."""
        return self.reduced_at_step or self.waits is Waits.IN_GRAD

    @property
    def from_pool(self) -> bool:
        """Whether its pages belong to a pool for the gradients of all flats, and not to the flat."""
        return self.waits is Waits.QUEUED or self.passes_through_ram

    @property
    def passes_through_ram(self) -> bool:
        """Whether its pages are few, belong to no particular flat, and are free again after an update in the backward."""
        return self.waits is Waits.PASSING and not self.tier.computes

    @property
    def has_own_pages_away(self) -> bool:
        """Whether the gradient has pages of its own outside the device, so that others never wait for its memory."""
        return self.waits in (Waits.KEPT, Waits.FROM_FIRST) and not self.tier.computes

    @property
    def own_pages(self) -> Tier | None:
        """Tier of the gradient's pages from which an update reads it; None if there are none, or it is queued."""
        return None if self.waits in (Waits.IN_GRAD, Waits.QUEUED) else self.tier


def route(home: Tier, dtype: torch.dtype, use: GradientUse, *, passes: bool = False) -> GradientRoute:
    """Decides the route of a flat's gradient.

    Args:
        home: tier that the placement has chosen for the gradient.
        dtype: dtype of the waiting gradient.
        passes: whether gradients have no homes outside the device.
    """
    if use.passes is Passes.AS_LEFT and home.computes:
        waits = Waits.IN_GRAD
    elif use.lock_free:
        waits = Waits.QUEUED
    elif use.until is not Until.BACKWARD:
        waits = Waits.KEPT
    else:
        waits = Waits.PASSING if home.computes or passes else Waits.FROM_FIRST
    # Where the update reads `.grad` unchanged, clipping in place costs no more than in plain training.
    clips_in_place = use.until is Until.CLEARED or (waits is Waits.IN_GRAD and not use.widens)
    # The step has changed its copy, so `.grad` is not what a plain loop shows.
    forgotten = use.widens and use.transformed
    outlives_step = use.until is Until.CLEARED or (use.until is Until.STEP and not forgotten)
    return GradientRoute(waits, home, dtype, use.until, clips_in_place, use.reduced_at_step, outlives_step)
