"""What the ranks of a tensor group exchange: differentiable sums and gathers of activations that are whole.

Owns a rank's place in its group, and the random numbers of what is divided. Ranks of a group compute the same on the same
data, each with its parts of parameters. What is *whole* is the same on all of them, and so is its gradient; of what is
*divided*, each has its part.

I1: a gradient that leaves `enter` is whole. I2: outside of divided regions all ranks draw the same random numbers; inside
each draws its own, and how many it drew there changes nothing outside but that some were drawn.
"""

from __future__ import annotations

import hashlib
import weakref
from abc import abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable
from typing_extensions import override

from lightning_ptm.comm.process_group import Exchange, NearExchange
from lightning_ptm.comm.shm_collectives import ShmCollectives
from lightning_ptm.memory.backend import Backend
from lightning_ptm.runtime.autograd.recompute import once
from lightning_ptm.runtime.ranks.activation_exchange import ActivationExchange
from lightning_ptm.torch_internals import version_of


class TensorGroup:
    """The ranks among which parameters are cut, and what layers ask of them.

    Args:
        size: how many they are.
        index: which one this is: the part that it has.
    """

    def __init__(self, size: int, index: int) -> None:
        self.size = size
        self.index = index
        self.layer = ""
        """The layer whose exchanges these are now, by its name in the plan: by it ranks tell exchanges of one shape apart."""
        self.in_step = False
        """Whether a step of the user's is in progress."""
        self._entered: tuple[weakref.ref[Tensor], int, Tensor] | None = None

    # -- differentiable -----------------------------------------------------------------------------------------------

    def enter(self, value: Tensor) -> Tensor:
        """A whole value for layers that are divided: itself. Their gradients are added up over the ranks; of layers that
        take the same value one after the other, together."""
        if not (torch.is_grad_enabled() and value.requires_grad):
            return value
        if self._entered is not None:
            known, version, entered = self._entered
            if known() is value and version_of(value) == version:
                return entered
        self.sends_back(self._summed(value))
        out: Tensor = _Enter.apply(value, self)
        self._entered = (weakref.ref(value), version_of(value), out)
        return out

    def leave_entered(self) -> None:
        """Layers behind take another value: what has entered is forgotten, which would keep a graph alive."""
        self._entered = None

    def add_up(self, value: Tensor) -> Tensor:
        """The sum over the ranks: whole."""
        self.leave_entered()
        out: Tensor = _AddUp.apply(value, self)
        return out

    def put_together(self, value: Tensor) -> Tensor:
        """The ranks' parts along the last dimension, one after the other: whole."""
        self.leave_entered()
        out: Tensor = _PutTogether.apply(value, self)
        return out

    def part_of(self, value: Tensor) -> Tensor:
        """This rank's part of a whole value along the last dimension."""
        self.sends_back(value.nbytes * (self.size - 1) // self.size)
        out: Tensor = _PartOf.apply(value, self)
        return out

    # -- what a kind of group does ------------------------------------------------------------------------------------

    @abstractmethod
    def sum(self, value: Tensor) -> Tensor:
        """The sum over the ranks, in memory of its own."""

    @abstractmethod
    def gather(self, value: Tensor) -> Tensor:
        """All ranks' values, (size, *shape)."""

    def meet_again(self) -> None:
        """Code that the ranks may not have in common comes next, or has come: they meet before their next exchange."""

    @contextmanager
    def asked_for(self) -> Iterator[None]:
        """What is exchanged within, the user's code asks for, maybe on one rank alone: the ranks meet for each, and for what
        they exchange next."""
        self.meet_again()
        try:
            yield
        finally:
            self.meet_again()

    @abstractmethod
    def sum_of_piece(self, pieces: Tensor) -> Tensor:
        """Of (size, *shape), a piece for each rank, of one dimension at least: the sum over the ranks of this one's, in
        memory of its own."""

    def kept(self, exchange: Callable[[], Tensor]) -> Tensor:
        """What an exchange results in; a forward that is recomputed is given the result of the first."""
        return once(exchange)

    @contextmanager
    def of_layer(self, layer: str) -> Iterator[None]:
        """What is exchanged within is a layer's."""
        before, self.layer = self.layer, layer
        try:
            yield
        finally:
            self.layer = before

    @contextmanager
    def of_step(self) -> Iterator[None]:
        """A step of the user's, or a batch of an evaluation."""
        self.in_step = True
        try:
            yield
        finally:
            self.in_step = False

    def sends_back(self, sent_bytes: int) -> None:
        """Is told how many bytes the backward pass of a forward will send to other ranks, by rings."""

    def _summed(self, value: Tensor) -> int:
        """Bytes that a rank sends for a sum."""
        return 2 * value.nbytes * (self.size - 1) // self.size

    def begin_divided(self) -> None:
        """From now on this rank draws random numbers of its own, until `end_divided`; nothing within such a region."""

    def end_divided(self) -> None:
        """Ends what `begin_divided` began; nothing where it did not."""

    def forget(self) -> None:
        """What a forward that an error has ended left behind: a divided region, and what has entered, with its graph."""
        self.leave_entered()
        self.end_divided()

    @contextmanager
    def drawing_apart(self, seed: int) -> Iterator[None]:
        """Random numbers within are those of a seed; those behind go on as if nothing had been drawn."""
        yield


class RankGroup(TensorGroup):
    """Of processes. In a run, ranks meet before they exchange (`connect`); outside of one nobody needs them elsewhere.

    Args:
        group: of torch.distributed; this rank's.
        backend: of the device that computes.
    """

    def __init__(self, group: dist.ProcessGroup, backend: Backend) -> None:
        super().__init__(group.size(), group.rank())
        self._group = group
        self._run: ActivationExchange | None = None
        self.exchanges = 0
        """Collectives so far."""
        self._backend = backend
        self._draws = [torch.device("cpu"), *([] if backend.random_state() is None else [backend.device])]
        """Devices with random numbers of their own."""
        self._outside: tuple[Sequence[Tensor], Sequence[Tensor]] | None = None
        """In a divided region, the random states before it and at its start."""

    @override
    def sum(self, value: Tensor) -> Tensor:
        def collective(group: dist.ProcessGroup, later: bool) -> tuple[Tensor, Any]:
            out = value.clone(memory_format=torch.contiguous_format)
            return out, dist.all_reduce(out, group=group, async_op=later)

        def near(shm_collectives: ShmCollectives, word: int) -> Tensor:
            return shm_collectives.sum(value, word)

        return self._exchange("sum", value, collective, near if ShmCollectives.adds(value.dtype) else None)

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
        """What is exchanged from here on is of a run; None: of none."""
        self._run = run

    def computes(self, batch: str) -> None:
        """What the ranks compute next, in words that have to be the same on all of them."""
        if self._run is not None:
            self._run.computes(batch)

    @override
    def meet_again(self) -> None:
        if self._run is not None:
            self._run.meet_again()

    @override
    def sum_of_piece(self, pieces: Tensor) -> Tensor:
        pieces = pieces.contiguous()
        if self._backend.collectives == "gloo":  # its reduce-scatter moves all to all ranks, and adds in 16 bits

            def all_to_all(group: dist.ProcessGroup, later: bool) -> tuple[Tensor, Any]:
                out = torch.empty_like(pieces)
                return out, dist.all_to_all_single(out, pieces, group=group, async_op=later)

            name = "sum of pieces"
            received = self._exchange(name, pieces, all_to_all, lambda near, word: near.pieces(pieces, word))
            return received.sum(0)

        def reduce_scatter(group: dist.ProcessGroup, later: bool) -> tuple[Tensor, Any]:
            out = torch.empty_like(pieces[0])
            return out, dist.reduce_scatter_single(out, pieces.flatten(0, 1), group=group, async_op=later)

        return self._exchange("sum of pieces", pieces, reduce_scatter)

    def _exchange(self, name: str, value: Tensor, collective: Exchange, near: NearExchange | None = None) -> Tensor:
        """The one way to the other ranks; what the exchange results in.

        Args:
            name: of the collective.
            value: what it sends.
            collective: issues it on a process group, asynchronously or not.
            near: the same among ranks of one machine.
        """
        self.exchanges += 1
        if self._run is None:
            return collective(self._group, False)[0]
        return self._run.issue(self.layer, name, collective, value, near)

    # -- random numbers -----------------------------------------------------------------------------------------------

    @override
    @torch.compiler.disable
    def begin_divided(self) -> None:
        if self._outside is None:
            outside = self._random_states()
            digest = hashlib.blake2b(b"".join(state.numpy().tobytes() for state in outside), digest_size=7).digest()
            seed = int.from_bytes(digest, "big") * self.size + self.index
            began = [torch.Generator(device).manual_seed(seed).get_state() for device in self._draws]
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
                # Of one dtype: the default is another in a backward pass, where a forward may be computed again.
                torch.rand((), dtype=torch.float32, device=device)

    @override
    @contextmanager
    def drawing_apart(self, seed: int) -> Iterator[None]:
        before = self._random_states()
        self._set_random_states([torch.Generator(device).manual_seed(seed).get_state() for device in self._draws])
        try:
            yield
        finally:
            self._set_random_states(before)

    def _random_states(self) -> list[Tensor]:
        of_device = self._backend.random_state()
        return [torch.get_rng_state(), *([] if of_device is None else [of_device])]

    def _set_random_states(self, states: Sequence[Tensor]) -> None:
        torch.set_rng_state(states[0])
        for state in states[1:]:
            self._backend.set_random_state(state)


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


class _AddUp(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, value: Tensor, group: TensorGroup) -> Tensor:
        return group.kept(lambda: group.sum(value))

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
