"""Modules whose optimizers update whole parameters, for the tests with several ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import optim

from kit.hybrid_optimizer import Hybrid
from kit.ranks.models import Tower


class Normed(optim.Optimizer):
    """Each parameter moves by its gradient over its norm; nothing is kept."""

    def __init__(self, params: Any, lr: float = 1e-2) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        loss = None if closure is None else torch.enable_grad()(closure)()
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.sub_(p.grad / p.grad.norm().clamp(min=1e-6), alpha=group["lr"])
        return loss


class WithNormed(Tower):
    def configure_optimizers(self) -> Any:
        return Normed(self.parameters())


class WithAdafactor(Tower):
    def configure_optimizers(self) -> Any:
        return optim.Adafactor(self.parameters(), lr=1e-2)


class WithHybrid(Tower):
    def configure_optimizers(self) -> Any:
        return Hybrid(self.parameters())


class WithMuon(Tower):
    """All else is frozen."""

    def __init__(self) -> None:
        super().__init__()
        for parameter in self.parameters():
            parameter.requires_grad_(parameter.dim() == 2)

    def configure_optimizers(self) -> Any:
        return optim.Muon([p for p in self.parameters() if p.requires_grad], lr=1e-2)


KINDS: list[type[Tower]] = [WithAdafactor, WithHybrid, WithNormed]
if hasattr(optim, "Muon"):
    KINDS.append(WithMuon)
