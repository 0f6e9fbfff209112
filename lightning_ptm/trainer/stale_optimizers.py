"""Optimizers whose states were lost at the end of their run: a further step would silently start from fresh states.

Owns the hooks that refuse such a step, and a `state_dict` without states, anywhere: in another run, of another Trainer, or
in a loop of the user's own.
I1: an optimizer that was given states since, also by `load_state_dict`, is no longer stale. Its hooks stay and do nothing,
since torch may be iterating over them when that is detected.
I2: a copy of a stale optimizer, by `copy` or through pickle, is stale, too.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any
from weakref import WeakSet, ref

from torch.optim import Optimizer

from lightning_ptm.errors import UsageError

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
