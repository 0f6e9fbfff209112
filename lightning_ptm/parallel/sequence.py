"""Differentiable exchanges along the sequence, the last but one dimension, for sequence parallelism.

Split, gather and reduce-scatter of activations, of which each rank of a tensor group has a part of the tokens. Knows nothing
of modules.

I1: all ranks have the same number of tokens: the sequence is padded with copies of its last token, whose gradients are zero.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from lightning_ptm.errors import UsageError
from lightning_ptm.parallel.exchange import TensorGroup
from lightning_ptm.runtime.autograd.saved_tensors import inside_checkpoint
from lightning_ptm.runtime.tensors.autograd_graphs import user_receives_gradient


@dataclasses.dataclass(slots=True)
class SecondGather:
    """Second gather of a part, in the backward pass, once for all layers that have saved the part.

    Attributes:
        group: the tensor group.
        length: length of the whole sequence.
        whole: the gathered value, from the first of these layers to the end of their region's backward pass.
        counted: whether the bytes of the second gather are counted.
    """

    group: TensorGroup
    length: int
    whole: Tensor | None = None
    counted: bool = False

    def count(self) -> None:
        """Marks the bytes as counted."""
        self.counted = True

    def of(self, part: Tensor) -> Tensor:
        """Returns the whole value, without a graph."""
        if self.whole is None or self.whole.dtype is not part.dtype:  # autocast may be off for some of the layers
            self.whole = _together(self.group.gather(part), self.length)
        return self.whole


class Split(torch.autograd.Function):
    """Whole value -> this rank's part; each rank's gradient is that of its part."""

    @staticmethod
    def forward(ctx: Any, whole: Tensor, group: TensorGroup) -> Tensor:
        ctx.group, ctx.layer, ctx.length = group, group.layer, whole.shape[-2]
        return _own(whole, group, _last_token).clone(memory_format=torch.contiguous_format)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        with ctx.group.of_layer(ctx.layer):
            return _together(ctx.group.gather(gradient), ctx.length), None


class Join(torch.autograd.Function):
    """Parts -> whole value, whose gradient is whole, and the part itself, for a next block that needs no more.

    Both outputs belong to one autograd node, so a hook on the gradient of the whole fires after the part's gradient, too.
    The node's weak reference `whole` serves to refuse hooks on the whole's gradient once the next block has taken the part.
    """

    @staticmethod
    def forward(ctx: Any, part: Tensor, group: TensorGroup, length: int, kept: bool) -> tuple[Tensor, Tensor]:
        def gather() -> Tensor:
            return _together(group.gather(part), length)

        ctx.group = group
        ctx.whole = None
        ctx.set_materialize_grads(False)
        return (group.kept(gather) if kept else gather()), part.detach()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, of_whole: Tensor | None, of_part: Tensor | None) -> tuple[Tensor | None, None, None, None]:
        whole = None if ctx.whole is None else ctx.whole()
        if of_part is not None and whole is not None and user_receives_gradient(whole):
            raise UsageError(
                "TensorParallel(sequence_parallel=True), and register_hook or retain_grad was called on a "
                "block's output after the next block had taken it, so that no rank has its whole gradient; "
                "call it before the next block is called"
            )
        own = None if of_whole is None else _own(of_whole, ctx.group, torch.zeros_like).contiguous()
        return (own if of_part is None else of_part if own is None else own + of_part), None, None, None


class Gather(torch.autograd.Function):
    """Parts -> whole value; the gradient is the sum of the ranks' gradients, reduce-scattered."""

    @staticmethod
    def forward(ctx: Any, part: Tensor, second_gather: SecondGather) -> Tensor:
        ctx.second_gather, ctx.layer = second_gather, second_gather.group.layer
        return _together(second_gather.group.gather(part), second_gather.length)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        ctx.second_gather.whole = None
        group = ctx.second_gather.group
        with group.of_layer(ctx.layer):
            return group.sum_of_piece(_pieces(gradient, group.size, torch.zeros_like)), None


class Scatter(torch.autograd.Function):
    """Summands of a whole value -> this rank's part of the sum (reduce-scatter); each rank's gradient is that of its part."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, group: TensorGroup) -> Tensor:
        ctx.group, ctx.layer, ctx.length = group, group.layer, value.shape[-2]
        return group.kept(lambda: group.sum_of_piece(_pieces(value, group.size, _last_token)))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        with ctx.group.of_layer(ctx.layer):
            return _together(ctx.group.gather(gradient), ctx.length), None


class Product(torch.autograd.Function):
    """Linear layer that saves only this rank's part of its input for the backward pass.

    Inside of an activation checkpoint it saves the whole input, which then exists only after the recomputation: so the
    backward pass has no further exchange.
    """

    @staticmethod
    def forward(
        ctx: Any, whole: Tensor, part: Tensor, weight: Tensor, bias: Tensor | None, second_gather: SecondGather
    ) -> Tensor:
        out = F.linear(whole, weight, bias)  # under autocast in another dtype
        ctx.second_gather, ctx.layer = second_gather, second_gather.group.layer
        ctx.dtypes = (whole.dtype, None if bias is None else bias.dtype)
        ctx.keeps_whole = inside_checkpoint()
        ctx.save_for_backward((whole if ctx.keeps_whole else part).to(out.dtype), weight)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        kept, weight = ctx.saved_tensors
        of_input, _, of_weight, of_bias, _ = ctx.needs_input_grad
        rows = gradient.flatten(0, -2)
        with ctx.second_gather.group.of_layer(ctx.layer):
            whole = ctx.second_gather.of(kept) if of_weight and not ctx.keeps_whole else kept
        return (
            (gradient @ weight.to(gradient.dtype)).to(ctx.dtypes[0]) if of_input else None,
            None,
            (rows.t() @ whole.flatten(0, -2).to(rows.dtype)).to(weight.dtype) if of_weight else None,
            rows.sum(0).to(ctx.dtypes[1]) if of_bias else None,
            None,
        )


# -- tokens -----------------------------------------------------------------------------------------------------------

Filler = Callable[[Tensor], Tensor]
"""Makes the padding from the last token (I1)."""


def _last_token(token: Tensor) -> Tensor:
    return token


def of_each(length: int, size: int) -> int:
    """Number of tokens on each rank, with padding."""
    return -(-length // size)


def _filled(value: Tensor, size: int, filler: Filler) -> Tensor:
    missing = of_each(value.shape[-2], size) * size - value.shape[-2]
    if not missing:
        return value
    return torch.cat([value, *[filler(value[..., -1:, :])] * missing], -2)


def _pieces(value: Tensor, size: int, filler: Filler) -> Tensor:
    """The ranks' parts, stacked: (size, ..., tokens of each, features)."""
    return torch.stack(_filled(value, size, filler).chunk(size, -2))


def _own(value: Tensor, group: TensorGroup, filler: Filler) -> Tensor:
    each = of_each(value.shape[-2], group.size)
    return _filled(value, group.size, filler).narrow(-2, group.index * each, each)


def _together(parts: Tensor, length: int) -> Tensor:
    """The whole sequence from the ranks' parts, (size, ..., tokens of each, features), without padding."""
    whole = torch.cat(parts.unbind(0), -2)
    # Not a view: the user's code may write to it.
    return whole if whole.shape[-2] == length else whole[..., :length, :].clone(memory_format=torch.contiguous_format)
