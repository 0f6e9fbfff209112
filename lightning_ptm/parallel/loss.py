"""Cross-entropy of vocabulary-parallel logits, without gathering them.

Knows rows of logits and their targets, not the tensor subclass of logits.py. The ranks exchange three numbers a row in one
sum: each rank's largest logit, the log of its sum of exponentials, and the target's logit. The backward pass exchanges
nothing.

I1: rounding is torch's: 16-bit logits are computed in fp32, and log-probabilities are rounded to the dtype of the loss.
I2: the saved tensors are the part as the layer computed it, in its dtype, and three numbers a row.
"""

from __future__ import annotations

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
    ignored = targets == ignore_index
    classes, first = width * group.size, group.index * width
    elsewhere = (targets >= 0) & (targets < classes) & ((targets < first) | (targets >= first + width))
    # A target that is no class stays as it is, which is an error on every rank.
    here = torch.where((targets >= first) & (targets < first + width), targets - first, targets)
    here = here.masked_fill(elsewhere | ignored, _ELSEWHERE)
    found: Tensor = _Probabilities.apply(rows.reshape(-1, width), here.flatten(), group, dtype, label_smoothing > 0)
    counted = torch.zeros_like(targets).masked_fill(ignored, _ELSEWHERE)

    def reduced(each: Tensor) -> Tensor:
        # By torch's own loss with one class, for its order of sums and its result for rows that are all ignored.
        of_targets = each.view(targets.shape).unsqueeze(ahead)
        return F.nll_loss(of_targets, counted, ignore_index=_ELSEWHERE, reduction=reduction)

    if not label_smoothing:
        return reduced(found[0])
    return (1 - label_smoothing) * reduced(found[0]) + reduced(found[1]) * (label_smoothing / classes)


class _Probabilities(torch.autograd.Function):
    """Log-probabilities of the rows' targets and, with label smoothing, their sums over all classes: (1 or 2, rows)."""

    @staticmethod
    def forward(ctx: Any, part: Tensor, here: Tensor, group: TensorGroup, dtype: torch.dtype, smoothed: bool) -> Tensor:
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
        found = [(-of_all[:, 2].sum(0) - largest) - off]
        classes = part.shape[-1] * group.size
        if smoothed:
            found.append((of_all[:, 3] + above * part.shape[-1]).sum(0) - classes * off)
        ctx.save_for_backward(part, here, largest, off)
        ctx.dtype, ctx.classes = dtype, classes
        return torch.stack(found).to(dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None, None]:
        part, here, largest, off = ctx.saved_tensors
        of_target = gradient[0].to(largest.dtype)
        logs = (part - largest.unsqueeze(-1)).sub_(off.unsqueeze(-1))
        out = logs.to(ctx.dtype).to(largest.dtype).exp_()  # I1: torch has these rounded, too
        if len(gradient) == 1:
            out.mul_(-of_target.unsqueeze(-1))
        else:
            of_all = gradient[1].to(largest.dtype)
            out.mul_(-(of_target + ctx.classes * of_all).unsqueeze(-1)).add_(of_all.unsqueeze(-1))
        is_here = here != _ELSEWHERE
        place, value = here.masked_fill(~is_here, 0), of_target.masked_fill(~is_here, 0)
        out.scatter_add_(1, place.unsqueeze(-1), value.unsqueeze(-1))
        return out.to(part.dtype), None, None, None, None
