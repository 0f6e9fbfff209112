"""Parameter guards: when parameters may be read by code outside of their unit's calls.

This concerns compute parameters that are not the master weights themselves. Owns whether a step or a backward pass is
in progress, how many backward passes of the iteration are over, and which units' updates have been waited for. Opens
and closes stores; the executor knows which stores are in use.

I1: parameters are open while a step, a backward pass or a call of their unit is in progress. A unit whose updates no
    step waits for (`late`) is opened by a step only once its update has been waited for.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from lightning_ptm.runtime.units.store import UnitStore
from lightning_ptm.terms import Phase


class GuardPolicy:
    """The parameter guards of one rank's stores.

    Args:
        used: returns whether a call of a unit, or its backward, is in progress.
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
        """Number of backward passes of the iteration in progress that are over. Others read it."""
        self.waited_for: set[int] = set()
        """Units whose updates have been waited for in this iteration, since its last optimizer step. Others read it."""

    def begin_iteration(self) -> None:
        """Resets the counts of the iteration."""
        self.passes = 0
        self.waited_for.clear()

    def computation_begins(self, phase: Phase) -> None:
        """Opens parameters for a step, or a backward pass, whose code may read them."""
        self._note(phase, begun=True)
        for store in self._closing:
            if not store.late or store.unit.index in self.waited_for:
                store.open()

    def computation_ends(self, phase: Phase) -> None:
        """Closes parameters after a step, or a backward pass; counts only a backward pass that had begun."""
        self.passes += phase is Phase.BACKWARD and self._in_backward
        self._note(phase, begun=False)
        for store in self._closing if not self.computing else ():
            if not self._used(store.unit.index):
                store.close()

    def _note(self, phase: Phase, *, begun: bool) -> None:
        if phase is Phase.BACKWARD:
            self._in_backward = begun
        else:
            self._in_step = begun
        self.computing = self._in_step or self._in_backward

    def updates_begin(self) -> None:
        """Closes `late` units, for whose updates an optimizer step does not wait.

        They have to be called, or held, before they can be read again.
        """
        self.waited_for.clear()
        for store in self._closing:
            if store.late and not self._used(store.unit.index):
                store.close()

    def waited(self, store: UnitStore) -> None:
        """Records that a unit's update has been waited for."""
        self.waited_for.add(store.unit.index)
        if self.computing:
            store.open()

    def abandon(self) -> None:
        """Closes everything after a failed iteration."""
        self._in_step = self._in_backward = self.computing = False
        self.waited_for.clear()
        for store in self._stores:
            store.close()
