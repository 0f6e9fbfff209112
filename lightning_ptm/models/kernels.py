"""Choice of the kernels of norms and AdamW: NVIDIA Apex's fused ones on CUDA if it is installed, or torch's.

The choice is made when a model is made. I1: both kinds have the same parameters and compute the same function up to rounding,
so checkpoints fit either. I2: a model that is only planned, or made where Apex cannot run, has torch's.
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch
from lightning.pytorch.accelerators import CUDAAccelerator
from torch import nn
from torch.optim import Optimizer

from lightning_ptm.errors import ConfigError

KernelChoice = Literal["auto", "torch", "apex"]
"""Kernels that a model takes. `auto`: Apex's norms if it is installed and there is a CUDA device, and its AdamW if all
parameters are on CUDA when it is made; `apex`: all of Apex's; `torch`: none of them."""


@dataclass(frozen=True, slots=True)
class Kernels:
    """The classes of one model's norms and optimizer.

    Attributes:
        fused_adam: Apex's class; None: torch's AdamW is used.
        adam_anywhere: whether Apex's AdamW is taken wherever parameters are when it is made.
    """

    layer_norm_class: type[nn.Module] = nn.LayerNorm
    rms_norm_class: type[nn.Module] = nn.RMSNorm
    fused_adam: type[Optimizer] | None = None
    adam_anywhere: bool = False

    def layer_norm(self, width: int) -> nn.Module:
        """Returns a LayerNorm (mean and variance) with weight and bias."""
        return self.layer_norm_class(width)

    def rms_norm(self, width: int, eps: float) -> nn.Module:
        """Returns an RMSNorm with a weight and without bias."""
        return self.rms_norm_class(width, eps=eps)

    def adamw(self, groups: Sequence[dict[str, Any]], *, lr: float, betas: tuple[float, float]) -> Optimizer:
        """Returns AdamW over parameter groups.

        Under angel_ptm parameters are not on CUDA when it is made, and master weights may stay in RAM, for which Apex has no
        kernel: `auto` takes torch's there, whose fused kernel the strategy runs where master weights are. With `apex` the
        strategy tries Apex's where updates will run, and refuses it in RAM before anything is trained.
        """
        on_cuda = all(parameter.is_cuda for group in groups for parameter in group["params"])
        if self.fused_adam is not None and (on_cuda or self.adam_anywhere):
            fused: Any = self.fused_adam
            made: Optimizer = fused(groups, lr=lr, betas=betas, adam_w_mode=True)
            return made
        return torch.optim.AdamW(groups, lr=lr, betas=betas)


TORCH = Kernels()


def choose(wanted: KernelChoice) -> Kernels:
    """Returns the kernels for a choice; torch's where Apex's cannot run, which `check` refuses in a run.

    Raises:
        ConfigError: there is no such choice.
    """
    if wanted not in get_args(KernelChoice):
        raise ConfigError(f"kernels={wanted!r}: use 'auto', 'torch' or 'apex'")
    if wanted == "torch" or not CUDAAccelerator.is_available():
        return TORCH
    try:
        return _of_apex(anywhere=wanted == "apex")
    except ImportError:
        return TORCH


def check(wanted: KernelChoice, device: torch.device) -> None:
    """Checks before a run that computes on `device` that the wanted kernels are there.

    Raises:
        ConfigError: Apex's are wanted, and it is not installed or has no kernels for the device.
    """
    if wanted != "apex":
        return
    if device.type != "cuda":
        raise ConfigError(
            f"kernels='apex', and this run computes on {device.type}, for which NVIDIA Apex has no kernels; use "
            f"Trainer(accelerator='cuda'), or kernels='auto'"
        )
    try:
        _of_apex(anywhere=True)
    except ImportError as error:
        raise ConfigError(
            f"kernels='apex', and NVIDIA Apex cannot be imported ({error}), so there are no such kernels; build Apex from "
            f"NVIDIA's source (see the page First GPU; the package apex on PyPI is something else), or use kernels='auto'"
        ) from error


def _of_apex(*, anywhere: bool) -> Kernels:
    """Returns Apex's kernels.

    Raises:
        ImportError: it is not installed or was built without them; also with PyPI's unrelated package `apex`.
    """
    from apex.normalization import FusedLayerNorm, FusedRMSNorm  # type: ignore[import-not-found,unused-ignore]
    from apex.optimizers import FusedAdam  # type: ignore[import-not-found,unused-ignore]

    for extension in ("amp_C", "fused_layer_norm_cuda"):  # without them, Apex's classes raise at their first use
        importlib.import_module(extension)
    return Kernels(FusedLayerNorm, FusedRMSNorm, FusedAdam, anywhere)


def is_norm(module: nn.Module) -> bool:
    """Whether `module` is a LayerNorm or an RMSNorm, of torch or of Apex."""
    return isinstance(module, (nn.LayerNorm, nn.RMSNorm)) or type(module).__module__.startswith("apex.normalization")


def in_words(wanted: KernelChoice, model: nn.Module, optimizer: Optimizer | None, device: torch.device) -> str:
    """Returns whose kernels a model has, for a run on CUDA, where there is a choice; empty elsewhere."""
    if device.type != "cuda":
        return ""
    norm = next(filter(is_norm, model.modules()), None)
    of_norms, of_adam = ("Apex" if type(each).__module__.startswith("apex.") else "torch" for each in (norm, optimizer))
    return f"{type(model).__name__} has norms of {of_norms} and an optimizer of {of_adam} (kernels={wanted!r})"
