"""An optimizer that updates whole parameters, with everything that such classes keep."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import optim


class Hybrid(optim.Optimizer):
    """Matrices move by products of matrices, all parameters by norms of their own; keeps states of four kinds of shapes, one
    for matrices alone, and a number."""

    def __init__(self, params: Any, lr: float = 1e-2) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        loss = None if closure is None else torch.enable_grad()(closure)()
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if not state:
                    state["step"] = 0
                    state["mean"] = torch.zeros_like(p)
                    state["norm"] = torch.zeros(())
                    if p.dim() == 2:
                        state["signs"] = torch.zeros(p.shape, dtype=torch.int8)
                        state["square"] = torch.zeros(min(p.shape), min(p.shape), dtype=p.dtype)
                state["step"] += 1
                state["mean"].lerp_(p.grad, 0.1)
                state["norm"].lerp_(p.grad.norm().float(), 0.5)
                move = state["mean"] / (state["norm"] + 1e-6)
                if p.dim() == 2:
                    state["signs"].copy_(p.grad.sign())
                    tall = p.shape[0] > p.shape[1]
                    state["square"].lerp_(p.grad.T @ p.grad if tall else p.grad @ p.grad.T, 0.5)
                    move = move @ torch.tanh(state["square"]) if tall else torch.tanh(state["square"]) @ move
                    move = move + 1e-3 * state["signs"]
                p.sub_(move * p.norm() / move.norm().clamp(min=1e-6), alpha=group["lr"] / state["step"])
        return loss
