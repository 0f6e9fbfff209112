"""Supply of gradient pages: the interface that one flat uses, and a pool of page sets for lock-free runs.

In lock-free mode gradients come and go while updates run concurrently with compute. Sets are allocated once, each
contiguous, and reused: allocating and releasing them all the time would fragment memory.

I1: a set has one user: the flat whose gradient is collected, then the receiver of the gradient, who returns the set.
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
_TIMEOUT_S = 60.0
"""The pool has enough sets for all gradients in flight, so a set returns within one update of each flat in progress."""


@dataclasses.dataclass(frozen=True, slots=True)
class PageSupply:
    """Source of pages for one flat's gradient.

    Attributes:
        take: returns pages for this rank's shard of the gradient, with undefined contents. Raises CapacityError if
            there are none.
        give_back: returns pages whose gradient was used.
    """

    take: Callable[[], PagedTensor]
    give_back: Callable[[PagedTensor], None]


class GradientPages:
    """Pool of page sets by number of elements and dtype. Compute takes sets, any thread returns them.

    Args:
        sets: all sets of the pool.
        while_waiting: called while compute waits for a set: advances updates, and raises their errors.
    """

    def __init__(self, sets: Iterable[PagedTensor], while_waiting: Callable[[], None] = lambda: None) -> None:
        self._while_waiting = while_waiting
        self._changed = threading.Condition()
        self._free: dict[tuple[int, torch.dtype], list[PagedTensor]] = {}
        for tensor in sets:
            self.give_back(tensor)

    def take(self, numel: int, dtype: torch.dtype) -> PagedTensor:
        """Returns a set with undefined contents; waits for one.

        Raises:
            CapacityError: no set was returned for a long time.
        """
        free = self._free.setdefault((numel, dtype), [])
        deadline = monotonic() + _TIMEOUT_S
        while True:
            with self._changed:
                if free:
                    return free.pop()
                self._changed.wait(_LOOK_S)
            self._while_waiting()
            if monotonic() > deadline:
                raise CapacityError(
                    f"updates have freed no pages for {_TIMEOUT_S} s, for which a gradient of {numel} elements waits, so "
                    "training stops: updates are slower than backward passes, or the disk hangs; use a faster disk_path, "
                    "a smaller lock_free=LockFree(max_staleness=...), or lock_free=False"
                )

    def supply(self, numel: int, dtype: torch.dtype) -> PageSupply:
        """The supply for a flat whose gradient has this size and dtype."""
        return PageSupply(partial(self.take, numel, dtype), self.give_back)

    def give_back(self, tensor: PagedTensor) -> None:
        """Returns a set whose gradient was used."""
        with self._changed:
            self._free.setdefault((tensor.numel, tensor.dtype), []).append(tensor)
            self._changed.notify_all()
