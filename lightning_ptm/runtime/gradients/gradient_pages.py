"""Where gradients have pages from: what one flat is told of it, and sets of pages for gradients that come and go while
updates run beside compute (lock-free mode).

These are taken once, each in a row, and used again and again: what is allocated and released all the time would scatter.
I1: a set has one user: the flat whose gradient arrives, then whoever was given the gradient, who gives the set back.
"""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Callable, Iterable
from functools import partial
from time import monotonic
from typing import TYPE_CHECKING

from lightning_ptm.errors import CapacityError

if TYPE_CHECKING:
    import torch

    from lightning_ptm.memory.paged_tensor import PagedTensor

_LOOK_S = 0.01
_PATIENCE_S = 60.0
"""There are sets enough for what can be on its way, so they come back within one update of each flat in hand."""


@dataclasses.dataclass(frozen=True, slots=True)
class PageSupply:
    """Of one flat's gradient.

    Attributes:
        take: pages for this rank's shard of it, with undefined contents. Raises CapacityError: there are none.
        give_back: the gradient in these pages is used.
    """

    take: Callable[[], PagedTensor]
    give_back: Callable[[PagedTensor], None]


class GradientPages:
    """Sets of pages by number of elements and dtype. Taken by compute, given back by any thread.

    Args:
        sets: all there are.
    """

    def __init__(self, sets: Iterable[PagedTensor]) -> None:
        self._changed = threading.Condition()
        self._free: dict[tuple[int, torch.dtype], list[PagedTensor]] = {}
        for tensor in sets:
            self.give_back(tensor)
        self.while_waiting: Callable[[], None] = lambda: None
        """Called while compute waits for a set: moves updates on, and raises their errors."""

    def take(self, numel: int, dtype: torch.dtype) -> PagedTensor:
        """A set with undefined contents; waits for one.

        Raises:
            CapacityError: none came back for a long time.
        """
        free = self._free.setdefault((numel, dtype), [])
        deadline = monotonic() + _PATIENCE_S
        while True:
            with self._changed:
                if free:
                    return free.pop()
                self._changed.wait(_LOOK_S)
            self.while_waiting()
            if monotonic() > deadline:
                raise CapacityError(
                    f"no pages for a gradient of {numel} elements have come free for {_PATIENCE_S:.0f} s: updates do not "
                    f"keep up; use a faster disk_path, a smaller max_staleness, or lock_free=False"
                )

    def supply(self, numel: int, dtype: torch.dtype) -> PageSupply:
        """Of a flat whose gradient has so many elements."""
        return PageSupply(partial(self.take, numel, dtype), self.give_back)

    def give_back(self, tensor: PagedTensor) -> None:
        """The gradient in these pages is used."""
        with self._changed:
            self._free.setdefault((tensor.numel, tensor.dtype), []).append(tensor)
            self._changed.notify_all()
