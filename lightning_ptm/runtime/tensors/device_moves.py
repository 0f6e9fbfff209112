"""Moves of a module to another device without its parameters: buffers, and tensors that classes move themselves (metrics).

Parameters are in pages and are not touched, whatever their state.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from lightning_ptm.torch_internals import PARAMETERS, apply_of, buffers_in, flat_weight_names, parameters_in


def move_buffers_and_metrics(root: nn.Module, device: torch.device) -> None:
    """Moves what `root.to(device)` moves, except parameters and meta tensors."""

    def moved(value: Tensor) -> Tensor:
        return value if value.is_meta else value.to(device)

    for owner in root.modules():
        for name, buffer in buffers_in(owner).items():
            if buffer is not None:
                buffers_in(owner)[name] = moved(buffer)
    for owner in root.modules():
        if apply_of(type(owner)) not in (apply_of(nn.Module), apply_of(nn.RNNBase)):
            _apply_without_parameters(owner, moved)


def _apply_without_parameters(owner: nn.Module, function: object) -> None:
    """Calls a class's own `_apply`, by which torchmetrics and others move tensors that are not buffers.

    During the call, the parameters of all submodules are ordinary attributes, so that `_apply` does not move them; new values
    of these attributes are discarded. torch's recurrent layers, which keep second references to their parameters, are
    restored afterwards.
    """
    inside = list(owner.modules())
    parameters = [parameters_in(each) for each in inside]
    recurrent = {each: dict(vars(each)) for each in inside if isinstance(each, nn.RNNBase)}
    try:
        for each, own_parameters in zip(inside, parameters, strict=True):
            vars(each).update(own_parameters)
            vars(each)[PARAMETERS] = {}
        apply_of(owner)(function)
    finally:
        for each, own in recurrent.items():
            vars(each).update({name: own[name] for name in flat_weight_names() if name in own})
        for each, own_parameters in zip(inside, parameters, strict=True):
            vars(each)[PARAMETERS] = own_parameters
            for name in own_parameters:
                vars(each).pop(name, None)
