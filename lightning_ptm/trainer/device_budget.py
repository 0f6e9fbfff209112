"""The memory of a device that pages of a fit may take where `device_memory` is "auto": the least that a plan needs for the
first step, and then what steps leave at their peak.

Decides from measurements; relayout.py lays the run out again. Owns what was measured, which outlives a layout.

I1: ranks decide alike: the budget is traced or not on all of them at the same time.
"""

from __future__ import annotations

from lightning_ptm.memory.backend import Backend
from lightning_ptm.runtime.deciding.budgets import with_headroom


class DeviceBudget:
    """Device memory of one rank's fit.

    Args:
        backend: this rank's device.
        follows: whether the run trains and its settings give no number.
    """

    def __init__(self, backend: Backend, *, follows: bool) -> None:
        # Configuration.
        self._backend = backend
        self._follows = follows and backend.has_own_memory
        # State.
        self.beside_bytes: int | None = None
        """Bytes that steps take beside pages at their peak; None: no step was traced, so pages take the least."""
        self._pool_bytes = 0
        self._first_step = 0
        """Number of optimizer steps before the present layout."""

    def begin_layout(self, pool_bytes: int) -> None:
        """Begins to measure a layout.

        Args:
            pool_bytes: device memory of its pages.
        """
        self._pool_bytes = pool_bytes
        if self._follows:
            self._backend.begin_peak()

    def may_grow(self, iterations: int, steps: int) -> bool:
        """Returns whether the budget was the least so far, and a step was traced since the layout.

        Args:
            iterations: iterations of the present layout.
            steps: optimizer steps of the run so far.
        """
        if not iterations:  # a checkpoint may have been loaded after the pages were laid out
            self._first_step = steps
        return self._follows and self.beside_bytes is None and steps > self._first_step

    def measure(self, *, varies: bool) -> int:
        """Follows the traced peak from the next layout on; returns its bytes.

        Args:
            varies: see `with_headroom`.
        """
        peak = self._backend.peak_outside_region(self._pool_bytes)
        of_step = max(0, peak - self._backend.bytes_outside_region(self._pool_bytes))
        self.beside_bytes = peak - of_step + with_headroom(of_step, varies=varies)
        return peak
