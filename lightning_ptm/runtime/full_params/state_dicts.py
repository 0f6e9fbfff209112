"""`state_dict()`, `load_state_dict()` and copies of the user's module, or of any part of it, while a run is in progress: true
values.

Owns what is put in place of the modules' own methods until `close`. Knows modules; pages are the engine's.

I1: the outermost call makes the parameters readable, or writable; what it returns keeps its values when the call is over,
whatever becomes of the pages. I2: with `keep_vars=True` what is asked for are the parameters themselves, so nothing is
gathered for them. I3: a copy is an ordinary module in no run: with parameters of its own, and without anything that the run
has put into its modules (`replace`).
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

from torch import nn

from lightning_ptm.errors import UsageError
from lightning_ptm.runtime.autograd.recompute import replace

InHand = Callable[[nn.Module], AbstractContextManager[None]]
"""Makes the parameters of a module readable, or writable; collective if it has to gather them."""

_ASSIGNED = (
    "load_state_dict(assign=True) was called in a run whose weights are in pages: it would give the {name} other parameters "
    "than those that pages and optimizers have; leave assign=True out, or call it before the run"
)


class StateDicts:
    """Of a module and all that is inside of it.

    Args:
        modules: those of which some parameters cannot be read at any time.
        copied: those of which copies are made.
        readable: see `InHand`.
        writable: the same, for parameters that are written to.
        uncopied: why no copies can be made; empty where they can.
    """

    def __init__(
        self,
        modules: Iterable[nn.Module],
        copied: Iterable[nn.Module],
        readable: InHand,
        writable: InHand,
        *,
        uncopied: str = "",
    ) -> None:
        self._readable = readable
        self._writable = writable
        self._uncopied = uncopied
        self._inside = False
        self._restore = [
            replace(
                each,
                state_dict=_StateDict(self._take, each, each.state_dict),
                load_state_dict=_LoadStateDict(self._load, each, each.load_state_dict),
            )
            for each in modules
        ]
        self._copied = list(copied)
        for each in self._copied:
            ours = {"__deepcopy__": _DeepCopy(self._copy, each), "__reduce_ex__": _Reduce(self._copy, each)}
            self._restore.append(replace(each, **ours))

    def close(self) -> None:
        """Gives the modules their own back."""
        while self._restore:
            self._restore.pop()()

    @contextmanager
    def as_they_are(self) -> Iterator[None]:
        """Inside, the modules' own methods are called, and nothing is gathered for them."""
        before, self._inside = self._inside, True
        try:
            yield
        finally:
            self._inside = before

    @contextmanager
    def _outermost(self, module: nn.Module, in_hand: InHand) -> Iterator[None]:
        """Inside, the module's own method is called (I1)."""
        if self._inside:
            yield
            return
        with self.as_they_are(), in_hand(module):
            yield

    def _take(self, module: nn.Module, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if kwargs.get("keep_vars", args[2] if len(args) > 2 else False):
            return original(*args, **kwargs)
        with self._outermost(module, self._readable):
            return original(*args, **kwargs)

    def _load(self, module: nn.Module, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if kwargs.get("assign", args[2] if len(args) > 2 else False):
            raise UsageError(_ASSIGNED.format(name=type(module).__name__))
        with self._outermost(module, self._writable):
            return original(*args, **kwargs)

    def _copy(self, module: nn.Module, known: dict[int, Any]) -> Any:
        if self._uncopied and next(module.parameters(), None) is not None:
            raise UsageError(self._uncopied)
        # Of all modules: one that asks another for what it lacks itself (PEFT's) would find that one's.
        names = "__deepcopy__", "__reduce_ex__"
        ours = [(each, {name: vars(each).pop(name) for name in names if name in vars(each)}) for each in self._copied]
        try:
            with self._outermost(module, self._readable):
                return copy.deepcopy(module, known)
        finally:
            for each, methods in ours:
                vars(each).update(methods)


class _Method:
    """In the place of a method of one module.

    Args:
        ours: what is called instead, with the module and `original` first.
        original: the module's own method.
    """

    name: str

    def __init__(self, ours: Callable[..., Any], module: nn.Module, original: Callable[..., Any]) -> None:
        self._ours = ours
        self._module = module
        self._original = original

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._ours(self._module, self._original, *args, **kwargs)

    # Somebody may have kept the method: a copy of it is the copied module's own.

    def __deepcopy__(self, known: dict[int, Any]) -> Any:
        return getattr(copy.deepcopy(self._module, known), self.name)

    def __reduce__(self) -> tuple[Any, ...]:
        return getattr, (self._module, self.name)


class _StateDict(_Method):
    name = "state_dict"


class _LoadStateDict(_Method):
    name = "load_state_dict"


class _DeepCopy:
    """`__deepcopy__` of one module."""

    def __init__(self, made: Callable[[nn.Module, dict[int, Any]], Any], module: nn.Module) -> None:
        self._made = made
        self._module = module

    def __call__(self, known: dict[int, Any]) -> Any:
        return self._made(self._module, known)


class _Reduce:
    """`__reduce_ex__` of one module: a copy is pickled, since values are read when this has returned."""

    def __init__(self, made: Callable[[nn.Module, dict[int, Any]], Any], module: nn.Module) -> None:
        self._made = made
        self._module = module

    def __call__(self, protocol: Any) -> Any:
        return self._made(self._module, {}).__reduce_ex__(protocol)
