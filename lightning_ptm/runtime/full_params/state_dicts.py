"""Replaces `state_dict()`, `load_state_dict()` and copying of modules during a run, so that they see full parameters.

Owns the replaced methods, of the user's module and its submodules, until `close`. Knows modules; pages are the
engine's.

I1: the outermost call gathers the parameters. What it returns keeps its values afterwards, whatever happens to the
pages.
I2: `keep_vars=True` asks for the parameters themselves, so nothing is gathered for it.
I3: a copy is an ordinary module in no run: it has parameters of its own and none of the methods that the run has
replaced (`replace`).
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

from torch import nn

from lightning_ptm.errors import UsageError
from lightning_ptm.runtime.autograd.recompute import own_attributes, replace

Gather = Callable[[nn.Module], AbstractContextManager[None]]
"""Context in which a module's parameters can be read (or written); collective if it has to gather them."""

_ASSIGNED = (
    "load_state_dict(assign=True) was called in a run whose weights are in pages: it would replace the parameters of "
    "the {name}, which pages and optimizers refer to; leave assign=True out, or call it before the run"
)


class StateDicts:
    """The replaced methods of a module and its submodules.

    Args:
        modules: modules some of whose parameters cannot be read at all times.
        copied: modules that can be copied.
        readable: see `Gather`.
        writable: the same, for parameters that are written to.
        uncopied: why modules cannot be copied; empty where they can.
    """

    def __init__(
        self,
        modules: Iterable[nn.Module],
        copied: Iterable[nn.Module],
        readable: Gather,
        writable: Gather,
        *,
        uncopied: str = "",
    ) -> None:
        self._readable = readable
        self._writable = writable
        self._uncopied = uncopied
        self._inside = False
        ours: dict[int, dict[str, _Method]] = {
            id(each): {
                "state_dict": _StateDict(self._take, each, each.state_dict),
                "load_state_dict": _LoadStateDict(self._load, each, each.load_state_dict),
            }
            for each in modules
        }
        self._copied = list(copied)
        self._restore = []
        for each in self._copied:
            copies = {"__deepcopy__": _DeepCopy(self._copy, each), "__reduce_ex__": _Reduce(self._copy, each)}
            self._restore.append(replace(each, **ours.get(id(each), {}), **copies))

    def close(self) -> None:
        """Restores the modules' own methods."""
        while self._restore:
            self._restore.pop()()

    @contextmanager
    def without_gathering(self) -> Iterator[None]:
        """Context in which the modules' own methods are called and nothing is gathered."""
        before, self._inside = self._inside, True
        try:
            yield
        finally:
            self._inside = before

    @contextmanager
    def _outermost(self, module: nn.Module, gather: Gather) -> Iterator[None]:
        """Context for a call of the module's own method. The outermost one gathers the module's parameters by `gather`;
        those inside it, as for submodules, gather nothing (I1)."""
        if self._inside:
            yield
            return
        with self.without_gathering(), gather(module):
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
        # Of all modules: a module that forwards attribute lookups (PEFT's) would find those of another, and a class with a
        # `__deepcopy__` (torch.fx.GraphModule's) copies all attributes that it finds.
        with own_attributes(self._copied), self._outermost(module, self._readable):
            return copy.deepcopy(module, known)


class _Method:
    """A replaced method of one module.

    Args:
        ours: the replacement; gets the module and `original` as first arguments.
        original: the module's own method.
    """

    name: str

    def __init__(self, ours: Callable[..., Any], module: nn.Module, original: Callable[..., Any]) -> None:
        self._ours = ours
        self._module = module
        self._original = original

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._ours(self._module, self._original, *args, **kwargs)

    # User code may have stored the method: its copy is the copied module's own method.

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
    """`__reduce_ex__` of one module: pickles a copy, since pickle reads the values after this has returned."""

    def __init__(self, made: Callable[[nn.Module, dict[int, Any]], Any], module: nn.Module) -> None:
        self._made = made
        self._module = module

    def __call__(self, protocol: Any) -> Any:
        return self._made(self._module, {}).__reduce_ex__(protocol)
