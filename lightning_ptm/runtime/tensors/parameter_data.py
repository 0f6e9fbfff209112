"""Replacement of a parameter's memory, on any device, that keeps the parameter object. Owns nothing."""

from __future__ import annotations

from torch import Tensor, nn

from lightning_ptm.torch_internals import (
    accumulation_hooks_of,
    can_share_data,
    hooks_of,
    put_accumulation_hooks,
    put_hooks,
    swap_tensors,
)


def set_data(parameter: nn.Parameter, value: Tensor) -> Tensor | None:
    """Sets `parameter.data = value`, also for devices of other libraries, where torch refuses to change a parameter's device
    (and `Module.to` makes new parameters). The parameter stays the same object, and keeps its hooks and gradient.

    Returns:
        The gradient if it is a view of pages (GradPlaceholder), which cannot be moved; else None.
    """
    try:
        parameter.data = value
        return None
    except RuntimeError:
        if can_share_data(parameter, value):
            raise
    hooks, later_hooks, gradient = hooks_of(parameter), accumulation_hooks_of(parameter), parameter.grad
    # `.data` has a version counter of its own, which a detached tensor would share.
    swap_tensors(parameter, nn.Parameter(value.data, requires_grad=parameter.requires_grad))
    # The swap moves the code that calls the hooks to the other tensor: register the dictionaries again.
    put_hooks(parameter, hooks)
    put_accumulation_hooks(parameter, later_hooks)
    if gradient is None or type(gradient) is not Tensor:
        return gradient
    parameter.grad = gradient.to(value.device)
    return None
