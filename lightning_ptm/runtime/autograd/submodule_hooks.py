"""Calls of submodules from outside their unit's forward: each counts as a call of the unit.

Owns which submodules own parameters of which units, and such calls in progress, the innermost last. The work at the
beginning and end of a unit's call is done by the callbacks `begins` and `ends` (hooks.py).

I1: a unit that is in use or held already is not entered again.
I2: a call inside a backward pass is a recomputed one, and ends with the unit's backward.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn

from lightning_ptm.memory.streams import ComputeStream, on_compute_stream
from lightning_ptm.runtime.fetching.executor import Executor
from lightning_ptm.runtime.tensors.autograd_graphs import in_backward, in_derivative, refuse_derivative


class SubmoduleHooks:
    """Calls of parameter-owning submodules, for all units.

    Args:
        names: names of the units.
        begins: begins a call of a unit with these arguments; returns its number if some inputs require gradients.
        ends: ends the call of that number, with this output.
        root_begins, root_ends: begin and end a call of a part of the root between two steps.
    """

    def __init__(
        self,
        names: list[str],
        executor: Executor,
        begins: Callable[[int, Any, Any], int | None],
        ends: Callable[[int, int | None, Any], None],
        root_begins: Callable[[], None],
        root_ends: Callable[[], None],
        stream: ComputeStream,
    ) -> None:
        self.stream = stream
        self._names = names
        self._executor = executor
        self._begins = begins
        self._ends = ends
        self._root_begins = root_begins
        self._root_ends = root_ends
        self._units_of: dict[int, list[int]] = {}
        # state
        self._open: list[tuple[int, nn.Module, int | None]] = []

    def add_owner(self, owner: nn.Module, index: int) -> bool:
        """Records that `owner` has parameters of a unit; returns whether this is the first unit recorded for it."""
        known = self._units_of.setdefault(id(owner), [])
        known.append(index)
        return len(known) == 1

    @on_compute_stream
    def call_begins(self, module: nn.Module, args: Any) -> None:
        """Begins a call of an owner of parameters."""
        for index in self._units_of[id(module)]:
            if in_derivative():
                refuse_derivative(self._names[index])
            if self._executor.used(index):
                continue
            if self._executor.held(index):
                self._executor.read_held(index)
            elif index == 0:
                self._executor.hold(0)  # outside an iteration: it stays until the next one ends
            else:
                call = self._begins(index, args, {})
                if not in_backward():
                    self._open.append((index, module, call))
            if index == 0 and not self._executor.guard_policy.computing:
                self._root_begins()
                self._open.append((0, module, None))

    def call_ends(self, module: nn.Module, output: Any) -> None:
        """Ends a call of an owner of parameters."""
        while self._open and self._open[-1][1] is module and not in_backward():
            index, _, call = self._open.pop()
            if index == 0:
                self._root_ends()
            else:
                self._ends(index, call, output)

    def give_up(self) -> None:
        """Ends calls that ended in an error which the user caught."""
        for index, *_ in self._open:
            self._executor.leave(index)
        self._open = []

    def forget(self) -> None:
        """Forgets the open calls, after the executor has forgotten them."""
        self._open = []
