"""Optimizers whose states come late, go, or differ from group to group: bit for bit as with a plain Trainer, or refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from kit.judged import Judged, MakeStrategy, assert_alike, judge, run
from kit.optimizers import ByParameter
from torch import Tensor, nn, optim

from lightning_ptm.errors import UsageError
from lightning_ptm.trainer.matmul_precision import wide_matmuls
from lightning_ptm.update.shadow import RunViews, ShadowOptimizer, snapshot
from lightning_ptm.update.trial.probe import probe

HOMES = ["ram", "masters_on_disk", "three_tiers"]


def by_norm(p: Tensor, move: Tensor, lr: float) -> None:
    """Moves a parameter as LAMB does."""
    p.sub_(move * p.norm() / move.norm().clamp(min=1e-6), alpha=lr)


class OfGroups(ByParameter):
    """A text of a group, or a number of it, says how its parameters move, and what is kept of them."""

    def one(self, p: Tensor, g: Tensor, group: dict[str, Any]) -> None:
        state = self.state[p]
        moment = state.setdefault("moment", torch.zeros_like(p)).lerp_(g, 0.1)
        if group["algorithm"] == "norm":
            by_norm(p, moment, group["lr"])
            return
        if group["algorithm"] == "adaptive":
            moment = moment / (state.setdefault("square", torch.zeros_like(p)).lerp_(g * g, 0.1).sqrt() + 1e-6)
        p.sub_(moment, alpha=group["lr"])


def groups_of(module: nn.Module, algorithms: list[str]) -> list[dict[str, Any]]:
    """Parameters in turn."""
    several = list(module.parameters())
    return [{"params": several[at :: len(algorithms)], "algorithm": each} for at, each in enumerate(algorithms)]


class ThirdGroupByNorm(Judged):
    """Optimizer whose third group has parameters with the shapes of the first group's."""

    def configure_optimizers(self) -> Any:
        groups = [groups_of(each, ["plain"])[0] for each in (self.blocks[0], self.first, self.blocks[1])]
        return OfGroups([*groups[:2], {**groups[2], "algorithm": "norm"}])


class EachGroupKeepsItsOwn(Judged):
    def configure_optimizers(self) -> Any:
        return OfGroups(groups_of(self, ["norm", "adaptive"]))


class LastOfManyByNorm(Judged):
    """More groups of different settings than are tried with all their shapes."""

    def configure_optimizers(self) -> Any:
        groups = groups_of(self.blocks[0], ["plain"] * 5) + groups_of(self.first, ["plain"] * 2)
        groups += groups_of(self.blocks[1], ["norm"])
        return OfGroups([{**group, "decay": 0.1 * at, "name": f"group {at}"} for at, group in enumerate(groups)])


@pytest.mark.parametrize("build", [ThirdGroupByNorm, EachGroupKeepsItsOwn, LastOfManyByNorm])
def test_each_kind_of_group_is_tried(strategy_at: MakeStrategy, build: type[Judged]) -> None:
    judge(build, strategy_at("masters_on_disk"))


class SkipsZeros(ByParameter):
    """Leaves a parameter alone whose gradient is all zeros: its states come with the first one that is not."""

    def one(self, p: Tensor, g: Tensor, group: dict[str, Any]) -> None:
        if bool(g.any()):
            state = self.state[p]
            state["step"] = state.get("step", 0) + 1
            by_norm(p, state.setdefault("moment", torch.zeros_like(p)).lerp_(g, 0.1), group["lr"] / state["step"])


class UsedFromTheThirdStep(Judged):
    def loss(self, batch: list[Tensor]) -> Tensor:
        x = self.blocks[0](self.first(batch[0]))
        weight = 0.0 if len(self.notes) < 2 else 1.0
        loss = self.head(x + weight * self.blocks[1](x)).square().mean()
        self.note(loss)
        return loss

    def configure_optimizers(self) -> Any:
        return SkipsZeros(self.parameters())


class MomentumFromTheThirdStep(Judged):
    def configure_optimizers(self) -> Any:
        return optim.SGD(self.parameters(), lr=0.1, momentum=0.9, fused=True)

    def on_train_batch_start(self, *_: Any) -> None:
        self.trainer.optimizers[0].param_groups[0]["momentum"] = 0.0 if self.trainer.global_step < 2 else 0.9


@pytest.mark.diagonal
@pytest.mark.parametrize("home", HOMES)
@pytest.mark.parametrize("build", [UsedFromTheThirdStep, MomentumFromTheThirdStep])
def test_states_may_come_in_a_later_step_than_the_first(
    strategy_at: MakeStrategy, home: str, build: type[Judged]
) -> None:
    judge(build, strategy_at(home), limit_train_batches=5)


class Restarts(ByParameter):
    """Lets its momentum go after many steps, in one of two ways."""

    def one(self, p: Tensor, g: Tensor, group: dict[str, Any]) -> None:
        state = self.state[p]
        state["step"] = state.get("step", 0) + 1
        moment = state.get("moment")
        state["moment"] = moment = torch.zeros_like(p) if moment is None else moment
        (by_norm if group["by_norm"] else _by_value)(p, moment.lerp_(g, 0.1), group["lr"])
        if state["step"] == 26:
            state["moment"] = None
        if state["step"] == 27:
            del state["moment"]


def _by_value(p: Tensor, move: Tensor, lr: float) -> None:
    p.sub_(move, alpha=lr)


@pytest.mark.parametrize("whole", [False, True])
def test_a_state_that_goes_is_refused_when_it_goes(strategy_at: MakeStrategy, whole: bool) -> None:
    class Restarting(Judged):
        def configure_optimizers(self) -> Any:
            return Restarts(self.parameters(), by_norm=whole)

    with pytest.raises(UsageError, match=r"Restarts has no 'moment' after a step .* in some steps only"):
        run(Restarting, strategy_at("masters_on_disk"), max_epochs=9)


class WithMuonAlone(Judged):
    def configure_optimizers(self) -> Any:
        return optim.Muon([p for p in self.parameters() if p.dim() == 2], lr=1e-2)


@pytest.mark.skipif(not hasattr(optim, "Muon"), reason="this torch has no Muon, whose products are of bfloat16")
@pytest.mark.parametrize("home", ["all_on_disk", "three_tiers"])
def test_products_of_updates_are_the_same_in_whichever_thread_they_run(strategy_at: MakeStrategy, home: str) -> None:
    def trained(build: Callable[[], Judged], at: str) -> Judged:
        return run(build, strategy_at(at, tuning={"matmul_precision": "fp32"}), precision="bf16-true")

    assert_alike(trained(WithMuonAlone, home), trained(WithMuonAlone, "ram"))


class ByProducts(ByParameter):
    """Moves matrices by products of their gradients."""

    def one(self, p: Tensor, g: Tensor, group: dict[str, Any]) -> None:
        p.sub_(g @ g.t() @ g, alpha=group["lr"])


def test_an_update_that_a_forward_has_waited_for_knows_nothing_of_its_autocast() -> None:
    value = torch.linspace(-1, 1, 64).reshape(8, 8)
    user = ByProducts([nn.Parameter(value.clone())])
    traits = probe(user)

    def updated() -> Tensor:
        run = RunViews(0, value.clone(), value.T * 0.37, {}, None)
        with torch.no_grad():
            ShadowOptimizer(user, traits).step_whole(snapshot(user, traits), run)
        return run.parameter

    with torch.autocast("cpu", torch.bfloat16), wide_matmuls():
        inside = updated()
    assert torch.equal(inside, updated())
