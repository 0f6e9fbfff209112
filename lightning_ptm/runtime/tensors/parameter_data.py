"""Other memory for a parameter that stays the same object, whatever device that memory is on. Owns nothing."""

from __future__ import annotations

import torch
from torch import Tensor, nn


def set_data(parameter: nn.Parameter, value: Tensor) -> Tensor | None:
    """`parameter.data = value`, also from and to devices of other libraries, where torch refuses to give a parameter another
    device, and `Module.to` makes new parameters. This one stays the same object, with its hooks and its gradient.

    Returns:
        The gradient, where it is shown of pages (grad_placeholder.py) and cannot come along; else None.
    """
    try:
        parameter.data = value
        return None
    except RuntimeError:
        if torch._has_compatible_shallow_copy_type(parameter, value):
            raise
    hooks, later_hooks, gradient = parameter._backward_hooks, parameter._post_accumulate_grad_hooks, parameter.grad
    # `.data` counts writes by itself, which a detached tensor would not.
    torch._C._swap_tensor_impl(parameter, nn.Parameter(value.data, requires_grad=parameter.requires_grad))
    # The dictionaries are the object's; what calls them went with the other tensor.
    parameter._backward_hooks, parameter._post_accumulate_grad_hooks = hooks, later_hooks
    if gradient is None or type(gradient) is not Tensor:
        return gradient
    parameter.grad = gradient.to(value.device)
    return None
