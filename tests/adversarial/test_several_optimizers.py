"""A parameter in several optimizers trains as with a plain Trainer, wherever states live: one value, states for each.

Everybody's steps start from what the others' have left.
"""

from __future__ import annotations

import warnings
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from kit.judged import ByHand, MakeStrategy, assert_alike, batches, judge, run, trainer
from torch import Tensor, optim

from lightning_ptm.errors import ConfigError
from lightning_ptm.runtime.engine.inspection import optimizers_in_pages, states_at_home
from lightning_ptm.sharded import load, to_file


class Sharing(ByHand):
    """A trunk in two optimizers of different classes, one of its blocks in a third, and a head in the last one alone."""

    clips: tuple[int, ...] = (0,)
    """Optimizers whose gradients are clipped."""
    forgets: tuple[int, ...] = (0, 2, 3)
    """Optimizers whose step has a backward pass of its own; the others use the gradients that exist already."""

    def configure_optimizers(self) -> Any:
        trunk = [*self.first.parameters(), *self.blocks.parameters()]
        return [
            optim.Adam(trunk, lr=1e-2, fused=True),
            optim.SGD(
                [
                    {"params": list(self.blocks.parameters()), "momentum": 0.9},
                    {"params": list(self.first.parameters()), "momentum": 0.5},
                ],
                lr=1e-1,
                fused=True,
            ),
            optim.AdamW(self.blocks[0].parameters(), lr=1e-3, fused=True),
            optim.AdamW(self.head.parameters(), lr=1e-2, fused=True),
        ]

    def training_step(self, batch: list[Tensor], index: int) -> None:
        for number, optimizer in enumerate(self.optimizers()):  # type: ignore[arg-type]
            if number in self.forgets:
                optimizer.zero_grad()
                self.manual_backward(self.loss(batch))
            if number in self.clips:
                self.clip_gradients(optimizer, 0.5, "norm")
            optimizer.step()


class Accumulating(Sharing):
    """Gradients of two passes before each step, clipped by value or by norm; one optimizer steps in every other batch."""

    def training_step(self, batch: list[Tensor], index: int) -> None:
        for number, optimizer in enumerate(self.optimizers()):  # type: ignore[arg-type]
            optimizer.zero_grad()
            for _ in range(2):
                self.manual_backward(self.loss(batch) / 2)
            self.clip_gradients(optimizer, 0.01, "value" if number else "norm")
            if number != 1 or index % 2:
                optimizer.step()


@pytest.mark.slow_unless(
    "ram-Sharing", "all_on_disk-Accumulating", "three_tiers-Accumulating", "lock_free_three_tiers-Sharing"
)
@pytest.mark.parametrize("build", [Sharing, Accumulating])
def test_they_train_as_with_a_plain_trainer(strategy_at: MakeStrategy, tier: str, build: type[Sharing]) -> None:
    if tier.startswith("lock_free"):
        pytest.skip("refused")
    judge(build, strategy_at(tier), max_epochs=2)


def went_on(folder: Path, first: Any, second: Any, precision: str = "32-true") -> Sharing:
    """Trained for an epoch, saved, and resumed for another by a run of its own, with all that its optimizers keep."""
    options: dict[str, Any] = {"enable_checkpointing": True, "default_root_dir": folder, "precision": precision}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.manual_seed(0)
        ran = trainer(first, **options)
        ran.fit(Sharing(), batches())
        path = Path(ran.checkpoint_callback.best_model_path)  # type: ignore[union-attr]
        if second is None and path.is_dir():
            to_file(path, folder / "whole.ckpt")
            path = folder / "whole.ckpt"
        module = Sharing()
        again = trainer(second, **options, max_epochs=2)
        again.fit(module, batches(), ckpt_path=path)
        path = Path(again.checkpoint_callback.best_model_path)  # type: ignore[union-attr]
        saved = load(path) if path.is_dir() else torch.load(path, weights_only=False)
    for state in saved["optimizer_states"]:
        for place, known in sorted(state["state"].items()):
            for name, value in sorted(known.items()):
                module.note((place, name))
                module.note(value)
    return module


@pytest.mark.diagonal
@pytest.mark.parametrize("kind", ["full", "sharded"])
@pytest.mark.parametrize("place", ["ram", "masters_on_disk", "three_tiers"])
def test_they_are_saved_and_go_on(strategy_at: MakeStrategy, tmp_path: Path, place: str, kind: str) -> None:
    def ours() -> Any:
        return strategy_at(place, checkpoints={"state_dict_type": kind})

    plain = went_on(tmp_path / "plain", None, None)
    assert {(0, "exp_avg"), (0, "momentum_buffer")} <= {note for note in plain.notes if isinstance(note, tuple)}
    assert_alike(went_on(tmp_path / "ours", ours(), ours()), plain)
    assert_alike(went_on(tmp_path / "to plain", ours(), None), plain)
    assert_alike(went_on(tmp_path / "from plain", None, ours()), plain)


@pytest.mark.parametrize("kind", ["full", "sharded"])
def test_masters_go_on_too(strategy_at: MakeStrategy, tmp_path: Path, kind: str) -> None:
    made = [strategy_at("masters_on_disk", checkpoints={"state_dict_type": kind}) for _ in range(2)]
    ours = went_on(tmp_path, *made, "bf16-mixed").state_dict()
    uninterrupted = run(Sharing, strategy_at("ram"), max_epochs=2, precision="bf16-mixed").state_dict()
    assert all(torch.equal(ours[name], value) for name, value in uninterrupted.items())


class Joining(Sharing):
    """In the second epoch a block that others have joins an optimizer that comes before theirs."""

    def configure_optimizers(self) -> Any:
        trunk = [*self.first.parameters(), *self.blocks.parameters()]
        return [
            optim.Adam(self.head.parameters(), lr=1e-2, fused=True),
            optim.Adam(trunk, lr=1e-2, fused=True),
            optim.NAdam(trunk, lr=3e-3),
            optim.AdamW(self.blocks[0].parameters(), lr=1e-3, fused=True),
        ]

    def training_step(self, batch: list[Tensor], index: int) -> None:
        super().training_step(batch, index)
        for optimizer in self.optimizers():  # type: ignore[union-attr]
            optimizer.zero_grad()

    def on_train_epoch_start(self) -> None:
        if self.current_epoch == 1:
            group = {"params": list(self.blocks[1].parameters()), "lr": 1e-3}
            self.optimizers()[0].add_param_group(group)  # type: ignore[index]


class Reloading(Sharing):
    """The first optimizer's states are read, halved and loaded after each batch; weights are edited by hand."""

    def on_train_batch_end(self, *_: Any) -> None:
        for optimizer in self.trainer.optimizers:
            for _, state in sorted(optimizer.state_dict()["state"].items()):
                for name in sorted(state):
                    self.note(state[name])
        first = self.trainer.optimizers[0]
        states = first.state_dict()
        for state in states["state"].values():
            state["exp_avg"] = state["exp_avg"] * 0.5
        first.load_state_dict(states)
        gathered = getattr(self.trainer.strategy, "gathered", None)
        with torch.no_grad(), nullcontext() if gathered is None else gathered(self):
            self.blocks[0].scale.mul_(1.01)


@pytest.mark.slow_unless(
    "masters_on_disk-Reloading", "lock_free-Joining", "tight-Joining", "tight_recomputed-Reloading"
)
@pytest.mark.parametrize("build", [Joining, Reloading])
def test_between_steps_their_states_are_each_ones_own(
    strategy_at: MakeStrategy, tier: str, build: type[Sharing]
) -> None:
    if tier.startswith("lock_free"):
        pytest.skip("refused")
    judge(build, strategy_at(tier), max_epochs=3)


def test_each_ones_states_are_counted(strategy_at: MakeStrategy) -> None:
    seen: list[Any] = []

    class Counted(Sharing):
        def on_train_batch_start(self, *_: Any) -> None:
            engine = self.trainer.strategy.engine  # type: ignore[attr-defined]
            seen.append((optimizers_in_pages(engine.blueprint), states_at_home(engine)))

    run(Counted, strategy_at("masters_on_disk"), precision="bf16-mixed")
    of_optimizers, at_home = seen[0]
    kept = {each.states: each.bytes for each in at_home}
    assert [each.optimizer.rpartition(".")[2] for each in of_optimizers] == ["Adam", "SGD", "AdamW", "AdamW"]
    assert sum(each.bytes for each in of_optimizers) == kept["optimizer states"]
    adam, sgd = of_optimizers[:2]
    assert adam.bytes == 2 * sgd.bytes and kept["master parameters"] == sgd.bytes + of_optimizers[3].bytes // 2


def test_lock_free_updates_have_one_optimizer_each(strategy_at: MakeStrategy) -> None:
    with pytest.raises(ConfigError, match=r"first.weight is in two optimizers, and with lock_free=True"):
        run(Sharing, strategy_at("lock_free"))
