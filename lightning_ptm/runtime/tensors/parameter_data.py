"""Other memory for a parameter that stays the same object, whatever device that memory is on. Owns nothing."""

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
    """`parameter.data = value`, also from and to devices of other libraries, where torch refuses to give a parameter another
    device, and `Module.to` makes new parameters. This one stays the same object, with its hooks and its gradient.

    Returns:
        The gradient, where it is shown of pages (grad_placeholder.py) and cannot come along; else None.
    """
    try:
        parameter.data = value
        return None
    except RuntimeError:
        if can_share_data(parameter, value):
            raise
    hooks, later_hooks, gradient = hooks_of(parameter), accumulation_hooks_of(parameter), parameter.grad
    # `.data` counts writes by itself, which a detached tensor would not.
    swap_tensors(parameter, nn.Parameter(value.data, requires_grad=parameter.requires_grad))
    # The dictionaries are the object's; what calls them went with the other tensor.
    put_hooks(parameter, hooks)
    put_accumulation_hooks(parameter, later_hooks)
    if gradient is None or type(gradient) is not Tensor:
        return gradient
    parameter.grad = gradient.to(value.device)
    return None
