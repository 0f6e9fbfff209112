"""One feed-forward alone, forward and backward in bf16: dense, or with experts of which each token uses one.

Options: `width`, `inner`, `tokens`, `seed`; `experts` 0 for the dense one. Experts have room for every token, so
that as many floating-point operations are done as in the dense one; the router is as it was initialised, about even.
"""

from __future__ import annotations

from typing import Any

import torch

from benchmarks.race import Baton, take_turns


def run(options: dict[str, Any], baton: Baton) -> None:
    """Takes part in the race until it is over."""
    from lightning_ptm.models.moe import MixtureOfExperts
    from lightning_ptm.models.t5 import FeedForward

    torch.manual_seed(options["seed"])
    width, inner, experts = options["width"], options["inner"], options["experts"]
    layer: torch.nn.Module
    if experts:
        layer = MixtureOfExperts(
            width,
            inner,
            experts=experts,
            choices=1,
            capacity_factor=float(experts),
            eval_capacity_factor=float(experts),
            jitter=0.0,
            gated=False,
            dropout=0.0,
        )
    else:
        layer = FeedForward(width, inner, gated=False, dropout=0.0)
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.normal_(std=parameter.shape[1] ** -0.5)
    layer.to(torch.bfloat16)
    if isinstance(layer, MixtureOfExperts):
        layer.router.float()
    x = torch.randn(options["tokens"], width).bfloat16().requires_grad_()
    gradient = torch.randn(options["tokens"], width).bfloat16()

    def step() -> float:
        layer.zero_grad(set_to_none=True)
        x.grad = None
        made = layer(x)
        out, extra = (made[0], made[1].balance_loss) if experts else (made, None)
        loss: torch.Tensor = (out * gradient).float().mean()
        (loss if extra is None else loss + 0.01 * extra).backward()
        return loss.item()

    take_turns(baton, step)
