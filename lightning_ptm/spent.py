"""Optimizers whose states have ended with their run: a step of theirs would begin anew, and nobody would see it.

Owns the hooks that refuse such a step, wherever it is taken: in another run, or in a loop by hand.
I1: an optimizer that was given states since, by `load_state_dict` too, is none of these.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, NoReturn
from weakref import WeakKeyDictionary

from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from lightning_ptm.errors import UsageError


class SpentOptimizers:
    """Holds none of them alive."""

    def __init__(self, optimizers: Iterable[Optimizer] = ()) -> None:
        self._hooks: WeakKeyDictionary[Optimizer, tuple[RemovableHandle, ...]] = WeakKeyDictionary()
        self.add(optimizers)

    def add(self, optimizers: Iterable[Optimizer]) -> None:
        for optimizer in optimizers:
            if optimizer not in self._hooks:
                self._hooks[optimizer] = (
                    optimizer.register_step_pre_hook(_refuse),
                    optimizer.register_load_state_dict_post_hook(self.discard),
                )

    def discard(self, optimizer: Optimizer) -> None:
        for hook in self._hooks.pop(optimizer, ()):
            hook.remove()

    def check(self, optimizers: Iterable[Optimizer]) -> None:
        """Raises:
        UsageError: one of these is spent.
        """
        for optimizer in optimizers:
            if optimizer in self._hooks:
                _refuse(optimizer)

    def __iter__(self) -> Iterator[Optimizer]:
        return iter(list(self._hooks))


def _refuse(optimizer: Optimizer, *_: Any) -> NoReturn:
    raise UsageError(
        f"the states of this {type(optimizer).__name__} have ended with an earlier run, since they lived on disk "
        f"or RAM could not hold a copy, so it cannot go on where it was; give fit a ckpt_path, or return a new "
        f"optimizer from configure_optimizers"
    )


__all__ = ["SpentOptimizers"]
