"""Parameter guard of a flat: opens and closes its parameters by exchanging their class (guarded_parameter.py).

Owns the open and the closed class of each parameter, and the flag that something computes with them. The binding reports
whether their values are bound.

I1: parameters are open while they are lent to the user; else while they are both bound and used. Parameters that do not close
    count as always used.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import nn

from lightning_ptm.runtime.units.guarded_parameter import GuardedParameter, guarded_class


class ParameterGuard:
    """Guard of one flat's parameters.

    Args:
        parameters: the binding's own list, in which new parameters may replace those that the user has resized.
        refusal: returns the error, given the arguments of a function that uses values of a closed parameter.
        closes: whether the parameters may be read only while something computes with them.
        absent: returns whether the parameters have no values at all now.
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
        """Marks the parameters as used: they can be read while they are bound."""
        if not self._used:
            self._used = True
            self._change()

    def close(self) -> None:
        """Marks the parameters as not used: they cannot be read, unless they never close."""
        if self._used and self.closes:
            self._used = False
            self._change()

    def values_are(self, *, bound: bool, lent: bool) -> None:
        """Sets where the parameters' values are: in the bound flat, lent to the user, or (neither) only in pages."""
        self._bound, self._lent = bound, lent
        self._change()

    def open_for_good(self, slot: int) -> None:
        """Opens a parameter whose storage is outside pages (end of a run)."""
        self._parameters[slot].__class__ = self._open_kinds[slot]

    def forget(self) -> None:
        """Marks the flat as gone without changing the parameters (end of a run)."""
        self._bound = False

    def _change(self) -> None:
        is_open = self._lent or (self._used and self._bound)
        for parameter, kind in zip(self._parameters, self._open_kinds if is_open else self._closed_kinds, strict=True):
            parameter.__class__ = kind
