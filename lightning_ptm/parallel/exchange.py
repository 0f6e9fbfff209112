"""Tensor groups: differentiable sums and gathers of activations between ranks, and random numbers for divided regions.

Owns a rank's index in its group, and the random states of divided regions. The ranks of a group compute on the same data,
each with its parts of parameters. A *whole* value is the same on all ranks, and so is its gradient; of a *divided* value,
each rank has its part.

I1: a gradient that leaves `enter` is whole.
I2: outside of divided regions all ranks draw the same random numbers. Inside, each rank draws its own; the random state
    after the region depends only on whether the rank drew any, not on how many.
I3: while two halves of a batch compute in turns (`taking_turns`), a sum in a forward is started, and then the other half
    computes until it starts one; in a backward two nodes start and await a sum, and other nodes run between them
    (two_batches.py). Each half has a divided region and random numbers of its own.
"""

from __future__ import annotations

import dataclasses
import hashlib
import weakref
from abc import abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable
from typing_extensions import override

from lightning_ptm.comm.process_group import Exchange, NearExchange
from lightning_ptm.comm.shm_collectives import ShmCollectives
from lightning_ptm.comm.work import StartedExchange
from lightning_ptm.memory.backend import Backend
from lightning_ptm.planning.mesh import Axis, GridAxis
from lightning_ptm.runtime.autograd.recompute import last_recomputed, once
from lightning_ptm.runtime.ranks.activation_exchange import ActivationExchange
from lightning_ptm.torch_internals import version_of


class Turns(Protocol):
    """The halves of a batch that compute in turns."""

    def change(self) -> None:
        """Lets the other half compute; returns when this one goes on."""

    def entered(self, node: Any) -> None:
        """Records the node that starts the sum of a gradient: what follows it in the forward is behind a sum."""


@dataclasses.dataclass(frozen=True, slots=True)
class HalfState:
    """State of a half of a batch, swapped in while that half computes.

    Attributes:
        layer: the layer that exchanges.
        outside: random states before its divided region, and those with which that began; None outside of one.
        random: random states, by device.
    """

    layer: str = ""
    outside: tuple[Sequence[Tensor], Sequence[Tensor]] | None = None
    random: Sequence[Tensor] = ()


class TensorGroup:
    """The ranks over which parameters are cut, with the exchanges that layers need.

    Args:
        size: number of ranks.
        index: index of this rank, and of its part.
    """

    def __init__(self, size: int, index: int) -> None:
        self.size = size
        self.index = index
        self.layer = ""
        """Name in the plan of the layer that exchanges now; the ranks compare it, to detect exchanges that do not match."""
        self.in_step = False
        """Whether a training step or an evaluation batch is in progress."""
        self._entered: tuple[weakref.ref[Tensor], int, Tensor] | None = None
        self._turns: Turns | None = None
        """The halves of a batch that compute in turns now; None: the batch is computed as a whole (I3)."""

    # -- differentiable -----------------------------------------------------------------------------------------------

    def enter(self, value: Tensor) -> Tensor:
        """Passes a whole value on to divided layers; its gradient is the sum over the ranks.

        Layers that take the same value one after the other share one sum.
        """
        if not (torch.is_grad_enabled() and value.requires_grad):
            return value
        if self._entered is not None:
            known, version, entered = self._entered
            if known() is value and version_of(value) == version:
                return entered
        self.count_backward(self._summed(value))
        if self._turns is None:
            out: Tensor = _Enter.apply(value, self)
        else:
            gradient = _Gradient()
            out = _StartSum.apply(_AwaitSum.apply(value, gradient, last_recomputed()), self, gradient)
            self._turns.entered(out.grad_fn)
        self._entered = (weakref.ref(value), version_of(value), out)
        return out

    def forget_entered(self) -> None:
        """Forgets the value that entered last, which later layers do not take, as it would keep its graph alive."""
        self._entered = None

    def add_up(self, value: Tensor) -> Tensor:
        """Returns the sum over the ranks, which is whole."""
        self.forget_entered()
        out: Tensor = _AddUp.apply(value, self)
        return out

    def put_together(self, value: Tensor) -> Tensor:
        """Returns the ranks' parts concatenated along the last dimension, which is whole."""
        self.forget_entered()
        out: Tensor = _PutTogether.apply(value, self)
        return out

    def part_of(self, value: Tensor) -> Tensor:
        """Returns this rank's part of a whole value along the last dimension."""
        self.count_backward(value.nbytes * (self.size - 1) // self.size)
        out: Tensor = _PartOf.apply(value, self)
        return out

    # -- halves of a batch --------------------------------------------------------------------------------------------

    @contextmanager
    def taking_turns(self, turns: Turns | None) -> Iterator[None]:
        """Context in which two halves of a batch compute in turns; None: in which they do not, for a check of a block."""
        before, self._turns = self._turns, turns
        try:
            yield
        finally:
            self._turns = before

    def half_state(self) -> HalfState:
        """Returns what belongs to the half of a batch that computes now."""
        return HalfState(self.layer)

    def resume(self, state: HalfState) -> None:
        """Continues with the state of a half of a batch."""
        self.forget_entered()
        self.layer = state.layer

    def second_half(self) -> HalfState:
        """Returns the state with which the second half of a batch begins: its random numbers follow from those of the
        first."""
        return HalfState()

    def after_halves(self, first_began: HalfState, second_began: HalfState, second_ended: HalfState) -> None:
        """Continues with the state of the first half, after both have ended. If only the second one has drawn random
        numbers, one is drawn here, so that the next batch gets others."""

    def sum_in_turn(self, value: Tensor) -> Tensor:
        """Returns the sum over the ranks in a forward; the other half of the batch, if there is one, computes meanwhile."""
        turns = self._turns
        if turns is None:
            return self.sum(value)
        started = self.start_sum(value)
        turns.change()
        return started.wait()

    # -- implemented by subclasses ------------------------------------------------------------------------------------

    @abstractmethod
    def sum(self, value: Tensor) -> Tensor:
        """Returns the sum over the ranks, in new memory."""

    def start_sum(self, value: Tensor) -> StartedExchange:
        """Starts a sum over the ranks, in new memory."""
        return StartedExchange(self.sum(value))

    @abstractmethod
    def gather(self, value: Tensor) -> Tensor:
        """Returns all ranks' values, (size, *shape)."""

    def meet_again(self) -> None:
        """Has the ranks synchronize before their next exchange: user code that may run on one rank alone comes between."""

    @contextmanager
    def user_exchange(self) -> Iterator[None]:
        """Context of exchanges that user code may cause on one rank alone: the ranks synchronize before each and after."""
        self.meet_again()
        try:
            yield
        finally:
            self.meet_again()

    @abstractmethod
    def sum_of_piece(self, pieces: Tensor) -> Tensor:
        """Reduce-scatter: returns the sum over the ranks of this rank's piece, in new memory.

        Args:
            pieces: (size, *shape), a piece of at least one dimension for each rank.
        """

    @abstractmethod
    def swap(self, pieces: Tensor) -> Tensor:
        """All-to-all: returns the pieces that all ranks have for this one, (size, *shape), by rank.

        Args:
            pieces: (size, *shape), a piece for each rank.
        """

    @abstractmethod
    def shift(self, value: Tensor) -> Tensor:
        """Sends a value to the next rank in a ring; returns that of the rank before."""

    def kept(self, exchange: Callable[[], Tensor]) -> Tensor:
        """Returns the result of an exchange; a recomputed forward gets the result of the first forward, without exchange."""
        return once(exchange)

    @contextmanager
    def of_layer(self, layer: str) -> Iterator[None]:
        """Context in which exchanges belong to a layer."""
        before, self.layer = self.layer, layer
        try:
            yield
        finally:
            self.layer = before

    @contextmanager
    def of_step(self) -> Iterator[None]:
        """Context of a training step or an evaluation batch."""
        self.in_step = True
        try:
            yield
        finally:
            self.in_step = False

    def count_backward(self, sent_bytes: int) -> None:
        """Counts the bytes that the backward pass of a forward will send to other ranks, by ring collectives."""

    def _summed(self, value: Tensor) -> int:
        """Bytes that a rank sends for a sum."""
        return 2 * value.nbytes * (self.size - 1) // self.size

    def begin_divided(self) -> None:
        """Begins a divided region, in which this rank draws its own random numbers; no effect inside such a region."""

    def end_divided(self) -> None:
        """Ends the divided region; no effect outside of one."""

    def forget(self) -> None:
        """Cleans up after a forward that raised: ends its divided region and forgets the value that entered last."""
        self.forget_entered()
        self.end_divided()

    @contextmanager
    def seeded(self, seed: int) -> Iterator[None]:
        """Context with random numbers of a seed; afterwards the random states are as before."""
        yield


class RankGroup(TensorGroup):
    """Tensor group of processes. In a run (`connect`), the ranks check that they agree before they exchange.

    Args:
        group: this rank's process group of torch.distributed.
        backend: backend of the device that computes.
        axis: the axis along which its ranks differ.
    """

    def __init__(self, group: dist.ProcessGroup, backend: Backend, axis: Axis | GridAxis = Axis.TENSOR) -> None:
        super().__init__(group.size(), group.rank())
        self._axis = axis
        self._group = group
        self._run: ActivationExchange | None = None
        self.exchanges = 0
        """Number of collectives so far."""
        self._backend = backend
        self._draws = [torch.device("cpu"), *([] if backend.random_state() is None else [backend.device])]
        """Devices that have a random state."""
        self._outside: tuple[Sequence[Tensor], Sequence[Tensor]] | None = None
        """The random states before a divided region, and those with which it began; None outside of one."""

    @override
    def sum(self, value: Tensor) -> Tensor:
        return self._exchange("sum", value, *self._sum_of(value))

    @override
    def start_sum(self, value: Tensor) -> StartedExchange:
        collective, near = self._sum_of(value)
        self.exchanges += 1
        if self._run is None:
            return StartedExchange(collective(self._group, False)[0])
        return self._run.start(self._axis, self.layer, "sum", collective, value, near)

    def _sum_of(self, value: Tensor) -> tuple[Exchange, NearExchange | None]:
        def collective(group: dist.ProcessGroup, later: bool) -> tuple[Tensor, Any]:
            out = value.clone(memory_format=torch.contiguous_format)
            return out, dist.all_reduce(out, group=group, async_op=later)

        def near(shm_collectives: ShmCollectives, word: int) -> Tensor:
            return shm_collectives.sum(value, word)

        return collective, near if ShmCollectives.adds(value.dtype) else None

    @override
    def gather(self, value: Tensor) -> Tensor:
        def collective(group: dist.ProcessGroup, later: bool) -> tuple[Tensor, Any]:
            given = value.contiguous()
            out = value.new_empty((self.size * value.shape[0], *value.shape[1:]) if value.dim() else (self.size,))
            handle = dist.all_gather_into_tensor(out, given, group=group, async_op=later)
            return out.view(self.size, *value.shape), handle

        return self._exchange(
            "gather", value, collective, lambda shm_collectives, word: shm_collectives.gathered(value, word)
        )

    def connect(self, run: ActivationExchange | None) -> None:
        """Sends further exchanges through a run's `ActivationExchange`; None: directly through the process group."""
        self._run = run

    @property
    def sums_at_once(self) -> bool:
        """Whether sums of a run are done when `start_sum` returns."""
        return self._run is not None and self._run.done_at_once(self._axis)

    def computes(self, batch: str) -> None:
        """Announces the batch that the ranks compute next, as a text that must be the same on all ranks."""
        if self._run is not None:
            self._run.computes(batch)

    @override
    def meet_again(self) -> None:
        if self._run is not None:
            self._run.meet_again()

    @override
    def sum_of_piece(self, pieces: Tensor) -> Tensor:
        if self._backend.collectives == "gloo":  # its reduce-scatter sends all pieces to all ranks, and adds in 16 bits
            return self._swap("sum of pieces", pieces).sum(0)
        pieces = pieces.contiguous()

        def reduce_scatter(group: dist.ProcessGroup, later: bool) -> tuple[Tensor, Any]:
            out = torch.empty_like(pieces[0])
            return out, dist.reduce_scatter_single(out, pieces.flatten(0, 1), group=group, async_op=later)

        return self._exchange("sum of pieces", pieces, reduce_scatter)

    @override
    def swap(self, pieces: Tensor) -> Tensor:
        return self._swap("swap", pieces)

    def _swap(self, name: str, pieces: Tensor) -> Tensor:
        pieces = pieces.contiguous()

        def collective(group: dist.ProcessGroup, later: bool) -> tuple[Tensor, Any]:
            out = torch.empty_like(pieces)
            return out, dist.all_to_all_single(out, pieces, group=group, async_op=later)

        return self._exchange(name, pieces, collective, lambda near, word: near.pieces(pieces, word))

    @override
    def shift(self, value: Tensor) -> Tensor:
        value = value.contiguous()
        sent, received = [0] * self.size, [0] * self.size
        sent[(self.index + 1) % self.size] = received[self.index - 1] = value.numel()

        def collective(group: dist.ProcessGroup, later: bool) -> tuple[Tensor, Any]:
            # An all-to-all in which the others get nothing: one handle, where two messages have two.
            out = torch.empty_like(value)
            handle = dist.all_to_all_single(out.view(-1), value.view(-1), received, sent, group=group, async_op=later)
            return out, handle

        return self._exchange("shift", value, collective, lambda near, word: near.shifted(value, word))

    def _exchange(self, name: str, value: Tensor, collective: Exchange, near: NearExchange | None = None) -> Tensor:
        """Runs a collective and returns its result; every exchange of the group but `start_sum` goes through this method.

        Args:
            name: name of the collective.
            value: tensor to send.
            collective: issues the collective on a process group, asynchronously or not.
            near: does the same over shared memory, between ranks of one machine.
        """
        self.exchanges += 1
        if self._run is None:
            return collective(self._group, False)[0]
        return self._run.issue(self._axis, self.layer, name, collective, value, near)

    # -- random numbers -----------------------------------------------------------------------------------------------

    @override
    @torch.compiler.disable
    def begin_divided(self) -> None:
        if self._outside is None:
            outside = self._random_states()
            began = self._seeded(_digest(outside) * self.size + self.index)
            self._outside = outside, began
            self._set_random_states(began)

    @override
    @torch.compiler.disable
    def end_divided(self) -> None:
        if self._outside is None:
            return
        (outside, began), self._outside = self._outside, None
        drawn = [not torch.equal(now, before) for now, before in zip(self._random_states(), began, strict=True)]
        self._set_random_states(outside)
        for device, some in zip(self._draws, drawn, strict=True):
            if some:
                # With an explicit dtype: the default differs in a backward pass, where a forward may be recomputed.
                torch.rand((), dtype=torch.float32, device=device)

    @override
    @contextmanager
    def seeded(self, seed: int) -> Iterator[None]:
        before = self._random_states()
        self._set_random_states(self._seeded(seed))
        try:
            yield
        finally:
            self._set_random_states(before)

    @override
    def half_state(self) -> HalfState:
        return HalfState(self.layer, self._outside, self._random_states())

    @override
    def resume(self, state: HalfState) -> None:
        super().resume(state)
        self._outside = state.outside
        self._set_random_states(state.random)

    @override
    def second_half(self) -> HalfState:
        # Other numbers than those of any divided region that begins in this state.
        return HalfState(random=self._seeded(_digest(self._random_states(), b"second half")))

    @override
    def after_halves(self, first_began: HalfState, second_began: HalfState, second_ended: HalfState) -> None:
        states = first_began.random, self._random_states(), second_began.random, second_ended.random
        for device, began, now, others, other in zip(self._draws, *states, strict=True):
            if torch.equal(began, now) and not torch.equal(others, other):
                torch.rand((), dtype=torch.float32, device=device)

    def _seeded(self, seed: int) -> list[Tensor]:
        """Random states of a seed."""
        return [torch.Generator(device).manual_seed(seed).get_state() for device in self._draws]

    def _random_states(self) -> list[Tensor]:
        of_device = self._backend.random_state()
        return [torch.get_rng_state(), *([] if of_device is None else [of_device])]

    def _set_random_states(self, states: Sequence[Tensor]) -> None:
        torch.set_rng_state(states[0])
        for state in states[1:]:
            self._backend.set_random_state(state)


def _digest(states: Sequence[Tensor], salt: bytes = b"") -> int:
    """Digest of random states, of 56 bits."""
    data = b"".join(state.numpy().tobytes() for state in states)
    return int.from_bytes(hashlib.blake2b(data + salt, digest_size=7).digest(), "big")


class _Enter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, value: Tensor, group: TensorGroup) -> Tensor:
        ctx.group, ctx.layer = group, group.layer
        return value.view_as(value)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        with ctx.group.of_layer(ctx.layer):
            return ctx.group.sum(gradient), None


class _Gradient:
    """The sum of a gradient that a node of the backward starts, and another one awaits."""

    started: StartedExchange | None = None


class _StartSum(torch.autograd.Function):
    """Starts the sum of the gradient. What it returns is on its way."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, group: TensorGroup, gradient: _Gradient) -> Tensor:
        ctx.group, ctx.layer, ctx.gradient = group, group.layer, gradient
        return value.view_as(value)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        with ctx.group.of_layer(ctx.layer):
            started = ctx.gradient.started = ctx.group.start_sum(gradient)
        return started.result, None, None


class _AwaitSum(torch.autograd.Function):
    """Awaits the sum of the gradient that the node after it in the forward, a `_StartSum`, has started. Meanwhile it
    recomputes the unit before, whose backward comes next."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, gradient: _Gradient, recompute: Callable[[], None] | None) -> Tensor:
        ctx.gradient, ctx.recompute = gradient, recompute
        return value.view_as(value)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, on_its_way: Tensor) -> tuple[Tensor, None, None]:
        started, ctx.gradient.started = ctx.gradient.started, None
        recompute, ctx.recompute = ctx.recompute, None
        if recompute is not None:
            recompute()
        return started.wait(), None, None


class _AddUp(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, value: Tensor, group: TensorGroup) -> Tensor:
        return group.kept(lambda: group.sum_in_turn(value))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient, None


class _PutTogether(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, value: Tensor, group: TensorGroup) -> Tensor:
        ctx.group = group
        return group.kept(lambda: torch.cat(group.gather(value).unbind(0), -1))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient.chunk(ctx.group.size, -1)[ctx.group.index], None


class _PartOf(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, value: Tensor, group: TensorGroup) -> Tensor:
        ctx.group, ctx.layer = group, group.layer
        return value.chunk(group.size, -1)[group.index].contiguous()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        with ctx.group.of_layer(ctx.layer):
            return torch.cat(ctx.group.gather(gradient).unbind(0), -1), None
