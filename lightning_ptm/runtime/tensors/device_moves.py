"""Moves of a module to another device without its parameters: buffers, and tensors that classes move themselves (metrics).

Parameters are in pages and are not touched, whatever their state.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn


def move_buffers_and_metrics(root: nn.Module, device: torch.device) -> None:
    """Moves what `root.to(device)` moves, except parameters and meta tensors."""

    def moved(value: Tensor) -> Tensor:
        return value if value.is_meta else value.to(device)

    for owner in root.modules():
        for name, buffer in owner._buffers.items():
            if buffer is not None:
                owner._buffers[name] = moved(buffer)
    for owner in root.modules():
        if type(owner)._apply not in (nn.Module._apply, nn.RNNBase._apply):
            _apply_without_parameters(owner, moved)


def _apply_without_parameters(owner: nn.Module, function: object) -> None:
    """Calls a class's own `_apply`, by which torchmetrics and others move tensors that are not buffers.

    During the call, the parameters of all submodules are ordinary attributes, so that `_apply` does not move them; new values
    of these attributes are discarded. torch's recurrent layers, which keep second references to their parameters, are
    restored afterwards.
    """
    inside = list(owner.modules())
    parameters = [each._parameters for each in inside]
    recurrent = {each: dict(vars(each)) for each in inside if isinstance(each, nn.RNNBase)}
    try:
        for each, own_parameters in zip(inside, parameters, strict=True):
            vars(each).update(own_parameters)
            vars(each)["_parameters"] = {}
        owner._apply(function)
    finally:
        for each, own in recurrent.items():
            vars(each).update({name: own[name] for name in ("_flat_weights", "_flat_weight_refs") if name in own})
        for each, own_parameters in zip(inside, parameters, strict=True):
            vars(each)["_parameters"] = own_parameters
            for name in own_parameters:
                vars(each).pop(name, None)
