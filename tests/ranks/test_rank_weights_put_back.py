"""Two ranks load other weights, copy their module and hold gradients back during a run, with the numbers of one rank that has
both ranks' batches; what one rank does alone is an error of both."""

from __future__ import annotations

import copy
import pickle
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from kit.fits import quiet_trainer
from kit.models import Linears
from kit.ranks.harness import run_ranks, watch_ranks
from kit.ranks.tensor_blocks import Blocks, trainer_of
from kit.ranks.tensor_blocks import loader as rows_of_blocks
from kit.ranks.training import loader, make_strategy
from torch import Tensor

from lightning_ptm.errors import UsageError

WIDTH = 64


class Net(Linears):
    """Three blocks; `act` is called behind each batch."""

    def __init__(self) -> None:
        super().__init__(WIDTH, seed=0)
        self.kept: dict[str, Tensor] = {}
        self.noted: list[Tensor] = []

    def loss(self, batch: Tensor) -> Tensor:
        return self(batch).square().mean()

    def training_step(self, batch: Tensor, index: int) -> Any:
        return self.loss(batch)

    @property
    def alone(self) -> bool:
        return bool(self.trainer.is_global_zero)


class PutsBack(Net):
    def on_train_batch_end(self, *args: Any) -> None:
        if self.trainer.global_step == 1:
            self.kept = {name: value.clone() for name, value in self.state_dict().items()}
        if self.trainer.global_step == 3:
            self.blocks[1].load_state_dict(
                {name.removeprefix("blocks.1."): value for name, value in self.kept.items() if "blocks.1." in name}
            )

    def on_train_end(self) -> None:
        self.head.load_state_dict({"weight": self.kept["head.weight"], "bias": self.kept["head.bias"]})


class OthersOnEachRank(PutsBack):
    """Rank 0's values count."""

    def on_train_end(self) -> None:
        given = self.kept["head.bias"] + self.trainer.global_rank
        self.head.load_state_dict({"weight": self.kept["head.weight"], "bias": given})


class Copies(Net):
    def on_train_batch_end(self, *args: Any) -> None:
        for twin in (copy.deepcopy(self.blocks[1]), pickle.loads(pickle.dumps(self.blocks[1]))):
            self.noted += [each.detach().clone() for each in twin.parameters()]
        whole = copy.deepcopy(self.trainer).lightning_module
        self.noted += [each.detach().clone() for each in whole.parameters()]


class Holds(Net):
    """Two backward passes a step, of which the first is not reduced by itself."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Tensor, index: int) -> None:
        optimizer: Any = self.optimizers()
        optimizer.zero_grad()
        model: Any = self.trainer.model
        if hasattr(model, "no_sync"):
            with model.no_sync():
                self.manual_backward(self.loss(batch))
            with self.trainer.strategy.no_sync():  # type: ignore[attr-defined]
                self.manual_backward(self.loss(batch) / 2)
        else:
            self.manual_backward(self.loss(batch))
            self.manual_backward(self.loss(batch) / 2)
        self.manual_backward(self.loss(batch) * 2)
        optimizer.step()


class LoadsAlone(PutsBack):
    def on_train_end(self) -> None:
        if self.alone:
            super().on_train_end()


class CopiesAlone(Net):
    def on_train_batch_end(self, *args: Any) -> None:
        if self.alone:
            copy.deepcopy(self.blocks[1])


def trained(build: type[Net], home: str | None, folder: Path, ranks: int, **settings: Any) -> Net:
    rows = torch.randn(32, WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    module = build()
    trainer = quiet_trainer(
        "auto" if home is None else make_strategy(folder, home, **settings),
        devices=ranks,
        precision="64-true",
        max_epochs=1,
        use_distributed_sampler=False,
    )
    trainer.fit(module, loader(rows, ranks, 8 // ranks))
    return module


def found_here(build: type[Net], home: str, folder: Path, **settings: Any) -> list[Tensor]:
    module = trained(build, home, folder, 2, **settings)
    return [*(each.detach().clone() for each in module.parameters()), *module.noted]


@pytest.mark.diagonal
@pytest.mark.parametrize("home", ["ram", "masters_on_disk", "all_on_disk", "three_tiers", "lock_free"])
@pytest.mark.parametrize(
    ("build", "reduced"),
    [
        *((build, "each_backward") for build in (PutsBack, OthersOnEachRank, Copies, Holds)),
        (Holds, "each_step"),
    ],
)
def test_ranks_do_it_together(build: type[Net], home: str, reduced: str, disk: Path) -> None:
    plain = trained(PutsBack if build is OthersOnEachRank else build, None, disk, 1)
    expected = [*(each.detach().clone() for each in plain.parameters()), *plain.noted]
    for found in run_ranks(partial(found_here, tuning={"reduce_gradients": reduced}), 2, build, home, disk):
        assert len(found) == len(expected)
        for value, other in zip(found, expected, strict=True):
            torch.testing.assert_close(value, other, rtol=0, atol=1e-12)


class CopiesParts(Blocks):
    def on_train_epoch_start(self) -> None:
        with pytest.raises(UsageError, match="ranks divide parameters or experts cannot be copied or pickled"):
            copy.deepcopy(self.blocks[0])
        found = {name: value.clone() for name, value in self.blocks[0].state_dict().items()}
        self.blocks[0].load_state_dict({name: value / 2 for name, value in found.items()})
        for name, value in self.blocks[0].state_dict().items():
            assert torch.equal(value, found[name] / 2)


def parts_here(settings: dict[str, Any]) -> None:
    trainer_of(2, 2, settings).fit(CopiesParts(), rows_of_blocks(8))


@pytest.mark.parametrize("home", ["device", "disk"])
def test_parts_are_loaded_and_not_copied(home: str, disk: Path) -> None:
    run_ranks(parts_here, 2, {"offload_optimizer": home, "disk_path": str(disk)})


def alone_here(build: type[Net], home: str, folder: Path) -> None:
    trained(build, home, folder, 2)


@pytest.mark.parametrize("home", ["ram", "all_on_disk"])
@pytest.mark.parametrize("build", [LoadsAlone, CopiesAlone])
def test_one_that_does_it_alone_ends_the_run_on_both(build: type[Net], home: str, disk: Path) -> None:
    for outcome in watch_ranks(alone_here, 2, build, home, disk, limit_s=60):
        assert "RankError" in outcome.error and "reads, edits or saves weights" in outcome.error, str(outcome)
