"""Optimizers whose states have ended with their run: a step of theirs would begin anew, and nobody would see it.

Owns the hooks that refuse such a step, and a `state_dict` without states, wherever it is asked for: in another run, of
another Trainer too, or in a loop by hand.
I1: an optimizer that was given states since, by `load_state_dict` too, is none of these. Its hooks stay, and let all pass:
torch may be going through them when that is found out.
I2: a copy of a spent optimizer, by `copy` or through pickle, is spent too.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any
from weakref import WeakSet, ref

from torch.optim import Optimizer

from lightning_ptm.errors import UsageError

_SPENT: WeakSet[Optimizer] = WeakSet()
_WATCHED: WeakSet[Optimizer] = WeakSet()
"""Have the hooks."""


def spend(optimizers: Iterable[Optimizer]) -> None:
    """The states of these have ended."""
    for optimizer in optimizers:
        _SPENT.add(optimizer)
        # On the object, where copy and pickle look first; weak, so that it goes when the user lets it go.
        vars(optimizer)["__reduce_ex__"] = partial(_reduce, ref(optimizer))
        if optimizer not in _WATCHED:
            _WATCHED.add(optimizer)
            optimizer.register_step_pre_hook(_check)
            optimizer.register_state_dict_pre_hook(_check)
            optimizer.register_load_state_dict_post_hook(_look_for_states)


class StaleInCopies(list[Optimizer]):
    """Optimizers whose copies, by `copy.deepcopy` or through pickle, are spent, and which are not spent themselves."""

    def __deepcopy__(self, known: dict[int, Any]) -> StaleInCopies:
        return _all_spent(copy.deepcopy(list(self), known))

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return _all_spent, (list(self),)


def _all_spent(optimizers: list[Optimizer]) -> StaleInCopies:
    spend(optimizers)
    return StaleInCopies(optimizers)


def renew(optimizer: Optimizer) -> None:
    """It has states again."""
    _SPENT.discard(optimizer)
    vars(optimizer).pop("__reduce_ex__", None)


def refuse_spent(optimizers: Iterable[Optimizer]) -> None:
    """Raises:
    UsageError: one of these is spent.
    """
    for optimizer in optimizers:
        _check(optimizer)


def _check(optimizer: Optimizer, *_: Any) -> None:
    if optimizer in _SPENT:
        raise UsageError(
            f"the states of this {type(optimizer).__name__} have ended with an earlier run, since RAM had no room for a copy "
            f"(of those on disk, half of what is free), so it cannot go on where it was; give fit a ckpt_path, or return a "
            f"new optimizer from configure_optimizers"
        )


def _look_for_states(optimizer: Optimizer) -> None:
    if optimizer.state:
        renew(optimizer)


def _reduce(weak: ref[Optimizer], _protocol: Any) -> tuple[Callable[..., Optimizer], tuple[Any, ...]]:
    optimizer = weak()
    assert optimizer is not None  # it is being copied
    kind = type(optimizer)
    return _spent_copy, (kind, kind.__getstate__(optimizer))


def _spent_copy(kind: type[Optimizer], state: dict[str, Any]) -> Optimizer:
    optimizer = kind.__new__(kind)
    optimizer.__setstate__(state)
    spend([optimizer])
    return optimizer
