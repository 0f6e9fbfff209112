"""What lies between layers that are cut, and how such a layer takes its input from there and gives its output back.

Layers ask and do not know which it is: whole on every rank (here), or this rank's part of the sequence (`sequence.py`).
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from lightning_ptm.parallel.exchange import TensorGroup


class BetweenLayers:
    """What is whole on every rank, and so is its gradient."""

    partial = False
    """Of parameters here that no rule cuts, every rank's gradient is a part of the sum."""

    def __init__(self, group: TensorGroup) -> None:
        self.group = group

    def enter(self, value: Tensor) -> Tensor:
        """A value for what ranks compute with their parts."""
        return self.group.enter(value)

    def columns(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """This rank's outputs of a linear layer.

        Args:
            weight: (its outputs, inputs).
        """
        return F.linear(self.enter(x), weight, bias)

    def leave(self, value: Tensor) -> Tensor:
        """A value of which every rank has computed a part of the sum."""
        return self.group.add_up(value)

    def begin(self, *, training: bool) -> None:
        """What follows is divided, and may draw random numbers where it is trained."""
        if training:
            self.group.begin_divided()

    def end(self) -> None:
        """What follows is as it was before `begin`."""
        self.group.end_divided()
