"""Values that a step leaves in `.grad`, and that nothing uses them as gradients."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from test_flat_gradient import One, grad, one
from torch import Tensor

from lightning_ptm.errors import UsageError
from lightning_ptm.runtime.gradients.state import GradientState
from lightning_ptm.runtime.gradients.view import GradPlaceholder, refuse_gradient


def test_a_refusal_names_what_was_done_and_when_it_can_be() -> None:
    with pytest.raises(
        UsageError,
        match=r"the gradient of w was changed too late, .*; read and change gradients between backward and step",
    ):
        refuse_gradient("w", "too late", "changed")


@pytest.fixture
def it(disk: Path) -> Iterator[One]:
    """A weight and a bias whose gradients are in pages and were used by a step."""
    with one("kept in RAM", disk) as made:
        made.backward(1.0, 2.0)
        made.step()
        yield made


def test_what_is_left_cannot_be_read(disk: Path) -> None:
    with one("kept in RAM", disk) as it:
        for _ in range(2):
            it.backward(1.0, None)
            it.step()
            left = grad(it.weight)
            assert it.gradient.view.used and it.bias.grad is None
            with pytest.raises(UsageError, match="gradient of weight was read after the step that has used it"):
                left + 1
            it.gradient.clear()
            assert it.weight.grad is None
        it.backward(1.0, None)
        it.step()
        assert it.weight.grad is left, "no other, as long as nobody has values of it"


def test_what_somebody_has_read_before_stays_readable(disk: Path) -> None:
    with one("kept in RAM", disk) as it:
        it.backward(1.0, None)
        it.gradient.view.show()
        shown = grad(it.weight)
        assert shown.sum() > 0
        it.step()
        assert it.weight.grad is shown and shown.eq(1).all()
        it.gradient.clear()
        it.backward(1.0, None)
        it.step()
        assert it.weight.grad is not shown, "it is of another step"


def test_copies_of_gradients_that_were_read_take_memory_until_they_are_zeroed(disk: Path) -> None:
    with one("kept in RAM", disk) as it:
        it.backward(1.0, None)
        it.gradient.view.show()
        assert it.gradient.view.read_bytes() == 0
        values = weakref.ref(read_values(grad(it.weight)))
        copied_bytes = it.weight.numel() * it.weight.element_size()
        assert it.gradient.view.read_bytes() == copied_bytes
        it.step()
        assert it.gradient.view.read_bytes() == copied_bytes, "as in a plain loop"
        it.gradient.clear()
        assert it.gradient.view.read_bytes() == 0 and values() is None


def read_values(shown: Tensor) -> Tensor:
    assert isinstance(shown, GradPlaceholder) and shown.sum() > 0 and shown.fetched_values is not None
    return shown.fetched_values


def test_what_is_let_go_of_by_any_means_is_forgotten(it: One) -> None:
    with pytest.raises(UsageError, match="gradient of weight was used by a step and not zeroed"):
        it.gradient.view.check_forgotten()
    it.weight.grad = None
    with pytest.raises(UsageError, match="gradient of bias was used by a step"):
        it.gradient.view.check_forgotten()
    it.bias.grad = torch.ones(it.bias.shape)
    it.gradient.view.check_forgotten()
    assert not it.gradient.view.used and it.gradient.recorded.state is GradientState.EMPTY
    it.gradient.view.check_forgotten()  # there is nothing


def test_a_pass_of_the_users_own_may_come_before_it_is_forgotten(it: One) -> None:
    it.gradient.view.hide()
    assert it.weight.grad is None and it.gradient.view.used
    it.weight.grad = torch.ones(it.weight.shape)  # of that pass
    it.gradient.view.hide()
    with pytest.raises(UsageError, match="gradient of weight was used by a step"):
        it.gradient.view.check_forgotten()
    it.gradient.clear()
    it.gradient.view.check_forgotten()


def test_a_pass_behind_it_finds_nothing(it: One) -> None:
    it.weight.grad = it.bias.grad = None
    it.gradient.view.hide()
    assert not it.gradient.view.used and it.gradient.recorded.state is GradientState.EMPTY


def test_what_such_a_pass_adds_cannot_be_read(disk: Path) -> None:
    """A plain loop would have the sum of both, or, where the pass did not come, the one that the step has used."""
    with one("in .grad", disk) as it:
        it.backward(1.0, 2.0)
        it.step(scratch=True)
        left = it.bias.grad
        it.gradient.view.hide()
        it.weight.grad = torch.ones(it.weight.shape)
        it.gradient.view.show()
        assert it.gradient.view.used and it.bias.grad is left
        with pytest.raises(
            UsageError, match="gradient of weight was read after a second backward pass without zero_grad"
        ):
            grad(it.weight).sum()
        it.weight.grad = None
        with pytest.raises(UsageError, match="gradient of bias was used by a step"):
            it.gradient.view.check_forgotten()
        it.bias.grad = torch.ones(it.bias.shape)
        it.gradient.view.check_forgotten()
        assert not it.gradient.view.used


def test_what_pages_show_of_such_a_pass_cannot_be_read_either(it: One) -> None:
    it.backward(1.0, None)
    it.gradient.view.show()
    shown = grad(it.weight)
    with pytest.raises(UsageError, match="gradient of weight was read after a second backward pass without zero_grad"):
        shown.sum()
    with pytest.raises(UsageError, match="gradient of bias was read after the step that has used it"):
        grad(it.bias).sum()
    it.gradient.view.hide()
    assert it.weight.grad is None is it.bias.grad
