"""The part of a forward that this rank's pipeline stage computes, while the module's own code runs from its beginning.

Every rank runs the module's unchanged step. Blocks of other stages are not computed: they answer with a tensor that has
a shape and no values. The first own block takes the hidden states that the stage before has sent in place of its first
argument. After the last own block the step ends, except on the last stage, which computes the loss. A stage may have several
runs of blocks: in training each run has forwards of its own, in which no other blocks are computed.

Owns where this rank is in the forward of one micro-batch. Knows units and tensors, not ranks.

I1: in each forward, blocks are called once each, in their order. The first argument of a stage's first block is what the
    block before it has returned, and nothing else.
I2: a tensor of a block that was not computed takes part in nothing: any operation on it is an error, so no loss can use
    it in silence.
I3: a loss gets gradients of a block through the block's output alone. A loss that arises inside of a block would be
    lost on the stages before the last one. A stage finds it in the graph of a loss that it computes (the last stage in
    training, every stage in a `WholeStep`), and in what its modules keep.
I4: code outside of blocks draws the same random numbers on all stages, since each block draws from a stream of its own,
    derived from torch's state at its call. So noise that a step draws before the first block is equal on the stage that
    computes the loss.
I5: other stages get nothing of a block but its output. A step that goes on after the stage's last block, with the output of
    the model's last block (`WholeStep`), shows whether its loss depends on anything else (trainer/stage_check.py).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from lightning_ptm.errors import InternalError, UsageError
from lightning_ptm.memory.backend import Backend
from lightning_ptm.runtime.autograd.saved_tensors import inside_checkpoint
from lightning_ptm.runtime.tensors import random_states
from lightning_ptm.runtime.tensors.autograd_graphs import in_backward
from lightning_ptm.runtime.units.discovery import Unit
from lightning_ptm.torch_internals import make_wrapper_subclass, no_torch_function, nodes_made, number_of_node

_REMEDY = "or train with pipeline_parallel_size=1"


class StageEnds(BaseException):
    """Ends a step after the last block of a stage. No `except Exception` of the user's code catches it."""


class AbsentOutput(Tensor):
    """The answer of a block that another stage computes: shape, dtype and device without values (I2).

    Args:
        like: a tensor of the same shape, dtype and device.
        block: the block's name.
    """

    @staticmethod
    def __new__(cls: Any, like: Tensor, block: str) -> AbsentOutput:
        made: AbsentOutput = make_wrapper_subclass(cls, like.shape, dtype=like.dtype, device=like.device)
        return made

    def __init__(self, like: Tensor, block: str) -> None:
        self.block = block

    __torch_function__ = no_torch_function

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"AbsentOutput({self.block!r}, shape={tuple(self.shape)})"

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        absent = next(each for each in _tensors((args, kwargs or {})) if isinstance(each, AbsentOutput))
        if func is torch.ops.aten.detach.default:
            return AbsentOutput(absent, absent.block)
        raise UsageError(
            f"{func} was called on the output of {absent.block}, which another pipeline stage computes; between stages, a "
            f"block's output can only be the next block's first argument, and a loss can use the last block's alone; leave "
            f"this operation to a block, {_REMEDY}"
        )


class _Received:
    """Hidden states of the stage before, until the first block takes them; after a backward pass, their gradient.

    The graph of a micro-batch refers to it, so it refers to nothing of the graph: Python's collector would not see the cycle.
    """

    def __init__(self, value: Tensor | None) -> None:
        self.value = value
        self.gradient: Tensor | None = None

    def taken(self) -> Tensor:
        """Returns the hidden states, and forgets them."""
        value, self.value = self.value, None
        if value is None:
            raise InternalError("a stage's first block was called without hidden states")
        return value


class _Entry(torch.autograd.Function):
    """Makes received hidden states an input of the graph, and takes their gradient."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, received: _Received) -> Tensor:
        ctx.received = received
        return received.taken()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[None, None]:
        (ctx.received.gradient,) = gradients
        return None, None


class WholeStep(Protocol):
    """Exchanges between stages in a step that does not end after the stage's last block (I5)."""

    def receive(self) -> Tensor:
        """Returns the hidden states for the first block of a run."""

    def hand_on(self, output: Tensor) -> None:
        """Sends the output of a run's last block to the next stage."""

    def see(self, block: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        """Receives the arguments of a block other than hidden states; called for the blocks of all stages."""

    def last_output(self, own: Tensor | None) -> Tensor:
        """Returns the output of the model's last block on all stages. Collective among the stages."""

    def blocks_end(self) -> None:
        """Called after the model's last block, on all stages; may raise `StageEnds`, on all, to end the step there."""


class MicroForward:
    """The forward of one micro-batch on one stage, until its backward.

    Args:
        runs: the units of each run that it computes.
        received: the hidden states of the stage before; None for the model's first run, and with `whole`.
        whole: exchanges of a step that goes on to its end; None: the step ends after the last block.
    """

    def __init__(
        self,
        runs: Sequence[range],
        received: Tensor | None,
        whole: WholeStep | None = None,
    ) -> None:
        self.firsts = {run.start for run in runs}
        self.lasts = {run.stop - 1 for run in runs}
        self.units = frozenset(unit for run in runs for unit in run)
        self.whole = whole
        self.received = _Received(received)
        self.output: Tensor | None = None
        """What the last block that it computes has returned."""
        self.calls: list[tuple[int, int, int]] = []
        """By call of an own block: its unit, the number of its graph's first node, and that of the first node behind it."""
        self.next = 1
        """The unit that has to be called next."""
        self.last: Any = None
        """What the block before it has returned."""

    def taken_gradient(self) -> Tensor:
        """Returns the gradient of the received hidden states, and forgets it; zeros without a backward pass."""
        gradient, self.received.gradient = self.received.gradient, None
        if gradient is None:
            assert self.output is not None
            return torch.zeros_like(self.output)
        return gradient


class StageCut:
    """The cut of a module into stages, on one rank.

    Args:
        units: all units, the root first.
        runs: the units of each run of blocks, in order; run i is on stage i modulo `stages`.
        stage: this rank's stage.
        stages: how many there are.
        backend: of the device that computes; None if no random numbers matter (on the meta device).
    """

    def __init__(
        self, units: Sequence[Unit], runs: Sequence[range], stage: int, stages: int, backend: Backend | None = None
    ) -> None:
        self._units = units
        self._backend = backend
        self._stage = stage
        self._runs = runs[stage::stages]
        """Runs of blocks of this stage."""
        self.chunks = len(self._runs)
        """Number of runs of blocks of each stage. Other classes read it."""
        self._firsts = {run.start for run in runs[1:]}
        self._is_last = stage == stages - 1
        # state
        self._micro: MicroForward | None = None

    def forward(self, step: Callable[[], Any], received: Tensor | None, chunk: int = 0) -> tuple[MicroForward, Any]:
        """Runs the module's step for one micro-batch and one run of blocks.

        Args:
            step: the module's step.
            received: the hidden states of the stage before.
            chunk: index of the run among those of the stage.

        Returns:
            The forward, and what the step has returned; None where it was ended after the run's last block.

        Raises:
            UsageError: the module cannot be divided into stages.
        """
        return self._forward(step, MicroForward([self._runs[chunk]], received))

    def forward_whole(self, step: Callable[[], Any], whole: WholeStep) -> tuple[MicroForward, Any]:
        """Runs the module's step once to its end.

        Returns:
            The forward, and what the step has returned; None where `whole` has ended it.

        Raises:
            UsageError: the module cannot be divided into stages.
        """
        return self._forward(step, MicroForward(self._runs, None, whole))

    def _forward(self, step: Callable[[], Any], micro: MicroForward) -> tuple[MicroForward, Any]:
        self._micro = micro
        result = None
        try:
            result = step()
        except StageEnds:
            pass
        finally:
            self._micro = None
            micro.last = None
        last = max(micro.lasts)
        if (last == len(self._units) - 1 or micro.whole is not None) and micro.next != len(self._units):
            raise UsageError(
                f"a step has not called {self._name(micro.next)}; with pipeline_parallel_size, each step calls every block "
                f"once, in the order of the module; do so, {_REMEDY}"
            )
        if last < len(self._units) - 1 and micro.output is None:
            raise UsageError(
                f"a step has returned without a call of {self._name(last)}, the last block of pipeline stage "
                f"{self._stage}, so there is nothing to send to the next stage; call every block in each step, {_REMEDY}"
            )
        return micro, result

    def wrapper(self, unit: int, *, absent: bool) -> Callable[..., Any]:
        """Returns the replacement of a block's call: a function of the original call and its arguments."""
        if absent:
            return lambda original, *args, **kwargs: self._answer(unit, args, kwargs)
        return lambda original, *args, **kwargs: self._call(unit, original, *args, **kwargs)

    def check_loss(self, micro: MicroForward, loss: Tensor | None) -> None:
        """Checks that no loss arises inside of this rank's blocks (I3).

        Args:
            loss: that of the step, if it has come to its end on this stage.

        Raises:
            UsageError: one does.
        """
        if loss is not None and loss.grad_fn is not None:
            self._check_graph(micro, loss)
        for unit in micro.units:
            for module in self._units[unit].module.modules():
                for name, value in vars(module).items():
                    if not name.startswith("_") and any(each.grad_fn is not None for each in _kept_in(value)):
                        self._refuse_inner_loss(unit, f"{type(module).__name__}.{name} keeps a tensor with its graph")

    def _check_graph(self, micro: MicroForward, loss: Tensor) -> None:
        is_last = len(self._units) - 1 in micro.lasts
        ends = {id(micro.output.grad_fn)} if is_last and micro.output is not None else set()
        todo, seen = [loss.grad_fn], set(ends)
        while todo:
            node = todo.pop()
            if node is None or id(node) in seen:
                continue
            seen.add(id(node))
            number = number_of_node(node)
            for unit, first, behind in micro.calls:
                if first <= number < behind:
                    self._refuse_inner_loss(unit, f"the loss uses a {type(node).__name__} of it")
            todo += [each for each, _ in node.next_functions]

    def _refuse_inner_loss(self, unit: int, what: str) -> None:
        raise UsageError(
            f"{what} beside the output of {self._name(unit)}: a loss that arises inside of a block would be lost on all "
            f"pipeline stages but the last; compute losses from the last block's output alone (detach what a module "
            f"keeps), {_REMEDY}"
        )

    def _name(self, unit: int) -> str:
        return self._units[unit].name

    def _answer(self, unit: int, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Tensor:
        return self._absent(self._begins(unit, args, kwargs), unit, args)

    def _absent(self, micro: MicroForward, unit: int, args: Sequence[Any]) -> Tensor:
        whole = micro.whole if unit == len(self._units) - 1 else None
        answer: Tensor = AbsentOutput(args[0], self._name(unit)) if whole is None else whole.last_output(None)
        self._ended(unit, answer)
        if whole is not None:
            whole.blocks_end()
        return answer

    def _call(self, unit: int, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if in_backward():  # it is recomputed
            with self._random_numbers(unit):
                return original(*args, **kwargs)
        micro = self._begins(unit, args, kwargs)
        if unit not in micro.units:
            return self._absent(micro, unit, args)
        began = nodes_made()
        if unit in micro.firsts and unit > 1:
            if inside_checkpoint():
                raise UsageError(
                    f"{self._name(unit)}, the first block of a pipeline stage, was called inside of torch.utils.checkpoint; "
                    f"leave that out, and use recompute='all'"
                )
            args = (self._entered(micro), *args[1:])
        with self._random_numbers(unit):
            output = original(*args, **kwargs)
        if not isinstance(output, Tensor):
            raise UsageError(
                f"{self._name(unit)} ({type(self._units[unit].module).__name__}) returned a {type(output).__name__}, and "
                f"pipeline stages hand on one tensor of hidden states; let blocks return a tensor, {_REMEDY}"
            )
        micro.calls.append((unit, began, nodes_made()))
        self._ended(unit, output)
        if unit in micro.lasts:
            self._run_ends(micro, unit, output)
        return output

    def _run_ends(self, micro: MicroForward, unit: int, output: Tensor) -> None:
        micro.output = output
        if unit == len(self._units) - 1:
            if micro.whole is not None:
                micro.whole.last_output(output)
                micro.whole.blocks_end()
            return
        if micro.whole is not None:
            micro.whole.hand_on(output)
        else:
            raise StageEnds

    def _random_numbers(self, unit: int) -> AbstractContextManager[None]:
        """Context of a block's call, which draws random numbers of its own (I4)."""
        return nullcontext() if self._backend is None else random_states.derived(unit, self._backend)

    def _entered(self, micro: MicroForward) -> Tensor:
        if micro.whole is not None:
            micro.received.value = micro.whole.receive()
        if not torch.is_grad_enabled():
            return micro.received.taken()
        entered: Tensor = _Entry.apply(torch.empty(0, requires_grad=True), micro.received)
        return entered

    def _begins(self, unit: int, args: Sequence[Any], kwargs: Mapping[str, Any]) -> MicroForward:
        micro, name = self._micro, self._name(unit)
        if micro is None:
            raise UsageError(
                f"{name} was called outside of a step of the Trainer, and its stage alone has its weights "
                f"(pipeline_parallel_size); call the module in its steps, or after the run"
            )
        if unit != micro.next:
            expected = self._name(micro.next) if micro.next < len(self._units) else "no block"
            raise UsageError(
                f"{name} was called where {expected} was expected; with pipeline_parallel_size, each step calls every block "
                f"once, in the order of the module; do so (generate texts after the run), {_REMEDY}"
            )
        if not args or not isinstance(args[0], Tensor):
            raise UsageError(
                f"{name} was called without a tensor as its first argument, and pipeline stages hand on hidden states there; "
                f"pass them first, {_REMEDY}"
            )
        if unit in self._firsts and args[0] is not micro.last:
            raise UsageError(
                f"the first argument of {name}, the first block of a pipeline stage, is not what {self._name(unit - 1)} has "
                f"returned; blocks have to follow each other with nothing in between; move operations on hidden states into "
                f"blocks, {_REMEDY}"
            )
        if micro.whole is not None:
            micro.whole.see(name, args if unit == 1 else (None, *args[1:]), kwargs)
        return micro

    def _ended(self, unit: int, output: Any) -> None:
        assert self._micro is not None
        self._micro.next, self._micro.last = unit + 1, output


def _kept_in(value: Any) -> Iterator[Tensor]:
    """Yields the tensors in a value that a module keeps, and in the attributes of an object."""
    yield from _tensors(value)
    if not isinstance(value, (Tensor, nn.Module, type)):
        yield from _tensors(list(getattr(value, "__dict__", {}).values()))


def _tensors(value: Any) -> Iterator[Tensor]:
    """Yields the tensors in a value, in its mappings and sequences."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for each in value:
            yield from _tensors(each)
    elif isinstance(value, Mapping):
        yield from _tensors(list(value.values()))
