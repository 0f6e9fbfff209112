"""Interface between cut layers and the activations around them: whole values here, parts of the sequence elsewhere.

A cut layer takes its input and gives its output through this interface. It does not know whether activations between layers
are whole on every rank (this class) or this rank's part of the sequence (subclasses in `sequence_parts.py`).
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from lightning_ptm.parallel.exchange import TensorGroup


class BetweenLayers:
    """Activations between cut layers that are whole on every rank, as are their gradients."""

    partial = False
    """Whether each rank has only a part of the gradients' sum for parameters here that no rule cuts."""

    def __init__(self, group: TensorGroup) -> None:
        self.group = group

    def enter(self, value: Tensor) -> Tensor:
        """Passes a whole value to layers that each rank computes with its part."""
        return self.group.enter(value)

    def columns(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """Returns this rank's outputs of a linear layer.

        Args:
            weight: (this rank's outputs, inputs).
        """
        return F.linear(self.enter(x), weight, bias)

    def leave(self, value: Tensor) -> Tensor:
        """Sums a value of which every rank has computed one summand."""
        return self.group.add_up(value)

    def begin(self, *, training: bool) -> None:
        """Begins a divided region; in training, each rank draws its own random numbers there (dropout)."""
        if training:
            self.group.begin_divided()

    def end(self) -> None:
        """Ends the divided region."""
        self.group.end_divided()
