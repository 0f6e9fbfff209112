"""A default dtype for tensors that a stretch of code makes, in one thread.

A forward in a true 16- or 64-bit precision runs with its dtype as torch's default (Lightning's rule, so that what a module
makes is of that dtype). The default is the process's: an update beside a forward, or one that a forward waits for, would
make numbers of that dtype, where an optimizer's step behind the backward makes them of the ordinary one.

I1: with `DefaultDtype(dtype)`, what makes tensors makes them as it would with this default, where the caller names no dtype;
    everything else goes by as it is. Not seen: what asks for the default itself (`torch.get_default_dtype`), as torch's own
    optimizers do when they make their states, and promotion (an integer tensor times a float).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

_ALWAYS: frozenset[Callable[..., Any]] = frozenset(
    (
        torch.zeros,
        torch.ones,
        torch.empty,
        torch.empty_strided,
        torch.eye,
        torch.rand,
        torch.randn,
        torch.linspace,
        torch.logspace,
        torch.scalar_tensor,
    )
)
"""Functions that make tensors of the default dtype, whatever they are given."""
_OF_FLOATS: frozenset[Callable[..., Any]] = frozenset((torch.full, torch.arange))
_OF_DATA: frozenset[Callable[..., Any]] = frozenset((torch.tensor, torch.as_tensor, torch.asarray))
"""Functions that make tensors of the default dtype where they are given Python's floats, or data of these."""


class DefaultDtype(TorchFunctionMode):
    """Makes `dtype` the default of what makes tensors in this thread, while it is entered; see I1."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self._dtype = dtype

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        given = [*args, *kwargs.values()]
        makes = (
            func in _ALWAYS
            or (func in _OF_FLOATS and any(type(each) is float for each in given))
            or (func in _OF_DATA and _is_of_floats(given[0]))
        )
        if makes and kwargs.get("dtype") is None:
            kwargs = {**kwargs, "dtype": self._dtype}
        return func(*args, **kwargs)


def _is_of_floats(data: Any) -> bool:
    """Whether data are Python's floats, among integers maybe, or nothing at all. NumPy's floats have a dtype of their own."""
    if isinstance(data, list | tuple):
        return not data or any(map(_is_of_floats, data))
    return type(data) is float
