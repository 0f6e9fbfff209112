"""A head and its cross-entropy alone, forward and backward: with whole logits or in slices.

Options: `tokens`, `width`, `vocabulary`, `dtype`, `seed`; `at_once`: tokens of a slice, None for the default.
"""

from __future__ import annotations

from typing import Any

import torch

from benchmarks.race import Baton, take_turns


def run(options: dict[str, Any], baton: Baton) -> None:
    """Takes part in the race until it is over."""
    from lightning_ptm.models import sliced_cross_entropy

    torch.manual_seed(options["seed"])
    tokens, width, vocabulary = options["tokens"], options["width"], options["vocabulary"]
    dtype = getattr(torch, options["dtype"])
    head = torch.nn.Linear(width, vocabulary, bias=False, dtype=dtype)
    x = torch.randn(tokens, width, dtype=dtype).requires_grad_()
    targets = torch.randint(0, vocabulary, (tokens,))

    def step() -> float:
        head.weight.grad = x.grad = None
        loss = sliced_cross_entropy(head, x, targets, tokens=options["at_once"])
        loss.backward()
        return loss.item()

    take_turns(baton, step)
