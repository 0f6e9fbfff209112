"""Optimizers that update each parameter as a whole (Muon, Adafactor, LAMB...) train bit for bit as without the strategy,
wherever their states are; these are saved, and either side goes on from what the other has saved."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from kit.hybrid_optimizer import Hybrid
from kit.judged import ByHand, Judged, MakeStrategy, assert_alike, batches, judge, run, trainer
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from torch import Tensor, nn, optim

from lightning_ptm.errors import ConfigError
from lightning_ptm.memory.paged_tensor import PagedTensor

ONE_RANK = ["ram", "masters_on_disk", "all_on_disk", "three_tiers", "lock_free"]


class Wide(Judged):
    """One matrix is longer than what updates move at once elsewhere."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks[1].inner = nn.Sequential(nn.Linear(64, 301), nn.Tanh(), nn.Linear(301, 64))

    def on_train_batch_end(self, *_: Any) -> None:
        for group in self.trainer.optimizers[0].param_groups:
            self.note(group["lr"])


class WithAdafactor(Wide):
    def configure_optimizers(self) -> Any:
        made = optim.Adafactor(self.parameters(), lr=1e-2)
        return {"optimizer": made, "lr_scheduler": optim.lr_scheduler.StepLR(made, 1)}


class WithHybrid(Wide):
    def configure_optimizers(self) -> Any:
        several = [[p for p in self.parameters() if (p.dim() == 2) == matrices] for matrices in (True, False)]
        return Hybrid([{"params": several[0]}, {"params": several[1], "lr": 3e-3}])


class WithMuon(ByHand):
    """Muon of the matrices, AdamW of the rest."""

    def configure_optimizers(self) -> Any:
        matrices = [p for p in self.parameters() if p.dim() == 2]
        others = [p for p in self.parameters() if p.dim() != 2]
        return [optim.Muon(matrices, lr=1e-2), optim.AdamW(others, lr=1e-2, fused=True)]

    def training_step(self, batch: list[Tensor], index: int) -> None:
        optimizers: Any = self.optimizers()
        for optimizer in optimizers:
            optimizer.zero_grad()
        self.manual_backward(self.loss(batch))
        for optimizer in optimizers:
            optimizer.step()


class RowsAndColumns(optim.Optimizer):
    """Scales by the mean squares of rows and of columns. A vector is one column, whose mean square is one element."""

    def __init__(self, params: Any, lr: float = 1e-3) -> None:
        super().__init__(params, {"lr": lr, "step": 0})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            group["step"] += 1  # a hyper-parameter that changes, so that each step is tried before it is taken
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state, squares = self.state[parameter], parameter.grad.reshape(len(parameter), -1).square()
                if not state:
                    state["rows"], state["columns"] = (
                        squares.new_zeros(len(squares)),
                        squares.new_zeros(squares.shape[1]),
                    )
                state["rows"].lerp_(squares.mean(1), 0.1)
                state["columns"].lerp_(squares.mean(0), 0.1)
                scale = (state["rows"].unsqueeze(1) * state["columns"]).add_(1e-8).pow_(0.25)
                parameter.sub_(parameter.grad / scale.view_as(parameter), alpha=group["lr"])
        return loss


class WithRowsAndColumns(Wide):
    def configure_optimizers(self) -> Any:
        return RowsAndColumns(self.parameters())


KINDS: list[type[Judged]] = [WithAdafactor, WithHybrid, WithRowsAndColumns]
if hasattr(optim, "Muon"):
    KINDS.append(WithMuon)


@pytest.mark.diagonal
@pytest.mark.parametrize("tier", ONE_RANK)
@pytest.mark.parametrize("build", KINDS)
def test_they_train_as_with_one_device(strategy_at: MakeStrategy, tier: str, build: type[Judged]) -> None:
    settings = {"lock_free": {"max_staleness": 0}} if tier == "lock_free" else {}
    judge(build, strategy_at(tier, **settings))


@pytest.mark.parametrize("tier", ["ram", "masters_on_disk"])
def test_clipping_and_accumulation(strategy_at: MakeStrategy, tier: str) -> None:
    options = {"gradient_clip_val": 0.1, "accumulate_grad_batches": 2, "limit_train_batches": 4}
    judge(WithHybrid, strategy_at(tier), **options)


@pytest.mark.parametrize("build", [WithAdafactor, WithHybrid])
def test_a_mixed_precision_has_the_same_numbers_wherever_states_are(
    strategy_at: MakeStrategy, build: type[Judged]
) -> None:
    in_ram = run(build, strategy_at("ram"), precision="bf16-mixed")
    assert_alike(run(build, strategy_at("all_on_disk"), precision="bf16-mixed"), in_ram)


@pytest.mark.parametrize("build", [WithAdafactor, WithHybrid])
def test_either_side_goes_on_from_what_the_other_has_saved(
    strategy_at: MakeStrategy, build: type[Judged], tmp_path: Path
) -> None:
    def resumed(folder: Path, first: Any, second: Any) -> Judged:
        options: dict[str, Any] = {"enable_checkpointing": True, "default_root_dir": folder}
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            torch.manual_seed(0)
            ran = trainer(first, **options)
            ran.fit(build(), batches())
            after = build()
            again = trainer(second, **options, max_epochs=2)
            again.fit(after, batches(), ckpt_path=ran.checkpoint_callback.best_model_path)  # type: ignore[union-attr]
        return after

    def ours(**settings: Any) -> Any:
        return strategy_at("masters_on_disk", **settings)

    plain = resumed(tmp_path / "plain", None, None)
    assert_alike(resumed(tmp_path / "ours", ours(), ours()), plain)
    assert_alike(resumed(tmp_path / "to plain", ours(), None), plain)
    assert_alike(resumed(tmp_path / "from plain", None, ours()), plain)


@pytest.mark.parametrize("build", [WithAdafactor, WithHybrid])
def test_sharded_checkpoints_hold_states_of_their_own_shapes(
    strategy_at: MakeStrategy, build: type[Judged], tmp_path: Path
) -> None:
    def resumed(folder: Path, make: Callable[[str], Any]) -> Judged:
        each = {"enable_checkpointing": True, "default_root_dir": folder, "limit_train_batches": 4}
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            torch.manual_seed(0)
            ran = trainer(make("masters_on_disk"), **each, callbacks=[ModelCheckpoint(every_n_train_steps=3)])
            ran.fit(build(), batches())
            after = build()
            trainer(make("ram"), **each, max_epochs=2).fit(
                after,
                batches(),
                ckpt_path=ran.checkpoint_callback.best_model_path,  # type: ignore[union-attr]
            )
        return after

    plain = resumed(tmp_path / "plain", lambda home: None)
    assert_alike(
        resumed(tmp_path / "ours", lambda home: strategy_at(home, checkpoints={"state_dict_type": "sharded"})), plain
    )


@pytest.mark.parametrize(
    "tier",
    [tier if tier in ("all_on_disk", "lock_free") else pytest.param(tier, marks=pytest.mark.slow) for tier in ONE_RANK],
)
def test_saves_behind_training_are_of_one_moment(strategy_at: MakeStrategy, tier: str, tmp_path: Path) -> None:
    settings = {"lock_free": {"max_staleness": 0}} if tier == "lock_free" else {}
    found = []
    for behind in (False, True):
        keep = ModelCheckpoint(tmp_path / str(behind), filename="{step}", every_n_train_steps=2, save_top_k=-1)
        strategy = strategy_at(tier, checkpoints={"state_dict_type": "sharded", "async_save": behind}, **settings)
        options: dict[str, Any] = {"enable_checkpointing": True, "callbacks": [keep], "limit_train_batches": 6}
        run(WithHybrid, strategy, precision="bf16-mixed", **options)
        paths = sorted((tmp_path / str(behind)).glob("*.ckpt"))
        found.append([{file.name: file.read_bytes() for file in path.glob("*.safetensors")} for path in paths])
    assert len(found[0]) == len(found[1]) == 3
    for at_once, later in zip(*found, strict=True):
        assert at_once.keys() == later.keys()
        assert not [name for name, content in at_once.items() if later[name] != content]


class Pair(nn.Module):
    """Two matrices in one unit, each longer than what updates move at once elsewhere."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(64, 301), nn.Linear(301, 64)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(torch.tanh(self.up(x)))


class WithPair(WithHybrid):
    def __init__(self) -> None:
        super().__init__()
        self.blocks[1].inner = Pair()


class Places(Callback):
    """Records what updates report that they are about to change: states with a wrong place, and all."""

    def __init__(self) -> None:
        self.wrong: set[str] = set()
        self.told: set[str] = set()

    def on_train_start(self, trainer: Any, module: Any) -> None:
        trainer.strategy.engine.updater.watch(self._look)

    def _look(self, paged: PagedTensor, start: int, values: Tensor) -> None:
        name = paged.name.rsplit("/", 1)[-1]
        self.told.add(name)
        # In RAM they are views of where they lie.
        if paged.tensor()[start:].data_ptr() != values.data_ptr():
            self.wrong.add(name)


def test_updates_tell_a_save_behind_training_which_states_are_about_to_change(strategy_at: MakeStrategy) -> None:
    places = Places()
    run(WithPair, strategy_at("ram"), precision="bf16-mixed", callbacks=[places])
    assert {"master", "mean", "square"} <= places.told
    assert not places.wrong


class AcrossStrides(WithAdafactor):
    def configure_model(self) -> None:
        self.head = nn.Linear(8, 8)
        self.head.weight.data = self.head.weight.data.t()


def test_a_parameter_that_lies_otherwise_than_its_shape_is_refused(strategy_at: MakeStrategy) -> None:
    with pytest.raises(ConfigError, match=r"of shape \(8, 8\) has strides \(1, 8\)"):
        run(AcrossStrides, strategy_at("masters_on_disk"))
