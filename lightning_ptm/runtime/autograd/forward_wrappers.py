"""Forwards that are around those of modules, and how another one comes into the place of a module's own."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, Self

from torch import nn

from lightning_ptm.runtime.autograd.recompute import replace

Forward = Callable[..., Any]


class _Wrapped:
    """A forward around another one.

    Args:
        make: what is around, given what is inside.
        inside: what is.
    """

    def __init__(self, make: Callable[[Forward], Forward], inside: Forward) -> None:
        functools.update_wrapper(self, inside)
        self._make = make
        self.inside = inside
        self._forward = make(inside)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._forward(*args, **kwargs)

    def with_inside(self, inside: Forward) -> Self:
        """The same around another one."""
        return type(self)(self._make, inside)


class ForwardWrapper(_Wrapped):
    """Around a module's own forward, for which another may stand in."""


class RecomputedForwardWrapper(_Wrapped):
    """Around what is recomputed, where a unit is: what the inside is given is kept for that, and not what this is given."""


def stand_in(module: nn.Module, forward: Forward) -> Callable[[], None]:
    """Puts a forward in the place of a module's own, inside of what is around that; returns what takes it back."""
    around = vars(module).get("forward")
    return replace(module, forward=around.with_inside(forward) if isinstance(around, ForwardWrapper) else forward)
