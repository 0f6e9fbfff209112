"""Two halves of a batch compute in turns: where turns change, what belongs to a half, and the order of the backward pass."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from typing_extensions import override

from lightning_ptm import torch_internals
from lightning_ptm.comm.work import StartedExchange
from lightning_ptm.errors import ConfigError
from lightning_ptm.parallel.exchange import HalfState, TensorGroup
from lightning_ptm.parallel.two_batches import TwoHalves
from lightning_ptm.runtime.autograd.recompute import Recompute
from lightning_ptm.runtime.units.discovery import Unit

PARTS = 3


class Noting(TensorGroup):
    """One rank of two that have the same values; notes when sums start and are waited for."""

    def __init__(self) -> None:
        super().__init__(2, 0)
        self.notes: list[str] = []
        self.states: list[str] = []
        self.state = "first"

    @override
    def sum(self, value: Tensor) -> Tensor:
        return 2 * value

    @override
    def start_sum(self, value: Tensor) -> StartedExchange:
        name = f"{self.layer} {'backward' if torch_internals.graph_task() != -1 else 'forward'}"
        self.notes.append(f"start {name}")
        self.states.append(self.state)
        return StartedExchange(2 * value, lambda: self.notes.append(f"await {name}"))

    @override
    def half_state(self) -> HalfState:
        return HalfState(self.layer, random=(self.state,))  # type: ignore[arg-type]

    @override
    def second_half(self) -> HalfState:
        return HalfState(random=("second",))  # type: ignore[arg-type]

    @override
    def resume(self, state: HalfState) -> None:
        super().resume(state)
        self.state = state.random[0]  # type: ignore[assignment]


def part(group: TensorGroup, x: Tensor, weight: Tensor, name: str) -> Tensor:
    with group.of_layer(name):
        return x + group.add_up((group.enter(x.sin()) * weight).cos())


def losses_of(
    group: Noting, x: Tensor, weights: list[Tensor], *, recomputed: bool = False
) -> tuple[TwoHalves, list[Tensor]]:
    def half(me: int) -> Tensor:
        value = x.chunk(2)[me]
        for at, weight in enumerate(weights):
            arguments = group, value, weight, f"{me}{at}"
            value = checkpoint(part, *arguments, use_reentrant=False) if recomputed else part(*arguments)
        return value.square().mean()

    halves = TwoHalves(group)
    losses = list(halves.compute(half, nullcontext))
    return halves, losses


def weights() -> list[Tensor]:
    return [torch.full((3,), 0.1 + at, requires_grad=True) for at in range(PARTS)]


@pytest.mark.parametrize("recomputed", [False, True])
def test_each_half_computes_while_a_sum_of_the_other_passes(recomputed: bool) -> None:
    group, x = Noting(), torch.arange(12.0).view(4, 3).requires_grad_()
    halves, losses = losses_of(group, x, weights(), recomputed=recomputed)
    order = [f"{me}{at}" for at in range(PARTS) for me in (0, 1)]
    assert [each.removeprefix("start ") for each in group.notes if "start" in each] == [
        f"{each} forward" for each in order
    ]
    for at, each in enumerate(order[:-1]):  # of all sums but the last, that of the other half is started first
        assert group.notes.index(f"start {order[at + 1]} forward") < group.notes.index(f"await {each} forward")
    group.notes.clear()
    halves.order_backward(losses)
    torch.stack(losses).mean().backward()
    order.reverse()
    assert [each.removeprefix("start ") for each in group.notes if "start" in each] == [
        f"{each} backward" for each in order
    ]
    for at, each in enumerate(order[:-1]):
        assert group.notes.index(f"start {order[at + 1]} backward") < group.notes.index(f"await {each} backward")


@pytest.mark.parametrize("recomputed", [False, True])
def test_gradients_are_those_of_two_micro_batches(recomputed: bool) -> None:
    group, x, ours, theirs = Noting(), torch.randn(4, 3).requires_grad_(), weights(), weights()
    halves, losses = losses_of(group, x, ours, recomputed=recomputed)
    halves.order_backward(losses)
    torch.stack(losses).mean().backward()
    for rows in x.detach().chunk(2):
        value = rows.requires_grad_()
        for weight in theirs:
            value = part(group, value, weight, "")
        (value.square().mean() / 2).backward()
    for one, other in zip(ours, theirs, strict=True):
        assert one.grad is not None and other.grad is not None
        assert torch.equal(one.grad, other.grad)


class Recomputed(nn.Module):
    """A unit with two sums each way."""

    def __init__(self, group: TensorGroup, at: int) -> None:
        super().__init__()
        self.group, self.at = group, at
        self.weights = nn.ParameterList(torch.full((3,), 0.1 + at + part) for part in (0.0, 0.5))

    @override
    def forward(self, x: Tensor) -> Tensor:
        for place, weight in enumerate(self.weights):
            x = part(self.group, x, weight, f"unit {self.at} sum {place}")
        return x


def recomputed_units(group: Noting) -> nn.Sequential:
    root = nn.Sequential(*(Recomputed(group, at) for at in range(PARTS)))
    recompute = Recompute(root, lambda index: group.notes.append(f"recompute unit {index}"), lambda module: dict)
    for at, module in enumerate(root):
        module.forward = recompute.of(Unit(at, str(at), module, (), ()))
    return root


def test_a_unit_is_recomputed_while_the_last_sums_of_the_unit_behind_it_pass() -> None:
    """The order of Oases' cross-pass schedule. The other half's sum is on its way, too."""
    group, x = Noting(), torch.arange(12.0).view(4, 3).requires_grad_()
    root = recomputed_units(group)
    halves = TwoHalves(group)
    losses = list(halves.compute(lambda me: root(x.chunk(2)[me]).square().mean(), nullcontext))
    halves.order_backward(losses)
    group.notes.clear()
    torch.stack(losses).mean().backward()
    last = f"recompute unit {PARTS - 1}"
    assert [each for each in group.notes if "recompute" in each][:2] == [last, last]
    for unit in range(1, PARTS):
        started, awaited, early = (
            [at for at, note in enumerate(group.notes) if note == wanted]
            for wanted in (
                f"start unit {unit} sum 0 backward",
                f"await unit {unit} sum 0 backward",
                f"recompute unit {unit - 1}",
            )
        )
        assert len(started) == len(awaited) == len(early) == 2
        assert max(started) < early[0] < awaited[0] < early[1] < awaited[1]


def test_recomputing_early_changes_no_gradient() -> None:
    group, x = Noting(), torch.randn(4, 3)
    early, later = recomputed_units(group), recomputed_units(group)
    halves = TwoHalves(group)
    losses = list(halves.compute(lambda me: early(x.chunk(2)[me]).square().mean(), nullcontext))
    halves.order_backward(losses)
    torch.stack(losses).mean().backward()
    for rows in x.chunk(2):
        (later(rows).square().mean() / 2).backward()
    for one, other in zip(early.parameters(), later.parameters(), strict=True):
        assert one.grad is not None and other.grad is not None
        assert torch.equal(one.grad, other.grad)


def test_a_node_with_its_own_number_holds_a_half_back() -> None:
    """What `order_backward` is for: without it, one half waits for each of its sums."""
    group, x = Noting(), torch.ones(4, 3, requires_grad=True)
    _, losses = losses_of(group, x, weights())
    group.notes.clear()
    torch.stack(losses).mean().backward()
    started = [each.split()[1][0] for each in group.notes if "start" in each]
    assert started not in (["1", "0"] * PARTS, ["0", "1"] * PARTS)


def test_a_half_has_its_layer_and_its_random_state() -> None:
    group = Noting()
    _, losses = losses_of(group, torch.ones(4, 3, requires_grad=True), weights())
    assert group.states == ["first", "second"] * PARTS
    assert (group.state, group.layer) == ("first", "")
    assert all(each.requires_grad for each in losses)


def test_outside_of_halves_sums_are_waited_for_at_once() -> None:
    group = Noting()
    value = part(group, torch.ones(2, 3, requires_grad=True), torch.ones(3), "layer")
    value.sum().backward()
    assert not group.notes


def test_a_check_of_a_block_within_a_half_takes_no_turns() -> None:
    group = Noting()

    def half(me: int) -> int:
        with group.taking_turns(None):
            part(group, torch.ones(2, 3, requires_grad=True), torch.ones(3), "check").sum().backward()
        return me

    assert TwoHalves(group).compute(half, nullcontext) == (0, 1)
    assert not group.notes


@pytest.mark.parametrize("failing", [0, 1])
@pytest.mark.parametrize("sums", [0, 1, 2])
def test_an_error_of_one_half_ends_the_other(failing: int, sums: int) -> None:
    group, ended = Noting(), []

    def half(me: int) -> Tensor:
        value = torch.ones(2)
        try:
            for _ in range(sums if me == failing else 9):
                value = group.add_up(value)
            if me == failing:
                raise ValueError("of the model")
        finally:
            ended.append(me)
        return value

    before = threading.active_count()
    with pytest.raises(ValueError, match="of the model"):
        TwoHalves(group).compute(half, nullcontext)
    assert threading.active_count() == before
    assert set(ended) <= {0, 1} and failing in ended


def test_one_half_may_have_more_sums_than_the_other() -> None:
    group = Noting()

    def half(me: int) -> int:
        value = torch.ones(2)
        for _ in range(2 + 3 * me):
            value = group.add_up(value)
        return int(value[0])

    assert TwoHalves(group).compute(half, nullcontext) == (4, 32)


def test_an_interrupt_ends_both_halves_where_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    group = Noting()
    halves = TwoHalves(group)
    wait_for: Callable[..., Any] = threading.Condition.wait_for
    main, interrupted = threading.main_thread(), []

    def interrupt(condition: threading.Condition, predicate: Callable[[], bool], timeout: float | None = None) -> Any:
        if threading.current_thread() is main and not interrupted:
            interrupted.append(True)
            raise KeyboardInterrupt
        return wait_for(condition, predicate, timeout)

    def half(me: int) -> Tensor:
        value = torch.ones(2)
        for _ in range(5):
            value = group.add_up(value)
        return value

    monkeypatch.setattr(threading.Condition, "wait_for", interrupt)
    with pytest.raises(KeyboardInterrupt):
        halves.compute(half, nullcontext)
    assert interrupted and threading.active_count() >= 1
    assert len([each for each in group.notes if each.startswith("start")]) <= 3


def test_a_torch_without_numbers_of_nodes_is_refused_in_words(monkeypatch: pytest.MonkeyPatch) -> None:
    torch_internals.node_numbering.cache_clear()
    without = type("Function", (), {"__module__": torch.autograd.Function.__module__})
    monkeypatch.setattr(torch.autograd, "Function", without)
    with pytest.raises(ConfigError, match=r"torch .* has no .*_set_sequence_nr, a private name .* install"):
        torch_internals.node_numbering()
    torch_internals.node_numbering.cache_clear()
