"""The plain PyTorch loop: mixed precision as a competent user writes it, everything in RAM.

A bf16 copy of the model computes; fp32 masters are updated by the optimizer, from fp32 gradients; lists of tensors are
cast and copied by the foreach functions, into memory that is taken once.

Options: `shape`, `batch`, `seed`; `update` false leaves the
optimizer and its states away (compute alone, and the turn's extra numbers are what was resident before anything was built
and before the first step); `recompute` true recomputes
each block in the backward pass; `device` "cpu" or "cuda".
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch

from benchmarks.gpt import GPT, SHAPES, GPTShape, adamw, batches, build
from benchmarks.race import Baton, current_rss_bytes, take_turns
from benchmarks.sides.devices import own_device, peaks


def run(options: dict[str, Any], baton: Baton) -> None:
    """Takes part in the race until it is over."""
    empty = current_rss_bytes()
    shape = GPTShape(**options["shape"])
    kind = options.get("device", "cpu")
    device = own_device(kind)
    recompute = options.get("recompute", False)
    model = build(shape, dtype=torch.bfloat16, seed=options["seed"], recompute=recompute, device=device)
    data = batches(shape, batch=options["batch"], seed=options["seed"], device=device)

    if not options.get("update", True):
        # Libraries keep memory of their own after a first step, which is no activation: they take it now.
        small = build(SHAPES["tiny"], dtype=torch.bfloat16, seed=0, device=device)
        small(*next(batches(SHAPES["tiny"], batch=1, seed=0, device=device))).backward()
        idle = {"empty_rss_bytes": empty, "idle_rss_bytes": current_rss_bytes()}
        take_turns(baton, lambda: _computed(model, data).item(), lambda: idle | peaks(kind))
        return

    take_turns(baton, updating(model, data), lambda: peaks(kind))


def updating(model: GPT, data: Iterator[tuple[torch.Tensor, torch.Tensor]]) -> Callable[[], float]:
    """Returns a step on the next batch: forward, backward, update of fp32 masters. It returns the loss."""
    parameters: list[torch.Tensor] = list(model.parameters())
    masters = [parameter.detach().float().requires_grad_() for parameter in parameters]
    gradients = [torch.zeros_like(master) for master in masters]
    for master, gradient in zip(masters, gradients, strict=True):
        master.grad = gradient
    optimizer = adamw(masters)

    def step() -> float:
        loss = _computed(model, data)
        with torch.no_grad():
            torch._foreach_copy_(gradients, [parameter.grad for parameter in parameters if parameter.grad is not None])
            optimizer.step()
            torch._foreach_copy_(parameters, masters)
        return loss.item()

    return step


def _computed(model: GPT, data: Iterator[tuple[torch.Tensor, torch.Tensor]]) -> torch.Tensor:
    model.zero_grad(set_to_none=True)
    loss: torch.Tensor = model(*next(data))
    loss.backward()
    return loss
