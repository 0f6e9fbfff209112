"""Loss in slices for models of Transformers, whose own forward computes head and loss: `slice_loss`.

In a training forward with labels, the head returns `PendingLogits`: a tensor subclass that stands for logits, and has the
head's input instead. It knows three things: views that leave the vocabulary as it is, casts, and F.cross_entropy, which
sliced_loss.py computes. Every other operation computes whole logits by calling the head. After the forward they refuse to be
used: weights may have been updated or released since.

I1: numbers are those of `sliced_cross_entropy`; with at most one slice, bitwise those of the model's own forward.
I2: the head's weight is read in calls of the head alone, so that hooks of a strategy fetch it.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from typing_extensions import override

from lightning_ptm.errors import ConfigError, UsageError
from lightning_ptm.parallel.logits import FACTS
from lightning_ptm.parallel.sliced_loss import can_be_sliced, sliced_cross_entropy
from lightning_ptm.parallel.view_splits import View, view_of
from lightning_ptm.runtime.autograd.recompute import replace
from lightning_ptm.torch_internals import make_wrapper_subclass, parse_to, stop_compiled_code_before, tree_map_only

Value = TypeVar("Value")
Model = TypeVar("Model", bound=nn.Module)
_PACKAGE = "transformers"


def slice_loss(model: Model, tokens: int | None = None) -> Model:
    """Makes a model of Transformers compute its loss in slices of tokens when it trains; returns the model.

    Whole logits are then never in memory: `logits` of its output, in a forward with labels and gradients, refuse to be used.
    A forward without labels, or under `torch.no_grad`, is as before. Works with any strategy.

    Args:
        model: a model whose class, loss and head (a Linear) are Transformers' and torch's own, such as LlamaForCausalLM or
            BertForMaskedLM. Models that compute with their logits before the loss (a soft cap) compute whole ones.
        tokens: as in `sliced_cross_entropy`.

    Raises:
        ConfigError: class, loss or head are not.
    """
    name = type(model).__name__
    get_head, loss = getattr(model, "get_output_embeddings", None), getattr(model, "loss_function", None)
    head = get_head() if callable(get_head) else None
    reason = None
    if not _is_of_transformers(type(model)):
        reason = f"its class is of {type(model).__module__}"
    elif type(head) is not nn.Linear:
        reason = "it has no head" if head is None else f"its head is a {type(head).__name__}"
    elif not _is_of_transformers(loss):
        reason = f"its loss_function is of {getattr(loss, '__module__', None)}"
    elif "forward" in vars(model):
        reason = "its forward was replaced"
    if reason is not None or head is None:
        raise ConfigError(
            f"slice_loss got a {name}, and {reason}: only head and loss of Transformers' own classes are computed in slices, "
            f"others might need their logits; leave it out, or call sliced_cross_entropy in your own loss"
        )
    replace(model, forward=_Forward(model, head, tokens))
    return model


def _is_of_transformers(value: Any) -> bool:
    return getattr(value, "__module__", "").partition(".")[0] == _PACKAGE


class _Forward:
    """Forward of a model with pending logits."""

    def __init__(self, model: nn.Module, head: nn.Linear, tokens: int | None) -> None:
        self._model, self._head, self._tokens = model, head, tokens
        self.__signature__ = self._parameters = inspect.signature(model.forward)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        own = type(self._model).forward
        if not torch.is_grad_enabled() or not can_be_sliced(self._head):
            return own(self._model, *args, **kwargs)
        given = self._parameters.bind_partial(*args, **kwargs).arguments
        if given.get("labels", given.get("kwargs", {}).get("labels")) is None:
            return own(self._model, *args, **kwargs)
        pending = _Pending(self._head, self._tokens)
        try:
            with pending.instead_of_logits():
                return own(self._model, *args, **kwargs)
        finally:
            pending.is_over = pending.whole is None


class _Pending:
    """State shared by the pending logits of one forward.

    Attributes:
        is_over: whether the forward has ended without whole logits.
        whole: whole logits, once an operation has needed them.
    """

    def __init__(self, head: nn.Linear, tokens: int | None) -> None:
        self.head, self.tokens = head, tokens
        self.is_over = False
        self.whole: Tensor | None = None
        self._own: dict[str, Any] = {}
        """The head's forward under tensor parallelism."""

    @contextmanager
    def instead_of_logits(self) -> Iterator[None]:
        """Context in which the head returns pending logits."""
        own = vars(self.head).get("forward")
        undo = replace(self.head, forward=self._forward)
        self._own = {} if own is None else {"forward": own}
        try:
            yield
        finally:
            undo()

    @contextmanager
    def computing(self) -> Iterator[None]:
        """Context in which the head computes again."""
        attributes = vars(self.head)
        forward = attributes.pop("forward", None)
        attributes.update(self._own)
        try:
            yield
        finally:
            attributes["forward"] = forward

    def _forward(self, x: Tensor) -> Tensor:
        if not x.is_floating_point() or isinstance(x, PendingLogits):
            with self.computing():
                return self.head(x)
        kind, dtype = x.device.type, x.dtype
        if torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind) and dtype is not torch.float64:
            dtype = torch.get_autocast_dtype(kind)
        return PendingLogits.made(self, x, x, x.dim() - 1, dtype, ())


class PendingLogits(Tensor):
    """Tensor that stands for logits which are computed when they are used, in slices if it is for their cross-entropy."""

    _pending: _Pending
    _x: Tensor
    """The head's input."""
    _viewed: Tensor
    """It after the views."""
    _vocabulary: int
    """Dimension of the vocabulary."""
    _views: tuple[Callable[[Tensor], Tensor], ...]

    @classmethod
    def made(
        cls,
        pending: _Pending,
        x: Tensor,
        viewed: Tensor,
        vocabulary: int,
        dtype: torch.dtype,
        views: tuple[Callable[[Tensor], Tensor], ...],
    ) -> PendingLogits:
        """Returns logits in a dtype."""
        shape = [*viewed.shape]
        shape[vocabulary] = pending.head.out_features
        strides, step = [0] * len(shape), 1
        for at in sorted(range(len(shape)), key=lambda at: viewed.stride(at)):  # the order of dimensions in memory
            strides[at], step = step, step * shape[at]
        made: PendingLogits = make_wrapper_subclass(cls, shape, strides, dtype=dtype, device=viewed.device)
        made._pending, made._x, made._viewed, made._vocabulary, made._views = pending, x, viewed, vocabulary, views
        return made

    def _answer(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor | None:
        """Result of an operation that needs no whole logits; None: the operation needs them."""
        if func in _KNOWN:
            return _KNOWN[func](self, *args, **kwargs)
        view = view_of(func, tuple(self.shape), self._vocabulary, args, kwargs)
        return None if view is None else self._through(view)

    def _through(self, view: View) -> PendingLogits:
        viewed = view.of(self._viewed)
        vocabulary = view.vocabulary % viewed.dim()
        return self.made(self._pending, self._x, viewed, vocabulary, self.dtype, (*self._views, view.of))

    def _whole(self) -> Tensor:
        if self._pending.whole is None:
            with self._pending.computing():
                self._pending.whole = self._pending.head(self._x)
        value = self._pending.whole
        for view in self._views:
            value = view(value)
        return value.to(self.dtype)

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
            first._refuse_if_over()
            found = None if first._pending.whole is not None else first._answer(func, args[1:], kwargs)
            if found is not None:
                return found
        return func(*_wholly(args), **_wholly(kwargs))

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Refuses operations that bypass __torch_function__, and would have no graph."""
        raise UsageError(
            f"{func} uses logits of slice_loss past torch's Python functions, which would leave their gradients out; do not "
            f"use slice_loss for this model"
        )

    def _refuse_if_over(self) -> None:
        if self._pending.is_over:
            raise UsageError(
                "logits of a training forward were used after it, and slice_loss has not computed them as a whole; compute "
                "them under torch.no_grad() or without labels, or do not use slice_loss for this model"
            )

    @override
    def __repr__(self, **ignored: Any) -> str:  # type: ignore[override]
        return f"PendingLogits(shape={tuple(self.shape)}, dtype={self.dtype}, device='{self.device}')"

    __str__ = __repr__

    @override
    def __format__(self, spec: str) -> str:
        return format(repr(self), spec)


stop_compiled_code_before(PendingLogits)


def _wholly(value: Value) -> Value:
    """A value, or nested containers, with whole logits, ordinary tensors."""

    def whole(logits: PendingLogits) -> Tensor:
        logits._refuse_if_over()
        return logits._whole()

    result: Value = tree_map_only(PendingLogits, whole, value)
    return result


# -- operations without whole logits; they return None where they need them --------------------------------------------


def _loss(
    logits: PendingLogits,
    target: Any,
    weight: Tensor | None = None,
    size_average: bool | None = None,
    ignore_index: int = -100,
    reduce: bool | None = None,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> Tensor | None:
    ahead = min(1, logits.dim() - 1)
    shape = logits.shape[:ahead] + logits.shape[ahead + 1 :]
    plain = weight is None and size_average is None and reduce is None and logits._vocabulary == ahead
    if not plain or target.dtype is not torch.int64 or target.shape != shape or target.device != logits.device:
        return None
    kind = logits.device.type
    if logits.dtype.itemsize == 2 and not (torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind)):
        return None  # torch rounds such a loss to 16 bits
    x, pending = logits._viewed.movedim(ahead, -1), logits._pending
    options = {"ignore_index": ignore_index, "reduction": reduction, "label_smoothing": label_smoothing}
    with pending.computing():
        return sliced_cross_entropy(pending.head, x, target, tokens=pending.tokens, **options)  # type: ignore[arg-type]


def _cast(logits: PendingLogits, dtype: Any) -> PendingLogits | None:
    if dtype is logits.dtype:
        return logits
    if dtype is not torch.float32 or logits.dtype.itemsize != 2:
        return None
    return logits.made(logits._pending, logits._x, logits._viewed, logits._vocabulary, dtype, logits._views)


def _to(logits: PendingLogits, *args: Any, **kwargs: Any) -> PendingLogits | None:
    given = [*args, *kwargs.values()]
    if kwargs.keys() - {"device", "dtype"} or not all(
        isinstance(each, (str, torch.device, torch.dtype)) for each in given
    ):
        return None
    device, dtype, *_ = parse_to(*args, **kwargs)
    return None if device is not None and device != logits.device else _cast(logits, dtype or logits.dtype)


_KNOWN: dict[Any, Callable[..., Tensor | None]] = {
    F.cross_entropy: _loss,
    Tensor.float: lambda logits: _cast(logits, torch.float32),
    Tensor.to: _to,
}
