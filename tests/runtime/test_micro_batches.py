"""Several micro-batches in flight: the forward of the next before the backward of the last, as pipelines of stages go.

Whatever the order of forwards, backwards that come in one order give the same sums, bit for bit, and a plan fits wherever
the run does.
"""

from __future__ import annotations

from typing import Any

import lightning as L
import pytest
from kit.models import Block
from kit.plain_loop import Batches, PlainLoop, TrainModule, fit, vectors
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from lightning_ptm.terms import Mode

BATCHES = vectors(5, 4, 3, 32)
IN_TURN = "F0 B0 F1 B1 F2 B2 F3 B3"
IN_FLIGHT = "F0 F1 B0 F2 B1 F3 B2 B3"
ALL_FIRST = "F0 F1 F2 F3 B0 B1 B2 B3"


class Staged(TrainModule):
    """`order` says when the forward and the backward of each micro-batch of a batch (micro-batches, rows, 32) comes."""

    width = 32

    def __init__(self, order: str) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.order = order
        self.first = nn.Linear(32, self.width)
        self.blocks = nn.ModuleList(Block(self.width) for _ in range(4))
        self.last = nn.Linear(self.width, 1)

    def compute(self, value: Tensor) -> Tensor:
        value = self.first(value)
        for block in self.blocks:
            value = self.call(block, value)
        return self.last(value).float().pow(2).mean()

    def call(self, block: nn.Module, value: Tensor) -> Tensor:
        return block(value)  # type: ignore[no-any-return]

    def training_step(self, batch: Tensor, index: int) -> None:  # type: ignore[override]
        optimizer: Any = self.optimizers()
        optimizer.zero_grad()
        losses: dict[str, Tensor] = {}
        for move in self.order.split():
            if move[0] == "F":
                losses[move[1:]] = self.compute(batch[int(move[1:])])
            else:
                self.manual_backward(losses[move[1:]])
        self.losses += [losses[name].detach().clone() for name in sorted(losses)]
        optimizer.step()


class Reentrant(Staged):
    """Model whose blocks are recomputed by torch's older checkpoint."""

    def call(self, block: nn.Module, value: Tensor) -> Tensor:
        return checkpoint(block, value, use_reentrant=True)  # type: ignore[no-any-return]


class Shared(Staged):
    """Each block is called twice in a micro-batch."""

    def call(self, block: nn.Module, value: Tensor) -> Tensor:
        return block(block(value).sin())  # type: ignore[no-any-return]


class SharedInput(Staged):
    """Model whose blocks, in all micro-batches, also read the output of one trunk, whose gradient comes once for
    each."""

    def __init__(self, order: str) -> None:
        super().__init__(order)
        self.trunk = nn.Linear(32, self.width)

    def training_step(self, batch: Tensor, index: int) -> None:  # type: ignore[override]
        self.beside = self.trunk(batch[0])
        super().training_step(batch, index)

    def call(self, block: nn.Module, value: Tensor) -> Tensor:
        return block(value + self.beside)  # type: ignore[no-any-return]

    def manual_backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        super().manual_backward(loss, *args, retain_graph=True, **kwargs)


@pytest.mark.slow_unless(
    "ram-32-true-Staged-F0 F1 F2 F3 B0 B1 B2 B3",
    "all_on_disk-bf16-mixed-Staged-F0 F1 B0 F2 B1 F3 B2 B3",
    "three_tiers-bf16-mixed-Shared-F0 F1 B0 F2 B1 F3 B2 B3",
    "tight-32-true-Shared-F0 F1 F2 F3 B0 B1 B2 B3",
)
@pytest.mark.parametrize("order", [IN_FLIGHT, ALL_FIRST])
@pytest.mark.parametrize("kind", [Staged, Shared])
@pytest.mark.parametrize("precision", ["bf16-mixed", "32-true"])
def test_as_in_turn(strategy_at, tier, kind, order, precision) -> None:
    def build() -> TrainModule:
        return kind(order)  # type: ignore[no-any-return]

    in_turn = PlainLoop(lambda: kind(IN_TURN), precision).run(BATCHES)
    fit(build, BATCHES, strategy_at(tier), precision).assert_equal(in_turn)


@pytest.mark.slow_unless("masters_on_disk-none", "lock_free-all", "lock_free_three_tiers-all", "tight_recomputed-none")
@pytest.mark.parametrize("recompute", ["all", "none"])
def test_recomputed(strategy_at, tier, recompute) -> None:
    kind = Staged if recompute == "all" else Reentrant
    plain = PlainLoop(lambda: kind(IN_FLIGHT)).run(BATCHES)
    # Reentrant checkpoints over several micro-batches hold their units to the end of the pass.
    settings = {"spare_pages": 8} if tier.startswith("tight") and recompute == "none" else {}
    fit(lambda: kind(IN_FLIGHT), BATCHES, strategy_at(tier, recompute=recompute, **settings)).assert_equal(plain)


@pytest.mark.slow_unless("ram", "three_tiers", "tight")
def test_one_trunk_for_all(strategy_at, tier) -> None:
    class ByPlainLoop(SharedInput):
        def manual_backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
            loss.backward(retain_graph=True)

    ours = fit(lambda: SharedInput(IN_FLIGHT), BATCHES, strategy_at(tier), "32-true")
    plain = fit(lambda: ByPlainLoop(IN_FLIGHT), BATCHES, "auto", "32-true")  # type: ignore[arg-type]
    ours.assert_equal(plain)


class Looks(L.Callback):
    """Records the executor's counts at the end of each step, and the bytes of the plan that it follows."""

    def __init__(self) -> None:
        self.misses: list[int] = []
        self.ticks: list[int] = []

    def on_train_batch_end(self, trainer: L.Trainer, *args: Any) -> None:
        executor = trainer.strategy.engine.executor  # type: ignore[attr-defined]
        planned = executor.plans.planned(Mode.TRAIN)
        self.misses.append(executor.fetching.misses)
        self.ticks.append(len(planned[1].ticks))


class Large(Staged):
    width = 128


LARGE = Batches([each for _ in range(2) for each in BATCHES.items])


@pytest.mark.parametrize("host_memory", [pytest.param("6MiB", marks=pytest.mark.slow), "4.5MiB"])
def test_a_plan_fits_wherever_the_run_does(strategy_at, host_memory) -> None:
    """In flight, a unit's gradients leave in the same tick as in turn, so no more is late than there."""
    late: dict[str, int] = {}
    for order in (IN_TURN, IN_FLIGHT, ALL_FIRST):
        looks = Looks()
        strategy = strategy_at(
            "all_on_disk",
            host_memory=host_memory,
            tuning={"staging_memory": "2MiB"},
            debug={"poison": False},
            page_size="64KiB",
        )
        fit(lambda order=order: Large(order), LARGE, strategy, "32-true", callbacks=[looks])
        assert looks.ticks[-1] == 1 + 4 * 4 + 4 * 5, "no plan was found for what the run does"
        late[order] = looks.misses[-1] - looks.misses[-4]
    # One each step: the root, which its own update has left behind, is read on after the optimizer's step.
    assert late[IN_TURN] <= 3 * 6 and late[IN_FLIGHT] <= 3 * 6 and late[ALL_FIRST] <= 3 * 6, late
