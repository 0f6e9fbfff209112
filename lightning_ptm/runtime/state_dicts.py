"""`state_dict()` of the user's module, or of any part of it, while a run is in progress: true values.

Owns what is put in place of the modules' `state_dict` until `close`. Knows modules; pages are the engine's.

I1: the outermost call makes the parameters readable; its tensors keep their values when the call is over, whatever becomes of
the pages. I2: with `keep_vars=True` what is asked for are the parameters themselves, so nothing is gathered for them.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from typing import Any, NoReturn

from torch import nn

from lightning_ptm.errors import UsageError
from lightning_ptm.runtime.closed import COPIED_IN_A_RUN
from lightning_ptm.runtime.recompute import replace

Readable = Callable[[nn.Module], AbstractContextManager[None]]
"""Makes the parameters of a module readable; collective if it has to gather them."""


class StateDicts:
    """The `state_dict` of a module and of all that is inside of it.

    Args:
        modules: those of which some parameters cannot be read at any time.
        readable: see `Readable`.
        copyable: whether modules may be copied now.
    """

    def __init__(
        self, modules: Iterable[nn.Module], readable: Readable, copyable: Callable[[], bool] = lambda: False
    ) -> None:
        self._readable = readable
        self.copyable = copyable
        self._inside = False
        self._restore = [replace(each, state_dict=_StateDict(self, each, each.state_dict)) for each in modules]

    def close(self) -> None:
        """Gives the modules their own back."""
        while self._restore:
            self._restore.pop()()

    def take(self, module: nn.Module, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """`original(*args, **kwargs)`, the state dict of `module`."""
        keep_vars = kwargs.get("keep_vars", args[2] if len(args) > 2 else False)
        if self._inside or keep_vars:
            return original(*args, **kwargs)
        self._inside = True
        try:
            with self._readable(module):
                return original(*args, **kwargs)
        finally:
            self._inside = False


class _StateDict:
    """The method of one module."""

    def __init__(self, owner: StateDicts, module: nn.Module, original: Callable[..., Any]) -> None:
        self._owner = owner
        self._module = module
        self._original = original

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._owner.take(self._module, self._original, *args, **kwargs)

    def __deepcopy__(self, known: dict[int, Any]) -> Any:
        if not self._owner.copyable():
            raise UsageError(COPIED_IN_A_RUN)
        return copy.deepcopy(self._original, known)  # which is bound to the copy

    def __reduce__(self) -> NoReturn:
        raise UsageError(COPIED_IN_A_RUN)
