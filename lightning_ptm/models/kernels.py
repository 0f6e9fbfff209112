"""Norms and AdamW with fused kernels: NVIDIA Apex's on CUDA if it is installed (from NVIDIA's source), else torch's own.

The choice is made when a model is built. I1: both choices compute the same function, so checkpoints fit either.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from lightning.pytorch.accelerators import CUDAAccelerator
from torch import nn
from torch.optim import Optimizer

try:
    from apex.normalization import FusedLayerNorm, FusedRMSNorm  # type: ignore[import-not-found,unused-ignore]
    from apex.optimizers import FusedAdam  # type: ignore[import-not-found,unused-ignore]
except ImportError:  # also with PyPI's unrelated package `apex`, which has none of them
    FusedLayerNorm = FusedRMSNorm = FusedAdam = None


def layer_norm(width: int) -> nn.Module:
    """Returns a LayerNorm (mean and variance) with weight and bias."""
    return _fused(FusedLayerNorm)(width) if _fused(FusedLayerNorm) else nn.LayerNorm(width)


def rms_norm(width: int, eps: float) -> nn.Module:
    """Returns an RMSNorm with a weight and without bias."""
    return _fused(FusedRMSNorm)(width, eps=eps) if _fused(FusedRMSNorm) else nn.RMSNorm(width, eps=eps)


def is_norm(module: nn.Module) -> bool:
    """Whether `module` is a norm of one of the two functions above."""
    return isinstance(module, tuple(kind for kind in (nn.LayerNorm, nn.RMSNorm, FusedLayerNorm, FusedRMSNorm) if kind))


def adamw(groups: Sequence[dict[str, Any]], *, lr: float, betas: tuple[float, float]) -> Optimizer:
    """Returns AdamW over parameter groups.

    Apex's AdamW has no kernel for the CPU: it is taken only if all parameters are on CUDA already. Under angel_ptm they are
    not, as master states may be in RAM; the strategy then runs torch's fused kernel where the master states are.
    """
    on_cuda = all(parameter.is_cuda for group in groups for parameter in group["params"])
    if on_cuda and (fused := _fused(FusedAdam)):
        return fused(groups, lr=lr, betas=betas, adam_w_mode=True)
    return torch.optim.AdamW(groups, lr=lr, betas=betas)


def _fused(kernel: Any) -> Any:
    """`kernel`, or None if it cannot run here."""
    return kernel if kernel is not None and CUDAAccelerator.is_available() else None
