"""Vocabulary-parallel logits: a tensor subclass that stands for whole logits and stores this rank's part of the vocabulary.

It gathers the whole logits only if code uses them for more than their cross-entropy. Owns the list of operations that need
no gather; loss.py does the exchange of a loss. Every other operation runs on the whole logits, which all ranks of the group
gather together, once; they stay in memory as long as the tensor does.

I1: every result is bitwise that of whole logits; the cross-entropy's is so up to the rounding of sums.
I2: the gradient of the part is complete, whichever way losses were computed. So requests about the autograd graph (hooks,
    gradients) go to the part.
I3: the part is never written to. Writes go to the whole logits, which from then on are the values.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.overrides import handle_torch_function, has_torch_function
from typing_extensions import override

from lightning_ptm.errors import RankError
from lightning_ptm.parallel.between_layers import BetweenLayers
from lightning_ptm.parallel.exchange import TensorGroup
from lightning_ptm.parallel.loss import cross_entropy
from lightning_ptm.parallel.view_splits import View, view_of
from lightning_ptm.runtime.tensors.autograd_graphs import in_transform
from lightning_ptm.torch_internals import (
    is_alias,
    make_wrapper_subclass,
    parse_to,
    stop_compiled_code_before,
    tree_map_only,
)

Value = TypeVar("Value")
Each = Callable[[Tensor], Tensor]


def logits_of(part: Tensor, group: TensorGroup) -> Tensor:
    """Returns a tensor that stands for whole logits of shape (..., vocabulary).

    Args:
        part: this rank's part, of shape (..., vocabulary / ranks).
    """
    traced = torch.jit.is_tracing()  # type: ignore[attr-defined]
    if traced or in_transform() or not part.is_floating_point() or not part.dim():
        return group.put_together(part)
    group.forget_entered()
    group.meet_again()
    return _divided_logits(part, group, part.dim() - 1)


def head_logits(x: Tensor, weight: Tensor, bias: Tensor | None, between: BetweenLayers) -> Tensor:
    """Returns what stands for the logits of a cut head, which torch's function modes may replace (sliced_loss.py).

    Args:
        weight, bias: this rank's part.
        between: interface to the activations around the head.
    """
    if has_torch_function((x,)):
        out: Tensor = handle_torch_function(head_logits, (x,), x, weight, bias, between)
        return out
    return logits_of(between.columns(x, weight, bias), between.group)


def whole(value: Value) -> Value:
    """Returns a value, or nested containers, with divided logits replaced by whole ones, ordinary tensors. Collective."""
    result: Value = tree_map_only(DividedLogits, DividedLogits._whole, value)
    return result


def _divided_logits(part: Tensor, group: TensorGroup, vocabulary: int) -> DividedLogits:
    source, views = _source_of(part, group, vocabulary)
    return DividedLogits._made(source, part, vocabulary, views)


def _source_of(part: Tensor, group: TensorGroup, vocabulary: int) -> tuple[_Source, tuple[Each, ...]]:
    last = part.dim() - 1
    if vocabulary == last:
        return _Source(part, group, part.dtype), ()
    moved = _Source(part.movedim(vocabulary, last), group, part.dtype)
    return moved, (lambda each: each.movedim(last, vocabulary),)


class _Source:
    """State shared by logits and their views: the part, with the vocabulary last, and the whole once it is gathered.

    Args:
        dtype: dtype of the logits; the part may have the narrower dtype that they were cast from.
    """

    def __init__(self, part: Tensor, group: TensorGroup, dtype: torch.dtype) -> None:
        self.part, self.group, self.dtype = part, group, dtype
        self.gathered: Tensor | None = None

    def whole(self) -> Tensor:
        if self.gathered is None:
            try:
                with self.group.user_exchange(), torch.enable_grad():  # later operations may need its graph
                    self.gathered = self.group.put_together(self.part).to(self.dtype)
            except RankError as error:
                raise RankError(
                    f"{error}. Logits of a cut head were used for something other than F.cross_entropy, which gathers "
                    "them on all ranks of the tensor group: compute it on every rank, and choose the rank afterwards (if "
                    "rank == 0)"
                ) from error
        return self.gathered


class DividedLogits(Tensor):
    """Tensor that stands for whole logits and stores this rank's part of the vocabulary.

    Shape, dtype and device are those of the whole. `F.cross_entropy` with class indices, reshaping and slicing of dimensions
    other than the vocabulary, casts, scaling by numbers and `detach` exchange at most a few numbers a row. Every other
    operation gathers the logits and gives ordinary tensors: it is a collective of the tensor group. Printing is not: it
    shows a description.
    """

    _source: _Source
    _part: Tensor
    """The source's part after the views."""
    _vocabulary: int
    """Dimension of the vocabulary."""
    _views: tuple[Each, ...]

    @classmethod
    def _made(cls, source: _Source, part: Tensor, vocabulary: int, views: tuple[Each, ...]) -> DividedLogits:
        made: DividedLogits = _Stand.apply(part, source, vocabulary)
        made._source, made._part, made._vocabulary, made._views = source, part, vocabulary, views
        return made

    def _answer(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor | None:
        """Result of an operation that needs no whole logits; None: the operation needs them."""
        if func in _DIVIDED:
            return _DIVIDED[func](self, *args, **kwargs)
        view = view_of(func, tuple(self.shape), self._vocabulary, args, kwargs)
        return None if view is None else self._through(view)

    def _through(self, view: View) -> DividedLogits:
        part = view.of(self._part)
        vocabulary = view.vocabulary % part.dim()
        if is_alias(part, self._part):
            return self._made(self._source, part, vocabulary, (*self._views, view.of))
        copied = _divided_logits(part, self._source.group, vocabulary)
        return copied if self.dtype is part.dtype else copied._widened(self.dtype)

    def _widened(self, dtype: torch.dtype) -> DividedLogits:
        """The logits in a wider dtype, without a copy: the loss casts the part."""
        source = _Source(self._source.part, self._source.group, dtype)
        return self._made(source, self._part, self._vocabulary, self._views)

    def _each(self, compute: Each) -> DividedLogits:
        """Result of an element-wise function."""
        return _divided_logits(compute(self._part.to(self.dtype)), self._source.group, self._vocabulary)

    def _whole(self) -> Tensor:
        value = self._source.whole()
        for view in self._views:
            value = view(value)
        return value

    @classmethod
    @override
    @torch.compiler.disable
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        first = args[0] if args else None
        if isinstance(first, cls):
            if func in FACTS:
                with torch.DisableTorchFunctionSubclass():
                    return func(*args, **kwargs)
            if func in _OF_THE_GRAPH:
                return _OF_THE_GRAPH[func](first, *args[1:], **kwargs)
            found = None if first._source.gathered is not None else first._answer(func, args[1:], kwargs)
            if found is not None:
                return found
        if func is torch.autograd.grad:
            return _grad(*args, **kwargs)
        return func(*whole(args), **whole(kwargs))

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Handles operations that bypass __torch_function__: under DisableTorchFunctionSubclass, or called from C++."""
        return func(*whole(args), **whole(kwargs or {}))

    @override
    def __repr__(self, **ignored: Any) -> str:  # type: ignore[override]
        group = self._source.group
        return (
            f"DividedLogits(part {group.index + 1} of {group.size} of the vocabulary, shape={tuple(self.shape)}, "
            f"dtype={self.dtype}, device='{self.device}')"
        )

    __str__ = __repr__

    @override
    def __format__(self, spec: str) -> str:
        return format(repr(self), spec)


stop_compiled_code_before(DividedLogits)  # a graph break before it in compiled code


class _Stand(torch.autograd.Function):
    """Autograd function that makes the wrapper tensor and connects it to the part, for functions that bypass Python."""

    @staticmethod
    def forward(ctx: Any, part: Tensor, source: _Source, vocabulary: int) -> Tensor:
        ctx.group, ctx.vocabulary = source.group, vocabulary
        size, inner = source.group.size, part.stride(vocabulary)
        shape = list(part.shape)
        shape[vocabulary] *= size
        around = [at != vocabulary and each >= inner for at, each in enumerate(part.stride())]
        strides = [each * size if out else each for each, out in zip(part.stride(), around, strict=True)]
        made: Tensor = make_wrapper_subclass(DividedLogits, shape, strides, dtype=source.dtype, device=part.device)
        return made

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        return _part_of(gradient, ctx.group, ctx.vocabulary), None, None


def _part_of(gradient: Tensor, group: TensorGroup, vocabulary: int) -> Tensor:
    if isinstance(gradient, DividedLogits) and gradient._vocabulary == vocabulary:
        return gradient._part
    return whole(gradient).chunk(group.size, vocabulary)[group.index]


# -- autograd operations, done on the part ----------------------------------------------------------------------------


def _gradient(logits: DividedLogits) -> Tensor | None:
    gradient = logits._part.grad
    return None if gradient is None else _divided_logits(gradient, logits._source.group, logits._vocabulary)


def _register_hook(logits: DividedLogits, hook: Callable[[Tensor], Tensor | None]) -> Any:
    group, vocabulary = logits._source.group, logits._vocabulary

    def called(gradient: Tensor) -> Tensor | None:
        found = hook(_divided_logits(gradient, group, vocabulary))
        return None if found is None else _part_of(found, group, vocabulary)

    return logits._part.register_hook(called)


def _set_gradient(logits: DividedLogits, gradient: Tensor | None) -> None:
    given = None if gradient is None else _part_of(gradient, logits._source.group, logits._vocabulary)
    logits._part.grad = given


def _require_grad(logits: DividedLogits, requires_grad: bool = True) -> DividedLogits:
    if not logits._part.is_leaf:
        logits._part.requires_grad_(requires_grad)  # raises torch's own error
    elif logits._part.requires_grad is not requires_grad:
        _become(logits, requires_grad)
        if requires_grad:
            with torch.DisableTorchFunctionSubclass():  # for functions that bypass Python
                logits.requires_grad_()
                logits.register_post_accumulate_grad_hook(_hand_over)
    return logits


def _hand_over(logits: Tensor) -> None:
    """Moves a gradient that was accumulated in the wrapper to the part."""
    assert isinstance(logits, DividedLogits)
    with torch.DisableTorchFunctionSubclass():
        gradient, logits.grad = logits.grad, None
    if gradient is not None:
        mine, before = _part_of(gradient, logits._source.group, logits._vocabulary), logits._part.grad
        logits._part.grad = mine.clone() if before is None else before + mine


def _detach_in_place(logits: DividedLogits) -> DividedLogits:
    _become(logits, False)
    with torch.DisableTorchFunctionSubclass():
        logits.detach_()
    return logits


def _become(logits: DividedLogits, requires_grad: bool) -> None:
    """Makes the logits a new leaf with their current values."""
    group, vocabulary = logits._source.group, logits._vocabulary
    written = None if logits._source.gathered is None else logits._whole().detach()
    part = logits._part.to(logits.dtype) if written is None else _part_of(written, group, vocabulary)
    logits._part = part.detach().requires_grad_(requires_grad)
    logits._source, logits._views = _source_of(logits._part, group, vocabulary)


def _grad(outputs: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
    """torch.autograd.grad for inputs that may be divided logits (I2)."""
    wanted = [inputs] if isinstance(inputs, Tensor) else list(inputs)
    parts = [each._part if isinstance(each, DividedLogits) else each for each in wanted]
    found = torch.autograd.grad(whole(outputs), parts, *whole(args), **whole(kwargs))
    return tuple(
        _divided_logits(gradient, each._source.group, each._vocabulary)
        if isinstance(each, DividedLogits) and gradient is not None
        else gradient
        for each, gradient in zip(wanted, found, strict=True)
    )


# -- operations without a gather; they return None where they need one ------------------------------------------------


def _loss(
    logits: DividedLogits,
    target: Any,
    weight: Tensor | None = None,
    size_average: bool | None = None,
    ignore_index: int = -100,
    reduce: bool | None = None,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> Tensor | None:
    ahead = min(1, logits.dim() - 1)
    plain = weight is None and size_average is None and reduce is None and 0 <= label_smoothing <= 1
    if not plain or logits._vocabulary != ahead or isinstance(target, DividedLogits):
        return None
    shape = logits.shape[:ahead] + logits.shape[ahead + 1 :]
    if target.dtype is not torch.int64 or target.shape != shape or target.device != logits.device:
        return None
    kind, dtype = logits.device.type, logits.dtype
    if dtype.itemsize == 2 and torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind):
        dtype = torch.float32
    asked = {"ignore_index": ignore_index, "reduction": reduction, "label_smoothing": label_smoothing}
    return cross_entropy(logits._part, target, logits._source.group, dtype=dtype, **asked)  # type: ignore[arg-type]


def _cast(logits: DividedLogits, dtype: Any) -> DividedLogits | None:
    if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point:
        return None
    if dtype is logits.dtype:
        return logits
    if dtype is torch.float32 and logits.dtype.itemsize == 2:
        return logits._widened(dtype)
    return logits._each(lambda part: part.to(dtype))


def _to(logits: DividedLogits, *args: Any, **kwargs: Any) -> DividedLogits | None:
    given = [*args, *kwargs.values()]
    if kwargs.keys() - {"device", "dtype"} or not all(
        isinstance(each, (str, torch.device, torch.dtype)) for each in given
    ):
        return None
    device, dtype, *_ = parse_to(*args, **kwargs)
    return None if device is not None and device != logits.device else _cast(logits, dtype or logits.dtype)


def _scaled(way: Callable[..., Tensor]) -> Callable[..., DividedLogits | None]:
    def scaled(logits: DividedLogits, by: Any, **kwargs: Any) -> DividedLogits | None:
        usual = type(by) in (int, float) and not kwargs
        return logits._each(lambda part: way(part, by)) if usual else None

    return scaled


def _read(name: str) -> Any:
    """The function by which __torch_function__ names the read of an attribute."""
    return getattr(Tensor, name).__get__


def _written(name: str) -> Any:
    """The function by which __torch_function__ names the assignment of an attribute."""
    return getattr(Tensor, name).__set__


FACTS = frozenset(
    {
        *map(_read, ("shape", "dtype", "device", "ndim", "layout", "itemsize", "nbytes", "_version")),
        *map(_read, ("is_cuda", "is_cpu", "is_meta", "is_sparse")),
        *(
            getattr(Tensor, name)
            for name in ("size", "dim", "ndimension", "numel", "nelement", "element_size", "stride")
        ),
        *(getattr(Tensor, name) for name in ("is_floating_point", "is_complex", "get_device", "is_contiguous")),
        *(getattr(Tensor, name) for name in ("__len__", "__hash__", "is_inference")),
        *(torch.numel, torch.is_floating_point, torch.is_complex, torch.is_inference),
    }
)
"""Functions that read no element of a tensor."""
_OF_THE_GRAPH: Mapping[Any, Callable[..., Any]] = {
    _read("grad_fn"): lambda logits, *_: logits._part.grad_fn,
    _read("requires_grad"): lambda logits, *_: logits._part.requires_grad,
    _read("is_leaf"): lambda logits, *_: logits._part.is_leaf,
    _read("retains_grad"): lambda logits, *_: logits._part.retains_grad,
    _read("grad"): lambda logits, *_: _gradient(logits),
    _written("grad"): _set_gradient,
    _written("requires_grad"): _require_grad,
    Tensor.requires_grad_: _require_grad,
    **dict.fromkeys((Tensor.detach_, torch.detach_), _detach_in_place),
    Tensor.retain_grad: lambda logits: logits._part.retain_grad(),
    Tensor.register_hook: _register_hook,
}
_DIVIDED: Mapping[Any, Callable[..., Tensor | None]] = {
    F.cross_entropy: _loss,
    Tensor.float: lambda logits: _cast(logits, torch.float32),
    Tensor.double: lambda logits: _cast(logits, torch.float64),
    Tensor.half: lambda logits: _cast(logits, torch.float16),
    Tensor.bfloat16: lambda logits: _cast(logits, torch.bfloat16),
    Tensor.type: lambda logits, dtype=None, **_: _cast(logits, dtype),
    Tensor.to: _to,
    **dict.fromkeys((Tensor.mul, torch.mul, Tensor.__mul__, Tensor.__rmul__), _scaled(torch.mul)),
    **dict.fromkeys((Tensor.div, torch.div, Tensor.__truediv__, torch.true_divide), _scaled(torch.div)),
    **dict.fromkeys((Tensor.tanh, torch.tanh), lambda logits: logits._each(torch.tanh)),
}
