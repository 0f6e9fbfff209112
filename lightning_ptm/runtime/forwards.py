"""Forwards that are around those of modules, and how another one comes into the place of a module's own."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from torch import nn

from lightning_ptm.runtime.recompute import replace

Forward = Callable[..., Any]


class Around:
    """A forward around another one.

    Args:
        make: what is around, given what is inside.
        inside: a module's own.
    """

    def __init__(self, make: Callable[[Forward], Forward], inside: Forward) -> None:
        functools.update_wrapper(self, inside)
        self._make = make
        self._forward = make(inside)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._forward(*args, **kwargs)

    def with_inside(self, inside: Forward) -> Around:
        """The same around another one."""
        return Around(self._make, inside)


def stand_in(module: nn.Module, forward: Forward) -> Callable[[], None]:
    """Puts a forward in the place of a module's own, inside of what is around that; returns what takes it back."""
    around = vars(module).get("forward")
    return replace(module, forward=around.with_inside(forward) if isinstance(around, Around) else forward)


__all__ = ["Around", "Forward", "stand_in"]
