"""How it is known that autograd is done with a call of a unit: the gradients of what the call took have been computed.

Owns the hooks on inputs and on the ways out of a call's graph, and the nodes by which autograd tells whether a backward pass
comes through a call. Which calls are waited for is the table's (calls.py), which asks `_takes_part`.

I1: what a forgotten call has left never tells anybody, and keeps no graph.
I2: the gradients of inputs that arguments did not show (in closures, slots, attributes of modules) are waited for, too.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils.hooks import RemovableHandle

from lightning_ptm.runtime.autograd.calls import Calls
from lightning_ptm.runtime.tensors.autograd_graphs import before_outputs, in_backward, nodes_of, tensors_in, ways_out
from lightning_ptm.runtime.units.discovery import Unit
from lightning_ptm.torch_internals import graph_task, is_executed, nodes_made

Told = Callable[[int, int, Any], None]
"""Of a unit and the number of a call."""


class CallCompletion:
    """Of all units.

    Args:
        come: is told when the gradients of a call's inputs have come, before the unit whose output these were begins.
        done: is told behind that.
    """

    def __init__(self, units: Sequence[Unit], come: Told, done: Told) -> None:
        self._units = units
        self._come = come
        self._done = done
        self._inside = [frozenset(map(id, unit.module.parameters())) for unit in units]
        # state
        self._hooks: list[RemovableHandle] = []
        self._nodes: dict[int, tuple[Any, ...]] = {}
        """By number of a call, nodes of its graph by which autograd tells whether a pass goes through it."""
        self._began: dict[int, int] = {}
        """By unit, how many nodes of graphs there were when its last call began."""
        self.calls = Calls(len(units), self._trained, self._takes_part)

    def _trained(self, index: int) -> int:
        return sum(item.parameter.requires_grad for item in self._units[index].parameters)

    def call_begins(self, index: int) -> None:
        """Without `watch_inputs`: what comes from here on is the graph of a unit's call."""
        self._began[index] = nodes_made()

    def watch_inputs(self, index: int, args: Any, kwargs: Any) -> int | None:
        """A unit is called. Returns the number of the call, if its inputs want gradients: it ends when these have come."""
        self._began[index] = nodes_made()
        inputs = [tensor for tensor in tensors_in((args, kwargs)) if tensor.requires_grad]
        if not inputs:
            return None
        call = self.calls.called(index)
        self._nodes[call] = nodes_of(inputs)
        # autograd.grad refuses to say whether it comes to a leaf: where there are no others, the call ends with the pass.
        # What a reentrant checkpoint calls with are leaves, too, and come in a backward pass of its own.
        told_of = [tensor for tensor in inputs if in_backward() or not tensor.is_leaf]
        if told_of:
            done, come = partial(self._done, index, call), partial(self._come, index, call)
            self._hooks.append(torch.autograd.graph.register_multi_grad_hook(told_of, done, mode="all"))
            first: Any = torch.autograd.graph.register_multi_grad_hook(told_of, come, mode="all")
            for tensor, each in zip(told_of, first.handles, strict=True):
                before_outputs(tensor, each.id)
            self._hooks.append(first)
        return call

    def _takes_part(self, call: int) -> bool:
        """Whether the backward pass in progress, in this thread, may go through a call."""
        nodes = self._nodes[call]
        return not nodes or any(map(is_executed, nodes))

    def forget(self) -> None:
        """No call's backward is waited for any more."""
        # A hook over several inputs holds the nodes of all of them, and each node holds the hook. Where units share an input
        # (a bias, an encoder's output) Python's collector cannot see through such a cycle: every graph would stay for ever.
        for handle in self._hooks:
            handle.remove()
        self._hooks = []
        self._nodes = {}

    def watch_ways_out(self, index: int, call: int | None, outputs: Sequence[Tensor]) -> None:
        """The gradients of inputs that arguments did not show (in closures, slots, attributes of modules) are waited for, as
        a call's of their own. Where no output shows, nothing is known, and the call ends with the pass."""
        known = self._nodes[call] if call is not None else ()
        if call is not None and outputs:
            # Besides those of the inputs, which calls of several micro-batches may share, so that nobody waits for a call
            # in vain, and none is missed: what changes an output in place may leave no way to its own node.
            self._nodes[call] += nodes_of(outputs)
        nodes = ways_out(outputs, self._began[index], known, self._inside[index])
        if not nodes and outputs:
            return
        another = self.calls.called(index)
        self._nodes[another] = nodes
        to_come: dict[int, int] = {}

        def executed(*_: Any) -> None:
            task = graph_task()
            if task not in to_come:
                to_come[task] = sum(map(is_executed, nodes))
            to_come[task] -= 1
            if not to_come[task]:
                self._done(index, another, None)

        self._hooks += [node.register_hook(executed) for node in nodes]
