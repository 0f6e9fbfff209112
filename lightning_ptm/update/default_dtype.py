"""A default dtype for one thread, as a torch function mode.

Lightning runs a forward in a true 16- or 64-bit precision with that dtype as torch's default, so that tensors made by the
module get it. The default holds for the process: an update that runs during a forward would make its tensors in that dtype,
whereas an optimizer step after the backward makes them in the ordinary one.

I1: under `DefaultDtype(dtype)`, factory functions make tensors as they would with this default, where the caller names no
    dtype; all other functions are unchanged. Two things are not covered: code that reads the default itself
    (`torch.get_default_dtype`), as torch's own optimizers do when they make their states, and type promotion (an integer
    tensor times a float).
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
"""Functions that make tensors of the default dtype for all arguments."""
_OF_FLOATS: frozenset[Callable[..., Any]] = frozenset((torch.full, torch.arange))
_OF_DATA: frozenset[Callable[..., Any]] = frozenset((torch.tensor, torch.as_tensor, torch.asarray))
"""Functions that make tensors of the default dtype if their arguments are Python floats, or data of Python floats."""


class DefaultDtype(TorchFunctionMode):
    """Context in which `dtype` is the default dtype of new tensors in this thread; see I1 for its limits."""

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
    """Whether data are empty or Python floats, possibly among integers. NumPy's floats have a dtype of their own."""
    if isinstance(data, list | tuple):
        return not data or any(map(_is_of_floats, data))
    return type(data) is float
