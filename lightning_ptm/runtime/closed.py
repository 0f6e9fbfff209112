"""Parameters whose values nobody may read or write now: a class that a parameter has as long as it is closed.

Owns which questions are about the tensor (its shape, its gradient, its place in a graph) and which about its values. Knows
tensors, never pages. torch does the same for parameters that are not initialised yet (`UninitializedParameter`).

I1: a closed parameter answers every question about the tensor, and raises at any other that Python can ask of it; code that
asks no Python (a kernel of somebody's own) finds what the storage holds. I2: it is the same object, of a subclass of its own
class: identity, attributes, hooks and `isinstance` are as they were. An open parameter costs nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from lightning_ptm.errors import UsageError

_ABOUT_VALUES = frozenset(
    getattr(Tensor, name) for name in ("data", "real", "imag", "T", "mT", "H", "mH") if hasattr(Tensor, name)
)
"""Attributes that are no fact about the tensor, but its values or a view of them."""

_ABOUT_THE_TENSOR = frozenset(
    {
        *(getattr(Tensor, name) for name in ("__len__", "__hash__", "size", "dim", "ndimension", "numel", "nelement")),
        *(
            getattr(Tensor, name)
            for name in ("stride", "is_contiguous", "storage_offset", "element_size", "get_device")
        ),
        *(getattr(Tensor, name) for name in ("is_floating_point", "is_complex", "is_signed", "is_inference")),
        *(getattr(Tensor, name) for name in ("is_same_size", "requires_grad_", "register_hook", "retain_grad")),
        *(getattr(Tensor, name) for name in ("register_post_accumulate_grad_hook",)),
        *(getattr(Tensor, name) for name in ("new_empty", "new_zeros", "new_ones", "new_full", "new_tensor")),
        *(getattr(torch, name) for name in ("is_floating_point", "is_complex", "is_signed", "is_inference", "numel")),
        *(getattr(torch, name) for name in ("empty_like", "zeros_like", "ones_like", "full_like", "is_same_size")),
        *(getattr(torch, name) for name in ("rand_like", "randn_like", "randint_like", "result_type")),
        torch.autograd.grad,
        torch.autograd.backward,
    }
)


def is_about_values(function: Any) -> bool:
    """Whether what `__torch_function__` is asked for are values of a tensor, or a change of them, and no fact about it."""
    if type(function).__name__ == "method-wrapper":  # an attribute that is read, written or deleted
        return function.__self__ in _ABOUT_VALUES
    return function not in _ABOUT_THE_TENSOR


COPIED_IN_A_RUN = (
    "a module whose parameters are in pages, or a callback, a Trainer or whatever else refers to it, cannot be copied or "
    "pickled while a run is in progress, but with everything in RAM, on one rank, in a true precision and without recompute; "
    "copy it before the run (in __init__ or setup), or a part of it inside of `with trainer.strategy.gathered(module):` (not "
    "with recompute), or take the module's state_dict()"
)


class ClosedParameter:
    """Base of all classes of closed parameters; see `closed_class`."""

    opens_to: type[nn.Parameter]
    """The class that the parameter has when it is open."""


def closed_class(kind: type[nn.Parameter], refusal: Callable[[tuple[Any, ...]], Exception]) -> type[nn.Parameter]:
    """The class of parameters of class `kind` while they are closed.

    Args:
        refusal: makes the error, from what the refused function was called with.
    """

    def torch_function(cls: Any, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if is_about_values(function):
            raise refusal((*args, *kwargs.values()))
        with torch._C.DisableTorchFunctionSubclass():
            return function(*args, **kwargs)

    def described(parameter: nn.Parameter, *ignored: Any) -> str:
        shape = tuple(parameter.shape)
        return f"{kind.__name__}(<values that cannot be read now>, shape={shape}, dtype={parameter.dtype})"

    def not_copied(parameter: nn.Parameter, *ignored: Any) -> Any:
        raise UsageError(COPIED_IN_A_RUN)

    members = {
        "opens_to": kind,
        "__torch_function__": classmethod(torch_function),
        "__repr__": described,
        "__format__": described,
        "__deepcopy__": not_copied,
        "__reduce_ex__": not_copied,
        "__doc__": "A parameter whose values cannot be read now.",
    }
    return type(kind.__name__, (kind, ClosedParameter), members)


def reopen(parameter: nn.Parameter) -> bool:
    """Gives a parameter that an earlier run has left closed its own class back; whether it was closed."""
    if not isinstance(parameter, ClosedParameter):
        return False
    parameter.__class__ = type(parameter).opens_to  # type: ignore[assignment]
    return True
