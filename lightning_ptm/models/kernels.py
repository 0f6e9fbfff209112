"""Fused kernels where they exist: NVIDIA Apex's on CUDA if it is installed (from NVIDIA's source), else torch's own.

Decides at the time of building. I1: what is chosen computes the same function, so checkpoints fit either choice.
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
except ImportError:  # the package named `apex` on PyPI, which is another thing, has neither
    FusedLayerNorm = FusedRMSNorm = FusedAdam = None


def layer_norm(width: int) -> nn.Module:
    """Mean and variance, with weight and bias."""
    return _fused(FusedLayerNorm)(width) if _fused(FusedLayerNorm) else nn.LayerNorm(width)


def rms_norm(width: int, eps: float) -> nn.Module:
    """Root mean square only, with a weight and no bias."""
    return _fused(FusedRMSNorm)(width, eps=eps) if _fused(FusedRMSNorm) else nn.RMSNorm(width, eps=eps)


def is_norm(module: nn.Module) -> bool:
    """Whether one of the two functions above has made `module`."""
    return isinstance(module, tuple(kind for kind in (nn.LayerNorm, nn.RMSNorm, FusedLayerNorm, FusedRMSNorm) if kind))


def adamw(groups: Sequence[dict[str, Any]], *, lr: float, betas: tuple[float, float]) -> Optimizer:
    """AdamW over parameter groups.

    Apex's has no kernel for the CPU: it is taken only where all parameters are on CUDA already. Under angel_ptm they are
    not, for master states may live in RAM; the strategy then runs torch's fused kernel on whichever side they live.
    """
    on_cuda = all(parameter.is_cuda for group in groups for parameter in group["params"])
    if on_cuda and (fused := _fused(FusedAdam)):
        return fused(groups, lr=lr, betas=betas, adam_w_mode=True)
    return torch.optim.AdamW(groups, lr=lr, betas=betas)


def _fused(kernel: Any) -> Any:
    """`kernel`, or None where it cannot run."""
    return kernel if kernel is not None and CUDAAccelerator.is_available() else None
