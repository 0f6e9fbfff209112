"""`torch.cuda` itself, in place of the fake device, with kernels that give the same bits each time."""

from __future__ import annotations

import os

os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"

import torch
from fake_library import NAME, lib

__all__ = ["NAME", "lib", "watch_files"]

torch.use_deterministic_algorithms(True, warn_only=True)
torch.backends.cuda.enable_flash_sdp(
    False
)  # the backward of each other attention than the plain one may add in any order
torch.backends.cuda.enable_mem_efficient_sdp(False)
torch.backends.cuda.enable_cudnn_sdp(False)


def watch_files() -> None:
    """Nothing is watched: a real device has no race detector."""
