"""Optimizers of the benchmarks' models, one for all sides.

`adamw`: fused AdamW for all parameters. `muon`: torch's Muon for the matrices of blocks, fused AdamW for embeddings, norms
and biases, as one class of a user's own (`MuonAdamW`). `muon_and_adamw`: the same two as two optimizers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.optim import AdamW, Optimizer
from torch.optim.adamw import adamw

LEARNING_RATE = 3e-4
MUON_LEARNING_RATE = 2e-2
MUON_DECAY = 0.1
KINDS = ("adamw", "muon", "muon_and_adamw")


def is_matrix(name: str, parameter: Tensor) -> bool:
    """Whether Muon moves a parameter: the matrices of blocks."""
    return "blocks." in name and parameter.dim() == 2


class MuonAdamW(Optimizer):
    """Muon and AdamW in one class, each for groups of its own (`muon` in a group says which), as many users have it. What
    they do to a parameter is what torch's own classes do."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"muon": False, "lr": LEARNING_RATE, "weight_decay": 1e-2})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        """One step of each group."""
        loss = None if closure is None else torch.enable_grad()(closure)()
        for group in self.param_groups:
            with_gradient = [parameter for parameter in group["params"] if parameter.grad is not None]
            (self._step_muon if group["muon"] else self._step_adamw)(group, with_gradient)
        return loss

    def _step_muon(self, group: dict[str, Any], parameters: list[Tensor]) -> None:
        for parameter in parameters:
            if not self.state[parameter]:
                self.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter)
        from torch.optim._muon import muon  # not in every torch that other benchmarks run with

        muon(
            parameters,
            _gradients(parameters),
            [self.state[parameter]["momentum_buffer"] for parameter in parameters],
            lr=group["lr"],
            weight_decay=group["weight_decay"],
            momentum=0.95,
            nesterov=True,
            ns_coefficients=(3.4445, -4.7750, 2.0315),
            ns_steps=5,
            eps=1e-7,
            adjust_lr_fn=None,
            has_complex=False,
        )

    def _step_adamw(self, group: dict[str, Any], parameters: list[Tensor]) -> None:
        for parameter in parameters:
            if not self.state[parameter]:
                self.state[parameter]["step"] = torch.zeros((), dtype=torch.float32)
                self.state[parameter]["exp_avg"] = torch.zeros_like(parameter)
                self.state[parameter]["exp_avg_sq"] = torch.zeros_like(parameter)
        states = [self.state[parameter] for parameter in parameters]
        adamw(
            parameters,
            _gradients(parameters),
            [state["exp_avg"] for state in states],
            [state["exp_avg_sq"] for state in states],
            [],
            [state["step"] for state in states],
            fused=True,
            amsgrad=False,
            beta1=0.9,
            beta2=0.999,
            lr=group["lr"],
            weight_decay=group["weight_decay"],
            eps=1e-8,
            maximize=False,
        )


def _gradients(parameters: list[Tensor]) -> list[Tensor]:
    return [parameter.grad for parameter in parameters if parameter.grad is not None]


def optimizers(kind: str, named: Iterable[tuple[str, Tensor]]) -> list[Optimizer]:
    """Those of `kind`, of KINDS, for parameters that are called so."""
    pairs = list(named)
    if kind == "adamw":
        return [AdamW([parameter for _, parameter in pairs], lr=LEARNING_RATE, fused=True)]
    matrices = [parameter for name, parameter in pairs if is_matrix(name, parameter)]
    others = [parameter for name, parameter in pairs if not is_matrix(name, parameter)]
    if kind == "muon":
        of_muon = {"params": matrices, "muon": True, "lr": MUON_LEARNING_RATE, "weight_decay": MUON_DECAY}
        return [MuonAdamW([of_muon, {"params": others}])]
    return [
        torch.optim.Muon(matrices, lr=MUON_LEARNING_RATE, weight_decay=MUON_DECAY),
        AdamW(others, lr=LEARNING_RATE, fused=True),
    ]
