"""Forwards and backward passes of the user's own between two steps (probes, metrics, passes of callbacks): the weights that
they read have had every update, and what they give is a plain Trainer's, bit for bit, wherever weights and masters are."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from kit.judged import ByHand, Judged, MakeStrategy, assert_alike, judge, run
from torch import Tensor, nn

from lightning_ptm.errors import UsageError
from lightning_ptm.update.updater import Updater

PROBE = torch.randn(4, 8, generator=torch.Generator().manual_seed(5))
Probe = Callable[[Judged], Any]


@pytest.fixture
def slow_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    """Updates end when somebody waits for them, and never before."""
    monkeypatch.setattr(Updater, "pump", lambda self, limit=None: False)


def blind(module: Judged) -> None:
    with torch.no_grad():
        module.loss([PROBE])


def evaluated(module: Judged) -> None:
    module.eval()
    with torch.inference_mode():
        module.loss([PROBE])
    module.train()


def mixed(module: Judged) -> None:
    with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
        module.loss([PROBE])


def backward(module: Judged) -> None:
    module.zero_grad()
    module.loss([PROBE]).backward()
    for parameter in module.parameters():
        module.note(parameter.grad)
    module.zero_grad()


def twice(module: Judged) -> None:
    module.zero_grad()
    loss = module.loss([PROBE])
    loss.backward(retain_graph=True)
    loss.backward()
    for parameter in module.parameters():
        module.note(parameter.grad)
    module.zero_grad()


def of_inputs(module: Judged) -> None:
    x = PROBE.clone().requires_grad_()
    module.note(torch.autograd.grad(module.loss([x]), x)[0])


def of_a_weight(module: Judged) -> None:
    module.note(torch.autograd.grad(module.loss([PROBE]), module.blocks[0].inner[2].weight)[0])


def a_block(module: Judged) -> None:
    with torch.no_grad():
        module.note(module.blocks[1](module.first(PROBE)))


def a_part(module: Judged) -> None:
    with torch.no_grad():
        module.note(module.blocks[1].inner[0](module.first(PROBE)))


def the_root(module: Judged) -> None:
    module.note(module.head(module.first(PROBE)).sum())


PROBES = [blind, evaluated, mixed, backward, twice, of_inputs, of_a_weight, a_block, a_part, the_root]
HOOKS = [
    "on_train_start",
    "on_train_epoch_start",
    "on_train_batch_start",
    "on_before_backward",
    "on_after_backward",
    "on_before_optimizer_step",
    "on_before_zero_grad",
    "on_train_batch_end",
    "on_train_epoch_end",
    "on_train_end",
]
PLACES = ["masters_on_disk", "all_on_disk", "three_tiers", "lock_free", "lock_free_three_tiers"]


def probing(probe: Probe, hook: str) -> type[Judged]:
    """A module that is probed in a hook."""

    def hooked(module: Judged, *args: Any, **kwargs: Any) -> None:
        with torch.enable_grad():
            probe(module)

    return type(f"Probed{hook}", (Judged,), {hook: hooked})


@pytest.mark.diagonal
@pytest.mark.usefixtures("slow_disk")
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("probe", PROBES)
def test_what_a_probe_reads_has_had_every_update(probe: Probe, place: str, strategy_at: MakeStrategy) -> None:
    judge(probing(probe, "on_train_batch_start"), strategy_at(place))
    judge(probing(probe, "on_train_batch_end"), strategy_at(place))


@pytest.mark.diagonal
@pytest.mark.usefixtures("slow_disk")
@pytest.mark.parametrize("place", ["masters_on_disk", "three_tiers", "lock_free"])
@pytest.mark.parametrize("hook", HOOKS)
def test_in_any_hook(hook: str, place: str, strategy_at: MakeStrategy) -> None:
    judge(probing(blind, hook), strategy_at(place))


class OptimizerStep(Judged):
    """Probed right behind the step, in the hook that takes it."""

    def optimizer_step(self, *args: Any, **kwargs: Any) -> None:
        super().optimizer_step(*args, **kwargs)
        blind(self)


class Joined(Judged):
    """A loss that was computed before the step is a part of it."""

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.before = self.loss([PROBE])

    def training_step(self, batch: list[Tensor], index: int) -> Tensor:
        return self.loss(batch) + self.before


class AddsUp(ByHand):
    """The gradient of a pass before the step counts."""

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.manual_backward(self.loss([PROBE]))

    def training_step(self, batch: list[Tensor], index: int) -> None:
        self.manual_backward(self.loss(batch))
        self.optimizers().step()
        self.optimizers().zero_grad()


class InTurn(ByHand):
    """Two optimizers, probed between their steps."""

    def configure_optimizers(self) -> Any:
        first = torch.optim.AdamW([*self.first.parameters(), *self.blocks[0].parameters()], lr=1e-2, fused=True)
        return first, torch.optim.AdamW([*self.blocks[1].parameters(), *self.head.parameters()], lr=1e-2, fused=True)

    def training_step(self, batch: list[Tensor], index: int) -> None:
        for optimizer in self.optimizers():
            optimizer.zero_grad()
            self.manual_backward(self.loss(batch))
            optimizer.step()
            blind(self)


class OwnWeight(Judged):
    """A weight that the LightningModule itself has is read in its forward."""

    def __init__(self) -> None:
        super().__init__()
        self.own = nn.Parameter(torch.randn(4, 8))

    def forward(self, x: Tensor) -> Tensor:
        return self.loss([x * self.own.mean(0)])

    def training_step(self, batch: list[Tensor], index: int) -> Tensor:
        return self(batch[0])

    def on_train_batch_end(self, *ignored: Any) -> None:
        with torch.no_grad():
            self(PROBE)


@pytest.mark.usefixtures("slow_disk")
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("build", [OptimizerStep, Joined, AddsUp, InTurn, OwnWeight])
def test_in_other_places(build: type[Judged], place: str, strategy_at: MakeStrategy) -> None:
    judge(build, strategy_at(place))


class Accumulating(Judged):
    """Probed between micro-batches, too."""

    def on_train_batch_end(self, *ignored: Any) -> None:
        blind(self)


@pytest.mark.usefixtures("slow_disk")
@pytest.mark.parametrize("place", PLACES)
def test_between_micro_batches(place: str, strategy_at: MakeStrategy) -> None:
    judge(Accumulating, strategy_at(place), accumulate_grad_batches=2, limit_train_batches=4)


class Stale(Judged):
    """Notes what a probe gives, and what it gives with the weights that are saved at the same moment."""

    def on_train_batch_end(self, *ignored: Any) -> None:
        self.found = [*getattr(self, "found", []), self.head(self.blocks[1](self.first(PROBE))).detach()]
        with self.trainer.strategy.gathered(self, write=False):
            self.wanted = [
                *getattr(self, "wanted", []),
                torch.func.functional_call(self.head, dict(self.head.named_parameters()), self.hidden()).detach(),
            ]

    def hidden(self) -> Tensor:
        return self.blocks[1](self.first(PROBE))


@pytest.mark.parametrize("place", ["lock_free", "lock_free_three_tiers"])
def test_a_probe_of_a_lock_free_run_lacks_no_update(place: str, strategy_at: MakeStrategy) -> None:
    """Steps read weights that may lack some, and those between them what would be saved."""
    module = run(Stale, strategy_at(place, lock_free={"max_staleness": 8}), limit_train_batches=6)
    for found, wanted in zip(module.found, module.wanted, strict=True):
        assert torch.equal(found, wanted)


# -- gradients of such passes ------------------------------------------------------------------------------------------


class Sums(Judged):
    """A pass of its own, without forgetting what the step has used: elsewhere it adds to that."""

    def on_train_batch_end(self, *ignored: Any) -> None:
        self.loss([PROBE]).backward()
        self.look()

    def look(self) -> None:
        for parameter in self.parameters():
            self.note(parameter.grad)


class Norm(Sums):
    def look(self) -> None:
        self.note(torch.nn.utils.get_total_norm([each.grad for each in self.parameters() if each.grad is not None]))


class OfAPart(Norm):
    """A backward pass through two layers; the other parameters keep the gradient that the step used."""

    def on_train_batch_end(self, *ignored: Any) -> None:
        self.head(self.first(PROBE)).square().mean().backward()
        self.look()


class InAHook(Judged):
    """Reads the gradient in a post-accumulate-grad hook."""

    watching = False

    def on_fit_start(self) -> None:
        def look(parameter: Tensor) -> None:
            if self.watching:
                self.note(parameter.grad)

        self.head.weight.register_post_accumulate_grad_hook(look)

    def on_train_batch_end(self, *ignored: Any) -> None:
        self.watching = True
        self.loss([PROBE]).backward()
        self.watching = False


@pytest.mark.parametrize("place", ["ram", *PLACES])
@pytest.mark.parametrize("build", [Sums, Norm, OfAPart, InAHook])
def test_a_gradient_is_the_plain_sum_or_cannot_be_read(
    build: type[Judged], place: str, strategy_at: MakeStrategy
) -> None:
    try:
        ours = run(build, strategy_at(place))
    except UsageError as error:
        assert place != "ram" and "radient" in str(error)
        return
    assert_alike(ours, run(build, None))


class ForgottenByHand(Judged):
    """The first pass adds to what the step has used; its sum is forgotten unread, and the second is read."""

    def on_train_batch_end(self, *ignored: Any) -> None:
        for _ in range(2):
            self.loss([PROBE]).backward()
            if _:
                self.note(self.head.weight.grad)
                self.note(self.blocks[1].inner[0].weight.grad)
            self.zero_grad()


@pytest.mark.parametrize("place", PLACES)
def test_a_sum_that_is_forgotten_does_no_harm(place: str, strategy_at: MakeStrategy) -> None:
    judge(ForgottenByHand, strategy_at(place))
