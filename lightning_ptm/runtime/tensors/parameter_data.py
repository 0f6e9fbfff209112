"""Replacement of a parameter's memory, on any device, that keeps the parameter object. Owns nothing."""

from __future__ import annotations

import torch
from torch import Tensor, nn


def set_data(parameter: nn.Parameter, value: Tensor) -> Tensor | None:
    """Sets `parameter.data = value`, also for devices of other libraries, where torch refuses to change a parameter's device
    (and `Module.to` makes new parameters). The parameter stays the same object, and keeps its hooks and gradient.

    Returns:
        The gradient if it is a view of pages (grad_placeholder.py), which cannot be moved; else None.
    """
    try:
        parameter.data = value
        return None
    except RuntimeError:
        if torch._has_compatible_shallow_copy_type(parameter, value):
            raise
    hooks, later_hooks, gradient = parameter._backward_hooks, parameter._post_accumulate_grad_hooks, parameter.grad
    # `.data` has a version counter of its own, which a detached tensor would share.
    torch._C._swap_tensor_impl(parameter, nn.Parameter(value.data, requires_grad=parameter.requires_grad))
    # The swap moves the code that calls the hooks to the other tensor: register the dictionaries again.
    parameter._backward_hooks, parameter._post_accumulate_grad_hooks = hooks, later_hooks
    if gradient is None or type(gradient) is not Tensor:
        return gradient
    parameter.grad = gradient.to(value.device)
    return None
