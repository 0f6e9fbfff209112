"""Methods that a run replaces are their owners' again behind it: the class's, or those that users had put there."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import lightning as L
import torch
from kit import fits
from lightning.pytorch.callbacks import EMAWeightAveraging, StochasticWeightAveraging
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_ptm import AngelPTMStrategy

MakeStrategy = Callable[..., AngelPTMStrategy]


class Layer(L.LightningModule):
    """Module whose optimizer counts its zero_grad by a method of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)
        self.optimizer = torch.optim.SGD(self.layer.parameters(), lr=0.1)
        self.zeroed = 0
        of_class = self.optimizer.zero_grad

        def zero_grad(*args: Any, **kwargs: Any) -> None:
            self.zeroed += 1
            of_class(*args, **kwargs)

        self.optimizer.zero_grad = zero_grad  # type: ignore[method-assign]

    def training_step(self, batch: list[torch.Tensor], index: int) -> torch.Tensor:
        return self.layer(batch[0]).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return self.optimizer


def fit(module: L.LightningModule, strategy: AngelPTMStrategy, *callbacks: L.Callback) -> None:
    data = DataLoader(TensorDataset(torch.ones(8, 8)), batch_size=4)
    fits.fit(module, data, strategy, max_epochs=3, callbacks=list(callbacks))


def test_a_users_own_zero_grad_is_called_and_there_again(tier: str, strategy_at: MakeStrategy) -> None:
    module = Layer()
    own = module.optimizer.zero_grad
    fit(module, strategy_at(tier))
    assert module.zeroed == 6
    assert module.optimizer.zero_grad is own


def test_what_is_put_around_a_replaced_method_stays_and_calls_the_owners(strategy_at: MakeStrategy) -> None:
    class PutsItsOwn(L.Callback):
        def on_train_start(self, trainer: L.Trainer, module: L.LightningModule) -> None:
            optimizer = trainer.optimizers[0]
            ours = optimizer.zero_grad
            optimizer.zero_grad = lambda *args, **kwargs: ours(*args, **kwargs)  # type: ignore[method-assign]

    module = Layer()
    fit(module, strategy_at("all_on_disk"), PutsItsOwn())
    zeroed = module.zeroed
    module.optimizer.zero_grad()
    assert module.zeroed == zeroed + 1


def test_averaging_callbacks_are_as_before(strategy_at: MakeStrategy) -> None:
    callbacks = StochasticWeightAveraging(0.1, swa_epoch_start=1), EMAWeightAveraging()
    for callback in callbacks:
        fit(Layer(), strategy_at("ram"), callback)
        assert not {"transfer_weights", "update_parameters", "_swap_models"} & vars(callback).keys()
        copy.deepcopy(callback)
