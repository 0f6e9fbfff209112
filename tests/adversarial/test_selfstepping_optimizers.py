"""Optimizers whose update pages cannot have train as with a plain Trainer where everything is in RAM; elsewhere a refusal."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from kit.judged import ByHand, Judged, MakeStrategy, assert_alike, batches, judge, run, trainer
from torch import Tensor, optim

from lightning_ptm.errors import ConfigError


class Lookahead(optim.SGD):
    """Moves parameters outside of its update, by state of its own shape."""

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        result = super().step(closure)
        for group in self.param_groups:
            for parameter in group["params"]:
                slow = self.state[parameter].setdefault("slow", [parameter.clone()])
                slow[0].lerp_(parameter, 0.5)
                parameter.copy_(slow[0])
        return result


MAKERS: dict[str, Callable[[Any], optim.Optimizer]] = {
    "LBFGS": lambda p: optim.LBFGS(p, lr=0.1, max_iter=4, line_search_fn="strong_wolfe"),
    "Lookahead": lambda p: Lookahead(p, lr=0.1, momentum=0.9),
}


def built(name: str, base: type[Judged] = Judged) -> Callable[[], Judged]:
    class Built(base):  # type: ignore[valid-type, misc]
        def configure_optimizers(self) -> Any:
            made = MAKERS[name](self.parameters())
            return {"optimizer": made, "lr_scheduler": optim.lr_scheduler.StepLR(made, 1)}

        def on_train_batch_end(self, *_: Any) -> None:
            for parameter in self.parameters():
                self.note(parameter)
                self.note(parameter.grad)

    return Built


@pytest.mark.diagonal
@pytest.mark.parametrize("name", MAKERS)
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"gradient_clip_val": 0.1, "accumulate_grad_batches": 2},
        {"precision": "bf16-true"},
        {"precision": "64-true"},
    ],
)
def test_they_train_as_with_one_device(strategy_at: MakeStrategy, name: str, options: dict[str, Any]) -> None:
    if name == "LBFGS" and options.get("precision") == "bf16-true":
        pytest.skip("no line search in 16 bits")
    judge(built(name), strategy_at("ram"), **options)


class Adversaries(ByHand):
    """Two optimizers of the same parameters, of which one steps itself, one of a part of them, and one that pages can
    have."""

    def configure_optimizers(self) -> Any:
        body = [*self.first.parameters(), *self.blocks.parameters()]
        return [
            optim.Adam(body, lr=1e-2),
            Lookahead(body, lr=1e-1, momentum=0.9),
            optim.AdamW(self.blocks[0].parameters(), lr=1e-3),
            optim.AdamW(self.head.parameters(), lr=1e-2, fused=True),
        ]

    def training_step(self, batch: list[Tensor], index: int) -> None:
        for number, optimizer in enumerate(self.optimizers()):  # type: ignore[arg-type]
            if number != 1:
                optimizer.zero_grad()
                self.manual_backward(self.loss(batch))
            if number == 0:
                self.clip_gradients(optimizer, 0.5, "norm")
            optimizer.step()
        self.note(self.head.weight.grad)
        self.note(self.first.weight.grad)


def test_parameters_in_several_optimizers(strategy_at: MakeStrategy) -> None:
    judge(Adversaries, strategy_at("ram"), max_epochs=2)


@pytest.mark.parametrize("build", [built("LBFGS"), built("Lookahead"), Adversaries])
def test_they_are_saved_and_go_on(strategy_at: MakeStrategy, build: Callable[[], Judged], tmp_path: Path) -> None:
    def resumed(folder: Path, first: Any, second: Any) -> Judged:
        options: dict[str, Any] = {"enable_checkpointing": True, "default_root_dir": folder}
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            torch.manual_seed(0)
            before = build()
            ran = trainer(first, **options)
            ran.fit(before, batches())
            after = build()
            path = ran.checkpoint_callback.best_model_path  # type: ignore[union-attr]
            again = trainer(second, **options, max_epochs=2)
            again.fit(after, batches(), ckpt_path=path)
            for optimizer in again.optimizers:
                states = copy.deepcopy(optimizer.state_dict())["state"]
                after.notes.append(sorted((place, sorted(state)) for place, state in states.items()))
        return after

    plain = resumed(tmp_path / "plain", None, None)
    assert_alike(resumed(tmp_path / "ours", strategy_at("ram"), strategy_at("ram")), plain)
    assert_alike(resumed(tmp_path / "to plain", strategy_at("ram"), None), plain)
    assert_alike(resumed(tmp_path / "from plain", None, strategy_at("ram")), plain)


def test_the_norm_of_their_gradients(strategy_at: MakeStrategy) -> None:
    class Normed(built("Lookahead")):  # type: ignore[misc]
        def on_before_optimizer_step(self, optimizer: Any) -> None:
            strategy = self.trainer.strategy
            norm = getattr(strategy, "gradient_norm", None)
            gradients = [p.grad for p in self.parameters()]
            self.note(norm(optimizer) if norm is not None else torch.nn.utils.get_total_norm(gradients))

    judge(Normed, strategy_at("ram"))


def test_the_same_optimizer_in_a_second_fit(strategy_at: MakeStrategy) -> None:
    def twice(strategy: Callable[[], Any]) -> Judged:
        torch.manual_seed(0)
        module = Judged()
        made = MAKERS["LBFGS"](module.parameters())
        module.configure_optimizers = lambda: made  # type: ignore[method-assign]
        for _ in range(2):
            trainer(strategy()).fit(module, batches())
        return module

    assert_alike(twice(lambda: strategy_at("ram")), twice(lambda: None))


@pytest.mark.parametrize("build", [built("LBFGS"), built("Lookahead"), Adversaries])
@pytest.mark.parametrize("tier", ["masters_on_disk", "all_on_disk", "three_tiers", "lock_free"])
def test_elsewhere_they_are_refused(strategy_at: MakeStrategy, tier: str, build: Callable[[], Judged]) -> None:
    with pytest.raises(
        ConfigError,
        match=r"LBFGS.*closure|Lookahead is refused|is in two optimizers, and with lock_free",
    ):
        run(build, strategy_at(tier))


@pytest.mark.parametrize(
    ("settings", "options"), [({}, {"precision": "bf16-mixed"}), ({"checkpoints": {"state_dict_type": "sharded"}}, {})]
)
def test_masters_and_sharded_checkpoints_need_pages(
    strategy_at: MakeStrategy, settings: dict[str, Any], options: dict[str, Any]
) -> None:
    with pytest.raises(ConfigError, match=r"everything in RAM, on one rank and in a true precision"):
        run(built("LBFGS"), strategy_at("ram", **settings), **options)
