"""Results of a training, compared bit for bit."""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor


@dataclasses.dataclass(frozen=True)
class Outcome:
    """The loss of every micro-batch (on this rank), weights and buffers by name, and losses of evaluations."""

    losses: list[Tensor]
    weights: dict[str, Tensor]
    validation_losses: list[Tensor] = dataclasses.field(default_factory=list)

    def assert_equal(self, other: Outcome) -> None:
        self._assert_same_losses("losses", self.losses, other.losses)
        self._assert_same_losses("validation losses", self.validation_losses, other.validation_losses)
        self.assert_same_weights(other)

    def assert_same_weights(self, other: Outcome) -> None:
        assert self.weights.keys() == other.weights.keys()
        differing = [name for name in self.weights if not torch.equal(self.weights[name], other.weights[name])]
        assert not differing, f"weights differ: {differing}"

    @staticmethod
    def _assert_same_losses(what: str, ours: list[Tensor], theirs: list[Tensor]) -> None:
        assert len(ours) == len(theirs)
        assert all(torch.isfinite(loss) for loss in ours), ours
        for step, (one, other) in enumerate(zip(ours, theirs, strict=True)):
            assert torch.equal(one, other), f"{what} differ from step {step} on: {ours} {theirs}"
