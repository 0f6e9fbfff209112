"""Detection of the end of a call's backward: autograd has computed the gradients of everything that the call took.

Owns the hooks on inputs and on the edges by which a call's graph is left, and the graph nodes that show whether a
backward pass goes through a call. Which calls a unit waits for is decided by the table (calls.py), which uses
`_takes_part`.

I1: hooks of a forgotten call never report anything, and keep no graph alive.
I2: gradients of inputs that are not among the arguments (closures, slots, attributes of modules) are waited for, too.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils.hooks import RemovableHandle

from lightning_ptm.runtime.autograd.calls import Calls
from lightning_ptm.runtime.tensors.autograd_graphs import (
    exit_nodes,
    in_backward,
    nodes_of,
    run_before_output_hooks,
    tensors_in,
)
from lightning_ptm.runtime.units.discovery import Unit
from lightning_ptm.torch_internals import graph_task, is_executed, nodes_made

CallReport = Callable[[int, int, Any], None]
"""Callback with the index of a unit, the number of a call and the gradients."""


class CallCompletion:
    """Hooks that report the end of the backward of each call, for all units.

    Args:
        ready: called when the gradients of a call's inputs have been computed, before the backward of the unit that
            produced the inputs begins.
        done: called for the same event, after `ready`.
    """

    def __init__(self, units: Sequence[Unit], ready: CallReport, done: CallReport) -> None:
        self._units = units
        self._ready = ready
        self._done = done
        self._inside = [frozenset(map(id, unit.module.parameters())) for unit in units]
        # state
        self._hooks: list[RemovableHandle] = []
        self._nodes: dict[int, tuple[Any, ...]] = {}
        """By number of a call, the nodes of its graph from which autograd tells whether a pass goes through it."""
        self._began: dict[int, int] = {}
        """By unit, autograd's sequence number when the unit's last call began: nodes of the call have higher ones."""
        self.calls = Calls(len(units), self._trained, self._takes_part)

    def _trained(self, index: int) -> int:
        return sum(item.parameter.requires_grad for item in self._units[index].parameters)

    def call_begins(self, index: int) -> None:
        """Records where the graph of a unit's call begins, without watching its inputs."""
        self._began[index] = nodes_made()

    def watch_inputs(self, index: int, args: Any, kwargs: Any) -> int | None:
        """Begins a call of a unit. Returns its number if some inputs require gradients.

        Such a call ends when the gradients of these inputs have been computed.
        """
        self._began[index] = nodes_made()
        inputs = [tensor for tensor in tensors_in((args, kwargs)) if tensor.requires_grad]
        if not inputs:
            return None
        call = self.calls.called(index)
        self._nodes[call] = nodes_of(inputs)
        # Autograd cannot say whether autograd.grad reaches a leaf: if all inputs are leaves, the call ends with the
        # pass. Inputs of a reentrant checkpoint's recomputed call are leaves too, but are reached in a backward pass of
        # its own.
        watched = [tensor for tensor in inputs if in_backward() or not tensor.is_leaf]
        if watched:
            done, ready = partial(self._done, index, call), partial(self._ready, index, call)
            self._hooks.append(torch.autograd.graph.register_multi_grad_hook(watched, done, mode="all"))
            first: Any = torch.autograd.graph.register_multi_grad_hook(watched, ready, mode="all")
            for tensor, each in zip(watched, first.handles, strict=True):
                run_before_output_hooks(tensor, each.id)
            self._hooks.append(first)
        return call

    def _takes_part(self, call: int) -> bool:
        """Whether the backward pass that runs in this thread may go through a call."""
        nodes = self._nodes[call]
        return not nodes or any(map(is_executed, nodes))

    def forget(self) -> None:
        """Forgets all calls: their backward is not waited for any more."""
        # A hook over several inputs holds the nodes of all inputs, and each node holds the hook. Python's collector
        # cannot see such a cycle if units share an input (a bias, an encoder's output), so every graph would stay
        # alive.
        for handle in self._hooks:
            handle.remove()
        self._hooks = []
        self._nodes = {}

    def watch_graph_exits(self, index: int, call: int | None, outputs: Sequence[Tensor]) -> None:
        """Waits for the gradients of inputs that the arguments do not show, as for a call of their own.

        Such inputs come from closures, slots or attributes of modules. If there are no outputs, the graph is unknown,
        and the call ends with the pass.
        """
        known = self._nodes[call] if call is not None else ()
        if call is not None and outputs:
            # In addition to the nodes of the inputs, which calls of several micro-batches may share: so no call is
            # waited for in vain, and none is missed. An operation that changes an output in place may leave no edge to
            # the output's own node.
            self._nodes[call] += nodes_of(outputs)
        nodes = exit_nodes(outputs, self._began[index], known, self._inside[index])
        if not nodes and outputs:
            return
        another = self.calls.called(index)
        self._nodes[another] = nodes
        remaining: dict[int, int] = {}

        def executed(*_: Any) -> None:
            task = graph_task()
            if task not in remaining:
                remaining[task] = sum(map(is_executed, nodes))
            remaining[task] -= 1
            if not remaining[task]:
                self._done(index, another, None)

        self._hooks += [node.register_hook(executed) for node in nodes]
