"""Loss and perplexity over an evaluation, summed over ranks by torchmetrics.

torchmetrics' own MeanMetric either looks for NaN, for which the host has to wait at each batch (and then drops them),
or, with nan_strategy="disable", forgets the weights (seen in 1.9). Its Perplexity pays for another softmax.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torchmetrics import Metric


class TokenLoss(Metric):
    """Mean loss of a token, in nats: batches count by their tokens. NaN stays NaN; without a batch it is NaN."""

    full_state_update = False
    nats: Tensor
    tokens: Tensor

    def __init__(self) -> None:
        super().__init__()
        # float64: a long evaluation adds small numbers to a large one.
        self.add_state("nats", default=torch.zeros((), dtype=torch.float64), dist_reduce_fx="sum")
        self.add_state("tokens", default=torch.zeros((), dtype=torch.int64), dist_reduce_fx="sum")

    def update(self, mean_nats: Tensor, token_count: int) -> None:
        """Adds a batch: its mean loss (a scalar, not kept) and the number of tokens that it is the mean of."""
        self.nats += mean_nats.detach().double() * token_count
        self.tokens += token_count

    def compute(self) -> Tensor:
        """The mean, float32."""
        return (self.nats / self.tokens).float()


class TokenPerplexity(TokenLoss):
    """exp of the mean loss of a token."""

    def compute(self) -> Tensor:
        """The perplexity, float32."""
        return super().compute().exp()
