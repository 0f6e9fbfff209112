"""Stand-in of NVIDIA Apex: modules under its names, with classes of its interface that torch's operators carry out.

Its optimizer refuses tensors that are not on CUDA, as Apex's kernel does, and counts steps in parameter groups.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch
from torch import nn


class FusedLayerNorm(nn.LayerNorm):
    """LayerNorm of a class of its own."""


class FusedRMSNorm(nn.RMSNorm):
    """RMSNorm of a class of its own."""


class FusedAdam(torch.optim.Optimizer):
    """AdamW, with the arguments and the bookkeeping of Apex's class."""

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        adam_w_mode: bool = True,
        weight_decay: float = 0.0,
    ) -> None:
        defaults = {
            "lr": lr,
            "bias_correction": bias_correction,
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
        }
        super().__init__(params, defaults)
        self.adam_w_mode = 1 if adam_w_mode else 0

    def zero_grad(self) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.grad = None

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            group["step"] = group.get("step", 0) + 1
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._update(parameter, group)
        return loss

    def _update(self, parameter: torch.Tensor, group: dict[str, Any]) -> None:
        state, (first, second) = self.state[parameter], group["betas"]
        if not state:
            state["exp_avg"] = torch.zeros_like(parameter.data).float()
            state["exp_avg_sq"] = torch.zeros_like(parameter.data).float()
        if parameter.device.type != "cuda":
            raise RuntimeError(f"multi_tensor_adam: expected CUDA tensors, got {parameter.device.type}")
        gradient = parameter.grad.float()  # type: ignore[union-attr]
        state["exp_avg"].mul_(first).add_(gradient, alpha=1 - first)
        state["exp_avg_sq"].mul_(second).addcmul_(gradient, gradient, value=1 - second)
        mean = state["exp_avg"] / (1 - first ** group["step"])
        root = (state["exp_avg_sq"] / (1 - second ** group["step"])).sqrt_().add_(group["eps"])
        update = mean.div_(root).add_(parameter.float(), alpha=group["weight_decay"])
        parameter.sub_((update * group["lr"]).to(parameter.dtype))


FusedLayerNorm.__module__ = FusedRMSNorm.__module__ = "apex.normalization.fused_layer_norm"
FusedAdam.__module__ = "apex.optimizers.fused_adam"


def modules(*, extensions: bool = True) -> dict[str, ModuleType]:
    """Returns the modules of an installed Apex by name, with its CUDA extensions or without."""
    names = ("apex", "apex.normalization", "apex.normalization.fused_layer_norm", "apex.optimizers")
    found = {name: ModuleType(name) for name in (*names, "apex.optimizers.fused_adam")}
    for name in ("apex.normalization", "apex.normalization.fused_layer_norm"):
        vars(found[name]).update(FusedLayerNorm=FusedLayerNorm, FusedRMSNorm=FusedRMSNorm)
    for name in ("apex.optimizers", "apex.optimizers.fused_adam"):
        vars(found[name]).update(FusedAdam=FusedAdam)
    if extensions:
        found |= {name: ModuleType(name) for name in ("amp_C", "fused_layer_norm_cuda")}
    return found


def install() -> None:
    """Installs it in this process."""
    sys.modules.update(modules())
