"""When parameters that are not the precise ones are open: may be read by code that no call of their unit announces.

Owns whether a step or a backward pass is in progress, how many backward passes of the iteration are over, and whose updates
somebody has waited for. Opens and closes stores; whether one is in use, the executor says.

I1: they are open while a step or a backward pass is in progress, or a call of their unit; those of a unit whose updates no
    step waits for (`late`) once somebody has waited for it there.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from lightning_ptm.runtime.units.store import UnitStore
from lightning_ptm.terms import Phase


class GuardPolicy:
    """Of the stores of one rank.

    Args:
        used: whether a call of a unit, or its backward, is in progress.
    """

    def __init__(self, stores: Sequence[UnitStore], used: Callable[[int], bool]) -> None:
        self._stores = stores
        self._used = used
        self._closing = [store for store in stores if store.closes]
        # state
        self._in_step = False
        self._in_backward = False
        self.computing = False
        """Whether a step or a backward pass is in progress. Others read it."""
        self.passes = 0
        """Backward passes of the iteration in progress that are over. Others read it."""
        self.waited_for: set[int] = set()
        """Units whose updates somebody has waited for in this iteration, since its last optimizer step. Others read it."""

    def begin_iteration(self) -> None:
        """Nobody has waited for anything in this one."""
        self.passes = 0
        self.waited_for.clear()

    def computation_begins(self, phase: Phase) -> None:
        """Of a step, or of a backward pass: its code may read parameters that are there."""
        self._now(phase, begun=True)
        for store in self._closing:
            if not store.late or store.unit.index in self.waited_for:
                store.open()

    def computation_ends(self, phase: Phase) -> None:
        """Of a step, or of a backward pass; one that never began has no end."""
        self.passes += phase is Phase.BACKWARD and self._in_backward
        self._now(phase, begun=False)
        for store in self._closing if not self.computing else ():
            if not self._used(store.unit.index):
                store.close()

    def _now(self, phase: Phase, *, begun: bool) -> None:
        if phase is Phase.BACKWARD:
            self._in_backward = begun
        else:
            self._in_step = begun
        self.computing = self._in_step or self._in_backward

    def updates_begin(self) -> None:
        """Of units, which an optimizer's step does not wait for: these have to be called, or held, to be read again."""
        self.waited_for.clear()
        for store in self._closing:
            if store.late and not self._used(store.unit.index):
                store.close()

    def waited(self, store: UnitStore) -> None:
        """Somebody has waited for a unit's update."""
        self.waited_for.add(store.unit.index)
        if self.computing:
            store.open()

    def abandon(self) -> None:
        """The iteration failed: everything is closed."""
        self._in_step = self._in_backward = self.computing = False
        self.waited_for.clear()
        for store in self._stores:
            store.close()
