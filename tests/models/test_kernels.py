"""Choice of kernels. Apex is not installed where tests run: a stand-in of its interface takes its place."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from types import ModuleType

import pytest
import torch
from lightning.pytorch.accelerators import CUDAAccelerator
from torch import nn

from lightning_ptm.models import kernels


class FusedLayerNorm(nn.LayerNorm):
    """Stand-in of Apex's class: a class of its own with the same parameters."""


class FusedRMSNorm(nn.RMSNorm):
    """Stand-in of Apex's class."""


class FusedAdam(torch.optim.AdamW):
    """Stand-in of Apex's class, whose mode is an argument."""

    def __init__(self, params: object, lr: float, betas: tuple[float, float], adam_w_mode: bool) -> None:
        assert adam_w_mode
        super().__init__(params, lr=lr, betas=betas)  # type: ignore[arg-type]


@pytest.fixture
def with_apex(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    normalization, optimizers = ModuleType("apex.normalization"), ModuleType("apex.optimizers")
    normalization.FusedLayerNorm, normalization.FusedRMSNorm = FusedLayerNorm, FusedRMSNorm  # type: ignore[attr-defined]
    optimizers.FusedAdam = FusedAdam  # type: ignore[attr-defined]
    with monkeypatch.context() as patch:
        for name, module in (("apex", ModuleType("apex")), (normalization.__name__, normalization)):
            patch.setitem(sys.modules, name, module)
        patch.setitem(sys.modules, optimizers.__name__, optimizers)
        importlib.reload(kernels)
        yield
    importlib.reload(kernels)


def made() -> tuple[type, type]:
    return type(kernels.layer_norm(4)), type(kernels.rms_norm(4, 1e-6))


def test_torchs_kernels_without_apex() -> None:
    assert made() == (nn.LayerNorm, nn.RMSNorm)


def test_apex_is_used_on_cuda_only(with_apex: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(CUDAAccelerator, "is_available", lambda: False)
    assert made() == (nn.LayerNorm, nn.RMSNorm)
    monkeypatch.setattr(CUDAAccelerator, "is_available", lambda: True)
    assert made() == (FusedLayerNorm, FusedRMSNorm)
    assert all(kernels.is_norm(module) for module in (kernels.layer_norm(4), kernels.rms_norm(4, 1e-6)))
    # Its optimizer has no kernel for parameters that are in RAM.
    groups = [{"params": [nn.Parameter(torch.zeros(2))]}]
    assert type(kernels.adamw(groups, lr=0.1, betas=(0.9, 0.95))) is torch.optim.AdamW


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_apexs_optimizer_takes_parameters_on_cuda(with_apex: None) -> None:
    groups = [{"params": [nn.Parameter(torch.zeros(2, device="cuda"))]}]
    assert type(kernels.adamw(groups, lr=0.1, betas=(0.9, 0.95))) is FusedAdam
