"""The user's optimizers in a run: their steps, which update pages, and their `state`, which is in pages or was lost.

`OptimizerStep` runs the update inside `step` of the user's own optimizer, however it is called: by Lightning's wrapper or the
user, with or without a closure. The class's `step` is called as usual, so hooks, schedulers, profilers and other wrappers see
a step. The run attaches to torch's step hooks: the class gets a closure that runs the caller's closure and then the run's
update, and afterwards finds its parameter groups empty, so that it updates nothing itself. For a class that never calls its
closure, or collects its parameters first, the update runs before the class's code. `OptimizerStep` owns two hooks of each
optimizer until `close`, and the content of its parameter groups while the class's code runs after the update.

`PagedStates` is `optimizer.state` from `guard` to `unguard`: a dict that raises where states are in pages, instead of seeming
to be empty. Loaded states can be read in it until the first step, and states of parameters outside of pages are ordinary
ones. States in pages can be dropped (`del`, `pop`, `clear`, or an empty dict as the new value): the parameter's next update
starts from fresh states.

Stale optimizers are those whose states were lost at the end of their run: a further step would silently start from fresh
states. Their hooks refuse such a step, and a `state_dict` without states, anywhere: in another run, of another Trainer, or in
a loop of the user's own.

I1: one update per call of `step`, after its closure.
I2: whenever a closure or another hook runs, the groups have the user's content.
I3: an optimizer that was given states since, also by `load_state_dict`, is no longer stale. Its hooks stay and do nothing,
    since torch may be iterating over them when that is detected.
I4: a copy of a stale optimizer, by `copy` or through pickle, is stale, too.
"""

from __future__ import annotations

import copy
import sys
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from types import FrameType
from typing import Any, NoReturn
from weakref import WeakSet, ref

import torch
from lightning.pytorch.core.optimizer import LightningOptimizer
from torch import Tensor
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from lightning_ptm.errors import UsageError
from lightning_ptm.runtime.engine.engine import Engine
from lightning_ptm.torch_internals import hooks_after_step, hooks_before_step


def plain_optimizer(optimizer: Optimizer) -> Optimizer:
    """Returns the user's optimizer, which Lightning's wrapper holds."""
    return optimizer.optimizer if isinstance(optimizer, LightningOptimizer) else optimizer


class _Call:
    """The closure passed to the class's `step`: the caller's closure, then the update."""

    def __init__(self, closure: Callable[[], Any] | None, update: Callable[[], None]) -> None:
        self._closure = closure
        self._update = update

        self.updated = False

    def __call__(self) -> Any:
        if self.updated:
            raise UsageError(
                "the optimizer evaluates its closure several times a step, and pages are updated once; use an optimizer that "
                "evaluates it once"
            )
        result = self._closure() if self._closure is not None else None
        self.update()
        return result

    def update(self) -> None:
        """Runs the update; the class's own code then finds no parameters."""
        self._update()
        self.updated = True


class OptimizerStep:
    """Runs the update inside `step` of one optimizer.

    Args:
        optimizer: the user's optimizer, without Lightning's wrapper.
        scaled: whether gradients are multiplied by a loss scale until Lightning's wrapper unscales them.
        arm: called with the optimizer and its closure before the closure runs.
    """

    def __init__(self, engine: Engine, optimizer: Optimizer, *, scaled: bool, arm: Callable[..., None]) -> None:
        self._engine = engine
        self._optimizer = optimizer
        self._scaled = scaled
        self._arm = arm
        traits = engine.stepping.traits_of(optimizer)
        self._ignores_closure = any(each.ignores_closure for each in traits)
        self._holds_parameters = any(each.holds_parameters for each in traits)
        self._call: _Call | None = None
        self._frame: FrameType | None = None
        """The frame of torch's wrapper around `step` and its hooks, during a call only, since it refers to the closure."""
        self._emptied: list[tuple[dict[str, Any], dict[str, Any]]] = []
        """The groups that are empty while the class's code runs, each with its content."""

        self._hooks: list[RemovableHandle] = [
            optimizer.register_step_pre_hook(self._before),
            optimizer.register_step_post_hook(self._after),
        ]
        # Runs before users' post hooks, which must find their groups.
        hooks_after_step(optimizer).move_to_end(self._hooks[1].id, last=False)

    def _before(self, optimizer: Optimizer, args: Any, kwargs: Any) -> tuple[Any, Any] | None:
        given = dict(zip(("self", "closure"), args, strict=False)) | kwargs
        closure = given.get("closure")
        if self._is_inner(sys._getframe(1)):
            return None
        check_guarded(optimizer)
        self.settle()  # a previous call may have raised an error that the caller has caught
        unknown = sorted({*kwargs} - {"closure"}) or [str(value) for value in args[2:]]
        if unknown:
            raise UsageError(
                f"optimizer.step was given {', '.join(unknown)}; angel_ptm runs the update page by page and cannot pass "
                f"arguments on; set them in the optimizer's param_groups"
            )
        if self._scaled and not self._engine.stepping.unscaled(optimizer):
            raise UsageError(
                f"step of the {type(optimizer).__name__} itself was called, whose gradients are still multiplied by the loss "
                f"scale of precision='16-mixed'; call step of what self.optimizers() returns, which unscales them, or use "
                f"precision='bf16-mixed'"
            )
        if self._ignores_closure:
            self._check_last()
            self._call, self._frame = _Call(None, self._update), sys._getframe(1)
            self._call.update()
            return None
        if self._holds_parameters:
            self._check_last()
        if closure is not None:
            self._arm(optimizer, closure=closure)
        self._call, self._frame = _Call(closure, self._update), sys._getframe(1)
        if not self._holds_parameters:
            return (optimizer,), {"closure": self._call}
        with torch.enable_grad():
            result = self._call()
        return (optimizer,), {"closure": None if closure is None else lambda: result}

    def _is_inner(self, frame: FrameType) -> bool:
        """Whether the class calls `step` of its base class, which torch wraps with the same hooks."""
        if self._frame is None:
            return False
        outer = frame.f_back
        while outer is not None and outer is not self._frame:
            outer = outer.f_back
        return outer is not None

    def _check_last(self) -> None:
        """Refuses pre hooks registered after this one, which would run after the update."""
        if next(reversed(hooks_before_step(self._optimizer))) != self._hooks[0].id:
            name = type(self._optimizer).__name__
            raise UsageError(
                f"{name}.step {'never calls' if self._ignores_closure else 'looks up its parameters before it calls'} its "
                f"closure, so angel_ptm updates pages before hooks of register_step_pre_hook that were registered during "
                f"the run; register them in configure_optimizers, or let step call its closure first"
            )

    def _after(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        call = self._call
        if call is None or self._frame is not sys._getframe(1):
            return
        if not call.updated:
            call.update()
        self.settle()

    def _update(self) -> None:
        self._engine.stepping.step(self._optimizer)
        # Changes the groups in place: the class may have taken the list of groups before it called the closure.
        for group in self._optimizer.param_groups:
            self._emptied.append((group, dict(group)))
            group["params"] = []

    def settle(self) -> None:
        """Restores the groups' content, also after a step that was cut short by an error."""
        self._call = self._frame = None
        emptied, self._emptied = self._emptied, []
        for group, values in emptied:
            group.clear()  # the class may have advanced its counters once more
            group.update(values)

    def close(self) -> None:
        """Ends the run: removes the hooks."""
        self.settle()
        for hook in self._hooks:
            hook.remove()


_READ = (
    "take optimizer.state_dict() or trainer.strategy.optimizer_state(optimizer), on all ranks, which fetch them, or read "
    "optimizer.state after fit"
)

_WRITE = (
    "change them in a state_dict() of the optimizer and give that to its load_state_dict, or edit optimizer.state between "
    "two fits; to start a parameter with fresh states, `del optimizer.state[parameter]`"
)


class PagedStates(defaultdict[Any, Any]):
    """The `state` of an optimizer whose states are in pages. It overrides every method of dict that reads or writes.

    Args:
        name: of the optimizer's class.
        shown: the states that can be read.
        paged: parameters whose states are in pages; None, in a copy of the optimizer: all that are not in `shown`.
        forget: called with a parameter whose states are to be dropped.
    """

    def __init__(
        self,
        name: str,
        shown: Mapping[Any, Any],
        paged: Iterable[Tensor] | None,
        forget: Callable[[Tensor], None] | None = None,
    ) -> None:
        super().__init__(dict, shown)
        self._name = name
        self._paged = None if paged is None else {id(parameter): parameter for parameter in paged}
        self._forget = forget
        self.is_open = False
        """Whether the run itself is using it, so that nothing is refused."""

    def _refuse(self, done: str, remedy: str) -> NoReturn:
        raise UsageError(f"state of {self._name} was {done} during a run, where it is in pages: {remedy}")

    def _is_paged(self, key: Any) -> bool:
        return self._paged is None or id(key) in self._paged

    def _check_read(self, *keys: Any) -> None:
        if not self.is_open and any(self._is_paged(key) and not dict.__contains__(self, key) for key in keys):
            self._refuse("read", _READ)

    def _check_all_read(self) -> None:
        if not self.is_open and (self._paged is None or not self._paged.keys() <= {id(key) for key in dict.keys(self)}):
            self._refuse("read", _READ)

    def _check_written(self, *keys: Any) -> None:
        if not self.is_open and any(map(self._is_paged, keys)):
            self._refuse("written to", _WRITE)

    def __missing__(self, key: Any) -> Any:
        self._check_read(key)
        return super().__missing__(key)

    def __contains__(self, key: object) -> bool:
        self._check_read(key)
        return super().__contains__(key)

    def __iter__(self) -> Iterator[Any]:
        self._check_all_read()
        return super().__iter__()

    def __reversed__(self) -> Iterator[Any]:
        self._check_all_read()
        return super().__reversed__()

    def __len__(self) -> int:
        self._check_all_read()
        return super().__len__()

    def __eq__(self, other: object) -> bool:
        self._check_all_read()
        return super().__eq__(other)

    __hash__ = None  # type: ignore[assignment]

    def __or__(self, other: Any) -> Any:
        return self.copy() | other

    def __ror__(self, other: Any) -> Any:
        return other | self.copy()

    def __ior__(self, other: Any) -> Any:
        self.update(other)
        return self

    def __repr__(self) -> str:
        return f"<state of {self._name}, in pages>"

    def get(self, key: Any, default: Any = None) -> Any:
        if self._paged is not None:  # torch's own classes look for old formats when they are copied
            self._check_read(key)
        return super().get(key, default)

    def keys(self) -> Any:
        self._check_all_read()
        return super().keys()

    def values(self) -> Any:
        if self._paged is not None:  # as in `get`
            self._check_all_read()
        return super().values()

    def items(self) -> Any:
        self._check_all_read()
        return super().items()

    def __setitem__(self, key: Any, value: Any) -> None:
        if not (isinstance(value, Mapping) and not value and self._let_go(key)):
            self._check_written(key)
            super().__setitem__(key, value)

    def __delitem__(self, key: Any) -> None:
        if not self._let_go(key):
            self._check_written(key)
            super().__delitem__(key)

    def _let_go(self, key: Any) -> bool:
        """Drops the states of a parameter, if they are in pages."""
        if self._forget is None or self._paged is None or self.is_open or id(key) not in self._paged:
            return False
        self._forget(key)
        dict.pop(self, key, None)
        return True

    def setdefault(self, key: Any, default: Any = None) -> Any:
        self._check_written(key)
        return super().setdefault(key, default)

    def pop(self, key: Any, *default: Any) -> Any:
        shown = dict.get(self, key)
        if self._let_go(key):
            return PagedStates(self._name, {}, None) if shown is None else shown  # raises if the caller reads it
        self._check_written(key)
        return super().pop(key, *default)

    def popitem(self) -> tuple[Any, Any]:
        if not self.is_open and (self._paged is None or self._paged):
            self._refuse("written to", _WRITE)
        return super().popitem()

    def clear(self) -> None:
        for parameter in () if self._paged is None else self._paged.values():
            self._let_go(parameter)
        if not self.is_open and self._paged is None:
            self._refuse("written to", _WRITE)
        super().clear()

    def update(self, *others: Any, **named: Any) -> None:
        self._check_written(*dict(*others))
        super().update(*others, **named)

    def copy(self) -> defaultdict[Any, Any]:  # type: ignore[override]
        self._check_all_read()
        return self.plain()

    __copy__ = copy  # type: ignore[assignment]

    def plain(self) -> defaultdict[Any, Any]:
        """The readable states, in the type that torch's optimizers use."""
        found: defaultdict[Any, Any] = defaultdict(dict)
        found.update(dict.items(self))
        return found

    # A copy of the optimizer has no pages, so reads of missing states raise there, too.

    def __reduce__(self) -> Any:
        return PagedStates, (self._name, dict(dict.items(self)), None)

    def __deepcopy__(self, known: Any) -> PagedStates:
        return PagedStates(self._name, copy.deepcopy(dict(dict.items(self)), known), None)


def guard(optimizer: Optimizer, paged: Iterable[Tensor], forget: Callable[[Tensor], None]) -> None:
    """Replaces an optimizer's `state`, at the start of a run or after its `load_state_dict`, which makes a plain dict.

    Args:
        paged: parameters whose states are in pages.
        forget: called with a parameter whose states are to be dropped.
    """
    if not isinstance(optimizer.state, PagedStates):
        optimizer.state = PagedStates(type(optimizer).__name__, optimizer.state, paged, forget)


def unguard(optimizer: Optimizer) -> bool:
    """Restores a plain `state`; returns False if the user has assigned another one since, which is kept."""
    if not isinstance(optimizer.state, PagedStates):
        return False
    optimizer.state = optimizer.state.plain()
    return True


def check_guarded(optimizer: Optimizer) -> None:
    """Checks an optimizer before a step.

    Raises:
        UsageError: its `state` was replaced.
    """
    if not isinstance(optimizer.state, PagedStates):
        raise UsageError(
            f"state of {type(optimizer).__name__} was replaced during a run, where it is in pages: {_WRITE}"
        )


def is_opened(optimizer: Optimizer) -> bool:
    """Whether `state` can be used freely: the run itself is using it, or none of it is in pages."""
    return not isinstance(optimizer.state, PagedStates) or optimizer.state.is_open


@contextmanager
def opened(optimizer: Optimizer) -> Iterator[None]:
    """Lets the run read and write an optimizer's `state` inside the block."""
    if is_opened(optimizer):
        yield
        return
    state = optimizer.state
    assert isinstance(state, PagedStates)
    state.is_open = True
    try:
        yield
    finally:
        state.is_open = False


_STALE: WeakSet[Optimizer] = WeakSet()

_WATCHED: WeakSet[Optimizer] = WeakSet()

"""Optimizers that have the hooks."""


def mark_stale(optimizers: Iterable[Optimizer]) -> None:
    """Marks optimizers as stale: their states are lost."""
    for optimizer in optimizers:
        _STALE.add(optimizer)
        # On the object, where copy and pickle look first; a weak reference, so that the optimizer can be freed.
        vars(optimizer)["__reduce_ex__"] = partial(_reduce, ref(optimizer))
        if optimizer not in _WATCHED:
            _WATCHED.add(optimizer)
            optimizer.register_step_pre_hook(_check)
            optimizer.register_state_dict_pre_hook(_check)
            optimizer.register_load_state_dict_post_hook(_look_for_states)


class StaleInCopies(list[Optimizer]):
    """Optimizers that are not stale themselves, but whose copies, by `copy.deepcopy` or through pickle, are."""

    def __deepcopy__(self, known: dict[int, Any]) -> StaleInCopies:
        return _all_stale(copy.deepcopy(list(self), known))

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return _all_stale, (list(self),)


def _all_stale(optimizers: list[Optimizer]) -> StaleInCopies:
    mark_stale(optimizers)
    return StaleInCopies(optimizers)


def renew(optimizer: Optimizer) -> None:
    """Marks an optimizer as having states again."""
    _STALE.discard(optimizer)
    vars(optimizer).pop("__reduce_ex__", None)


def refuse_stale(optimizers: Iterable[Optimizer]) -> None:
    """Raises:
    UsageError: one of the optimizers is stale.
    """
    for optimizer in optimizers:
        _check(optimizer)


def _check(optimizer: Optimizer, *_: Any) -> None:
    if optimizer in _STALE:
        raise UsageError(
            f"the states of this {type(optimizer).__name__} were lost at the end of an earlier run, since RAM had no room "
            f"for a copy (of states on disk, half of the free RAM), so it cannot continue; give fit a ckpt_path, or "
            f"return a new optimizer from configure_optimizers"
        )


def _look_for_states(optimizer: Optimizer) -> None:
    if optimizer.state:
        renew(optimizer)


def _reduce(weak: ref[Optimizer], _protocol: Any) -> tuple[Callable[..., Optimizer], tuple[Any, ...]]:
    optimizer = weak()
    assert optimizer is not None  # it is being copied
    kind = type(optimizer)
    return _stale_copy, (kind, kind.__getstate__(optimizer))


def _stale_copy(kind: type[Optimizer], state: dict[str, Any]) -> Optimizer:
    optimizer = kind.__new__(kind)
    optimizer.__setstate__(state)
    mark_stale([optimizer])
    return optimizer
