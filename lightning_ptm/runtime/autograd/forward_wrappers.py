"""Wrappers around the forward of modules, and replacement of a module's own forward inside such a wrapper."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, Self

from torch import nn

from lightning_ptm.runtime.autograd.recompute import replace

Forward = Callable[..., Any]


class _Wrapped:
    """A forward wrapped around another forward.

    Args:
        make: makes the outer forward from the inner one.
        inside: the inner forward.
    """

    def __init__(self, make: Callable[[Forward], Forward], inside: Forward) -> None:
        functools.update_wrapper(self, inside)
        self._make = make
        self.inside = inside
        self._forward = make(inside)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._forward(*args, **kwargs)

    def with_inside(self, inside: Forward) -> Self:
        """Returns the same wrapper around another inner forward."""
        return type(self)(self._make, inside)


class ForwardWrapper(_Wrapped):
    """Wrapper around a module's own forward, which `stand_in` may replace."""


class RecomputedForwardWrapper(_Wrapped):
    """Wrapper around the recomputed part of a unit's forward.

    The checkpoint stores the arguments of the inner forward, not those of the wrapper.
    """


def stand_in(module: nn.Module, forward: Forward) -> Callable[[], None]:
    """Replaces a module's own forward inside its wrapper, if it has one. Returns a function that undoes it."""
    around = vars(module).get("forward")
    return replace(module, forward=around.with_inside(forward) if isinstance(around, ForwardWrapper) else forward)
