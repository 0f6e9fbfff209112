"""Every element-wise optimizer of torch.optim, page by page, equals itself on whole parameters to the last bit."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from paged_training import (
    SHAPES,
    SMALL_SHAPES,
    Make,
    Twin,
    assert_bits,
    make_allocator,
    make_twin,
    plain_step,
    random_gradients,
    set_lr,
)
from torch import optim

from lightning_ptm.terms import Tier
from lightning_ptm.update.gradient_source import ParameterGradients, TensorGradient, Transform
from lightning_ptm.update.loss_scale import LossScale
from lightning_ptm.update.norms import clip_coefficient, parameter_norms, total_norm


@dataclasses.dataclass(frozen=True)
class Case:
    """An optimizer class, its settings, and what the second parameter group changes."""

    cls: type[optim.Optimizer]
    settings: dict[str, Any]
    second: dict[str, Any] = dataclasses.field(default_factory=dict)

    def make(self, groups: list[dict[str, object]]) -> optim.Optimizer:
        return self.cls(groups, **self.settings)  # type: ignore[arg-type]


CASES = {
    "adam": Case(optim.Adam, {"lr": 1e-2}, {"weight_decay": 0.1}),
    "adamw": Case(optim.AdamW, {"lr": 1e-2}, {"weight_decay": 0.0, "betas": (0.8, 0.99)}),
    "adamw_amsgrad_in_one_group": Case(optim.AdamW, {"lr": 1e-2}, {"amsgrad": True}),
    "adamw_maximize": Case(optim.AdamW, {"lr": 1e-2, "maximize": True}),
    "adamw_foreach": Case(optim.AdamW, {"lr": 1e-2, "foreach": True}),
    "adamw_unfused": Case(optim.AdamW, {"lr": 1e-2, "fused": False}),
    "adamw_tensor_lr": Case(optim.AdamW, {"lr": torch.tensor(1e-2)}),
    "sgd": Case(optim.SGD, {"lr": 0.1}, {"weight_decay": 0.1}),
    "sgd_momentum": Case(optim.SGD, {"lr": 0.1, "momentum": 0.9, "dampening": 0.1}, {"weight_decay": 0.1}),
    "sgd_momentum_each_alone": Case(optim.SGD, {"lr": 0.1, "momentum": 0.9, "foreach": False}, {"nesterov": True}),
    "sgd_nesterov_in_one_group": Case(optim.SGD, {"lr": 0.1}, {"momentum": 0.9, "nesterov": True}),
    "radam": Case(optim.RAdam, {"lr": 1e-2}, {"weight_decay": 0.1, "decoupled_weight_decay": True}),
    "nadam": Case(optim.NAdam, {"lr": 1e-2}, {"weight_decay": 0.1}),
    "rmsprop": Case(optim.RMSprop, {"lr": 1e-2}, {"centered": True, "momentum": 0.9}),
    "adagrad": Case(optim.Adagrad, {"lr": 1e-2, "initial_accumulator_value": 0.3}, {"lr_decay": 0.1}),
    "adadelta": Case(optim.Adadelta, {"lr": 1.0}, {"weight_decay": 0.1}),
    "adamax": Case(optim.Adamax, {"lr": 1e-2}, {"weight_decay": 0.1}),
    "asgd": Case(optim.ASGD, {"lr": 1e-2, "t0": 2.0}, {"lambd": 0.01}),
    "rprop": Case(optim.Rprop, {"lr": 1e-2}, {"etas": (0.4, 1.3)}),
}
UNUSED = ((1,), (), (1, 4), (0, 7), ())
"""Parameters without a gradient at each step: p1 comes late, others pause, so that scalars differ within the flat."""


NONE_LATE = ((), (), (1, 4), (0, 7), ())
"""For optimizers that themselves fail when only some parameters of a group take their first step (torch's fused SGD)."""


@pytest.fixture
def twins() -> Iterator[list[Twin]]:
    made: list[Twin] = []
    yield made
    for twin in made:
        twin.close()


def train(twin: Twin, dtype: torch.dtype) -> None:
    shapes = [tuple(parameter.shape) for parameter in twin.plain]
    for step, unused in enumerate(NONE_LATE if isinstance(twin.optimizer, optim.SGD) else UNUSED):
        gradients = random_gradients(step, dtype, shapes, unused)
        plain_step(twin, gradients)
        twin.updater.finish(twin.submit(gradients))
        if step == 2:
            set_lr(twin, 0.5)


@pytest.mark.parametrize("name", CASES)
def test_in_ram_with_the_parameters_own_gradients(name: str, twins: list[Twin]) -> None:
    case = CASES[name]
    twins.append(make_twin(case.make, make_allocator(), second=case.second))
    train(twins[0], torch.bfloat16)
    twins[0].assert_equal()


@pytest.mark.parametrize("name", CASES)
def test_master_states_and_gradients_and_parameters_on_disk(name: str, twins: list[Twin], tmp_path: Path) -> None:
    case = CASES[name]
    disk = Tier.DISK
    twins.append(
        make_twin(
            case.make, make_allocator(tmp_path), second=case.second, home=disk, target_home=disk, gradient_home=disk
        )
    )
    train(twins[0], torch.bfloat16)
    twins[0].assert_equal()
    assert twins[0].updater.stats.bytes_written > 0


@pytest.mark.diagonal
@pytest.mark.parametrize("name", ["adamw", "sgd", "sgd_momentum", "rprop", "asgd"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("home", [Tier.DEVICE, Tier.DISK])
def test_true_precisions_update_the_compute_parameters(
    name: str, dtype: torch.dtype, home: Tier, twins: list[Twin], tmp_path: Path
) -> None:
    case = CASES[name]
    twins.append(
        make_twin(
            case.make,
            make_allocator(tmp_path),
            second=case.second,
            compute=dtype,
            mixed=False,
            home=home,
            target_home=home,
            shapes=SMALL_SHAPES if dtype is torch.bfloat16 else SHAPES,
        )
    )
    train(twins[0], dtype)
    twins[0].assert_equal()


@pytest.mark.parametrize("gradient_home", [Tier.DEVICE, Tier.HOST, Tier.DISK])
@pytest.mark.parametrize("target_home", [Tier.DEVICE, Tier.HOST, Tier.DISK])
@pytest.mark.parametrize("home", [Tier.DEVICE, Tier.HOST, Tier.DISK])
def test_every_mixture_of_homes(
    home: Tier, target_home: Tier, gradient_home: Tier, twins: list[Twin], tmp_path: Path
) -> None:
    case = CASES["adamw"]
    allocator = make_allocator(tmp_path, host_mib=6)
    twins.append(
        make_twin(
            case.make,
            allocator,
            second=case.second,
            home=home,
            target_home=target_home,
            gradient_home=gradient_home,
            staging_tier=Tier.HOST,
            staging=1,
        )
    )
    train(twins[0], torch.bfloat16)
    twins[0].assert_equal()


class Lion(optim.Optimizer):
    """A third-party, element-wise optimizer as people write them: no `step` scalar, not fused, in-place on the gradient."""

    def __init__(self, params: Any, lr: float = 1e-3, betas: tuple[float, float] = (0.9, 0.99), decay: float = 0.0):
        super().__init__(params, {"lr": lr, "betas": betas, "decay": decay})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if not state:
                    state["momentum"] = torch.zeros_like(p)
                    state["steps"] = 0
                first, second = group["betas"]
                p.mul_(1 - group["lr"] * group["decay"])
                p.add_(state["momentum"].mul(first).add(p.grad, alpha=1 - first).sign_(), alpha=-group["lr"])
                state["momentum"] = state["momentum"] * second + p.grad * (1 - second)  # replaced, not written in place
                state["steps"] += 1


class GroupCounter(optim.Optimizer):
    """Keeps its step in the parameter group, as NVIDIA Apex's FusedAdam does, and its state from the constructor on."""

    def __init__(self, params: Any, lr: float = 1e-2):
        super().__init__(params, {"lr": lr})
        for group in self.param_groups:
            group["step"] = 0
            for p in group["params"]:
                self.state[p]["sum"] = torch.full_like(p, 0.5)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            group["step"] += 1
            for p in group["params"]:
                if p.grad is not None:
                    self.state[p]["sum"].addcmul_(p.grad, p.grad)
                    p.sub_(p.grad / self.state[p]["sum"].sqrt(), alpha=group["lr"] / group["step"])


@pytest.mark.parametrize("make", [lambda groups: Lion(groups, lr=1e-2), Lion])
@pytest.mark.parametrize("home", [Tier.DEVICE, Tier.DISK])
def test_third_party(make: Make, home: Tier, twins: list[Twin], tmp_path: Path) -> None:
    twins.append(make_twin(make, make_allocator(tmp_path), second={"decay": 0.1}, home=home))
    train(twins[0], torch.bfloat16)
    twins[0].assert_equal()


def test_values_that_the_optimizer_keeps_in_its_groups(twins: list[Twin]) -> None:
    twins.append(make_twin(GroupCounter, make_allocator()))
    twin = twins[0]
    twin.optimizer.state.clear()
    train(twin, torch.bfloat16)
    assert [group["step"] for group in twin.optimizer.param_groups] == [len(UNUSED)] * 2
    twin.assert_equal()


@pytest.mark.parametrize("home", [Tier.DEVICE, Tier.DISK])
@pytest.mark.parametrize("norm_type", [2.0, float("inf"), 3.0])
def test_clipping_by_norm_with_a_loss_scale(home: Tier, norm_type: float, twins: list[Twin], tmp_path: Path) -> None:
    case = CASES["adamw"]
    twins.append(make_twin(case.make, make_allocator(tmp_path), second=case.second, home=home))
    twin = twins[0]
    unscale = LossScale(init_scale=1000.0).unscale_factor()
    assert unscale is not None
    for step, unused in enumerate(UNUSED):
        gradients = random_gradients(step, torch.bfloat16, unused=unused)
        for parameter, gradient in zip(twin.plain, gradients, strict=True):
            parameter.grad = gradient.float().mul_(unscale) if gradient is not None else None
        expected = torch.nn.utils.clip_grad_norm_(twin.plain, 0.05, norm_type)
        twin.plain_optimizer.step()

        laid_out = ParameterGradients([gradients[index] for index in twin.order])
        norms = parameter_norms(
            twin.states,
            laid_out,
            laid_out.present(twin.flat),
            norm_type=norm_type,
            transform=Transform(unscale=unscale),
        )
        # The plain loop's order of parameters is the model's, ours is the flat's.
        used = [index for index in twin.order if gradients[index] is not None]
        in_order = [norm for _, norm in sorted(zip(used, norms, strict=True), key=lambda pair: pair[0])]
        total = total_norm(in_order, norm_type)
        assert_bits(total, expected, "total norm")
        transform = Transform(unscale=unscale, clip=clip_coefficient(total, 0.05))
        twin.updater.finish(twin.submit(gradients, transform))
    twin.assert_equal()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_clipping_in_true_precision(dtype: torch.dtype, twins: list[Twin]) -> None:
    case = CASES["adamw"]
    twins.append(make_twin(case.make, make_allocator(), second=case.second, compute=dtype, mixed=False))
    twin = twins[0]
    for step in range(3):
        gradients = random_gradients(step, dtype)
        for parameter, gradient in zip(twin.plain, gradients, strict=True):
            assert gradient is not None
            parameter.grad = gradient.clone()
        expected = torch.nn.utils.clip_grad_norm_(twin.plain, 0.5)
        twin.plain_optimizer.step()
        source = ParameterGradients([gradients[index] for index in twin.order])
        norms = parameter_norms(twin.states, source, (True,) * len(twin.order), dtype=dtype)
        total = total_norm([norm for _, norm in sorted(zip(twin.order, norms, strict=True), key=lambda pair: pair[0])])
        assert_bits(total, expected, "total norm")
        twin.updater.finish(twin.submit(gradients, Transform(clip=clip_coefficient(total, 0.5))))
    twin.assert_equal()


@pytest.mark.parametrize("gradient_home", [None, Tier.DEVICE])
def test_clipping_by_value(gradient_home: Tier | None, twins: list[Twin]) -> None:
    case = CASES["sgd_momentum"]
    twins.append(make_twin(case.make, make_allocator(), second=case.second, gradient_home=gradient_home))
    twin = twins[0]
    for step in range(3):
        gradients = random_gradients(step, torch.bfloat16)
        for parameter, gradient in zip(twin.plain, gradients, strict=True):
            assert gradient is not None
            parameter.grad = gradient.float()
        torch.nn.utils.clip_grad_value_(twin.plain, 0.3)
        twin.plain_optimizer.step()
        twin.updater.finish(twin.submit(gradients, Transform(clamp=0.3)))
    twin.assert_equal()


def test_the_shadow_sees_the_hyper_parameters_of_the_submission(twins: list[Twin]) -> None:
    case = CASES["adamw"]
    twins.append(make_twin(case.make, make_allocator(), second=case.second))
    twin = twins[0]
    gradients = random_gradients(0, torch.bfloat16)
    plain_step(twin, gradients)
    handle = twin.submit(gradients)
    for group in twin.optimizer.param_groups:
        group["lr"] = 100.0
    twin.updater.finish(handle)
    twin.assert_equal()


def test_a_gradient_that_is_not_contiguous(twins: list[Twin]) -> None:
    case = CASES["adamw"]
    twins.append(make_twin(case.make, make_allocator(), second=case.second))
    gradients = random_gradients(0, torch.bfloat16)
    assert gradients[4] is not None
    gradients[4] = gradients[4].t().contiguous().t()
    plain_step(twins[0], gradients)
    twins[0].updater.finish(twins[0].submit(gradients))
    twins[0].assert_equal()


def test_reader_gives_the_same_by_view_and_by_copy(twins: list[Twin]) -> None:
    case = CASES["sgd"]
    twins.append(make_twin(case.make, make_allocator()))
    states = twins[0].states
    reader = TensorGradient(torch.randn(states.flat.shard_numel))
    for run in states.runs(0, states.flat.shard_numel, (True,) * len(states.flat.slots)):
        copy = torch.full((run.numel,), float("nan"))
        reader.read_into(copy, run)
        for segment in run.segments:
            begin = segment.start - run.start
            assert_bits(copy[begin : begin + segment.numel], reader.view(run)[begin : begin + segment.numel], "segment")
        assert copy.isfinite().all()


@pytest.mark.parametrize("home", [Tier.DEVICE, Tier.DISK])
def test_several_steps_with_one_gradient_are_one_pass_over_the_pages(tmp_path: Path, home: Tier) -> None:
    """Lock-free updates with the gradients of several steps are bit for bit those steps, each with its own rate."""
    allocator = make_allocator(tmp_path)
    twin = make_twin(lambda groups: torch.optim.AdamW(groups, lr=0.1, fused=True), allocator, home=home)
    try:
        for step in range(2):
            gradients = random_gradients(step, torch.bfloat16, unused=[3])
            earlier = []
            for factor in (1.0, 0.5, 0.25):
                set_lr(twin, factor)
                plain_step(twin, gradients)
                earlier.append(twin.hyper())
            job = twin.job(gradients, earlier=earlier[:-1], fresh_target=True)
            twin.updater.finish(twin.updater.submit(job))
            assert job.steps == tuple(earlier)
        twin.assert_equal()
    finally:
        twin.close()
