"""`.grad` of parameters whose gradient is in pages: what it shows, and what is done to it."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from small_parts import OnePage, parts
from test_flat_gradient import One, grad, of_two, one
from torch import Tensor

import lightning_ptm
from lightning_ptm.errors import UsageError
from lightning_ptm.runtime.gradients.view import GradPlaceholder


@pytest.fixture(params=["kept on the device", "kept in RAM", "kept on disk", "passing"])
def shown(request: pytest.FixtureRequest, disk: Path) -> Iterator[One]:
    with one(request.param, disk) as it:
        it.backward(1.0, 2.0)
        it.gradient.view.show()
        yield it


def test_grad_shows_what_is_in_pages(shown: One) -> None:
    assert isinstance(shown.weight.grad, GradPlaceholder)
    assert grad(shown.weight).eq(1).all() and grad(shown.bias).sum() == 2 * 64
    assert shown.gradient.view.uncollected() == [False, False]
    shown.backward(1.0, None)
    shown.gradient.view.show()
    assert grad(shown.weight).eq(2).all()


def test_a_gradient_that_was_edited_is_edited_in_pages(shown: One) -> None:
    grad(shown.weight).mul_(3)
    grad(shown.bias).view(-1)[:] = 7
    shown.gradient.apply_user_changes()
    assert shown.values() == [3.0, 7.0]


def test_an_edit_counts_before_the_next_pass_adds_to_it(shown: One) -> None:
    grad(shown.weight).mul_(3)
    shown.backward(1.0, 1.0)
    assert shown.values() == [4.0, 3.0]


def test_a_gradient_that_was_assigned_takes_its_place(shown: One) -> None:
    shown.weight.grad = torch.full(shown.weight.shape, 9.0)
    shown.gradient.apply_user_changes()
    assert shown.values() == [9.0, 2.0]
    assert isinstance(shown.weight.grad, GradPlaceholder) and grad(shown.weight).eq(9).all()


def test_a_gradient_that_was_set_to_none_is_forgotten(shown: One) -> None:
    shown.weight.grad = None
    shown.gradient.apply_user_changes()
    assert list(shown.gradient.view.present()) == [False, True] and shown.values() == [0.0, 2.0]
    shown.bias.grad = None
    shown.gradient.apply_user_changes()
    assert not shown.gradient.any


def test_what_another_parameter_shows_is_a_tensor_of_its_own() -> None:
    with parts(OnePage(), ()) as made:
        it = One(made, "kept in RAM", torch.float32)
        it.backward(1.0, 2.0)
        it.gradient.view.show()
        other = made.module.bias.grad
        made.module.bias.grad = made.module.bias.grad.clone()
        assert not isinstance(made.module.bias.grad, GradPlaceholder)
        made.module.bias.grad = GradPlaceholder(it.bias, lambda: torch.full((64,), 8.0))
        it.gradient.view.resolve()
        assert type(made.module.bias.grad) is Tensor and made.module.bias.grad is not other
        it.gradient.apply_user_changes()
        assert it.values() == [1.0, 8.0]


def test_what_is_clipped_by_the_update_is_not_shown_before(shown: One) -> None:
    shown.gradient.view.clip_later()
    with pytest.raises(UsageError, match="gradient of weight was read when it was clipped already"):
        grad(shown.weight).sum()
    shown.gradient.clear()
    assert not shown.gradient.view.clipped_later


def test_a_used_gradient_is_not_read_and_not_gone_on_from(shown: One) -> None:
    shown.step()
    with pytest.raises(UsageError, match="gradient of weight was read after the step that has used it"):
        grad(shown.weight).sum()
    for act in (shown.gradient.view.check_forgotten, shown.gradient.apply_user_changes):
        with pytest.raises(UsageError, match="gradient of weight was used by a step and not zeroed"):
            act()
    shown.weight.grad = None
    with pytest.raises(UsageError, match="gradient of bias was used by a step"):
        shown.gradient.view.check_forgotten()
    shown.bias.grad = None
    shown.gradient.view.check_forgotten()
    assert not shown.gradient.any
    shown.backward(4.0, 4.0)
    assert shown.values() == [4.0, 4.0]


def test_grad_itself_stays_readable_behind_a_step(disk: Path) -> None:
    with one("in .grad", disk) as it:
        it.backward(1.0, 2.0)
        it.step()
        it.gradient.view.check_forgotten()
        assert it.values() == [1.0, 2.0]
        it.step(scratch=True)
        with pytest.raises(UsageError, match="after the step that has used it"):
            grad(it.weight).sum()


def test_behind_the_run_grad_is_what_somebody_has_looked_at(shown: One) -> None:
    assert grad(shown.weight).sum() > 0
    shown.gradient.view.make_plain()
    assert type(shown.weight.grad) is Tensor and shown.weight.grad.eq(1).all()
    assert shown.bias.grad is None


def test_what_was_not_collected_is_dropped_and_nothing_is_shown_any_more(shown: One) -> None:
    before = grad(shown.weight)
    shown.gradient.view.drop()
    assert shown.weight.grad is None and shown.bias.grad is None
    with pytest.raises(UsageError, match="gradient of weight was read when it was of an earlier step"):
        before.sum()
    assert shown.values() == [1.0, 2.0]  # the pages are as they were


def test_hooks_on_sums_that_are_elsewhere_are_refused(shown: One) -> None:
    for _ in range(2):  # one is a run's own
        shown.weight.register_post_accumulate_grad_hook(lambda parameter: None)
    with pytest.raises(UsageError, match="weight has a hook of register_post_accumulate_grad_hook"):
        shown.gradient.view.hide()
    shown.weight.grad = None
    shown.gradient.view.hide()


def test_an_edit_of_what_is_to_be_clipped_already_is_refused(shown: One) -> None:
    grad(shown.weight).mul_(3)
    shown.gradient.view.clipped_later = True
    with pytest.raises(UsageError, match="gradient of weight was changed when it was clipped already"):
        shown.gradient.apply_user_changes()


def test_of_a_shared_flat_all_gradients_are_forgotten_or_none(disk: Path) -> None:
    with of_two("kept in RAM", disk) as it:
        it.backward(1.0, 1.0)
        it.gradient.view.show()
        it.weight.grad = None
        with pytest.raises(UsageError, match="set to None on several ranks"):
            it.gradient.apply_user_changes()
        assert list(it.gradient.view.present()) == [True, True]
        it.bias.grad = None
        it.gradient.apply_user_changes()
        assert not it.gradient.any


def test_a_gradient_that_was_put_there_before_any_was_shown_takes_its_place(disk: Path) -> None:
    with one("kept in RAM", disk) as it:
        it.backward(1.0, 2.0)
        it.weight.grad = torch.full(it.weight.shape, 9.0)
        it.gradient.apply_user_changes()
        assert it.values() == [9.0, 2.0]


def test_no_other_file_of_the_runtime_assigns_grad() -> None:
    """Moves of a parameter to another device take the gradient along, and a virtual run assigns what autograd would."""
    runtime = Path(lightning_ptm.__file__).parent / "runtime"
    assigning = set[str]()
    for path in runtime.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
            inside = [each for target in targets if target is not None for each in ast.walk(target)]
            if any(isinstance(each, ast.Attribute) and each.attr == "grad" for each in inside):
                assigning.add(str(path.relative_to(runtime)))
    assert assigning == {"gradients/view.py", "units/binding.py", "engine/virtual_run.py"}
