"""Whether the parameters of a flat can be read: which of two classes each of them has (guarded_parameter.py).

Owns these classes, and whether somebody computes with the parameters. Whether their values are there, the binding tells.

I1: parameters can be read while they are lent; else while their values are there and they are used. Those that do not close
    are used always.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import nn

from lightning_ptm.runtime.units.guarded_parameter import GuardedParameter, guarded_class


class ParameterGuard:
    """Of one flat.

    Args:
        parameters: the binding's own list, in which others may take the place of those that users have resized.
        refusal: makes the error, from what a function was called with that asked for values.
        closes: they may be read while they are used only.
        absent: whether there are no values at all of them now.
    """

    def __init__(
        self,
        parameters: Sequence[nn.Parameter],
        refusal: Callable[[tuple[Any, ...]], Exception],
        *,
        closes: bool,
        absent: Callable[[], bool] = lambda: False,
    ) -> None:
        self.closes = closes
        self._parameters = parameters
        kinds = [type(parameter) for parameter in parameters]
        self._open_kinds = [kind.opens_to if issubclass(kind, GuardedParameter) else kind for kind in kinds]
        closed = {kind: guarded_class(kind, refusal, absent) for kind in dict.fromkeys(self._open_kinds)}
        self._closed_kinds = [closed[kind] for kind in self._open_kinds]
        # state
        self._used = not closes
        self._bound = False
        self._lent = False

    def open(self) -> None:
        """From here on the parameters are used: they can be read as long as they are bound."""
        if not self._used:
            self._used = True
            self._change()

    def close(self) -> None:
        """Nothing computes with the parameters: they cannot be read, where they are closed at all."""
        if self._used and self.closes:
            self._used = False
            self._change()

    def values_are(self, *, bound: bool, lent: bool) -> None:
        """Their values are in the flat that they are views of, or in the user's hands, or (neither) elsewhere."""
        self._bound, self._lent = bound, lent
        self._change()

    def open_for_good(self, slot: int) -> None:
        """A parameter has storage of its own again."""
        self._parameters[slot].__class__ = self._open_kinds[slot]

    def forget(self) -> None:
        """The flat is gone, and the parameters stay as they are (end of a run)."""
        self._bound = False

    def _change(self) -> None:
        is_open = self._lent or (self._used and self._bound)
        for parameter, kind in zip(self._parameters, self._open_kinds if is_open else self._closed_kinds, strict=True):
            parameter.__class__ = kind
