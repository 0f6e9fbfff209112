"""The share of this machine's rates that a model reaches: a small GPT's forward and backward against what is planned for it.

Owns a model without a trainer. Layers that no rate is of (norms, sums, copies) and Python's dispatch are in it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median
from time import perf_counter

import torch

from lightning_ptm.forecasting.counting import Work
from lightning_ptm.forecasting.estimate import estimate
from lightning_ptm.memory.backend import Backend
from lightning_ptm.models import GPT
from lightning_ptm.runtime.units import discover
from lightning_ptm.trainer.half_products import products_here

_HEAD_WIDTH = 64
_LAYERS = 2
_TOKENS = 256
_LEAST = 5
"""Passes whose median counts."""


@dataclass(frozen=True, slots=True)
class Sample:
    """A small model.

    Attributes:
        works: what its units compute in a forward.
        compute: a forward and a backward in bfloat16, to their end.
    """

    works: Sequence[Work]
    compute: Callable[[], None]

    def reached(self, forward_s: Callable[[Work], float], seconds: float) -> float:
        """Planned over measured seconds of a forward and a backward; at most 1.

        Args:
            forward_s: what is planned for a unit's forward.
            seconds: that are spent on it, about.
        """
        planned_s = 3 * sum(map(forward_s, self.works))
        self.compute()
        found: list[float] = []
        began = perf_counter()
        while perf_counter() - began < seconds or len(found) < _LEAST:
            started = perf_counter()
            self.compute()
            found.append(perf_counter() - started)
        return min(1.0, planned_s / median(found))


def small_gpt(backend: Backend, width: int, samples: int) -> Sample:
    """A GPT of two blocks.

    Args:
        width: a multiple of 64.
        samples: of its batch, 256 tokens each.
    """
    settings = {"width": width, "layers": _LAYERS, "heads": width // _HEAD_WIDTH, "sequence_length": _TOKENS}
    counted = GPT(**settings, meta=True)  # type: ignore[arg-type]
    with torch.device("meta"):
        counted.configure_model()
    tokens = torch.empty((samples, _TOKENS), dtype=torch.long, device="meta")
    works = estimate(counted.to(torch.bfloat16), discover(counted, "auto"), (tokens, tokens), torch.bfloat16)

    model = GPT(**settings)  # type: ignore[arg-type]
    model.configure_model()
    model.to(device=backend.device, dtype=torch.bfloat16)
    batch = (torch.zeros((samples, _TOKENS), dtype=torch.long, device=backend.device),) * 2

    def compute() -> None:
        model.zero_grad(set_to_none=False)
        with products_here(torch.bfloat16, backend):
            model.loss(batch).backward()
        backend.synchronize()

    return Sample(works, compute)
