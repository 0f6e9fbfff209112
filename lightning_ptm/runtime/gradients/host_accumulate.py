"""Sums of gradients in RAM: what a device adds to them comes on a stream of its own, and the device goes on meanwhile.

Owns that stream. Whose sums they are, and what may be read when, is gradient_shard.py's.
I1: what has come is added once, by whoever looks first, in whatever thread.
I2: the memory that it comes from stays until then.
"""

from __future__ import annotations

import threading

import torch
from torch import Tensor

from lightning_ptm.memory.backend import Backend
from lightning_ptm.memory.streams import Copies, Pair
from lightning_ptm.memory.transfer import Completion

UNITS_AHEAD = 2
"""So many units' gradients are on their way at most: one that is copied while the backward of the next computes, and one for
a host that is ahead of both. Each takes page-locked memory of its own."""


class Addition:
    """Something on its way to a sum; looks and waits as a transfer does.

    Args:
        value: where it arrives.
        sum_: it is added to this, or put there.
    """

    def __init__(self, arriving: Completion, value: Tensor, sum_: Tensor, *, adds: bool) -> None:
        self._arriving = arriving
        self._value: Tensor | None = value
        self._sum = sum_
        self._adds = adds
        self._lock = threading.Lock()

    def done(self) -> bool:
        """Whether the sum has it. Never blocks for the device."""
        if self._value is not None and self._arriving.done():
            self.wait()
        return self._value is None

    def wait(self, host: bool = True) -> None:
        """Returns when the sum has it: the CPU adds."""
        with self._lock:
            if self._value is None:
                return
            self._arriving.synchronize()
            with torch.no_grad():
                if self._adds:
                    self._sum.add_(self._value)
                else:
                    self._sum.copy_(self._value)
            self._value = None


class HostAccumulator:
    """The stream, of a device with memory of its own."""

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        # Of their own: additions would wait for copies of pages, which are of the next units.
        self._to_host = Copies(backend, backend.stream())

    def start(self, part: Tensor, sum_: Tensor, *, adds: bool) -> Addition:
        """Begins to bring `part`, which what is queued so far has written. It must stay as it is until that is added."""
        value = self._backend.empty_in_host(part)
        return Addition(self._to_host.launch([Pair(value, part)]), value, sum_, adds=adds)
