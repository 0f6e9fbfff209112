"""Replacement forwards for sequence parallelism: between tensor-parallel layers, each rank holds its part of the
sequence.

A block takes and returns whole values; inside, norms, dropout and residuals are computed on this rank's part. A divided
region gathers its input and reduce-scatters its output. So the all-reduce of a whole value becomes a gather and a
reduce-scatter, and the tensors that autograd saves between regions are divided. The first layers of a region save only the
part for their weights' gradients; it is gathered again in the backward pass.

I1: a block whose input *is* the output of the block before takes the part from which that was gathered, and the backward
    pass exchanges nothing there. If a hook or other code observes the gradient of the whole, it is exchanged.
I2: a recomputed forward exchanges only what the backward pass would exchange otherwise: the inputs of divided regions.
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
from lightning_ptm.parallel.sequence import Gather, Join, Product, Scatter, SecondGather, Split, of_each
from lightning_ptm.runtime.autograd.recompute import Forward, ForwardWrapper, RecomputedForwardWrapper
from lightning_ptm.runtime.tensors.autograd_graphs import in_backward, user_receives_gradient
from lightning_ptm.torch_internals import version_of


class SequenceParts:
    """Sequence parallelism in one module's blocks: forwards of blocks and regions, and exchanges for their layers.

    Args:
        group: the tensor group over which sequences are divided.
    """

    def __init__(self, group: TensorGroup) -> None:
        self.group = group
        self._length: int | None = None
        """Length of the whole sequence in the block that computes; None outside of blocks."""
        self._joined: dict[int, _Joined] = {}
        """By id, outputs of blocks that are still referenced."""
        self._gathered: _Gathered | None = None
        """Value gathered last by the innermost region, or by the last layer that gathers its input."""

    def forget(self) -> None:
        """Forgets the state of an earlier run."""
        self._joined.clear()
        self._length = self._gathered = None

    # -- forwards -----------------------------------------------------------------------------------------------------

    def block(self, module: nn.Module, name: str) -> Forward:
        """Forward of a block: takes and returns whole values, and runs the block's own forward on this rank's part.

        If the block is recomputed in the backward pass, only the part is saved.
        """
        own = module.forward

        def around(inside: Forward) -> Forward:
            @functools.partial(torch.compiler.disable, recursive=False)
            def forward(*args: Any, **kwargs: Any) -> Any:
                x = _hidden((args, kwargs))
                if x is None or x.dim() < 2:
                    raise _refused(
                        name,
                        "takes no sequence (its first floating-point argument must be one, with tokens in the last but one "
                        "dimension)",
                    )
                part = self._part_of(x)
                given = _exchanged((args, kwargs), x, part)
                out = inside(x.shape[-2], *given[0], **given[1])
                of_part = _hidden(out)
                if of_part is None or of_part.shape[:-1] != part.shape[:-1]:
                    raise _refused(name, "does not return a sequence of the tokens that it takes")
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
        """Forward of a module between regions: refuses a call outside of its block.

        Its gradients are summed over the ranks, which would be wrong for whole gradients outside of the block.
        """
        own = module.forward

        @functools.wraps(own)
        def forward(*args: Any, **kwargs: Any) -> Any:
            # Not checked in compiled code, which is inside a block, nor in a recomputation in the backward pass.
            counts = not torch.compiler.is_compiling() and torch.is_grad_enabled() and not in_backward()
            if counts and any(parameter.requires_grad for parameter in module.parameters(recurse=False)):
                self.length(name)
            return own(*args, **kwargs)

        return forward

    def divided_region(self, module: nn.Module, name: str) -> Forward:
        """Forward of a divided region: gathers the input; the region's last layers reduce-scatter."""
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
        """Forward of a region that computes whole values: gathers the input, and each rank takes its part of the output."""

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
                    raise _refused(name, "does not return a sequence of the tokens that it takes")
                return _exchanged(out, result, self._split(result))

            return forward

        return ForwardWrapper(around, module.forward)

    # -- parts and wholes ---------------------------------------------------------------------------------------------

    def length(self, name: str) -> int:
        """Length of the whole sequence in the block that computes.

        Raises:
            ConfigError: no block computes.
        """
        if self._length is None:
            raise _refused(name, "is called while the block around it is not")
        return self._length

    def _checked(self, x: Tensor | None, name: str) -> Tensor:
        each = of_each(self.length(name), self.group.size)
        if x is None or x.dim() < 2 or x.shape[-2] != each:
            raise _refused(name, f"does not take the {each} tokens that each rank has in its block")
        return x

    @torch.compiler.disable
    def _part_of(self, x: Tensor) -> Tensor:
        known = self._joined.get(id(x))
        return known.part if known is not None and known.stands_for(x) else self._split(x)  # I1

    @torch.compiler.disable
    def _split(self, x: Tensor) -> Tensor:
        each = of_each(x.shape[-2], self.group.size)
        self.group.count_backward(x.nbytes // max(1, x.shape[-2]) * each * (self.group.size - 1))
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
        group.count_backward(part.nbytes * (group.size - 1))  # the reduce-scatter of its gradient
        second_gather = SecondGather(group, self._length or 0)
        whole: Tensor = Gather.apply(part, second_gather)
        return _Gathered(part, _version(part), whole, _version(whole), second_gather)

    @torch.compiler.disable
    def _entered(self, value: Tensor) -> Tensor:
        entered = self.group.enter(value)
        self.group.forget_entered()
        return entered

    # -- called by layers ---------------------------------------------------------------------------------------------

    def product(self, gathered: _Gathered, weight: Tensor, bias: Tensor | None) -> Tensor:
        """Returns a linear layer's outputs for a gathered value, of which only the part is saved."""
        if weight.requires_grad and not gathered.second_gather.counted:
            gathered.second_gather.count()
            self.group.count_backward(gathered.part.nbytes * (self.group.size - 1))
        out: Tensor = Product.apply(gathered.whole, gathered.part.detach(), weight, bias, gathered.second_gather)
        return out

    def gathered_from(self, x: Tensor, name: str) -> _Gathered:
        """Gathers a part; layers that take the same part one after the other share one gather."""
        known = self._gathered
        if known is None or known.part is not x or known.part_version != _version(x):
            self._gathered = known = self._gather(self._checked(x, name))
        return known

    def gathered_as(self, x: Tensor) -> _Gathered | None:
        """The last gather if it made the value `x` and `x` was not changed since, else None."""
        known = self._gathered
        same = known is not None and known.whole is x and known.whole_version == _version(x)
        return known if same else None

    def leave(self, value: Tensor, name: str) -> Tensor:
        """Reduce-scatter along the sequence: returns this rank's part of the sum over the ranks."""
        each = of_each(self.length(name), self.group.size)
        self.group.count_backward(value.nbytes // max(1, value.shape[-2]) * each * (self.group.size - 1))
        out: Tensor = Scatter.apply(value, self.group)
        return out

    def forget_gathered(self) -> None:
        """Forgets the last gather, which no further layer takes, as it would keep its graph alive."""
        self._gathered = None


@dataclasses.dataclass(frozen=True, slots=True)
class _Joined:
    """A block's output, its version counter, and the part that it was gathered from."""

    whole: weakref.ref[Tensor]
    version: int
    part: Tensor

    def stands_for(self, x: Tensor) -> bool:
        """Whether the part can replace `x`, with the same results in forward and backward."""
        # An activation checkpoint gives the same tensor a different autograd node.
        same = self.whole() is x and self.version == version_of(x) and self.part.grad_fn is x.grad_fn
        return same and self.part.requires_grad == x.requires_grad and not user_receives_gradient(x)


@dataclasses.dataclass(frozen=True, slots=True)
class _Gathered:
    """A part, the whole value gathered from it, and their version counters."""

    part: Tensor
    part_version: int
    whole: Tensor
    whole_version: int
    second_gather: SecondGather


class InRegion(BetweenLayers):
    """Interface of layers in a divided region: values are whole, gradients are summands; the last layers reduce-scatter."""

    partial = True

    def __init__(self, parts: SequenceParts, name: str) -> None:
        super().__init__(parts.group)
        self.parts, self.name = parts, name

    @override
    def enter(self, value: Tensor) -> Tensor:
        return value  # the region has passed it on already

    @override
    def columns(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        gathered = self.parts.gathered_as(x)
        return F.linear(x, weight, bias) if gathered is None else self.parts.product(gathered, weight, bias)

    @override
    def leave(self, value: Tensor) -> Tensor:
        return self.parts.leave(value, self.name)

    @override
    def begin(self, *, training: bool) -> None:
        self.parts.length(self.name)  # only a check: the block has begun the divided region

    @override
    def end(self) -> None:
        """Does nothing: the block ends the divided region."""


class InBlock(InRegion):
    """Interface of layers directly in a block: a layer gets a part of the sequence, and gathers it."""

    @override
    def enter(self, value: Tensor) -> Tensor:
        return self.group.enter(value)

    @override
    def columns(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return self.parts.product(self.parts.gathered_from(x, self.name), weight, bias)

    @override
    def leave(self, value: Tensor) -> Tensor:
        self.group.forget_entered()
        self.parts.forget_gathered()
        return super().leave(value)


# -- arguments and results --------------------------------------------------------------------------------------------


def _hidden(value: Any) -> Tensor | None:
    """The first floating-point tensor in arguments or results."""
    if isinstance(value, Tensor):
        return value if value.is_floating_point() else None
    if isinstance(value, dict):
        value = value.values()
    elif not isinstance(value, (list, tuple)):
        return None
    return next((found for each in value if (found := _hidden(each)) is not None), None)


def _exchanged(value: Any, known: Tensor, new: Tensor, other: Callable[[Tensor], Tensor] | None = None) -> Any:
    """Returns arguments or results with the tensor `known` replaced by `new`.

    Args:
        other: function for the other floating-point tensors; None: they stay.
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
        f"TensorParallel(sequence_parallel=True) and {name} {what}; leave the layers of this block "
        "out of tensor_parallel's plan, so that it is whole on every rank, or train with "
        "tensor_parallel=TensorParallel(sequence_parallel=False)"
    )
