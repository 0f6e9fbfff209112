"""`optimizer.state` during a run: a dict that raises where states are in pages, instead of seeming to be empty.

Owns `optimizer.state` from `guard` to `unguard`. Loaded states can be read in it until the first step, and states of
parameters outside of pages are ordinary ones. States in pages can be dropped (`del`, `pop`, `clear`, or an empty dict as the
new value): the parameter's next update starts from fresh states.
"""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NoReturn

from torch import Tensor
from torch.optim import Optimizer

from lightning_ptm.errors import UsageError

_READ = (
    "call optimizer.state_dict() or trainer.strategy.optimizer_state(optimizer) on all ranks, which copy "
    "them, or read optimizer.state after fit"
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
        raise UsageError(
            f"optimizer.state of {self._name} was {done} during a run, and the states are in pages: {remedy}"
        )

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
