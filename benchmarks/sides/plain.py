"""The plain PyTorch loop: mixed precision as a competent user writes it, everything in RAM.

A bf16 copy of the model computes; fp32 masters are updated by fused AdamW from fp32 gradients; lists of tensors are
cast and copied by the foreach functions, into memory that is taken once.

Options: `shape`, `batch`, `seed`; `update` false leaves the optimizer and its states away (compute alone);
`recompute` true recomputes each block in the backward pass.
"""

from __future__ import annotations

from typing import Any

import torch
from gpt import GPTShape, batches, build
from race import Baton, take_turns

LEARNING_RATE = 3e-4


def run(options: dict[str, Any], baton: Baton) -> None:
    shape = GPTShape(**options["shape"])
    model = build(shape, dtype=torch.bfloat16, seed=options["seed"], recompute=options.get("recompute", False))
    data = batches(shape, batch=options["batch"], seed=options["seed"])
    parameters = list(model.parameters())

    def compute() -> torch.Tensor:
        model.zero_grad(set_to_none=True)
        loss: torch.Tensor = model(*next(data))
        loss.backward()
        return loss

    if not options.get("update", True):
        take_turns(baton, lambda: compute().item())
        return

    masters = [parameter.detach().float().requires_grad_() for parameter in parameters]
    for master in masters:
        master.grad = torch.zeros_like(master)
    gradients = [master.grad for master in masters]
    optimizer = torch.optim.AdamW(masters, lr=LEARNING_RATE, fused=True)

    def step() -> float:
        loss = compute()
        with torch.no_grad():
            torch._foreach_copy_(gradients, [parameter.grad for parameter in parameters])
            optimizer.step()
            torch._foreach_copy_(parameters, masters)
        return loss.item()

    take_turns(baton, step)
