"""`state` of an optimizer during a run. Its tensors are in pages, so a plain one would say in silence that there are none,
and swallow what is written to it: this one says what to do instead.

Owns `optimizer.state` from `guard` to `unguard`. What is shown in it (states that were loaded, until the first step) can be
read, and states of parameters that have no pages are the user's as ever. What has states can lose them (`del`, `pop`,
`clear`, an empty dict in their place): the next update of it begins afresh.
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
    "take optimizer.state_dict() or trainer.strategy.optimizer_state(optimizer), on all ranks, which fetch them, or read "
    "optimizer.state after fit"
)
_WRITE = (
    "change them in a state_dict() of the optimizer and give that to its load_state_dict, or edit optimizer.state between "
    "two fits; to have it begin afresh with a parameter, `del optimizer.state[parameter]`"
)


class PagedStates(defaultdict[Any, Any]):
    """See the file's contract. Long because a dict is read and written by so many methods.

    Args:
        name: of the optimizer's class.
        shown: what can be read.
        paged: parameters whose states are in pages; None: all others, of a copy.
        forget: is told of which of them the states are to end.
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
        """Whether the run itself is at work on it."""

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
        """States of a parameter end, if they are in pages and the user wants it."""
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
            return PagedStates(self._name, {}, None) if shown is None else shown  # nobody has read them
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
        """What it shows, as torch's optimizers keep it."""
        found: defaultdict[Any, Any] = defaultdict(dict)
        found.update(dict.items(self))
        return found

    # A copy of the optimizer has no pages: what it lacks is an error there, too.

    def __reduce__(self) -> Any:
        return PagedStates, (self._name, dict(dict.items(self)), None)

    def __deepcopy__(self, known: Any) -> PagedStates:
        return PagedStates(self._name, copy.deepcopy(dict(dict.items(self)), known), None)


def guard(optimizer: Optimizer, paged: Iterable[Tensor], forget: Callable[[Tensor], None]) -> None:
    """A run begins, or the optimizer has got a plain `state` again (its load_state_dict makes one).

    Args:
        paged: parameters whose states are in pages; forget: is told of which of them the states are to end.
    """
    if not isinstance(optimizer.state, PagedStates):
        optimizer.state = PagedStates(type(optimizer).__name__, optimizer.state, paged, forget)


def unguard(optimizer: Optimizer) -> bool:
    """The run is over; returns False where the user has put another `state` in its place since, which then counts."""
    if not isinstance(optimizer.state, PagedStates):
        return False
    optimizer.state = optimizer.state.plain()
    return True


def check_guarded(optimizer: Optimizer) -> None:
    """Before a step.

    Raises:
        UsageError: `state` was replaced since.
    """
    if not isinstance(optimizer.state, PagedStates):
        raise UsageError(
            f"state of {type(optimizer).__name__} was replaced during a run, where it is in pages: {_WRITE}"
        )


def is_opened(optimizer: Optimizer) -> bool:
    """Whether the run itself is at work on its `state`, or has nothing in pages of it."""
    return not isinstance(optimizer.state, PagedStates) or optimizer.state.is_open


@contextmanager
def opened(optimizer: Optimizer) -> Iterator[None]:
    """Inside, the run reads and writes it."""
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
