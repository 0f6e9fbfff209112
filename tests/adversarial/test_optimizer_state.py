"""`state` of an optimizer, and gradients that its class writes to: as with a plain Trainer, or an error with the remedy."""

from __future__ import annotations

import copy
import pickle
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import pytest
import torch
from kit.judged import ByHand, Judged, MakeStrategy, judge, run
from torch import Tensor
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict

from lightning_ptm.checkpoints.optimizer_states import PagedStates
from lightning_ptm.errors import UsageError

Deed = Callable[["Momentum", torch.optim.Optimizer], Any]


class Momentum(ByHand):
    """Does something to its optimizer behind every step."""

    deed: Deed = staticmethod(lambda module, optimizer: None)

    def training_step(self, batch: list[Tensor], index: int) -> None:
        optimizer: Any = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(self.loss(batch))
        optimizer.step()
        self.deed(self, self.trainer.optimizers[0])

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9, fused=True)


def doing(what: Deed) -> type[Momentum]:
    class Doing(Momentum):
        deed = staticmethod(what)

    return Doing


def replace(module: Momentum, optimizer: torch.optim.Optimizer) -> None:
    optimizer.state = defaultdict(dict)


def assign(module: Momentum, optimizer: torch.optim.Optimizer) -> None:
    optimizer.state[module.head.weight] = {"momentum_buffer": torch.zeros_like(module.head.weight)}


def in_place_or(module: Momentum, optimizer: torch.optim.Optimizer) -> None:
    optimizer.state |= {module.head.weight: {}}


WRITES: dict[str, Deed] = {
    "assign": assign,
    "popitem": lambda module, optimizer: optimizer.state.popitem(),
    "setdefault": lambda module, optimizer: optimizer.state.setdefault(module.head.weight, {}),
    "update": lambda module, optimizer: optimizer.state.update({module.head.weight: {}}),
    "replace": replace,
    "or": in_place_or,
}
READS: dict[str, Deed] = {
    "item": lambda module, optimizer: optimizer.state[module.head.weight]["momentum_buffer"],
    "wrapper": lambda module, optimizer: module.optimizers().state[module.head.weight],  # type: ignore[union-attr]
    "get": lambda module, optimizer: optimizer.state.get(module.head.weight),
    "items": lambda module, optimizer: list(optimizer.state.items()),
    "values": lambda module, optimizer: list(optimizer.state.values()),
    "keys": lambda module, optimizer: list(optimizer.state),
    "in": lambda module, optimizer: module.head.weight in optimizer.state,
    "len": lambda module, optimizer: len(optimizer.state),
    "bool": lambda module, optimizer: bool(optimizer.state),
    "equal": lambda module, optimizer: optimizer.state == {},
    "or": lambda module, optimizer: optimizer.state | {},
    "copy": lambda module, optimizer: optimizer.state.copy(),
    "copy.copy": lambda module, optimizer: copy.copy(optimizer.state),
    "deepcopy": lambda module, optimizer: copy.deepcopy(optimizer).state_dict(),
    "pickle": lambda module, optimizer: pickle.loads(pickle.dumps(optimizer)).state_dict(),
    "deepcopy of it": lambda module, optimizer: len(copy.deepcopy(optimizer.state)),
    "torch's own": lambda module, optimizer: get_optimizer_state_dict(module, optimizer),
}


@pytest.mark.slow_unless(
    "all_on_disk-update",
    "all_on_disk-replace",
    "lock_free_three_tiers-assign",
    "lock_free_three_tiers-popitem",
    "lock_free_three_tiers-setdefault",
    "lock_free_three_tiers-or",
)
@pytest.mark.parametrize("name", WRITES)
def test_state_is_not_written_to_in_vain(name: str, tier: str, strategy_at: MakeStrategy) -> None:
    with pytest.raises(UsageError, match=r"state of SGD was (written to|replaced) during a run, .*load_state_dict"):
        run(doing(WRITES[name]), strategy_at(tier))


@pytest.mark.parametrize("name", READS)
def test_state_is_not_missing_in_silence(name: str, strategy_at: MakeStrategy) -> None:
    with pytest.raises(
        UsageError, match=r"optimizer.state of SGD was read during a run, .* call optimizer\.state_dict\(\)"
    ):
        run(doing(READS[name]), strategy_at("ram"))


class ResetWhenRearranged(Judged):
    """A recipe for unfreezing: the optimizer begins afresh."""

    def on_train_batch_start(self, batch: Any, index: int) -> None:
        if index == 2:
            self.trainer.optimizers[0].state = defaultdict(dict)
            self.head.weight.data = self.head.weight.data.clone()


class ResetAtTheEnd(Judged):
    def on_train_end(self) -> None:
        self.optimizer = self.trainer.optimizers[0]
        self.optimizer.state = defaultdict(dict)

    def teardown(self, stage: str) -> None:
        self.note(len(self.optimizer.state))


def test_a_reset_counts_when_pages_end(strategy_at: MakeStrategy) -> None:
    judge(ResetWhenRearranged, strategy_at("ram"), limit_train_batches=5)
    for where in ("ram", "three_tiers", "lock_free"):
        judge(ResetAtTheEnd, strategy_at(where))


def test_states_are_in_the_order_of_parameters_behind_a_run(strategy_at: MakeStrategy) -> None:
    kept: list[torch.optim.Optimizer] = []
    module = run(doing(lambda module, optimizer: kept.append(optimizer)), strategy_at("ram"))
    assert all(ours is theirs for ours, theirs in zip(kept[0].state, module.parameters(), strict=True))


def reset(module: Momentum, optimizer: torch.optim.Optimizer) -> None:
    whole = optimizer.state_dict()
    for state in whole["state"].values():
        state["momentum_buffer"] = state["momentum_buffer"] * 0.5
    optimizer.load_state_dict(whole)


def note(module: Momentum, optimizer: torch.optim.Optimizer) -> None:
    for handle in (optimizer, module.optimizers()):
        for state in handle.state_dict()["state"].values():  # type: ignore[union-attr]
            module.note(state["momentum_buffer"])


@pytest.mark.slow_unless("masters_on_disk", "lock_free", "tight_recomputed")
@pytest.mark.parametrize("what", [reset, note])
def test_state_dicts_are_whole_and_loaded_in_mid_run(what: Deed, tier: str, strategy_at: MakeStrategy) -> None:
    judge(doing(what), strategy_at(tier))


def test_state_is_plain_again_behind_a_run(strategy_at: MakeStrategy) -> None:
    kept: list[torch.optim.Optimizer] = []
    module = run(doing(lambda module, optimizer: kept.append(optimizer)), strategy_at("ram"))
    state = kept[0].state
    assert type(state) is defaultdict and not isinstance(state, PagedStates)
    assert set(state) == set(module.parameters())
    assert "state_dict" not in vars(kept[0])


class Halves(torch.optim.SGD):
    """Uses gradients as scratch."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.grad.mul_(0.5)
        super().step()
        return loss


class Halving(Momentum):
    def configure_optimizers(self) -> Any:
        return Halves(self.parameters(), lr=0.1)


class HalvingByItself(Judged):
    def configure_optimizers(self) -> Any:
        return Halves(self.parameters(), lr=0.1)


class StepsAgain(Halving):
    deed = staticmethod(lambda module, optimizer: optimizer.step())


class Reads(Halving):
    deed = staticmethod(lambda module, optimizer: module.note(module.head.weight.grad))


class Adds(Halving):
    deed = staticmethod(lambda module, optimizer: module.manual_backward(module.head.weight.sum()))


@pytest.mark.slow_unless("masters_on_disk", "lock_free", "tight_recomputed")
@pytest.mark.parametrize("build", [Halving, HalvingByItself])
def test_a_class_that_writes_to_gradients_trains_as_ever(
    build: type[Judged], tier: str, strategy_at: MakeStrategy
) -> None:
    judge(build, strategy_at(tier))


@pytest.mark.slow_unless(
    "ram-StepsAgain",
    "all_on_disk-StepsAgain",
    "three_tiers-Reads",
    "lock_free_three_tiers-Reads",
    "lock_free_three_tiers-Adds",
    "tight-Adds",
)
@pytest.mark.parametrize("build", [StepsAgain, Reads, Adds])
def test_what_a_class_has_written_to_gradients_is_not_left_out_in_silence(
    build: type[Judged], tier: str, strategy_at: MakeStrategy
) -> None:
    with pytest.raises(UsageError, match=r"the gradient of .* was (used by a step and not zeroed|read after the step)"):
        run(build, strategy_at(tier))
