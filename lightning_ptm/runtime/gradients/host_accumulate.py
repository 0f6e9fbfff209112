"""Accumulation of gradients in RAM: the device copies gradients on a separate stream, and the CPU adds them to sums.

Owns that stream. The owner of the sums, and the rules for reading them, are in gradient_shard.py.

I1: an arrived gradient is added once, by the first caller of `done` or `wait`, in whatever thread.
I2: the source memory of the copy stays unchanged until then.
"""

from __future__ import annotations

import threading

import torch
from torch import Tensor

from lightning_ptm.memory.backend import Backend
from lightning_ptm.memory.device_work import Completion
from lightning_ptm.memory.streams import Copies, Pair

UNITS_AHEAD = 2
"""Maximum number of units whose gradients are in flight: one that is copied while the backward of the next unit
computes, and one for a host that runs ahead of both. Each takes page-locked memory of its own."""


class Addition:
    """A gradient on its way to a sum, with the interface of a transfer.

    Args:
        value: the buffer in RAM that the gradient is copied to.
        sum_: the sum that `value` is added to, or written to.
    """

    def __init__(self, arriving: Completion, value: Tensor, sum_: Tensor, *, adds: bool) -> None:
        self._arriving = arriving
        self._value: Tensor | None = value
        self._sum = sum_
        self._adds = adds
        self._lock = threading.Lock()

    def done(self) -> bool:
        """Whether the sum includes the gradient. Never blocks for the device."""
        if self._value is not None and self._arriving.done():
            self.wait()
        return self._value is None

    def wait(self, host: bool = True) -> None:
        """Blocks until the sum includes the gradient; the CPU adds it."""
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
    """The stream for gradients of a device with memory of its own."""

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        # Not the stream of page copies: additions would wait for pages of the next units.
        self._to_host = Copies(backend, backend.stream())

    def start(self, part: Tensor, sum_: Tensor, *, adds: bool) -> Addition:
        """Starts to copy `part`, written by the work queued so far. `part` must stay unchanged until it is added."""
        value = self._backend.empty_in_host(part)
        return Addition(self._to_host.launch([Pair(value, part)]), value, sum_, adds=adds)
