"""Sequence parallelism: between layers that are cut, each rank of a tensor group has its part of the sequence.

A block takes what is whole and gives what is whole; inside, norms, dropout and residuals are computed on this rank's part. A
divided region gathers its input and leaves parts of its output, so that one sum of what is whole becomes a gather and a
reduce-scatter, and what autograd keeps between regions is divided. What the first layers of a region keep for their weights'
gradients is the part; it is gathered again in the backward pass.

I1: a block whose input *is* what the block before gave takes the part that this was gathered from, and the backward pass
    exchanges nothing there. Where somebody else hears of the gradient of the whole, it is exchanged.
I2: a recomputed forward exchanges nothing but what the backward pass would otherwise: the inputs of divided regions.
"""

from __future__ import annotations

import dataclasses
import functools
import weakref
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from typing_extensions import override

from lightning_ptm.errors import ConfigError
from lightning_ptm.parallel.between_layers import BetweenLayers
from lightning_ptm.parallel.exchange import TensorGroup
from lightning_ptm.parallel.sequence import Again, Gather, Join, Product, Scatter, Split, of_each
from lightning_ptm.runtime.autograd.forward_wrappers import Forward, ForwardWrapper, RecomputedForwardWrapper
from lightning_ptm.runtime.tensors.autograd_graphs import in_backward, user_receives_gradient
from lightning_ptm.torch_internals import version_of


class SequenceParts:
    """The parts of the sequence of one module's blocks: forwards of blocks and regions, and what layers find inside.

    Args:
        group: that divides sequences.
    """

    def __init__(self, group: TensorGroup) -> None:
        self.group = group
        self._length: int | None = None
        """Of the whole sequence in the block that computes; None outside of blocks."""
        self._joined: dict[int, _Joined] = {}
        """By id, whole values that blocks gave and that somebody has."""
        self._gathered: _Gathered | None = None
        """What the innermost region, or the last layer that gathers for itself, has gathered."""

    def forget(self) -> None:
        """What a run has left behind."""
        self._joined.clear()
        self._length = self._gathered = None

    # -- forwards -----------------------------------------------------------------------------------------------------

    def block(self, module: nn.Module, name: str) -> Forward:
        """Of a block: takes and gives what is whole, and computes its own forward on this rank's part, which alone is kept
        where the block is recomputed."""
        own = module.forward

        def around(inside: Forward) -> Forward:
            @functools.partial(torch.compiler.disable, recursive=False)
            def forward(*args: Any, **kwargs: Any) -> Any:
                x = _hidden((args, kwargs))
                if x is None or x.dim() < 2:
                    raise _refused(
                        name,
                        "takes no sequence (its first floating argument has to be one, tokens before the last dimension)",
                    )
                part = self._part_of(x)
                given = _exchanged((args, kwargs), x, part)
                out = inside(x.shape[-2], *given[0], **given[1])
                of_part = _hidden(out)
                if of_part is None or of_part.shape[:-1] != part.shape[:-1]:
                    raise _refused(name, "gives something else than a sequence of the tokens that it takes")
                return _exchanged(out, of_part, self._join(of_part, x.shape[-2]))

            return forward

        @functools.partial(torch.compiler.disable, recursive=False)
        @functools.wraps(own)
        def of_part(length: int, *args: Any, **kwargs: Any) -> Any:
            outside, self._length = self._length, length
            if module.training:
                self.group.begin_divided()
            try:
                return own(*args, **kwargs)
            finally:
                self._length, self._gathered = outside, None
                self.group.end_divided()

        return RecomputedForwardWrapper(around, of_part)

    def within(self, module: nn.Module, name: str) -> Forward:
        """Of what is between regions: of what is whole, outside of its block, its gradients would be whole on every rank, and
        these are added up."""
        own = module.forward

        @functools.wraps(own)
        def forward(*args: Any, **kwargs: Any) -> Any:
            # Compiled code is a block's; in a backward pass it is computed again.
            counts = not torch.compiler.is_compiling() and torch.is_grad_enabled() and not in_backward()
            if counts and any(parameter.requires_grad for parameter in module.parameters(recurse=False)):
                self.length(name)
            return own(*args, **kwargs)

        return forward

    def divided_region(self, module: nn.Module, name: str) -> Forward:
        """Of a region whose input is gathered and whose last layers leave parts."""
        own = module.forward

        @functools.partial(torch.compiler.disable, recursive=False)
        @functools.wraps(own)
        def forward(*args: Any, **kwargs: Any) -> Any:
            x = self._checked(_hidden((args, kwargs)), name)
            gathered = self._gather(x)
            given = _exchanged((args, kwargs), x, gathered.whole, self._entered)
            before, self._gathered = self._gathered, gathered
            try:
                return own(*given[0], **given[1])
            finally:
                self._gathered = before

        return forward

    def whole_region(self, module: nn.Module, name: str) -> Forward:
        """Of a region that computes what is whole: each rank takes its part of what it gives."""

        def around(own: Forward) -> Forward:
            @functools.partial(torch.compiler.disable, recursive=False)
            def forward(*args: Any, **kwargs: Any) -> Any:
                x = self._checked(_hidden((args, kwargs)), name)
                length = self.length(name)
                self.group.end_divided()
                whole = self._whole_of(x, length)
                given = _exchanged((args, kwargs), x, whole)
                out = own(*given[0], **given[1])
                if module.training:
                    self.group.begin_divided()
                result = _hidden(out)
                if result is None or result.shape[:-1] != whole.shape[:-1]:
                    raise _refused(name, "gives something else than a sequence of the tokens that it takes")
                return _exchanged(out, result, self._split(result))

            return forward

        return ForwardWrapper(around, module.forward)

    # -- parts and wholes ---------------------------------------------------------------------------------------------

    def length(self, name: str) -> int:
        """Of the whole sequence.

        Raises:
            ConfigError: no block computes.
        """
        if self._length is None:
            raise _refused(name, "is called, and the block around it is not")
        return self._length

    def _checked(self, x: Tensor | None, name: str) -> Tensor:
        each = of_each(self.length(name), self.group.size)
        if x is None or x.dim() < 2 or x.shape[-2] != each:
            raise _refused(name, f"takes something else than the {each} tokens that each rank has in its block")
        return x

    @torch.compiler.disable
    def _part_of(self, x: Tensor) -> Tensor:
        known = self._joined.get(id(x))
        return known.part if known is not None and known.stands_for(x) else self._split(x)  # I1

    @torch.compiler.disable
    def _split(self, x: Tensor) -> Tensor:
        each = of_each(x.shape[-2], self.group.size)
        self.group.sends_back(x.nbytes // max(1, x.shape[-2]) * each * (self.group.size - 1))
        out: Tensor = Split.apply(x, self.group)
        return out

    @torch.compiler.disable
    def _join(self, part: Tensor, length: int) -> Tensor:
        whole: Tensor
        whole, same = Join.apply(part, self.group, length, False)
        if not whole.is_inference():
            key = id(whole)
            gone = weakref.ref(whole, lambda _: self._joined.pop(key, None))
            self._joined[key] = _Joined(gone, version_of(whole), same)
            if whole.grad_fn is not None:
                whole.grad_fn.whole = gone  # type: ignore[attr-defined]
        return whole

    @torch.compiler.disable
    def _whole_of(self, part: Tensor, length: int) -> Tensor:
        whole: Tensor
        whole, _ = Join.apply(part, self.group, length, True)
        return whole

    @torch.compiler.disable
    def _gather(self, part: Tensor) -> _Gathered:
        group = self.group
        group.sends_back(part.nbytes * (group.size - 1))  # the reduce-scatter of its gradient
        again = Again(group, self._length or 0)
        whole: Tensor = Gather.apply(part, again)
        return _Gathered(part, _version(part), whole, _version(whole), again)

    @torch.compiler.disable
    def _entered(self, value: Tensor) -> Tensor:
        entered = self.group.enter(value)
        self.group.leave_entered()
        return entered

    # -- what layers ask ----------------------------------------------------------------------------------------------

    def product(self, gathered: _Gathered, weight: Tensor, bias: Tensor | None) -> Tensor:
        """A linear layer's outputs of a whole value, of which the part is kept."""
        if weight.requires_grad and not gathered.again.counted:
            gathered.again.count()
            self.group.sends_back(gathered.part.nbytes * (self.group.size - 1))
        out: Tensor = Product.apply(gathered.whole, gathered.part.detach(), weight, bias, gathered.again)
        return out

    def gathered_from(self, x: Tensor, name: str) -> _Gathered:
        """What is gathered from a part: once for layers that take it one after the other."""
        known = self._gathered
        if known is None or known.part is not x or known.part_version != _version(x):
            self._gathered = known = self._gather(self._checked(x, name))
        return known

    def gathered_as(self, x: Tensor) -> _Gathered | None:
        """How a whole value has been gathered; None: it is another, or not what it was any more."""
        known = self._gathered
        same = known is not None and known.whole is x and known.whole_version == _version(x)
        return known if same else None

    def leave(self, value: Tensor, name: str) -> Tensor:
        """This rank's part of the sum over the ranks of a whole sequence."""
        each = of_each(self.length(name), self.group.size)
        self.group.sends_back(value.nbytes // max(1, value.shape[-2]) * each * (self.group.size - 1))
        out: Tensor = Scatter.apply(value, self.group)
        return out

    def forget_gathered(self) -> None:
        """No layer will take it again; to remember it would keep its graph alive."""
        self._gathered = None


@dataclasses.dataclass(frozen=True, slots=True)
class _Joined:
    """What a block has given, how often it had been written to, and the part that it was gathered from."""

    whole: weakref.ref[Tensor]
    version: int
    part: Tensor

    def stands_for(self, x: Tensor) -> bool:
        """Whether who takes the part in the place of `x` computes the same, and so does autograd."""
        # A checkpoint gives the same tensor a node of its own.
        same = self.whole() is x and self.version == version_of(x) and self.part.grad_fn is x.grad_fn
        return same and self.part.requires_grad == x.requires_grad and not user_receives_gradient(x)


@dataclasses.dataclass(frozen=True, slots=True)
class _Gathered:
    """A part, what was gathered from it, and how often they had been written to."""

    part: Tensor
    part_version: int
    whole: Tensor
    whole_version: int
    again: Again


class InRegion(BetweenLayers):
    """In a divided region values are whole, and gradients parts of sums; its last layers leave parts of the sequence."""

    partial = True

    def __init__(self, parts: SequenceParts, name: str) -> None:
        super().__init__(parts.group)
        self.parts, self.name = parts, name

    @override
    def enter(self, value: Tensor) -> Tensor:
        return value  # the region has

    @override
    def columns(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        gathered = self.parts.gathered_as(x)
        return F.linear(x, weight, bias) if gathered is None else self.parts.product(gathered, weight, bias)

    @override
    def leave(self, value: Tensor) -> Tensor:
        return self.parts.leave(value, self.name)

    @override
    def begin(self, *, training: bool) -> None:
        self.parts.length(self.name)  # the block has begun

    @override
    def end(self) -> None:
        """The block does."""


class InBlock(InRegion):
    """Directly in a block: a layer is given a part of the sequence, and gathers it for itself."""

    @override
    def enter(self, value: Tensor) -> Tensor:
        return self.group.enter(value)

    @override
    def columns(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return self.parts.product(self.parts.gathered_from(x, self.name), weight, bias)

    @override
    def leave(self, value: Tensor) -> Tensor:
        self.group.leave_entered()
        self.parts.forget_gathered()
        return super().leave(value)


# -- arguments and results --------------------------------------------------------------------------------------------


def _hidden(value: Any) -> Tensor | None:
    """The first floating tensor in arguments or results."""
    if isinstance(value, Tensor):
        return value if value.is_floating_point() else None
    if isinstance(value, dict):
        value = value.values()
    elif not isinstance(value, (list, tuple)):
        return None
    return next((found for each in value if (found := _hidden(each)) is not None), None)


def _exchanged(value: Any, known: Tensor, new: Tensor, other: Callable[[Tensor], Tensor] | None = None) -> Any:
    """The same arguments or results with another tensor in the place of `known`.

    Args:
        other: what becomes of other floating tensors.
    """
    if isinstance(value, Tensor):
        if value is known:
            return new
        return value if other is None or not value.is_floating_point() else other(value)
    if isinstance(value, dict) and type(value) is dict:
        return {key: _exchanged(each, known, new, other) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        made = [_exchanged(each, known, new, other) for each in value]
        return type(value)(*made) if hasattr(value, "_fields") else type(value)(made)
    return value


def _version(value: Tensor) -> int:
    return -1 if value.is_inference() else version_of(value)


def _refused(name: str, what: str) -> ConfigError:
    return ConfigError(
        f"sequence_parallel=True and {name} {what}; leave the layers of this block out of tensor_parallel's plan, so that it "
        f"is whole on every rank, or train with tensor_parallel=TensorParallel(sequence_parallel=False)"
    )
