"""Measures a small GPT's forward and backward against its forecast: the share of this machine's rates that a model reaches.

Owns a model without a Trainer. Its time includes layers that no rate covers (norms, sums, copies), and Python's dispatch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from statistics import median
from time import perf_counter
from typing import Any

import torch

from lightning_ptm.forecasting.counting import UnitWork
from lightning_ptm.forecasting.estimate import estimate
from lightning_ptm.memory.backend import Backend
from lightning_ptm.models import GPT
from lightning_ptm.runtime.units.discovery import discover
from lightning_ptm.trainer.matmul_precision import products_here

_HEAD_WIDTH = 64
_LAYERS = 2
_TOKENS = 256
_LEAST = 5
"""Least number of passes for the median."""


def typical_s(compute: Callable[[], None], seconds: float) -> float:
    """The median of as many passes as take about `seconds`."""
    compute()
    found: list[float] = []
    began = perf_counter()
    while perf_counter() - began < seconds or len(found) < _LEAST:
        started = perf_counter()
        compute()
        found.append(perf_counter() - started)
    return median(found)


def sample_works(width: int, samples: int) -> Sequence[UnitWork]:
    """The work of the small GPT's units in a forward."""
    model = GPT(**_settings(width), meta=True)
    with torch.device("meta"):
        model.configure_model()
    tokens = torch.empty((samples, _TOKENS), dtype=torch.long, device="meta")
    return estimate(model.to(torch.bfloat16), discover(model, "auto"), (tokens, tokens), torch.bfloat16)


def small_gpt(backend: Backend, width: int, samples: int) -> Callable[[], None]:
    """A function that runs a forward and a backward of a GPT of two blocks in bfloat16, and waits for the device.

    Args:
        width: a multiple of 64.
        samples: batch size, of 256 tokens each.
    """
    model = GPT(**_settings(width))
    model.configure_model()
    model.to(device=backend.device, dtype=torch.bfloat16)
    batch = (torch.zeros((samples, _TOKENS), dtype=torch.long, device=backend.device),) * 2

    def compute() -> None:
        model.zero_grad(set_to_none=False)
        with products_here(torch.bfloat16, backend):
            model.loss(batch).backward()
        backend.synchronize()

    return compute


def _settings(width: int) -> dict[str, Any]:
    return {"width": width, "layers": _LAYERS, "heads": width // _HEAD_WIDTH, "sequence_length": _TOKENS}
