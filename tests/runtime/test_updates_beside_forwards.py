"""Updates that run while a forward has another default dtype: their numbers are those of steps behind the backward."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable
from typing import Any

import lightning as L
import pytest
import torch
from kit.plain_loop import make_trainer
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_ptm.memory.disk import FileOps
from lightning_ptm.update.shadow import ShadowOptimizer

IN_FORWARD = threading.Event()


class MakesNumbers(Optimizer):
    """Makes a tensor of a number in each step, and a state of one that asks for the default."""

    def __init__(self, parameters: Iterable[Tensor]) -> None:
        super().__init__(parameters, {"lr": 0.01})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    state = self.state[parameter]
                    if not state:
                        state["decay"] = torch.ones((), dtype=torch.get_default_dtype())
                        state["sum"] = torch.zeros_like(parameter)
                    state["decay"] *= 0.9
                    state["sum"] += parameter.grad
                    parameter.sub_(state["sum"] * torch.tensor(0.3) * state["decay"].item())
        return loss


class Net(L.LightningModule):
    """A forward waits for updates within `training_step`."""

    def __init__(self, optimizer: Callable[[Any], Optimizer]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(*(nn.Linear(16, 16) for _ in range(3)))
        self.optimizer = optimizer

    def training_step(self, batch: Tensor, index: int) -> Tensor:
        IN_FORWARD.set()
        assert torch.get_default_dtype() is not torch.float32
        time.sleep(0.01)
        loss = torch.tanh(self.layers(batch)).square().mean()
        IN_FORWARD.clear()
        return loss

    def configure_optimizers(self) -> Optimizer:
        return self.optimizer(self.parameters())


def weights(strategy: Any, optimizer: Callable[[Any], Optimizer], precision: str) -> dict[str, Tensor]:
    IN_FORWARD.clear()
    module = Net(optimizer)
    rows = torch.randn(24, 16, generator=torch.Generator().manual_seed(1))
    make_trainer(strategy, precision).fit(module, torch.utils.data.DataLoader(rows, batch_size=4))
    return {name: value.detach().clone() for name, value in module.state_dict().items()}


class SlowDisk(FileOps):
    """Disk that delivers reads for an update when the next forward has begun."""

    def preadv(self, *args: Any) -> int:
        time.sleep(0.03)
        return super().preadv(*args)


@pytest.fixture
def late(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Updates in another thread wait for a forward, if one comes; whether one was there, of each."""
    steps: list[bool] = []
    take = ShadowOptimizer._take_step

    def wait(shadow: ShadowOptimizer) -> None:
        own = threading.current_thread() is not threading.main_thread()
        steps.append(IN_FORWARD.wait(0.05) if own else IN_FORWARD.is_set())
        take(shadow)

    monkeypatch.setattr(ShadowOptimizer, "_take_step", wait)
    return steps


@pytest.mark.parametrize("precision", ["64-true", "bf16-true"])
@pytest.mark.parametrize("optimizer", [torch.optim.NAdam, torch.optim.ASGD, MakesNumbers])
def test_lock_free(optimizer: Callable[[Any], Optimizer], precision: str, strategy_at: Any, late: list[bool]) -> None:
    expected = weights("auto", optimizer, precision)
    found = weights(strategy_at("lock_free", units=["Linear"]), optimizer, precision)
    assert any(late)  # some have met a forward
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=0, atol=0)


@pytest.mark.parametrize("precision", ["64-true", "bf16-true"])
@pytest.mark.parametrize("optimizer", [torch.optim.NAdam, torch.optim.ASGD, MakesNumbers])
def test_that_a_forward_makes_itself(
    optimizer: Callable[[Any], Optimizer], precision: str, strategy_at: Any, late: list[bool]
) -> None:
    expected = weights("auto", optimizer, precision)
    strategy = strategy_at("masters_on_disk", units=["Linear"])
    strategy.file_ops = SlowDisk()
    found = weights(strategy, optimizer, precision)
    assert any(late)
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=0, atol=0)
