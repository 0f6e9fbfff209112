"""Cross-entropy of a linear head, in slices of tokens: whole logits are never in memory.

The forward computes a slice's logits, then its loss and gradients: a training step has the same three products as with whole
logits. The backward scales the gradients by that of the loss. It computes them again, with a fourth product, when the same
graph has a second backward, for losses of each token, and in fp16, where gradients without the loss scale underflow.

I1: for as many tokens as a slice has, everything is bitwise that of whole logits: the same operations run.
I2: for more, the loss of each token is torch's for its logits. Logits and gradients of inputs are bitwise those of whole
    products where the library that multiplies matrices chooses the same order of sums for fewer rows. Gradients of the weight
    are sums over slices: in fp32 and fp64 in the products' dtype, in 16 bits the slices' rounded products are added in fp32.
    Where tensor parallelism cuts the head, the ranks exchange three numbers a token in each slice, and the loss is that of
    loss.py.
I3: the head is called once, as a module, so that a strategy fetches its weight once.
"""

from __future__ import annotations

import dataclasses
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.overrides import TorchFunctionMode

from lightning_ptm.errors import ConfigError
from lightning_ptm.parallel.between_layers import BetweenLayers
from lightning_ptm.parallel.exchange import TensorGroup
from lightning_ptm.parallel.logits import head_logits
from lightning_ptm.parallel.loss import PartOfRows, WholeRows, here_of
from lightning_ptm.runtime.autograd.recompute import RecomputedForwardWrapper
from lightning_ptm.runtime.tensors.autograd_graphs import in_transform
from lightning_ptm.torch_internals import forward_hooks_of, is_compiled, log_softmax_backward, parameters_in

SLICE_BYTES = 256 << 20
"""Bytes of a slice's logits, in the dtype of the loss, if the caller gives no number of tokens."""
_ROWS = 384
"""Slices are multiples of so many tokens: MKL adds products of fp32 and fp64 in blocks of 384 rows, so that most sums over
slices are bitwise those of the whole."""
_BLOCK = 8192
"""Rows of a 16-bit weight gradient that are computed at once, before they are added in fp32."""


def sliced_cross_entropy(
    head: nn.Module,
    x: Tensor,
    targets: Tensor,
    *,
    tokens: int | None = None,
    reduction: str = "mean",
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
) -> Tensor:
    """Returns the cross-entropy of `head(x)`, in fp32 or the wider dtype of the logits, without keeping whole logits.

    Whole logits are computed all the same where there are no more than `tokens` tokens, or where `head` is not torch's Linear
    with its own forward, has hooks or is compiled.

    Args:
        head: linear layer from a token's vector to logits.
        x: vectors, (..., width).
        targets: indices of classes, (...), int64.
        tokens: tokens whose logits are in memory at once; None: as many as have 256 MiB of logits, but at least 384.
        reduction: "mean" over tokens that are not ignored, their "sum", or "none".
        ignore_index: target of tokens without a loss.
        label_smoothing: probability that is spread evenly over all classes.
        z_loss: factor of the square of the log of the sum of exponentials, which is added to each token's loss (PaLM,
            section 5).

    Raises:
        ConfigError: `tokens` is below 1, or `reduction` is another word.
    """
    if (tokens is not None and tokens < 1) or reduction not in ("mean", "sum", "none"):
        raise ConfigError(
            f"sliced_cross_entropy got tokens={tokens} and reduction={reduction!r}, which leaves no loss to compute; give 1 "
            f"token or more (None: chosen by the bytes of logits), and 'mean', 'sum' or 'none'"
        )
    loss = _Loss(ignore_index, label_smoothing, z_loss)
    at_once = tokens or _fitting_tokens(getattr(head, "out_features", 1), x.dtype)
    if targets.numel() > at_once and x.is_floating_point() and can_be_sliced(head):
        with _LossInPlaceOfLogits(head, x, targets, _Slices(loss, at_once, reduction)) as way:
            logits = head(x)
        if way.is_taken:
            return logits  # the loss
    else:
        logits = head(x)
    rows = logits.to(torch.promote_types(logits.dtype, torch.float32)).flatten(0, -2)
    each = loss.whole(rows, targets.flatten(), reduction)
    return each.view(targets.shape) if reduction == "none" else each


def _fitting_tokens(classes: int, dtype: torch.dtype) -> int:
    row_bytes = classes * torch.promote_types(dtype, torch.float32).itemsize
    return max(1, SLICE_BYTES // row_bytes // _ROWS) * _ROWS


def can_be_sliced(head: nn.Module) -> bool:
    """Whether a head is a Linear and nothing more, outside of compiled and transformed code."""
    if torch.compiler.is_compiling() or torch.jit.is_tracing() or in_transform():  # type: ignore[attr-defined]
        return False
    own = isinstance(head, nn.Linear) and type(head).forward is nn.Linear.forward
    recomputed = isinstance(vars(head).get("forward"), RecomputedForwardWrapper)
    return own and not recomputed and not is_compiled(head) and not forward_hooks_of(head)


@dataclass(frozen=True, slots=True)
class _Loss:
    """The loss of rows of logits."""

    ignore_index: int
    label_smoothing: float
    z_loss: float

    def whole(self, logits: Tensor, targets: Tensor, reduction: str) -> Tensor:
        """Returns the loss of whole logits, (tokens, classes), with autograd's graph."""
        given = {"ignore_index": self.ignore_index, "label_smoothing": self.label_smoothing}
        found = F.cross_entropy(logits, targets, reduction=reduction, **given)  # type: ignore[arg-type]
        if not self.z_loss:
            return found
        squares = (self.z_loss * logits.logsumexp(-1).square()).masked_fill(targets == self.ignore_index, 0)
        return found + self.reduced(squares, targets, reduction)

    def of_rows(self, targets: Tensor, gradient: Tensor, reduction: str) -> Tensor:
        """Returns the gradients of the tokens' losses, from that of the result."""
        ignored = targets == self.ignore_index
        each = gradient / ignored.logical_not().sum() if reduction == "mean" else gradient
        return each.expand(targets.shape).masked_fill(ignored, 0)

    def reduced(self, rows: Tensor, targets: Tensor, reduction: str) -> Tensor:
        """Returns the result from the tokens' losses, by torch's own loss of one class, for its order of sums."""
        if reduction == "none":
            return rows
        counted = torch.zeros_like(targets).masked_fill_(targets == self.ignore_index, -1)
        return F.nll_loss(rows.neg().unsqueeze(-1), counted, ignore_index=-1, reduction=reduction)


@dataclass(frozen=True, slots=True)
class _Slices:
    """Options of a loss in slices, and the number of tokens of a slice."""

    loss: _Loss
    tokens: int
    reduction: str
    group: TensorGroup | None = None
    """The ranks that have parts of the vocabulary."""


class _Rows:
    """A slice: its tokens' losses, and the gradient of its logits, which it overwrites."""

    def __init__(self, loss: _Loss, logits: Tensor, targets: Tensor) -> None:
        self._loss, self._targets = loss, targets
        self._wide = torch.promote_types(logits.dtype, torch.float32)
        self._of_sums = logits.to(self._wide).logsumexp(-1) if loss.z_loss else None
        self._logs = F.log_softmax(logits, -1, dtype=self._wide)

    def losses(self) -> Tensor:
        """Returns each token's loss."""
        found = F.nll_loss(self._logs, self._targets, ignore_index=self._loss.ignore_index, reduction="none")
        spread = self._logs.sum(-1) if self._loss.label_smoothing else None
        return _with_terms(self._loss, found, spread, self._of_sums, self._targets, self._logs.shape[-1])

    def gradient(self, of_rows: Tensor, into: Tensor | None) -> Tensor:
        """Returns the gradient of the logits, in the dtype of the loss.

        Args:
            of_rows: gradients of the tokens' losses, 0 for ignored tokens.
            into: memory of the gradient of an earlier slice, of as many tokens at least, which is used again.
        """
        loss, logs = self._loss, self._logs
        of_logs = torch.empty_like(logs) if into is None else into[: len(logs)]
        if loss.label_smoothing:
            of_logs.copy_((of_rows * (-loss.label_smoothing / logs.shape[-1])).unsqueeze(-1).expand_as(logs))
        else:
            of_logs.zero_()
        place = self._targets.masked_fill(self._targets == loss.ignore_index, 0).unsqueeze(-1)
        of_logs.scatter_add_(1, place, (of_rows * (loss.label_smoothing - 1)).unsqueeze(-1))
        # By autograd's own function, for its rounding.
        found = log_softmax_backward(of_logs, logs, 1, logs.dtype, out=of_logs)
        if self._of_sums is not None:
            found.add_(logs.exp().mul_((2 * loss.z_loss * of_rows * self._of_sums).unsqueeze(-1)))
        return found


class _DividedRows:
    """`_Rows` of this rank's part of the logits. Collective in the group, unless the whole rows are known."""

    def __init__(
        self, loss: _Loss, part: Tensor, targets: Tensor, group: TensorGroup, known: WholeRows | None = None
    ) -> None:
        self._loss, self._targets = loss, targets
        self._classes = part.shape[-1] * group.size
        here = here_of(targets, part.shape[-1], group, loss.ignore_index)
        self.whole = known or WholeRows.exchanged(part, here, group, smoothed=loss.label_smoothing > 0)
        self._mine = PartOfRows(part, here, self.whole.largest, self.whole.off)

    def losses(self) -> Tensor:
        """Returns each token's loss."""
        found = self.whole.of_targets.neg().masked_fill(self._targets == self._loss.ignore_index, 0)
        return _with_terms(self._loss, found, self.whole.of_all, self._of_sums(), self._targets, self._classes)

    def gradient(self, of_rows: Tensor, into: Tensor | None) -> Tensor:
        """Returns the gradient of the part, in the dtype of the loss, in new memory."""
        loss = self._loss
        of_all = of_rows * (-loss.label_smoothing / self._classes) if loss.label_smoothing else None
        of_targets = of_rows * (loss.label_smoothing - 1)
        found = self._mine.gradient(self.whole.largest.dtype, of_targets, of_all, self._classes)
        of_sums = self._of_sums()
        if of_sums is not None:
            logs = (self._mine.part - of_sums.unsqueeze(-1)).exp_()
            found.add_(logs.mul_((2 * loss.z_loss * of_rows * of_sums).unsqueeze(-1)))
        return found

    def _of_sums(self) -> Tensor | None:
        return self.whole.largest + self.whole.off if self._loss.z_loss else None


def _with_terms(
    loss: _Loss, found: Tensor, spread: Tensor | None, of_sums: Tensor | None, targets: Tensor, classes: int
) -> Tensor:
    """Returns the tokens' losses with label smoothing and z-loss.

    Args:
        found: losses without them.
        spread: sums of all log-probabilities, for label smoothing.
        of_sums: logs of the sums of exponentials, for z-loss.
    """
    ignored = targets == loss.ignore_index
    if spread is not None:
        spread = spread.masked_fill(ignored, 0) * (loss.label_smoothing / classes)
        found = found * (1 - loss.label_smoothing) - spread
    return found if of_sums is None else found + (of_sums.square() * loss.z_loss).masked_fill(ignored, 0)


class _LossInPlaceOfLogits(TorchFunctionMode):
    """Context in which a Linear's forward returns the loss of its logits; `is_taken`: whether one did."""

    def __init__(self, head: nn.Module, x: Tensor, targets: Tensor, slices: _Slices) -> None:
        super().__init__()
        self._head, self._x, self._targets, self._slices = head, x, targets, slices
        self.is_taken = False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self.is_taken or func not in (F.linear, head_logits):
            return func(*args, **(kwargs or {}))
        # Hooks of other strategies may cast `x`, and parametrizations compute the weight.
        is_head = args[0] is self._x or args[1] is parameters_in(self._head).get("weight")
        if func is head_logits and is_head and type(args[3]) is BetweenLayers:
            x, weight, bias, between = args
            self.is_taken = True
            slices = dataclasses.replace(self._slices, group=between.group)
            found = _loss(between.enter(x), weight, bias, targets=self._targets, slices=slices)
            between.group.forget_entered()
            return found
        if func is F.linear and is_head and "forward" not in vars(self._head):
            self.is_taken = True
            return _loss(*args, targets=self._targets, slices=self._slices, **(kwargs or {}))
        return func(*args, **(kwargs or {}))


def _loss(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    targets: Tensor,
    slices: _Slices,
) -> Tensor:
    kind = input.device.type
    given = [input, weight] if bias is None else [input, weight, bias]
    if torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind):
        dtype = torch.get_autocast_dtype(kind)
        given = [each if each.dtype is torch.float64 else each.to(dtype) for each in given]
    x, weight, *biases = given
    found: Tensor = _SlicedLoss.apply(
        x.flatten(0, -2), weight, biases[0] if biases else None, targets.flatten(), slices, torch.is_grad_enabled()
    )
    return found.view(targets.shape) if slices.reduction == "none" else found


@dataclass(frozen=True, slots=True)
class _Wanted:
    """The gradients that are computed."""

    x: bool
    weight: bool
    bias: bool


class _Gradients:
    """Gradients of a head's inputs, to which slices are added.

    Args:
        x: the head's inputs, (tokens, width).
        weight: (classes, width).
    """

    def __init__(self, x: Tensor, weight: Tensor, bias: Tensor | None, wanted: _Wanted) -> None:
        self._x, self._weight, self._wanted = x, weight, wanted
        self._wide = torch.promote_types(weight.dtype, torch.float32)
        self.x = torch.empty_like(x) if wanted.x else None
        self.weight: Tensor | None = None
        """In 16 bits, the product of the first slice until the sum is rounded."""
        self._sum: Tensor | None = None
        """Sum of products of 16 bits, if there are more than two: two are added as precisely without it."""
        self.bias = torch.zeros_like(bias, dtype=self._wide) if wanted.bias and bias is not None else None

    def add(self, of_logits: Tensor, here: slice) -> None:
        """Adds the slice `here`, whose logits have this gradient."""
        if self.x is not None:
            torch.mm(of_logits, self._weight, out=self.x[here])
        if self.bias is not None:
            self.bias += of_logits.sum(0)
        if self._wanted.weight and self._wide is self._weight.dtype:
            if self.weight is None:
                self.weight = of_logits.t() @ self._x[here]
            else:
                torch.addmm(self.weight, of_logits.t(), self._x[here], out=self.weight)
        elif self._wanted.weight:
            self._add_rounded(of_logits, here, last=here.stop >= len(self._x))

    def _add_rounded(self, of_logits: Tensor, here: slice, *, last: bool) -> None:
        """Adds a slice's product of 16 bits to the weight's gradient, in fp32.

        Args:
            last: whether no slice follows, so that the sum is rounded.
        """
        if self.weight is None:
            self.weight = of_logits.t() @ self._x[here]
            return
        if self._sum is None and not last:
            self._sum = self.weight.to(self._wide)
        total = self.weight if self._sum is None else self._sum
        for at in range(0, len(total), _BLOCK):
            block = slice(at, at + _BLOCK)
            total[block].add_(of_logits[:, block].t() @ self._x[here])
            if last and self._sum is not None:
                self.weight[block] = self._sum[block]

    def scale_(self, by: Tensor) -> None:
        """Multiplies the gradients by a number."""
        for each in (self.x, self.weight, self.bias):
            if each is not None:
                each.mul_(by)

    def round(self) -> None:
        """Rounds the bias's sum to the dtype of the weight, after the last slice."""
        self._sum = None
        self.bias = None if self.bias is None else self.bias.to(self._weight.dtype)


class _SlicedLoss(torch.autograd.Function):
    """Loss of a linear layer's outputs."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, slices: _Slices, training: bool
    ) -> Tensor:
        ctx.slices = slices
        ctx.wanted = _Wanted(*ctx.needs_input_grad[:3])
        ctx.found = None
        saved = [x, weight, bias, targets]
        if training and slices.reduction != "none" and x.dtype is not torch.float16:
            if x.is_meta:  # a forecast, which counts a forward and the memory that a step takes
                # Gradients, and the logits of one slice, which exist before them: a larger batch never takes less memory.
                saved += [torch.empty_like(each) for each in (x, weight)]
                saved.append(
                    x.new_empty((slices.tokens, len(weight)), dtype=torch.promote_types(x.dtype, torch.float32))
                )
            else:
                ctx.found = _Gradients(x, weight, bias, ctx.wanted)
        ctx.save_for_backward(*saved)
        of_rows = None
        if ctx.found is not None:
            one = torch.ones((), dtype=torch.promote_types(x.dtype, torch.float32), device=x.device)
            of_rows = slices.loss.of_rows(targets, one, slices.reduction)
        ctx.known = []
        losses = _computed(x, weight, bias, targets, slices, ctx.known, ctx.found, of_rows)
        return slices.loss.reduced(losses, targets, slices.reduction)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        found, ctx.found = ctx.found, None
        if found is not None:
            found.scale_(gradient)
        else:
            x, weight, bias, targets = ctx.saved_tensors
            found = _Gradients(x, weight, bias, ctx.wanted)
            of_rows = ctx.slices.loss.of_rows(targets, gradient, ctx.slices.reduction)
            _computed(x, weight, bias, targets, ctx.slices, ctx.known, found, of_rows)
        return found.x, found.weight, found.bias, None, None, None


def _no_autocast(kind: str) -> AbstractContextManager[object]:
    """Context without autocast, which has chosen the dtypes already."""
    return torch.autocast(kind, enabled=False) if torch.amp.is_autocast_available(kind) else nullcontext()


def _computed(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    targets: Tensor,
    slices: _Slices,
    known: list[WholeRows],
    gradients: _Gradients | None,
    of_rows: Tensor | None,
) -> Tensor:
    """Returns each token's loss; adds to `gradients` for these gradients of the tokens' losses.

    Args:
        known: by slice, what the ranks of a group have exchanged; empty: they exchange, and it is added.
    """
    wide = torch.promote_types(x.dtype, torch.float32)
    losses = torch.empty(targets.shape, dtype=wide, device=x.device)
    exchanged = iter(known[:])
    before: Tensor | None = None
    """In 16 bits, the gradient of the logits of the slice before, whose memory is used again: the system clears new memory.
    In others there is no room for it beside logits."""
    with _no_autocast(x.device.type):
        tokens = len(targets) if x.is_meta else slices.tokens
        for start in range(0, len(targets), tokens):
            here = slice(start, start + tokens)
            logits = F.linear(x[here], weight, bias)
            dtype = logits.dtype
            rows: _Rows | _DividedRows
            if slices.group is None:
                rows = _Rows(slices.loss, logits, targets[here])
            else:
                whole = next(exchanged, None)
                rows = _DividedRows(slices.loss, logits, targets[here], slices.group, whole)
                if whole is None:
                    known.append(rows.whole)
            del logits
            losses[here] = rows.losses()
            if gradients is not None and of_rows is not None:
                found = rows.gradient(of_rows[here], before)
                before = found if slices.group is None and found.dtype is not dtype else None
                del rows
                gradients.add(found.to(dtype), here)
                del found
        if gradients is not None:
            gradients.round()
    return losses
