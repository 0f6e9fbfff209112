"""The mixture of experts by itself: who computes what, what finds no room, and what the router reports."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_ptm.models.moe import MixtureOfExperts, dispatch


def layer(**changes: object) -> MixtureOfExperts:
    """Experts of two numbers: expert e multiplies what is positive by e + 1. The router reads the first element."""
    options = {
        "experts": 4,
        "choices": 1,
        "capacity_factor": 1.0,
        "eval_capacity_factor": 4.0,
        "jitter": 0.0,
        "gated": False,
        "dropout": 0.0,
    }
    made = MixtureOfExperts(2, 2, **(options | changes))  # type: ignore[arg-type]
    with torch.no_grad():
        for index, expert in enumerate(made.experts):
            expert.expand.copy_(torch.eye(2))
            expert.project.copy_(torch.eye(2) * (index + 1))
        made.router.weight.zero_()
    return made


def towards(made: MixtureOfExperts, expert_of_token: list[int], strength: float = 20.0) -> Tensor:
    """Tokens that the router sends to these experts: orthogonal directions for two experts, both positive."""
    directions = torch.tensor([[1.0, 0.1], [0.1, 1.0]])
    with torch.no_grad():
        made.router.weight[0] = torch.tensor([strength, -strength])
        made.router.weight[1] = torch.tensor([-strength, strength])
        made.router.weight[2:] = -strength
    return directions[torch.tensor(expert_of_token)]


def test_each_token_is_its_experts_output_times_the_probability() -> None:
    made = layer(capacity_factor=4.0)
    x = towards(made, [0, 1, 1, 0])
    probability = made.router(x).max(dim=-1, keepdim=True).values
    out, routing = made(x.view(2, 2, 2))
    expected = x * torch.tensor([[1.0], [2.0], [2.0], [1.0]]) * probability
    torch.testing.assert_close(out.view(4, 2), expected)
    assert routing.load.tolist() == [2, 2, 0, 0]
    assert routing.dropped == 0


@pytest.mark.parametrize("choices", [1, 2])
def test_a_batch_without_tokens_is_one(choices: int) -> None:
    made = layer(choices=choices)
    x = torch.zeros(3, 0, 2, requires_grad=True)
    out, routing = made(x)
    assert out.shape == x.shape
    assert (routing.balance_loss, routing.dropped) == (0, 0)
    (out.sum() + routing.balance_loss).backward()
    assert made.router.weight.grad is not None and not made.router.weight.grad.any()
    assert all(expert.expand.grad is None for expert in made.experts)


def test_what_finds_no_room_adds_nothing_and_is_counted() -> None:
    """Eight tokens for four experts: two each. Expert 0 is wanted by six, expert 1 by two."""
    made = layer()
    wanted = [0, 0, 1, 0, 0, 1, 0, 0]
    x = towards(made, wanted).requires_grad_()
    out, routing = made(x)
    assert made.capacity(8) == 2
    assert routing.load.tolist() == [6, 2, 0, 0]
    assert routing.dropped == 4
    assert routing.dropped_fraction == 0.5
    computed = [bool(row.abs().sum() > 0) for row in out]
    assert computed == [True, True, True, False, False, True, False, False]  # the first ones that came
    out.sum().backward()
    assert x.grad is not None
    assert [bool(row.abs().sum() > 0) for row in x.grad] == computed
    assert made.experts[0].expand.grad is not None
    assert made.experts[2].expand.grad is None  # not called


def test_evaluation_has_a_capacity_of_its_own() -> None:
    made = layer().eval()
    assert made.capacity(8) == 8
    _, routing = made(towards(made, [0] * 8))
    assert routing.dropped == 0


def test_capacity_is_rounded_up() -> None:
    assert layer(capacity_factor=1.25).capacity(10) == 4
    assert layer(choices=2).capacity(10) == 5


def test_two_choices_are_weighted_to_one_and_first_ones_come_first() -> None:
    made = layer(choices=2, capacity_factor=1.0, experts=2)
    x = towards(made, [0, 1, 1], strength=1.0)
    out, routing = made(x)
    probabilities = made.router(x)
    # Room for three choices each; expert 0 is first choice of one token and second of two, expert 1 the other way.
    assert routing.load.tolist() == [3, 3]
    assert routing.dropped == 0
    torch.testing.assert_close(out, x * (probabilities[:, :1] + 2 * probabilities[:, 1:]))

    made.capacity_factor = 2 / 3
    out, routing = made(x)
    assert routing.dropped == 2
    # Expert 0 computes its own token 0 and then token 1; expert 1 its own tokens 1 and 2, and not token 0.
    second = probabilities.clone()
    second[0, 1] = second[2, 0] = 0.0
    torch.testing.assert_close(out, x * (second[:, :1] + 2 * second[:, 1:]))


@pytest.mark.parametrize("choices", [1, 2])
@pytest.mark.parametrize("factor", [0.5, 4.0])
def test_gradients_are_those_of_finite_differences(choices: int, factor: float) -> None:
    torch.manual_seed(0)
    made = layer(choices=choices, capacity_factor=factor, gated=True).double()
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.normal_()
    x = torch.randn(6, 2, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda value: made(value)[0], (x,))
    assert torch.autograd.gradcheck(lambda value: made(value)[1].balance_loss, (x,))


def test_reports_of_an_even_and_of_a_collapsed_router() -> None:
    made = layer(experts=2)
    _, even = made(towards(made, [0, 1] * 4))
    _, collapsed = made(towards(made, [1] * 8))
    assert even.balance_loss.item() == pytest.approx(1.0)
    assert even.load_entropy.item() == pytest.approx(1.0)
    assert collapsed.balance_loss.item() == pytest.approx(2.0)
    assert collapsed.load_entropy.item() == 0.0
    _, uneven = made(towards(made, [0, 1, 1, 1]))
    entropy = -(0.25 * math.log(0.25) + 0.75 * math.log(0.75)) / math.log(2)
    assert uneven.load_entropy.item() == pytest.approx(entropy)


def test_the_router_computes_in_fp32_under_autocast() -> None:
    made = layer()
    x = torch.randn(4, 2, dtype=torch.bfloat16)
    with torch.autocast("cpu", torch.bfloat16):
        assert made.router(x).dtype is torch.float32
        out, _ = made(x)
    assert out.dtype is torch.bfloat16


def test_jitter_is_for_training_only() -> None:
    made = layer(jitter=0.5)
    x = towards(made, [0, 1], strength=1.0)
    assert not torch.equal(made.router(x), made.router(x))
    made.eval()
    assert torch.equal(made.router(x), made.router(x))


@settings(deadline=None, max_examples=60)
@given(data=st.data(), choices=st.sampled_from([1, 2]), experts=st.integers(2, 7), capacity=st.integers(1, 6))
def test_dispatch(data: st.DataObject, choices: int, experts: int, capacity: int) -> None:
    """Against a loop over choices in order of their priority."""
    tokens = data.draw(st.integers(1, 20))
    picks = st.permutations(range(experts)).map(lambda order: order[:choices])
    chosen = torch.tensor(data.draw(st.lists(picks, min_size=tokens, max_size=tokens))).t().contiguous()
    plan = dispatch(chosen, experts, capacity)
    given_to: list[list[int]] = [[] for _ in range(experts)]
    without_room = 0
    for rank in range(choices):
        for token in range(tokens):
            queue = given_to[int(chosen[rank, token])]
            if len(queue) < capacity:
                queue.append(token)
            else:
                without_room += 1
                assert plan.slots[rank, token] == len(plan.rows)
    assert [part.tolist() for part in plan.rows.split(plan.counts)] == given_to
    assert len(plan.rows) == choices * tokens - without_room
    assert torch.equal(plan.choices % tokens, plan.rows)
    where = plan.slots.flatten()[plan.choices]
    assert torch.equal(where, torch.arange(len(plan.rows)))
    assert plan.load.tolist() == torch.bincount(chosen.flatten(), minlength=experts).tolist()


class Operations(TorchDispatchMode):
    """Counts what torch is asked to compute, and the elements that come of it."""

    def __init__(self) -> None:
        super().__init__()
        self.count = self.elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        self.count += 1
        made = out if isinstance(out, (tuple, list)) else (out,)
        self.elements += sum(value.numel() for value in made if isinstance(value, Tensor))
        return out


def trained(tokens: int, experts: int, **changes: object) -> Operations:
    """A forward and a backward pass whose tokens fall on all experts in turn."""
    made = MixtureOfExperts(
        experts,
        8,
        experts=experts,
        **{"choices": 1, "capacity_factor": 1.0, "eval_capacity_factor": 1.0} | changes,  # type: ignore[arg-type]
        jitter=0.01,
        gated=False,
        dropout=0.0,
    )
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.fill_(0.1)
        made.router.weight.copy_(torch.eye(experts))
    x = (4 * torch.eye(experts)).repeat(tokens // experts, 1).requires_grad_()
    with Operations() as operations:
        out, routing = made(x)
        (out.sum() + routing.balance_loss).backward()
    assert routing.load.count_nonzero() >= experts / 2
    return operations


@pytest.mark.parametrize("settings", [{}, {"capacity_factor": 0.5}, {"choices": 2}])
def test_work_does_not_loop_over_tokens_and_memory_is_linear_in_them(settings: dict[str, object]) -> None:
    """The number of operations is the same for 16 times the tokens, and each further 512 tokens add as many
    elements."""
    few, twice, thrice, many = (trained(count, 8, **settings) for count in (512, 1024, 1536, 8192))
    assert few.count == twice.count == many.count
    assert twice.elements - few.elements == thrice.elements - twice.elements
    assert many.elements - few.elements == 15 * (twice.elements - few.elements)


def test_memory_of_dispatch_grows_with_tokens_and_not_with_tokens_times_experts() -> None:
    def elements(experts: int) -> int:
        chosen = (torch.arange(4096) * 7 % experts).view(1, -1)
        with Operations() as operations:
            plan = dispatch(chosen, experts, 4096 // experts)
        assert plan.rows.numel() + plan.choices.numel() + plan.slots.numel() == 3 * 4096
        return operations.elements

    assert elements(512) - elements(8) <= 2 * 512  # their loads
