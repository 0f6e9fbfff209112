"""Cross-entropy of vocabulary-parallel logits, without gathering them.

Knows rows of logits and their targets, not the tensor subclass of logits.py. The ranks exchange three numbers a row in one
all-reduce: each rank's largest logit, the log of its sum of exponentials, and the target's logit (with label smoothing
also the sum of its logits). The backward pass exchanges nothing.

I1: rounding is torch's: 16-bit logits are computed in fp32, and log-probabilities are rounded to the dtype of the loss.
I2: the saved tensors are the part as the layer computed it, in its dtype, and three numbers a row.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from lightning_ptm.parallel.exchange import TensorGroup
from lightning_ptm.runtime.autograd.recompute import once

_ELSEWHERE = torch.iinfo(torch.int64).min
"""Marker for targets that are in another rank's part, or ignored."""


def cross_entropy(
    part: Tensor,
    targets: Tensor,
    group: TensorGroup,
    *,
    dtype: torch.dtype,
    ignore_index: int = -100,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> Tensor:
    """Returns torch's `F.cross_entropy` of whole logits in `dtype`, without class weights.

    Args:
        part: this rank's part of the logits: (classes,), or (samples, classes, ...), in `dtype` or a narrower one.
        targets: indices of classes, (), or (samples, ...); the same on all ranks.
        dtype: dtype of the result.

    Raises:
        IndexError: a target is not a class (on a GPU: a device-side assertion), as in torch.
    """
    ahead = min(1, part.dim() - 1)  # dimensions before that of the classes
    rows = part.movedim(ahead, -1)
    width = rows.shape[-1]
    classes = width * group.size
    here = here_of(targets.flatten(), width, group, ignore_index)
    found: Tensor = _Probabilities.apply(rows.reshape(-1, width), here, group, dtype, label_smoothing > 0)
    counted = torch.zeros_like(targets).masked_fill(targets == ignore_index, _ELSEWHERE)

    def reduced(each: Tensor) -> Tensor:
        # By torch's own loss with one class, for its order of sums and its result for rows that are all ignored.
        of_targets = each.view(targets.shape).unsqueeze(ahead)
        return F.nll_loss(of_targets, counted, ignore_index=_ELSEWHERE, reduction=reduction)

    if not label_smoothing:
        return reduced(found[0])
    return (1 - label_smoothing) * reduced(found[0]) + reduced(found[1]) * (label_smoothing / classes)


def here_of(targets: Tensor, width: int, group: TensorGroup, ignore_index: int) -> Tensor:
    """Returns targets as indices of this rank's part, which has `width` classes; others and ignored ones have a mark."""
    classes, first = width * group.size, group.index * width
    elsewhere = (targets >= 0) & (targets < classes) & ((targets < first) | (targets >= first + width))
    # A target that is no class stays as it is, which is an error on every rank.
    here = torch.where((targets >= first) & (targets < first + width), targets - first, targets)
    return here.masked_fill(elsewhere | (targets == ignore_index), _ELSEWHERE)


@dataclasses.dataclass(frozen=True, slots=True)
class WholeRows:
    """Results of an exchange about whole rows of logits, equal on all ranks; tensors (rows,), at least fp32.

    Attributes:
        largest: the largest logit.
        off: the log of the sum of exponentials of logits less the largest one.
        of_targets: log-probabilities of targets.
        of_all: sums of all log-probabilities, for label smoothing.
    """

    largest: Tensor
    off: Tensor
    of_targets: Tensor
    of_all: Tensor | None = None

    @classmethod
    def exchanged(cls, part: Tensor, here: Tensor, group: TensorGroup, *, smoothed: bool) -> WholeRows:
        """Returns the rows of which this rank has a part. Collective in the group."""
        wide = torch.promote_types(part.dtype, torch.float32)
        largest = part.amax(-1).to(wide)
        # The log of the sum of exponentials, summed by torch itself. A part may be all -inf where others are not.
        off = F.log_softmax(part, -1, dtype=wide).amax(-1).neg_().masked_fill_(largest == -torch.inf, 0)
        numbers = [largest, off, F.nll_loss(part, here, ignore_index=_ELSEWHERE, reduction="none").to(wide)]
        if smoothed:
            numbers.append((part - largest.unsqueeze(-1)).sum(-1))
        # A sum, not a gather: if another rank gathers its logits meanwhile, the mismatch raises instead of mixing values.
        of_all = part.new_zeros((group.size, len(numbers), len(part)), dtype=wide)
        torch.stack(numbers, out=of_all[group.index])
        with group.user_exchange():
            of_all = once(lambda: group.sum(of_all))
        largest = of_all[:, 0].amax(0)
        above = of_all[:, 0] - largest
        off = (above + of_all[:, 1]).logsumexp(0)
        of_targets = (-of_all[:, 2].sum(0) - largest) - off
        if not smoothed:
            return cls(largest, off, of_targets)
        classes = part.shape[-1] * group.size
        return cls(largest, off, of_targets, (of_all[:, 3] + above * part.shape[-1]).sum(0) - classes * off)


@dataclasses.dataclass(frozen=True, slots=True)
class PartOfRows:
    """One rank's part of the logits of rows, whose largest logits and sums are known (`WholeRows`)."""

    part: Tensor
    here: Tensor
    largest: Tensor
    off: Tensor

    def gradient(self, dtype: torch.dtype, of_target: Tensor, of_all: Tensor | None, classes: int) -> Tensor:
        """Returns the gradient of the part, at least in fp32, from those of `WholeRows.of_targets` and `of_all`.

        Args:
            dtype: dtype of the loss.
            classes: number of classes of all parts.
        """
        logs = (self.part - self.largest.unsqueeze(-1)).sub_(self.off.unsqueeze(-1))
        out = logs.to(dtype).to(self.largest.dtype).exp_()  # I1: torch has these rounded, too
        if of_all is None:
            out.mul_(-of_target.unsqueeze(-1))
        else:
            out.mul_(-(of_target + classes * of_all).unsqueeze(-1)).add_(of_all.unsqueeze(-1))
        is_here = self.here != _ELSEWHERE
        place, value = self.here.masked_fill(~is_here, 0), of_target.masked_fill(~is_here, 0)
        return out.scatter_add_(1, place.unsqueeze(-1), value.unsqueeze(-1))


class _Probabilities(torch.autograd.Function):
    """Log-probabilities of the rows' targets and, with label smoothing, their sums over all classes: (1 or 2, rows)."""

    @staticmethod
    def forward(ctx: Any, part: Tensor, here: Tensor, group: TensorGroup, dtype: torch.dtype, smoothed: bool) -> Tensor:
        rows = WholeRows.exchanged(part, here, group, smoothed=smoothed)
        ctx.save_for_backward(part, here, rows.largest, rows.off)
        ctx.dtype, ctx.classes = dtype, part.shape[-1] * group.size
        found = [rows.of_targets, *([] if rows.of_all is None else [rows.of_all])]
        return torch.stack(found).to(dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None, None]:
        mine = PartOfRows(*ctx.saved_tensors)
        of_target, *of_all = (each.to(mine.largest.dtype) for each in gradient)
        out = mine.gradient(ctx.dtype, of_target, of_all[0] if of_all else None, ctx.classes)
        return out.to(mine.part.dtype), None, None, None, None
