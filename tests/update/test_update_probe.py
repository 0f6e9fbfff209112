"""Results of the probe, and its refusals."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from kit.devices import HERE, on_device
from torch import optim

from lightning_ptm.errors import ConfigError, UsageError
from lightning_ptm.update.shadow import GroupValues, RunViews, ShadowOptimizer, snapshot
from lightning_ptm.update.trial.probe import probe
from lightning_ptm.update.trial.traits import Initial


def parameters() -> list[torch.nn.Parameter]:
    return [torch.nn.Parameter(torch.zeros(2, 3))]


class LikeLAMB(optim.Optimizer):
    """Adam-like, but the step is scaled by a norm of the whole parameter."""

    def __init__(self, params: Any, lr: float = 1e-2):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    average = self.state[p].setdefault("average", torch.zeros_like(p))
                    average.lerp_(p.grad, 0.1)
                    p.sub_(average * p.norm() / average.norm().clamp(min=1e-6), alpha=group["lr"])


class HiddenCounter(optim.Optimizer):
    """Keeps its step on the object, where several pieces of one step would each advance it."""

    def __init__(self, params: Any, lr: float = 1e-2):
        super().__init__(params, {"lr": lr})
        self.steps_done = 0

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.steps_done += 1
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.sub_(p.grad, alpha=group["lr"] / self.steps_done)


class NeedsClosure(optim.Optimizer):
    def __init__(self, params: Any):
        super().__init__(params, {})

    def step(self, closure: Any) -> None:  # type: ignore[override]
        closure()
        closure()


class FillsStateInConstructor(optim.Optimizer):
    def __init__(self, params: Any, lr: float = 1e-2):
        super().__init__(params, {"lr": lr})
        for group in self.param_groups:
            for p in group["params"]:
                self.state[p]["sum"] = torch.ones_like(p)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.addcdiv_(p.grad, self.state[p]["sum"].addcmul_(p.grad, p.grad).sqrt(), value=-group["lr"])


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (lambda: optim.LBFGS(parameters()), "closure"),
        (lambda: NeedsClosure(parameters()), "closure"),
        (lambda: optim.SparseAdam(parameters()), "dense gradients"),
        (lambda: HiddenCounter(parameters()), "depends on self.steps_done"),
    ],
)
def test_refused_with_class_and_reason_and_remedy(make: Any, reason: str) -> None:
    optimizer = make()
    with pytest.raises(ConfigError, match=type(optimizer).__name__) as caught:
        probe(optimizer)
    assert reason in str(caught.value)
    assert "what works" in str(caught.value)


@pytest.mark.parametrize(
    ("make", "reason", "kept"),
    [
        (lambda: optim.Adafactor(parameters()), "row_var", {"row_var": (2, 1), "col_var": (1, 3)}),
        (lambda: LikeLAMB(parameters()), "depends on others of its parameter", {"average": (2, 3)}),
        pytest.param(
            lambda: optim.Muon(parameters()),
            "whole 2-D parameters only",
            {"momentum_buffer": (2, 3)},
            marks=pytest.mark.skipif(not hasattr(optim, "Muon"), reason="this torch has no Muon"),
        ),
    ],
)
def test_whole_parameters_with_the_reason_and_the_shapes_of_their_states(make: Any, reason: str, kept: Any) -> None:
    traits = probe(make())
    assert reason in traits.whole
    assert dict(traits.groups[0].state_shapes[2, 3]) == kept


def test_slots_and_scalars_of_each_group() -> None:
    groups = [{"params": parameters()}, {"params": parameters(), "amsgrad": True}]
    traits = probe(optim.AdamW(groups, lr=1e-3))
    assert [slot.name for slot in traits.groups[0].slots] == ["exp_avg", "exp_avg_sq"]
    assert [slot.name for slot in traits.slots] == ["exp_avg", "exp_avg_sq", "max_exp_avg_sq"]
    assert traits.groups[0].scalars == ("step",)
    assert traits.bytes_per_element() == 12
    assert traits.initial is Initial.LAZY


def test_fused_is_chosen_only_when_left_open() -> None:
    assert probe(optim.AdamW(parameters())).groups[0].fused
    assert not probe(optim.AdamW(parameters(), fused=False)).groups[0].fused
    assert not probe(optim.AdamW(parameters(), foreach=True)).groups[0].fused
    assert not probe(optim.AdamW(parameters(), foreach=False)).groups[0].fused
    assert not probe(optim.RMSprop(parameters())).groups[0].fused


def test_a_fused_kernel_that_computes_something_else_is_not_chosen() -> None:
    optimizer = optim.SGD(parameters(), lr=0.1, momentum=0.9)
    assert probe(optimizer, dtype=torch.float32).groups[0].fused
    fused = optim.SGD([torch.nn.Parameter(torch.ones(64, dtype=torch.bfloat16))], lr=0.1, momentum=0.9, fused=True)
    parameter = fused.param_groups[0]["params"][0]
    for _ in range(3):
        parameter.grad = torch.ones_like(parameter)
        fused.step()
    is_right = bool((fused.state[parameter]["momentum_buffer"] == 2.71875).all())
    assert probe(optimizer, dtype=torch.bfloat16).groups[0].fused <= is_right


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_fused_kernel_that_was_asked_for_is_refused_by_its_own_name(dtype: torch.dtype) -> None:
    with pytest.raises(ConfigError, match="with fused=True and momentum keeps wrong momentum") as caught:
        probe(optim.SGD(parameters(), lr=0.1, momentum=0.9, fused=True), dtype=dtype)
    assert "fused=False" in str(caught.value)
    assert probe(optim.SGD(parameters(), lr=0.1, fused=True), dtype=dtype).groups


def test_state_from_the_constructor_only() -> None:
    assert probe(FillsStateInConstructor(parameters())).initial is Initial.CONSTRUCTED


def test_probing_leaves_the_optimizer_alone() -> None:
    parameter = parameters()[0]
    optimizer = optim.AdamW([parameter], lr=torch.tensor(1e-3))
    scheduler = optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)
    before = dict(optimizer.param_groups[0])
    random = torch.random.get_rng_state()
    probe(optimizer)
    assert optimizer.param_groups[0] == before
    assert not optimizer.state
    assert parameter.grad is None
    assert torch.equal(torch.random.get_rng_state(), random)
    assert scheduler.last_epoch == 0


def test_whole_parameters_that_are_large_are_tried_without_their_memory() -> None:
    parameter = torch.nn.Parameter(torch.empty(1 << 20, 1 << 20, device="meta"))
    traits = probe(optim.Adafactor([parameter]))
    assert dict(traits.groups[0].state_shapes[1 << 20, 1 << 20]) == {"row_var": (1 << 20, 1), "col_var": (1, 1 << 20)}


def test_parameters_on_meta() -> None:
    parameter = torch.nn.Parameter(torch.empty(1000, 1000, device="meta"))
    assert len(probe(optim.AdamW([parameter])).slots) == 2


def test_snapshot_is_a_copy() -> None:
    lr = torch.tensor(1.0)
    optimizer = optim.AdamW(parameters(), lr=lr)
    hyper = snapshot(optimizer, probe(optimizer))
    lr.fill_(2.0)
    optimizer.param_groups[0]["weight_decay"] = 9.0
    assert hyper.groups[0]["lr"] == 1.0
    assert hyper.groups[0]["weight_decay"] == 0.01
    assert "params" not in hyper.groups[0]
    with pytest.raises(TypeError):
        hyper.groups[0]["lr"] = 3.0  # type: ignore[index]


def test_a_group_that_came_later_is_an_error() -> None:
    optimizer = optim.AdamW(parameters())
    traits = probe(optimizer)
    optimizer.add_param_group({"params": parameters()})
    with pytest.raises(ConfigError, match="parameter groups"):
        snapshot(optimizer, traits)


def test_a_state_that_appears_later_is_an_error() -> None:
    optimizer = optim.SGD(parameters(), lr=0.1)
    traits = probe(optimizer)
    shadow = ShadowOptimizer(optimizer, traits)
    group = {**snapshot(optimizer, traits).groups[0], "momentum": 0.9}
    run = RunViews(0, torch.ones(64), torch.ones(64), {}, None)
    with pytest.raises(UsageError, match="momentum_buffer"):
        shadow.step(GroupValues((group,)), [run])


def test_the_shadow_lets_go_of_views() -> None:
    optimizer = optim.AdamW(parameters())
    traits = probe(optimizer)
    shadow = ShadowOptimizer(optimizer, traits)
    value = torch.ones(64)
    slots = {slot.name: torch.zeros(64) for slot in traits.slots}
    shadow.step(snapshot(optimizer, traits), [RunViews(0, value, torch.ones(64), slots, None)])
    assert value.grad is None
    assert not optimizer.state
    assert (value != 1).all()
    assert (slots["exp_avg"] != 0).all()


def test_hooks_of_the_users_object_are_not_run_for_every_page() -> None:
    optimizer = optim.AdamW(parameters())
    calls: list[int] = []
    optimizer.register_step_post_hook(lambda *_: calls.append(1))
    traits = probe(optimizer)
    shadow = ShadowOptimizer(optimizer, traits)
    slots = {slot.name: torch.zeros(64) for slot in traits.slots}
    shadow.step(snapshot(optimizer, traits), [RunViews(0, torch.ones(64), torch.ones(64), slots, None)])
    assert not calls


@pytest.mark.gpu
@on_device
def test_on_a_device() -> None:
    traits = probe(optim.AdamW(parameters()), device=HERE)
    assert traits.groups[0].fused
    assert [slot.name for slot in traits.slots] == ["exp_avg", "exp_avg_sq"]


@pytest.mark.skipif(not hasattr(optim, "Muon"), reason="this torch has no Muon")
def test_a_group_without_parameters_is_tried_with_those_of_others() -> None:
    """Whose parameters were taken away, or are to come; of other kinds the class may know nothing."""
    matrices = [torch.nn.Parameter(torch.zeros(shape)) for shape in ((40, 8), (9, 100))]
    optimizer = optim.Muon([{"params": matrices[:1]}, {"params": matrices[1:], "momentum": 0.5}])
    expected = probe(optimizer)
    optimizer.param_groups[1]["params"] = []
    found = probe(optimizer)
    assert found.whole == expected.whole and [each.slots for each in found.groups] == [
        each.slots for each in expected.groups
    ]
