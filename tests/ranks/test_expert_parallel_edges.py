"""Experts that ranks divide, at the edges: 16-bit sums, small memory, collectives of the user's in a step, and wrong use."""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar

import lightning as L
import pytest
import torch
from kit.outcomes import Outcome
from kit.ranks.harness import run_ranks
from kit.ranks.models import WIDTH, MomentumTower
from kit.ranks.training import Training, fit, loader, make_strategy, make_trainer, plain, tokens
from test_rank_experts import MoETower
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_ptm import AngelPTMPrecision
from lightning_ptm.models.moe import Expert, MixtureOfExperts, Routing
from lightning_ptm.terms import Tier
from lightning_ptm.update.loss_scale import LossScale

EXPERTS = {"units": ["MixtureOfExperts", "Expert"], "expert_parallel_size": 2}


# -- sums over ranks in 16 bits -------------------------------------------------------------------------------------------

FIRST_SCALE, STEPS = 2.0**18, 8


class OneSum(L.LightningModule):
    """The gradient of the expert that all tokens of all ranks go to is by far the largest number in the pass."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = MixtureOfExperts(
            WIDTH,
            64,
            experts=4,
            choices=1,
            capacity_factor=4.0,
            eval_capacity_factor=4.0,
            jitter=0.0,
            gated=False,
            dropout=0.0,
        )
        for parameter in self.layer.parameters():
            nn.init.normal_(parameter, std=parameter.shape[1] ** -0.5)

    def training_step(self, batch: Tensor, index: int) -> Tensor:
        return 64 * self.layer(batch)[0].float().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=1e-3)


def scaled(size: int, folder: Path) -> tuple[float, dict[str, Tensor], dict[str, Tensor]]:
    torch.manual_seed(0)
    module = OneSum()
    before = {name: parameter.detach().clone() for name, parameter in module.named_parameters()}
    scale = LossScale(FIRST_SCALE)
    strategy = make_strategy(folder, "all_on_disk", units=["Expert"], expert_parallel_size=size)
    plugins = [AngelPTMPrecision("16-mixed", scale)]
    trainer = make_trainer(Training(MoETower, None), strategy, 2, plugins=plugins)  # type: ignore[arg-type]
    rows = torch.randn(WIDTH).expand(STEPS * 32, WIDTH)  # every token is the same one, on all ranks
    trainer.fit(module, DataLoader(rows, batch_size=32))
    after = {name: parameter.detach() for name, parameter in module.named_parameters()}
    return scale.value, after, {name: after[name] - before[name] for name in after}


def in_both_ways(folder: Path) -> list[Any]:
    return [scaled(size, folder) for size in (1, 2)]


def test_an_experts_sum_over_ranks_overflows_no_earlier_than_each_ranks_own(disk: Path) -> None:
    for (scale, theirs, moved), (own_scale, ours, _) in run_ranks(in_both_ways, 2, disk):
        # A step at twice this scale has overflowed, and so would the sum of two ranks at this one.
        assert own_scale == scale < FIRST_SCALE
        assert FIRST_SCALE / scale < 2.0 ** (STEPS - 2)  # some steps have not overflowed
        assert any(difference.abs().max() > 0 for name, difference in moved.items() if ".experts." in name)
        for name, weight in theirs.items():
            torch.testing.assert_close(ours[name], weight, rtol=0, atol=0.01 * float(moved[name].abs().max()) + 1e-7)


# -- memory for what other ranks gather -----------------------------------------------------------------------------------


class Fill(L.Callback):
    """Rank 1 has its experts on the device when rank 0 gathers a block that all ranks share."""

    def on_train_start(self, trainer: L.Trainer, module: Any) -> None:
        engine = trainer.strategy.engine
        blueprint, executor = engine.blueprint, engine.executor
        shared = next(unit.index for unit in blueprint.units if unit.name == "dense")
        store = engine.stores[shared]
        executor.release_all()
        experts = [unit for unit in blueprint.by_need if unit not in blueprint.layout.remote_flats]
        if trainer.global_rank == 1:
            for unit in experts:
                executor.require(unit)
            assert not store.fetched
        live = sum(engine.stores[unit].fetched for unit in experts)
        self.no_room = engine.allocator.free_bytes(Tier.DEVICE) < store.full_bytes
        if trainer.global_rank == 0:
            executor.require(shared)
        engine.drain()
        self.kept = store.fetched
        self.given_up = live - sum(engine.stores[unit].fetched for unit in experts)


class LargeExperts(MoETower):
    """A device tier of 40 pages holds some of these, of eight pages each."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            MixtureOfExperts(
                WIDTH,
                512,
                experts=10,
                choices=1,
                capacity_factor=1.25,
                eval_capacity_factor=2.0,
                jitter=0.0,
                gated=False,
                dropout=0.0,
            )
            for _ in range(1)
        )
        for parameter in self.blocks.parameters():
            nn.init.normal_(parameter, std=parameter.shape[1] ** -0.5)
        self.dense = nn.Linear(WIDTH, 4 * WIDTH)

    def loss(self, batch: Tensor, rank: int, step: int) -> Tensor:
        return super().loss(batch, rank, step) + self.dense(self.embedding(batch)).mean()


def fill(training: Training, folder: Path) -> tuple[bool, bool, int]:
    torch.manual_seed(0)
    callback = Fill()
    settings = {
        "units": ["MixtureOfExperts", "Expert", "Linear"],
        "expert_parallel_size": 2,
        "device_memory": "2560KiB",
    }
    strategy = make_strategy(folder, "three_tiers", **settings)
    trainer = make_trainer(training, strategy, 2, callbacks=[callback])
    trainer.fit(training.build(), loader(tokens(training, 2), 2))
    return callback.no_room, callback.kept, callback.given_up


def test_room_is_made_for_what_others_gather(disk: Path) -> None:
    """Else this rank would throw it away, and gather it again when it comes to it."""
    first, second = run_ranks(fill, 2, Training(LargeExperts, "64-true", batches=1), disk)
    no_room, kept, given_up = second
    assert no_room and kept and given_up > 0
    assert first[1]


# -- the least device memory ----------------------------------------------------------------------------------------------


class Pair(nn.Module):
    """Block with two layers of experts."""

    def __init__(self) -> None:
        super().__init__()
        kept = {"capacity_factor": 2.0, "eval_capacity_factor": 3.0, "jitter": 0.0, "gated": False, "dropout": 0.0}
        self.first = MixtureOfExperts(WIDTH, 256, experts=9, choices=1, **kept)  # type: ignore[arg-type]
        self.between = nn.Linear(WIDTH, WIDTH)
        self.second = MixtureOfExperts(WIDTH, 256, experts=8, choices=2, **kept)  # type: ignore[arg-type]

    def forward(self, x: Tensor) -> tuple[Tensor, Routing]:
        x = x + self.between(self.first(x)[0])
        out, routing = self.second(x)
        return x + out, routing


class TwoLayersInABlock(MomentumTower):
    """Every token is another one, so that all experts compute."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Pair()])
        self.large: nn.Module = nn.Identity()
        for parameter in self.blocks.parameters():
            if parameter.dim() > 1:
                nn.init.normal_(parameter, std=0.7 * parameter.shape[1] ** -0.5)

    def loss(self, batch: Tensor, rank: int, step: int) -> Tensor:
        x, routing = self.blocks[0](self.embedding(batch[:, :-1]))
        logits = self.head(self.norm(x))
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())
        return loss + 0.01 * routing.balance_loss + 0.01 * self.large(x).square().mean()


class WithALargeUnit(TwoLayersInABlock):
    """It is larger than the pages that plans leave to it while experts compute."""

    def __init__(self) -> None:
        super().__init__()
        self.large = nn.Linear(WIDTH, 5000)


LEAST_CASES: dict[str, tuple[Training, dict[str, Any]]] = {
    "two layers in a recomputed block": (
        Training(TwoLayersInABlock, "64-true", batches=2, clip=0.5),
        {"units": ["Pair", "Expert"], "recompute": "all"},
    ),
    "a large unit beside experts": (
        Training(WithALargeUnit, "64-true", batches=2),
        {"units": ["MixtureOfExperts", "Expert", "Linear"], "recompute": "all", "offload_parameters": "host"},
    ),
}


def fit_least(folder: Path) -> dict[str, Outcome]:
    return {
        name: fit(training, 2, folder, "tight", expert_parallel_size=2, **settings)
        for name, (training, settings) in LEAST_CASES.items()
    }


def test_the_least_memory_that_a_plan_accepts_is_enough(disk: Path) -> None:
    found = run_ranks(fit_least, 2, disk)
    for name, (training, _) in LEAST_CASES.items():
        for ours, theirs in zip(found, plain(training, 2), strict=True):
            torch.testing.assert_close(ours[name].losses, theirs.losses, rtol=0, atol=1e-9)
            torch.testing.assert_close(ours[name].weights, theirs.weights, rtol=0, atol=1e-9)


# -- collectives of the user's in a step ----------------------------------------------------------------------------------


class Talks(MoETower):
    """Rank 1 has one kind of token and leaves a block out, so it is there while rank 0 still gathers."""

    def __init__(self) -> None:
        super().__init__()
        self.dense = nn.Linear(WIDTH, 4 * WIDTH)

    def loss(self, batch: Tensor, rank: int, step: int) -> Tensor:
        loss = super().loss(batch if rank == 0 else batch[:, :1].expand_as(batch), 9, step)
        if rank == 0:
            loss = loss + self.dense(self.embedding(batch)).mean()
        strategy = self.trainer.strategy
        if step == 0:
            assert strategy.reduce(torch.tensor(float(rank)), reduce_op="sum") == 1
        elif step == 1:
            assert self.all_gather(torch.tensor(rank)).tolist() == [0, 1]
        elif step == 2:
            assert strategy.broadcast(rank, 1) == 1
        else:
            strategy.barrier()
        return loss


def talk(training: Training, folder: Path, size: int) -> list[Tensor]:
    torch.manual_seed(0)
    module = training.build()
    settings = {"units": ["MixtureOfExperts", "Expert", "Linear"], "expert_parallel_size": size}
    trainer = make_trainer(training, make_strategy(folder, "all_on_disk", **settings), 2)
    trainer.fit(module, loader(tokens(training, 2), 2))
    return module.losses


@pytest.mark.parametrize("size", [1, 2])
def test_collectives_in_a_step_wait_for_ranks_that_gather(size: int, disk: Path) -> None:
    for losses in run_ranks(talk, 2, Training(Talks, "64-true", batches=4), disk, size, limit_s=45.0):
        assert len(losses) == 4


# -- batches without tokens -----------------------------------------------------------------------------------------------


class WithoutTokens(MoETower):
    """Rank 1 has none at step 1, and nobody at step 2."""

    optimizer_class = torch.optim.SGD
    optimizer_options: ClassVar[dict[str, Any]] = {"lr": 0.1}

    def loss(self, batch: Tensor, rank: int, step: int) -> Tensor:
        if (step == 1 and rank == 1) or step == 2:
            batch = batch[:0]
        x, balance = self.embedding(batch % (3 + rank)), 0.0
        for block in self.blocks:
            out, routing = block(x)
            x, balance = x + out, balance + routing.balance_loss
        return self.norm(x).exp().sum() / 1000 + 0.01 * balance


def without_tokens(training: Training, folder: Path) -> Outcome:
    return fit(training, 2, folder, "lock_free", **EXPERTS)


def test_ranks_without_tokens_compute_others(disk: Path) -> None:
    training = Training(WithoutTokens, "64-true")
    theirs = plain(training, 2)
    for rank, ours in enumerate(run_ranks(without_tokens, 2, training, disk)):
        torch.testing.assert_close(ours.losses, theirs[rank].losses, rtol=0, atol=1e-9)
        torch.testing.assert_close(ours.weights, theirs[rank].weights, rtol=0, atol=1e-9)


# -- parts that one rank alone has ----------------------------------------------------------------------------------------


class ShowsExperts(MoETower):
    """Reads each expert's weights alone, and puts those of one back."""

    shown: dict[str, Tensor]

    def on_train_start(self) -> None:
        experts = {name: each for name, each in self.named_modules() if isinstance(each, Expert)}
        for each in experts.values():
            each.load_state_dict({name: value + 1 for name, value in each.state_dict().items()})
        self.shown = {
            f"{at}.{name}": value for at, each in experts.items() for name, value in each.state_dict().items()
        }


def show_experts(disk: Path) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Returns the weights of all experts at the start, before they are changed, and as the run shows them afterwards."""
    torch.manual_seed(0)
    module, training = ShowsExperts(), Training(ShowsExperts, batches=1)
    before = {name: value.clone() for name, value in module.state_dict().items()}
    make_trainer(training, make_strategy(disk, "ram", **EXPERTS), 2).fit(module, loader(tokens(training, 2), 2))
    return before, module.shown


def test_the_weights_of_one_expert_are_read_and_put_back_on_all_ranks(disk: Path) -> None:
    """Where a rank has an expert whole, on its device, and others have to gather it."""
    for before, shown in run_ranks(show_experts, 2, disk):
        assert len(shown) == 40
        for name, value in shown.items():
            assert torch.equal(value, before[name] + 1), name
