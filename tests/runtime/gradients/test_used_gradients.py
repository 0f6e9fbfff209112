"""What a step leaves in `.grad`, and that nothing goes on from it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from test_flat_gradient import One, one

from lightning_ptm.errors import UsageError
from lightning_ptm.runtime.gradients.grad_placeholder import GradPlaceholder
from lightning_ptm.runtime.gradients.used_gradients import UsedGradients, refuse_gradient


@pytest.fixture
def made(disk: Path) -> Iterator[tuple[UsedGradients, One]]:
    """Of a weight and a bias whose gradients are in pages."""
    with one("kept in RAM", disk) as it:
        it.backward(1.0, 2.0)
        yield UsedGradients(it.gradient.store.binding, ["weight", "bias"], it.gradient.shard), it


def test_a_refusal_names_what_was_done_and_when_it_can_be() -> None:
    with pytest.raises(
        UsageError,
        match=r"the gradient of w was changed too late, .*; read and change gradients between backward",
    ):
        refuse_gradient("w", "too late", "changed")


def test_what_is_left_cannot_be_read(made: tuple[UsedGradients, One]) -> None:
    used, it = made
    used.leave(0, None)
    left = it.weight.grad
    assert used.any and used.of(0) is left and used.of(1) is None and it.bias.grad is None
    with pytest.raises(UsageError, match="gradient of weight was read after the step that has used it"):
        left + 1  # type: ignore[operator]
    used.leave(0, None)
    assert it.weight.grad is left  # no other, as long as nobody has values of it


def test_what_somebody_has_read_before_stays_readable(made: tuple[UsedGradients, One]) -> None:
    used, it = made
    shown = GradPlaceholder(it.weight, lambda: torch.ones(it.weight.shape))
    it.weight.grad = shown
    assert shown.sum() > 0
    used.leave(0, shown)
    assert used.of(0) is shown and shown.eq(1).all()
    used.leave(0, None)  # another step, to which it is not the gradient
    assert used.of(0) is not shown


def test_what_is_let_go_of_by_any_means_is_forgotten(made: tuple[UsedGradients, One]) -> None:
    used, it = made
    used.check_forgotten()  # there is nothing
    used.leave(0, None)
    used.leave(1, None)
    with pytest.raises(UsageError, match="gradient of weight was used by a step and not forgotten"):
        used.check_forgotten()
    it.weight.grad = None
    with pytest.raises(UsageError, match="gradient of bias was used by a step"):
        used.check_forgotten()
    it.bias.grad = torch.ones(it.bias.shape)
    assert it.gradient.shard.content.filled
    used.check_forgotten()
    assert not used.any and not it.gradient.shard.content.filled


def test_a_pass_of_the_users_own_may_come_before_it_is_forgotten(made: tuple[UsedGradients, One]) -> None:
    used, it = made
    used.leave(0, None)
    used.pass_begins()
    assert it.weight.grad is None and used.any
    it.weight.grad = torch.ones(it.weight.shape)  # of that pass
    used.pass_begins()
    with pytest.raises(UsageError, match="gradient of weight was used by a step"):
        used.check_forgotten()
    used.forget()
    used.check_forgotten()


def test_a_pass_behind_it_finds_nothing(made: tuple[UsedGradients, One]) -> None:
    used, it = made
    used.leave(0, None)
    it.weight.grad = None
    used.pass_begins()
    assert not used.any and not it.gradient.shard.content.filled


def test_what_such_a_pass_adds_cannot_be_read(made: tuple[UsedGradients, One]) -> None:
    """A plain loop would have the sum of both, or, where the pass did not come, the one that the step has used."""
    used, it = made
    used.leave(0, None)
    used.leave(1, None)
    left = it.bias.grad
    used.pass_begins()
    it.weight.grad = torch.ones(it.weight.shape)
    used.pass_ended({})
    assert used.is_mixed_sum(0) and used.is_mixed_sum(1) and it.bias.grad is left
    with pytest.raises(UsageError, match="gradient of weight was read after a second backward pass without zero_grad"):
        it.weight.grad.sum()
    it.weight.grad = None
    used.drop_removed()
    assert not used.is_mixed_sum(0) and used.is_mixed_sum(1), "one of them was forgotten"
    it.bias.grad = torch.ones(it.bias.shape)
    used.check_forgotten()
    assert not used.any and not used.is_mixed_sum(1)


def test_what_pages_show_of_such_a_pass_cannot_be_read_either(made: tuple[UsedGradients, One]) -> None:
    used, it = made
    used.leave(0, None)
    used.pass_begins()
    shown = GradPlaceholder(it.weight, lambda: torch.ones(it.weight.shape))
    it.weight.grad = shown
    used.pass_ended({0: shown})
    with pytest.raises(UsageError, match="gradient of weight was read after a second backward pass without zero_grad"):
        shown.sum()
    used.pass_begins()
    assert it.weight.grad is shown, "its maker takes it away"
