"""`step` of the user's own torch optimizer trains as Lightning's wrapper of it does, whoever calls it and however."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
from kit.judged import ByHand, Judged, MakeStrategy, assert_alike, judge, run
from torch import Tensor, nn

from lightning_ptm.errors import ConfigError, UsageError


class RawHandle(ByHand):
    """`optimizers(use_pl_optimizer=False)`."""

    def raw(self) -> torch.optim.Optimizer:
        return self.optimizers(use_pl_optimizer=False)  # type: ignore[return-value]

    def training_step(self, batch: list[Tensor], index: int) -> None:
        optimizer = self.raw()
        optimizer.zero_grad()
        self.manual_backward(self.loss(batch))
        optimizer.step()


class RawClosure(RawHandle):
    """`trainer.optimizers[0]`, with a closure that computes the gradients."""

    def raw(self) -> torch.optim.Optimizer:
        return self.trainer.optimizers[0]

    def training_step(self, batch: list[Tensor], index: int) -> None:
        optimizer = self.raw()

        def closure() -> Tensor:
            optimizer.zero_grad()
            loss = self.loss(batch)
            self.manual_backward(loss)
            return loss

        self.note(optimizer.step(closure))


class RawInHook(Judged):
    """`optimizer.optimizer.step` in an overridden hook."""

    def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any = None) -> None:
        optimizer.optimizer.step(closure=optimizer_closure)


class ClosureFirst(Judged):
    """The closure runs by itself, and the raw step without one."""

    def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any = None) -> None:
        optimizer_closure()
        optimizer.optimizer.step()


@pytest.mark.slow_unless(
    "all_on_disk-RawInHook",
    "all_on_disk-ClosureFirst",
    "lock_free_three_tiers-RawHandle",
    "lock_free_three_tiers-RawClosure",
)
@pytest.mark.parametrize("build", [RawHandle, RawClosure, RawInHook, ClosureFirst])
def test_a_raw_step_trains_as_a_plain_trainer_does(
    build: Callable[[], Judged], tier: str, strategy_at: MakeStrategy
) -> None:
    judge(build, strategy_at(tier))


@pytest.mark.parametrize("build", [RawHandle, RawInHook, ClosureFirst])
def test_in_mixed_precision_a_raw_step_is_that_of_the_wrapper(build: type[Judged], strategy_at: MakeStrategy) -> None:
    class Wrapped(build):  # type: ignore[misc,valid-type]
        def raw(self) -> Any:
            return self.optimizers()

        def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any = None) -> None:
            optimizer.step(closure=optimizer_closure)

    raw = run(build, strategy_at("ram"), precision="bf16-mixed")
    wrapped = run(Wrapped, strategy_at("ram"), precision="bf16-mixed")
    del raw.notes[-1], wrapped.notes[-1]  # Lightning counts steps of its wrapper alone
    assert_alike(raw, wrapped)
    assert not torch.equal(raw.head.weight, run(build, None, max_epochs=0).head.weight)


class Accumulating(RawHandle):
    """Raw steps every other batch, clipped, with two optimizers."""

    def training_step(self, batch: list[Tensor], index: int) -> None:
        optimizers = self.trainer.optimizers
        self.manual_backward(self.loss(batch))
        if index % 2:
            for optimizer in optimizers:
                self.clip_gradients(optimizer, gradient_clip_val=0.1, gradient_clip_algorithm="norm")
                optimizer.step()
                optimizer.zero_grad()

    def configure_optimizers(self) -> Any:
        blocks = torch.optim.SGD(self.blocks.parameters(), lr=0.1, momentum=0.9, fused=True)
        return [blocks, torch.optim.AdamW([*self.first.parameters(), *self.head.parameters()], lr=1e-2, fused=True)], []


@pytest.mark.slow_unless("all_on_disk", "lock_free_three_tiers")
def test_raw_steps_of_two_optimizers_with_accumulation_and_clipping(tier: str, strategy_at: MakeStrategy) -> None:
    judge(Accumulating, strategy_at(tier), limit_train_batches=4)


class Wrapping(Judged):
    """Whatever is put around `step` before the run sees each step once, in order, and finds the user's groups."""

    def configure_optimizers(self) -> Any:
        optimizer = super().configure_optimizers()
        optimizer.register_step_pre_hook(lambda *_: self.note(f"before {self.trainer.global_step}"))
        optimizer.register_step_post_hook(lambda each, *_: self.note(len(each.param_groups[0]["params"])))
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
        scheduled = optimizer.step

        def counted(*args: Any, **kwargs: Any) -> Any:
            self.note("counted")
            result = scheduled(*args, **kwargs)
            self.note(float(result))
            return result

        counted._wrapped_by_lr_sched = True  # type: ignore[attr-defined]
        optimizer.step = counted
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


def test_wrappers_and_hooks_of_step_see_each_step(strategy_at: MakeStrategy) -> None:
    judge(Wrapping, strategy_at("masters_on_disk"))


class Inherited(torch.optim.AdamW):
    """A class that calls the `step` of its base class, which has hooks of its own."""

    def step(self, closure: Any = None) -> Any:
        with torch.enable_grad():
            result = closure() if closure is not None else None
        super().step()
        return result


class OwnClass(RawHandle):
    def configure_optimizers(self) -> Any:
        torch.optim.AdamW([nn.Parameter(torch.zeros(1))])  # torch puts hooks around the base class's step
        return Inherited(self.parameters(), lr=1e-2, fused=True)


class OwnClassAutomatic(Judged):
    configure_optimizers = OwnClass.configure_optimizers


@pytest.mark.parametrize("build", [OwnClass, OwnClassAutomatic])
def test_a_class_that_inherits_its_step_updates_once(build: Callable[[], Judged], strategy_at: MakeStrategy) -> None:
    judge(build, strategy_at("masters_on_disk"))


class AfterAnError(RawHandle):
    """A step that failed and was caught is none; those behind it are."""

    def training_step(self, batch: list[Tensor], index: int) -> None:
        def fails() -> None:
            raise KeyError("of the closure")

        with pytest.raises(KeyError):
            self.raw().step(fails)
        super().training_step(batch, index)


@pytest.mark.slow_unless("all_on_disk", "lock_free_three_tiers")
def test_an_error_in_a_closure_leaves_the_next_step_whole(tier: str, strategy_at: MakeStrategy) -> None:
    judge(AfterAnError, strategy_at(tier))


class Twice(RawHandle):
    """Two steps with one gradient."""

    def training_step(self, batch: list[Tensor], index: int) -> None:
        super().training_step(batch, index)
        self.raw().step()


@pytest.mark.slow_unless("masters_on_disk", "lock_free", "tight_recomputed")
def test_two_raw_steps_with_one_gradient(tier: str, strategy_at: MakeStrategy) -> None:
    judge(Twice, strategy_at(tier))


def test_a_mocked_step_sees_the_calls_and_trains_nothing(strategy_at: MakeStrategy) -> None:
    class Mocked(RawHandle):
        def on_train_start(self) -> None:
            patch = mock.patch.object(torch.optim.AdamW, "step")
            self.calls = patch.start()
            self.undo = patch.stop

        def on_train_end(self) -> None:
            self.undo()
            self.note(len(self.calls.mock_calls))

    judge(Mocked, strategy_at("ram"))


def test_hooks_of_the_run_are_gone_behind_it(strategy_at: MakeStrategy) -> None:
    module = run(RawHandle, strategy_at("ram"))
    optimizer = module.trainer.optimizers[0]
    assert not optimizer._optimizer_step_pre_hooks and not optimizer._optimizer_step_post_hooks
    assert len(optimizer.param_groups[0]["params"]) == len(list(module.parameters()))
    before = module.head.weight.detach().clone()
    module.head.weight.grad = torch.ones_like(before)
    optimizer.step()
    assert not torch.equal(module.head.weight, before)


def test_arguments_that_a_step_cannot_take_are_refused(strategy_at: MakeStrategy) -> None:
    class Given(RawHandle):
        def training_step(self, batch: list[Tensor], index: int) -> None:
            self.raw().step(grad_scaler=None)  # type: ignore[call-arg]

    with pytest.raises(UsageError, match=r"optimizer\.step was given grad_scaler"):
        run(Given, strategy_at("ram"))


class NeverCalls(torch.optim.Optimizer):
    """Optimizer that ignores its closure, as is common for manual optimization."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.add_(parameter.grad, alpha=-group["lr"])


class Advances(NeverCalls):
    """Counts its steps in its groups."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        super().step()
        for group in self.param_groups:
            group["step"] = group.get("step", 0) + 1


class GroupsFirst(torch.optim.SGD):
    """Takes its groups before it calls the closure."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        groups = self.param_groups
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.add_(parameter.grad, alpha=-group["lr"])
        return loss


class Flattens(torch.optim.Optimizer):
    """Looks up all parameters before its closure."""

    def __init__(self, parameters: Any, lr: float = 0.05) -> None:
        super().__init__(parameters, {"lr": lr})

    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        pairs = [(parameter, group) for group in self.param_groups for parameter in group["params"]]
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        with torch.no_grad():
            for parameter, group in pairs:
                if parameter.grad is not None:
                    parameter.add_(parameter.grad, alpha=-group["lr"])
        return loss


class DecaysWhatItHeld(torch.optim.SGD):
    """The list itself, and with something done to it behind the step of its base class."""

    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        held = self.param_groups[0]["params"]
        loss = super().step(closure)
        with torch.no_grad():
            for parameter in held:
                parameter.mul_(0.9)
        return loss


class PassesOn(torch.optim.SGD):
    """Names no closure, and hands it on."""

    def step(self, *args: Any, **kwargs: Any) -> Any:
        return super().step(*args, **kwargs)


class Wrapper(RawHandle):
    """Manual optimization by Lightning's wrapper."""

    def raw(self) -> Any:
        return self.optimizers()


def using(base: type[Judged], optimizer: type[torch.optim.Optimizer]) -> Callable[[], Judged]:
    class Using(base):  # type: ignore[misc,valid-type]
        def configure_optimizers(self) -> Any:
            return optimizer(self.parameters())

        def on_train_end(self) -> None:
            self.note([(group["lr"], group.get("step")) for group in self.trainer.optimizers[0].param_groups])

    return Using


@pytest.mark.diagonal
@pytest.mark.parametrize("base", [Wrapper, RawHandle])
@pytest.mark.parametrize("optimizer", [NeverCalls, Advances, GroupsFirst, PassesOn])
def test_a_hand_written_step_updates_once(
    base: type[Judged], optimizer: type[torch.optim.Optimizer], strategy_at: MakeStrategy
) -> None:
    judge(using(base, optimizer), strategy_at("masters_on_disk"))


@pytest.mark.slow_unless("ram", "three_tiers", "tight")
def test_a_step_that_never_calls_its_closure_updates_once_on_every_home(tier: str, strategy_at: MakeStrategy) -> None:
    judge(using(Wrapper, NeverCalls), strategy_at(tier))


@pytest.mark.slow_unless(
    "all_on_disk-Flattens-RawClosure-None",
    "all_on_disk-DecaysWhatItHeld-RawHandle-None",
    "lock_free_three_tiers-Flattens-Judged-0.01",
    "lock_free_three_tiers-DecaysWhatItHeld-Judged-None",
)
@pytest.mark.parametrize(("base", "clip"), [(Judged, None), (Judged, 0.01), (RawHandle, None), (RawClosure, None)])
@pytest.mark.parametrize("optimizer", [Flattens, DecaysWhatItHeld])
def test_a_step_that_has_looked_up_its_parameters_updates_once_on_every_home(
    base: type[Judged],
    clip: float | None,
    optimizer: type[torch.optim.Optimizer],
    tier: str,
    strategy_at: MakeStrategy,
) -> None:
    judge(using(base, optimizer), strategy_at(tier), gradient_clip_val=clip)


@pytest.mark.parametrize("base", [Judged, RawClosure])
@pytest.mark.parametrize("optimizer", [GroupsFirst, PassesOn])
def test_a_hand_written_step_calls_the_closure_that_it_was_given(
    base: type[Judged], optimizer: type[torch.optim.Optimizer], strategy_at: MakeStrategy
) -> None:
    judge(using(base, optimizer), strategy_at("masters_on_disk"))


@pytest.mark.parametrize(
    ("optimizer", "reason"),
    [(NeverCalls, "never calls its closure"), (Flattens, "looks up its parameters before it calls its closure")],
)
def test_hooks_behind_the_update_of_a_class_are_refused(
    optimizer: type[torch.optim.Optimizer], reason: str, strategy_at: MakeStrategy
) -> None:
    class Hooked(using(RawHandle, optimizer)):  # type: ignore[misc]
        def on_train_start(self) -> None:
            self.raw().register_step_pre_hook(lambda *_: None)

    with pytest.raises(UsageError, match=rf"\.step {reason}; register the hook in configure_optim.* its closure first"):
        run(Hooked, strategy_at("ram"))


def test_a_closure_that_is_called_in_some_steps_only_needs_everything_in_ram(strategy_at: MakeStrategy) -> None:
    class Sometimes(NeverCalls):
        def step(self, closure: Any = None) -> None:  # type: ignore[override]
            self.count = getattr(self, "count", 0) + 1
            if closure is not None and self.count % 2:
                closure()
            super().step()

    with pytest.raises(ConfigError, match=r"Sometimes\.step calls its closure in some steps only"):
        run(using(RawHandle, Sometimes), strategy_at("masters_on_disk"))
    judge(using(RawHandle, Sometimes), strategy_at("ram"))


class Late(torch.optim.SGD):
    """Fails behind its update where the test says so; pages are updated by copies, which do not."""

    failing: Any = None

    def step(self, closure: Any = None) -> Any:
        result = super().step(closure)
        if self is Late.failing:
            raise KeyError("behind the update")
        return result


class AfterALateError(RawHandle):
    def training_step(self, batch: list[Tensor], index: int) -> None:
        Late.failing = self.trainer.optimizers[0] if index == 0 else None
        try:
            super().training_step(batch, index)
        except KeyError:
            self.note("caught")
        self.note(len(self.trainer.optimizers[0].param_groups))


def test_a_step_keeps_its_closure_no_longer_than_it_lasts(strategy_at: MakeStrategy) -> None:
    class Kept(RawHandle):
        def training_step(self, batch: list[Tensor], index: int) -> None:
            def closure() -> None:
                self.manual_backward(self.loss(batch))

            kept = weakref.ref(closure)
            gc.disable()
            try:
                self.raw().step(closure)  # type: ignore[arg-type]
                del closure
                self.note(kept() is None)
            finally:
                gc.enable()

    judge(Kept, strategy_at("ram"))


@pytest.mark.parametrize("base", [AfterALateError, type("Wrapped", (AfterALateError,), {"raw": Wrapper.raw})])
def test_an_error_behind_the_update_leaves_the_next_step_whole(base: type[Judged], strategy_at: MakeStrategy) -> None:
    judge(using(base, Late), strategy_at("ram"))
