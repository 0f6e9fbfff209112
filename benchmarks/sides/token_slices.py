"""A feed-forward alone on slices of its tokens, forward and backward.

Options: `tokens`, `width`, `inner`, `seed`; `slices`: number of slices, None for what "auto" chooses, 1 for the whole.
"""

from __future__ import annotations

from typing import Any

import torch

from benchmarks.race import Baton, take_turns


def run(options: dict[str, Any], baton: Baton) -> None:
    """Takes part in the race until it is over."""
    from lightning_ptm.runtime.autograd.recompute import Recompute
    from lightning_ptm.runtime.autograd.token_slices import TokenCut
    from lightning_ptm.runtime.units.discovery import Unit

    torch.manual_seed(options["seed"])
    tokens, width, inner = options["tokens"], options["width"], options["inner"]
    layers = torch.nn.Linear(width, inner), torch.nn.GELU(approximate="tanh"), torch.nn.Linear(inner, width)
    module = torch.nn.Sequential(*layers).bfloat16()
    x = torch.randn(1, tokens, width, dtype=torch.bfloat16).requires_grad_()
    call: Any = module
    if options["slices"] != 1:
        unit = Unit(-1, "feed_forward", module, (), ())
        call = Recompute(module, lambda _: None, lambda _: dict).in_token_slices(
            unit, TokenCut(options["slices"]), lambda: False
        )

    def step() -> float:
        module.zero_grad()
        x.grad = None
        loss = call(x).float().square().mean()
        loss.backward()
        return float(loss)

    take_turns(baton, step)
