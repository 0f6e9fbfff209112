"""The cross-entropy of logits of which every rank has a part of the vocabulary: the sum of the parts, never put together.

Knows rows of logits and their targets; which tensors these are, logits.py knows. Each rank's largest logit, the sum of its
exponentials and the target's logit, three numbers a row, are exchanged in one sum; the backward pass exchanges nothing.

I1: rounded as torch rounds: computed in fp32 where logits are in 16 bits, and log-probabilities are rounded to the dtype that
the loss is asked for in. I2: what is saved is the part as the layer computed it, its dtype too, and three numbers a row.
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
"""In the place of targets that are another rank's, or ignored."""


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
    """As torch's function of the same name, of whole logits in `dtype` without weights of classes.

    Args:
        part: this rank's of the logits: (classes,), or (samples, classes, ...), in `dtype` or one that it was widened
            from.
        targets: indices of classes, (), or (samples, ...); the same on all ranks.
        dtype: of the result.

    Raises:
        IndexError: as torch's: a target is no class. Of a GPU it is an assertion of the device.
    """
    ahead = min(1, part.dim() - 1)  # dimensions before that of the classes
    rows = part.movedim(ahead, -1)
    width = rows.shape[-1]
    ignored = targets == ignore_index
    classes, first = width * group.size, group.index * width
    elsewhere = (targets >= 0) & (targets < classes) & ((targets < first) | (targets >= first + width))
    # A target that no rank has stays what it is, which is an error on each.
    here = torch.where((targets >= first) & (targets < first + width), targets - first, targets)
    here = here.masked_fill(elsewhere | ignored, _ELSEWHERE)
    found: Tensor = _Probabilities.apply(rows.reshape(-1, width), here.flatten(), group, dtype, label_smoothing > 0)
    counted = torch.zeros_like(targets).masked_fill(ignored, _ELSEWHERE)

    def reduced(each: Tensor) -> Tensor:
        # By torch's own loss of one class, for its order of sums and what it makes of rows that are all ignored.
        of_targets = each.view(targets.shape).unsqueeze(ahead)
        return F.nll_loss(of_targets, counted, ignore_index=_ELSEWHERE, reduction=reduction)

    if not label_smoothing:
        return reduced(found[0])
    return (1 - label_smoothing) * reduced(found[0]) + reduced(found[1]) * (label_smoothing / classes)


class _Probabilities(torch.autograd.Function):
    """Log-probabilities of rows' targets, and, if they are smoothed, their sums over all classes: (1 or 2, rows)."""

    @staticmethod
    def forward(ctx: Any, part: Tensor, here: Tensor, group: TensorGroup, dtype: torch.dtype, smoothed: bool) -> Tensor:
        wide = torch.promote_types(part.dtype, torch.float32)
        largest = part.amax(-1).to(wide)
        # What torch takes off the largest: as it sums exponentials, so do we. A part may be all -inf where others are not.
        off = F.log_softmax(part, -1, dtype=wide).amax(-1).neg_().masked_fill_(largest == -torch.inf, 0)
        told = [largest, off, F.nll_loss(part, here, ignore_index=_ELSEWHERE, reduction="none").to(wide)]
        if smoothed:
            told.append((part - largest.unsqueeze(-1)).sum(-1))
        # A sum and no gather: if another rank puts logits together meanwhile, the ranks are told, not mixed up.
        all_told = part.new_zeros((group.size, len(told), len(part)), dtype=wide)
        torch.stack(told, out=all_told[group.index])
        with group.asked_for():
            all_told = once(lambda: group.sum(all_told))
        largest = all_told[:, 0].amax(0)
        above = all_told[:, 0] - largest
        off = (above + all_told[:, 1]).logsumexp(0)
        found = [(-all_told[:, 2].sum(0) - largest) - off]
        classes = part.shape[-1] * group.size
        if smoothed:
            found.append((all_told[:, 3] + above * part.shape[-1]).sum(0) - classes * off)
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
