"""Callback that logs the norm of the gradients at optimizer steps, whichever pages hold them.

Owns a count of each optimizer's steps. I1: all ranks request the norm at the same steps, since the request is collective.
"""

from __future__ import annotations

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.core.optimizer import LightningOptimizer
from torch.optim import Optimizer

from .where import own_name, pages_of


class GradNormMonitor(Callback):
    """Logs `gradients/norm`, the global norm over all parameters and ranks; with several optimizers `gradients/norm_0`,
    `gradients/norm_1`... The gradients are those of the whole step (all its micro-batches), before clipping and unscaled;
    inf or NaN if a loss scale was too high and the step is skipped. A second GradNormMonitor of a Trainer, for another
    norm, logs `gradients_2/norm`.

    Does nothing with other strategies. Costs a pass over the gradients each time. In addition, every gradient must be
    complete before the first is used, so units are not updated during the backward pass, as with `gradient_clip_val`. The
    numbers of the training stay the same.

    Args:
        every_n_steps: how often; 1 is each optimizer step.
        norm_type: of the norm: 2, 1, inf...
    """

    asks_strategy_for_gradients = True
    """Declares to the strategy that this hook between backward and step does not read `.grad`."""

    def __init__(self, every_n_steps: int = 1, norm_type: float = 2.0) -> None:
        if every_n_steps < 1:
            raise ValueError(
                f"GradNormMonitor got every_n_steps={every_n_steps}, so no norm would be logged; give at least 1"
            )
        self.every_n_steps = every_n_steps
        self.norm_type = float(norm_type)
        self._steps: list[int] = []

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._steps = [0 for _ in trainer.optimizers]

    def on_before_optimizer_step(self, trainer: Trainer, pl_module: LightningModule, optimizer: Optimizer) -> None:
        """Logs the norm of this step. Collective."""
        strategy = pages_of(trainer)
        if strategy is None:
            return
        # In manual optimization this is Lightning's wrapper.
        inner = optimizer.optimizer if isinstance(optimizer, LightningOptimizer) else optimizer
        index = next(index for index, each in enumerate(trainer.optimizers) if each is inner)
        self._steps[index] += 1
        if (self._steps[index] - 1) % self.every_n_steps:
            return
        norm = strategy.gradient_norm(optimizer, self.norm_type)
        group = own_name(trainer, self, "gradients")
        name = f"{group}/norm" if len(self._steps) == 1 else f"{group}/norm_{index}"
        pl_module.log(name, norm.detach().float(), on_step=True, on_epoch=False, batch_size=1)
