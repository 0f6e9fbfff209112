"""T5-MoE: T5 with a mixture of experts in every other block, after Switch Transformers (Fedus et al. 2022)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from lightning_ptm.errors import ConfigError
from lightning_ptm.models.base import Batch
from lightning_ptm.models.moe import Expert, MixtureOfExperts, Router
from lightning_ptm.models.t5 import T5
from lightning_ptm.parallel import ColwiseParallel, RowwiseParallel, Rule, Summed

INIT_SCALE = 0.1
"""Scale of the truncated normal initialisation of Switch Transformers: a tenth of the usual one keeps routers stable."""


class T5MoE(T5):
    """T5 whose blocks 1, 3, 5... of either stack have experts instead of one feed-forward.

    In addition to T5's values, each training step logs `moe/balance_loss`, `moe/dropped` (the fraction of choices without
    room at their expert) and `moe/load_entropy` (1: experts have equally many tokens), as means over the layers.

    Args:
        experts: Experts of a layer that has them, at least 2.
        choices: Experts that compute a token: 1 or 2.
        capacity_factor: Room of an expert in training, in multiples of its even share of the batch's tokens; tokens without
            room are passed on by their block's residual.
        eval_capacity_factor: The same for evaluation.
        balance_weight: Weight of the loss that keeps experts evenly busy.
        jitter: In training, a router's inputs are multiplied by uniform noise of this size.
        settings: Arguments of T5.

    Raises:
        ConfigError: sizes do not fit together.
    """

    tensor_parallel_plan: ClassVar[Mapping[str, Rule]] = {
        **T5.tensor_parallel_plan,
        "*.blocks.*.feed_forward.experts": Summed(),  # one exchange for all of a layer's experts
        "*.blocks.*.feed_forward.experts.*.expand": ColwiseParallel(),
        "*.blocks.*.feed_forward.experts.*.gate": ColwiseParallel(),
        "*.blocks.*.feed_forward.experts.*.project": RowwiseParallel(),
    }

    def __init__(
        self,
        experts: int = 8,
        choices: int = 1,
        capacity_factor: float = 1.25,
        eval_capacity_factor: float = 2.0,
        balance_weight: float = 0.01,
        jitter: float = 0.01,
        **settings: Any,
    ) -> None:
        super().__init__(**settings)
        if experts < 2 or choices not in (1, 2):
            raise ConfigError(
                f"T5MoE got experts={experts} and choices={choices}: a token goes to 1 or 2 of at least 2 experts; for one "
                f"feed-forward use T5"
            )
        if not min(capacity_factor, eval_capacity_factor) > 0 or not 0 <= jitter < 1:
            raise ConfigError(
                f"T5MoE got capacity_factor={capacity_factor}, eval_capacity_factor={eval_capacity_factor}, jitter={jitter}: "
                f"experts would compute nothing, or inputs of a router change sign; factors are above 0 and jitter is in "
                f"[0, 1)"
            )
        if not balance_weight >= 0:
            raise ConfigError(
                f"T5MoE got balance_weight={balance_weight}: training would drive all tokens to one expert; give 0 (no "
                f"balance loss) or more"
            )
        if self.layers < 2:
            raise ConfigError(
                f"T5MoE got layers={self.layers} and has experts in every other block from the second on, so there would be "
                f"none; use at least 2 layers"
            )
        self.save_hyperparameters()
        self.experts = experts
        self.choices = choices
        self.capacity_factor = capacity_factor
        self.eval_capacity_factor = eval_capacity_factor
        self.balance_weight = balance_weight
        self.jitter = jitter

    def make_feed_forward(self, index: int) -> nn.Module:
        """Returns experts for every other block, starting with the second."""
        if index % 2 == 0:
            return super().make_feed_forward(index)
        return MixtureOfExperts(
            self.width,
            self.feed_forward_width,
            experts=self.experts,
            choices=self.choices,
            capacity_factor=self.capacity_factor,
            eval_capacity_factor=self.eval_capacity_factor,
            jitter=self.jitter,
            gated=self.gated,
            dropout=self.dropout,
        )

    @torch.no_grad()
    def init_weights(self, module: nn.Module) -> None:
        """Initialises as T5 does, with matrices from Switch Transformers' smaller, truncated normal."""
        if isinstance(module, Router):
            self.init_matrix(module.weight, self.width)
        elif isinstance(module, Expert):
            for weight in module.parameters():
                self.init_matrix(weight, weight.shape[1])
        else:
            super().init_weights(module)

    def init_matrix(self, weight: Tensor, inputs: int) -> None:
        """Initialises a matrix in place (section 2.4 of Switch Transformers)."""
        std = (INIT_SCALE / inputs) ** 0.5
        nn.init.trunc_normal_(weight, std=std, a=-2 * std, b=2 * std)

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        """Returns the loss of one micro-batch: cross-entropy plus the weighted balance loss."""
        loss, routings = self.loss_and_routings(batch)
        balance = torch.stack([routing.balance_loss for routing in routings]).mean()
        self.log("train_loss", loss, prog_bar=True)
        self.log("moe/balance_loss", balance)
        self.log("moe/dropped", torch.stack([routing.dropped_fraction for routing in routings]).mean())
        self.log("moe/load_entropy", torch.stack([routing.load_entropy for routing in routings]).mean())
        return loss + self.balance_weight * len(routings) * balance
