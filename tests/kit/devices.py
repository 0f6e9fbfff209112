"""The accelerator that tests with the marker `gpu` run on: torch's in this process, whatever its name."""

from __future__ import annotations

import pytest
import torch

HERE = torch.accelerator.current_accelerator(check_available=True)
"""Device of this machine, without an index; None: there is none."""
on_device = pytest.mark.skipif(HERE is None, reason="needs an accelerator")
on_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


def keep_busy() -> None:
    """Makes work that is queued next start late, where the device has a kernel for that."""
    sleep = getattr(torch.get_device_module(HERE), "_sleep", None)
    if sleep is not None:
        sleep(20_000_000)
