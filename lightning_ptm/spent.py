"""Optimizers whose states have ended with their run: a step of theirs would begin anew, and nobody would see it.

Owns the hooks that refuse such a step, wherever it is taken: in another run, of another Trainer too, or in a loop by hand.
I1: an optimizer that was given states since, by `load_state_dict` too, is none of these.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NoReturn
from weakref import WeakKeyDictionary

from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from lightning_ptm.errors import UsageError

_HOOKS: WeakKeyDictionary[Optimizer, tuple[RemovableHandle, ...]] = WeakKeyDictionary()


def spend(optimizers: Iterable[Optimizer]) -> None:
    """The states of these have ended."""
    for optimizer in optimizers:
        if optimizer not in _HOOKS:
            _HOOKS[optimizer] = (
                optimizer.register_step_pre_hook(_refuse),
                optimizer.register_load_state_dict_post_hook(renew),
            )


def renew(optimizer: Optimizer) -> None:
    """It has states again."""
    for hook in _HOOKS.pop(optimizer, ()):
        hook.remove()


def spent(optimizers: Iterable[Optimizer]) -> list[Optimizer]:
    """Those of them whose states have ended."""
    return [optimizer for optimizer in optimizers if optimizer in _HOOKS]


def refuse_spent(optimizers: Iterable[Optimizer]) -> None:
    """Raises:
    UsageError: one of these is spent.
    """
    for optimizer in spent(optimizers):
        _refuse(optimizer)


def _refuse(optimizer: Optimizer, *_: Any) -> NoReturn:
    raise UsageError(
        f"the states of this {type(optimizer).__name__} have ended with an earlier run, since they lived on disk "
        f"or RAM could not hold a copy, so it cannot go on where it was; give fit a ckpt_path, or return a new "
        f"optimizer from configure_optimizers"
    )


__all__ = ["refuse_spent", "renew", "spend", "spent"]
