"""A run leaves nothing on the user's objects, also one whose set-up fails late, or whose end is disturbed."""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Iterator
from typing import Any

import lightning as L
import pytest
import torch
from kit.fits import quiet_trainer
from torch import Tensor, nn
from torch.utils.data import DataLoader

import lightning_ptm.trainer.builder
from lightning_ptm import AngelPTMPrecision
from lightning_ptm.errors import InternalError
from lightning_ptm.planning.inventory import Lifetime, Row, What
from lightning_ptm.terms import Tier


class Net(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 64)) for _ in range(3))

    def training_step(self, batch: Tensor, index: int) -> Tensor:
        for block in self.blocks:
            batch = batch + block(batch)
        return batch.square().mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


def fit(module: L.LightningModule, strategy: Any, **options: Any) -> None:
    trainer = quiet_trainer(strategy, max_steps=2, **options)
    trainer.fit(module, DataLoader(torch.randn(8, 64), batch_size=4))  # type: ignore[arg-type]


def belongings(module: nn.Module) -> dict[str, list[tuple[str, int]]]:
    """Lists the hooks of each module with their number, and the methods that replace its class's."""
    return {
        name: sorted((key, len(value) if isinstance(value, dict) else 0) for key, value in vars(each).items())
        for name, each in module.named_modules()
    }


@pytest.fixture(params=["lightning_ptm update", "lightning_ptm buffering"])
def no_more_threads(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """While set, the system has no thread for lock-free updates, which are started when all else is there."""
    name, full, start = request.param, threading.Event(), threading.Thread.start

    def limited(thread: threading.Thread) -> None:
        if full.is_set() and thread.name == name:
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", limited)
    yield full


@pytest.mark.diagonal
@pytest.mark.parametrize("tier", ["lock_free", "lock_free_three_tiers"])
def test_nothing_stays_on_a_module_whose_set_up_fails_last(
    strategy_at: Any, tier: str, no_more_threads: threading.Event
) -> None:
    module = Net()
    before = belongings(module.blocks)
    weights = {name: parameter.detach().clone() for name, parameter in module.named_parameters()}
    no_more_threads.set()
    with pytest.raises(RuntimeError, match="can't start new thread"):
        fit(module, strategy_at(tier))
    assert belongings(module.blocks) == before
    for name, parameter in module.named_parameters():
        assert type(parameter) is nn.Parameter
        assert torch.equal(parameter, weights[name]), name
    no_more_threads.clear()
    fit(module, strategy_at(tier))


def test_what_is_taken_without_a_row_is_found(strategy_at: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The test adds a row that no code allocates."""
    decide_here = lightning_ptm.trainer.builder.decide_here

    def with_a_row(*args: Any, **kwargs: Any) -> Any:
        found = decide_here(*args, **kwargs)
        row = Row(What.SAVES, Tier.DEVICE, 100, "float32", 4, lifetime=Lifetime.RUN)
        rows = (*found.inventory.rows, row)
        return dataclasses.replace(found, inventory=dataclasses.replace(found.inventory, rows=rows))

    monkeypatch.setattr(lightning_ptm.trainer.builder, "decide_here", with_a_row)
    with pytest.raises(
        InternalError, match=r"set-up has allocated \d+ bytes of the device tier, and the rows .* sum to \d+"
    ):
        fit(Net(), strategy_at("ram"))


class Holds(AngelPTMPrecision):
    """A user's own, which fails when it is to let go of the run."""

    def attach(self, engine: Any, *args: Any, **kwargs: Any) -> None:
        super().attach(engine, *args, **kwargs)
        if engine is None:
            raise RuntimeError("holds on")


@pytest.mark.parametrize("tier", ["masters_on_disk", "lock_free"])
def test_an_end_that_is_disturbed_gives_back_all_else(strategy_at: Any, tier: str) -> None:
    """Threads and files are looked for by a fixture (tests/conftest.py)."""
    torch.manual_seed(0)
    module, undisturbed = Net(), Net()
    undisturbed.load_state_dict(module.state_dict())
    before = belongings(module.blocks)
    torch.manual_seed(1)
    with pytest.raises(RuntimeError, match="holds on"):
        fit(module, strategy_at(tier), plugins=[Holds("32-true")])
    assert belongings(module.blocks) == before
    torch.manual_seed(1)
    fit(undisturbed, strategy_at(tier))
    for ours, theirs in zip(module.parameters(), undisturbed.parameters(), strict=True):
        assert torch.equal(ours, theirs)
