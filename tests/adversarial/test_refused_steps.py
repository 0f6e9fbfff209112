"""A step that is refused, or that an optimizer breaks off, leaves weights: those of the last whole step where that can be."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from kit.judged import MakeStrategy
from kit.twins import Twin, quietly, trainer, vectors
from torch import Tensor

from lightning_ptm.errors import UsageError

BATCHES = 5
LAST = 3
"""The last whole step."""


class Plain(torch.optim.Optimizer):
    """SGD by hand, with what its group asks for; subclasses do something else when `flag` is set."""

    def __init__(self, parameters: Any, lr: float = 0.1, flag: Any = False) -> None:
        super().__init__(parameters, {"lr": lr, "flag": flag})

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
                    state["count"] = state.get("count", 0) + 1
                    self.update(parameter, state, group)
        return loss

    def update(self, parameter: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        parameter.sub_(parameter.grad, alpha=group["lr"])


class WantsState(Plain):
    def update(self, parameter: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        super().update(parameter, state, group)
        if group["flag"]:
            state.setdefault("mean", torch.zeros_like(parameter)).lerp_(parameter, 0.1)


class WantsStateAbove(Plain):
    def update(self, parameter: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        super().update(parameter, state, group)
        if group["flag"] > 0.5:
            state["mean"] = torch.zeros_like(parameter)


class DropsState(Plain):
    def update(self, parameter: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        super().update(parameter, state, group)
        if group["flag"]:
            state.pop("mean", None)
        else:
            state.setdefault("mean", torch.zeros_like(parameter)).lerp_(parameter.grad, 0.1)


class Refuses(Plain):
    def update(self, parameter: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        if group["flag"]:
            raise ValueError("the class's own")
        super().update(parameter, state, group)


class LacksKey(Plain):
    def update(self, parameter: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        parameter.sub_(parameter.grad, alpha=group["lr"] * {False: 1.0}[group["flag"]])


def flips(key: str, value: Any, group: int | None = None) -> Callable[[torch.optim.Optimizer], None]:
    def act(optimizer: torch.optim.Optimizer) -> None:
        for place, each in enumerate(optimizer.param_groups):
            if group is None or place == group:
                each[key] = value

    return act


def adam(**settings: Any) -> Callable[[Any], torch.optim.Optimizer]:
    return lambda parameters: torch.optim.Adam(parameters, **{"lr": 1e-2, "fused": True, **settings})


def sgd(**settings: Any) -> Callable[[Any], torch.optim.Optimizer]:
    return lambda parameters: torch.optim.SGD(parameters, lr=1e-2, **settings)


CASES: dict[str, tuple[Callable[[Any], torch.optim.Optimizer], Callable[[Any], None], str]] = {
    "momentum": (sgd(), flips("momentum", 0.9), "momentum_buffer"),
    "momentum of one group": (sgd(), flips("momentum", 0.9, 1), "momentum_buffer"),
    "momentum, fused": (sgd(fused=True), flips("momentum", 0.9), "momentum_buffer"),
    "amsgrad": (adam(), flips("amsgrad", True), "max_exp_avg_sq"),
    "amsgrad of one group": (adam(fused=False), flips("amsgrad", True, 0), "max_exp_avg_sq"),
    "centered": (
        lambda each: torch.optim.RMSprop(each, lr=1e-3),
        flips("centered", True),
        "grad_avg",
    ),
    "rmsprop's momentum": (lambda each: torch.optim.RMSprop(each, lr=1e-3), flips("momentum", 0.5), "momentum_buffer"),
    "another class's flag": (WantsState, flips("flag", True), "mean"),
    "another class's number": (lambda each: WantsStateAbove(each, flag=0.1), flips("flag", 0.9), "mean"),
    "a state is dropped": (DropsState, flips("flag", True), "mean"),
    "the class raises": (Refuses, flips("flag", True), "the class's own"),
    "a key is not known": (LacksKey, flips("flag", "x"), "x"),
    "a group goes": (sgd(), lambda optimizer: optimizer.param_groups.pop(), "parameter groups"),
    "capturable": (adam(fused=False), flips("capturable", True), "capturable"),
}


class Flips(Twin):
    def __init__(self, name: str) -> None:
        super().__init__()
        self.name = name

    def configure_optimizers(self) -> Any:
        mine = list(self.blocks.parameters())
        rest = [each for each in self.parameters() if not any(each is other for other in mine)]
        return CASES[self.name][0]([{"params": mine}, {"params": rest}])

    def on_before_zero_grad(self, optimizer: Any) -> None:
        if self.trainer.global_step == LAST:
            CASES[self.name][1](optimizer)


def numbers(module: Any) -> dict[str, Tensor]:
    return {name: value.detach().clone() for name, value in module.state_dict().items()}


def plainly(build: Callable[[], Any], steps: int, **options: Any) -> dict[str, Tensor]:
    with quietly():
        torch.manual_seed(0)
        module = build()
        trainer(None, max_steps=steps, **options).fit(module, vectors(count=BATCHES))
    return numbers(module)


def failed(build: Callable[[], Any], strategy: Any, error: Any, match: str, **options: Any) -> tuple[Any, L.Trainer]:
    with quietly():
        torch.manual_seed(0)
        module = build()
        chosen = trainer(strategy, **options)
        with pytest.raises(error, match=match):
            chosen.fit(module, vectors(count=BATCHES))
    return module, chosen


HOMES = ["ram", "masters_on_disk", "all_on_disk", "three_tiers"]


@pytest.mark.diagonal
@pytest.mark.parametrize("home", HOMES)
@pytest.mark.parametrize("name", CASES)
def test_the_weights_of_the_last_whole_step_come_back(strategy_at: MakeStrategy, name: str, home: str) -> None:
    module, _ = failed(lambda: Flips(name), strategy_at(home), Exception, CASES[name][2])
    for key, value in plainly(lambda: Flips(name), LAST).items():
        assert torch.equal(module.state_dict()[key], value), key


@pytest.mark.parametrize("name", ["momentum", "amsgrad", "the class raises"])
def test_states_come_back_with_them(strategy_at: MakeStrategy, name: str, tmp_path: Path) -> None:
    _, chosen = failed(lambda: Flips(name), strategy_at("ram"), Exception, CASES[name][2])
    chosen.save_checkpoint(tmp_path / "x.ckpt")
    state = torch.load(tmp_path / "x.ckpt", weights_only=False)["optimizer_states"][0]["state"]
    assert all(float(each.get("step", each.get("count", LAST))) == LAST for each in state.values())


@pytest.mark.parametrize("name", ["momentum", "amsgrad", "another class's flag"])
@pytest.mark.parametrize("clip", [None, 0.5])
def test_under_mixed_precision(strategy_at: MakeStrategy, name: str, clip: float | None) -> None:
    options = {"precision": "bf16-mixed", "gradient_clip_val": clip}

    class Stops(Flips):
        def on_before_zero_grad(self, optimizer: Any) -> None:
            pass

    module, _ = failed(lambda: Flips(name), strategy_at("all_on_disk"), Exception, CASES[name][2], **options)
    with quietly():
        torch.manual_seed(0)
        stopped = Stops(name)
        trainer(strategy_at("all_on_disk"), max_steps=LAST, **options).fit(stopped, vectors(count=BATCHES))
    for key, value in numbers(stopped).items():
        assert torch.equal(module.state_dict()[key], value), key


def test_with_gradients_that_lack(strategy_at: MakeStrategy) -> None:
    """An optimizer that needs all gradients, and a parameter of a flat of several has none in one step."""

    class NeedsAll(Plain):
        @torch.no_grad()
        def step(self, closure: Any = None) -> Any:
            loss = super().step(closure)
            for group in self.param_groups:
                if any(each.grad is None for each in group["params"]):
                    for each in group["params"]:
                        each.mul_(2.0)
            return loss

    class Lacks(Twin):
        def configure_optimizers(self) -> Any:
            return NeedsAll(self.parameters())

        def on_before_optimizer_step(self, optimizer: Any) -> None:
            if self.trainer.global_step == LAST:
                self.blocks[1].bias.grad = None

    strategy = strategy_at("masters_on_disk")
    module, _ = failed(Lacks, strategy, UsageError, r"blocks.1.bias has no gradient in this step")
    for key, value in plainly(Lacks, LAST).items():
        assert torch.equal(module.state_dict()[key], value), key


class Meets(Plain):
    """Raises because of the numbers that it meets, which nobody can know before."""

    def update(self, parameter: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        if not torch.isfinite(parameter.grad).all():
            raise ArithmeticError("inf or NaN in a gradient")
        super().update(parameter, state, group)


class MeetsNaN(Twin):
    def configure_optimizers(self) -> Any:
        return Meets(self.parameters(), lr=1e-2)

    def on_after_backward(self) -> None:
        if self.trainer.global_step == LAST:
            self.blocks[1].weight.grad[3] = float("nan")


@pytest.mark.parametrize("home", [*HOMES, "lock_free"])
def test_what_an_optimizer_breaks_off_leaves_each_weight_before_or_behind_its_update(
    strategy_at: MakeStrategy, home: str, tmp_path: Path
) -> None:
    module, chosen = failed(MeetsNaN, strategy_at(home), ArithmeticError, "inf or NaN in a gradient")

    class Meant(MeetsNaN):
        def configure_optimizers(self) -> Any:
            return Plain(self.parameters(), lr=1e-2)

    before, behind = plainly(Meant, LAST), plainly(Meant, LAST + 1)
    for key, value in module.state_dict().items():
        either = (value == before[key]) | (value == behind[key])
        assert either.all(), key
        assert key != "blocks.1.weight" or torch.equal(value[3], before[key][3])
    with pytest.warns(UserWarning, match="mix two optimizer steps"):
        chosen.save_checkpoint(tmp_path / "x.ckpt", weights_only=True)
    with pytest.raises(UsageError, match="ended with their run"):
        chosen.save_checkpoint(tmp_path / "y.ckpt")


def test_a_module_trains_on_behind_a_refused_step(strategy_at: MakeStrategy) -> None:
    module, _ = failed(lambda: Flips("momentum"), strategy_at("all_on_disk"), UsageError, "momentum_buffer")
    module.name = "another class's number"
    with quietly():
        trainer(strategy_at("ram"), max_steps=2).fit(module, vectors(count=BATCHES))
    assert all(torch.isfinite(value).all() for value in module.state_dict().values())


@pytest.mark.parametrize("schedule", ["constant", "cosine"])
def test_a_step_is_tried_where_something_but_the_learning_rate_has_changed(
    strategy_at: MakeStrategy, monkeypatch: pytest.MonkeyPatch, schedule: str
) -> None:
    from lightning_ptm.update.shadow import ShadowOptimizer

    tried: list[int] = []
    own = ShadowOptimizer.check
    monkeypatch.setattr(ShadowOptimizer, "check", lambda self, *args: (tried.append(1), own(self, *args))[1])

    class Scheduled(Twin):
        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)
            if schedule == "constant":
                return optimizer
            return {
                "optimizer": optimizer,
                "lr_scheduler": {
                    "scheduler": torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 10),
                    "interval": "step",
                },
            }

    with quietly():
        trainer(strategy_at("ram")).fit(Scheduled(), vectors(count=BATCHES))
    assert len(tried) == 1
